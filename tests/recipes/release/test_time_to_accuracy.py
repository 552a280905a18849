"""Time to accuracy from a history, by hand, and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capszoo.models._pretrained import WeightsInfo
from capszoo.recipes.config import load_recipe
from capszoo.recipes.release.paper_results import seeds_note
from capszoo.recipes.release.time_to_accuracy import draw_time_to_accuracy, time_table, time_to_accuracy


def info(**raw: Any) -> WeightsInfo:
    recipe = {"data": {"name": "cifar10", "val_size": 1000}, "batch_size": 100, "epochs": 4}
    history = {"epoch": [1, 2, 3, 4], "val_top1": [50.0, 73.0, 79.4, 80.0]}
    tree = {"recipe": recipe, "history": history, "train_seconds": 2400, "hardware": "a CPU", **raw}
    return WeightsInfo("idpa_cnn", "cifar10", "", 10, (3, 32, 32), (), (), raw=tree)


def test_by_hand() -> None:
    found = time_to_accuracy(info())
    assert [(one.epoch, one.images, one.minutes) for one in found] == [
        (2, 98_000, 20.0),
        (3, 147_000, 30.0),
        (3, 147_000, 30.0),
    ]
    timed = info(history={"epoch": [1, 2], "val_top1": [79.9, 80.0], "seconds": [90.0, 120.0]})
    assert [one.minutes for one in time_to_accuracy(timed)] == [1.5, 1.5, 1.5]
    assert time_to_accuracy(info(history={})) == []
    recipe = load_recipe("idpa_cnn.cifar10", ["init.weights=RUN"]).model_dump(mode="json")
    assert time_to_accuracy(info(recipe=recipe)) == [], "began with trained weights"
    assert time_to_accuracy(info(recipe=recipe | {"init": None}))


def test_table_and_picture(tmp_path: Path) -> None:
    lines = time_table([info(), info(history={})])
    assert len(lines) == 3 and "~20, 2, 0.10 M" in lines[2] and "a CPU" in lines[2]
    draw_time_to_accuracy(tmp_path / "times.svg", [info()])
    text = (tmp_path / "times.svg").read_text()
    assert "idpa_cnn.cifar10" in text and "time to accuracy, " in text


@pytest.mark.parametrize(
    ("seeds", "note"),
    [
        ({}, ""),
        ({"test": {"values": [90.0], "mean": 90.0}}, ""),
        ({"test": {"values": [90.0, 92.0], "mean": 91.0, "sd": 1.4142}}, "; 91.00 ± 1.41, n = 2 seeds"),
    ],
)
def test_seeds_note(seeds: Any, note: str) -> None:
    assert seeds_note(info(seeds=seeds)) == note
