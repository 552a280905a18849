"""Named data sets: locations of their files, required contents, and conversion to one tensor.

A data set is searched under the folder given by the caller, else under each folder of the environment variable
``CAPSZOO_DATA``, else in the folder of a Debian package. Nothing is downloaded unless the caller specifies a folder
(``download=FOLDER``). Accepted layouts, in the folder itself or its sub-folder of the data set's name: the Hub's
parquet files, idx files (plain or gzip; such as torchvision's ``MNIST/raw`` and ``FashionMNIST/raw``), CIFAR's binary
batches, SVHN's .mat files, smallNORB's matrices. Sets composed from another one need that set's files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from capszoo.images import Framing

from .augment import frame
from .download import fetch, remote_files
from .errors import DataError
from .generate import Composer, Distort, Overlay, Scatter
from .readers import idx_pair, read_cifar_binary, read_idx_pair, read_norb_matrix, read_parquet, read_svhn_mat
from .roots import environment_roots, given_root
from .sets import ImageSet, StreamedSet, sized
from .specs import PREFIXES, DatasetSpec, Side, both_sides, dataset_spec

_IDX = {"train": "train", "test": "t10k"}
_SYSTEM_FOLDERS = {"fashion_mnist": Path("/usr/share/datasets/fashion-mnist")}

#: Seeds of the composed test sets: one image per test digit, always the same.
TEST_SEEDS = {"affnist": 1, "multimnist": 2, "diverse_multimnist": 3}

# MNIST and Fashion-MNIST agree in their files' names, shapes and counts.
_FIRST_LABELS = {
    ("mnist", "train"): (5, 0, 4, 1, 9),
    ("mnist", "test"): (7, 2, 1, 0, 4),
    ("fashion_mnist", "train"): (9, 0, 0, 3, 0),
    ("fashion_mnist", "test"): (9, 2, 1, 1, 6),
}

# Columns of smallNORB's info: instance, elevation (0 to 8), azimuth (tens of degrees), lighting.
_NORB_TRAINED = {
    "smallnorb_azimuth": (2, (30, 32, 34, 0, 2, 4)),
    "smallnorb_elevation": (1, (0, 1, 2)),
}


def _roots(spec: DatasetSpec, data: str | Path | None) -> list[Path]:
    if data is not None:
        return [given_root(data)]
    roots = environment_roots()
    if spec.name in _SYSTEM_FOLDERS:
        roots.append(_SYSTEM_FOLDERS[spec.name])
    return [root for root in roots if root.is_dir()]


def _folders(spec: DatasetSpec, roots: list[Path]) -> Iterator[Path]:
    for root in roots:
        for sub in spec.folders:
            if (root / sub).is_dir():
                yield root / sub


def _read_cifar(spec: DatasetSpec, split: str, folder: Path) -> tuple[Tensor, Tensor] | None:
    if spec.name == "cifar10":
        names = ["test_batch.bin"] if split == "test" else [f"data_batch_{k}.bin" for k in range(1, 6)]
    else:
        names = [f"{split}.bin"]
    present = [folder / name for name in names if (folder / name).is_file()]
    if present and len(present) < len(names):
        raise DataError(f"{folder} holds {len(present)} of the {len(names)} batches of the {split} split")
    return read_cifar_binary(present, 1 if spec.name == "cifar10" else 2) if present else None


def _read_norb(spec: DatasetSpec, split: str, folder: Path) -> tuple[Tensor, Tensor] | None:
    """Images [n, 2, 96, 96] and labels of smallNORB; for its viewpoint sets, only the images that belong to them."""
    stem = "training" if split == "train" else "testing"
    paths = {
        kind: next(iter(sorted(folder.glob(f"smallnorb-*-{stem}-{kind}.mat*"))), None)
        for kind in ("dat", "cat", "info")
    }
    if paths["dat"] is None:
        return None
    if missing := [kind for kind, path in paths.items() if path is None]:
        raise DataError(f"{folder} lacks smallnorb-…-{stem}-{missing[0]}.mat beside {paths['dat'].name}")
    images, labels, info = (read_norb_matrix(path) for path in paths.values() if path)
    if images.ndim != 4 or labels.ndim != 1 or info.ndim != 2 or len(info) != len(labels):
        raise DataError(f"{folder}: smallNORB's {stem} files do not belong together")
    labels = labels.long()
    if spec.name not in _NORB_TRAINED:
        return images, labels
    column, trained = _NORB_TRAINED[spec.name]
    chosen = torch.isin(info[:, column], torch.tensor(trained, dtype=info.dtype))
    if split == "test":
        chosen = ~chosen
    return images[chosen], labels[chosen]


def _read_split(spec: DatasetSpec, split: str, folder: Path) -> tuple[Tensor, Tensor] | None:
    """Read a split from a folder in any known layout; None if it has none of them."""
    if spec.name.startswith("smallnorb"):
        return _read_norb(spec, split, folder)
    shards = sorted([*folder.glob(f"{split}-*.parquet"), *folder.glob(f"{split}.parquet")])
    if shards:
        return read_parquet(shards, spec.input_size[0])
    if spec.name in ("cifar10", "cifar100"):
        return _read_cifar(spec, split, folder)
    if spec.name == "svhn":
        path = folder / f"{split}_32x32.mat"
        return read_svhn_mat(path) if path.is_file() else None
    pair = idx_pair(folder, _IDX[split])
    if pair is None:
        return None
    return read_idx_pair(pair, limit=spec.counts[split] * math.prod(spec.input_size) + 2**10)


def _check(spec: DatasetSpec, split: str, images: Tensor, labels: Tensor, folder: Path, count: int) -> None:
    what = f"{folder} is not the {split} split of {spec.title}:"
    size = (2, 96, 96) if spec.name.startswith("smallnorb") else spec.input_size
    if tuple(images.shape[1:]) != size:
        raise DataError(f"{what} its images are {tuple(images.shape[1:])}, not {size} (c, h, w)")
    if len(images) != len(labels):
        raise DataError(f"{what} {len(images)} images but {len(labels)} labels")
    if len(images) != count:
        raise DataError(f"{what} {len(images)} images, expected {count} (truncated or incomplete?)")
    if int(labels.min()) < 0 or int(labels.max()) >= spec.num_classes:
        raise DataError(f"{what} labels run from {int(labels.min())} to {int(labels.max())}")
    other = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}.get(spec.name)
    if other and tuple(labels[:5].tolist()) == _FIRST_LABELS[other, split]:
        raise DataError(
            f"{what} its labels are those of {dataset_spec(other).title}, whose files have the same names"
        )


def _pickled(spec: DatasetSpec, roots: list[Path]) -> Path | None:
    """A copy of CIFAR as Python pickles, which are never read."""
    subfolder = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}.get(spec.name)
    if subfolder is None:
        return None
    subs = (subfolder, f"{spec.name}/{subfolder}")
    return next((root / sub for root in roots for sub in subs if (root / sub).is_dir()), None)


def _find(spec: DatasetSpec, split: str, roots: list[Path], count: int) -> tuple[Tensor, Tensor] | None:
    for folder in _folders(spec, roots):
        images = _read_split(spec, split, folder)
        if images is not None:
            _check(spec, split, *images, folder, count)
            return images
    return None


def load_dataset(
    name: str,
    split: str,
    data: str | Path | None = None,
    *,
    count: int | None = None,
    size: Side | None = None,
    resize: Side | None = None,
    download: str | Path | None = None,
    skipped: list[str] | None = None,
    channels: int | None = None,
    framing: Framing | None = None,
) -> ImageSet | StreamedSet:
    """Load a split of a data set into memory.

    Image folders, shards and repositories above 2 GB (as uint8), and h-ImageNet, become a set to be streamed.

    Args:
        name: a key of ``DATASETS``, or one of ``PREFIXES`` followed by a path or repository.
        split: "train", "test", or another key of the data set's ``counts``; with a prefix "train", "val" or "test".
        data: folder with the data set or its sub-folder; None uses ``CAPSZOO_DATA``.
        count: expected number of images; None uses the official number; ignored with a prefix.
        size: side, or rows and columns, of the model's input images; None uses the data set's (224 for
            ``imagefolder:``, ``wds:`` and ``hf:``).
        resize: those of the images before they are cropped to ``size``; None uses the data set's (8/7 of ``size``
            there).
        download: download missing files to this folder; None: nothing is ever downloaded.
        skipped: for folders and repositories of images, skip those that cannot be read, and add a line about
            each to this list; None: they are an error.
        channels: with a prefix, read encoded images in grey (1) or in colour (3), as a model takes them; None: in
            colour if a sample of the training images has colour.
        framing: how images of another shape are framed, and black and white of those with more than 8 bits; None: the
            middle, and one range for the set, which ``spec.value_range`` of the result states.

    Raises:
        DataError: a missing, truncated or wrong file; the message is one line, with a remedy.
    """
    if name.startswith(tuple(PREFIXES)):
        from .folders import Reading, open_set

        return open_set(name, split, data, download, Reading(size, resize, skipped, channels, framing))
    spec = dataset_spec(name)
    if split not in spec.counts:
        raise DataError(f"unknown split '{split}' of {spec.title}: there are {', '.join(spec.counts)}")
    if spec.base:
        return _composed(spec, split, data, count, (size, resize), download)
    roots = _roots(spec, data)
    if spec.name == "h_imagenet":
        from .folders import Reading, open_h_imagenet

        reading = Reading(size, resize, skipped, framing=framing)
        return open_h_imagenet(spec, split, list(_folders(spec, roots)), reading)
    expected = spec.counts[split] if count is None else count
    split_images = _find(spec, split, roots, expected)
    origin = "smallnorb" if name in _NORB_TRAINED else name
    if split_images is None and download is not None and remote_files(origin, split):
        split_images = _find(spec, split, [fetch(origin, split, download).parent], expected)
    if split_images is None:
        raise _not_found(spec, split, roots, bool(remote_files(origin, split)))
    images, labels = split_images
    if size or resize or spec.side:
        spec, side = sized(spec, size, resize)
        framing = framing or Framing()
        images = frame(images, side, framing.crop_mode, framing.mean or spec.mean)
    return ImageSet(spec, split, images, labels)


def _composed(
    spec: DatasetSpec,
    split: str,
    data: str | Path | None,
    count: int | None,
    sizes: Sequence[Side | None],
    download: str | Path | None,
) -> ImageSet:
    """A composed set from the files of its digits."""
    if any(side and both_sides(side) != spec.input_size[1:] for side in sizes):
        raise DataError(f"{spec.title} is composed at {spec.input_size[1]} pixels and cannot be resized")
    part = "train" if split == "train" else "test"
    digits = load_dataset(spec.base, part, data, count=count, download=download)
    assert isinstance(digits, ImageSet)
    return compose(spec, split, digits)


def _not_found(spec: DatasetSpec, split: str, roots: list[Path], fetchable: bool) -> DataError:
    if pickled := _pickled(spec, roots):
        return DataError(f"{pickled} holds pickles, which can run any code and are not read: {spec.remedy}")
    where = f"not in {', '.join(map(str, roots))}" if roots else "CAPSZOO_DATA names no folder"
    by_command = f", or `capszoo data fetch {spec.name} --to FOLDER`" if fetchable else ""
    return DataError(
        f"{spec.title} ({split}) not found: {where}; set CAPSZOO_DATA to its folder, or give it with --data if "
        f"that takes a folder of data sets ({spec.remedy}){by_command}"
    )


def compose(spec: DatasetSpec, split: str, digits: ImageSet) -> ImageSet:
    """A composed set from its digits: new images for every training batch, fixed ones for a test split."""
    composer: Composer
    if spec.name == "affnist":
        composer = Distort() if split == "test" else Scatter()
    else:
        composer = Overlay(single=1 / 6 if spec.name == "diverse_multimnist" else 0.0)
    made = replace(digits, spec=spec, split=split, composer=composer)
    return made if split == "train" else made.fixed(TEST_SEEDS[spec.name])
