"""The steps of capConv: grouped convolutions, squash, the combination of the branches; capFC.

Letters as in :mod:`capszoo.layers.capconv`.
"""

import math
from typing import Optional

import torch
from torch import Tensor, nn

from .._layout import split_axis
from .._modules import at_least
from ..squash import squash

torch.fx.wrap("split_axis")


def squash_groups(x: Tensor, groups: int) -> Tensor:
    """Squash every capsule of a feature map ``[b, g*d, h, w]`` (channel = group * d + dimension)."""
    return squash(split_axis(x, 1, [groups, x.shape[1] // groups]), 2).flatten(1, 2)


class SquashGroups(nn.Module):
    """:func:`squash_groups` as a layer: ``[b, g*d, h, w]`` to the same shape.

    Args:
        groups: capsule channels g.

    Raises:
        ValueError: ``groups`` is below 1.
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        at_least(1, groups=groups)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return squash_groups(x, self.groups)

    def extra_repr(self) -> str:
        return f"groups={self.groups}"


def grouped_pointwise(x: Tensor, weight: Tensor, bias: Optional[Tensor], groups: int) -> Tensor:
    """1x1 grouped convolution of stride 1 as one batched matrix product (several times faster on a CPU).

    Args:
        x: ``[b, g*d, h, w]``.
        weight: ``[g*e, d, 1, 1]``, the layout of ``nn.Conv2d``.
        bias: ``[g*e]`` or None.
        groups: ``g``.

    Returns:
        ``[b, g*e, h, w]``.
    """
    matrices = weight.unflatten(0, (groups, -1)).flatten(2)  # [g, e, d]
    grid = split_axis(x, 1, [groups, x.shape[1] // groups]).flatten(3)  # [b, g, d, h*w]
    y = torch.matmul(matrices, grid).flatten(1, 2)  # [b, g*e, h*w]
    if bias is not None:
        y = y + bias.to(y.dtype)[:, None]  # under autocast y is in half precision, and stays so
    return split_axis(y, 2, [x.shape[2], x.shape[3]])


def capconv_combine(master: Tensor, aide: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Master and aide activations weighted by their coefficients (Eq. 6): ``alpha * master + beta * aide``.

    Args:
        master, aide: ``[b, g*d, h, w]``.
        alpha, beta: one map per capsule channel, ``[b, g, h, w]``.

    Returns:
        ``[b, g*d, h, w]``.
    """
    groups = alpha.shape[1]
    m = split_axis(master, 1, [groups, master.shape[1] // groups])  # [b, g, d, h, w]
    a = split_axis(aide, 1, [groups, aide.shape[1] // groups])
    return (m * alpha.unsqueeze(2) + a * beta.unsqueeze(2)).flatten(1, 2)


def cap_fc(x: Tensor, weight: Tensor) -> Tensor:
    """Fully connected layer per pose dimension, then squash: grid capsules to class capsules.

    Args:
        x: ``[b, g*d, h, w]``.
        weight: ``[d, g*h*w, n]``, one matrix for each of the d dimensions; children ordered (group, row, column).

    Returns:
        Class capsules ``[b, n, d]``.
    """
    d = weight.shape[0]
    children = split_axis(x, 1, [x.shape[1] // d, d]).permute(2, 0, 1, 3, 4).flatten(2)  # [d, b, g*h*w]
    return squash(torch.bmm(children, weight).permute(1, 2, 0), -1)  # [b, n, d]


def groups_together(maps: int, groups: int) -> int:
    """How many of ``groups`` groups, with ``maps`` output maps in all, to merge into one: enough for 8 maps.

    On a CPU a convolution computes 8 or 16 output channels at a time; one or two maps leave most of a vector empty.
    """
    return math.gcd(groups, max(1, 8 * groups // maps))


def merge_groups(weight: Tensor, groups: int, together: int) -> Tensor:
    """Weights of a grouped convolution for one with fewer groups, with zeros between channels of different groups.

    Args:
        weight: ``[g*o, d, k, k]``, of a convolution in ``g`` groups.
        groups: number of groups ``g``.
        together: number of groups merged into one; divides ``g``.

    Returns:
        ``[g*o, together*d, k, k]``, weights of the same function in ``g / together`` groups.
    """
    chans, height, width = weight.shape[1], weight.shape[2], weight.shape[3]
    grouped = weight.flatten(1).unflatten(0, (groups // together, together, -1))  # [g/t, t, o, d*k*k]
    own = torch.eye(together, dtype=weight.dtype, device=weight.device).view(together, 1, together, 1)
    return (grouped.unsqueeze(3) * own).flatten(0, 2).reshape(-1, together * chans, height, width)
