"""Homogeneous vector capsules, naive: Byerly et al. 2020, capsule by capsule and number by number."""

from __future__ import annotations

import torch
from torch import Tensor


def normalised(
    values: list[Tensor], statistics: tuple[Tensor, Tensor] | None, epsilon: float
) -> list[Tensor]:
    """Numbers of all images and classes for one dimension, with their own statistics or given ones."""
    if statistics is None:
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
    else:
        mean, variance = statistics
    return [(value - mean) / torch.sqrt(variance + epsilon) for value in values]


def class_capsules(
    maps: Tensor, weight: Tensor, bias: Tensor, statistics: tuple[Tensor, Tensor] | None, epsilon: float
) -> Tensor:
    """One branch.

    Args:
        maps: ``[b, d, h, w]``; a child is the channel vector at a position.
        weight: ``[n, i, d]``, children in the order of rows.
        bias: ``[d]``.
        statistics: mean and variance ``[d]`` of each dimension; None takes those of the images and classes.
        epsilon: of the norm.

    Returns:
        ``[b, n, d]``.
    """
    batch, dims, rows, columns = maps.shape
    classes = weight.shape[0]
    capsules = [[[torch.zeros(())] * dims for _ in range(classes)] for _ in range(batch)]
    for d in range(dims):
        sums = []
        for image in range(batch):
            for n in range(classes):
                s = torch.zeros((), dtype=maps.dtype)
                for row in range(rows):
                    for column in range(columns):
                        s = s + maps[image, d, row, column] * weight[n, row * columns + column, d]
                sums.append(s)
        one = None if statistics is None else (statistics[0][d], statistics[1][d])
        for k, value in enumerate(normalised(sums, one, epsilon)):
            capsules[k // classes][k % classes][d] = torch.clamp(value + bias[d], min=0)
    return torch.stack([torch.stack([torch.stack(pose) for pose in image]) for image in capsules])


def merged(
    branches: list[Tensor],
    branch_weight: Tensor,
    bias: Tensor,
    statistics: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> Tensor:
    """Class capsules of the branches, each ``[b, n, d]``, to scores ``[b, n]``; no length is below 1e-6."""
    batch, classes = branches[0].shape[:2]
    scores = [[torch.zeros(())] * classes for _ in range(batch)]
    for k, capsules in enumerate(branches):
        lengths = []
        for image in range(batch):
            for n in range(classes):
                length = torch.sqrt(torch.clamp(torch.sum(capsules[image, n] ** 2), min=1e-12))
                lengths.append(length * branch_weight[k])
        one = None if statistics is None else (statistics[0][k], statistics[1][k])
        for place, value in enumerate(normalised(lengths, one, epsilon)):
            image, n = divmod(place, classes)
            scores[image][n] = scores[image][n] + value + bias[k]
    return torch.stack([torch.stack(row) for row in scores])
