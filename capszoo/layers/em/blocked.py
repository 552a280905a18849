"""EM routing in windows that share transforms, on the CPU in blocks of windows.

Letters as in :mod:`capszoo.layers.em`.
"""

import math
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from .._tracing import is_tracing
from .routing import em_routing, route_moments
from .steps import Settings, first_weights
from .vote_buffer import VoteBuffer

__all__ = ["window_routing"]


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
    settings: Settings,
) -> Tuple[Tensor, Tensor, Tensor]:
    """:func:`em_routing` of the votes ``poses @ wide``."""
    parents = beta_v.shape[0]
    mean = _first_mean(poses, activations, weight, settings.eps)
    votes = torch.bmm(poses.transpose(0, 1), wide).unflatten(2, [parents, -1])  # [i, n, j, e]
    return em_routing(votes.permute(1, 2, 0, 3), activations, beta_v, beta_a, *settings, mean)


def window_routing(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    wide: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    settings: Settings,
    need_couplings: bool,
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """EM routing in windows that share transforms; on the CPU a few windows at a time, whose votes stay in the cache.

    Args:
        poses: ``[n, i, d]`` of n windows.
        activations: ``[n, i]``.
        weight: the transforms, ``[i, q, j, r]``.
        wide: the same as matrices on flattened poses, ``[i, d, j * e]``, see :func:`block_diagonal`.
        beta_v, beta_a, settings: see :func:`em_routing`.
        need_couplings: whether to return the couplings.

    Returns:
        poses ``[n, j, e]``, logits ``[n, j]``, and couplings ``[n, j, i]`` or None.
    """
    if torch.jit.is_scripting():
        mu, logits, couplings = _window_routing(poses, activations, weight, wide, beta_v, beta_a, settings)
        if need_couplings:
            return mu, logits, couplings
        return mu, logits, None
    else:  # noqa: RET505 (as in ConvEM)
        tensors = (poses, activations, weight, wide, beta_v, beta_a)
        plain = poses.device.type != "cpu" or is_tracing(poses)
        if plain or poses.shape[0] * wide.shape[0] * wide.shape[2] <= _BLOCK_VOTES:
            given = _window_routing(*tensors, settings)
        elif not torch.compiler.is_compiling():
            given = _Windows.apply(settings, need_couplings, *tensors)
        else:
            given = em_windows(*tensors, *settings, need_couplings)
        return given[0], given[1], given[2] if need_couplings else None


#: Votes of a block (8 MiB in float32): the transforms are read for each block, and each takes a hundred small steps, of
#: both of which fewer and larger blocks save.
_BLOCK_VOTES = 1 << 21


def _in_blocks(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
    wide: Tensor,
    beta_v: Tensor,
    beta_a: Tensor,
    settings: Settings,
    need_couplings: bool,
) -> Tuple[Tensor, ...]:
    """:func:`_window_routing`, a block of windows at a time; couplings where they are asked for."""
    parents, (count, children, pose_dim) = beta_v.shape[0], poses.shape
    outputs = [poses.new_empty(count, parents, pose_dim), poses.new_empty(count, parents)]
    if need_couplings:
        outputs.append(poses.new_empty(count, parents, children))
    block, buffers = _buffers(wide, count, 2)
    for start in range(0, count, block):
        part = slice(start, start + block)
        mean = _first_mean(poses[part], activations[part], weight, settings.eps)
        votes, squares = _votes_about(poses[part], wide, mean, buffers)
        zero = torch.zeros_like(mean)
        results = route_moments(votes, squares, mean, zero, activations[part], beta_v, beta_a, settings)
        for output, result in zip(outputs, results, strict=False):
            output[part] = result
    return tuple(outputs)


def _buffers(wide: Tensor, count: int, number: int) -> Tuple[int, List[Tensor]]:
    """Windows of a block, and so many buffers for their votes."""
    per_window = wide.shape[0] * wide.shape[2]
    block = max(1, min(count, _BLOCK_VOTES // per_window))
    return block, [wide.new_empty(block * per_window) for _ in range(number)]


def _votes_about(poses: Tensor, wide: Tensor, mean: Tensor, buffers: List[Tensor]) -> Tuple[Any, Any]:
    """Votes about ``mean`` and their squares, in the first two buffers."""
    shape = (wide.shape[0], *mean.shape)  # [i, n, j, e]
    votes, squares = (buffer[: math.prod(shape)].view(shape) for buffer in buffers[:2])
    torch.bmm(poses.transpose(0, 1), wide, out=votes.flatten(2))
    votes -= mean
    torch.mul(votes, votes, out=squares)
    return VoteBuffer(votes.flatten(1, 2).transpose(0, 1)), VoteBuffer(squares.flatten(1, 2).transpose(0, 1))


@library.custom_op("capszoo::em_windows", mutates_args=())
def em_windows(
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
) -> Tuple[Tensor, Tensor, Tensor]:
    """:func:`window_routing` in blocks for compiled models; couplings are empty if not wanted."""
    settings = Settings(num_iters, lam_start, lam_step, var_floor, eps, normalize_cost)
    found = _in_blocks(poses, activations, weight, wide, beta_v, beta_a, settings, need_couplings)
    return found[0], found[1], found[2] if need_couplings else poses.new_empty(0)


@em_windows.register_fake
def _(
    poses: Tensor, activations: Tensor, weight: Tensor, wide: Tensor, beta_v: Tensor, *rest: Any
) -> Tuple[Tensor, Tensor, Tensor]:
    parents, (count, children, pose_dim) = beta_v.shape[0], poses.shape
    couplings = poses.new_empty((count, parents, children) if rest[-1] else (0,))  # need_couplings
    return poses.new_empty(count, parents, pose_dim), poses.new_empty(count, parents), couplings


@library.custom_op("capszoo::em_windows_backward", mutates_args=())
def _em_windows_backward(
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
    grad_poses: Optional[Tensor],
    grad_logits: Optional[Tensor],
    grad_couplings: Optional[Tensor],
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the tensors of :func:`em_windows`, from those of its results."""
    tensors = (poses, activations, weight, wide, beta_v, beta_a)
    settings = Settings(num_iters, lam_start, lam_step, var_floor, eps, normalize_cost)
    # autograd finds the gradients of the small steps in here, and an operator's kernel runs below it
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        found = _gradients(tensors, settings, (grad_poses, grad_logits, grad_couplings))
    return found[0], found[1], found[2], found[3], found[4], found[5]


@_em_windows_backward.register_fake
def _(*given: Any) -> Tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in given[:6])


def _keep(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.set_materialize_grads(False)
    ctx.settings, ctx.need_couplings = inputs[6:12], inputs[12]


def _backward(ctx: Any, *given: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    couplings = given[2] if ctx.need_couplings else None
    found = _em_windows_backward(*ctx.saved_tensors, *ctx.settings, given[0], given[1], couplings)
    return (*found, *[None] * 7)


em_windows.register_autograd(_backward, setup_context=_keep)


class _Windows(torch.autograd.Function):
    """:func:`_window_routing`, a block of windows at a time, whose votes are made again in the backward pass.

    The buffers for votes, squares and gradients are allocated once: memory fresh from the system costs more than the
    arithmetic does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
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
        return _in_blocks(poses, activations, weight, wide, beta_v, beta_a, settings, need_couplings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        return None, None, *_gradients(ctx.saved_tensors, ctx.settings, given)


def _gradients(
    tensors: Tuple[Tensor, ...], settings: Settings, given: Tuple[Optional[Tensor], ...]
) -> Tuple[Tensor, ...]:
    """Those of the tensors of :func:`_in_blocks`, from those of its results; makes the votes of each block again."""
    poses, activations, weight, wide, beta_v, beta_a = tensors
    grads = [torch.empty_like(poses), torch.empty_like(activations)]
    shared = [torch.zeros_like(t) for t in (weight, beta_v, beta_a)]
    wide_grad = torch.zeros_like(wide)
    block, buffers = _buffers(wide, poses.shape[0], 3)
    for start in range(0, poses.shape[0], block):
        part = slice(start, start + block)
        with torch.enable_grad(), torch.autocast(poses.device.type, enabled=False):
            # every input as if a gradient of it were asked for: the terms come from those of the weights
            inputs = [t.detach().requires_grad_() for t in (poses[part], activations[part], weight)]
            betas = [t.detach().requires_grad_() for t in (beta_v, beta_a)]
            mean = _first_mean(inputs[0], inputs[1], inputs[2], settings.eps)
            about = mean.detach().requires_grad_()
            with torch.no_grad():
                votes, squares = _votes_about(poses[part], wide, mean, buffers)
            zero = torch.zeros_like(about)
            present = activations[part].detach().requires_grad_()
            results = route_moments(votes, squares, about, zero, present, betas[0], betas[1], settings)
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
    return *grads, shared[0], wide_grad, shared[1], shared[2]


def _sum_of_terms(terms: List[Tuple[Tensor, Tensor]], out: Tensor, add: bool = False) -> None:
    """Outer products ``[nj, i, 1] * [nj, 1, e]`` summed in ``out``, ``[i, n, j, e]``, or added to it; uses them up."""
    for k, (left, right) in enumerate(terms):
        left = left.reshape(*out.shape[1:3], -1).permute(2, 0, 1).contiguous().unsqueeze(3)  # [i, n, j, 1]
        right = right.reshape(out.shape[1:])
        if k == 0 and not add:
            torch.mul(left, right, out=out)
        else:
            out.addcmul_(left, right)
    # a term leads to its graph, and the graph to the votes that hold the terms: a circle that Python does not see
    terms.clear()
