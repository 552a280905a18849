"""`capszoo train`: options that a kind of call does not use, and the dry run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from capszoo.recipes.train import train
from capszoo.recipes.training.step import TrainStep
from tests.recipes.conftest import tiny_mnist
from tests.recipes.training.test_stages import staged_recipe
from tests.test_cli import fails, needs_training, run, succeeds

__all__ = ["tiny_mnist"]

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


def test_a_state_is_moved_by_the_commands(tiny_mnist: Path, tmp_path: Path) -> None:  # noqa: F811
    first, state, there = (tmp_path / name for name in ("first", "state", "there"))
    train(staged_recipe(), out=first, data=tiny_mnist, stop_after=1)
    assert succeeds("state", "export", first, state).strip() == f"manifest: {state / 'manifest.json'}"
    made, resume = succeeds("state", "import", state, there).splitlines()
    assert made == f"run: {there}" and (there / "checkpoints").is_dir()
    command = shlex.split(resume.removeprefix("resume: capszoo "))
    assert resume.startswith("resume: capszoo train ") and command[-2:] == ["--out", str(there)]
    assert "idpa_cnn" in succeeds(*command, "--data", tiny_mnist, "--cpu", "--dry-run")


def test_options_of_a_queue_and_of_seeds_arrive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("capszoo.recipes.training.queue.train_queue", lambda *a, **o: calls.append((a, o)))
    places = ("--out", tmp_path / "runs", "--data", tmp_path)
    text = succeeds(
        "train",
        "--queue",
        "cnn6.mnist",
        *places,
        "--cpu",
        "--epochs",
        7,
        "--parallel",
        3,
        "--minutes",
        2.5,
        "--state",
        tmp_path,
    )
    given = (tmp_path / "runs", tmp_path, True, 3, 2.5, ["cnn6.mnist"], ["epochs=7"])
    assert calls == [(given, {"state": tmp_path})] and "0/7" in text

    def seeds(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return {"test": {"mean": 91.5, "sd": 0.25, "values": [91.25, 91.75], "n": 10_000}}

    monkeypatch.setattr("capszoo.recipes.training.multi_run.train_seeds", seeds)
    options = ("--seeds", "4,2", "--profile", "short", "--set", "batch_size=8", "--parallel", 2)
    text = succeeds("train", "cnn6.mnist", *options, *places)
    assert calls[-1] == (
        "cnn6.mnist",
        [4, 2],
        ["batch_size=8"],
        tmp_path / "runs",
        tmp_path,
        False,
        "short",
        2,
    )
    mean = "mean ± standard deviation of 2 seeds (91.25, 91.75)"
    assert text.strip() == f"test: 91.50 ± 0.25 % on 10,000 images, {mean}"


def test_images_that_changed_are_accepted_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[bool] = []
    for name in ("train.train", "finetune.finetune"):
        monkeypatch.setattr(
            f"capszoo.recipes.{name}", lambda *_, accept_data, **__: calls.append(accept_data) or {}
        )
    for call in (("train", "cnn6.mnist"), ("finetune", "idpa_cnn.mnist", "--data", tmp_path)):
        succeeds(*call, "--out", tmp_path / "run")
        succeeds(*call, "--out", tmp_path / "run", "--accept-data")
    assert calls == [False, True, False, True]


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
    assert named in line and "is empty" in line
