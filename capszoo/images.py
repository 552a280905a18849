"""Open images in one way for ``predict``, ``explain``, ``eval``, ``finetune``, export and the data readers.

A small image file may decode to a huge image. Its size is therefore checked before a pixel is decoded, and an
image is cropped before it is scaled. A bundle's ``infer.py`` has a copy of these rules, because it imports nothing
from this package; ``tests/test_images.py`` checks that the two agree.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from .errors import CapszooError, UsageError
from .reading import default_background, flatten

__all__ = [
    "IMAGE_SUFFIXES",
    "FORMATS",
    "JPEG_SCALE",
    "MAX_PIXELS",
    "files_below",
    "find_images",
    "image_formats",
    "is_visible_image",
    "open_image",
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

#: Pixels of the largest image that is decoded, unless ``CAPSZOO_MAX_PIXELS`` or the caller sets another limit.
MAX_PIXELS = 64_000_000

#: A JPEG is decoded at a smaller scale only if that is at least so many times the size that the caller scales to.
JPEG_SCALE = 8

_SMALLER = "scale it down, or allow more with CAPSZOO_MAX_PIXELS"

# The limit here raises an error, and is lower than the size at which Pillow only warns.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

#: Pixels converted at a time where Pillow has no conversion.
_STRIP = 2**20


def is_visible_image(path: str) -> bool:
    """True for a relative path with the suffix of an image, unless it is hidden or in a hidden folder.

    Hidden files are metadata such as macOS's ``._a.jpg``, hidden folders hold copies such as thumbnails.
    """
    if path.startswith(".") or f"{os.sep}." in path:
        return False
    return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Return files unchanged, and for folders the images under them (:func:`is_visible_image`, sorted).

    Raises:
        CapszooError: a path that does not exist, a folder without images, or one that cannot be read.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = (p for p in files_below(path) if is_visible_image(str(p.relative_to(path))))
            inside = sorted(p for p in below if p.is_file())
            if not inside:
                raise CapszooError(
                    f"{path}: no images in this folder",
                    f"image files end in {', '.join(sorted(IMAGE_SUFFIXES))}",
                )
            found.extend(inside)
        elif path.exists():
            found.append(path)
        else:
            raise CapszooError(f"{path}: no such file", "check the path")
    return found


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
    stated = os.environ.get("CAPSZOO_MAX_PIXELS", "")
    if not stated:
        return MAX_PIXELS
    if not stated.isdecimal() or not 0 < int(stated[:20]) < 2**40:
        raise UsageError(
            f"CAPSZOO_MAX_PIXELS is '{stated[:60]}'", "give a number of pixels, such as 100000000"
        )
    return int(stated)


#: Pillow's formats that are read. Others open further files inside (IPTC), run programs (EPS, refused by its name), or
#: decode before their size can be refused (icons).
FORMATS = (
    "PNG",
    "JPEG",
    "MPO",
    "BMP",
    "DIB",
    "GIF",
    "WEBP",
    "TIFF",
    "PPM",
    "JPEG2000",
    "AVIF",
    "TGA",
    "PCX",
    "SGI",
)


@cache
def image_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow has, and EPS, which is recognised to be refused in clear words."""
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
) -> Image.Image:
    """Read an image, upright.

    Args:
        source: path of a file, or a file's bytes.
        channels: 1 converts to grey, 3 to RGB (see :func:`to_mode`); None leaves the mode.
        name: name in error messages; None uses the path.
        max_pixels: an image with more is refused before it is decoded; None uses :func:`pixel_limit`.
        side: size in pixels to which the caller scales with a filter. A JPEG may then be decoded at a smaller scale, of
            at least :data:`JPEG_SCALE` times the side; after the filter, pixels differ by at most 1 of 255.

    Raises:
        CapszooError: the file is missing, not an image, damaged, or has too many pixels.
    """
    name = name or (source if isinstance(source, (str, Path)) else "an image")
    limit = max_pixels or pixel_limit()
    if Image.MAX_IMAGE_PIXELS is not None and limit > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = limit  # Pillow's limit would refuse images that the caller allows
    smaller = "scale it down" if max_pixels else _SMALLER  # the variable does not change a caller's limit
    with _one_line_errors(name, limit, smaller):
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
            return upright if channels is None else to_mode(upright, channels)


