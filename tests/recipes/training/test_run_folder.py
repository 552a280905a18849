"""A run's folder: held by one process, never continued with another recipe or other images, read past damage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from capszoo._pretrained.files import sha256_of
from capszoo._utils.files import NotWritable
from capszoo.data.readers import read_idx
from capszoo.recipes import train as train_module
from capszoo.recipes.train import TrainingError, train
from capszoo.recipes.training import begin
from capszoo.recipes.training.checkpoints import (
    checkpoint_folders,
    latest_checkpoint,
    save_checkpoint,
)
from capszoo.recipes.training.finish import _machines
from capszoo.recipes.training.history import read_records, trained_images
from capszoo.recipes.training.run_folder import (
    LOCK,
    RunLock,
    check_data,
    check_run,
    first_difference,
    open_run,
    read_sessions,
)
from tests.support.errors import assert_names, refuses
from tests.support.formats import write_idx
from tests.support.recipes import metadata, tiny_recipe

POSITION = {"updates_per_epoch": 3, "seconds": 1.0, "sums": [0.0, 0.0, 0.0], "images": {"train": 120}}


@contextmanager
def _held(root: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a folder until the end of the block."""
    code = (
        "import sys, time; from pathlib import Path; from capszoo.recipes.training.run_folder import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(600)"
    )
    argv = [sys.executable, "-c", code, str(out)]
    with subprocess.Popen(argv, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def _contents(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != LOCK}


def test_a_second_run_in_the_same_folder_is_refused_in_one_line(
    root: Path, tiny_mnist: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(tiny_recipe(epochs=1), out=out, data=tiny_mnist, stop_after=1)
    before = _contents(out)
    with _held(root, out) as holder:
        holds = f"process {holder.pid} on {socket.gethostname()}"
        for epochs, paused in ((1, False), (3, True)):  # refused before its recipe is compared
            if paused:
                os.kill(holder.pid, signal.SIGSTOP)  # a paused run keeps its folder
            with refuses(TrainingError, names=["--out"]) as e:
                train(tiny_recipe(epochs=epochs), out=out, data=tiny_mnist)
            assert f"is in use by {holds}" in str(e.value)
        assert before == _contents(out)
    # a stale lock, whose process is gone, is taken over
    assert (out / LOCK).read_text() == holds
    assert train(tiny_recipe(epochs=1), out=out, data=tiny_mnist)["finished"]
    RunLock(out).acquire()  # given back at the end


def test_a_folder_without_a_checkpoint_is_used_again(tiny_mnist: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny_recipe(epochs=1), out=out, data=tiny_mnist, stop_after=1)
    shutil.rmtree(out / "checkpoints")
    (out / "metrics.jsonl").unlink(missing_ok=True)
    assert train(tiny_recipe(epochs=1, batch_size=16), out=out, data=tiny_mnist)["finished"]
    assert len(read_sessions(out)) == 1, "of the run that was made"


@pytest.mark.parametrize("existed", [True, False])
def test_a_start_that_fails_leaves_nothing(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    out = tmp_path / "runs" / "run"
    if existed:
        out.mkdir(parents=True)
        (out / "notes.txt").write_text("mine")

    def fails_in(module: Any, name: str) -> None:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="CUDA"):
            patch.setattr(module, name, Mock(side_effect=RuntimeError("CUDA out of memory")))
            train(tiny_recipe(epochs=1), out=out, data=tiny_mnist)

    for module, name in ((begin, "_note_session"), (train_module, "train_step")):
        fails_in(module, name)
        left = {path.name for path in out.iterdir()} - {LOCK} if existed else (tmp_path / "runs").exists()
        assert left == ({"notes.txt"} if existed else False)
    train(tiny_recipe(epochs=1), out=out, data=tiny_mnist, stop_after=1)
    fails_in(train_module, "train_step")  # a run that was begun is kept
    assert (out / "checkpoints" / "step-00000001").is_dir()


def test_given_settings_are_compared_before_derived_ones() -> None:
    old = {"early_stop": 20, "epochs": 60, "batch_size": 24, "schedule": {"warmup_epochs": 6.0}}
    new = {"early_stop": 14, "epochs": 40, "batch_size": 24, "schedule": {"warmup_epochs": 4.0}}
    assert first_difference(old, new) == ("epochs", 60, 40)
    assert first_difference(old, {**old, "early_stop": 14}) == ("early_stop", 20, 14)
    assert first_difference(old, old) == ("", None, None)


def test_copies_of_checkpoints_are_the_user_s(tmp_path: Path) -> None:
    contents = ({"model": {"w": torch.zeros(1)}}, {}, POSITION)
    copy = save_checkpoint(tmp_path, 48, *contents)
    copy = copy.rename(copy.with_name("step-00000048.bak"))
    for step in (48, 99_999_999, 100_000_000, 100_000_001):
        save_checkpoint(tmp_path, step, *contents)
    assert copy.is_dir() and [path.name for path in checkpoint_folders(tmp_path)] == [
        "step-100000000",
        "step-100000001",
    ]
    (tmp_path / "recipe.yaml").write_text("batch_size: 2\n")
    assert trained_images(tmp_path) == 200_000_002


def test_damaged_records_are_left_out_and_named(
    tiny_mnist: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    train(tiny_recipe(epochs=2), out=out, data=tiny_mnist, stop_after=4)
    sound = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").write_text('{"epoch": 1}\n{"epoch": 1, "step": "3"}\n' + sound)
    assert train(tiny_recipe(epochs=2), out=out, data=tiny_mnist)["finished"]
    assert "line 1 " in caplog.text and "line 2 " in caplog.text
    assert [record["epoch"] for record in read_records(out / "metrics.jsonl")] == [1, 2]


def test_a_lock_is_held_once_and_says_nothing_odd(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    first.acquire()
    (tmp_path / LOCK).write_text("\x1b]0;title\x07 process\n" + "x" * 5000)
    with pytest.raises(TrainingError) as e:
        second.acquire()
    assert str(e.value).isprintable() and len(str(e.value)) < 700
    first.close()
    second.acquire()
    second.close()
    with refuses(TrainingError, names=["write"]):
        RunLock(tmp_path / "absent").acquire()


def test_a_run_that_another_process_has_begun_since_is_refused(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found no folder; the other one has created it, and has ended, while this one built its network."""
    out, create = tmp_path / "run", begin.create_net
    train(tiny_recipe(), out=tmp_path / "other", data=tiny_mnist, stop_after=1)

    def slow(*args: Any) -> Any:
        shutil.copytree(tmp_path / "other", out)
        return create(*args)

    with monkeypatch.context() as patch:
        patch.setattr(begin, "create_net", slow)
        with refuses(TrainingError, names=["holds", "run"]):
            train(tiny_recipe(), out=out, data=tiny_mnist)
    assert train(tiny_recipe(), out=out, data=tiny_mnist)["finished"]


def test_keys_that_change_no_update_may_differ(tiny_mnist: Path, tmp_path: Path) -> None:
    train(tiny_recipe(), out=tmp_path / "run", data=tiny_mnist, stop_after=1)
    changes: dict[str, Any] = {"description": "in other words", "checkpoint_every": 2, "routing_images": 20}
    done = train(tiny_recipe(**changes), out=tmp_path / "run", data=tiny_mnist)
    whole = train(tiny_recipe(), out=tmp_path / "whole", data=tiny_mnist)
    assert done["finished"] and sha256_of(done["weights"]) == sha256_of(whole["weights"])
    assert len(read_sessions(tmp_path / "run")) == 2 and "sessions" not in metadata(done), "one machine"


@pytest.mark.parametrize("content", [b"", b"null", b"- a", b"data: a", b"{}", b"\xff\xfe", b"[", None])
@pytest.mark.parametrize("trace", ["checkpoints", "metrics.jsonl", "sessions.json"])
def test_a_run_without_its_recipe_is_not_continued(tmp_path: Path, content: bytes | None, trace: str) -> None:
    check_run(tiny_recipe(), tmp_path, resume=True)  # of an empty folder
    (tmp_path / trace).touch()
    if content is not None:
        (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(TrainingError, match=r"^[^\n]*recipe.yaml[^\n]*$"):
        check_run(tiny_recipe(), tmp_path, resume=True)


@pytest.mark.parametrize("history", [None, {}, {"epoch": []}, {"epoch": [None]}])
def test_a_finished_run_without_a_history_is_finished(
    tiny_mnist: Path, tmp_path: Path, history: dict[str, Any] | None
) -> None:
    done = train(tiny_recipe(), out=tmp_path / "run", data=tiny_mnist)
    path = done["weights"].with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"history": history}))
    again = train(tiny_recipe(), out=tmp_path / "run", data=tiny_mnist)
    assert again["finished"] and again["epoch"] == done["epoch"]


def test_a_run_may_go_on_in_another_precision_and_states_both(
    tiny_mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train(tiny_recipe(precision="bf16"), out=out, data=tiny_mnist, stop_after=1)
    stated = metadata(train(tiny_recipe(), out=out, data=tiny_mnist))
    assert [session["precision"] for session in read_sessions(out)] == ["bf16", "fp32"]
    assert stated["recipe"]["precision"] == "fp32"
    parts = [(part["from_update"], part["precision"]) for part in stated["sessions"]]
    assert parts == [(0, "bf16"), (1, "fp32")]
    assert stated["hardware"] == stated["sessions"][0]["hardware"], "one processor, named once"
    assert "resumed at update 1 in fp32, before in bf16" in capsys.readouterr().out


def _stated(folder: Path, sessions: list[dict[str, Any]]) -> dict[str, Any]:
    (folder / "sessions.json").write_text(json.dumps(sessions))
    return _machines(folder)


def test_images_that_changed_are_stated(tmp_path: Path) -> None:
    sessions: list[dict[str, Any]] = [
        {"from_update": update, "hardware": "one, 2 processes", "data": {"train": images}}
        for update, images in ((0, "a"), (3, "a"), (5, "b"), (7, "b"))
    ]
    del sessions[0]["data"]  # of an earlier version
    stated = _stated(tmp_path, sessions)
    assert stated["hardware"] == "one, 2 processes"
    found = [(part["from_update"], part.get("other_images")) for part in stated["sessions"]]
    assert found == [(0, None), (5, {"train": "b"})]


@pytest.mark.parametrize(
    ("key", "changed", "both"),
    [
        ("commit", {"commit": "b"}, [(0, "a"), (5, "b")]),
        ("torch", {"versions": {"torch": "2.1"}}, [(0, "2.0"), (5, "2.1")]),
    ],
)
def test_a_run_with_two_versions_of_the_software_states_both(
    tmp_path: Path, key: str, changed: dict[str, Any], both: list[tuple[int, str]]
) -> None:
    first = {"from_update": 0, "commit": "a", "hardware": "x", "versions": {"torch": "2.0"}}
    then, last = first | {"from_update": 3}, first | {"from_update": 5}
    assert _stated(tmp_path, [first, then, last]) == {}
    assert _stated(tmp_path, [first, last | changed, last]) == {}, "killed before a checkpoint"
    stated = _stated(tmp_path, [first, then, last | changed])
    assert [(part["from_update"], part[key]) for part in stated["sessions"]] == both
    assert stated["hardware"] == "x"


def test_other_images_under_the_same_path_are_named(tiny_mnist: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "run", tiny_mnist / "mnist" / "train-images-idx3-ubyte"
    train(tiny_recipe(epochs=1), out=out, data=tiny_mnist, stop_after=1)
    write_idx(file, 255 - read_idx(file).numpy())
    with refuses(TrainingError, names=["images", "trained"]):
        train(tiny_recipe(epochs=1), out=out, data=tiny_mnist)
    assert train(tiny_recipe(epochs=1), out=out, data=tiny_mnist, accept_data=True)["finished"]
    assert len(read_sessions(out)) == 2


@pytest.mark.parametrize("left", [80, 119])
def test_accepted_images_must_be_as_many(tiny_mnist: Path, tmp_path: Path, left: int) -> None:
    """Also where they make as many updates: validation and training images would mix."""
    out, folder = tmp_path / "run", tiny_mnist / "mnist"
    recipe = tiny_recipe(data={"name": f"idx:{folder}", "val_size": 20})
    train(recipe, out=out, stop_after=1)
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        write_idx(folder / name, read_idx(folder / name).numpy()[-left:])
    with refuses(TrainingError, names=["120", left, "images"]):
        train(recipe, out=out, accept_data=True)


def test_new_checkpoints_outlive_damaged_ones_of_later_updates(tmp_path: Path) -> None:
    empty: Any = ({"model": {"weight": torch.zeros(2)}}, {"optimizer": {}}, POSITION)
    for step in (10, 12):
        (save_checkpoint(tmp_path, step, *empty) / "optimizer.pt").write_bytes(b"damaged")
    assert latest_checkpoint(tmp_path)[0] is None
    for step in (0, 5, 7):
        save_checkpoint(tmp_path, step, *empty)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000005", "step-00000007"]
    found, skipped = latest_checkpoint(tmp_path)
    assert found is not None and found.state["step"] == 7 and not skipped


@pytest.mark.parametrize("sessions", ["", "[", "null", "5", "[5]", '[{"data": 5}]', "[{}]", '{"data": {}}'])
def test_sessions_that_cannot_be_read_hold_nothing_up(tmp_path: Path, sessions: str) -> None:
    (tmp_path / "sessions.json").write_text(sessions)
    check_data(tmp_path, {"train": "a"})


def _state(**changes: str) -> str:
    """The text of a state.json in which one value is another."""
    values = {"step": "6", "updates_per_epoch": "3", "seconds": "1.0", "sums": "[0.0, 0.0, 0.0]"}
    values |= {"images": '{"train": 120}', "files": "%s"} | changes
    return "{" + ", ".join(f'"{key}": {value}' for key, value in values.items()) + "}"


def _two(run: Path) -> Path:
    """Two checkpoints; the folder of the newer one."""
    for step in (3, 6):
        weights = {"model": {"w": torch.full((4,), float(step))}}
        folder = save_checkpoint(run, step, weights, {"lr": torch.ones(2)}, {"threads": 1, **POSITION})
    return folder


def _passed_over(run: Path) -> str:
    """What is said of the newer checkpoint, which is damaged: the older one is read."""
    checkpoint, (line,) = latest_checkpoint(run)
    assert checkpoint is not None and checkpoint.state["step"] == 3
    assert checkpoint.weights["model"]["w"].tolist() == [3.0] * 4 and "\n" not in line
    return line


@pytest.mark.parametrize(
    "state",
    ["[]", "null", "5", '""', "{}", "[" * 100_000]
    + [_state(files=files) for files in ("[]", "null", "{}")]
    + [_state(step=step) for step in ('"x"', "true", "-1", "1.5")]
    + [_state(seconds=seconds) for seconds in ("null", "true", "-1", "Infinity")]
    + [_state(sums=sums) for sums in ('"abc"', "[0, 0]", '[0, 0, "1"]')]
    + [_state(images=images) for images in ("[120]", '{"train": "120"}')],
)
def test_a_newest_state_of_another_shape_is_passed_over(tmp_path: Path, state: str) -> None:
    damaged = _two(tmp_path)
    files = json.dumps(json.loads((damaged / "state.json").read_text())["files"])
    (damaged / "state.json").write_text(state.replace("%s", files))
    assert_names(_passed_over(tmp_path), ["step-00000006"])


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    _two(tmp_path)
    (tmp_path / "checkpoints" / ".step-00000009.capszoo.1.tmp").mkdir()
    (tmp_path / ".metrics.jsonl.capszoo.1.tmp").write_text("")
    (tmp_path / ".notes.tmp").mkdir()  # a user's
    with closing(RunLock(tmp_path)) as lock:
        lock.acquire()
        open_run(tiny_recipe(), tmp_path, lock)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [LOCK, ".notes.tmp", "checkpoints", "recipe.yaml"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def _replace(checkpoint: Path, name: str, content: bytes) -> None:
    """Write another file of a checkpoint, and its hash."""
    (checkpoint / name).write_bytes(content)
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    state["files"][name] = hashlib.sha256(content).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
@pytest.mark.parametrize("damage", [b"", b"\x80\x05garbage", b"\xff" * 64, b"{}"])
def test_damage_with_a_matching_hash_is_passed_over(tmp_path: Path, name: str, damage: bytes) -> None:
    _replace(_two(tmp_path), name, damage)
    _passed_over(tmp_path)


def test_no_pickle_runs_from_a_checkpoint(tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    _replace(_two(tmp_path), "optimizer.pt", pickle.dumps(Canary()))
    _passed_over(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_file_system_that_syncs_no_folders_and_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents: Any = ({"model": {"weight": torch.zeros(2)}}, {"optimizer": {}}, POSITION)
    real = os.fsync

    def only_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    save_checkpoint(tmp_path, 3, *contents)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with refuses(NotWritable, names=["step-00000004"]):
        save_checkpoint(tmp_path, 4, *contents)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert latest_checkpoint(tmp_path)[0] is not None
