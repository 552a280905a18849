"""Layers of routing beside the naive references, and the largest tensor that a call makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from capszoo.layers import ConvIDPA, DynamicRouting
from tests.reference import idpa as naive

F64 = torch.float64


def describe(layer: nn.Module) -> naive.Layer:
    """The naive description of a layer, on its own parameters."""
    conv = isinstance(layer, ConvIDPA)
    return naive.Layer(
        layer.weight,
        layer.rows,
        kernel=layer.kernel_size if conv else 0,
        stride=layer.stride if conv else 1,
        padding=layer.padding if conv else 0,
        scale=layer.scale != 1.0,
        start=None if layer.parent_init == "zero" else layer.start,
        norm_weight=layer.norm.weight if layer.layer_norm else None,
        norm_bias=layer.norm.bias if layer.layer_norm else None,
        layer_norm=layer.layer_norm,
        beta_v=layer.beta_v,
        beta_a=layer.beta_a,
    )


def shaken(module: nn.Module) -> nn.Module:
    """In float64, with parameters away from their special initial values (norms, starts, betas)."""
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def assert_same(fast: Any, expected: Any, inputs: list[Tensor], atol: float = 1e-11) -> None:
    """Equal values (tensors, or several), and equal gradients of a random functional of them."""
    fast, expected = tree_leaves(fast), tree_leaves(expected)
    torch.testing.assert_close(fast, expected, atol=atol, rtol=10 * atol)
    weights = [torch.randn(t.shape, dtype=F64) for t in fast]
    grads, expected_grads = (
        torch.autograd.grad(
            sum((t * w).sum() for t, w in zip(values, weights, strict=True)), inputs, retain_graph=True
        )
        for values in (fast, expected)
    )
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert expected_grad.abs().max() > 0
        torch.testing.assert_close(grad, expected_grad, atol=10 * atol, rtol=100 * atol)


def dense_transforms(layer: DynamicRouting) -> Tensor:
    """``[i, d, j * e]`` as ``[i, j, e, d]``."""
    weight = layer.weight.reshape(layer.in_caps, layer.in_dim, layer.out_caps, layer.out_dim)
    return weight.permute(0, 2, 3, 1)
