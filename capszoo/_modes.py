"""Evaluation mode for the time of one call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

__all__ = ["evaluating"]


@dataclass
class _Hold:
    """A module that calls keep in eval mode."""

    training: bool  # its mode before the first of them
    threads: list[int] = field(default_factory=list)  # one entry a call


#: Modules in use by their ids, which are unique as long as a call has the module.
_HELD: dict[int, _Hold] = {}
_LOCK = threading.Lock()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode within this context; every module then gets its own mode back.

    ``model.train(was_training)`` would put a part that stays in eval mode, such as a frozen BatchNorm, into training.
    Threads may share the model, or parts of it: a module leaves eval mode with the last call that uses it.
    """
    thread = threading.get_ident()
    modules = list(model.modules())
    with _LOCK:
        modes = [_hold(module, thread) for module in modules]
        model.eval()
    try:
        yield
    finally:
        with _LOCK:
            for module, training in zip(modules, modes, strict=True):
                _release(module, thread, training)


def _hold(module: nn.Module, thread: int) -> bool:
    """Note a call of a thread; the mode that the module has in this thread's view."""
    hold = _HELD.setdefault(id(module), _Hold(module.training))
    others = bool(hold.threads) and thread not in hold.threads
    hold.threads.append(thread)
    return hold.training if others else module.training


def _release(module: nn.Module, thread: int, training: bool) -> None:
    hold = _HELD[id(module)]
    hold.threads.remove(thread)
    if all(
        other == thread for other in hold.threads
    ):  # a call inside another of the same thread, or the last one
        module.training = training
    if not hold.threads:
        del _HELD[id(module)]
