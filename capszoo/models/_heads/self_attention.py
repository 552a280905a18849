"""Head with the self-attention routing of Efficient-CapsNet."""

import torch.nn as nn

from capszoo.layers import SelfAttentionRouting, Squash
from capszoo.layers._modules import at_least

from .base import ConvNorm, HeadArgs, register_head
from .dynamic import LengthHead


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
        common: HeadArgs,
        caps_types: int = 32,
        caps_dim: int = 16,
        class_dim: int = 16,
        attention: bool = True,
    ) -> None:
        super().__init__(common, caps_types, caps_dim)
        at_least(1, class_dim=class_dim)
        self.class_dim, self._attention = class_dim, attention
        squash = Squash(dim=1, pose_dim=caps_dim, exponential=True)
        self.primary = nn.Sequential(ConvNorm(self.chans, self.width), squash)
        self._ready(common.num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        return SelfAttentionRouting(
            self.num_children, self.caps_dim, num_classes, self.class_dim, self._attention
        )
