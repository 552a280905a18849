"""EM routing: each parent is a Gaussian cluster of the votes of its children.

Papers: the procedure as Tsai et al. 2020 ("Capsules with inverted dot-product attention routing", Tables 6-7) and
Li et al. 2018 ("Neural network encapsulation", section 2.1) compare against it; it is that of Hinton, Sabour and
Frosst 2018 ("Matrix capsules with EM routing", Procedure 1). The cost normalisation is Li et al., appendix A.i.

========================= =================================================
symbol                    here
========================= =================================================
``V_ij``                  ``votes``, child ``i``'s vote for the pose of parent ``j``
``a_i``                   ``activations`` of the children
``R_ij``                  ``coupling``: share of child ``i`` that parent ``j`` takes
``sum_i R_ij`` (after a)  ``mass``
``mu_j``, ``sigma_j^2``   ``poses``, ``variance``
``beta_v``, ``beta_a``    ``beta_v``, ``beta_a``, one number per parent type
``lambda_t``              ``lam_start + lam_step * t``, with t from 0
``a_j``                   ``sigmoid(logits)``
========================= =================================================

Letters: b batch (for a convolution: batch times output positions) · i children · j parents · d, e pose sizes ·
p, q rows and columns of a matrix pose · h w grid · k l kernel · n classes · g groups of children that share their
transforms.

Each iteration, from ``R = 1 / parents``::

    M-step   R <- R * a_i + eps / parents;  mu, sigma^2 = weighted mean and variance of the votes
             cost_jh = (beta_v + log sigma_jh) * sum_i R_ij
             logit_j = lambda_t * (beta_a - sum_h cost_jh)
    E-step   R_ij = softmax over parents of (log sigmoid(logit_j) - sum_h [log sigma_jh + (V - mu)^2 / 2 sigma^2])

Deviations and choices of ours, all of them arguments: ``lambda_t = 1 + t``; variances are floored at ``var_floor``,
from the second iteration on also at ``var_share`` of the first one's, and a range of normalised costs that may be
rounding is not blown up (``min_share``; these two are arguments of the functions alone); ``eps``, an activation
that every child has beside its own, keeps a weighted mean defined where no child is active.
Activations are returned before their sigmoid, which keeps their order where the sigmoid has saturated; without
``normalize_cost`` it does so early (encapnet's authors call that option crucial).

How it is computed: squares are taken about the mean of the first iteration, where they do not cancel; means,
variances and log-likelihoods are then matrix-vector products of the votes and of these squares, the only two
tensors of that size. In eager PyTorch on the CPU they are made for a block of windows at a time, and again in the
backward pass. Half types are computed in float32, under autocast too.
"""

import math
from typing import Any, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ._blockwise import blockwise
from ._em_graph import route_in_parts
from ._em_steps import (
    EPS,
    INIT_NOISE,
    LAM_START,
    LAM_STEP,
    MIN_SHARE,
    VAR_FLOOR,
    VAR_SHARE,
    first_weights,
    log_weight,
    parent_logits,
)
from ._transforms import block_diagonal
from .squash import upcast_half

__all__ = ["ClassEM", "ConvEM", "SharedEM", "em_routing", "shared_em_routing"]

torch.fx.wrap("upcast_half")


