"""EM routing of capsules whose transforms are shared over a grid. Letters as in :mod:`capszoo.layers.em`."""

from typing import List, Optional, Tuple

import torch
from torch import Tensor, nn

from .._blockwise import blockwise
from .._precision import upcast_half
from .base import EMLayer
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

__all__ = ["SharedEM", "shared_em_routing"]

torch.fx.wrap("upcast_half")


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
    """EM routing from capsules whose transforms are shared over a grid, without making votes.

    Let ``c_g`` be the mean pose of the children of type ``g``, weighted as in the first iteration, and ``m_j`` the
    mean of the first iteration. The vote of the child of type ``g`` at place ``s`` is ``V = m_j + D_gj + W_gj u`` with
    ``u = pose - c_g`` and ``D_gj = W_gj c_g + B_gj - m_j``. Means, squares and distances are linear and quadratic
    forms of ``u`` (``w_h``: row h of ``W_gj``; ``r``: any weights of the children)::

        sum_s r (V - m)_h    = w_h . sum_s r u + D_h sum_s r                     children are summed, then transformed
        sum_s r (V - m)_h^2  = <w_h w_h^T, sum_s r u u^T> + 2 D_h w_h . sum_s r u + D_h^2 sum_s r
        sum_h q_h (V - m)_h^2 = <sum_h q_h w_h w_h^T, u u^T> + 2 u . sum_h q_h D_h w_h + sum_h q_h D_h^2

    so the largest tensors are the couplings, and ``w_h w_h^T`` of all transforms, whatever the batch (and on the CPU
    those of a block). Squares about
    ``c_g`` and ``m_j`` do not cancel: the variances are as exact as those of :func:`em_routing`.

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
    """
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
    forms = _shared_products(weight)  # w_h w_h^T: [j, g*m, e]
    # the children's deviations u weigh up to zero: first moments are those of the centres alone
    mean, offset, variance = _shared_start(weight, forms, bias, centre, share, (pairs * weights).sum(dim=3))
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
        form = _shared_forms(weight, forms, offset, shift, variance, height).flatten(0, 1)  # [bg, j, f]
        # M-step
        sums = _shared_sums(features, present, idle, form)  # [bg, j, f]
        if need_couplings and t == num_iters - 1:
            coupling = _shared_couplings(features, form)  # [bg, s, j]
        total, shift, variance = _shared_moments(weight, forms, offset, sums.unflatten(0, [-1, groups]))
        variance = torch.maximum(variance, least)
        lam = lam_start + lam_step * t
        logits, log_sigma = parent_logits(
            total.t(), variance.transpose(0, 1), beta_v, beta_a, lam, normalize_cost, min_share
        )
    if coupling is not None:
        coupling = coupling.unflatten(0, [-1, groups]).permute(0, 3, 1, 2)
    elif need_couplings:
        coupling = torch.full_like(activations, 1.0).unsqueeze(1).expand(-1, parents, -1, -1) / parents
    return (mean + shift).transpose(0, 1), logits, coupling


# The steps of shared_em_routing. Each works in blocks where that is of use (see _blockwise): over the parents, with the
# products of their transforms, or over the groups of children, with their couplings; and is a leaf for FX.


def _shared_products_plain(weight: Tensor) -> Tuple[Tensor]:
    return (_pairs(weight, 1.0).flatten(1, 2),)


