"""Small sets in single files: ``idx:PATH`` and ``parquet:PATH``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...images import Framing, ValueRange
from ..errors import DataError
from ..readers import idx_pair, parquet_label_names, read_idx_pair, read_labelled_parquet, survey_parquet
from .common import SPLITS, Reading, encode_labels, fits_memory, mean_cropped, sides


class Packed(NamedTuple):
    """A split read from single files.

    Attributes:
        images: uint8 [n, c, h, w].
        labels: int64 [n].
        label_names: of the classes.
        size: rows and columns of the model's input, where images of different sizes have been scaled to one; else None.
        cropped: mean share of the images' area that was cropped away.
        value_range: black and white of images of more than 8 bits a channel, where the set has some.
        notes: what of the images' files is not read.
    """

    images: Tensor
    labels: Tensor
    label_names: Sequence[str]
    size: tuple[int, int] | None = None
    cropped: float | None = 0.0
    value_range: ValueRange | None = None
    notes: tuple[str, ...] = ()


def read_idx(folder: Path, split: str) -> Packed:
    """Read a split of the set ``idx:PATH``, files in the format of MNIST.

    Args:
        folder: of the files.
        split: ``"train"`` or ``"test"``; there is no ``"val"``.

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
    # Both splits must have the same classes, whichever is requested.
    training = idx_pair(folder, "train") if split != "train" else pair
    trained = read_idx_pair(training)[1] if training and training != pair else labels
    encoded, label_names = encode_labels(labels.tolist(), trained.unique().tolist(), f"{folder} ({split})")
    return Packed(images, encoded, label_names)


def read_packed_parquet(folder: Path, split: str, reading: Reading) -> Packed:
    """Read a split of the set ``parquet:PATH``.

    Images keep their size unless one is given. Those of different sizes become squares, as those of ``hf:`` do.

    Args:
        folder: of the files, whose names begin with that of the split.
        split: ``"train"``, ``"val"`` or ``"test"``.
        reading: without a ``size``, images of one size keep it; without ``resize``, they have ``size``.

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
    # Colour, size and classes come from the training split, so that all splits agree.
    framing = reading.framing or Framing(value_range="set")
    training = parquet_shards(folder, SPLITS["train"]) or shards
    look, kinds = survey_parquet(training, ranges=framing.value_range == "set")
    value_range = look.value_range if framing.value_range == "set" else framing.value_range
    framing = replace(framing, value_range=value_range)
    side, model_size = ((reading.resize or reading.size) if reading.size else None), None
    if side is None and len(set(look.sizes)) > 1:
        model_size, side = sides(reading.size, reading.resize)
    images, labels = read_labelled_parquet(shards, reading.channels or look.channels, side, framing=framing)
    feature_names = parquet_label_names(shards[0])
    if feature_names and not any(isinstance(label, str) for label in labels):
        numbers, label_names = torch.tensor(labels, dtype=torch.int64), list(feature_names)
    else:
        numbers, label_names = encode_labels(labels, kinds, f"{folder} ({split})")
    cropped = mean_cropped(look.sizes, (images.shape[2], images.shape[3]), framing)
    return Packed(images, numbers, label_names, model_size, cropped, value_range, look.notes)


def parquet_shards(folder: Path, names: Sequence[str]) -> list[Path]:
    """Parquet files in ``folder`` whose names begin with the first of ``names`` that has some; in order."""
    return next((shards for name in names if (shards := sorted(folder.glob(f"{name}[-.]*parquet")))), [])
