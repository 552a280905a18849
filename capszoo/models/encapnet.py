"""EncapNet: convolutional capsules whose routing is approximated by a master and an aide branch.

Paper: Li, Guo, Dai, Ouyang, Wang, "Neural Network Encapsulation", ECCV 2018, arXiv:1808.03749 (section 3.1,
Table 2, appendix A.i). The authors' release was read for facts: initial values, kernel of the aide, capFC.

A stem, then modules of one Type I layer (which strides, and doubles the pose dimension of the 32 capsule channels) and
a stack of Type II layers, then capFC, whose capsule lengths are the scores. The feedback agreement used with
it in training is in ``capszoo/models/_feedback.py``.

Our choices where the paper does not specify: above 64 pixels the stem is a ResNet's (7x7 of stride 2, max-pooling);
``encapnet_v2`` and ``encapnet_v3`` divide their 101 layers as 9, 12, 69, 9 and leave the aide out of the first
two modules. The stem has PyTorch's initial values (in the release Xavier's, without biases); a BatchNorm follows it.
"""

from collections import OrderedDict
from functools import partial
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import register_model
from torch import Tensor

from capszoo.layers._modules import at_least
from capszoo.layers.capconv import CapFC, EncapModule
from capszoo.layers.squash import capsule_lengths

from ._base import CapsuleNet, CapsuleOutput, Votes, feature_levels
from ._blocks import BasicBlock, ConvBnAct, init_conv_weights
from ._builder import build_capsule_model, model_cfg, zoo_cfgs

__all__ = ["EncapNet", "EncapResNet"]


class Stem(nn.Module):
    """3x3 convolution, BN, ReLU; or for large images a ResNet stem: 7x7 and 3x3 max-pooling, both of stride 2.

    ``[b, in, h, w] -> [b, out, h, w]``, or with a quarter of the rows and columns.
    """

    def __init__(self, in_chans: int, out_chans: int, large: bool, bias: bool) -> None:
        super().__init__()
        kernel, stride = (7, 2) if large else (3, 1)
        self.conv = nn.Conv2d(in_chans, out_chans, kernel, stride, kernel // 2, bias=bias)
        self.bn = nn.BatchNorm2d(out_chans)
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.act(self.bn(self.conv(x))))


def _is_large(stem: str, img_size: Tuple[int, int]) -> bool:
    if stem not in ("auto", "conv", "resnet"):
        raise ValueError(f"stem must be 'auto', 'conv' or 'resnet', not {stem!r}")
    return stem == "resnet" or (stem == "auto" and max(img_size) > 64)


def _aides(mode: str, aide: Optional[Sequence[bool]], modules: int) -> List[bool]:
    """Which modules have the aide branch."""
    if mode not in ("master", "master_aide"):
        raise ValueError(f"mode must be 'master' or 'master_aide', not {mode!r}")
    with_aide = [mode == "master_aide"] * modules if aide is None else [bool(a) for a in aide]
    if len(with_aide) != modules:
        raise ValueError(f"aide must have one entry per module ({modules}), not {len(with_aide)}")
    if mode == "master" and any(with_aide):
        raise ValueError("mode='master' leaves out every aide: drop one of mode and aide")
    return with_aide


def _halved(size: Tuple[int, int], times: int) -> Tuple[int, int]:
    """Grid size after ``times`` convolutions of stride 2, padded by half their kernel."""
    h, w = size
    for _ in range(times):
        h, w = (h + 1) // 2, (w + 1) // 2
    return h, w


