"""Readers of file formats: idx, parquet with encoded images, CIFAR's binary batches, SVHN's .mat, NORB's matrices.

Each returns uint8 images [n, c, h, w] and int64 labels [n] (or the plain tensor of one file), or raises ``DataError``
with one line that names the file. Nothing is ever unpickled, because a pickle can run arbitrary code.
Sources of the formats: idx: the table at the foot of LeCun's MNIST page; parquet: the Hub's ``Image`` feature, a
struct of ``bytes`` and ``path``, next to a ``label``; CIFAR binary: one label byte (CIFAR-100 two, the coarse class
first), then 3 planes of 1,024 bytes; SVHN: MATLAB 5 with X [32, 32, 3, n] and y [n, 1], in which the digit 0 is class
10; NORB: a little-endian magic number that states the dtype, the rank, at least three sizes, then the values.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import random
import re
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from capszoo._utils.files import expanded
from capszoo.errors import CapszooError, install_hint

from .errors import DataError
from .specs import Side, both_sides

if TYPE_CHECKING:
    from capszoo.images import Framing

_IDX_UBYTE = 0x08
#: Bytes that a file of images may unpack to, where the size of its set is not known beforehand.
MAX_FILE_BYTES = 2 * 2**30
#: Pillow's mode in which images are read, by the number of channels.
MODES = {1: "L", 3: "RGB"}
#: Number of images, drawn at random, that are looked at first.
_LOOKED_AT = 4096
_ORIENTATION = 0x0112  # EXIF tag
#: Largest label of a set: each number up to it is a class.
MAX_LABEL = 100_000
_NORB_BYTES = 29_160 * 2 * 108 * 108 + 2**10  # largest file: two images of 108 x 108 per example
_CIFAR_BYTES = 50_000 * (2 + 3 * 32 * 32)
_SVHN_IMAGES = 531_131  # size of the extra set
_CIFAR_PIXELS = 3 * 32 * 32
_IMAGE_COLUMNS = ("image", "img")
#: Names of a column of labels, the most common first.
LABEL_COLUMNS = ("label", "fine_label", "labels", "class", "target", "category")
_NORB_TYPES: dict[int, np.dtype[Any]] = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}


def _read_bytes(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """A file's bytes, decompressed if they are gzip, which may expand a thousandfold."""
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            raw = (gzip.GzipFile(fileobj=file) if zipped else file).read(limit + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) > limit:
        raise DataError(f"{path} holds more than {limit:,} bytes, which no such file does; fetch it again")
    return raw


def read_idx(path: str | Path, limit: int = MAX_FILE_BYTES) -> Tensor:
    """Read one idx file of unsigned bytes, gzipped or not; a file of more than ``limit`` bytes is refused.

    Returns:
        A uint8 tensor of the shape in the header.
    """
    path = Path(path)
    raw = _read_bytes(path, limit)
    if len(raw) < 4 or raw[:2] != b"\x00\x00" or raw[2] != _IDX_UBYTE:
        raise DataError(
            f"{path} is not an idx file of bytes (its first bytes are {raw[:4].hex() or 'missing'})"
        )
    rank = raw[3]
    header = 4 + 4 * rank
    shape = tuple(int.from_bytes(raw[4 + 4 * k : 8 + 4 * k], "big") for k in range(rank))
    if not 1 <= rank <= 4:
        raise DataError(f"{path} states {rank} dimensions, which no file of images or labels has")
    return _after_header(path, raw, header, shape, np.dtype("u1"))


def _after_header(path: Path, raw: bytes, header: int, shape: tuple[int, ...], kind: np.dtype[Any]) -> Tensor:
    expected = header + kind.itemsize * math.prod(shape)
    if len(raw) != expected:
        raise DataError(f"{path} is truncated or padded: {len(raw)} bytes, its header promises {expected}")
    values = np.frombuffer(raw, kind, offset=header).reshape(shape)
    return torch.from_numpy(values.astype(kind.newbyteorder("=")))


