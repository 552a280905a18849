"""Dynamic routing in training, in blocks of images: an operator with a written-out gradient, eager and compiled.

Every iteration weights the votes û_ij and compares them with a sum of poses, so the gradient of all iterations is a sum
of outer products, with ``s`` the weighted sum of votes and ``V`` the sum of the poses before the iteration:

    ∂û_ij = Σ_t c_ij^t ∂s_j^t + ∂b_ij^t V_j^t

It is one matrix product for each image and parent. Autograd writes one tensor of the votes' size for every term, and
adds them up.

Where the transforms are few, the backward pass forms the votes of each block again. Else each block would have to read
all transforms and add to all their gradients: there the forward pass stores the votes.

Letters as in :mod:`capszoo.layers.dynamic`. Votes are ``[b, j, i, e]`` here, contiguous, float32 or float64.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, library

from .._autograd import count_as_reference, refuse_second_gradient
from .._precision import upcast_half, wide_type
from ..squash import squared_lengths, squash, squash_gradient
from ..tuning import TUNING


class Blocks:
    """The votes of one block of images after the other, in buffers that are allocated once.

    Args:
        x: children ``[b, i, d]``, at least one image.
        weight: ``[i, d, j * e]``, of the same type.
        out_caps: ``j``.
    """

    def __init__(self, x: Tensor, weight: Tensor, out_caps: int) -> None:
        self.x, self.weight, self.out_caps = x, weight, out_caps
        children, _, width = weight.shape
        self.shape = (out_caps, children, width // out_caps)
        step = max(1, min(len(x), TUNING.dynamic_block_votes // (children * width)))
        self.slices = [slice(begin, min(begin + step, len(x))) for begin in range(0, len(x), step)]
        self.raw = x.new_empty(children * step * width)
        self.buffer: Optional[Tensor] = None

    def product(self, block: slice) -> Tensor:
        """A buffer for the product of a block's children and transforms, ``[i, b, j * e]``."""
        children, _, width = self.weight.shape
        images = block.stop - block.start
        return self.raw[: children * images * width].view(children, images, width)

    def votes(self, block: slice, out: Optional[Tensor] = None) -> Tensor:
        """Votes of a block, in ``out`` or a buffer: copied while the product is in the cache."""
        if out is None:
            if self.buffer is None:
                first = self.slices[0].stop
                self.buffer = self.x.new_empty(first, *self.shape, dtype=wide_type(self.x.dtype))
            out = self.buffer[: block.stop - block.start]
        product = torch.bmm(self.x[block].transpose(0, 1), self.weight, out=self.product(block))
        return out.copy_(product.unflatten(2, (self.out_caps, -1)).permute(1, 2, 0, 3))


