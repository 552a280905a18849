"""Heinsen's routing, naive: every vote, score and credit by itself, number by number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def norm(vector: Tensor) -> Tensor:
    """LayerNorm without weights, with PyTorch's ε; a single number stays as it is."""
    if len(vector) == 1:
        return vector
    mean = sum(vector[k] for k in range(len(vector))) / len(vector)
    variance = sum((vector[k] - mean) ** 2 for k in range(len(vector))) / len(vector)
    return torch.stack([(vector[k] - mean) / torch.sqrt(variance + 1e-5) for k in range(len(vector))])


def benefits(module: Any, x: Tensor, i: int, j: int) -> Tensor:
    """β of a pair: a weight of its own, or a linear function of the child."""
    if hasattr(module, "bias"):
        return torch.dot(x[i], module.weight[j]) + module.bias[j]
    return module.weight[i, j]


def route_image(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Route the children ``[i, d]`` of one image by a layer's weights; returns ``[j, e]`` and the credit ``[j, i]``."""
    n, d = x.shape
    m = layer.out_caps
    row = [i if layer.in_caps else 0 for i in range(n)]
    votes, active = {}, []
    for i in range(n):
        scaled = x[i] / math.sqrt(n)
        score = layer.act_bias[row[i]]
        for k in range(d):
            score = score + scaled[k] * layer.act_weight[row[i], k]
        active.append(sigmoid(score))
        for j in range(m):
            votes[i, j] = (scaled * layer.vote_scale[j]) @ layer.weight + layer.vote_bias[j]
    parents: list[Tensor] = []
    credit: dict[tuple[int, int], Tensor] = {}
    for iteration in range(layer.num_iters):
        for i in range(n):
            if iteration == 0:
                shares = [1 / m] * m
            else:
                fits = []
                for j in range(m):
                    predicted = (norm(parents[j]) @ layer.pred_weight) * layer.pred_scale[
                        j
                    ] + layer.pred_bias[j]
                    likeness = torch.dot(x[i], predicted)
                    fits.append(
                        sigmoid(likeness * layer.score_weight[row[i], j] + layer.score_bias[row[i], j])
                    )
                shares = [fit / sum(fits) for fit in fits]  # the softmax of logarithms
            for j in range(m):
                used = active[i] * shares[j]
                ignored = active[i] - used
                use, ignore = (benefits(beta, x, i, j) for beta in (layer.beta_use, layer.beta_ign))
                credit[i, j] = use * used - ignore * ignored
        parents = [sum(credit[i, j] * votes[i, j] for i in range(n)) for j in range(m)]  # type: ignore[misc]
    poses = torch.stack([norm(parent) for parent in parents])
    return poses, torch.stack([torch.stack([credit[i, j] for i in range(n)]) for j in range(m)])


def route(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of children ``[b, i, d]``, image by image."""
    results = [route_image(layer, image) for image in x]
    return torch.stack([r[0] for r in results]), torch.stack([r[1] for r in results])
