"""Networks with routing as their pooling layer, and a ResNet whose features route to class capsules.

Paper: Zhao, Huang, "Exploring Dynamic Routing As A Pooling Layer" (ICCV workshop, 2019): section 4.1 and Table 1
(``cnn_routingpool``), section 4.2 and Table 2 (``resnet*_routingpool``), section 4.3 and Table 4
(``resnet20_routingcaps``). The residual networks are those of He et al. 2016, section 4.2, with parameter-free
shortcuts.

Our choices, where the paper is silent: three routing iterations; stride 1 and padding 2 in the plain CNN; capsules of
16 channels in the ResNets; in ``resnet20_routingcaps`` transforms shared over positions, without a bias (with them the
network has the size that the paper states, about 2.5M parameters with the decoder at 40x40 pixels, 2.2M at 36x36).
"""

from collections import OrderedDict
from functools import partial
from typing import Any, Optional, Tuple, Union

import torch
import torch.nn as nn
from timm.models import register_model
from torch import Tensor

from capszoo.layers import upcast_half
from capszoo.layers.routing_pool import RoutingCaps, RoutingPool2d

from ..errors import NoCapsules
from ._base import CapsuleNet, CapsuleOutput, CouplingLayout, LengthCapsNet, Votes, feature_levels
from ._blocks import check_caps_dim, cifar_resnet_stages, init_conv_weights, score_parts
from ._builder import MNIST, build_capsule_model, model_cfg, zoo_cfgs

__all__ = ["RoutingCapsResNet", "RoutingPoolCNN", "RoutingPoolNet", "RoutingPoolResNet"]

_POOLS = ("routing", "avg", "max")

torch.fx.wrap("upcast_half")


