"""Apply a function block by block, for engines of eager mode on a CPU; the backward pass recomputes each block.

A step whose items (parents, groups of children) are independent computes one block of items at a time. No temporary is
larger than one block, so all of them stay in the cache. Only the inputs are stored for the backward pass. Large
temporaries also cost page faults, because the allocator returns them to the system when they are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._autograd import differentiable_once

Function = Callable[..., Sequence[Tensor]]


def blockwise(
    function: Function,
    tensors: Sequence[Tensor],
    in_dims: Sequence[int | None],
    out_dims: Sequence[int],
    items: int,
) -> Any:
    """Compute ``function(*tensors)`` block by block.

    Args:
        function: maps ``tensors`` to as many results as ``out_dims``; differentiable, without random numbers. A
            block of the results depends only on the same block of the inputs.
        tensors: inputs of ``function``.
        in_dims: the axis along which each input is cut into blocks; None for an input that every block needs whole.
        out_dims: the axis along which the blocks of each result are concatenated.
        items: maximum items per block; values below 1 count as 1.

    Returns:
        The results as a tuple. With more than one block, they can be differentiated only once.
    """
    size = next(t.shape[d] for t, d in zip(tensors, in_dims, strict=True) if d is not None)
    block = max(1, min(size, items))
    block = -(-size // -(-size // block)) if size else 1  # even blocks
    if block >= size:
        return function(*tensors)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _Blockwise.apply(function, tuple(in_dims), tuple(out_dims), block, *tensors)
    return _run(function, tensors, in_dims, out_dims, block, size)


def _parts(tensors: Sequence[Tensor], dims: Sequence[int | None], start: int, length: int) -> list[Tensor]:
    return [t if d is None else t.narrow(d, start, length) for t, d in zip(tensors, dims, strict=True)]


def _run(
    function: Function,
    tensors: Sequence[Tensor],
    in_dims: Sequence[int | None],
    out_dims: Sequence[int],
    block: int,
    size: int,
) -> tuple[Tensor, ...]:
    outputs: list[Tensor] = []
    for start in range(0, size, block):
        length = min(block, size - start)
        results = function(*_parts(tensors, in_dims, start, length))
        if not outputs:
            for result, dim in zip(results, out_dims, strict=True):
                shape = list(result.shape)
                shape[dim] = size
                outputs.append(result.new_empty(shape))
        for output, result, dim in zip(outputs, results, out_dims, strict=True):
            output.narrow(dim, start, length).copy_(result)
    return tuple(outputs)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        function, in_dims, out_dims, block, *tensors = arguments
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        size = next(t.shape[d] for t, d in zip(tensors, in_dims, strict=True) if d is not None)
        ctx.plan = (function, in_dims, out_dims, block, size)
        return _run(function, tensors, in_dims, out_dims, block, size)

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, tensors: tuple[Tensor, ...], *incoming: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        function, in_dims, out_dims, block, size = ctx.plan
        needed = ctx.needs_input_grad[4:]
        grads: list[Tensor | None] = [None] * len(tensors)
        for k, (tensor, dim) in enumerate(zip(tensors, in_dims, strict=True)):
            if needed[k]:
                grads[k] = torch.zeros_like(tensor) if dim is None else torch.empty_like(tensor)
        for start in range(0, size, block):
            length = min(block, size - start)
            inputs = [
                part.detach().requires_grad_(need)
                for part, need in zip(_parts(tensors, in_dims, start, length), needed, strict=True)
            ]
            with torch.enable_grad(), torch.autocast(inputs[0].device.type, enabled=False):
                results = function(*inputs)
            outputs, weights = [], []
            for result, grad, dim in zip(results, incoming, out_dims, strict=True):
                if grad is not None and result.requires_grad:
                    outputs.append(result)
                    weights.append(grad.narrow(dim, start, length))
            wanted = [t for t in inputs if t.requires_grad]
            gradients = iter(torch.autograd.grad(outputs, wanted, weights, allow_unused=True))
            for whole, dim, need in zip(grads, in_dims, needed, strict=True):
                if not need:
                    continue
                assert whole is not None
                part = next(gradients)
                if dim is None:
                    if part is not None:
                        whole += part
                elif part is None:
                    whole.narrow(dim, start, length).zero_()
                else:
                    whole.narrow(dim, start, length).copy_(part)
        return (None, None, None, None, *grads)
