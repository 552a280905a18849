"""Data sets with a prefix: folders, tables, shards, the Hub's parquet and repositories, idx, MedMNIST.

Sets of up to 2 GB as uint8 are decoded once and stored in memory; larger folders and repositories are streamed.
A file for each kind; ``common`` has what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...images import Framing, cropped_share
from ..augment import frame
from ..download import fetch
from ..errors import DataError
from ..medmnist import medmnist_file, medmnist_set, read_medmnist
from ..readers import idx_pair
from ..sets import ImageSet, StreamedSet, sized
from ..shards import shards_of_split
from .common import SPLIT_NAMES, SPLITS, Decoded, Reading, available_workers, folder_spec, locate
from .hub import fetch_repository, hub_splits, open_hub
from .images import Files, holds_classes, open_h_imagenet, open_images, split_folder
from .packed import Packed, parquet_shards, read_idx, read_packed_parquet
from .tables import open_table, table_splits
from .webdataset import find_shards, open_shards

__all__ = [
    "Decoded",
    "Files",
    "Reading",
    "available_workers",
    "folder_spec",
    "fetch_repository",
    "find_splits",
    "holds_classes",
    "open_h_imagenet",
    "open_set",
]


def open_set(
    name: str, split: str, data: str | Path | None, download: str | Path | None, reading: Reading
) -> ImageSet | StreamedSet:
    """Open a set with a prefix, ``imagefolder:PATH`` or another one; the arguments are those of ``load_dataset``.

    Images of folders and repositories are framed at ``resize``, by default 8/7 of ``size``, whose default is 224.
    Images of idx and parquet files keep their size unless one is given.
    """
    kind, _, source = name.partition(":")
    if split not in SPLITS:
        raise DataError(f"unknown split '{split}' of {name}: there are train, val, test")
    if kind == "hf":
        return open_hub(name, source, split, data, download, reading)
    if kind == "wds":
        return open_shards(name, source, split, data, reading)
    if kind == "csv":
        return open_table(name, source, split, data, reading)
    if kind == "imagefolder":
        return open_images(name, locate(name, source, data), split, reading)
    if kind == "medmnist":
        facts = medmnist_set(source)
        if download is not None and medmnist_file(source, data) is None:
            data = fetch(name, split, download)
        packed = Packed(*read_medmnist(source, split, data), facts.label_names)
    elif kind == "parquet":
        packed = read_packed_parquet(locate(name, source, data), split, reading)
    else:
        packed = read_idx(locate(name, source, data), split)
    images, labels, label_names = packed.images, packed.labels, packed.label_names
    if int(labels.min()) < 0 or int(labels.max()) >= len(label_names):
        run = f"labels run from {int(labels.min())} to {int(labels.max())}"
        raise DataError(
            f"{name} ({split}): {run}, but there are {len(label_names)} class names: number them from 0"
        )
    rows, columns = images.shape[-2:]
    spec = folder_spec(name, label_names, (images.shape[1], rows, columns), len(images), split)
    cropped = packed.cropped
    if packed.size:
        spec = replace(spec, input_size=(images.shape[1], *packed.size))
    elif reading.size or reading.resize:
        framing = reading.framing or Framing()
        spec, side = sized(spec, reading.size, reading.resize)
        cropped = cropped or cropped_share((columns, rows), side, crop_mode=framing.crop_mode)
        images = frame(images, side, framing.crop_mode, framing.mean or spec.mean)
    # labels of several classes are zeros and ones [n, classes]
    counted = None if labels.ndim == 2 else 1
    spec = replace(spec, cropped=cropped, value_range=packed.value_range, notes=packed.notes)
    spec = replace(spec, labels_per_image=counted)
    return ImageSet(spec, split, images, labels)


def find_splits(name: str, data: str | Path | None = None, download: str | Path | None = None) -> set[str]:
    """Which of train, val and test a set given by a path or repository has, each under a separate name."""
    kind, _, source = name.partition(":")
    split_names: dict[str, tuple[str, ...]] = {**SPLITS, "test": ("test",)}
    if kind == "hf":
        names_there, _ = hub_splits(name, source, data, download)
        return {split for split, names in split_names.items() if any(name in names_there for name in names)}
    if kind == "wds":
        every = find_shards(name, source, data)
        return {split for split, names in split_names.items() if shards_of_split(every, names, SPLIT_NAMES)}
    if kind == "csv":
        return table_splits(name, source, data)
    if kind == "medmnist":
        medmnist_set(source)
        return set(split_names)
    folder = locate(name, source, data)
    if kind == "idx":
        return {split for split, stem in (("train", "train"), ("test", "t10k")) if idx_pair(folder, stem)}
    look: Callable[[Path, Sequence[str]], Any] = parquet_shards if kind == "parquet" else split_folder
    return {split for split, names in split_names.items() if look(folder, names)}
