"""Kernels of one iteration of IDPA, in which votes exist only in registers.

Procedure 1 of IDPA (see :mod:`capszoo.layers.idpa`). Imported only when a kernel is about to run: nothing
else in the package needs Triton.

======= =============================================================================================
letter  here
======= =============================================================================================
n       routings: batch x output positions, ``BN`` of them in a tile
i       children of a routing, ``C`` of them; a step of a loop takes ``KB // QP``
j       parents, ``J``; e = p r, dimension of a parent's pose; p q r rows and columns, ``P Q R``
v       votes ``[n*p, r*j]``, seen as ``[n, p*r, j]``: sums over p and r are mostly within a thread
======= =============================================================================================

Sizes with a second P (``JP PP QP RP``) are padded to powers of two; the padding is zero.

**Layout of a tile.** Rows ``(n', p', n'', p'')`` and columns ``(r, j)``, see :mod:`.tiles`; couplings
``[n', n'', j]``.

**Tensor cores.** A vote is a product of depth q, 4 for 4x4 poses, while a tensor core takes depth 16. The children of a
step lie side by side in that depth: ``[n*p, (i q)]`` against ``[(i q), r*j]``, where the first has the columns of all
other children set to zero. So the weights of a step are one full tile, loaded once, and nothing is padded in memory.
The same tile, transposed, gives the children's gradients, and the weights' gradients of all children of a step share
one accumulator.

**Reductions.** Couplings sum to 1 over the parents, so a tile contains all parents. Parents are sums over children:
a program that owns parents (n) loops over the children. Weights' gradients are sums over n: a program that owns
children loops over the routings. One backward kernel cannot own both: :func:`grad_parents_kernel` is of the
first kind, :func:`grad_children_kernel` of the second, and each recomputes the votes. No atomics: where there would
be too few programs, the loop is split, and a second kernel adds up the parts.
"""

# Triton reads these functions' source: constants are marked tl.constexpr, and there are no other type hints.
import triton
import triton.language as tl

from .norms import finish
from .tiles import over_pose, pose_offsets, spread


