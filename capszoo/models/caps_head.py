"""Capsule heads on trunks: the networks of the SR-CapsNet paper, and any timm backbone.

Paper: Hahn, Pyeon, Kim, "Self-Routing Capsule Networks" (NeurIPS 2019): ``resnet20_avg``, ``resnet20_conv``,
``resnet20_dynamic``, ``resnet20_em``, ``resnet20_selfrouting``, the last three with ``depth=2`` as well. The trunk is
the CIFAR ResNet-20 (16-32-64 channels, parameter-free shortcuts). The public release was read for facts.

``resnet20_idpa`` (our choice) is the same trunk and the same 32 primary capsules of 16 dimensions with the routing of
Tsai et al., "Capsules with Inverted Dot-Product Attention Routing" (2020, arXiv:2002.04764).
``resnet20_heinsen`` (our choice) is the same trunk with the head of Heinsen, "An Algorithm for Routing Vectors in
Sequences" (2022, arXiv:2211.11754), whose tokens are the pixels of the trunk's map. ``caps_head`` is any timm backbone
with any routing of :data:`capszoo.models._heads.HEADS`; :func:`attach_head` creates it in one call.
"""

from collections import OrderedDict
from functools import partial
from typing import Any, Callable, Collection, Dict, List, Optional, Set, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import resample_abs_pos_embed
from timm.models import register_model
from timm.models._features import feature_take_indices
from timm.models._manipulate import group_parameters
from torch import Tensor

from capszoo._pretrained.facts import model_input_size, own_facts, set_own_facts
from capszoo.errors import UsageError

from ._backbones import (
    BackboneFeatures,
    BackboneLevels,
    backbone_args,
    create_backbone,
    create_backbone_cfg,
    described_backbone,
    feature_levels_of,
    first_convolution,
    prune_stages,
)
from ._base import CapsuleNet, CapsuleOutput, CouplingLayout, Votes, feature_levels
from ._blocks import cifar_resnet_stages, init_conv_weights
from ._builder import build_capsule_model, is_registered, model_cfg, zoo_cfgs
from ._heads import HEADS, create_head, head_arguments, unknown_routing
from ._inspect import freeze_batch_statistics

__all__ = [
    "BackboneNet",
    "HeadNet",
    "HeinsenResNet",
    "PlainHeadResNet",
    "RoutedResNet",
    "SelfRoutingResNet",
    "attach_head",
]


class HeadNet(CapsuleNet):
    """Feature stages and a :class:`CapsuleHead`.

    A subclass sets ``stages``, ``feature_info`` and calls :meth:`_attach` last.
    """

    classifier_name = "head.classes"

    def _attach(self, chans: int, grid: Tuple[int, int], routing: str, options: Dict[str, Any]) -> None:
        self.num_features = chans
        # a module given to `attach_head` may be on any device and of any dtype
        self.head = self._like_parameters(create_head(chans, grid, self.num_classes, routing, **options))
        self.head_hidden_size = self.head.hidden_size
        self.map_quantity = self.head.map_quantity
        self.readout = tuple(f"head.{name}" for name in self.head.readout)
        self._make_head()

    def get_classifier(self) -> nn.Module:
        return getattr(self.head, "classes", self.head)

    def _set_classifier(self, layer: nn.Module) -> None:
        self.head.classes = layer

    def _make_classifier(self) -> nn.Module:
        return self.head.make_classes(self.num_classes)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Feature map to class scores ``[b, n]``; ``pre_logits``: the class layer's input, pooled by the head."""
        if self.num_classes == 0 and self.global_pool == "":
            return x
        if pre_logits or self.num_classes == 0:
            return self.head.pooled(x)
        return self.head(x)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        return self.head.class_capsules(x)

    @torch.jit.ignore
    def forward_capsules(self, x: Tensor) -> CapsuleOutput:
        """Images to scores, class capsules, activations and couplings (see the head's ``route``)."""
        self._require_classes()
        out = self.head.route(self.forward_features(x))
        return CapsuleOutput(out.scores, out.poses, out.activations, out.couplings)

    @torch.jit.ignore
    def coupling_map(self, x: Tensor) -> Tensor:
        """Images to ``[b, n, h', w']``: share of each position of the head's grid in each class; sums to 1."""
        self._require_classes()
        return self.head.coupling_map(self.forward_features(x))

    @torch.jit.ignore
    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return self.head.coupling_layouts()

    @torch.jit.ignore
    def class_votes(self, x: Tensor) -> Votes:
        self._require_classes()
        return self.head.class_votes(self.forward_features(x))

    def _drop_head(self) -> None:
        super()._drop_head()
        self.head = nn.Identity()


