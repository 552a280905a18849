"""Readers of file formats: idx (plain or gzip), parquet with encoded images, CIFAR's binary batches.

Each returns uint8 images [n, c, h, w] and int64 labels [n], or raises `DataError` in one line that names the file.
Sources of the formats: idx: the table at the foot of LeCun's MNIST page; parquet: the Hub's `Image` feature, a
struct of `bytes` and `path`, next to an integer `label`; CIFAR binary: a label byte, then 3 planes of 1,024 bytes.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .errors import DataError

__all__ = ["read_cifar_binary", "read_idx", "read_parquet"]

_IDX_UBYTE = 0x08
_CIFAR_RECORD = 1 + 3 * 32 * 32


def read_idx(path: str | Path) -> Tensor:
    """Read one idx file of unsigned bytes, gzipped or not.

    Returns a uint8 tensor of the shape the header states.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) < 4 or raw[:2] != b"\x00\x00" or raw[2] != _IDX_UBYTE:
        raise DataError(
            f"{path} is not an idx file of bytes (its first bytes are {raw[:4].hex() or 'missing'})"
        )
    rank = raw[3]
    header = 4 + 4 * rank
    shape = tuple(int.from_bytes(raw[4 + 4 * k : 8 + 4 * k], "big") for k in range(rank))
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(raw) != expected:
        raise DataError(f"{path} is truncated or padded: {len(raw)} bytes, its header promises {expected}")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy())


def _check_shards(files: Sequence[Path]) -> None:
    """Hub shards say in their names how many there are: `train-00000-of-00004.parquet`."""
    match = re.search(r"-of-(\d+)\.parquet$", files[0].name)
    if match and int(match[1]) != len(files):
        raise DataError(
            f"{files[0].parent} holds {len(files)} of {int(match[1])} shards like {files[0].name}"
        )


def _decode(encoded: bytes, mode: str, source: Path) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return np.asarray(image if image.mode == mode else image.convert(mode))
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{source} holds a damaged image: {error}") from error


def read_parquet(files: Sequence[str | Path], channels: int) -> tuple[Tensor, Tensor]:
    """Read parquet shards with one image column (a struct with `bytes`, or plain bytes) and one integer column.

    Arguments:
        files: all shards of one split.
        channels: 1 decodes to grey, 3 to RGB.

    Returns images [n, c, h, w] uint8 and labels [n] int64, in file order.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError('reading parquet needs pyarrow: pip install "capszoo[train]"') from error
    paths = sorted(Path(file) for file in files)
    if not paths:
        raise DataError("no parquet file given")
    _check_shards(paths)
    mode = "L" if channels == 1 else "RGB"
    images: list[np.ndarray] = []
    labels: list[int] = []
    for path in paths:
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from error
        image_column = next((name for name in ("image", "img") if name in table.column_names), None)
        label_column = next(
            (name for name in ("label", "fine_label", "labels") if name in table.column_names), None
        )
        if image_column is None or label_column is None:
            raise DataError(
                f"{path} has the columns {table.column_names}; expected 'image' or 'img', and 'label'"
            )
        for cell in table.column(image_column).to_pylist():
            encoded = cell.get("bytes") if isinstance(cell, dict) else cell
            if encoded is None:
                raise DataError(f"{path} names its images by path only; a copy with embedded bytes is needed")
            images.append(_decode(encoded, mode, path))
        labels += table.column(label_column).to_pylist()
    sizes = {image.shape for image in images}
    if len(sizes) != 1:
        raise DataError(f"{paths[0].parent} holds images of {len(sizes)} sizes; one size is needed")
    stacked = torch.from_numpy(np.stack(images))
    stacked = stacked.unsqueeze(1) if channels == 1 else stacked.permute(0, 3, 1, 2).contiguous()
    return stacked, torch.tensor(labels, dtype=torch.int64)


def read_cifar_binary(files: Sequence[str | Path]) -> tuple[Tensor, Tensor]:
    """Read CIFAR-10's binary batches (`data_batch_1.bin`, …): images [n, 3, 32, 32] uint8, labels [n] int64."""
    images, labels = [], []
    for file in files:
        path = Path(file)
        raw = path.read_bytes()
        if not raw or len(raw) % _CIFAR_RECORD:
            raise DataError(f"{path} is truncated: {len(raw)} bytes is no multiple of {_CIFAR_RECORD}")
        records = torch.from_numpy(np.frombuffer(raw, np.uint8).reshape(-1, _CIFAR_RECORD).copy())
        labels.append(records[:, 0].long())
        images.append(records[:, 1:].reshape(-1, 3, 32, 32))
    return torch.cat(images), torch.cat(labels)
