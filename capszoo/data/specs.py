"""Specifications of the named data sets, and the prefixes of those given by a path or a repository."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from capszoo._utils.files import expanded
from capszoo.errors import unknown_name

from .errors import DataError, UnknownDataset

#: Rows and columns of images, or the side of squares.
Side: TypeAlias = "int | tuple[int, int]"


def both_sides(side: Side) -> tuple[int, int]:
    """Rows and columns."""
    return (side, side) if isinstance(side, int) else side


def shown_sides(side: Side) -> str:
    """``32``, or ``32x64`` for rows and columns that differ."""
    rows, columns = both_sides(side)
    return str(rows) if rows == columns else f"{rows}x{columns}"


@dataclass(frozen=True)
class DatasetSpec:
    """Specification of a data set; ``mean`` and ``std`` are for images scaled to [0, 1]."""

    name: str
    title: str
    label_names: tuple[str, ...]
    #: What the model sees; stored images may be larger and are then cropped to it.
    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    #: Images of each split; 0 where they depend on the copy.
    counts: dict[str, int]
    #: Sub-folders in which known copies lie; "" is the folder itself.
    folders: tuple[str, ...]
    source: str
    remedy: str
    #: Name of the set whose images this one is composed from.
    base: str = ""
    #: 1: labels are classes [n]. Otherwise zeros and ones [n, classes]: this many ones, None where it varies.
    labels_per_image: int | None = 1
    #: Side of the stored images where it differs from ``input_size``.
    side: int | None = None
    #: Black and white of images of more than 8 bits a channel, where the set has some.
    value_range: tuple[float, float] | None = None
    #: Mean share of the training images' area that framing cuts off; None where it is not known.
    cropped: float | None = None
    #: What of the files of images is not read, a sentence a kind.
    notes: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        return len(self.label_names)

    @property
    def multi_label(self) -> bool:
        return self.labels_per_image != 1

    @property
    def accuracy(self) -> str:
        """Kind of accuracy: "top-1", or, for images with several labels, the "exact set"."""
        return "exact set" if self.multi_label else "top-1"


#: Prefixes that a path or repository follows, and what it must be.
PREFIXES: dict[str, str] = {
    "imagefolder:": "a folder of images in a sub-folder per class, below train/ and test/ (or val/)",
    "csv:": "a table of file names and labels, beside its images",
    "parquet:": "a folder of the Hub's parquet shards, train-*.parquet and test-*.parquet",
    "idx:": "a folder of four idx files, named like MNIST's",
    "wds:": "a folder of WebDataset shards, train-*.tar and val-*.tar, or PATH/train-{000000..000009}.tar",
    "medmnist:": "a set of MedMNIST, such as pneumoniamnist: NAME.npz below a data folder",
    "hf:": "a repository of the Hub (OWNER/NAME) below a data folder, or the path of a copy",
}

#: Those whose images have any size and are scaled to ``resize`` before their middle is taken.
RESIZED = ("imagefolder:", "csv:", "wds:", "hf:")

_MNIST = DatasetSpec(
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
)

_SMALLNORB = DatasetSpec(
    name="smallnorb",
    title="smallNORB",
    label_names=("animal", "human", "airplane", "truck", "car"),
    input_size=(2, 32, 32),
    # Not recomputed, because the files are not available; rounded values of a public implementation.
    mean=(0.72, 0.72),
    std=(0.12, 0.12),
    counts={"train": 24_300, "test": 24_300},
    folders=("smallnorb", "smallNORB", "norb-v1.0-small", ""),
    source="LeCun, Huang, Bottou: Learning Methods for Generic Object Recognition (CVPR 2004)",
    remedy="the six files smallnorb-5x…-{training,testing}-{dat,cat,info}.mat, plain or .gz, will do",
    side=48,
)

# Means and deviations of composed sets are computed from one image per training digit.
_AFFNIST = replace(
    _MNIST,
    name="affnist",
    title="affNIST (train: MNIST digits at random places; test: regenerated)",
    input_size=(1, 40, 40),
    mean=(0.0640,),
    std=(0.2253,),
    counts={"train": 60_000, "test": 10_000, "expanded": 10_000},
    source="regenerated from MNIST after Tieleman's affNIST; the protocol of Sabour et al. 2017, section 5.2",
    base="mnist",
)

_FASHION_NAMES = "T-shirt/top; Trouser; Pullover; Dress; Coat; Sandal; Shirt; Sneaker; Bag; Ankle boot"

_CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

DATASETS: dict[str, DatasetSpec] = {
    spec.name: spec
    for spec in (
        _MNIST,
        DatasetSpec(
            name="fashion_mnist",
            title="Fashion-MNIST",
            label_names=tuple(_FASHION_NAMES.split("; ")),
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
            label_names=tuple("airplane automobile bird cat deer dog frog horse ship truck".split()),
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
        DatasetSpec(
            name="cifar100",
            title="CIFAR-100",
            label_names=tuple(_CIFAR100_NAMES.split()),
            input_size=(3, 32, 32),
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            counts={"train": 50_000, "test": 10_000},
            folders=("cifar100", "cifar100/cifar100", "cifar-100-binary", "cifar100/cifar-100-binary", ""),
            source="Krizhevsky: Learning Multiple Layers of Features from Tiny Images",
            remedy="the Hub's uoft-cs/cifar100 or the binary version (cifar-100-binary) will do",
        ),
        DatasetSpec(
            name="svhn",
            title="SVHN (cropped digits)",
            label_names=tuple("0123456789"),
            input_size=(3, 32, 32),
            mean=(0.4377, 0.4438, 0.4728),
            std=(0.1980, 0.2010, 0.1970),
            counts={"train": 73_257, "test": 26_032, "extra": 531_131},
            folders=("svhn", "SVHN", "svhn/cropped_digits", "cropped_digits", ""),
            source="Netzer et al.: Reading Digits in Natural Images with Unsupervised Feature Learning (2011)",
            remedy="the Hub's ufldl-stanford/svhn or the files {train,test}_32x32.mat will do",
        ),
        DatasetSpec(
            name="sign_digits",
            title="Sign Language Digits",
            label_names=tuple("0123456789"),
            input_size=(3, 100, 100),
            mean=(0.6765, 0.6474, 0.6177),
            std=(0.1465, 0.1634, 0.1905),
            counts={"train": 1_653, "test": 409},
            folders=("sign_digits", "sign_digits/data", ""),
            source="Mavi: photographs of hands, 10 classes (arXiv 2011.08927); cut between two people",
            remedy="the source's images as parquet shards (image, label), those numbered below 5582 in train-*.parquet",
        ),
        _SMALLNORB,
        # Hinton et al. 2018, section 5.1: train on some viewpoints of the training objects; `test` has the other
        # viewpoints of the test objects, `familiar` those used in training.
        *(
            replace(
                _SMALLNORB,
                name=f"smallnorb_{angle}",
                title=f"smallNORB, novel {angle}s",
                counts={"train": 8_100, "test": 16_200, "familiar": 8_100},
            )
            for angle in ("azimuth", "elevation")
        ),
        _AFFNIST,
        replace(
            _AFFNIST,
            name="multimnist",
            title="MultiMNIST",
            input_size=(1, 36, 36),
            mean=(0.1390,),
            std=(0.3221,),
            counts={"train": 60_000, "test": 10_000},
            source="composed from MNIST after Sabour et al. 2017, section 6",
            labels_per_image=2,
        ),
        replace(
            _AFFNIST,
            name="diverse_multimnist",
            title="DiverseMultiMNIST",
            input_size=(1, 36, 36),
            mean=(0.1291,),
            std=(0.3118,),
            counts={"train": 60_000, "test": 10_000},
            source="composed from MNIST after Tsai et al. 2020 (arXiv 2002.04764), appendix B.2",
            labels_per_image=None,
        ),
        DatasetSpec(
            name="h_imagenet",
            title="h-ImageNet",
            label_names=(),  # determined when the set is built
            input_size=(3, 128, 128),
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            counts={"train": 0, "test": 0},
            folders=("h_imagenet", ""),
            source="built from ILSVRC 2012 after Li et al. 2018 (EncapNet), section 5",
            remedy="build it once: capszoo data h-imagenet ILSVRC_FOLDER OUT",
            side=156,
        ),
    )
}


def _prefix(name: str) -> str | None:
    return next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)


def is_data_set(name: str) -> bool:
    """True for a named data set, or a name with a prefix; False for a path."""
    return name in DATASETS or _prefix(name) is not None


def is_text(name: str) -> bool:
    """False for a name with bytes that are no UTF-8: metadata and tables could not state it."""
    return name == name.encode(errors="ignore").decode()


def folder_name(path: str | Path) -> str:
    """The name of a folder of images as a data set; ``photos/`` is ``photos``."""
    return f"imagefolder:{os.path.normpath(path)}"


def table_name(path: str | Path) -> str | None:
    """The name of a table of file names and labels as a data set; None for any other path."""
    is_table = Path(path).suffix.lower() in (".csv", ".tsv", ".txt") and expanded(path).is_file()
    return f"csv:{os.path.normpath(path)}" if is_table else None


def source_name(data: str | Path) -> str:
    """Source of the images that ``data`` names: a data set's name, a prefixed name, or a prefixed folder or table.

    Raises:
        DataError: ``data`` is neither of them.
    """
    text = str(data)
    if not text.strip() or text in PREFIXES:
        raise DataError(f"--data {text!r} names no folder: give a folder, or hf:OWNER/NAME")
    if is_data_set(text):
        return text
    table = table_name(text)
    if table is None and not expanded(text).is_dir():
        raise DataError(
            f"{text}: no such folder; --data takes a folder with a sub-folder of images per class, a table of file "
            "names and labels (FILE.csv), or hf:OWNER/NAME"
        )
    if not is_text(text):
        raise DataError(f"{text!r}: the folder's name is not UTF-8, and metadata cannot state it: rename it")
    return table or folder_name(text)


def same_place(name: str, other: str) -> bool:
    """Whether two names are of one set, or of one folder or file by a relative and by an absolute path."""
    (prefix, _, path), (other_prefix, _, other_path) = name.partition(":"), other.partition(":")
    if name == other or not path or prefix != other_prefix:
        return name == other
    return os.path.realpath(expanded(path)) == os.path.realpath(expanded(other_path))


def check_name(name: str) -> str:
    """Return the name if ``load_dataset`` accepts it; else raise ``DataError`` with the nearest known one."""
    prefix = _prefix(name)
    if prefix and len(name) > len(prefix):
        return name
    if prefix:
        raise UnknownDataset(f"'{name}' must be followed by: {PREFIXES[prefix]}")
    return dataset_spec(name).name


def check_channels(name: str, channels: int | None) -> None:
    """Refuse a number of channels for a set whose images have a fixed one."""
    if channels and not name.startswith((*RESIZED, "parquet:")):
        raise DataError(
            f"{name} has a fixed number of channels", "leave data.channels (--colour, --grey) out"
        )


def dataset_spec(name: str) -> DatasetSpec:
    """Look a data set up by name; an unknown name raises ``DataError`` with the nearest known one."""
    if name in DATASETS:
        return DATASETS[name]
    if _prefix(name):
        raise DataError(f"what {name} holds is known once it is loaded")
    raise UnknownDataset(unknown_name("data set", name, [*DATASETS, *(f"{prefix}…" for prefix in PREFIXES)]))


def list_sets() -> list[dict[str, str]]:
    """Every named data set, and the prefixes of those given by a path or a repository."""
    named = [
        {
            "name": name,
            "input": "x".join(map(str, spec.input_size)),
            "splits": ", ".join(f"{split} {count:,}" for split, count in spec.counts.items()),
            "title": spec.title,
        }
        for name, spec in DATASETS.items()
    ]
    prefixed = [
        {"name": f"{prefix}…", "input": "", "splits": "", "title": what} for prefix, what in PREFIXES.items()
    ]
    return named + prefixed
