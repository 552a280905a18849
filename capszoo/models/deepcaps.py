"""DeepCaps: capsule convolutions in residual blocks, one skip connection of which is routed.

Paper: Rajasegaran, Jayasundara, Jayasekara, Jayasekara, Seneviratne, Rodrigo, "DeepCaps: Going Deeper with Capsule
Networks" (CVPR 2019, arXiv:1904.09546). The public release (MIT) was read for facts: layers and their order, initial
values, the decoder.

A stem, then four blocks: a capsule convolution that halves the map, then two in a row beside a skip of one, whose
outputs are added. A capsule convolution is a convolution without bias and a squash of every capsule. The skip of the
fourth block is routed (:class:`capszoo.layers.Conv3dDynamicRouting`). The capsules of the third and the fourth block
are the children of the class capsules, by dynamic routing. Scores are capsule lengths, in [0, 1].

The release's networks count 8,441,856 parameters at 28x28x1 and 8,444,160 at 32x32x3 without the decoder, as Keras
counts: with the 256 running statistics of the norm, which are no parameters here (8,441,600 and 8,443,904). The paper
states 7.22 millions.

What differs from the release:

- it squashes the parents of the routed skip over the whole map at once; here each is squashed by itself, as in
  Sabour et al. 2017;
- it reads the map of the routed skip in another order of channels and positions than it is written;
- one of its versions adds a bias to the class capsules, which is not in the count. Without it, the class transforms
  start larger (the layer's 0.1);
- convolutions of stride 2 are padded by 1 on every side; Keras pads maps of an even size at the end alone.
"""

import math
from collections import OrderedDict
from functools import partial
from typing import Any, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models import register_model
from torch import Tensor

from capszoo.layers import (
    Conv3dDynamicRouting,
    DynamicRouting,
    PrimaryCaps2d,
    capsule_lengths,
    capsules_from_map,
)
from capszoo.layers._modules import at_least

from ._base import CouplingLayout, LengthCapsNet, feature_levels
from ._builder import build_capsule_model, model_cfg, zoo_cfgs

__all__ = ["DeepCapsNet"]


class ConvActNorm(nn.Module):
    """Padded 3x3 convolution with a bias, ReLU, BatchNorm: ``[b, in, h, w] -> [b, out, h, w]``."""

    def __init__(self, in_chans: int, out_chans: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, out_chans, 3, padding=1)
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm2d(out_chans, eps=1e-3, momentum=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.conv(x)))


def _capsule_conv(in_chans: int, num_caps: int, pose_dim: int, stride: int = 1) -> PrimaryCaps2d:
    layer = PrimaryCaps2d(in_chans, num_caps, pose_dim, 3, stride, 1, bias=False, activation="squash")
    weight = layer.conv.weight
    bound = math.sqrt(3) * weight.numel() ** -0.25  # what Keras makes of a kernel of six axes
    nn.init.uniform_(weight, -bound, bound)
    return layer


