"""The normalisation after the sums of votes, as an epilogue and as kernels.

Letters as in :mod:`.kernels`. LayerNorm runs over a pose and has a weight and a bias ``[e]`` (gamma, beta). All of it
is float32.

:func:`finish` is the epilogue of a kernel whose loop is not split. :func:`finish_kernel` does the same for sums in
memory: the parts of a split loop, or the product of the first iteration. It and :func:`grad_norm_kernel` do not need
the rows and columns of a pose: they see ``n * j`` parents of one row, ``[n, j, e]`` as ``[m, 1, e]``.
"""

# Triton reads these functions' source: constants are marked tl.constexpr, and there are no other type hints.
import triton
import triton.language as tl

from .tiles import over_pose, pose_offsets, pose_places, spread


@triton.jit
def _layer_norm(
    sums, eps, P: tl.constexpr, R: tl.constexpr, PP: tl.constexpr, RP: tl.constexpr
):  # fmt: skip
    """Poses of mean 0 and variance 1, and the factor applied to their deviations (before weight and bias)."""
    deviation = sums - spread(over_pose(sums) * (1.0 / (P * R)))
    if P != PP or R != RP:
        deviation = tl.where(pose_places(P, R, PP, RP)[1], deviation, 0.0)
    factor = spread(tl.rsqrt(over_pose(deviation * deviation) * (1.0 / (P * R)) + eps))
    return deviation * factor, factor


@triton.jit
def finish(
    sums, offsets, mask, out_ptr, kept_ptr, gamma_ptr, beta_ptr, eps,
    P: tl.constexpr, R: tl.constexpr, PP: tl.constexpr, RP: tl.constexpr,
    NORM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Store the normalised poses (out) and, with KEEP, the sums before the norm (kept), which backward needs."""
    if KEEP:
        tl.store(kept_ptr + offsets, sums.to(kept_ptr.dtype.element_ty), mask=mask)
    if NORM == "layer":
        place, there = pose_places(P, R, PP, RP)
        gamma = tl.load(gamma_ptr + place, mask=there, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + place, mask=there, other=0.0).to(tl.float32)
        poses = _layer_norm(sums, eps, P, R, PP, RP)[0] * gamma + beta
    else:
        poses = sums
    tl.store(out_ptr + offsets, poses.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish_kernel(
    s_ptr, out_ptr, kept_ptr, gamma_ptr, beta_ptr, parents, parts, scale, eps,
    E: tl.constexpr, EP: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """:func:`finish` for ``[part, m, e]`` (s), summed over its parts and scaled. Programs: tiles of m."""
    m = tl.program_id(0) * BN + tl.arange(0, BN)
    offsets, mask = pose_offsets(m, parents, 1, 1, E, 1, 1, EP, BN)
    sums = tl.zeros((BN // 16, 1, 16, EP, 1), tl.float32)
    for part in range(parts):
        at = tl.cast(part, tl.int64) * parents * E + offsets
        sums += tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32)
    finish(sums * scale, offsets, mask, out_ptr, kept_ptr, gamma_ptr, beta_ptr, eps, 1, E, 1, EP, NORM, KEEP)


@triton.jit
def _over_parents(x):
    """Sum over the poses of a tile, in the shape of pose places."""
    return tl.sum(tl.sum(x, 2, keep_dims=True), 0, keep_dims=True)


@triton.jit
def grad_norm_kernel(
    g_ptr, s_ptr, gamma_ptr, gs_ptr, ga_ptr, parents, scale, eps,
    E: tl.constexpr, EP: tl.constexpr, NORM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradient of the sums (gs) from that of the poses (g), both ``[m, e]``; reads the sums (s).

    Also writes a tile's share of the gradients of LayerNorm's weight and bias, ``[program, 2, e]`` (ga). Programs:
    tiles of m.
    """
    m = tl.program_id(0) * BN + tl.arange(0, BN)
    offsets, mask = pose_offsets(m, parents, 1, 1, E, 1, 1, EP, BN)
    sums = tl.load(s_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    grads = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if NORM == "layer":
        x, factor = _layer_norm(sums, eps, 1, E, 1, EP)
        place, there = pose_places(1, E, 1, EP)
        ga_ptr += tl.program_id(0) * (2 * E) + place
        tl.store(ga_ptr, _over_parents(grads * x), mask=there)
        tl.store(ga_ptr + E, _over_parents(grads), mask=there)
        grads *= tl.load(gamma_ptr + place, mask=there, other=0.0).to(tl.float32)
        mean = spread(over_pose(grads) * (1.0 / E))
        along = spread(over_pose(grads * x) * (1.0 / E))
        grads = factor * (grads - mean - x * along)
    tl.store(gs_ptr + offsets, (grads * scale).to(gs_ptr.dtype.element_ty), mask=mask)