def idx_pair(folder: Path, stem: str) -> tuple[Path, Path] | None:
    """Files of images and labels of a split, under any of the common names; None if they do not exist."""

    def find(kind: str) -> Path | None:
        names = (f"{stem}-{kind}-ubyte", f"{stem}-{kind.replace('-idx', '.idx')}-ubyte")
        return next((p for n in names for p in (folder / n, folder / f"{n}.gz") if p.is_file()), None)

    images, labels = find("images-idx3"), find("labels-idx1")
    return (images, labels) if images and labels else None


def read_idx_pair(pair: tuple[Path, Path], limit: int = MAX_FILE_BYTES) -> tuple[Tensor, Tensor]:
    """Images [n, 1, h, w] and labels [n] of a split; files of more than ``limit`` bytes are refused."""
    images, labels = read_idx(pair[0], limit), read_idx(pair[1], limit)
    if images.ndim != 3 or labels.ndim != 1:
        raise DataError(f"{pair[0]} and {pair[1]} do not hold images and labels")
    return images.unsqueeze(1), labels.long()


def _check_shards(files: Sequence[Path]) -> None:
    """Check that no Hub shard is missing: their names have the number of shards, ``train-00000-of-00004.parquet``."""
    match = re.search(r"-of-(\d+)\.parquet$", files[0].name)
    if match and int(match[1]) != len(files):
        raise DataError(
            f"{files[0].parent} holds {len(files)} of {int(match[1])} shards like {files[0].name}"
        )


def decode_image(
    encoded: bytes | Path,
    mode: str,
    source: Path | str,
    side: Side | None = None,
    framing: Framing | None = None,
) -> np.ndarray:
    """Decode one image.

    Args:
        encoded: bytes of the image, or the path of its file.
        mode: "L" or "RGB".
        source: name in error messages.
        side: frame it at this height and width, or side of a square; None keeps the size.
        framing: how it is framed, and which values are black and white; None: the middle, and each file's own.

    Returns:
        uint8 [h, w] or [h, w, 3].
    """
    from PIL import Image

    from capszoo.images import Framing, open_image, resize_and_crop

    framing = framing or Framing()
    value_range = None if framing.value_range == "set" else framing.value_range
    size = None if side is None else both_sides(side)
    try:
        result = open_image(
            encoded,
            1 if mode == "L" else 3,
            name=source,
            side=size and max(size),
            value_range=value_range,
        )
    except CapszooError as error:
        reason = error.message.removeprefix(f"{source}: ")
        raise DataError(f"{source}: {reason}", error.remedy) from error
    if size is not None and result.size != size[::-1]:
        bilinear = Image.Resampling.BILINEAR
        result = resize_and_crop(result, size, 1.0, bilinear, framing.crop_mode, framing.mean)
    return np.asarray(result)


@dataclass(frozen=True)
class SetLook:
    """What the headers of a set's images say.

    Attributes:
        channels: 3 if any of the images has colour, else 1.
        value_range: black and white, one range for all images of more than 8 bits; None: there are none.
        sizes: width and height of a random sample of the images.
        notes: what of files is not read, a sentence a kind.
    """

    channels: int
    value_range: tuple[float, float] | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()


def look_at_set(
    image_at: Callable[[int], tuple[bytes | Path, Path | str]],
    count: int,
    channels: int | None = None,
    ranges: bool = True,
) -> SetLook:
    """Colour and sizes of a set's images, and one range of values for those of more than 8 bits a channel.

    A random sample is looked at first. The others are looked at only if that leaves colour or range open, each once.

    The range is what the files state (a TIFF's MaxSampleValue), if all of them do. Otherwise white is the largest
    value; of integers, the largest that its number of bits can hold, at least 8. Black is 0, or the smallest value if
    that is negative. Floats from 0 to 1 have that range.

    Args:
        image_at: an image by its index, encoded or as a path, and its name.
        count: number of images.
        channels: 1 or 3 if that is known; None: look for colour.
        ranges: look for values of more than 8 bits.
    """

    def look(index: int) -> _Look | None:
        try:
            encoded, source = image_at(index)
        except Exception:  # reported when it is decoded
            return None
        return _look_at(encoded, source, ranges)

    def looked(indices: Sequence[int]) -> list[_Look]:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return [one for one in pool.map(look, indices) if one is not None]

    sample = random.Random(0).sample(range(count), min(count, _LOOKED_AT))
    seen = looked(sample)
    colour = any(one.colour for one in seen)
    values = [one.values for one in seen if one.values]
    rest = sorted(set(range(count)) - set(sample))
    for start in range(0, len(rest), _LOOKED_AT):  # `map` submits all that it is given at once
        if not values and (colour or channels):
            break
        more = looked(rest[start : start + _LOOKED_AT])
        colour = colour or any(one.colour for one in more)
        values += [one.values for one in more if one.values]
    sizes = tuple(one.size for one in seen)
    return SetLook(channels or (3 if colour else 1), _range_of(values), sizes, _notes(seen))


