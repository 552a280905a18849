"""Engine of self-routing besides the reference: the parents' poses without votes, on a CPU.

The sum ``Σ_i c_ij a_i W_ij u_i`` is one matrix product for each parent: all children, each multiplied by its share of
that parent and concatenated, times all transforms to that parent. Votes have ``j * e`` elements for each child, the
weighted children of one parent ``d``. They are formed for some rows at a time and recomputed in the backward pass.

It is an operator of PyTorch, so that torch.compile does not unroll the loops. Letters as in
:mod:`capszoo.layers.self_routing`. In its tensors with an axis ``d`` for each child, the children are the last axis:
products with their shares and sums over ``d`` then run along memory.
"""

from typing import Any, List, Tuple

import torch
from torch import Tensor, library

from .._autograd import count_as_reference, new_like, refuse_second_gradient
from ..engine import Call, Engine, Routed
from ..tuning import TUNING
from .routing import EPS, choose_parents


def _rows(poses: Tensor) -> List[slice]:
    """Slices over the batch of ``[b, d, i]``, so that the weighted children of one parent fit the cache."""
    rows = max(1, TUNING.self_routing_block_elements // max(1, poses[0].numel()))
    return [slice(start, start + rows) for start in range(0, len(poses), rows)]


@library.custom_op("capszoo::weighted_sum_of_votes", mutates_args=())
def weighted_sum_of_votes(poses: Tensor, share: Tensor, weight: Tensor) -> Tensor:
    """``Σ_i s_ij W_ij u_i`` without votes.

    Args:
        poses: children ``[b, d, i]``, contiguous, at least one.
        share: factors ``[b, j, i]``; float32 for half precision, else of the same type.
        weight: ``[j, e, d * i]``, of the type of ``poses``.

    Returns:
        ``[b, j, e]``, of the type of ``share``.
    """
    total = share.new_empty(share.shape[0], share.shape[1], weight.shape[1])
    with torch.autocast(poses.device.type, enabled=False):
        for rows in _rows(poses):
            part, factors = poses[rows], share[rows].to(poses.dtype)
            weighted = part.new_empty(part.shape)
            for j, transforms in enumerate(weight):
                torch.mul(part, factors[:, j].unsqueeze(1), out=weighted)
                total[rows, j] = weighted.flatten(1) @ transforms.t()
    return total


@weighted_sum_of_votes.register_fake
def _(poses: Tensor, share: Tensor, weight: Tensor) -> Tensor:
    return share.new_empty(share.shape[0], share.shape[1], weight.shape[1])


@library.custom_op("capszoo::weighted_sum_of_votes_backward", mutates_args=())
def weighted_sum_of_votes_backward(
    grad: Tensor, poses: Tensor, share: Tensor, weight: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of poses, share and weight."""
    grad_poses = share.new_zeros(poses.shape)
    grad_share = torch.empty_like(share, memory_format=torch.contiguous_format)
    grad_weight = share.new_zeros(weight.shape)
    with torch.autocast(poses.device.type, enabled=False):
        for rows in _rows(poses):
            part, factors, incoming = poses[rows], share[rows], grad[rows].to(poses.dtype)
            weighted, by_weighted = part.new_empty(part.shape), part.new_empty(part.shape)
            for j, transforms in enumerate(weight):
                own = factors[:, j].unsqueeze(1)  # [b, 1, i]
                torch.mul(part, own.to(part.dtype), out=weighted)
                grad_weight[j] += incoming[:, j].t() @ weighted.flatten(1)
                torch.mm(incoming[:, j], transforms, out=by_weighted.flatten(1))
                grad_poses[rows].addcmul_(by_weighted.to(factors.dtype), own)
                grad_share[rows, j] = by_weighted.mul_(part).sum(dim=1)
    return grad_poses.to(poses.dtype), grad_share, grad_weight.to(weight.dtype)


@weighted_sum_of_votes_backward.register_fake
def _(grad: Tensor, poses: Tensor, share: Tensor, weight: Tensor) -> Tuple[Tensor, ...]:
    return new_like(poses, share, weight)


def _keep(ctx: Any, inputs: Tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    return weighted_sum_of_votes_backward(grad, *ctx.saved_tensors)


weighted_sum_of_votes.register_autograd(_backward, setup_context=_keep)
refuse_second_gradient(weighted_sum_of_votes_backward)


@count_as_reference(weighted_sum_of_votes)
def _multiply_adds(poses: Any, share: Any, weight: Any) -> int:
    return share[0] * share[2] * weight[0] * weight[1] * (poses[1] + 1)  # the votes, their weighted sum


@count_as_reference(backward=weighted_sum_of_votes_backward)
def _multiply_adds_backward(grad: Any, poses: Any, share: Any, weight: Any) -> int:
    return _multiply_adds(poses, share, weight)


class VoteFree(Engine):
    """On a CPU: one matrix product of the weighted children for each parent, no votes."""

    name = "vote_free"
    evidence = "Self-routing: vote_free"
    devices = ("cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if reason := super().refusal(layer, call, forced):
            return reason
        if layer.pose_weight is None:
            return "needs parents with poses: others get no votes"
        if not forced and call.votes < TUNING.self_routing_vote_free_min_votes:
            return "needs votes of at least TUNING.self_routing_vote_free_min_votes elements"
        return ""

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        poses, activations = inputs
        active, mass, share, couplings = choose_parents(poses, activations, layer.weight, layer.bias)
        weight = layer.pose_weight.to(call.dtype).unflatten(2, [call.parents, -1])  # [i, d, j, e]
        weight = weight.permute(2, 3, 1, 0).reshape(call.parents, call.parent_dim, -1)
        children = poses.to(call.dtype).transpose(1, 2).contiguous()
        total = weighted_sum_of_votes(children, share.contiguous(), weight)
        parents = (total / (mass.unsqueeze(2) + EPS)).to(poses.dtype)
        return Routed([parents], [active.to(poses.dtype)], couplings if call.couplings else None)
