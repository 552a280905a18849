"""Capsule networks with EM routing.

- ``capsnet_em``, ``capsnet_em_resnet``: Tsai et al., "Capsules with Inverted Dot-Product Attention Routing" (2020,
  arXiv:2002.04764), Tables 6 and 7, and the text's ResNet backbone; on CIFAR-10 with
  the plain convolution, two iterations are best.
- ``capsnet_em_norb``, ``capsnet_em_norb_small``: the networks of Hinton, Sabour, Frosst, "Matrix capsules with EM
  routing" (2018), for 32x32 crops of smallNORB.
- ``capsnet6_em``: Li et al., "Neural Network Encapsulation" (2018, arXiv:1808.03749), Table 1 (b), appendix A.i.

Maps of matrix capsules are ``[b, caps * (p*p + 1), h, w]``: the poses, channel = capsule * p*p + row * p + column, then
the activations.

Our choices, where the papers are silent: the floor of the variances (see ``capszoo.layers.em_routing``), and how
the activations are kept from saturating the sigmoid, without which no loss on them has a gradient (Li et al. state this
too). In ``capsnet6_em`` that is their normalised cost, at a constant temperature, so that the sigmoid's input is in
[-5, 5] as in the text. In the other networks it is the inverse temperature ``lambda_t = (1 + t) / 10``, divided in each
layer by its children per parent, with which the cost grows, and an initial ``beta_v`` near minus the log of the votes'
deviation. Convolutions start as He normal, the transforms as identities plus noise. In ``capsnet6_em`` the mid capsules
form 32 types on a grid of ``mid_caps / 32`` positions; the public release of that paper computes with 512 of them, the
2048 of the text are the default, because they give the stated size.

Scores are the logits of the class activations: they keep their order where half precision rounds the activations to 1,
and can be used directly in cross-entropy. ``scores="activations"`` returns the input of the spread loss.
"""

from collections import OrderedDict
from functools import partial
from typing import Any, Dict, List, Optional, Tuple, Union

import torch
import torch.nn as nn
from timm.models import register_model
from torch import Tensor

from capszoo.layers import ClassEM, ConvEM, SharedEM
from capszoo.layers._layout import out_size, split_axis
from capszoo.layers._modules import at_least
from capszoo.layers._precision import finite_cast

from ._base import (
    CapsuleNet,
    CapsuleOutput,
    CouplingLayout,
    Votes,
    feature_levels,
    feature_levels_by_rows,
)
from ._blocks import ConvBnAct, idpa_backbone_stages, init_conv_weights, six_layer_stages
from ._builder import build_capsule_model, model_cfg, zoo_cfgs

__all__ = ["EMCapsNet", "SixLayerEMCapsNet"]

torch.fx.wrap("split_axis")


def _normalised(share: Tensor) -> Tensor:
    """Scale maps ``[b, n, h, w]`` of non-negative shares so that each sums to 1; uniform where nothing is active."""
    share = share + 1e-6
    return share / share.sum(dim=(2, 3), keepdim=True)


class NoClassCaps(nn.Identity):
    """Replaces the class capsules in a network without classes."""

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, x


class PrimaryMatrixCaps(nn.Module):
    """Poses and activations (sigmoid) by two 1x1 convolutions: ``[b, in, h, w] -> [b, caps * (p*p + 1), h, w]``."""

    def __init__(self, in_chans: int, num_caps: int, pose_size: int) -> None:
        super().__init__()
        self.pose = nn.Conv2d(in_chans, num_caps * pose_size * pose_size, 1)
        self.activation = nn.Conv2d(in_chans, num_caps, 1)
        for conv in (self.pose, self.activation):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="linear")
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.pose(x), torch.sigmoid(self.activation(x))], dim=1)


class AppendActivations(nn.Module):
    """Append activations by 3x3 convolution, BatchNorm, ReLU: ``[b, in, h, w] -> [b, in + caps, h, w]``."""

    def __init__(self, in_chans: int, num_caps: int) -> None:
        super().__init__()
        self.activation = ConvBnAct(in_chans, num_caps, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.activation(x)], dim=1)


