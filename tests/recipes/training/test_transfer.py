"""A run's state as plain files: carried over, it ends with the same weights bit for bit; damaged files are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from capszoo.recipes.train import train
from capszoo.recipes.training.checkpoints import latest_checkpoint
from capszoo.recipes.training.distributed import TrainingError
from capszoo.recipes.training.transfer import _optimizer_tensors, export_state, import_state

from .test_stages import staged_recipe


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"optimizer": {"name": "adamw", "lr": 0.003}, "ema_decay": None}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_goes_on_elsewhere_bit_for_bit(tiny_mnist: Path, tmp_path: Path, changes: dict) -> None:
    recipe = staged_recipe(**changes)
    whole = train(recipe, out=tmp_path / "whole", data=tiny_mnist)
    train(recipe, out=tmp_path / "here", data=tiny_mnist, stop_after=4)
    manifest = export_state(tmp_path / "here", tmp_path / "state", part_bytes=4000)
    parts = list((tmp_path / "state").glob("state-*.safetensors"))
    assert len(parts) > 3 and all(part.stat().st_size < 20_000 for part in parts)
    assert json.loads(manifest.read_text())["state"]["step"] == 4
    there = import_state(tmp_path / "state", tmp_path / "there")
    result = train(there / "recipe.yaml", out=there, data=tiny_mnist)
    expected, found = load_file(whole["weights"]), load_file(result["weights"])
    assert all(torch.equal(value, found[key]) for key, value in expected.items())


def test_an_optimiser_whose_settings_hold_a_tensor(tiny_mnist: Path, tmp_path: Path) -> None:
    recipe = staged_recipe(optimizer={"name": "lamb", "lr": 0.003}, ema_decay=None)
    train(recipe, out=tmp_path / "run", data=tiny_mnist, stop_after=1)
    export_state(tmp_path / "run", tmp_path / "state")
    there = import_state(tmp_path / "state", tmp_path / "there")
    (before, _), (after, _) = latest_checkpoint(tmp_path / "run"), latest_checkpoint(there)
    assert before and after
    for one, other in zip(
        *(found.optimizer["optimizer"]["param_groups"] for found in (before, after)), strict=True
    ):
        assert isinstance(one["step"], torch.Tensor), "otherwise this test shows nothing"
        assert one.keys() == other.keys() and other["lr"] == one["lr"]
        assert torch.equal(other["step"], one["step"]) and other["step"].dtype == one["step"].dtype
    with pytest.raises(
        TrainingError, match="the optimizer's kind is a dtype, which an exported state cannot hold"
    ):
        _optimizer_tensors({"state": {}, "param_groups": [{"kind": torch.float32}]})


def test_what_cannot_be_imported_is_one_line(tiny_mnist: Path, tmp_path: Path) -> None:
    train(staged_recipe(), out=tmp_path / "run", data=tiny_mnist, stop_after=1)
    export_state(tmp_path / "run", tmp_path / "state")
    with pytest.raises(TrainingError, match="is not empty"):
        export_state(tmp_path / "run", tmp_path / "state")
    with pytest.raises(TrainingError, match="holds no checkpoint"):
        export_state(tmp_path / "nothing", tmp_path / "other")
    with pytest.raises(TrainingError, match="already holds a run"):
        import_state(tmp_path / "state", tmp_path / "run")

    def refused(damage: str, text: str) -> None:
        shutil.copytree(tmp_path / "state", tmp_path / damage)
        manifest = tmp_path / damage / "manifest.json"
        part = tmp_path / damage / "state-000.safetensors"
        if damage == "bits":
            part.write_bytes(part.read_bytes()[:-1] + b"x")
        elif damage == "missing":
            part.unlink()
        elif damage == "list":
            manifest.write_text("[]")
        elif damage == "outside":
            tree = json.loads(manifest.read_text())
            tree["files"] = {"../state/manifest.json": "0" * 64}
            manifest.write_text(json.dumps(tree))
        with pytest.raises(TrainingError, match=text) as error:
            import_state(tmp_path / damage, tmp_path / f"{damage}-run")
        assert "\n" not in str(error.value) and not (tmp_path / f"{damage}-run").exists()

    refused("bits", "does not match its checksum")
    refused("missing", "No such file")
    refused("list", "not the state of a run, or damaged")
    refused("outside", "is not a file name")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", -1),
        ("seconds", None),
        ("sums", [0.0]),
        ("step", True),
        ("images", [120]),
        ("images", {"train": "120"}),
    ],
)
def test_a_position_that_cannot_be_resumed_is_refused(
    tiny_mnist: Path, tmp_path: Path, key: str, value: object
) -> None:
    train(staged_recipe(), out=tmp_path / "run", data=tiny_mnist, stop_after=1)
    manifest = export_state(tmp_path / "run", tmp_path / "state")
    tree = json.loads(manifest.read_text())
    tree["state"][key] = value
    manifest.write_text(json.dumps(tree))
    with pytest.raises(TrainingError, match=f"the position of the run states the {key}"):
        import_state(tmp_path / "state", tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_an_import_that_is_killed_leaves_all_or_nothing(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(staged_recipe(), out=tmp_path / "run", data=tiny_mnist, stop_after=1)
    export_state(tmp_path / "run", tmp_path / "state")
    rename, moves = Path.rename, []

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            import_state(tmp_path / "state", tmp_path / "there")
    assert not (tmp_path / "there").exists() and not list(tmp_path.glob(".there.*"))

    def noted(self: Path, target: Path) -> Path:
        moves.append(Path(target).name)
        assert not (tmp_path / "there").exists(), "it appears as a whole"
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", noted)
    import_state(tmp_path / "state", tmp_path / "there")
    assert moves.count("there") == 1 and (tmp_path / "there" / "recipe.yaml").is_file()


def test_a_failed_transfer_leaves_nothing(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command works once the disk has room."""
    train(staged_recipe(), out=tmp_path / "run", data=tiny_mnist, stop_after=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(shutil, "copyfile", full)
        with pytest.raises(TrainingError, match="cannot write to .*state: No space left"):
            export_state(tmp_path / "run", tmp_path / "state")
    export_state(tmp_path / "run", tmp_path / "state")
    with monkeypatch.context() as context:
        context.setattr(shutil, "copyfile", full)
        with pytest.raises(TrainingError, match="cannot write to .*there: No space left"):
            import_state(tmp_path / "state", tmp_path / "there")
    import_state(tmp_path / "state", tmp_path / "there")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "data") == [
        "run",
        "state",
        "there",
    ]
