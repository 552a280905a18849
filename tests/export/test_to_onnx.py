"""The ONNX file is written only when it has been proved equal, and the gate sees what it must see."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

import capszoo
from capszoo._utils.files import NotWritable
from capszoo.errors import UsageError
from capszoo.export import options, to_onnx, unroll
from capszoo.export.compare import EagerRunner, OnnxRunner
from capszoo.export.to_onnx import ExportError, ExportReport, export, prepare
from capszoo.export.verify import graph_rules
from capszoo.export.verify.gate import Gate, _on_images, _probe_batches, verify_against_eager
from capszoo.export.verify.graph_rules import node_types
from capszoo.export.verify.images import RealImages, transformed
from capszoo.models import CapsuleOutput
from tests.support import packed
from tests.support.errors import assert_names, refuses
from tests.support.toys import ToyCaps

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "mnist_test_1000.npz"

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[ToyCaps, Path, ExportReport]:
    """One toy through the full gate, shared by the tests that only look at the result."""
    torch.manual_seed(0)
    model = ToyCaps(decoder=True)
    path = tmp_path_factory.mktemp("onnx") / "deep" / "toy.onnx"
    images = torch.rand(6, 1, 10, 10)
    return model, path, export(model, path, batch=(1, 4, 8), images=images)


def test_report(exported: tuple[ToyCaps, Path, ExportReport]) -> None:
    model, path, report = exported
    assert report.passed and report.opset == 20 and report.path == str(path)
    assert report.num_nodes == sum(report.node_types.values()) > 20
    assert report.max_rank == 4 and report.routing_iters == [3] and report.batch == (1, 4, 8)
    assert report.input_shape == ("batch", 1, 10, 10) and report.outputs == {"scores": ("batch", 5)}
    assert {found.probe for found in report.comparisons} == {"random", "zero", "constant", "x100", "images"}
    assert {(d.probe, d.batch) for d in report.comparisons} >= {("zero", 1), ("random", 2), ("x100", 8)}
    assert 0 <= report.max_rel_diff <= 1e-4 and report.max_abs_diff <= 1e-4
    assert report.file_bytes == path.stat().st_size
    assert [step.passed for step in report.gate][:5] == [True] * 5
    assert report.gate[5].name == "TensorRT-RTX parses and builds the graph" and len(report.gate) == 6
    assert report.to_dict()["passed"] is True and report.to_dict()["gate"][0]["name"] == "structure"
    assert "BatchNormalization" not in report.node_types
    assert model.training and model.decoder is not None


def test_file(exported: tuple[ToyCaps, Path, ExportReport]) -> None:
    model, path, _ = exported
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert {entry.domain: entry.version for entry in proto.opset_import} == {"": 20}
    content = path.read_bytes()
    for secret in (b"stack_trace", b"toys.py", b"torch.onnx", b"fx_node"):
        assert secret not in content
    assert not any("decoder" in tensor.name for tensor in proto.graph.initializer)
    assert [file.name for file in path.parent.iterdir()] == ["toy.onnx"]
    said = {entry.key: entry.value for entry in proto.metadata_props}
    assert said["model"] == "ToyCaps" and json.loads(said["labels"]) == list("abcde")
    assert said["precision"] == "fp32" and json.loads(said["routing_iters"]) == [3]
    spec = json.loads(said["preprocess"])
    assert (spec["mean"], spec["std"], spec["size"], spec["score_kind"]) == ([0.2], [0.5], [10, 10], "logits")
    x = torch.randn(7, 1, 10, 10)
    with torch.no_grad():
        expected = model.eval()(x)
    model.train()
    np.testing.assert_allclose(OnnxRunner(str(path))(x.numpy())[0], expected, atol=1e-5)


def test_capsule_outputs_and_iterations(tmp_path: Path) -> None:
    model = ToyCaps(3)
    path = tmp_path / "all.onnx"
    report = export(
        model, path, gate="quick", routing_iters=2, outputs=("scores", "poses", "couplings"), opset=18
    )
    assert report.opset == 18 and report.routing_iters == [2]
    assert report.outputs == {
        "scores": ("batch", 5),
        "poses": ("batch", 5, 3),
        "couplings": ("batch", 5, 12),
    }
    other = ToyCaps(2)
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 1, 10, 10)
    with torch.no_grad():
        expected = other.eval().forward_capsules(x)
    scores, poses, couplings = OnnxRunner(str(path))(x.numpy())
    np.testing.assert_allclose(scores, expected.scores, atol=1e-5)
    np.testing.assert_allclose(poses, expected.poses, atol=1e-5)
    np.testing.assert_allclose(couplings, expected.couplings[0], atol=1e-5)
    assert "activations" not in report.outputs
    not_run = {step.name for step in report.gate if step.passed is None}
    assert not_run >= {"top-1 on real images", "plain and optimised graph agree"}


def test_one_tensor_under_two_names_is_two_outputs(tmp_path: Path) -> None:
    class Same(ToyCaps):
        def forward_capsules(self, x: Tensor) -> CapsuleOutput:
            found = super().forward_capsules(x)
            return found._replace(activations=found.scores)

    path = tmp_path / "both.onnx"
    report = export(Same(), path, gate="quick", outputs=("activations", "scores", "poses"))
    assert list(report.outputs) == ["activations", "scores", "poses"]
    activations, scores, _ = OnnxRunner(str(path))(np.ones((2, 1, 10, 10), np.float32))
    assert np.array_equal(activations, scores)


def test_an_empty_batch_that_crashes_onnx_runtime_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = dict(batch=(1, 2, 5))
    report = export(ToyCaps(1), tmp_path / "good.onnx", **options)
    assert [step.detail for step in report.gate if "empty batch" in step.name] == ["[[0, 5]]"]
    monkeypatch.setattr(to_onnx, "allow_empty_batches", lambda proto: None)
    with refuses(ExportError, names=["empty", "batch"]):
        export(ToyCaps(1), tmp_path / "bad.onnx", **options)
    assert not (tmp_path / "bad.onnx").exists()


def test_fixed_batch_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.onnx").symlink_to(tmp_path / "target.onnx")
    report = export(ToyCaps(1), tmp_path / "link.onnx", batch=3)
    assert (tmp_path / "link.onnx").is_symlink() and (tmp_path / "target.onnx").is_file()
    assert report.input_shape == (3, 1, 10, 10) and report.batch == (3, 3, 3)
    assert {d.batch for d in report.comparisons} == {3}


def test_without_check_nothing_is_claimed(tmp_path: Path) -> None:
    model = ToyCaps(1).train()
    model.stem[1].eval()  # a frozen norm: each module's mode comes back
    report = export(model, tmp_path / "unchecked.onnx", check=False, optimize=False)
    assert model.training and model.class_caps.training and not model.stem[1].training
    assert not report.passed and report.comparisons == [] and np.isnan(report.max_abs_diff)
    assert (tmp_path / "unchecked.onnx").is_file()


# -- precision, uint8 input, outputs -----------------------------------------------------------------------------------


def digits(count: int) -> tuple[Tensor, Tensor]:
    """Real test images of MNIST: normalised, and as uint8."""
    with np.load(FIXTURE) as arrays:
        pixels = torch.from_numpy(arrays["images"][:count]).unsqueeze(1)
    return (pixels.float() / 255 - 0.1307) / 0.3081, pixels


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "resnet20_routingcaps.mnist",
        # in float16 the two overflow at 100 times the values that an image can have
        "capsnet_dynamic.mnist",  # a minute on a CPU
        "capsnet_dynamic_cifar.cifar10",
        "idpa_cnn.mnist",
    ],
)
def test_float16_of_bundled_weights_keeps_its_answers(name: str, root: Path, tmp_path: Path) -> None:
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    model = capszoo.create_model(name, pretrained=True)
    pixels = packed(root, name.rpartition(".")[2]).images[:100]
    images = transformed(model, [to_pil_image(image) for image in pixels])
    report = export(
        name, tmp_path / "half.onnx", precision="fp16", gate="quick", images=images, batch=(1, 8, 64)
    )
    steps = {step.name: step for step in report.gate}
    assert report.passed and report.tolerance == 2e-2 and report.precision == "fp16"
    assert steps["fp16 in PyTorch"].passed and "100 images" in steps["fp16 in PyTorch"].detail
    assert steps["top-1 on real images"].passed
    on_images = [d for d in report.half_comparisons if d.probe == "images"]
    assert sum(d.batch for d in on_images) == 100
    assert sum(d.batch * d.top1_agreement for d in on_images) / 100 >= 0.995
    # it is really half: all convolutions and nearly all numbers, while softmax stays float32
    operators, weights = report.precision_map["operators"], report.precision_map["weights"]
    assert set(operators["Conv"]) == {"float16"} and set(operators["Softmax"]) == {"float32"}
    assert weights["float16"] > 100 * weights.get("float32", 0)
    full = export(name, tmp_path / "full.onnx", check=False)
    assert report.file_bytes < 0.6 * full.file_bytes
    # the float32 file keeps its answers through a converter that knows none of its rules
    converted = float16.convert_float_to_float16(onnx.load(tmp_path / "full.onnx"), keep_io_types=True)
    answers = [
        OnnxRunner(graph)(images.numpy())[0].argmax(1)
        for graph in (converted.SerializeToString(), str(tmp_path / "full.onnx"))
    ]
    assert (answers[0] == answers[1]).mean() >= 0.99
    proto = onnx.load(tmp_path / "half.onnx")
    assert {v.type.tensor_type.elem_type for v in (*proto.graph.input, *proto.graph.output)} == {1}  # float32


@pytest.mark.slow
def test_bfloat16(tmp_path: Path) -> None:
    report = export(ToyCaps(), tmp_path / "bf16.onnx", precision="bf16", gate="quick", batch=(1, 2, 4))
    assert report.passed and report.opset == 22
    assert set(report.precision_map["operators"]["Conv"]) == {"bfloat16"}
    assert "run as float32" in next(s.detail for s in report.gate if s.name == "parity with eager")
    assert [s.passed for s in report.gate if s.name == "bf16 in PyTorch"] == [True]
    with refuses(UsageError, names=["20", "22"]):  # its convolution takes bfloat16 from 22 on
        export(ToyCaps(), tmp_path / "old.onnx", precision="bf16", gate="quick", opset=20)
    assert not (tmp_path / "old.onnx").exists()


def test_half_precision_is_tried_at_the_ends_of_the_pixels(tmp_path: Path) -> None:
    class Bright(ToyCaps):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (x.mean((1, 2, 3)) * 50000).unsqueeze(1) / 50000

    prepared = prepare(Bright(), precision="fp16", batch=(1, 2, 5))
    assert prepared.span == ([pytest.approx(-0.4)], [pytest.approx(1.6)])
    with refuses(ExportError, names=["brightest", "input"]) as caught:  # 1.6 * 50000 exceeds 65504
        export(Bright(), tmp_path / "bad.onnx", precision="fp16", batch=(1, 2, 5))
    assert "bf16" in caught.value.remedy
    # float16 has digits too few at such sums, bfloat16 even fewer: its range is not the reason here
    report = export(Bright(), tmp_path / "quick.onnx", precision="fp16", gate="quick", batch=(1, 2, 5))
    assert {found.probe for found in report.half_comparisons} == {"random", "zero"}


def test_uint8_input_of_a_model_without_parameters() -> None:
    class Mean(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3))

    graph = unroll.Served(Mean(), mean=(0.5,), std=(0.25,))
    assert graph(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).item() == pytest.approx(2.0)
    mean, std = (0.1, 0.4, 0.7), (0.2, 0.3, 0.5)
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    colour = unroll.Served(torch.nn.Identity(), mean=mean, std=std)(images)
    for channel in range(3):
        expected = (images[:, channel] / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(colour[:, channel], expected)


def test_the_top_1_is_that_of_the_scores_wherever_they_are(tmp_path: Path) -> None:
    images = torch.rand(4, 1, 10, 10)

    class Turned:
        """The model with two scores exchanged, whose difference is within the limit."""

        name = "turned"

        def __init__(self, runner: EagerRunner) -> None:
            self.runner = runner

        def __call__(self, x: np.ndarray) -> list[np.ndarray]:
            couplings, scores = self.runner(x)
            best = scores.argsort(1)[:, -2:]
            np.put_along_axis(scores, best, np.take_along_axis(scores, best[:, ::-1], 1), 1)
            return [couplings, scores]

    job = to_onnx.prepare(ToyCaps(), outputs=("couplings", "scores"), images=images, tolerance=1.0)
    eager = EagerRunner(job.original)
    assert "4 images, top-1 equal on all" in verify_against_eager(job, eager)[0]
    with refuses(ExportError, names=["top-1", "0.00%"]):
        verify_against_eager(job, Turned(eager))
    others = export(ToyCaps(), tmp_path / "x.onnx", outputs=("couplings",), images=images, gate="quick")
    assert "top-1 not compared" in next(s.detail for s in others.gate if s.name == "top-1 on real images")
    assert all(d.top1_agreement is None for d in others.comparisons)


def test_a_quick_gate_tests_two_batches() -> None:
    profiles = (1, 1, 2), (1, 8, 32), (4, 4, 4), (4, 8, 32)
    assert [_probe_batches(batch, full=False) for batch in profiles] == [[1, 2], [1, 3], [4], [4, 5]]


def test_too_many_other_answers_are_refused() -> None:
    job = to_onnx.prepare(ToyCaps(), batch=(1, 4, 8))
    images = torch.rand(200, 1, 10, 10)
    # scores within the limit, but the order of the two best is turned on the first images
    flat = np.zeros((8, 5), np.float32)
    turned = flat.copy()
    flat[:, 0], turned[:, 1] = 1e-8, 1e-8

    class Fixed:
        name = "fixed"

        def __init__(self, values: np.ndarray, bad: int) -> None:
            self.values, self.left = values, bad

        def __call__(self, x: np.ndarray) -> list[np.ndarray]:
            wrong = min(self.left, len(x))
            self.left -= wrong
            return [np.concatenate([self.values[:wrong], flat[wrong : len(x)]])]

    real = RealImages(images, None, "given")
    job.precision = "fp16"
    assert "99.50%" in _on_images(job, Fixed(flat, 0), Fixed(turned, 1), real, [], {})
    with refuses(ExportError, names=["top-1", "99.00%"]):
        _on_images(job, Fixed(flat, 0), Fixed(turned, 2), real, [], {})
    job.precision = "fp32"
    with refuses(ExportError, names=["top-1", "99.50%", "100.0%"]):
        _on_images(job, Fixed(flat, 0), Fixed(turned, 1), real, [], {})


def test_uint8_input(tmp_path: Path) -> None:
    path = tmp_path / "pixels.onnx"
    normalised, pixels = digits(20)
    model = capszoo.create_model("resnet20_routingcaps.mnist", pretrained=True).eval()
    report = export(model, path, uint8_input=True, gate="quick", images=pixels, batch=(1, 2, 20))
    assert report.passed and report.input_dtype == "uint8"
    with torch.no_grad():
        expected = model(normalised)
    np.testing.assert_allclose(OnnxRunner(str(path))(pixels.numpy())[0], expected, atol=2e-5)
    with refuses(UsageError, names=["uint8"]):
        export(model, path, uint8_input=True, gate="quick", images=normalised)


def test_real_images_are_the_graph_s_input(tmp_path: Path) -> None:
    model = capszoo.create_model("resnet20_routingcaps.mnist", pretrained=True).eval()
    for shape in ((4, 1, 32, 32), (4, 3, 28, 28), (1, 28, 28), (0, 1, 28, 28)):
        with refuses(UsageError, names=["1", "28", "graph"]):
            export(model, tmp_path / "net.onnx", images=torch.rand(shape))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_pooled_map_of_few_pixels(channels_last: bool, tmp_path: Path) -> None:
    """A convolution that becomes a product, and one in channels_last: neither may change the strides of the graph."""
    model = nn.Sequential(
        nn.Conv2d(3, 256, 3, padding=1),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).eval()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    report = export(model, tmp_path / "x.onnx", input_size=(3, 2, 2), gate="quick", batch=(1, 2, np.int64(4)))
    assert report.passed
    if channels_last:
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)  # the user's own stays


def test_an_impossible_place_is_refused_before_tracing(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    os.mkfifo(tmp_path / "pipe.onnx")
    said: list[str] = []
    with pytest.raises(NotWritable, match=r"plain.x\.onnx"):
        export(ToyCaps(1), tmp_path / "plain" / "x.onnx", progress=said.append)
    with refuses(UsageError, names=["regular", "file"]):
        export(ToyCaps(1), tmp_path / "pipe.onnx", progress=said.append)
    assert said in ([], ["preparing"]) and sorted(os.listdir(tmp_path)) == ["pipe.onnx", "plain"]


# -- what must fail, and leave nothing ----------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A flat function of the image as a classifier."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.in_chans, self.img_size = 1, (4, 4)
        self.linear = nn.Linear(16, 5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x.flatten(1)) - self.linear.bias)


def _squares(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    return x / reduce(x * x, -1, keepdim=True).float().sqrt()


HALF = {"precision": "fp16"}


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda x: {"logits": x}, {}, ("forward", "returns")),
        (lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-9), {}, "NaN"),
        (lambda x: x if x.sum() > 0 else -x, {}, "trace"),
        (lambda x: x.reshape(int(x.shape[0]), 5), {}, ("batch", "number")),
        (lambda x: (x.reshape(-1, *[1] * 5, 5) * 2).softmax(-1).flatten(1), {}, ("7", "6", "dimensions")),
        (lambda x: x.double().exp().float(), {}, "float64"),
        (lambda x: x - x.logsumexp(-1, keepdim=True), {}, "ReduceLogSumExp"),
        (lambda x: torch.einsum("bn,bn->bn", x, x), {}, ("operator", "Einsum")),
        (lambda x: x.sum(), {}, ("scalar", "without")),
        (
            lambda x: torch.linalg.vector_norm(x, dim=-1),
            HALF,
            ("float16", "float32"),
        ),  # overflows from 256 on
        (lambda x: _squares(x, torch.sum), HALF, ("ReduceSum", "float16", "float32")),
        (lambda x: _squares(x, torch.mean), HALF, ("ReduceMean", "float16", "float32")),
    ],
)
def test_a_failed_gate_writes_nothing(
    function: Callable[[Tensor], Tensor], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.onnx"
    path.write_text("an older file")
    with refuses(ExportError, names=message) as caught:
        export(Wrapped(function), path, gate="quick", **options)
    assert "\n" not in str(caught.value) and caught.value.remedy
    assert path.read_text() == "an older file" and len(list(tmp_path.iterdir())) == 1


def test_an_unequal_graph_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(model: nn.Module, routing_iters: int | None = None) -> nn.Module:
        prepared = original(model, routing_iters)
        with torch.no_grad():
            prepared.class_caps.weight.mul_(1.01)
        return prepared

    original = unroll.prepare_for_export
    monkeypatch.setattr(unroll, "prepare_for_export", spoilt)
    with refuses(ExportError, names=["differs", "largest"]) as caught:
        export(ToyCaps(), tmp_path / "bad.onnx", gate="quick")
    assert_names(caught.value.remedy, ["forward", "numbers"])
    report = caught.value.report
    assert report is not None and not report.passed and report.max_rel_diff > 1e-4
    assert list(tmp_path.iterdir()) == []


def test_another_answer_of_the_plain_graph_is_refused(exported: tuple[ToyCaps, Path, ExportReport]) -> None:
    model, path, report = exported
    other = onnx.load(path)
    weight = next(t for t in other.graph.initializer if t.name == "class_caps.weight")
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 2, weight.name))
    gate = Gate(copy.deepcopy(report), to_onnx.prepare(model), onnx.load(path))
    with refuses(ExportError, names=["optimisation", "changes"]):
        gate.both_graphs(other)


def test_an_opset_that_the_exporter_changes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses(UsageError, names=["13", "written"]):
        export(ToyCaps(1), tmp_path / "old.onnx", opset=13, gate="quick")
    monkeypatch.setattr(options, "MIN_OPSET", 1)  # should torch.onnx change others
    with refuses(ExportError, names=["13", "exporter"]):
        export(ToyCaps(1), tmp_path / "old.onnx", opset=13, gate="quick")
    assert list(tmp_path.iterdir()) == []


def _with_nan(model: ToyCaps) -> ToyCaps:
    with torch.no_grad():
        model.class_caps.weight[0, 0, 0] = float("nan")
    return model


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda model: model.to("meta"), ("weights", "without")),
        (lambda model: model.half(), ("float32", "model.float()")),
        (_with_nan, ("NaN", "class_caps.weight")),
    ],
)
def test_weights_that_cannot_be_exported(
    change: Callable[[ToyCaps], ToyCaps], names: tuple[str, ...], tmp_path: Path
) -> None:
    with refuses(ExportError, names=names):
        export(change(ToyCaps()), tmp_path / "x.onnx")
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(UsageError, names=["folder"]):
        export(ToyCaps(), tmp_path)
    with refuses(UsageError, names=["input", "size"]):
        export(nn.Linear(4, 2), tmp_path / "x.onnx")
    with refuses(UsageError, names=["capsules"]):
        export(nn.Conv2d(1, 2, 1), tmp_path / "x.onnx", input_size=(1, 4, 4), outputs=("poses",))
    monkeypatch.setattr(to_onnx, "MAX_BYTES", 1000)
    with refuses(ExportError, names=["ONNX", "2", "GiB"]):
        export(ToyCaps(), tmp_path / "x.onnx")
    assert list(tmp_path.iterdir()) == []


# -- the structural rules, on graphs made by hand -------------------------------------------------------------------


def _graph(node_type: str, shape: list[object], dtype: int | None = None, **attributes: object) -> object:
    dtype = dtype or onnx.TensorProto.FLOAT
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node(node_type, ["input"], ["scores"], **attributes)
    graph = onnx.helper.make_graph(
        [node], "g", [value("input", dtype, shape)], [value("scores", dtype, shape)]
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


def _unknown_shape() -> object:
    """Expands to a shape that only the data tells."""
    proto: Any = _graph("Expand", ["batch", 2, 3])
    proto.graph.node[0].input.append("sizes")
    proto.graph.input.append(onnx.helper.make_tensor_value_info("sizes", onnx.TensorProto.INT64, [4]))
    wider = onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, ["batch", 1, 2, 3])
    proto.graph.output[0].CopyFrom(wider)
    return proto


@pytest.mark.parametrize(
    ("proto", "problem"),
    [
        (_graph("Relu", [2, 3]), "batch of input is 2"),
        (_graph("Relu", ["batch", "n"]), "symbolic beyond its batch"),
        (_graph("Bernoulli", ["batch", 3]), "not on the list"),
        (_graph("Einsum", ["batch", 3], equation="bn->bn"), "Einsum"),
        (_graph("Relu", ["batch", 2**28]), "elements for 3 images, too many"),  # a GiB for each image
        (_graph("Relu", ["batch", 1, 1, 1, 1, 1, 2]), "7 dimensions"),
        (_graph("Relu", ["batch", 3], onnx.TensorProto.DOUBLE), "float64"),
        (_unknown_shape(), "no inferable shape"),
        (_graph("NoSuchOperator", ["batch", 3]), "onnx.checker"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rules(proto: object, problem: str) -> None:
    assert graph_rules.inspect_graph(_graph("Relu", ["batch", 3])) == []
    assert any(problem in found for found in graph_rules.inspect_graph(proto))


#: Rows of onnx-tensorrt's docs/operators.md for TensorRT 10.15 that say N.
REFUSED_BY_TENSORRT = """
    AffineGrid Bernoulli BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CenterCropPad Col2Im Compress
    ConcatFromSequence ConvInteger DFT Det DynamicQuantizeLinear ImageDecoder MatMulInteger MaxRoiPool MaxUnpool
    MelWeightMatrix Multinomial NegativeLogLikelihoodLoss Optional OptionalGetElement OptionalHasElement QLinearConv
    QLinearMatMul RegexFullMatch SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength
    SequenceMap SoftmaxCrossEntropyLoss SplitToSequence StringConcat StringNormalizer StringSplit TfIdfVectorizer Unique
