"""Make any picture look like the training images: transparency, polarity, framing, canvas.

Training images are drawn in one way (white digits on black, in the middle of the frame). Users' images
differ. Transparency is always composited; inverting and re-framing are done on request, and an image
that looks inverted gets a note. A bundle's ``infer.py`` has a copy of these rules, because it imports nothing from
this package; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageChops

from ._backgrounds import BACKGROUNDS

__all__ = [
    "default_background",
    "fit_drawing",
    "flatten",
    "invert",
    "looks_inverted",
    "pad_to",
]

#: Mean difference from the background, out of 255, below which opaque pixels count as invisible.
VANISHES_BELOW = 32

#: Ratio of the size of MNIST's digits to the side of the frame: 20 of 28 pixels.
FITTED = 20 / 28


def default_background(channels: int) -> str:
    """Black for grey images (digits are white on black), white for colour, unless the weights' metadata differ."""
    return "black" if channels == 1 else "white"


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
        return invert(flat), f"{note} and inverted"
    return flat, note


def invert(image: Image.Image) -> Image.Image:
    """Swap dark and bright, in grey or RGB."""
    return ImageChops.invert(image)


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