def _shared_start_plain(
    weight: Tensor, forms: Tensor, bias: Tensor, centre: Tensor, share: Tensor, squares: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    # votes of the centres: [j, g, b, e]
    offset = torch.matmul(centre.transpose(0, 1), weight) + bias.unsqueeze(2)
    share = share.transpose(0, 1)  # [g, b, 1]
    mean = (share * offset).sum(dim=1)  # [j, b, e]
    offset = offset - mean.unsqueeze(1)
    variance = torch.matmul(squares.flatten(1), forms) + (share * offset * offset).sum(dim=1)
    return mean, offset, variance


def _shared_forms_plain(
    weight: Tensor, forms: Tensor, offset: Tensor, shift: Tensor, variance: Tensor, height: Tensor
) -> Tuple[Tensor]:
    precision = -0.5 / variance  # [j, b, e]
    there = offset - shift.unsqueeze(1)  # (V - mu)^2 = (there + W u)^2: [j, g, b, e]
    scaled = there * precision.unsqueeze(1)
    level = (scaled * there).sum(dim=3, keepdim=True) + height[:, None, :, None]  # [j, g, b, 1]
    linear = torch.matmul(2.0 * scaled, weight.transpose(2, 3))  # [j, g, b, d]
    square = torch.bmm(precision, forms.transpose(1, 2)).unflatten(2, [weight.shape[1], -1])  # [j, b, g, m]
    form = torch.cat([level.transpose(1, 2), linear.transpose(1, 2), square], dim=3)  # [j, b, g, f]
    return (form.permute(1, 2, 0, 3),)


def _shared_couplings(features: Tensor, form: Tensor) -> Tensor:
    """Couplings ``[bg, s, j]``."""
    return torch.softmax(torch.bmm(features.transpose(1, 2), form.transpose(1, 2)), dim=2)


def _shared_sums_plain(features: Tensor, present: Tensor, idle: Tensor, form: Tensor) -> Tuple[Tensor]:
    couplings = _shared_couplings(features, form)
    return (torch.bmm(couplings.transpose(1, 2), present.transpose(1, 2)) + idle,)


def _shared_moments_plain(
    weight: Tensor, forms: Tensor, offset: Tensor, sums: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
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


def _shared_products(weight: Tensor) -> Tensor:
    """``w_h w_h^T`` of all transforms, ``[j, g*m, e]``."""
    if torch.jit.is_scripting():
        return _shared_products_plain(weight)[0]
    else:  # noqa: RET505 (as in ConvEM)
        return blockwise(_shared_products_plain, (weight,), (0,), (0,), _forms_work(weight))[0]


def _shared_start(
    weight: Tensor, forms: Tensor, bias: Tensor, centre: Tensor, share: Tensor, squares: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """Mean ``[j, b, e]`` at even couplings, the centres' votes about it ``[j, g, b, e]``, variance ``[j, b, e]``."""
    if torch.jit.is_scripting():
        return _shared_start_plain(weight, forms, bias, centre, share, squares)
    else:  # noqa: RET505 (as in ConvEM)
        inputs = (weight, forms, bias, centre, share, squares)
        return blockwise(
            _shared_start_plain, inputs, (0, 0, 0, None, None, None), (0, 0, 0), _forms_work(weight)
        )


def _shared_forms(
    weight: Tensor, forms: Tensor, offset: Tensor, shift: Tensor, variance: Tensor, height: Tensor
) -> Tensor:
    """Log-likelihoods of the children as forms of their features, ``[b, g, j, f]``."""
    if torch.jit.is_scripting():
        return _shared_forms_plain(weight, forms, offset, shift, variance, height)[0]
    else:  # noqa: RET505 (as in ConvEM)
        inputs = (weight, forms, offset, shift, variance, height)
        return blockwise(_shared_forms_plain, inputs, (0, 0, 0, 0, 0, 0), (2,), _forms_work(weight))[0]


def _shared_sums(features: Tensor, present: Tensor, idle: Tensor, form: Tensor) -> Tensor:
    """Features summed over the places of a type with the parents' weights, ``[bg, j, f]``."""
    if torch.jit.is_scripting():
        return _shared_sums_plain(features, present, idle, form)[0]
    else:  # noqa: RET505 (as in ConvEM)
        work = features.shape[2] * form.shape[1]
        return blockwise(_shared_sums_plain, (features, present, idle, form), (0, 0, 0, 0), (0,), work)[0]


def _shared_moments(
    weight: Tensor, forms: Tensor, offset: Tensor, sums: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """From sums ``[b, g, j, f]``: masses ``[j, b]``, means less the first ones and variances ``[j, b, e]``."""
    if torch.jit.is_scripting():
        return _shared_moments_plain(weight, forms, offset, sums)
    else:  # noqa: RET505 (as in ConvEM)
        inputs = (weight, forms, offset, sums)
        return blockwise(_shared_moments_plain, inputs, (0, 0, 0, 2), (0, 0, 0), _forms_work(weight))


def _forms_work(weight: Tensor) -> int:
    """Numbers in the products ``w_h w_h^T`` of one parent."""
    return weight.shape[1] * weight.shape[2] * (weight.shape[2] + 1) // 2 * weight.shape[3]


for _step in ("_shared_products", "_shared_start", "_shared_forms", "_shared_sums", "_shared_moments"):
    torch.fx.wrap(_step)


class SharedEM(EMLayer):
    """EM routing of vector capsules whose transforms are shared over the grid (Li et al. 2018, Fig. 1b, appendix A.i).

    Every capsule type ("group") has one biased transform to each parent, the same at all its places: votes as by a
    biased 1x1 convolution with as many groups as capsule types. :func:`shared_em_routing` says how they are avoided.

    Args:
        groups, in_dim: child types, and numbers in a child's pose.
        out_caps, out_dim: parents, and numbers in a parent's pose.
        num_iters: iterations.
        lam_start, lam_step, var_floor, eps, normalize_cost: see :func:`em_routing`.
        init_beta_v: first ``beta_v``. Well below minus the log of sigma, the parents that take more votes start as the
            more active ones; above, as the less active, and such a net hardly learns. Not for costs as they are, which
            it would send to the end of the sigmoid.

    ``weight`` is ``[j, g, d, e]``, normal of standard deviation 1 (our choice: a parent is the mean of many votes, and
    smaller ones would put the next layer's variances near their floor); ``bias`` is ``[j, g, e]``, initially 0;
    ``beta_v`` and ``beta_a`` are ``[j]``.
    """

    def __init__(
        self,
        groups: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        num_iters: int = 3,
        lam_start: float = LAM_START,
        lam_step: float = LAM_STEP,
        var_floor: float = VAR_FLOOR,
        eps: float = EPS,
        normalize_cost: bool = True,
        init_beta_v: float = -5.0,
    ) -> None:
        super().__init__(Settings(num_iters, lam_start, lam_step, var_floor, eps, normalize_cost))
        self.groups, self.in_dim, self.out_caps, self.out_dim = groups, in_dim, out_caps, out_dim
        self.init_beta_v = init_beta_v
        self.weight = nn.Parameter(torch.empty(out_caps, groups, in_dim, out_dim))
        self.bias = nn.Parameter(torch.empty(out_caps, groups, out_dim))
        self.beta_v = nn.Parameter(torch.empty(out_caps))
        self.beta_a = nn.Parameter(torch.empty(out_caps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.constant_(self.beta_v, self.init_beta_v)
        nn.init.zeros_(self.beta_a)

    def votes(self, x: Tensor) -> Tensor:
        """Children ``[b, g, d, s]`` to votes ``[b, j, g * s, e]``, which the routing itself never makes."""
        votes = torch.einsum("bgds,jgde->bjgse", upcast_half(x), upcast_half(self.weight))
        return (votes + upcast_half(self.bias).unsqueeze(2)).flatten(2, 3)

    def forward(self, x: Tensor, activations: Tensor) -> Tuple[Tensor, Tensor]:
        """Children ``[b, g, d, s]``, activations ``[b, g, s]`` to poses ``[b, j, e]``, activation logits ``[b, j]``."""
        poses, logits, _ = self._route(x, activations, False)
        return poses.to(x.dtype), logits.to(x.dtype)

    def route(self, x: Tensor, activations: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """As :func:`shared_em_routing` returns them, at least in float32: couplings are ``[b, j, g, s]``."""
        poses, logits, couplings = self._route(x, activations, True)
        assert couplings is not None
        return poses, logits, couplings

    def _route(
        self, x: Tensor, activations: Tensor, need_couplings: bool
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        if torch.jit.is_scripting():
            return self._route_full(x, activations, need_couplings)
        else:  # noqa: RET505 (as in ConvEM)
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                with torch.autocast(x.device.type, enabled=False):
                    return self._route_full(x, activations, need_couplings)
            return self._route_full(x, activations, need_couplings)

    def _route_full(
        self, x: Tensor, activations: Tensor, need_couplings: bool
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """In float32 or float64."""
        return shared_em_routing(
            upcast_half(x),
            upcast_half(activations),
            upcast_half(self.weight),
            upcast_half(self.bias),
            upcast_half(self.beta_v),
            upcast_half(self.beta_a),
            *self._settings(),
            need_couplings=need_couplings,
        )

    def extra_repr(self) -> str:
        sizes = f"{self.groups} groups of {self.in_dim} -> {self.out_caps}x{self.out_dim}, "
        return sizes + super().extra_repr()