class ConvAct(nn.Module):
    """5x5 convolution with a bias, ReLU: ``[b, in, h, w] -> [b, out, h, w]``."""

    def __init__(self, in_chans: int, out_chans: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, out_chans, 5, padding=2)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class ReducePool(nn.Module):
    """Average or maximum over the grid: ``[b, c, h, w] -> [b, c]``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "max":
            return x.amax(dim=(2, 3))
        return x.mean(dim=(2, 3))

    def extra_repr(self) -> str:
        return repr(self.kind)


class RoutingPoolNet(CapsuleNet):
    """Feature stages, a pooling layer, one linear classifier; the networks of the paper's Tables 1 and 2.

    There are no class capsules: :meth:`forward_capsules` returns as "poses" ``[b, n, groups]`` the contribution of each
    pooled capsule to each class score (their sum and the bias of a linear classifier are the score), as activations the
    scores, and as couplings one tensor ``[b, groups, h, w]`` with routing pooling, none otherwise.

    Args:
        num_classes: classes; 0 returns the pooled features.
        in_chans: channels of the images.
        img_size: height and width of the images in pixels; no weight depends on it.
        pool: ``"routing"``, ``"avg"`` or ``"max"``.
        lam: λ of the routing; 0 is average pooling exactly.
        caps_dim: channels of a capsule; divides those of the last stage.
        routing_iters: routing iterations.
        global_pool: timm's name for ``pool``, which it overrides if given; ``""`` leaves the features unpooled
            while there is no classifier.
        drop_rate: dropout before the classifier.

    Raises:
        ValueError: an argument is out of range.
    """

    classifier_name = "fc"

    def __init__(
        self,
        num_classes: int,
        in_chans: int,
        img_size: Union[int, Tuple[int, int]],
        pool: str,
        lam: float,
        caps_dim: int,
        routing_iters: int,
        global_pool: Optional[str],
        drop_rate: float,
    ) -> None:
        if pool not in _POOLS:
            raise ValueError(f"pool must be one of {', '.join(map(repr, _POOLS))}, not {pool!r}")
        global_pool = pool if global_pool is None else global_pool
        super().__init__(num_classes, in_chans, img_size, global_pool, pools=_POOLS)
        self.default_pool = global_pool or pool
        self.lam, self.caps_dim, self.routing_iters = float(lam), caps_dim, routing_iters
        self.head_drop = nn.Dropout(drop_rate)

    def _build(
        self, stages: "OrderedDict[str, nn.Module]", chans: Tuple[int, ...], reductions: Tuple[int, ...]
    ) -> None:
        """The feature stages, with their channels and reductions, and what follows them; last call of ``__init__``."""
        check_caps_dim(self.caps_dim, chans[-1])
        self.num_features = self.head_hidden_size = chans[-1]
        self.stages = nn.Sequential(stages)
        self.feature_info = feature_levels(zip(stages, chans, reductions, strict=True))
        init_conv_weights(self.stages)
        self._set_pool(self.global_pool)
        self._make_head()

    def _make_classifier(self) -> nn.Module:
        return nn.Linear(self.num_features, self.num_classes)

    def _set_pool(self, kind: Optional[str]) -> None:
        """Set the pooling; None keeps it. A classifier needs one: ``""`` then restores the default."""
        super()._set_pool(kind)
        if self.global_pool == "" and self.num_classes:
            self.global_pool = self.default_pool
        self.routes = self.global_pool == "routing"
        if self.routes:
            pool: nn.Module = RoutingPool2d(self.caps_dim, self.lam, self.routing_iters, flatten=True)
        else:
            pool = ReducePool(self.global_pool) if self.global_pool else nn.Identity()
        self.pool = pool.train(self.training)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """``[b, C, h, w]`` to scores ``[b, n]``; to ``[b, C]`` with ``pre_logits`` or without a classifier."""
        x = self.pool(x)  # [b, C]; unchanged without pooling
        x = self.head_drop(x)
        if pre_logits:
            return x
        return self.fc(x)

    def _route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Feature map ``[b, C, h, w]`` to the classifier's input ``[b, C]``, and the weights of the positions.

        The weights ``[b, groups, h, w]`` of a pooled capsule sum to 1 over the positions.
        """
        self._require_classes()
        h, w = x.shape[2], x.shape[3]
        if self.global_pool == "routing":
            assert isinstance(self.pool, RoutingPool2d)
            pooled, weights = self.pool.route(x)
        elif self.global_pool == "max":  # each channel selects one position; share per position in a group
            pooled = self.pool(x)
            taken = torch.zeros_like(x, dtype=torch.float32).flatten(2)
            taken = taken.scatter(2, x.flatten(2).argmax(2, keepdim=True), 1.0)
            weights = taken.unflatten(1, (-1, self.caps_dim)).mean(2).unflatten(2, (h, w))
        else:
            pooled, shape = self.pool(x), (x.shape[0], x.shape[1] // self.caps_dim, h, w)
            weights = torch.full(shape, 1.0 / (h * w), device=x.device)
        return self.head_drop(pooled), weights

    @torch.jit.ignore
    def forward_capsules(self, x: Tensor) -> CapsuleOutput:
        pooled, weights = self._route(self.forward_features(x))
        scores = self.fc(pooled)
        parts = score_parts(pooled, self.fc, self.caps_dim)
        return CapsuleOutput(scores, parts, scores, (weights,) if self.global_pool == "routing" else ())

    @torch.jit.ignore
    def coupling_map(self, x: Tensor) -> Tensor:
        """Couplings of the groups, averaged with weights: each group's contribution to the class score (minimum 0).

        ``[b, in_chans, h, w] -> [b, n, h', w']``. If no group contributes to a class, all have the same weight.
        """
        x = self.forward_features(x)
        pooled, weights = self._route(x)
        share = score_parts(pooled, self.fc, self.caps_dim).float().clamp_min(1e-6)  # [b, n, groups]
        share = share / share.sum(-1, keepdim=True)
        return torch.bmm(share, weights.float().flatten(2)).unflatten(2, x.shape[2:])

    @torch.jit.ignore
    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return (CouplingLayout(1, "children"),) if self.global_pool == "routing" else ()

    @torch.jit.ignore
    def class_votes(self, x: Tensor) -> Votes:
        """The untransformed children of each group as votes; their parents are the pooled groups."""
        if self.global_pool != "routing":
            raise NoCapsules("average and maximum pooling route nothing, so there are no votes")
        self._require_classes()
        x = self.forward_features(x)
        pool: Any = self.pool
        return Votes(pool.capsules(x), pool(x).unflatten(1, (-1, self.caps_dim)), False)


class RoutingPoolCNN(RoutingPoolNet):
    """Four 5x5 convolutions of 64 channels, a pooling layer, one linear classifier (section 4.1).

    Arguments are those of :class:`RoutingPoolNet`, and ``width``, the channels of each convolution.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        width: int = 64,
        pool: str = "routing",
        lam: float = 0.5,
        caps_dim: int = 16,
        routing_iters: int = 3,
        global_pool: Optional[str] = None,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(
            num_classes, in_chans, img_size, pool, lam, caps_dim, routing_iters, global_pool, drop_rate
        )
        stages = OrderedDict((f"conv{i + 1}", ConvAct(width if i else in_chans, width)) for i in range(4))
        self._build(stages, (width,) * 4, (1,) * 4)  # type: ignore[arg-type]


class RoutingPoolResNet(RoutingPoolNet):
    """CIFAR ResNet of ``depth = 6n + 2`` layers (16-32-64 channels), routing in place of average pooling.

    Arguments are those of :class:`RoutingPoolNet`, and ``depth``.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        depth: int = 20,
        pool: str = "routing",
        lam: float = 5.0,
        caps_dim: int = 16,
        routing_iters: int = 3,
        global_pool: Optional[str] = None,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(
            num_classes, in_chans, img_size, pool, lam, caps_dim, routing_iters, global_pool, drop_rate
        )
        self._build(cifar_resnet_stages(in_chans, depth), (16, 16, 32, 64), (1, 1, 2, 4))


class RoutingCapsResNet(LengthCapsNet):
    """CIFAR ResNet without pool and classifier, whose features route to class capsules (section 4.3).

    The channels at a grid position are capsules of dimension ``caps_dim``. Algorithm 1 routes them to one capsule per
    class, whose length is the class score. :meth:`forward_capsules` returns poses ``[b, n, pose_dim]``, their lengths,
    and one couplings tensor ``[b, n, types, h, w]`` that sums to 1 over types and positions.

    Args:
        num_classes: classes; 0 omits the class capsules (and the decoder).
        in_chans: channels of the images.
        img_size: height and width of the images in pixels; only the decoder depends on it.
        depth: layers of the ResNet that provides the features, 6n + 2.
        caps_dim: channels of a child capsule, a divisor of 64 (the paper's Table 4 has 32; the default, 16, is its
            size in the plain CNN).
        pose_dim: pose dimension of a class capsule.
        lam: λ of the routing (the paper uses 1 for affNIST, 5 for MultiMNIST).
        routing_iters: routing iterations.
        global_pool: ``"avg"``, or ``""`` to return the feature map without class capsules.
        decoder: add the decoder (see :meth:`reconstruct`).
        drop_rate: dropout of single entries of the feature map that is routed, not of whole capsules.
    """

    map_quantity = "coupling"

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 1,
        img_size: Union[int, Tuple[int, int]] = 40,
        depth: int = 20,
        caps_dim: int = 16,
        pose_dim: int = 16,
        lam: float = 1.0,
        routing_iters: int = 3,
        global_pool: str = "avg",
        decoder: Union[bool, str] = False,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, decoder=decoder)
        self.num_features = self.head_hidden_size = 64
        check_caps_dim(caps_dim, self.num_features)
        self.caps_dim, self.class_dim = caps_dim, pose_dim
        self.lam, self.routing_iters = float(lam), routing_iters
        stages = cifar_resnet_stages(in_chans, depth)
        self.stages = nn.Sequential(stages)
        self.feature_info = feature_levels(zip(stages, (16, 16, 32, 64), (1, 1, 2, 4), strict=True))
        init_conv_weights(self.stages)
        self.head_drop = nn.Dropout(drop_rate)
        self._make_head()

    def _make_classifier(self) -> nn.Module:
        types = self.num_features // self.caps_dim
        return RoutingCaps(
            types, self.caps_dim, self.num_classes, self.class_dim, self.lam, self.routing_iters
        )

    def _children(self, x: Tensor) -> Tensor:
        return self.head_drop(x)

    def _lengths(self, poses: Tensor) -> Tensor:
        """In float32 for half precision; the gradient is zero for a zero capsule."""
        return torch.linalg.vector_norm(upcast_half(poses), dim=-1).to(poses.dtype)

    @torch.jit.ignore
    def coupling_map(self, x: Tensor) -> Tensor:
        """Couplings of each class, summed over the types at a position: ``[b, n, h', w']``."""
        return self.forward_capsules(x).couplings[0].sum(2)

    @torch.jit.ignore
    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return (CouplingLayout(1, "children"),)


