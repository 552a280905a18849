"""Head with self-routing."""

import torch
import torch.nn as nn
from torch import Tensor

from capszoo.layers import ConvSelfRouting, SelfRouting
from capszoo.layers._precision import upcast_half

from .base import HeadArgs, HeadOutput, log_probabilities, register_head
from .capsule_layers import ActivePrimary, CapsuleLayersHead

torch.fx.wrap("upcast_half")


@register_head("self_routing")
class SelfRoutingHead(CapsuleLayersHead):
    """Primary capsules with activations, self-routing (SR-CapsNet); scores are the logarithms of the activations.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension.
        depth: capsule layers, 1 or 2; with 2, the poses of the first one go through a BatchNorm.
    """

    active = True
    relative = True
    map_quantity = "coupling × activation"

    def __init__(self, common: HeadArgs, caps_types: int = 32, caps_dim: int = 16, depth: int = 1) -> None:
        super().__init__(common, caps_types, caps_dim, depth)
        self.primary = ActivePrimary(self.chans, caps_types, caps_dim)
        if depth == 2:
            self.hidden = ConvSelfRouting(caps_types, caps_dim, caps_types, caps_dim, 3, 2, 1)
        self._ready(common.num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        return SelfRouting(self.num_children, self.caps_dim, num_classes)

    def _hidden(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        return torch.cat([self.norm(x[:, : self.width]), x[:, self.width :]], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self._children(x)
        active, _ = self.classes(self._poses(x), self._activations(x))
        return log_probabilities(upcast_half(active)).to(x.dtype)

    @torch.jit.ignore
    def _route(self, x: Tensor) -> HeadOutput:
        """Returns couplings of the class layer ``[b, n, i]``, children ordered (row, column, type)."""
        children, below = self._routed_children(x)
        poses, activations = self._poses(children), self._activations(children)
        active, _, couplings = self.classes.route(poses, activations)
        share = couplings * upcast_half(activations).unsqueeze(1)  # [b, n, i]
        means = torch.bmm(share, upcast_half(poses)) / share.sum(dim=2, keepdim=True).clamp_min(1e-7)
        scores = log_probabilities(upcast_half(active)).to(x.dtype)
        return HeadOutput(scores, means.to(x.dtype), active, (*below, couplings), share)
