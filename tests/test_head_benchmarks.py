"""The benchmarks of heads and of fine-tuning: tables say no more than the results; the commands exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from benchmarks import finetune, heads
from capszoo.models._heads import HEADS


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


def test_the_kept_costs_are_within_their_aims() -> None:
    rows = heads.stored()["cost"]["rows"]
    assert [row["routing"] for row in rows] == list(HEADS)
    assert all(row["memory_share"] <= heads.MEMORY_AIM for row in rows)
    assert all(row["time_share"] <= heads.TIME_AIM for row in rows)


def test_the_kept_files_agree_with_pytorch() -> None:
    rows = heads.stored()["backbones"]["rows"]
    assert [row["backbone"] for row in rows] == list(heads.BACKBONES)
    assert all(row["passed"] and row["max_rel_diff"] < 1e-3 for row in rows)