_cfg = partial(
    model_cfg,
    pool_size=(8, 8),
    first_conv="stages.stem.conv",
    classifier="fc",
    paper_name="Exploring Dynamic Routing As A Pooling Layer",
    paper_ids="doi:10.1109/ICCVW.2019.00095",
)

default_cfgs = zoo_cfgs(
    {
        "cnn_routingpool": _cfg(pool_size=(32, 32), first_conv="stages.conv1.conv"),
        "resnet_routingpool": _cfg(),
        "resnet20_routingpool": _cfg(),
        "resnet32_routingpool": _cfg(),
        "resnet44_routingpool": _cfg(),
        "resnet56_routingpool": _cfg(),
        "resnet20_routingcaps": _cfg(
            input_size=(1, 40, 40),
            pool_size=(10, 10),
            classifier="class_caps",
            **MNIST,
        ),
    }
)


_create_cnn = partial(build_capsule_model, RoutingPoolCNN)
_create_resnet = partial(build_capsule_model, RoutingPoolResNet)
_create_caps = partial(build_capsule_model, RoutingCapsResNet)


@register_model
def cnn_routingpool(pretrained: bool = False, **kwargs: Any) -> RoutingPoolCNN:
    """Four 5x5 convolutions of 64 and routing pooling: CIFAR-10 error 18.39 (average 19.35, max 21.39)."""
    args = dict(width=64, lam=0.5, caps_dim=16)
    return _create_cnn("cnn_routingpool", pretrained, defaults=args, **kwargs)