class _HeadResNet(HeadNet):
    """CIFAR ResNet and a head."""

    def _build(self, layers: int, routing: str, options: Dict[str, Any]) -> None:
        stages = cifar_resnet_stages(self.in_chans, layers)
        self.stages = nn.Sequential(stages)
        self.feature_info = feature_levels(zip(stages, (16, 16, 32, 64), (1, 1, 2, 4), strict=True))
        init_conv_weights(self.stages)
        rows, columns = (-(-size // 4) for size in self.img_size)
        self._attach(64, (rows, columns), routing, options)


class PlainHeadResNet(_HeadResNet):
    """The baselines without capsules.

    Args:
        num_classes: classes; 0 returns the pooled features.
        in_chans, img_size: channels and size of the images; weights depend on the size with ``routing="conv"``.
        routing: ``"avg"``, ``"max"`` or ``"conv"``.
        layers: depth of the ResNet, 6n + 2.
        global_pool: ``"avg"``; ``""`` returns the feature map without classes.
        drop_rate: dropout of the class layer's input.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        routing: str = "avg",
        layers: int = 20,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        if routing not in ("avg", "max", "conv"):
            raise ValueError(f"routing must be 'avg', 'max' or 'conv', not {routing!r}")
        super().__init__(num_classes, in_chans, img_size, global_pool, HEADS[routing].fixed_grid)
        self._build(layers, routing, dict(drop_rate=drop_rate))


class SelfRoutingResNet(_HeadResNet):
    """CIFAR ResNet and self-routing, which has no iterations.

    Couplings of :meth:`forward_capsules`: with ``depth=2``, ``[b, h', w', j, 9*i]`` of the first layer; always
    ``[b, n, i]`` of the class layer, children ordered (row, column, type). ``poses`` are the weighted means of the
    children's, because the paper's last layer has none.

    Args:
        num_classes: classes; 0 returns the pooled features.
        in_chans, img_size: channels and size of the images; weights depend on the size.
        depth: capsule layers, 1 or 2.
        caps_types, caps_dim: primary capsule types, and their pose dimension.
        layers: depth of the ResNet, 6n + 2.
        global_pool: ``"avg"``; ``""`` returns the feature map without classes.
        drop_rate: dropout of single entries of the class layer's child poses, not of whole capsules.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        depth: int = 1,
        caps_types: int = 32,
        caps_dim: int = 16,
        layers: int = 20,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed_input_size=True)
        options = dict(caps_types=caps_types, caps_dim=caps_dim, depth=depth, drop_rate=drop_rate)
        self._build(layers, "self_routing", options)


class RoutedResNet(_HeadResNet):
    """CIFAR ResNet and an iterative routing.

    Couplings of :meth:`forward_capsules` as in :class:`SelfRoutingResNet`.

    Args:
        num_classes: classes; 0 returns the pooled features.
        in_chans, img_size: channels and size of the images; weights depend on the size.
        routing: ``"dynamic"``, ``"em"``, ``"idpa"`` or ``"self_attention"``.
        depth: capsule layers, 1 or 2 (2 with dynamic and em alone).
        caps_types, caps_dim: primary capsule types, and their pose dimension.
        routing_iters: routing iterations; None uses the routing's default (3; idpa 2). Self-attention has none
            and ignores it.
        even_couplings: do not route, with the same parameters (see :func:`capszoo.models._heads.create_head`).
        layers: depth of the ResNet, 6n + 2.
        global_pool: ``"avg"``; ``""`` returns the feature map without classes.
        drop_rate: dropout of single entries of the class layer's child poses, not of whole capsules.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        routing: str = "dynamic",
        depth: int = 1,
        caps_types: int = 32,
        caps_dim: int = 16,
        routing_iters: Optional[int] = None,
        layers: int = 20,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        even_couplings: bool = False,
    ) -> None:
        if routing not in ("dynamic", "em", "idpa", "self_attention"):
            raise ValueError(f"routing must be 'dynamic', 'em', 'idpa' or 'self_attention', not {routing!r}")
        deeper = routing in ("dynamic", "em")
        if not deeper and depth != 1:
            raise ValueError(f"the {routing} head has one capsule layer: depth must be 1, not {depth}")
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed_input_size=True)
        options: Dict[str, Any] = dict(caps_types=caps_types, caps_dim=caps_dim, drop_rate=drop_rate)
        options["even_couplings"] = even_couplings
        if routing_iters is not None and routing != "self_attention":
            options["num_iters"] = routing_iters
        if deeper:
            options["depth"] = depth
        self._build(layers, routing, options)


class HeinsenResNet(_HeadResNet):
    """CIFAR ResNet and Heinsen's routing: the pixels of the last map to hidden capsules, twice, and to the classes.

    The couplings of :meth:`forward_capsules` are credit, ``[b, j, i]`` of each layer: of any sign, no shares.

    Args:
        num_classes: classes; 0 returns the pooled features.
        in_chans, img_size: channels and size of the images; no weight depends on the size.
        num_caps: hidden capsules of each of the two layers.
        caps_dim: pose dimension of a hidden capsule; 0 takes the map's channels.
        routing_iters: routing iterations.
        layers: depth of the ResNet, 6n + 2.
        global_pool: ``"avg"``; ``""`` returns the feature map without classes.
        drop_rate: dropout of single entries of the class layer's child poses, not of whole capsules.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        num_caps: int = 64,
        caps_dim: int = 0,
        routing_iters: int = 2,
        layers: int = 20,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool)
        options = dict(num_caps=num_caps, caps_dim=caps_dim, num_iters=routing_iters, drop_rate=drop_rate)
        self._build(layers, "heinsen", options)


