"""The plain convolutional networks used as baselines in the capsule papers.

- ``cnn_sabour``: Sabour, Frosst, Hinton, "Dynamic Routing Between Capsules" (2017, arXiv:1710.09829), section 5.
- ``cnn_baseline``, ``cnn_multimnist``, ``cnn_multimnist_fc``: Tsai et al., "Capsules with Inverted Dot-Product
  Attention Routing" (2020, arXiv:2002.04764), Tables 2, 3 and 12.
- ``cnn6``, ``cnn6_wide``: Li et al., "Neural Network Encapsulation" (2018, arXiv:1808.03749), Table 1 (c, d), appendix
  A.i.

Our choices, where the papers are silent: padding 2 in ``cnn_sabour`` (only then does the network have the stated 35.4M
parameters) and dropout 0.5; in ``cnn6`` no bias before a BatchNorm, stride 1 in the fifth convolution, and the grid to
which its features are averaged: 2x2 in ``cnn6``, 1x1 in ``cnn6_wide``, which comes closest to the stated sizes.
The IDPA paper's tables say "ReLU + Batch Norm", and "Batch Norm + ReLU" for another network: the order is kept.
"""

from collections import OrderedDict
from functools import partial
from typing import Any, Dict, Optional, Tuple, Union

import torch
import torch.nn as nn
from timm.models import register_model
from torch import Tensor

from ._base import CapsuleNet, feature_levels
from ._blocks import ConvBnAct, init_conv_weights
from ._builder import MNIST, build_capsule_model, model_cfg, zoo_cfgs

__all__ = ["BaselineCNN", "ConvNet", "MultiMnistCNN", "SabourCNN", "SixLayerCNN"]


class ConvActBn(nn.Module):
    """Average pooling (optional), convolution with a bias, ReLU, BatchNorm (optional), in this order.

    ``[b, in, h, w] -> [b, out, h', w']``
    """

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        kernel_size: int = 3,
        stride: int = 1,
        padding: int = 0,
        bn: bool = True,
        pool: int = 1,
    ) -> None:
        super().__init__()
        self.pool: nn.Module = nn.AvgPool2d(pool) if pool > 1 else nn.Identity()
        self.conv = nn.Conv2d(in_chans, out_chans, kernel_size, stride, padding)
        self.act = nn.ReLU(inplace=True)
        self.bn: nn.Module = nn.BatchNorm2d(out_chans) if bn else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.act(self.conv(self.pool(x))))


class ConvNet(CapsuleNet):
    """Convolutions, pooling or flattening, hidden layers (the neck), one linear classifier.

    There are no capsules: :meth:`forward_capsules` and :meth:`coupling_map` raise RuntimeError. A subclass sets
    ``pooler`` (``[b, c, h, w] -> [b, width]``), ``neck`` and ``head_drop``, and then calls :meth:`_finish`.

    Args:
        num_classes: classes; 0 returns the neck's output ``[b, head_hidden_size]``.
        in_chans: channels of the images.
        img_size: height and width of the images in pixels.
        global_pool: the value of ``pooling``, or None for it; ``""`` returns the feature map while there is no
            classifier. Anything else is a ValueError.
        fixed_input_size: whether weights depend on ``img_size``.
        pooling: ``"avg"`` or ``"flatten"``: the step between convolutions and classifier.
    """

    classifier_name = "fc"

    def __init__(
        self,
        num_classes: int,
        in_chans: int,
        img_size: Union[int, Tuple[int, int]],
        global_pool: Optional[str],
        fixed_input_size: bool,
        pooling: str,
    ) -> None:
        global_pool = pooling if global_pool is None else global_pool
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed_input_size, pools=(pooling,))
        self.pooling = pooling
        self._set_pool(global_pool)
        self.pooler: nn.Module = nn.Identity()
        self.neck: nn.Module = nn.Identity()
        self.head_drop: nn.Module = nn.Identity()
        self.fc: nn.Module = nn.Identity()  # here: optimizers and files know the parameters by their order

    def _finish(
        self, stages: "OrderedDict[str, nn.Module]", chans: Tuple[int, ...], reductions: Tuple[int, ...]
    ) -> None:
        self.stages = nn.Sequential(stages)
        self.num_features = chans[-1]
        self.feature_info = feature_levels(zip(stages, chans, reductions, strict=True))
        init_conv_weights(self.stages)
        self._make_head()

    def _make_classifier(self) -> nn.Module:
        return nn.Linear(self.head_hidden_size, self.num_classes)

    def _set_pool(self, kind: Optional[str]) -> None:
        """Enable or disable the network's pooling, which a classifier enables again; None keeps it."""
        super()._set_pool(self.pooling if self.num_classes else kind)

    def _feature_grid(self, stages: "OrderedDict[str, nn.Module]") -> Tuple[int, int]:
        """Grid of the last feature map at ``img_size``, from the size formula of each layer."""
        h, w = self.img_size
        for layer in (m for s in stages.values() for m in s.modules()):
            if isinstance(layer, nn.Conv2d):
                (k, _), (s, _), p = layer.kernel_size, layer.stride, int(layer.padding[0])
                h, w = (h + 2 * p - k) // s + 1, (w + 2 * p - k) // s + 1
        if h < 1 or w < 1:
            raise ValueError(f"img_size={self.img_size} is too small for this network's convolutions")
        return h, w

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """``[b, c, h, w]`` to scores ``[b, n]``; to ``[b, head_hidden_size]`` without a classifier."""
        if self.num_classes == 0 and self.global_pool == "":
            return x
        x = self.pooler(x)
        x = self.neck(x)
        x = self.head_drop(x)
        if pre_logits:
            return x
        return self.fc(x)

    def _drop_head(self) -> None:
        super()._drop_head()
        self.neck = nn.Identity()


