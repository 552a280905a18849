"""Efficient-CapsNet: few parameters, primary capsules by a depthwise convolution, routing by self-attention.

Paper: Mazzia, Salvetti, Chiaberge, "Efficient-CapsNet: capsule network with self-attention routing" (2021,
arXiv:2101.12491). The public release was read for facts: kernel sizes, the order of ReLU and BatchNorm, the bias that
is added to the couplings.

One network in three sizes, by its arguments:

- MNIST (the defaults), 161,824 parameters;
- MultiMNIST: ``img_size=36, strides=(1, 1, 2, 2), primary_kernel=5, primary_stride=2``, 154,656;
- smallNORB: ``img_size=48, in_chans=2, kernels=(7, 3, 3, 3), strides=(2, 1, 1, 2), norm="instance",
  num_classes=5``, 151,664.

Scores are capsule lengths, in [0, 1].

Our choices, where the paper is silent: BatchNorm's and InstanceNorm's epsilon and momentum are PyTorch's; the
depthwise kernel covers the whole map unless ``primary_kernel`` is given, so that other image sizes keep 16 primary
capsules.
"""

from collections import OrderedDict
from functools import partial
from typing import Any, List, Optional, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models import register_model
from torch import Tensor

from capszoo.layers import SelfAttentionRouting, Squash, capsule_lengths, upcast_half
from capszoo.layers._forward_methods import ForwardMethods, forward_method
from capszoo.layers._modules import at_least

from ._base import CouplingLayout, LengthCapsNet, feature_levels_by_rows
from ._builder import build_capsule_model, model_cfg, zoo_cfgs

__all__ = ["EfficientCapsNet"]


class ConvActNorm(nn.Module):
    """Convolution without padding, activation, normalisation: ``[b, in, h, w] -> [b, out, h', w']``.

    Args:
        in_chans, out_chans, kernel_size, stride: of the convolution, which has a bias.
        norm: ``"batch"`` (ReLU, BatchNorm) or ``"instance"`` (LeakyReLU 0.3, affine InstanceNorm).
    """

    def __init__(self, in_chans: int, out_chans: int, kernel_size: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, out_chans, kernel_size, stride)
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]
        self.act: nn.Module
        self.norm: nn.Module
        if norm == "batch":
            self.act, self.norm = nn.ReLU(inplace=True), nn.BatchNorm2d(out_chans)
        elif norm == "instance":
            self.act = nn.LeakyReLU(0.3, inplace=True)
            self.norm = nn.InstanceNorm2d(out_chans, affine=True)
        else:
            raise ValueError(f"norm must be 'batch' or 'instance', not {norm!r}")

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.conv(x)))