def _check_iterations(num_iters: int) -> None:
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1, not {num_iters}")


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
            5 (from the second iteration on; in the first, it is 0.01 nats per pose dimension).
        mean: ``[b, j, e]``, the first iteration's mean, for a caller who has it for less than a pass over the
            votes (see :func:`first_weights`); absent, it is computed here.

    Returns:
        poses ``[b, j, e]``; logits ``[b, j]``, whose sigmoids are the parents' activations; couplings
        ``[b, j, i]`` of the last iteration, which sum to 1 over the parents.
    """
    _check_iterations(num_iters)
    parents, pose_dim = votes.shape[1], votes.shape[3]
    v = votes.flatten(0, 1)  # [bj, i, e], a view in the layout above
    if mean is None:
        weights = _even(first_weights(activations, parents, eps)[0], parents)
        mean = torch.bmm(weights, v).reshape(-1, parents, pose_dim)  # [b, j, e]
    # (V - mean)^2 in one pass over the votes; written out, it and its gradient would take three
    squares = F.mse_loss(v, mean.reshape(-1, 1, pose_dim).expand_as(v), reduction="none")  # [bj, i, e]
    return _route_moments(
        v,
        squares,
        mean,
        mean,
        activations,
        beta_v,
        beta_a,
        num_iters,
        lam_start,
        lam_step,
        var_floor,
        eps,
        normalize_cost,
        var_share,
        min_share,
    )


def _route_moments(
    votes: Tensor,
    squares: Tensor,
    mean: Tensor,
    origin: Tensor,
    activations: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    num_iters: int,
    lam_start: float,
    lam_step: float,
    var_floor: float,
    eps: float,
    normalize_cost: bool,
    var_share: float = VAR_SHARE,
    min_share: float = MIN_SHARE,
) -> Tuple[Tensor, Tensor, Tensor]:
    """:func:`em_routing` by moments of the votes: all that it does with tensors of their size are matrix products.

    Args:
        votes: ``[bj, i, e]``.
        squares: ``[bj, i, e]``, squares of the votes less the first iteration's mean.
        mean: ``[b, j, e]``, the first iteration's mean.
        origin: ``[b, j, e]``, ``mean``, or 0 where it has been subtracted from ``votes``.
        activations: ``[b, i]``.

    The other arguments and the results are those of :func:`em_routing`.
    """
    parents, pose_dim, children = mean.shape[1], mean.shape[2], activations.shape[1]
    # t = 0: every parent takes the same share of every child, so the weights do not depend on j
    even, mass = first_weights(activations, parents, eps)  # [b, i], [b, 1]
    variance = _weigh(_even(even, parents), squares).reshape(-1, parents, pose_dim).clamp_min(var_floor)
    least = (var_share * variance).clamp_min(var_floor)  # [b, j, e]
    logits, log_sigma = parent_logits(mass, variance, beta_v, beta_a, lam_start, normalize_cost, 0.0)
    shift = torch.zeros_like(mean)  # mu - first mean
    coupling = torch.full_like(activations, 1.0).unsqueeze(1).expand(-1, parents, -1) / parents  # [b, j, i]
    for t in range(1, num_iters):
        # E-step: distance = sum_h (V - mu)^2 / 2 sigma^2, expanded about the first mean
        precision = 0.5 / variance  # [b, j, e]
        distance = _project(squares, precision.reshape(-1, pose_dim, 1))  # [bj, i, 1]
        height = log_weight(logits, log_sigma)  # [b, j]
        if t > 1:  # else mu is the first mean itself
            pull = 2.0 * precision * shift
            distance = distance - _project(votes, pull.reshape(-1, pose_dim, 1))
            height = height - (pull * (origin + 0.5 * shift)).sum(dim=-1)
        distance = distance.reshape(-1, parents, children)
        coupling = torch.softmax(height.unsqueeze(2) - distance, dim=1)  # [b, j, i]
        # M-step
        weights = coupling * activations.unsqueeze(1) + eps / parents  # [b, j, i]
        mass = weights.sum(dim=2)  # [b, j]
        weights = (weights / mass.unsqueeze(2)).flatten(0, 1).unsqueeze(1)  # [bj, 1, i]
        shift = _weigh(weights, votes).reshape(-1, parents, pose_dim) - origin
        second = _weigh(weights, squares).reshape(-1, parents, pose_dim)  # about the first mean
        variance = torch.maximum(second - shift * shift, least)
        lam = lam_start + lam_step * t
        logits, log_sigma = parent_logits(mass, variance, beta_v, beta_a, lam, normalize_cost, min_share)
    return mean + shift, logits, coupling


def _even(weights: Tensor, parents: int) -> Tensor:
    """Weights ``[b, i]`` of every parent, ``[bj, 1, i]``."""
    return weights.unsqueeze(1).expand(-1, parents, -1).flatten(0, 1).unsqueeze(1)


def _weigh(weights: Tensor, votes: Tensor) -> Tensor:
    """Sums over the children: ``[bj, 1, i]`` and ``[bj, i, e]`` to ``[bj, 1, e]``."""
    if torch.jit.is_scripting():
        return torch.bmm(weights, votes)
    else:  # noqa: RET505 (as in ConvEM)
        if isinstance(votes, _Kept):
            return _Weigh.apply(weights, votes)
        return torch.bmm(weights, votes)


def _project(votes: Tensor, directions: Tensor) -> Tensor:
    """Sums over the pose: ``[bj, i, e]`` and ``[bj, e, 1]`` to ``[bj, i, 1]``."""
    if torch.jit.is_scripting():
        return torch.bmm(votes, directions)
    else:  # noqa: RET505 (as in ConvEM)
        if isinstance(votes, _Kept):
            return _Project.apply(votes, directions)
        return torch.bmm(votes, directions)


def _init_transforms(weight: Tensor, noise: float) -> None:
    """Identity plus noise: a parent starts as the mean of poses that mean the same to every child."""
    with torch.no_grad():
        nn.init.normal_(weight, std=noise)
        weight += torch.eye(weight.shape[-1], dtype=weight.dtype, device=weight.device)


def _describe(lam_start: float, lam_step: float, var_floor: float, eps: float, normalize_cost: bool) -> str:
    numbers = f", lam={lam_start:g}+{lam_step:g}t, var_floor={var_floor:g}, eps={eps:g}"
    return numbers + (", normalize_cost=True" if normalize_cost else "")


class _MatrixEM(nn.Module):
    """What the two layers of matrix capsules share: arguments, parameters, and maps that hold them.

    A map of matrix capsules is ``[b, caps * (p*p + 1), h, w]``: the poses, channel = capsule * p*p + row * p +
    column, then the activations, one channel a capsule.
    """

    prepared: Optional[Tensor]

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        taps: int,
        pose_size: int,
        num_iters: int,
        lam_start: float,
        lam_step: float,
        var_floor: float,
        eps: float,
        normalize_cost: bool,
        init_noise: float,
        init_beta_v: float,
    ) -> None:
        super().__init__()
        _check_iterations(num_iters)
        if pose_size < 2:
            raise ValueError(f"pose_size must be at least 2 (poses are matrices), not {pose_size}")
        self.in_caps = in_caps
        self.out_caps = out_caps
        self.pose_size = pose_size
        self.pose_dim = pose_size * pose_size
        self.num_iters = num_iters
        self.lam_start = lam_start
        self.lam_step = lam_step
        self.var_floor = var_floor
        self.eps = eps
        self.normalize_cost = normalize_cost
        self.init_noise = init_noise
        self.init_beta_v = init_beta_v
        self.weight = nn.Parameter(torch.empty(taps * in_caps, out_caps, pose_size, pose_size))
        self.beta_v = nn.Parameter(torch.empty(out_caps))
        self.beta_a = nn.Parameter(torch.empty(out_caps))
        channels = in_caps * (self.pose_dim + 1)
        self._channels_message = (
            f"a map of {in_caps} matrix capsules has {channels} channels: poses, then activations"
        )
        self.register_buffer("prepared", None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _init_transforms(self.weight, self.init_noise)
        nn.init.constant_(self.beta_v, self.init_beta_v)
        nn.init.zeros_(self.beta_a)

    @torch.jit.ignore
    def prepare_for_export(self) -> None:
        """Keep the block-diagonal weights as a constant: nothing is computed from ``weight`` any more."""
        self.prepared = block_diagonal(self.weight.detach(), self.pose_size)

    def _wide_weight(self) -> Tensor:
        prepared = self.prepared
        if prepared is not None:
            return upcast_half(prepared)
        return block_diagonal(upcast_half(self.weight), self.pose_size)

    def _weight(self) -> Tensor:
        """``[i, q, j, r]``."""
        prepared, p = self.prepared, self.pose_size
        if prepared is not None:  # [i, p, q, j, p, r]
            return upcast_half(prepared.reshape(-1, p, p, self.out_caps, p, p)[:, 0, :, :, 0])
        return upcast_half(self.weight).transpose(1, 2)

    def extra_repr(self) -> str:
        return (
            f"{self.in_caps}, {self.out_caps}, pose_size={self.pose_size}, num_iters={self.num_iters}"
            + _describe(self.lam_start, self.lam_step, self.var_floor, self.eps, self.normalize_cost)
        )


def _first_mean(poses: Tensor, activations: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Mean vote at even couplings, ``[n, j, e]``: children summed and transformed by one product."""
    children, pose_size, parents = weight.shape[0], weight.shape[1], weight.shape[2]
    weights = first_weights(activations, parents, eps)[0].unsqueeze(2)
    rows = (poses * weights).reshape(-1, children, pose_size, pose_size).transpose(1, 2)  # [n, p, i, q]
    mean = torch.matmul(rows.flatten(2), weight.flatten(2).flatten(0, 1))  # [n, p, j*r]
    return mean.reshape(-1, pose_size, parents, pose_size).transpose(1, 2).flatten(2)


