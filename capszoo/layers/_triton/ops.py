"""The operators over the kernels, for torch.compile and autograd: an iteration, a norm alone, and their backward.

A fake kernel or a backward that reads only a few of an operator's arguments takes the others as ``*rest``.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, library

from .._autograd import count_as_reference, new_like, refuse_second_gradient


@library.custom_op("capszoo::fused_pass", mutates_args=())
def fused_pass(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    want_couplings: bool,
    keep: bool,
    scale: float,
    kernel: int,
    stride: int,
    norm: str,
    norm_weight: Optional[Tensor],
    norm_bias: Optional[Tensor],
    eps: float,
    fresh: bool = True,
) -> Tuple[Tensor, Tensor, Tensor]:
    """One iteration of IDPA: couplings from the current parents, weighted sums of votes, norm.

    Letters: b batch, h w grid, i types of children, c = kernel * kernel * i children of a parent, n = b * h' * w'
    routings, p q r rows and columns of poses (p = 1 for vectors), d = p*q, e = p*r.

    Args:
        children: ``[b, h, w, i, d]``, already padded; ``[b, 1, 1, i, d]`` for a fully connected layer.
        weight: ``[c, q, j, r]`` of the same dtype, children in the order kernel row, kernel column, type.
        parents: ``[n, j, e]``.
        want_couplings: return the couplings too.
        keep: return the sums too. Only the gradient of a norm reads them.
        scale: factor of the agreement.
        kernel, stride: of the window of children.
        norm: applied to the sums: ``"none"`` or ``"layer"`` (LayerNorm over e).
        norm_weight, norm_bias: of the LayerNorm, ``[e]``, of any dtype; else None.
        eps: of the LayerNorm.
        fresh: as in :func:`.routing_pass`.

    Returns:
        Poses ``[n, j, e]``, couplings ``[n, c, j]`` and sums of votes ``[n, j, e]``, in the dtype of the children; the
        last two are empty unless requested.
    """
    from .launch import Norm, Pass

    end = Norm(norm, norm_weight, norm_bias, eps)
    return Pass(children, weight, parents, scale, kernel, stride).run(want_couplings, end, keep)


@fused_pass.register_fake
def _(
    children: Tensor, weight: Tensor, parents: Tensor, want_couplings: bool, keep: bool, *rest: Any
) -> Tuple[Tensor, Tensor, Tensor]:
    normed = rest[3] != "none"
    couplings = (parents.shape[0], weight.shape[0], parents.shape[1]) if want_couplings else (0,)
    kept = parents.shape if keep and normed else (0,)
    return children.new_empty(parents.shape), children.new_empty(couplings), children.new_empty(kept)


@library.custom_op("capszoo::fused_pass_backward", mutates_args=())
def fused_pass_backward(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    grad_sums: Tensor,
    grad_couplings: Optional[Tensor],
    scale: float,
    kernel: int,
    stride: int,
    fresh: bool = True,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`fused_pass` for its first three tensors; recomputes votes and couplings.

    ``grad_sums`` is the gradient of the sums before the norm.
    """
    from .launch import Pass

    work = Pass(children, weight, parents, scale, kernel, stride)
    return (
        *work.grad_children(grad_sums, grad_couplings),
        work.grad_parents(grad_sums, grad_couplings),
    )


@fused_pass_backward.register_fake
def _(children: Tensor, weight: Tensor, parents: Tensor, *rest: Any) -> Tuple[Tensor, ...]:
    return new_like(children, weight, parents)


@library.custom_op("capszoo::fused_norm", mutates_args=())
def fused_norm(
    sums: Tensor,
    scale: float,
    norm: str,
    norm_weight: Optional[Tensor],
    norm_bias: Optional[Tensor],
    eps: float,
) -> Tensor:
    """Only the norm of :func:`fused_pass`, applied to ``sums * scale``: ``[n, j, e]`` to the same shape.

    For the first iteration, whose sums of votes are a convolution or a matrix product.
    """
    from .launch import Norm, normalise

    return normalise(sums, Norm(norm, norm_weight, norm_bias, eps), scale)


