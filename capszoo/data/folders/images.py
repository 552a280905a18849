"""``imagefolder:PATH``: a sub-folder of images for each class; and h-ImageNet, which is stored so."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from capszoo._utils.files import read_json_object
from capszoo.errors import CapszooError, WeightsError
from capszoo.images import Framing, files_below, is_hidden, is_visible_image

from ..errors import DataError
from ..readers import MODES
from ..sets import ImageSet, Origin, StreamedSet, sized
from ..specs import DatasetSpec, is_text
from ..summary import shown_suffixes, suffix_of
from .common import SPLIT_NAMES, SPLITS, Decoded, Reading, decode_or_stream, look_alike, open_source

#: Names, in lower case, that mean a split; only those of ``SPLIT_NAMES`` are read as one.
_SPLIT_WORDS = SPLIT_NAMES | {
    *("training", "testing", "dev", "eval", "evaluation", "holdout"),
    *(f"{name}{sign}set" for name in SPLIT_NAMES for sign in ("", "_", "-")),
}


@dataclass(frozen=True)
class Files:
    """Images in separate files."""

    root: Path
    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def encoded(self, index: int) -> tuple[Path, Path]:
        path = self.root / self.paths[index]
        return path, path

    def files(self) -> str:
        return "".join(f"{path} {_size(self.root / path)}\n" for path in self.paths)


def _size(path: Path) -> int:
    """Bytes of a file; 0 for a broken link, which decoding reports by its name, or leaves out."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def open_images(
    name: str, folder: Path, split: str, reading: Reading, spec: DatasetSpec | None = None
) -> ImageSet | StreamedSet:
    """A folder with a sub-folder per class, in a folder per split; without split folders, all is the training split."""
    root = split_folder(folder, SPLITS[split])
    training = split_folder(folder, SPLITS["train"]) or root  # images for a test alone have their own classes
    if root is None or training is None:
        raise _no_split(name, folder, SPLITS["train" if training is None else split])
    numbers = _class_numbers(name, training)
    _refuse_misnamed_splits(name, folder)
    own = _class_numbers(name, root)
    stranger = next((kind for kind in own if kind not in numbers), None)
    if stranger is not None:
        like = look_alike(stranger, numbers)
        shown = repr(stranger) if like else stranger
        raise DataError(f"{name}: {root} has the class {shown}, which {training} lacks{like}")
    listed = _listed(root, numbers)
    _refuse_empty(name, root, numbers, listed, every=split == "train")
    labels = torch.tensor(listed.targets, dtype=torch.int64)
    files = Files(root, listed.paths)
    origin = Origin(
        listed.left_out,
        _beside(folder, root, training if split == "train" else None),
        _merged_splits(root, own),
    )
    if spec is not None:
        spec, side = sized(replace(spec, label_names=tuple(numbers)), reading.size, reading.resize)
        decoder = Decoded(files, MODES[spec.input_size[0]], side, reading.framing or Framing())
        return decode_or_stream(spec, split, decoder, labels, side, reading.skipped, origin=origin)
    # one look for all splits
    trained = files if split == "train" else Files(training, _listed(training, numbers).paths)
    return open_source(name, split, files, trained, labels, list(numbers), reading, origin=origin)


def _no_split(name: str, folder: Path, missing: Sequence[str]) -> DataError:
    """The error about a folder without the split that is read, or without the training split."""
    if any(sub.is_dir() for sub in folder.iterdir()):
        remedy = "in a recipe set data.test=false" if "test" in missing else ""
        return DataError(f"{name}: {folder} has no sub-folder {' or '.join(missing)}", remedy)
    flat = sum(is_visible_image(file.name) for file in folder.iterdir())
    contents = f"holds {flat} images and" if flat else "has"
    return DataError(
        f"{name}: {folder} {contents} no class folders",
        "put the images of each class into a sub-folder of its name, or give a table of their labels (FILE.csv)",
    )


def _class_numbers(name: str, root: Path) -> dict[str, int]:
    """Labels of the classes, by their names in one Unicode form: some systems store accents as characters."""
    numbers: dict[str, int] = {}
    folders = _class_folders(root)
    if not folders:
        raise DataError(f"{name}: {root} has no class folders")
    for kind in sorted(unicodedata.normalize("NFC", folder) for folder in folders):
        if not is_text(kind):
            raise DataError(f"{name}: the folder {kind!a} in {root} has a name that is no text: rename it")
        if kind in numbers:
            raise DataError(
                f"{name}: {root} has two folders of the name {kind!r}, in two forms of Unicode: merge them"
            )
        numbers[kind] = len(numbers)
    return numbers


