"""EM routing of votes, and of windows that share transforms, step by step; letters as in :mod:`capszoo.layers.em`."""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._layout import split_axis
from .steps import (
    EPS,
    LAM_START,
    LAM_STEP,
    MIN_SHARE,
    VAR_FLOOR,
    VAR_SHARE,
    Settings,
    check_iterations,
    first_weights,
    log_weight,
    parent_logits,
)

torch.fx.wrap("split_axis")


def em_routing(
    votes: Tensor,
    activations: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    num_iters: int = 2,
    lam_start: float = LAM_START,
    lam_step: float = LAM_STEP,
    var_floor: float = VAR_FLOOR,
    eps: float = EPS,
    normalize_cost: bool = False,
    mean: Optional[Tensor] = None,
    var_share: float = VAR_SHARE,
    min_share: float = MIN_SHARE,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Route votes by expectation-maximisation.

    Args:
        votes: ``[b, j, i, e]``, float32 or float64; any strides, best with ``b`` and ``j`` mergeable (the layout
            ``[i, b, j, e]`` in memory, as matrix products over the children leave it, is read without a copy).
        activations: ``[b, i]``, not negative.
        beta_v, beta_a: ``[j]``.
        num_iters: iterations, at least 1.
        lam_start, lam_step: inverse temperature ``lam_start + lam_step * t`` of iteration t = 0, 1, …
        var_floor: smallest variance.
        eps: added to every child's activation, and shared evenly by the parents.
        normalize_cost: map the parents' costs of each item to [-5, 5], smallest to largest, before the sigmoid.
        var_share: from the second iteration on, a variance is at least this share of the first iteration's.
        min_share: with ``normalize_cost``, costs that spread over less than this share of the mean cost do not reach
            5 (from the second iteration on; in the first, the limit is 0.01 nats per pose dimension).
        mean: ``[b, j, e]``, the first iteration's mean, if the caller can compute it without reading the votes (see
            :func:`first_weights`); computed here if None.

    Returns:
        poses ``[b, j, e]``; logits ``[b, j]``, whose sigmoids are the parents' activations; couplings
        ``[b, j, i]`` of the last iteration, which sum to 1 over the parents.

    Raises:
        ValueError: ``num_iters`` is below 1.
    """
    check_iterations(num_iters)
    parents, pose_dim = votes.shape[1], votes.shape[3]
    v = votes.flatten(0, 1)  # [bj, i, e], a view in the layout above
    if mean is None:
        weights = even_weights(first_weights(activations, parents, eps)[0], parents)
        mean = torch.bmm(weights, v).reshape(-1, parents, pose_dim)  # [b, j, e]
    # (V - mean)^2 reads the votes once; written out, it and its gradient would read them three times
    squares = F.mse_loss(v, mean.reshape(-1, 1, pose_dim).expand_as(v), reduction="none")  # [bj, i, e]
    settings = Settings(num_iters, lam_start, lam_step, var_floor, eps, normalize_cost)
    return route_moments(v, squares, mean, mean, activations, beta_v, beta_a, settings, var_share, min_share)


def route_moments(
    votes: Tensor,
    squares: Tensor,
    mean: Tensor,
    origin: Tensor,
    activations: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    settings: Settings,
    var_share: float = VAR_SHARE,
    min_share: float = MIN_SHARE,
) -> Tuple[Tensor, Tensor, Tensor]:
    """:func:`em_routing` from moments of the votes: all operations on tensors of their size are ``torch.bmm``.

    Args:
        votes: ``[bj, i, e]``.
        squares: ``[bj, i, e]``, squares of the votes minus the first iteration's mean.
        mean: ``[b, j, e]``, the first iteration's mean.
        origin: ``[b, j, e]``, ``mean``, or 0 where it has been subtracted from ``votes``.
        activations: ``[b, i]``.
        settings: ``num_iters`` to ``normalize_cost``.

    The other arguments and the results are those of :func:`em_routing`.
    """
    num_iters, lam_start, lam_step, var_floor, eps, normalize_cost = settings
    parents, pose_dim, children = mean.shape[1], mean.shape[2], activations.shape[1]
    # t = 0: every parent takes the same share of every child, so the weights do not depend on j
    even, mass = first_weights(activations, parents, eps)  # [b, i], [b, 1]
    variance = (
        torch.bmm(even_weights(even, parents), squares).reshape(-1, parents, pose_dim).clamp_min(var_floor)
    )
    least = (var_share * variance).clamp_min(var_floor)  # [b, j, e]
    logits, log_sigma = parent_logits(mass, variance, beta_v, beta_a, lam_start, normalize_cost, 0.0)
    shift = torch.zeros_like(mean)  # mu - first mean
    coupling = torch.full_like(activations, 1.0).unsqueeze(1).expand(-1, parents, -1) / parents  # [b, j, i]
    for t in range(1, num_iters):
        # E-step: distance = sum_h (V - mu)^2 / 2 sigma^2, expanded about the first mean
        precision = 0.5 / variance  # [b, j, e]
        distance = torch.bmm(squares, precision.reshape(-1, pose_dim, 1))  # [bj, i, 1]
        height = log_weight(logits, log_sigma)  # [b, j]
        if t > 1:  # else mu is the first mean itself
            pull = 2.0 * precision * shift
            distance = distance - torch.bmm(votes, pull.reshape(-1, pose_dim, 1))
            height = height - (pull * (origin + 0.5 * shift)).sum(dim=-1)
        distance = distance.reshape(-1, parents, children)
        coupling = torch.softmax(height.unsqueeze(2) - distance, dim=1)  # [b, j, i]
        # M-step
        weights = coupling * activations.unsqueeze(1) + eps / parents  # [b, j, i]
        mass = weights.sum(dim=2)  # [b, j]
        weights = (weights / mass.unsqueeze(2)).flatten(0, 1).unsqueeze(1)  # [bj, 1, i]
        shift = torch.bmm(weights, votes).reshape(-1, parents, pose_dim) - origin
        second = torch.bmm(weights, squares).reshape(-1, parents, pose_dim)  # about the first mean
        variance = torch.maximum(second - shift * shift, least)
        lam = lam_start + lam_step * t
        logits, log_sigma = parent_logits(mass, variance, beta_v, beta_a, lam, normalize_cost, min_share)
    return mean + shift, logits, coupling


def even_weights(weights: Tensor, parents: int) -> Tensor:
    """Weights ``[b, i]`` of every parent, ``[bj, 1, i]``."""
    return weights.unsqueeze(1).expand(-1, parents, -1).flatten(0, 1).unsqueeze(1)


def first_mean(poses: Tensor, activations: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Mean vote with even couplings, ``[n, j, e]``: children summed, then transformed by one product."""
    children, pose_size, parents = weight.shape[0], weight.shape[1], weight.shape[2]
    weights = first_weights(activations, parents, eps)[0].unsqueeze(2)
    rows = (poses * weights).reshape(-1, children, pose_size, pose_size).transpose(1, 2)  # [n, p, i, q]
    mean = torch.matmul(rows.flatten(2), weight.flatten(2).flatten(0, 1))  # [n, p, j*r]
    return mean.reshape(-1, pose_size, parents, pose_size).transpose(1, 2).flatten(2)


def window_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    flat_weight: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    settings: Settings,
) -> Tuple[Tensor, Tensor, Tensor]:
    """EM routing of n windows that share transforms: :func:`em_routing` of the votes ``poses @ flat_weight``.

    Args:
        poses: ``[n, i, d]``.
        activations: ``[n, i]``.
        weight: the transforms, ``[i, q, j, r]``.
        flat_weight: the same as matrices on flattened poses, ``[i, d, j * e]``, see :func:`block_diagonal`.
        beta_v, beta_a, settings: see :func:`em_routing`.

    Returns:
        poses ``[n, j, e]``, logits ``[n, j]``, couplings ``[n, j, i]``.
    """
    parents = beta_v.shape[0]
    mean = first_mean(poses, activations, weight, settings.eps)
    votes = torch.bmm(poses.transpose(0, 1), flat_weight)  # [i, n, j*e]
    votes = split_axis(votes, 2, [parents, flat_weight.shape[2] // parents])  # [i, n, j, e]
    return em_routing(votes.permute(1, 2, 0, 3), activations, beta_v, beta_a, *settings, mean)
