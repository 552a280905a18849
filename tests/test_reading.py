"""Transparency, polarity, framing and canvas: the same in `predict`, in the data readers and in a bundle's infer.py."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models import save_for_hf

import capszoo
from capszoo.errors import UsageError
from capszoo.images import fit_drawing, flatten, looks_inverted, pad_to
from capszoo.preprocess import ImageTransform, model_transform
from tests.support import load_script, packed
from tests.support.command import write_run
from tests.support.errors import refuses

MNIST = ImageTransform(1, (28, 28), (0.1307,), (0.3081,))


@pytest.fixture(scope="module")
def disguises(root: Path):  # type: ignore[no-untyped-def]
    return load_script(root / "scripts" / "disguises.py")


@pytest.mark.parametrize(
    "name", ["resnet20_routingcaps.mnist", "resnet20_routingcaps.affnist", "idpa_cnn.mnist"]
)
def test_digits_in_six_disguises(name: str, disguises, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = capszoo.load(name, device="cpu")
    for how, option in disguises.DISGUISES.items():
        files = disguises.write(tmp_path / how, how)
        assert disguises.right_by_predict(model, files, option) >= 9, how
    inverted = model.predict(disguises.write(tmp_path / "inverted", "inverted"))
    assert all(any("--invert" in said for said in one.notes) for one in inverted)
    black = model.predict(disguises.write(tmp_path / "ink", "transparent, black ink"))
    assert all(any("composited on white and inverted" in said for said in one.notes) for one in black)
    assert not any(one.notes for one in model.predict(disguises.write(tmp_path / "plain", "plain")))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs capszoo[export]")
def test_infer_py_reads_the_disguises_too(disguises, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    bundle = (
        capszoo.load("resnet20_routingcaps.affnist", device="cpu").export(tmp_path / "b", gate="quick").path
    )
    for how, option in disguises.DISGUISES.items():
        assert disguises.right_by_infer(bundle, disguises.write(tmp_path / how, how), option) >= 9, how


def test_transparency() -> None:
    drawn = np.zeros((20, 20, 4), np.uint8)
    drawn[5:15, 5:15, 3] = 255
    black = Image.fromarray(drawn)
    flat, note = flatten(black, "black", 1)
    assert np.asarray(flat)[10, 10] == 255 and np.asarray(flat)[0, 0] == 0 and "inverted" in note
    flat, note = flatten(black, "black", 3)  # colours are not inverted
    assert (
        flat.getpixel((10, 10)) == (0, 0, 0) and flat.getpixel((0, 0)) == (255, 255, 255) and "white" in note
    )
    flat, note = flatten(black, "white", 3)
    assert flat.getpixel((0, 0)) == (255, 255, 255) and not note
    opaque = Image.new("RGBA", (4, 4), (0, 0, 0, 255))  # a black picture is a black picture
    assert flatten(opaque, "black", 1)[0].getpixel((0, 0)) == 0 and not flatten(opaque, "black", 1)[1]
    empty = Image.new("RGBA", (4, 4), (255, 255, 255, 0))
    assert flatten(empty, "black", 1)[0].getpixel((0, 0)) == 0
    grey = Image.new("L", (4, 4), 9)
    assert flatten(grey, "black", 1) == (grey, "")


def test_the_note_on_inverted_images_needs_the_image_and_its_own_mean(root: Path) -> None:
    image = Image.fromarray(255 - packed(root, "mnist").images[0, 0].numpy())
    for fit in (False, True):  # a fitted drawing is on black
        (note,) = replace(MNIST, fit=fit).read(image)[1]
        assert "inverted? --invert" in note
    assert replace(MNIST, inherited_mean=True).read(image)[1] == ()


@pytest.mark.parametrize("mean", [None, [0.1307]])
def test_a_mean_from_other_weights_says_nothing_about_the_images(
    mean: list[float] | None, tmp_path: Path
) -> None:
    """Fine-tuning keeps the normalisation of the weights that it starts from."""
    recipe = {"data": {"name": "imagefolder:photos", "mean": mean, "std": mean}}
    net = capszoo.load(write_run(tmp_path, mean=[0.1307], recipe=recipe), device="cpu").net
    bright = Image.new("L", (20, 20), 240)
    assert bool(model_transform(net).read(bright)[1]) == (mean is None)
    save_for_hf(net, str(tmp_path / "hub"), safe_serialization=True)
    saved = capszoo.load(f"local-dir:{tmp_path / 'hub'}", device="cpu").net
    assert bool(model_transform(saved).read(bright)[1]) == (mean is None)


def test_the_note_on_inverted_images_never_fires_on_test_images(root: Path) -> None:
    for image in packed(root, "mnist").images[:, 0].numpy():
        assert not looks_inverted(Image.fromarray(image), (0.1307,))
        assert looks_inverted(Image.fromarray(255 - image), (0.1307,))
    garments = packed(root, "fashion_mnist").images[:, 0].numpy()
    assert sum(bool(looks_inverted(Image.fromarray(image), (0.286,))) for image in garments) <= 2


def test_fit_undoes_shift_and_scale(root: Path) -> None:
    again, moved = [], []
    for image in packed(root, "mnist").images[:100, 0].numpy():
        digit = Image.fromarray(image)
        again.append(np.abs(np.asarray(fit_drawing(digit, (28, 28)), dtype=float) - image).mean())
        canvas = Image.new("L", (120, 90))
        canvas.paste(digit.resize((56, 56)), (60, 3))
        moved.append(np.abs(np.asarray(fit_drawing(canvas, (28, 28)), dtype=float) - image).mean())
    # of 255: a digit that MNIST's makers framed stays where it is, a moved and scaled one comes back
    assert np.mean(again) < 1 and np.mean(moved) < 8
    digit = Image.fromarray(packed(root, "mnist").images[0, 0].numpy())
    blank = Image.new("L", (30, 30), 5)
    assert fit_drawing(blank, (28, 28)).size == (28, 28)  # nothing is drawn
    assert pad_to(digit, (40, 40)).getpixel((0, 0)) == 0 and pad_to(digit, (40, 40)).size == (40, 40)


def test_the_canvas_of_the_weights() -> None:
    net = capszoo.create_model("resnet20_routingcaps.affnist", pretrained=True)
    transform = model_transform(net)
    assert transform.object_size == (28, 28) and transform.size == (40, 40)
    digit = Image.fromarray(np.full((28, 28), 255, np.uint8))
    view = np.asarray(transform.view(digit))
    assert view.shape == (40, 40) and view[6:34, 6:34].min() == 255 and view.sum() == 255 * 28 * 28
    # the option is about transparent pixels: the padding stays that of training
    assert np.array_equal(np.asarray(model_transform(net, background="white").view(digit)), view)
    whole = Image.effect_noise((40, 40), 80)
    assert np.array_equal(np.asarray(transform.view(whole)), np.asarray(whole))  # a canvas already
    # another size than the weights were trained for is no canvas of theirs
    other = capszoo.create_model("resnet20_routingcaps.affnist", pretrained=True, img_size=28)
    assert model_transform(other).object_size is None
    with refuses(UsageError, names=["red"]):
        model_transform(net, background="red")


def test_eval_pads_as_predict(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    from capszoo.recipes.evaluation.target import prepare

    digits = packed(root, "mnist")
    for k in range(10):
        for split in ("train", "test"):
            (tmp_path / split / str(k)).mkdir(parents=True)
        Image.new("L", (28, 28)).save(tmp_path / "train" / str(k) / "0.png")
        for index in (digits.labels == k).nonzero().flatten()[:3].tolist():
            Image.fromarray(digits.images[index, 0].numpy()).save(tmp_path / "test" / str(k) / f"{index}.png")
    subject = prepare("resnet20_routingcaps.affnist", data=f"imagefolder:{tmp_path}", device="cpu")
    batch = next(subject.batches(30))
    files = sorted((tmp_path / "test").rglob("*.png"))
    transform = model_transform(subject.net)
    for tensor, file in zip(batch.images, files, strict=True):
        with Image.open(file) as image:
            torch.testing.assert_close(tensor, transform(image), atol=1e-5, rtol=0)
    with torch.no_grad():
        assert (subject.net(batch.images).argmax(1) == batch.labels).float().mean() >= 0.9
