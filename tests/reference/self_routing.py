"""Self-routing, naive: the paper's equations, child by child."""

from __future__ import annotations

import torch
from torch import Tensor


def route_image(
    poses: Tensor, activations: Tensor, weight: Tensor, bias: Tensor, pose_weight: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Route one image.

    Args:
        poses: ``[i, d]``.
        activations: ``[i]``.
        weight: ``[i, j, d]``, W_route.
        bias: ``[i, j]``.
        pose_weight: ``[i, j, e, d]``, W_pose, or None.

    Returns:
        activations ``[j]``, poses ``[j, e]`` or None, couplings ``[i, j]``.
    """
    children, parents, _ = weight.shape
    c = []
    for i in range(children):
        logits = [torch.dot(weight[i, j], poses[i]) + bias[i, j] for j in range(parents)]
        total = sum(torch.exp(logit) for logit in logits)
        c.append([torch.exp(logit) / total for logit in logits])
    active, out = [], []
    for j in range(parents):
        mass = sum(c[i][j] * activations[i] for i in range(children))
        active.append(mass / sum(activations[i] for i in range(children)))
        if pose_weight is not None:
            weighted = sum(c[i][j] * activations[i] * (pose_weight[i, j] @ poses[i]) for i in range(children))
            out.append(weighted / mass)
    couplings = torch.stack([torch.stack(row) for row in c])
    return torch.stack(active), torch.stack(out) if out else None, couplings


def conv_route(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    bias: Tensor,
    pose_weight: Tensor,
    kernel_size: int,
    stride: int,
    padding: int,
) -> tuple[Tensor, Tensor]:
    """Windows of one image, ``[h, w, t, d]`` and ``[h, w, t]``, to ``[h', w', j, e]`` and ``[h', w', j]``."""
    h, w, types, d = poses.shape
    size = (h + 2 * padding, w + 2 * padding)
    padded, active = poses.new_zeros(*size, types, d), poses.new_zeros(*size, types)
    padded[padding : padding + h, padding : padding + w] = poses
    active[padding : padding + h, padding : padding + w] = activations
    out_poses, out_active = [], []
    for row in range(0, size[0] - kernel_size + 1, stride):
        for column in range(0, size[1] - kernel_size + 1, stride):
            window = (slice(row, row + kernel_size), slice(column, column + kernel_size))
            result = route_image(
                padded[window].reshape(-1, d), active[window].reshape(-1), weight, bias, pose_weight
            )
            out_active.append(result[0])
            out_poses.append(result[1])
    out_h = (size[0] - kernel_size) // stride + 1
    return (
        torch.stack(out_poses).unflatten(0, (out_h, -1)),
        torch.stack(out_active).unflatten(0, (out_h, -1)),
    )
