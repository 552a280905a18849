"""Primary capsules: from a feature map to capsules.

Paper: Sabour, Frosst, Hinton, "Dynamic Routing Between Capsules" (2017), section 4: a capsule of the first capsule
layer is ``d`` channels of a convolution at one grid position (not ``d`` neighbouring pixels of one channel).

Letters: ``b`` batch, ``i`` capsules, ``d`` pose size, ``h w`` grid. In a feature map the channels are ordered
``capsule * d + dimension``; in a list of capsules they are ordered ``(row * w + column) * types + type``.
"""

from typing import Tuple

import torch
from torch import Tensor, nn

from ._layout import out_size, split_axis
from ._modules import at_least
from ._strided_conv import StridedConv2d
from .squash import squash

__all__ = ["PrimaryCaps2d", "capsules_from_map"]

torch.fx.wrap("split_axis")


def capsules_from_map(x: Tensor, pose_dim: int) -> Tensor:
    """The capsules of a feature map as a list.

    Args:
        x: ``[b, types * d, h, w]``, channel = type * d + dimension.
        pose_dim: ``d``.

    Returns:
        ``[b, h * w * types, d]``, index = (row * w + column) * types + type. For a channels-last ``x`` no copy.
    """
    # explicit, because -1 is ambiguous for an empty batch
    count = x.shape[2] * x.shape[3] * (x.shape[1] // pose_dim)
    return x.permute(0, 2, 3, 1).reshape(x.shape[0], count, pose_dim)


class PrimaryCaps2d(nn.Module):
    """A convolution whose output channels are read as capsules (Sabour et al. 2017, section 4).

    Args:
        in_chans: channels of the input map.
        num_caps: capsule types.
        pose_dim: ``d``, pose dimension.
        kernel_size, stride, padding: of the convolution.
        bias: whether the convolution has a bias (capsules that go into a LayerNorm need none).
        activation: ``"identity"``, or ``"squash"`` for squashed capsules.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        in_chans: int,
        num_caps: int,
        pose_dim: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
        activation: str = "identity",
    ) -> None:
        super().__init__()
        at_least(
            1, in_chans=in_chans, num_caps=num_caps, pose_dim=pose_dim, kernel_size=kernel_size, stride=stride
        )
        at_least(0, padding=padding)
        if activation not in ("identity", "squash"):
            raise ValueError(f"activation must be 'identity' or 'squash', not {activation!r}")
        self.num_caps = num_caps
        self.pose_dim = pose_dim
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.squashed = activation == "squash"
        self.conv = StridedConv2d(in_chans, num_caps * pose_dim, kernel_size, stride, padding, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, in_chans, h, w]`` to ``[b, num_caps * pose_dim, h', w']``, channel = capsule * pose_dim + dim."""
        x = self.conv(x)
        if self.squashed:
            x = squash(split_axis(x, 1, [self.num_caps, self.pose_dim]), dim=2).flatten(1, 2)
        return x

    def grid_size(self, height: int, width: int) -> Tuple[int, int]:
        """Rows and columns of the capsule grid for an input map of this size (plain integers)."""
        window = (self.kernel_size, self.stride, self.padding)
        return out_size(height, *window), out_size(width, *window)

    def extra_repr(self) -> str:
        return f"{self.num_caps} capsules of {self.pose_dim}" + (", squashed" if self.squashed else "")