class EncapNet(CapsuleNet):
    """EncapNet (Table 2). There are no routing iterations: ``forward_capsules`` returns empty ``couplings``.

    Args:
        num_classes: class capsules; 0 omits capFC.
        in_chans, img_size: of the images. capFC has weights per grid position: other sizes are refused.
        depths: capConv layers of each module, including the Type I layer.
        strides: of the modules' Type I layers.
        pose_dims: pose dimension after each module.
        groups: capsule channels.
        mode: ``"master_aide"``, or ``"master"`` for no aide anywhere (Table 3, row 1, also without skip connections).
        aide: which modules have the aide branch, one bool per module; defaults to all of them.
        coefficients: ``"own"``, ``"cross"`` or ``"both"`` (Table 3, rows 2 to 4, also without skip connections).
        skip_type1, skip_type2: skip connections of the two layer types (rows 5 to 7).
        stem: of a single stem layer: ``"conv"`` (3x3), ``"resnet"``, or ``"auto"``: the ResNet stem above 64 pixels.
        stem_chans, stem_strides: 3x3 convolution layers before the modules; the default is the paper's single one, of
            stride 1.
        global_pool: pooling of the features without a class layer; ``""`` for none.
        drop_rate: dropout of capFC's input.
        decoder: add the reconstruction decoder.

    Raises:
        ValueError: an argument is out of range.
    """

    classifier_name = "head"

    score_kind = "lengths"
    map_quantity = "vote component"

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        depths: Sequence[int] = (4, 4, 4, 4),
        strides: Sequence[int] = (1, 2, 2, 2),
        pose_dims: Sequence[int] = (2, 4, 8, 16),
        groups: int = 32,
        mode: str = "master_aide",
        aide: Optional[Sequence[bool]] = None,
        coefficients: str = "both",
        skip_type1: bool = True,
        skip_type2: bool = True,
        stem: str = "auto",
        stem_chans: Sequence[int] = (32,),
        stem_strides: Sequence[int] = (1,),
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        decoder: Union[bool, str] = False,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed_input_size=True, decoder=decoder)
        modules = len(depths)
        if not (modules == len(strides) == len(pose_dims) and modules >= 1):
            raise ValueError("depths, strides and pose_dims must have one entry per module")
        if len(stem_chans) != len(stem_strides) or not stem_chans:
            raise ValueError("stem_chans and stem_strides must have one entry per stem layer")
        if len(stem_chans) == 1 and stem_strides[0] != 1:
            raise ValueError("a single stem layer has stride 1; its ResNet form halves the map twice")
        if len(stem_chans) > 1 and stem == "resnet":
            raise ValueError("stem='resnet' is a single stem layer: give one entry of stem_chans")
        with_aide = _aides(mode, aide, modules)

        self.head_drop = nn.Dropout(drop_rate)
        self.groups = groups
        self.class_dim = pose_dims[-1]
        self.depths = tuple(depths)

        stages: "OrderedDict[str, nn.Module]" = OrderedDict()
        levels: List[Tuple[str, int, int]] = []  # name, channels, log2 of the reduction
        large = _is_large(stem, self.img_size) and len(stem_chans) == 1
        halvings = 2 if large else 0
        chans = in_chans
        for i, (width, stride) in enumerate(zip(stem_chans, stem_strides, strict=True)):
            name = "stem" if len(stem_chans) == 1 else f"conv{i + 1}"
            stages[name] = (
                Stem(chans, width, large, bias=True)
                if len(stem_chans) == 1
                else ConvBnAct(chans, width, 3, stride, bias=True)
            )
            chans = width
            halvings += _log2(stride)
            if len(stem_chans) > 1:
                levels.append((name, chans, halvings))
        for i, (depth, stride, pose_dim, has_aide) in enumerate(
            zip(depths, strides, pose_dims, with_aide, strict=True)
        ):
            name = f"module{i + 1}"
            stages[name] = EncapModule(
                chans,
                groups * pose_dim,
                depth,
                stride,
                groups,
                "master_aide" if has_aide else "master",
                coefficients,
                skip_type1,
                skip_type2,
            )
            chans = groups * pose_dim
            halvings += _log2(stride)
            levels.append((name, chans, halvings))
        self.stages = nn.Sequential(stages)
        if len(stem_chans) > 1:
            for name in list(stages)[: len(stem_chans)]:
                init_conv_weights(stages[name])
        self.feature_info = feature_levels((name, chs, 2**halved) for name, chs, halved in levels)
        self.num_features = self.head_hidden_size = chans
        self.grid = _halved(self.img_size, halvings)
        self._make_head()

    def _make_classifier(self) -> nn.Module:
        return CapFC(self.num_classes, self.class_dim, self.groups, self.grid)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses = self.head(self.head_drop(x))
        return capsule_lengths(poses), poses

    def forward_capsules(self, x: Tensor) -> CapsuleOutput:
        """Images to scores, class capsules ``[b, n, d]`` and lengths; ``couplings`` is empty (no iterations)."""
        lengths, poses = self.forward_poses(x)
        return CapsuleOutput(lengths, poses, lengths, ())

    def coupling_map(self, x: Tensor) -> Tensor:
        """Images to ``[b, n, h', w']``: share of each grid position in each class capsule, summing to 1.

        capFC has no couplings; the share is the component of the position's vote along the class capsule,
        clamped at zero and normalised (:meth:`capszoo.layers.capconv.CapFC.contributions`).
        """
        self._require_classes()
        features = self.forward_features(x)
        return self.head.contributions(features, self.head(features))

    def class_votes(self, x: Tensor) -> Votes:
        self._require_classes()
        features = self.forward_features(x)
        return Votes(self.head.votes(features), self.head(features), True)

    @torch.jit.ignore
    def feedback_pairs(self, units: int = 1) -> List[Tuple[str, str]]:
        """Modules whose outputs the feedback agreement compares, (lower, higher), for one or two units a module.

        The first unit of a module reconstructs the module's input from the middle of the Type II stack (the release's
        place; the paper's figure gives no number); the second reconstructs the Type I layer's output from the last
        Type II layer's. A module without a Type II layer has only the first unit, on its Type I layer.
        """
        if units not in (1, 2):
            raise ValueError(f"units must be 1 or 2, not {units}")
        pairs: List[Tuple[str, str]] = []
        names = list(dict(self.stages.named_children()))
        first = len(names) - len(self.depths)
        for i, depth in enumerate(self.depths):
            stack = depth - 1
            name = f"stages.{names[first + i]}"
            below = f"stages.{names[first + i - 1]}"
            if stack == 0:
                pairs.append((below, f"{name}.type1"))
                continue
            pairs.append((below, f"{name}.type2.{max(stack // 2, 1) - 1}"))
            if units == 2:
                pairs.append((f"{name}.type1", f"{name}.type2.{stack - 1}"))
        return pairs


