"""Changes in each iteration of routing: the routing logits and the couplings, iteration by iteration.

Sabour et al. 2017 ("Dynamic Routing Between Capsules", Fig. A.1) draw the mean change of the routing logits b_ij by
iteration, to show that routing converges. Here the change is computed from the couplings, which every routing has: the
couplings are a softmax, so their logarithm equals the logits up to a shift that cancels in the softmax; the mean over
the softmax's axis is subtracted on both sides. Credit (Heinsen's routing) has no logits: its own change is measured.

One layer at a time is run with 1, 2, … iterations, the layers below it with their usual number: so the last couplings
of t iterations are the t-th couplings of a longer routing from the same children. Concurrent routing (IDPA), where all
layers iterate in lockstep, is run with t iterations as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CapszooError
from ..models._base import CouplingLayout
from ..models._inspect import evaluating, iteration_attributes
from .routing_stats import canonical

__all__ = ["IterationChanges", "all_iterations", "iteration_changes"]

#: Iterations that are looked at, or the network's own number where that is larger.
ITERATIONS = 5


@dataclass(frozen=True)
class IterationChanges:
    """One routing layer; one value for each iteration from the first, before which the couplings were even.

    Attributes:
        own: number of iterations in the network.
        logits: mean absolute change of the logits (natural logarithm of a coupling, minus the mean); empty for credit.
        couplings: mean absolute change of the couplings, as a multiple of an even one. Of credit, as a multiple of its
            mean size after the iteration; before the first there is none, so that its first change is 1.
    """

    own: int
    logits: tuple[float, ...]
    couplings: tuple[float, ...]


def _count(module: nn.Module) -> int | None:
    counts = [getattr(module, name) for name in iteration_attributes(module)]
    return counts[0] if counts else None


def _routers(model: nn.Module) -> list[nn.Module]:
    """The outermost routing modules of the model."""
    routers: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if module is not model and id(module) not in inside and _count(module) is not None:
            routers.append(module)
            inside |= {id(part) for part in module.modules()}
    return routers


@contextmanager
def all_iterations(model: nn.Module, count: int) -> Iterator[None]:
    """Set the number of iterations of every routing layer of a model within this context.

    Args:
        model: a network of the zoo, or one of its layers.
        count: iterations, 1 or more.
    """
    before = [
        (module, name, getattr(module, name))
        for module in model.modules()
        for name in iteration_attributes(module)
    ]
    try:
        for module, name, _ in before:
            setattr(module, name, count)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class _Layer:
    """Sums over the images, for one layer."""

    def __init__(self, layout: CouplingLayout, own: int, iterations: int) -> None:
        self.layout, self.own = layout, own
        self.sums = torch.zeros(
            2, iterations, dtype=torch.float64
        )  # logits (or the size of credit), couplings
        self.count = 0

    def add(self, iterations: list[Tensor]) -> None:
        """Add the couplings after each iteration, in the layout of the network."""
        flat = [canonical(c, self.layout) for c in iterations]  # [b, positions, parents, children]
        self.count += flat[0].numel()
        credit = self.layout.over is None
        axis = 3 if self.layout.over == "children" else 2
        even = 1.0 if credit else 1 / flat[0].shape[axis]
        before = torch.full_like(flat[0], 0.0 if credit else even)
        for t, now in enumerate(flat):
            logits = now if credit else _logits(now, axis) - _logits(before, axis)
            self.sums[0, t] += float(logits.abs().cpu().double().sum())
            self.sums[1, t] += float((now - before).abs().cpu().double().sum()) / even
            before = now

    def result(self) -> IterationChanges:
        if self.layout.over is None:
            sizes, changes = self.sums
            return IterationChanges(self.own, (), tuple((changes / sizes.clamp_min(1e-30)).tolist()))
        logits, couplings = (self.sums / self.count).tolist()
        return IterationChanges(self.own, tuple(logits), tuple(couplings))


def _logits(couplings: Tensor, axis: int) -> Tensor:
    logits = couplings.clamp_min(torch.finfo(torch.float32).tiny).log()
    return logits - logits.mean(axis, keepdim=True)


@torch.no_grad()
def iteration_changes(
    model: nn.Module, batches: Iterable[Tensor], iterations: int | None = None
) -> tuple[IterationChanges, ...]:
    """The changes in each iteration of routing, for each routing layer in order; empty without iterations.

    Args:
        model: a network of the zoo; run in eval mode.
        batches: images ``[b, c, h, w]``, normalised, on the model's device.
        iterations: how many to examine; None uses ``ITERATIONS``, or the network's number if that is larger.

    Raises:
        CapszooError: no capsule network, or no images.
    """
    forward: Any = getattr(model, "forward_capsules", None)
    if forward is None or not hasattr(model, "coupling_layouts"):
        raise CapszooError(f"{type(model).__name__} is no capsule network", "choose one: `capszoo list`")
    layouts = model.coupling_layouts()  # type: ignore[operator]
    routers = _routers(model)
    if not layouts or not routers:
        return ()
    together = len(routers) == 1  # one module routes all layers, in lockstep
    own = [_count(router) or 1 for router in routers]
    most = iterations or max(ITERATIONS, *own)
    layers = [_Layer(layout, own[0 if together else k], most) for k, layout in enumerate(layouts)]
    with evaluating(model):
        for images in batches:
            for k, router in enumerate(routers):
                outputs = []
                for t in range(1, most + 1):
                    with all_iterations(router, t):
                        outputs.append(forward(images).couplings)
                for number in range(len(layers)) if together else (k,):
                    layers[number].add([couplings[number] for couplings in outputs])
    if not layers[0].count:
        raise CapszooError("there are no images", "give at least one")
    return tuple(layer.result() for layer in layers)
