"""Dynamic routing, naive: Procedure 1 of Sabour et al. 2017, capsule by capsule."""

from __future__ import annotations

import torch
from torch import Tensor

from .squash import squash_vector


def route_image(
    votes: Tensor, num_iters: int, softmax_over: str = "parents", start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Route one image.

    Args:
        votes: ``[i, j, e]``, ``û_{j|i}``.
        num_iters: ``r``.
        softmax_over: ``"parents"`` or ``"children"``.
        start: ``[i, j]``, first logits; zero where absent.

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
            s = torch.zeros_like(votes[0, 0])
            for i in range(children):
                s = s + c[i][j] * votes[i, j]
            v.append(squash_vector(s))
        # line 7
        for i in range(children):
            for j in range(parents):
                b[i][j] = b[i][j] + torch.dot(votes[i, j], v[j])
    return torch.stack(v), torch.stack([torch.stack(row) for row in c])


def route(
    votes: Tensor, num_iters: int, softmax_over: str = "parents", start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A batch of votes ``[b, i, j, e]``, image by image; returns ``[b, j, e]`` and ``[b, i, j]``."""
    results = [route_image(image, num_iters, softmax_over, start) for image in votes]
    return torch.stack([r[0] for r in results]), torch.stack([r[1] for r in results])


def dense_votes(x: Tensor, transforms: Tensor) -> Tensor:
    """Children ``[b, i, d]``, transforms ``[i, j, e, d]``: votes ``[b, i, j, e]``, one matrix-vector product each."""
    return torch.stack(
        [
            torch.stack(
                [
                    torch.stack([transforms[i, j] @ image[i] for j in range(transforms.shape[1])])
                    for i in range(transforms.shape[0])
                ]
            )
            for image in x
        ]
    )


def shared_votes(x: Tensor, transforms: Tensor, offsets: Tensor) -> Tensor:
    """Children ``[b, g, p, d]``, transforms ``[g, j, e, d]``, offsets ``[g, j, e]``: votes ``[b, g * p, j, e]``."""
    images = []
    for image in x:
        votes = []
        for g in range(x.shape[1]):
            for p in range(x.shape[2]):
                votes.append(
                    torch.stack(
                        [transforms[g, j] @ image[g, p] + offsets[g, j] for j in range(transforms.shape[1])]
                    )
                )
        images.append(torch.stack(votes))
    return torch.stack(images)


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
    b, h, w, types, d = x.shape
    rows, cols, parents, e, _ = kernel.shape
    padded = x.new_zeros(b, h + 2 * padding, w + 2 * padding, types, d)
    padded[:, padding : padding + h, padding : padding + w] = x
    out_h = (h + 2 * padding - rows) // stride + 1
    out_w = (w + 2 * padding - cols) // stride + 1
    places = [(row, col, j) for row in range(out_h) for col in range(out_w) for j in range(parents)]
    all_poses, all_couplings = [], []
    for image in padded:
        votes = {}
        for i in range(types):
            for row, col, j in places:
                vote = x.new_zeros(e)
                for k in range(rows):
                    for m in range(cols):
                        vote = vote + kernel[k, m, j] @ image[row * stride + k, col * stride + m, i]
                votes[i, row, col, j] = vote
        logits = {key: x.new_zeros(()) for key in votes}
        poses, c = {}, {}
        for _ in range(num_iters):
            for i in range(types):
                whole = sum(torch.exp(logits[(i, *place)]) for place in places)
                for place in places:
                    c[(i, *place)] = torch.exp(logits[(i, *place)]) / whole
            for place in places:
                s = sum(c[(i, *place)] * votes[(i, *place)] for i in range(types)) + bias[place[2]]
                poses[place] = squash_vector(s)
            for i, *place in votes:
                key = (i, *place)
                logits[key] = logits[key] + torch.dot(votes[key], poses[tuple(place)])
        all_poses.append(torch.stack([poses[place] for place in places]))
        all_couplings.append(torch.stack([torch.stack([c[(i, *p)] for p in places]) for i in range(types)]))
    grid = torch.stack(all_poses).reshape(b, out_h, out_w, parents, e)
    return grid, torch.stack(all_couplings).reshape(b, types, out_h, out_w, parents)
