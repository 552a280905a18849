"""Primary capsules, naive: number ``dim`` of capsule ``cap`` at a grid position is channel ``cap * d + dim`` there."""

from __future__ import annotations

import torch
from torch import Tensor


def capsules_of(features: Tensor, pose_dim: int) -> Tensor:
    """``[b, types * d, h, w]`` to ``[b, h, w, types, d]``, one number at a time."""
    b, channels, h, w = features.shape
    types = channels // pose_dim
    out = features.new_zeros(b, h, w, types, pose_dim)
    for n in range(b):
        for row in range(h):
            for col in range(w):
                for cap in range(types):
                    for dim in range(pose_dim):
                        out[n, row, col, cap, dim] = features[n, cap * pose_dim + dim, row, col]
    return torch.as_tensor(out)
