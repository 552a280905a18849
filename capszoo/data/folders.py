"""Data sets that a path or a repository names: folders of images, the Hub's parquet and repositories, idx files.

What fits into 2 GB as uint8 is decoded once and held in memory; larger folders and repositories are streamed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .augment import resize as resize_images
from .errors import DataError
from .readers import decode_image, image_mode, parquet_label_names, read_parquet
from .sets import DatasetSpec, Decoder, ImageSet, StreamedSet
from .sources import idx_pair, read_idx_pair, sized

__all__ = [
    "MEMORY_LIMIT",
    "FileDecoder",
    "available_workers",
    "fetch_repository",
    "open_h_imagenet",
    "open_set",
]

MEMORY_LIMIT = 2 * 2**30
"""Bytes as uint8 up to which a set is held in memory."""

DEFAULT_SIZE = 224
_TEST_NAMES = ("test", "val", "validation", "valid")
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def open_set(
    name: str,
    split: str,
    data: str | Path | None,
    *,
    size: int | None,
    resize: int | None,
    download: str | Path | None,
) -> ImageSet | StreamedSet:
    """Open `imagefolder:PATH`, `parquet:PATH`, `idx:PATH` or `hf:REPO`; the arguments are those of `load_dataset`.

    Images of folders and repositories are scaled and cut to squares of side `resize`, by default 8/7 of `size`, which
    is 224 unless given. Images of idx and parquet files keep their size unless one is given.
    """
    kind, _, where = name.partition(":")
    if split not in ("train", "test"):
        raise DataError(f"unknown split '{split}' of {name}: there are train, test")
    if kind == "hf":
        return _open_hub(name, where, split, data, size, resize, download)
    folder = _locate(name, where, data)
    if kind == "imagefolder":
        return _open_images(name, folder, split, size, resize)
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
    """The folder itself, or below one of the data folders."""
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


# Small sets in files of their own.


def _read_idx(
    folder: Path, split: str, size: int | None, resize: int | None
) -> tuple[Tensor, Tensor, Sequence[str]]:
    pair = idx_pair(folder, "train" if split == "train" else "t10k")
    if pair is None:
        raise DataError(
            f"{folder} has no idx files of a {split} split (…-images-idx3-ubyte, …-labels-idx1-ubyte)"
        )
    images, labels = read_idx_pair(pair)
    if len(images) != len(labels) or not len(images):
        raise DataError(f"{pair[0]} has {len(images)} images, {pair[1]} {len(labels)} labels")
    # Both splits must agree on the number of classes, whichever is asked for.
    training = idx_pair(folder, "train")
    top = int(read_idx_pair(training)[1].max()) if training and split != "train" else 0
    return images, labels, [str(k) for k in range(max(int(labels.max()), top) + 1)]


def _read_parquet(
    folder: Path, split: str, size: int | None, resize: int | None
) -> tuple[Tensor, Tensor, Sequence[str]]:
    names = ("train",) if split == "train" else _TEST_NAMES
    shards = next((found for name in names if (found := sorted(folder.glob(f"{name}[-.]*parquet")))), [])
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


# Folders and repositories of encoded images.


@dataclass(frozen=True)
class FileDecoder:
    """Images in files of their own."""

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
    """Images in a data set of the library datasets, whose files are mapped into memory, not read."""

    rows: Any
    column: str
    mode: str
    side: int

    def decode(self, index: int) -> Tensor:
        cell = self.rows[index][self.column]
        encoded = cell["bytes"] or Path(cell["path"])
        return _to_tensor(decode_image(encoded, self.mode, f"row {index} of {self.column}", self.side))

    def fingerprint(self) -> str:
        return f"{self.rows._fingerprint} {self.side}"


def _to_tensor(image: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(np.array(image))  # Pillow's array may not be written to
    return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1).contiguous()


def available_workers() -> int:
    """Processors this process may use, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _hold_or_stream(
    spec: DatasetSpec, split: str, decoder: Decoder, labels: Tensor, side: int
) -> ImageSet | StreamedSet:
    """In memory where it fits, else streamed."""
    n = len(labels)
    if n * spec.input_size[0] * side * side > MEMORY_LIMIT:
        return StreamedSet(spec, split, decoder, torch.arange(n), labels, side, available_workers())
    images = torch.empty((n, spec.input_size[0], side, side), dtype=torch.uint8)

    def fill(index: int) -> None:
        images[index] = decoder.decode(index)

    with ThreadPoolExecutor(available_workers()) as pool:  # Pillow decodes outside of Python's lock
        list(pool.map(fill, range(n)))
    return ImageSet(spec, split, images, labels)