def _notes(seen: Sequence[_Look]) -> tuple[str, ...]:
    """A sentence about each kind of thing that is not read, with the first file's name and the number of others."""
    names: dict[str, list[str]] = {}
    for one in seen:
        for what in one.lost:
            names.setdefault(what, []).append(one.name)
    return tuple(
        f"{min(files)}{f' and {len(files) - 1:,} more' if files[1:] else ''}: {what}"
        for what, files in names.items()
    )


class _Values(NamedTuple):
    """Values of an image of more than 8 bits."""

    floats: bool
    low: float
    high: float
    stated: bool


def _range_of(values: Sequence[_Values]) -> tuple[float, float] | None:
    if not values:
        return None
    low, high = min(one.low for one in values), max(one.high for one in values)
    if not all(one.stated for one in values) and low >= 0:
        low = 0.0
        if not any(one.floats for one in values):
            high = float(2 ** max(8, int(high).bit_length()) - 1)
        elif high <= 1:
            high = 1.0
    return low, high if high > low else low + 1  # a set of one value


def parquet_label_names(file: str | Path) -> tuple[str, ...]:
    """Class names from the Hub's metadata in a parquet file; () if it has none that can be read."""
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file)
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        # the column that `_parquet_table` reads
        column = next(column for column in LABEL_COLUMNS if column in schema.names)
        names = features[column].get("names", ())
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


class _Look(NamedTuple):
    """What an image's file states before it is decoded, the values of one of more than 8 bits, and what is not read."""

    colour: bool
    size: tuple[int, int]
    values: _Values | None
    name: str
    lost: tuple[str, ...]


def _look_at(encoded: bytes | Path, source: Path | str, ranges: bool) -> _Look | None:
    """Open an image once for its header, and decode it for its values; None: decoding will report what it has."""
    from PIL import Image

    from capszoo._utils.pixels import (
        decoded_pixels,
        image_formats,
        is_deep,
        lost_of,
        stated_range,
        value_extremes,
    )
    from capszoo.images import open_image, pixel_limit

    try:
        file = io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
        with Image.open(file, formats=image_formats()) as image:
            colour = not (image.mode in ("1", "L", "LA") or is_deep(image))
            # only where the header states it: Pillow would decode a PNG to look for it at the end
            turned = "exif" in image.info and image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
            size = image.size[::-1] if turned else image.size
            lost = lost_of(image) if decoded_pixels(image) <= pixel_limit() else ()
            look = _Look(colour, size, None, Path(source).name, lost)
            if not ranges or not is_deep(image):
                return look
            floats, declared = image.mode == "F", stated_range(image)
        low, high = declared or value_extremes([np.asarray(open_image(encoded, name=source))])
        return look._replace(values=_Values(floats, low, high, declared is not None))
    except Exception:
        return None


