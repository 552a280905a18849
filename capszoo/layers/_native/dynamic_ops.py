"""The operator ``capszoo::dynamic_in_lanes``: dynamic routing on a CPU, in C++, storing no votes.

Symbols as in :mod:`capszoo.layers.dynamic`. Letters: n routings · g groups of l lanes, in
which the last one is padded · i children · j parents · d, e their pose dimensions · t iterations.
"""

import ctypes
from collections.abc import Iterator
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor, library

from .._autograd import count_as_reference, new_like, refuse_second_gradient
from ..squash import squared_lengths, squash, squash_gradient
from .build import load
from .call import arguments, in_threads

#: Largest pose dimension. The C++ code is compiled for the dimensions of a layer; larger poses are not tested.
MAX_DIM = 64

_CHILDREN = 4  # of a block: CHILDREN in dynamic_pass.cpp


def dynamic_sizes(child_dim: int, parent_dim: int) -> Dict[str, int]:
    """Macros of dynamic_pass.cpp."""
    return {"D": child_dim, "E": parent_dim}


def _code(x: Tensor, first: Tensor) -> ctypes.CDLL:
    return load("dynamic_pass", x.dtype == torch.float64, **dynamic_sizes(x.shape[2], first.shape[2]))


@library.custom_op("capszoo::dynamic_in_lanes", mutates_args=())
def dynamic_in_lanes(
    x: Tensor, weight: Tensor, first: Tensor, num_iters: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """The iterations after the first one of :func:`.dynamic.routing.dynamic_routing`, with softmax over the parents.

    Args:
        x: children ``[n, i, d]``, float32 or float64.
        weight: ``[i, d, j * e]``.
        first: sums of votes of the first iteration, with even couplings, ``[g, j, e, l]``. Its gradient is included in
            those of ``x`` and ``weight``.
        num_iters: iterations, at least 2.

    Returns:
        poses ``[g, j, e, l]``, squashed, and the couplings of the iterations after the first, ``[t - 1, g, i, j, l]``.
        For the gradient: the sums of votes of every iteration, ``[t, g, j, e, l]``.
    """
    groups, parents = first.shape[:2]
    x, weight = x.contiguous(), _in_blocks(weight, parents)
    poses, couplings, totals = _results(x, first, num_iters)
    function = _code(x, first).dynamic_pass
    totals[0] = first
    pose_sum = squash(totals[0], 2)
    for t in range(1, num_iters):

        def compute(
            _: int, first: int, last: int, out: Tuple[Tensor, Tensor] = (totals[t], couplings[t - 1])
        ) -> None:
            function(*arguments(x, weight, pose_sum, first, last, *x.shape[:2], parents, *out))  # noqa: B023

        in_threads(compute, groups)
        poses = squash(totals[t], 2)
        pose_sum = pose_sum + poses
    return poses, couplings, totals


@library.custom_op("capszoo::dynamic_in_lanes_backward", mutates_args=())
def _dynamic_in_lanes_backward(
    x: Tensor,
    weight: Tensor,
    couplings: Tensor,
    totals: Tensor,
    grad_poses: Optional[Tensor],
    grad_couplings: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:
    """Gradients of children and transforms; see :mod:`capszoo.layers.dynamic.blocked`."""
    (routings, children), (num_iters, groups, parents) = x.shape[:2], totals.shape[:3]
    x, blocks = x.contiguous(), _in_blocks(weight, parents)
    poses = squash(totals, 3)
    of_poses = [torch.zeros_like(pose) for pose in poses]
    if grad_poses is not None:
        of_poses[-1] += grad_poses
    code = _code(x, totals[0])
    of_logits = torch.empty_like(couplings)
    # the votes' gradient, [j, g, l, terms, e]: one term alike for all children, two with factors for each iteration
    terms = totals.new_empty(parents, groups, totals.shape[4], 2 * num_iters - 1, totals.shape[3])
    for t in range(num_iters - 1, 0, -1):
        of_total, of_sum = _through_squash(of_poses[t], totals[t]), torch.empty_like(totals[t])
        saved = (
            couplings[t - 1],
            of_total,
            None if grad_couplings is None else grad_couplings[t - 1].contiguous(),
        )

        def compute(
            _: int, first: int, last: int, saved: Any = saved, out: Any = (of_logits[t - 1], of_sum)
        ) -> None:
            sizes = (first, last, routings, children, parents)
            code.dynamic_pass_backward(*arguments(x, blocks, *saved, *sizes, *out))

        in_threads(compute, groups)
        for k in range(t):
            of_poses[k] += of_sum
        terms[..., 2 * t - 1, :] = of_total.permute(1, 0, 3, 2)
        terms[..., 2 * t, :] = poses[:t].sum(dim=0).permute(1, 0, 3, 2)
    terms[..., 0, :] = _through_squash(of_poses[0], totals[0]).permute(1, 0, 3, 2) / parents
    grad_x, grad_blocks = torch.empty_like(x), torch.zeros_like(blocks)

    def accumulate(_: int, first: int, last: int) -> None:
        sizes = (first, last, routings, children, parents, num_iters - 1, groups)
        code.dynamic_grads(*arguments(x, blocks, couplings, of_logits, terms, *sizes, grad_x, grad_blocks))

    in_threads(accumulate, -(-children // _CHILDREN))
    return grad_x, _out_of_blocks(grad_blocks, weight, parents)


def _in_blocks(weight: Tensor, parents: int) -> Tensor:
    """Transforms ``[i, d, j * e]`` in the order in which they are read: ``[j, i, d, e]`` for each block of children."""
    blocks = weight.new_empty(weight.numel())
    for part, block in _parts(weight, blocks, parents):
        block.copy_(part)
    return blocks


def _out_of_blocks(blocks: Tensor, like: Tensor, parents: int) -> Tensor:
    """The inverse of :func:`_in_blocks`."""
    weight = blocks.new_empty(like.shape)
    for part, block in _parts(weight, blocks, parents):
        part.copy_(block)
    return weight


def _parts(weight: Tensor, blocks: Tensor, parents: int) -> Iterator[Tuple[Tensor, Tensor]]:
    """Views ``[block, j, i, d, e]`` of transforms in both orders: of whole blocks of children, and of blocks of one."""
    children, dim, width = weight.shape
    whole = children // _CHILDREN * _CHILDREN
    for first, last, size in ((0, whole, _CHILDREN), (whole, children, 1)):
        part = weight[first:last].view(-1, size, dim, parents, width // parents).permute(0, 3, 1, 2, 4)
        yield part, blocks[first * dim * width : last * dim * width].view(part.shape)


def _through_squash(grad: Tensor, total: Tensor) -> Tensor:
    return squash_gradient(grad, total, 2, squared_lengths(total, 2)).contiguous()


@dynamic_in_lanes.register_fake
def _(x: Tensor, weight: Tensor, first: Tensor, num_iters: int) -> Tuple[Tensor, Tensor, Tensor]:
    return _results(x, first, num_iters)


@_dynamic_in_lanes_backward.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tuple[Tensor, ...]:
    return new_like(x, weight)


def _results(x: Tensor, first: Tensor, num_iters: int) -> Tuple[Tensor, Tensor, Tensor]:
    """Uninitialised poses, couplings and sums."""
    groups, parents, _, lanes = first.shape
    couplings = x.new_empty(num_iters - 1, groups, x.shape[1], parents, lanes)
    return first.new_empty(first.shape), couplings, first.new_empty(num_iters, *first.shape)


def _keep(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *gradients: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    grad_x, grad_weight = _dynamic_in_lanes_backward(*ctx.saved_tensors, gradients[0], gradients[1])
    return grad_x, grad_weight, None, None


dynamic_in_lanes.register_autograd(_backward, setup_context=_keep)
refuse_second_gradient(_dynamic_in_lanes_backward)


@count_as_reference(dynamic_in_lanes)
def _multiply_adds(x: Any, weight: Any, first: Any, num_iters: int) -> int:
    return (
        2 * (num_iters - 1) * x[0] * x[1] * weight[2]
    )  # agreement and weighted sum; `first` counts as the votes


@count_as_reference(backward=_dynamic_in_lanes_backward)
def _multiply_adds_backward(x: Any, weight: Any, couplings: Any, *rest: Any) -> int:
    return x[0] * x[1] * weight[2] * (x[2] + 2 * couplings[0])
