"""Implementation of ``capszoo data``: one function per command returns its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .._utils.files import expanded, read_json_object
from ..errors import WeightsError
from .download import fetch, remote_files
from .errors import DataError
from .folders import find_splits
from .folders.common import unreadable
from .sets import ImageSet, StreamedSet
from .sources import load_dataset
from .specs import DATASETS, PREFIXES, check_name, dataset_spec, is_data_set, source_name
from .summary import summarise


def check_set(name: str, data: str | Path | None = None) -> Iterator[str]:
    """Read a whole data set; yield a line for each split, and one about what was read of it.

    Args:
        name: name of the data set, or a folder of images or a table of labels as finetune and eval take it.
        data: its folder; None uses ``CAPSZOO_DATA``.

    Raises:
        DataError: not found, or damaged.
    """
    if not is_data_set(name) and expanded(name).exists():
        name = source_name(name)
    check_name(name)
    if name in DATASETS:
        splits = list(DATASETS[name].counts)
    else:  # a folder of classes alone has no splits, and is all training images
        available = find_splits(name, data)
        splits = [split for split in ("train", "val", "test") if split in available] or ["train"]
    found_sets: dict[str, ImageSet | StreamedSet] = {}
    for split in splits:
        if (name, split) == ("svhn", "extra"):
            continue
        damaged: list[str] = []
        # a streamed set is decoded only to fill this list
        images = load_dataset(name, split, data, skipped=damaged)
        if damaged:
            raise unreadable(damaged)
        if isinstance(images, ImageSet):  # the pixels are not needed any more
            found_sets[split] = replace(images, images=images.images.new_empty(0, *images.images.shape[1:]))
        else:
            found_sets[split] = images
        c, h, w = images.spec.input_size
        yield (
            f"{name} {split}: {len(images)} images, {c}x{h}x{w} out of {images.size[0]}x{images.size[1]}, "
            f"{images.spec.num_classes} classes, sha256 {images.fingerprint()}"
        )
    yield f"read: {summarise(found_sets).sentence()}"


def fetch_set(name: str, to: str | Path) -> str:
    """Download a data set's files and verify their checksums; return a message about it.

    Args:
        name: of the data set, ``medmnist:NAME`` or ``hf:OWNER/NAME``.
        to: target folder.

    Raises:
        DataError: the set cannot be downloaded, or a checksum differs.
    """
    if name.startswith("hf:"):
        from .folders import fetch_repository

        folder = fetch_repository(name.removeprefix("hf:"), to)
        recipe = f"recipes data.name={name} with --data {to}"
        return f"{name} is in {folder}: finetune and eval take --data hf:{folder}, {recipe}"
    if name.startswith("medmnist:"):
        folder = fetch(name, "train", to)  # one file has all splits
        return f"{name} is in {folder}; check it with: capszoo data check {name} --data {to}"
    if name.startswith(tuple(PREFIXES)):
        raise DataError(
            f"{name} is on this machine: only named data sets, medmnist:NAME and hf:OWNER/NAME are fetched"
        )
    spec = dataset_spec(name)
    source = spec.base or ("smallnorb" if spec.name.startswith("smallnorb") else spec.name)
    for split in ("train", "test"):
        if not remote_files(source, split):
            raise DataError(f"{spec.title} cannot be fetched: {spec.remedy}")
        folder = fetch(source, split, to)
    return f"{spec.title} is in {folder}; check it with: capszoo data check {name} --data {to}"


def _read_accuracies(path: Path) -> dict[str, float]:
    """Top-1 accuracy by class from a JSON file."""
    expected = 'an accuracy for each class is expected, {"n01440764": 0.75, …}'
    try:
        accuracies = read_json_object(path)
    except WeightsError as error:
        raise DataError(error.message, expected) from error
    if not accuracies:
        raise DataError(f"{path} is empty", expected)
    for kind, share in accuracies.items():
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise DataError(f"{path}: the accuracy of {kind} is {str(share)[:60]}, not a number in 0..1")
    return accuracies


def build_h_imagenet(
    ilsvrc: str | Path, out: str | Path, accuracies: str | None, weights: str | None, device: str = "cpu"
) -> Iterator[str]:
    """Build h-ImageNet from a copy of ILSVRC 2012; yield a line for each part.

    Args:
        ilsvrc: folder with ``Data/CLS-LOC`` and ``Annotations/CLS-LOC``.
        out: target folder.
        accuracies: JSON file of the top-1 accuracy by class; None measures them with ``weights``.
        weights: file of torchvision's ResNet-18 weights.
        device: device for the measurement.
    """
    from .._utils.devices import resolve_device
    from .imagenet import Ilsvrc, build, class_accuracies, load_judge

    if accuracies:
        measured = _read_accuracies(Path(accuracies))
    else:
        measured = class_accuracies(Ilsvrc(ilsvrc), load_judge(str(weights)), resolve_device(device))
    manifest = build(ilsvrc, out, measured)
    for part, count in manifest["counts"].items():
        paper = manifest["paper"][part]
        same = "as in the paper" if count == paper else f"the paper has {paper:,}"
        yield f"{part}: {count:,} images ({same})"