def _refuse_empty(name: str, root: Path, numbers: dict[str, int], listed: _Listed, every: bool) -> None:
    """Refuse a split without images, or, where ``every`` class needs some, without images of a class."""
    if not listed.paths:
        flat = sum(is_visible_image(file.name) for file in root.iterdir())
        if flat:
            raise DataError(
                f"{name}: {root} holds {flat} images outside of class folders",
                "sort them into a sub-folder for each class, or move the folder away",
            )
        raise DataError(f"{name}: {root} holds no images{_instead(listed.left_out)}")
    filled = set(listed.targets)
    empty = [kind for kind, label in numbers.items() if label not in filled]
    if empty and every:
        which = f"class {empty[0]} has" if len(empty) == 1 else f"classes {', '.join(empty)} have"
        unread: Counter[str] = Counter()
        for kind in empty:
            unread.update(listed.unread_of.get(kind, {}))
        instead = _instead(unread)
        remedy = "" if instead else ": add some, or remove its folder"
        raise DataError(f"{name}: {root}: the {which} no images{instead}{remedy}")


def _instead(left_out: Mapping[str, int]) -> str:
    """What a folder without images holds in their place, and what to do with it."""
    if not left_out:
        return ""
    return f", but {shown_suffixes(left_out)}: save them as PNG or JPEG"


def split_folder(folder: Path, names: Sequence[str]) -> Path | None:
    """The sub-folder of a split; for the training split the folder itself, if it has classes but no splits."""
    if _classes_alone(folder):
        return folder if "train" in names else None
    chosen = next((folder / name for name in names if (folder / name).is_dir()), None)
    if chosen is None and "train" in names and not any((folder / name).is_dir() for name in SPLITS["test"]):
        return folder if any(sub.is_dir() for sub in folder.iterdir()) else None
    return chosen


def _classes_alone(folder: Path) -> bool:
    """True if sub-folders with the name of a split are classes: they and a folder beside them hold images themselves.

    So are valid and invalid, or bus, car and train. A folder of images and its test images without classes are not.
    """
    kinds = _class_folders(folder)
    named = [folder / kind for kind in kinds if kind.casefold() in _SPLIT_WORDS]
    others = [folder / kind for kind in kinds if kind.casefold() not in _SPLIT_WORDS]
    if not named or not any(map(_holds_images, others)) or not all(map(_holds_images, named)):
        return False
    return not any(_holds_images(part / kind) for part in named for kind in _class_folders(part))


def _holds_images(folder: Path) -> bool:
    """Whether there are images in a folder itself."""
    return any(is_visible_image(name) for name in os.listdir(folder))


def _refuse_misnamed_splits(name: str, folder: Path) -> None:
    """Refuse folders such as Test, which would become a class, or be ignored beside the folder train."""
    if _classes_alone(folder):
        return
    refused = (SPLIT_NAMES | {"testing"}) - {"train"}
    if split_folder(folder, SPLITS["train"]) == folder:  # beside train/ they are named as left out
        refused |= _SPLIT_WORDS - {"train", "training"}
    misnamed = [
        kind for kind in _class_folders(folder) if kind not in SPLIT_NAMES and kind.casefold() in refused
    ]
    if misnamed:
        raise DataError(
            f"{name}: {folder} has the sub-folder {misnamed[0]}, which is a split and no class",
            "rename the splits to train, val and test",
        )


def _beside(folder: Path, root: Path, training: Path | None) -> dict[str, int]:
    """Number of images in folders that are not read, by their path.

    Those are images beside the class folders, in hidden folders, and, if ``training`` is read, in folders beside those
    of the splits.
    """
    prefix = "" if root == folder else f"{root.name}/"
    loose = sum(is_visible_image(name) for name in os.listdir(root))
    loose_files = {f"{prefix}*": loose}
    hidden = (sub for sub in root.iterdir() if sub.name.startswith(".") and sub.is_dir())
    loose_files |= {f"{prefix}{sub.name}": _images_below(sub) for sub in hidden}
    if training is not None and training != folder:
        used = {split_folder(folder, names) for names in SPLITS.values()}
        others = (kind for kind in _class_folders(folder) if folder / kind not in used)
        loose_files |= {kind: _images_below(folder / kind) for kind in others}
        loose_files |= {"*": sum(is_visible_image(name) for name in os.listdir(folder))}
    return {place: loose_files[place] for place in sorted(loose_files) if loose_files[place]}


