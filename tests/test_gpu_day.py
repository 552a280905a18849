"""`benchmarks/gpu_day.py` on a CPU: steps in processes of their own, gone on with, bounded, reported honestly."""

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

from tests.support import load_script


@pytest.fixture(scope="module")
def day(root: Path) -> ModuleType:
    return load_script(root / "benchmarks" / "gpu_day.py")


def call(root: Path, *arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "benchmarks" / "gpu_day.py"), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_a_step_runs_in_a_process_and_is_not_repeated(root: Path, tmp_path: Path) -> None:
    done = call(root, "--dry-run", "--out", str(tmp_path), "--steps", "machine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("machine: done (") and "all is done" in done.stdout
    first = (tmp_path / "machine.json").read_text()
    assert json.loads(first)["items"]["rates"]["macs"] > 0
    report = (tmp_path / "report.md").read_text()
    assert (
        report.startswith("# A dry run on the CPU") and "not measured" in report and "| reached" not in report
    )
    assert call(root, "--dry-run", "--out", str(tmp_path), "--steps", "machine").stdout.startswith(
        "machine: done before"
    )
    assert (tmp_path / "machine.json").read_text() == first
    other = call(root, "--dry-run", "--flops", "1e12", "--out", str(tmp_path))
    assert other.returncode == 1 and "holds results of other settings" in other.stderr


def settings(day: ModuleType, out: Path) -> Any:
    return day.Settings(out, True, 4.3e12, 790e12)


def test_an_item_that_fails_leaves_the_others_alone(
    day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def broken() -> None:
        calls.append("broken")
        raise RuntimeError("CUDA error: an illegal memory access")

    def wrong() -> None:
        raise ValueError("no such shape")

    items = {"wrong": wrong, "broken": broken, "good": lambda: {"ms": 1.0}}
    monkeypatch.setitem(day.STEPS, "train", lambda _: items)
    assert day.run_step("train", settings(day, tmp_path)) == day.BROKEN
    assert set(day.read(tmp_path, "train")) == {"wrong", "broken"}, "what follows needs a new process"
    assert day.run_step("train", settings(day, tmp_path)) == 0
    found = day.state(tmp_path, "train")
    assert found["finished"] and found["items"]["good"] == {"ms": 1.0} and calls == ["broken"]
    assert found["items"]["wrong"] == {"error": "ValueError: no such shape"}
    day.forget_failures(tmp_path)
    assert (
        day.read(tmp_path, "train") == {"good": {"ms": 1.0}} and not day.state(tmp_path, "train")["finished"]
    )


def test_failed_tests_are_named_beside_the_counts(day: ModuleType, tmp_path: Path) -> None:
    text = "import pytest\npytestmark = pytest.mark.gpu\ndef test_right(): pass\ndef test_wrong(): assert False\n"
    (tmp_path / "test_two.py").write_text(text)
    found = day.run_tests(tmp_path / "test_two.py")
    assert found["tests"] == 2 and found["failures"] == 1
    assert "failed: ['test_wrong']" in found["error"] and day.to_repeat(found)


def test_tests_of_several_types_are_items_of_their_own(day: ModuleType, tmp_path: Path) -> None:
    items = day.tests(day.Settings(tmp_path, False, 4.3e12, 790e12))
    triton = {name for name in items if "test_triton" in name}
    assert triton == {f"tests/layers/test_triton.py{part}" for part in day.DTYPES}


@pytest.mark.slow
def test_each_item_runs_the_tests_of_its_type(day: ModuleType, tmp_path: Path) -> None:
    text = (
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])\n"
        "def test_typed(dtype): pass\n"
        "def test_plain(): pass\n"
    )
    (tmp_path / "test_types.py").write_text(text)
    for names in day.DTYPES.values():
        found = day.run_tests(tmp_path / "test_types.py", names)
        assert found["tests"] == 1 and "error" not in found


def test_errors_that_break_the_device(day: ModuleType) -> None:
    for text in (
        "CUDA error: x",
        "Triton Error [CUDA]: an illegal memory access",
        "CUDNN_STATUS_EXECUTION_FAILED",
    ):
        assert day.is_broken(RuntimeError(text))
    assert not day.is_broken(ValueError("no such shape"))


def test_what_is_trained_compiled_is_measured_first(day: ModuleType, tmp_path: Path) -> None:
    real = day.Settings(tmp_path, False, 4.3e12, 790e12)
    names = list(day.train(real))
    assert names[: len(day.FIRST)] == [f"{name}, compiled" for name in day.FIRST]
    assert sorted(names) == sorted(f"{name}{kind}" for name in day.MODELS for kind in ("", *day.COMPILED))
    assert list(day.STEPS)[:4] == ["machine", "check", "layers", "train"] and set(day.LIMITS) == set(
        day.STEPS
    )


def test_what_hangs_or_dies_is_recorded(
    day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the step's process hangs at its first item, dies at its second, and makes its third."""
    stub = tmp_path / "stub.py"
    stub.write_text(f"""
import json, os, time
from pathlib import Path
path = Path({str(tmp_path / "train.json")!r})
now = json.loads(path.read_text()) if path.is_file() else {{"items": {{}}, "running": None, "finished": False}}
def write(running, finished=False):
    path.write_text(json.dumps({{**now, "running": running, "finished": finished}}))
if "a" not in now["items"]:
    write("a"); time.sleep(60)
if "b" not in now["items"]:
    write("b"); os.write(2, b"out of luck"); os._exit(11)
if "c" not in now["items"]:  # the step's limit comes in the middle of the second item of this process
    now["items"]["c"] = 1; write("d"); time.sleep(60)
now["items"]["d"] = 1
write(None, True)
""")
    monkeypatch.setattr(day, "__file__", str(stub))
    monkeypatch.setitem(day.LIMITS, "train", 2)
    assert day.supervise("train", [], settings(day, tmp_path), 60) == "2 failed: a, b"
    items = day.read(tmp_path, "train")
    assert items == {
        "a": {"error": "took more than 2 s"},
        "b": {"error": "its process exited with 11: out of luck"},
        "c": 1,
        "d": 1,
    }
    (tmp_path / "train.json").unlink()
    assert day.supervise("train", [], settings(day, tmp_path), 1) == "to be gone on with"
    assert day.read(tmp_path, "train") == {}, "cut off by the call's end, not by its own limit"


def test_a_layer_that_is_wrong_is_not_timed(day: ModuleType, tmp_path: Path) -> None:
    checks = {"dynamic, float32": {"case": "d", "error": 1.0, "tolerance": 0.1, "passed": False}}
    day.write(tmp_path / "check.json", {"items": checks, "running": None, "finished": True})
    items = day.layers(settings(day, tmp_path))
    assert items["dynamic"]() == {"left_out": "not timed: dynamic, float32 did not pass its check"}
    assert "did not pass" in items["em"]()["left_out"], "nor one that was not checked"


def test_retry_repeats_failed_and_wrong_items(day: ModuleType, tmp_path: Path) -> None:
    items = {
        "a": {"case": "a", "error": 1.0, "tolerance": 0.1, "passed": False},
        "b": {"case": "b", "error": 0.01, "tolerance": 0.1, "passed": True},
        "c": {"error": "no such shape"},
    }
    for step in ("check", "tests"):
        day.write(tmp_path / f"{step}.json", {"items": items, "running": None, "finished": True})
    day.forget_failures(tmp_path, ["check"])
    assert set(day.read(tmp_path, "check")) == {"b"} and not day.state(tmp_path, "check")["finished"]
    assert day.state(tmp_path, "tests") == {"items": items, "running": None, "finished": True}, "not chosen"


def test_each_file_of_gpu_tests_is_an_item(day: ModuleType, root: Path, tmp_path: Path) -> None:
    names = list(day.tests(settings(day, tmp_path)))
    assert "tests/layers/test_triton.py" in names and "tests/test_gpu_day.py" not in names


def test_a_finished_step_gains_new_items(
    day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        day.STEPS, "train", lambda _: {"old": lambda: {"ms": 1.0}, "new": lambda: {"ms": 2.0}}
    )
    old = {"items": {"old": {"ms": 3.0}}, "running": None, "finished": True}
    day.write(tmp_path / "train.json", old)
    day.reopen(settings(day, tmp_path), ["train"])
    assert not day.state(tmp_path, "train")["finished"]
    assert day.run_step("train", settings(day, tmp_path)) == 0
    assert day.read(tmp_path, "train") == {"old": {"ms": 3.0}, "new": {"ms": 2.0}}
    day.reopen(settings(day, tmp_path), ["train"])
    assert day.state(tmp_path, "train")["finished"]


def test_warming_compiles_and_measures_nothing(
    day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = settings(day, tmp_path)
    compiled: list[dict[str, Any]] = []
    original = torch.compile

    def compile_(module: Any, **options: Any) -> Any:
        compiled.append(options)
        return original(module, backend="eager")

    monkeypatch.setattr(torch, "compile", compile_)
    day.warm_item("idpa_classes", dry)
    assert [options["backend"] for options in compiled] == ["aot_eager"] * 2, "forward, and with backward"
    day.warm_item("capConv, compiled", dry)
    assert compiled[2]["mode"] is None
    day.warm_item("capConv, CUDA graphs", dry)
    assert compiled[3]["mode"] == "reduce-overhead" and list(tmp_path.iterdir()) == []


def test_a_report_compares_like_with_like(day: ModuleType, tmp_path: Path) -> None:
    step = {"model": "m", "batch": 128, "images_per_s": 1.0, "peak_mib": 7.0}
    names = [day.YARDSTICK, f"{day.YARDSTICK}, CUDA graphs", "IDPA, CUDA graphs"]
    items = {name: step | {"ms": ms} for name, ms in zip(names, (8.0, 2.0, 3.0), strict=True)}
    day.write(tmp_path / "train.json", {"items": items, "running": None, "finished": True})
    text = day.report(settings(day, tmp_path), {})
    assert "| IDPA, CUDA graphs | `m` | 1 | 1.50 | – |" in text, "graphs keep their memory"


def test_targets_by_hand(day: ModuleType, tmp_path: Path) -> None:
    row = {
        "fused_ms": 1.0,
        "reference_ms": 9.0,
        "compiled_ms": 1.2,
        "of_floor": 0.5,
        "fused_mib": 10.0,
        "reference_mib": 200.0,
    }
    for step, items in (
        ("layers", {"idpa_conv": [row, row]}),
        ("train", {"IDPA, compiled": {"ms": 2.0}, "IDPA, backbone alone, compiled": {"ms": 1.0}}),
    ):
        day.write(tmp_path / f"{step}.json", {"items": items, "running": None, "finished": True})
    reached = [one.reached for one in day.targets(tmp_path)]
    assert reached == [True, False, True, False, False, None]


@pytest.mark.slow
def test_the_whole_dry_run(root: Path, tmp_path: Path) -> None:
    """Every step on the CPU; only what is not installed may be left out, and nothing may fail."""
    done = call(root, "--dry-run", "--out", str(tmp_path), "--minutes", "20", timeout=1300)
    assert done.returncode == 0 and "all is done" in done.stdout, done.stdout + done.stderr
    assert "failed" not in done.stdout
    steps = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert len(steps["check"]) == 12 and all(one["passed"] for one in steps["check"].values())
    assert all(len(rows) == 2 for rows in steps["layers"].values())
    assert len(steps["train"]) == 11 and all(one["images_per_s"] > 0 for one in steps["train"].values())
    if importlib.util.find_spec("onnxruntime"):
        assert steps["onnxruntime"]["IDPA"]["ms"] > 0
