"""Look into a model without changing it: iteration counts, frozen modules, eval mode for the time of one call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import List

from torch import nn

__all__ = [
    "evaluating",
    "iteration_attributes",
    "routing_iterations",
    "ITERATION_ATTRIBUTES",
    "frozen_modules",
    "freeze_batch_statistics",
]


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


#: Attribute names of the iteration count in layers and models.
ITERATION_ATTRIBUTES = ("num_iters", "routing_iters")


def iteration_attributes(module: nn.Module) -> list[str]:
    """Names of the iteration counts of this module itself, without its submodules; empty unless it routes."""
    even = getattr(module, "lam", None) == 0  # one step of no iterations
    if even or not getattr(module, "routes", True):
        return []
    return [name for name in ITERATION_ATTRIBUTES if type(getattr(module, name, None)) is int]


def routing_iterations(model: nn.Module) -> list[int]:
    """The distinct iteration counts of a model's routings, ascending; empty without routing."""
    counts = {getattr(module, name) for module in model.modules() for name in iteration_attributes(module)}
    return sorted(counts)


def frozen_modules(net: nn.Module) -> List[nn.Module]:
    """The modules that have parameters, none of which requires a gradient."""
    found = []
    for module in net.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            found.append(module)
    return found


def freeze_batch_statistics(net: nn.Module) -> None:
    """Set frozen modules to eval mode, so that the statistics of their norms do not change."""
    for module in frozen_modules(net):
        module.eval()