class EMNetBase(CapsuleNet):
    """Shared by both networks: class capsules by EM routing, and the scores computed from their activations."""

    map_quantity = "coupling × activation"
    no_classifier = NoClassCaps

    def __init__(
        self,
        num_classes: int,
        in_chans: int,
        img_size: Union[int, Tuple[int, int]],
        global_pool: str,
        decoder: Union[bool, str],
        scores: str,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, decoder=decoder)
        if scores not in ("logits", "activations"):
            raise ValueError(f"scores must be 'logits' or 'activations', not {scores!r}")
        self.score_kind = scores

    def reconstruct(self, poses: Tensor, target: Optional[Tensor] = None) -> Tensor:
        """As in :class:`CapsuleNet`, but the class must be given: a class is present by its activation, not its length.

        Raises:
            ValueError: ``target`` is None.
            RuntimeError: the model was created without ``decoder=True``.
        """
        if target is None and self.decoder is not None:
            raise ValueError(
                "an EM capsule's length does not say whether its class is present: give target=scores.argmax(1)"
            )
        return super().reconstruct(poses, target)

    def _scores(self, logits: Tensor) -> Tensor:
        if self.score_kind == "activations":
            return torch.sigmoid(logits)
        return logits


def _check_normalised(num_classes: int, routing: Dict[str, Any]) -> None:
    """Raise ValueError for one class with normalised costs: relative to itself, its score never changes."""
    if num_classes == 1 and routing["normalize_cost"]:
        raise ValueError(
            "costs are normalised over the classes, so that one class has a constant score: use num_classes=2, "
            "or normalize_cost=False"
        )


