"""How a picture becomes pixels: opened, upright, of 8 bits, without transparency, at the size of a model's input.

``capszoo.images`` and ``capszoo.preprocess`` use these functions, and a bundle's ``infer.py`` has this module's source
in place of its import. It therefore imports numpy and Pillow alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageChops, ImageOps

#: Values of the backgrounds.
BACKGROUNDS = {"black": 0, "white": 255}

#: Pixels of the largest image that is decoded, unless the caller sets another limit.
MAX_PIXELS = 64_000_000

#: Values of pixels that become black and white.
ValueRange = tuple[float, float]

#: Range of integers of more than 8 bits, where nothing states another.
_INTEGERS: ValueRange = (0.0, 65535.0)

#: An image of 16 bits whose values all lie below is dark: it has 12 bits, or fewer.
_DARK = 8192

#: Pixels converted at a time where Pillow has no conversion.
_STRIP = 2**20


class Refused(ValueError):
    """A picture that is not read: the reason, and what to do."""

    def __str__(self) -> str:
        return ": ".join(map(str, self.args))


#: Pillow's formats that are read. Others open further files inside (IPTC), run programs (EPS, refused by its name), or
#: decode before their size can be refused (icons).
FORMATS = tuple("PNG JPEG MPO BMP DIB GIF WEBP TIFF PPM JPEG2000 AVIF TGA PCX SGI".split())


@cache
def image_formats() -> tuple[str, ...]:
    """Those of ``FORMATS`` that this Pillow has, and EPS, which is recognised to be refused in clear words."""
    Image.init()
    return tuple(name for name in (*FORMATS, "EPS") if name in Image.OPEN)


def decoded_pixels(image: Image.Image) -> int:
    """Pixels that decoding an opened image allocates: of the image, or of a TIFF's tile if that is larger."""
    tags = getattr(image, "tag_v2", None) or {}
    width, height = (int(tags.get(tag) or 0) for tag in (322, 323))  # TileWidth, TileLength
    return max(image.width * image.height, width * height)


def open_upright(
    file: str | Path | BinaryIO, max_pixels: int, smaller: str, draft: tuple[str | None, int] | None = None
) -> Image.Image:
    """An image file, upright; refused before it is decoded if it has too many pixels.

    Args:
        file: path, or an open file.
        max_pixels: that are decoded.
        smaller: remedy for an image that has more.
        draft: mode and smallest side with which a JPEG may be decoded at a smaller scale.

    Raises:
        Refused: it has too many pixels, or Pillow would not read it as it is.
        OSError, ValueError: what Pillow raises for other files.
    """
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels  # Pillow's limit would refuse images that the caller allows
    with Image.open(file, formats=image_formats()) as image:
        if image.format == "EPS":  # whatever the file's suffix, Pillow would run Ghostscript to decode it
            raise Refused("in PostScript", "save it as PNG")
        if decoded_pixels(image) > max_pixels:
            what = f"{image.width}x{image.height}"
            if image.width * image.height <= max_pixels:
                what += " in tiles that"
            raise Refused(f"{what} are more than {max_pixels:,} pixels", smaller)
        if draft is not None:
            image.draft(draft[0], (draft[1], draft[1]))
        return upright(image)


def upright(image: Image.Image) -> Image.Image:
    """An opened image, decoded and turned as its EXIF data state.

    Raises:
        Refused: it is in LAB colours or has no pixels.
    """
    if image.mode == "LAB":  # Pillow converts it only with a colour profile
        raise Refused("in LAB colours", "save it in grey or RGB")
    if 0 in image.size:
        raise Refused("has no pixels", "give another image")
    lost = "; ".join(lost_of(image))
    image.load()
    try:
        turned = ImageOps.exif_transpose(image)
    except Exception:  # EXIF data that cannot be read state no orientation
        turned = image.copy()
    turned.info |= {_STATED: None, _LOST: lost}
    if (declared := stated_range(image)) is not None:  # a copy has no tags
        turned.info[_STATED] = declared
    return turned


#: Keys of ``Image.info`` for the range that the image's file states, and for what of the file is not read.
_STATED, _LOST = "capszoo value range", "capszoo lost"


