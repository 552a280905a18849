"""INT8: what is quantised and what is not, what it costs on real images, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import capszoo
from capszoo.cli import app
from capszoo.errors import CapszooError
from capszoo.export import to_onnx
from capszoo.export.bundle import check_bundle, export_bundle
from capszoo.export.options import TOLERANCES
from capszoo.export.passes import int8
from capszoo.export.to_onnx import ExportError
from capszoo.export.verify.gate import _on_images
from capszoo.export.verify.images import RealImages, open_images, transformed
from tests.support import packed
from tests.support.errors import refuses
from tests.support.toys import ToyCaps

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def pictures(root: Path, name: str, picked: Sequence[int] | range) -> list[Image.Image]:
    images = packed(root, name).images[list(picked)]
    return [Image.fromarray(image.permute(1, 2, 0).numpy().squeeze()) for image in images]


def real(root: Path, model: torch.nn.Module, name: str, picked: range) -> RealImages:
    labels = packed(root, name).labels[list(picked)]
    return RealImages(transformed(model, pictures(root, name, picked)), labels, f"{name}, packed")


def toy_images(count: int, labels: bool = False) -> RealImages:
    images = torch.randn(count, 1, 10, 10, generator=torch.Generator().manual_seed(count))
    return RealImages(images, torch.zeros(count, dtype=torch.long) if labels else None, "noise")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("resnet20_routingcaps.mnist", "mnist"),
        ("idpa_cnn.mnist", "mnist"),
        ("resnet20_routingpool.cifar10", "cifar10"),
    ],
)
def test_bundled_weights_lose_at_most_half_a_point(name: str, data: str, root: Path, tmp_path: Path) -> None:
    model = capszoo.create_model(name, pretrained=True)
    calibration, images = real(root, model, data, range(200)), real(root, model, data, range(200, 1000))
    report = to_onnx.export(
        model,
        tmp_path / "model.onnx",
        precision="int8",
        gate="quick",
        calibration=calibration,
        images=images,
    )
    assert report.passed and report.accuracy["images"] == 800
    assert report.accuracy["lost"] <= int8.MAX_LOSS and report.accuracy["eager"] > 85
    # the graph before quantisation is held to float32's own limit
    assert max(d.relative for d in report.float_comparisons) <= TOLERANCES["fp32"]

    proto = onnx.load(tmp_path / "model.onnx")
    values = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    made_by = {output: node for node in proto.graph.node for output in node.output}
    wide, per_channel = ("Exp", "Softmax", "Sqrt", "ReduceSum", "ReduceL2", "LayerNormalization"), 0
    for node in proto.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero = values[node.input[2]]
            assert zero.dtype == np.int8 and not zero.any()  # symmetric, as TensorRT wants it
            axes = [a.i for a in node.attribute if a.name == "axis"]
            if values[node.input[1]].size > 1:
                per_channel += 1
                assert axes == [0] and values[node.input[0]].dtype == np.int8
        elif node.op_type in wide:
            assert not any(made_by[i].op_type == "DequantizeLinear" for i in node.input if i in made_by), (
                f"{node.op_type} reads quantised values"
            )
    operators = report.precision_map["operators"]
    assert per_channel == operators["Conv"]["int8"] >= 2 and "int8" not in operators.get("MatMul", {})
    assert report.precision_map["weights"]["int8"] > 0
    assert (tmp_path / "model.onnx").stat().st_size < 4 * sum(p.numel() for p in model.parameters())


def test_only_plain_layers_are_quantised() -> None:
    model = capszoo.create_model("idpa_cnn").eval()
    weights = int8.plain_layers(model)
    routing = {name for name, module in model.named_modules() if "IDPA" in type(module).__name__}
    assert weights and routing
    assert not [w for w in weights if any(w.startswith(f"{r}.") for r in routing if r)]
    assert "fc.weight" not in int8.plain_layers(capszoo.create_model("resnet20_routingpool"))  # 640 weights
    big = int8.plain_layers(capszoo.create_model("cnn_sabour", img_size=20))
    assert any(w.endswith("weight") for w in big) and len(big) == 5  # 3 convolutions, 2 of 3 linear layers


def test_a_bundle_of_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "MAX_LOSS", 20.0)  # untrained: many answers are near a tie
    model, out = ToyCaps(1).eval(), tmp_path / "toy"
    manifest = export_bundle(
        model,
        out,
        precision="int8",
        gate="quick",
        batch=(1, 2, 4),
        calibration=toy_images(64),
        images=toy_images(16),
        uint8_input=False,
    )
    assert manifest["precision"]["model"] == "int8"
    assert manifest["precision"]["operators"]["Conv"] == {"int8": 2}
    names = [step["name"] for step in manifest["gates"]]
    assert "before quantisation: parity with eager" in names and "accuracy on real images" in names
    assert not any("unknown" in kinds for kinds in manifest["precision"]["operators"].values())
    calibration = next(step["detail"] for step in manifest["gates"] if step["name"] == "calibration")
    assert calibration == "64 images, noise; 2 of 2 layers in int8"
    assert check_bundle(out).passed


def test_what_is_lost_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyCaps(1).eval()
    options = dict(precision="int8", gate="quick", calibration=toy_images(32), batch=(1, 2, 8))
    monkeypatch.setattr(int8, "MAX_LOSS", -200.0)  # nothing can be good enough
    with pytest.raises(ExportError, match="int8 loses -?[0-9.]+ points on 16 real") as caught:
        images = toy_images(16, labels=True)
        to_onnx.export(model, tmp_path / "x.onnx", images=images, **options)  # type: ignore[arg-type]
    assert caught.value.report is not None and caught.value.report.gate[-1].passed is False
    assert list(tmp_path.iterdir()) == []


def test_a_large_layer_that_stays_float32_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(ToyCaps):
        """A linear layer on three dimensions, whose weight the exporter transposes."""

        def __init__(self) -> None:
            super().__init__(1)
            self.wide = torch.nn.Linear(10, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.wide(x.flatten(1, 2)).unflatten(1, (1, 10)))

    monkeypatch.setattr(int8, "MIN_WEIGHTS", 100)
    monkeypatch.setattr(int8, "MAX_LOSS", 100.0)
    options = dict(precision="int8", gate="quick", calibration=toy_images(32), images=toy_images(16))
    report = to_onnx.export(Wide(), tmp_path / "x.onnx", tolerance=1.0, **options)  # type: ignore[arg-type]
    step = next(step for step in report.gate if step.name == "calibration")
    assert step.detail.endswith("2 of 3 layers in int8, not wide")


def test_bad_ranges_are_refused(tmp_path: Path) -> None:
    """Calibrated on nearly nothing, every real value is cut off: the gate must notice."""
    dark = RealImages(toy_images(32).images * 1e-4, None, "darkness")
    with pytest.raises(ExportError, match="real images: differs|int8 loses"):
        to_onnx.export(
            ToyCaps(1).eval(),
            tmp_path / "x.onnx",
            precision="int8",
            gate="quick",
            calibration=dark,
            images=toy_images(32),
        )
    assert list(tmp_path.iterdir()) == []


def save(folder: Path, files: dict[str, Image.Image]) -> Path:
    for name, picture in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        picture.save(folder / name)
    return folder


def test_the_command(root: Path, tmp_path: Path) -> None:
    digits = packed(root, "mnist")
    plain = save(
        tmp_path / "plain", {f"{i}.png": p for i, p in enumerate(pictures(root, "mnist", range(40)))}
    )
    classes = save(
        tmp_path / "classes",
        {
            f"{digits.labels[i]}/{i}.png": p
            for i, p in zip(range(50, 110), pictures(root, "mnist", range(50, 110)), strict=True)
        },
    )
    out = tmp_path / "digits.onnx"
    call = ["export", "resnet20_routingcaps.mnist", "--out", str(out), "--precision", "int8", "--quick"]
    done = CliRunner().invoke(
        app, [*call, "--calibrate", str(plain), "--verify-data", str(classes), "--json"]
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["precision"] == "int8" and report["accuracy"]["images"] == 60


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--precision", "int8"], 2, "int8 needs --calibrate"),
        (["--precision", "int8", "--calibrate", "x"], 2, "int8 needs --verify-data"),
        (["--calibrate", "x"], 2, "--calibrate does nothing for fp32"),
        (["--verify-data", "photos", "--data", "."], 2, "--data has no effect on a folder of images"),
        (
            ["--precision", "int8", "--calibrate", "mnist", "--verify-data", "mnits"],
            1,
            "no folder and no data set: .*mnist",
        ),
    ],
)
def test_the_command_refuses_in_one_line(more: list[str], code: int, words: str, tmp_path: Path) -> None:
    call = ["export", "resnet20_routingcaps.mnist", "--out", str(tmp_path / "x.onnx"), *more]
    done = CliRunner().invoke(app, call, env={"CAPSZOO_DATA": str(tmp_path)})
    assert done.exit_code == code and re.search(words, " ".join(done.output.split()))
    assert "--debug" not in done.output and list(tmp_path.iterdir()) == []


def test_images_of_folders_and_data_sets(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = capszoo.create_model("resnet20_routingcaps.mnist", pretrained=True)
    digits = pictures(root, "mnist", range(6))
    mixed = save(tmp_path, {f"{i % 2}/{i}.png": p for i, p in enumerate(digits)})
    found = open_images(model, str(mixed), limit=4)
    assert found.images.shape == (4, 1, *model.img_size) and found.labels is not None
    assert set(found.labels.tolist()) == {0, 1}
    digits[0].save(tmp_path / "loose.png")
    assert open_images(model, str(mixed)).labels is None  # one class is not known: none is trusted
    assert open_images(model, str(mixed), uint8_input=True).images.dtype == torch.uint8

    model.pretrained_cfg["label_names"] = ("b", "a", *"cdefghij")
    for name, label in (("a", 1), ("b", 0)):  # by the model's names, not in the order of the folders
        save(tmp_path / "named" / "test" / name, {"0.png": digits[label]})
    for name in "cdefghij":
        (tmp_path / "named" / "test" / name).mkdir()
    by_name = open_images(model, f"imagefolder:{tmp_path / 'named'}")
    assert by_name.labels is not None and by_name.labels.tolist() == [1, 0]
    shown = open_images(model, str(tmp_path / "named" / "test" / "a" / "0.png"))
    assert torch.equal(by_name.images[0], shown.images[0]), (
        "the pixels of a file: a digit of 28 is not resized"
    )
    model.pretrained_cfg["label_names"] = tuple("klmnopqrst")
    assert open_images(model, f"imagefolder:{tmp_path / 'named'}").labels is None

    monkeypatch.setattr(
        "capszoo.export.verify.images.load_dataset", lambda name, split, data, skipped: packed(root, name)
    )
    named = open_images(model, "mnist", limit=10)
    assert len(named) == 10 and torch.equal(named.labels, packed(root, "mnist").labels[::100])
    expected = transformed(model, pictures(root, "mnist", range(0, 1000, 100)))
    assert torch.equal(named.images, expected)
    ten = capszoo.create_model("resnet20_routingcaps", num_classes=4)
    with refuses(CapszooError, names=["10", "4", "classes"]):
        open_images(ten, "mnist")
    with refuses(CapszooError, names=["several", "classes"]):
        monkeypatch.undo()
        multi = "diverse_multimnist"
        monkeypatch.setattr(
            "capszoo.export.verify.images.load_dataset",
            lambda name, split, data, skipped: type("Set", (), {"spec": capszoo.data.dataset_spec(multi)})(),
        )
        open_images(model, multi)


class Says:
    """Class 0 for all images, but another for the first of them."""

    def __init__(self, name: str, wrong: int, answer: int = 1) -> None:
        self.name, self.wrong, self.answer, self.at = name, wrong, answer, 0

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        number = np.arange(self.at, self.at + len(images))
        self.at += len(images)
        return [np.eye(5, dtype=np.float32)[np.where(number < self.wrong, self.answer, 0)]]


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        (Says("eager", 0), Says("int8", 4), 0.4),
        (Says("eager", 0), Says("int8", 5), 0.5),
        (Says("eager", 0), Says("int8", 6), None),
        (Says("eager", 6), Says("int8", 0), -0.6),
        # labels that do not fit hide no loss: all answers are wrong before and after, but each has changed
        (Says("eager", 1000), Says("int8", 1000, 2), None),
    ],
)
def test_half_a_point_may_be_lost(before: Says, after: Says, lost: float | None) -> None:
    job = to_onnx.prepare(ToyCaps(1), precision="int8", tolerance=1.0)
    real = RealImages(torch.rand(1000, 1, 10, 10), torch.zeros(1000, dtype=torch.long), "given")
    figures: dict[str, float] = {}
    with (
        nullcontext()
        if lost is not None
        else pytest.raises(ExportError, match="loses (0.60|100.00) .* limit is 0.5")
    ):
        _on_images(job, before, after, real, [], figures)
        assert figures["lost"] == pytest.approx(lost)
