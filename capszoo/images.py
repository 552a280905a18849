"""Open images in one way for ``predict``, ``explain``, ``eval``, ``finetune``, export and the data readers.

A small image file may decode to a huge image. Its size is therefore checked before a pixel is decoded, and an
image is cropped before it is scaled. A bundle's ``infer.py`` has a copy of these rules, because it imports nothing
from this package; ``tests/test_images.py`` checks that the two agree.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageChops, ImageOps, UnidentifiedImageError

from ._utils.choices import BACKGROUNDS, CROP_MODES
from .errors import CapszooError, UsageError

__all__ = [
    "CROP_MODES",
    "FORMATS",
    "Framing",
    "IMAGE_SUFFIXES",
    "JPEG_SCALE",
    "MAX_PIXELS",
    "MUCH_CROPPED",
    "ValueRange",
    "cropped_share",
    "default_background",
    "files_below",
    "find_images",
    "fit_drawing",
    "flatten",
    "image_formats",
    "invert",
    "is_deep",
    "is_hidden",
    "is_visible_image",
    "looks_inverted",
    "one_line_errors",
    "open_image",
    "pad_to",
    "pixel_limit",
    "resize_and_crop",
    "stated_range",
    "to_8_bits",
    "to_mode",
    "upright_picture",
    "value_extremes",
]


#: Suffixes of image files in a folder; a file given by name may have any suffix.
IMAGE_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        "png jpg jpeg jpe jfif mpo bmp dib gif webp tif tiff pbm pgm ppm pnm jp2 j2k jpf jpx avif tga pcx sgi"
    ).split()
)

#: Pixels of the largest image that is decoded, unless ``CAPSZOO_MAX_PIXELS`` or the caller sets another limit.
MAX_PIXELS = 64_000_000

#: A JPEG is decoded at a smaller scale only if that is at least so many times the size that the caller scales to.
JPEG_SCALE = 8

_SMALLER = "scale it down, or allow more with CAPSZOO_MAX_PIXELS"

# Pillow reports some files to its log besides raising an error; without a handler that would go to the terminal.
logging.getLogger("PIL").addHandler(logging.NullHandler())

# The limit here raises an error, and is lower than the size at which Pillow only warns.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", module=r"PIL\.")  # damaged EXIF data, in raw lines

#: Pixels converted at a time where Pillow has no conversion.
_STRIP = 2**20

#: Share of an image's area from which losing it is worth a note.
MUCH_CROPPED = 1 / 3

#: Values of pixels that become black and white.
ValueRange = tuple[float, float]

#: Range of integers of more than 8 bits, where nothing states another.
_INTEGERS: ValueRange = (0.0, 65535.0)

#: An image of 16 bits whose values all lie below is dark: it has 12 bits, or fewer.
_DARK = 8192


@dataclass(frozen=True)
class Framing:
    """How the images of a set are framed, and which of their values are black and white.

    Attributes:
        crop_mode: one of ``CROP_MODES``.
        mean: per channel, for values in 0..1: the colour of ``border``'s padding. Empty: the data set's.
        value_range: of images with more than 8 bits a channel; ``"set"`` takes it from the training images, None from
            each file (see ``to_8_bits``).
    """

    crop_mode: str = "center"
    mean: tuple[float, ...] = ()
    value_range: ValueRange | Literal["set"] | None = None


def is_visible_image(path: str) -> bool:
    """True for a relative path with the suffix of an image, unless it is hidden or in a hidden folder.

    Hidden files are metadata such as macOS's ``._a.jpg``, hidden folders hold copies such as thumbnails.
    """
    return not is_hidden(path) and os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES


def is_hidden(path: str) -> bool:
    """True for a relative path of a hidden file, or of one in a hidden folder."""
    return path.startswith(".") or f"{os.sep}." in path


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Return files unchanged, and for folders the images under them (:func:`is_visible_image`, sorted).

    Raises:
        CapszooError: a path that does not exist, a folder without images, or one that cannot be read.
    """
    paths_found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = (p for p in files_below(path) if is_visible_image(str(p.relative_to(path))))
            inside = sorted(p for p in below if p.is_file())
            if not inside:
                raise CapszooError(
                    f"{path}: no images in this folder",
                    f"image files end in {', '.join(sorted(IMAGE_SUFFIXES))}",
                )
            paths_found.extend(inside)
        elif path.exists():
            paths_found.append(path)
        else:
            raise CapszooError(f"{path}: no such file", "check the path")
    return paths_found