def _sides(size: int | None, resize: int | None) -> tuple[int, int]:
    """Side of the model's input and of the images kept."""
    size = size or DEFAULT_SIZE
    side = resize or round(size * 8 / 7)
    if side < size:
        raise DataError(f"images resized to {side} pixels are smaller than the {size} that the model sees")
    return size, side


def _open_images(
    name: str, folder: Path, split: str, size: int | None, resize: int | None, spec: DatasetSpec | None = None
) -> ImageSet | StreamedSet:
    """A folder with a sub-folder per class, below one per split."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    names = ("train",) if split == "train" else _TEST_NAMES
    root = next((folder / sub for sub in names if (folder / sub).is_dir()), None)
    if root is None:
        raise DataError(f"{name}: {folder} has no sub-folder {' or '.join(names)}")
    try:
        classes, numbers = find_classes(str(folder / "train"))
        samples = make_dataset(str(root), numbers, extensions=IMG_EXTENSIONS, allow_empty=split != "train")
    except FileNotFoundError as error:
        raise DataError(f"{name}: {str(error).splitlines()[0]}") from error
    strangers = sorted(sub.name for sub in root.iterdir() if sub.is_dir() and sub.name not in numbers)
    if strangers:
        raise DataError(f"{name}: {root} has the class {strangers[0]}, which {folder / 'train'} lacks")
    if not samples:
        raise DataError(f"{name}: {root} holds no images")
    paths = tuple(os.path.relpath(path, root) for path, _ in samples)
    labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
    if spec is None:
        size, side = _sides(size, resize)
        mode = image_mode(root / paths[0], root / paths[0])
        spec = _spec(name, classes, (3 if mode == "RGB" else 1, size, size), len(paths), split)
    else:
        spec, side = sized(replace(spec, label_names=tuple(classes)), size, resize)
        mode = "RGB"
    return _hold_or_stream(spec, split, FileDecoder(root, paths, mode, side), labels, side)


def open_h_imagenet(
    spec: DatasetSpec, split: str, folders: Sequence[Path], *, size: int | None, resize: int | None
) -> ImageSet | StreamedSet:
    """h-ImageNet as `capszoo.data.imagenet.build` wrote it; its counts must be those of its manifest."""
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


def fetch_repository(repository: str, folder: str | Path) -> Path:
    """Download a data set's repository from the Hub to `folder`/OWNER/NAME, as far as it is not there yet."""
    from huggingface_hub import snapshot_download

    target = Path(folder).expanduser() / repository
    try:
        snapshot_download(repository, repo_type="dataset", local_dir=target)
    except Exception as error:  # no network, no such repository, no access, disk full: of many kinds
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
) -> ImageSet | StreamedSet:
    """A repository of the Hub, fetched before or now, through the library datasets; its cache lies beside the files."""
    configuration = None
    if not Path(repository).expanduser().is_dir():
        repository, _, configuration = repository.partition(":")
    try:
        folder = _locate(name, repository, data)
    except DataError as error:
        if download is None:
            raise DataError(
                f"{name} is in no data folder, and fetched only when told where to: "
                f"python -m capszoo.data fetch hf:{repository} --to FOLDER"
            ) from error
        folder = fetch_repository(repository, download)
    try:
        import datasets
    except ImportError as error:
        raise DataError("hf: needs the library datasets: pip install datasets") from error
    read: Callable[..., Any] = datasets.load_dataset
    try:
        found = read(str(folder), configuration or None, cache_dir=str(folder / ".cache"))
    except Exception as error:  # the library's errors are of many kinds
        raise DataError(f"{name}: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    names = ("train",) if split == "train" else _TEST_NAMES
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
    first = rows[0][image]
    mode = image_mode(first["bytes"] or Path(first["path"]), name)
    size, side = _sides(size, resize)
    spec = _spec(name, label_names, (3 if mode == "RGB" else 1, size, size), len(labels), split)
    return _hold_or_stream(spec, split, _Rows(rows, image, mode, side), labels, side)
