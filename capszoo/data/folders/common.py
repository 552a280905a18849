"""What all kinds of sets share: where a set is, its splits and specification, decoding into memory or streaming."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ..._utils.files import expanded
from ...errors import spelling_difference
from ...images import Framing, cropped_share
from ..errors import DataError
from ..readers import MAX_LABEL, MODES, SetLook, decode_image, look_at_set
from ..roots import environment_roots, given_root
from ..sets import Decoder, ImageSet, Origin, StreamedSet, stored_sides
from ..specs import DatasetSpec, Side, shown_sides

#: Bytes as uint8 up to which a set is held in memory.
MEMORY_LIMIT = 2 * 2**30

DEFAULT_SIZE = 224
_VAL_NAMES = ("val", "validation", "valid")
#: Names in use for each split; a set that has no test split is tested on its validation split.
SPLITS = {"train": ("train",), "val": _VAL_NAMES, "test": ("test", *_VAL_NAMES)}
SPLIT_NAMES = frozenset(name for names in SPLITS.values() for name in names)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def locate(
    name: str, source: str, data: str | Path | None, what: Literal["file", "folder"] = "folder"
) -> Path:
    """The folder or file below a data folder, or the one itself; that one first if no data folder is given.

    Raises:
        DataError: there is neither, or no folder ``data``.
    """
    itself = expanded(source)
    places = [itself, *(root / source for root in environment_roots())]
    if data:
        places = [given_root(data) / source, itself]
    exists = Path.is_dir if what == "folder" else Path.is_file
    found = next(filter(exists, places), None)
    if found is None:
        if other := next((place for place in places if place.exists()), None):
            raise DataError(f"{name}: {other} is a {'file' if other.is_file() else 'folder'}: name a {what}")
        raise DataError(f"{name}: no such {what}: {', '.join(dict.fromkeys(map(str, places)))}")
    return found


def folder_spec(
    name: str, label_names: Sequence[str], input_size: tuple[int, int, int], count: int, split: str
) -> DatasetSpec:
    """The specification of a set that states none: ImageNet's mean and deviation for colour, else 0.5."""
    colour = input_size[0] == 3
    return DatasetSpec(
        name=name,
        title=name,
        label_names=tuple(label_names),
        input_size=input_size,
        mean=_IMAGENET_MEAN if colour else (0.5,) * input_size[0],
        std=_IMAGENET_STD if colour else (0.5,) * input_size[0],
        counts={split: count},
        folders=(),
        source=name,
        remedy="",
    )


#: A label of a table or shard: the number of a class, or its name.
Label = int | str


def encode_labels(
    labels: Sequence[Label], training: Iterable[Label], source: str
) -> tuple[Tensor, list[str]]:
    """Class indices [n] of labels, and the names of the classes, which are the labels of the training images.

    Numbers are in their order, so that those from 0 on are their own indices; names are in alphabetical order.

    Args:
        labels: of a split.
        training: labels of the training split.
        source: name of the split in error messages.

    Raises:
        DataError: a label is empty, or does not occur in training.
    """
    texts = [unicodedata.normalize("NFC", str(label)) for label in labels]
    kinds = {unicodedata.normalize("NFC", str(label)) for label in training}
    if any(not text.strip() for text in (*texts, *kinds)):
        raise DataError(f"{source}: some images have an empty label: it cannot be trained or tested on")
    if all(kind.isascii() and kind.isdigit() and len(kind) < 19 for kind in kinds):
        names = sorted(kinds, key=lambda kind: (int(kind), kind))
    else:
        names = sorted(kinds)
    if len(names) > MAX_LABEL:
        raise DataError(
            f"{source}: {len(names):,} different labels are no classes: name the column of labels label"
        )
    index = {kind: k for k, kind in enumerate(names)}
    unknown = next((text for text in texts if text not in index), None)
    if unknown is not None:
        raise DataError(
            f"{source} has the label {unknown[:100]!r}, which no training image has{look_alike(unknown, names)}"
        )
    return torch.tensor([index[text] for text in texts], dtype=torch.int64), names


def look_alike(name: str, names: Iterable[str]) -> str:
    """A note for an error about a name that is not known, if it only looks like a known one."""
    differences = ((one, spelling_difference(name, one)) for one in names)
    one, difference = next(((one, difference) for one, difference in differences if difference), ("", ""))
    return f" (it differs from {one!r} in {difference})" if difference else ""


@dataclass(frozen=True)
class Reading:
    """How encoded images are read: the arguments of these names of ``load_dataset``."""

    size: Side | None = None
    resize: Side | None = None
    skipped: list[str] | None = None
    channels: int | None = None
    framing: Framing | None = None


class Source(Protocol):
    """Encoded images of a split, in separate files or packed in some."""

    def __len__(self) -> int: ...

    def encoded(self, index: int) -> tuple[bytes | Path, Path | str]:
        """An image, encoded or as a path, and its name."""

    def files(self) -> str:
        """A string that differs if the files do, and ends where that of the framing begins."""


