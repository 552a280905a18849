"""Several recipes or seeds side by side: each runs as it would alone; one that fails leaves the others alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from capszoo.errors import CapszooError
from capszoo.recipes.config import RecipeError, load_recipe
from capszoo.recipes.train import train
from capszoo.recipes.training import multi_run
from capszoo.recipes.training.distributed import Stopped, TrainingError
from capszoo.recipes.training.history import find_runs, read_records, trained_images
from capszoo.recipes.training.multi_run import train_seeds, train_together
from capszoo.recipes.weights import seeds_summary
from tests.support.command import fails
from tests.support.errors import assert_names, refuses
from tests.support.recipes import TINY, environment, newest


def write_recipes(folder: Path, data: Path, *tags: str, **changes: Any) -> list[str]:
    """Recipe files over the tests' images as plain idx files: a process of its own knows no smaller MNIST."""
    paths = []
    for tag in tags:
        source = {**TINY["data"], "name": f"idx:{data / 'mnist'}"}
        path = folder / f"{tag}.yaml"
        path.write_text(yaml.safe_dump({**TINY, "epochs": 1, "tag": tag, "data": source, **changes}))
        paths.append(str(path))
    return paths


def test_each_trains_as_it_would_alone_and_one_that_fails_leaves_the_other_alone(
    tmp_path: Path,
    data: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    good, bad = write_recipes(tmp_path, data, "good", "bad")
    Path(bad).write_text(Path(bad).read_text().replace("batch_size: 20", "batch_size: 101"))
    with refuses(TrainingError, names=["1", "2", "idpa_cnn.bad"]):
        train_together([good, bad], out=tmp_path / "runs", cpu=True)
    printed = capsys.readouterr().out
    assert "idpa_cnn.bad: failed (1): error: 100 training images do not fill one batch" in printed
    assert "idpa_cnn.good: finished: " in printed
    assert "do not fill" in (tmp_path / "runs" / "idpa_cnn.bad.log").read_text()
    alone = train(good, out=tmp_path / "alone", cpu=True)
    a, b = load_file(alone["weights"]), load_file(tmp_path / "runs" / "idpa_cnn.good" / alone["weights"].name)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_after_a_signal_a_failed_run_is_told_from_a_stopped_one(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "bad": "raise SystemExit(1)",
        "good": "import time; time.sleep(60)",
        "hangs": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
    }

    def start(job: multi_run.Job, environment: dict[str, str]) -> multi_run._Process:
        job.log.touch()
        return multi_run._Process(job, subprocess.Popen([sys.executable, "-c", programs[job.recipe]]))

    monkeypatch.setattr(multi_run, "_start", start)
    *jobs, stuck = [multi_run.Job(name, tmp_path / name) for name in programs]
    monkeypatch.setattr(multi_run, "STOP_SECONDS", 0.5)
    monkeypatch.setattr(multi_run, "LOOK_SECONDS", 0.05)
    # it must have begun to ignore the signal
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with refuses(Stopped, names=["0", "1", "stopped"]):
        multi_run.run_jobs([stuck])

    tell, sent = multi_run._tell, list[bool]()

    def stop_after_failure(processes: list[multi_run._Process], console: Any) -> None:
        tell(processes, console)
        if not processes[0].running and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(multi_run, "_tell", stop_after_failure)
    with refuses(Stopped, names=["1", "2", "command"]):
        multi_run.run_jobs(jobs)
    printed = capsys.readouterr().out
    assert "good: stopped: " in printed and "bad: failed (1): " in printed
    assert "stopping: each run finishes its current update and saves a checkpoint" in printed


def test_mistakes_are_found_before_anything_starts(tmp_path: Path, data: Path) -> None:
    first, second = write_recipes(tmp_path, data, "first", "second")
    for recipes, overrides, expected in (
        ([first, first], None, "idpa_cnn.first"),
        ([first, second], ["epoch=1"], "epoch"),
    ):
        with refuses(RecipeError, names=expected):
            train_together(recipes, overrides, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_log_that_cannot_be_written_leaves_the_other_run_alone(tmp_path: Path, data: Path) -> None:
    recipes = write_recipes(tmp_path, data, "one", "two")
    (tmp_path / "runs" / "idpa_cnn.two.log").mkdir(parents=True)
    with refuses(TrainingError, names=["idpa_cnn.two"]):
        train_together(recipes, out=tmp_path / "runs", cpu=True)
    assert (tmp_path / "runs" / "idpa_cnn.one" / "idpa_cnn.one.json").is_file()


@pytest.mark.slow
def test_a_signal_stops_all_with_checkpoints(root: Path, tmp_path: Path, data: Path) -> None:
    recipes = write_recipes(tmp_path, data, "one", "two", epochs=5000, checkpoint_every=2)
    runs = tmp_path / "runs"
    command = [
        sys.executable,
        "-m",
        "capszoo",
        "train",
        *recipes,
        "--together",
        "--device",
        "cpu",
        "--out",
        str(runs),
    ]
    process = subprocess.Popen(
        command, cwd=root, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while not all(
            list((runs / f"idpa_cnn.{tag}").glob("checkpoints/step-*[1-9]")) for tag in ("one", "two")
        ):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert_names(err, ["2", "command"])
    for tag in ("one", "two"):
        last = (runs / f"idpa_cnn.{tag}.log").read_text().splitlines()[-1]
        step = int(newest(runs / f"idpa_cnn.{tag}").name.split("-")[1])
        assert last == f"error: stopped at update {step} of 25000; the same command resumes there"
        assert f"idpa_cnn.{tag}: stopped" in out


def test_several_recipes_need_the_option() -> None:
    line = fails(2, "train", "idpa_cnn.mnist", "resnet20_routingcaps.mnist")
    assert_names(line, ["2", "--together"])
    line = fails(2, "train", "resnet20_routingpool.cifar10", "--profile", "shrot")
    assert_names(line, ["shrot", "short"])


def test_seeds_are_trained_once_and_summarised(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe,) = write_recipes(tmp_path, data, "idx")
    runs = tmp_path / "runs"
    summary = train_seeds(recipe, [0, 1], out=runs, cpu=True, parallel=2)
    assert summary["seeds"] == [0, 1] and len(summary["test"]["values"]) == 2 and "sd" in summary["test"]
    assert json.loads((runs / "idpa_cnn.idx.seeds.json").read_text()) == summary
    metadata = json.loads((runs / "idpa_cnn.idx.seed1" / "idpa_cnn.idx.json").read_text())
    assert metadata["seeds"] == summary and metadata["seed"] == 1
    records = [read_records(run / "metrics.jsonl")[-1] for run in runs.glob("*.seed?")]
    images = sum(record["step"] for record in records) * load_recipe(recipe).batch_size
    assert f"{images} images in " in capsys.readouterr().out
    logs = [path.stat().st_size for path in sorted(runs.glob("*.log"))]
    again = train_seeds(recipe, [0, 1], out=runs, cpu=True)
    assert again == summary and [path.stat().st_size for path in sorted(runs.glob("*.log"))] == logs
    assert train_seeds(recipe, [1], out=runs, cpu=True) == summary, "the run of the other seed counts"
    # no mean of runs on different images
    changed = runs / "idpa_cnn.idx.seed1" / "idpa_cnn.idx.json"
    kept = changed.read_text()
    changed.write_text(json.dumps(json.loads(kept) | {"dataset": {"sha256": {"test": "0"}}}))
    with pytest.raises(TrainingError, match="seed1 .*seed0"):
        train_seeds(recipe, [0, 1], out=runs, cpu=True)
    changed.write_text(kept)
    # a finished run with other settings is not the recipe's
    with pytest.raises(TrainingError, match="idpa_cnn.idx.seed0 .*epochs=1"):
        train_seeds(recipe, [0, 2], ["epochs=2"], out=runs, cpu=True)
    assert not (runs / "idpa_cnn.idx.seed2").exists()


def test_a_damaged_folder_has_no_images_and_stops_no_other_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    assert trained_images(tmp_path) == 0
    with pytest.raises(CapszooError, match="recipe.yaml"):
        find_runs([tmp_path])


def test_mean_and_standard_deviation_by_hand() -> None:
    runs = {
        seed: {"metrics": {"test": {"top1": top1, "n": 100}}}
        for seed, top1 in ((0, 90.0), (1, 92.0), (2, 94.0))
    }
    summary = seeds_summary("a.b", runs, 5)
    assert summary["test"] == {"values": [90.0, 92.0, 94.0], "mean": 92.0, "sd": 2.0, "n": 100}
    assert "validation" not in summary
    assert "sd" not in seeds_summary("a.b", {0: runs[0]}, 5)["test"]


@pytest.mark.parametrize(("seeds", "overrides"), [([0, 0], []), ([], []), ([1], ["seed=2"])])
def test_seeds_that_cannot_be(tmp_path: Path, seeds: list[int], overrides: list[str]) -> None:
    with pytest.raises(RecipeError, match="--seeds"):
        train_seeds("idpa_cnn.mnist", seeds, overrides, out=tmp_path)
