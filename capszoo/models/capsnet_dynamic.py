"""Capsule networks with dynamic routing.

- ``capsnet_dynamic``: Sabour, Frosst, Hinton, "Dynamic Routing Between Capsules" (2017, arXiv:1710.09829), section 4.
- ``capsnet_dynamic_cifar``, ``capsnet_dynamic_resnet``: the same on CIFAR, the networks that Tsai et al., "Capsules
  with Inverted Dot-Product Attention Routing" (2020, arXiv:2002.04764), compare with: Tables 4 and 5, and the text's
  ResNet backbone.
- ``capsnet_dynamic_multimnist``: the dynamic-routing network of that paper's Figure 5: the layers of its Table 11, with
  squash instead of the LayerNorms and capsule lengths instead of the linear classifier.
- ``capsnet6_dynamic``: Li et al., "Neural Network Encapsulation" (2018, arXiv:1808.03749), Table 1 (a), appendix A.i.

Scores are capsule lengths, in [0, 1].

Our choices, where the papers are silent: the plain stem starts as He normal (fan in), the primary convolution normal
with variance 1 / fan in, the convolutions of the ResNet and of ``capsnet6_dynamic`` as He normal (fan out); in the
latter, the capsules of the fourth layer are not squashed (the text names only conv-BN-ReLU), and the mid capsules
form 32 types on a grid of ``mid_caps / 32`` positions. The public release computes with 512 mid capsules; the 2048 of
the text are the default, because they give the stated size.
"""

from collections import OrderedDict
from functools import partial
from typing import Any, Dict, List, Tuple, Union

import torch
import torch.nn as nn
from timm.models import register_model
from torch import Tensor

from capszoo.layers import (
    ConvDynamicRouting,
    DynamicRouting,
    PrimaryCaps2d,
    SharedDynamicRouting,
    Squash,
    capsule_lengths,
)
from capszoo.layers._layout import out_size, split_axis
from capszoo.layers._modules import at_least

from ._base import CouplingLayout, LengthCapsNet, feature_levels, feature_levels_by_rows
from ._blocks import idpa_backbone_stages, init_conv_weights, six_layer_stages
from ._builder import build_capsule_model, model_cfg, zoo_cfgs

__all__ = ["DynamicCapsNet", "SixLayerCapsNet"]

torch.fx.wrap("split_axis")


def _normalised(share: Tensor) -> Tensor:
    """Maps ``[b, n, h, w]`` of non-negative shares, scaled so that each sums to 1."""
    return share / share.sum(dim=(2, 3), keepdim=True)


