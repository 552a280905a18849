"""What a recipe asks for, made: schedules, optimisers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capszoo.recipes.config import DataConfig, Recipe, RecipeError, load_recipe
from capszoo.recipes.evaluation.target import evaluation_batch
from capszoo.recipes.training.setup import (
    _limited,
    create_optimizer,
    create_scheduler,
)
from tests.support.errors import refuses


def _recipe(**more: Any) -> Recipe:
    return load_recipe({"arch": "a", "tag": "b", "data": {"name": "mnist"}, "epochs": 10, **more})


def rates_at(recipe: Recipe, *updates: int) -> list[float]:
    """The learning rates of a recipe at some updates, ten an epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=recipe.optimizer.lr)
    scheduler = create_scheduler(recipe, optimizer, 10)
    assert scheduler is not None
    rates = []
    for update in updates:
        scheduler.step_update(update)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_step_schedule_has_a_floor_after_its_warm_up() -> None:
    """Efficient-CapsNet's rate: 0.97 an epoch from 5e-4, not below 5e-5; the warm-up starts lower."""
    warmup = ["schedule.warmup_epochs=2", "schedule.warmup_lr=0.00001"]
    rates = rates_at(load_recipe("efficient_capsnet.mnist", warmup), 0, 20, 30, 500, 1000, 1490)
    assert rates == pytest.approx([1e-5, 5e-4 * 0.97**2, 5e-4 * 0.97**3, 5e-4 * 0.97**50, 5e-5, 5e-5])


@pytest.mark.parametrize(
    ("overrides", "nesterov", "decays"),
    [
        ((), True, {0.0, 5e-4}),
        (("optimizer.name=momentum", "optimizer.options.filter_bias_and_bn=false"), False, {5e-4}),
    ],
)
def test_momentum_is_that_of_the_release_on_request(
    overrides: tuple[str, ...], nesterov: bool, decays: set[float]
) -> None:
    optimizer = create_optimizer(
        load_recipe("idpa_cnn.cifar10", overrides), torch.nn.Sequential(torch.nn.Linear(2, 2))
    )
    assert {group["nesterov"] for group in optimizer.param_groups} == {nesterov}
    assert {group["weight_decay"] for group in optimizer.param_groups} == decays


@pytest.mark.parametrize(
    ("schedule", "share"),
    [
        ({"name": "cosine"}, lambda x: 0.5 * (1 + math.cos(math.pi * x))),
        ({"name": "poly", "decay_rate": 1.0}, lambda x: 1 - x),
        ({"name": "poly", "decay_rate": 0.5}, lambda x: (1 - x) ** 0.5),
    ],
)
def test_rates_by_hand(schedule: dict[str, Any], share: Callable[[float], float]) -> None:
    """A warm-up in 2 of 10 epochs from 0.1 to 1, then a decay to 0.01 as if it had begun at the first update."""
    settings = {"warmup_epochs": 2, "warmup_lr": 0.1, "min_lr": 0.01, **schedule}
    rates = rates_at(_recipe(optimizer={"lr": 1.0}, schedule=settings), 0, 10, 60, 99)
    assert rates == pytest.approx([0.1, 0.55, 0.01 + 0.99 * share(0.6), 0.01 + 0.99 * share(0.99)])


@pytest.mark.parametrize(
    ("name", "expected"), [("mnist", list(range(10))), ("idx:mnist", None), ("h_imagenet", None)]
)
def test_a_limit_takes_a_mixture_of_a_folder_s_images(name: str, expected: list[int] | None) -> None:
    settings = DataConfig(name=name, limit=10)
    chosen = _limited(100, settings).tolist()
    assert len(set(chosen)) == 10 and chosen == sorted(chosen) == _limited(100, settings).tolist()
    assert chosen == expected if expected else max(chosen) >= 50
    assert _limited(5, settings).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"name": "adamv"}, ["adamv", "adam"]),
        ({"name": "adamw", "options": {"nosuch": 1}}, ["optimizer", "nosuch"]),
        ({"name": "adahessian"}, ["adahessian", "derivatives"]),  # of second order
    ],
)
def test_optimisers_that_cannot_be_are_refused(settings: dict[str, Any], names: list[str]) -> None:
    with refuses(RecipeError, names=names):
        create_optimizer(_recipe(optimizer=settings), torch.nn.Linear(2, 2))


def test_multistep_by_hand() -> None:
    schedule = {"name": "multistep", "milestones": [3, 6], "decay_rate": 0.1}
    rates = rates_at(_recipe(optimizer={"lr": 1.0}, schedule=schedule), 0, 28, 30, 58, 60, 99)
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_the_optimiser_has_the_recipe_s_settings() -> None:
    settings = {"name": "momentum", "lr": 0.3, "momentum": 0.8, "weight_decay": 0.05}
    groups = create_optimizer(_recipe(optimizer=settings), torch.nn.Linear(3, 2)).param_groups
    keys = ("lr", "momentum", "weight_decay", "nesterov")
    found = {group["params"][0].dim(): tuple(group[key] for key in keys) for group in groups}
    assert found == {1: (0.3, 0.8, 0.0, False), 2: (0.3, 0.8, 0.05, False)}, "no decay of biases"


def test_evaluation_takes_less_than_the_memory_of_training() -> None:
    def batch(side: int, device: str, trained: int | None) -> int:
        return evaluation_batch((side, side), torch.device(device), trained)

    assert [batch(32, "cpu", size) for size in (None, 64, 500)] == [500, 500, 500]
    assert [batch(32, "cuda", size) for size in (None, 64, 500)] == [500, 128, 500]
    assert [batch(224, "cpu", size) for size in (None, 8, 128)] == [64, 64, 256], "large images: fewer"
    assert [batch(4096, "cuda", size) for size in (None, 3)] == [1, 6]
