"""The operator ``capszoo::routing_pass``: one iteration of routing on a CPU, in C++, storing no votes.

Letters: n routings · i children, padded to a multiple of the lanes and cut into c blocks of l lanes · j parents ·
p, q, r rows of a pose, columns of a child's and of a parent's · h = p * r elements of a parent's pose.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from .build import library

__all__ = ["in_lanes", "routing_pass", "weight_in_lanes"]

_BYTES = 64  # of a vector in the C++ code


def in_lanes(x: Tensor) -> Tensor:
    """Children ``[n, i, ...]``, float32 or float64, as ``[n, c, ..., l]``, padded by zeros."""
    lanes = _BYTES // x.element_size()
    padding = -x.shape[1] % lanes
    if padding:
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, padding])
    return x.unflatten(1, [-1, lanes]).movedim(2, -1).contiguous()


def weight_in_lanes(weight: Tensor) -> Tensor:
    """Transforms ``[i, q, j, r]`` as ``[c, j, q, r, l]``."""
    return in_lanes(weight.transpose(1, 2).unsqueeze(0)).squeeze(0)


@custom_op("capszoo::routing_pass", mutates_args=())
def routing_pass(
    rows: Tensor,
    activations: Tensor,
    weight: Tensor,
    mean: Tensor,
    precision: Optional[Tensor],
    pull: Optional[Tensor],
    height: Optional[Tensor],
    idle: float,
    children: int,
    squares: bool,
    need_couplings: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Couplings of one iteration, and the moments of the votes that they weight.

    With ``V`` the votes minus ``mean``::

        R_ij = softmax over j of (height_j + sum_h (pull_jh V_ijh - precision_jh V_ijh^2))
        w_ij = R_ij * a_i + idle
        mass_j = sum_i w_ij;  sums_jh = sum_i w_ij V_ijh;  squares_jh = sum_i w_ij V_ijh^2

    Args:
        rows: ``[n, c, p, q, l]``, float32 or float64.
        activations: ``[n, c, l]``.
        weight: ``[c, j, q, r, l]``.
        mean, precision, pull: ``[n, j, h]``; without ``pull``, couplings are even. ``precision`` is read with
            ``squares`` alone.
        height: ``[n, j]``.
        idle: added to every weight.
        children: number of children without padding.
        squares: whether the last result is computed.
        need_couplings: whether to return the couplings.

    Returns:
        mass ``[n, j]``, sums ``[n, j, h]``, squares ``[n, j, h]``, couplings ``[n, j, i]``; the last two empty unless
        requested.
    """
    tensors = _contiguous(rows, activations, weight, mean, precision, pull, height)
    count, parents = mean.shape[:2]
    out = [
        mean.new_empty(count, parents),
        mean.new_empty(mean.shape),
        mean.new_empty(mean.shape if squares else (0,)),
        mean.new_empty((count, parents, children) if need_couplings else (0,)),
    ]
    function = _code(rows, mean, squares).routing_pass
    _in_threads(function, tensors, idle, count, (children, parents), [out] * torch.get_num_threads())
    return out[0], out[1], out[2], out[3]


