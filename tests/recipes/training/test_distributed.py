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

from tests.support import PACKED
from tests.support.errors import assert_names
from tests.support.formats import write_shards
from tests.support.recipes import (
    PAIR,
    TINY,
    assert_same_weights,
    command,
    environment,
    errors,
    newest,
    records,
    run,
    weight_differences,
)


def assert_same_state(one: Path, two: Path) -> None:
    """The newest checkpoints of two runs agree bit for bit: weights, EMA, optimiser, position and sums."""
    a, b = newest(one), newest(two)
    assert a.name == b.name and {f.name for f in a.iterdir()} == {f.name for f in b.iterdir()}
    for file in a.glob("*.safetensors"):
        assert_same_weights(file, b / file.name)
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
    assert records(whole) == records(killed)
    assert_same_weights(whole / "idpa_cnn.mnist.safetensors", killed / "idpa_cnn.mnist.safetensors")
    begun = [session["from_update"] for session in json.loads((killed / "sessions.json").read_text())]
    assert begun == sorted(begun)
    assert not list((killed / "checkpoints").glob(".*")), "nothing half-written is left"


@pytest.mark.slow  # resuming bit for bit on one process is in test_train.py
@pytest.mark.parametrize(("kills", "seed"), [(1, 0), (10, 1), (10, 2)])
def test_killed_it_ends_with_the_same_weights(
    root: Path, tmp_path: Path, data: Path, kills: int, seed: int
) -> None:
    kill_and_resume(root, tmp_path, data, kills, seed)


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
    recipe = {**TINY, "model_args": PAIR["model_args"], **shards_of(root, tmp_path / "shards")}
    for processes in (1, 2):
        done = run(root, command(tmp_path / f"by-{processes}", data, recipe, "streamed,double", processes))
        assert done.returncode == 0, done.stderr
    assert 0 < max(weight_differences(tmp_path / "by-1", tmp_path / "by-2").values()) <= 1e-9


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
    one, two = tmp_path / "by-1", tmp_path / "by-2"
    for processes, out in ((1, one), (2, two)):
        done = run(root, command(out, data, PAIR, mode, processes))
        assert done.returncode == 0, done.stderr
        assert newest(out).name == "step-00000020"
    differences = weight_differences(one, two)
    assert max(value for key, value in differences.items() if key not in apart) <= bound, differences
    assert any(differences.values()), "two processes do sum in another order"
    alone, shared = records(one)[-1], records(two)[-1]
    assert alone["val_top1"] == shared["val_top1"]
    assert alone["train_loss"] == pytest.approx(shared["train_loss"], rel=1e-4)
    if not mode:  # in one of the two: starting processes takes most of the time
        shutil.rmtree(two / "checkpoints")  # a finished run is left alone, also without them
        before = (two / "metrics.jsonl").read_bytes()
        done = run(root, command(two, data, PAIR, mode, 2))
        assert done.returncode == 0 and done.stderr.count("already finished") == 1, done.stderr
        assert (two / "metrics.jsonl").read_bytes() == before and not (two / "checkpoints").exists()


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
