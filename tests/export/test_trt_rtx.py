"""NVIDIA's TensorRT-RTX parses and builds every model of the zoo (``make test-trt-rtx`` brings and runs it).

It builds for compute capability 8.9 without a GPU. That it takes a graph is a check of the graph: nothing that it
builds is run here, and it is not TensorRT. Where ``CAPSZOO_RTX_RESULTS`` names a file, the result of every model at its
own size is noted there, failures too; docs/benchmarks.md's table is made from it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import capszoo
from capszoo.errors import UsageError
from capszoo.export import to_onnx, to_tensorrt
from capszoo.export.to_onnx import ExportError
from tests.support import zoo

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

pytestmark = [
    pytest.mark.rtx,
    pytest.mark.skipif(
        to_tensorrt.find_rtx() is None, reason="needs TensorRT-RTX: make test-trt-rtx brings and runs it"
    ),
]


def build(model: nn.Module, folder: Path, **options: Any) -> to_onnx.GateStep:
    """Export without the gate (other tests have it) and give the graph to the parser and builder."""
    job = to_onnx.prepare(model.eval(), check=False, runtime="gpu", **options)
    report = to_onnx.write(job, folder / "model.onnx")
    return to_tensorrt.rtx_step(folder / "model.onnx", report)


def note(name: str, precision: str, passed: bool, detail: str, seconds: float) -> None:
    """Add a result to the file that ``CAPSZOO_RTX_RESULTS`` names; test processes take turns."""
    file = os.environ.get("CAPSZOO_RTX_RESULTS")
    if not file:
        return
    import fcntl

    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = json.loads(path.read_text()) if path.is_file() else {}
        entry = {"passed": passed, "detail": detail, "seconds": round(seconds, 1)}
        results.setdefault(name, {})[precision] = entry
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        os.replace(temporary, path)
    finally:
        os.close(lock)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, precision) for name in zoo.PER_ROUTING for precision in ("fp32", "fp16")),
        *(("resnet20_routingcaps", "bf16"), ("idpa_cnn", "bf16")),
    ],
)
def test_one_per_routing(name: str, precision: str, tmp_path: Path) -> None:
    step = build(zoo.small(name), tmp_path, precision=precision)
    assert step.passed and "for SM89" in step.detail


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", zoo.names())
def test_every_model_at_its_own_size(name: str, precision: str, tmp_path: Path) -> None:
    start = time.perf_counter()
    try:
        step = build(capszoo.create_model(name), tmp_path, precision=precision)
    except ExportError as e:
        note(name, precision, False, e.message, time.perf_counter() - start)
        raise
    note(name, precision, bool(step.passed), step.detail, time.perf_counter() - start)
    assert step.passed


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.names())
def test_couplings_as_an_output(name: str, tmp_path: Path) -> None:
    model = zoo.small(name)
    if zoo.has_couplings(model):
        assert build(model, tmp_path, outputs=("scores", "couplings")).passed
    else:  # nothing to build: the refusal is what there is to see
        with pytest.raises(UsageError, match="has no (capsules|couplings)"):
            build(model, tmp_path, outputs=("scores", "couplings"))
