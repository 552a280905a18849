"""Dynamic routing without votes: children are weighted and summed before they are transformed.

With u_i a child, W_ij its transform to parent j and v_j a pose, the two operations on the votes W_ij u_i
need no votes:

* ``sum_i c_ij W_ij u_i`` is one matrix product for each parent: all weighted children ``c_ij u_i``, concatenated,
  times all transforms to that parent;
* ``<W_ij u_i, v_j> = <u_i, W_ijᵀ v_j>``, where ``W_ijᵀ v_j`` of all children (the *keys*) is one product as well.

The weighted children and the keys have the children's pose dimension, not the parents'. The products have as many
rows as there are images: with many images they are full matrix products, where those with votes are vector-matrix
products. A block of images is routed at a time. The backward pass recomputes keys and weighted children, by one product
with the transforms for both; couplings and sums are stored.

Letters: ``b`` batch, ``i`` children, ``d`` their pose, ``j`` parents, ``e`` theirs. In every tensor with a ``d`` axis
for each child, the children are the last axis, so that a sum over ``d`` runs along memory.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..squash import squash
from ..tuning import TUNING

__all__ = ["vote_free_routing"]


def vote_free_routing(
    x: Tensor,
    weight: Tensor,
    start: Tensor | None,
    out_caps: int,
    num_iters: int,
    softmax_over: str,
    need_couplings: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`.routing.dynamic_routing` of the votes of ``x`` through ``weight``.

    Args:
        x: children ``[b, i, d]``, float32 or float64, at least one image.
        weight: ``[i, d, j * e]``, of the same type.
        start: ``[j, i]``, the logits of the first iteration; zero where absent.
        out_caps: ``j``.
        num_iters: iterations, at least 2.
        softmax_over: ``"parents"`` or ``"children"``.
        need_couplings: whether to return the couplings.

    Returns:
        poses ``[b, j, e]``, squashed, and the couplings ``[b, j, i]`` of the last iteration, or None. They can be
        differentiated once.
    """
    axis = 0 if softmax_over == "parents" else 2
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, start)):
        poses, couplings = _VoteFree.apply(x, weight, start, need_couplings, out_caps, num_iters, axis)
        return poses, couplings
    poses, _, every = _route(_Routing(x, weight, start, out_caps, num_iters, axis), keep=need_couplings)
    return poses, None if every is None else every[-1].transpose(0, 1)