class PrimaryConv(ForwardMethods, nn.Conv2d):
    """The depthwise convolution to the primary capsules: ``[b, c, h, w] -> [b, c, h', w']``."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight, self.bias)

    @torch.jit.ignore
    @forward_method
    def hand_down(self, x: Tensor, share: Tensor) -> Tensor:
        """Distribute each capsule's share over the positions that it sees, in proportion to their contributions.

        Args:
            x: the convolution's input.
            share: of each capsule in each class, ``[b, n, types, h', w']``.

        Returns:
            ``[b, n, h, w]``.
        """
        batch, classes, types = share.shape[:3]
        stride: Any = self.stride
        weight, share = upcast_half(self.weight.abs()), upcast_half(share)
        terms = upcast_half(x).abs().clamp_min(1e-6)
        whole = F.conv2d(
            terms, weight, None, stride, groups=self.groups
        )  # total for each dimension of a child
        whole = whole.unflatten(1, (types, -1)).sum(2).clamp_min(1e-6)  # and to each child
        share = share.flatten(0, 1) / whole.repeat_interleave(classes, 0)
        share = share.repeat_interleave(self.out_channels // types, 1)
        edge = [(a - k) % s for a, k, s in zip(x.shape[2:], self.kernel_size, stride, strict=True)]
        down = F.conv_transpose2d(share, weight, None, stride, output_padding=edge, groups=self.groups)
        return (down.unflatten(0, (batch, classes)) * terms.unsqueeze(1)).sum(2)


class EfficientCapsNet(LengthCapsNet):
    """Four convolutions, a depthwise convolution to primary capsules, self-attention routing to class capsules.

    Couplings of :meth:`forward_capsules`: ``[b, n, i]``, children ordered (row, column, type); there is one row and one
    column unless ``primary_kernel`` leaves more.

    Args:
        num_classes: classes; 0 omits the class capsules.
        in_chans, img_size: of the images, in pixels.
        widths, kernels, strides: channels, kernel sizes and strides of the four convolutions.
        norm: ``"batch"`` or ``"instance"``, see :class:`ConvActNorm`.
        caps_dim: pose dimension of a primary capsule; divides the last width.
        class_dim: pose dimension of a class capsule.
        primary_kernel, primary_stride: of the depthwise convolution; None covers the whole map.
        decoder: build the reconstruction decoder.
        global_pool: ``"avg"``; ``""`` returns the feature map without class capsules.
        drop_rate: dropout of single entries of the class layer's child poses, not of whole capsules.

    Raises:
        ValueError: an invalid argument; the message names it.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 1,
        img_size: Union[int, Tuple[int, int]] = 28,
        widths: Tuple[int, int, int, int] = (32, 64, 64, 128),
        kernels: Tuple[int, int, int, int] = (5, 3, 3, 3),
        strides: Tuple[int, int, int, int] = (1, 1, 1, 2),
        norm: str = "batch",
        caps_dim: int = 8,
        class_dim: int = 16,
        primary_kernel: Optional[int] = None,
        primary_stride: int = 1,
        decoder: Union[bool, str] = False,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed_input_size=True, decoder=decoder)
        for name, values in (("widths", widths), ("kernels", kernels), ("strides", strides)):
            if len(values) != 4:
                raise ValueError(f"{name} must be four numbers, not {values}")
            at_least(1, **{name: min(values)})
        at_least(1, primary_stride=primary_stride)
        if caps_dim < 1 or widths[-1] % caps_dim:
            raise ValueError(f"caps_dim={caps_dim} must divide the last of widths, {widths[-1]}")
        self.caps_dim, self.class_dim = caps_dim, class_dim
        self.caps_types = widths[-1] // caps_dim
        self.num_features = self.head_hidden_size = widths[-1]

        stages: "OrderedDict[str, nn.Module]" = OrderedDict()
        levels: List[Tuple[str, int, int]] = []  # name, channels, height
        (h, w), chans = self.img_size, in_chans
        for i, (width, kernel, stride) in enumerate(zip(widths, kernels, strides, strict=True)):
            stages[f"conv{i + 1}"] = ConvActNorm(chans, width, kernel, stride, norm)
            h, w, chans = (h - kernel) // stride + 1, (w - kernel) // stride + 1, width
            levels.append((f"conv{i + 1}", width, h))
        kernel_size = (h, w) if primary_kernel is None else (primary_kernel, primary_kernel)
        if min(h, w) < 1 or kernel_size[0] > h or kernel_size[1] > w:
            raise ValueError(f"img_size={self.img_size} is too small for this network's convolutions")
        primary = PrimaryConv(chans, chans, kernel_size, primary_stride, groups=chans)
        nn.init.kaiming_normal_(primary.weight, nonlinearity="linear")
        nn.init.zeros_(primary.bias)  # type: ignore[arg-type]
        stages["primary"], stages["squash"] = primary, Squash(dim=1, pose_dim=caps_dim, exponential=True)
        h, w = ((a - k) // primary_stride + 1 for a, k in zip((h, w), kernel_size, strict=True))
        levels += [("primary", chans, h), ("squash", chans, h)]
        self.grid = (h, w)
        self.stages = nn.Sequential(stages)
        self.feature_info = feature_levels_by_rows(self.img_size[0], levels)
        self.head_drop = nn.Dropout(drop_rate)
        self._make_head()

    def _make_classifier(self) -> nn.Module:
        children = self.grid[0] * self.grid[1] * self.caps_types
        return SelfAttentionRouting(children, self.caps_dim, self.num_classes, self.class_dim)

    @torch.jit.ignore
    def coupling_map(self, x: Tensor) -> Tensor:
        """Images to ``[b, n, h', w']``: share of each position of the last convolution's map, summing to 1.

        A child's share in a class is its coupling times the length of its vote. The depthwise convolution distributes
        it over the positions, in proportion to the absolute value of each position's contribution.
        """
        self._require_classes()
        conv4: Any = self.stages[:-2](x)
        children = self._children(self.stages[-2:](conv4))
        votes = self.class_caps.votes(children)  # [b, n, i, e]
        couplings = self.class_caps.route(children)[1]
        share = (couplings * capsule_lengths(votes)).unflatten(2, (*self.grid, self.caps_types))
        primary: Any = self.stages.primary
        down = primary.hand_down(conv4, share.permute(0, 1, 4, 2, 3))  # [b, n, h', w']
        return down / down.sum(dim=(2, 3), keepdim=True)

    @torch.jit.ignore
    def covered_cells(self, x: Tensor) -> Tensor:
        """Images to the mask of positions of the last convolution's map that a primary capsule sees, ``[h', w']``.

        A stride may leave out the last rows and columns. A stride larger than the kernel leaves out others, too.
        """
        primary: Any = self.stages.primary
        conv4: Any = self.stages[:-2](x[:1])
        seen = []
        for length, count, kernel, stride in zip(
            conv4.shape[2:], self.grid, primary.kernel_size, primary.stride, strict=True
        ):
            at = torch.arange(length, device=x.device)
            seen.append((at % stride < kernel) & (at < (count - 1) * stride + kernel))
        return seen[0].unsqueeze(1) & seen[1]

    @torch.jit.ignore
    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return (CouplingLayout(1, "parents"),)


_cfg = partial(
    model_cfg,
    fixed_input_size=True,
    first_conv="stages.conv1.conv",
    classifier="class_caps",
    paper_name="Efficient-CapsNet: capsule network with self-attention routing",
    paper_ids="arXiv:2101.12491",
)

default_cfgs = zoo_cfgs(
    {
        # grey values in 0..1, the range that the decoder reconstructs
        "efficient_capsnet": _cfg(input_size=(1, 28, 28), pool_size=(1, 1), mean=(0.0,), std=(1.0,)),
    }
)


_create_efficient = partial(build_capsule_model, EfficientCapsNet)


@register_model
def efficient_capsnet(pretrained: bool = False, **kwargs: Any) -> EfficientCapsNet:
    """Efficient-CapsNet on MNIST: 161,824 parameters, self-attention routing without iterations."""
    args: dict = dict(caps_dim=8, class_dim=16)
    return _create_efficient("efficient_capsnet", pretrained, defaults=args, **kwargs)
