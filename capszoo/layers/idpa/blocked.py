"""The operator ``capszoo::idpa_pass``: one iteration of Procedure 1 on a CPU, block by block, storing no votes."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, library

from .._autograd import count_as_reference, new_like, refuse_second_gradient
from .._precision import upcast_half
from ..tuning import TUNING


class Workspace:
    """Reused buffers for one block of votes: allocating them for every block would cost more than its arithmetic.

    Each thread's part of the two vote-sized buffers stays in its L2 cache; 128 rows make the products of the
    votes wide enough.

    Args:
        like: a tensor with the dtype and device of the buffers.
        n, i, rows, j, e: routings, children, rows of a pose, parents, pose dimension.
    """

    def __init__(self, like: Tensor, n: int, i: int, rows: int, j: int, e: int) -> None:
        self.n_step = min(n, max(1, 128 // rows))
        self.i_step = min(
            i, max(1, TUNING.idpa_block_votes * torch.get_num_threads() // (self.n_step * e * j))
        )
        self.e, self.j = e, j
        pairs = self.n_step * self.i_step
        self.wide = like.new_empty(2, pairs * e * j)
        self.narrow = like.new_empty(3, pairs * j)
        self.sum = like.new_empty(self.n_step * e * j)

    def votes(self, children: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
        """Votes of ``[n, i, p, q]`` through ``[i, q, r*j]``: ``[i, n, e, j]``, and a buffer of that shape (line 2)."""
        n, i, rows, inner = children.shape
        width = weight.shape[2]
        x = upcast_half(children).transpose(0, 1).reshape(i, n * rows, inner)
        size, shape = n * i * rows * width, (i, n, self.e, self.j)
        torch.bmm(x, weight, out=self.wide[0, :size].view(i, n * rows, width))
        return self.wide[0, :size].view(shape), self.wide[1, :size].view(shape)

    def agreement(self, votes: Tensor, parents: Tensor, product: Tensor, which: int) -> Tensor:
        """Dot product of each vote with its parent, ``[n, e, j]``: ``[i, n, j]`` (line 3)."""
        out = self.flat(which, votes)
        return torch.sum(torch.mul(votes, parents, out=product), 2, out=out)

    def add_sum(self, votes: Tensor, weights: Tensor, product: Tensor, to: Tensor) -> None:
        """Weight the votes by ``[i, n, j]``, sum over the children, and add to ``[n, e, j]`` (line 5)."""
        out = self.sum[: to.numel()].view(to.shape)
        to += torch.sum(torch.mul(votes, weights.unsqueeze(2), out=product), 0, out=out)

    def flat(self, which: int, votes: Tensor) -> Tensor:
        i, n = votes.shape[0], votes.shape[1]
        return self.narrow[which, : i * n * self.j].view(i, n, self.j)


@library.custom_op("capszoo::idpa_pass", mutates_args=())
def idpa_pass(
    children: Tensor, weight: Tensor, parents: Tensor, fresh: bool, need_couplings: bool
) -> Tuple[Tensor, Tensor]:
    """One iteration of Procedure 1 in which votes exist only for the current block.

    Within a block, votes have the layout ``[i, n, e, j]``: every product with the parents' poses or the couplings is a
    plain multiplication of long contiguous runs, every sum runs over an outer axis.

    Args:
        children: ``[n, i, p, q]``.
        weight: ``[i, q, j, r]``.
        parents: ``[n, j, e]``, times the scale of the agreement.
        fresh: as in :func:`.routing_pass`.
        need_couplings: return the couplings too.

    Returns:
        Sums of votes ``[n, j, e]`` and couplings ``[n, i, j]`` (empty unless requested).
    """
    n, i, rows, _ = children.shape
    j, e = parents.shape[1], parents.shape[2]
    p = upcast_half(parents).transpose(1, 2).contiguous()  # [n, e, j]
    sums = torch.zeros_like(p)
    couplings = children.new_empty((n, i, j) if need_couplings else (0,))
    room = Workspace(p, n, i, rows, j, e)
    for first in range(0, i, room.i_step):
        at = slice(first, first + room.i_step)
        w = upcast_half(weight[at]).transpose(2, 3).flatten(2)  # [i, q, r*j]
        for start in range(0, n, room.n_step):
            of = slice(start, start + room.n_step)
            votes, product = room.votes(children[of, at], w)
            a = room.agreement(votes, p[of], product, 0)
            r = torch.softmax(a, -1, out=room.flat(1, votes))  # line 4
            room.add_sum(votes, r, product, sums[of])
            if need_couplings:
                couplings[of, at] = r.transpose(0, 1)
    return sums.transpose(1, 2).contiguous().to(children.dtype), couplings


@library.custom_op("capszoo::idpa_pass_backward", mutates_args=())
def _idpa_pass_backward(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    fresh: bool,
    grad_sums: Tensor,
    grad_couplings: Optional[Tensor],
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`idpa_pass` for its three tensors; recomputes the votes and couplings of each block."""
    n, i, rows, inner = children.shape
    j, e = parents.shape[1], parents.shape[2]
    p = upcast_half(parents).transpose(1, 2).contiguous()  # [n, e, j]
    g = upcast_half(grad_sums).transpose(1, 2).contiguous()
    grad_p = torch.zeros_like(p)
    grad_children, grad_weight = children.new_empty(children.shape), weight.new_empty(weight.shape)
    room = Workspace(p, n, i, rows, j, e)
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


@idpa_pass.register_fake
def _(
    children: Tensor, weight: Tensor, parents: Tensor, fresh: bool, need_couplings: bool
) -> Tuple[Tensor, Tensor]:
    shape = (children.shape[0], children.shape[1], parents.shape[1]) if need_couplings else (0,)
    return children.new_empty(parents.shape), children.new_empty(shape)


@_idpa_pass_backward.register_fake
def _(children: Tensor, weight: Tensor, parents: Tensor, *rest: Any) -> Tuple[Tensor, ...]:
    return new_like(children, weight, parents)


def _save_for_backward(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.set_materialize_grads(False)
    ctx.fresh, ctx.need_couplings = inputs[3:]


def _backward(ctx: Any, grad_sums: Optional[Tensor], grad_couplings: Optional[Tensor]) -> Tuple[Any, ...]:
    children, weight, parents = ctx.saved_tensors
    if grad_sums is None:
        grad_sums = torch.zeros_like(parents)
    if not ctx.need_couplings:
        grad_couplings = None
    return (*_idpa_pass_backward(children, weight, parents, ctx.fresh, grad_sums, grad_couplings), None, None)


idpa_pass.register_autograd(_backward, setup_context=_save_for_backward)
refuse_second_gradient(_idpa_pass_backward)


@count_as_reference(idpa_pass, _idpa_pass_backward)
def _multiply_adds(children: Any, weight: Any, parents: Any, fresh: bool, *rest: Any) -> int:
    votes = children[0] * children[1] * parents[1] * parents[2]
    return votes * (children[3] * fresh + 2)  # the votes, their agreement, their weighted sum
