"""`scripts/queue_runs.py`: what it trains, in which order, and runs that go on from small files elsewhere."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from capszoo.errors import CapszooError
from capszoo.recipes.train import train
from capszoo.recipes.training.distributed import Stopped
from scripts import queue_runs
from scripts.queue_runs import QueueItem, main, pack, read_queue, unpack
from tests.support.recipes import staged_recipe


def test_the_queue_names_recipes_targets_and_twins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    items = read_queue()
    tags = [item.tag for item in items]
    assert len(set(tags)) == len(tags)
    assert all(item.at_least is not None and item.cost and item.profile for item in items)
    pooled = {tag for tag in tags if re.fullmatch(r"resnet\d+_routingpool\.[a-z0-9]+", tag)}
    assert {f"{tag}_avg" for tag in pooled} <= set(tags), "a twin is missing"
    assert [item.tier for item in items] == sorted(item.tier or 9 for item in items), "tier by tier"
    assert main(["list", "--out", str(tmp_path)]) == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "in zoo" in shown["cnn6.mnist.seed1"] and " 0/" in shown["capsnet_em.cifar10"]
    assert main(["list", "cnn6.nothing"]) == 1 and "cnn6.nothing" in capsys.readouterr().err


def test_a_run_goes_on_elsewhere_from_small_files(
    tiny_mnist: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = staged_recipe()
    name, state = recipe.name, tmp_path / "state"
    whole = train(recipe, out=tmp_path / "whole" / name, data=tiny_mnist)
    here, there = (tmp_path / folder / name for folder in ("here", "there"))
    train(recipe, out=here, data=tiny_mnist, stop_after=7)
    packed = pack(here, state, 5000)
    assert len(list(packed.iterdir())) > 3 and all(file.stat().st_size <= 5000 for file in packed.iterdir())

    def go_on(*_: Any) -> None:
        train(there / "recipe.yaml", out=there, data=tiny_mnist, stop_after=2)
        raise Stopped("Ctrl-C", signal.SIGINT)

    monkeypatch.setattr(queue_runs, "run_jobs", go_on)
    run = queue_runs.Run(QueueItem(name), 0, there, recipe.epochs, None, False)
    monkeypatch.setattr(queue_runs, "runs_of", lambda *_: [run])
    assert main(["train", "--state", str(state)]) == 130
    assert queue_runs.packed_position(packed) == (False, 9)
    with pytest.raises(CapszooError):
        pack(here, state)  # would replace a later state

    last = tmp_path / "last" / name
    unpack(packed, last)
    result = train(last / "recipe.yaml", out=last, data=tiny_mnist)
    expected, found = load_file(whole["weights"]), load_file(result["weights"])
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    unpack(pack(last, state), tmp_path / "copy")
    assert queue_runs.position(tmp_path / "copy")[0] and not (tmp_path / "copy" / "checkpoints").exists()

    (packed / "run.tar.000").write_bytes(b"damaged")
    with pytest.raises(CapszooError):
        unpack(packed, tmp_path / "other")
    assert not (tmp_path / "other").exists()
