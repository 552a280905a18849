"""EM routing, naive: Hinton et al. 2018, Procedure 1, child by child and number by number.

From the second iteration on a variance is at least ``VAR_SHARE`` of the first iteration's (our choice).
Normalised costs (Li et al. 2018, appendix A.i) are divided by their range, but by no less than a smallest one, for the
range of parents that are alike is rounding (our choice): ``MIN_SPREAD`` nats per pose dimension times the parents' mean
mass, and after the first iteration ``MIN_SHARE`` of a mean parent's cost beside.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

VAR_SHARE = 1e-3
MIN_SPREAD = 0.01
MIN_SHARE = 0.05


def route_item(
    votes: Tensor,
    activations: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    num_iters: int,
    lam_start: float = 1.0,
    lam_step: float = 1.0,
    var_floor: float = 1e-4,
    eps: float = 1e-4,
    normalize_cost: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Route one image (or one window).

    Args:
        votes: ``[i, j, e]``.
        activations: ``[i]``.
        beta_v, beta_a: ``[j]``.

    Returns:
        Poses ``[j, e]``, activations ``[j]``, couplings ``[i, j]``.
    """
    children, parents, size = votes.shape
    r = [[votes.new_tensor(1.0 / parents) for _ in range(parents)] for _ in range(children)]
    mu: list[list[Tensor]] = []
    variance: list[list[Tensor]] = []
    a: list[Tensor] = []
    first: list[list[Tensor]] = []
    for t in range(num_iters):
        if t > 0:
            # E-step: the density of each Gaussian at each vote, and Bayes
            for i in range(children):
                p = []
                for j in range(parents):
                    density = a[j]
                    for h in range(size):
                        exponent = -((votes[i, j, h] - mu[j][h]) ** 2) / (2 * variance[j][h])
                        density = density * torch.exp(exponent) / torch.sqrt(2 * math.pi * variance[j][h])
                    p.append(density)
                for j in range(parents):
                    r[i][j] = p[j] / sum(p)
        # M-step
        lam = lam_start + lam_step * t
        mu, variance, masses, costs, a = [], [], [], [], []
        for j in range(parents):
            weights = [r[i][j] * activations[i] + eps / parents for i in range(children)]
            total = sum(weights)
            masses.append(total)
            mu.append(
                [sum(weights[i] * votes[i, j, h] for i in range(children)) / total for h in range(size)]
            )
            spread = []
            for h in range(size):
                square = sum(weights[i] * (votes[i, j, h] - mu[j][h]) ** 2 for i in range(children))
                spread.append(torch.clamp(square / total, min=var_floor))
                if t > 0:
                    spread[h] = torch.maximum(spread[h], VAR_SHARE * first[j][h])
            variance.append(spread)
            costs.append(sum((beta_v[j] + torch.log(torch.sqrt(spread[h]))) * total for h in range(size)))
        if t == 0:
            first = variance
        if normalize_cost:
            low, high = min(costs, key=Tensor.item), max(costs, key=Tensor.item)
            mean_variance = sum(sum(spread) for spread in variance) / (parents * size)
            level = sum(beta_v) / parents + torch.log(torch.sqrt(mean_variance))
            least = MIN_SPREAD if t == 0 else MIN_SPREAD + MIN_SHARE * abs(level)
            least = least * size * sum(masses) / parents
            costs = [10 * (cost - low) / max(high - low, least, key=Tensor.item) - 5 for cost in costs]
        a = [torch.sigmoid(lam * (beta_a[j] - costs[j])) for j in range(parents)]
    poses = torch.stack([torch.stack(row) for row in mu])
    return poses, torch.stack(a), torch.stack([torch.stack(row) for row in r])


def route(
    votes: Tensor, activations: Tensor, beta_v: Tensor, beta_a: Tensor, num_iters: int, **settings: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A batch of votes ``[b, i, j, e]`` and activations ``[b, i]``: ``[b, j, e]``, ``[b, j]``, ``[b, i, j]``."""
    results = [
        route_item(v, a, beta_v, beta_a, num_iters, **settings)  # type: ignore[arg-type]
        for v, a in zip(votes, activations, strict=True)
    ]
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))  # type: ignore[return-value]


def split_map(x: Tensor, capsules: int, rows: int) -> tuple[Tensor, Tensor]:
    """Image ``[capsules * (p*p + 1), h, w]``: poses ``[capsules, p, p, h, w]``, activations ``[capsules, h, w]``."""
    poses = x[: capsules * rows * rows].unflatten(0, (capsules, rows, rows))
    return poses, x[capsules * rows * rows :]


def convolution(
    x: Tensor,
    weight: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    kernel: int,
    stride: int,
    num_iters: int,
    **settings: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Windows of a batch of maps ``[b, caps * (p*p + 1), h, w]``, each routed on its own.

    Returns:
        Poses ``[b, h', w', j, p*p]``, activations ``[b, h', w', j]``, couplings ``[b, h', w', i, j]``.
    """
    taps, parents, rows, _ = weight.shape
    capsules = taps // (kernel * kernel)
    height, width = ((size - kernel) // stride + 1 for size in x.shape[2:])
    windows, active = [], []
    for image in x:
        poses, activations = split_map(image, capsules, rows)
        for top in range(0, height * stride, stride):
            for left in range(0, width * stride, stride):
                votes, present = [], []
                for k in range(kernel):
                    for m in range(kernel):
                        for c in range(capsules):
                            pose = poses[c, :, :, top + k, left + m]
                            transforms = weight[(k * kernel + m) * capsules + c]
                            votes.append(
                                torch.stack([(pose @ transforms[j]).reshape(-1) for j in range(parents)])
                            )
                            present.append(activations[c, top + k, left + m])
                windows.append(torch.stack(votes))
                active.append(torch.stack(present))
    routed = route(torch.stack(windows), torch.stack(active), beta_v, beta_a, num_iters, **settings)
    return tuple(t.unflatten(0, (len(x), height, width)) for t in routed)  # type: ignore[return-value]


def classes(
    x: Tensor, weight: Tensor, beta_v: Tensor, beta_a: Tensor, num_iters: int, **settings: float
) -> tuple[Tensor, Tensor, Tensor]:
    """All capsules of maps ``[b, caps * (p*p + 1), h, w]`` to class capsules, with coordinate addition.

    Returns:
        Poses ``[b, n, p*p]``, activations ``[b, n]``, couplings ``[b, h*w*caps, n]``.
    """
    capsules, parents, rows, _ = weight.shape
    images, active = [], []
    for image in x:
        poses, activations = split_map(image, capsules, rows)
        height, width = image.shape[1:]
        votes, present = [], []
        for y in range(height):
            for z in range(width):
                for c in range(capsules):
                    own = []
                    for j in range(parents):
                        vote = poses[c, :, :, y, z] @ weight[c, j]
                        place = torch.zeros_like(vote)
                        place[0, rows - 1] = (y + 0.5) / height
                        place[1, rows - 1] = (z + 0.5) / width
                        own.append((vote + place).reshape(-1))
                    votes.append(torch.stack(own))
                    present.append(activations[c, y, z])
        images.append(torch.stack(votes))
        active.append(torch.stack(present))
    return route(torch.stack(images), torch.stack(active), beta_v, beta_a, num_iters, **settings)


def shared_votes(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Children ``[b, g, d, s]``, transforms ``[j, g, d, e]``, biases ``[j, g, e]``: votes ``[b, g*s, j, e]``."""
    return (torch.einsum("bgds,jgde->bgsje", x, weight) + bias.transpose(0, 1).unsqueeze(1)).flatten(1, 2)