@dataclass(frozen=True)
class Decoded:
    """The decoder of a streamed set."""

    source: Source
    mode: str
    side: tuple[int, int]
    framing: Framing = Framing()

    def decode(self, index: int) -> Tensor:
        encoded, name = self.source.encoded(index)
        # Pillow's array is read-only
        image = torch.from_numpy(np.array(decode_image(encoded, self.mode, name, self.side, self.framing)))
        return image[None] if image.ndim == 2 else image.permute(2, 0, 1).contiguous()

    def fingerprint(self) -> str:
        """Size and framing are stated too; for squares of the middle, the side alone."""
        parts = [shown_sides(self.side)]
        if self.framing.crop_mode != "center":
            parts.append(self.framing.crop_mode)
        if self.framing.value_range not in (None, (0.0, 1.0), (0.0, 65535.0)):
            parts.append(repr(self.framing.value_range))
        return self.source.files() + " ".join(parts)


def usable_cores() -> int:
    """Number of processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_workers() -> int:
    """Number of decoding workers: the processors available to this process, at most 8."""
    return min(8, usable_cores())


def fits_memory(size: int) -> bool:
    """Whether a set of so many bytes is held in memory."""
    return size <= MEMORY_LIMIT


def decode_or_stream(
    spec: DatasetSpec,
    split: str,
    decoder: Decoder,
    labels: Tensor,
    side: tuple[int, int],
    skipped: list[str] | None = None,
    shards: Tensor | None = None,
    origin: Origin | None = None,
) -> ImageSet | StreamedSet:
    """Decode into memory if the set fits, else stream it.

    Images that cannot be read are all listed in one error, or skipped and added to ``skipped`` if that is a list
    (a streamed set is then decoded once to find them).
    """
    n = len(labels)
    held = fits_memory(n * spec.input_size[0] * side[0] * side[1])
    images = torch.empty((n if held else 0, spec.input_size[0], *side), dtype=torch.uint8)

    def fill(index: int) -> str:
        try:
            image = decoder.decode(index)
        except DataError as error:
            return str(error)
        if held:
            images[index] = image
        return ""

    sound = torch.arange(n)
    if held or skipped is not None:
        with ThreadPoolExecutor(available_workers()) as pool:  # Pillow releases the GIL while decoding
            failures: list[str] = []
            for start in range(0, n, 4096):  # `map` submits all that it is given at once
                failures += pool.map(fill, range(start, min(start + 4096, n)))
        bad = [failure for failure in failures if failure]
        if bad and skipped is None:
            raise unreadable(bad)
        if bad:
            skipped.extend(bad)  # type: ignore[union-attr]
            sound = torch.tensor([k for k, failure in enumerate(failures) if not failure], dtype=torch.int64)
    if not len(sound):
        raise DataError(f"{spec.name}: none of the {n} images of {split} can be read")
    if held:
        return ImageSet(spec, split, images[sound], labels[sound], origin=origin or Origin())
    return StreamedSet(
        spec,
        split,
        decoder,
        sound,
        labels[sound],
        side,
        available_workers(),
        shards=None if shards is None else shards[sound],
        origin=origin or Origin(),
    )


def unreadable(failures: Sequence[str]) -> DataError:
    """The error about images that cannot be read. A line has room for one reason; the other files are only named."""
    others = "; ".join(failure.partition(": ")[0] for failure in failures[1:4])
    more = "" if len(failures) == 1 else f", and {len(failures) - 1} more: {others}"
    more += " and others" if len(failures) > 4 else ""
    leave_out = "leave it out (finetune, eval, export: --skip-bad; a recipe: data.skip_bad)"
    return DataError(f"{failures[0]}{more}; mend or remove what cannot be read, or {leave_out}")


def sides(size: Side | None, resize: Side | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of the model's input, and of the stored images."""
    return stored_sides(size or DEFAULT_SIZE, resize, 8 / 7)


def mean_cropped(sizes: Sequence[tuple[int, int]], side: tuple[int, int], framing: Framing) -> float | None:
    """Mean share of the area of images (width, height) that framing cuts off; None without images."""
    lost = sum(n * cropped_share(one, side, crop_mode=framing.crop_mode) for one, n in Counter(sizes).items())
    return lost / len(sizes) if sizes else None


def open_source(
    name: str,
    split: str,
    source: Source,
    training: Source,
    labels: Tensor,
    label_names: Sequence[str],
    reading: Reading,
    shards: Tensor | None = None,
    origin: Origin | None = None,
) -> ImageSet | StreamedSet:
    """A set of a split's images, whose channels and range of values are those of the training images if not asked for.

    Its specification also states how much of the images is cropped away, and what of their files is not read.
    """
    framing = reading.framing or Framing(value_range="set")
    if framing.value_range == "set":
        look = look_at_set(training.encoded, len(training), reading.channels)
    else:
        channels = reading.channels or look_at_set(training.encoded, len(training), ranges=False).channels
        look = SetLook(channels, framing.value_range)
    size, side = sides(reading.size, reading.resize)
    spec = folder_spec(name, label_names, (look.channels, *size), len(labels), split)
    framing = replace(framing, mean=framing.mean or spec.mean, value_range=look.value_range)
    cropped = mean_cropped(look.sizes, side, framing)
    spec = replace(spec, value_range=look.value_range, cropped=cropped, notes=look.notes)
    decoder = Decoded(source, MODES[look.channels], side, framing)
    return decode_or_stream(spec, split, decoder, labels, side, reading.skipped, shards, origin)
