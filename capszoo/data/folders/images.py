"""`imagefolder:PATH`: a sub-folder of images for each class; and h-ImageNet, which is stored so."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DataError
from ..readers import decode_image, image_mode
from ..sets import ImageSet, StreamedSet, sized
from ..specs import DatasetSpec
from .common import SPLITS, decode_or_stream, folder_spec, mode_of, sides, to_tensor

__all__ = ["FileDecoder", "open_h_imagenet", "open_images", "split_folder"]


@dataclass(frozen=True)
class FileDecoder:
    """Images in separate files."""

    root: Path
    paths: tuple[str, ...]
    mode: str
    side: int

    def decode(self, index: int) -> Tensor:
        path = self.root / self.paths[index]
        return to_tensor(decode_image(path, self.mode, path, self.side))

    def fingerprint(self) -> str:
        return (
            "\n".join(f"{path} {(self.root / path).stat().st_size}" for path in self.paths) + f"\n{self.side}"
        )


def open_images(
    name: str,
    folder: Path,
    split: str,
    size: int | None,
    resize: int | None,
    spec: DatasetSpec | None = None,
    skipped: list[str] | None = None,
) -> ImageSet | StreamedSet:
    """A folder with a sub-folder per class, in a folder per split; without split folders, all is the training split."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    root = split_folder(folder, SPLITS[split])
    training = split_folder(folder, SPLITS["train"])
    if root is None or training is None:
        missing = SPLITS["train" if training is None else split]
        flat = sum(file.suffix.lower() in IMG_EXTENSIONS for file in folder.iterdir())
        if flat and not any(sub.is_dir() for sub in folder.iterdir()):
            raise DataError(
                f"{name}: {folder} holds {flat} images and no class folders",
                "put the images of each class into a sub-folder of its name",
            )
        raise DataError(f"{name}: {folder} has no sub-folder {' or '.join(missing)}")
    try:
        classes, numbers = find_classes(str(training))
        samples = make_dataset(str(root), numbers, extensions=IMG_EXTENSIONS, allow_empty=True)
    except FileNotFoundError as error:
        raise DataError(f"{name}: {str(error).splitlines()[0]}") from error
    strangers = sorted(sub.name for sub in root.iterdir() if sub.is_dir() and sub.name not in numbers)
    if strangers:
        raise DataError(f"{name}: {root} has the class {strangers[0]}, which {training} lacks")
    if not samples:
        raise DataError(f"{name}: {root} holds no images")
    filled = {label for _, label in samples}
    empty = [kind for kind, label in numbers.items() if label not in filled]
    if empty and split == "train":
        which = f"class {empty[0]} has" if len(empty) == 1 else f"classes {', '.join(empty)} have"
        raise DataError(f"{name}: {training}: the {which} no images: add some, or remove its folder")
    paths = tuple(os.path.relpath(path, root) for path, _ in samples)
    labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
    if spec is None:
        size, side = sides(size, resize)
        looked = paths if split == "train" else _relative(training, numbers)  # one mode for all splits
        mode = mode_of(lambda k: image_mode(training / looked[k], training / looked[k]), len(looked))
        spec = folder_spec(name, classes, (3 if mode == "RGB" else 1, size, size), len(paths), split)
    else:
        spec, side = sized(replace(spec, label_names=tuple(classes)), size, resize)
        mode = "RGB"
    return decode_or_stream(spec, split, FileDecoder(root, paths, mode, side), labels, side, skipped)


def split_folder(folder: Path, names: Sequence[str]) -> Path | None:
    """The sub-folder of a split; for the training split the folder itself, if it has classes but no splits."""
    found = next((folder / name for name in names if (folder / name).is_dir()), None)
    if found is None and "train" in names and not any((folder / name).is_dir() for name in SPLITS["test"]):
        return folder if any(sub.is_dir() for sub in folder.iterdir()) else None
    return found


def _relative(root: Path, numbers: dict[str, int]) -> tuple[str, ...]:
    """Images of a folder with a sub-folder per class, as paths relative to it."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    samples = make_dataset(str(root), numbers, extensions=IMG_EXTENSIONS, allow_empty=True)
    return tuple(os.path.relpath(path, root) for path, _ in samples)


def open_h_imagenet(
    spec: DatasetSpec, split: str, folders: Sequence[Path], *, size: int | None, resize: int | None
) -> ImageSet | StreamedSet:
    """h-ImageNet as written by `capszoo.data.imagenet.build`; its counts must match its manifest."""
    folder = next((folder for folder in folders if (folder / "h_imagenet.json").is_file()), None)
    if folder is None:
        raise DataError(f"{spec.title} not found in any data folder: {spec.remedy}")
    manifest = json.loads((folder / "h_imagenet.json").read_text(encoding="utf-8"))
    found = open_images(spec.name, folder, split, size, resize, spec)
    expected = manifest["counts"]["train" if split == "train" else "val"]
    if len(found) != expected:
        raise DataError(
            f"{folder} holds {len(found)} images of {spec.title} ({split}), its manifest says {expected}"
        )
    titles = manifest.get("titles", {})
    named = tuple(titles.get(wnid, wnid) for wnid in found.spec.label_names)
    return replace(found, spec=replace(found.spec, label_names=named))
