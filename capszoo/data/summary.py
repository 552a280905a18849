"""What was read of a data set, as a record and as one sentence, for users to check before training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from capszoo.images import IMAGE_SUFFIXES

from .sets import ImageSet, StreamedSet

#: Number of classes up to which the sentence states the images of each.
_ALL_NAMED = 6
_KINDS_NAMED = 4
_WORDS = {"train": "training", "val": "validation"}


@dataclass(frozen=True)
class SetSummary:
    """What was read of a data set.

    Attributes:
        label_names: names of the classes, in the order of their indices.
        images: number of images of each split.
        per_class: number of images of each class, of each split.
        input_size: channels, height and width that the model sees.
        area: share of a training image's area that the model sees without augmentation; a mean.
        left_out: number of files that were not read because of their suffix, by that suffix.
        folders: number of images in folders that were not read, by the folder's name.
        unreadable: number of images that were left out because they cannot be read.
        notes: sentences about the folders.
    """

    label_names: tuple[str, ...]
    images: dict[str, int]
    per_class: dict[str, list[int]]
    input_size: tuple[int, int, int]
    area: float
    left_out: dict[str, int]
    folders: dict[str, int]
    unreadable: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The record without the names of classes and folders, which metadata state elsewhere or keep private."""
        values = asdict(self)
        for key in ("label_names", "input_size", "notes"):
            del values[key]
        values["folders"] = sum(self.folders.values())
        return {
            "sentence": self.sentence(private=True),
            **{key: value for key, value in values.items() if value},
        }

    def sentence(self, private: bool = False) -> str:
        """The record in a line.

        Args:
            private: leave the names of folders that were not read out.
        """
        colour = {1: "in grey", 3: "in colour"}.get(self.input_size[0], f"of {self.input_size[0]} channels")
        parts = [
            self._classes(),
            self._images(),
            f"{colour}, {self.input_size[1]}x{self.input_size[2]} pixels",
        ]
        if self.area < 0.995:
            parts.append(f"cropped to {self.area:.0%} of their area")
        missing = [shown_suffixes(self.left_out)] if self.left_out else []
        if self.folders:
            total = f"{sum(self.folders.values()):,} images in folders that are not read"
            missing.append(total if private else shown_folders(self.folders))
        if self.unreadable:
            missing.append(f"{self.unreadable:,} that cannot be read")
        left_out = [f"left out: {', '.join(missing)}"] if missing else []
        return "; ".join([", ".join(parts), *left_out, *(() if private else self.notes)])

    def _classes(self) -> str:
        n = len(self.label_names)
        counts = [sum(split) for split in zip(*self.per_class.values(), strict=True)]
        what = "class" if n == 1 else "classes"
        if n <= _ALL_NAMED:
            each = ", ".join(
                f"{name}: {count:,}" for name, count in zip(self.label_names, counts, strict=True)
            )
            return f"{n} {what} ({each})"
        least, most = min(counts), max(counts)
        spread = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        first, second, *_, last = self.label_names
        return f"{n:,} {what} ({first}, {second}, …, {last}: {spread} images each)"

    def _images(self) -> str:
        each = [f"{count:,} {_WORDS.get(split, split)}" for split, count in self.images.items()]
        *before, last = each
        return f"{', '.join(before)} and {last} images" if before else f"{last} images"


def summarise(parts: Mapping[str, ImageSet | StreamedSet | None], unreadable: int = 0) -> SetSummary:
    """What was read of a data set.

    Args:
        parts: its splits, in the order of the sentence, the training split first; None and empty ones are left out.
        unreadable: number of images that were left out because they cannot be read.
    """
    splits = {split: part for split, part in parts.items() if part is not None and len(part.labels)}
    first = next(iter(splits.values()))
    left_out: dict[str, int] = {}
    folders: dict[str, int] = {}
    notes: dict[str, None] = dict.fromkeys(first.spec.notes)
    seen: list[int] = []
    for part in splits.values():
        folders |= part.origin.folders
        notes |= dict.fromkeys(part.origin.notes)
        if id(part.origin) in seen:  # a validation split that was carved out of the training images
            continue
        seen.append(id(part.origin))
        for suffix, count in part.origin.left_out.items():
            left_out[suffix] = left_out.get(suffix, 0) + count
    (rows, columns), size = first.spec.input_size[1:], first.size
    cropped = min(rows, size[0]) * min(columns, size[1]) / (size[0] * size[1])
    counts = {split: len(part.labels) for split, part in splits.items()}
    area = 1 - (first.spec.cropped or 0)
    return SetSummary(
        label_names=first.spec.label_names,
        images=counts,
        per_class={split: _per_class(part) for split, part in splits.items()},
        input_size=first.spec.input_size,
        area=area * cropped,
        left_out=left_out,
        folders=folders,
        unreadable=unreadable,
        notes=tuple(notes),
    )


def _per_class(part: ImageSet | StreamedSet) -> list[int]:
    labels, n = part.labels.cpu(), part.spec.num_classes
    counts = labels.sum(0).long() if labels.ndim == 2 else labels.bincount(minlength=n)
    return [int(count) for count in counts.tolist()]


def suffix_of(path: str) -> str:
    """The suffix of a file, in lower case; of ``a.jpg.1`` and ``a.jpg?w=300`` with that of the image before it."""
    stem, suffix = os.path.splitext(os.path.basename(path).lower().partition("?")[0])
    before = os.path.splitext(stem)[1]
    if "?" in os.path.basename(path):
        return f"{suffix}?…"
    return f"{before}{suffix}" if before in IMAGE_SUFFIXES else suffix[:20]


def shown_suffixes(counts: Mapping[str, int]) -> str:
    """``8 .heic, 2 without a suffix``; the most frequent first, and only a few of them."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{count:,} {suffix or 'without a suffix'}" for suffix, count in ordered[:_KINDS_NAMED]]
    if rest := sum(count for _, count in ordered[_KINDS_NAMED:]):
        named.append(f"{rest:,} other files")
    return ", ".join(named)


def shown_folders(counts: Mapping[str, int]) -> str:
    """``32 images in bus and car (…)``, with what to do about them."""
    names = [_shown(place) for place in counts]
    listed: Sequence[str] = (
        names if len(names) <= _KINDS_NAMED else [*names[:_KINDS_NAMED], f"{len(names) - _KINDS_NAMED} more"]
    )
    *before, last = listed
    where = f"{', '.join(before)} and {last}" if before else last
    remedy = (
        ""
        if all(name.startswith(".") for name in counts)
        else (" (classes lie in one folder, or below train, val and test)")
    )
    return f"{sum(counts.values()):,} images in {where}{remedy}"


def _shown(place: str) -> str:
    if not place.endswith("*"):
        return place
    return f"{place[:-2]} itself" if place != "*" else "the folder itself"
