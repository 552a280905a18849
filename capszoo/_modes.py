"""Evaluation mode for the time of one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode within this context; every module then gets its own mode back.

    ``model.train(was_training)`` would put a part that stays in eval mode, such as a frozen BatchNorm, into training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