@fused_norm.register_fake
def _(sums: Tensor, *rest: Any) -> Tensor:
    return sums.new_empty(sums.shape)


@library.custom_op("capszoo::fused_norm_backward", mutates_args=())
def fused_norm_backward(
    grad: Tensor,
    sums: Tensor,
    scale: float,
    norm: str,
    norm_weight: Optional[Tensor],
    norm_bias: Optional[Tensor],
    eps: float,
) -> Tuple[Tensor, Tensor]:
    """Gradients of the sums, ``[n, j, e]``, and of LayerNorm's weight and bias, ``[2, e]`` (empty without them)."""
    from .launch import Norm, grad_norm

    return grad_norm(grad, sums, Norm(norm, norm_weight, norm_bias, eps), scale)


@fused_norm_backward.register_fake
def _(
    grad: Tensor, sums: Tensor, scale: float, norm: str, norm_weight: Optional[Tensor], *rest: Any
) -> Tuple[Tensor, Tensor]:
    affine = sums.new_empty(0) if norm_weight is None else norm_weight.new_empty((2, sums.shape[-1]))
    return sums.new_empty(sums.shape), affine


def _affine_gradients(affine: Tensor) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    return (affine[0], affine[1]) if affine.dim() > 1 else (None, None)


def _save_pass(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor, Tensor]) -> None:
    children, weight, parents, ctx.want_couplings, _, ctx.scale, ctx.kernel, ctx.stride = inputs[:8]
    ctx.norm, norm_weight, norm_bias, ctx.eps, ctx.fresh = inputs[8:]
    ctx.save_for_backward(children, weight, parents, norm_weight, norm_bias, output[2])
    ctx.set_materialize_grads(False)


def _pass_backward(
    ctx: Any, grad: Optional[Tensor], grad_couplings: Optional[Tensor], _: Optional[Tensor]
) -> Tuple[Any, ...]:
    children, weight, parents, norm_weight, norm_bias, sums = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(parents, dtype=children.dtype)
    grad_sums, affine = grad, grad.new_empty(0)
    if ctx.norm != "none":
        if sums.shape != parents.shape:
            raise RuntimeError(
                "fused_pass has no gradient without the sums before its norm: call it with keep=True"
            )
        grad_sums, affine = fused_norm_backward(grad, sums, 1.0, ctx.norm, norm_weight, norm_bias, ctx.eps)
    grads = fused_pass_backward(
        children,
        weight,
        parents,
        grad_sums,
        grad_couplings if ctx.want_couplings else None,
        ctx.scale,
        ctx.kernel,
        ctx.stride,
        ctx.fresh,
    )
    return (*grads, *[None] * 6, *_affine_gradients(affine), None, None)


fused_pass.register_autograd(_pass_backward, setup_context=_save_pass)
refuse_second_gradient(fused_pass_backward)


@count_as_reference(fused_pass)
def _multiply_adds(children: Any, weight: Any, parents: Any, *rest: Any) -> int:
    return _of_pass(weight, parents, rest[9] if len(rest) > 9 else True)  # a default is not passed on


@count_as_reference(backward=fused_pass_backward)
def _multiply_adds_backward(children: Any, weight: Any, parents: Any, *rest: Any) -> int:
    return _of_pass(weight, parents, rest[5] if len(rest) > 5 else True)


def _of_pass(weight: Any, parents: Any, fresh: bool) -> int:
    votes = parents[0] * weight[0] * parents[1] * parents[2]
    return votes * (weight[1] * fresh + 2)  # the votes, their agreement, their weighted sum


def _save_norm(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    sums, ctx.scale, ctx.norm, norm_weight, norm_bias, ctx.eps = inputs
    ctx.save_for_backward(sums, norm_weight, norm_bias)


def _norm_backward(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
    sums, norm_weight, norm_bias = ctx.saved_tensors
    grad_sums, affine = fused_norm_backward(grad, sums, ctx.scale, ctx.norm, norm_weight, norm_bias, ctx.eps)
    return (grad_sums, None, None, *_affine_gradients(affine), None)


fused_norm.register_autograd(_norm_backward, setup_context=_save_norm)
refuse_second_gradient(fused_norm_backward)
