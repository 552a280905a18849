"""What runs a model in eval mode gives every module its own mode back: a frozen norm stays frozen."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import timm
import torch
from torch import nn

import capszoo
from capszoo.explain.convergence import iteration_changes
from capszoo.explain.heat_map import explain
from capszoo.explain.routing_stats import routing_stats
from capszoo.models._inspect import evaluating
from capszoo.summary import count_multiply_adds

IMAGE = torch.randn(1, 28, 28)


def half_frozen(model: nn.Module) -> dict[str, bool]:
    """The modes of a model in training whose norms stay in eval mode."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert len(set(modes.values())) == 2
    return modes


@pytest.mark.parametrize(
    "call",
    [
        lambda model: explain(model, IMAGE),
        lambda model: routing_stats(model, [(IMAGE[None], None)]),
        lambda model: iteration_changes(model, [IMAGE[None]], 2),
        count_multiply_adds,
    ],
    ids=["explain", "routing_stats", "iteration_changes", "count_multiply_adds"],
)
def test_a_frozen_norm_stays_frozen(call: Callable[[Any], Any]) -> None:
    model = capszoo.create_model("resnet20_routingcaps", img_size=28, depth=8)
    modes = half_frozen(model)
    call(model)
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_attached_backbone_keeps_its_modes() -> None:
    backbone = timm.create_model("resnet10t", num_classes=0)
    modes = half_frozen(backbone)
    capszoo.attach_head(backbone, "avg", num_classes=3, img_size=32)
    kept = {name: module.training for name, module in backbone.named_modules()}
    assert all(kept[name] == mode for name, mode in modes.items() if name in kept)


class Waiting(nn.Module):
    """Holds a forward pass back until another thread allows it to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.go_on.wait(30)
        out: torch.Tensor = self.norm(x)
        return out


@pytest.mark.parametrize("shared", ["the model", "a part of it"])
def test_a_call_that_ends_leaves_the_model_in_eval_for_the_others(shared: str) -> None:
    model = Waiting().train()
    before = copy.deepcopy(model.norm.state_dict())

    def slow() -> None:
        with evaluating(model), torch.no_grad():
            model(torch.randn(8, 3) + 5)

    other = model if shared == "the model" else model.norm
    with ThreadPoolExecutor(1) as pool:
        with evaluating(other):  # begins before the slow call, and ends within it
            running = pool.submit(slow)
            assert model.entered.wait(30)
        model.go_on.set()
        running.result()
    assert all(torch.equal(value, before[key]) for key, value in model.norm.state_dict().items())
    assert all(module.training for module in model.modules())
