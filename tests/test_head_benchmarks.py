"""The benchmarks of heads and of fine-tuning: tables say no more than the results; the commands exist."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.main import get_command

from benchmarks import finetune, heads
from capszoo.models._heads import HEADS
from tests.support import packed


def test_without_results_the_pages_say_so() -> None:
    for text in (heads.cost_table({}), heads.backbones_table({})):
        assert "No figures yet" in text and "|" not in text


def test_fine_tuning_is_compared_seed_by_seed() -> None:
    def runs(*top1: float) -> list[dict[str, Any]]:
        return [
            {
                "metrics": {"test": {"top1": value}, "validation": {"top1": 50.0}},
                "num_params": 650209,
                "train_seconds": 3,
            }
            for value in top1
        ]

    text = finetune.line(finetune.ROWS[3], runs(80.0, 82.0, 84.0), runs(70.0, 71.0, 75.0))
    assert "| 650,209 | 82.0 ± 2.0 | 72.0 ± 2.6 | 10.0 ± 1.0 | 50.0 ± 0.0 | 3 |" in text


def test_runs_of_fine_tuning_are_commands_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option exists, and both sides have one recipe."""
    group: Any = get_command(__import__("capszoo.cli", fromlist=["app"]).app)
    made: list[list[str]] = []
    finished: dict[str, Any] = {}
    metadata = {
        "metrics": dict.fromkeys(("test", "validation"), {"top1": 1.0}),
        "num_params": 4,
        "train_seconds": 3,
    }

    def pretend(command: list[str], out: Path) -> None:
        made.append(command)
        group.commands[command[0]].make_context(command[0], list(command[1:]))
        (out / "backbone").mkdir(exist_ok=True)
        finished[command[command.index("--out") + 1]] = metadata

    monkeypatch.setattr(finetune, "capszoo", pretend)
    monkeypatch.setattr(
        finetune, "finished_metadata", lambda run: finished.get(str(run.relative_to(tmp_path)))
    )
    monkeypatch.setattr(finetune, "write_photos", lambda folder, *_: folder.mkdir())
    arguments = ["--out", str(tmp_path), "--only", "idpa --epochs", "--seeds", "1"]
    assert finetune.main(arguments) == 0
    assert [command[0] for command in made] == ["train", "publish", "finetune", "finetune"]
    tuned, scratch = made[2:]
    assert {*scratch} - {*tuned} == {"--from-scratch", f"{tuned[tuned.index('--out') + 1]}.scratch"}
    assert finetune.main(arguments) == 0 and len(made) == 4


def test_photos_are_drawn_class_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    images = packed(root, "cifar10")
    monkeypatch.setattr(finetune, "load_dataset", lambda *_: images)
    for seed in (0, 1):
        finetune.write_photos(tmp_path / str(seed), replace(finetune.ROWS[2], per_class=3), seed)
    names = [{path.name for path in (tmp_path / str(seed)).glob("train/*/*.png")} for seed in (0, 1)]
    assert [len(found) for found in names] == [15, 15] and names[0] != names[1]
    odd = [images.spec.label_names[kind] for kind in (1, 3, 5, 7, 9)]
    assert sorted(path.name for path in (tmp_path / "0" / "test").iterdir()) == sorted(odd)
    assert len(list((tmp_path / "0" / "test").glob("*/*.png"))) == int((images.labels % 2 == 1).sum())
    first = next((tmp_path / "0" / "train" / "cat").glob("*.png"))
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
