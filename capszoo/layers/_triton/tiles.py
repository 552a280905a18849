"""Where the numbers of a tile are, shared by the kernels: parents' poses, and sums over them.

Letters as in :mod:`.kernels`.

**Layout of a tile.** Rows ``(n', p', n'', p'')`` and columns ``(r, j)``, with ``PH = 2`` halves p' of a pose's rows and
``NL`` routings n'' such that p' is the bit 3 of a row. A thread's accumulators of a tensor core product are two
columns side by side of rows m and m + 8, and every eighth column further on: so r and half of p are summed up within
a thread, and a thread owns few couplings (each costs an exponential). Parents have the same layout,
``[n', p', n'', (p'' r), j]``, couplings ``[n', n'', j]``.
"""

# Triton reads these functions' source: constants are marked tl.constexpr, and there are no other type hints.
import triton
import triton.language as tl


@triton.jit
def pose_places(P: tl.constexpr, R: tl.constexpr, PP: tl.constexpr, RP: tl.constexpr):
    """Places ``[1, p', 1, (p'' r), 1]`` in a parent's pose, and which of them exist (all, where nothing is padded)."""
    PH: tl.constexpr = 2 if PP > 1 else 1
    E: tl.constexpr = PP // PH * RP
    e = tl.reshape(tl.arange(0, PH)[:, None] * E + tl.arange(0, E)[None, :], (1, PH, 1, E, 1))
    place = e
    if P != PP or R != RP:
        place = e // RP * R + e % RP
    return place, (e // RP < P) & (e % RP < R)


@triton.jit
def pose_offsets(
    n, routings, J: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    JP: tl.constexpr, PP: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Offsets ``[n', p', n'', (p'' r), j]`` of parents in ``[n, j, e]``, and which of them exist."""
    NL: tl.constexpr = 16 // PP
    n = tl.reshape(n, (BN // NL, 1, NL, 1, 1))
    place, exists = pose_places(P, R, PP, RP)
    j = tl.reshape(tl.arange(0, JP), (1, 1, 1, 1, JP))
    there = n < routings
    if J != JP:
        there = there & (j < J)
    if P != PP or R != RP:
        there = there & exists
    return n.to(tl.int64) * (J * P * R) + (place + j * (P * R)), there


@triton.jit
def over_pose(x):
    """The sum of each pose's numbers, ``[n', n'', j]``."""
    return tl.sum(tl.sum(x, 3), 1)


@triton.jit
def spread(x):
    """A number for each parent, ``[n', n'', j]``, in the shape of poses and votes."""
    return x[:, None, :, None, :]
