"""Head with the self-attention routing of Efficient-CapsNet."""

from typing import Tuple

import torch.nn as nn

from capszoo.layers import SelfAttentionRouting, Squash
from capszoo.layers._modules import at_least

from .base import ConvNorm, register_head
from .dynamic import LengthHead

__all__ = ["SelfAttentionHead"]


@register_head("self_attention")
class SelfAttentionHead(LengthHead):
    """Primary capsules and self-attention routing of Efficient-CapsNet; scores as in :class:`LengthHead`.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension.
        class_dim: pose dimension of a class capsule.
        attention: False holds the couplings even; their learned prior remains.
    """

    even = {"attention": False}

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str = "self_attention",
        proj_chans: int = 0,
        max_grid: int = 0,
        drop_rate: float = 0.0,
        caps_types: int = 32,
        caps_dim: int = 16,
        class_dim: int = 16,
        attention: bool = True,
    ) -> None:
        super().__init__(
            in_chans, grid, num_classes, routing, proj_chans, max_grid, drop_rate, caps_types, caps_dim
        )
        at_least(1, class_dim=class_dim)
        self.class_dim, self._attention = class_dim, attention
        squash = Squash(dim=1, pose_dim=caps_dim, exponential=True)
        self.primary = nn.Sequential(ConvNorm(self.chans, self.width), squash)
        self._ready(num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        return SelfAttentionRouting(
            self.num_children, self.caps_dim, num_classes, self.class_dim, self._attention
        )
