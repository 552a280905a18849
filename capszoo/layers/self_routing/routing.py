"""Self-routing, step by step: equations of section 3 of the paper. Letters as in :mod:`capszoo.layers.self_routing`."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._precision import upcast_half

torch.fx.wrap("upcast_half")

#: added to both denominators
EPS = 1e-7


def choose_parents(
    poses: Tensor, activations: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """The part of :func:`self_routing` that needs no votes.

    Returns:
        activations of the parents ``[b, j]``; their mass ``Σ_i c_ij a_i``, ``[b, j]``; the shares ``c_ij a_i`` and the
        couplings, ``[b, j, i]``. All are float32 for half precision.
    """
    logits = torch.bmm(poses.transpose(0, 1), weight) + bias.unsqueeze(1)  # [i, b, j]
    couplings = torch.softmax(upcast_half(logits), dim=2).permute(1, 2, 0)  # [b, j, i]
    active = upcast_half(activations)
    share = couplings * active.unsqueeze(1)  # [b, j, i]
    mass = share.sum(dim=2)  # [b, j]
    return mass / (active.sum(dim=1, keepdim=True) + eps), mass, share, couplings


def self_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    bias: Tensor,
    pose_weight: Optional[Tensor] = None,
    eps: float = EPS,
) -> Tuple[Tensor, Optional[Tensor], Tensor]:
    """Route children to parents by the children's own poses.

    Args:
        poses: ``[b, i, d]``.
        activations: ``[b, i]``, not negative.
        weight: ``[i, d, j]``, W_route.
        bias: ``[i, j]``.
        pose_weight: ``[i, d, j * e]``, W_pose; None if the parents need no poses.
        eps: added to both denominators.

    Returns:
        activations ``[b, j]``, which sum to 1; poses ``[b, j, e]``, or None without ``pose_weight``; and the
        couplings ``[b, j, i]``, which sum to 1 over the parents.
    """
    parents, mass, share, couplings = choose_parents(poses, activations, weight, bias, eps)
    parent_poses: Optional[Tensor] = None
    if pose_weight is not None:
        votes = upcast_half(torch.bmm(poses.transpose(0, 1), pose_weight))  # [i, b, j*e]
        votes = votes.reshape(weight.shape[0], -1, weight.shape[2], pose_weight.shape[2] // weight.shape[2])
        total = torch.matmul(share.unsqueeze(2), votes.permute(1, 2, 0, 3)).squeeze(2)  # [b, j, e]
        parent_poses = (total / (mass.unsqueeze(2) + eps)).to(poses.dtype)
    return parents.to(poses.dtype), parent_poses, couplings
