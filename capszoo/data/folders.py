"""Data sets given by a path or a repository: folders of images, shards, the Hub's parquet and repositories, idx.

Sets of up to 2 GB as uint8 are decoded once and stored in memory; larger folders and repositories are streamed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .augment import resize as resize_images
from .errors import DataError
from .readers import (
    MAX_LABEL,
    decode_image,
    idx_pair,
    image_below,
    image_mode,
    parquet_label_names,
    read_idx_pair,
    read_parquet,
)
from .sets import Decoder, ImageSet, StreamedSet, sized
from .shards import ShardIndex, expand_shards, member_name, read_index, read_member, shards_of_split
from .specs import DatasetSpec

__all__ = [
    "MEMORY_LIMIT",
    "FileDecoder",
    "available_workers",
    "fetch_repository",
    "find_splits",
    "open_h_imagenet",
    "open_set",
]

MEMORY_LIMIT = 2 * 2**30
"""Bytes as uint8 up to which a set is held in memory."""

DEFAULT_SIZE = 224
_VAL_NAMES = ("val", "validation", "valid")
_SPLITS = {"train": ("train",), "val": _VAL_NAMES, "test": ("test", *_VAL_NAMES)}
"""Names in use for each split; a set that has no test split is tested on its validation split."""
_MODE_SAMPLE = 1000
"""Number of images, evenly spaced, that decide whether a set has colour."""
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def open_set(
    name: str,
    split: str,
    data: str | Path | None,
    *,
    size: int | None,
    resize: int | None,
    download: str | Path | None,
    skipped: list[str] | None = None,
) -> ImageSet | StreamedSet:
    """Open `imagefolder:`, `wds:`, `parquet:`, `idx:PATH` or `hf:REPO`; the arguments are those of `load_dataset`.

    Images of folders and repositories are scaled and cropped to squares of side `resize`, by default 8/7 of `size`,
    whose default is 224. Images of idx and parquet files keep their size unless one is given.
    """
    kind, _, where = name.partition(":")
    if split not in _SPLITS:
        raise DataError(f"unknown split '{split}' of {name}: there are train, val, test")
    if kind == "hf":
        return _open_hub(name, where, split, data, size, resize, download, skipped)
    if kind == "wds":
        return _open_shards(name, where, split, data, size, resize, skipped)
    folder = _locate(name, where, data)
    if kind == "imagefolder":
        return _open_images(name, folder, split, size, resize, skipped=skipped)
    images, labels, label_names = (_read_parquet if kind == "parquet" else _read_idx)(
        folder, split, size, resize
    )
    if int(labels.min()) < 0 or int(labels.max()) >= len(label_names):
        raise DataError(f"{name} ({split}): labels run from {int(labels.min())} to {int(labels.max())}")
    native = (images.shape[1], images.shape[2], images.shape[3])
    spec = _spec(name, label_names, native, len(images), split)
    if size or resize:
        spec, side = sized(spec, size, resize)
        images = resize_images(images, (side, side))
    return ImageSet(spec, split, images, labels)


def _locate(name: str, where: str, data: str | Path | None) -> Path:
    """The folder itself, or the one below a data folder."""
    roots = (
        [data] if data else [part for part in os.environ.get("CAPSZOO_DATA", "").split(os.pathsep) if part]
    )
    places = [Path(where).expanduser(), *(Path(root).expanduser() / where for root in roots)]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise DataError(f"{name}: no such folder: {', '.join(dict.fromkeys(map(str, places)))}")
    return found


def _spec(
    name: str, label_names: Sequence[str], input_size: tuple[int, int, int], count: int, split: str
) -> DatasetSpec:
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


# Small sets in single files.


def _read_idx(
    folder: Path, split: str, size: int | None, resize: int | None
) -> tuple[Tensor, Tensor, Sequence[str]]:
    pair = idx_pair(folder, "train" if split == "train" else "t10k") if split != "val" else None
    if pair is None:
        raise DataError(
            f"{folder} has no idx files of a {split} split (…-images-idx3-ubyte, …-labels-idx1-ubyte)"
        )
    images, labels = read_idx_pair(pair)
    if len(images) != len(labels) or not len(images):
        raise DataError(f"{pair[0]} has {len(images)} images, {pair[1]} {len(labels)} labels")
    # Both splits must have the same number of classes, whichever is requested.
    training = idx_pair(folder, "train")
    top = int(read_idx_pair(training)[1].max()) if training and split != "train" else 0
    return images, labels, [str(k) for k in range(max(int(labels.max()), top) + 1)]


def _read_parquet(
    folder: Path, split: str, size: int | None, resize: int | None
) -> tuple[Tensor, Tensor, Sequence[str]]:
    names = _SPLITS[split]
    shards = _shards(folder, names)
    if not shards:
        raise DataError(
            f"{folder} has no parquet files of a {split} split ({'-*.parquet, '.join(names)}-*.parquet)"
        )
    if (total := sum(path.stat().st_size for path in shards)) > MEMORY_LIMIT:
        raise DataError(
            f"{folder}: {total / 2**30:.1f} GB of parquet are too much for memory: use hf:{folder}"
        )
    images, labels = read_parquet(shards, None, (resize or size) if size else None)
    label_names = parquet_label_names(shards[0]) or [str(k) for k in range(int(labels.max()) + 1)]
    return images, labels, label_names


def _shards(folder: Path, names: Sequence[str]) -> list[Path]:
    return next((found for name in names if (found := sorted(folder.glob(f"{name}[-.]*parquet")))), [])


# Folders and repositories of encoded images.


@dataclass(frozen=True)
class FileDecoder:
    """Images in separate files."""

    root: Path
    paths: tuple[str, ...]
    mode: str
    side: int

    def decode(self, index: int) -> Tensor:
        path = self.root / self.paths[index]
        return _to_tensor(decode_image(path, self.mode, path, self.side))

    def fingerprint(self) -> str:
        return (
            "\n".join(f"{path} {(self.root / path).stat().st_size}" for path in self.paths) + f"\n{self.side}"
        )


@dataclass(frozen=True)
class _Rows:
    """Images in a data set of the library datasets, whose files are memory-mapped."""

    rows: Any
    column: str
    mode: str
    side: int
    folder: Path

    def decode(self, index: int) -> Tensor:
        encoded = _cell(self.rows[index][self.column], self.folder)
        return _to_tensor(decode_image(encoded, self.mode, f"row {index} of {self.column}", self.side))

    def fingerprint(self) -> str:
        return f"{self.rows._fingerprint} {self.side}"


def _cell(cell: dict[str, Any], folder: Path) -> bytes | Path:
    """An image's bytes, or its file, which must be in the repository: a table could name any path."""
    return cell["bytes"] or image_below(folder, str(cell["path"]), f"a table of {folder}")


