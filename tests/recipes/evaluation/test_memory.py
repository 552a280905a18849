"""The memory of a forward pass bounds the batch of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capszoo.recipes.evaluation import memory
from capszoo.recipes.evaluation.target import prepare
from capszoo.recipes.train import train
from capszoo.recipes.training import begin
from tests.support.recipes import tiny_recipe


class Wide(nn.Module):
    """Takes 4,000 bytes for an image twice at a time, and frees what it no longer needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x[:, :1, :1, :1] * self.weight.expand(1, 1000, 1, 1)
        return x.flatten(1).sum(1)


def test_the_peak_counts_what_exists_at_one_time() -> None:
    found = memory.memory_per_image(Wide(), (1, 1, 1))
    assert found == pytest.approx(2 * 4000, rel=0.01)


def test_a_batch_takes_half_of_the_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Wide()
    per_image = memory.memory_per_image(net, (1, 1, 1)) * memory.MARGIN
    most = memory.MOST_BYTES // per_image
    for available, expected in ((20 * per_image, 10), (per_image, 1), (0, 1), (10**15, most)):
        monkeypatch.setattr(memory, "available_memory", lambda device, found=available: found)
        assert memory.fitting_images(net, (1, 1, 1)) == expected
    assert (memory.available_memory(torch.device("cpu")) or 0) > 0


def test_evaluation_and_validation_take_what_fits(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capszoo.recipes.evaluation.target.fitting_images", lambda net, size: 7)
    assert prepare("resnet20_routingcaps.mnist", data=tiny_mnist, device="cpu").batch_size == 7
    sizes: list[int] = []
    batches = begin.Batches

    def noted(data: Any, size: int, **options: Any) -> Any:
        if not options.get("train"):
            sizes.append(size)
        return batches(data, size, **options)

    monkeypatch.setattr(begin, "Batches", noted)
    monkeypatch.setattr(begin, "fitting_images", lambda net, size: 5)
    recipe: dict[str, Any] = {"epochs": 1, "data": {"name": "mnist", "val_size": 20}}
    train(tiny_recipe(**recipe), out=tmp_path / "run", data=tiny_mnist, cpu=True)
    train(tiny_recipe(**recipe, eval_batch_size=3), out=tmp_path / "set", data=tiny_mnist, cpu=True)
    assert sizes == [5, 3]