def _images_below(folder: Path) -> int:
    try:
        return sum(is_visible_image(str(path.relative_to(folder))) for path in files_below(folder))
    except CapszooError:  # a folder that is not read may be one that cannot be
        return 0


def _merged_splits(root: Path, kinds: Iterable[str]) -> tuple[str, ...]:
    """A note about splits below the classes, whose images are read as one."""
    below = [set(_class_folders(root / kind)) for kind in kinds if (root / kind).is_dir()]
    splits = set.union(*below) if below else set()
    if len(splits) < 2 or not all(name.casefold() in _SPLIT_WORDS for name in splits):
        return ()
    return (
        f"{' and '.join(sorted(splits))} below the classes are read as one: put the classes below the splits",
    )


def holds_classes(folder: Path) -> bool:
    """True if a folder contains images by class, with or without splits, so that ``imagefolder:`` may be omitted."""

    def by_class(parent: Path) -> bool:
        kinds = _class_folders(parent)
        return len(kinds) > 1 and all(any(map(is_visible_image, os.listdir(parent / kind))) for kind in kinds)

    parts = (folder, *(folder / name for name in SPLIT_NAMES))
    return any(by_class(part) for part in parts if part.is_dir())


def _class_folders(root: Path) -> list[str]:
    """Sorted names of the sub-folders, without hidden ones such as ``.ipynb_checkpoints``."""
    return sorted(sub.name for sub in root.iterdir() if sub.is_dir() and not sub.name.startswith("."))


@dataclass(frozen=True)
class _Listed:
    """The images of a folder with a sub-folder per class.

    Attributes:
        paths: relative to the folder.
        targets: their labels.
        unread_of: number of other files of each class that has some, by their suffix.
    """

    paths: tuple[str, ...]
    targets: list[int]
    unread_of: dict[str, dict[str, int]]

    @property
    def left_out(self) -> dict[str, int]:
        """Number of files that are no images, by their suffix."""
        total: Counter[str] = Counter()
        for counts in self.unread_of.values():
            total.update(counts)
        return dict(total)


def _listed(root: Path, numbers: dict[str, int]) -> _Listed:
    """Images of a folder with a sub-folder per class; a split may lack a class."""
    folders = {unicodedata.normalize("NFC", kind): kind for kind in _class_folders(root)}
    paths: list[str] = []
    targets: list[int] = []
    unread: dict[str, dict[str, int]] = {}
    for kind, label in numbers.items():
        if kind not in folders:
            continue
        try:
            below = sorted(str(path.relative_to(root)) for path in files_below(root / folders[kind]))
        except CapszooError as error:
            raise DataError(error.message, error.remedy) from error
        images = [path for path in below if is_visible_image(path)]
        others = (path for path in below if not (is_visible_image(path) or is_hidden(path)))
        if counts := Counter(map(suffix_of, others)):
            unread[kind] = counts
        paths += images
        targets += [label] * len(images)
    return _Listed(tuple(paths), targets, unread)


def open_h_imagenet(
    spec: DatasetSpec, split: str, folders: Sequence[Path], reading: Reading
) -> ImageSet | StreamedSet:
    """h-ImageNet as written by ``capszoo.data.imagenet.build``; its counts must match its manifest."""
    folder = next((folder for folder in folders if (folder / "h_imagenet.json").is_file()), None)
    if folder is None:
        raise DataError(f"{spec.title} not found in any data folder: {spec.remedy}")
    try:
        manifest = read_json_object(folder / "h_imagenet.json")
        expected = manifest["counts"]["train" if split == "train" else "val"]
    except WeightsError as error:
        raise DataError(f"{error}: build the set again") from error
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / 'h_imagenet.json'} is damaged ({error}): build the set again") from error
    images = open_images(spec.name, folder, split, reading, spec)
    if not reading.skipped and len(images) != expected:
        raise DataError(
            f"{folder} holds {len(images)} images of {spec.title} ({split}), its manifest says {expected}"
        )
    titles = manifest.get("titles", {})
    named = tuple(titles.get(wnid, wnid) for wnid in images.spec.label_names)
    return replace(images, spec=replace(images.spec, label_names=named))
