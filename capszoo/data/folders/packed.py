"""Small sets in single files: `idx:PATH` and `parquet:PATH`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ...images import Framing
from ..errors import DataError
from ..readers import idx_pair, parquet_colour_and_top, parquet_label_names, read_idx_pair, read_parquet
from ..specs import Side
from .common import SPLITS, fits_memory

__all__ = ["parquet_shards", "read_idx", "read_packed_parquet"]


def read_idx(folder: Path, split: str) -> tuple[Tensor, Tensor, Sequence[str]]:
    """Read a split of the set ``idx:PATH``, files in the format of MNIST.

    Args:
        folder: of the files.
        split: ``"train"`` or ``"test"``; there is no ``"val"``.

    Returns:
        Images, class indices, and the classes' names, which are their indices.

    Raises:
        DataError: files are missing or cannot be read, or images and labels differ in number.
    """
    pair = idx_pair(folder, "train" if split == "train" else "t10k") if split != "val" else None
    if pair is None:
        raise DataError(
            f"{folder} has no idx files of a {split} split (…-images-idx3-ubyte, …-labels-idx1-ubyte)"
        )
    images, labels = read_idx_pair(pair)
    if len(images) != len(labels) or not len(images):
        raise DataError(f"{pair[0]} has {len(images)} images, {pair[1]} {len(labels)} labels")
    # Both splits must have the same number of classes, whichever is requested.
    training = idx_pair(folder, "train")
    top = int(read_idx_pair(training)[1].max()) if training and split != "train" else 0
    return images, labels, [str(k) for k in range(max(int(labels.max()), top) + 1)]


def read_packed_parquet(
    folder: Path,
    split: str,
    size: Side | None,
    resize: Side | None,
    channels: int | None = None,
    framing: Framing | None = None,
) -> tuple[Tensor, Tensor, Sequence[str]]:
    """Read a split of the set ``parquet:PATH``.

    Args:
        folder: of the files, whose names begin with that of the split.
        split: ``"train"``, ``"val"`` or ``"test"``.
        size: side, or rows and columns, of the images; None keeps that of the files.
        resize: those to which they are resized where ``size`` is given; None: ``size``.
        channels: 1 or 3; None: as many as the training images have.
        framing: how they are framed, with a known range of values.

    Returns:
        Images, class indices, and the classes' names.

    Raises:
        DataError: files are missing, cannot be read, or do not fit into memory.
    """
    names = SPLITS[split]
    shards = parquet_shards(folder, names)
    if not shards:
        raise DataError(
            f"{folder} has no parquet files of a {split} split ({'-*.parquet, '.join(names)}-*.parquet)"
        )
    if not fits_memory(total := sum(path.stat().st_size for path in shards)):
        raise DataError(
            f"{folder}: {total / 2**30:.1f} GB of parquet are too much for memory: use hf:{folder}"
        )
    # Colour and number of classes come from the training split, so that all splits agree.
    training = parquet_shards(folder, SPLITS["train"]) if split != "train" else []
    colour, top = parquet_colour_and_top(training) if training else (None, 0)
    images, labels = read_parquet(
        shards, channels or colour, (resize or size) if size else None, framing=framing
    )
    label_names = parquet_label_names(shards[0]) or [str(k) for k in range(max(int(labels.max()), top) + 1)]
    return images, labels, label_names


def parquet_shards(folder: Path, names: Sequence[str]) -> list[Path]:
    """Parquet files in ``folder`` whose names begin with the first of ``names`` that has some; in order."""
    return next((found for name in names if (found := sorted(folder.glob(f"{name}[-.]*parquet")))), [])
