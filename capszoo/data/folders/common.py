"""What all kinds of sets share: where a set is, its splits and specification, decoding into memory or streaming."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..._utils.files import expanded
from ...errors import spelling_difference
from ...images import Framing, cropped_share
from ..errors import DataError
from ..readers import MAX_LABEL, SetLook, look_at_set
from ..roots import environment_roots, given_root
from ..sets import Decoder, ImageSet, Origin, StreamedSet, stored_sides
from ..specs import DatasetSpec, Side, shown_sides

__all__ = [
    "MEMORY_LIMIT",
    "SPLITS",
    "SPLIT_NAMES",
    "available_workers",
    "Label",
    "decode_or_stream",
    "encode_labels",
    "fits_memory",
    "folder_spec",
    "framing_text",
    "locate",
    "look_alike",
    "look_at_training",
    "settled",
    "sides",
    "to_tensor",
    "unreadable",
    "usable_cores",
]

#: Bytes as uint8 up to which a set is held in memory.
MEMORY_LIMIT = 2 * 2**30

DEFAULT_SIZE = 224
_VAL_NAMES = ("val", "validation", "valid")
#: Names in use for each split; a set that has no test split is tested on its validation split.
SPLITS = {"train": ("train",), "val": _VAL_NAMES, "test": ("test", *_VAL_NAMES)}
SPLIT_NAMES = frozenset(name for names in SPLITS.values() for name in names)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def locate(name: str, source: str, data: str | Path | None) -> Path:
    """The folder below a data folder, or the one itself; that one first if no data folder is given.

    Raises:
        DataError: there is neither, or no folder ``data``.
    """
    itself = expanded(source)
    places = (
        [given_root(data) / source, itself]
        if data
        else [itself, *(root / source for root in environment_roots())]
    )
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        raise DataError(f"{name}: no such folder: {', '.join(dict.fromkeys(map(str, places)))}")
    return folder


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


def to_tensor(image: np.ndarray) -> Tensor:
    """An image ``[h, w]`` or ``[h, w, c]`` as ``[c, h, w]``."""
    tensor = torch.from_numpy(np.array(image))  # Pillow's array is read-only
    return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1).contiguous()


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


def look_at_training(
    image_at: Callable[[int], tuple[bytes | Path, Path | str]],
    count: int,
    channels: int | None,
    framing: Framing | None,
) -> SetLook:
    """What the training images say of what is not asked for: channels, range of values, sizes.

    Args:
        image_at, count, channels: as for ``look_at_set``.
        framing: as asked for; None: one range for the set.
    """
    value_range = framing.value_range if framing else "set"
    if value_range == "set":
        return look_at_set(image_at, count, channels)
    return SetLook(channels or look_at_set(image_at, count, ranges=False).channels, value_range)


def settled(
    spec: DatasetSpec, framing: Framing | None, looked: SetLook, side: tuple[int, int]
) -> tuple[DatasetSpec, Framing]:
    """A set's specification and framing, with the colour of its border and the range of its values.

    The specification also states how much of the images is cropped away, and what of their files is not read.

    Args:
        spec: of the set.
        framing: as asked for; None: the middle.
        looked: at the training images.
        side: rows and columns of the stored images.
    """
    framing = framing or Framing()
    framing = replace(framing, mean=framing.mean or spec.mean, value_range=looked.value_range)
    lost = [cropped_share(size, side, crop_mode=framing.crop_mode) for size in looked.sizes]
    cropped = sum(lost) / len(lost) if lost else None
    return replace(spec, value_range=looked.value_range, cropped=cropped, notes=looked.notes), framing


def framing_text(side: tuple[int, int], framing: Framing) -> str:
    """What a fingerprint states of the decoded images' size and framing; for squares of the middle, the side alone."""
    parts = [shown_sides(side)]
    if framing.crop_mode != "center":
        parts.append(framing.crop_mode)
    if framing.value_range not in (None, (0.0, 1.0), (0.0, 65535.0)):
        parts.append(repr(framing.value_range))
    return " ".join(parts)
