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
import yaml

from capszoo.errors import CapszooError
from capszoo.recipes.config import RecipeError, load_recipe
from capszoo.recipes.train import train
from capszoo.recipes.training import multi_run
from capszoo.recipes.training.distributed import Stopped, TrainingError
from capszoo.recipes.training.history import find_runs, trained_images
from capszoo.recipes.training.multi_run import train_seeds, train_together
from tests.support.command import fails
from tests.support.errors import assert_names, refuses
from tests.support.recipes import TINY, assert_same_weights, environment, newest, records


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
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture
) -> None:
    good, bad = write_recipes(tmp_path, data, "good", "bad")
    Path(bad).write_text(Path(bad).read_text().replace("batch_size: 20", "batch_size: 101"))
    with refuses(TrainingError, names=["1", "2", "idpa_cnn.bad"]):
        train_together([good, bad], out=tmp_path / "runs", cpu=True)
    printed = capsys.readouterr().out
    assert "idpa_cnn.bad: failed (1): error: 100 training images do not fill one batch" in printed
    assert "idpa_cnn.good: finished: " in printed
    assert "do not fill" in (tmp_path / "runs" / "idpa_cnn.bad.log").read_text()
    alone = train(good, out=tmp_path / "alone", cpu=True)["weights"]
    assert_same_weights(alone, tmp_path / "runs" / "idpa_cnn.good" / alone.name)


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
    with refuses(RecipeError, names=["idpa_cnn.first"]):
        train_together([first, first], out=tmp_path / "runs")
    with refuses(RecipeError, names=["epoch"]):
        train_together([first, second], ["epoch=1"], tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "file").touch()
    with refuses(TrainingError, names=["file", "another place"]):
        train_together([first, second], out=tmp_path / "file")
    fails(2, "train", "idpa_cnn.mnist", "resnet20_routingcaps.mnist", names=["2", "--together"])


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
    folders = [tmp_path / "runs" / f"idpa_cnn.{tag}" for tag in ("one", "two")]
    command = [sys.executable, "-m", "capszoo", "train", *recipes, "--together", "--device", "cpu"]
    command += ["--out", str(tmp_path / "runs")]
    process = subprocess.Popen(
        command, cwd=root, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while not all(list(folder.glob("checkpoints/step-*[1-9]")) for folder in folders):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert_names(err, ["2", "command"])
    for folder in folders:
        last = folder.with_name(f"{folder.name}.log").read_text().splitlines()[-1]
        step = int(newest(folder).name.split("-")[1])
        assert last == f"error: stopped at update {step} of 25000; the same command resumes there"
        assert f"{folder.name}: stopped" in out


def test_seeds_are_trained_once_and_summarised(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe,) = write_recipes(tmp_path, data, "idx")
    runs = tmp_path / "runs"
    folders = [runs / f"idpa_cnn.idx.seed{seed}" for seed in (0, 1, 2)]
    summary = train_seeds(recipe, [0, 1], out=runs, cpu=True, parallel=2)
    assert summary["seeds"] == [0, 1] and len(summary["test"]["values"]) == 2 and "sd" in summary["test"]
    assert json.loads((runs / "idpa_cnn.idx.seeds.json").read_text()) == summary
    second = folders[1] / "idpa_cnn.idx.json"
    kept = json.loads(second.read_text())
    assert kept["seeds"] == summary and kept["seed"] == 1
    images = sum(records(folder)[-1]["step"] for folder in folders[:2]) * load_recipe(recipe).batch_size
    assert f"{images} images in " in capsys.readouterr().out
    logs = [path.stat().st_size for path in sorted(runs.glob("*.log"))]
    for seeds in ([0, 1], [1]):  # the run of the other seed counts
        assert train_seeds(recipe, seeds, out=runs, cpu=True) == summary
    assert [path.stat().st_size for path in sorted(runs.glob("*.log"))] == logs
    # no mean of runs on different images
    second.write_text(json.dumps(kept | {"dataset": {"sha256": {"test": "0"}}}))
    with pytest.raises(TrainingError, match="seed1 .*seed0"):
        train_seeds(recipe, [0, 1], out=runs, cpu=True)
    second.write_text(json.dumps(kept))
    # a finished run with other settings is not the recipe's
    with pytest.raises(TrainingError, match="idpa_cnn.idx.seed0 .*epochs=1"):
        train_seeds(recipe, [0, 2], ["epochs=2"], out=runs, cpu=True)
    assert not folders[2].exists()


def test_a_damaged_folder_has_no_images_and_stops_no_other_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    assert trained_images(tmp_path) == 0
    with pytest.raises(CapszooError, match="recipe.yaml"):
        find_runs([tmp_path])


@pytest.mark.parametrize(("seeds", "overrides"), [([0, 0], []), ([], []), ([1], ["seed=2"])])
def test_seeds_that_cannot_be(tmp_path: Path, seeds: list[int], overrides: list[str]) -> None:
    with pytest.raises(RecipeError, match="--seeds"):
        train_seeds("idpa_cnn.mnist", seeds, overrides, out=tmp_path)
