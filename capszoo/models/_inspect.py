"""Look into a model without changing it: iteration counts, frozen modules, eval mode for the time of one call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import List

import torch
from torch import Tensor, nn

#: Modules that calls keep in eval mode, by their ids: the number of these calls, and the mode before the first.
_IN_USE: dict[int, tuple[int, bool]] = {}
_LOCK = threading.Lock()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode within this context; every module then gets its own mode back.

    ``model.train(was_training)`` would put a part that stays in eval mode, such as a frozen BatchNorm, into training.
    Threads may share the model, or parts of it: a module leaves eval mode with the last call that uses it.
    """
    modules = list(model.modules())
    with _LOCK:
        for module in modules:
            count, training = _IN_USE.get(id(module), (0, module.training))
            _IN_USE[id(module)] = (count + 1, training)
        model.eval()
    try:
        yield
    finally:
        with _LOCK:
            for module in modules:
                count, training = _IN_USE.pop(id(module))
                if count > 1:
                    _IN_USE[id(module)] = (count - 1, training)
                else:
                    module.training = training


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


def first_parameter(model: nn.Module) -> Tensor:
    """For the device and the type of a model's input; an exported file has no parameters, and runs on the CPU."""
    return next(model.parameters(), torch.empty(0))


def frozen_modules(net: nn.Module) -> List[nn.Module]:
    """The modules that have parameters, none of which requires a gradient."""
    modules = []
    for module in net.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            modules.append(module)
    return modules


def freeze_batch_statistics(net: nn.Module) -> None:
    """Set frozen modules to eval mode, so that the statistics of their norms do not change."""
    for module in frozen_modules(net):
        module.eval()
