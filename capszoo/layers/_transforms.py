"""Layouts of the pose transform weights, shared by the routings."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["block_diagonal"]


def block_diagonal(weight: Tensor, pose_size: int) -> Tensor:
    """Transforms of matrix poses as block-diagonal matrices on flattened poses: ``[i, j, q, r] -> [i, p*q, j*p*r]``.

    ``pose.flatten() @ block_diagonal(weight)[i]`` is ``pose @ weight[i, j]`` for all parents j, flattened.
    Multiplying by the zeros costs less than the inefficiency of separate 4x4 products.

    Args:
        weight: ``[i, j, q, r]``.
        pose_size: rows p of a pose.
    """
    w = weight.permute(0, 2, 1, 3).unsqueeze(3)  # [i, q, j, 1, r]
    # row p of the child's pose reaches row p of the vote only
    rows = [F.pad(w, [0, 0, p, pose_size - 1 - p]) for p in range(pose_size)]  # each [i, q, j, p, r]
    return torch.stack(rows, dim=1).flatten(3).flatten(1, 2)