class SabourCNN(ConvNet):
    """Three convolutions, two hidden layers: ``cnn_sabour``.

    Args:
        num_classes, in_chans, global_pool: see :class:`ConvNet`; ``global_pool`` is ``"flatten"`` or ``""``.
        img_size: height and width of the images in pixels; the first hidden layer depends on it.
        widths: channels of the 5x5 convolutions.
        hidden: widths of the hidden layers.
        drop_rate: dropout before the classifier.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 1,
        img_size: Union[int, Tuple[int, int]] = 28,
        widths: Tuple[int, int, int] = (256, 256, 128),
        hidden: Tuple[int, int] = (328, 192),
        global_pool: Optional[str] = None,
        drop_rate: float = 0.5,
    ) -> None:
        super().__init__(
            num_classes, in_chans, img_size, global_pool, fixed_input_size=True, pooling="flatten"
        )
        _check_widths(widths, 3)
        chans = (in_chans, *widths)
        stages: "OrderedDict[str, nn.Module]" = OrderedDict(
            (f"conv{i + 1}", ConvActBn(chans[i], chans[i + 1], 5, padding=2, bn=False)) for i in range(3)
        )
        h, w = self._feature_grid(stages)
        self.pooler = nn.Flatten()
        self.neck = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(widths[-1] * h * w, hidden[0]),
                act1=nn.ReLU(inplace=True),
                fc2=nn.Linear(hidden[0], hidden[1]),
                act2=nn.ReLU(inplace=True),
            )
        )
        self.head_drop = nn.Dropout(drop_rate)
        self.head_hidden_size = hidden[1]
        self._finish(stages, tuple(widths), (1, 1, 1))


class MultiMnistCNN(ConvNet):
    """Three convolutions, a linear layer, a classifier: ``cnn_multimnist`` and ``cnn_multimnist_fc``.

    Table 12 applies the linear layer at each position and averages its outputs. Averaging its inputs gives the same
    result, and is the order used here.

    Args:
        num_classes, in_chans, global_pool: see :class:`ConvNet`.
        img_size: height and width of the images in pixels; weights depend on it with ``pool="linear"``.
        width: channels of the convolutions.
        hidden: width of the linear layer.
        pool: ``"avg"`` (Table 12), or ``"linear"``: the linear layer sees every position (section 6).
        drop_rate: dropout before the classifier.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 1,
        img_size: Union[int, Tuple[int, int]] = 36,
        width: int = 1024,
        hidden: int = 640,
        pool: str = "avg",
        global_pool: Optional[str] = None,
        drop_rate: float = 0.0,
    ) -> None:
        if pool not in ("avg", "linear"):
            raise ValueError(f"pool must be 'avg' or 'linear', not {pool!r}")
        learned = pool == "linear"
        super().__init__(
            num_classes, in_chans, img_size, global_pool, learned, "flatten" if learned else "avg"
        )
        stages: "OrderedDict[str, nn.Module]" = OrderedDict(
            conv1=ConvActBn(in_chans, width, stride=2, padding=1, bn=False),
            conv2=ConvActBn(width, width, stride=2),
            conv3=ConvActBn(width, width),
        )
        h, w = self._feature_grid(stages)
        self.pooler = nn.Flatten() if learned else GridPool(1)
        self.neck = nn.Linear(width * h * w if learned else width, hidden)
        self.head_drop = nn.Dropout(drop_rate)
        self.head_hidden_size = hidden
        self._finish(stages, (width,) * 3, (2, 4, 4))