class EMCapsNet(EMNetBase):
    """Convolutional features, primary matrix capsules, two convolutional EM layers, class capsules.

    Couplings of :meth:`forward_capsules`: ``[b, h', w', j, k*l*i]`` of each convolutional layer, and of the class layer
    ``[b, n, h', w', i]``.

    Args:
        num_classes: classes; 0 omits the class capsules.
        in_chans, img_size: of the images. Only the decoder's weights depend on the size, but ``img_size`` sets the
            class layer's λ: the same weights give an image other scores in a network that was created for another size.
        backbone: ``"conv"``, one convolution, BatchNorm and ReLU, or ``"resnet"``, that of the IDPA paper.
        stem_chans, stem_kernel, stem_stride, stem_padding: of the convolution; the ResNet uses only the channels.
        caps: capsule types of the primary layer and of each 3x3 EM layer, the first of which has stride 2.
        pose_size: rows (and columns) of a pose.
        routing_iters: iterations, in every routing layer.
        lam_start, lam_step: inverse temperature ``lam_start + lam_step * t`` of iteration t, divided in each layer by
            its children per parent.
        var_floor, normalize_cost: see ``capszoo.layers.em_routing``.
        scores: what ``forward`` returns: ``"logits"`` of the class activations (for cross-entropy), or the
            ``"activations"`` in [0, 1] (for the spread loss). Their order is the same, except where the sigmoid
            saturates.
        decoder: build the reconstruction decoder.
        global_pool: ``"avg"``; ``""`` returns the feature map without class capsules.
        drop_rate: share of the class layer's children that are set inactive in training.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        backbone: str = "conv",
        stem_chans: int = 256,
        stem_kernel: int = 4,
        stem_stride: int = 2,
        stem_padding: int = 1,
        caps: Tuple[int, ...] = (32, 32, 32),
        pose_size: int = 4,
        routing_iters: int = 2,
        lam_start: float = 0.1,
        lam_step: float = 0.1,
        var_floor: float = 1e-4,
        normalize_cost: bool = False,
        scores: str = "logits",
        decoder: Union[bool, str] = False,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, decoder, scores)
        if len(caps) < 2:
            raise ValueError(f"caps must name the primary capsules and at least one EM layer's, not {caps}")
        at_least(1, caps=min(caps), stem_stride=stem_stride)
        self.caps, self.pose_size, self.class_dim = tuple(caps), pose_size, pose_size * pose_size
        self._lam = (lam_start, lam_step)
        self._routing: Dict[str, Any] = dict(
            pose_size=pose_size, num_iters=routing_iters, var_floor=var_floor, normalize_cost=normalize_cost
        )
        per_caps = self.class_dim + 1  # channels of a capsule type
        self.num_features = self.head_hidden_size = caps[-1] * per_caps

        h, w = self.img_size
        stages: "OrderedDict[str, nn.Module]" = OrderedDict()
        levels: List[Tuple[str, int, int]] = []  # name, channels, height
        if backbone == "conv":
            stages["stem"] = ConvBnAct(
                in_chans, stem_chans, stem_kernel, stem_stride, stem_padding, bias=True
            )
            h, w = (out_size(size, stem_kernel, stem_stride, stem_padding) for size in (h, w))
            levels.append(("stem", stem_chans, h))
        elif backbone == "resnet":
            stages = idpa_backbone_stages(in_chans, stem_chans)
            levels += [("stem", 64, h), ("layer1", 64, h)]
            h, w = (h + 1) // 2, (w + 1) // 2
            levels.append(("layer2", stem_chans, h))
        else:
            raise ValueError(f"backbone must be 'conv' or 'resnet', not {backbone!r}")
        init_conv_weights(nn.Sequential(stages))
        stages["primary"] = PrimaryMatrixCaps(stem_chans, caps[0], pose_size)
        levels.append(("primary", caps[0] * per_caps, h))
        for i in range(1, len(caps)):
            layer = ConvEM(
                caps[i - 1],
                caps[i],
                kernel_size=3,
                stride=2 if i == 1 else 1,
                init_beta_v=0.5 if i == 1 else 2.0,
                **self._settings(9 * caps[i - 1], caps[i]),
            )
            h, w = layer.grid_size(h, w)
            if h < 1 or w < 1:
                raise ValueError(f"img_size={self.img_size} is too small for this network's convolutions")
            stages[f"caps{i}"] = layer
            levels.append((f"caps{i}", caps[i] * per_caps, h))
        self.grid = (h, w)
        self.stages = nn.Sequential(stages)
        self.feature_info = feature_levels_by_rows(self.img_size[0], levels)
        self.drop_rate = drop_rate
        self.head_drop = nn.Dropout(drop_rate)
        self._make_head()

    def _settings(self, children: int, parents: int) -> Dict[str, Any]:
        """Arguments of a routing layer with the given numbers of children and parents."""
        start, step = (lam * parents / children for lam in self._lam)
        return dict(self._routing, lam_start=start, lam_step=step)

    def _make_classifier(self) -> nn.Module:
        _check_normalised(self.num_classes, self._routing)
        children = self.grid[0] * self.grid[1] * self.caps[-1]
        settings = self._settings(children, self.num_classes)
        return ClassEM(self.caps[-1], self.num_classes, init_beta_v=3.0, **settings)

    def _children(self, x: Tensor) -> Tensor:
        """The last map, with some of its capsules set inactive by dropout."""
        if self.drop_rate == 0.0:
            return x
        split = self.num_features - self.num_features // (self.class_dim + 1)
        return torch.cat([x[:, :split], self.head_drop(x[:, split:])], dim=1)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses, logits = self.class_caps(self._children(x))
        return self._scores(logits), poses

    def forward_capsules(self, x: Tensor) -> CapsuleOutput:
        """Images to scores and activations ``[b, n]``, class poses ``[b, n, p*p]``, couplings of each routing layer."""
        self._require_classes()
        couplings: List[Tensor] = []
        for stage in self.stages:
            if isinstance(stage, ConvEM):
                poses, logits, coupling = stage.route(x)
                couplings.append(coupling)
                x = stage.pack(poses, logits).to(x.dtype)
            else:
                x = stage(x)
        poses, logits, coupling = self.class_caps.route(self._children(x))
        poses, logits = poses.to(x.dtype), finite_cast(logits, x.dtype)
        return CapsuleOutput(self._scores(logits), poses, torch.sigmoid(logits), (*couplings, coupling))

    def coupling_map(self, x: Tensor) -> Tensor:
        """Images to ``[b, n, h', w']``: share of each position in each class capsule, summing to 1.

        A child's share is its coupling times its activation; a position's share is the sum over its capsule types.
        """
        self._require_classes()
        x = self.forward_features(x)
        couplings = self.class_caps.route(x)[2]  # [b, n, h, w, i]
        activations = x[:, -self.caps[-1] :].permute(0, 2, 3, 1).unsqueeze(1)  # [b, 1, h, w, i]
        return _normalised((couplings * activations).sum(dim=4))

    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return (CouplingLayout(3, "parents"),) * (len(self.caps) - 1) + (CouplingLayout(1, "parents"),)

    def class_votes(self, x: Tensor) -> Votes:
        self._require_classes()
        x = self._children(self.forward_features(x))
        return Votes(self.class_caps.votes(x)[0], self.class_caps.route(x)[0], True)


class SixLayerEMCapsNet(EMNetBase):
    """Four convolutions, and two EM layers whose transforms are shared over the grid: ``capsnet6_em``.

    Couplings of :meth:`forward_capsules`: ``[b, mid_caps, types, h * w]`` and ``[b, n, types, mid_caps / types]``.

    Args:
        num_classes: classes; 0 omits the class capsules.
        in_chans, img_size: of the images. Only the decoder's weights depend on the size.
        widths: channels of the 3x3 convolutions (strides 1, 1, 2, 2).
        caps_types: capsule types of both layers; the last width and ``mid_caps`` are multiples of it.
        mid_caps, mid_dim: capsules of the fifth layer, and their pose dimension. Memory grows with ``mid_caps``.
        class_dim: pose dimension of a class capsule.
        routing_iters: iterations, in both routing layers.
        lam_start, lam_step, var_floor, normalize_cost: see ``capszoo.layers.em_routing``.
        scores: ``"logits"`` or ``"activations"``, as in :class:`EMCapsNet`.
        decoder: build the reconstruction decoder.
        global_pool: ``"avg"``; ``""`` returns the feature map without class capsules.
        drop_rate: share of the class layer's children that are set inactive in training.

    Raises:
        ValueError: an argument is out of range.
    """

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
        lam_start: float = 1.0,
        lam_step: float = 0.0,
        var_floor: float = 1e-4,
        normalize_cost: bool = True,
        scores: str = "logits",
        decoder: Union[bool, str] = False,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, decoder, scores)
        stages = six_layer_stages(in_chans, widths, caps_types, mid_caps)
        self.caps_types, self.in_dim = caps_types, widths[-1] // caps_types
        self.mid_dim, self.class_dim = mid_dim, class_dim
        self._routing: Dict[str, Any] = dict(
            num_iters=routing_iters,
            lam_start=lam_start,
            lam_step=lam_step,
            var_floor=var_floor,
            normalize_cost=normalize_cost,
            init_beta_v=-5.0 if normalize_cost else 0.0,
        )
        self.num_features = widths[-1] + caps_types
        self.head_hidden_size = caps_types * (mid_dim + 1)

        stages["primary"] = AppendActivations(widths[-1], caps_types)
        self.feature_info = feature_levels(
            zip(stages, (*widths, self.num_features), (1, 1, 2, 4, 4), strict=True)
        )
        self.stages = nn.Sequential(stages)
        init_conv_weights(self.stages)
        self.mid_caps: Any = SharedEM(caps_types, self.in_dim, mid_caps, mid_dim, **self._routing)
        self.head_drop = nn.Dropout(drop_rate)
        self._make_head()

    def _make_classifier(self) -> nn.Module:
        _check_normalised(self.num_classes, self._routing)
        return SharedEM(self.caps_types, self.mid_dim, self.num_classes, self.class_dim, **self._routing)

    def _grid_children(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """``[b, g * d + g, h, w]`` to poses ``[b, g, d, h * w]`` and activations ``[b, g, h * w]``."""
        split = self.caps_types * self.in_dim
        x = x.flatten(2)
        return split_axis(x[:, :split], 1, [self.caps_types, self.in_dim]), x[:, split:]

    def _mid_children(self, poses: Tensor, logits: Tensor) -> Tuple[Tensor, Tensor]:
        """Mid capsules ``[b, g * s, e]``, type by type: poses ``[b, g, e, s]`` and activations ``[b, g, s]``."""
        split = [self.caps_types, poses.shape[1] // self.caps_types]
        return split_axis(poses, 1, split).transpose(2, 3), split_axis(torch.sigmoid(logits), 1, split)

    def _pooled(self, x: Tensor) -> Tensor:
        """Map to the mid capsules' mean over their positions, poses and then activations: ``[b, g * (e + 1)]``."""
        poses, activations = self._mid(x)
        return torch.cat([poses.mean(dim=3).flatten(1), activations.mean(dim=2)], dim=1)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses, activations = self._mid(x)
        poses, logits = self.class_caps(poses, self.head_drop(activations))
        return self._scores(logits), poses

    def _mid(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """The map to the class layer's children: poses ``[b, g, e, s]`` and activations ``[b, g, s]``."""
        poses, activations = self._grid_children(x)
        poses, logits = self.mid_caps(poses, activations)
        return self._mid_children(poses, logits)

    def _route(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Map to class poses, their logits, both layers' couplings, and the mid capsules' activations."""
        poses, logits, mid_couplings = self.mid_caps.route(*self._grid_children(x))
        poses, activations = self._mid_children(poses.to(x.dtype), logits.to(x.dtype))
        activations = self.head_drop(activations)
        poses, logits, class_couplings = self.class_caps.route(poses, activations)
        return poses.to(x.dtype), finite_cast(logits, x.dtype), mid_couplings, class_couplings, activations

    def forward_capsules(self, x: Tensor) -> CapsuleOutput:
        """Images to scores and activations ``[b, n]``, class poses ``[b, n, e]``, couplings of both layers."""
        self._require_classes()
        poses, logits, mid_couplings, class_couplings, _ = self._route(self.forward_features(x))
        return CapsuleOutput(
            self._scores(logits), poses, torch.sigmoid(logits), (mid_couplings, class_couplings)
        )

    def coupling_map(self, x: Tensor) -> Tensor:
        """Images to ``[b, n, h', w']``: share of each grid position in each class capsule, summing to 1.

        A mid capsule's share in a class is its coupling times its activation. The mid capsule's shares (couplings times
        activations, scaled to sum to 1) distribute it over the grid, and the shares are summed over the capsule types.
        """
        self._require_classes()
        x = self.forward_features(x)
        _, _, mid_couplings, class_couplings, activations = self._route(x)
        down = (mid_couplings * self._grid_children(x)[1].unsqueeze(1)).sum(dim=2) + 1e-6  # [b, mid, h*w]
        down = down / down.sum(dim=2, keepdim=True)
        share = (class_couplings * activations.unsqueeze(1)).flatten(2)  # [b, n, mid]
        return _normalised(torch.bmm(share, down).unflatten(2, (x.shape[2], x.shape[3])))

    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return (CouplingLayout(1, "parents"),) * 2

    def class_votes(self, x: Tensor) -> Votes:
        self._require_classes()
        children, activations = self._mid(self.forward_features(x))
        poses, _, _ = self.class_caps.route(children, self.head_drop(activations))
        return Votes(self.class_caps.votes(children), poses, True)

    def _drop_head(self) -> None:
        super()._drop_head()
        self.mid_caps = NoClassCaps()


_cfg = partial(
    model_cfg,
    pool_size=(5, 5),
    first_conv="stages.stem.conv",
    classifier="class_caps",
    paper_name="Capsules with Inverted Dot-Product Attention Routing",
    paper_ids="arXiv:2002.04764",
)

# stereo pairs: two grey channels. Hinton et al. scale each image individually to zero mean and unit variance
_norb = partial(
    _cfg,
    input_size=(2, 32, 32),
    pool_size=(4, 4),
    num_classes=5,
    mean=(0.5, 0.5),
    std=(0.25, 0.25),
    paper_name="Matrix capsules with EM routing",
    paper_ids="openreview:HJWLfGWRb",
)


default_cfgs = zoo_cfgs(
    {
        "capsnet_em": _cfg(),
        "capsnet_em_resnet": _cfg(),
        "capsnet_em_norb": _norb(),
        "capsnet_em_norb_small": _norb(),
        "capsnet6_em": _cfg(
            pool_size=(8, 8),
            first_conv="stages.conv1.conv",
            paper_name="Neural Network Encapsulation",
            paper_ids="arXiv:1808.03749",
        ),
    }
)


_create_em = partial(build_capsule_model, EMCapsNet)
_create_six_layers = partial(build_capsule_model, SixLayerEMCapsNet)


@register_model
def capsnet_em(pretrained: bool = False, **kwargs: Any) -> EMCapsNet:
    """EM routing on a plain convolution: CIFAR-10 accuracy 82.19 (2 iterations), CIFAR-100 37.73."""
    args: Dict[str, Any] = dict(stem_chans=256, caps=(32, 32, 32), routing_iters=2)
    return _create_em("capsnet_em", pretrained, defaults=args, **kwargs)


@register_model
def capsnet_em_resnet(pretrained: bool = False, **kwargs: Any) -> EMCapsNet:
    """EM routing on a ResNet: CIFAR-10 accuracy 92.15, CIFAR-100 58.08 (best of 1 to 5 iterations)."""
    args: Dict[str, Any] = dict(backbone="resnet", stem_chans=128, caps=(32, 32, 32), routing_iters=2)
    return _create_em("capsnet_em_resnet", pretrained, defaults=args, **kwargs)


def _norb_args(stem_chans: int, caps: Tuple[int, ...]) -> Dict[str, Any]:
    # classes and channels come from the configuration, so that weights with other numbers override them
    return dict(
        stem_chans=stem_chans,
        stem_kernel=5,
        stem_padding=0,
        caps=caps,
        routing_iters=2,
    )


@register_model
def capsnet_em_norb(pretrained: bool = False, **kwargs: Any) -> EMCapsNet:
    """Matrix capsules on smallNORB, A = B = C = D = 32: error 2.2; with 3 iterations 1.8, over several crops 1.4."""
    return _create_em("capsnet_em_norb", pretrained, defaults=_norb_args(32, (32, 32, 32)), **kwargs)


@register_model
def capsnet_em_norb_small(pretrained: bool = False, **kwargs: Any) -> EMCapsNet:
    """The small matrix-capsule network, A = 64, B = 8, C = D = 16: smallNORB error 2.2."""
    return _create_em("capsnet_em_norb_small", pretrained, defaults=_norb_args(64, (8, 16, 16)), **kwargs)


@register_model
def capsnet6_em(pretrained: bool = False, **kwargs: Any) -> SixLayerEMCapsNet:
    """Six layers, two of them of capsules (Table 1, b): error 12.66 on CIFAR-10, 0.31 on MNIST."""
    args: Dict[str, Any] = dict(mid_caps=2048, mid_dim=16, class_dim=16, routing_iters=3)
    return _create_six_layers("capsnet6_em", pretrained, defaults=args, **kwargs)
