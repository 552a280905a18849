"""Sinkhorn divergence, naive: one sample pair and one scaling entry at a time (Li et al. 2018, Eq. 8 to 11)."""

from __future__ import annotations

import torch
from torch import Tensor


def cost_matrix(x: Tensor, y: Tensor, cost: str) -> Tensor:
    rows = []
    for i in range(len(x)):
        row = []
        for j in range(len(y)):
            if cost == "cosine":
                row.append(1 - (x[i] @ y[j]) / (x[i].norm() * y[j].norm()))
            else:
                difference = x[i] - y[j]
                row.append(
                    difference.norm() if float(difference.detach().norm()) > 0 else difference.sum() * 0
                )
        rows.append(torch.stack(row))
    return torch.stack(rows)


def plan(cost: Tensor, num_iters: int, epsilon: float) -> Tensor:
    n, m = cost.shape
    kernel = torch.exp(-cost / epsilon)
    b = [torch.tensor(1.0 / m, dtype=cost.dtype) for _ in range(m)]
    for _ in range(num_iters):
        a = [(1.0 / n) / sum(kernel[i, j] * b[j] for j in range(m)) for i in range(n)]
        b = [(1.0 / m) / sum(kernel[i, j] * a[i] for i in range(n)) for j in range(m)]
    return torch.stack([torch.stack([a[i] * kernel[i, j] * b[j] for j in range(m)]) for i in range(n)])


def transport(x: Tensor, y: Tensor, num_iters: int, epsilon: float, cost: str, backprop_plan: bool) -> Tensor:
    costs = cost_matrix(x, y, cost)
    p = plan(costs, num_iters, epsilon)
    p = p if backprop_plan else p.detach()
    total = costs.new_zeros(())
    for i in range(len(x)):
        for j in range(len(y)):
            total = total + p[i, j] * costs[i, j]
    return total


def divergence(
    x: Tensor, y: Tensor, num_iters: int, epsilon: float, cost: str, bias_fix: bool, backprop_plan: bool
) -> Tensor:
    args = (num_iters, epsilon, cost, backprop_plan)
    loss = transport(x, y, *args)
    if bias_fix:
        loss = 2 * loss - transport(x, x, *args) - transport(y, y, *args)
    return loss


def kl(x: Tensor, y: Tensor) -> Tensor:
    """KL(softmax(y) || softmax(x)), mean over samples."""
    total = x.new_zeros(())
    for i in range(len(x)):
        px, py = torch.exp(x[i]) / torch.exp(x[i]).sum(), torch.exp(y[i]) / torch.exp(y[i]).sum()
        for k in range(x.shape[1]):
            total = total + py[k] * torch.log(py[k] / px[k])
    return total / len(x)