""".split()


def test_list_of_operators() -> None:
    assert graph_rules.SUPPORTED_OPS.isdisjoint(graph_rules.FORBIDDEN_OPS)
    assert graph_rules.SUPPORTED_OPS.isdisjoint(REFUSED_BY_TENSORRT)
    for name in graph_rules.SUPPORTED_OPS:
        assert not onnx.defs.get_schema(name).deprecated, name
        onnx.defs.get_schema(name, 20)  # raises where TensorRT 10.0 cannot have known it


def test_control_flow_is_found_inside_branches() -> None:
    inner = onnx.helper.make_node("NonZero", ["c"], ["y"])
    value = onnx.helper.make_tensor_value_info
    branch = onnx.helper.make_graph([inner], "b", [], [value("y", onnx.TensorProto.INT64, None)])
    node = onnx.helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch)
    graph = onnx.helper.make_graph(
        [node], "g", [value("c", onnx.TensorProto.BOOL, [])], [value("z", onnx.TensorProto.INT64, None)]
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    assert node_types(proto) == {"If": 1, "NonZero": 2}


def test_large_graphs_are_optimised_in_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules that list the whole graph at every node are left out, and put back; small graphs keep them all."""
    from onnxscript import rewriter

    before = rewriter._DEFAULT_REWRITE_RULES
    several = [rule for rule in before if not rule._target_pattern.has_single_output_node]
    with to_onnx.linear_rewriting(to_onnx.MANY_NODES + 1):
        assert [rule for rule in before if rule not in rewriter._DEFAULT_REWRITE_RULES] == several
    assert rewriter._DEFAULT_REWRITE_RULES is before
    with to_onnx.linear_rewriting(10):
        assert rewriter._DEFAULT_REWRITE_RULES is before
    monkeypatch.setattr(to_onnx, "MANY_NODES", 1)
    report = export(ToyCaps().eval(), tmp_path / "model.onnx", batch=(1, 2, 5))
    assert report.passed and "plain and optimised graph agree" in [s.name for s in report.gate if s.passed]
