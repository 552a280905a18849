"""Matrix products with votes, which may be kept in a buffer that is used again.

Letters as in :mod:`capszoo.layers.em`.
"""

from typing import Any, List, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["VoteBuffer", "project", "weighted_sum"]


class VoteBuffer:
    """Votes (or their squares) in a buffer, and their gradient as the outer products that it is the sum of.

    ``values`` is ``[bj, i, e]``; a pair in ``terms`` stands for the gradient ``pair[0] * pair[1]``, of ``[bj, i, 1]``
    and ``[bj, 1, e]``.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.terms: List[Tuple[Tensor, Tensor]] = []


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, votes: VoteBuffer) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.votes = votes
        return torch.bmm(weights, votes.values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        ctx.votes.terms.append((weights.transpose(1, 2), grad))
        return torch.bmm(ctx.votes.values, grad.transpose(1, 2)).transpose(1, 2), None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, votes: VoteBuffer, directions: Tensor) -> Tensor:
        ctx.save_for_backward(directions)
        ctx.votes = votes
        return torch.bmm(votes.values, directions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[None, Tensor]:
        (directions,) = ctx.saved_tensors
        ctx.votes.terms.append((grad, directions.transpose(1, 2)))
        return None, torch.bmm(grad.transpose(1, 2), ctx.votes.values).transpose(1, 2)


def weighted_sum(weights: Tensor, votes: Tensor) -> Tensor:
    """Sums over the children: ``[bj, 1, i]`` and ``[bj, i, e]`` to ``[bj, 1, e]``."""
    if torch.jit.is_scripting():
        return torch.bmm(weights, votes)
    else:  # noqa: RET505 (as in ConvEM)
        if isinstance(votes, VoteBuffer):
            return _WeightedSum.apply(weights, votes)
        return torch.bmm(weights, votes)


def project(votes: Tensor, directions: Tensor) -> Tensor:
    """Sums over the pose: ``[bj, i, e]`` and ``[bj, e, 1]`` to ``[bj, i, 1]``."""
    if torch.jit.is_scripting():
        return torch.bmm(votes, directions)
    else:  # noqa: RET505 (as in ConvEM)
        if isinstance(votes, VoteBuffer):
            return _Project.apply(votes, directions)
        return torch.bmm(votes, directions)
