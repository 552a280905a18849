"""EM routing of capsules whose transforms are shared over a grid, without votes.

Letters as in :mod:`capszoo.layers.em`.
"""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from .._blockwise import blockwise
from ..engine import Routed
from ..tuning import TUNING
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


def _pairs(x: Tensor, weigh_off_diagonal: float) -> Tensor:
    """Products of all pairs of entries along axis 2, each pair once: ``[., ., s, .] -> [., ., s (s + 1) / 2, .]``.

    ``sum(_pairs(x, 2) * _pairs(w, 1)) == sum(x * w)^2`` over that axis.
    """
    products: List[Tensor] = []
    for k in range(x.shape[2]):
        one = x[:, :, k : k + 1]
        products.append(one * one)
        if k + 1 < x.shape[2]:
            products.append(one * (weigh_off_diagonal * x[:, :, k + 1 :]))
    return torch.cat(products, dim=2)


torch.fx.wrap("_pairs")  # a leaf for FX, whose tracer cannot count to a traced size


def shared_em_routing(
    x: Tensor,
    activations: Tensor,
    weight: Tensor,
    bias: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    num_iters: int = 3,
    lam_start: float = LAM_START,
    lam_step: float = LAM_STEP,
    var_floor: float = VAR_FLOOR,
    eps: float = EPS,
    normalize_cost: bool = True,
    var_share: float = VAR_SHARE,
    min_share: float = MIN_SHARE,
    need_couplings: bool = True,
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """EM routing from capsules whose transforms are shared over a grid, without forming votes.

    Let ``c_g`` be the mean pose of the children of type ``g``, weighted as in the first iteration, and ``m_j`` the
    mean of the first iteration. The vote of the child of type ``g`` at place ``s`` is ``V = m_j + D_gj + W_gj u`` with
    ``u = pose - c_g`` and ``D_gj = W_gj c_g + B_gj - m_j``. Means, squares and distances are linear and quadratic
    forms of ``u`` (``w_h``: row h of ``W_gj``; ``r``: any weights of the children)::

        sum_s r (V - m)_h    = w_h . sum_s r u + D_h sum_s r                     children are summed, then transformed
        sum_s r (V - m)_h^2  = <w_h w_h^T, sum_s r u u^T> + 2 D_h w_h . sum_s r u + D_h^2 sum_s r
        sum_h q_h (V - m)_h^2 = <sum_h q_h w_h w_h^T, u u^T> + 2 u . sum_h q_h D_h w_h + sum_h q_h D_h^2

    so the largest tensors are the couplings, and ``w_h w_h^T`` of all transforms, whatever the batch size. Squares
    about ``c_g`` and ``m_j`` do not cancel: the variances are as exact as those of :func:`em_routing`.

    Args:
        x: ``[b, g, d, s]``, float32 or float64.
        activations: ``[b, g, s]``, not negative.
        weight: ``[j, g, d, e]``.
        bias: ``[j, g, e]``.
        beta_v, beta_a, num_iters, lam_start, lam_step, var_floor, eps, normalize_cost, var_share, min_share: see
            :func:`em_routing`.
        need_couplings: whether to return the couplings.

    Returns:
        poses ``[b, j, e]``; logits ``[b, j]``, whose sigmoids are the parents' activations; couplings
        ``[b, j, g, s]`` of the last iteration, which sum to 1 over the parents, or None.

    Raises:
        ValueError: ``num_iters`` is below 1.
    """
    settings = Settings(num_iters, lam_start, lam_step, var_floor, eps, normalize_cost)
    tensors = [weight, bias, beta_v, beta_a]
    routed = SharedSteps().route_shared(
        [x, activations], tensors, settings, need_couplings, var_share, min_share
    )
    return routed.poses[0], routed.activations[0], routed.couplings


class SharedSteps:
    """The procedure of :func:`shared_em_routing` and its steps as methods, which :class:`StepsInBlocks` overrides."""

    def route_shared(
        self,
        inputs: List[Tensor],
        tensors: List[Tensor],
        settings: Settings,
        need_couplings: bool,
        var_share: float = VAR_SHARE,
        min_share: float = MIN_SHARE,
    ) -> Routed:
        """:func:`shared_em_routing`: ``inputs`` are x and activations, ``tensors`` weight, bias, beta_v and beta_a."""
        x, activations = inputs[0], inputs[1]
        weight, bias, beta_v, beta_a = tensors[0], tensors[1], tensors[2], tensors[3]
        num_iters, lam_start, lam_step, var_floor, eps, normalize_cost = settings
        check_iterations(num_iters)
        parents, groups = weight.shape[0], weight.shape[1]
        # t = 0: every parent takes the same share of every child, so the moments do not depend on j
        weights, mass = first_weights(activations.flatten(1), parents, eps)  # [b, gs], [b, 1]
        weights = weights.reshape(activations.shape).unsqueeze(2)  # [b, g, 1, s]
        share = weights.sum(dim=3)  # [b, g, 1]
        centre = (x * weights).sum(dim=3) / share  # [b, g, d]
        u = x - centre.unsqueeze(3)
        pairs = _pairs(u, 2.0)  # [b, g, m, s]
        features = torch.cat([torch.ones_like(u[:, :, :1]), u, pairs], dim=2).flatten(0, 1)  # [bg, f, s]
        present = features * activations.flatten(0, 1).unsqueeze(1)
        idle = (eps / parents) * features.sum(dim=2).unsqueeze(1)  # [bg, 1, f]
        forms = self.products(weight)  # w_h w_h^T: [j, g*m, e]
        # the children's weighted deviations u sum to zero, so the first moments are those of the centres alone
        squares = (pairs * weights).sum(dim=3)
        mean, offset, variance = self.first_moments(weight, forms, bias, centre, share, squares)
        variance = variance.clamp_min(var_floor)  # [j, b, e]
        least = (var_share * variance).clamp_min(var_floor)
        logits, log_sigma = parent_logits(
            mass, variance.transpose(0, 1), beta_v, beta_a, lam_start, normalize_cost, 0.0
        )
        shift = torch.zeros_like(mean)  # mu - m
        coupling: Optional[Tensor] = None
        for t in range(1, num_iters):
            # E-step: log-likelihoods as one form per parent and group, applied to the features
            height = log_weight(logits, log_sigma).t()  # [j, b]
            # [bg, j, f]
            form = self.likelihood_forms(weight, forms, offset, shift, variance, height).flatten(0, 1)
            # M-step
            sums = self.weighted_features(features, present, idle, form)  # [bg, j, f]
            if need_couplings and t == num_iters - 1:
                coupling = _couplings(features, form)  # [bg, s, j]
            total, shift, variance = self.moments(weight, forms, offset, sums.unflatten(0, [-1, groups]))
            variance = torch.maximum(variance, least)
            lam = lam_start + lam_step * t
            logits, log_sigma = parent_logits(
                total.t(), variance.transpose(0, 1), beta_v, beta_a, lam, normalize_cost, min_share
            )
        if coupling is not None:
            coupling = coupling.unflatten(0, [-1, groups]).permute(0, 3, 1, 2)
        elif need_couplings:
            coupling = torch.full_like(activations, 1.0).unsqueeze(1).expand(-1, parents, -1, -1) / parents
        return Routed([(mean + shift).transpose(0, 1)], [logits], coupling)

    def products(self, weight: Tensor) -> Tensor:
        """``w_h w_h^T`` of all transforms, ``[j, g*m, e]``."""
        return _pairs(weight, 1.0).flatten(1, 2)

    def first_moments(
        self, weight: Tensor, forms: Tensor, bias: Tensor, centre: Tensor, share: Tensor, squares: Tensor
    ) -> Tuple[Tensor, Tensor, Tensor]:
        """With even couplings: mean ``[j, b, e]``, centres' votes about it ``[j, g, b, e]``, variance ``[j, b, e]``."""
        # votes of the centres: [j, g, b, e]
        offset = torch.matmul(centre.transpose(0, 1), weight) + bias.unsqueeze(2)
        share = share.transpose(0, 1)  # [g, b, 1]
        mean = (share * offset).sum(dim=1)  # [j, b, e]
        offset = offset - mean.unsqueeze(1)
        variance = torch.matmul(squares.flatten(1), forms) + (share * offset * offset).sum(dim=1)
        return mean, offset, variance

    def likelihood_forms(
        self, weight: Tensor, forms: Tensor, offset: Tensor, shift: Tensor, variance: Tensor, height: Tensor
    ) -> Tensor:
        """Log-likelihoods of the children as forms of their features, ``[b, g, j, f]``."""
        precision = -0.5 / variance  # [j, b, e]
        there = offset - shift.unsqueeze(1)  # (V - mu)^2 = (there + W u)^2: [j, g, b, e]
        scaled = there * precision.unsqueeze(1)
        level = (scaled * there).sum(dim=3, keepdim=True) + height[:, None, :, None]  # [j, g, b, 1]
        linear = torch.matmul(2.0 * scaled, weight.transpose(2, 3))  # [j, g, b, d]
        # [j, b, g, m]
        square = torch.bmm(precision, forms.transpose(1, 2)).unflatten(2, [weight.shape[1], -1])
        form = torch.cat([level.transpose(1, 2), linear.transpose(1, 2), square], dim=3)  # [j, b, g, f]
        return form.permute(1, 2, 0, 3)

    def weighted_features(self, features: Tensor, present: Tensor, idle: Tensor, form: Tensor) -> Tensor:
        """Features summed over the places of a type, weighted for each parent, ``[bg, j, f]``."""
        couplings = _couplings(features, form)
        return torch.bmm(couplings.transpose(1, 2), present.transpose(1, 2)) + idle

    def moments(
        self, weight: Tensor, forms: Tensor, offset: Tensor, sums: Tensor
    ) -> Tuple[Tensor, Tensor, Tensor]:
        """From sums ``[b, g, j, f]``: masses ``[j, b]``, means minus the first ones, and variances ``[j, b, e]``."""
        dim = weight.shape[2]
        sums = sums.permute(2, 0, 1, 3)  # [j, b, g, f]
        masses = sums[:, :, :, :1].transpose(1, 2)  # [j, g, b, 1]
        total = masses.sum(dim=1)  # [j, b, 1]
        first = torch.matmul(sums[:, :, :, 1 : dim + 1].transpose(1, 2), weight)  # [j, g, b, e]
        moved = masses * offset
        shift = (first + moved).sum(dim=1) / total
        second = torch.bmm(sums[:, :, :, dim + 1 :].flatten(2), forms)
        second = second + (offset * (2.0 * first + moved)).sum(dim=1)
        return total.squeeze(2), shift, second / total - shift * shift


def _couplings(features: Tensor, form: Tensor) -> Tensor:
    """Couplings ``[bg, s, j]``."""
    return torch.softmax(torch.bmm(features.transpose(1, 2), form.transpose(1, 2)), dim=2)


class StepsInBlocks(SharedSteps):
    """The same steps in blocks of parents, with the products of their transforms, or of groups of children."""

    def products(self, weight: Tensor) -> Tensor:
        return blockwise(lambda w: (SharedSteps.products(self, w),), (weight,), (0,), (0,), _parents(weight))[
            0
        ]

    def first_moments(self, weight: Tensor, *others: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        step, dims = super().first_moments, (0, 0, 0, None, None, None)
        return blockwise(step, (weight, *others), dims, (0, 0, 0), _parents(weight))

    def likelihood_forms(self, weight: Tensor, *others: Tensor) -> Tensor:
        step = super().likelihood_forms
        tensors, dims = (weight, *others), (0,) * 6
        return blockwise(lambda *t: (step(*t),), tensors, dims, (2,), _parents(weight))[0]

    def weighted_features(self, features: Tensor, present: Tensor, idle: Tensor, form: Tensor) -> Tensor:
        step = super().weighted_features
        items = TUNING.em_shared_block_elements // (features.shape[2] * form.shape[1])
        return blockwise(lambda *t: (step(*t),), (features, present, idle, form), (0,) * 4, (0,), items)[0]

    def moments(self, weight: Tensor, *others: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        return blockwise(super().moments, (weight, *others), (0, 0, 0, 2), (0, 0, 0), _parents(weight))


def _parents(weight: Tensor) -> int:
    """Number of parents in a block, from the number of elements of the products ``w_h w_h^T`` of one parent."""
    groups, d, e = weight.shape[1:]
    return TUNING.em_shared_block_elements // (groups * d * (d + 1) // 2 * e)
