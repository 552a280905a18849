"""Every routing as it is usually written: votes made and kept whole, element by element, no shared work.

These are what `benchmarks/routing.py` compares the layers with, on the layers' own weights, and what it checks their
values against before it times anything. Letters as in the layers: b batch, i children, j parents, e parent pose.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from capszoo import layers


def squash(s: Tensor) -> Tensor:
    square = (s * s).sum(dim=-1, keepdim=True)
    return s * square.sqrt() / (1 + square)


def windows(x: Tensor, kernel_size: int, stride: int) -> Tensor:
    """``[b, c, h, w]`` to ``[b*h'*w', k*l, c]``."""
    b, c = x.shape[:2]
    patches = F.unfold(x, kernel_size, stride=stride).reshape(b, c, kernel_size**2, -1)
    return patches.permute(0, 3, 2, 1).reshape(-1, kernel_size**2, c)


def by_agreement(votes: Tensor, num_iters: int, over: int) -> Tensor:
    """Dynamic routing of votes ``[b, i, j, e]`` to ``[b, j, e]``, softmax over axis 1 (children) or 2 (parents)."""
    logits = torch.zeros_like(votes[..., 0])  # [b, i, j]
    for t in range(num_iters):
        couplings = logits.softmax(dim=over)
        poses = squash((couplings.unsqueeze(3) * votes).sum(dim=1))
        if t < num_iters - 1:
            logits = logits + (votes * poses.unsqueeze(1)).sum(dim=3)
    return poses


def dynamic(layer: layers.DynamicRouting, x: Tensor) -> Tensor:
    """``[b, i, d]`` to ``[b, j, e]``: one small matrix product a vote, over an expanded weight."""
    weight = layer.weight.reshape(layer.in_caps, layer.in_dim, layer.out_caps, layer.out_dim)
    weight = weight.permute(0, 2, 1, 3)  # [i, j, d, e]
    votes = torch.matmul(x[:, :, None, None, :], weight).squeeze(3)  # [b, i, j, e]
    return by_agreement(votes, layer.num_iters, over=2)


def shared_dynamic(layer: layers.SharedDynamicRouting, x: Tensor) -> Tensor:
    """``[b, g, d, p]`` to ``[b, j, e]``, softmax over the children."""
    b, g, d, p = x.shape
    weight = layer.weight.reshape(layer.out_caps, layer.out_dim, g, d).permute(2, 0, 1, 3).reshape(g, -1, d)
    votes = torch.matmul(weight, x) + layer.bias.permute(2, 0, 1).reshape(g, -1, 1)  # [b, g, j*e, p]
    votes = votes.reshape(b, g, layer.out_caps, layer.out_dim, p).permute(0, 1, 4, 2, 3).flatten(1, 2)
    return by_agreement(votes, layer.num_iters, over=1)


def em(votes: Tensor, active: Tensor, layer: layers.ConvEM | layers.ClassEM) -> tuple[Tensor, Tensor]:
    """Votes ``[n, i, j, e]`` and activations ``[n, i]`` to poses ``[n, j, e]``, activation logits ``[n, j]``."""
    parents = votes.shape[2]
    share = torch.full_like(votes[..., 0], 1 / parents)
    for t in range(layer.num_iters):
        weight = (share * active.unsqueeze(2) + layer.eps / parents).unsqueeze(3)  # [n, i, j, 1]
        mass = weight.sum(dim=1)  # [n, j, 1]
        mean = (weight * votes).sum(dim=1) / mass
        spread = (votes - mean.unsqueeze(1)) ** 2
        variance = ((weight * spread).sum(dim=1) / mass).clamp_min(layer.var_floor)
        cost = ((layer.beta_v[:, None] + 0.5 * variance.log()) * mass).sum(dim=2)
        logits = (layer.lam_start + layer.lam_step * t) * (layer.beta_a - cost)
        if t < layer.num_iters - 1:
            density = -(spread / (2 * variance.unsqueeze(1)) + 0.5 * variance.log().unsqueeze(1)).sum(dim=3)
            share = (F.logsigmoid(logits).unsqueeze(1) + density).softmax(dim=2)
    return mean, logits


def matrix_votes(poses: Tensor, weight: Tensor) -> Tensor:
    """Poses ``[n, i, d]`` through ``[i, j, p, p]``: ``[n, i, j, d]``, by products of small matrices."""
    side = weight.shape[-1]
    return torch.matmul(poses.unflatten(2, (side, side)).unsqueeze(2), weight).flatten(3)


def conv_em(layer: layers.ConvEM, x: Tensor) -> Tensor:
    """The map to poses ``[b*h'*w', j, e]``."""
    x = windows(x, layer.kernel_size, layer.stride)
    split = layer.in_caps * layer.pose_dim
    poses = x[..., :split].reshape(x.shape[0], -1, layer.pose_dim)
    return em(matrix_votes(poses, layer.weight), x[..., split:].flatten(1), layer)[0]


def conv_idpa(layer: layers.ConvIDPA, x: Tensor, num_iters: int) -> Tensor:
    """``[b, i*d, h, w]`` to poses ``[b*h'*w', j, e]``: `num_iters` passes over the same children."""
    side = math.isqrt(layer.in_dim)
    weight = layer.weight.permute(4, 5, 2, 0, 3, 1).reshape(-1, layer.out_caps, side, side)  # [kli, j, q, r]
    poses = windows(x, layer.kernel_size, layer.stride)
    return idpa(layer, poses.reshape(poses.shape[0], -1, layer.in_dim), weight, num_iters)


def fc_idpa(layer: layers.FCIDPA, x: Tensor, num_iters: int) -> Tensor:
    """``[b, i, d]`` to poses ``[b, j, e]``."""
    return idpa(layer, x, layer.weight.permute(0, 2, 1, 3), num_iters)


def idpa(layer: layers.ConvIDPA | layers.FCIDPA, children: Tensor, weight: Tensor, num_iters: int) -> Tensor:
    votes = matrix_votes(children, weight)  # [n, i, j, e]
    parents = torch.zeros_like(votes[:, 0])
    for _ in range(num_iters):
        agreement = layer.scale * (votes * parents.unsqueeze(1)).sum(dim=3)
        couplings = agreement.softmax(dim=2)
        parents = layer.norm((couplings.unsqueeze(3) * votes).sum(dim=1))
    return parents


def routing_pool(layer: layers.RoutingPool2d, x: Tensor) -> Tensor:
    """``[b, c, h, w]`` to ``[b, c]``."""
    b, c = x.shape[:2]
    u = x.reshape(b, c // layer.caps_dim, layer.caps_dim, -1).transpose(2, 3)  # [b, g, l, e]
    unit = F.normalize(u, dim=3)
    logits = torch.zeros_like(u[..., :1])
    for _ in range(layer.num_iters):
        s = (logits.mul(layer.lam).softmax(dim=2) * u).sum(dim=2, keepdim=True)
        logits = logits + (unit * F.normalize(s, dim=3)).sum(dim=3, keepdim=True)
    return (logits.mul(layer.lam).softmax(dim=2) * u).sum(dim=2).flatten(1)


def capconv(layer: layers.CapConv, x: Tensor) -> Tensor:
    """``[b, c, h, w]`` to the same kind of map, master and aide, coefficients "both"."""
    groups = layer.groups
    pair: Any = layer.conv  # MasterAide

    def squashed(y: Tensor) -> Tensor:
        y = F.relu(y).reshape(y.shape[0], groups, -1, *y.shape[2:])
        square = (y * y).sum(dim=2, keepdim=True)
        return (y * square.sqrt() / (1 + square)).flatten(1, 2)

    def conv(part: torch.nn.Conv2d, y: Tensor) -> Tensor:
        return F.conv2d(y, part.weight, part.bias, part.stride, part.padding, 1, part.groups)

    master = squashed(pair.master_bn(conv(pair.master, x)))
    aide = squashed(pair.aide_bn(conv(pair.aide, x)))
    both = conv(pair.coef_master, master) + conv(pair.coef_aide, aide)
    size = master.shape[1] // groups
    alpha = both[:, 0::2].repeat_interleave(size, dim=1)
    beta = both[:, 1::2].repeat_interleave(size, dim=1)
    return squashed(layer.bn(master * alpha + aide * beta))


class EinsumDynamic(torch.nn.Module):
    """:class:`layers.DynamicRouting` in einsums over its weights, as it is often exported."""

    def __init__(self, layer: layers.DynamicRouting) -> None:
        super().__init__()
        shape = (layer.in_caps, layer.in_dim, layer.out_caps, layer.out_dim)
        self.weight = torch.nn.Parameter(layer.weight.detach().reshape(shape).clone())
        self.num_iters = layer.num_iters

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bid,idje->bije", x, self.weight)
        logits = torch.zeros_like(votes[..., 0])
        for t in range(self.num_iters):
            couplings = logits.softmax(dim=2)
            s = torch.einsum("bij,bije->bje", couplings, votes)
            square = (s * s).sum(dim=-1, keepdim=True)
            poses = s * (square + 1e-7).sqrt() / (1 + square)
            if t < self.num_iters - 1:
                logits = logits + torch.einsum("bije,bje->bij", votes, poses)
        return poses


class EinsumConvIDPA(torch.nn.Module):
    """:class:`layers.ConvIDPA` with matrix poses in einsums: votes of all positions at once, in nine dimensions."""

    def __init__(self, layer: layers.ConvIDPA) -> None:
        super().__init__()
        self.side = math.isqrt(layer.in_dim)
        weight = layer.weight.detach()  # [j, r, i, q, k, l]
        self.weight = torch.nn.Parameter(weight.clone())
        self.layer_norm = layer.norm
        self.kernel_size, self.stride = layer.kernel_size, layer.stride
        self.scale, self.num_iters = float(layer.scale), layer.num_iters

    def forward(self, x: Tensor) -> Tensor:
        b, p = x.shape[0], self.side
        k, step = self.kernel_size, self.stride
        x = x.reshape(b, -1, p, p, x.shape[2], x.shape[3])  # [b, i, p, q, h, w]
        rows = (x.shape[4] - k) // step + 1
        cols = (x.shape[5] - k) // step + 1
        places = [
            x[..., u : u + step * (rows - 1) + 1 : step, v : v + step * (cols - 1) + 1 : step]
            for u in range(k)
            for v in range(k)
        ]
        windows = torch.stack(places, dim=4).unflatten(4, (k, k))  # [b, i, p, q, k, l, h, w]
        votes = torch.einsum("bipqklhw,jriqkl->bhwklijpr", windows, self.weight)
        parents = torch.zeros_like(votes[:, :, :, 0, 0, 0])  # [b, h, w, j, p, r]
        for _ in range(self.num_iters):
            agreement = torch.einsum("bhwklijpr,bhwjpr->bhwklij", votes, parents) * self.scale
            couplings = agreement.softmax(dim=-1)
            total = torch.einsum("bhwklij,bhwklijpr->bhwjpr", couplings, votes)
            parents = self.layer_norm(total.flatten(4))
            parents = parents.unflatten(4, (p, p))
        return parents.flatten(3).permute(0, 3, 1, 2)  # [b, j*e, h, w]
