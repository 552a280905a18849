"""`imagefolder:PATH`: a sub-folder of images for each class; and h-ImageNet, which is stored so."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from capszoo.errors import CapszooError
from capszoo.images import Framing, files_below, is_visible_image

from ..errors import DataError
from ..readers import decode_image, image_mode, mode_of
from ..sets import ImageSet, StreamedSet, sized
from ..specs import DatasetSpec, Side, is_text
from .common import (
    SPLIT_NAMES,
    SPLITS,
    decode_or_stream,
    folder_spec,
    framing_text,
    settled,
    sides,
    to_tensor,
)

__all__ = ["FileDecoder", "holds_classes", "open_h_imagenet", "open_images", "split_folder"]


@dataclass(frozen=True)
class FileDecoder:
    """Images in separate files."""

    root: Path
    paths: tuple[str, ...]
    mode: str
    side: tuple[int, int]
    framing: Framing = Framing()

    def decode(self, index: int) -> Tensor:
        path = self.root / self.paths[index]
        return to_tensor(decode_image(path, self.mode, path, self.side, self.framing))

    def fingerprint(self) -> str:
        files = "\n".join(f"{path} {_size(self.root / path)}" for path in self.paths)
        return f"{files}\n{framing_text(self.side, self.framing)}"


def _size(path: Path) -> int:
    """Bytes of a file; 0 for a broken link, which decoding reports by its name, or leaves out."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def open_images(
    name: str,
    folder: Path,
    split: str,
    size: Side | None,
    resize: Side | None,
    spec: DatasetSpec | None = None,
    skipped: list[str] | None = None,
    channels: int | None = None,
    framing: Framing | None = None,
) -> ImageSet | StreamedSet:
    """A folder with a sub-folder per class, in a folder per split; without split folders, all is the training split."""
    root = split_folder(folder, SPLITS[split])
    training = split_folder(folder, SPLITS["train"]) or root  # images for a test alone have their own classes
    if root is None or training is None:
        missing = SPLITS["train" if training is None else split]
        if not any(sub.is_dir() for sub in folder.iterdir()):
            flat = sum(is_visible_image(file.name) for file in folder.iterdir())
            found = f"holds {flat} images and" if flat else "has"
            raise DataError(
                f"{name}: {folder} {found} no class folders",
                "put the images of each class into a sub-folder of its name",
            )
        raise DataError(f"{name}: {folder} has no sub-folder {' or '.join(missing)}")
    classes = _class_folders(training)
    if not classes:
        raise DataError(f"{name}: {training} has no class folders")
    _refuse_misnamed_splits(name, folder)
    unreadable = [kind for kind in classes if not is_text(kind)]
    if unreadable:
        raise DataError(
            f"{name}: the folder {unreadable[0]!a} in {training} has a name that is no text: rename it"
        )
    numbers = {kind: k for k, kind in enumerate(classes)}
    strangers = [kind for kind in _class_folders(root) if kind not in numbers]
    if strangers:
        raise DataError(f"{name}: {root} has the class {strangers[0]}, which {training} lacks")
    paths, targets = _listed(root, numbers)
    if not paths:
        flat = sum(is_visible_image(file.name) for file in root.iterdir())
        if flat:
            raise DataError(
                f"{name}: {root} holds {flat} images outside of class folders",
                "sort them into a sub-folder for each class, or move the folder away",
            )
        raise DataError(f"{name}: {root} holds no images")
    filled = set(targets)
    empty = [kind for kind, label in numbers.items() if label not in filled]
    if empty and split == "train":
        which = f"class {empty[0]} has" if len(empty) == 1 else f"classes {', '.join(empty)} have"
        raise DataError(f"{name}: {training}: the {which} no images: add some, or remove its folder")
    labels = torch.tensor(targets, dtype=torch.int64)
    if spec is None:
        size, side = sides(size, resize)
        looked = paths if split == "train" else _listed(training, numbers)[0]  # one mode for all splits
        mode = mode_of(
            lambda k: image_mode(training / looked[k], training / looked[k]), len(looked), channels
        )
        spec = folder_spec(name, classes, (3 if mode == "RGB" else 1, *size), len(paths), split)
        spec, framing = settled(
            spec, framing, lambda k: (training / looked[k], training / looked[k]), len(looked), side
        )
    else:
        spec, side = sized(replace(spec, label_names=tuple(classes)), size, resize)
        mode = "RGB"
    decoder = FileDecoder(root, paths, mode, side, framing or Framing())
    return decode_or_stream(spec, split, decoder, labels, side, skipped)