@routing_pass.register_fake
def _(
    rows: Tensor, activations: Tensor, weight: Tensor, mean: Tensor, *rest: Any
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    children, squares, need_couplings = rest[-3:]
    count, parents = mean.shape[:2]
    return (
        mean.new_empty(count, parents),
        mean.new_empty(mean.shape),
        mean.new_empty(mean.shape if squares else (0,)),
        mean.new_empty((count, parents, children) if need_couplings else (0,)),
    )


@custom_op("capszoo::routing_pass_backward", mutates_args=())
def _routing_pass_backward(
    rows: Tensor,
    activations: Tensor,
    weight: Tensor,
    mean: Tensor,
    precision: Optional[Tensor],
    pull: Optional[Tensor],
    height: Optional[Tensor],
    idle: float,
    children: int,
    squares: bool,
    mass: Tensor,
    sums: Tensor,
    grad_mass: Tensor,
    grad_sums: Tensor,
    grad_squares: Optional[Tensor],
    grad_couplings: Optional[Tensor],
) -> List[Tensor]:
    """Gradients of the seven tensors of :func:`routing_pass`; empty for those that are None."""
    tensors = _contiguous(rows, activations, weight, mean, precision, pull, height)
    given = _contiguous(mass, sums, grad_mass, grad_sums, grad_squares, grad_couplings)
    grads = _like(rows, activations, weight, mean, precision, pull, height)
    count, parents = mean.shape[:2]
    # every thread adds to a gradient of the transforms of its own
    of_weight = [torch.zeros_like(tensors[2]) for _ in range(min(count, torch.get_num_threads()))]  # type: ignore[arg-type]
    results = [[*given, *grads[:2], mine, *grads[3:]] for mine in of_weight]
    function = _code(rows, mean, squares).routing_pass_backward
    _in_threads(function, tensors, idle, count, (children, parents), results)
    for more in of_weight[1:]:
        of_weight[0] += more
    grads[2] = of_weight[0]
    return grads


@_routing_pass_backward.register_fake
def _(*given: Any) -> List[Tensor]:
    return _like(*given[:7])


def _like(*tensors: Optional[Tensor]) -> List[Tensor]:
    """New tensors of these shapes; empty ones for None."""
    first = tensors[0]
    assert first is not None
    return [first.new_empty((0,) if t is None else t.shape) for t in tensors]


def _contiguous(*tensors: Optional[Tensor]) -> List[Optional[Tensor]]:
    return [None if t is None else t.contiguous() for t in tensors]


def _code(rows: Tensor, mean: Tensor, squares: bool) -> ctypes.CDLL:
    p, q = rows.shape[2:4]
    return library(p, q, mean.shape[2] // p, rows.dtype == torch.float64, squares)


def _in_threads(
    function: Any,
    tensors: Sequence[Optional[Tensor]],
    idle: float,
    count: int,
    sizes: Tuple[int, int],
    results: Sequence[Sequence[Optional[Tensor]]],
) -> None:
    """Call the C++ function for equal parts of the routings, one thread for each of ``results``.

    A call of ctypes releases Python's lock.
    """
    parts = min(count, len(results))
    bounds = [count * k // parts for k in range(parts + 1)]

    def compute(k: int) -> None:
        function(
            *map(_pointer, tensors),
            ctypes.c_double(idle),
            *map(ctypes.c_int64, (*bounds[k : k + 2], *sizes)),
            *map(_pointer, results[k]),
        )

    if parts == 1:
        compute(0)
    else:
        list(_threads(parts).map(compute, range(parts)))


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads that stay: starting them takes longer than a small call."""
    return ThreadPoolExecutor(count)


if hasattr(os, "register_at_fork"):  # a forked process has none of them
    os.register_at_fork(after_in_child=_threads.cache_clear)


def _pointer(tensor: Optional[Tensor]) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() if tensor is not None and tensor.numel() else None)


def _keep(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *output[:2])
    ctx.set_materialize_grads(False)
    ctx.idle, ctx.children, ctx.squares, ctx.need_couplings = inputs[7:11]


def _backward(ctx: Any, *given: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    *tensors, mass, sums = ctx.saved_tensors
    grad_mass, grad_sums, grad_squares, grad_couplings = given
    grads = _routing_pass_backward(
        *tensors,
        ctx.idle,
        ctx.children,
        ctx.squares,
        mass,
        sums,
        torch.zeros_like(mass) if grad_mass is None else grad_mass,
        torch.zeros_like(sums) if grad_sums is None else grad_sums,
        torch.zeros_like(sums) if ctx.squares and grad_squares is None else grad_squares,
        grad_couplings if ctx.need_couplings else None,
    )
    return (*(None if t is None else g for t, g in zip(tensors, grads, strict=True)), *[None] * 4)


routing_pass.register_autograd(_backward, setup_context=_keep)
