"""`benchmarks/gpu.py` on a CPU: steps in processes of their own, resumed, bounded, reported honestly."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import capszoo
from tests.support import load_script


@pytest.fixture(scope="module")
def gpu(root: Path) -> ModuleType:
    return load_script(root / "benchmarks" / "gpu.py")


def test_an_item_that_fails_leaves_the_others_alone(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    def wrong() -> None:
        raise ValueError("no such shape")

    items = {"wrong": wrong, "broken": broken, "good": lambda: {"ms": 1.0}}
    monkeypatch.setitem(gpu.STEPS, "train", lambda _: items)
    settings = gpu.Settings(tmp_path, True)
    assert gpu.run_step("train", settings) == gpu.BROKEN
    assert set(gpu.read(tmp_path, "train")) == {"wrong", "broken"}, "what follows needs a new process"
    assert gpu.run_step("train", settings) == 0
    found = gpu.read(tmp_path, "train")
    assert found["good"] == {"ms": 1.0} and found["wrong"] == {"error": "ValueError: no such shape"}
    # a finished step is not repeated; --retry repeats what failed
    assert gpu.supervise("train", [], settings, 0) == "2 failed: wrong, broken"
    assert (
        gpu.main(["--out", str(tmp_path), "--dry-run", "--steps", "train", "--minutes", "0", "--retry"]) == 0
    )
    assert set(gpu.read(tmp_path, "train")) == {"good"}
    gpu.write(tmp_path / "card.json", "another card")
    with pytest.raises(SystemExit, match="another card"):
        gpu.main(["--out", str(tmp_path), "--dry-run"])


def test_the_check_finds_errors(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, case = torch.device("cpu"), gpu.TINY_CASES["em"]
    assert gpu.difference(case, torch.float32, cpu) < 1e-4
    real = gpu.gradients

    def wrong(form: Any, layer: Any, x: torch.Tensor, *seed: Any) -> list[torch.Tensor]:
        found = real(form, layer, x, *seed)
        if x.dtype == torch.float32:
            found[-1][0] = float("nan")  # a place that was never written
        return found

    monkeypatch.setattr(gpu, "gradients", wrong)
    assert gpu.difference(case, torch.float32, cpu) == float("inf")


def test_what_is_measured_exists(gpu: ModuleType, tmp_path: Path) -> None:
    full, tiny = gpu.CASES, gpu.TINY_CASES
    assert [type(case.build()) for case in full.values()] == [type(case.build()) for case in tiny.values()]
    known = {"resnet18_cifar", *capszoo.list_models()}
    for models in (gpu.MODELS, gpu.TINY_MODELS):
        assert {spec.partition(":")[0].partition("@")[0] for spec in models.values()} <= known
    names = gpu.train(gpu.Settings(tmp_path)).keys()
    assert {"IDPA, CUDA graphs", "IDPA, eager, without Triton", "EM, compiled"} <= names
    files = gpu.tests(gpu.Settings(tmp_path)).keys()
    assert "tests/layers/test_triton.py" in files and "tests/test_gpu_benchmark.py" not in files


@pytest.mark.slow
def test_the_whole_dry_run(root: Path, tmp_path: Path) -> None:
    """Every step on the CPU; only what is not installed may be left out, and nothing may fail."""
    command = [sys.executable, str(root / "benchmarks" / "gpu.py"), "--dry-run", "--out", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--minutes", "20"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "all is done" in done.stdout, done.stdout + done.stderr
    assert "failed" not in done.stdout, (tmp_path / "report.md").read_text()
    steps = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert all(one["passed"] for one in steps["check"].values())
    assert all("compiled reference, ms" in one for one in steps["layers"].values())
    assert all(one["images/s"] > 0 for one in (*steps["train"].values(), *steps["runs"].values()))
    if importlib.util.find_spec("onnxruntime"):
        assert steps["onnxruntime"]["IDPA"]["ms"] > 0
