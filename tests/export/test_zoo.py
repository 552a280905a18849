"""Models of the zoo, at test size, through the gate: one per routing, and all of them in the slow sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from capszoo.export.to_onnx import export
from tests.models import zoo_cases as zoo

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

PER_ROUTING = ("capsnet_dynamic", "capsnet_em_norb_small", "encapnet6", "idpa_resnet")


def through_the_gate(name: str, precision: str, folder: Path) -> None:
    model = zoo.small(name)
    zoo.calibrate(model)
    report = export(model.eval(), folder / "model.onnx", precision=precision, gate="quick", batch=(1, 2, 3))
    assert report.passed and report.max_rel_diff <= report.tolerance
    if precision == "fp16":
        assert report.precision_map["weights"]["float16"] > report.precision_map["weights"].get("float32", 0)


@pytest.mark.parametrize("name", PER_ROUTING)
def test_float16_per_routing(name: str, tmp_path: Path) -> None:
    through_the_gate(name, "fp16", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", zoo.names())
def test_every_model(name: str, precision: str, tmp_path: Path) -> None:
    through_the_gate(name, precision, tmp_path)