def files_below(folder: Path) -> Iterator[Path]:
    """All files under a folder, except in hidden folders; also in linked folders. One reached twice is read once.

    Raises:
        CapszooError: a folder that cannot be read.
    """

    def fail(error: OSError) -> None:
        raise CapszooError(
            f"{error.filename}: this folder cannot be read ({error.strerror})", "check its permissions"
        ) from None

    seen: set[str] = set()
    for place, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a folder above, for example
            folders.clear()
            continue
        seen.add(real)
        # hidden folders hold no images; of a folder that is reached twice, the path without a link counts
        folders[:] = sorted(
            (f for f in folders if not f.startswith(".")),
            key=lambda f: (os.path.islink(os.path.join(place, f)), f),
        )
        yield from (Path(place, file) for file in files)


def pixel_limit() -> int:
    """Pixels of the largest image that is decoded: :data:`MAX_PIXELS`, or the environment's ``CAPSZOO_MAX_PIXELS``.

    Raises:
        UsageError: the variable is not an integer above 0.
    """
    setting = os.environ.get("CAPSZOO_MAX_PIXELS", "")
    if not setting:
        return MAX_PIXELS
    if not setting.isdecimal() or not 0 < int(setting[:20]) < 2**40:
        raise UsageError(
            f"CAPSZOO_MAX_PIXELS is '{setting[:60]}'", "give a number of pixels, such as 100000000"
        )
    return int(setting)


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


def open_image(
    source: str | Path | bytes,
    channels: int | None = None,
    *,
    name: str | Path | None = None,
    max_pixels: int | None = None,
    side: int | None = None,
    value_range: ValueRange | None = None,
) -> Image.Image:
    """Read an image, upright.

    Args:
        source: path of a file, or a file's bytes.
        channels: 1 converts to grey, 3 to RGB (see :func:`to_mode`); None leaves the mode.
        name: name in error messages; None uses the path.
        max_pixels: an image with more is refused before it is decoded; None uses :func:`pixel_limit`.
        side: size in pixels to which the caller scales with a filter. A JPEG may then be decoded at a smaller scale, of
            at least :data:`JPEG_SCALE` times the side; after the filter, pixels differ by at most 1 of 255.
        value_range: see :func:`to_8_bits`.

    Raises:
        CapszooError: the file is missing, not an image, damaged, or has too many pixels.
    """
    name = name or (source if isinstance(source, (str, Path)) else "an image")
    limit = max_pixels or pixel_limit()
    if Image.MAX_IMAGE_PIXELS is not None and limit > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = limit  # Pillow's limit would refuse images that the caller allows
    smaller = "scale it down" if max_pixels else _SMALLER  # the variable does not change a caller's limit
    with one_line_errors(name, limit, smaller):
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(file, formats=image_formats()) as image:
            if image.format == "EPS":  # whatever the file's suffix, Pillow would run Ghostscript to decode it
                raise CapszooError(f"{name}: in PostScript", "save it as PNG")
            if decoded_pixels(image) > limit:
                what = f"{image.width}x{image.height}"
                if image.width * image.height <= limit:
                    what += " in tiles that"
                raise CapszooError(f"{name}: {what} are more than {limit:,} pixels", smaller)
            if side is not None:
                smallest = JPEG_SCALE * side
                image.draft({1: "L", 3: "RGB"}.get(channels or 0), (smallest, smallest))
            upright = _upright(image, name)
            return upright if channels is None else to_mode(upright, channels, value_range, name)


def upright_picture(image: Image.Image) -> Image.Image:
    """A picture that Pillow opened or made, upright.

    Raises:
        CapszooError: its file is damaged or closed, it has no pixels, or it is in LAB colours.
    """
    name = getattr(image, "filename", "") or "the picture"
    with one_line_errors(name):
        return _upright(image, name)


def _upright(image: Image.Image, name: str | Path) -> Image.Image:
    if image.mode == "LAB":  # Pillow converts it only with a colour profile
        raise CapszooError(f"{name}: in LAB colours", "save it in grey or RGB")
    if 0 in image.size:
        raise CapszooError(f"{name}: has no pixels", "give another image")
    lost = "; ".join(lost_of(image))
    image.load()
    try:
        upright = ImageOps.exif_transpose(image)
    except Exception:  # EXIF data that cannot be read state no orientation
        upright = image.copy()
    upright.info |= {_STATED: None, _LOST: lost}
    if (declared := stated_range(image)) is not None:  # a copy has no tags
        upright.info[_STATED] = declared
    return upright


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


