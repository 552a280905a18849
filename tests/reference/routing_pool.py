"""Algorithm 1 of Zhao & Huang (2019), capsule by capsule: slow, and meant to be read beside the paper."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6  # no length is taken as shorter than this


def unit(s: Tensor) -> Tensor:
    """Eq. 6: a vector of length 1 (zero stays zero)."""
    return s / torch.sqrt(torch.clamp((s * s).sum(), min=EPS**2))


def squash(s: Tensor) -> Tensor:
    square = torch.clamp((s * s).sum(), min=EPS**2)
    return torch.sqrt(square) / (1 + square) * s


ACTIVATIONS = {"identity": lambda s: s, "squash": squash, "norm": unit}


def softmax(b: list[Tensor]) -> list[Tensor]:
    """Eqs. 3 and 5: over the children."""
    biggest = max(float(v.detach()) for v in b)
    exps = [torch.exp(v - biggest) for v in b]
    total = torch.stack(exps).sum()
    return [v / total for v in exps]


def algorithm_1(children: list[Tensor], lam: float, r: int, activation: str) -> tuple[Tensor, list[Tensor]]:
    """Route the children (vectors ``[e]``) to one parent: its pose ``[e]``, and a coupling for each child."""
    normed = [unit(u) for u in children]  # 1
    b = [torch.zeros((), dtype=u.dtype) for u in children]  # 2
    c = softmax(b)  # 3
    for _ in range(r):  # 4
        s = sum(c_i * u_i for c_i, u_i in zip(c, children, strict=True))  # 5
        v = unit(s)  # 6
        b = [b_i + (n_i * v).sum() for b_i, n_i in zip(b, normed, strict=True)]  # 7
        c = softmax([lam * b_i for b_i in b])  # 8
    s = sum(c_i * u_i for c_i, u_i in zip(c, children, strict=True))  # 10
    return ACTIVATIONS[activation](s), c  # 11


def routing_pool(x: Tensor, lam: float, r: int, activation: str = "identity") -> tuple[Tensor, Tensor]:
    """Children ``[b, g, l, e]`` to poses ``[b, g, e]`` and couplings ``[b, g, l]``."""
    poses, couplings = [], []
    for image in x:
        routed = [algorithm_1(list(group), lam, r, activation) for group in image]
        poses.append(torch.stack([pose for pose, _ in routed]))
        couplings.append(torch.stack([torch.stack(c) for _, c in routed]))
    return torch.stack(poses), torch.stack(couplings)


def routing_caps(
    x: Tensor, weight: Tensor, lam: float, r: int, activation: str = "squash"
) -> tuple[Tensor, Tensor]:
    """Children ``[b, g, l, d]``, transforms ``[n, g*d, e]`` to poses ``[b, n, e]``, couplings ``[b, n, g, l]``."""
    _, types, locations, d = x.shape
    poses, couplings = [], []
    for image in x:
        for transform in weight:
            votes = [
                image[g, p] @ transform[g * d : (g + 1) * d] for g in range(types) for p in range(locations)
            ]
            pose, c = algorithm_1(votes, lam, r, activation)
            poses.append(pose)
            couplings.append(torch.stack(c).reshape(types, locations))
    n = weight.shape[0]
    return (
        torch.stack(poses).reshape(len(x), n, -1),
        torch.stack(couplings).reshape(len(x), n, types, locations),
    )
