"""Opening images: one rule for all, also in a bundle's infer.py; no small file takes the machine."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm.data
from PIL import Image
from torch import nn

from capszoo import images
from capszoo._utils import pixels
from capszoo._utils.choices import BACKGROUNDS
from capszoo._utils.pixels import to_8_bits
from capszoo.data import DataError
from capszoo.data.readers import decode_image, look_at_set
from capszoo.errors import CapszooError, UsageError
from capszoo.export.bundle.manifest import preprocessing
from capszoo.export.bundle.write import stand_alone_script
from capszoo.images import open_image, resize_and_crop, to_mode, upright_picture
from capszoo.preprocess import ImageTransform
from tests.support import load_script
from tests.support.errors import refuses
from tests.support.formats import write_image


@pytest.fixture(scope="module")
def infer(tmp_path_factory: pytest.TempPathFactory):
    """The script that a bundle holds."""
    path = tmp_path_factory.mktemp("bundle") / "infer.py"
    path.write_text(stand_alone_script(), encoding="utf-8")
    return load_script(path)


def _chunks(path: Path, *chunks: tuple[bytes, bytes]) -> Path:
    """A PNG of these chunks, and of its end."""
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (*chunks, (b"IEND", b""))
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


def _png(path: Path, width: int, height: int) -> Path:
    """A grey PNG of one bit a pixel, all black, without ever holding its pixels."""
    row = b"\0" * (1 + (width + 7) // 8)
    packer = zlib.compressobj(9)
    body = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return _chunks(path, (b"IHDR", head), (b"IDAT", body))


def _spec(transform: ImageTransform) -> dict:
    """The preprocess.json that an export writes for a transform."""
    report: Any = SimpleNamespace(
        batch=(1, 2, 4), outputs={"scores": ()}, input_name="input", input_dtype="float32"
    )
    return json.loads(json.dumps(preprocessing(nn.Identity(), transform, report)))


def _gallery(folder: Path) -> list[Path]:
    """Images of every mode and of odd sizes; one of them turned by its EXIF tag."""
    rng = np.random.default_rng(0)
    drawn = np.zeros((28, 28, 4), np.uint8)
    drawn[5:20, 5:8, 3] = 255  # black ink on nothing
    grey = rng.integers(0, 256, (37, 53), dtype=np.uint8)
    colour = rng.integers(0, 256, (41, 30, 3), dtype=np.uint8)
    pictures = {
        "drawn.png": Image.fromarray(drawn),
        "white.png": Image.fromarray(drawn | np.array([255, 255, 255, 0], np.uint8)),
        "noise.png": Image.fromarray(rng.integers(0, 256, (31, 45, 4), dtype=np.uint8)),
        "bright.png": Image.new("L", (40, 40), 240),
        "grey.png": Image.fromarray(grey),
        "rgb.png": Image.fromarray(colour),
        "one.png": Image.fromarray(grey).convert("1"),
        "la.png": Image.fromarray(np.dstack([grey, grey[::-1]]), "LA"),
        "palette.png": Image.fromarray(colour).quantize(16),
        "deep.png": Image.fromarray(rng.integers(0, 65536, (45, 33), dtype=np.uint16)),
        "dark16.png": Image.fromarray(rng.integers(0, 200, (45, 33), dtype=np.uint16)),
        "float.tif": Image.fromarray(rng.random((30, 31), dtype=np.float32) * 250),
        "share.tif": Image.fromarray(rng.random((30, 31), dtype=np.float32)),
        "cmyk.jpg": Image.fromarray(colour).convert("CMYK"),
        "hsv.tif": Image.fromarray(colour),
        "right.png": Image.fromarray(rng.integers(0, 256, (28, 28), dtype=np.uint8)),
        "thin.png": Image.fromarray(rng.integers(0, 256, (500, 3), dtype=np.uint8)),
    }
    for name, picture in pictures.items():
        picture.save(folder / name)
    Image.fromarray(grey).convert("P").save(folder / "key.png", transparency=7)
    twelve = Image.fromarray(rng.integers(0, 4096, (45, 33), dtype=np.uint16))
    twelve.save(folder / "twelve.tif", tiffinfo={281: 4095})  # MaxSampleValue
    turned = Image.fromarray(grey)
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(folder / "turned.jpg", exif=exif)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("crop_pct", "interpolation"),
    [(1.0, "bilinear"), (0.875, "bicubic"), (0.5, "nearest"), (0.9, "box"), (0.7, "hamming")],
)
def test_a_bundle_opens_images_as_the_package_does(
    infer, tmp_path: Path, channels: int, crop_pct: float, interpolation: str
) -> None:
    mean, std = (0.1, 0.4, 0.7)[-channels:], (0.2, 0.3, 0.5)[-channels:]
    transform = ImageTransform(channels, (28, 24), mean, std, interpolation, crop_pct)
    for path in _gallery(tmp_path):
        ours, theirs = transform(open_image(path)).numpy(), infer.preprocess(path, _spec(transform))
        assert np.array_equal(ours, theirs.astype(np.float32)), path.name


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"invert": True}, {"fit": True}, {"background": "white"}, {"invert": True, "fit": True}]
)
def test_a_bundle_has_the_options_of_the_package(infer, tmp_path: Path, channels: int, options: dict) -> None:
    for size, objects in (((28, 28), None), ((40, 40), (28, 28))):
        trained = ImageTransform(channels, size, (0.1,) * channels, (0.3,) * channels, object_size=objects)
        for path in _gallery(tmp_path):
            view, notes = replace(trained, **options).read(open_image(path))
            pixels, said = infer.read(path, _spec(trained), **options)
            np.testing.assert_allclose(pixels, trained.normalise(view).numpy(), atol=1e-6)
            assert said == list(notes)


def test_every_background_has_a_value() -> None:
    assert tuple(pixels.BACKGROUNDS) == BACKGROUNDS


def test_floats_of_either_range_are_the_same_picture(tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (20, 20), dtype=np.uint8)
    grey[0, 0] = 0
    expected = np.asarray(Image.fromarray(grey))
    for top in (255, 1):
        values = grey.astype(np.float32) / 255 * top
        values[0, 0] = np.nan  # a pixel without a value is black
        Image.fromarray(values).save(tmp_path / "float.tif")
        found = np.asarray(open_image(tmp_path / "float.tif", 1), dtype=int)
        assert np.abs(found - expected).max() <= 1, top


def test_readers_open_images_as_predict_does(tmp_path: Path) -> None:
    for path in _gallery(tmp_path):
        assert look_at_set(lambda _, path=path: (path, path), 1).sizes == (open_image(path).size,)
        for mode, channels in (("L", 1), ("RGB", 3)):
            read = decode_image(path.read_bytes(), mode, path.name)
            assert np.array_equal(read, np.asarray(open_image(path, channels))), path.name


@pytest.mark.parametrize("resampling", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC])
def test_cropping_before_scaling_gives_the_same_pixels(resampling: Image.Resampling) -> None:
    # smooth, for a bicubic filter overshoots at edges, and Pillow then clips between its two passes, in either order
    waves = (
        np.sin(np.arange(300)[:, None, None] / 4 + np.arange(300)[None, :, None] / 6 + np.arange(3)) * 100
        + 128
    )
    for rows, cols, crop in ((112, 128, 0.5), (60, 40, 1.0), (300, 40, 1.0), (28, 28, 1.0)):
        image = Image.fromarray(waves[:rows, :cols].astype(np.uint8))
        scale = max(28 / rows, 32 / cols) / crop
        size = (max(32, round(cols * scale)), max(28, round(rows * scale)))
        whole = image if size == image.size else image.resize(size, resampling)
        top, left = (whole.height - 28) // 2, (whole.width - 32) // 2
        expected = np.asarray(whole.crop((left, top, left + 32, top + 28)), dtype=int)
        found = np.asarray(resize_and_crop(image, (28, 32), crop, resampling), dtype=int)
        assert found.shape == (28, 32, 3) and np.abs(found - expected).max() <= 1, (rows, cols)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (333, 250), (1024, 683)])
def test_predict_sees_the_pixels_of_eval_and_training(tmp_path: Path, size: tuple[int, int]) -> None:
    """Data sets are decoded at 8/7 of the input, then cropped: the same centre, whatever is odd."""
    noise = np.random.default_rng(0).integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(tmp_path / "a.png")
    transform = ImageTransform(3, (56, 56), (0.5,), (0.25,), crop_pct=0.875)
    evaluated = decode_image(tmp_path / "a.png", "RGB", "a", 64)[4:60, 4:60].transpose(2, 0, 1).astype(int)
    seen = transform(open_image(tmp_path / "a.png")).numpy()
    assert np.abs(np.rint((seen * 0.25 + 0.5) * 255) - evaluated).max() <= 1


@pytest.mark.parametrize(("rows", "cols"), [(28, 31), (31, 28), (28, 30), (29, 28), (28, 61)])
def test_an_image_whose_short_side_fits_is_not_blurred(tmp_path: Path, rows: int, cols: int) -> None:
    """Training and evaluation cut whole pixels, as prediction does, also where the middle lies between two."""
    noise = np.random.default_rng(0).integers(0, 256, (rows, cols, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    trained = decode_image(tmp_path / "a.png", "RGB", "a", 28)
    top, left = (rows - 28) // 2, (cols - 28) // 2
    assert np.array_equal(trained, noise[top : top + 28, left : left + 28])
    seen = ImageTransform(3, (28, 28), (0,), (1,))(open_image(tmp_path / "a.png")).numpy()
    assert np.array_equal(trained.transpose(2, 0, 1), np.rint(seen * 255))


@pytest.mark.parametrize(("width", "side"), [(64, 32), (300, 32), (640, 37), (2100, 224)])
def test_a_jpeg_has_the_same_pixels_at_any_scale(tmp_path: Path, width: int, side: int) -> None:
    """Stripes and noise, which a smaller decoded scale changes most."""
    noise = np.random.default_rng(0).integers(0, 256, (width, width, 3), dtype=np.uint8)
    noise[: width // 2] = np.where(np.arange(width) % 7 < 2, 255, 0)[None, :, None]
    Image.fromarray(noise).save(tmp_path / "a.jpg", quality=95)
    read = decode_image(tmp_path / "a.jpg", "RGB", "a", side).astype(int)
    seen = resize_and_crop(open_image(tmp_path / "a.jpg"), (side, side), 1.0, Image.Resampling.BILINEAR)
    assert np.abs(read - np.asarray(seen, dtype=int)).max() <= 1
    with Image.open(tmp_path / "a.jpg") as whole:
        assert open_image(tmp_path / "a.jpg", 3, side=width // 20).width < whole.width


def test_files_that_pillow_may_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow hands PostScript to Ghostscript, opens what is inside of an IPTC file with every format, and decodes an
    icon when it opens it, whose directory may state 16x16 for a PNG of any size."""

    def field(record: int, number: int, value: bytes) -> bytes:
        return bytes((0x1C, record, number)) + struct.pack(">H", len(value)) + value

    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    size = struct.pack(">H", 8)
    head = field(3, 60, b"\1\0") + field(3, 20, size) + field(3, 30, size) + field(3, 120, b"\5")
    png = _png(tmp_path / "bomb.png", 13_000, 13_000).read_bytes()
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(png), 22)
    Image.init()
    assert Image.OPEN["IPTC"], "the test is of a format that Pillow has"
    monkeypatch.setattr(
        "PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started")
    )
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda _: pytest.fail("decoded"))
    path = tmp_path / "digit.png"
    for content, message, sizes in (
        (script, "in PostScript", ((8, 8),)),  # its header alone is read
        (head + field(8, 10, script), "not an image", ()),
        (struct.pack("<HHH", 0, 1, 1) + entry + png, "not an image", ()),
    ):
        path.write_bytes(content)
        with pytest.raises(CapszooError, match=message):
            open_image(path)
        assert look_at_set(lambda _: (path, path), 1).sizes == sizes


