"""From file to tensor: sizes, modes, normalisation, broken files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from PIL import Image

from capszoo._pretrained.facts import set_own_facts
from capszoo._utils import pixels
from capszoo.errors import CapszooError, UsageError
from capszoo.images import Framing
from capszoo.inference import load_model, predict
from capszoo.preprocess import (
    ImageTransform,
    find_images,
    load_image,
    model_framing,
    model_input_size,
    model_transform,
)
from tests.support.errors import refuses


def transform(channels: int = 1, size: tuple[int, int] = (8, 8), **options: object) -> ImageTransform:
    return ImageTransform(channels, size, (0.0,) * channels, (1.0,) * channels, **options)  # type: ignore[arg-type]


def test_an_image_of_the_right_size_is_not_resampled() -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8) * 3
    tensor = transform()(Image.fromarray(pixels))
    assert torch.equal(tensor, torch.from_numpy(pixels.astype(np.float32) / 255)[None])


def test_normalisation_and_back() -> None:
    t = ImageTransform(3, (4, 4), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    image = Image.new("RGB", (4, 4), (255, 0, 51))
    tensor = t(image)
    assert tensor[:, 0, 0].tolist() == pytest.approx([2.5, -4 / 3, -0.25], abs=1e-6)
    assert t.restore(tensor)[:, 0, 0].tolist() == pytest.approx([1.0, 0.0, 0.2], abs=1e-6)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK"])
def test_modes(mode: str) -> None:
    white = Image.new("RGB", (8, 8), "white").convert(mode)
    for channels in (1, 3):
        assert transform(channels)(white).min() > 0.99


def test_sixteen_bits_with_a_transparent_value_are_scaled_too(tmp_path: Path) -> None:
    values = np.arange(0, 64 * 1024, 1024, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "grey.png", transparency=65535)
    with Image.open(tmp_path / "grey.png") as image:
        assert image.mode.startswith("I") and image.has_transparency_data
        view, notes = transform().read(image)
    np.testing.assert_allclose(np.asarray(view), values / 257, atol=1)
    assert not notes


def test_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("L", (8, 4))
    image.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to the right
    image.save(tmp_path / "turned.png", exif=exif)
    upright = load_image(tmp_path / "turned.png")
    assert upright.size == (4, 8) and upright.getpixel((3, 0)) == 255
    for kind in ("png", "webp"):  # as viewers do, without an orientation
        colour = Image.effect_noise((8, 4), 80).convert("RGB")
        colour.save(tmp_path / f"damaged.{kind}", exif=b"Exif\0\0garbage", lossless=True)
        np.testing.assert_array_equal(load_image(tmp_path / f"damaged.{kind}"), colour)


def test_find_images(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".thumbnails").mkdir()
    for name in ("b/2.JPG", "1.png", "x.txt", "b/._2.JPG", ".thumbnails/1.png"):
        (tmp_path / name).touch()
    assert find_images([tmp_path, tmp_path / "x.txt"]) == [
        tmp_path / "1.png",
        tmp_path / "b" / "2.JPG",
        tmp_path / "x.txt",
    ]
    assert find_images([tmp_path / ".thumbnails"]) == [tmp_path / ".thumbnails" / "1.png"]  # given by name
    with refuses(CapszooError, names=["file"]):
        find_images([tmp_path / "missing"])
    (tmp_path / "empty").mkdir()
    with refuses(CapszooError, names=["images", "folder"]):
        find_images([tmp_path / "empty"])


class Described(nn.Module):
    def __init__(self, **attributes: object) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def test_the_default_device_does_not_matter() -> None:
    transform = model_transform(
        Described(in_chans=1, img_size=8, pretrained_cfg={"mean": (0.5,), "std": (0.5,)})
    )
    with torch.device("meta"):
        pixels = transform(Image.new("L", (8, 8), 255))
        assert pixels.device.type == transform.restore(pixels).device.type == "cpu"
    assert bool((transform.restore(pixels) == 1).all())


def test_model_transform_reads_the_configuration() -> None:
    mean = (0.1, 0.2, 0.3)
    cfg = dict(input_size=(3, 8, 8), mean=mean, std=(1, 1, 1), interpolation="bicubic", crop_pct=0.875)
    t = model_transform(Described(pretrained_cfg=cfg))
    assert t == ImageTransform(3, (8, 8), mean, (1, 1, 1), "bicubic", 0.875, "white", canvas="white")
    random = model_transform(Described(pretrained_cfg={**cfg, "interpolation": "random"}))
    assert random.interpolation == "bilinear"
    grey = model_transform(Described(pretrained_cfg=cfg, in_chans=1, img_size=(6, 4)))
    assert grey.size == (6, 4) and grey.mean == pytest.approx((0.2,)) and len(grey.std) == 1
    assert model_input_size(Described(in_chans=2, img_size=9)) == (2, 9, 9)
    created_grey = Described(pretrained_cfg=cfg)  # timm's in_chans=1 changes the first convolution alone
    created_grey.stem = nn.Conv2d(1, 4, 3)
    assert model_input_size(created_grey) == (1, 8, 8)
    with refuses(CapszooError, names=["2", "channels"]):
        model_transform(Described(in_chans=2, img_size=9))
    with refuses(UsageError, names=["input", "size"]):
        model_input_size(Described())


def test_an_error_while_reading_belongs_to_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Pillow raises for one picture, the others are classified."""
    model = load_model("resnet20_routingcaps.mnist", device="cpu")
    good = Image.new("L", (28, 28))
    floats = Image.fromarray(np.full((28, 28), -5, np.float32))
    plain = pixels.flatten

    def flatten(image: Image.Image, *others: Any) -> Any:
        if image.mode == "CMYK":
            raise ValueError("conversion from CMYK to\nXYZ not supported")
        return plain(image, *others)

    monkeypatch.setattr(pixels, "flatten", flatten)
    found = predict(model, [good, floats, Image.new("CMYK", (28, 28)), good])
    assert [bool(one.error) for one in found] == [False, True, True, False]
    assert found[1].error.startswith("image 2: ")
    assert found[2].error.startswith("image 3: ") and "\n" not in found[2].error
    assert found[0].label == found[3].label


def test_the_configuration_states_crop_mode_and_range() -> None:
    cfg = dict(input_size=(3, 8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, crop_mode="squash")
    set_own_facts(cfg, {"value_range": [-1.0, 4095.0]})
    model = Described(in_chans=3, img_size=8, pretrained_cfg=cfg)
    found = model_transform(model)
    assert (found.crop_mode, found.value_range) == ("squash", (-1.0, 4095.0))
    framing = model_framing(model)
    assert framing == Framing("squash", (0.5,) * 3, (-1.0, 4095.0))
    cfg["crop_mode"] = "rkrc"  # one of timm's for training
    assert model_transform(model).crop_mode == "center"