class BaselineCNN(ConvNet):
    """Three strided convolutions with average pooling between: ``cnn_baseline``.

    The last pooling, 2x2 in the tables, covers the whole grid here, so that every image size from 5 pixels works.

    Args:
        num_classes, in_chans, img_size, global_pool: see :class:`ConvNet`; no weight depends on ``img_size``.
        width: channels of the convolutions.
        drop_rate: dropout before the classifier.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        width: int = 1024,
        global_pool: Optional[str] = None,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed_input_size=False, pooling="avg")
        if min(self.img_size) < 5:
            raise ValueError(f"img_size={self.img_size} is too small for this network's convolutions")
        stages: "OrderedDict[str, nn.Module]" = OrderedDict(
            conv1=ConvActBn(in_chans, width, stride=2, padding=1, bn=False),
            conv2=ConvActBn(width, width, stride=2, padding=1),
            conv3=ConvActBn(width, width, stride=2, padding=1, pool=2),
        )
        self.pooler = GridPool(1)
        self.head_drop = nn.Dropout(drop_rate)
        self.head_hidden_size = width
        self._finish(stages, (width,) * 3, (2, 4, 16))


def _check_widths(widths: Tuple[int, ...], count: int) -> None:
    if len(widths) != count or min(widths) < 1:
        raise ValueError(f"widths must be {count} numbers of at least 1, not {widths}")


class GridPool(nn.Module):
    """Average pooling to a grid of ``size x size``, flattened: ``[b, c, h, w] -> [b, c * size * size]``.

    The cells are those of adaptive average pooling, one axis after the other. That operator itself exports to
    gathers if the sizes do not divide.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        n = self.size
        if n == 1:
            return x.mean(dim=(2, 3))
        h, w = x.shape[2], x.shape[3]
        # cell i covers rows floor(i h / n) to ceil((i + 1) h / n)
        rows = [x[:, :, i * h // n : ((i + 1) * h + n - 1) // n].mean(dim=2) for i in range(n)]
        x = torch.stack(rows, dim=2)  # [b, c, n, w]
        cols = [x[:, :, :, i * w // n : ((i + 1) * w + n - 1) // n].mean(dim=3) for i in range(n)]
        return torch.stack(cols, dim=3).flatten(1)

    def extra_repr(self) -> str:
        return str(self.size)


class SixLayerCNN(ConvNet):
    """Five convolutions with BatchNorm, average pooling, a classifier: ``cnn6`` and ``cnn6_wide``.

    Args:
        num_classes, in_chans, img_size, global_pool: see :class:`ConvNet`; no weight depends on ``img_size``.
        widths: channels of the 3x3 convolutions (strides 1, 1, 2, 2, 1).
        pool_grid: rows and columns of the grid to which the features are averaged before the classifier.
        drop_rate: dropout before the classifier.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: Union[int, Tuple[int, int]] = 32,
        widths: Tuple[int, int, int, int, int] = (32, 64, 128, 256, 512),
        pool_grid: int = 2,
        global_pool: Optional[str] = None,
        drop_rate: float = 0.0,
    ) -> None:
        if pool_grid < 1:
            raise ValueError(f"pool_grid must be at least 1, not {pool_grid}")
        super().__init__(num_classes, in_chans, img_size, global_pool, fixed_input_size=False, pooling="avg")
        _check_widths(widths, 5)
        chans, strides = (in_chans, *widths), (1, 1, 2, 2, 1)
        stages: "OrderedDict[str, nn.Module]" = OrderedDict(
            (f"conv{i + 1}", ConvBnAct(chans[i], chans[i + 1], stride=strides[i])) for i in range(5)
        )
        self.pooler = GridPool(pool_grid)
        self.head_drop = nn.Dropout(drop_rate)
        self.head_hidden_size = widths[-1] * pool_grid**2
        self._finish(stages, tuple(widths), (1, 1, 2, 4, 4))


_cfg = partial(model_cfg, first_conv="stages.conv1.conv", classifier="fc")
_idpa_cfg = partial(
    _cfg, paper_name="Capsules with Inverted Dot-Product Attention Routing", paper_ids="arXiv:2002.04764"
)
_encap_cfg = partial(
    _cfg, pool_size=(8, 8), paper_name="Neural Network Encapsulation", paper_ids="arXiv:1808.03749"
)
_MULTIMNIST: Dict[str, Any] = dict(input_size=(1, 36, 36), pool_size=(6, 6), **MNIST)

default_cfgs = zoo_cfgs(
    {
        "cnn_sabour": _cfg(
            input_size=(1, 28, 28),
            pool_size=(28, 28),
            fixed_input_size=True,
            paper_name="Dynamic Routing Between Capsules",
            paper_ids="arXiv:1710.09829",
            **MNIST,
        ),
        "cnn_multimnist": _idpa_cfg(**_MULTIMNIST),
        "cnn_multimnist_fc": _idpa_cfg(**_MULTIMNIST, fixed_input_size=True),
        "cnn_baseline": _idpa_cfg(pool_size=(2, 2)),
        "cnn6": _encap_cfg(),
        "cnn6_wide": _encap_cfg(),
    }
)


@register_model
def cnn_sabour(pretrained: bool = False, **kwargs: Any) -> SabourCNN:
    """Baseline of the CapsNet paper: error 0.39 on MNIST, 8.1 on MultiMNIST; affNIST accuracy 66."""
    args = dict(widths=(256, 256, 128), hidden=(328, 192))
    return build_capsule_model(SabourCNN, "cnn_sabour", pretrained, defaults=args, **kwargs)


@register_model
def cnn_multimnist(pretrained: bool = False, **kwargs: Any) -> MultiMnistCNN:
    """Baseline of the IDPA paper with average pooling (Table 12): DiverseMultiMNIST accuracy 79.81."""
    args = dict(width=1024, hidden=640)
    return build_capsule_model(MultiMnistCNN, "cnn_multimnist", pretrained, defaults=args, **kwargs)


@register_model
def cnn_multimnist_fc(pretrained: bool = False, **kwargs: Any) -> MultiMnistCNN:
    """``cnn_multimnist`` with learned pooling (section 6): DiverseMultiMNIST accuracy 84.84."""
    args: Dict[str, Any] = dict(width=1024, hidden=640, pool="linear")
    return build_capsule_model(MultiMnistCNN, "cnn_multimnist_fc", pretrained, defaults=args, **kwargs)


@register_model
def cnn_baseline(pretrained: bool = False, **kwargs: Any) -> BaselineCNN:
    """CNN baseline of the IDPA paper (layers: its Tables 2 and 3): accuracy 87.10 on CIFAR-10, 62.30 on CIFAR-100."""
    args = dict(width=1024)
    return build_capsule_model(BaselineCNN, "cnn_baseline", pretrained, defaults=args, **kwargs)


@register_model
def cnn6(pretrained: bool = False, **kwargs: Any) -> SixLayerCNN:
    """Six-layer CNN with EncapNet's feature-map sizes (Table 1, c): error 14.43 on CIFAR-10, 0.38 on MNIST."""
    args = dict(widths=(32, 64, 128, 256, 512), pool_grid=2)
    return build_capsule_model(SixLayerCNN, "cnn6", pretrained, defaults=args, **kwargs)


@register_model
def cnn6_wide(pretrained: bool = False, **kwargs: Any) -> SixLayerCNN:
    """``cnn6``, 2.5 times as wide (Table 1, d): error 12.09 on CIFAR-10, 0.33 on MNIST."""
    args = dict(widths=(80, 160, 320, 640, 1280), pool_grid=1)
    return build_capsule_model(SixLayerCNN, "cnn6_wide", pretrained, defaults=args, **kwargs)
