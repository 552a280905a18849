"""The GPU benchmark, as far as it runs without one: its counts, its check, its table and file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from capszoo import layers
from tests.support import load_script


@pytest.fixture(scope="module")
def bench(root: Path) -> ModuleType:
    return load_script(root / "benchmarks" / "gpu.py")


def test_counts_by_hand(bench: ModuleType) -> None:
    """Operations, multiply-adds that no tensor core takes, and megabytes moved, forward and with backward."""
    conv, _, dynamic = bench.cases()
    assert conv.numbers() == 128 * 49 * 288 * 32 * 16 and dynamic.numbers() == 512 * 1152 * 10 * 16
    stated = {
        conv: ((11.1, 1.8, 40), (33.3, 8.3, 114)),
        dynamic: ((2.3, 0.4, 12.6), (6.8, 1.7, 37)),
    }
    for case, counts in stated.items():
        weights = sum(p.numel() for p in case.build().parameters())
        for backward, (operations, core, moved) in zip((False, True), counts, strict=True):
            assert 2 * case.macs(backward) / 1e9 == pytest.approx(operations, abs=0.06)
            assert case.core_macs(backward) / 1e9 == pytest.approx(core, abs=0.06)
            assert case.moved(weights, backward) / 1e6 == pytest.approx(moved, rel=0.02)


def test_cases_are_shaped_as_counted(bench: ModuleType) -> None:
    for case in bench.cases():
        layer = case.build()
        with torch.no_grad():
            y = layer(torch.randn(1, *case.size))
        assert y.numel() == case.routings * case.parents * case.pose
        width = layer.weight.numel() // (case.children * case.parents)
        assert width == case.depth * (case.pose // getattr(layer, "rows", 1))


def test_each_case_has_a_tiny_one(bench: ModuleType) -> None:
    """Of the same routing; EM is checked here."""
    full, tiny = bench.all_cases(), bench.tiny_cases()
    assert [type(case.build()) for case in full.values()] == [type(case.build()) for case in tiny.values()]
    assert list(full) == list(tiny)
    for case in tiny.values():
        result = case.result(case.build(), case.input(case.batch, torch.device("cpu"), torch.float32))
        assert result.numel() == case.batch * case.routings * case.parents * case.pose
    assert bench.check(tiny["em"], torch.float32, 2, torch.device("cpu")) < 1e-4


@pytest.fixture
def small(bench: ModuleType) -> object:
    return bench.Case("small", lambda: layers.FCIDPA(6, 3, 4), (6, 4), 2, 1, 6, 3, 2, 4, 1)


def test_the_check_finds_errors(bench: ModuleType, small: object, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert bench.check(small, torch.float32, 2, cpu) < 1e-5
    real = bench.gradients

    def wrong(layer: torch.nn.Module, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
        found = real(layer, x, *more)
        if x.dtype == torch.float32:
            found[-1][0] = float("nan")  # a place that was never written
        return found

    monkeypatch.setattr(bench, "gradients", wrong)
    assert bench.check(small, torch.float32, 2, cpu) == float("inf")


def test_rows_table_and_file(bench: ModuleType, small: object, tmp_path: Path) -> None:
    rows = bench.measure(small, bench.Machine(1e12, 1e12), torch.device("cpu"), with_compile=False)
    assert [row.what for row in rows] == ["forward", "forward and backward"]
    result = bench.Result({"device": "none"}, layers=rows)
    result.training_steps_ms = {"backbone": 2.0, "idpa_resnet": 2.5, "idpa_resnet, compiled": 2.0}
    text = bench.table(result)
    assert "| small | forward |" in text and "| idpa_resnet | 2.50 | 1.25 |" in text
    assert "| idpa_resnet, compiled | 2.00 |  |" in text  # not against the backbone that was not compiled
    row = dataclasses.replace(rows[0], fused_ms=2.0, tensor_floor_ms=0.5, bytes_floor_ms=1.0)
    assert row.of_floor == 0.5
    result.write(tmp_path / "gpu.json")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["training_steps_ms"]["backbone"] == 2.0 and written["layers"][0]["of_floor"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["gpu.json"]


def test_without_a_gpu_it_says_so(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="^error: this needs a CUDA device, and [^\\n]*$"):
        bench.main()
