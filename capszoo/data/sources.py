"""Data sets by name: where their files may lie, what they must hold, and how they become one tensor.

Nothing is ever downloaded. A data set is looked for under the folder given by the caller, else under each folder of
the environment variable `CAPSZOO_DATA`, else where a Debian package puts it. Accepted layouts, under the folder
itself or its sub-folder of the data set's name: the Hub's parquet files, idx files (plain or gzip; torchvision's
`MNIST/raw` and `FashionMNIST/raw` are such), CIFAR's binary batches.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .errors import DataError
from .readers import read_cifar_binary, read_idx, read_parquet

__all__ = ["DATASETS", "DatasetSpec", "ImageSet", "dataset_spec", "load_dataset", "split_validation"]


@dataclass(frozen=True)
class DatasetSpec:
    """What a named data set is; `mean` and `std` are for images scaled to [0, 1]."""

    name: str
    title: str
    label_names: tuple[str, ...]
    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    counts: dict[str, int]
    folders: tuple[str, ...]
    """Sub-folders in which known copies lie; "" is the folder itself."""
    source: str
    remedy: str

    @property
    def num_classes(self) -> int:
        return len(self.label_names)


_IDX = {"train": "train", "test": "t10k"}

DATASETS: dict[str, DatasetSpec] = {
    spec.name: spec
    for spec in (
        DatasetSpec(
            name="mnist",
            title="MNIST",
            label_names=tuple("0123456789"),
            input_size=(1, 28, 28),
            mean=(0.1307,),
            std=(0.3081,),
            counts={"train": 60_000, "test": 10_000},
            folders=("mnist", "mnist/mnist", "MNIST/raw", "mnist/raw", ""),
            source="LeCun, Cortes, Burges: The MNIST database of handwritten digits",
            remedy="the Hub's ylecun/mnist, torchvision's MNIST/raw or the four idx files will do",
        ),
        DatasetSpec(
            name="fashion_mnist",
            title="Fashion-MNIST",
            label_names=(
                "T-shirt/top",
                "Trouser",
                "Pullover",
                "Dress",
                "Coat",
                "Sandal",
                "Shirt",
                "Sneaker",
                "Bag",
                "Ankle boot",
            ),
            input_size=(1, 28, 28),
            mean=(0.2860,),
            std=(0.3530,),
            counts={"train": 60_000, "test": 10_000},
            folders=("fashion_mnist", "fashion-mnist", "fashion_mnist/fashion_mnist", "FashionMNIST/raw", ""),
            source="Xiao, Rasul, Vollgraf: Fashion-MNIST (arXiv 1708.07747)",
            remedy="Debian's package dataset-fashion-mnist, torchvision's FashionMNIST/raw or the idx files will do",
        ),
        DatasetSpec(
            name="cifar10",
            title="CIFAR-10",
            label_names=(
                "airplane",
                "automobile",
                "bird",
                "cat",
                "deer",
                "dog",
                "frog",
                "horse",
                "ship",
                "truck",
            ),
            input_size=(3, 32, 32),
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            counts={"train": 50_000, "test": 10_000},
            folders=(
                "cifar10",
                "cifar10/plain_text",
                "cifar-10-batches-bin",
                "cifar10/cifar-10-batches-bin",
                "",
            ),
            source="Krizhevsky: Learning Multiple Layers of Features from Tiny Images",
            remedy="the Hub's uoft-cs/cifar10 or the binary version (cifar-10-batches-bin) will do",
        ),
    )
}

_SYSTEM_FOLDERS = {"fashion_mnist": Path("/usr/share/datasets/fashion-mnist")}


@dataclass(frozen=True)
class ImageSet:
    """A data set held in memory: `images` uint8 [n, c, h, w], `labels` int64 [n]."""

    spec: DatasetSpec
    split: str
    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.images.shape[0]

    def subset(self, indices: Tensor, split: str | None = None) -> ImageSet:
        """The images at `indices` [m] as a set of their own."""
        return replace(
            self, split=split or self.split, images=self.images[indices], labels=self.labels[indices]
        )

    def to(self, device: torch.device | str) -> ImageSet:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def fingerprint(self) -> str:
        """sha256 over the pixels and labels in order: equal for every lossless copy of the data set."""
        digest = hashlib.sha256()
        digest.update(self.images.cpu().contiguous().numpy().tobytes())
        digest.update(self.labels.to("cpu", torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def dataset_spec(name: str) -> DatasetSpec:
    """Look a data set up by name; an unknown name raises `DataError` with the nearest known one."""
    if name in DATASETS:
        return DATASETS[name]
    near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise DataError(f"unknown data set '{name}': {hint}known are {', '.join(DATASETS)}")


def _roots(spec: DatasetSpec, data: str | Path | None) -> list[Path]:
    if data is not None:
        root = Path(data).expanduser()
        if not root.is_dir():
            raise DataError(f"data folder {root} does not exist")
        return [root]
    roots = [Path(part).expanduser() for part in os.environ.get("CAPSZOO_DATA", "").split(os.pathsep) if part]
    if spec.name in _SYSTEM_FOLDERS:
        roots.append(_SYSTEM_FOLDERS[spec.name])
    return [root for root in roots if root.is_dir()]


def _folders(spec: DatasetSpec, roots: list[Path]) -> Iterator[Path]:
    for root in roots:
        for sub in spec.folders:
            if (root / sub).is_dir():
                yield root / sub


def _idx_pair(folder: Path, stem: str) -> tuple[Path, Path] | None:
    def find(kind: str) -> Path | None:
        names = (f"{stem}-{kind}-ubyte", f"{stem}-{kind.replace('-idx', '.idx')}-ubyte")
        return next((p for n in names for p in (folder / n, folder / f"{n}.gz") if p.is_file()), None)

    images, labels = find("images-idx3"), find("labels-idx1")
    return (images, labels) if images and labels else None


def _read_split(spec: DatasetSpec, split: str, folder: Path) -> tuple[Tensor, Tensor] | None:
    """Read a split from a folder in whichever known layout it has; None where it has none of them."""
    shards = sorted([*folder.glob(f"{split}-*.parquet"), *folder.glob(f"{split}.parquet")])
    if shards:
        return read_parquet(shards, spec.input_size[0])
    if spec.name == "cifar10":
        names = ["test_batch.bin"] if split == "test" else [f"data_batch_{k}.bin" for k in range(1, 6)]
        present = [folder / name for name in names if (folder / name).is_file()]
        if present and len(present) < len(names):
            raise DataError(f"{folder} holds {len(present)} of the {len(names)} batches of the {split} split")
        return read_cifar_binary(present) if present else None
    pair = _idx_pair(folder, _IDX[split])
    if pair is None:
        return None
    images, labels = read_idx(pair[0]), read_idx(pair[1])
    if images.ndim != 3 or labels.ndim != 1:
        raise DataError(f"{pair[0]} and {pair[1]} do not hold images and labels")
    return images.unsqueeze(1), labels.long()


def _check(spec: DatasetSpec, split: str, images: Tensor, labels: Tensor, folder: Path, count: int) -> None:
    what = f"{folder} is not the {split} split of {spec.title}:"
    if tuple(images.shape[1:]) != spec.input_size:
        raise DataError(f"{what} its images are {tuple(images.shape[1:])}, not {spec.input_size} (c, h, w)")
    if len(images) != len(labels):
        raise DataError(f"{what} {len(images)} images but {len(labels)} labels")
    if len(images) != count:
        raise DataError(f"{what} {len(images)} images, expected {count} (truncated or incomplete?)")
    if int(labels.min()) < 0 or int(labels.max()) >= spec.num_classes:
        raise DataError(f"{what} labels run from {int(labels.min())} to {int(labels.max())}")


def load_dataset(
    name: str, split: str, data: str | Path | None = None, *, count: int | None = None
) -> ImageSet:
    """Load a split of a named data set into memory.

    Arguments:
        name: a key of `DATASETS`.
        split: "train" or "test".
        data: folder that holds the data set or its sub-folder; None asks `CAPSZOO_DATA`.
        count: the number of images to expect; None means the official number.

    Raises `DataError` (one line, with a remedy) for a missing, truncated or wrong file.
    """
    spec = dataset_spec(name)
    if split not in spec.counts:
        raise DataError(f"unknown split '{split}' of {spec.title}: there are {', '.join(spec.counts)}")
    roots = _roots(spec, data)
    for folder in _folders(spec, roots):
        found = _read_split(spec, split, folder)
        if found is not None:
            _check(spec, split, *found, folder, spec.counts[split] if count is None else count)
            return ImageSet(spec, split, *found)
    where = f"not in {', '.join(map(str, roots))}" if roots else "CAPSZOO_DATA names no folder"
    raise DataError(
        f"{spec.title} ({split}) not found: {where}; give its folder with --data or CAPSZOO_DATA ({spec.remedy})"
    )


def split_validation(data: ImageSet, size: int, seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """Carve `size` images out of a training set by a fixed seed: (the rest, the validation set)."""
    if not 0 <= size < len(data):
        raise DataError(f"a validation split of {size} images cannot be carved out of {len(data)}")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order[:size].sort().values, order[size:].sort().values
    return data.subset(rest), data.subset(held_out, split="validation")