def test_a_tile_that_is_larger_than_its_image(infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TIFF of one pixel may state a tile of any size, which is decoded as a whole."""
    side, entries = 24_000, []
    for tag, kind, value in (
        *((256, 4, 1), (257, 4, 1), (258, 3, 8), (259, 3, 8), (262, 3, 1), (277, 3, 1)),
        *((322, 4, side), (323, 4, side), (324, 4, 200), (325, 4, 20)),
    ):
        entries.append(struct.pack("<HHI", tag, kind, 1) + struct.pack("<I", value))
    path = tmp_path / "tile.tif"
    header = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    path.write_bytes(header.ljust(200, b"\0") + zlib.compress(bytes(100)).ljust(20, b"\0"))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with refuses(CapszooError, names=["tile.tif", "1x1", "64,000,000"]):
        open_image(path)
    with refuses(ValueError, names=["64,000,000", "--max-pixels"]):
        infer.preprocess(path, {})


def test_16_bit_transparent_colour(tmp_path: Path) -> None:
    """PNG's tRNS of 16-bit RGB: Pillow reads the pixels as 8 bits and leaves the colour as 16."""
    raw = b"".join(b"\0" + struct.pack(">6H", 0x1234, 0x5678, 0x9ABC, 0xFFFF, 0, 0) for _ in range(2))
    head = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    transparent = struct.pack(">3H", 0x1234, 0x5678, 0x9ABC)
    path = _chunks(tmp_path / "a.png", (b"IHDR", head), (b"tRNS", transparent), (b"IDAT", zlib.compress(raw)))
    expected = [[[255, 255, 255], [255, 0, 0]]] * 2  # composited on white
    assert np.asarray(open_image(path, 3)).tolist() == expected


def test_a_thin_image_is_cropped_before_it_is_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 x 1,000,000 pixels, about a kilobyte: scaled first, it would be 28 x 28,000,000."""
    transform = ImageTransform(1, (28, 28), (0.5,), (0.25,), crop_pct=0.875)
    made, resize = [], Image.Image.resize
    monkeypatch.setattr(
        Image.Image,
        "resize",
        lambda self, size, *a, **k: (made.append(size[0] * size[1]), resize(self, size, *a, **k))[1],
    )
    start = time.monotonic()
    for size in ((1, 1_000_000), (1_000_000, 1)):
        path = _png(tmp_path / f"{size[0]}.png", *size)
        assert path.stat().st_size < 100_000
        assert transform(open_image(path)).shape == (1, 28, 28)
        assert decode_image(path, "L", "x", side=28).shape == (28, 28)
    assert len(made) >= 4 and max(made) <= 28 * 28 and time.monotonic() - start < 20


def test_too_many_pixels_are_refused_before_they_are_decoded(
    infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _png(tmp_path / "bomb.png", 13_000, 13_000)
    assert path.stat().st_size < 200_000
    decoded = []
    monkeypatch.setattr(Image.Image, "load", lambda self: decoded.append(self))
    with refuses(CapszooError, names=["bomb.png", "13000x13000", "64,000,000"]):
        open_image(path)
    with refuses(DataError, names=["bomb.png", "64,000,000"]):
        decode_image(path, "L", path)
    with refuses(ValueError, names=["13000x13000", "64,000,000", "--max-pixels"]):
        infer.preprocess(path, {})
    assert not decoded
    huge = _png(tmp_path / "huge.png", 80_000_000, 1)
    with refuses(CapszooError, names=["64,000,000", "pixels"]):
        open_image(huge)


def test_folders_are_read_whole_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("photos/a.png", "photos/private/b.png", "photos/.store/d.png", "elsewhere/c.png"):
        write_image(tmp_path / name, np.zeros((4, 4), np.uint8))
    photos = tmp_path / "photos"
    (photos / "linked").symlink_to(tmp_path / "elsewhere")
    (photos / "private" / "above").symlink_to(photos)  # a loop
    (photos / "set").symlink_to(photos / ".store")
    (photos / "again").symlink_to(photos / "private")
    walk, listed = os.walk, os.scandir
    for backwards in (False, True):

        def ordered(*args: Any, backwards: bool = backwards, **options: Any) -> Iterator[Any]:
            for place, folders, files in walk(*args, **options):
                folders.sort(reverse=backwards)
                yield place, folders, files

        monkeypatch.setattr(os, "walk", ordered)
        found = [path.relative_to(photos).as_posix() for path in images.find_images([photos])]
        assert found == ["a.png", "linked/c.png", "private/b.png", "set/d.png"]

    def scandir(path: str) -> Any:
        if str(path).endswith("private"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with refuses(CapszooError, names=["private", "permissions"]):
        images.find_images([photos])


def test_the_limit_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _png(tmp_path / "small.png", 40, 30)
    with refuses(CapszooError, names=["40x30", "1,000", "scale"]) as caught:
        open_image(path, max_pixels=1000)
    assert "CAPSZOO_MAX_PIXELS" not in str(caught.value), "the variable would not change this limit"
    monkeypatch.setenv("CAPSZOO_MAX_PIXELS", "1000")
    with refuses(CapszooError, names=["1,000", "pixels"]):
        open_image(path)
    monkeypatch.setenv("CAPSZOO_MAX_PIXELS", "1200")
    assert open_image(path).size == (40, 30)
    for wrong in ("many", "0", "-5", "1" * 40):
        monkeypatch.setenv("CAPSZOO_MAX_PIXELS", wrong)
        with refuses(UsageError, names=["CAPSZOO_MAX_PIXELS"]):
            open_image(path)


def test_deep_images_are_converted_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (50, 40), dtype=np.uint16)
    whole = np.asarray(to_mode(Image.fromarray(values), 1))
    monkeypatch.setattr(pixels, "_STRIP", 100)
    assert np.array_equal(whole, np.asarray(to_mode(Image.fromarray(values), 1)))
    assert np.array_equal(whole, np.rint(values / 65535.0 * 255).astype(np.uint8))


def test_what_pillow_does_not_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, dds = tmp_path / "lab.tif", tmp_path / "odd.dds"
    Image.new("LAB", (20, 20)).save(lab)
    header = struct.pack("<4sII", b"DDS ", 124, 0x1007) + struct.pack("<5I", 8, 8, 0, 0, 0) + b"\0" * 44
    dds.write_bytes(header + struct.pack("<8I", 32, 4, 0x12345678, 0, 0, 0, 0, 0) + b"\0" * 200)
    with refuses(CapszooError, names=["lab.tif", "LAB", "RGB"]):
        open_image(lab)
    with refuses(CapszooError, names=["odd.dds"]):
        open_image(dds)
    for path in (lab, dds):
        with refuses(DataError, names=[path.name]):
            decode_image(path, "RGB", path)
    assert look_at_set(lambda _: (dds, dds), 1).sizes == ()
    with refuses(CapszooError, names=["file"]):
        open_image(tmp_path / "absent.png")
    with refuses(CapszooError, names=["folder"]):
        open_image(tmp_path)
    whole = write_image(tmp_path / "a.png", np.asarray(Image.effect_noise((30, 30), 50))).read_bytes()
    for content in (b"", b"hello", whole[:10], whole[:40], whole[:400]):
        with refuses(CapszooError, names=["image"]):
            open_image(content)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "a.png")

    monkeypatch.setattr(Image, "open", refuse)
    with refuses(CapszooError, names=["a.png", "permissions"]):
        open_image(tmp_path / "a.png")


def _grey(values: np.ndarray) -> Image.Image:
    return Image.fromarray(values)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_one_range_holds_for_dark_and_bright_images(kind: type) -> None:
    """Which values are black and white never depends on the image alone."""
    seen = {}
    for value in (255, 256, 4095):
        picture, note = to_8_bits(_grey(np.full((4, 4), value, kind)), (0, 4095))
        assert note == ""
        seen[value] = int(np.asarray(picture)[0, 0])
    assert seen == {255: 16, 256: 16, 4095: 255}
    picture, note = to_8_bits(_grey(np.full((4, 4), 5000, kind)), (0, 4095))
    assert np.asarray(picture)[0, 0] == 255 and "clipped" in note
    low, _ = to_8_bits(_grey(np.array([[-2, 0, 2]], np.float32)), (-2.0, 2.0))
    assert np.asarray(low).tolist() == [[0, 128, 255]]


def test_without_a_known_range_integers_have_all_16_bits() -> None:
    found = {}
    for value in (255, 256, 65535):
        picture, note = to_8_bits(_grey(np.full((4, 4), value, np.uint16)))
        found[value] = int(np.asarray(picture)[0, 0])
        assert bool(note) == (value < 8192)
    assert found == {255: 1, 256: 1, 65535: 255}


@pytest.mark.parametrize("extremes", [(0, 300.0), (0, 65535.0), (-0.01, 1.0), (-1.0, 1.0), (0, 1.01)])
def test_floats_of_an_unknown_range_are_refused(infer, tmp_path: Path, extremes: tuple) -> None:
    path = tmp_path / "float.tif"
    _grey(np.linspace(*extremes, 64, dtype=np.float32).reshape(8, 8)).save(path)
    with refuses(CapszooError, names=["float.tif"]):
        open_image(path, 1)
    with refuses(DataError, names=["float.tif"]):
        decode_image(path, "L", path)
    with refuses(ValueError, names=["black", "white"]):
        infer.preprocess(path, _spec(ImageTransform(1, (8, 8), (0.5,), (0.25,))))
    transform = ImageTransform(1, (8, 8), (0.5,), (0.25,), value_range=extremes)
    assert np.asarray(transform.view(open_image(path))).max() == 255
    assert np.array_equal(transform(open_image(path)).numpy(), infer.preprocess(path, _spec(transform)))


def _colours_of_16_bits(path: Path, value: int) -> Path:
    head = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    body = zlib.compress((b"\0" + struct.pack(">H", value) * 24) * 8)
    return _chunks(path, (b"IHDR", head), (b"IDAT", body))


def test_what_of_a_file_is_not_read_is_said(infer, tmp_path: Path) -> None:
    """Pages after the first, and the lower half of colours of 16 bits, which is all that 12 bits fill."""
    for kind, suffix in ((np.uint8, "tif"), (np.uint16, "tif"), (np.uint8, "gif"), (np.uint8, "webp")):
        pages = [_grey(np.full((8, 8), 9000 * k % 256**2, np.uint16).astype(kind)) for k in (1, 2, 3)]
        pages[0].save(tmp_path / f"{kind.__name__}.{suffix}", save_all=True, append_images=pages[1:])
    transform = ImageTransform(3, (8, 8), (0.5,) * 3, (0.25,) * 3)
    expected = {path.name: ["the first of its pages alone is read"] for path in tmp_path.iterdir()}
    _colours_of_16_bits(tmp_path / "dark.png", 4095)
    _colours_of_16_bits(tmp_path / "bright.png", 40950)
    pages[0].save(tmp_path / "one.tif")
    dark = "the upper 8 of its 16 bits are read, and its values end below 8192: dark"
    expected |= {"dark.png": [dark], "bright.png": [], "one.tif": []}
    for name, notes in expected.items():
        path = tmp_path / name
        assert list(transform.read(open_image(path))[1]) == notes, name
        assert infer.read(path, _spec(transform))[1] == notes, name
    looked = look_at_set(lambda k: (tmp_path / list(expected)[k], list(expected)[k]), len(expected))
    assert looked.notes == (f"uint16.tif and 3 more: {expected['uint8.tif'][0]}", f"dark.png: {dark}")


def test_a_tiff_states_its_range(tmp_path: Path) -> None:
    values = np.full((4, 4), 1023, np.uint16)
    _grey(values).save(tmp_path / "ten.tif", tiffinfo={281: 1023})
    assert np.asarray(open_image(tmp_path / "ten.tif", 1)).min() == 255
    for opened in (open_image(tmp_path / "ten.tif"), upright_picture(Image.open(tmp_path / "ten.tif"))):
        assert to_8_bits(opened)[0].getpixel((0, 0)) == 255


@pytest.mark.parametrize("crop_pct", [1.0, 0.75])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(300, 90), (90, 300), (64, 48)])
def test_crop_modes_are_timms(tmp_path: Path, size: tuple, crop_mode: str, crop_pct: float) -> None:
    waves = np.sin(
        np.arange(size[1])[:, None, None] / 30 + np.arange(size[0])[None, :, None] / 40 + np.arange(3)
    )
    picture = Image.fromarray((waves * 100 + 128).astype(np.uint8))
    picture.save(tmp_path / "a.png")
    mean, std = (0.2, 0.4, 0.8), (0.25,) * 3
    transform = ImageTransform(3, (48, 48), mean, std, crop_pct=crop_pct, crop_mode=crop_mode)
    theirs = timm.data.create_transform(
        (3, 48, 48), crop_pct=crop_pct, crop_mode=crop_mode, mean=mean, std=std, interpolation="bilinear"
    )
    ours = transform(open_image(tmp_path / "a.png"))
    differs = (ours - theirs(picture)).abs() * 0.25 * 255
    # timm scales the whole image to whole pixels, and crops a region that may be half a pixel off
    assert differs.mean() < 2 and (differs > 20).float().mean() < 0.03
    # what a data set stores at the scaled size is the same picture
    side = (round(48 / crop_pct),) * 2
    stored = decode_image(tmp_path / "a.png", "RGB", "a", side, images.Framing(crop_mode, mean))
    edge = (side[0] - 48) // 2
    trained = stored[edge : edge + 48, edge : edge + 48].transpose(2, 0, 1).astype(int)
    off = np.abs(np.rint((ours.numpy() * 0.25 + np.reshape(mean, (3, 1, 1))) * 255) - trained)
    assert (off > 2).mean() < 0.05


def test_the_share_that_is_cropped_away() -> None:
    assert images.cropped_share((256, 64), (64, 64)) == 0.75
    assert images.cropped_share((256, 64), (32, 128)) == 0
    assert images.cropped_share((64, 64), (64, 64), crop_pct=0.5) == 0.75
    for mode in ("squash", "border"):
        assert images.cropped_share((256, 64), (64, 64), crop_mode=mode) == 0


@pytest.mark.parametrize("mode", ["La", "RGBa"])
def test_premultiplied_pictures_are_read(mode: str) -> None:
    picture = Image.new(mode.upper(), (8, 8), (200, 255) if mode == "La" else (200, 200, 200, 255)).convert(
        mode
    )
    transform = ImageTransform(1, (8, 8), (0.5,), (0.25,))
    assert np.asarray(transform.view(picture)).tolist() == [[200] * 8] * 8


def test_an_image_of_many_bands_is_one_line(tmp_path: Path, root: Path) -> None:
    """Pillow also logs it, to the terminal where no handler is set."""
    tags = [(256, 4), (257, 4), (258, 8), (259, 1), (262, 1), (273, 200), (277, 9), (278, 4), (279, 144)]
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    header = b"II*\0" + struct.pack("<IH", 8, len(tags)) + table + bytes(4)
    (tmp_path / "bands.tif").write_bytes(header.ljust(200, b"\0") + bytes(144))
    code = (
        "import sys; from capszoo.images import open_image; from capszoo.errors import CapszooError\n"
        "try:\n    open_image(sys.argv[1])\nexcept CapszooError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "bands.tif")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.stderr == "" and "bands.tif: not an image that can be read" in done.stdout
