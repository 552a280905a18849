"""One graph a routing in readers that are not ours: values compared, or for Core ML, which runs on a Mac, converted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from capszoo.export.compare import EagerRunner, OnnxRunner, compare_outputs
from capszoo.export.prepare import prepare
from capszoo.export.to_onnx import export
from tests.support import zoo

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.slow

Run = Callable[[np.ndarray], np.ndarray]


def of_environment(name: str) -> object:
    return pytest.importorskip(name, reason=f"needs {name}: make test-runtimes runs this in its environment")


def openvino(path: Path) -> Run:
    ov = of_environment("openvino")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = ov.Core().compile_model(ov.convert_model(path), "CPU", settings)  # type: ignore[attr-defined]
    return lambda images: compiled(images)[0]


def onnxsim(path: Path) -> Run:
    simplified, same = of_environment("onnxsim").simplify(onnx.load(path))  # type: ignore[attr-defined]
    assert same
    runner = OnnxRunner(simplified.SerializeToString(), threads=1)
    return lambda images: runner(images)[0]


def quantised(path: Path) -> Run:
    from onnxruntime.quantization import quantize_dynamic

    target = path.with_name("int8.onnx")
    quantize_dynamic(path, target)
    runner = OnnxRunner(str(target), threads=1)
    return lambda images: runner(images)[0]


def check(model: torch.nn.Module, run: Run, tolerance: float) -> None:
    """Equal to eager PyTorch at batches that no exporter saw."""
    eager = EagerRunner(model)
    for batch in (1, 2, 5):
        images = zoo.images(model, batch).numpy()
        found = compare_outputs(eager(images), [run(images)])
        assert found.passed(tolerance), f"batch {batch}: {found.relative:.1e} of the largest output"


@pytest.fixture(scope="module", params=zoo.PER_ROUTING)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.nn.Module]:
    torch.manual_seed(0)
    model = zoo.small(request.param)
    zoo.calibrate(model)
    path = tmp_path_factory.mktemp(request.param) / "model.onnx"
    export(model.eval(), path, batch=(1, 2, 5), gate="quick")
    return path, model


@pytest.mark.parametrize(
    ("reader", "tolerance"),
    [(openvino, 1e-4), (onnxsim, 1e-4), (quantised, 0.25)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_reader_gives_the_same_scores(
    reader: Callable[[Path], Run], tolerance: float, exported: tuple[Path, torch.nn.Module]
) -> None:
    path, model = exported
    check(model, reader(path), tolerance)


@pytest.mark.parametrize("name", zoo.PER_ROUTING)
def test_core_ml_converts(name: str) -> None:
    ct = of_environment("coremltools")
    program = prepare(zoo.small(name).eval(), batch=1).trace().run_decompositions({})
    for node in program.graph.nodes:  # an operator that coremltools 9 lacks, in the program of IDPA
        if node.target is torch.ops.aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    converted = ct.convert(program, convert_to="mlprogram", skip_model_load=True)  # type: ignore[attr-defined]
    assert len(converted.get_spec().description.output) == 1
