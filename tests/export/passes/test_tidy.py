"""A graph after the last pass: names, weights and batches as other readers of ONNX expect them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capszoo.export.compare import OnnxRunner
from capszoo.export.passes.tidy import allow_empty_batches, name_outputs
from capszoo.export.to_onnx import export
from tests.support.toys import ToyCaps

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

helper = onnx.helper


def graph_of(
    nodes: list, outputs: dict[str, list], weights: dict[str, np.ndarray], inner: dict[str, list]
) -> object:
    """A model with the input ``x`` ``[b, 6, 4]``."""
    values = [
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in group.items()]
        for group in ({"x": ["b", 6, 4]}, outputs, inner)
    ]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", values[0], values[1], tensors, value_info=values[2])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def test_outputs_have_the_names_asked_for() -> None:
    """Also where the graph uses a name inside, gives one tensor twice, or returns its input."""
    nodes = [helper.make_node("Relu", ["x"], ["scores"]), helper.make_node("Neg", ["scores"], ["y"])]
    proto = graph_of(nodes, {"y": ["b", 6, 4]}, {}, {})
    proto.graph.output.append(proto.graph.output[0])  # type: ignore[attr-defined]
    proto.graph.output.append(proto.graph.input[0])  # type: ignore[attr-defined]
    name_outputs(proto, ["scores", "poses", "images"])  # type: ignore[arg-type]
    onnx.checker.check_model(proto, full_check=True)
    assert [value.name for value in proto.graph.output] == ["scores", "poses", "images"]  # type: ignore[attr-defined]
    images = np.ones((2, 6, 4), np.float32)
    scores, poses, same = OnnxRunner(proto.SerializeToString())(images)  # type: ignore[attr-defined]
    assert (scores == -1).all() and np.array_equal(scores, poses) and np.array_equal(same, images)


def test_an_empty_batch_gives_no_rows() -> None:
    """Untouched, ONNX Runtime divides by zero in the product and gives [0, 6, 4] for the sum."""
    nodes = [
        helper.make_node("ReduceSum", ["x", "last"], ["sum"], keepdims=0),
        helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["turned", "weight"], ["product"]),
    ]
    weights = {"last": np.array([-1]), "weight": np.ones((6, 4, 5), np.float32)}
    proto = graph_of(nodes, {"sum": ["b", 6], "product": [6, "b", 5]}, weights, {"turned": [6, "b", 4]})
    allow_empty_batches(proto)  # type: ignore[arg-type]
    onnx.checker.check_model(proto, full_check=True)
    run = OnnxRunner(proto.SerializeToString())  # type: ignore[attr-defined]
    assert [output.shape for output in run(np.zeros((0, 6, 4), np.float32))] == [(0, 6), (6, 0, 5)]
    images = np.random.default_rng(0).standard_normal((3, 6, 4), dtype=np.float32)
    total, product = run(images)
    np.testing.assert_allclose(total, images.sum(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(product, images.swapaxes(0, 1) @ weights["weight"], rtol=1e-5)


class Squares(ToyCaps):
    """With a product of weights alone, larger than the exporter folds by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(100, 600))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x.flatten(1) @ (self.wide * self.wide.abs()))[:, :5]


def test_weights_are_folded_and_have_one_shape(tmp_path: Path) -> None:
    export(Squares(), tmp_path / "x.onnx", gate="quick")
    graph = onnx.load(tmp_path / "x.onnx").graph
    weights = {tensor.name for tensor in graph.initializer}
    assert not [node for node in graph.node if weights.issuperset(node.input)]
    assert not weights.intersection(value.name for value in graph.value_info)


class Layouts(ToyCaps):
    """With one weight in two layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(25, 4, 600))

    def forward(self, x: Tensor) -> Tensor:
        images = x.flatten(1)  # [b, 100]
        once = images @ self.wide.flatten(0, 1)
        again = images.unflatten(1, (25, 4)).transpose(0, 1) @ self.wide  # [25, b, 600]
        return super().forward(x) + once[:, :5] + again.sum(0)[:, :5]


def test_a_weight_in_two_layouts_is_stored_once(tmp_path: Path) -> None:
    model = Layouts()
    assert export(model, tmp_path / "x.onnx", gate="quick").passed
    stored = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert (tmp_path / "x.onnx").stat().st_size < 1.1 * stored + 20_000
