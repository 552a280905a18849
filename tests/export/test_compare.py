"""The one comparator."""

from __future__ import annotations

import numpy as np
import pytest

from capszoo.errors import CapszooError
from capszoo.export import compare
from capszoo.export.compare import HALF_PROBES, PROBES, OnnxRunner, compare_outputs, probe_input
from tests.support.errors import refuses


def test_figures_are_exact() -> None:
    reference = np.array([[1.0, -4.0], [2.0, 0.0]], dtype=np.float32)
    candidate = reference + np.array([[0.0, 0.5], [-0.25, 0.0]], dtype=np.float32)
    difference = compare_outputs([reference], [candidate], "p", ("a", "b"))
    assert difference.max_abs == 0.5 and difference.mean_abs == 0.75 / 4
    assert difference.relative == 0.5 / 4.0 and difference.batch == 2
    assert difference.passed(0.125) and not difference.passed(0.124)
    assert difference.top1_agreement == 1.0 and difference.finite
    assert (difference.reference, difference.candidate, difference.probe) == ("a", "b", "p")


def test_the_worst_output_counts() -> None:
    small, large = np.full((1, 2), 0.01, np.float32), np.full((1, 3), 100.0, np.float32)
    difference = compare_outputs([small, large], [small * 2, large + 0.5])
    assert difference.max_abs == pytest.approx(0.5) and difference.relative == pytest.approx(1.0)


def test_outputs_near_zero_are_compared_against_a_floor() -> None:
    zero = np.zeros((1, 2), np.float32)
    assert compare_outputs([zero], [zero + 1e-8]).passed(1e-4)
    assert not compare_outputs([zero], [zero + 1e-6]).passed(1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_never_pass(bad: float) -> None:
    good = np.ones((2, 2), np.float32)
    other = good.copy()
    other[0, 1] = bad
    for pair in ((good, other), (other, good), (other, other)):
        found = compare_outputs([pair[0]], [pair[1]])
        assert not found.passed(1e9) and found.top1_agreement == 0.0


def test_another_prediction_is_seen() -> None:
    reference = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    assert compare_outputs([reference], [reference[:, ::-1]]).top1_agreement == 0.0
    assert compare_outputs([reference], [reference[[0, 0]]]).top1_agreement == 0.5


def test_another_shape_is_an_error() -> None:
    with refuses(ValueError, names=["differ", "shape"]):
        compare_outputs([np.ones((1, 2))], [np.ones((1, 3))])
    with refuses(ValueError, names=["differ", "shape"]):
        compare_outputs([np.ones((1, 2))], [])


def test_probes() -> None:
    inputs = {probe: probe_input(probe, (2, 1, 4, 4), seed=3) for probe in PROBES}
    assert all(x.shape == (2, 1, 4, 4) and x.dtype == np.float32 for x in inputs.values())
    assert not inputs["zero"].any() and (inputs["constant"] == 0.5).all()
    assert np.array_equal(inputs["x100"], inputs["random"] * 100) and inputs["random"].std() > 0.5
    with refuses(ValueError, names=["unknown", "probe"]):
        probe_input("huge", (1,))
    pixels = {probe: probe_input(probe, (4, 3, 8, 8), dtype="uint8") for probe in PROBES}
    assert all(x.dtype == np.uint8 for x in pixels.values()) and not pixels["zero"].any()
    assert set(np.unique(pixels["x100"])) == {0, 255} and len(np.unique(pixels["random"])) > 200


def test_probes_of_half_precision_are_pixels_that_an_image_can_have() -> None:
    assert not set(HALF_PROBES) & {"x100"}
    span = ([-1.0, -2.0], [3.0, 4.0])
    extremes, brightest = (probe_input(probe, (2, 2, 4, 4), span=span) for probe in HALF_PROBES[3:])
    for channel in (0, 1):
        low, high = (ends[channel] for ends in span)
        assert set(np.unique(extremes[:, channel])) == {low, high} and (brightest[:, channel] == high).all()
    assert extremes.dtype == brightest.dtype == np.float32
    pixels = [probe_input(probe, (2, 2, 4, 4), dtype="uint8") for probe in HALF_PROBES[3:]]
    assert set(np.unique(pixels[0])) == {0, 255} and (pixels[1] == 255).all()


def test_a_provider_that_onnx_runtime_cannot_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime itself only warns, and computes on the CPU."""
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    helper = pytest.importorskip("onnx").helper
    value = [helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    with refuses(CapszooError, names=["CUDAExecutionProvider"]):
        OnnxRunner(model.SerializeToString(), provider="CUDAExecutionProvider")
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    with refuses(CapszooError, names=["CUDAExecutionProvider"]):
        OnnxRunner(model.SerializeToString(), provider="CUDAExecutionProvider")


def test_a_batch_with_room_has_all_probes() -> None:
    seen = []

    class Echo:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, images: np.ndarray) -> list[np.ndarray]:
            seen.append(images)
            return [images.reshape(len(images), -1)[:, :5]]

    n = len(compare.PROBES)
    compare.compare_probes(Echo("a"), Echo("b"), 2 * n, (1, 4, 4))
    for i in range(2 * n):
        probe = compare.probe_input(compare.PROBES[i % n], (2 * n, 1, 4, 4), 2 * n, "float32")
        assert np.array_equal(seen[0][i], probe[i])
