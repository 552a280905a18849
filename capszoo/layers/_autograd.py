"""What all engines with an operator or a gradient written by hand share: the limits of differentiation, FLOP counts."""

import functools
from collections.abc import Callable
from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.utils.flop_counter import register_flop_formula


def count_as_reference(forward: Any = None, backward: Any = None) -> Callable[..., Callable[..., int]]:
    """Decorate a formula: the multiply-adds of an operator, for ``torch.utils.flop_counter``.

    An engine may form votes again, or skip products with zeros. Its operators count what the reference computes in
    their place, so that a model has one count. The gradient of a matrix product is two products of its size.

    Args:
        forward, backward: the operators; the formula is called with their arguments, tensors as shapes.
    """

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        for operator, flops in ((forward, 2), (backward, 4)):
            if operator is not None:
                register_flop_formula(operator._opoverload.overloadpacket)(_times(flops, formula))
        return formula

    return register


def _times(flops: int, formula: Callable[..., int]) -> Callable[..., int]:
    def count(*arguments: Any, out_shape: Any = None) -> int:
        return flops * formula(*arguments)

    return count


def refuse_second_gradient(backward: Any) -> None:
    """Register a gradient of ``backward``, the operator that computes a gradient: a RuntimeError that names the remedy.

    Without it, PyTorch's own error says only that no formula was registered.
    """
    backward.register_autograd(_refuse)


def refuse_batched_gradient(*grads: Any) -> None:
    """In a gradient without a rule for vmap, under ``is_grads_batched``: a RuntimeError that names the remedy."""
    batched = (functorch.is_batchedtensor, functorch.is_legacy_batchedtensor)
    if any(isinstance(grad, Tensor) and any(test(grad) for test in batched) for grad in grads):
        raise RuntimeError(
            "this engine computes one gradient at a time: compute within capszoo.layers.use_engines('reference')"
        )


def new_like(*tensors: Optional[Tensor]) -> Tuple[Tensor, ...]:
    """New tensors of these shapes and types, contiguous; empty ones for None: what a gradient's fake kernel returns."""
    some = next(t for t in tensors if t is not None)
    return tuple(some.new_empty(0) if t is None else t.new_empty(t.shape) for t in tensors)


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the ``backward`` of an autograd function: its own gradient is a RuntimeError that names the remedy.

    ``backward`` is called with the context, the saved tensors, which activation checkpointing allows to read once, and
    the gradients of the outputs.

    Unlike ``torch.autograd.function.once_differentiable``, the gradients stay connected to what they depend on: a
    second gradient with respect to one input is refused too, instead of missing.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors
        with torch.no_grad():
            grads = backward(ctx, saved, *gradients)
        if not torch.is_grad_enabled():  # nobody can differentiate again
            return grads
        sources = [value for value in (*gradients, *saved) if isinstance(value, Tensor)]
        whole = grads if isinstance(grads, tuple) else (grads,)
        return tuple(_Once.apply(grad, *sources) if isinstance(grad, Tensor) else grad for grad in whole)

    return once


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "this engine is differentiable once: compute within capszoo.layers.use_engines('reference')"
    )


class _Once(torch.autograd.Function):
    """A gradient that depends on ``sources``; it cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        _refuse(ctx)
