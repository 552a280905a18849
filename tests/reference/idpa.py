"""Inverted dot-product attention routing, naive: Procedures 1 and 2 of Tsai et al. 2020, capsule by capsule.

A layer is described by :class:`Layer`; poses are nested lists of ``[d]`` tensors, ``caps[y][x][i]`` on a grid or
``caps[i]`` without one, so that nothing is shared with the fast layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Layer:
    """One capsule layer.

    ``weight`` is ``[j, r, i, q, k, l]`` where convolutional (``kernel`` > 0), else ``[i, q, j, r]``; poses have
    ``rows`` rows. ``start`` holds the parents' first poses ``[j, e]``; ``beta_v``, ``beta_a`` are given with
    activations.
    """

    weight: Tensor
    rows: int
    kernel: int = 0
    stride: int = 1
    padding: int = 0
    scale: bool = True
    start: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    layer_norm: bool = True
    eps: float = 1e-5
    beta_v: Tensor | None = None
    beta_a: Tensor | None = None

    @property
    def parents(self) -> int:
        return self.weight.shape[0] if self.kernel else self.weight.shape[2]

    @property
    def out_dim(self) -> int:
        return self.rows * (self.weight.shape[1] if self.kernel else self.weight.shape[3])


def vote(pose: Tensor, weight: Tensor, rows: int) -> Tensor:
    """``[d]`` and ``[q, r]`` to ``[e]``: v = pose·W for each row of the pose (Eq. 1)."""
    return torch.cat([(row[:, None] * weight).sum(dim=0) for row in pose.reshape(rows, -1)])


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    mean = x.sum() / x.numel()
    variance = ((x - mean) ** 2).sum() / x.numel()
    y = (x - mean) / torch.sqrt(variance + eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def route_position(
    votes: list[list[Tensor]], parents: list[Tensor], layer: Layer, activations: list[Tensor] | None = None
) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
    """Procedure 1, lines 3 to 6, for the parents of one output position.

    Args:
        votes: ``votes[i][j]``, each ``[e]``.
        parents: poses of the iteration before, ``parents[j]``.
        layer: options.
        activations: of the children, for ablation C.

    Returns:
        New poses ``[j]``, couplings ``[i][j]``, activations ``[j]`` (empty without).
    """
    children, count = len(votes), len(parents)
    scale = 1 / math.sqrt(layer.out_dim) if layer.scale else 1.0
    couplings = []
    for i in range(children):
        agreement = [(parents[j] * votes[i][j]).sum() * scale for j in range(count)]  # line 3
        total = sum(torch.exp(a) for a in agreement)
        couplings.append([torch.exp(a) / total for a in agreement])  # line 4
    poses, active = [], []
    for j in range(count):
        assigned = [
            couplings[i][j] * (1.0 if activations is None else activations[i]) for i in range(children)
        ]
        s = sum(assigned[i] * votes[i][j] for i in range(children))  # line 5
        if activations is not None:
            mass = sum(assigned)
            mean = s / mass
            variance = sum(assigned[i] * (votes[i][j] - mean) ** 2 for i in range(children)) / mass
            log_sigma = torch.log(torch.sqrt(variance.clamp(min=1e-4)))
            cost = sum(layer.beta_v[j] + h for h in log_sigma) / layer.out_dim * mass * count / children
            active.append(1 / (1 + torch.exp(-(layer.beta_a[j] - cost))))
        if layer.layer_norm:
            s = layer_norm(s, layer.norm_weight, layer.norm_bias, layer.eps)  # line 6
        poses.append(s)
    return poses, couplings, active


def _window(caps: Any, y: int, x: int, layer: Layer, empty: Any) -> list[Any]:
    """Children of the output position (y, x) in the order kernel row, kernel column, type."""
    found = []
    for k in range(layer.kernel):
        for m in range(layer.kernel):
            row = y * layer.stride + k - layer.padding
            col = x * layer.stride + m - layer.padding
            inside = 0 <= row < len(caps) and 0 <= col < len(caps[0])
            found += caps[row][col] if inside else empty
    return found


def _flat(caps: Any) -> list[Any]:
    return [c for row in caps for cell in row for c in cell] if isinstance(caps[0], list) else list(caps)


def routing(children: Any, parents: Any, layer: Layer, activations: Any = None) -> tuple[Any, Any, Any]:
    """Procedure 1 for a whole layer of one image; ``parents=None`` starts from zero (or ``layer.start``).

    Returns poses, couplings and activations, nested by position where convolutional.
    """
    begin = torch.zeros(layer.parents, layer.out_dim, dtype=layer.weight.dtype)
    begin = list(begin if layer.start is None else layer.start)
    if not layer.kernel:
        caps = _flat(children)
        acts = None if activations is None else _flat(activations)
        votes = [
            [vote(c, layer.weight[i, :, j, :], layer.rows) for j in range(layer.parents)]
            for i, c in enumerate(caps)
        ]
        return route_position(votes, begin if parents is None else parents, layer, acts)
    height = (len(children) + 2 * layer.padding - layer.kernel) // layer.stride + 1
    width = (len(children[0]) + 2 * layer.padding - layer.kernel) // layer.stride + 1
    types = layer.weight.shape[2]
    no_pose = [torch.zeros_like(children[0][0][0])] * types
    no_activation = [layer.weight.new_zeros(())] * types
    poses, couplings, active = [], [], []
    for y in range(height):
        poses.append([])
        couplings.append([])
        active.append([])
        for x in range(width):
            window = _window(children, y, x, layer, no_pose)
            acts = None if activations is None else _window(activations, y, x, layer, no_activation)
            votes = []
            for n, child in enumerate(window):
                k, m, i = n // types // layer.kernel, n // types % layer.kernel, n % types
                votes.append(
                    [
                        vote(child, layer.weight[j, :, i, :, k, m].t(), layer.rows)
                        for j in range(layer.parents)
                    ]
                )
            p, c, a = route_position(votes, begin if parents is None else parents[y][x], layer, acts)
            poses[-1].append(p)
            couplings[-1].append(c)
            active[-1].append(a)
    return poses, couplings, active


def inference(
    primary: Any,
    layers: list[Layer],
    num_iters: int,
    routing_order: str = "concurrent",
    activations: Any = None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Procedure 2, lines 4 to 9, for one image: all layers, all iterations.

    Args:
        primary: primary capsules (P^1), nested lists.
        layers: from the bottom up.
        num_iters: t.
        routing_order: ``"concurrent"``, or ``"sequential"`` (ablation B).
        activations: of the primary capsules, for ablation C.

    Returns:
        Of every layer the last poses, couplings and activations.
    """
    poses: list[Any] = [primary] + [None] * len(layers)
    active: list[Any] = [activations] + [None] * len(layers)
    couplings: list[Any] = [None] * len(layers)
    with_activations = activations is not None

    def below(level: int) -> Any:
        return active[level] if with_activations else None

    if routing_order == "sequential":
        for level, layer in enumerate(layers):
            for _ in range(num_iters):
                poses[level + 1], couplings[level], active[level + 1] = routing(
                    poses[level], poses[level + 1], layer, below(level)
                )
        return poses[1:], couplings, active[1:]
    for level, layer in enumerate(layers):  # lines 5 and 6: first iteration, layer after layer
        poses[level + 1], couplings[level], active[level + 1] = routing(
            poses[level], None, layer, below(level)
        )
    for _ in range(num_iters - 1):  # lines 7 to 9: every layer from the previous iteration's values
        new = [
            routing(poses[level], poses[level + 1], layer, below(level)) for level, layer in enumerate(layers)
        ]
        for level, (p, c, a) in enumerate(new):
            poses[level + 1], couplings[level], active[level + 1] = p, c, a
    return poses[1:], couplings, active[1:]


def grid(x: Tensor) -> list[list[list[Tensor]]]:
    """``[h, w, i, ...]`` as nested lists."""
    return [[list(cell) for cell in row] for row in x]


def stack(nested: Any) -> Tensor:
    """Nested lists of tensors as one tensor."""
    return nested if isinstance(nested, Tensor) else torch.stack([stack(n) for n in nested])
