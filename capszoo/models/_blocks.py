"""Blocks shared by several families: convolution-norm-activation, basic residual blocks, backbones, the decoder.

Sources: He et al. 2016 (basic block, CIFAR ResNet with parameter-free shortcuts); Tsai et al. 2020, appendix A.1
(the ResNet backbone of the IDPA paper); Sabour et al. 2017 (the reconstruction decoder); Rajasegaran et al.
2019 (the decoder that the classes share).
"""

from collections import OrderedDict
from typing import Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from capszoo.layers._modules import at_least


def check_caps_dim(caps_dim: int, chans: int) -> None:
    """Refuse a pose dimension that does not divide the channels of a map."""
    if caps_dim < 1 or chans % caps_dim:
        valid = ", ".join(str(d) for d in range(1, chans + 1) if chans % d == 0)
        raise ValueError(f"caps_dim={caps_dim} does not divide the {chans} channels: use one of {valid}")


class ConvBnAct(nn.Module):
    """Convolution, BatchNorm, ReLU: ``[b, in, h, w] -> [b, out, h', w']``."""

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        kernel_size: int = 3,
        stride: int = 1,
        padding: Optional[int] = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        padding = kernel_size // 2 if padding is None else padding
        self.conv = nn.Conv2d(in_chans, out_chans, kernel_size, stride, padding, bias=bias)
        self.bn = nn.BatchNorm2d(out_chans)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class PadShortcut(nn.Module):
    """Parameter-free shortcut (He et al. 2016, option A): subsample, and pad the new channels with zeros."""

    def __init__(self, in_chans: int, out_chans: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = out_chans - in_chans

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut (He et al. 2016).

    Args:
        in_chans, out_chans: channels.
        stride: of the first convolution and of the shortcut.
        shortcut: ``"projection"`` (1x1 convolution with BatchNorm) or ``"pad"`` (parameter-free), used only if the
            shape changes.
    """

    def __init__(self, in_chans: int, out_chans: int, stride: int = 1, shortcut: str = "projection") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, out_chans, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_chans)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out_chans, out_chans, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_chans)
        self.act2 = nn.ReLU(inplace=True)
        self.shortcut: nn.Module
        if stride == 1 and in_chans == out_chans:
            self.shortcut = nn.Identity()
        elif shortcut == "pad":
            self.shortcut = PadShortcut(in_chans, out_chans, stride)
        elif shortcut == "projection":
            self.shortcut = nn.Sequential(
                OrderedDict(
                    conv=nn.Conv2d(in_chans, out_chans, 1, stride, bias=False), bn=nn.BatchNorm2d(out_chans)
                )
            )
        else:
            raise ValueError(f"shortcut must be 'projection' or 'pad', not {shortcut!r}")

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.act2(y + self.shortcut(x))


def _residual_stage(in_chans: int, out_chans: int, depth: int, stride: int, shortcut: str) -> nn.Sequential:
    blocks = [BasicBlock(in_chans, out_chans, stride, shortcut)]
    blocks += [BasicBlock(out_chans, out_chans, 1, shortcut) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


def cifar_resnet_stages(in_chans: int, depth: int) -> "OrderedDict[str, nn.Module]":
    """Stem and three stages of the CIFAR ResNet with ``depth = 6n + 2`` layers (He et al. 2016, section 4.2).

    Returns:
        Stages ``stem``, ``layer1``, ``layer2``, ``layer3`` with reductions 1, 1, 2, 4.

    Raises:
        ValueError: ``depth`` is not 6n + 2 of at least 8.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"a CIFAR ResNet has 6n + 2 layers (8, 14, 20, 32, …), not {depth}")
    n = (depth - 2) // 6
    return OrderedDict(
        stem=ConvBnAct(in_chans, 16),
        layer1=_residual_stage(16, 16, n, 1, "pad"),
        layer2=_residual_stage(16, 32, n, 2, "pad"),
        layer3=_residual_stage(32, 64, n, 2, "pad"),
    )


def idpa_backbone_stages(in_chans: int, out_chans: int = 128) -> "OrderedDict[str, nn.Module]":
    """ResNet backbone of the IDPA paper (appendix A.1): 32x32 images to 16x16 features of ``out_chans``.

    Returns:
        ``stem`` (3x3, 64), ``layer1`` (3 blocks of 64), ``layer2`` (4 blocks, stride 2); reductions 1, 1, 2.
    """
    return OrderedDict(
        stem=ConvBnAct(in_chans, 64),
        layer1=_residual_stage(64, 64, 3, 1, "projection"),
        layer2=_residual_stage(64, out_chans, 4, 2, "projection"),
    )


def six_layer_stages(
    in_chans: int, widths: Tuple[int, ...], caps_types: int, mid_caps: int
) -> "OrderedDict[str, nn.Module]":
    """Four 3x3 convolutions, a quarter of the rows and columns (Li et al. 2018, appendix A.i): ``conv1`` to ``conv4``.

    Raises:
        ValueError: other than four widths, or the last one or ``mid_caps`` is no multiple of ``caps_types``.
    """
    if len(widths) != 4:
        raise ValueError(f"widths must be four numbers of channels, not {widths}")
    at_least(1, caps_types=caps_types)
    if widths[-1] % caps_types or mid_caps % caps_types or mid_caps < caps_types:
        raise ValueError(
            f"the last of widths ({widths[-1]}) and mid_caps ({mid_caps}) must be multiples of "
            f"caps_types ({caps_types})"
        )
    layers = zip((in_chans, *widths[:3]), widths, (1, 1, 2, 2), strict=True)
    convolutions = [ConvBnAct(chans, width, stride=stride, bias=True) for chans, width, stride in layers]
    return OrderedDict((f"conv{i + 1}", layer) for i, layer in enumerate(convolutions))