def _encoded(cell: Any, source: Path, folder: Path | None) -> bytes | Path:
    """An image's bytes, or its path below ``folder``; without one paths are refused, because they may name any file."""
    held = cell.get("bytes") if isinstance(cell, dict) else cell
    if isinstance(held, bytes):
        return held
    named = cell.get("path") if isinstance(cell, dict) else cell
    if not isinstance(named, str):
        raise DataError(f"{source}: the image column holds neither bytes nor paths")
    if folder is None:
        raise DataError(
            f"{source} names its images by path only, and files of this machine are not read for it: take a copy with "
            "embedded bytes, or set CAPSZOO_IMAGE_PATHS to the folder that the images are in"
        )
    return image_below(folder, named, source)


def image_below(folder: Path, named: str, source: Path | str) -> Path:
    """The file that a data set names, which must be a regular file below a folder.

    Raises:
        DataError: any other file.
    """
    try:
        path = (folder / named).resolve()
        if not (path.is_relative_to(folder.resolve()) and path.is_file()):
            raise ValueError
    except (OSError, ValueError) as error:
        raise DataError(f"{source} names {named[:200]!r}, which is no file below {folder}") from error
    return path


def _unpacked_bytes(groups: Any, columns: Sequence[str]) -> int:
    """Bytes of some columns of a parquet file, uncompressed, from its metadata; of all of them if those are few."""
    parts = [groups.row_group(k) for k in range(groups.num_row_groups)]
    whole = sum(part.total_byte_size for part in parts)
    if whole <= 2 * MAX_FILE_BYTES:
        return whole  # pyarrow ends the process at `column` of some damaged files
    return sum(
        part.column(i).total_uncompressed_size
        for part in parts
        for i in range(part.num_columns)
        if part.column(i).path_in_schema.partition(".")[0] in columns
    )


def _read_columns(path: Path, columns: list[str], row_bytes: int) -> Any:
    """Columns of a parquet file, in parts, because a value that is stored once may stand in every row.

    Args:
        path: of the file.
        columns: their names.
        row_bytes: unpacked bytes by its metadata, so that no value has more.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts, size = [], 0
    with pq.ParquetFile(path) as file:
        rows = min(max(MAX_FILE_BYTES // max(row_bytes, 1), 1), 4096)
        for part in file.iter_batches(batch_size=rows, columns=columns):
            size += part.nbytes
            if size > 2 * MAX_FILE_BYTES:
                raise DataError(
                    f"{path} unpacks to over {size:,} bytes, too much for memory: use hf:{path.parent}"
                )
            parts.append(part)
        schema = pa.schema([file.schema_arrow.field(name) for name in columns])
    return pa.Table.from_batches(parts, parts[0].schema if parts else schema)


def _parquet_table(path: Path) -> tuple[Any, str, str]:
    """One parquet shard, and the names of its columns of images and labels; raises ``DataError`` for any other file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"reading parquet needs pyarrow: {install_hint('train')}") from error
    try:
        groups = pq.read_metadata(path)
        columns = pq.read_schema(path).names
        image_column = next((name for name in _IMAGE_COLUMNS if name in columns), None)
        label_column = next((name for name in LABEL_COLUMNS if name in columns), None)
        if image_column is None or label_column is None:
            raise DataError(f"{path} has the columns {columns}; expected 'image' or 'img', and 'label'")
        whole = _unpacked_bytes(groups, (image_column, label_column))
        if whole > 2 * MAX_FILE_BYTES or groups.num_rows > MAX_FILE_BYTES // 8:
            raise DataError(f"{path} unpacks to {whole:,} bytes, too much for memory: use hf:{path.parent}")
        table = _read_columns(path, [image_column, label_column], whole)
    except (OSError, pa.ArrowException, UnicodeError) as error:  # names of columns that are no text
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{path} is not a readable parquet file: {reason}") from error
    kind = table.schema.field(label_column).type
    column = table.column(label_column)
    words = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_label = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string)
    accepted = any(check(words) for check in is_label)
    if not accepted or column.null_count:
        what = "empty cells" if accepted else f"values of type {kind}"
        raise DataError(
            f"{path}: the column '{label_column}' holds {what}; labels are whole numbers, or text"
        )
    return table, image_column, label_column


