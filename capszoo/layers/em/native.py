"""EM routing in windows that share transforms, one ``capszoo::routing_pass`` per iteration: no vote is stored.

Letters as in :mod:`capszoo.layers.em`.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._native.ops import in_lanes, routing_pass, weight_in_lanes
from .routing import first_mean
from .steps import MIN_SHARE, VAR_SHARE, Settings, log_weight, parent_logits


def native_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    settings: Settings,
    need_couplings: bool,
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """:func:`.window_routing` without the transforms ``flat_weight``; couplings where requested."""
    num_iters, lam_start, lam_step, var_floor, eps, normalize_cost = settings
    children, size, parents = weight.shape[:3]
    mean = first_mean(poses, activations, weight, eps)  # [n, j, e]
    tensors = (
        in_lanes(poses.unflatten(2, [size, size])),
        in_lanes(activations),
        weight_in_lanes(weight),
        mean,
    )
    options = (eps / parents, children, True)  # read the squares too
    last = num_iters == 1
    # t = 0: even couplings
    mass, _, second, couplings = routing_pass(
        *tensors, None, None, None, *options, True, need_couplings and last
    )  # the mass is the same for every parent
    variance = (second / mass.unsqueeze(2)).clamp_min(var_floor)
    least = (VAR_SHARE * variance).clamp_min(var_floor)
    logits, log_sigma = parent_logits(mass, variance, beta_v, beta_a, lam_start, normalize_cost, 0.0)
    shift = torch.zeros_like(mean)  # mu - first mean
    for t in range(1, num_iters):
        # E-step: distance = sum_h (V - mu)^2 / 2 sigma^2, expanded about the first mean
        precision = 0.5 / variance
        height = log_weight(logits, log_sigma)
        pull: Optional[Tensor] = None
        if t > 1:  # else mu is the first mean itself
            pull = 2.0 * precision * shift
            height = height - 0.5 * (pull * shift).sum(dim=2)
        mass, first, second, couplings = routing_pass(
            *tensors, precision, pull, height, *options, False, need_couplings and t == num_iters - 1
        )
        # M-step
        shift = first / mass.unsqueeze(2)
        variance = torch.maximum(second / mass.unsqueeze(2) - shift * shift, least)
        lam = lam_start + lam_step * t
        logits, log_sigma = parent_logits(mass, variance, beta_v, beta_a, lam, normalize_cost, MIN_SHARE)
    return mean + shift, logits, couplings if need_couplings else None