def lost_of(image: Image.Image) -> tuple[str, ...]:
    """What of an opened file is not read: further pages, and where it matters half of the bits of a colour.

    Pillow reads the upper 8 of 16 bits of a colour. Values of 12 bits leave 16 levels of them. An image whose bits are
    looked at is decoded.
    """
    lost = []
    if image.format != "MPO" and getattr(image, "is_animated", False):  # a camera's MPO has a preview
        lost.append("the first of its pages alone is read")
    raw = [args if isinstance(args, str) else str(args[:1]) for *_, args in getattr(image, "tile", ())]
    if image.mode.startswith("RGB") and any(";16" in mode for mode in raw):
        if max(high for _, high in image.getextrema()[:3]) < _DARK // 256:  # type: ignore[misc]
            lost.append(f"the upper 8 of its 16 bits are read, and its values end below {_DARK}: dark")
    return tuple(lost)


def is_deep(image: Image.Image) -> bool:
    """True for an opened image of integers or floats of more than 8 bits, whose black and white are not fixed."""
    return image.mode.startswith("I") or image.mode == "F"


def stated_range(image: Image.Image) -> ValueRange | None:
    """Black and white as a TIFF states them (MinSampleValue and MaxSampleValue); None if it does not."""
    tags = getattr(image, "tag_v2", None) or {}
    if not is_deep(image):
        return None

    def number(*names: int) -> float | None:
        held = next((tags[name] for name in names if name in tags), None)
        held = held[0] if isinstance(held, tuple) and held else held
        return float(held) if isinstance(held, (int, float)) and np.isfinite(held) else None

    highest, lowest = number(281, 341), number(280, 340)
    return (lowest or 0.0, highest) if highest is not None and highest > (lowest or 0.0) else None


def to_8_bits(image: Image.Image, value_range: ValueRange | None = None) -> tuple[Image.Image, str]:
    """16 or 32 bits to 8, one strip at a time: Pillow's conversion would clip. Other images are returned unchanged.

    A transparent value (PNG's tRNS) becomes opaque.

    Args:
        image: of any mode.
        value_range: values that become black and white; those beyond are clipped. None: the range that a TIFF states,
            else 0 to 65535 for integers, 0 to 1 or 0 to 255 for floats.

    Returns:
        The picture, and a note for the user; empty if nothing was assumed or clipped.

    Raises:
        Refused: ``value_range`` is None, the file states none, and it has values outside of the ranges above.
    """
    lost = image.info.get(_LOST, "")
    if not is_deep(image):
        return image, lost
    rows = max(1, _STRIP // image.width)
    strips = [
        np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))
        for top in range(0, image.height, rows)
    ]
    lowest, highest = value_extremes(strips)
    (black, white), note = _black_and_white(image, lowest, highest, value_range)
    scaled = [
        np.rint((np.nan_to_num(strip.astype(np.float64), nan=black) - black) / (white - black) * 255)
        .clip(0, 255)
        .astype(np.uint8)
        for strip in strips
    ]
    picture = np.concatenate(scaled) if scaled else np.zeros((image.height, image.width), np.uint8)
    return Image.fromarray(picture), "; ".join(said for said in (lost, note) if said)


def value_extremes(strips: Sequence[np.ndarray]) -> ValueRange:
    """Smallest and largest value of an image in grey, in parts; infinite ones and NaN do not count."""
    lowest, highest = np.inf, -np.inf
    for strip in strips:
        if (finite := strip[np.isfinite(strip)]).size:
            lowest, highest = min(lowest, float(finite.min())), max(highest, float(finite.max()))
    return (lowest, highest) if lowest <= highest else (0.0, 0.0)


def _black_and_white(
    image: Image.Image, lowest: float, highest: float, value_range: ValueRange | None
) -> tuple[ValueRange, str]:
    """The values of an image that become black and white, and a note if they are assumed, or others are clipped."""
    declared = value_range or image.info.get(_STATED)
    if declared:
        black, white = declared
        clipped = f"values outside of {black:g} to {white:g} are clipped"
        return declared, clipped if lowest < black or highest > white else ""
    unknown = Refused(
        f"its values run from {lowest:g} to {highest:g}, and which are black and white is not known",
        "save it with 8 bits, or train on such images: the weights then state the range",
    )
    if image.mode != "F":
        if lowest < 0 or highest > _INTEGERS[1]:
            raise unknown
        dark = f"16 bits are read as 0 to 65535, and its values end below {_DARK}: dark"
        return _INTEGERS, dark if highest < _DARK else ""
    if 0 <= lowest and highest <= 1:
        return (0.0, 1.0), ""
    # a little above 1 is a picture of 0 to 1 that overshoots, or a dark one of 0 to 255
    if lowest < 0 or not 2 <= highest <= 255:
        raise unknown
    return (0.0, 255.0), "floats above 1 are read as 0 to 255"


