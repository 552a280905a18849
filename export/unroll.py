"""Prepare a model for export: a copy in eval mode that computes the same function with fewer operations.

The iteration count of every routing is fixed (a Python ``for`` over an int, which tracing unrolls). BatchNorm is folded
into the convolution before it wherever the traced graph shows that this is safe. Weights are stored in the layout of
the graphs' engines (:meth:`.RoutingLayer.freeze`, or a module's ``prepare_for_export()``). Parts that the requested
outputs do not need are dropped. :func:`prepare_for_export` does not modify the original. :class:`Served` adds the
graph's other parts: normalisation, another precision, the requested outputs.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from timm.models._features_fx import get_notrace_functions, get_notrace_modules
from torch import fx
from torch.nn.utils.fusion import fuse_conv_bn_eval

from capszoo.errors import UsageError
from capszoo.layers.engine import RoutingLayer
from capszoo.models._inspect import first_parameter, iteration_attributes, routing_iterations

__all__ = [
    "Served",
    "fold_batchnorm",
    "has_hooks",
    "is_plain_conv",
    "prepare_for_export",
    "routing_iterations",
    "set_routing_iterations",
]

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def prepare_for_export(model: nn.Module, routing_iters: int | None = None) -> nn.Module:
    """Copy a model and prepare the copy for export; it computes the same scores as the original in eval mode.

    Args:
        model: any classifier of the zoo or of timm; not modified.
        routing_iters: iterations of every routing; None keeps the model's number.

    Raises:
        UsageError: ``routing_iters`` below 1, or given for a model without routing.
    """
    prepared = copy.deepcopy(model).eval().requires_grad_(False)
    prepared = prepared.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    if routing_iters is not None:
        set_routing_iterations(prepared, routing_iters)
    # reconstructions are not an output of the graph; a network without them may compute with its decoder
    if isinstance(getattr(prepared, "decoder", None), nn.Module) and hasattr(prepared, "reconstruct"):
        setattr(prepared, "decoder", None)  # noqa: B010
    fold_batchnorm(prepared)
    _call_hooks(prepared)
    for module in prepared.modules():
        if isinstance(module, RoutingLayer):
            module.freeze()
    return prepared


def set_routing_iterations(model: nn.Module, routing_iters: int) -> None:
    """Set the iteration count of every routing of a model, in place.

    Raises:
        UsageError: a count below 1, or a model without routing.
    """
    if routing_iters < 1:
        raise UsageError(f"routing_iters is {routing_iters}", "give 1 or more")
    has_routing = False
    for module in model.modules():
        for name in iteration_attributes(module):
            setattr(module, name, routing_iters)
            has_routing = True
    if not has_routing:
        raise UsageError(f"{type(model).__name__} has no routing", "leave routing_iters out")


def fold_batchnorm(model: nn.Module) -> int:
    """Fold each eval-mode BatchNorm into the convolution before it, in place; return how many were folded.

    A pair qualifies if the symbolically traced graph shows that the convolution's output is used only by that
    BatchNorm, that each module runs once, and that it has one name. A subclass of a convolution may compute with other
    weights than its own, so it qualifies only if it declares ``folds_batchnorm = True``. A model that cannot be traced
    is not changed.
    """
    graph = _trace(model)
    if graph is None:
        return 0
    modules = dict(model.named_modules())
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    # a parameter that is also read directly must keep its value
    read_apart = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    folded = 0
    for node in graph.nodes:
        if node.op != "call_module" or type(modules[node.target]) not in _BATCHNORMS:
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
            continue
        conv_name, norm_name = str(source.target), str(node.target)
        conv, norm = modules[conv_name], modules[norm_name]
        if not is_plain_conv(conv) or norm.running_mean is None or norm.training:
            continue
        if calls[conv_name] != 1 or calls[norm_name] != 1 or {conv_name, norm_name} & read_apart:
            continue
        if has_hooks(conv) or has_hooks(norm) or max(names[id(conv)], names[id(norm)]) > 1:
            continue
        _replace(model, conv_name, _fold(conv, norm))
        _replace(model, norm_name, nn.Identity())
        folded += 1
    return folded


def is_plain_conv(module: nn.Module) -> bool:
    """True if the output is linear in the module's own weight and bias, for each output channel separately."""
    return type(module) in _CONVS or (
        isinstance(module, _CONVS) and getattr(module, "folds_batchnorm", False)
    )


def _fold(conv: Any, norm: Any) -> nn.Module:
    """One convolution that equals ``norm(conv(x))``; the product is computed in float64, then rounded once."""
    fused = fuse_conv_bn_eval(copy.deepcopy(conv).double(), copy.deepcopy(norm).double())
    return fused.to(conv.weight.dtype).eval().requires_grad_(False)


def _call_hooks(model: nn.Module) -> None:
    """Call ``prepare_for_export()`` of every submodule that defines it, children before parents.

    A hook changes its module in place and returns None, or returns a module that replaces it.
    """
    for name, module in reversed(list(model.named_modules())):
        hook = getattr(module, "prepare_for_export", None)
        replacement = hook() if callable(hook) else None
        if isinstance(replacement, nn.Module) and replacement is not module and name:
            _replace(model, name, replacement.eval().requires_grad_(False))


class Served(nn.Module):
    """A model for serving: float32 or uint8 images as input, the requested outputs in float32, flat.

    In half precision, parameters, convolutions and vote products are half; the zoo's layers compute
    norms, squash, softmax logits and EM variances in float32.

    Args:
        model: any classifier; changed in place to ``dtype``.
        outputs: fields of ``forward_capsules``; only ``scores`` calls ``forward``.
        mean, std: per channel, for values in 0..1: if given, the graph accepts uint8 images and normalises them.
        dtype: precision of the model.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(
        self,
        model: nn.Module,
        outputs: Sequence[str] = ("scores",),
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model = model.to(dtype) if dtype != torch.float32 else model
        self.outputs, self.dtype, self.uint8 = tuple(outputs), dtype, bool(mean)
        self.input_dtype = torch.uint8 if mean else torch.float32
        if mean:
            # (x / 255 - mean) / std as one product and one difference; the constants are computed in float64
            like = first_parameter(model)
            m, s = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
            self.register_buffer("scale", (1 / (255 * s)).float().to(like.device), persistent=False)
            self.register_buffer("shift", (m / s).float().to(like.device), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        if self.uint8:
            x = x.float() * self.scale - self.shift
        x = x.to(self.dtype)
        if self.outputs == ("scores",):
            return self.model(x).float()
        capsules = self.model.forward_capsules(x)  # type: ignore[operator]
        flat: list[torch.Tensor] = []
        for name in self.outputs:
            value = getattr(capsules, name)
            flat.extend([value] if isinstance(value, torch.Tensor) else value)
        return tuple(value.float() for value in flat)


class _Tracer(fx.Tracer):
    """torch.fx tracing that treats modules which timm declares untraceable as leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = isinstance(m, tuple(get_notrace_modules())) or is_plain_conv(m)
        return whole or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> fx.Graph | None:
    try:
        return _Tracer(autowrap_functions=tuple(get_notrace_functions())).trace(model)
    except Exception:  # tracing runs the model's Python on proxies: anything may be raised
        return None


def has_hooks(module: nn.Module) -> bool:
    """True if calling the module does more than its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"))


def _replace(model: nn.Module, name: str, replacement: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, replacement)


def non_finite_weights(model: nn.Module) -> list[str]:
    """Names of the parameters and buffers that contain NaN or infinity."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, t in tensors if t.is_floating_point() and not bool(torch.isfinite(t).all())]