@library.custom_op("capszoo::route_votes", mutates_args=())
def route_votes(
    x: Tensor, weight: Tensor, start: Optional[Tensor], out_caps: int, num_iters: int, axis: int
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`.routing.dynamic_routing` of the votes of ``x`` through ``weight``.

    Args:
        x: children ``[b, i, d]``, at least one image.
        weight: ``[i, d, j * e]``, of the same type.
        start: ``[j, i]``, the logits of the first iteration; zero where absent.
        out_caps: ``j``.
        num_iters: iterations, at least 2.
        axis: of the softmax in ``[b, j, i]``: 1 for parents, 2 for children.

    Returns:
        poses ``[b, j, e]``, squashed, and the couplings of the iterations after the first, ``[t - 1, b, j, i]``. For
        the gradient: the sums of votes of every iteration, ``[t, b, j, e]``, and the votes (empty where they are not
        stored). All are float32 for half precision, else of the type of ``x``.
    """
    poses, couplings, totals, votes = _results(x, weight, out_caps, num_iters)
    start_logits = None if start is None else upcast_half(start)
    room = Blocks(x, weight, out_caps)
    for block in room.slices:
        some = room.votes(block, votes[block] if len(votes) else None)
        first = _first(some, start_logits, axis)
        totals[0, block] = _weighted_sum(first, some)
        pose, pose_sum = squash(totals[0, block]), torch.zeros_like(poses[block])
        for t in range(1, num_iters):
            pose_sum += pose
            logits = _agreement(some, pose_sum)
            if start_logits is not None:
                logits += start_logits
            c = torch.softmax(logits, dim=axis, out=couplings[t - 1, block])
            totals[t, block] = _weighted_sum(c, some)
            pose = squash(totals[t, block])
        poses[block] = pose
    return poses, couplings, totals, votes


@library.custom_op("capszoo::route_votes_backward", mutates_args=())
def _route_votes_backward(
    x: Tensor,
    weight: Tensor,
    start: Optional[Tensor],
    couplings: Tensor,
    totals: Tensor,
    votes: Tensor,
    axis: int,
    grad_poses: Optional[Tensor],
    grad_couplings: Optional[Tensor],
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of children, transforms and first logits (zeros where absent)."""
    start_logits = None if start is None else upcast_half(start)
    grad_x, grad_weight = x.new_empty(x.shape), totals.new_zeros(weight.shape)
    grad_start = totals.new_zeros(couplings.shape[2:])
    room, stored = Blocks(x, weight, totals.shape[2]), len(votes) > 0
    everything = x.new_empty(x.shape[1], len(x), weight.shape[2]) if stored else None  # [i, b, j*e]

    def accumulate(images: slice, grad_votes: Tensor) -> None:
        grad_x[images] = torch.bmm(grad_votes, weight.transpose(1, 2)).transpose(0, 1)
        factors = x[images].permute(1, 2, 0), grad_votes
        if grad_weight.dtype == x.dtype:
            grad_weight.baddbmm_(*factors)
        else:
            grad_weight.add_(torch.bmm(*factors))

    for block in room.slices:
        some = votes[block] if stored else room.votes(block)
        of_poses = None if grad_poses is None else grad_poses[block]
        of_couplings = None if grad_couplings is None else grad_couplings[:, block]
        saved = start_logits, couplings[:, block], totals[:, block]
        grads = _vote_gradients(some, *saved, axis, of_poses, of_couplings, grad_start)
        into = room.product(block) if everything is None else everything[:, block]
        into.unflatten(2, (room.out_caps, -1)).copy_(grads.permute(2, 0, 1, 3))
        if everything is None:
            accumulate(block, into)
    if everything is not None:
        accumulate(slice(None), everything)
    return grad_x, grad_weight.to(weight.dtype), grad_start if start is None else grad_start.to(start.dtype)


def _vote_gradients(
    votes: Tensor,
    start: Optional[Tensor],
    couplings: Tensor,
    totals: Tensor,
    axis: int,
    grad_poses: Optional[Tensor],
    grad_couplings: Optional[Tensor],
    grad_start: Tensor,
) -> Tensor:
    """Gradient of the votes of a block, of their shape; adds that of the first logits to the last tensor."""
    num_iters, first = len(totals), _first(votes, start, axis)
    poses = [squash(total) for total in totals]
    of_poses = [torch.zeros_like(pose) for pose in poses]
    if grad_poses is not None:
        of_poses[-1] += grad_poses
    left, right = [], []  # ∂û_ij = Σ left_ij right_j
    for t in range(num_iters - 1, 0, -1):
        c, of_total = couplings[t - 1], _through_squash(of_poses[t], totals[t])
        of_c = _agreement(votes, of_total)
        if grad_couplings is not None:
            of_c += grad_couplings[t - 1]
        of_logits = of_c.sub_((of_c * c).sum(dim=axis, keepdim=True)).mul_(c)
        of_sum = _weighted_sum(of_logits, votes)
        for k in range(t):
            of_poses[k] += of_sum
        left += [c, of_logits]
        right += [of_total, torch.stack(poses[:t]).sum(dim=0)]
        if start is not None:
            grad_start += of_logits.sum(dim=0)
    of_total = _through_squash(of_poses[0], totals[0])
    if start is not None:
        c, of_c = first[0], _agreement(votes, of_total).sum(dim=0)
        grad_start += c * (of_c - (of_c * c).sum(dim=axis - 1, keepdim=True))
    left.append(first.expand_as(left[0]))
    right.append(of_total)
    columns, rows = torch.stack(left, dim=2).flatten(0, 1), torch.stack(right, dim=2).flatten(0, 1)
    return torch.bmm(columns.transpose(1, 2), rows).view_as(votes)


def _through_squash(grad: Tensor, total: Tensor) -> Tensor:
    return squash_gradient(grad, total, -1, squared_lengths(total, -1))


@route_votes.register_fake
def _(
    x: Tensor, weight: Tensor, start: Optional[Tensor], out_caps: int, num_iters: int, axis: int
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    return _results(x, weight, out_caps, num_iters)


@_route_votes_backward.register_fake
def _(
    x: Tensor, weight: Tensor, start: Optional[Tensor], couplings: Tensor, *rest: Any
) -> Tuple[Tensor, ...]:
    starts = couplings.new_empty(couplings.shape[2:]) if start is None else start.new_empty(start.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), starts


def _keep(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1:])
    ctx.set_materialize_grads(False)
    ctx.axis = inputs[5]


def _backward(ctx: Any, *gradients: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing allows no second time
    start = saved[2]
    grads = _route_votes_backward(*saved, ctx.axis, gradients[0], gradients[1])
    return grads[0], grads[1], None if start is None else grads[2], None, None, None


route_votes.register_autograd(_backward, setup_context=_keep)
refuse_second_gradient(_route_votes_backward)


@count_as_reference(route_votes)
def _multiply_adds(x: Any, weight: Any, start: Any, out_caps: int, num_iters: int, axis: int) -> int:
    later = 2 * (num_iters - 1) + (start is not None)  # agreements and weighted sums
    return x[0] * x[1] * weight[2] * (x[2] + later)


@count_as_reference(backward=_route_votes_backward)
def _multiply_adds_backward(x: Any, weight: Any, start: Any, couplings: Any, *rest: Any) -> int:
    return _multiply_adds(x, weight, start, 0, couplings[0] + 1, 0)


def _results(
    x: Tensor, weight: Tensor, out_caps: int, num_iters: int
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised poses, couplings, sums and votes."""
    dtype = wide_type(x.dtype)
    (b, i, _), e = x.shape, weight.shape[2] // out_caps
    stored = weight.numel() > TUNING.dynamic_block_votes
    return (
        x.new_empty(b, out_caps, e, dtype=dtype),
        x.new_empty(num_iters - 1, b, out_caps, i, dtype=dtype),
        x.new_empty(num_iters, b, out_caps, e, dtype=dtype),
        x.new_empty(b if stored else 0, out_caps, i, e, dtype=dtype),
    )


def _first(votes: Tensor, start: Optional[Tensor], axis: int) -> Tensor:
    """Couplings of the first iteration, ``[1, j, i]`` or ``[1, 1, 1]``."""
    if start is None:
        return votes.new_full((1, 1, 1), 1.0 / votes.shape[axis])
    return torch.softmax(start, dim=axis - 1).unsqueeze(0)


def _weighted_sum(couplings: Tensor, votes: Tensor) -> Tensor:
    """``Σ_i c_ij û_ij``: ``[b, j, e]``."""
    b, j, i, e = votes.shape
    return torch.bmm(couplings.expand(b, j, i).reshape(b * j, 1, i), votes.view(b * j, i, e)).view(b, j, e)


def _agreement(votes: Tensor, poses: Tensor) -> Tensor:
    """``<û_ij, v_j>``: ``[b, j, i]``."""
    b, j, i, e = votes.shape
    return torch.bmm(votes.view(b * j, i, e), poses.reshape(b * j, e, 1)).view(b, j, i)
