"""Procedure 1 over votes that are kept: the plain form."""

import math
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._precision import upcast_half

torch.fx.wrap("upcast_half")

__all__ = [
    "agreement_of",
    "block_mask",
    "couplings_of",
    "group_size",
    "idpa_routing",
    "normalised",
    "update_of",
]

#: Parents in one block of the masked products; more costs arithmetic, fewer makes the products narrow.
_MAX_GROUP = 16


def group_size(num_parents: int) -> int:
    """Parents per block: the largest divisor up to 16; all of them where that would be a poor one (primes)."""
    if num_parents <= _MAX_GROUP:
        return num_parents
    group = max(g for g in range(1, _MAX_GROUP + 1) if num_parents % g == 0)
    return num_parents if group < 4 and num_parents <= 4 * _MAX_GROUP else group


def block_mask(rows: int, num_parents: int, cols: int, group: int) -> Tensor:
    """``[w, g]``: 1 where a number in a block of votes (width w) belongs to the parent, else 0."""
    mask = torch.eye(group).repeat_interleave(cols, dim=0)  # [g*r, g]
    return mask.repeat(rows, 1) if group == num_parents else mask


def agreement_of(blocks: Tensor, parents: Tensor, mask: Tensor, rows: int, num_parents: int) -> Tensor:
    """Dot product of every vote with its parent (Procedure 1, line 3).

    Args:
        blocks: votes in blocks, ``[n*..., i, w]``.
        parents: ``[n, p, j, r]``.
        mask: ``[w, g]``, from :func:`block_mask`.
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


def update_of(
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


def couplings_of(agreement: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax over the parents, in float32 for half types (Procedure 1, line 4). ``[n, i, j]``"""
    return upcast_half(agreement).softmax(dim=-1).to(dtype)


def normalised(couplings: Tensor) -> Tensor:
    """Couplings ``[..., j, i]`` as each parent's shares in its children, which sum to 1 over ``i``."""
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
            agreement = agreement_of(blocks, (poses * scale).unsqueeze(1), mask, 1, num_parents)  # line 3
            couplings = couplings_of(agreement, votes.dtype)  # line 4
            sums = update_of(blocks, couplings, mask, 1, num_parents, e)  # line 5
        poses = F.layer_norm(sums, (e,), norm_weight, norm_bias, eps) if layer_norm else sums  # line 6
    assert poses is not None
    return poses, couplings.transpose(1, 2)
