"""The losses, naive: one class and one pixel at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def margin(scores: Tensor, present: Tensor, m_plus: float, m_minus: float, down_weight: float) -> Tensor:
    """Sabour et al. 2017, Eq. 4; present [b, n] of zeros and ones."""
    total = scores.new_zeros(())
    for i in range(scores.shape[0]):
        for k in range(scores.shape[1]):
            if present[i, k]:
                total = total + max(scores[i, k] * 0, m_plus - scores[i, k]) ** 2
            else:
                total = total + down_weight * max(scores[i, k] * 0, scores[i, k] - m_minus) ** 2
    return total / scores.shape[0]


def spread(scores: Tensor, target: Tensor, margin: float) -> Tensor:
    """Hinton et al. 2018, Eq. 3."""
    total = scores.new_zeros(())
    for i in range(scores.shape[0]):
        t = int(target[i])
        for k in range(scores.shape[1]):
            if k != t:
                total = total + max(scores[i, k] * 0, margin - (scores[i, t] - scores[i, k])) ** 2
    return total / scores.shape[0]


def cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    total = scores.new_zeros(())
    for i in range(scores.shape[0]):
        total = total - torch.log(torch.exp(scores[i, int(target[i])]) / torch.exp(scores[i]).sum())
    return total / scores.shape[0]


def bce(scores: Tensor, present: Tensor) -> Tensor:
    total = scores.new_zeros(())
    for i in range(scores.shape[0]):
        for k in range(scores.shape[1]):
            p = 1 / (1 + torch.exp(-scores[i, k]))
            total = total - (torch.log(p) if present[i, k] else torch.log(1 - p))
    return total / math.prod(scores.shape)


def reconstruction(made: Tensor, image: Tensor, weight: float) -> Tensor:
    total = made.new_zeros(())
    for i in range(made.shape[0]):
        for a, b in zip(made[i].flatten(), image[i].flatten(), strict=True):
            total = total + (a - b) ** 2
    return weight * total / made.shape[0]
