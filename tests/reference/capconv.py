"""capConv and capFC, naive: PyTorch's own convolutions and norms, capsule channel by capsule channel.

Encapsulated layer of Li et al. 2018, section 3.1; feature maps are [b, g*d, h, w], channel = group * d + dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .squash import squash


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, groups: int) -> Tensor:
    """Zero-padded by half the kernel."""
    return F.conv2d(x, weight, bias, stride, weight.shape[2] // 2, 1, groups)


def batch_norm(x: Tensor, norm: nn.BatchNorm2d, training: bool) -> Tensor:
    mean, var = (None, None) if training else (norm.running_mean, norm.running_var)
    return F.batch_norm(x, mean, var, norm.weight, norm.bias, training, 0.0, norm.eps)


def activate(x: Tensor, norm: nn.BatchNorm2d, groups: int, training: bool) -> Tensor:
    x = batch_norm(x, norm, training).clamp(min=0)
    return squash(x.unflatten(1, (groups, -1)).movedim(2, -1)).movedim(-1, 2).flatten(1, 2)


def capconv(layer: nn.Module, x: Tensor, skip: Tensor | None, training: bool) -> Tensor:
    """The layer's output from its parameters."""
    groups = layer.groups
    conv = layer.conv
    if not hasattr(conv, "aide"):
        y = convolution(x, conv.weight, conv.bias, conv.stride[0], groups)
    else:
        stride = conv.master.stride[0]
        master = convolution(x, conv.master.weight, conv.master.bias, stride, groups)
        master = activate(master, conv.master_bn, groups, training)
        aide = convolution(x, conv.aide.weight, conv.aide.bias, stride, 1)
        aide = activate(aide, conv.aide_bn, groups, training)
        alpha, beta = coefficients(conv, master, aide)
        b, c, h, w = master.shape
        d = c // groups
        y = torch.stack(
            [master[:, k] * alpha[:, k // d] + aide[:, k] * beta[:, k // d] for k in range(c)], dim=1
        )
    if skip is not None:
        y = y + skip
    return activate(y, layer.bn, groups, training)


def coefficients(conv: nn.Module, master: Tensor, aide: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and beta, each [b, g, h, w]."""
    groups = conv.groups
    if conv.coefficients == "both":
        # per capsule channel, master and aide side by side, one convolution with two outputs
        d = master.shape[1] // groups
        parts, weights = [], []
        for g in range(groups):
            parts += [master[:, g * d : (g + 1) * d], aide[:, g * d : (g + 1) * d]]
            for o in (2 * g, 2 * g + 1):
                weights.append(torch.cat([conv.coef_master.weight[o], conv.coef_aide.weight[o]]))
        maps = convolution(torch.cat(parts, 1), torch.stack(weights), conv.coef_aide.bias, 1, groups)
        return maps[:, 0::2], maps[:, 1::2]
    of_master = convolution(master, conv.coef_master.weight, conv.coef_master.bias, 1, groups)
    of_aide = convolution(aide, conv.coef_aide.weight, conv.coef_aide.bias, 1, groups)
    return (of_master, of_aide) if conv.coefficients == "own" else (of_aide, of_master)


def module(encap: nn.Module, x: Tensor, training: bool) -> Tensor:
    """Type I layer, then the Type II stack with its one skip."""
    skip = None
    if encap.skip is not None:
        skip = convolution(x, encap.skip.weight, encap.skip.bias, encap.skip.stride[0], 1)
    x = capconv(encap.type1, x, skip, training)
    start = x
    for n, layer in enumerate(encap.type2):
        last = n == len(encap.type2) - 1
        x = capconv(layer, x, start if last and encap.skip_type2 else None, training)
    return x


def cap_fc(x: Tensor, weight: Tensor) -> Tensor:
    """[b, g*d, h, w] and [d, g*h*w, n] to class capsules [b, n, d]."""
    d, _, n = weight.shape
    weight = weight.reshape(d, -1, *x.shape[2:], n)
    return squash(torch.einsum("bgkhw,kghwn->bnk", x.unflatten(1, (-1, d)), weight))


def contributions(x: Tensor, weight: Tensor, poses: Tensor) -> Tensor:
    """Share of each grid position in each class capsule, [b, n, h, w]."""
    d, _, n = weight.shape
    weight = weight.reshape(d, -1, *x.shape[2:], n)
    along = torch.einsum("bgkhw,kghwn,bnk->bnhw", x.unflatten(1, (-1, d)), weight, poses).clamp(min=0)
    total = along.sum((2, 3), keepdim=True)
    return torch.where(total > 0, along / total, 1.0 / along[0, 0].numel())
