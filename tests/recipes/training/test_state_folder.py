"""A queue's runs as small files: stopped, carried to another folder, finished there with the same weights."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from capszoo.recipes.train import train
from capszoo.recipes.training import finish, state_folder
from capszoo.recipes.training.distributed import TrainingError
from capszoo.recipes.training.queue import queue_state, read_queue, train_queue
from capszoo.recipes.training.state_folder import load_states, save_states
from capszoo.recipes.weights import finished_metadata

from .test_multi_run import write_recipes
from .test_queue import write_queue

NAMES = ("idpa_cnn.one", "idpa_cnn.two")


@pytest.mark.slow
def test_a_queue_goes_on_elsewhere(tmp_path: Path, data: Path) -> None:
    """One run is stopped in its middle, one waits; both are finished from files, side by side, in another folder."""
    recipes = write_recipes(tmp_path, data, "one", "two", epochs=2)
    queue = write_queue(tmp_path, [{"tag": recipe} for recipe in recipes])
    whole = train(recipes[0], out=tmp_path / "whole", cpu=True)
    train(recipes[0], out=tmp_path / "here" / NAMES[0], cpu=True, stop_after=7)
    state = tmp_path / "state"
    assert not train_queue(tmp_path / "here", cpu=True, minutes=0, path=queue, state=state)
    assert [path.name for path in state.iterdir()] == [f"{NAMES[0]}.state"], "the other was not begun"
    manifest = json.loads((state / f"{NAMES[0]}.state" / "manifest.json").read_text())
    assert manifest["state"]["step"] == 7

    there = tmp_path / "there"
    assert train_queue(there, cpu=True, parallel=2, path=queue, state=state)
    assert sorted(path.name for path in state.iterdir()) == [f"{name}.finished" for name in NAMES]
    expected, found = load_file(whole["weights"]), load_file(there / NAMES[0] / f"{NAMES[0]}.safetensors")
    assert all(torch.equal(value, found[key]) for key, value in expected.items())

    third = tmp_path / "third"  # nothing is left to do there
    assert train_queue(third, cpu=True, path=queue, state=state)
    assert all(one.finished and one.epoch == 2 for one in queue_state(read_queue(queue), third))
    assert not list(third.glob("*.log"))


def test_large_weights_are_cut_and_damage_is_found(tmp_path: Path, data: Path) -> None:
    (recipe,) = write_recipes(tmp_path, data, "one")
    run, state = tmp_path / NAMES[0], tmp_path / "state"
    weights = train(recipe, out=run, cpu=True)["weights"]
    (folder,) = save_states([run, tmp_path / "nothing"], state, part_bytes=5000)
    parts = sorted(folder.glob("*.safetensors.*"))
    assert len(parts) > 2 and all(part.stat().st_size <= 5000 for part in folder.iterdir() if part in parts)
    copy = tmp_path / "copy" / NAMES[0]
    assert load_states([copy], state) == [copy]
    assert (copy / weights.name).read_bytes() == weights.read_bytes()
    assert load_states([copy], state) == [], "a finished run stays as it is"
    parts[1].write_bytes(parts[1].read_bytes()[:-1] + b"x")
    with pytest.raises(TrainingError, match="does not match its checksum"):
        load_states([tmp_path / "other" / NAMES[0]], state)
    assert not (tmp_path / "other").exists()


def test_a_run_killed_while_its_test_images_are_evaluated_is_not_finished(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe,) = write_recipes(tmp_path, data, "one")
    run, state = tmp_path / NAMES[0], tmp_path / "state"
    with monkeypatch.context() as patch:
        patch.setattr(finish, "evaluate", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out=run, cpu=True)
    assert (run / f"{NAMES[0]}.json").is_file() and finished_metadata(run) is None
    (folder,) = save_states([run], state)
    assert folder.name == f"{NAMES[0]}.state"
    copy = tmp_path / "copy" / NAMES[0]
    assert load_states([copy], state) == [copy]
    result = train(recipe, out=copy, cpu=True)
    assert result["finished"] and "test" in result
    metadata = finished_metadata(copy)
    assert metadata is not None and "evaluated" not in metadata and "test" in metadata["metrics"]


def test_a_state_that_was_being_replaced_is_not_lost(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two renames of a replacement, the former state is used, and is not deleted."""
    (recipe,) = write_recipes(tmp_path, data, "one")
    run, state = tmp_path / NAMES[0], tmp_path / "state"
    train(recipe, out=run, cpu=True, stop_after=1)
    (saved,) = save_states([run], state)
    replaced = saved.with_name(f".{saved.name}.old")
    saved.rename(replaced)
    copy = tmp_path / "copy" / NAMES[0]
    assert load_states([copy], state) == [copy] and saved.is_dir() and not replaced.exists()

    saved.rename(replaced)
    with monkeypatch.context() as patch:
        patch.setattr(state_folder, "export_state", Mock(side_effect=TrainingError("damaged")))
        with pytest.raises(TrainingError, match="damaged"):
            save_states([run], state)
    assert saved.is_dir()