def upright_picture(image: Image.Image) -> Image.Image:
    """A picture that Pillow opened or made, upright.

    Raises:
        CapszooError: its file is damaged or closed, it has no pixels, or it is in LAB colours.
    """
    name = getattr(image, "filename", "") or "the picture"
    with _one_line_errors(name, pixel_limit(), _SMALLER):
        return _upright(image, name)


def _upright(image: Image.Image, name: str | Path) -> Image.Image:
    if image.mode == "LAB":  # Pillow converts it only with a colour profile
        raise CapszooError(f"{name}: in LAB colours", "save it in grey or RGB")
    if 0 in image.size:
        raise CapszooError(f"{name}: has no pixels", "give another image")
    image.load()
    return ImageOps.exif_transpose(image)


@contextmanager
def _one_line_errors(name: str | Path, limit: int, smaller: str) -> Iterator[None]:
    """Turn what Pillow raises for an image into a CapszooError.

    `limit` is the number of pixels that is allowed, `smaller` the remedy for an image that has more.
    """
    try:
        yield
    except CapszooError:
        raise
    except FileNotFoundError:
        raise CapszooError(f"{name}: no such file", "check the path") from None
    except IsADirectoryError:
        raise CapszooError(f"{name} is a folder", "name an image file") from None
    except UnidentifiedImageError:
        raise CapszooError(f"{name}: not an image", "give a PNG, JPEG or another common image file") from None
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


def to_mode(image: Image.Image, channels: int) -> Image.Image:
    """Convert an image to grey (1 channel) or RGB (3): 16 and 32 bits scaled to 8, transparency composited."""
    mode = "L" if channels == 1 else "RGB"
    image, _ = flatten(to_8_bits(image), default_background(channels), channels)
    return image if image.mode == mode else image.convert(mode)


def to_8_bits(image: Image.Image) -> Image.Image:
    """16 or 32 bits to 8, one strip at a time: Pillow's conversion would clip. Other images are returned unchanged.

    White is 65535 or 255 for integers, 255 or 1 for floats: the least that is not below the largest value. A
    transparent value (PNG's tRNS) becomes opaque.
    """
    if not (image.mode.startswith("I") or image.mode == "F"):
        return image
    rows = max(1, _STRIP // image.width)
    strips = [
        np.nan_to_num(np.asarray(image.crop((0, top, image.width, min(top + rows, image.height)))))
        for top in range(0, image.height, rows)
    ]
    largest = max((strip.max(initial=0) for strip in strips), default=0)
    if image.mode.startswith("I"):
        top_value = 65535.0 if largest > 255 else 255.0
    else:
        top_value = 255.0 if largest > 1 else 1.0
    scaled = [
        np.rint(strip.astype(np.float64) / top_value * 255).clip(0, 255).astype(np.uint8) for strip in strips
    ]
    return Image.fromarray(
        np.concatenate(scaled) if scaled else np.zeros((image.height, image.width), np.uint8)
    )


def resize_and_crop(
    image: Image.Image, size: tuple[int, int], crop_pct: float, resampling: Image.Resampling
) -> Image.Image:
    """The centre of an image at ``size`` (height, width): the shorter side scaled to ``size / crop_pct``, then cropped.

    Only the cropped region is scaled: scaling a whole image of 1 x 1,000,000 pixels would take gigabytes. The region
    has the exact centre of the image. An image that already has the scaled size (``size`` if ``crop_pct`` is 1) is
    cropped, not resampled.
    """
    height, width = size
    scale = max(height / image.height, width / image.width) / crop_pct
    rows, cols = max(height, round(image.height * scale)), max(width, round(image.width * scale))
    if (rows, cols) == (image.height, image.width):
        x, y = (cols - width) // 2, (rows - height) // 2
        return image.crop((x, y, x + width, y + height))
    tall, wide = min(height / scale, image.height), min(width / scale, image.width)
    top, left = (image.height - tall) / 2, (image.width - wide) / 2
    # a rounding error may not lead outside of the image
    box = (left, top, min(left + wide, image.width), min(top + tall, image.height))
    return image.resize((width, height), resampling, box=box)