def _to_tensor(image: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(np.array(image))  # Pillow's array is read-only
    return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1).contiguous()


def available_workers() -> int:
    """Number of processors available to this process, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _decode_or_stream(
    spec: DatasetSpec,
    split: str,
    decoder: Decoder,
    labels: Tensor,
    side: int,
    skipped: list[str] | None = None,
    shards: Tensor | None = None,
) -> ImageSet | StreamedSet:
    """Decode into memory if the set fits, else stream it.

    Images that cannot be read are all listed in one error, or skipped and added to `skipped` if that is a list
    (a streamed set is then decoded once to find them).
    """
    n = len(labels)
    held = n * spec.input_size[0] * side * side <= MEMORY_LIMIT
    images = torch.empty((n if held else 0, spec.input_size[0], side, side), dtype=torch.uint8)

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
            failures = list(pool.map(fill, range(n)))
        bad = [failure for failure in failures if failure]
        if bad and skipped is None:
            # A line has room for one reason; the other files are only named.
            others = "; ".join(failure.partition(": ")[0] for failure in bad[1:4])
            more = "" if len(bad) == 1 else f", and {len(bad) - 1} more: {others}"
            more += "; …" if len(bad) > 4 else ""
            first = bad[0].partition(": give")[0]
            raise DataError(f"{first}{more}: mend or remove what cannot be read, or leave it out (skip_bad)")
        if bad:
            skipped.extend(bad)  # type: ignore[union-attr]
            sound = torch.tensor([k for k, failure in enumerate(failures) if not failure], dtype=torch.int64)
    if not len(sound):
        raise DataError(f"{spec.name}: none of the {n} images of {split} can be read")
    if held:
        return ImageSet(spec, split, images[sound], labels[sound])
    return StreamedSet(
        spec,
        split,
        decoder,
        sound,
        labels[sound],
        side,
        available_workers(),
        shards=None if shards is None else shards[sound],
    )


def _mode_of(modes: Callable[[int], str], count: int) -> str:
    """ "RGB" if any of the images (a sample of a thousand, evenly spaced) has colour, else "L"."""
    for index in range(0, count, -(-count // _MODE_SAMPLE) or 1):
        with suppress(DataError):  # unreadable images are reported when they are decoded
            if modes(index) == "RGB":
                return "RGB"
    return "L"


def _sides(size: int | None, resize: int | None) -> tuple[int, int]:
    """Side of the model's input, and of the stored images."""
    size = size or DEFAULT_SIZE
    side = resize or round(size * 8 / 7)
    if side < size:
        raise DataError(f"images resized to {side} pixels are smaller than the {size} that the model sees")
    return size, side