def _blocks(children: Tensor, out_caps: int) -> list[tuple[int, int]]:
    """First image and number of images of every block; even blocks."""
    images = children.shape[0]
    keys = children[0].numel() * out_caps
    most = max(TUNING.dynamic_vote_free_min_routings, TUNING.dynamic_vote_free_block_keys // keys)
    count = -(-images // most)
    edges = [images * k // count for k in range(count + 1)]
    return [(first, last - first) for first, last in itertools.pairwise(edges)]


def _route(routing: "_Routing", keep: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Poses; and, with ``keep``, all sums ``[t, b, j, e]`` and all couplings after the first ``[t - 1, j, b, i]``."""
    images, _, i = routing.children.shape
    j, e, _ = routing.transforms.shape
    poses = routing.children.new_empty(images, j, e)
    totals = poses.new_empty(routing.num_iters, images, j, e) if keep else None
    couplings = poses.new_empty(routing.num_iters - 1, j, images, i) if keep else None
    for begin, length in _blocks(routing.children, j):
        found = routing.forward(begin, length)
        poses.narrow(0, begin, length).copy_(found.poses[-1])
        if totals is not None and couplings is not None:
            torch.stack(found.totals, out=totals.narrow(1, begin, length))
            torch.stack(found.couplings, out=couplings.narrow(2, begin, length))
    return poses, totals, couplings


class _VoteFree(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, start: Tensor | None, need_couplings: bool, *plan: int
    ) -> tuple[Tensor, Tensor | None]:
        poses, totals, couplings = _route(_Routing(x, weight, start, *plan), keep=True)
        assert couplings is not None
        ctx.save_for_backward(x, weight, start, totals, couplings)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return poses, couplings[-1].transpose(0, 1).clone() if need_couplings else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, start, totals, couplings = ctx.saved_tensors
        routing = _Routing(x, weight, start, *ctx.plan)
        routing.begin_backward()
        d_poses = torch.zeros_like(totals[-1]) if given[0] is None else given[0]
        for begin, length in _blocks(routing.children, routing.out_caps):
            d_couplings = None if given[1] is None else given[1].narrow(0, begin, length).transpose(0, 1)
            routing.backward(
                begin,
                d_poses.narrow(0, begin, length),
                d_couplings,
                totals.narrow(1, begin, length),
                couplings.narrow(2, begin, length),
            )
        return (*routing.gradients(), None, None, None, None)


class _Forward(NamedTuple):
    totals: list[Tensor]  # of each iteration, [b, j, e]
    poses: list[Tensor]  # [b, j, e]
    couplings: list[Tensor]  # of each iteration after the first, [j, b, i]


class _Routing:
    """Tensors of one call in the layout of the products, and the forward and backward steps of a block of images."""

    def __init__(
        self, x: Tensor, weight: Tensor, start: Tensor | None, out_caps: int, num_iters: int, axis: int
    ) -> None:
        i, d, _ = weight.shape
        self.out_caps, self.num_iters, self.axis = out_caps, num_iters, axis
        self.pose = (d, i)
        self.children = x.transpose(1, 2).contiguous()  # [b, d, i]
        transforms = weight.reshape(i, d, out_caps, -1).permute(2, 3, 1, 0)
        self.transforms = transforms.reshape(out_caps, -1, d * i)  # [j, e, d*i]
        self.start = None if start is None else start.unsqueeze(1)  # [j, 1, i]
        self.even = 1.0 / (out_caps if axis == 0 else i)
        self.first = None if self.start is None else torch.softmax(self.start, dim=axis)  # [j, 1, i]

    def _sum(self, weighted: Tensor) -> Tensor:
        """Weighted children ``[j, b, d*i]``, transformed and summed: ``[b, j, e]``."""
        return torch.bmm(weighted, self.transforms.transpose(1, 2)).transpose(0, 1)

    def forward(self, begin: int, length: int) -> _Forward:
        u = self.children.narrow(0, begin, length)
        workspace = u.new_empty(self.out_caps, length, u[0].numel())  # keys, then weighted children
        view = workspace.view(self.out_caps, length, *self.pose)
        if self.first is None:
            total = torch.mm(u.flatten(1), self.transforms.flatten(0, 1).t()).mul_(self.even)
            totals = [total.view(length, self.out_caps, -1)]
        else:
            torch.mul(self.first.unsqueeze(2), u, out=view)
            totals = [self._sum(workspace)]
        poses, couplings = [squash(totals[0])], []
        for _ in range(1, self.num_iters):
            pose_sum = poses[0] if len(poses) == 1 else torch.stack(poses).sum(dim=0)
            torch.bmm(pose_sum.transpose(0, 1), self.transforms, out=workspace)
            logits = view.mul_(u).sum(dim=2)  # [j, b, i]
            if self.start is not None:
                logits += self.start
            couplings.append(torch.softmax(logits, dim=self.axis))
            torch.mul(couplings[-1].unsqueeze(2), u, out=view)
            totals.append(self._sum(workspace))
            poses.append(squash(totals[-1]))
        return _Forward(totals, poses, couplings)

    def begin_backward(self) -> None:
        self.d_children = torch.zeros_like(self.children)
        self.d_transforms = torch.zeros_like(self.transforms)
        self.d_start = self.d_first = None
        if self.start is not None:
            self.d_start, self.d_first = torch.zeros_like(self.start), torch.zeros_like(self.start)

    def backward(
        self, begin: int, given: Tensor, d_couplings: Tensor | None, totals: Tensor, couplings: Tensor
    ) -> None:
        """Accumulate the gradients of a block's images, from those of poses and of couplings ``[j, b, i]``."""
        length = given.shape[0]
        u = self.children.narrow(0, begin, length)
        d_u = self.d_children.narrow(0, begin, length)
        poses, back = zip(*(_squash_with_gradient(total) for total in totals), strict=True)
        d_poses = torch.zeros_like(totals)
        d_poses[-1] = given
        keys = u.new_empty(self.out_caps, 2 * length, u[0].numel())
        made = torch.empty_like(keys)
        of_logits, of_sum = keys.view(self.out_caps, 2, length, *self.pose).unbind(1)
        made_of_logits, made_of_sum = made.view(self.out_caps, 2, length, *self.pose).unbind(1)
        for t in range(self.num_iters - 1, 0, -1):
            # keys of the poses that gave the logits, and of the gradient of the sum, in one product
            pose_sum = torch.stack(poses[:t]).sum(dim=0)
            rows = torch.cat([pose_sum, back[t](d_poses[t])]).transpose(0, 1)  # [j, 2*b, e]
            torch.bmm(rows, self.transforms, out=keys)
            c = couplings[t - 1]  # [j, b, i]
            d_c = torch.mul(of_sum, u, out=made_of_logits).sum(dim=2)
            if d_couplings is not None and t == self.num_iters - 1:
                d_c += d_couplings
            d_logits = d_c.sub_((d_c * c).sum(dim=self.axis, keepdim=True)).mul_(c)
            torch.mul(d_logits.unsqueeze(2), u, out=made_of_logits)
            torch.mul(c.unsqueeze(2), u, out=made_of_sum)
            of_logits.mul_(d_logits.unsqueeze(2))
            of_sum.mul_(c.unsqueeze(2))
            d_u += keys.view(self.out_caps * 2, length, *self.pose).sum(dim=0)
            self.d_transforms.baddbmm_(rows.transpose(1, 2), made)
            d_poses[:t] += self._sum(made.narrow(1, 0, length))
            if self.d_start is not None:
                self.d_start += d_logits.sum(dim=1, keepdim=True)
        self._first_iteration(u, d_u, back[0](d_poses[0]))

    def _first_iteration(self, u: Tensor, d_u: Tensor, d_total: Tensor) -> None:
        if self.first is None or self.d_first is None:
            flat = d_total.flatten(1).mul(self.even)  # [b, j*e]
            d_u += torch.mm(flat, self.transforms.flatten(0, 1)).view_as(d_u)
            self.d_transforms.flatten(0, 1).addmm_(flat.t(), u.flatten(1))
            return
        rows = d_total.transpose(0, 1)  # [j, b, e]
        workspace = torch.bmm(rows, self.transforms)
        keys = workspace.view(self.out_caps, -1, *self.pose)
        self.d_first += (keys * u).sum(dim=(1, 2)).unsqueeze(1)
        d_u += keys.mul_(self.first.unsqueeze(2)).sum(dim=0)
        torch.mul(self.first.unsqueeze(2), u, out=keys)
        self.d_transforms.baddbmm_(rows.transpose(1, 2), workspace)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of ``x``, ``weight`` and ``start``."""
        d, i = self.pose
        d_weight = self.d_transforms.view(self.out_caps, -1, d, i).permute(3, 2, 0, 1).reshape(i, d, -1)
        d_start = None
        if self.d_start is not None and self.d_first is not None and self.first is not None:
            mean = (self.d_first * self.first).sum(dim=self.axis, keepdim=True)
            d_start = (self.d_start + self.first * (self.d_first - mean)).squeeze(1)
        return self.d_children.transpose(1, 2), d_weight, d_start


def _squash_with_gradient(total: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Squashed ``total``, and a function from its gradient to the gradient of ``total``."""
    total = total.detach().requires_grad_()
    with torch.enable_grad():
        pose = squash(total)
    return pose.detach(), lambda given: torch.autograd.grad(pose, total, given)[0]
