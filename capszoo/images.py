"""Open images in one way for ``predict``, ``explain``, ``eval``, ``finetune``, export and the data readers.

A small image file may decode to a huge image. Its size is therefore checked before a pixel is decoded, and an
image is cropped before it is scaled (``capszoo._utils.pixels``).
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, UnidentifiedImageError

from ._utils.choices import CROP_MODES
from ._utils.pixels import (
    FORMATS,
    MAX_PIXELS,
    Refused,
    ValueRange,
    fit_drawing,
    flatten,
    grey_or_rgb,
    looks_inverted,
    open_upright,
    pad_to,
    resize_and_crop,
    scales,
    upright,
)
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
    "is_hidden",
    "is_visible_image",
    "looks_inverted",
    "one_line_errors",
    "open_image",
    "pad_to",
    "pixel_limit",
    "resize_and_crop",
    "to_mode",
    "upright_picture",
]


#: Suffixes of image files in a folder; a file given by name may have any suffix.
IMAGE_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        "png jpg jpeg jpe jfif mpo bmp dib gif webp tif tiff pbm pgm ppm pnm jp2 j2k jpf jpx avif tga pcx sgi"
    ).split()
)

#: A JPEG is decoded at a smaller scale only if that is at least so many times the size that the caller scales to.
JPEG_SCALE = 8

_SMALLER = "scale it down, or allow more with CAPSZOO_MAX_PIXELS"

# Pillow reports some files to its log besides raising an error; without a handler that would go to the terminal.
logging.getLogger("PIL").addHandler(logging.NullHandler())

# The limit here raises an error, and is lower than the size at which Pillow only warns.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", module=r"PIL\.")  # damaged EXIF data, in raw lines

#: Share of an image's area from which losing it is worth a note.
MUCH_CROPPED = 1 / 3


@dataclass(frozen=True)
class Framing:
    """How the images of a set are framed, and which of their values are black and white.

    Attributes:
        crop_mode: one of ``CROP_MODES``.
        mean: per channel, for values in 0..1: the colour of ``border``'s padding. Empty: the data set's.
        value_range: of images with more than 8 bits a channel; ``"set"`` takes it from the training images, None from
            each file (see :func:`open_image`).
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
        value_range: values that become black and white in an image of more than 8 bits; those beyond are clipped. None:
            the range that a TIFF states, else 0 to 65535 for integers, 0 to 1 or 0 to 255 for floats.

    Raises:
        CapszooError: the file is missing, not an image, damaged, or has too many pixels.
    """
    name = name or (source if isinstance(source, (str, Path)) else "an image")
    limit = max_pixels or pixel_limit()
    smaller = "scale it down" if max_pixels else _SMALLER  # the variable does not change a caller's limit
    draft = None if side is None else ({1: "L", 3: "RGB"}.get(channels or 0), JPEG_SCALE * side)
    with one_line_errors(name, limit, smaller):
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        image = open_upright(file, limit, smaller, draft)
        return image if channels is None else to_mode(image, channels, value_range, name)


def upright_picture(image: Image.Image) -> Image.Image:
    """A picture that Pillow opened or made, upright.

    Raises:
        CapszooError: its file is damaged or closed, it has no pixels, or it is in LAB colours.
    """
    name = getattr(image, "filename", "") or "the picture"
    with one_line_errors(name):
        return upright(image)


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
    except Refused as e:
        raise CapszooError(f"{name}: {e.args[0]}", e.args[1]) from None
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
        CapszooError: it has more than 8 bits, and which values are black and white is not known.
    """
    with one_line_errors(name):
        return grey_or_rgb(image, channels, default_background(channels), value_range)[0]


def cropped_share(
    image: tuple[int, int], size: tuple[int, int], crop_pct: float = 1.0, crop_mode: str = "center"
) -> float:
    """Share of an image's area that ``resize_and_crop`` cuts off, 0 to 1.

    Args:
        image: width and height, as Pillow has them.
        size: height and width of the result.
        crop_pct, crop_mode: as for ``resize_and_crop``.
    """
    down, across = scales(image, size, crop_pct, crop_mode)
    seen = min(size[0] / down, image[1]) * min(size[1] / across, image[0])
    return max(0.0, 1 - seen / (image[0] * image[1]))


def default_background(channels: int) -> str:
    """Black for grey images (digits are white on black), white for colour, unless the weights' metadata differ."""
    return "black" if channels == 1 else "white"