def parquet_cells(files: Sequence[Path]) -> tuple[list[tuple[bytes | Path, Path]], list[int | str]]:
    """The encoded images of parquet shards, each with its shard, and their labels."""
    asked = os.environ.get("CAPSZOO_IMAGE_PATHS")
    folder = expanded(asked) if asked else None
    encoded: list[tuple[bytes | Path, Path]] = []
    labels: list[int | str] = []
    for path in files:
        table, image_column, label_column = _parquet_table(path)
        encoded += [(_encoded(cell, path, folder), path) for cell in table.column(image_column).to_pylist()]
        labels += table.column(label_column).to_pylist()
    return encoded, labels


def _check_labels(labels: Sequence[int | str], source: Path) -> None:
    """Refuse numbers that are no classes, before a list of that many classes is made."""
    numbers = [label for label in labels if isinstance(label, int)]
    if numbers and (min(numbers) < 0 or max(numbers) > MAX_LABEL):
        raise DataError(
            f"{source}: labels run from {min(numbers)} to {max(numbers)}: number the classes from 0"
        )


def survey_parquet(files: Sequence[Path], ranges: bool = True) -> tuple[SetLook, set[int | str]]:
    """Look once at the headers of all images of parquet shards, and at their labels.

    Args:
        files: the shards.
        ranges: look for one range of the values of images of more than 8 bits, as ``look_at_set`` does.
    """
    seen: list[_Look] = []
    kinds: set[int | str] = set()
    for file in files:  # one at a time: together they may be larger than the memory
        encoded, labels = parquet_cells([file])
        _check_labels(labels, file)
        kinds.update(labels)
        seen += [look for cell, source in encoded if (look := _look_at(cell, source, ranges))]
    channels = 3 if any(one.colour for one in seen) else 1
    value_range = _range_of([one.values for one in seen if one.values])
    return SetLook(channels, value_range, tuple(one.size for one in seen), _notes(seen)), kinds


def read_parquet(files: Sequence[str | Path], channels: int) -> tuple[Tensor, Tensor]:
    """As ``read_labelled_parquet``, of files whose labels are whole numbers: images, and labels int64 [n]."""
    images, labels = read_labelled_parquet(files, channels)
    if any(isinstance(label, str) for label in labels):
        raise DataError(f"{files[0]}: the labels are text; this data set's are whole numbers")
    return images, torch.tensor(labels, dtype=torch.int64)


def read_labelled_parquet(
    files: Sequence[str | Path],
    channels: int,
    side: Side | None = None,
    framing: Framing | None = None,
) -> tuple[Tensor, list[int | str]]:
    """Read parquet shards with one image column (a struct with ``bytes``, or plain bytes) and one column of labels.

    A string column of images, which would name files of this machine, is refused unless ``CAPSZOO_IMAGE_PATHS`` names
    the folder that they are below.

    Args:
        files: all shards of one split.
        channels: 1 decodes to grey, 3 to RGB.
        side: height and width of the images, or side of a square; None: they must all have the same size.
        framing: as for ``decode_image``.

    Returns:
        Images [n, c, h, w] uint8 and n labels, numbers or text, in file order.
    """
    paths = sorted(Path(file) for file in files)
    if not paths:
        raise DataError("no parquet file given")
    _check_shards(paths)
    encoded, labels = parquet_cells(paths)
    if not encoded:
        raise DataError(f"{paths[0].parent} holds no images")
    _check_labels(labels, paths[0].parent)
    return _decode_all(encoded, MODES[channels], side, paths[0].parent, framing), labels


