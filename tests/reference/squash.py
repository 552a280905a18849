"""Squash, naive: Sabour et al. 2017, Eq. 1, and that of Efficient-CapsNet."""

from __future__ import annotations

import torch
from torch import Tensor


def squash_vector(s: Tensor) -> Tensor:
    """One capsule ``[d]``: ``|s|^2 / (1 + |s|^2) * s / |s|``; the zero capsule stays zero."""
    length = torch.sqrt(torch.sum(s * s))
    if length == 0:
        return torch.zeros_like(s)
    return length**2 / (1 + length**2) * (s / length)


def squash(s: Tensor) -> Tensor:
    """Capsules ``[..., d]``, one by one."""
    flat = s.reshape(-1, s.shape[-1])
    return torch.stack([squash_vector(row) for row in flat]).reshape(s.shape)


def exponential_squash_vector(s: Tensor) -> Tensor:
    """One capsule ``[d]``: ``(1 - exp(-|s|)) * s / |s|``; the zero capsule stays zero."""
    length = torch.sqrt(torch.sum(s * s))
    if length == 0:
        return torch.zeros_like(s)
    return (1 - torch.exp(-length)) * (s / length)
