"""A run's folder: held by one process, never continued with another recipe or other images, read past damage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from capszoo._pretrained.files import sha256_of
from capszoo.data.readers import read_idx_pair
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
    closing_lock,
    first_difference,
    open_run,
    read_sessions,
)
from tests.support.errors import assert_names, refuses
from tests.support.formats import write_idx
from tests.support.recipes import tiny_recipe

POSITION = {"updates_per_epoch": 3, "seconds": 1.0, "sums": [0.0, 0.0, 0.0], "images": {"train": 120}}


def _holder(root: Path, out: Path) -> subprocess.Popen[str]:
    """A process that holds a folder until it is killed."""
    code = (
        "import sys, time; from pathlib import Path; from capszoo.recipes.training.run_folder import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(out)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


def test_a_second_run_in_the_same_folder_is_refused_in_one_line(
    root: Path, tiny_mnist: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(tiny_recipe(epochs=1), out=out, data=tiny_mnist, stop_after=1)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != LOCK}
    holder = _holder(root, out)
    try:
        for paused in (False, True):
            if paused:
                os.kill(holder.pid, signal.SIGSTOP)  # a paused run keeps its folder
            with pytest.raises(TrainingError) as e:
                train(tiny_recipe(epochs=1), out=out, data=tiny_mnist)
            text = str(e.value)
            assert f"is in use by process {holder.pid} on {socket.gethostname()}" in text and "\n" not in text
            assert "choose another --out" in text
            with refuses(TrainingError, names=["use"]):  # before its recipe is compared
                train(tiny_recipe(epochs=3), out=out, data=tiny_mnist)
        assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name != LOCK}
    finally:
        holder.kill()
        holder.wait()
    # a stale lock, whose process is gone, is taken over
    assert (out / LOCK).read_text() == f"process {holder.pid} on {socket.gethostname()}"
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

    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    for module, name in ((begin, "_note_session"), (train_module, "train_step")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail)
            with pytest.raises(RuntimeError, match="CUDA"):
                train(tiny_recipe(epochs=1), out=out, data=tiny_mnist)
        left = {path.name for path in out.iterdir()} - {LOCK} if existed else (tmp_path / "runs").exists()
        assert left == ({"notes.txt"} if existed else False)
    train(tiny_recipe(epochs=1), out=out, data=tiny_mnist, stop_after=1)
    with monkeypatch.context() as patch:  # a run that was begun is kept
        patch.setattr(train_module, "train_step", fail)
        with pytest.raises(RuntimeError, match="CUDA"):
            train(tiny_recipe(epochs=1), out=out, data=tiny_mnist)
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
    assert "\x1b" not in str(e.value) and "\n" not in str(e.value) and len(str(e.value)) < 700
    first.release()
    second.acquire()
    second.release()
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
    train(tiny_recipe(), out=tmp_path, data=tiny_mnist, stop_after=1)
    changes: dict[str, Any] = {"description": "in other words", "checkpoint_every": 2, "routing_images": 20}
    check_run(tiny_recipe(**changes), tmp_path, resume=True)
    done = train(tiny_recipe(**changes), out=tmp_path, data=tiny_mnist)
    whole = train(tiny_recipe(), out=tmp_path / "whole", data=tiny_mnist)
    assert done["finished"] and done["test"] == whole["test"]
    assert sha256_of(done["weights"]) == sha256_of(whole["weights"])


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"5", b"- a\n- b", b"text", b"{}", b"\xff\xfe", b"[", b"a: &a [*a]", None],
)
def test_a_run_without_its_recipe_is_not_continued(
    tiny_mnist: Path, tmp_path: Path, content: bytes | None
) -> None:
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    if content is not None:
        (out / "recipe.yaml").write_bytes(content)
    with pytest.raises(TrainingError) as e:
        train(tiny_recipe(), out=out, data=tiny_mnist)
    assert "recipe.yaml" in str(e.value) and "\n" not in str(e.value)
    left = (out / "recipe.yaml").read_bytes() if content is not None else None
    assert left == content, "nothing is written over"


def test_an_empty_folder_or_one_of_other_files_is_no_run(tmp_path: Path) -> None:
    check_run(tiny_recipe(), tmp_path, resume=True)
    (tmp_path / "notes.txt").write_text("x")
    check_run(tiny_recipe(), tmp_path, resume=True)
    for name in ("metrics.jsonl", "sessions.json"):
        (tmp_path / name).write_text("")
        with refuses(TrainingError, names=[name, "recipe.yaml"]):
            check_run(tiny_recipe(), tmp_path, resume=True)
        (tmp_path / name).unlink()


def test_a_run_may_go_on_in_another_precision_and_states_both(
    tiny_mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train(tiny_recipe(precision="bf16"), out=out, data=tiny_mnist, stop_after=1)
    done = train(tiny_recipe(), out=out, data=tiny_mnist)
    assert [session["precision"] for session in read_sessions(out)] == ["bf16", "fp32"]
    stated = json.loads(Path(done["weights"]).with_suffix(".json").read_text())
    assert stated["recipe"]["precision"] == "fp32"
    assert [(part["from_update"], part["precision"]) for part in stated["sessions"]] == [
        (0, "bf16"),
        (1, "fp32"),
    ]
    assert stated["hardware"] == stated["sessions"][0]["hardware"], "one processor, named once"
    assert "resumed at update 1 in fp32, before in bf16" in capsys.readouterr().out
    with refuses(TrainingError, names=["epochs=2", "3"]):
        check_run(tiny_recipe(epochs=3, precision="bf16"), out, resume=True)


def test_images_that_changed_are_stated(tmp_path: Path) -> None:
    sessions: list[dict[str, Any]] = [
        {"from_update": update, "hardware": "one, 2 processes", "data": {"train": images}}
        for update, images in ((0, "a"), (3, "a"), (5, "b"), (7, "b"))
    ]
    del sessions[0]["data"]  # of an earlier version
    (tmp_path / "sessions.json").write_text(json.dumps(sessions))
    stated = _machines(tmp_path)
    assert stated["hardware"] == "one, 2 processes"
    found = [(part["from_update"], part.get("other_images")) for part in stated["sessions"]]
    assert found == [(0, None), (5, {"train": "b"})]


def test_a_run_on_one_machine_states_no_sessions(tiny_mnist: Path, tmp_path: Path) -> None:
    train(tiny_recipe(), out=tmp_path, data=tiny_mnist, stop_after=1)
    done = train(tiny_recipe(), out=tmp_path, data=tiny_mnist)
    assert len(read_sessions(tmp_path)) == 2
    assert "sessions" not in json.loads(Path(done["weights"]).with_suffix(".json").read_text())


@pytest.mark.parametrize("key", ["commit", "torch"])
def test_a_run_with_two_versions_of_the_software_states_both(tmp_path: Path, key: str) -> None:
    sessions = [
        {"from_update": 0, "commit": "a", "hardware": "x", "versions": {"torch": "2.0"}},
        {"from_update": 3, "commit": "a", "hardware": "x", "versions": {"torch": "2.0"}},
        {"from_update": 5, "commit": "a", "hardware": "x", "versions": {"torch": "2.0"}},
    ]
    (tmp_path / "sessions.json").write_text(json.dumps(sessions))
    assert _machines(tmp_path) == {}
    if key == "commit":
        sessions[2]["commit"] = "b"
    else:
        sessions[2]["versions"] = {"torch": "2.1"}
    (tmp_path / "sessions.json").write_text(json.dumps(sessions))
    stated = _machines(tmp_path)
    assert [(part["from_update"], part[key]) for part in stated["sessions"]] == [
        (0, "a" if key == "commit" else "2.0"),
        (5, "b" if key == "commit" else "2.1"),
    ]
    assert stated["hardware"] == "x"

    lost = sessions[0] | {"from_update": 5, "commit": "c"}  # killed before a checkpoint
    (tmp_path / "sessions.json").write_text(json.dumps([sessions[0], lost, sessions[1] | {"from_update": 5}]))
    assert _machines(tmp_path) == {}


def test_other_images_under_the_same_path_are_named(tiny_mnist: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "run", tiny_mnist / "mnist"
    train(tiny_recipe(epochs=1), out=out, data=tiny_mnist, stop_after=1)
    pair = (folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte")
    images = read_idx_pair(pair)[0].squeeze(1).numpy()
    write_idx(pair[0], 255 - images)
    with refuses(TrainingError, names=["images", "trained"]):
        train(tiny_recipe(epochs=1), out=out, data=tiny_mnist)
    done = train(tiny_recipe(epochs=1), out=out, data=tiny_mnist, accept_data=True)
    assert done["finished"]
    assert len(json.loads((out / "sessions.json").read_text())) == 2


def _keep_images(folder: Path, kept: slice) -> None:
    """Leave some of the training images in a folder of idx files."""
    pair = (folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte")
    images, labels = read_idx_pair(pair)
    write_idx(pair[0], images.squeeze(1).numpy()[kept])
    write_idx(pair[1], labels.numpy().astype("uint8")[kept])


def test_accepted_images_must_make_as_many_updates(tiny_mnist: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "run", tiny_mnist / "mnist"
    recipe = tiny_recipe(data={"name": f"idx:{folder}", "val_size": 20})
    train(recipe, out=out, stop_after=1)
    _keep_images(folder, slice(80))
    with refuses(TrainingError, names=["120", "80", "images"]):
        train(recipe, out=out, accept_data=True)


def test_one_image_less_would_mix_validation_and_training(tiny_mnist: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "run", tiny_mnist / "mnist"
    recipe = tiny_recipe(data={"name": f"idx:{folder}", "val_size": 20})
    train(recipe, out=out, stop_after=1)
    _keep_images(folder, slice(1, None))  # as many updates an epoch
    with refuses(TrainingError, names=["120", "119", "images"]):
        train(recipe, out=out, accept_data=True)


def test_new_checkpoints_outlive_damaged_ones_of_later_updates(tmp_path: Path) -> None:
    empty: Any = ({"model": {"weight": torch.zeros(2)}}, {"optimizer": {}}, POSITION)
    for step in (10, 12):
        (save_checkpoint(tmp_path, step, *empty) / "optimizer.pt").write_bytes(b"damaged")
    assert latest_checkpoint(tmp_path)[0] is None
    for step in (0, 5, 7):
        save_checkpoint(tmp_path, step, *empty)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-00000005",
        "step-00000007",
    ]
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


@pytest.mark.parametrize(
    "state",
    ["[]", "null", "5", '""', "{}", "[" * 100_000]
    + [_state(files=files) for files in ("[]", "null", "{}")]
    + [_state(step=step) for step in ('"x"', "null", "true", "-1", "1.5", "[]")]
    + [_state(seconds=seconds) for seconds in ('"x"', "null", "true", "-1", "Infinity", "NaN")]
    + [_state(sums=sums) for sums in ('"abc"', "null", "[]", "[0, 0]", '[0, 0, "1"]')]
    + [_state(images=images) for images in ("[120]", '{"train": "120"}')],
)
def test_a_newest_state_of_another_shape_is_passed_over(tmp_path: Path, state: str) -> None:
    newest = _two(tmp_path)
    files = json.dumps(json.loads((newest / "state.json").read_text())["files"])
    (newest / "state.json").write_text(state.replace("%s", files))
    checkpoint, skipped = latest_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.state["step"] == 3
    assert checkpoint.weights["model"]["w"].tolist() == [3.0] * 4
    (line,) = skipped
    assert_names(line, ["step-00000006"])
    assert "\n" not in line


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    _two(tmp_path)
    (tmp_path / "checkpoints" / ".step-00000009.capszoo.1.tmp").mkdir()
    (tmp_path / ".metrics.jsonl.capszoo.1.tmp").write_text("")
    (tmp_path / ".notes.tmp").mkdir()  # a user's
    with closing_lock(tmp_path) as lock:
        lock.acquire()
        open_run(tiny_recipe(), tmp_path, lock)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [LOCK, ".notes.tmp", "checkpoints", "recipe.yaml"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
@pytest.mark.parametrize("damage", [b"", b"\x80\x05garbage", b"\xff" * 64, b"{}"])
def test_damage_with_a_matching_hash_is_passed_over(tmp_path: Path, name: str, damage: bytes) -> None:
    newest = _two(tmp_path)
    (newest / name).write_bytes(damage)
    state: dict[str, Any] = json.loads((newest / "state.json").read_text())
    state["files"][name] = hashlib.sha256(damage).hexdigest()
    (newest / "state.json").write_text(json.dumps(state))
    checkpoint, skipped = latest_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.state["step"] == 3 and len(skipped) == 1


def test_no_pickle_runs_from_a_checkpoint(tmp_path: Path) -> None:
    import pickle

    class Canary:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    newest = _two(tmp_path)
    content = pickle.dumps(Canary())
    (newest / "optimizer.pt").write_bytes(content)
    state = json.loads((newest / "state.json").read_text())
    state["files"]["optimizer.pt"] = hashlib.sha256(content).hexdigest()
    (newest / "state.json").write_text(json.dumps(state))
    checkpoint, _ = latest_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.state["step"] == 3 and not (tmp_path / "ran").exists()


def test_a_file_system_that_syncs_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def only_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    save_checkpoint(tmp_path, 3, {"model": {"weight": torch.zeros(2)}}, {"optimizer": {}}, POSITION)
    assert latest_checkpoint(tmp_path)[0] is not None
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with refuses(OSError, names=["Input/output"]):
        save_checkpoint(tmp_path, 4, {"model": {"weight": torch.zeros(2)}}, {"optimizer": {}}, POSITION)