def _open_images(
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

    root = _split_folder(folder, _SPLITS[split])
    training = _split_folder(folder, _SPLITS["train"])
    if root is None or training is None:
        missing = _SPLITS["train" if training is None else split]
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
        size, side = _sides(size, resize)
        looked = paths if split == "train" else _relative(training, numbers)  # one mode for all splits
        mode = _mode_of(lambda k: image_mode(training / looked[k], training / looked[k]), len(looked))
        spec = _spec(name, classes, (3 if mode == "RGB" else 1, size, size), len(paths), split)
    else:
        spec, side = sized(replace(spec, label_names=tuple(classes)), size, resize)
        mode = "RGB"
    return _decode_or_stream(spec, split, FileDecoder(root, paths, mode, side), labels, side, skipped)


def _split_folder(folder: Path, names: Sequence[str]) -> Path | None:
    """The sub-folder of a split; for the training split the folder itself, if it has classes but no splits."""
    found = next((folder / name for name in names if (folder / name).is_dir()), None)
    if found is None and "train" in names and not any((folder / name).is_dir() for name in _SPLITS["test"]):
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
    found = _open_images(spec.name, folder, split, size, resize, spec)
    expected = manifest["counts"]["train" if split == "train" else "val"]
    if len(found) != expected:
        raise DataError(
            f"{folder} holds {len(found)} images of {spec.title} ({split}), its manifest says {expected}"
        )
    titles = manifest.get("titles", {})
    named = tuple(titles.get(wnid, wnid) for wnid in found.spec.label_names)
    return replace(found, spec=replace(found.spec, label_names=named))


@dataclass(frozen=True)
class _Members:
    """Images in shards."""

    index: ShardIndex
    mode: str
    side: int

    def encoded(self, number: int) -> tuple[bytes, Path, int]:
        """The bytes of an image, its shard, and their offset in it."""
        path, offset = self.index.paths[self.index.shards[number]], int(self.index.offsets[number])
        return read_member(path, offset, int(self.index.sizes[number])), path, offset

    def decode(self, index: int) -> Tensor:
        encoded, path, offset = self.encoded(index)
        try:
            return _to_tensor(decode_image(encoded, self.mode, path, self.side))
        except DataError:  # reading the name takes another access, so it happens only on errors
            return _to_tensor(
                decode_image(encoded, self.mode, f"{path}/{member_name(path, offset)}", self.side)
            )

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.index.offsets.tobytes() + self.index.sizes.tobytes()).hexdigest()
        names = "\n".join(f"{path.name} {path.stat().st_size}" for path in self.index.paths)
        return f"{names}\n{digest} {self.side}"


def _find_shards(name: str, where: str, data: str | Path | None) -> list[Path]:
    """All shards that `wds:` and a path name; for a folder, including those in its split sub-folders."""
    last = where.rpartition("/")[2]
    if any(c in last for c in "{*?["):
        parent = where[: -len(last) - 1] or ("/" if where.startswith("/") else ".")
        return expand_shards(name, _locate(name, parent, data), last)
    folder = _locate(name, where, data)
    subs = [folder / split for names in _SPLITS.values() for split in names if (folder / split).is_dir()]
    found = sorted(path for place in (folder, *dict.fromkeys(subs)) for path in place.glob("*.tar"))
    if not found:
        raise DataError(f"{name}: {folder} has no shards (train-*.tar, val-*.tar)")
    return found


def _shard_names(index: ShardIndex, training: ShardIndex) -> list[str]:
    """Class names from `classes.txt` beside the shards, else numbers."""
    count = 1 + int(max(index.labels.max(), training.labels.max()))
    parents = dict.fromkeys(
        parent for path in index.paths[:1] for parent in (path.parent, path.parent.parent)
    )
    for file in (parent / "classes.txt" for parent in parents):
        if not file.is_file():
            continue
        try:
            names = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {file}: {error}") from error
        if not count <= len(names) <= MAX_LABEL or not all(name.strip() for name in names):
            raise DataError(f"{file} has {len(names)} lines, but the shards have the label {count - 1}")
        return [name.strip() for name in names]
    return [str(k) for k in range(count)]


def _open_shards(
    name: str,
    where: str,
    split: str,
    data: str | Path | None,
    size: int | None,
    resize: int | None,
    skipped: list[str] | None,
) -> ImageSet | StreamedSet:
    """A split of a set of WebDataset shards."""
    known = [part for names in _SPLITS.values() for part in names]
    every = _find_shards(name, where, data)
    paths = shards_of_split(every, _SPLITS[split], known)
    if not paths:
        raise DataError(f"{name} has no shards of a {split} split ({'-*.tar, '.join(_SPLITS[split])}-*.tar)")
    index = read_index(paths, available_workers())
    # Colour and number of classes come from the training split, so that all splits agree.
    training = shards_of_split(every, _SPLITS["train"], known)
    looked = read_index(training, available_workers()) if split != "train" and training else index
    label_names = _shard_names(index, looked)
    members = _Members(looked, "L", 1)

    def mode_at(number: int) -> str:
        encoded, path, _ = members.encoded(number)
        return image_mode(encoded, path)

    mode = _mode_of(mode_at, len(looked.labels))
    size, side = _sides(size, resize)
    spec = _spec(name, label_names, (3 if mode == "RGB" else 1, size, size), len(index.labels), split)
    labels, shards = torch.from_numpy(index.labels), torch.from_numpy(index.shards)
    return _decode_or_stream(spec, split, _Members(index, mode, side), labels, side, skipped, shards)


