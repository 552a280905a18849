"""`capszoo train`: options that a kind of call does not use, and the dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from capszoo.recipes.training.step import TrainStep
from tests.test_cli import fails, needs_training, run, succeeds

pytestmark = needs_training


def test_a_dry_run_is_of_one_run() -> None:
    line = fails(2, "train", "cnn6.mnist", "--seeds", "0,1", "--dry-run")
    assert line == "error: --seeds has no effect with --dry-run: leave it out"


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
        settings = (
            "--batch-size",
            2,
            "--set",
            f"channels_last={layout}",
            "--threads",
            before + 1,
            "--out",
            tmp_path / "x",
        )
        assert run("train", "cnn6.cifar10", "--cpu", "--dry-run", *settings).exit_code == 0
        assert seen == {(before + 1, layout)} and torch.get_num_threads() == before
    assert not list(tmp_path.iterdir())


def test_the_dry_run_of_a_queue(tmp_path: Path) -> None:
    arguments = ("train", "--queue", "--dry-run", "--out", tmp_path)
    for dry in (("--dry-run",), ()):
        line = fails(2, "train", "idpa_cnn.mnist", "--queue", *dry, "--out", tmp_path)
        assert line.startswith("error: the queue has no idpa_cnn.mnist: it has idpa_resnet.cifar10, ")

    def row(*more: object) -> list[str]:
        lines = succeeds(*arguments, *more).splitlines()
        return next(line for line in lines if line.startswith("cnn6.mnist, seed 1")).split()

    assert row()[3:5] == ["left", "out"], "the zoo has it"
    assert row("cnn6.mnist", "--epochs", 7)[3] == "0/7"
