"""`capszoo.load`, and the images that it takes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models import save_for_hf

import capszoo
from capszoo._pretrained.info import stored_file
from capszoo.errors import CapszooError, UnknownArgument, UsageError
from capszoo.inference import predict
from capszoo.preprocess import as_image
from capszoo.scores import score_kind
from capszoo.summary import routing_iterations
from tests.support.errors import assert_names, refuses

DIGITS = Path(capszoo.__file__).parent / "assets"
DIGIT = DIGITS / "digit_3.png"


@pytest.fixture(scope="module")
def model() -> capszoo.LoadedModel:
    return capszoo.load("resnet20_routingcaps", device="cpu")


def test_a_bare_name_reads_the_project_s_own_digits(model: capszoo.LoadedModel) -> None:
    found = model.predict(sorted(DIGITS.glob("digit_*.png")))
    assert [one.label for one in found] == list("0123456789")
    assert all(one.probability == one.top[0].probability and 0.3 < one.probability < 1 for one in found)


def test_every_way_to_give_an_image(model: capszoo.LoadedModel) -> None:
    picture = Image.open(DIGIT)
    grey = np.asarray(picture)
    expected = model.predict(DIGIT)
    assert isinstance(expected, capszoo.ImagePrediction) and expected.label == "3"
    ways = (
        str(DIGIT),
        picture,
        grey,
        grey[..., None],
        np.repeat(grey[..., None], 3, axis=2),
        (grey / 255)[None].astype(np.float32),
        torch.from_numpy(grey[None] / 255.0),
        torch.from_numpy(grey[None] / 255.0).expand(3, -1, -1),
        torch.from_numpy(grey.copy())[..., None],
    )
    for image in ways:
        found = model.predict(image)
        assert isinstance(found, capszoo.ImagePrediction)
        assert [s.index for s in found.top] == [s.index for s in expected.top]
        assert found.top[0].score == pytest.approx(expected.top[0].score, abs=1e-5)
    many = model.predict(list(ways))
    drawn: list[int] = []
    batches: list[int] = []  # images drawn at the end of each batch
    images = (drawn.append(k) or DIGIT for k in range(4))
    predict(model.net, images, batch_size=2, advance=lambda _: batches.append(len(drawn)))
    assert batches == [2, 4], "a generator is not drawn whole"
    assert isinstance(many, list) and [one.label for one in many] == ["3"] * len(ways)
    # the function takes the same, and gives a list
    assert [one.label for one in predict(model.net, str(DIGIT))] == ["3"]
    assert [one.label for one in predict(model.net, picture)] == ["3"]


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((28, 28, 1), np.int64),
        np.zeros((28, 28, 2), np.uint8),
        np.full((1, 28, 28), 1.5, np.float32),
        np.full((1, 28, 28), -0.1, np.float32),
        np.full((1, 28, 28), np.nan, np.float32),
        np.zeros((28, 28, 3), np.float32),  # channels come first in floats
        np.zeros((0, 28, 1), np.uint8),
    ],
)
def test_arrays_that_are_no_image(model: capszoo.LoadedModel, wrong: object) -> None:
    with refuses(UsageError, names=["arrays"]):
        model.predict(wrong)  # type: ignore[call-overload]


def test_what_a_call_could_mean_is_said(model: capszoo.LoadedModel) -> None:
    for several in (torch.zeros(2, 1, 28, 28), np.zeros((4, 28, 28, 3), np.uint8)):
        with refuses(UsageError, names=["list"]):
            model.predict(several)
    grey = np.zeros((28, 28), np.float32)
    assert model.predict(grey).top == model.predict(grey.astype(np.uint8)).top
    with refuses(UsageError, names=["web"]):
        model.predict(["https://example.org/a.png"])
    with refuses(UnknownArgument, names=["top_k", "topk"]):
        model.predict(grey, top_k=3)
    with refuses(UsageError, names=["LoadedModel"]):
        capszoo.load(model.net)  # type: ignore[arg-type]


def test_what_is_no_image_at_all(model: capszoo.LoadedModel) -> None:
    with refuses(UsageError, names=["int", "image"]):
        model.predict([3])  # type: ignore[list-item]
    found = model.predict("nosuch.png")
    assert_names(found.error, ["file"])
    with refuses(CapszooError, names=["file"]):
        _ = found.label


def test_pictures_that_cannot_be_read_spare_the_others(model: capszoo.LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(DIGIT.read_bytes()[:120])
    closed = Image.open(DIGIT)
    closed.close()
    unreadable = [
        (Image.open(tmp_path / "cut.png"), "cut.png: cannot be read (image file is truncated)"),
        (closed, "cannot be read (Operation on closed image)"),
        (Image.new("L", (0, 0)), "the picture: has no pixels"),
        (Image.new("LAB", (28, 28)), "in LAB colours"),
    ]
    found = model.predict([*(picture for picture, _ in unreadable), DIGIT])
    assert found[-1].label == "3"
    for one, (_, message) in zip(found, unreadable, strict=False):
        assert message in one.error and "\n" not in one.error
    with refuses(CapszooError, names=["pixels"]):
        model.explain(Image.new("L", (0, 0)))


@pytest.mark.parametrize("option", ("topk", "batch_size"))
@pytest.mark.parametrize("value", (0, -1))
def test_counts_below_1(model: capszoo.LoadedModel, option: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"{option} is {value}"):
        model.predict([DIGIT], **{option: value})


def test_transparency_survives_an_array() -> None:
    rgba = np.zeros((5, 4, 4), np.uint8)
    assert as_image(rgba).mode == "RGBA" and as_image(rgba).size == (4, 5)


def test_explain(model: capszoo.LoadedModel, tmp_path: Path) -> None:
    found = model.explain(DIGIT)
    assert found.labels[found.predicted] == "3" and found.name == "resnet20_routingcaps"
    assert torch.equal(found.heat, model.explain(np.asarray(Image.open(DIGIT))).heat)
    pytest.importorskip("matplotlib")
    assert found.save(tmp_path / "heat.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs capszoo[export]")
def test_export(model: capszoo.LoadedModel, tmp_path: Path) -> None:
    written = model.export(tmp_path / "m.onnx", gate="quick", batch=1)
    assert isinstance(written, capszoo.ExportedModel)
    assert written.passed and written.path.is_file() and written.report["opset"] == 20
    folder = model.export(tmp_path / "bundle", gate="quick", batch=1)
    assert folder.passed and (folder.path / "infer.py").is_file() and folder.report["labels"] == model.labels
    dotted = model.export(tmp_path / "digits.v1", gate="quick", batch=1)
    assert (dotted.path / "manifest.json").is_file()
    named = model.export(tmp_path / "named", gate="quick", batch=1, name="..", source="")
    assert named.report["name"] == "model" and not named.report["model"]["source"]
    with refuses(UsageError, names=["onnx", "file"]):
        model.export(tmp_path / "m.pt")


def test_an_options_object_keeps_its_name(
    model: capszoo.LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capszoo.export import bundle, to_onnx
    from capszoo.export.options import BundleOptions, ExportOptions

    calls: list[dict[str, Any]] = []
    report = SimpleNamespace(passed=True, to_dict=dict)
    monkeypatch.setattr(to_onnx, "export", lambda *_, **given: calls.append(given) or report)
    monkeypatch.setattr(bundle, "export_bundle", lambda *_, **given: calls.append(given) or {"gates": []})
    model.export(tmp_path / "a.onnx", options=ExportOptions(name="digits"))
    model.export(tmp_path / "b", options=BundleOptions(source="runs/mine"))
    model.export(tmp_path / "c")
    own = {"name": model.name, "source": model.name}
    assert calls[0] == {"options": ExportOptions(name="digits")}
    assert calls[1] == {"options": BundleOptions(source="runs/mine"), "name": own["name"]}
    assert calls[2] == own


def test_options_and_what_it_says_of_itself() -> None:
    once = capszoo.load("resnet20_routingcaps.mnist", device="cpu", routing_iters=1)
    assert routing_iterations(once.net) == [1]
    assert repr(once) == "LoadedModel('resnet20_routingcaps.mnist', input=1x28x28, classes=10)"
    with pytest.raises(capszoo.UnknownModel, match="did you mean"):
        capszoo.load("resnet20_routingcap")


def test_prediction_leaves_a_network_in_training_mode_as_it_is() -> None:
    loaded = capszoo.load("resnet20_routingcaps", device="cpu")
    expected = loaded.predict(DIGIT).label
    before = {key: value.clone() for key, value in loaded.net.state_dict().items()}
    loaded.net.train()
    assert loaded.predict(DIGIT).label == expected and loaded.net.training
    assert all(torch.equal(value, before[key]) for key, value in loaded.net.state_dict().items())


def test_scores_that_are_not_those_of_the_weights_have_their_own_kind(tmp_path: Path) -> None:
    kinds = {
        scores: capszoo.load("capsnet_em_norb_small.mnist", device="cpu", scores=scores)
        for scores in ("logits", "activations")
    }
    found = {scores: (loaded.score_kind, loaded.predict(DIGIT).top[0]) for scores, loaded in kinds.items()}
    assert {scores: kind for scores, (kind, _) in found.items()} == {one: one for one in kinds}
    assert found["activations"][1].label == found["logits"][1].label
    assert found["activations"][1].probability > 0.5, "not the softmax of activations"
    file = stored_file("capsnet_em_norb_small.mnist.safetensors")
    assert capszoo.load(file, device="cpu", scores="activations").score_kind == "activations"
    save_for_hf(kinds["activations"].net, str(tmp_path / "saved"), safe_serialization=True)
    again = f"local-dir:{tmp_path / 'saved'}"
    for scores in kinds:
        net = capszoo.create_model(again, pretrained=True, scores=scores)
        assert score_kind(net) == scores


def test_the_weights_own_number_of_classes_does_not_excuse_another_size() -> None:
    with refuses(CapszooError, names=["48x48"]):
        capszoo.load("resnet20_idpa.cifar10", img_size=48, num_classes=10, device="cpu")
    assert (
        capszoo.load("resnet20_idpa.cifar10", img_size=48, num_classes=3, device="cpu").net.num_classes == 3
    )
