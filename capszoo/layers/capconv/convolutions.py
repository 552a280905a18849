"""Convolutions of EncapNet; letters as in :mod:`capszoo.layers.capconv`."""

from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .routing import grouped_pointwise, groups_together, merge_groups


class XavierConv2d(nn.Conv2d):
    """A convolution initialised as in the release (Xavier, normal), with a constant bias.

    ``reset_parameters`` replaces PyTorch's, so that weights are drawn once: large networks are built in half the time.
    """

    bias_start = 0.0
    #: linear in its own weight and bias, and so are its subclasses (see capszoo.export.unroll)
    folds_batchnorm = True

    def reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.weight)
        if self.bias is not None:
            nn.init.constant_(self.bias, self.bias_start)


class CoefficientConv2d(XavierConv2d):
    """The 3x3 convolution that gives one map (or two) per capsule channel; its bias starts at one.

    A few capsule channels are convolved as one group, with zeros between their weights (:func:`merge_groups`). That
    multiplies this convolution's arithmetic, a hundredth of the layer's, but halves its time.
    """

    bias_start = 1.0
    graph_weight: Optional[Tensor]

    def __init__(self, chans: int, maps: int, groups: int, bias: bool) -> None:
        super().__init__(chans, maps, 3, 1, 1, groups=groups, bias=bias)
        self.together = groups_together(maps, groups)
        self.register_buffer("graph_weight", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.graph_weight
        if weight is None:
            weight = merge_groups(self.weight, self.groups, self.together)
        return F.conv2d(x, weight, self.bias, 1, 1, 1, self.groups // self.together)

    @torch.jit.unused
    def prepare_for_export(self) -> None:
        """Store the merged weights as a constant."""
        self.graph_weight = merge_groups(self.weight.detach(), self.groups, self.together)


class CapGroupConv2d(XavierConv2d):
    """A biased convolution grouped by capsule channel; 1x1 of stride 1 runs as a matrix product."""

    def __init__(self, in_chans: int, out_chans: int, kernel_size: int, stride: int, groups: int) -> None:
        super().__init__(in_chans, out_chans, kernel_size, stride, kernel_size // 2, groups=groups)
        self.pointwise = kernel_size == 1 and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        if self.pointwise:
            return grouped_pointwise(x, self.weight, self.bias, self.groups)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