#: Keys of a configuration that describe the images, which a ``caps_head`` has from its backbone.
IMAGE_SETTINGS = ("mean", "std", "interpolation", "crop_pct", "crop_mode")


class BackboneNet(HeadNet):
    """Any timm backbone and a capsule head.

    Args:
        num_classes: classes; 0 returns the class layer's input.
        in_chans, img_size: of the images. Most routings have weights for every grid position: other sizes are refused.
        backbone: timm name, ``"hf-hub:…"`` or ``"local-dir:…"``; or a module with ``forward_features``.
        routing: a name of :data:`HEADS`.
        routing_iters: routing iterations, for an iterative routing; None uses its default.
        proj_chans: channels of the 1x1 projection (BatchNorm, ReLU) before the head; 0 omits it.
        max_grid: a map with more rows or columns is first average-pooled to at most this many.
        head_args: further arguments of the head's class.
        backbone_pretrained: load the backbone's weights; nothing is downloaded otherwise.
        backbone_args: further arguments of the backbone's network.
        cache_dir: folder for the backbone's downloads.
        out_index: level of the backbone's features, as in timm's ``out_indices``, whose map the head takes; the stages
            after it are dropped. None takes the last map.
        global_pool: ``"avg"``; ``""`` returns the feature map without classes.
        drop_rate: dropout of the class layer's input.

    Raises:
        ValueError: an unknown backbone, routing or argument, or a backbone without this feature map; one line.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 224,
        backbone: Any = "resnet18",
        routing: str = "idpa",
        routing_iters: Optional[int] = None,
        proj_chans: int = 64,
        max_grid: int = 8,
        head_args: Optional[Dict[str, Any]] = None,
        backbone_pretrained: bool = False,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        backbone_args: Optional[Dict[str, Any]] = None,
        cache_dir: Optional[str] = None,
        out_index: Optional[int] = None,
    ) -> None:
        options: Dict[str, Any] = dict(proj_chans=proj_chans, max_grid=max_grid, drop_rate=drop_rate)
        options.update(head_args or {})
        arguments = head_arguments(routing, set(options))  # before a backbone is created or downloaded
        if routing_iters is not None:
            if "num_iters" not in arguments:
                raise ValueError(f"the {routing} head has no iterations: leave routing_iters out")
            options["num_iters"] = routing_iters
        super().__init__(num_classes, in_chans, img_size, global_pool, HEADS[routing].fixed_grid)
        if isinstance(backbone, str):
            backbone = create_backbone(
                backbone, backbone_pretrained, in_chans, self.img_size, cache_dir, backbone_args
            )
        last = None if out_index is None else prune_stages(backbone, out_index)
        self.is_cut = last is not None
        levels = int(options.get("levels", 1))
        if levels > 1:
            features: BackboneFeatures = BackboneLevels(backbone, in_chans, self.img_size, levels, last)
            options["lower_chans"] = features.lower_chans
        else:
            features = BackboneFeatures(backbone, in_chans, self.img_size)
        self.backbone_cfg: Any = dict(getattr(backbone, "pretrained_cfg", None) or {})
        self.stages = nn.Sequential(OrderedDict(backbone=features))
        self.feature_info = feature_levels_of(
            backbone, "stages.backbone.model", features.chans, self.img_size, features.grid
        )[:last]
        #: Name of the first convolution, in which weights are adapted to other channels.
        first = first_convolution(features.model)
        self.first_conv = f"stages.backbone.model.{first}" if first else None
        self._attach(features.chans, features.grid, routing, options)

    @torch.jit.ignore
    def _resample(self, name: str, weight: Tensor, img_size: Tuple[int, int]) -> Optional[Tensor]:
        """Position embeddings of a vision transformer, by timm's interpolation."""
        model: Any = self.stages.backbone.model  # type: ignore[union-attr]
        patches: Any = getattr(model, "patch_embed", None)
        if name != "stages.backbone.model.pos_embed" or not hasattr(patches, "dynamic_feat_size"):
            return None
        prefix = 0 if getattr(model, "no_embed_class", False) else int(getattr(model, "num_prefix_tokens", 0))
        grid = list(patches.dynamic_feat_size(img_size))
        if weight.dim() != 3 or weight.shape[1] != grid[0] * grid[1] + prefix:
            return None
        return resample_abs_pos_embed(weight, list(patches.grid_size), grid, num_prefix_tokens=prefix)

    def train(self, mode: bool = True) -> "BackboneNet":
        """As in PyTorch, but frozen parts of the backbone stay in eval mode: their norms keep their statistics."""
        super().train(mode)
        freeze_batch_statistics(self.stages)
        return self

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """As in the backbone; one without this method, or whose method refuses, is recomputed as a whole."""
        model: Any = self.stages.backbone.model  # type: ignore[union-attr]
        whole = enable
        if hasattr(model, "set_grad_checkpointing"):
            try:
                model.set_grad_checkpointing(enable)
                whole = False
            except AssertionError:  # timm's VGG and others have the method, and refuse to enable it
                pass
        super().set_grad_checkpointing(whole)

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        model: Any = self.stages.backbone.model  # type: ignore[union-attr]
        theirs: Set[str] = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
        return super().no_weight_decay() | {f"stages.backbone.model.{name}" for name in theirs}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> Callable[[str], Tuple[float, ...]]:
        """The backbone's order of depth; the head last."""
        model: Any = self.stages.backbone.model  # type: ignore[union-attr]
        matcher = getattr(model, "group_matcher", None)
        order = group_parameters(model, matcher(coarse=coarse), reverse=True) if matcher else {}

        def depth_of(name: str) -> Tuple[float, ...]:
            if not name.startswith("stages."):
                return (float("inf"),)
            return (float(order.get(name.removeprefix("stages.backbone.model."), 0)),)

        return depth_of

    def _level_indices(self, indices: Any) -> Any:
        """timm's indices of feature levels, as the backbone counts them: a cut one counts its dropped levels too."""
        return feature_take_indices(len(self.feature_info), indices)[0] if self.is_cut else indices

    @torch.jit.ignore
    def forward_intermediates(self, x: Tensor, indices: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in the backbone (timm's signature); the final features as a map ``[b, c, h, w]``.

        A backbone without this method has one level, the final features.
        """
        features: Any = self.stages.backbone
        if not hasattr(features.model, "forward_intermediates"):
            return super().forward_intermediates(x, indices, *args, **kwargs)
        features_out = features.model.forward_intermediates(x, self._level_indices(indices), *args, **kwargs)
        if isinstance(features_out, tuple):
            if isinstance(features, BackboneLevels):  # the final features are joined maps
                return self.forward_features(x), features_out[1]
            return features.to_map(features_out[0]), features_out[1]
        return features_out

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: Union[int, List[int]] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> List[int]:
        features: Any = self.stages.backbone
        if not hasattr(features.model, "prune_intermediate_layers"):
            return super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if prune_head:
            self._drop_head()
            if isinstance(features, BackboneLevels):  # the last map is what remains
                features.levels = 1
        # without its head, which most of timm's networks would reset, and which is gone already
        return features.model.prune_intermediate_layers(self._level_indices(indices), prune_norm, False)

    def describe(self, cfg: Dict[str, Any], overridden: Collection[str] = ()) -> None:
        """Complete the network's configuration by the backbone's image settings, except for those that are stated."""
        for key in IMAGE_SETTINGS:
            if key not in overridden and self.backbone_cfg.get(key) is not None:
                cfg[key] = self.backbone_cfg[key]
        for key in ("mean", "std"):
            if key not in overridden and len(cfg[key]) != self.in_chans:
                cfg[key] = (0.5,) * self.in_chans
        # the configuration names the paper of the default routing
        if getattr(self.head, "routing", "idpa") != "idpa":
            cfg["paper_ids"], cfg["paper_name"] = None, None
        cfg["first_conv"] = self.first_conv
        cfg["input_size"] = (self.in_chans, *self.img_size)
        cfg["pool_size"] = self.stages.backbone.grid  # type: ignore[union-attr]


def attach_head(
    backbone: Union[str, nn.Module],
    routing: str = "idpa",
    num_classes: int = 10,
    img_size: Union[int, Tuple[int, int], None] = None,
    in_chans: Optional[int] = None,
    pretrained: bool = False,
    freeze: bool = False,
    **head_args: Any,
) -> "BackboneNet":
    """Create a capsule network from any timm backbone.

    Args:
        backbone: timm name, ``"hf-hub:USER/NAME"`` or ``"local-dir:folder"``; or a module with ``forward_features``,
            which is used without a copy and loses its classifier.
        routing: of the head, a name of ``capszoo.models._heads.HEADS``: a routing such as ``idpa`` or ``em``, or one
            of the baselines without capsules ``avg``, ``max`` and ``conv``.
        num_classes: classes.
        img_size: of the images, one number or (rows, columns) in pixels; None uses the backbone's.
        in_chans: channels of the images; None uses the backbone's.
        pretrained: load the backbone's weights; nothing is downloaded otherwise. A module brings its own.
        freeze: freeze the backbone: its parameters need no gradient, and it stays in eval mode in training, so that the
            statistics of its norms do not change.
        **head_args: of the head: ``proj_chans`` (64), ``max_grid`` (8), ``routing_iters``, ``even_couplings=True``
            (the same head without routing), ``out_index`` (the backbone's feature level whose map the head takes,
            by default the last), and those specific to the routing, such as ``caps_types``, ``depth`` or ``levels``.

    Returns:
        A network with all of the zoo's methods.

    Raises:
        ValueError: an unknown backbone, routing or argument, or a backbone without a feature map; one line.
        WeightsError: weights are requested but do not exist.

    Examples:
        ``attach_head("resnet18.a1_in1k", "idpa", num_classes=37, pretrained=True)`` loads the backbone's weights.

        >>> import torch
        >>> net = attach_head("resnet18", "idpa", num_classes=37, img_size=64).eval()
        >>> tuple(net(torch.zeros(1, 3, 64, 64)).shape)
        (1, 37)
    """
    if routing not in HEADS:
        raise unknown_routing(routing)
    if pretrained and not isinstance(backbone, str):
        raise ValueError(
            "pretrained=True loads a named backbone's weights, a module has its own: leave it out"
        )
    own: Dict[str, Any] = {
        key: head_args.pop(key)
        for key in ("proj_chans", "max_grid", "drop_rate", "routing_iters", "out_index")
        if key in head_args
    }
    options: Dict[str, Any] = dict(
        own, backbone=backbone, routing=routing, num_classes=num_classes, head_args=head_args
    )
    if isinstance(backbone, str):
        plain = create_backbone_cfg(backbone, described_backbone(backbone))
        options["backbone_pretrained"] = pretrained
        native = tuple(plain.get("input_size") or (3, 224, 224))
    else:
        try:
            native = model_input_size(backbone)
        except UsageError:  # it states none
            native = (3, 224, 224)
    options["img_size"] = native[1:] if img_size is None else img_size
    options["in_chans"] = native[0] if in_chans is None else in_chans
    net: BackboneNet = caps_head(**options)
    if freeze:
        net.stages.requires_grad_(False)
        net.train(net.training)
    return net


_cfg = partial(
    model_cfg,
    pool_size=(8, 8),
    fixed_input_size=True,
    first_conv="stages.stem.conv",
    classifier="head.classes",
    paper_name="Self-Routing Capsule Networks",
    paper_ids="neurips:2019/hash/e46bc064f8e92ac2c404b9871b2a4ef2",
)

_IDPA_PAPER: Dict[str, Any] = dict(
    paper_ids=("arXiv:2002.04764",),
    paper_name="Capsules with Inverted Dot-Product Attention Routing",
)

default_cfgs = zoo_cfgs(
    {
        "resnet20_avg": _cfg(fixed_input_size=False),
        "resnet20_conv": _cfg(),
        "resnet20_dynamic": _cfg(),
        "resnet20_em": _cfg(),
        "resnet20_heinsen": _cfg(
            fixed_input_size=False,
            paper_ids=("arXiv:2211.11754",),
            paper_name="An Algorithm for Routing Vectors in Sequences",
        ),
        "resnet20_idpa": _cfg(**_IDPA_PAPER),
        "resnet20_selfrouting": _cfg(),
        "caps_head": _cfg(
            input_size=(3, 224, 224),
            pool_size=(7, 7),
            first_conv="stages.backbone.model.conv1",
            **_IDPA_PAPER,
        ),
    }
)


_create_plain = partial(build_capsule_model, PlainHeadResNet)
_create_routed = partial(build_capsule_model, RoutedResNet)
_create_heinsen = partial(build_capsule_model, HeinsenResNet)
_create_self_routing = partial(build_capsule_model, SelfRoutingResNet)
_create_backbone_net = partial(build_capsule_model, BackboneNet)


@register_model
def resnet20_avg(pretrained: bool = False, **kwargs: Any) -> PlainHeadResNet:
    """ResNet-20 with average pooling, the twin of the capsule heads: CIFAR-10 error 7.94."""
    args = dict(routing="avg")
    return _create_plain("resnet20_avg", pretrained, defaults=args, **kwargs)


@register_model
def resnet20_conv(pretrained: bool = False, **kwargs: Any) -> PlainHeadResNet:
    """ResNet-20 with a convolution over the whole map, as many weights as self-routing: CIFAR-10 error 10.01."""
    args = dict(routing="conv")
    return _create_plain("resnet20_conv", pretrained, defaults=args, **kwargs)


@register_model
def resnet20_dynamic(pretrained: bool = False, **kwargs: Any) -> RoutedResNet:
    """ResNet-20 with dynamic routing: CIFAR-10 error 8.46, with two capsule layers 7.86."""
    args = dict(routing="dynamic", routing_iters=3)
    return _create_routed("resnet20_dynamic", pretrained, defaults=args, **kwargs)


@register_model
def resnet20_em(pretrained: bool = False, **kwargs: Any) -> RoutedResNet:
    """ResNet-20 with EM routing: CIFAR-10 error 10.25, with two capsule layers 12.52."""
    args = dict(routing="em", routing_iters=3)
    return _create_routed("resnet20_em", pretrained, defaults=args, **kwargs)


@register_model
def resnet20_heinsen(pretrained: bool = False, **kwargs: Any) -> HeinsenResNet:
    """ResNet-20 with the head of Heinsen's routing, 64 tokens to 64, 64 and the classes (our choice of network)."""
    args = dict(num_caps=64, routing_iters=2)
    return _create_heinsen("resnet20_heinsen", pretrained, defaults=args, **kwargs)


@register_model
def resnet20_idpa(pretrained: bool = False, **kwargs: Any) -> RoutedResNet:
    """ResNet-20 with one layer of inverted dot-product attention routing (our choice of network)."""
    args = dict(routing="idpa", routing_iters=2)
    return _create_routed("resnet20_idpa", pretrained, defaults=args, **kwargs)


@register_model
def resnet20_selfrouting(pretrained: bool = False, **kwargs: Any) -> SelfRoutingResNet:
    """ResNet-20 with self-routing (SR-CapsNet): CIFAR-10 error 8.17, with two capsule layers 7.86."""
    args = dict(depth=1)
    return _create_self_routing("resnet20_selfrouting", pretrained, defaults=args, **kwargs)


@register_model
def caps_head(pretrained: bool = False, **kwargs: Any) -> BackboneNet:
    """Any timm backbone with any routing as its head, by backbone=… and routing=…; ResNet-18 and IDPA by default."""
    args = dict(backbone="resnet18", routing="idpa")
    # weights state the images that they were trained on, which need not be the backbone's
    cfg = kwargs.get("pretrained_cfg")
    whole = pretrained or not (isinstance(cfg, str) or is_registered(cfg, "caps_head"))
    overridden = IMAGE_SETTINGS if whole else tuple(kwargs.get("pretrained_cfg_overlay") or ())
    backbone = kwargs.get("backbone")
    config = described_backbone(backbone, kwargs.get("cache_dir")) if isinstance(backbone, str) else None
    if config is not None:
        kwargs["backbone_args"] = {**backbone_args(config), **(kwargs.get("backbone_args") or {})}
    net = _create_backbone_net("caps_head", pretrained, defaults=args, **kwargs)
    inner: Any = net if isinstance(net, BackboneNet) else getattr(net, "model", None)
    if isinstance(inner, BackboneNet):  # or timm's wrapper of one, for features_only
        inner.describe(net.pretrained_cfg, overridden)
    if config is not None:  # a saved network names the architecture, not this machine's folder
        net._model_args["backbone"] = config.architecture
        facts = own_facts(net.pretrained_cfg)
        facts["model_args"]["backbone"] = config.architecture
        set_own_facts(net.pretrained_cfg, facts)
    return net
