"""``wds:PATH``: WebDataset shards."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...images import Framing
from ..errors import DataError
from ..readers import MAX_LABEL, MODES, decode_image
from ..sets import ImageSet, StreamedSet
from ..shards import ShardIndex, expand_shards, member_name, read_index, read_member, shards_of_split
from ..specs import Side
from .common import (
    SPLIT_NAMES,
    SPLITS,
    available_workers,
    decode_or_stream,
    encode_labels,
    folder_spec,
    framing_text,
    locate,
    look_at_training,
    settled,
    sides,
    to_tensor,
)

__all__ = ["find_shards", "open_shards"]


@dataclass(frozen=True)
class _Members:
    """Images in shards."""

    index: ShardIndex
    mode: str
    side: tuple[int, int]
    framing: Framing = Framing()

    def encoded(self, number: int) -> tuple[bytes, Path, int]:
        """The bytes of an image, its shard, and their offset in it."""
        path, offset = self.index.paths[self.index.shards[number]], int(self.index.offsets[number])
        return read_member(path, offset, int(self.index.sizes[number])), path, offset

    def decode(self, index: int) -> Tensor:
        encoded, path, offset = self.encoded(index)
        try:
            return to_tensor(decode_image(encoded, self.mode, path, self.side, self.framing))
        except DataError:  # reading the name takes another access, so it happens only on errors
            name = f"{path}/{member_name(path, offset)}"
            return to_tensor(decode_image(encoded, self.mode, name, self.side, self.framing))

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.index.offsets.tobytes() + self.index.sizes.tobytes()).hexdigest()
        names = "\n".join(f"{path.name} {path.stat().st_size}" for path in self.index.paths)
        return f"{names}\n{digest} {framing_text(self.side, self.framing)}"


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
    name: str,
    where: str,
    split: str,
    data: str | Path | None,
    size: Side | None,
    resize: Side | None,
    skipped: list[str] | None,
    channels: int | None = None,
    framing: Framing | None = None,
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

    members = _Members(looked, "L", (1, 1))
    look = look_at_training(lambda k: members.encoded(k)[:2], len(looked.labels), channels, framing)
    size, side = sides(size, resize)
    spec = folder_spec(name, label_names, (look.channels, *size), len(index.labels), split)
    spec, framing = settled(spec, framing, look, side)
    decoder = _Members(index, MODES[look.channels], side, framing)
    return decode_or_stream(spec, split, decoder, labels, side, skipped, torch.from_numpy(index.shards))