def _window_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    wide: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    num_iters: int,
    lam_start: float,
    lam_step: float,
    var_floor: float,
    eps: float,
    normalize_cost: bool,
) -> Tuple[Tensor, Tensor, Tensor]:
    """:func:`em_routing` of the votes ``poses @ wide``."""
    parents = beta_v.shape[0]
    mean = _first_mean(poses, activations, weight, eps)
    votes = torch.bmm(poses.transpose(0, 1), wide).unflatten(2, [parents, -1])  # [i, n, j, e]
    return em_routing(
        votes.permute(1, 2, 0, 3),
        activations,
        beta_v,
        beta_a,
        num_iters,
        lam_start,
        lam_step,
        var_floor,
        eps,
        normalize_cost,
        mean,
    )


def window_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    wide: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    num_iters: int,
    lam_start: float,
    lam_step: float,
    var_floor: float,
    eps: float,
    normalize_cost: bool,
    need_couplings: bool,
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """EM routing in windows that share transforms; on the CPU a few windows at a time, whose votes stay in the cache.

    Args:
        poses: ``[n, i, d]`` of n windows.
        activations: ``[n, i]``.
        weight: the transforms, ``[i, q, j, r]``.
        wide: the same as matrices on flattened poses, ``[i, d, j * e]``, see :func:`block_diagonal`.
        beta_v, beta_a, num_iters, lam_start, lam_step, var_floor, eps, normalize_cost: see :func:`em_routing`.
        need_couplings: whether to return the couplings.

    Returns:
        poses ``[n, j, e]``, logits ``[n, j]``, and couplings ``[n, j, i]`` or None.
    """
    settings = (num_iters, lam_start, lam_step, var_floor, eps, normalize_cost)
    if torch.jit.is_scripting():
        mu, logits, couplings = _window_routing(poses, activations, weight, wide, beta_v, beta_a, *settings)
        if need_couplings:
            return mu, logits, couplings
        return mu, logits, None
    else:  # noqa: RET505 (as in ConvEM)
        plain = poses.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing()
        if not plain and poses.shape[0] * wide.shape[0] * wide.shape[2] > _BLOCK_VOTES:
            given = _Windows.apply(settings, need_couplings, poses, activations, weight, wide, beta_v, beta_a)
        else:
            given = _window_routing(poses, activations, weight, wide, beta_v, beta_a, *settings)
        return given[0], given[1], given[2] if need_couplings else None


