"""capConv and capFC, naive: loops over positions, capsule channels and dimensions.

Encapsulated layer of Li et al. 2018, section 3.1; feature maps are [b, g*d, h, w], channel = group * d + dimension.
Everything is built from Python loops and scalar products, so that gradients come from autograd alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def squash(vector: Tensor) -> Tensor:
    length = vector.norm() if float(vector.detach().norm()) > 0 else vector.sum() * 0
    return vector * length / (1 + length * length)


def squash_map(x: Tensor, groups: int) -> Tensor:
    b, c, h, w = x.shape
    d = c // groups
    rows = []
    for image in range(b):
        for g in range(groups):
            for i in range(h):
                for j in range(w):
                    rows.append(squash(x[image, g * d : (g + 1) * d, i, j]))
    return torch.stack(rows).reshape(b, groups, h, w, d).permute(0, 1, 4, 2, 3).reshape(b, c, h, w)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, groups: int) -> Tensor:
    """Zero-padded by half the kernel, one output number at a time."""
    b, c, h, w = x.shape
    out, per_group, k, _ = weight.shape
    pad = k // 2
    out_h, out_w = (h + 2 * pad - k) // stride + 1, (w + 2 * pad - k) // stride + 1
    values = []
    for image in range(b):
        for o in range(out):
            first = (o // (out // groups)) * per_group
            for i in range(out_h):
                for j in range(out_w):
                    total = x.new_zeros(()) if bias is None else bias[o]
                    for u in range(k):
                        for v in range(k):
                            row, col = i * stride + u - pad, j * stride + v - pad
                            if 0 <= row < h and 0 <= col < w:
                                total = (
                                    total + x[image, first : first + per_group, row, col] @ weight[o, :, u, v]
                                )
                    values.append(total)
    return torch.stack(values).reshape(b, out, out_h, out_w)


def batch_norm(x: Tensor, norm: nn.BatchNorm2d, training: bool) -> Tensor:
    channels = []
    for c in range(x.shape[1]):
        values = x[:, c]
        mean = values.mean() if training else norm.running_mean[c]
        var = ((values - mean) ** 2).mean() if training else norm.running_var[c]
        channels.append((values - mean) / (var + norm.eps) ** 0.5 * norm.weight[c] + norm.bias[c])
    return torch.stack(channels, dim=1)


def activate(x: Tensor, norm: nn.BatchNorm2d, groups: int, training: bool) -> Tensor:
    return squash_map(batch_norm(x, norm, training).clamp(min=0), groups)


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
    b, c, h, w = x.shape
    d, in_caps, n = weight.shape
    groups = c // d
    images = []
    for image in range(b):
        classes = []
        for j in range(n):
            pose = []
            for k in range(d):
                total = x.new_zeros(())
                for g in range(groups):
                    for row in range(h):
                        for col in range(w):
                            total = (
                                total + x[image, g * d + k, row, col] * weight[k, (g * h + row) * w + col, j]
                            )
                pose.append(total)
            classes.append(squash(torch.stack(pose)))
        images.append(torch.stack(classes))
    return torch.stack(images)


def contributions(x: Tensor, weight: Tensor, poses: Tensor) -> Tensor:
    """Share of each grid position in each class capsule, [b, n, h, w]."""
    b, c, h, w = x.shape
    d, in_caps, n = weight.shape
    groups = c // d
    out = x.new_zeros(b, n, h, w)
    for image in range(b):
        for j in range(n):
            for row in range(h):
                for col in range(w):
                    along = 0.0
                    for k in range(d):
                        for g in range(groups):
                            vote = x[image, g * d + k, row, col] * weight[k, (g * h + row) * w + col, j]
                            along += float(vote * poses[image, j, k])
                    out[image, j, row, col] = max(along, 0.0)
            total = out[image, j].sum()
            out[image, j] = out[image, j] / total if total > 0 else 1.0 / (h * w)
    return out
