"""Real processes: killed at random moments, two side by side on one batch, on a disk that is full."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support import PACKED
from tests.support.errors import assert_names
from tests.support.formats import write_shards
from tests.support.recipes import TINY, command, environment, errors, newest, run


def assert_same_state(one: Path, two: Path) -> None:
    """The newest checkpoints of two runs agree bit for bit: weights, EMA, optimiser, position and sums."""
    a, b = newest(one), newest(two)
    assert a.name == b.name and {f.name for f in a.iterdir()} == {f.name for f in b.iterdir()}
    for file in a.glob("*.safetensors"):
        expected, found = load_file(file), load_file(b / file.name)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert torch.equal(value, found[key]), f"{file.name}: {key}"
    states = [json.loads((folder / "state.json").read_text()) for folder in (a, b)]
    for state in states:
        state.pop("seconds")
    assert states[0] == states[1], "files' checksums too: the optimiser's bytes"


@contextmanager
def running(root: Path, argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv, cwd=root, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def progress(out: Path) -> int:
    """Updates that the newest checkpoint holds, finished or being written; -1 before the first."""
    names = [path.name for path in (out / "checkpoints").glob("*step-*")]
    return max((int(name.removeprefix(".").split("-")[1][:8]) for name in names), default=-1)


def kill_and_resume(
    root: Path,
    tmp_path: Path,
    data: Path,
    kills: int,
    seed: int = 0,
    mode: str = "",
    changes: dict[str, Any] | None = None,
) -> None:
    """Kill a run so many times at moments drawn from the seed, let it end, and hold it against one left alone."""
    recipe = {
        **TINY,
        "model_args": {**TINY["model_args"], "drop_rate": 0.2},
        "ema_decay": 0.9,
        "accumulate": 2,
        "checkpoint_every": 1,
        "epochs": 4 if kills < 10 else 8,
        **(changes or {}),
    }
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(root, command(whole, data, recipe, mode)).returncode == 0
    total, rng, log = progress(whole), random.Random(seed), tmp_path / "killed.log"
    # Paced, and not in the last updates: on a busy machine it must not end before this process sees where it is.
    paced = command(killed, data, recipe, f"{mode}pace:0.15")
    for target in sorted(rng.randrange(total - 8) for _ in range(kills)):
        with running(root, paced, log) as process:
            while progress(killed) < target and process.poll() is None:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.3))  # within an update, a checkpoint, an epoch's end
            assert process.poll() is None, "it ended before it could be killed: " + log.read_text()[-500:]
            os.killpg(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
    done = run(root, command(killed, data, recipe, mode))
    assert done.returncode == 0, done.stderr
    assert_same_state(whole, killed)
    records = [
        [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (whole, killed)
    ]
    for record in records[0] + records[1]:
        del record["seconds"], record["images_per_s"]
    assert records[0] == records[1]
    weights = [load_file(out / "idpa_cnn.mnist.safetensors") for out in (whole, killed)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    sessions = json.loads((killed / "sessions.json").read_text())
    assert [session["from_update"] for session in sessions] == sorted(
        session["from_update"] for session in sessions
    )
    assert not list((killed / "checkpoints").glob(".*")), "nothing half-written is left"


@pytest.mark.slow  # resuming bit for bit on one process is in test_train.py
def test_killed_it_ends_with_the_same_weights(root: Path, tmp_path: Path, data: Path) -> None:
    """Once; `make test-slow` kills at ten moments."""
    kill_and_resume(root, tmp_path, data, 1)


def shards_of(root: Path, folder: Path) -> dict[str, Any]:
    """What changes a recipe to streamed shards, 8 of the fixture's digits each."""
    digits = np.load(root / "tests" / "fixtures" / PACKED["mnist"])
    for split, part in (("train", slice(0, 120)), ("val", slice(120, 160))):
        write_shards(folder, digits["images"][part], digits["labels"][part].tolist(), 8, split)
    settings = {"name": f"wds:{folder}", "size": 28, "augment": {"shift": 2, "resize": 28}, "val_size": 20}
    return {"data": settings}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4])
def test_a_run_on_streamed_shards_is_killed_and_ends_with_the_same_weights(
    root: Path, tmp_path: Path, data: Path, seed: int
) -> None:
    """Five times each, at moments drawn from the seed."""
    kill_and_resume(root, tmp_path, data, 5, seed, "streamed,", shards_of(root, tmp_path / "shards"))


@pytest.mark.slow
def test_two_processes_on_streamed_shards_train_as_one(root: Path, tmp_path: Path, data: Path) -> None:
    model_args = {"num_caps": 4, "pose_dim": 16, "backbone_chans": 8}
    recipe = {**TINY, "model_args": model_args, **shards_of(root, tmp_path / "shards")}
    found = []
    for processes in (1, 2):
        out = tmp_path / f"by-{processes}"
        done = run(root, command(out, data, recipe, "streamed,double", processes))
        assert done.returncode == 0, done.stderr
        found.append(load_file(newest(out) / "model.safetensors"))
    differences = [float((found[0][key] - found[1][key]).abs().max()) for key in found[0]]
    assert 0 < max(differences) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_ten_moments_it_ends_with_the_same_weights(
    root: Path, tmp_path: Path, data: Path, seed: int
) -> None:
    """Twenty in all, in two runs."""
    kill_and_resume(root, tmp_path, data, 10, seed)


