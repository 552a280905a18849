"""Inverted dot-product attention (IDPA) routing: children choose among parents by a dot product, LayerNorm follows.

Paper: Tsai, Srivastava, Goh, Salakhutdinov, "Capsules with Inverted Dot-Product Attention Routing" (ICLR 2020,
arXiv:2002.04764), Procedures 1 and 2. The authors' release was read for facts: the scale of the agreement, the
initial values of the weights, the place of the dropout.

=========== ===========================================================================================
symbol      here
=========== ===========================================================================================
p_i^L       a child's pose; ``children`` holds those of a layer
p_j^{L+1}   a parent's pose, ``parents`` before a pass, ``poses`` after it
W_ij        ``weight``: vote = pose·W for matrix poses (``[p, q]·[q, r]``), a whole matrix for vector poses
v_ij        ``votes``
a_ij        ``agreement``, times ``scale``
r_ij        ``couplings``, softmax of the agreement over the parents
t           ``num_iters`` (passes of Procedure 1)
=========== ===========================================================================================

Letters: b batch, h w grid, k l kernel, i children, j parents, d and e their pose sizes, p q r rows and columns of
matrix poses (p = 1, q = d, r = e for vector poses), n rows of independent routings: batch x output positions.

In a convolutional layer each output position routes the children of its own window; the softmax runs over the
parent types at that position.

Concurrent routing and its dependency cone
    Procedure 2 computes iteration 1 layer after layer; in iterations 2..t every layer is updated from the
    *previous* iteration's poses of its children and of itself. Iteration s of layer L therefore depends only on
    iteration s-1 of layers L-1 and L (on iteration 1 of layer L-1 for s = 1). With layers 1..M the class capsules
    after t iterations need just ``max(1, t - (M - L))`` iterations of layer L; what lies outside of this cone cannot
    reach the scores, nor their gradients, and :class:`IDPAStack` does not compute it. At t = 2 that is one pass for
    every layer but the last, and two for the last. ``full=True`` computes everything, for those who look at
    the hidden layers' last poses and couplings. Sequential routing (ablation B) has no such shortcut.

    The cone also gives an order: layer after layer, each with all its iterations, from the list of its children's
    iterations. That is what the code does; the values are those of the procedure, iteration by iteration.

Speed
    First pass: with parents at zero every coupling is 1/parents, so that the new parents are the sum of votes
    divided by the number of parents: one convolution or matrix product, in which no vote is formed. For matrix
    poses the row p of the children becomes part of the batch: input ``[b*p, i*q, h, w]``, weight
    ``[j*r, i*q, k, l]``.

    Later passes: votes come from one batched product over the children, ``[i, n*p, q] x [i, q, j*r]``, and stay in
    its layout ``[i, n, p, j, r]``: they are never transposed, and shared between passes as long as the
    children stay the same. Agreement and update are batched products over blocks of votes, each block holding all
    children and g parents (and all rows p, where one block holds all parents); the terms between different parents
    are masked out. That is g times the arithmetic, but in products wide enough to run at a GEMM's speed. Measured
    on one thread, one pass over 800 children, 10 parents, 4x4 poses, batch 32, forward and backward: 52 ms, against
    91 ms with votes transposed to ``[n, j, i, e]`` and 80 ms with block-diagonal weights.

    That is the plain form, for what is traced, scripted or exported, and for few votes. Where votes are many
    (:data:`_MANY`), an eager or compiled pass on a CPU is the operator ``capszoo::idpa_pass``, which keeps no vote: it
    takes some routings and some children at a time, computes their votes into a buffer that stays in the cache,
    routes them there with plain multiplications and sums, and adds up; its backward pass computes them again.
    (Children are independent of each other up to the sum, so that any block of them will do.)

    On CUDA a pass is ``capszoo::fused_pass`` (:mod:`capszoo.layers._triton`), eager or compiled, wherever its kernels
    take the sizes: votes in registers, windows read from the grid itself, LayerNorm at the end. Elsewhere, the plain
    form.

Deviations and our choices: the agreement is scaled by 1/sqrt(e), as in the release (the text omits it; an argument).
Random starts are drawn once, at construction, and shared by all positions. What "activations as in EM routing"
(ablation C) means is said in :class:`ConvIDPA`.
"""

import math
from collections import OrderedDict
from typing import Any, List, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._transforms import block_diagonal
from ._triton import fused, working_type
from ._triton.ops import fused_norm, fused_pass
from .squash import upcast_half

torch.fx.wrap("upcast_half")

__all__ = ["CapsuleNorm", "ConvIDPA", "FCIDPA", "IDPAStack", "idpa_routing"]

#: Parents in one block of the masked products; more costs arithmetic, fewer makes the products narrow.
_MAX_GROUP = 16

#: Numbers in a block of votes, for each thread (two such buffers fill half of a 2 MiB cache).
_BLOCK = 2**17

#: Numbers in a part of the votes of an image in an exported graph, which has no loop over images or windows.
_PART = 2**20

#: From so many votes on (numbers in them) a layer works in blocks; fewer fit the caches as they are.
_MANY = 2**20


def _group_size(num_parents: int) -> int:
    """Parents per block: the largest divisor up to 16; all of them where that would be a poor one (primes)."""
    if num_parents <= _MAX_GROUP:
        return num_parents
    group = max(g for g in range(1, _MAX_GROUP + 1) if num_parents % g == 0)
    return num_parents if group < 4 and num_parents <= 4 * _MAX_GROUP else group


def _block_mask(rows: int, num_parents: int, cols: int, group: int) -> Tensor:
    """``[w, g]``: 1 where a number in a block of votes (width w) belongs to the parent, else 0."""
    mask = torch.eye(group).repeat_interleave(cols, dim=0)  # [g*r, g]
    return mask.repeat(rows, 1) if group == num_parents else mask


