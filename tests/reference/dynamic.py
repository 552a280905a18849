"""Dynamic routing, naive: Procedure 1 of Sabour et al. 2017, capsule by capsule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .squash import squash_vector


def route_image(
    votes: Tensor,
    num_iters: int,
    softmax_over: str = "parents",
    start: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Route one image.

    Args:
        votes: ``[i, j, e]``, ``û_{j|i}``.
        num_iters: ``r``.
        softmax_over: ``"parents"`` or ``"children"``.
        start: ``[i, j]``, first logits; zero where absent.
        bias: ``[j, e]``, added to every sum before the squash; zero where absent.

    Returns:
        ``[j, e]`` and the couplings ``[i, j]`` of the last round.
    """
    children, parents, _ = votes.shape
    b = [
        [votes.new_zeros(()) if start is None else start[i, j] for j in range(parents)]
        for i in range(children)
    ]
    v: list[Tensor] = []
    c = [[votes.new_zeros(()) for _ in range(parents)] for _ in range(children)]
    for _ in range(num_iters):
        # line 4
        if softmax_over == "parents":
            for i in range(children):
                denominator = sum(torch.exp(b[i][k]) for k in range(parents))
                for j in range(parents):
                    c[i][j] = torch.exp(b[i][j]) / denominator
        else:
            for j in range(parents):
                denominator = sum(torch.exp(b[k][j]) for k in range(children))
                for i in range(children):
                    c[i][j] = torch.exp(b[i][j]) / denominator
        # lines 5 and 6
        v = []
        for j in range(parents):
            s = torch.zeros_like(votes[0, 0]) if bias is None else bias[j]
            for i in range(children):
                s = s + c[i][j] * votes[i, j]
            v.append(squash_vector(s))
        # line 7
        for i in range(children):
            for j in range(parents):
                b[i][j] = b[i][j] + torch.dot(votes[i, j], v[j])
    return torch.stack(v), torch.stack([torch.stack(row) for row in c])


def route(votes: Tensor, *options: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """A batch of votes ``[b, i, j, e]``, image by image; returns ``[b, j, e]`` and ``[b, i, j]``."""
    results = [route_image(image, *options, **settings) for image in votes]
    return torch.stack([r[0] for r in results]), torch.stack([r[1] for r in results])


def dense_votes(x: Tensor, transforms: Tensor) -> Tensor:
    """Children ``[b, i, d]``, transforms ``[i, j, e, d]``: votes ``[b, i, j, e]``."""
    return torch.einsum("bid,ijed->bije", x, transforms)


def shared_votes(x: Tensor, transforms: Tensor, offsets: Tensor) -> Tensor:
    """Children ``[b, g, p, d]``, transforms ``[g, j, e, d]``, offsets ``[g, j, e]``: votes ``[b, g * p, j, e]``."""
    return (torch.einsum("bgpd,gjed->bgpje", x, transforms) + offsets.unsqueeze(1)).flatten(1, 2)


def conv_route(
    x: Tensor, transforms: Tensor, stride: int, padding: int, num_iters: int, softmax_over: str = "parents"
) -> Tensor:
    """A convolutional capsule layer, window by window.

    Args:
        x: ``[b, h, w, i, d]``.
        transforms: ``[k, l, i, j, e, d]``.
        stride, padding: of the window; beyond the border capsules are zero.
        num_iters, softmax_over: of the routing.

    Returns:
        ``[b, h', w', j, e]``.
    """
    b, h, w, types, d = x.shape
    rows, cols, _, parents, e, _ = transforms.shape
    padded = x.new_zeros(b, h + 2 * padding, w + 2 * padding, types, d)
    padded[:, padding : padding + h, padding : padding + w] = x
    out_h = (h + 2 * padding - rows) // stride + 1
    out_w = (w + 2 * padding - cols) // stride + 1
    flat = transforms.reshape(rows * cols * types, parents, e, d)
    grid = []
    for row in range(out_h):
        for col in range(out_w):
            children = []
            for k in range(rows):
                for m in range(cols):
                    for i in range(types):
                        children.append(padded[:, row * stride + k, col * stride + m, i])
            votes = dense_votes(torch.stack(children, dim=1), flat)
            grid.append(route(votes, num_iters, softmax_over)[0])
    return torch.stack(grid, dim=1).reshape(b, out_h, out_w, parents, e)


def conv3d_route(
    x: Tensor, kernel: Tensor, bias: Tensor, stride: int, padding: int, num_iters: int
) -> tuple[Tensor, Tensor]:
    """A convolutional capsule layer of one kernel, routed over types and positions together (DeepCaps).

    Args:
        x: ``[b, h, w, i, d]``.
        kernel: ``[k, l, j, e, d]``, the same for every child type.
        bias: ``[j, e]``, added to every sum before the squash.
        stride, padding: of the kernel; beyond the border capsules are zero.
        num_iters: of the routing.

    Returns:
        ``[b, h', w', j, e]``, and the couplings ``[b, i, h', w', j]`` of the last round.
    """
    b, types, parents, e = len(x), x.shape[3], kernel.shape[2], kernel.shape[3]
    maps = x.permute(0, 3, 4, 1, 2).flatten(0, 1)  # [b*i, d, h, w]
    votes = F.conv2d(maps, kernel.permute(2, 3, 4, 0, 1).flatten(0, 1), None, stride, padding)
    h, w = votes.shape[2:]
    votes = (
        votes.reshape(b, types, parents, e, h * w).permute(0, 1, 4, 2, 3).flatten(2, 3)
    )  # [b, i, h'*w'*j, e]
    poses, couplings = route(votes, num_iters, bias=bias.repeat(h * w, 1))
    return poses.reshape(b, h, w, parents, e), couplings.reshape(b, types, h, w, parents)