def test_a_signal_lets_the_evaluation_end(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe,) = write_recipes(tmp_path, data, "one")
    evaluate = finish.evaluate

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(finish, "evaluate", interrupted)
    assert "test" in train(recipe, out=tmp_path / "run", cpu=True)


def test_a_damaged_run_does_not_keep_others_from_being_saved(tmp_path: Path, data: Path) -> None:
    (recipe,) = write_recipes(tmp_path, data, "one")
    runs = [tmp_path / "damaged", tmp_path / "sound"]
    for run in runs:
        train(recipe, out=run, cpu=True, stop_after=1)
    for file in runs[0].glob("checkpoints/*/optimizer.pt"):
        file.write_bytes(b"")
    (runs[0] / "checkpoints" / "step-old").mkdir()
    with pytest.raises(TrainingError, match="damaged"):
        save_states(runs, tmp_path / "state")
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["sound.state"]


def test_a_state_that_is_further_than_the_run_is_not_lost(tmp_path: Path, data: Path) -> None:
    (recipe,) = write_recipes(tmp_path, data, "one")
    run, state = tmp_path / NAMES[0], tmp_path / "state"
    train(recipe, out=run, cpu=True, stop_after=1)
    shutil.copytree(run, tmp_path / "old" / NAMES[0])
    train(recipe, out=run, cpu=True, stop_after=1)
    save_states([run], state)
    assert load_states([run], state) == []
    with pytest.raises(TrainingError, match="is at update 1, .* at 2: move one of them away"):
        load_states([tmp_path / "old" / NAMES[0]], state)
    next(state.glob("*.state/manifest.json")).write_text("{")
    with pytest.raises(TrainingError, match="is not the state of a run, or damaged"):
        load_states([tmp_path / "old" / NAMES[0]], state)


def test_a_finished_run_that_replaces_an_unfinished_one_is_finished(tmp_path: Path, data: Path) -> None:
    (recipe,) = write_recipes(tmp_path, data, "one")
    here, there, state = tmp_path / "here" / NAMES[0], tmp_path / "there" / NAMES[0], tmp_path / "state"
    train(recipe, out=there, cpu=True, stop_after=1)
    whole = train(recipe, out=here, cpu=True)
    save_states([here], state)
    other = tmp_path / "other" / NAMES[0]
    train(recipe, ["epochs=9"], out=other, cpu=True, stop_after=1)
    before = {file.name: file.read_bytes() for file in other.iterdir() if file.is_file()}
    with pytest.raises(TrainingError, match="other/.* holds a run with epochs=9, this recipe says"):
        load_states([other], state)
    assert {file.name: file.read_bytes() for file in other.iterdir() if file.is_file()} == before
    assert load_states([there], state) == [there]
    records = (there / "metrics.jsonl").read_bytes()
    result = train(recipe, out=there, cpu=True, stop_after=1)
    assert result["finished"] and result["step"] == whole["step"]
    assert (there / "metrics.jsonl").read_bytes() == records == (here / "metrics.jsonl").read_bytes()