@pytest.mark.parametrize(
    ("mode", "bound", "apart"),
    [
        # In float64 rounding is small, so an error in how processes share a batch would stand out.
        ("double", 1e-9, set()),
        # In float32 one weight is left out: softmax does not see a shift of all logits, so the bias that all classes
        # share has no gradient but rounding errors, which AdamW divides by their own size.
        pytest.param("", 1e-5, {"score.bias"}, marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(
    root: Path, tmp_path: Path, data: Path, mode: str, bound: float, apart: set[str]
) -> None:
    model_args = {"num_caps": 4, "pose_dim": 16, "backbone_chans": 8}
    recipe = {**TINY, "model_args": model_args, "optimizer": {"name": "adamw", "lr": 0.001}, "accumulate": 2}
    found = []
    for processes in (1, 2):
        out = tmp_path / f"by-{processes}"
        done = run(root, command(out, data, recipe, mode, processes))
        assert done.returncode == 0, done.stderr
        assert newest(out).name == "step-00000020"
        found.append(load_file(newest(out) / "model.safetensors"))
    one, two = found
    differences = {key: float((one[key] - two[key]).abs().max()) for key in one.keys() - apart}
    assert max(differences.values()) <= bound, differences
    assert any(differences.values()), "two processes do sum in another order"
    records = [
        json.loads((tmp_path / f"by-{n}" / "metrics.jsonl").read_text().splitlines()[-1]) for n in (1, 2)
    ]
    assert records[0]["val_top1"] == records[1]["val_top1"]
    assert records[0]["train_loss"] == pytest.approx(records[1]["train_loss"], rel=1e-4)
    if not mode:  # in one of the two: starting processes takes most of the time
        _finished_run_is_left_alone(
            root, command(tmp_path / "by-2", data, recipe, mode, 2), tmp_path / "by-2"
        )


def _finished_run_is_left_alone(root: Path, argv: list[str], out: Path) -> None:
    """Also one without checkpoints, which do not come along from another machine."""
    shutil.rmtree(out / "checkpoints")
    before = (out / "metrics.jsonl").read_bytes()
    done = run(root, argv)
    assert done.returncode == 0 and done.stderr.count("already finished") == 1, done.stderr
    assert (out / "metrics.jsonl").read_bytes() == before and not (out / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("nan:1", "the loss is not finite at update 3 (epoch 1), first in the output of the loss"),
        ("full-disk:20000", "cannot write to"),
        ("crash:1", "another process of this run has ended"),
    ],
)
def test_what_fails_on_one_process_ends_both_with_one_line(
    root: Path, tmp_path: Path, data: Path, mode: str, expected: str
) -> None:
    recipe = {**TINY, "checkpoint_every": 1} if mode.startswith("full-disk") else TINY
    done = run(root, command(tmp_path / "run", data, recipe, mode, processes=2), timeout=120)
    assert done.returncode != 0
    (line,) = errors(done)
    assert expected in line
    # The launcher adds a report of its own.
    ours = done.stderr.partition("torch/distributed/elastic")[0]
    assert "Traceback" not in ours, ours


@pytest.mark.slow
def test_a_signal_to_the_launcher_stops_both_processes_at_the_same_update(
    root: Path, tmp_path: Path, data: Path
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    argv = command(out, data, {**TINY, "epochs": 5000, "checkpoint_every": 3}, processes=2)
    with running(root, argv, log) as process:
        deadline = time.monotonic() + 120
        while progress(out) < 3:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)  # as a scheduler does
        process.wait(timeout=60)
    lines = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    step = progress(out)
    assert lines == [f"error: stopped at update {step} of 25000; the same command resumes there"]


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_one_line_and_keeps_the_last_good_state(
    root: Path, tmp_path: Path, data: Path
) -> None:
    """A limit on the size of files stands in for the disk: the first checkpoint fits, the next has moments too."""
    out = tmp_path / "run"
    recipe = {**TINY, "checkpoint_every": 1}
    assert run(root, command(tmp_path / "whole", data, recipe, "stop:3")).returncode == 0
    weights, moments = (
        (newest(tmp_path / "whole") / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")
    )
    assert moments > weights + 1000
    done = run(root, command(out, data, recipe, f"full-disk:{(weights + moments) // 2}"))
    assert done.returncode == 1
    (line,) = errors(done)
    assert_names(line, ["write", "room", "command"])
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000000"]
    assert run(root, command(out, data, recipe, "stop:3")).returncode == 0
    assert_same_state(tmp_path / "whole", out)