def resize_and_crop(
    image: Image.Image,
    size: tuple[int, int],
    crop_pct: float,
    resampling: Image.Resampling,
    crop_mode: str = "center",
    mean: Sequence[float] = (),
) -> Image.Image:
    """An image at ``size`` (height, width): scaled to ``size / crop_pct``, then the middle cropped.

    Only the cropped region is scaled: scaling a whole image of 1 x 1,000,000 pixels would take gigabytes. The region
    has the exact centre of the image. An image that already has the scaled size (``size`` if ``crop_pct`` is 1) is
    cropped, not resampled.

    Args:
        image: in grey or RGB.
        size, crop_pct, resampling: of the result.
        crop_mode: ``center`` scales the shorter side to the frame, ``border`` the longer one, ``squash`` both.
        mean: per channel, for values in 0..1: the colour of the padding of ``border``; black if empty.
    """
    height, width = size
    down, across = scales(image.size, size, crop_pct, crop_mode)
    rows, cols = max(1, round(image.height * down)), max(1, round(image.width * across))
    if crop_mode != "border":
        rows, cols = max(height, rows), max(width, cols)
    tall, wide = min(height, rows), min(width, cols)  # of the part that is seen
    if (rows, cols) == (image.height, image.width):
        x, y = (cols - wide) // 2, (rows - tall) // 2
        seen = image.crop((x, y, x + wide, y + tall))
    else:
        region = min(height / down, image.height), min(width / across, image.width)
        top, left = (image.height - region[0]) / 2, (image.width - region[1]) / 2
        # a rounding error may not lead outside of the image
        box = (left, top, min(left + region[1], image.width), min(top + region[0], image.height))
        seen = image.resize((wide, tall), resampling, box=box)
    if (tall, wide) == size:
        return seen
    bands = len(image.getbands())
    colour = mean if len(mean) == bands else (sum(mean) / max(len(mean), 1),) * bands
    fill = tuple(min(max(round(255 * value), 0), 255) for value in colour)
    canvas = Image.new(image.mode, (width, height), fill)
    canvas.paste(seen, ((width - wide) // 2, (height - tall) // 2))
    return canvas


def scales(
    image: tuple[int, int], size: tuple[int, int], crop_pct: float, crop_mode: str
) -> tuple[float, float]:
    """Factors of the height and of the width of an image (width, height) in ``resize_and_crop``."""
    down, across = size[0] / image[1], size[1] / image[0]
    if crop_mode != "squash":
        down = across = max(down, across) if crop_mode == "center" else min(down, across)
    return down / crop_pct, across / crop_pct


#: Mean difference from the background, out of 255, below which opaque pixels count as invisible.
VANISHES_BELOW = 32

#: Ratio of the size of MNIST's digits to the side of the frame: 20 of 28 pixels.
FITTED = 20 / 28


def flatten(image: Image.Image, background: str, channels: int) -> tuple[Image.Image, str]:
    """Composite a picture's transparent pixels on a background.

    If its opaque pixels would be invisible on the background, the opposite one is used. For a model of grey images the
    result is then inverted, so that it has the background that the model was trained on.

    Args:
        image: of any mode; one without transparency is returned unchanged.
        background: ``black`` or ``white``.
        channels: of the model, 1 or 3.

    Returns:
        The picture without transparency, and a note for the user, empty if the requested background was used.
    """
    if not image.has_transparency_data:
        return image, ""
    if image.mode in ("La", "RGBa"):  # premultiplied, which Pillow converts to no other mode
        image = image.convert(image.mode.upper())
    key = image.info.get("transparency")
    if isinstance(key, tuple) and max(key) > 255:  # of 16 bits, while Pillow reads the pixels as 8
        image = image.copy()
        image.info["transparency"] = tuple(value >> 8 for value in key)
    rgba = image.convert("RGBA")
    # a sample of about a million pixels is enough
    step = max(1, round((rgba.width * rgba.height / 1e6) ** 0.5))
    opacity = np.asarray(rgba.getchannel("A"))[::step, ::step].astype(np.float64)
    grey = np.asarray(rgba.convert("RGB").convert("L"))[::step, ::step].astype(np.float64)
    total = opacity.sum()
    differs = np.abs(grey - BACKGROUNDS[background])
    vanishes = opacity.min() < 255 and total > 0 and (differs * opacity).sum() / total < VANISHES_BELOW
    chosen = background
    note = ""
    if vanishes:
        chosen = "white" if background == "black" else "black"
        note = f"transparent, and its opaque pixels are {background}: composited on {chosen}"
    canvas = Image.new("RGBA", rgba.size, (BACKGROUNDS[chosen],) * 3 + (255,))
    flat = Image.alpha_composite(canvas, rgba).convert("RGB" if channels == 3 else "L")
    if vanishes and channels == 1:
        return ImageChops.invert(flat), f"{note} and inverted"
    return flat, note


def grey_or_rgb(
    image: Image.Image, channels: int, background: str, value_range: ValueRange | None = None
) -> tuple[Image.Image, str, str]:
    """A picture in grey (1 channel) or RGB (3), and the notes of ``to_8_bits`` and ``flatten``."""
    image, depth = to_8_bits(image, value_range)
    image, note = flatten(image, background, channels)
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode), depth, note


def looks_inverted(image: Image.Image, mean: Sequence[float]) -> str:
    """A note if a grey picture is bright with a bright edge, but training images are dark; else empty.

    Args:
        image: as the model sees it, in grey or RGB.
        mean: of the training images, per channel, for values in 0..1.
    """
    if len(mean) != 1 or mean[0] > 0.35 or image.mode != "L":
        return ""
    pixels = np.asarray(image, dtype=np.float64) / 255
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    if pixels.mean() < 0.6 or edge.mean() < 0.6:
        return ""
    return f"mean {pixels.mean():.1f}, trained on {mean[0]:.2f}: inverted? --invert swaps dark and bright"


def fit_drawing(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Centre and scale a drawing like the makers of MNIST: 20 of 28 pixels, its centre of mass in the middle.

    Args:
        image: in grey or RGB, bright on dark. Pixels below a fifth of its range count as background.
        size: height and width of the result, in pixels.
    """
    height, width = size
    grey = np.asarray(image.convert("L"))
    darkest, brightest = float(grey.min()), float(grey.max())
    ink = grey > darkest + 0.2 * (brightest - darkest)
    if not ink.any() or ink.all():  # nothing is drawn
        return image.resize((width, height))
    rows, cols = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    drawing = image.crop((int(cols[0]), int(rows[0]), int(cols[-1]) + 1, int(rows[-1]) + 1))
    scale = FITTED * min(height / drawing.height, width / drawing.width)
    small = (max(1, round(drawing.width * scale)), max(1, round(drawing.height * scale)))
    drawing = drawing.resize(small, Image.Resampling.LANCZOS)
    weight = np.asarray(drawing.convert("L"), dtype=np.float64) + 1e-9
    down = (weight.sum(axis=1) @ np.arange(small[1])) / weight.sum()
    across = (weight.sum(axis=0) @ np.arange(small[0])) / weight.sum()
    top = min(max(round(height / 2 - down), 0), height - small[1])
    left = min(max(round(width / 2 - across), 0), width - small[0])
    framed = Image.new(image.mode, (width, height))
    framed.paste(drawing, (left, top))
    return framed


def pad_to(image: Image.Image, size: tuple[int, int], background: str = "black") -> Image.Image:
    """A picture in the middle of a canvas of ``size`` (height, width), which must be at least as large."""
    height, width = size
    value = BACKGROUNDS[background]
    canvas = Image.new(image.mode, (width, height), value if image.mode == "L" else (value,) * 3)
    canvas.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return canvas


def view(
    image: Image.Image,
    *,
    channels: int,
    size: tuple[int, int],
    interpolation: str,
    crop_pct: float,
    crop_mode: str = "center",
    mean: Sequence[float] = (),
    background: str = "black",
    canvas: str = "black",
    object_size: tuple[int, int] | None = None,
    value_range: ValueRange | None = None,
    inherited_mean: bool = False,
    invert: bool = False,
    fit: bool = False,
) -> tuple[Image.Image, tuple[str, ...]]:
    """An upright image as a model sees it, and notes on how it was read; see ``capszoo.preprocess.ImageTransform``."""
    image, depth, note = grey_or_rgb(image, channels, background, value_range)
    image = ImageChops.invert(image) if invert else image
    whole = (image.height, image.width) == size
    inner = size if object_size is None or (whole and not fit) else object_size
    cropped = resize_and_crop(
        image, inner, crop_pct, Image.Resampling[interpolation.upper()], crop_mode, mean
    )
    # judged before it is fitted, which puts it on black; with another set's mean there is nothing to compare with
    bright = "" if invert or inherited_mean else looks_inverted(cropped, mean)
    image = fit_drawing(image, inner) if fit else cropped
    image = image if inner == size else pad_to(image, size, canvas)
    return image, tuple(remark for remark in (depth, note, bright) if remark)