@triton.jit
def _corner(n, positions, width, image, row, column):
    """Offset of the first child in the window of routing n: ``[n]``, int64."""
    place = n % positions
    return (n // positions).to(tl.int64) * image + (place // width) * row + (place % width) * column


@triton.jit
def _child_columns(
    first, end, KB: tl.constexpr, PP: tl.constexpr, QP: tl.constexpr, P: tl.constexpr, Q: tl.constexpr
):
    """For the elements ``(i p q)`` of a step's children: child, place in its pose, mask of valid places."""
    column = tl.arange(0, KB * PP)
    inside = column % (PP * QP)
    p = inside // QP
    q = inside % QP
    child = first + column // (PP * QP)
    there = child < end
    if P == PP and Q == QP:
        place = inside  # contiguous, with a constant mask: loads of 16 bytes
    else:
        place = p * Q + q
        there = there & (p < P) & (q < Q)
    return child, place, there


@triton.jit
def _load_children(
    x_ptr, corner, known, first, end, grid_row,
    TYPES: tl.constexpr, KERNEL: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    PP: tl.constexpr, QP: tl.constexpr, BN: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Poses of the children ``first ...`` of each routing, ``[(n p), (i q)]``, rows in the order of a tile."""
    child, place, there = _child_columns(first, end, KB, PP, QP, P, Q)
    cell = child // TYPES
    offset = (
        (cell // KERNEL) * grid_row + (cell % KERNEL) * (TYPES * P * Q) + (child % TYPES) * (P * Q) + place
    )
    mask = known[:, None] & there[None, :]
    x = tl.load(x_ptr + corner[:, None] + offset[None, :], mask=mask, other=0.0)
    NL: tl.constexpr = 16 // PP
    PH: tl.constexpr = 2 if PP > 1 else 1
    x = tl.reshape(x, (BN // NL, NL, KB // QP, PH, PP // PH, QP))
    return tl.reshape(tl.permute(x, (0, 3, 1, 4, 2, 5)), (BN * PP, KB))


@triton.jit
def _weight_offsets(
    first, end, J: tl.constexpr, Q: tl.constexpr, R: tl.constexpr,
    JP: tl.constexpr, QP: tl.constexpr, RP: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Offsets ``[(i q), (j r)]`` of a step's weights in ``[i, q, j, r]``, and which of them exist."""
    k = tl.arange(0, KB)
    column = tl.arange(0, JP * RP)
    child = first + k // QP
    q = k % QP
    there = ((child < end) & (q < Q))[:, None]
    if R == RP:
        place = column
        if J != JP:
            there = there & (column < J * R)[None, :]
    else:
        place = column // RP * R + column % RP
        there = there & ((column // RP < J) & (column % RP < R))[None, :]
    return (child * Q + q)[:, None] * (J * R) + place[None, :], there


@triton.jit
def _load_weight(
    w_ptr, first, end, J: tl.constexpr, Q: tl.constexpr, R: tl.constexpr,
    JP: tl.constexpr, QP: tl.constexpr, RP: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Weights of a step's children, ``[(i q), r*j]``."""
    offset, there = _weight_offsets(first, end, J, Q, R, JP, QP, RP, KB)
    w = tl.load(w_ptr + offset, mask=there, other=0.0)
    return tl.reshape(tl.permute(tl.reshape(w, (KB, JP, RP)), (0, 2, 1)), (KB, RP * JP))


@triton.jit
def _votes(
    x, w, JP: tl.constexpr, PP: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Votes of one child, ``[n', p', n'', (p'' r), j]`` (Procedure 1, line 2)."""
    NL: tl.constexpr = 16 // PP
    PH: tl.constexpr = 2 if PP > 1 else 1
    return tl.reshape(_dot(x, w, PRECISION), (BN // NL, PH, NL, PP // PH * RP, JP))


@triton.jit
def _agreement(votes, poses):
    """Dot products of votes with poses, ``[n', n'', j]`` (line 3)."""
    return over_pose(votes * poses)


@triton.jit
def _only(x, child: tl.constexpr, KB: tl.constexpr, QP: tl.constexpr):
    """Of ``[..., (i q)]`` the columns of one child; zero elsewhere."""
    if QP != KB:
        x = tl.where((tl.arange(0, KB) // QP == child)[None, :], x, tl.zeros_like(x))
    return x


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """Product with float32 accumulation. ``ieee`` is for Triton's interpreter, which cannot multiply bfloat16."""
    if PRECISION == "ieee":
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _couple(agreement, J: tl.constexpr, JP: tl.constexpr):
    """Softmax over the parents, ``[n', n'', j]`` (line 4)."""
    if J != JP:
        agreement = tl.where((tl.arange(0, JP) < J)[None, None, :], agreement, float("-inf"))
    r = tl.exp(agreement - tl.max(agreement, 2)[:, :, None])
    return r * (1.0 / tl.sum(r, 2))[:, :, None]


@triton.jit
def _coupling_offsets(
    n, routings, child, end, children, J: tl.constexpr, JP: tl.constexpr, PP: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Offsets ``[n', n'', j]`` of a child's couplings in ``[n, i, j]``, and which of them exist."""
    NL: tl.constexpr = 16 // PP
    n = tl.reshape(n, (BN // NL, NL, 1))
    j = tl.reshape(tl.arange(0, JP), (1, 1, JP))
    # (compared as a tensor: Triton's interpreter turns a single boolean into an integer)
    exists = tl.zeros_like(j) + child < end
    return (n.to(tl.int64) * children + child) * J + j, (n < routings) & (exists & (j < J))


@triton.jit
def pass_kernel(
    x_ptr, w_ptr, p_ptr, s_ptr, c_ptr, kept_ptr, gamma_ptr, beta_ptr,
    routings, children, positions, width, image, row, column, grid_row, part, scale, eps,
    J: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr,
    JP: tl.constexpr, PP: tl.constexpr, QP: tl.constexpr, RP: tl.constexpr,
    TYPES: tl.constexpr, KERNEL: tl.constexpr, PRECISION: tl.constexpr, COUPLINGS: tl.constexpr,
    NORM: tl.constexpr, KEEP: tl.constexpr, BN: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Sums of votes weighted by their couplings, normalised if the loop is not split.

    Reads children from their grid (x), weights ``[i, q, j, r]`` (w) and parents ``[n, j, e]`` (p). Writes new parents,
    or partial sums ``[part, n, j, e]`` (s); on request, couplings ``[n, i, j]`` (c) and the sums before the norm
    (kept). Programs: (tiles of n, parts of i).
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    known = n < routings
    corner = _corner(n, positions, width, image, row, column)
    offsets, mask = pose_offsets(n, routings, J, P, R, JP, PP, RP, BN)
    parents = tl.load(p_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    sums = tl.zeros_like(parents)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, children)
    for first in range(begin, end, KB // QP):
        x = _load_children(x_ptr, corner, known, first, end, grid_row, TYPES, KERNEL, P, Q, PP, QP, BN, KB)
        w = _load_weight(w_ptr, first, end, J, Q, R, JP, QP, RP, KB)
        for i in tl.static_range(KB // QP):
            votes = _votes(_only(x, i, KB, QP), w, JP, PP, RP, BN, PRECISION)
            r = _couple(_agreement(votes, parents), J, JP)
            sums += spread(r) * votes  # line 5
            if COUPLINGS:
                at, there = _coupling_offsets(n, routings, first + i, end, children, J, JP, PP, BN)
                tl.store(c_ptr + at, r.to(c_ptr.dtype.element_ty), mask=there)
    s_ptr += tl.program_id(1).to(tl.int64) * routings * (J * P * R)
    finish(sums, offsets, mask, s_ptr, kept_ptr, gamma_ptr, beta_ptr, eps, P, R, PP, RP, NORM, KEEP)


@triton.jit
def _softmax_backward(r, grad_r):
    """Gradient of a child's agreements from that of its couplings, ``[n', n'', j]``."""
    grad_a = r * grad_r
    return grad_a - r * tl.sum(grad_a, 2)[:, :, None]


@triton.jit
def grad_parents_kernel(
    x_ptr, w_ptr, p_ptr, g_ptr, gc_ptr, gp_ptr,
    routings, children, positions, width, image, row, column, grid_row, part, scale,
    J: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr,
    JP: tl.constexpr, PP: tl.constexpr, QP: tl.constexpr, RP: tl.constexpr,
    TYPES: tl.constexpr, KERNEL: tl.constexpr, PRECISION: tl.constexpr, COUPLINGS: tl.constexpr,
    BN: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Gradient of the parents, ``[part, n, j, e]`` (gp), from those of the sums (g) and the couplings (gc).

    Programs and loop as in :func:`pass_kernel`, with one more agreement.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    known = n < routings
    corner = _corner(n, positions, width, image, row, column)
    offsets, mask = pose_offsets(n, routings, J, P, R, JP, PP, RP, BN)
    parents = tl.load(p_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    grads = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros_like(parents)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, children)
    for first in range(begin, end, KB // QP):
        x = _load_children(x_ptr, corner, known, first, end, grid_row, TYPES, KERNEL, P, Q, PP, QP, BN, KB)
        w = _load_weight(w_ptr, first, end, J, Q, R, JP, QP, RP, KB)
        for i in tl.static_range(KB // QP):
            votes = _votes(_only(x, i, KB, QP), w, JP, PP, RP, BN, PRECISION)
            r = _couple(_agreement(votes, parents), J, JP)
            grad_r = _agreement(votes, grads)
            if COUPLINGS:
                at, there = _coupling_offsets(n, routings, first + i, end, children, J, JP, PP, BN)
                grad_r += tl.load(gc_ptr + at, mask=there, other=0.0).to(tl.float32)
            total += spread(_softmax_backward(r, grad_r)) * votes
    gp_ptr += tl.program_id(1).to(tl.int64) * routings * (J * P * R)
    tl.store(gp_ptr + offsets, (total * scale).to(gp_ptr.dtype.element_ty), mask=mask)


@triton.jit
def grad_children_kernel(
    x_ptr, w_ptr, p_ptr, g_ptr, gc_ptr, gx_ptr, gw_ptr,
    routings, children, positions, width, image, row, column, grid_row, part, scale,
    J: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr,
    JP: tl.constexpr, PP: tl.constexpr, QP: tl.constexpr, RP: tl.constexpr,
    TYPES: tl.constexpr, KERNEL: tl.constexpr, PRECISION: tl.constexpr, COUPLINGS: tl.constexpr,
    BN: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Gradients of every routing's own children, ``[n, i, d]`` (gx), and of the weights, ``[part, i, q, j, r]`` (gw).

    Programs: (steps of i, parts of n). A program loads its children's weights once and loops over the routings.
    """
    first = tl.program_id(0) * (KB // QP)
    w = _load_weight(w_ptr, first, children, J, Q, R, JP, QP, RP, KB)
    turned = tl.trans(w)
    grad_w = tl.zeros((KB, RP * JP), tl.float32)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, routings)
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        known = n < end
        corner = _corner(n, positions, width, image, row, column)
        offsets, mask = pose_offsets(n, end, J, P, R, JP, PP, RP, BN)
        parents = tl.load(p_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
        grads = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = _load_children(
            x_ptr, corner, known, first, children, grid_row, TYPES, KERNEL, P, Q, PP, QP, BN, KB
        )
        grad_x = tl.zeros((BN * PP, KB), tl.float32)
        for i in tl.static_range(KB // QP):
            own = _only(x, i, KB, QP)
            votes = _votes(own, w, JP, PP, RP, BN, PRECISION)
            r = _couple(_agreement(votes, parents), J, JP)
            grad_r = _agreement(votes, grads)
            if COUPLINGS:
                at, there = _coupling_offsets(n, end, first + i, children, children, J, JP, PP, BN)
                grad_r += tl.load(gc_ptr + at, mask=there, other=0.0).to(tl.float32)
            grad_v = spread(r) * grads + spread(_softmax_backward(r, grad_r)) * parents
            grad_v = tl.reshape(grad_v, (BN * PP, RP * JP)).to(w.dtype)
            grad_x += _only(_dot(grad_v, turned, PRECISION), i, KB, QP)
            grad_w += _dot(tl.trans(own), grad_v, PRECISION)
        child, place, there = _child_columns(first, children, KB, PP, QP, P, Q)
        at = n.to(tl.int64)[:, None] * (children * P * Q) + (child * (P * Q) + place)[None, :]
        NL: tl.constexpr = 16 // PP
        PH: tl.constexpr = 2 if PP > 1 else 1
        grad_x = tl.reshape(grad_x, (BN // NL, PH, NL, PP // PH, KB // QP, QP))
        grad_x = tl.reshape(tl.permute(grad_x, (0, 2, 4, 1, 3, 5)), (BN, KB * PP)).to(gx_ptr.dtype.element_ty)
        tl.store(gx_ptr + at, grad_x, mask=known[:, None] & there[None, :])
    offset, there = _weight_offsets(first, children, J, Q, R, JP, QP, RP, KB)
    gw_ptr += tl.program_id(1).to(tl.int64) * children * (Q * J * R)
    grad_w = tl.permute(tl.reshape(grad_w, (KB, RP, JP)), (0, 2, 1))
    tl.store(gw_ptr + offset, tl.reshape(grad_w, (KB, JP * RP)), mask=there)


@triton.jit
def fold_kernel(
    gx_ptr, out_ptr, numbers, height, width, out_height, out_width,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of windows ``[b, h', w', k, l, c]`` added up on the grid ``[b, h, w, c]``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = at < numbers
    cell = at // CHANNELS
    x = cell % width
    y = (cell // width) % height
    b = cell // width // height
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(KERNEL):
        for m in tl.static_range(KERNEL):
            top = y - k
            left = x - m
            there = (top >= 0) & (left >= 0) & (top % STRIDE == 0) & (left % STRIDE == 0)
            there = there & (top // STRIDE < out_height) & (left // STRIDE < out_width)
            window = (b * out_height + top // STRIDE) * out_width + left // STRIDE
            source = (window * (KERNEL * KERNEL) + k * KERNEL + m) * CHANNELS + at % CHANNELS
            total += tl.load(gx_ptr + source, mask=known & there, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=known)
