"""Heads without primary capsules: average, maximum and routing pooling, and a convolution over the whole map."""

from typing import Tuple

import torch
import torch.nn as nn
from torch import Tensor

from capszoo.layers import RoutingPool2d
from capszoo.layers._forward_methods import forward_method
from capszoo.layers._modules import at_least

from .._base import CouplingLayout, Votes
from .._blocks import check_caps_dim, score_parts
from .base import CapsuleHead, ConvNorm, HeadArgs, HeadOutput, register_head


@register_head("avg")
class AverageHead(CapsuleHead):
    """Average pooling and a linear layer: the twin without capsules."""

    fixed_grid = has_capsules = False

    def __init__(self, common: HeadArgs) -> None:
        super().__init__(common)
        self._ready(common.num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        return nn.Linear(self.chans, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.head_drop(self._pooled(x)))


@register_head("max")
class MaxHead(AverageHead):
    """Maximum pooling and a linear layer."""

    def _pooled(self, x: Tensor) -> Tensor:
        return self._map(x).amax(dim=(2, 3))


@register_head("conv")
class ConvHead(CapsuleHead):
    """A convolution over the whole map of the primary capsules' channels: the same number of weights, no routing.

    Args:
        caps_types, caps_dim: their product is the number of channels.
    """

    has_capsules = False

    def __init__(self, common: HeadArgs, caps_types: int = 32, caps_dim: int = 16) -> None:
        super().__init__(common)
        at_least(1, caps_types=caps_types, caps_dim=caps_dim)
        self.width = caps_types * caps_dim
        self.primary = ConvNorm(self.chans, self.width, bias=True)
        self._ready(common.num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        layer = nn.Conv2d(self.width, num_classes, self.grid)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        return layer

    @property
    def hidden_size(self) -> int:
        return self.width

    def _pooled(self, x: Tensor) -> Tensor:
        return self.primary(self._map(x)).mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        primary = self.primary(self._map(x))
        torch._assert(
            primary.shape[2] == self.grid[0], "the head has weights for each position of another grid"
        )
        torch._assert(
            primary.shape[3] == self.grid[1], "the head has weights for each position of another grid"
        )
        return self.classes(self.head_drop(primary)).flatten(1)


@register_head("routing_pool")
class RoutingPoolHead(AverageHead):
    """Routing pooling and a linear layer; "poses" are the contributions of each pooled capsule to each class score.

    Args:
        lam: λ of the routing; 0 is average pooling.
        caps_dim: channels of a capsule; divides those of the map (``proj_chans`` with a projection).
        num_iters: routing iterations.
    """

    has_capsules = True
    even = {"lam": 0.0}

    def __init__(self, common: HeadArgs, lam: float = 5.0, caps_dim: int = 16, num_iters: int = 3) -> None:
        super().__init__(common)
        check_caps_dim(caps_dim, self.chans)
        self.pool = RoutingPool2d(caps_dim, lam, num_iters, flatten=True)

    def _pooled(self, x: Tensor) -> Tensor:
        return self.pool(self._map(x))

    @torch.jit.ignore
    def _route(self, x: Tensor) -> HeadOutput:
        """Returns couplings ``[b, groups, h, w]``, which sum to 1 over the positions."""
        pooled, couplings = self.pool.route(self._map(x))
        pooled = self.head_drop(pooled)
        scores, parts = self.classes(pooled), score_parts(pooled, self.classes, self.pool.caps_dim)
        share = torch.bmm(parts.float().clamp_min(1e-6), couplings.float().flatten(2))  # [b, n, h*w]
        return HeadOutput(scores, parts, scores, (couplings,), share)

    @torch.jit.ignore
    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return (CouplingLayout(1, "children"),)

    @torch.jit.ignore
    @forward_method
    def class_votes(self, x: Tensor) -> Votes:
        x = self._map(x)
        return Votes(self.pool.capsules(x), self.pool(x).unflatten(1, (-1, self.pool.caps_dim)), False)
