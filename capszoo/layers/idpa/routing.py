"""Procedure 1 of the paper, line by line: the reference."""

import math
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._precision import upcast_half

torch.fx.wrap("upcast_half")

__all__ = ["agreement_of", "couplings_of", "idpa_routing", "iteration", "normalised", "weighted_sum"]


def agreement_of(votes: Tensor, parents: Tensor) -> Tensor:
    """Dot product of every vote ``[n, j, i, e]`` with its parent ``[n, j, e]``: ``[n, j, i]`` (line 3)."""
    return torch.matmul(votes, parents.unsqueeze(3)).squeeze(3)


def couplings_of(agreement: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax of ``[n, j, i]`` over the parents, in float32 for half precision (line 4)."""
    return upcast_half(agreement).softmax(dim=1).to(dtype)


def weighted_sum(votes: Tensor, weights: Tensor) -> Tensor:
    """Votes ``[n, j, i, e]`` weighted by ``[n, j, i]`` and summed over the children: ``[n, j, e]`` (line 5)."""
    return torch.matmul(weights.unsqueeze(2), votes).squeeze(2)


def iteration(votes: Tensor, parents: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    """One iteration of Procedure 1, without the LayerNorm.

    Args:
        votes: ``[n, j, i, e]``.
        parents: poses of the previous iteration, ``[n, j, e]``.
        scale: of the agreement.

    Returns:
        Sums of votes ``[n, j, e]`` and couplings ``[n, j, i]``, which sum to 1 over ``j``.
    """
    couplings = couplings_of(agreement_of(votes, parents * scale), votes.dtype)
    return weighted_sum(votes, couplings), couplings


def normalised(couplings: Tensor) -> Tensor:
    """Couplings ``[..., j, i]``, normalised for each parent to sum to 1 over the children ``i``."""
    return couplings / couplings.sum(dim=-1, keepdim=True).clamp(min=1e-30)


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
    """Route the votes of one layer with fixed children (Procedure 1, ``num_iters`` times).

    The layers do the same across layers (Procedure 2).

    Args:
        votes: ``[b, j, i, e]``.
        num_iters: iterations, at least 1.
        parents: initial poses, ``[b, j, e]``; zero if None.
        scale_agreement: divide the agreement by sqrt(e).
        norm_weight, norm_bias: affine part of the LayerNorm, ``[e]``.
        layer_norm: False omits the LayerNorm (ablation A).
        eps: of the LayerNorm.

    Returns:
        Poses ``[b, j, e]``, and the couplings of the last iteration ``[b, j, i]``, which sum to 1 over ``j``.

    Raises:
        ValueError: ``num_iters`` is below 1.
    """
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1, not {num_iters}")
    num_parents, e = votes.shape[1], votes.shape[3]
    scale = 1.0 / math.sqrt(e) if scale_agreement else 1.0
    couplings = torch.full_like(votes[..., 0], 1.0 / num_parents)
    poses = parents
    for _ in range(num_iters):
        if poses is None:
            sums = votes.sum(dim=2) / num_parents  # parents at zero: uniform couplings
        else:
            sums, couplings = iteration(votes, poses, scale)  # lines 3 to 5
        poses = F.layer_norm(sums, (e,), norm_weight, norm_bias, eps) if layer_norm else sums  # line 6
    assert poses is not None
    return poses, couplings
