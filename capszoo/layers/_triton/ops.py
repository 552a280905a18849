"""The operators over the kernels: ``capszoo::fused_pass`` and its backward, as torch.compile and autograd see them."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

__all__ = ["fused_pass"]


@torch.library.custom_op("capszoo::fused_pass", mutates_args=())
def fused_pass(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    scale: float,
    kernel: int,
    stride: int,
    want_couplings: bool,
) -> Tuple[Tensor, Tensor]:
    """One pass of routing by agreement: couplings from the parents so far, and the votes summed under them.

    Letters: b batch, h w grid, i types of children, c = kernel * kernel * i children of a parent, n = b * h' * w'
    routings, p q r rows and columns of poses (p = 1 for vectors), d = p*q, e = p*r.

    Args:
        children: ``[b, h, w, i, d]``, padded already; ``[b, 1, 1, i, d]`` where fully connected.
        weight: ``[c, q, j, r]`` of the same type, children in the order kernel row, kernel column, type.
        parents: ``[n, j, e]``.
        scale: of the agreement.
        kernel, stride: of the window of children.
        want_couplings: give the couplings too.

    Returns:
        Sums of votes ``[n, j, e]`` and couplings ``[n, c, j]`` (empty where they are not wanted), in the type of the
        children.
    """
    from .launch import Pass

    return Pass(children, weight, parents, scale, kernel, stride).run(want_couplings)


@torch.library.custom_op("capszoo::fused_pass_backward", mutates_args=())
def fused_pass_backward(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    grad_sums: Tensor,
    grad_couplings: Optional[Tensor],
    scale: float,
    kernel: int,
    stride: int,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`fused_pass` for its three tensors; votes and couplings are computed again."""
    from .launch import Pass

    work = Pass(children, weight, parents, scale, kernel, stride)
    grad_children, grad_weight = work.grad_children(grad_sums, grad_couplings)
    return grad_children, grad_weight, work.grad_parents(grad_sums, grad_couplings)


@fused_pass.register_fake
def _(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    scale: float,
    kernel: int,
    stride: int,
    want_couplings: bool,
) -> Tuple[Tensor, Tensor]:
    shape = (parents.shape[0], weight.shape[0], parents.shape[1]) if want_couplings else (0,)
    return children.new_empty(parents.shape), children.new_empty(shape)


@fused_pass_backward.register_fake
def _(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    grad_sums: Tensor,
    grad_couplings: Optional[Tensor],
    scale: float,
    kernel: int,
    stride: int,
) -> Tuple[Tensor, Tensor, Tensor]:
    return (
        children.new_empty(children.shape),
        weight.new_empty(weight.shape),
        parents.new_empty(parents.shape),
    )


def _save_for_backward(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.set_materialize_grads(False)
    ctx.scale, ctx.kernel, ctx.stride, ctx.want_couplings = inputs[3:]


def _backward(ctx: Any, grad_sums: Optional[Tensor], grad_couplings: Optional[Tensor]) -> Tuple[Any, ...]:
    children, weight, parents = ctx.saved_tensors
    if grad_sums is None:
        grad_sums = torch.zeros_like(parents)
    if not ctx.want_couplings:
        grad_couplings = None
    grads = fused_pass_backward(
        children, weight, parents, grad_sums, grad_couplings, ctx.scale, ctx.kernel, ctx.stride
    )
    return (*grads, None, None, None, None)


fused_pass.register_autograd(_backward, setup_context=_save_for_backward)
