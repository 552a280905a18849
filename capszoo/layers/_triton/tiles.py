"""Layout of the elements of a tile, shared by the kernels: parents' poses, and sums over them.

Letters as in :mod:`.kernels`.

**Layout of a tile.** Rows ``(n', p', n'', p'')`` and columns ``(r, j)``, with ``PH = 2`` halves p' of a pose's rows and
``NL`` routings n'' such that p' is bit 3 of the row index. In a tensor core product a thread's accumulators are two
adjacent columns of rows m and m + 8, and of every eighth column after them. So r and half of p are summed within a
thread, and a thread owns few couplings (each costs an exponential). Parents have the same layout,
``[n', p', n'', (p'' r), j]``, couplings ``[n', n'', j]``.
"""

# Triton reads these functions' source: constants are marked tl.constexpr, and there are no other type hints.
import triton
import triton.language as tl


@triton.jit
def pose_places(P: tl.constexpr, R: tl.constexpr, PP: tl.constexpr, RP: tl.constexpr):
    """Places ``[1, p', 1, (p'' r), 1]`` in a parent's pose, and the mask of valid ones (all, without padding)."""
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
    """Offsets ``[n', p', n'', (p'' r), j]`` of parents in ``[n, j, e]``, and the mask of valid ones."""
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
    """Sum of the elements of each pose, ``[n', n'', j]``."""
    return tl.sum(tl.sum(x, 3), 1)


@triton.jit
def spread(x):
    """Broadcast one scalar per parent, ``[n', n'', j]``, to the shape of poses and votes."""
    return x[:, None, :, None, :]
