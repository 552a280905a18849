"""EM routing in windows that share transforms, one block of windows at a time: an operator, eager and compiled.

Letters as in :mod:`capszoo.layers.em`.
"""

import math
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor, library

from .._autograd import count_as_reference, differentiable_once, new_like, refuse_second_gradient
from ..tuning import TUNING
from .routing import route_moments
from .steps import Settings, first_weights


class VoteBuffer:
    """Votes (or their squares) in a buffer, with their gradient stored as a list of outer products.

    ``torch.bmm`` accepts it in place of a tensor ``[nj, i, e]``. The children are innermost in memory: a matrix-vector
    product then reads the votes in their order, and vector registers hold children.

    ``values`` is ``[nj, e, i]``; a pair in ``terms`` represents the gradient ``pair[0] * pair[1]``, of ``[nj, e, 1]``
    and ``[nj, 1, i]``; the gradient is the sum over the pairs.
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
    """``[nj, 1, i]`` times votes: ``[nj, 1, e]``."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, votes: VoteBuffer) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.votes = votes
        return torch.bmm(weights, votes.values.transpose(1, 2))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Tuple[Tensor, ...], grad: Tensor) -> Tuple[Tensor, None]:
        (weights,) = saved
        ctx.votes.terms.append((grad.transpose(1, 2), weights))
        return torch.bmm(grad, ctx.votes.values), None


class _Project(torch.autograd.Function):
    """Votes times ``[nj, e, 1]``: ``[nj, i, 1]``."""

    @staticmethod
    def forward(ctx: Any, votes: VoteBuffer, directions: Tensor) -> Tensor:
        row = _row(directions)
        ctx.save_for_backward(row)
        ctx.votes = votes
        return torch.bmm(row, votes.values).transpose(1, 2)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Tuple[Tensor, ...], grad: Tensor) -> Tuple[None, Tensor]:
        (directions,) = saved
        grad = _row(grad)
        ctx.votes.terms.append((directions.transpose(1, 2), grad))
        return None, torch.bmm(grad, ctx.votes.values.transpose(1, 2)).transpose(1, 2)


def _row(column: Tensor) -> Tensor:
    """``[nj, x, 1]`` as ``[nj, 1, x]``, with the strides of a contiguous tensor; others slow a product down tenfold."""
    return column.flatten(1).unsqueeze(1)


def _children_last(weight: Tensor) -> Tensor:
    """The transforms ``[i, q, j, r]`` as ``[j, r, q, i]``."""
    return weight.permute(2, 3, 1, 0).contiguous()


def _rows(poses: Tensor) -> Tensor:
    """Poses ``[n, i, d]`` as ``[n, p, q, i]``."""
    size = math.isqrt(poses.shape[2])
    return poses.transpose(1, 2).contiguous().unflatten(1, [size, size])