class DynamicCapsNet(LengthCapsNet):
    """Convolutional features, primary capsules, fully connected dynamic routing to one capsule per class.

    Couplings of :meth:`forward_capsules`: with ``conv_caps``, ``[b, h', w', j, k*l*i]`` of the convolutional capsule
    layer; always ``[b, n, i]`` of the class layer, its children ordered (row, column, type).

    Args:
        num_classes: classes; 0 omits the class capsules.
        in_chans, img_size: of the images; the class layer has transforms for every grid position.
        backbone: ``"conv"``, one convolution and ReLU, or ``"resnet"``, that of the IDPA paper.
        stem_chans, stem_kernel, stem_stride, stem_padding: of the convolution; the ResNet uses only the channels.
        caps_types, caps_dim: primary capsule types, and their pose dimension.
        primary_kernel, primary_stride, primary_bias: of the primary capsules' convolution.
        conv_caps: whether a convolutional capsule layer (3x3, same types and pose dimension) follows.
        class_dim: pose dimension of a class capsule.
        routing_iters: routing iterations, in every routing layer.
        softmax_over: ``"parents"`` or ``"children"``: the axis over which the couplings sum to 1.
        routing_init: first logits of the class layer: ``"zero"``, ``"random"`` or ``"learned"``.
        decoder: build the reconstruction decoder.
        global_pool: ``"avg"``; ``""`` returns the feature map without class capsules.
        drop_rate: dropout of single entries of the class layer's child poses, not of whole capsules.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 1,
        img_size: Union[int, Tuple[int, int]] = 28,
        backbone: str = "conv",
        stem_chans: int = 256,
        stem_kernel: int = 9,
        stem_stride: int = 1,
        stem_padding: int = 0,
        caps_types: int = 32,
        caps_dim: int = 8,
        primary_kernel: int = 9,
        primary_stride: int = 2,
        primary_bias: bool = True,
        conv_caps: bool = False,
        class_dim: int = 16,
        routing_iters: int = 3,
        softmax_over: str = "parents",
        routing_init: str = "zero",
        decoder: Union[bool, str] = False,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed_input_size=True, decoder=decoder)
        at_least(1, stem_stride=stem_stride)
        self.caps_types, self.caps_dim, self.class_dim = caps_types, caps_dim, class_dim
        self.routing_iters, self.softmax_over, self.routing_init = routing_iters, softmax_over, routing_init
        self.num_features = self.head_hidden_size = caps_types * caps_dim
        primary = PrimaryCaps2d(
            stem_chans, caps_types, caps_dim, primary_kernel, primary_stride, bias=primary_bias
        )
        nn.init.kaiming_normal_(primary.conv.weight, nonlinearity="linear")
        if primary.conv.bias is not None:
            nn.init.zeros_(primary.conv.bias)

        h, w = self.img_size
        stages: "OrderedDict[str, nn.Module]" = OrderedDict()
        levels: List[Tuple[str, int, int]] = []  # name, channels, height
        if backbone == "conv":
            conv = nn.Conv2d(in_chans, stem_chans, stem_kernel, stem_stride, stem_padding)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
            stages["conv1"] = nn.Sequential(OrderedDict(conv=conv, act=nn.ReLU(inplace=True)))
            h, w = (out_size(size, stem_kernel, stem_stride, stem_padding) for size in (h, w))
            levels.append(("conv1", stem_chans, h))
        elif backbone == "resnet":
            stages = idpa_backbone_stages(in_chans, stem_chans)
            init_conv_weights(nn.Sequential(stages))
            levels += [("stem", 64, h), ("layer1", 64, h)]
            h, w = (h + 1) // 2, (w + 1) // 2
            levels.append(("layer2", stem_chans, h))
        else:
            raise ValueError(f"backbone must be 'conv' or 'resnet', not {backbone!r}")
        h, w = primary.grid_size(h, w)
        stages["primary"] = primary
        stages["squash"] = Squash(dim=1, pose_dim=caps_dim)
        levels += [("primary", self.num_features, h), ("squash", self.num_features, h)]
        if conv_caps:
            stages["conv_caps"] = ConvDynamicRouting(
                caps_types,
                caps_dim,
                caps_types,
                caps_dim,
                num_iters=routing_iters,
                softmax_over=softmax_over,
            )
            h, w = h - 2, w - 2
            levels.append(("conv_caps", self.num_features, h))
        if h < 1 or w < 1:
            raise ValueError(f"img_size={self.img_size} is too small for this network's convolutions")
        self.grid = (h, w)
        self.stages = nn.Sequential(stages)
        self.feature_info = feature_levels_by_rows(self.img_size[0], levels)
        self.head_drop = nn.Dropout(drop_rate)
        self._make_head()

    def _make_classifier(self) -> nn.Module:
        return DynamicRouting(
            self.grid[0] * self.grid[1] * self.caps_types,
            self.caps_dim,
            self.num_classes,
            self.class_dim,
            self.routing_iters,
            self.softmax_over,
            self.routing_init,
        )

    @torch.jit.ignore
    def _routed_children(self, x: Tensor) -> Tuple[Tensor, Tuple[Tensor, ...]]:
        couplings: Tuple[Tensor, ...] = ()
        torch._assert(tuple(x.shape[-2:]) == self.img_size, self._size_message)
        for stage in self.stages:
            if isinstance(stage, ConvDynamicRouting):
                x, coupling = stage.route(x)
                couplings += (coupling,)
            else:
                x = stage(x)
        return self._children(x), couplings

    def coupling_map(self, x: Tensor) -> Tensor:
        """Images to ``[b, n, h', w']``: share of each grid position in each class capsule, summing to 1.

        A child's share is its coupling times the length of its vote; a position's share is the sum over its capsule
        types. The grid is that of the layer below the class capsules.
        """
        self._require_classes()
        children = self._children(self.forward_features(x))
        couplings = self.class_caps.route(children)[1]  # [b, n, i]
        share = couplings * capsule_lengths(self.class_caps.votes(children))  # lengths are at least 1e-6
        return _normalised(share.unflatten(2, (self.grid[0], self.grid[1], -1)).sum(dim=4))

    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        convolutional = sum(isinstance(stage, ConvDynamicRouting) for stage in self.stages)
        return (CouplingLayout(3, self.softmax_over),) * convolutional + (
            CouplingLayout(1, self.softmax_over),
        )


class SixLayerCapsNet(LengthCapsNet):
    """Four convolutions, and two capsule layers whose transforms are shared over the grid: ``capsnet6_dynamic``.

    Couplings of :meth:`forward_capsules`: ``[b, mid_caps, types * h * w]`` and ``[b, n, mid_caps]``.

    Args:
        num_classes: classes; 0 omits the class capsules.
        in_chans, img_size: of the images. Weights depend on the size only where ``routing_init`` is not zero,
            and in the decoder.
        widths: channels of the 3x3 convolutions (strides 1, 1, 2, 2).
        caps_types: capsule types of both layers; the last width and ``mid_caps`` are multiples of it.
        mid_caps, mid_dim: capsules of the fifth layer, and their pose dimension.
        class_dim: pose dimension of a class capsule.
        routing_iters: routing iterations (Table 5: 1 to 4).
        softmax_over: ``"children"`` (appendix A.i) or ``"parents"``.
        routing_init: first logits of both layers: ``"zero"``, ``"random"`` or ``"learned"`` (Table 5).
        decoder: build the reconstruction decoder.
        global_pool: ``"avg"``; ``""`` returns the feature map without class capsules.
        drop_rate: dropout of single entries of the class layer's child poses, not of whole capsules.

    Raises:
        ValueError: an argument is out of range.
    """

    map_quantity = "coupling × capsule length"

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        widths: Tuple[int, int, int, int] = (32, 64, 128, 256),
        caps_types: int = 32,
        mid_caps: int = 2048,
        mid_dim: int = 16,
        class_dim: int = 16,
        routing_iters: int = 3,
        softmax_over: str = "children",
        routing_init: str = "zero",
        decoder: Union[bool, str] = False,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        fixed = routing_init != "zero"
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed, decoder)
        stages = six_layer_stages(in_chans, widths, caps_types, mid_caps)
        self.caps_types, self.mid_dim, self.class_dim = caps_types, mid_dim, class_dim
        self.routing_iters, self.softmax_over, self.routing_init = routing_iters, softmax_over, routing_init
        self.mid_positions = mid_caps // caps_types
        self.num_features = widths[-1]
        self.head_hidden_size = caps_types * mid_dim

        h, w = (-(-size // 4) for size in self.img_size)
        self.feature_info = feature_levels(zip(stages, widths, (1, 1, 2, 4), strict=True))
        self.stages = nn.Sequential(stages)
        init_conv_weights(self.stages)
        self.mid_caps: Any = SharedDynamicRouting(
            caps_types,
            widths[-1] // caps_types,
            mid_caps,
            mid_dim,
            routing_iters,
            softmax_over,
            routing_init,
            positions=h * w,
        )
        self.head_drop = nn.Dropout(drop_rate)
        self._make_head()

    def _make_classifier(self) -> nn.Module:
        return SharedDynamicRouting(
            self.caps_types,
            self.mid_dim,
            self.num_classes,
            self.class_dim,
            self.routing_iters,
            self.softmax_over,
            self.routing_init,
            positions=self.mid_positions,
        )

    def _grid_children(self, x: Tensor) -> Tensor:
        """``[b, g * d, h, w]`` to ``[b, g, d, h * w]``."""
        return split_axis(x.flatten(2), 1, [self.caps_types, x.shape[1] // self.caps_types])

    def _mid_children(self, poses: Tensor) -> Tensor:
        """Mid capsules ``[b, g * p, e]``, type by type, to ``[b, g, e, p]``."""
        return split_axis(poses, 1, [self.caps_types, self.mid_positions]).transpose(2, 3)

    def _pooled(self, x: Tensor) -> Tensor:
        """``[b, g * d, h, w]`` to the mid capsules' mean, ``[b, g * e]``."""
        return self._mid(x).mean(dim=3).flatten(1)

    def _children(self, x: Tensor) -> Tensor:
        return self.head_drop(self._mid(x))

    def _mid(self, x: Tensor) -> Tensor:
        """``[b, g * d, h, w]`` to the class layer's children, ``[b, g, e, p]``."""
        return self._mid_children(self.mid_caps(self._grid_children(x)))

    @torch.jit.ignore
    def _routed_children(self, x: Tensor) -> Tuple[Tensor, Tuple[Tensor, ...]]:
        mid, couplings = self.mid_caps.route(self._grid_children(self.forward_features(x)))
        return self.head_drop(self._mid_children(mid)), (couplings,)

    def coupling_map(self, x: Tensor) -> Tensor:
        """Images to ``[b, n, h', w']``: share of each grid position in each class capsule, summing to 1.

        A mid capsule's share in a class is its coupling times its length. The mid capsule's couplings (scaled to sum
        to 1 over its children) distribute it over the grid, and the shares are summed over the capsule types.
        """
        self._require_classes()
        children, (mid_couplings,) = self._routed_children(x)
        class_couplings = self.class_caps.route(children)[1]
        lengths = capsule_lengths(children, dim=2).flatten(1).unsqueeze(1)  # [b, 1, mid]
        down = mid_couplings / mid_couplings.sum(dim=2, keepdim=True)  # [b, mid, g*p]
        share = torch.bmm(class_couplings * lengths, down)  # [b, n, g*p]
        grid = [-(-size // 4) for size in x.shape[2:]]
        return _normalised(share.unflatten(2, (self.caps_types, *grid)).sum(dim=2))

    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return (CouplingLayout(1, self.softmax_over),) * 2

    def _drop_head(self) -> None:
        super()._drop_head()
        self.mid_caps = nn.Identity()


_cfg = partial(
    model_cfg,
    pool_size=(8, 8),
    fixed_input_size=True,
    first_conv="stages.conv1.conv",
    classifier="class_caps",
    paper_name="Dynamic Routing Between Capsules",
    paper_ids="arXiv:1710.09829",
)

# Sabour et al. feed grey values in 0..1, the range that the decoder reconstructs
_digits = partial(_cfg, mean=(0.0,), std=(1.0,))

# networks that the IDPA paper compares with
_IDPA: Dict[str, Any] = dict(
    paper_name="Capsules with Inverted Dot-Product Attention Routing", paper_ids="arXiv:2002.04764"
)


default_cfgs = zoo_cfgs(
    {
        "capsnet_dynamic": _digits(input_size=(1, 28, 28), pool_size=(6, 6)),
        "capsnet_dynamic_cifar": _cfg(**_IDPA),
        "capsnet_dynamic_resnet": _cfg(first_conv="stages.stem.conv", **_IDPA),
        "capsnet_dynamic_multimnist": _digits(
            input_size=(1, 36, 36),
            pool_size=(6, 6),
            **_IDPA,
        ),
        "capsnet6_dynamic": _cfg(
            fixed_input_size=False,
            paper_name="Neural Network Encapsulation",
            paper_ids="arXiv:1808.03749",
        ),
    }
)


_create_dynamic = partial(build_capsule_model, DynamicCapsNet)
_create_six_layers = partial(build_capsule_model, SixLayerCapsNet)


@register_model
def capsnet_dynamic(pretrained: bool = False, **kwargs: Any) -> DynamicCapsNet:
    """Sabour et al. on MNIST: error 0.25 with reconstruction, 0.35 without; MultiMNIST 5.2."""
    args: Dict[str, Any] = dict(stem_chans=256, caps_types=32, caps_dim=8, class_dim=16, routing_iters=3)
    return _create_dynamic("capsnet_dynamic", pretrained, defaults=args, **kwargs)


@register_model
def capsnet_dynamic_cifar(pretrained: bool = False, **kwargs: Any) -> DynamicCapsNet:
    """Dynamic routing on a plain convolution: CIFAR-10 accuracy 84.08, CIFAR-100 56.96."""
    args: Dict[str, Any] = dict(stem_chans=256, caps_types=32, caps_dim=8, class_dim=16)
    return _create_dynamic("capsnet_dynamic_cifar", pretrained, defaults=args, **kwargs)


@register_model
def capsnet_dynamic_resnet(pretrained: bool = False, **kwargs: Any) -> DynamicCapsNet:
    """Dynamic routing on a ResNet of 256 channels: CIFAR-10 accuracy 92.65, CIFAR-100 71.70."""
    args: Dict[str, Any] = dict(backbone="resnet", stem_chans=256, primary_stride=1)
    return _create_dynamic("capsnet_dynamic_resnet", pretrained, defaults=args, **kwargs)


@register_model
def capsnet_dynamic_multimnist(pretrained: bool = False, **kwargs: Any) -> DynamicCapsNet:
    """Dynamic routing with 64-dimensional capsules, DiverseMultiMNIST: exact-set accuracy 83.39."""
    args: Dict[str, Any] = dict(
        stem_chans=1024,
        stem_kernel=3,
        stem_stride=2,
        stem_padding=1,
        caps_types=16,
        caps_dim=64,
        primary_kernel=3,
        primary_bias=False,
        conv_caps=True,
        class_dim=64,
    )
    return _create_dynamic("capsnet_dynamic_multimnist", pretrained, defaults=args, **kwargs)


@register_model
def capsnet6_dynamic(pretrained: bool = False, **kwargs: Any) -> SixLayerCapsNet:
    """Six layers, two of them of capsules (Table 1, a): error 14.28 on CIFAR-10, 0.37 on MNIST."""
    args: Dict[str, Any] = dict(mid_caps=2048, mid_dim=16, class_dim=16, routing_iters=3)
    return _create_six_layers("capsnet6_dynamic", pretrained, defaults=args, **kwargs)
