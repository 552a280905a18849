"""`capszoo train`: options that a kind of call does not use, and the dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from capszoo.recipes.training.step import TrainStep
from tests.support.command import fails, needs_training, run, succeeds
from tests.support.errors import assert_names

pytestmark = needs_training


def test_a_dry_run_is_timed_as_the_run_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the threads and the memory format of the run; the command may be the whole one, and writes nothing."""
    before, forward = torch.get_num_threads(), TrainStep.forward
    seen: set[tuple[int, bool]] = set()

    def spied(self: Any, images: torch.Tensor, *others: torch.Tensor) -> Any:
        seen.add((torch.get_num_threads(), images.is_contiguous(memory_format=torch.channels_last)))
        return forward(self, images, *others)

    monkeypatch.setattr(TrainStep, "forward", spied)
    for layout in (True, False):
        seen.clear()
        settings = ("--batch-size", 2, "--set", f"channels_last={layout}", "--threads", before + 1)
        line = ("train", "cnn6.cifar10", "--device", "cpu", "--dry-run", *settings, "--out", tmp_path / "x")
        assert run(*line).exit_code == 0
        assert seen == {(before + 1, layout)} and torch.get_num_threads() == before
    assert not list(tmp_path.iterdir())


def test_options_of_seeds_arrive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    runs = tmp_path / "runs"

    def seeds(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return {"test": {"mean": 91.5, "sd": 0.25, "values": [91.25, 91.75], "n": 10_000}}

    monkeypatch.setattr("capszoo.recipes.training.multi_run.train_seeds", seeds)
    options = (
        "--profile",
        "short",
        "--set",
        "batch_size=8",
        "--parallel",
        2,
        "--out",
        runs,
        "--data",
        tmp_path,
    )
    text = succeeds("train", "cnn6.mnist", "--seeds", "4,2", *options)
    assert calls == [("cnn6.mnist", [4, 2], ["batch_size=8"], runs, tmp_path, False, "short", 2)]
    mean = "mean ± standard deviation of 2 seeds (91.25, 91.75)"
    assert text.strip() == f"test: 91.50 ± 0.25 % on 10,000 images, {mean}"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("train", "idpa_cnn.mnist", "--out", ""), "--out"),
        (("train", "idpa_cnn.mnist", "--out="), "--out"),
        (("train", ""), "RECIPE"),
        (("finetune", "idpa_cnn.mnist", "--data", ""), "--data"),
        (("predict", "", "x.png"), "MODEL"),
        (("predict", "idpa_cnn.mnist", ""), "IMAGE"),
        (("publish", "", "me/x"), "RUN"),
    ],
)
def test_an_empty_value_is_not_the_current_folder(arguments: tuple[str, ...], named: str) -> None:
    line = fails(2, *arguments)
    assert_names(line, ["empty"])
    assert named in line