@register_model
def resnet_routingpool(pretrained: bool = False, **kwargs: Any) -> RoutingPoolResNet:
    """ResNet-20 with routing pooling; the same network as ``resnet20_routingpool``."""
    args = dict(depth=20, lam=5.0)
    return _create_resnet("resnet_routingpool", pretrained, defaults=args, **kwargs)


@register_model
def resnet20_routingpool(pretrained: bool = False, **kwargs: Any) -> RoutingPoolResNet:
    """ResNet-20 with routing pooling: CIFAR-10 error 8.49 (average pooling 8.73)."""
    args = dict(depth=20, lam=5.0)
    return _create_resnet("resnet20_routingpool", pretrained, defaults=args, **kwargs)


@register_model
def resnet32_routingpool(pretrained: bool = False, **kwargs: Any) -> RoutingPoolResNet:
    """ResNet-32 with routing pooling: CIFAR-10 error 7.65 (average pooling 7.89)."""
    args = dict(depth=32, lam=5.0)
    return _create_resnet("resnet32_routingpool", pretrained, defaults=args, **kwargs)


@register_model
def resnet44_routingpool(pretrained: bool = False, **kwargs: Any) -> RoutingPoolResNet:
    """ResNet-44 with routing pooling: CIFAR-10 error 7.10 (average pooling 7.22)."""
    args = dict(depth=44, lam=5.0)
    return _create_resnet("resnet44_routingpool", pretrained, defaults=args, **kwargs)


@register_model
def resnet56_routingpool(pretrained: bool = False, **kwargs: Any) -> RoutingPoolResNet:
    """ResNet-56 with routing pooling: CIFAR-10 error 6.75 (average pooling 6.97)."""
    args = dict(depth=56, lam=5.0)
    return _create_resnet("resnet56_routingpool", pretrained, defaults=args, **kwargs)


@register_model
def resnet20_routingcaps(pretrained: bool = False, **kwargs: Any) -> RoutingCapsResNet:
    """ResNet-20 features routed to class capsules: affNIST error 5.12 (λ=1, capsules of 32 channels)."""
    args = dict(depth=20, lam=1.0)
    return _create_caps("resnet20_routingcaps", pretrained, defaults=args, **kwargs)
