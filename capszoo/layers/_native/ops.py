"""The operator ``capszoo::routing_pass``: one iteration of routing on a CPU, in C++, storing no votes.

Letters: n routings · i children, padded to a multiple of the lanes and cut into c blocks of l lanes · j parents ·
p, q, r rows of a pose, columns of a child's and of a parent's · h = p * r elements of a parent's pose.
"""

import ctypes
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from .._autograd import count_as_reference, new_like, refuse_batched_gradient, refuse_second_gradient
from ..engine import Call
from . import not_native
from .build import load
from .call import arguments, in_threads, parts_of

_BYTES = 64  # of a block of lanes: one register or several, see lanes.h


def in_lanes(x: Tensor) -> Tensor:
    """Children ``[n, i, ...]``, float32 or float64, as ``[n, c, ..., l]``, padded by zeros."""
    lanes = _BYTES // x.element_size()
    padding = -x.shape[1] % lanes
    if padding:
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, padding])
    return x.unflatten(1, [-1, lanes]).movedim(2, -1).contiguous()


def grouped(x: Tensor) -> Tensor:
    """``[n, ...]``, float32 or float64, as ``[g, ..., l]``, padded by zeros."""
    return in_lanes(x.unsqueeze(0)).squeeze(0)


def ungrouped(x: Tensor, count: int) -> Tensor:
    """The first ``count`` of ``[g, ..., l]``, as ``[n, ...]``."""
    return x.movedim(-1, 1).flatten(0, 1)[:count]


def weight_in_lanes(weight: Tensor) -> Tensor:
    """Transforms ``[i, q, j, r]`` as ``[c, j, q, r, l]``."""
    return grouped(weight.transpose(1, 2))


@library.custom_op("capszoo::routing_pass", mutates_args=())
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
    fresh: bool,
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
        mean, precision, pull: ``[n, j, h]``. ``precision`` is read with ``squares`` alone, where ``pull`` may be absent
            if it is zero.
        height: ``[n, j]``; without it, couplings are even.
        idle: added to every weight.
        children: number of children without padding.
        squares: whether the last result is computed.
        fresh: whether these children were not in the iteration before: the reference forms their votes now. Only the
            count of floating-point operations reads it.
        need_couplings: whether to return the couplings.

    Returns:
        mass ``[n, j]``, sums ``[n, j, h]``, squares ``[n, j, h]``, couplings ``[n, j, i]``; the last two empty unless
        requested.
    """
    tensors = _contiguous(rows, activations, weight, mean, precision, pull, height)
    count, parents = mean.shape[:2]
    out = _results(mean, children, squares, need_couplings)
    function = _code(rows, mean, squares).routing_pass

    def compute(_: int, first: int, last: int) -> None:
        function(*arguments(*tensors, idle, first, last, children, parents, *out))

    in_threads(compute, count)
    return out


@routing_pass.register_fake
def _(
    rows: Tensor, activations: Tensor, weight: Tensor, mean: Tensor, *rest: Any
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    return _results(mean, rest[4], rest[5], rest[7])


def _results(
    mean: Tensor, children: int, squares: bool, need_couplings: bool
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised results of :func:`routing_pass`."""
    count, parents = mean.shape[:2]
    return (
        mean.new_empty(count, parents),
        mean.new_empty(mean.shape),
        mean.new_empty(mean.shape if squares else (0,)),
        mean.new_empty((count, parents, children) if need_couplings else (0,)),
    )


