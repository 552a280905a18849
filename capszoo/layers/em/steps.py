"""Steps common to all forms of EM routing, and its constants; letters as in :mod:`capszoo.layers.em`."""

from typing import NamedTuple, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Defaults of our choice (the papers do not state them).
LAM_START = 1.0
LAM_STEP = 1.0
VAR_FLOOR = 1e-4
EPS = 1e-4
INIT_NOISE = 0.2
# Bounds below which a float32 value is mostly rounding error. After the first iteration variances are at least this
# share of the first one: they are differences of moments, which cancel completely where a parent took a single child.
VAR_SHARE = 1e-3
# Smallest divisor for the range of normalised costs: similar parents differ only by rounding, which the normalisation
# would stretch to the full range. In nats of log sigma per pose dimension, times the mean mass; once masses differ
# (from the second iteration on), also at least this share of the mean cost.
MIN_SPREAD = 0.01
MIN_SHARE = 0.05


class Settings(NamedTuple):
    """Arguments of a routing besides its tensors; see :func:`.routing.em_routing`."""

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
        min_share, min_spread: smallest range that normalised costs are divided by, see :data:`MIN_SPREAD`.

    Returns:
        logits ``[b, j]``, and ``sum_h log sigma_jh`` ``[b, j]`` minus a term common to all parents of an item.
    """
    pose_dim = variance.shape[2]
    # relative to the mean: differences between parents keep their precision, however large or small all votes are
    common = variance.mean(dim=(1, 2)).unsqueeze(1)  # [b, 1]
    log_sigma = 0.5 * (variance / common.unsqueeze(2)).log().sum(dim=2)  # [b, j]
    # sum over h of (beta_v + log sigma_jh) * sum_i R_ij
    if not normalize:
        cost = mass * (pose_dim * (beta_v + 0.5 * common.log()) + log_sigma)
        return lam * (beta_a - cost), log_sigma
    # minus its value for a parent of mean beta_v, mass and deviation, which the normalisation would subtract
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
    """Log of a parent's weight in the mixture, up to a constant that all parents share: ``[b, j]``."""
    # -softplus(-x), because an exported logsigmoid is Log(Sigmoid(x)), which is -inf at -120
    return -F.softplus(-logits) - log_sigma


def first_weights(activations: Tensor, parents: int, eps: float = EPS) -> Tuple[Tensor, Tensor]:
    """Weights of the first M-step, the same for every parent.

    Args:
        activations: ``[b, i]``.
        parents: number of parents.
        eps: as in :func:`.routing.em_routing`.

    Returns:
        weights ``[b, i]`` with sum 1, and ``[b, 1]``, the sum of each parent's weights before normalisation.
    """
    weights = (activations + eps) / parents
    mass = weights.sum(dim=1, keepdim=True)
    return weights / mass, mass