class _Kept:
    """Votes (or their squares) in a buffer, and their gradient as the outer products that it is the sum of.

    ``values`` is ``[bj, i, e]``; a pair in ``terms`` stands for the gradient ``pair[0] * pair[1]``, of ``[bj, i, 1]``
    and ``[bj, 1, e]``.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.terms: List[Tuple[Tensor, Tensor]] = []


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, votes: _Kept) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.votes = votes
        return torch.bmm(weights, votes.values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        ctx.votes.terms.append((weights.transpose(1, 2), grad))
        return torch.bmm(ctx.votes.values, grad.transpose(1, 2)).transpose(1, 2), None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, votes: _Kept, directions: Tensor) -> Tensor:
        ctx.save_for_backward(directions)
        ctx.votes = votes
        return torch.bmm(votes.values, directions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[None, Tensor]:
        (directions,) = ctx.saved_tensors
        ctx.votes.terms.append((grad, directions.transpose(1, 2)))
        return None, torch.bmm(grad.transpose(1, 2), ctx.votes.values).transpose(1, 2)


#: Votes of a block (8 MiB in float32): the transforms are read for each block, and each takes a hundred small steps, of
#: both of which fewer and larger blocks save.
_BLOCK_VOTES = 1 << 21


class _Windows(torch.autograd.Function):
    """:func:`_window_routing`, a block of windows at a time, whose votes are made again in the backward pass.

    The buffers for votes, squares and gradients are allocated once: memory fresh from the system costs more than the
    arithmetic does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        settings: Tuple[int, float, float, float, float, bool],
        need_couplings: bool,
        poses: Tensor,
        activations: Tensor,
        weight: Tensor,
        wide: Tensor,
        beta_v: Tensor,
        beta_a: Tensor,
    ) -> Tuple[Tensor, ...]:
        ctx.save_for_backward(poses, activations, weight, wide, beta_v, beta_a)
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.need_couplings = settings, need_couplings
        parents, (count, children, pose_dim) = beta_v.shape[0], poses.shape
        outputs = [poses.new_empty(count, parents, pose_dim), poses.new_empty(count, parents)]
        if need_couplings:
            outputs.append(poses.new_empty(count, parents, children))
        block, buffers = _Windows.buffers(wide, count, 2)
        for start in range(0, count, block):
            part = slice(start, start + block)
            mean = _first_mean(poses[part], activations[part], weight, settings[4])
            votes, squares = _Windows.votes(poses[part], wide, mean, buffers)
            zero = torch.zeros_like(mean)
            results = _route_moments(  # type: ignore[misc]
                votes, squares, mean, zero, activations[part], beta_v, beta_a, *settings
            )
            for output, result in zip(outputs, results, strict=False):
                output[part] = result
        return tuple(outputs)

    @staticmethod
    def buffers(wide: Tensor, count: int, number: int) -> Tuple[int, List[Tensor]]:
        per_window = wide.shape[0] * wide.shape[2]
        block = max(1, min(count, _BLOCK_VOTES // per_window))
        return block, [wide.new_empty(block * per_window) for _ in range(number)]

    @staticmethod
    def votes(poses: Tensor, wide: Tensor, mean: Tensor, buffers: List[Tensor]) -> Tuple[Any, Any]:
        """Votes about ``mean`` and their squares, in the first two buffers."""
        shape = (wide.shape[0], *mean.shape)  # [i, n, j, e]
        votes, squares = (buffer[: math.prod(shape)].view(shape) for buffer in buffers[:2])
        torch.bmm(poses.transpose(0, 1), wide, out=votes.flatten(2))
        votes -= mean
        torch.mul(votes, votes, out=squares)
        return _Kept(votes.flatten(1, 2).transpose(0, 1)), _Kept(squares.flatten(1, 2).transpose(0, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        poses, activations, weight, wide, beta_v, beta_a = ctx.saved_tensors
        grads = [torch.empty_like(poses), torch.empty_like(activations)]
        shared = [torch.zeros_like(t) for t in (weight, beta_v, beta_a)]
        wide_grad = torch.zeros_like(wide)
        block, buffers = _Windows.buffers(wide, poses.shape[0], 3)
        for start in range(0, poses.shape[0], block):
            part = slice(start, start + block)
            with torch.enable_grad(), torch.autocast(poses.device.type, enabled=False):
                # every input as if a gradient of it were asked for: the terms come from those of the weights
                inputs = [t.detach().requires_grad_() for t in (poses[part], activations[part], weight)]
                betas = [t.detach().requires_grad_() for t in (beta_v, beta_a)]
                mean = _first_mean(inputs[0], inputs[1], inputs[2], ctx.settings[4])
                about = mean.detach().requires_grad_()
                with torch.no_grad():
                    votes, squares = _Windows.votes(poses[part], wide, mean, buffers)
                zero = torch.zeros_like(about)
                present = activations[part].detach().requires_grad_()
                results = _route_moments(  # type: ignore[misc]
                    votes, squares, about, zero, present, *betas, *ctx.settings
                )
                pairs = [
                    (r, g[part])
                    for r, g in zip(results, given, strict=False)
                    if g is not None and r.requires_grad
                ]
                small = torch.autograd.grad(
                    [r for r, _ in pairs],
                    [about, present, *betas],
                    [g for _, g in pairs],
                    allow_unused=True,
                    materialize_grads=True,
                )
            grad = buffers[2][: votes.values.numel()].view(wide.shape[0], *mean.shape)  # [i, n, j, e]
            _sum_of_terms(squares.terms, grad)
            grad *= votes.values.transpose(0, 1).reshape(grad.shape)
            grad *= 2.0
            _sum_of_terms(votes.terms, grad, add=True)
            about_grad = small[0] - grad.sum(dim=0)
            by_mean = torch.autograd.grad(mean, inputs, about_grad)
            flat = grad.flatten(2)  # [i, n, j*e]
            grads[0][part] = by_mean[0] + torch.bmm(flat, wide.transpose(1, 2)).transpose(0, 1)
            grads[1][part] = by_mean[1] + small[1]
            wide_grad.baddbmm_(poses[part].permute(1, 2, 0), flat)
            for total, more in zip(shared, (by_mean[2], small[2], small[3]), strict=True):
                total += more
        return None, None, *grads, shared[0], wide_grad, shared[1], shared[2]


def _sum_of_terms(terms: List[Tuple[Tensor, Tensor]], out: Tensor, add: bool = False) -> None:
    """Outer products ``[nj, i, 1] * [nj, 1, e]`` summed in ``out``, ``[i, n, j, e]``, or added to it."""
    for k, (left, right) in enumerate(terms):
        left = left.reshape(*out.shape[1:3], -1).permute(2, 0, 1).contiguous().unsqueeze(3)  # [i, n, j, 1]
        right = right.reshape(out.shape[1:])
        if k == 0 and not add:
            torch.mul(left, right, out=out)
        else:
            out.addcmul_(left, right)


torch.fx.wrap("window_routing")


class ConvEM(_MatrixEM):
    """EM routing of matrix capsules in a window: ``k x k`` positions of every child type to every parent type.

    The children of an output position are the ``k * k * in_caps`` capsules of its window, which has a normalisation
    of its own: the couplings of a child sum to 1 over the parent types in each window that it lies in. No padding.

    Args:
        in_caps, out_caps: capsule types.
        pose_size: rows (and columns) of a pose.
        kernel_size, stride: of the window.
        num_iters: iterations.
        lam_start, lam_step, var_floor, eps, normalize_cost: see :func:`em_routing`.
        init_noise: standard deviation of the noise that the transforms, initially identities, are given.
        init_beta_v: first ``beta_v``; minus the expected log of sigma makes the first activations neither 0 nor 1.

    ``weight`` is ``[k*k*in_caps, out_caps, p, p]``, its first index ``(row * k + column) * in_caps + capsule``; a
    vote is ``pose @ weight``, so that a transform has as many numbers as a pose. ``beta_v`` and ``beta_a`` are
    ``[out_caps]``.
    """

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        pose_size: int = 4,
        kernel_size: int = 3,
        stride: int = 1,
        num_iters: int = 2,
        lam_start: float = LAM_START,
        lam_step: float = LAM_STEP,
        var_floor: float = VAR_FLOOR,
        eps: float = EPS,
        normalize_cost: bool = False,
        init_noise: float = INIT_NOISE,
        init_beta_v: float = 0.0,
    ) -> None:
        super().__init__(
            in_caps,
            out_caps,
            kernel_size * kernel_size,
            pose_size,
            num_iters,
            lam_start,
            lam_step,
            var_floor,
            eps,
            normalize_cost,
            init_noise,
            init_beta_v,
        )
        self.kernel_size = kernel_size
        self.stride = stride
        #: set by what writes a graph for a runtime that takes it node by node, as ONNX Runtime does
        self.in_parts = False

    def grid_size(self, height: int, width: int) -> Tuple[int, int]:
        """Output rows and columns for an input of this size."""
        k, s = self.kernel_size, self.stride
        return (height - k) // s + 1, (width - k) // s + 1

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, in_caps * (p*p + 1), h, w]`` to ``[b, out_caps * (p*p + 1), h', w']``, activations in 0..1."""
        poses, logits, _ = self._route(x, False)
        return self.pack(poses, logits).to(x.dtype)

    def pack(self, poses: Tensor, logits: Tensor) -> Tensor:
        """What :meth:`route` returns, as a map with the activations behind the poses."""
        return torch.cat([poses.flatten(3), torch.sigmoid(logits)], dim=3).permute(0, 3, 1, 2)

    def route(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Map to poses ``[b, h', w', j, p*p]``, activation logits ``[b, h', w', j]``, couplings ``[b, h', w', j, i]``.

        All of them at least in float32; the children i of a window as the first index of ``weight``.
        """
        poses, logits, couplings = self._route(x, True)
        assert couplings is not None
        return poses, logits, couplings

    def _route(self, x: Tensor, need_couplings: bool) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        if torch.jit.is_scripting():
            return self._route_full(x, need_couplings)
        else:  # noqa: RET505 (TorchScript compiles no more than the branch it needs of an if with else)
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                with torch.autocast(x.device.type, enabled=False):
                    return self._route_full(x, need_couplings)
            return self._route_full(x, need_couplings)

    def _route_full(self, x: Tensor, need_couplings: bool) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """In float32 or float64."""
        torch._assert(x.shape[1] == self.in_caps * (self.pose_dim + 1), self._channels_message)
        x = self._windows(upcast_half(x).permute(0, 2, 3, 1))  # [b, h', w', k, l, channels]
        b, h, w = x.shape[0], x.shape[1], x.shape[2]
        children, parents = self.weight.shape[0], self.out_caps
        split = self.in_caps * self.pose_dim
        mu, logits, couplings = self._route_windows(
            x[..., :split].reshape(-1, h * w, children, self.pose_dim),  # [b, hw, i, d]
            x[..., split:].reshape(-1, h * w, children),  # [b, hw, i]
            self._weight().contiguous(),  # [i, q, j, r]
            self._wide_weight(),  # [i, d, j*e]
            need_couplings,
        )
        if need_couplings:
            assert couplings is not None
            couplings = couplings.reshape(b, h, w, parents, children)
        return mu.reshape(b, h, w, parents, self.pose_dim), logits.reshape(b, h, w, parents), couplings

    def _route_windows(
        self, poses: Tensor, activations: Tensor, weight: Tensor, wide: Tensor, need_couplings: bool
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Windows ``[b, hw, i, d]``, ``[b, hw, i]``, for the rest as :func:`window_routing`, which it calls."""
        beta_v, beta_a = upcast_half(self.beta_v), upcast_half(self.beta_a)
        settings = (
            self.num_iters,
            self.lam_start,
            self.lam_step,
            self.var_floor,
            self.eps,
            self.normalize_cost,
        )
        if not torch.jit.is_scripting():
            if self.in_parts:
                return route_in_parts(
                    poses, activations, weight, wide, beta_v, beta_a, settings, need_couplings
                )
        return window_routing(
            poses.flatten(0, 1),
            activations.flatten(0, 1),
            weight,
            wide,
            beta_v,
            beta_a,
            *settings,
            need_couplings,
        )

    def _windows(self, x: Tensor) -> Tensor:
        """``[b, h, w, c]`` to ``[b, h', w', k, l, c]``, by slices."""
        last = self.kernel_size - 1
        columns = [x[:, :, k : k - last if k < last else None : self.stride] for k in range(self.kernel_size)]
        x = torch.stack(columns, dim=3)  # [b, h, w', l, c]
        rows = [x[:, k : k - last if k < last else None : self.stride] for k in range(self.kernel_size)]
        return torch.stack(rows, dim=3)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", kernel_size={self.kernel_size}, stride={self.stride}"


class ClassEM(_MatrixEM):
    """EM routing of all capsules of a map to one capsule per class.

    The transforms are shared by all positions of a capsule type, so any grid will do. What tells positions apart is
    coordinate addition: a child's place, scaled to (0, 1), is added to its votes, the row to the top and the column to
    the second number of the pose's right-hand column.

    Args:
        in_caps, num_classes: capsule types, and classes.
        pose_size: rows (and columns) of a pose.
        num_iters: iterations.
        lam_start, lam_step, var_floor, eps, normalize_cost: see :func:`em_routing`.
        init_noise: standard deviation of the noise that the transforms, initially identities, are given.
        init_beta_v: first ``beta_v``; minus the expected log of sigma makes the first activations neither 0 nor 1.

    ``weight`` is ``[in_caps, num_classes, p, p]``; ``beta_v``, ``beta_a`` are ``[num_classes]``.
    """

    def __init__(
        self,
        in_caps: int,
        num_classes: int,
        pose_size: int = 4,
        num_iters: int = 2,
        lam_start: float = LAM_START,
        lam_step: float = LAM_STEP,
        var_floor: float = VAR_FLOOR,
        eps: float = EPS,
        normalize_cost: bool = False,
        init_noise: float = INIT_NOISE,
        init_beta_v: float = 0.0,
    ) -> None:
        super().__init__(
            in_caps,
            num_classes,
            1,
            pose_size,
            num_iters,
            lam_start,
            lam_step,
            var_floor,
            eps,
            normalize_cost,
            init_noise,
            init_beta_v,
        )

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Map ``[b, in_caps * (p*p + 1), h, w]`` to poses ``[b, n, p*p]`` and activation logits ``[b, n]``."""
        poses, logits, _ = self.route(x)
        return poses.to(x.dtype), logits.to(x.dtype)

    def route(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Map to poses ``[b, n, p*p]``, activation logits ``[b, n]`` and couplings ``[b, n, h, w, in_caps]``.

        All of them at least in float32.
        """
        if torch.jit.is_scripting():
            return self._route(x)
        else:  # noqa: RET505 (as in ConvEM)
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                with torch.autocast(x.device.type, enabled=False):
                    return self._route(x)
            return self._route(x)

    def votes(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Map to votes ``[b, n, h*w*in_caps, p*p]``, places added, and activations ``[b, h*w*in_caps]``."""
        torch._assert(x.shape[1] == self.in_caps * (self.pose_dim + 1), self._channels_message)
        h, w = x.shape[2], x.shape[3]
        x = upcast_half(x).flatten(2).transpose(1, 2)  # [b, hw, channels]
        split = self.in_caps * self.pose_dim
        poses = x[:, :, :split].reshape(-1, self.in_caps, self.pose_dim)  # [bhw, caps, d]
        activations = x[:, :, split:].flatten(1)  # [b, hw*caps]
        votes = torch.bmm(poses.transpose(0, 1), self._wide_weight())  # [caps, bhw, n*e]
        votes = votes.reshape(self.in_caps, -1, h * w, self.out_caps, self.pose_dim)
        votes = votes.permute(1, 3, 2, 0, 4) + grid_coordinates(
            x, h, w, self.pose_size
        )  # [b, n, hw, caps, e]
        return votes.flatten(2, 3), activations

    def _route(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        h, w = x.shape[2], x.shape[3]
        votes, activations = self.votes(x)
        mu, logits, couplings = em_routing(
            votes,
            activations,
            upcast_half(self.beta_v),
            upcast_half(self.beta_a),
            self.num_iters,
            self.lam_start,
            self.lam_step,
            self.var_floor,
            self.eps,
            self.normalize_cost,
        )
        return mu, logits, couplings.reshape(-1, self.out_caps, h, w, self.in_caps)


def grid_coordinates(like: Tensor, height: int, width: int, pose_size: int) -> Tensor:
    """Places of a grid as additions to flattened matrix poses, ``[h*w, 1, p*p]``, in the type and place of ``like``."""
    rows = (torch.arange(height, dtype=like.dtype, device=like.device) + 0.5) / height
    columns = (torch.arange(width, dtype=like.dtype, device=like.device) + 0.5) / width
    places = torch.zeros(height, width, 1, pose_size * pose_size, dtype=like.dtype, device=like.device)
    places[:, :, 0, pose_size - 1] = rows[:, None]
    places[:, :, 0, 2 * pose_size - 1] = columns
    return places.flatten(0, 1)


torch.fx.wrap("grid_coordinates")  # a leaf for FX, which cannot make tensors of a traced size


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
    _check_iterations(num_iters)
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


class SharedEM(nn.Module):
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
        super().__init__()
        _check_iterations(num_iters)
        self.groups, self.in_dim, self.out_caps, self.out_dim = groups, in_dim, out_caps, out_dim
        self.num_iters = num_iters
        self.lam_start = lam_start
        self.lam_step = lam_step
        self.var_floor = var_floor
        self.eps = eps
        self.normalize_cost = normalize_cost
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
            self.num_iters,
            self.lam_start,
            self.lam_step,
            self.var_floor,
            self.eps,
            self.normalize_cost,
            need_couplings=need_couplings,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.groups} groups of {self.in_dim} -> {self.out_caps}x{self.out_dim}, num_iters={self.num_iters}"
            + _describe(self.lam_start, self.lam_step, self.var_floor, self.eps, self.normalize_cost)
        )