class CapsuleBlock(nn.Module):
    """Capsule convolutions: one of stride 2, two in a row, one beside them: ``[b, in, h, w] -> [b, i*d, h/2, w/2]``.

    Args:
        in_chans: channels of the input map.
        num_caps, pose_dim: capsule types of every layer, and their pose dimension.
        routing_iters: of the layer beside the two, which is routed; 0 makes it a capsule convolution.
    """

    def __init__(self, in_chans: int, num_caps: int, pose_dim: int, routing_iters: int = 0) -> None:
        super().__init__()
        chans = num_caps * pose_dim
        self.down = _capsule_conv(in_chans, num_caps, pose_dim, 2)
        self.conv1 = _capsule_conv(chans, num_caps, pose_dim)
        self.conv2 = _capsule_conv(chans, num_caps, pose_dim)
        self.skip: Any = (
            Conv3dDynamicRouting(num_caps, pose_dim, num_caps, pose_dim, padding=1, num_iters=routing_iters)
            if routing_iters
            else _capsule_conv(chans, num_caps, pose_dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.conv2(self.conv1(x)) + self.skip(x)

    @torch.jit.ignore
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Like ``forward``, and the couplings of the routed skip, ``[b, j * h' * w', i]``."""
        x = self.down(x)
        skip, couplings = self.skip.route(x)
        return self.conv2(self.conv1(x)) + skip, couplings


class DeepCapsNet(LengthCapsNet):
    """A stem, three blocks of capsule convolutions; in the head a block with a routed skip, and the class capsules.

    Couplings of :meth:`forward_capsules`: ``[b, j * h * w, i]`` of the routed skip, which sum to 1 over all types and
    positions of the parents; ``[b, n, i]`` of the class layer. Its children are those of the fourth block, then those
    of the third, each ordered (row, column, type).

    Args:
        num_classes: classes; 0 omits the class capsules.
        in_chans, img_size: of the images; the class layer has transforms for every grid position.
        stem_chans: channels of the stem.
        caps_types: capsule types of every block.
        caps_dims: pose dimensions of the four blocks; the last two are equal.
        class_dim: pose dimension of a class capsule.
        routing_iters: routing iterations of both routings.
        decoder: build the reconstruction decoder, ``"shared"`` by default.
        global_pool: ``"avg"``; ``""`` returns the feature map without class capsules.
        drop_rate: dropout of single entries of the class layer's child poses, not of whole capsules.

    Raises:
        ValueError: an argument is out of range.
    """

    own_decoder = "shared"

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 1,
        img_size: Union[int, Tuple[int, int]] = 28,
        stem_chans: int = 128,
        caps_types: int = 32,
        caps_dims: Tuple[int, int, int, int] = (4, 8, 8, 8),
        class_dim: int = 32,
        routing_iters: int = 3,
        decoder: Union[bool, str] = False,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed_input_size=True, decoder=decoder)
        if len(caps_dims) != 4 or caps_dims[2] != caps_dims[3]:
            raise ValueError(
                f"caps_dims must be four numbers, of which the last two are equal, not {caps_dims}"
            )
        at_least(1, routing_iters=routing_iters)
        self.caps_types, self.caps_dim, self.class_dim = caps_types, caps_dims[-1], class_dim
        self.routing_iters = routing_iters
        self.num_features = self.head_hidden_size = caps_types * caps_dims[-1]

        stages: "OrderedDict[str, nn.Module]" = OrderedDict(stem=ConvActNorm(in_chans, stem_chans))
        chans = [stem_chans]
        for i, pose_dim in enumerate(caps_dims[:3]):
            stages[f"block{i + 1}"] = CapsuleBlock(chans[-1], caps_types, pose_dim)
            chans.append(caps_types * pose_dim)
        self.stages = nn.Sequential(stages)
        self.feature_info = feature_levels(zip(stages, chans, (1, 2, 4, 8), strict=True))
        self.block4: Any = CapsuleBlock(chans[-1], caps_types, caps_dims[-1], routing_iters)
        h, w = ((size + 7) // 8 for size in self.img_size)  # of three convolutions that round up
        self.positions = h * w + (h + 1) // 2 * ((w + 1) // 2)
        self.head_drop = nn.Dropout(drop_rate)
        self._make_head()

    def _make_classifier(self) -> nn.Module:
        children = self.positions * self.caps_types
        return DynamicRouting(children, self.caps_dim, self.num_classes, self.class_dim, self.routing_iters)

    def _pooled(self, x: Tensor) -> Tensor:
        """Mean of the fourth block's map over its grid."""
        return self.block4(x).mean(dim=(2, 3))

    def _children(self, x: Tensor) -> Tensor:
        return self._joined(self.block4(x), x)

    def _joined(self, last: Tensor, x: Tensor) -> Tensor:
        """Maps of the fourth and the third block to ``[b, i, d]``."""
        children = [capsules_from_map(last, self.caps_dim), capsules_from_map(x, self.caps_dim)]
        return self.head_drop(torch.cat(children, dim=1))

    @torch.jit.ignore
    def _routed_children(self, x: Tensor) -> Tuple[Tensor, Tuple[Tensor, ...]]:
        x = self.forward_features(x)
        last, couplings = self.block4.route(x)
        return self._joined(last, x), (couplings,)

    @torch.jit.ignore
    def coupling_map(self, x: Tensor) -> Tensor:
        """Images to ``[b, n, h', w']``: share of each position of the third block in each class, summing to 1.

        A child's share is its coupling times the length of its vote. The share of a position of the fourth block is
        spread evenly over the positions of the third that it stands for.
        """
        self._require_classes()
        x = self.forward_features(x)
        last = self.block4(x)
        children = self._joined(last, x)
        share = self.class_caps.route(children)[1] * capsule_lengths(self.class_caps.votes(children))
        split = last.shape[2] * last.shape[3] * self.caps_types
        coarse = share[:, :, :split].unflatten(2, (*last.shape[2:], -1)).sum(dim=4)
        fine = share[:, :, split:].unflatten(2, (*x.shape[2:], -1)).sum(dim=4)
        cells = F.avg_pool2d(torch.ones_like(fine), 2, ceil_mode=True, divisor_override=1)
        spread = F.interpolate(coarse / cells, size=fine.shape[2:])  # the nearest
        total = fine + spread  # lengths of votes are at least 1e-6
        return total / total.sum(dim=(2, 3), keepdim=True)

    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return (CouplingLayout(1, "parents"),) * 2

    def _drop_head(self) -> None:
        super()._drop_head()
        self.block4 = nn.Identity()


_cfg = partial(
    model_cfg,
    fixed_input_size=True,
    first_conv="stages.stem.conv",
    classifier="class_caps",
    paper_name="DeepCaps: Going Deeper with Capsule Networks",
    paper_ids="arXiv:1904.09546",
)

default_cfgs = zoo_cfgs(
    {
        # pixel values in 0..1, the range that the decoder reconstructs
        "deepcaps": _cfg(input_size=(1, 28, 28), pool_size=(4, 4), mean=(0.0,), std=(1.0,)),
    }
)

_create_deepcaps = partial(build_capsule_model, DeepCapsNet)


@register_model
def deepcaps(pretrained: bool = False, **kwargs: Any) -> DeepCapsNet:
    """Capsule convolutions in four residual blocks, the last with a routed skip: Fashion-MNIST 94.73, MNIST 99.72"""
    return _create_deepcaps("deepcaps", pretrained, defaults={}, **kwargs)