def _decode_all(
    encoded: Sequence[tuple[bytes | Path, Path]],
    mode: str,
    side: Side | None,
    folder: Path,
    framing: Framing | None,
) -> Tensor:
    """Images of one size as uint8 [n, c, h, w]; refused if they need more than ``MAX_FILE_BYTES``, decoded."""
    images: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    first: dict[Path, int] = {}
    for k, (cell, source) in enumerate(encoded):
        row = k - first.setdefault(source, k)
        image = decode_image(cell, mode, f"{source}: row {row}", side, framing)
        image = image[..., None] if image.ndim == 2 else image
        if images is None:
            if (whole := len(encoded) * image.nbytes) > MAX_FILE_BYTES:
                raise DataError(
                    f"{folder}: {whole / 2**30:.1f} GB of pixels are too much for memory: use hf:{folder}"
                )
            images = np.empty((len(encoded), *image.shape), np.uint8)
        if image.shape != images.shape[1:]:
            raise DataError(f"{source} holds an image of another size than the first; one size is needed")
        images[k] = image
    assert images is not None
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def read_cifar_binary(files: Sequence[str | Path], label_bytes: int = 1) -> tuple[Tensor, Tensor]:
    """Read CIFAR's binary batches (``data_batch_1.bin``, …; ``train.bin``): images [n, 3, 32, 32] uint8, labels [n].

    Args:
        files: all batches of a split.
        label_bytes: 1 for CIFAR-10; 2 for CIFAR-100, of which the second (the fine class) is used.
    """
    images, labels = [], []
    for file in files:
        path = Path(file)
        raw = _read_bytes(path, _CIFAR_BYTES)
        record = label_bytes + _CIFAR_PIXELS
        if not raw or len(raw) % record:
            raise DataError(f"{path} is truncated: {len(raw)} bytes is no multiple of {record}")
        records = torch.from_numpy(np.frombuffer(raw, np.uint8).reshape(-1, record).copy())
        labels.append(records[:, label_bytes - 1].long())
        images.append(records[:, label_bytes:].reshape(-1, 3, 32, 32))
    return torch.cat(images), torch.cat(labels)


def read_svhn_mat(file: str | Path) -> tuple[Tensor, Tensor]:
    """Read a file of cropped SVHN digits (``train_32x32.mat``): images [n, 3, 32, 32] uint8, labels [n] int64."""
    try:
        from scipy.io import loadmat, whosmat
    except ImportError as error:
        raise DataError(f"reading .mat files needs scipy: {install_hint('train')}") from error
    path = Path(file)
    raw = _read_bytes(path)
    try:
        # checked before anything is unpacked
        shapes = {name: shape for name, shape, _ in whosmat(io.BytesIO(raw))}
        most = {"X": _SVHN_IMAGES * _CIFAR_PIXELS, "y": _SVHN_IMAGES}
        large = [name for name, limit in most.items() if math.prod(shapes.get(name, ())) > limit]
        content = {} if large else loadmat(io.BytesIO(raw), variable_names=("X", "y"))
        images, classes = content["X"], content["y"].reshape(-1)
        if classes.dtype.kind not in "biuf" or not (
            np.isfinite(classes).all() and (classes == np.floor(classes)).all()
        ):
            raise ValueError("labels that are no whole numbers")
        labels = classes.astype(np.int64)
    # a damaged file may raise anything: ValueError, TypeError, zlib.error, KeyError, …
    except Exception as error:
        raise DataError(f"{path} is not a MATLAB 5 file with X and y (damaged?); fetch it again") from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != len(labels):
        raise DataError(
            f"{path} holds X {images.dtype} {images.shape} and {len(labels)} labels, not cropped SVHN digits"
        )
    labels[labels == 10] = 0
    return torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1))), torch.from_numpy(labels)


def read_norb_matrix(file: str | Path) -> Tensor:
    """Read one of NORB's binary matrices, plain or gzip: uint8 or int32 of the shape that the header states."""
    path = Path(file)
    raw = _read_bytes(path, _NORB_BYTES)
    magic, rank = (int.from_bytes(raw[k : k + 4], "little") for k in (0, 4))
    if magic not in _NORB_TYPES or not 1 <= rank <= 4:
        raise DataError(
            f"{path} is not a NORB matrix of bytes or integers (its first bytes are {raw[:4].hex() or 'missing'})"
        )
    header = 8 + 4 * max(rank, 3)  # at least three sizes are stored
    shape = tuple(int.from_bytes(raw[8 + 4 * k : 12 + 4 * k], "little") for k in range(rank))
    return _after_header(path, raw, header, shape, _NORB_TYPES[magic])
