"""EM routing in windows that share transforms, one block of windows at a time: an operator, eager and compiled.

Letters as in :mod:`capszoo.layers.em`.
"""

import math
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from ..tuning import TUNING
from .routing import first_mean, route_moments
from .steps import Settings

__all__ = ["em_windows"]


class VoteBuffer:
    """Votes (or their squares) in a buffer, with their gradient stored as a list of outer products.

    ``torch.bmm`` accepts it in place of a tensor.

    ``values`` is ``[bj, i, e]``; a pair in ``terms`` represents the gradient ``pair[0] * pair[1]``, of ``[bj, i, 1]``
    and ``[bj, 1, e]``; the gradient is the sum over the pairs.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.terms: List[Tuple[Tensor, Tensor]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.bmm or kwargs:
            return NotImplemented
        left, right = args
        return _Project.apply(left, right) if isinstance(left, cls) else _WeightedSum.apply(left, right)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, votes: VoteBuffer) -> Tensor:
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
    def forward(ctx: Any, votes: VoteBuffer, directions: Tensor) -> Tensor:
        ctx.save_for_backward(directions)
        ctx.votes = votes
        return torch.bmm(votes.values, directions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[None, Tensor]:
        (directions,) = ctx.saved_tensors
        ctx.votes.terms.append((grad, directions.transpose(1, 2)))
        return None, torch.bmm(grad.transpose(1, 2), ctx.votes.values).transpose(1, 2)


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
    """:func:`.window_routing`, one block of windows at a time; couplings where requested."""
    parents, (count, children, pose_dim) = beta_v.shape[0], poses.shape
    outputs = [poses.new_empty(count, parents, pose_dim), poses.new_empty(count, parents)]
    if need_couplings:
        outputs.append(poses.new_empty(count, parents, children))
    block, buffers = _buffers(wide, count, 2)
    for start in range(0, count, block):
        part = slice(start, start + block)
        mean = first_mean(poses[part], activations[part], weight, settings.eps)
        votes, squares = _votes_about(poses[part], wide, mean, buffers)
        zero = torch.zeros_like(mean)
        results = route_moments(votes, squares, mean, zero, activations[part], beta_v, beta_a, settings)
        for output, result in zip(outputs, results, strict=False):
            output[part] = result
    return tuple(outputs)


def _buffers(wide: Tensor, count: int, number: int) -> Tuple[int, List[Tensor]]:
    """Number of windows in a block, and ``number`` buffers for their votes."""
    per_window = wide.shape[0] * wide.shape[2]
    block = max(1, min(count, TUNING.em_block_votes // per_window))
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
    """:func:`window_routing`, one block of windows at a time; couplings are empty unless requested."""
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
    # autograd computes the gradients of the small steps in here, but an operator's kernel runs below autograd
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


def _gradients(
    tensors: Tuple[Tensor, ...], settings: Settings, given: Tuple[Optional[Tensor], ...]
) -> Tuple[Tensor, ...]:
    """Gradients of the tensors of :func:`_in_blocks`, from those of its results; recomputes the votes of each block.

    The buffers for votes, squares and gradients are allocated once: newly allocated memory costs more time than the
    arithmetic does.
    """
    poses, activations, weight, wide, beta_v, beta_a = tensors
    grads = [torch.empty_like(poses), torch.empty_like(activations)]
    shared = [torch.zeros_like(t) for t in (weight, beta_v, beta_a)]
    wide_grad = torch.zeros_like(wide)
    block, buffers = _buffers(wide, poses.shape[0], 3)
    for start in range(0, poses.shape[0], block):
        part = slice(start, start + block)
        with torch.enable_grad(), torch.autocast(poses.device.type, enabled=False):
            # every input requires a gradient, because the terms arise from the gradients of the weights
            inputs = [t.detach().requires_grad_() for t in (poses[part], activations[part], weight)]
            betas = [t.detach().requires_grad_() for t in (beta_v, beta_a)]
            mean = first_mean(inputs[0], inputs[1], inputs[2], settings.eps)
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
    """Sum outer products ``[nj, i, 1] * [nj, 1, e]`` into ``out``, ``[i, n, j, e]``, or add to it; clears ``terms``."""
    for k, (left, right) in enumerate(terms):
        left = left.reshape(*out.shape[1:3], -1).permute(2, 0, 1).contiguous().unsqueeze(3)  # [i, n, j, 1]
        right = right.reshape(out.shape[1:])
        if k == 0 and not add:
            torch.mul(left, right, out=out)
        else:
            out.addcmul_(left, right)
    # break the cycle term -> autograd graph -> VoteBuffer -> term, which the garbage collector cannot see
    terms.clear()
