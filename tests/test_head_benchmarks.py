"""The benchmarks of heads and of transfer: tables say no more than the results, and the documented commands are run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.main import get_command

from benchmarks import heads, transfer
from capszoo.models._heads import HEADS
from capszoo.recipes.config import load_recipe

BACKBONE = {"test": 50.04, "epochs": 8, "hardware": "a machine", "torch": "2.9"}


def row(seed: int, pretrained: bool, top1: float, head: str = "idpa") -> dict[str, Any]:
    return {
        "head": head,
        "seed": seed,
        "pretrained": pretrained,
        "top1": top1,
        "n": 10000,
        "parameters": 650209,
    }


def test_without_results_the_pages_say_so() -> None:
    for text in (heads.cost_table({}), heads.backbones_table({}), transfer.section({})):
        assert "No figures yet" in text and "|" not in text


def test_transfer_is_compared_seed_by_seed() -> None:
    pairs = [(0, 80.0, 70.0), (1, 82.0, 71.0), (2, 84.0, 75.0)]
    rows = [row(seed, kind, top1) for seed, a, b in pairs for kind, top1 in ((True, a), (False, b))]
    rows.append(row(3, True, 10.0))  # no twin yet: it does not count
    text = transfer.section({"backbone": BACKBONE, "rows": rows})
    assert "| `idpa` | 650,209 | 82.0 ± 2.0 | 72.0 ± 2.6 | 10.0 ± 1.0 | 3 |" in text
    assert "50.0% on the test images of CIFAR-100 after 8 epochs" in text and "all 10,000 test images" in text
    assert "`avg`" not in text


def test_the_commands_of_transfer_are_taken_by_the_command_line() -> None:
    """Every option exists, and the recipe is a valid one."""
    group = get_command(__import__("capszoo.cli", fromlist=["app"]).app)
    commands = [
        shlex.split(line)[1:] for line in transfer.section({}).splitlines() if line.startswith("capszoo ")
    ]
    assert [command[0] for command in commands] == [
        "train",
        "publish",
        "finetune",
        "finetune",
        "eval",
        "eval",
    ]
    for name, *arguments in commands:
        group.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
    train = commands[0]
    sets = [train[k + 1] for k, word in enumerate(train) if word == "--set"]
    recipe = load_recipe("resnet20_avg.cifar10", [*sets, "epochs=8"], "comparison")
    assert (
        recipe.name == "resnet20_avg.cifar100"
        and recipe.data.name == "cifar100"
        and recipe.precision == "bf16"
    )
    tuned, scratch = (set(command) for command in commands[2:4])
    assert scratch - tuned == {"--from-scratch", "runs/idpa.0.scratch"}, "both sides have one recipe"


def test_a_finished_run_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    finished = {"metrics": {"validation": {"top1": 1.0}, "test": {"top1": 2.0}}, "recipe": {"epochs": 8}}
    finished |= {"train_seconds": 3, "hardware": "h", "versions": {"torch": "t"}, "num_params": 4}

    def pretend(command: list[str], out: Path, threads: int, capture: bool = False) -> str:
        made.append(command)
        if command[0] == "publish":
            (out / "backbone").mkdir()
        if len(made) == 5:
            raise SystemExit("stopped")
        return json.dumps({"top1": 60.0, "n": 10000})

    monkeypatch.setattr(transfer, "capszoo", pretend)
    monkeypatch.setattr(transfer, "metadata", lambda run: finished)
    monkeypatch.setattr(transfer, "write_photos", lambda folder, seed, count: folder.mkdir())
    arguments = ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "found.json"), "--seeds", "0"]
    with pytest.raises(SystemExit, match="stopped"):
        transfer.main([*arguments, "--heads", "idpa"])
    before = list(made)
    assert transfer.main([*arguments, "--heads", "idpa"]) == 0
    kinds = [command[0] for command in made[len(before) :]]
    assert kinds == ["finetune", "eval"], "the backbone and the first run are there; the second is done anew"
    assert "--from-scratch" in made[-2]
    assert len(json.loads((tmp_path / "found.json").read_text())["rows"]) == 2


def test_photos_are_drawn_class_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    from tests.support import packed

    images = packed(root, "cifar10")
    monkeypatch.setattr("capszoo.data.load_dataset", lambda *_: images)
    for seed in (0, 1):
        transfer.write_photos(tmp_path / str(seed), seed, 3)
    names = [{path.name for path in (tmp_path / str(seed)).glob("*/*.png")} for seed in (0, 1)]
    assert [len(found) for found in names] == [30, 30] and names[0] != names[1]
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == sorted(images.spec.label_names)
    assert sorted(images.spec.label_names) == list(images.spec.label_names), (
        "a folder keeps the labels' order"
    )
    first = next((tmp_path / "0" / "cat").glob("*.png"))
    pixels = images.images[int(first.stem)].permute(1, 2, 0).numpy()
    assert (pixels == Image.open(first)).all()


def test_cost_names_what_is_over_its_aim() -> None:
    rows = [
        {"routing": "em", "parameters": 5, "time_share": 0.26, "memory_share": 0.1, "mib": 7.0},
        {"routing": "avg", "parameters": 5, "memory_share": 0.31, "mib": 7.0},
    ]
    text = heads.cost_table({"cost": {"rows": [{"hardware": "h", "torch": "t", **row} for row in rows]}})
    assert "| `em` | 5 | 26.0 (over the aim) | 10.0 | 7 |" in text
    assert "| `avg` | 5 | not measured | 31.0 (over the aim) | 7 |" in text
    assert text.endswith("Measured with h, torch t.")


def test_rows_of_several_machines_are_told_apart() -> None:
    places = {"a": "x", "b": "y", "c": "x"}
    rows = [{"routing": k, "parameters": 5, "hardware": h, "torch": "t"} for k, h in places.items()]
    text = heads.cost_table({"cost": {"rows": rows}})
    assert text.endswith("Measured with x, torch t (`a`, `c`); y, torch t (`b`).")


def test_the_kept_costs_are_within_their_aims() -> None:
    rows = heads.stored()["cost"]["rows"]
    assert [row["routing"] for row in rows] == list(HEADS)
    assert all(row["memory_share"] <= heads.MEMORY_AIM for row in rows)
    assert all(row["time_share"] <= heads.TIME_AIM for row in rows)


def test_the_kept_files_agree_with_pytorch() -> None:
    rows = heads.stored()["backbones"]["rows"]
    assert [row["backbone"] for row in rows] == list(heads.BACKBONES)
    assert all(row["passed"] and row["max_rel_diff"] < 1e-3 for row in rows)


def test_new_figures_are_laid_over_kept_ones(tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    heads.keep(file, "cost", [{"routing": "em", "memory_share": 0.1}], "routing")
    heads.keep(file, "cost", [{"routing": "em", "time_share": 0.2}], "routing")
    (found,) = heads.stored(file)["cost"]["rows"]
    about = {key: found[key] for key in ("hardware", "torch", "timm")}
    assert found == {"routing": "em", "memory_share": 0.1, "time_share": 0.2, **about}
    file.write_text(file.read_text().replace(found["hardware"], "another machine"))
    heads.keep(file, "cost", [{"routing": "em", "time_share": 0.3}], "routing")
    assert heads.stored(file)["cost"]["rows"] == [{"routing": "em", "time_share": 0.3, **about}]
    heads.keep(file, "cost", [{"routing": "avg", "time_share": 0.1}], "routing", ("avg", "em"))
    assert [row["routing"] for row in heads.stored(file)["cost"]["rows"]] == ["avg", "em"]


def test_memory_of_a_head_is_measured_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([100.0, 130.0, 110.0])
    monkeypatch.setattr(heads, "_peak_in_subprocess", lambda routing, threads: next(peaks))
    assert heads.memory_in_subprocess("em", 1, 3) == 110.0