def split_folder(folder: Path, names: Sequence[str]) -> Path | None:
    """The sub-folder of a split; for the training split the folder itself, if it has classes but no splits."""
    found = next((folder / name for name in names if (folder / name).is_dir()), None)
    if found is None and "train" in names and not any((folder / name).is_dir() for name in SPLITS["test"]):
        return folder if any(sub.is_dir() for sub in folder.iterdir()) else None
    return found


def _refuse_misnamed_splits(name: str, folder: Path) -> None:
    """Refuse folders such as Test, which would become a class, or be ignored beside the folder train."""
    words = {kind: kind.casefold() for kind in _class_folders(folder) if kind not in SPLIT_NAMES}
    misnamed = [kind for kind, word in words.items() if word in (*SPLIT_NAMES, "testing") and word != "train"]
    if misnamed:
        raise DataError(
            f"{name}: {folder} has the sub-folder {misnamed[0]}, which is a split and no class",
            "rename the splits to train, val and test",
        )


def holds_classes(folder: Path) -> bool:
    """True if a folder contains images by class, with or without splits, so that `imagefolder:` may be omitted."""

    def by_class(parent: Path) -> bool:
        kinds = _class_folders(parent)
        return len(kinds) > 1 and all(any(map(is_visible_image, os.listdir(parent / kind))) for kind in kinds)

    parts = (folder, *(folder / name for name in SPLIT_NAMES))
    return any(by_class(part) for part in parts if part.is_dir())


def _class_folders(root: Path) -> list[str]:
    """Sorted names of the sub-folders, without hidden ones such as `.ipynb_checkpoints`."""
    return sorted(sub.name for sub in root.iterdir() if sub.is_dir() and not sub.name.startswith("."))


def _listed(root: Path, numbers: dict[str, int]) -> tuple[tuple[str, ...], list[int]]:
    """Images of a folder with a sub-folder per class, as paths relative to it, and their labels."""
    paths: list[str] = []
    targets: list[int] = []
    for kind, label in numbers.items():
        if not (root / kind).is_dir():  # a split may lack a class
            continue
        try:
            below = (str(path.relative_to(root)) for path in files_below(root / kind))
            found = sorted(path for path in below if is_visible_image(path))
        except CapszooError as error:
            raise DataError(error.message, error.remedy) from error
        paths += found
        targets += [label] * len(found)
    return tuple(paths), targets


def open_h_imagenet(
    spec: DatasetSpec,
    split: str,
    folders: Sequence[Path],
    *,
    size: Side | None,
    resize: Side | None,
    skipped: list[str] | None = None,
    framing: Framing | None = None,
) -> ImageSet | StreamedSet:
    """h-ImageNet as written by `capszoo.data.imagenet.build`; its counts must match its manifest."""
    folder = next((folder for folder in folders if (folder / "h_imagenet.json").is_file()), None)
    if folder is None:
        raise DataError(f"{spec.title} not found in any data folder: {spec.remedy}")
    try:
        manifest = json.loads((folder / "h_imagenet.json").read_text(encoding="utf-8"))
        expected = manifest["counts"]["train" if split == "train" else "val"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / 'h_imagenet.json'} is damaged ({error}): build the set again") from error
    found = open_images(spec.name, folder, split, size, resize, spec, skipped, framing=framing)
    if not skipped and len(found) != expected:
        raise DataError(
            f"{folder} holds {len(found)} images of {spec.title} ({split}), its manifest says {expected}"
        )
    titles = manifest.get("titles", {})
    named = tuple(titles.get(wnid, wnid) for wnid in found.spec.label_names)
    return replace(found, spec=replace(found.spec, label_names=named))
