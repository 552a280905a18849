"""Operators whose gradient is itself an operator, and which can therefore be differentiated only once."""

from typing import Any

__all__ = ["refuse_second_gradient"]


def refuse_second_gradient(backward: Any) -> None:
    """Register a gradient of ``backward``, the operator that computes a gradient: a RuntimeError that names the remedy.

    Without it, PyTorch's own error says only that no formula was registered.
    """
    backward.register_autograd(_refuse)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "this engine is differentiable once: compute within capszoo.layers.use_engines('reference')"
    )