def _log2(stride: int) -> int:
    if stride not in (1, 2):
        raise ValueError(f"strides are 1 or 2, not {stride}")
    return stride - 1


class EncapResNet(CapsuleNet):
    """The paper's ResNet with EncapNet's feature-map sizes (Table 2): a baseline without capsules, for any image size.

    Args:
        num_classes: classes; 0 omits the classifier.
        in_chans, img_size: of the images; the size only determines the stem.
        widths, depths, strides: channels, basic blocks and stride of each stage.
        stem_chans: channels of the stem.
        stem: ``"conv"`` (3x3), ``"resnet"``, or ``"auto"``: the ResNet stem above 64 pixels.
        global_pool: ``"avg"``; ``""`` only without a classifier.
        drop_rate: dropout before the classifier.

    Raises:
        ValueError: an argument is out of range.
    """

    classifier_name = "head"

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        widths: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        strides: Sequence[int] = (1, 2, 2, 2),
        stem_chans: int = 32,
        stem: str = "auto",
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool)
        if not (len(widths) == len(depths) == len(strides) and len(widths) >= 1):
            raise ValueError("widths, depths and strides must have one entry per stage")
        at_least(1, widths=min(widths), depths=min(depths), strides=min(strides))
        self.head_drop = nn.Dropout(drop_rate)
        large = _is_large(stem, self.img_size)
        stages: "OrderedDict[str, nn.Module]" = OrderedDict(
            stem=Stem(in_chans, stem_chans, large, bias=False)
        )
        levels: List[Tuple[str, int, int]] = []
        reduction, chans = (4 if large else 1), stem_chans
        for i, (width, depth, stride) in enumerate(zip(widths, depths, strides, strict=True)):
            blocks = [BasicBlock(chans, width, stride)] + [BasicBlock(width, width) for _ in range(depth - 1)]
            stages[f"layer{i + 1}"] = nn.Sequential(*blocks)
            chans = width
            reduction *= stride
            levels.append((f"layer{i + 1}", width, reduction))
        self.feature_info = feature_levels(levels)
        self.stages = nn.Sequential(stages)
        init_conv_weights(self.stages)
        self.num_features = self.head_hidden_size = chans
        self._make_head()

    def _make_classifier(self) -> nn.Module:
        return nn.Linear(self.num_features, self.num_classes)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features ``[b, c, h, w]`` to logits ``[b, n]``; ``pre_logits``: pooled features ``[b, c]``."""
        if self.num_classes == 0 and self.global_pool == "":
            return x
        x = x.mean(dim=[2, 3])
        if pre_logits:
            return x
        return self.head(self.head_drop(x))

    @torch.jit.ignore
    def feedback_pairs(self, units: int = 1) -> List[Tuple[str, str]]:
        """Stages whose outputs the feedback agreement compares, (lower, higher).

        The first unit of a stage reconstructs the stage's input from its output; the second its first block's output
        from its last block's (our choice, by analogy to the capsule modules).
        """
        if units not in (1, 2):
            raise ValueError(f"units must be 1 or 2, not {units}")
        pairs: List[Tuple[str, str]] = []
        stages = list(self.stages.named_children())
        for (below, _), (name, stage) in zip(stages[:-1], stages[1:], strict=True):
            last = len(list(stage.children())) - 1
            pairs.append((f"stages.{below}", f"stages.{name}"))
            if units == 2 and last > 0:
                pairs.append((f"stages.{name}.0", f"stages.{name}.{last}"))
        return pairs


_cfg = partial(
    model_cfg,
    pool_size=(4, 4),
    fixed_input_size=True,
    first_conv="stages.stem.conv",
    classifier="head",
    paper_name="Neural Network Encapsulation",
    paper_ids="arXiv:1808.03749",
)

default_cfgs = zoo_cfgs(
    {
        "encapnet_v1": _cfg(),
        "encapnet_v2": _cfg(
            num_classes=200,
            input_size=(3, 128, 128),
            mean=IMAGENET_DEFAULT_MEAN,
            std=IMAGENET_DEFAULT_STD,
            crop_pct=128 / 156,
        ),
        "encapnet_v3": _cfg(
            num_classes=200,
            input_size=(3, 224, 224),
            pool_size=(7, 7),
            mean=IMAGENET_DEFAULT_MEAN,
            std=IMAGENET_DEFAULT_STD,
            crop_pct=224 / 256,
        ),
        "encapnet6": _cfg(first_conv="stages.conv1.conv"),
        "encapnet6_master": _cfg(first_conv="stages.conv1.conv"),
        "resnet18_encap": _cfg(fixed_input_size=False),
    }
)


_create_encapnet = partial(build_capsule_model, EncapNet)
_create_resnet = partial(build_capsule_model, EncapResNet)


@register_model
def encapnet_v1(pretrained: bool = False, **kwargs: Any) -> EncapNet:
    """EncapNet of 18 layers: CIFAR-10 error 4.55 / 3.13 / 3.10 without, with mild, with strong augmentation."""
    args = dict(depths=(4, 4, 4, 4))
    return _create_encapnet("encapnet_v1", pretrained, defaults=args, **kwargs)


def _create_deep(name: str, pretrained: bool, kwargs: Dict[str, Any]) -> EncapNet:
    """101 layers, with the master alone in the first two modules."""
    args: Dict[str, Any] = dict(depths=(9, 12, 69, 9))
    if kwargs.get("mode", "master_aide") == "master_aide":
        args["aide"] = (False, False, True, True)
    return _create_encapnet(name, pretrained, defaults=args, **kwargs)


@register_model
def encapnet_v2(pretrained: bool = False, **kwargs: Any) -> EncapNet:
    """EncapNet of 101 layers at 128 pixels, master alone in the first two modules: h-ImageNet error 43.15."""
    return _create_deep("encapnet_v2", pretrained, kwargs)


@register_model
def encapnet_v3(pretrained: bool = False, **kwargs: Any) -> EncapNet:
    """EncapNet v2 at 224 pixels: h-ImageNet error 42.76 / 40.18 / 40.05."""
    return _create_deep("encapnet_v3", pretrained, kwargs)


#: Four convolutions to 8x8x256, one capConv of stride 2 to 512 channels, capFC (appendix A.i).
_SIX_LAYERS: Dict[str, Any] = dict(
    stem_chans=(32, 64, 128, 256), stem_strides=(1, 1, 2, 2), depths=(1,), strides=(2,), pose_dims=(16,)
)


@register_model
def encapnet6(pretrained: bool = False, **kwargs: Any) -> EncapNet:
    """Six layers with master and aide (Table 1, f): error 11.93 on CIFAR-10, 0.25 on MNIST."""
    return _create_encapnet("encapnet6", pretrained, defaults=_SIX_LAYERS, **kwargs)


@register_model
def encapnet6_master(pretrained: bool = False, **kwargs: Any) -> EncapNet:
    """Six layers with the master alone (Table 1, e): error 13.87 on CIFAR-10, 0.31 on MNIST."""
    args = dict(_SIX_LAYERS, mode="master")
    return _create_encapnet("encapnet6_master", pretrained, defaults=args, **kwargs)


@register_model
def resnet18_encap(pretrained: bool = False, **kwargs: Any) -> EncapResNet:
    """ResNet with EncapNet's feature-map sizes (Table 2): CIFAR-10 error 8.03, with feedback agreement 7.67."""
    args = dict(widths=(64, 128, 256, 512), depths=(2, 2, 2, 2))
    return _create_resnet("resnet18_encap", pretrained, defaults=args, **kwargs)