@contextmanager
def one_line_errors(name: str | Path, limit: int | None = None, smaller: str = _SMALLER) -> Iterator[None]:
    """Turn what Pillow raises for an image into a CapszooError.

    Args:
        name: of the image.
        limit: number of pixels that is allowed; None: :func:`pixel_limit`.
        smaller: remedy for an image that has more.
    """
    limit = limit or pixel_limit()
    try:
        yield
    except CapszooError:
        raise
    except FileNotFoundError:
        raise CapszooError(f"{name}: no such file", "check the path") from None
    except IsADirectoryError:
        raise CapszooError(f"{name} is a folder", "name an image file") from None
    except UnidentifiedImageError:
        raise CapszooError(
            f"{name}: not an image that can be read",
            "give a PNG, JPEG or another common image file; save other kinds (HEIC, more than 4 bands) as one",
        ) from None
    except Image.DecompressionBombError:
        raise CapszooError(f"{name}: more than {limit:,} pixels", smaller) from None
    except MemoryError:
        raise CapszooError(f"{name}: too large for the memory of this machine", "scale it down") from None
    except PermissionError:
        raise CapszooError(f"{name}: cannot be read", "check its permissions") from None
    except Exception as e:  # Pillow's decoders raise many kinds of errors for broken files
        reason = " ".join(str(e).split())[:200] or type(e).__name__
        raise CapszooError(
            f"{name}: cannot be read ({reason})",
            "the file is damaged, or of a kind that Pillow does not read",
        ) from None


def to_mode(
    image: Image.Image, channels: int, value_range: ValueRange | None = None, name: str | Path = "an image"
) -> Image.Image:
    """Convert an image to grey (1 channel) or RGB (3): 16 and 32 bits scaled to 8, transparency composited.

    Raises:
        CapszooError: see :func:`to_8_bits`.
    """
    mode = "L" if channels == 1 else "RGB"
    image, _ = flatten(to_8_bits(image, value_range, name)[0], default_background(channels), channels)
    return image if image.mode == mode else image.convert(mode)


def to_8_bits(
    image: Image.Image, value_range: ValueRange | None = None, name: str | Path = "an image"
) -> tuple[Image.Image, str]:
    """16 or 32 bits to 8, one strip at a time: Pillow's conversion would clip. Other images are returned unchanged.

    A transparent value (PNG's tRNS) becomes opaque.

    Args:
        image: of any mode.
        value_range: values that become black and white; those beyond are clipped. None: the range that a TIFF states,
            else 0 to 65535 for integers, 0 to 1 or 0 to 255 for floats.
        name: of the image in errors.

    Returns:
        The picture, and a note for the user; empty if nothing was assumed or clipped.

    Raises:
        CapszooError: ``value_range`` is None, the file states none, and it has values outside of the ranges above.
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
    (black, white), note = _black_and_white(image, lowest, highest, value_range, name)
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
    image: Image.Image, lowest: float, highest: float, value_range: ValueRange | None, name: str | Path
) -> tuple[ValueRange, str]:
    """The values of an image that become black and white, and a note if they are assumed, or others are clipped."""
    declared = value_range or image.info.get(_STATED)
    if declared:
        black, white = declared
        clipped = f"values outside of {black:g} to {white:g} are clipped"
        return declared, clipped if lowest < black or highest > white else ""
    unknown = CapszooError(
        f"{name}: its values run from {lowest:g} to {highest:g}, and which are black and white is not known",
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
    mean: tuple[float, ...] = (),
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
    down, across = _scales(image.size, size, crop_pct, crop_mode)
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


def _scales(
    image: tuple[int, int], size: tuple[int, int], crop_pct: float, crop_mode: str
) -> tuple[float, float]:
    """Factors of the height and of the width of an image (width, height) in ``resize_and_crop``."""
    down, across = size[0] / image[1], size[1] / image[0]
    if crop_mode != "squash":
        down = across = max(down, across) if crop_mode == "center" else min(down, across)
    return down / crop_pct, across / crop_pct


def cropped_share(
    image: tuple[int, int], size: tuple[int, int], crop_pct: float = 1.0, crop_mode: str = "center"
) -> float:
    """Share of an image's area that ``resize_and_crop`` cuts off, 0 to 1.

    Args:
        image: width and height, as Pillow has them.
        size: height and width of the result.
        crop_pct, crop_mode: as for ``resize_and_crop``.
    """
    down, across = _scales(image, size, crop_pct, crop_mode)
    seen = min(size[0] / down, image[1]) * min(size[1] / across, image[0])
    return max(0.0, 1 - seen / (image[0] * image[1]))


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
