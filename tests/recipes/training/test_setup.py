"""What a recipe asks for, made: schedules, optimisers."""

from __future__ import annotations

import pytest
import torch

from capszoo.recipes.config import RecipeError, load_recipe
from capszoo.recipes.training.setup import create_optimizer, create_scheduler


def test_step_schedule_has_a_floor_after_its_warm_up() -> None:
    """Efficient-CapsNet's rate: 0.97 an epoch from 5e-4, not below 5e-5; the warm-up starts lower."""
    recipe = load_recipe(
        "efficient_capsnet.mnist", ["schedule.warmup_epochs=2", "schedule.warmup_lr=0.00001"]
    )
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=recipe.optimizer.lr)
    schedule = create_scheduler(recipe, optimizer, 10)
    assert schedule is not None
    rates = []
    for epoch in (0, 2, 3, 50, 100, 149):
        schedule.step_update(10 * epoch)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-5, 5e-4 * 0.97**2, 5e-4 * 0.97**3, 5e-4 * 0.97**50, 5e-5, 5e-5])


def test_an_unknown_optimiser_names_the_nearest() -> None:
    recipe = load_recipe("efficient_capsnet.mnist", ["optimizer.name=adamv"])
    with pytest.raises(RecipeError, match="unknown optimizer 'adamv': did you mean 'adam'"):
        create_optimizer(recipe, torch.nn.Linear(2, 2))
    recipe = load_recipe("efficient_capsnet.mnist", ["optimizer.options.nosuch=1"])
    with pytest.raises(RecipeError, match="optimizer adam: .*nosuch"):
        create_optimizer(recipe, torch.nn.Linear(2, 2))
