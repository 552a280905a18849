"""Self-attention routing, naive: Efficient-CapsNet's matrices, capsule by capsule."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .squash import exponential_squash_vector


def route_image(votes: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Route one image.

    Args:
        votes: ``[i, j, e]``.
        bias: ``[i, j]``.

    Returns:
        ``[j, e]`` and the couplings ``[i, j]``.
    """
    children, parents, e = votes.shape
    row_sums = []  # of A_j, by parent
    for j in range(parents):
        attention = torch.stack(
            [
                torch.stack([torch.dot(votes[i, j], votes[k, j]) / math.sqrt(e) for k in range(children)])
                for i in range(children)
            ]
        )
        row_sums.append([sum(attention[i, k] for k in range(children)) for i in range(children)])
    couplings = torch.stack(
        [
            torch.stack(
                [
                    torch.exp(row_sums[j][i]) / sum(torch.exp(row_sums[m][i]) for m in range(parents))
                    for j in range(parents)
                ]
            )
            for i in range(children)
        ]
    )
    poses = []
    for j in range(parents):
        s = torch.zeros_like(votes[0, 0])
        for i in range(children):
            s = s + (couplings[i, j] + bias[i, j]) * votes[i, j]
        poses.append(exponential_squash_vector(s))
    return torch.stack(poses), couplings


def route(votes: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of votes ``[b, i, j, e]``, image by image; returns ``[b, j, e]`` and ``[b, i, j]``."""
    results = [route_image(image, bias) for image in votes]
    return torch.stack([r[0] for r in results]), torch.stack([r[1] for r in results])