def fetch_repository(repository: str, folder: str | Path) -> Path:
    """Download a data set's repository from the Hub to `folder`/OWNER/NAME, except files that already exist."""
    from huggingface_hub import snapshot_download

    target = Path(folder).expanduser() / repository
    try:
        snapshot_download(repository, repo_type="dataset", local_dir=target)
    except Exception as error:  # no network, no such repository, no access, disk full: many kinds
        raise DataError(
            f"cannot fetch hf:{repository}: {(str(error) or repr(error)).splitlines()[0]}"
        ) from error
    return target


def _open_hub(
    name: str,
    repository: str,
    split: str,
    data: str | Path | None,
    size: int | None,
    resize: int | None,
    download: str | Path | None,
    skipped: list[str] | None,
) -> ImageSet | StreamedSet:
    """A split of a Hub repository, downloaded earlier or now."""
    found, folder = _hub_splits(name, repository, data, download)  # raises an error if the library is missing
    import datasets

    names = _SPLITS[split]
    part = next((part for part in names if part in found), None)
    if part is None:
        raise DataError(f"{name} has the splits {', '.join(found)}, none of {', '.join(names)}")
    rows = found[part]
    image = next((key for key, kind in rows.features.items() if isinstance(kind, datasets.Image)), None)
    label = next((key for key, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)), None)
    if image is None or label is None:
        raise DataError(
            f"{name} has the columns {', '.join(rows.features)}: no image or no class label among them"
        )
    label_names = rows.features[label].names
    labels = torch.tensor(rows[label][:], dtype=torch.int64)
    rows = rows.cast_column(image, datasets.Image(decode=False))
    looked = (found["train"] if "train" in found else rows).cast_column(image, datasets.Image(decode=False))

    def mode_at(index: int) -> str:
        cell = looked[index][image]
        return image_mode(_cell(cell, folder), name)

    mode = _mode_of(mode_at, len(looked))
    size, side = _sides(size, resize)
    spec = _spec(name, label_names, (3 if mode == "RGB" else 1, size, size), len(labels), split)
    return _decode_or_stream(spec, split, _Rows(rows, image, mode, side, folder), labels, side, skipped)


def _hub_splits(
    name: str, repository: str, data: str | Path | None, download: str | Path | None
) -> tuple[Any, Path]:
    """All splits of a repository by name, through the library datasets; and its folder, which also has the cache."""
    configuration = None
    if not Path(repository).expanduser().is_dir():
        repository, _, configuration = repository.partition(":")
    try:
        folder = _locate(name, repository, data)
    except DataError as error:
        if download is None:
            raise DataError(
                f"{name} is in no data folder, and fetched only when told where to: "
                f"capszoo data fetch hf:{repository} --to FOLDER"
            ) from error
        folder = fetch_repository(repository, download)
    try:
        import datasets
    except ImportError as error:
        raise DataError("hf: needs the library datasets: pip install 'capszoo[train]'") from error
    read: Callable[..., Any] = datasets.load_dataset
    try:
        found = read(str(folder), configuration or None, cache_dir=str(folder / ".cache"))
    except Exception as error:  # the library raises many kinds of errors
        raise DataError(f"{name}: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    return found, folder


def find_splits(name: str, data: str | Path | None = None, download: str | Path | None = None) -> set[str]:
    """Which of train, val and test a set given by a path or repository has, each under a separate name."""
    kind, _, where = name.partition(":")
    own: dict[str, tuple[str, ...]] = {**_SPLITS, "test": ("test",)}
    if kind == "hf":
        found, _ = _hub_splits(name, where, data, download)
        return {split for split, names in own.items() if any(name in found for name in names)}
    if kind == "wds":
        known = [part for names in _SPLITS.values() for part in names]
        every = _find_shards(name, where, data)
        return {split for split, names in own.items() if shards_of_split(every, names, known)}
    folder = _locate(name, where, data)
    if kind == "idx":
        return {split for split, stem in (("train", "train"), ("test", "t10k")) if idx_pair(folder, stem)}
    look: Callable[[Path, Sequence[str]], Any] = _shards if kind == "parquet" else _split_folder
    return {split for split, names in own.items() if look(folder, names)}