def _buffers(transforms: Tensor, pose_dim: int, count: int, number: int) -> Tuple[int, List[Tensor]]:
    """Number of windows in a block, and ``number`` buffers for their votes."""
    per_window = transforms.shape[0] * pose_dim * transforms.shape[3]
    block = max(1, min(count, TUNING.em_block_votes // per_window))
    return block, [transforms.new_empty(block * per_window) for _ in range(number)]


def _votes_about_mean(
    rows: Tensor, even: Tensor, transforms: Tensor, buffers: List[Tensor]
) -> Tuple[Tensor, Any, Any]:
    """Mean vote ``[n, j, e]`` with weights ``even``, votes about it, and their squares, in the first two buffers."""
    count, size, _, children = rows.shape
    shape = (count, transforms.shape[0], size, size, children)  # [n, j, p, r, i]
    votes, squares = (buffer[: math.prod(shape)].view(shape) for buffer in buffers[:2])
    for q in range(size):
        factors = rows[:, None, :, None, q], transforms[:, None, :, q]
        torch.mul(*factors, out=votes) if q == 0 else votes.addcmul_(*factors)
    by_window = votes.view(count, -1, children)  # [n, je, i]
    mean = torch.bmm(even.unsqueeze(1), by_window.transpose(1, 2))  # [n, 1, je]
    by_window -= mean.transpose(1, 2)
    torch.mul(votes, votes, out=squares)
    merged = (-1, size * size, children)
    return mean.view(count, -1, size * size), VoteBuffer(votes.view(merged)), VoteBuffer(squares.view(merged))


@library.custom_op("capszoo::em_windows", mutates_args=())
def em_windows(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
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
    """:func:`.window_routing`, one block of windows at a time; couplings are empty unless requested."""
    settings = Settings(num_iters, lam_start, lam_step, var_floor, eps, normalize_cost)
    outputs = _results(poses, beta_v, need_couplings)
    transforms = _children_last(weight)
    block, buffers = _buffers(transforms, poses.shape[2], len(poses), 2)
    for start in range(0, len(poses), block):
        part = slice(start, start + block)
        even = first_weights(activations[part], len(beta_v), eps)[0]
        mean, votes, squares = _votes_about_mean(_rows(poses[part]), even, transforms, buffers)
        zero = torch.zeros_like(mean)
        results = route_moments(votes, squares, mean, zero, activations[part], beta_v, beta_a, settings)
        for output, result in zip(outputs[: 2 + need_couplings], results, strict=False):
            output[part] = result
    return outputs


@em_windows.register_fake
def _(
    poses: Tensor, activations: Tensor, weight: Tensor, beta_v: Tensor, *rest: Any
) -> Tuple[Tensor, Tensor, Tensor]:
    return _results(poses, beta_v, rest[-1])


def _results(poses: Tensor, beta_v: Tensor, need_couplings: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Uninitialised poses, logits and couplings."""
    parents, (count, children, pose_dim) = beta_v.shape[0], poses.shape
    couplings = poses.new_empty((count, parents, children) if need_couplings else (0,))
    return poses.new_empty(count, parents, pose_dim), poses.new_empty(count, parents), couplings


@library.custom_op("capszoo::em_windows_backward", mutates_args=())
def _em_windows_backward(
    poses: Tensor,
    activations: Tensor,
    weight: Tensor,
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
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the tensors of :func:`em_windows`, from those of its results."""
    tensors = (poses, activations, weight, beta_v, beta_a)
    settings = Settings(num_iters, lam_start, lam_step, var_floor, eps, normalize_cost)
    # autograd computes the gradients of the small steps in here, but an operator's kernel runs below autograd
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        grads = _gradients(tensors, settings, (grad_poses, grad_logits, grad_couplings))
    return grads[0], grads[1], grads[2], grads[3], grads[4]


@_em_windows_backward.register_fake
def _(*given: Any) -> Tuple[Tensor, ...]:
    return new_like(*given[:5])


def _keep(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.set_materialize_grads(False)
    ctx.settings, ctx.need_couplings = inputs[5:11], inputs[11]


def _backward(ctx: Any, *gradients: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    couplings = gradients[2] if ctx.need_couplings else None
    grads = _em_windows_backward(*ctx.saved_tensors, *ctx.settings, gradients[0], gradients[1], couplings)
    return (*grads, *[None] * 7)


em_windows.register_autograd(_backward, setup_context=_keep)
refuse_second_gradient(_em_windows_backward)


@count_as_reference(em_windows, _em_windows_backward)
def _multiply_adds(poses: Any, _a: Any, weight: Any, _v: Any, _b: Any, num_iters: int, *rest: Any) -> int:
    count, children, dim = poses
    size, parents = weight[1:3]
    later = 3 + 4 * (num_iters - 2) if num_iters > 1 else 0
    # the mean of the votes before they are formed, the votes, and their moments and distances
    return count * children * parents * dim * (size + dim + 1 + later)


def _gradients(
    tensors: Tuple[Tensor, ...], settings: Settings, gradients: Tuple[Optional[Tensor], ...]
) -> Tuple[Tensor, ...]:
    """Gradients of the tensors of :func:`em_windows`, from those of its results; recomputes the votes of each block.

    The buffers for votes, squares and gradients are allocated once: newly allocated memory costs more time than the
    arithmetic does.
    """
    poses, activations, weight, beta_v, beta_a = tensors
    parents, pose_dim = beta_v.shape[0], poses.shape[2]
    grads = [torch.empty_like(poses), torch.empty_like(activations)]
    transforms = _children_last(weight)
    shared = [torch.zeros_like(t) for t in (transforms, beta_v, beta_a)]
    block, buffers = _buffers(transforms, pose_dim, poses.shape[0], 3)
    for start in range(0, poses.shape[0], block):
        part = slice(start, start + block)
        rows = _rows(poses[part])
        with torch.enable_grad(), torch.autocast(poses.device.type, enabled=False):
            # every input requires a gradient, because the terms arise from the gradients of the weights
            present = activations[part].detach().requires_grad_()
            betas = [t.detach().requires_grad_() for t in (beta_v, beta_a)]
            even = first_weights(present, parents, settings.eps)[0]  # [n, i]
            with torch.no_grad():
                mean, votes, squares = _votes_about_mean(rows, even, transforms, buffers)
            zero, about = torch.zeros_like(mean), mean.detach().requires_grad_()
            results = route_moments(votes, squares, about, zero, present, betas[0], betas[1], settings)
            pairs = [
                (r, g[part])
                for r, g in zip(results, gradients, strict=False)
                if g is not None and r.requires_grad
            ]
            small = torch.autograd.grad(
                [r for r, _ in pairs],
                [about, present, *betas],
                [g for _, g in pairs],
                allow_unused=True,
                materialize_grads=True,
            )
        grad = buffers[2][: votes.values.numel()].view(votes.values.shape)  # [nj, e, i]
        _sum_of_terms(squares.terms, grad)
        grad.mul_(votes.values).mul_(2.0)
        _sum_of_terms(votes.terms, grad, add=True)
        # the mean is a weighted sum of the votes: the share of each vote, and that of each weight
        about_grad = small[0] - grad.sum(dim=2).view(mean.shape)
        by_window = (mean.shape[0], -1, grad.shape[2])  # [n, je, i]
        about_grad = about_grad.flatten(1)
        grad.view(by_window).addcmul_(about_grad.unsqueeze(2), even.detach().unsqueeze(1))
        even_grad = torch.bmm(about_grad.unsqueeze(1), votes.values.view(by_window)).squeeze(1)
        grads[1][part] = small[1] + torch.autograd.grad(even, present, even_grad)[0]
        grads[0][part] = _transform_gradients(grad, rows, transforms, shared[0])
        for total, more in zip(shared[1:], small[2:], strict=True):
            total += more
    return *grads, shared[0].permute(3, 2, 0, 1).contiguous(), shared[1], shared[2]


def _transform_gradients(grad: Tensor, rows: Tensor, transforms: Tensor, transforms_grad: Tensor) -> Tensor:
    """Gradient of the poses, ``[n, i, d]``, from that of the votes; adds that of the transforms to the last tensor."""
    count, size, _, children = rows.shape
    grad = grad.view(count, -1, size, size, children)  # [n, j, p, r, i]
    gradient = torch.zeros_like(rows)
    for j in range(transforms.shape[0]):
        for r in range(size):
            gradient.addcmul_(grad[:, j, :, r].unsqueeze(2), transforms[j, r])
    for n in range(count):
        for p in range(size):
            transforms_grad.addcmul_(grad[n, :, p].unsqueeze(2), rows[n, p])
    return gradient.flatten(1, 2).transpose(1, 2)


def _sum_of_terms(terms: List[Tuple[Tensor, Tensor]], out: Tensor, add: bool = False) -> None:
    """Sum outer products ``[nj, e, 1] * [nj, 1, i]`` into ``out``, ``[nj, e, i]``, or add to it; clears ``terms``."""
    if terms:
        columns, rows = (
            torch.cat(side, dim=axis) for side, axis in zip(zip(*terms, strict=True), (2, 1), strict=True)
        )
        torch.baddbmm(out, columns, rows, out=out) if add else torch.bmm(columns, rows, out=out)
    elif not add:
        out.zero_()
    # break the cycle term -> autograd graph -> VoteBuffer -> term, which the garbage collector cannot see
    terms.clear()