def init_conv_weights(module: nn.Module) -> None:
    """He initialisation (fan out, ReLU) of every convolution below ``module``; norms start as the identity."""
    for m in module.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            if m.bias is not None:
                nn.init.zeros_(m.bias)


def score_parts(pooled: Tensor, classifier: nn.Module, caps_dim: int) -> Tensor:
    """Contribution of each pooled capsule to each score: the score of this capsule alone, less that of none.

    With a linear classifier, the contributions and the bias sum to the score. The classifier is called, so that it may
    be quantised, pruned or replaced.

    Args:
        pooled: the classifier's input ``[b, groups * caps_dim]``.
        classifier: ``[b, groups * caps_dim]`` to ``[b, n]``.
        caps_dim: channels of a capsule.

    Returns:
        ``[b, n, groups]``.
    """
    batch, width = pooled.shape
    groups = width // caps_dim
    of_group = torch.eye(groups, dtype=pooled.dtype, device=pooled.device).repeat_interleave(caps_dim, 1)
    alone = (pooled.unsqueeze(1) * of_group).reshape(batch * groups, width)
    scores = classifier(torch.cat([alone, pooled.new_zeros(1, width)]))  # [b*groups + 1, n]
    parts = scores[:-1] - scores[-1:]
    return parts.reshape(batch, groups, parts.shape[1]).transpose(1, 2)


def _masked(poses: Tensor, target: Optional[Tensor], num_classes: int) -> Tensor:
    """Capsules ``[b, n, e]`` with zeros in place of all but the target's, or else the longest."""
    if target is None:
        target = poses.detach().float().square().sum(dim=-1).argmax(dim=1)
    keep = F.one_hot(target.long(), num_classes).to(poses.dtype)  # [b, n]
    return poses * keep[:, :, None]


class Decoder(nn.Module):
    """Reconstruction from one class capsule (Sabour et al. 2017, section 4.1): 512, 1024, pixels, sigmoid.

    All capsules but one are masked by zeros: in training the labelled one is kept, in inference the longest.

    Args:
        num_classes: number of capsules.
        pose_dim: pose dimension of a capsule.
        out_chans: channels of the image.
        img_size: height and width of the image, in pixels.
    """

    def __init__(self, num_classes: int, pose_dim: int, out_chans: int, img_size: Tuple[int, int]) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.out_shape = (out_chans, img_size[0], img_size[1])
        self.fc1 = nn.Linear(num_classes * pose_dim, 512)
        self.fc2 = nn.Linear(512, 1024)
        self.fc3 = nn.Linear(1024, out_chans * img_size[0] * img_size[1])

    def forward(self, poses: Tensor, target: Optional[Tensor] = None) -> Tensor:
        """Capsules ``[b, n, e]`` (and the class to keep, ``[b]``) to images ``[b, c, h, w]`` in 0..1."""
        x = _masked(poses, target, self.num_classes).flatten(1)  # [b, n*e]
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = torch.sigmoid(self.fc3(x))
        return x.reshape(-1, self.out_shape[0], self.out_shape[1], self.out_shape[2])


class SharedDecoder(nn.Module):
    """Reconstruction from one class capsule, with the same weights for all classes (Rajasegaran et al. 2019).

    A linear layer to a small map of 16 channels, then transposed 3x3 convolutions: 64 channels, then half as many with
    each doubling of the map, then the image. As in the release there is no activation between them, and the map has at
    most 8 rows and columns after at least two halvings of the image. The sigmoid at the end is our choice (the release
    has a ReLU), as is the crop of sides that cannot be halved so often.

    Args:
        num_classes: number of capsules.
        pose_dim: pose dimension of a capsule.
        out_chans: channels of the image.
        img_size: height and width of the image, in pixels.
    """

    def __init__(self, num_classes: int, pose_dim: int, out_chans: int, img_size: Tuple[int, int]) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.img_size = img_size
        doublings = 2
        while max(img_size) > 8 * 2**doublings:
            doublings += 1
        self.grid = tuple(-(-size // 2**doublings) for size in img_size)
        self.fc = nn.Linear(pose_dim, 16 * self.grid[0] * self.grid[1])
        self.bn = nn.BatchNorm2d(16, momentum=0.2)  # 0.8 in Keras's terms
        layers = [nn.ConvTranspose2d(16, 64, 3, padding=1)]
        width = 64
        for _ in range(doublings):
            narrow = max(width // 2, 1)
            layers.append(nn.ConvTranspose2d(width, narrow, 3, 2, 1, output_padding=1))
            width = narrow
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(width, out_chans, 3, padding=1))

    def forward(self, poses: Tensor, target: Optional[Tensor] = None) -> Tensor:
        """Capsules ``[b, n, e]`` (and the class to keep, ``[b]``) to images ``[b, c, h, w]`` in 0..1."""
        pose = _masked(poses, target, self.num_classes).sum(dim=1)  # [b, e]
        x = F.relu(self.fc(pose)).reshape(-1, 16, self.grid[0], self.grid[1])
        x = self.layers(self.bn(x))
        return torch.sigmoid(x[:, :, : self.img_size[0], : self.img_size[1]])
