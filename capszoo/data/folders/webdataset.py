"""``wds:PATH``: WebDataset shards."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DataError
from ..readers import MAX_LABEL
from ..sets import ImageSet, StreamedSet
from ..shards import ShardIndex, expand_shards, read_index, read_member, shards_of_split
from .common import SPLIT_NAMES, SPLITS, Reading, available_workers, encode_labels, locate, open_source


@dataclass(frozen=True)
class _Members:
    """Images in shards."""

    index: ShardIndex

    def __len__(self) -> int:
        return len(self.index.labels)

    def encoded(self, index: int) -> tuple[bytes, str]:
        path = self.index.paths[self.index.shards[index]]
        name, content = read_member(path, int(self.index.offsets[index]), int(self.index.sizes[index]))
        return content, f"{path}/{name}"

    def files(self) -> str:
        digest = hashlib.sha256(self.index.offsets.tobytes() + self.index.sizes.tobytes()).hexdigest()
        names = "\n".join(f"{path.name} {path.stat().st_size}" for path in self.index.paths)
        return f"{names}\n{digest} "


def find_shards(name: str, source: str, data: str | Path | None) -> list[Path]:
    """All shards that ``wds:`` and a path name; for a folder, including those in its split sub-folders."""
    source = source.replace("\\", "/") if os.name == "nt" else source
    last = source.rpartition("/")[2]
    if any(c in last for c in "{*?["):
        parent = source[: -len(last) - 1] or ("/" if source.startswith("/") else ".")
        return expand_shards(name, locate(name, parent, data), last)
    folder = locate(name, source, data)
    subs = [sub for sub in folder.iterdir() if sub.name.casefold() in SPLIT_NAMES and sub.is_dir()]
    shards = sorted(
        path
        for place in (folder, *subs)
        for path in place.glob("*.tar")
        if not path.name.startswith(".")  # macOS's `._` files
    )
    if not shards:
        raise DataError(f"{name}: {folder} has no shards (train-*.tar, val-*.tar)")
    return shards


def _stated_names(index: ShardIndex) -> list[str]:
    """Class names from ``classes.txt`` beside the shards, or beside the folder of their split; [] without the file."""
    folder = index.paths[0].parent
    parents = [folder, *([folder.parent] if folder.name.casefold() in SPLIT_NAMES else [])]
    file = next((parent / "classes.txt" for parent in parents if (parent / "classes.txt").is_file()), None)
    if file is None:
        return []
    try:
        names = file.read_text(encoding="utf-8").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file}: {error}") from error
    blank = next((i for i, name in enumerate(names, start=1) if not name.strip()), None)
    if blank:
        raise DataError(f"{file}: line {blank} is empty, and no name of a class")
    if len(names) > MAX_LABEL:
        raise DataError(f"{file} has {len(names):,} lines, which are no classes")
    return [name.strip() for name in names]


def _classes(index: ShardIndex, training: ShardIndex, where: str) -> tuple[Tensor, list[str]]:
    """Class indices of a split's images, and the names of the classes."""
    class_names = _stated_names(index)
    if not class_names:
        return encode_labels(index.written(), training.kinds(), where)
    if index.names or training.names:
        return encode_labels(index.written(), class_names, where)
    top = int(max(index.labels.max(), training.labels.max()))
    if top >= len(class_names):
        raise DataError(
            f"{where}: classes.txt has {len(class_names)} lines, but the shards have the label {top}"
        )
    return torch.from_numpy(index.labels), class_names


def open_shards(
    name: str, where: str, split: str, data: str | Path | None, reading: Reading
) -> ImageSet | StreamedSet:
    """A split of a set of WebDataset shards."""
    every = find_shards(name, where, data)
    paths = shards_of_split(every, SPLITS[split], SPLIT_NAMES)
    if not paths:
        raise DataError(f"{name} has no shards of a {split} split ({'-*.tar, '.join(SPLITS[split])}-*.tar)")
    index = read_index(paths, available_workers())
    # Colour and number of classes come from the training split, so that all splits agree.
    training = shards_of_split(every, SPLITS["train"], SPLIT_NAMES)
    looked = read_index(training, available_workers()) if split != "train" and training else index
    labels, label_names = _classes(index, looked, f"{name} ({split})")
    shards = torch.from_numpy(index.shards)
    return open_source(name, split, _Members(index), _Members(looked), labels, label_names, reading, shards)