@library.custom_op("capszoo::routing_pass_backward", mutates_args=())
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
    fresh: bool,
    mass: Tensor,
    sums: Tensor,
    grad_mass: Tensor,
    grad_sums: Tensor,
    grad_squares: Optional[Tensor],
    grad_couplings: Optional[Tensor],
) -> List[Tensor]:
    """Gradients of the seven tensors of :func:`routing_pass`; empty for those that are None."""
    tensors = _contiguous(rows, activations, weight, mean, precision, pull, height)
    incoming = _contiguous(mass, sums, grad_mass, grad_sums, grad_squares, grad_couplings)
    grads = list(new_like(rows, activations, weight, mean, precision, pull, height))
    count, parents = mean.shape[:2]
    # every thread adds to a gradient of the transforms of its own
    of_weight = [weight.new_zeros(weight.shape) for _ in range(parts_of(count))]
    function = _code(rows, mean, squares).routing_pass_backward

    def compute(part: int, first: int, last: int) -> None:
        results = (*grads[:2], of_weight[part], *grads[3:])
        function(*arguments(*tensors, idle, first, last, children, parents, *incoming, *results))

    in_threads(compute, count)
    for more in of_weight[1:]:
        of_weight[0] += more
    grads[2] = of_weight[0]
    return grads


@_routing_pass_backward.register_fake
def _(*given: Any) -> List[Tensor]:
    return list(new_like(*given[:7]))


def _contiguous(*tensors: Optional[Tensor]) -> List[Optional[Tensor]]:
    return [None if t is None else t.contiguous() for t in tensors]


def _code(rows: Tensor, mean: Tensor, squares: bool) -> ctypes.CDLL:
    p, q = rows.shape[2:4]
    sizes = _sizes(p, q, mean.shape[2] // p, squares)
    return load("routing_pass", rows.dtype == torch.float64, **sizes)


#: Largest q * r: transforms of more elements would fill the registers many times.
_MAX_TRANSFORM = 64


def not_routing_pass(call: Call, rows: int, inner: int, cols: int, squares: bool, forced: bool) -> str:
    """:func:`.not_native` of the operator."""
    if inner * cols > _MAX_TRANSFORM:
        return "needs transforms with no more elements than its code keeps in registers"
    return not_native(call, "routing_pass", forced, **_sizes(rows, inner, cols, squares))


def _sizes(rows: int, inner: int, cols: int, squares: bool) -> Dict[str, int]:
    """Macros of routing_pass.cpp."""
    return {"P": rows, "Q": inner, "R": cols, "SQUARES": int(squares)}


def _keep(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *output[:2])
    ctx.set_materialize_grads(False)
    ctx.idle, ctx.children, ctx.squares, ctx.fresh, ctx.need_couplings = inputs[7:12]


def _backward(ctx: Any, *gradients: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    refuse_batched_gradient(*gradients)
    *tensors, mass, sums = ctx.saved_tensors
    grad_mass, grad_sums, grad_squares, grad_couplings = gradients
    grads = _routing_pass_backward(
        *tensors,
        ctx.idle,
        ctx.children,
        ctx.squares,
        ctx.fresh,
        mass,
        sums,
        torch.zeros_like(mass) if grad_mass is None else grad_mass,
        torch.zeros_like(sums) if grad_sums is None else grad_sums,
        torch.zeros_like(sums) if ctx.squares and grad_squares is None else grad_squares,
        grad_couplings if ctx.need_couplings else None,
    )
    return (*(None if t is None else g for t, g in zip(tensors, grads, strict=True)), *[None] * 5)


routing_pass.register_autograd(_backward, setup_context=_keep)
refuse_second_gradient(_routing_pass_backward)


@count_as_reference(routing_pass, _routing_pass_backward)
def _multiply_adds(
    rows: Any,
    _a: Any,
    _w: Any,
    mean: Any,
    _p: Any,
    pull: Any,
    height: Any,
    _i: Any,
    children: int,
    *rest: Any,
) -> int:
    squares, fresh = rest[:2]
    (count, parents, dim), (pose_rows, inner) = mean, rows[2:4]
    votes = count * children * parents * dim
    if not squares:  # IDPA: the votes, their agreement, their weighted sum
        return votes * (inner * fresh + 2)
    if height is None:  # EM: the votes by block-diagonal transforms, their squares weighted evenly
        return votes * (pose_rows * inner * fresh + 1)
    return votes * (3 if pull is None else 4)  # the distance (and the pull), two weighted moments
