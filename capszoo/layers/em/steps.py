"""Steps of EM routing that every form of it takes, and its constants; letters as in :mod:`capszoo.layers.em`."""

from typing import NamedTuple, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Settings", "check_iterations", "first_weights", "log_weight", "parent_logits"]

# Defaults of our own choosing (the papers do not print them).
LAM_START = 1.0
LAM_STEP = 1.0
VAR_FLOOR = 1e-4
EPS = 1e-4
INIT_NOISE = 0.2
# Bounds below which a number of float32 is mostly rounding. After the first iteration variances are at least this share
# of the first: they are differences of moments, and nothing is left of them where a parent took a single child.
VAR_SHARE = 1e-3
# What the range of normalised costs is taken for at least, because parents that are alike differ by rounding, which
# would be blown up to the full range: so many nats of log sigma per pose dimension, times the mean mass; once masses
# differ (from the second iteration on), also this share of the mean cost.
MIN_SPREAD = 0.01
MIN_SHARE = 0.05


class Settings(NamedTuple):
    """What a routing is told beside its tensors; see :func:`.procedure.em_routing`."""

    num_iters: int
    lam_start: float
    lam_step: float
    var_floor: float
    eps: float
    normalize_cost: bool


def check_iterations(num_iters: int) -> None:
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1, not {num_iters}")


def parent_logits(
    mass: Tensor,
    variance: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    lam: float,
    normalize: bool,
    min_share: float,
    min_spread: float = MIN_SPREAD,
) -> Tuple[Tensor, Tensor]:
    """The parents' activation logits and deviations.

    Args:
        mass: ``[b, j or 1]``.
        variance: ``[b, j, e]``.
        beta_v, beta_a: ``[j]``.
        lam: inverse temperature.
        normalize: whether costs are normalised.
        min_share, min_spread: range that normalised costs are divided by at least, see :data:`MIN_SPREAD`.

    Returns:
        logits ``[b, j]``, and ``sum_h log sigma_jh`` ``[b, j]`` less what all parents of an item share.
    """
    pose_dim = variance.shape[2]
    # relative to the mean: what tells parents apart keeps its digits, however large or small all votes are
    common = variance.mean(dim=(1, 2)).unsqueeze(1)  # [b, 1]
    log_sigma = 0.5 * (variance / common.unsqueeze(2)).log().sum(dim=2)  # [b, j]
    # sum over h of (beta_v + log sigma_jh) * sum_i R_ij
    if not normalize:
        cost = mass * (pose_dim * (beta_v + 0.5 * common.log()) + log_sigma)
        return lam * (beta_a - cost), log_sigma
    # less its value for a parent of mean beta_v, mass and deviation, which the normalisation would subtract
    mean_mass = mass.mean(dim=1, keepdim=True)
    mean_beta = beta_v.mean()
    level = mean_beta + 0.5 * common.log()  # of one pose dimension
    cost = mass * (pose_dim * (beta_v - mean_beta) + log_sigma)
    cost = cost + (mass - mean_mass) * (pose_dim * level)
    low = cost.amin(dim=1, keepdim=True)
    high = cost.amax(dim=1, keepdim=True)
    least = pose_dim * mean_mass * (min_spread + min_share * level.abs())
    cost = (cost - low) / torch.maximum(high - low, least) * 10.0 - 5.0
    return lam * (beta_a - cost), log_sigma


def log_weight(logits: Tensor, log_sigma: Tensor) -> Tensor:
    """Log of a parent's weight in the mixture, without what all parents share: ``[b, j]``."""
    # -softplus(-x), because an exported logsigmoid is Log(Sigmoid(x)), which is -inf at -120
    return -F.softplus(-logits) - log_sigma


def first_weights(activations: Tensor, parents: int, eps: float = EPS) -> Tuple[Tensor, Tensor]:
    """Weights of the first M-step, the same for every parent.

    Args:
        activations: ``[b, i]``.
        parents: their number.
        eps: as in :func:`.procedure.em_routing`.

    Returns:
        weights ``[b, i]`` with sum 1, and ``[b, 1]``, what each parent's weights summed to before.
    """
    weights = (activations + eps) / parents
    mass = weights.sum(dim=1, keepdim=True)
    return weights / mass, mass