def _agreement(blocks: Tensor, parents: Tensor, mask: Tensor, rows: int, num_parents: int) -> Tensor:
    """Dot product of every vote with its parent (Procedure 1, line 3).

    Args:
        blocks: votes in blocks, ``[n*..., i, w]``.
        parents: ``[n, p, j, r]``.
        mask: ``[w, g]``, from :func:`_block_mask`.
        rows: p.
        num_parents: j.

    Returns:
        ``[n, i, j]``.
    """
    width, group = mask.shape[0], mask.shape[1]
    agreement = torch.bmm(blocks, parents.reshape(-1, width, 1) * mask)  # [n*..., i, g]
    if group == num_parents:
        return agreement
    agreement = agreement.reshape(-1, rows, num_parents // group, agreement.shape[1], group).sum(dim=1)
    return agreement.transpose(1, 2).flatten(2)  # [n, i, j]


def _update(
    blocks: Tensor, couplings: Tensor, mask: Tensor, rows: int, num_parents: int, cols: int
) -> Tensor:
    """Votes weighted by couplings and summed over the children (Procedure 1, line 5).

    Args:
        blocks: votes in blocks, ``[n*..., i, w]``.
        couplings: ``[n, i, j]``.
        mask: ``[w, g]``.
        rows, num_parents, cols: p, j and r.

    Returns:
        ``[n, j, p*r]``.
    """
    group = mask.shape[1]
    c = couplings.transpose(1, 2)  # [n, j, i]
    if group != num_parents:
        c = c.reshape(-1, 1, num_parents // group, group, c.shape[2]).expand(-1, rows, -1, -1, -1)
        c = c.reshape(-1, group, c.shape[4])  # [n*..., g, i]
    sums = (torch.bmm(c, blocks) * mask.t()).sum(dim=1)  # [n*..., w]
    return sums.reshape(-1, rows, num_parents, cols).transpose(1, 2).flatten(2)


def _couplings(agreement: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax over the parents, in float32 for half types (Procedure 1, line 4). ``[n, i, j]``"""
    return upcast_half(agreement).softmax(dim=-1).to(dtype)


def _normalised(couplings: Tensor) -> Tensor:
    """Couplings ``[..., j, i]`` as each parent's shares in its children, which sum to 1 over ``i``."""
    return couplings / couplings.sum(dim=-1, keepdim=True).clamp(min=1e-30)


class _Room:
    """Buffers for one block of votes: new memory for every block would cost more than the arithmetic in it.

    Each thread's part of the two vote-sized buffers stays in its L2 cache; 128 rows make the products of the
    votes wide enough.

    Args:
        like: gives dtype and device.
        n, i, rows, j, e: routings, children, rows of a pose, parents, numbers in a pose.
    """

    def __init__(self, like: Tensor, n: int, i: int, rows: int, j: int, e: int) -> None:
        self.n_step = min(n, max(1, 128 // rows))
        self.i_step = min(i, max(1, _BLOCK * torch.get_num_threads() // (self.n_step * e * j)))
        self.e, self.j = e, j
        pairs = self.n_step * self.i_step
        self.wide = like.new_empty(2, pairs * e * j)
        self.narrow = like.new_empty(3, pairs * j)
        self.sum = like.new_empty(self.n_step * e * j)

    def votes(self, children: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
        """Votes of ``[n, i, p, q]`` through ``[i, q, r*j]``, ``[i, n, e, j]``, and a buffer like them (line 2)."""
        n, i, rows, inner = children.shape
        width = weight.shape[2]
        x = upcast_half(children).transpose(0, 1).reshape(i, n * rows, inner)
        size, shape = n * i * rows * width, (i, n, self.e, self.j)
        torch.bmm(x, weight, out=self.wide[0, :size].view(i, n * rows, width))
        return self.wide[0, :size].view(shape), self.wide[1, :size].view(shape)

    def agreement(self, votes: Tensor, parents: Tensor, product: Tensor, which: int) -> Tensor:
        """Dot product of each vote with its parent's ``[n, e, j]``: ``[i, n, j]`` (line 3)."""
        out = self.flat(which, votes)
        return torch.sum(torch.mul(votes, parents, out=product), 2, out=out)

    def add_sum(self, votes: Tensor, weights: Tensor, product: Tensor, to: Tensor) -> None:
        """Add the votes, weighted by ``[i, n, j]`` and summed over the children, to ``[n, e, j]`` (line 5)."""
        out = self.sum[: to.numel()].view(to.shape)
        to += torch.sum(torch.mul(votes, weights.unsqueeze(2), out=product), 0, out=out)

    def flat(self, which: int, votes: Tensor) -> Tensor:
        i, n = votes.shape[0], votes.shape[1]
        return self.narrow[which, : i * n * self.j].view(i, n, self.j)


@torch.library.custom_op("capszoo::idpa_pass", mutates_args=())
def _idpa_pass(
    children: Tensor, weight: Tensor, parents: Tensor, want_couplings: bool
) -> Tuple[Tensor, Tensor]:
    """One pass of Procedure 1 in which a vote exists only while its block is worked on.

    Within a block, votes lie as ``[i, n, e, j]``: every product with the parents' poses or the couplings is a plain
    multiplication of long runs, every sum one over an outer axis.

    Args:
        children: ``[n, i, p, q]``.
        weight: ``[i, q, j, r]``.
        parents: ``[n, j, e]``, times the scale of the agreement.
        want_couplings: give the couplings too.

    Returns:
        Sums of votes ``[n, j, e]`` and couplings ``[n, i, j]`` (empty where they are not wanted).
    """
    n, i, rows, _ = children.shape
    j, e = parents.shape[1], parents.shape[2]
    p = upcast_half(parents).transpose(1, 2).contiguous()  # [n, e, j]
    sums = torch.zeros_like(p)
    couplings = children.new_empty((n, i, j) if want_couplings else (0,))
    room = _Room(p, n, i, rows, j, e)
    for first in range(0, i, room.i_step):
        at = slice(first, first + room.i_step)
        w = upcast_half(weight[at]).transpose(2, 3).flatten(2)  # [i, q, r*j]
        for start in range(0, n, room.n_step):
            of = slice(start, start + room.n_step)
            votes, product = room.votes(children[of, at], w)
            a = room.agreement(votes, p[of], product, 0)
            r = torch.softmax(a, -1, out=room.flat(1, votes))  # line 4
            room.add_sum(votes, r, product, sums[of])
            if want_couplings:
                couplings[of, at] = r.transpose(0, 1)
    return sums.transpose(1, 2).contiguous().to(children.dtype), couplings


@torch.library.custom_op("capszoo::idpa_pass_backward", mutates_args=())
def _idpa_pass_backward(
    children: Tensor, weight: Tensor, parents: Tensor, grad_sums: Tensor, grad_couplings: Optional[Tensor]
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`_idpa_pass` for its three tensors; computes the votes and couplings of each block again."""
    n, i, rows, inner = children.shape
    j, e = parents.shape[1], parents.shape[2]
    p = upcast_half(parents).transpose(1, 2).contiguous()  # [n, e, j]
    g = upcast_half(grad_sums).transpose(1, 2).contiguous()
    grad_p = torch.zeros_like(p)
    grad_children, grad_weight = children.new_empty(children.shape), weight.new_empty(weight.shape)
    room = _Room(p, n, i, rows, j, e)
    for first in range(0, i, room.i_step):
        at = slice(first, first + room.i_step)
        w = upcast_half(weight[at]).transpose(2, 3).flatten(2)  # [i, q, r*j]
        back = w.transpose(1, 2).contiguous()
        grad_w = torch.zeros_like(w)
        for start in range(0, n, room.n_step):
            of = slice(start, start + room.n_step)
            kids = children[of, at]
            votes, product = room.votes(kids, w)
            a = room.agreement(votes, p[of], product, 0)
            r = torch.softmax(a, -1, out=room.flat(1, votes))  # [i, n, j]
            grad_r = room.agreement(votes, g[of], product, 2)
            if grad_couplings is not None:
                grad_r += grad_couplings[of, at].transpose(0, 1)
            grad_a = torch.mul(r, grad_r, out=a)
            grad_a.addcmul_(r, grad_a.sum(dim=-1, keepdim=True), value=-1.0)
            room.add_sum(votes, grad_a, product, grad_p[of])
            torch.mul(r.unsqueeze(2), g[of], out=votes).addcmul_(grad_a.unsqueeze(2), p[of])
            grad_v = votes.view(w.shape[0], -1, w.shape[2])  # the votes' gradient, [i, n*p, r*j]
            grad_kids = torch.bmm(grad_v, back)
            grad_children[of, at] = grad_kids.view(-1, kids.shape[0], rows, inner).transpose(0, 1)
            x = upcast_half(kids).transpose(0, 1).reshape(-1, kids.shape[0] * rows, inner)
            grad_w.baddbmm_(x.transpose(1, 2), grad_v)
        grad_weight[at] = grad_w.unflatten(2, (-1, j)).transpose(2, 3)
    grad_parents = grad_p.transpose(1, 2).contiguous().to(parents.dtype)
    return grad_children, grad_weight, grad_parents


@_idpa_pass.register_fake
def _(children: Tensor, weight: Tensor, parents: Tensor, want_couplings: bool) -> Tuple[Tensor, Tensor]:
    shape = (children.shape[0], children.shape[1], parents.shape[1]) if want_couplings else (0,)
    return children.new_empty(parents.shape), children.new_empty(shape)


@_idpa_pass_backward.register_fake
def _(
    children: Tensor, weight: Tensor, parents: Tensor, grad_sums: Tensor, grad_couplings: Optional[Tensor]
) -> Tuple[Tensor, Tensor, Tensor]:
    return (
        children.new_empty(children.shape),
        weight.new_empty(weight.shape),
        parents.new_empty(parents.shape),
    )


def _save_for_backward(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.set_materialize_grads(False)
    ctx.want_couplings = inputs[3]


def _backward(ctx: Any, grad_sums: Optional[Tensor], grad_couplings: Optional[Tensor]) -> Tuple[Any, ...]:
    children, weight, parents = ctx.saved_tensors
    if grad_sums is None:
        grad_sums = torch.zeros_like(parents)
    if not ctx.want_couplings:
        grad_couplings = None
    return (*_idpa_pass_backward(children, weight, parents, grad_sums, grad_couplings), None)


_idpa_pass.register_autograd(_backward, setup_context=_save_for_backward)


def idpa_routing(
    votes: Tensor,
    num_iters: int = 2,
    parents: Optional[Tensor] = None,
    scale_agreement: bool = True,
    norm_weight: Optional[Tensor] = None,
    norm_bias: Optional[Tensor] = None,
    layer_norm: bool = True,
    eps: float = 1e-5,
) -> Tuple[Tensor, Tensor]:
    """Route the votes of one layer, its children fixed (Procedure 1, ``num_iters`` times).

    The layers below do the same in a layout of their own, and across layers (Procedure 2).

    Args:
        votes: ``[b, j, i, e]``.
        num_iters: passes, at least 1.
        parents: poses to start from, ``[b, j, e]``; zero where absent.
        scale_agreement: divide the agreement by sqrt(e).
        norm_weight, norm_bias: affine part of the LayerNorm, ``[e]``.
        layer_norm: False leaves the LayerNorm out (ablation A).
        eps: of the LayerNorm.

    Returns:
        Poses ``[b, j, e]``, and the couplings of the last pass ``[b, j, i]``, which sum to 1 over ``j``.
    """
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1, not {num_iters}")
    num_parents, num_children, e = votes.shape[1], votes.shape[2], votes.shape[3]
    blocks = votes.reshape(-1, num_children, e)  # [b*j, i, e]: blocks of one parent
    mask = torch.ones(e, 1, dtype=votes.dtype, device=votes.device)
    scale = 1.0 / math.sqrt(e) if scale_agreement else 1.0
    couplings = torch.full_like(votes[..., 0], 1.0 / num_parents).transpose(1, 2)  # [b, i, j]
    poses = parents
    for _ in range(num_iters):
        if poses is None:
            sums = votes.sum(dim=2) / num_parents  # parents at zero: uniform couplings
        else:
            agreement = _agreement(blocks, (poses * scale).unsqueeze(1), mask, 1, num_parents)  # line 3
            couplings = _couplings(agreement, votes.dtype)  # line 4
            sums = _update(blocks, couplings, mask, 1, num_parents, e)  # line 5
        poses = F.layer_norm(sums, (e,), norm_weight, norm_bias, eps) if layer_norm else sums  # line 6
    assert poses is not None
    return poses, couplings.transpose(1, 2)


class CapsuleNorm(nn.Module):
    """LayerNorm over the pose of every capsule of a feature map: ``[b, i*d, h, w]`` to the same shape.

    Channel = capsule * d + dimension. The result is laid out channels-last, as the capsule layers read it.
    """

    def __init__(self, pose_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.pose_dim = pose_dim
        self.norm = nn.LayerNorm(pose_dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1).unflatten(-1, [-1, self.pose_dim])  # [b, h, w, i, d]
        return self.norm(x).flatten(3).permute(0, 3, 1, 2)


class _IDPALayer(nn.Module):
    """What convolutional and fully connected layers share: options, norm, passes over votes."""

    weight: nn.Parameter
    start: Tensor
    mask: Tensor
    wide: Optional[Tensor]
    kernel_size: int
    stride: int

    def __init__(
        self,
        num_children: int,
        out_caps: int,
        in_dim: int = 16,
        out_dim: Optional[int] = None,
        num_iters: int = 2,
        pose: str = "matrix",
        scale_agreement: bool = True,
        parent_init: str = "zero",
        layer_norm: bool = True,
        activations: bool = False,
        drop: float = 0.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if pose not in ("matrix", "vector"):
            raise ValueError(f"pose must be 'matrix' or 'vector', not {pose!r}")
        if parent_init not in ("zero", "random", "learned"):
            raise ValueError(f"parent_init must be 'zero', 'random' or 'learned', not {parent_init!r}")
        if num_iters < 1:
            raise ValueError(f"num_iters must be at least 1, not {num_iters}")
        out_dim = in_dim if out_dim is None else out_dim
        side = math.isqrt(in_dim)
        if pose == "matrix" and (side * side != in_dim or in_dim != out_dim):
            raise ValueError(
                f"matrix poses are square and alike in both layers, not of {in_dim} and {out_dim} numbers: "
                "use pose='vector'"
            )
        self.num_children = num_children  # of one parent
        self.in_dim = in_dim
        self.out_caps = out_caps
        self.out_dim = out_dim
        self.num_iters = num_iters
        self.pose = pose
        self.rows, self.inner, self.cols = (side, side, side) if pose == "matrix" else (1, in_dim, out_dim)
        self.scale = 1.0 / math.sqrt(out_dim) if scale_agreement else 1.0
        self.parent_init = parent_init
        self.layer_norm = layer_norm
        self.activations = activations
        # with parents at zero and no activations, the first pass is a sum of votes: no vote is formed
        self.folds = parent_init == "zero" and not activations
        group = _group_size(out_caps)
        self.register_buffer("mask", _block_mask(self.rows, out_caps, self.cols, group), persistent=False)

        if parent_init == "learned":
            self.start = nn.Parameter(torch.zeros(out_caps, out_dim))
        elif parent_init == "random":
            self.register_buffer("start", torch.randn(out_caps, out_dim))
        else:
            self.register_buffer("start", torch.zeros(out_caps, out_dim), persistent=False)
        if activations:
            self.beta_v = nn.Parameter(torch.zeros(out_caps))
            self.beta_a = nn.Parameter(torch.zeros(out_caps))
        else:
            self.register_parameter("beta_v", None)
            self.register_parameter("beta_a", None)
        self.register_buffer("wide", None, persistent=False)
        self.drop = nn.Dropout(drop)
        self.norm = nn.LayerNorm(out_dim, eps=eps) if layer_norm else nn.Identity()

    def _new_weight(self, *shape: int) -> nn.Parameter:
        """Normal with variance parents / (children * inner), as the release has it."""
        std = math.sqrt(self.out_caps / (self.num_children * self.inner))
        return nn.Parameter(torch.empty(shape).normal_(std=std))

    def _to_blocks(self, children: Tensor, weight: Tensor) -> Tensor:
        """Votes of children ``[n, i, p, q]`` through weights ``[i, q, j*r]``, viewed as ``[n*..., i, w]``."""
        x = children.transpose(0, 1).reshape(self.num_children, -1, self.inner)  # [i, n*p, q]
        votes = torch.bmm(x, weight)  # Procedure 1, line 2: [i, n*p, j*r]
        return votes.reshape(self.num_children, -1, self.mask.shape[0]).transpose(0, 1)

    def _route_blocks(
        self, blocks: Tensor, parents: Tensor, activation: Optional[Tensor]
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """One pass of Procedure 1 over votes.

        Args:
            blocks: votes, ``[n*..., i, w]``.
            parents: poses of the iteration before, ``[n, j, e]``.
            activation: of the children, ``[n, i]`` (ablation C).

        Returns:
            Sums of votes ``[n, j, e]``, couplings ``[n, i, j]``, activations of the parents ``[n, j]`` or None.
        """
        rows, j, cols = self.rows, self.out_caps, self.cols
        p = (parents * self.scale).reshape(-1, j, rows, cols).transpose(1, 2)
        agreement = _agreement(blocks, p, self.mask, rows, j)  # line 3
        couplings = _couplings(agreement, blocks.dtype)  # line 4
        beta_v, beta_a = self.beta_v, self.beta_a
        if activation is None or beta_v is None or beta_a is None:
            return _update(blocks, couplings, self.mask, rows, j, cols), couplings, None  # line 5
        # Ablation C: the M-step of EM routing with the couplings in the place of its assignments
        votes, mask = upcast_half(blocks), upcast_half(self.mask)
        assigned = upcast_half(couplings * activation.unsqueeze(2))  # R_ij, [n, i, j]
        sums = _update(votes, assigned, mask, rows, j, cols)
        squares = _update(votes * votes, assigned, mask, rows, j, cols)
        mass = assigned.sum(dim=1)  # [n, j]
        total = mass.clamp(min=1e-6).unsqueeze(2)
        mean = sums / total
        variance = (squares / total - mean * mean).clamp(min=1e-4)
        cost = (beta_v + 0.5 * variance.log().mean(dim=2)) * (mass * (self.out_caps / self.num_children))
        return sums.to(blocks.dtype), couplings, torch.sigmoid(beta_a - cost).to(blocks.dtype)

    def _normalise(self, sums: Tensor) -> Tensor:
        """Line 6, after the release's dropout: ``[..., e]``."""
        return self.norm(self.drop(sums))

    def _sum_of_votes(self, children: Tensor) -> Tensor:
        """Sum of the votes of each parent, ``[n, j, e]``, in one product."""
        raise NotImplementedError

    def _votes(self, children: Tensor) -> Tensor:
        """Votes in blocks, ``[n*..., i, w]``."""
        raise NotImplementedError

    def _of_each_parent(self, activation: Tensor) -> Tensor:
        """Activations of a layer's children as the parents see them, ``[n, i]``."""
        raise NotImplementedError

    def _child_poses(self, children: Tensor) -> Tensor:
        """Every routing's own children, ``[n, i, p, q]``."""
        raise NotImplementedError

    def _child_weight(self) -> Tensor:
        """``[i, q, j, r]``"""
        raise NotImplementedError

    def _child_grid(self, children: Tensor) -> Tensor:
        """Children as :func:`.fused_pass` reads them, ``[b, h, w, i, d]``, padded."""
        raise NotImplementedError

    @torch.jit.unused
    def _is_fused(self, children: List[Tensor], num_iters: int) -> bool:
        """Whether the passes go through :func:`.fused_pass`: on CUDA, in eager mode or compiled."""
        if self.activations or num_iters == int(self.folds):
            return False
        return fused(children[0], self.weight, self.out_caps, self.rows, self.inner, self.cols)

    @torch.jit.unused
    def _many_votes(self, children: List[Tensor], num_iters: int) -> bool:
        """Whether the passes go through :func:`_idpa_pass`: on a CPU, in eager mode or compiled, with many votes."""
        first = children[0]
        if isinstance(first, torch.fx.Proxy) or torch.jit.is_tracing() or torch.compiler.is_exporting():
            return False
        if self.activations or first.device.type != "cpu" or first.dtype != self.weight.dtype:
            return False
        passes = num_iters - 1 if self.folds else num_iters
        if passes == 0 or (passes > 1 and len(children) == 1 and self.inner > 16):
            return False  # no votes; or votes that cost more to compute for each pass than to keep
        return self._routings(first) * self.num_children * self.out_caps * self.out_dim >= _MANY

    @torch.jit.unused
    def _routings(self, children: Tensor) -> int:
        """Independent routings n."""
        raise NotImplementedError

    @torch.jit.unused
    def _passes_by(
        self, engine: "_Engine", children: List[Tensor], num_iters: int, want_couplings: bool
    ) -> Tuple[List[Tensor], List[Tensor], Optional[Tensor]]:
        """:meth:`_passes` by an engine of its own: no activations."""
        poses: List[Tensor] = []
        couplings: Optional[Tensor] = None
        held: List[Tensor] = []
        read = -1
        for s in range(num_iters):  # from 0
            if s == 0 and self.folds:
                new = engine.first(children[0])
            else:
                wanted = min(max(s - 1, 0), len(children) - 1)
                if wanted != read:
                    read, held = wanted, engine.hold(children[wanted])
                parents = poses[s - 1] if s > 0 else self.start.expand(self._routings(children[0]), -1, -1)
                new, couplings = engine.route(held, parents, want_couplings and s == num_iters - 1)
            poses.append(new)
        return poses, [], couplings if want_couplings else None

    @torch.jit.unused
    def _positions(self, children: Tensor) -> int:
        """Independent routings of an image, a plain integer also where the batch is free."""
        raise NotImplementedError

    def _passes(
        self, children: List[Tensor], activations: List[Tensor], num_iters: int, want_couplings: bool
    ) -> Tuple[List[Tensor], List[Tensor], Optional[Tensor]]:
        """The passes of ``route()``, with rows of independent routings: poses ``[n, j, e]``, activations ``[n, j]``.

        Pass s reads its children's iteration s-1 (Procedure 2, line 8), the first pass iteration 1 (line 6).
        """
        if not torch.jit.is_scripting():
            if self.wide is None and self._is_fused(children, num_iters):
                return self._passes_by(_Fused(self, children[0]), children, num_iters, want_couplings)
            if self.wide is not None:
                return self._passes_by(_Parts(self, self.wide), children, num_iters, want_couplings)
            if self._many_votes(children, num_iters):
                return self._passes_by(_Blocked(self), children, num_iters, want_couplings)
        poses: List[Tensor] = []
        active: List[Tensor] = []
        blocks = children[0]  # replaced before it is read
        activation: Optional[Tensor] = None
        couplings: Optional[Tensor] = None
        for s in range(num_iters):  # from 0
            if s == 0 and self.folds:
                sums = self._sum_of_votes(children[0]) / self.out_caps
            else:
                read = max(s - 1, 0)
                if s == 0 or (s == 1 and self.folds) or (s > 1 and read < len(children)):  # new children
                    blocks = self._votes(children[read])
                    if self.activations:
                        activation = self._of_each_parent(activations[read])
                if s == 0:
                    # (the votes of one child have the size of the parents' poses)
                    parents = self.start + torch.zeros_like(
                        blocks[:, 0].reshape(-1, self.out_caps, self.out_dim)
                    )
                else:
                    parents = poses[s - 1]
                sums, couplings, act = self._route_blocks(blocks, parents, activation)
                if act is not None:
                    active.append(act)
            poses.append(self._normalise(sums))
        return poses, active, couplings

    def extra_repr(self) -> str:
        text = f"children={self.num_children}x{self.in_dim}, out_caps={self.out_caps}, out_dim={self.out_dim}"
        text += f", pose={self.pose}, num_iters={self.num_iters}"
        if self.parent_init != "zero":
            text += f", parent_init={self.parent_init}"
        return text + (", activations=True" if self.activations else "")


class _Engine:
    """How a layer makes its passes where it does not keep all votes in blocks; see :meth:`_IDPALayer._passes_by`."""

    def __init__(self, layer: _IDPALayer) -> None:
        self.layer = layer

    def first(self, children: Tensor) -> Tensor:
        """Poses ``[n, j, e]`` after a pass in which all parents are zero: no vote is formed."""
        return self.layer._normalise(self.layer._sum_of_votes(children) / self.layer.out_caps)

    def hold(self, children: Tensor) -> List[Tensor]:
        """What passes over the same children share."""
        raise NotImplementedError

    def route(
        self, held: List[Tensor], parents: Tensor, want_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """One pass of Procedure 1.

        Args:
            held: from :meth:`hold`.
            parents: poses of the iteration before, ``[n, j, e]``.
            want_couplings: give the couplings too.

        Returns:
            Poses ``[n, j, e]`` and couplings ``[n, i, j]``, which say nothing where they are not wanted.
        """
        raise NotImplementedError


class _Blocked(_Engine):
    """Passes through :func:`_idpa_pass`, no votes being kept."""

    def __init__(self, layer: _IDPALayer) -> None:
        super().__init__(layer)
        self.weight = layer._child_weight()

    def hold(self, children: Tensor) -> List[Tensor]:
        return [self.layer._child_poses(children)]

    def route(
        self, held: List[Tensor], parents: Tensor, want_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor]]:
        sums, couplings = _idpa_pass(held[0], self.weight, parents * self.layer.scale, want_couplings)
        return self.layer._normalise(sums), couplings


class _Parts(_Engine):
    """Passes of an exported graph, plain products through the weights of :meth:`ConvIDPA.prepare_for_export`."""

    def __init__(self, layer: _IDPALayer, wide: Tensor) -> None:
        super().__init__(layer)
        self.wide = wide

    def hold(self, children: Tensor) -> List[Tensor]:
        """All votes, ``[n, j, i, e]`` for some children at a time: made and moved while they are in the cache."""
        layer = self.layer
        poses = layer._child_poses(children).flatten(2).transpose(0, 1)  # [i, n, d]
        shape = (layer.out_caps, layer.out_dim)
        votes = layer._positions(children) * layer.num_children * layer.out_caps * layer.out_dim
        count = -(-votes // _PART)
        parts = zip(poses.chunk(count), self.wide.chunk(count), strict=True)
        return [torch.bmm(x, w).unflatten(2, shape).permute(1, 2, 0, 3) for x, w in parts]

    def route(
        self, held: List[Tensor], parents: Tensor, want_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Couplings sum to 1 over the parents, so parts of the children are independent."""
        parents = (parents * self.layer.scale).unsqueeze(3)  # [n, j, e, 1]
        sums: List[Tensor] = []
        couplings: List[Tensor] = []
        for part in held:
            agreement = torch.matmul(part, parents).squeeze(3).transpose(1, 2)  # line 3: [n, i, j]
            c = _couplings(agreement, part.dtype)  # line 4
            sums.append(torch.matmul(c.transpose(1, 2).unsqueeze(2), part).squeeze(2))  # line 5: [n, j, e]
            couplings.append(c)
        total = sums[0]
        for some in sums[1:]:
            total = total + some
        return self.layer._normalise(total), torch.cat(couplings, dim=1) if want_couplings else None


class _Fused(_Engine):
    """Passes on a GPU, no vote leaving the registers; poses in the type the kernels compute with."""

    def __init__(self, layer: _IDPALayer, like: Tensor) -> None:
        super().__init__(layer)
        self.dtype = working_type(like)
        self.weight = layer._child_weight().to(self.dtype).contiguous()  # here, and not again in each pass
        self.norm: Tuple[str, Optional[Tensor], Optional[Tensor], float] = ("none", None, None, 0.0)
        dropped = layer.training and layer.drop.p > 0  # between sums and norm
        if isinstance(layer.norm, nn.LayerNorm) and not dropped:
            self.norm = ("layer", layer.norm.weight, layer.norm.bias, layer.norm.eps)
        self.keep = torch.is_grad_enabled()

    def first(self, children: Tensor) -> Tensor:
        layer = self.layer
        return self._finished(fused_norm(layer._sum_of_votes(children), 1.0 / layer.out_caps, *self.norm))

    def hold(self, children: Tensor) -> List[Tensor]:
        return [self.layer._child_grid(children).to(self.dtype).contiguous()]

    def route(
        self, held: List[Tensor], parents: Tensor, want_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor]]:
        layer = self.layer
        options = (want_couplings, self.keep, layer.scale, layer.kernel_size, layer.stride, False)
        poses, couplings, _ = fused_pass(held[0], self.weight, parents.to(self.dtype), *options, *self.norm)
        return self._finished(poses), couplings

    def _finished(self, poses: Tensor) -> Tensor:
        return self.layer._normalise(poses) if self.norm[0] == "none" else poses


class ConvIDPA(_IDPALayer):
    """Convolutional capsule layer with IDPA routing.

    Args:
        in_caps: capsule types of the children.
        out_caps: capsule types of the parents.
        in_dim: numbers in a child's pose.
        out_dim: numbers in a parent's pose; the children's where absent.
        kernel_size, stride, padding: of the window of child positions that each parent sees.
        num_iters: passes of :meth:`forward`; :class:`IDPAStack` counts its own.
        pose: ``"matrix"`` (vote = pose·W, O(d) weights a pair) or ``"vector"`` (a whole matrix a pair).
        scale_agreement: divide the agreement by sqrt(out_dim).
        parent_init: parents before the first pass: ``"zero"``, ``"random"`` (drawn at construction, saved with the
            weights) or ``"learned"`` (a parameter that starts at zero), footnote 1 of the paper.
        layer_norm: False leaves out the LayerNorm (ablation A).
        activations: capsules have activations as in EM routing (ablation C). The paper only names this; here
            (our choice) a child's activation multiplies its couplings, ``R = r * a``; the pose is
            ``LayerNorm(sum R v)``; and a parent's activation is ``sigmoid(beta_a - cost)`` with the cost
            ``(beta_v + mean log sigma) * sum R * parents / children``, sigma being the votes' standard deviation
            under R. Scaled so, the sigmoid does not start saturated, whatever the number of children.
        drop: dropout of the sum of votes, before the LayerNorm.
        eps: of the LayerNorm.

    Shapes: ``[b, in_caps*in_dim, h, w]`` to ``[b, out_caps*out_dim, h', w']``, channel = capsule * dim + dimension
    (matrix poses row by row). ``weight`` is ``[j, r, i, q, k, l]``, the first pass's convolution unfolded.
    """

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int = 16,
        out_dim: Optional[int] = None,
        kernel_size: int = 3,
        stride: int = 1,
        padding: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(in_caps * kernel_size * kernel_size, out_caps, in_dim, out_dim, **options)
        self.in_caps = in_caps
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding
        self.weight = self._new_weight(out_caps, self.cols, in_caps, self.inner, kernel_size, kernel_size)

    def out_size(self, size: int) -> int:
        """Parents along an axis of ``size`` children."""
        return (size + 2 * self.padding - self.kernel_size) // self.stride + 1

    def forward(self, x: Tensor) -> Tensor:
        """Child map ``[b, i*d, h, w]`` to parent map ``[b, j*e, h', w']``, after ``num_iters`` passes.

        This is the layer alone, without activations: its children do not change between passes.
        """
        torch._assert(not self.activations, "activations go through route()")
        grid = x.permute(0, 2, 3, 1).unflatten(-1, [self.in_caps, self.in_dim])
        poses, _, _ = self.route([grid], [], self.num_iters, False)
        return poses[len(poses) - 1].flatten(3).permute(0, 3, 1, 2)

    def route(
        self,
        children: List[Tensor],
        activations: List[Tensor],
        num_iters: int,
        want_couplings: bool = True,
    ) -> Tuple[List[Tensor], List[Tensor], Optional[Tensor]]:
        """All iterations of this layer, given those of its children.

        Args:
            children: poses ``[b, h, w, i, d]`` after each of their iterations: pass s reads entry s-1 (1-based; the
                first pass reads entry 1, and the last entry stands for all that would follow).
            activations: likewise, ``[b, h, w, i]``; empty unless the layer has activations.
            num_iters: passes.
            want_couplings: False where nobody reads them, which saves their memory.

        Returns:
            Poses ``[b, h', w', j, e]`` after each pass; activations ``[b, h', w', j]``, or an empty list; and the
            last pass's couplings ``[b, h', w', j, k*l, i]`` (they sum to 1 over ``j``), or None where they are not
            wanted, or the only pass was a sum of votes: all couplings are then 1/j.
        """
        height = self.out_size(children[0].shape[1])
        width = self.out_size(children[0].shape[2])
        rows, active_rows, c = self._passes(children, activations, num_iters, want_couplings)
        poses: List[Tensor] = []
        for row in rows:
            poses.append(row.reshape(-1, height, width, self.out_caps, self.out_dim))
        active: List[Tensor] = []
        for row in active_rows:
            active.append(row.reshape(-1, height, width, self.out_caps))
        couplings: Optional[Tensor] = None
        if c is not None:
            shape = [-1, height, width, self.out_caps, self.kernel_size * self.kernel_size, self.in_caps]
            couplings = c.transpose(1, 2).reshape(shape)
        return poses, active, couplings

    def even_couplings(self, poses: Tensor) -> Tensor:
        """The couplings of a pass that is a sum of votes, 1/j: ``[b, h', w', j, k*l, i]``, for its poses."""
        b, h, w = poses.shape[0], poses.shape[1], poses.shape[2]
        even = poses.new_full([1], 1.0 / self.out_caps)
        return even.expand(b, h, w, self.out_caps, self.kernel_size * self.kernel_size, self.in_caps)

    def share_among_children(self, share: Tensor, couplings: Tensor, height: int, width: int) -> Tensor:
        """Divide what each parent holds among its children, in proportion to their couplings with it.

        Args:
            share: ``[b, n, h'*w'*j]``, for n wholes (the classes).
            couplings: ``[b, h', w', j, k*l, i]``.
            height, width: of the children's grid.

        Returns:
            ``[b, n, height*width*i]``; sums over the last axis are kept (without padding).
        """
        b, h, w, j, window, i = couplings.shape
        n = share.shape[1]
        of_parent = _normalised(couplings.reshape(b, h * w, j, window * i))
        share = torch.matmul(share.reshape(b, n, h * w, j).transpose(1, 2), of_parent)  # [b, h'*w', n, k*l*i]
        share = share.reshape(b, h * w, n, window, i).permute(0, 2, 4, 3, 1).reshape(b, n * i * window, h * w)
        share = F.fold(
            share, (height, width), self.kernel_size, 1, self.padding, self.stride
        )  # [b, n*i, h, w]
        return share.reshape(b, n, i, height * width).transpose(2, 3).flatten(2)

    def _sum_of_votes(self, children: Tensor) -> Tensor:
        p, q, j, r = self.rows, self.inner, self.out_caps, self.cols
        x = children.unflatten(4, [p, q]).permute(0, 4, 1, 2, 3, 5)  # [b, p, h, w, i, q]
        x = x.flatten(0, 1).flatten(3).permute(0, 3, 1, 2)  # [b*p, i*q, h, w], channels last
        x = F.conv2d(
            x, self.weight.flatten(2, 3).flatten(0, 1), None, self.stride, self.padding
        )  # [b*p, j*r, ...]
        x = x.permute(0, 2, 3, 1).unflatten(0, [-1, p]).flatten(2, 3)  # [b, p, h'*w', j*r]
        return x.unflatten(3, [j, r]).permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(2)

    def _child_poses(self, children: Tensor) -> Tensor:
        x = self._windows(children.flatten(3)).flatten(0, 2)  # [n, k*l*i*d]
        return x.reshape(-1, self.num_children, self.rows, self.inner)

    def _child_weight(self) -> Tensor:
        return self.weight.permute(4, 5, 2, 3, 0, 1).flatten(0, 2)

    def _child_grid(self, children: Tensor) -> Tensor:
        edge = self.padding
        return F.pad(children, [0, 0, 0, 0, edge, edge, edge, edge]) if edge > 0 else children

    @torch.jit.unused
    def _positions(self, children: Tensor) -> int:
        return self.out_size(children.shape[1]) * self.out_size(children.shape[2])

    @torch.jit.unused
    def _routings(self, children: Tensor) -> int:
        return children.shape[0] * self._positions(children)

    @torch.jit.unused
    def prepare_for_export(self) -> None:
        """Lay out the weights for graphs: the votes of a child, for all parents at once, as one product.

        For matrix poses that takes ``rows`` times the multiply-adds (and ``rows**2`` times the memory) of products as
        narrow as a pose, and far less time; votes come out with the pose last, and only couplings are transposed.
        """
        if self.activations:
            return
        weight = self._child_weight().detach().transpose(1, 2)  # [i, j, q, r]
        self.wide = block_diagonal(weight, self.rows)

    def _votes(self, children: Tensor) -> Tensor:
        return self._to_blocks(self._child_poses(children), self._child_weight().flatten(2))

    def _of_each_parent(self, activation: Tensor) -> Tensor:
        return self._windows(activation).flatten(0, 2)

    def _windows(self, x: Tensor) -> Tensor:
        """Every window of a grid: ``[b, h, w, c]`` to ``[b, h', w', k*l*c]``.

        Slices along one axis, then the other: 2 k slices and two concatenations, which export to plain operators
        (unfold becomes Gather) and copy long runs.
        """
        if self.padding > 0:
            x = F.pad(x, [0, 0, self.padding, self.padding, self.padding, self.padding])
        rest = self.kernel_size - 1
        height, width = x.shape[1], x.shape[2]
        columns: List[Tensor] = []
        for offset in range(self.kernel_size):
            columns.append(x[:, :, offset : width - rest + offset : self.stride])
        x = torch.cat(columns, dim=3)  # [b, h, w', l*c]
        rows: List[Tensor] = []
        for offset in range(self.kernel_size):
            rows.append(x[:, offset : height - rest + offset : self.stride])
        return torch.cat(rows, dim=3)

    def extra_repr(self) -> str:
        text = f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
        return f"in_caps={self.in_caps}, {super().extra_repr()}, {text}"


class FCIDPA(_IDPALayer):
    """Fully connected capsule layer with IDPA routing; every child has weights of its own.

    Args:
        in_caps: children, over all grid positions.
        out_caps: parents.
        in_dim, out_dim: pose sizes.
        num_iters, pose, scale_agreement, parent_init, layer_norm, activations, drop, eps: as in :class:`ConvIDPA`.

    Shapes: ``[b, in_caps, in_dim]`` to ``[b, out_caps, out_dim]``. A grid ``[b, h, w, i, d]`` is taken position
    by position: child = (row * width + column) * types + type. ``weight`` is ``[i, q, j, r]``, which is the first
    pass's matrix ``[i*q, j*r]`` and the later passes' batch of matrices without a copy.
    """

    def __init__(self, in_caps: int, out_caps: int, *args: Any, **options: Any) -> None:
        super().__init__(in_caps, out_caps, *args, **options)
        self.in_caps = in_caps
        self.kernel_size = self.stride = 1
        self.weight = self._new_weight(in_caps, self.inner, out_caps, self.cols)

    def forward(self, x: Tensor) -> Tensor:
        """Children ``[b, i, d]`` to parents ``[b, j, e]``, after ``num_iters`` passes (without activations)."""
        torch._assert(not self.activations, "activations go through route()")
        poses, _, _ = self.route([x], [], self.num_iters, False)
        return poses[len(poses) - 1]

    def route(
        self,
        children: List[Tensor],
        activations: List[Tensor],
        num_iters: int,
        want_couplings: bool = True,
    ) -> Tuple[List[Tensor], List[Tensor], Optional[Tensor]]:
        """All iterations of this layer, given those of its children (see :meth:`ConvIDPA.route`).

        Args:
            children: ``[b, i, d]`` or ``[b, h, w, types, d]``, one entry per iteration.
            activations: ``[b, i]`` or ``[b, h, w, types]``; empty unless the layer has activations.
            num_iters: passes.
            want_couplings: False where nobody reads them, which saves their memory.

        Returns:
            Poses ``[b, j, e]`` after each pass; activations ``[b, j]``, or an empty list; and the last pass's
            couplings ``[b, j, i]`` (they sum to 1 over ``j``), or None where they are not wanted or all are 1/j.
        """
        poses, active, couplings = self._passes(children, activations, num_iters, want_couplings)
        return poses, active, None if couplings is None else couplings.transpose(1, 2)

    def votes(self, children: Tensor) -> Tensor:
        """Children ``[b, i, d]`` or ``[b, h, w, types, d]`` to votes ``[b, j, i, e]``."""
        votes = torch.einsum("bipq,iqjr->bjipr", self._child_poses(children), self.weight)
        return votes.flatten(3)

    def even_couplings(self, poses: Tensor) -> Tensor:
        """The couplings of a pass that is a sum of votes, 1/j: ``[b, j, i]``, for its poses."""
        return poses.new_full([1], 1.0 / self.out_caps).expand(poses.shape[0], self.out_caps, self.in_caps)

    def share_among_children(self, share: Tensor, couplings: Tensor) -> Tensor:
        """``[b, n, j]`` and couplings ``[b, j, i]`` to ``[b, n, i]`` (see the method of :class:`ConvIDPA`)."""
        return torch.bmm(share, _normalised(couplings))

    def _sum_of_votes(self, children: Tensor) -> Tensor:
        x = children.reshape(-1, self.in_caps, self.rows, self.inner).transpose(1, 2)
        x = x.reshape(-1, self.in_caps * self.inner)  # [b*p, i*q]
        x = torch.mm(x, self.weight.flatten(2).flatten(0, 1))  # [b*p, j*r]
        return x.reshape(-1, self.rows, self.out_caps, self.cols).transpose(1, 2).flatten(2)

    def _child_poses(self, children: Tensor) -> Tensor:
        return children.reshape(-1, self.in_caps, self.rows, self.inner)

    def _child_weight(self) -> Tensor:
        return self.weight

    def _child_grid(self, children: Tensor) -> Tensor:
        return children.reshape(-1, 1, 1, self.in_caps, self.in_dim)

    @torch.jit.unused
    def _positions(self, children: Tensor) -> int:
        return 1

    @torch.jit.unused
    def _routings(self, children: Tensor) -> int:
        return children.shape[0]

    def _votes(self, children: Tensor) -> Tensor:
        return self._to_blocks(self._child_poses(children), self._child_weight().flatten(2))

    def _of_each_parent(self, activation: Tensor) -> Tensor:
        return activation.reshape(-1, self.in_caps)


class IDPAStack(nn.Sequential):
    """Capsule layers routed together (Procedure 2).

    Args:
        layers: :class:`ConvIDPA` layers, then :class:`FCIDPA` ones, by name, from the primary capsules' parents up.
        num_iters: routing iterations t.
        routing: ``"concurrent"`` (Procedure 2), or ``"sequential"``: each layer makes all its passes before the next
            starts (ablation B).
        depth: layers of the whole network, from which the iterations of every layer follow; those given where
            absent. (A class layer may be missing now and added later, as a child module.)
    """

    def __init__(
        self,
        layers: "OrderedDict[str, nn.Module]",
        num_iters: int = 2,
        routing: str = "concurrent",
        depth: Optional[int] = None,
    ) -> None:
        super().__init__(layers)
        if num_iters < 1:
            raise ValueError(f"num_iters must be at least 1, not {num_iters}")
        if routing not in ("concurrent", "sequential"):
            raise ValueError(f"routing must be 'concurrent' or 'sequential', not {routing!r}")
        self.num_iters = num_iters
        self.routing = routing
        self.depth = len(layers) if depth is None else depth

    def iterations(self, level: int, full: bool = False) -> int:
        """Passes of layer ``level`` (from 0): those in the dependency cone of the last layer, or with ``full`` all."""
        if full or self.routing == "sequential":
            return self.num_iters
        return max(1, self.num_iters - (self.depth - 1 - level))

    def forward(self, x: Tensor) -> Tensor:
        """Primary capsules ``[b, h, w, i, d]`` to the last layer's poses, ``[b, j, e]`` or ``[b, h', w', j, e]``."""
        poses, _ = self.run(x, None, self.depth)
        return poses

    def run(self, x: Tensor, activation: Optional[Tensor], layers: int) -> Tuple[Tensor, Optional[Tensor]]:
        """Poses and activations of layer ``layers`` (from 1), as the last layer of the stack reads or gives them.

        Args:
            x: primary capsules, ``[b, h, w, i, d]``.
            activation: theirs, ``[b, h, w, i]``; None unless the layers have activations.
            layers: how many layers to run.
        """
        children = [x]
        activations: List[Tensor] = []
        if activation is not None:
            activations.append(activation)
        for level, layer in enumerate(self):
            if level < layers:
                children, activations, _ = layer.route(children, activations, self.iterations(level), False)  # type: ignore[operator]
                if self.routing == "sequential":
                    children = children[-1:]
                    activations = activations[-1:]
        last: Optional[Tensor] = None
        if len(activations) > 0:
            last = activations[-1]
        return children[-1], last

    def run_full(
        self, x: Tensor, activation: Optional[Tensor] = None, full: bool = True
    ) -> Tuple[List[Tensor], List[Tensor], List[Tensor]]:
        """Last poses, activations and couplings of every layer.

        Args:
            x, activation: as in :meth:`run`.
            full: run all iterations of every layer; else those in the dependency cone of the last layer, whose
                poses and couplings are the same either way.

        Returns:
            Poses, activations (empty without activations) and couplings of each layer, as of its ``route()``;
            even couplings for a layer whose only pass was a sum of votes.
        """
        children, activations = [x], [] if activation is None else [activation]
        poses: List[Tensor] = []
        active: List[Tensor] = []
        couplings: List[Tensor] = []
        for level, layer in enumerate(self._typed()):
            children, activations, c = layer.route(children, activations, self.iterations(level, full))
            if self.routing == "sequential":
                children, activations = children[-1:], activations[-1:]
            poses.append(children[-1])
            active += activations[-1:]
            couplings.append(layer.even_couplings(children[-1]) if c is None else c)
        return poses, active, couplings

    def shares(self, x: Tensor, activation: Optional[Tensor] = None, even: bool = False) -> Tensor:
        """Share of each primary capsule in each of the last layer's: ``[b, n, h, w, i]``, summing to 1 over h, w, i.

        A parent's share is divided among its children in proportion to their couplings with it, from the last layer
        down. The couplings are those that reach the last layer: where its dependency cone holds but one pass of
        a layer, that layer divides evenly.

        Args:
            x, activation: as in :meth:`run`; the last layer is fully connected.
            even: what even couplings would give everywhere, ``[1, 1, h, w, i]``: by how many windows a capsule is seen.
        """
        poses, _, couplings = self.run_full(x, activation, full=False)
        layers = self._typed()
        n = poses[-1].shape[1]
        share = torch.eye(n, dtype=upcast_half(x).dtype, device=x.device).expand(x.shape[0], n, n)
        if even:
            couplings = [layer.even_couplings(p[:1]) for layer, p in zip(layers, poses, strict=True)]
            share = share[:1, :1]
        for level in range(len(layers) - 1, -1, -1):
            layer, c = layers[level], upcast_half(couplings[level])
            if isinstance(layer, FCIDPA):
                share = layer.share_among_children(share, c)
            else:
                height, width = (poses[level - 1] if level > 0 else x).shape[1:3]
                share = layer.share_among_children(share, c, height, width)
        share = share.reshape(share.shape[0], share.shape[1], x.shape[1], x.shape[2], -1)
        return share / share.sum(dim=(2, 3, 4), keepdim=True)

    def _typed(self) -> "List[Union[ConvIDPA, FCIDPA]]":
        return [layer for layer in self if isinstance(layer, (ConvIDPA, FCIDPA))]

    def extra_repr(self) -> str:
        return f"num_iters={self.num_iters}, routing={self.routing}"
