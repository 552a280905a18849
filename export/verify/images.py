"""Real images for an export, to compare outputs and to calibrate int8; with their classes if known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from PIL import Image
from torch import Tensor

from capszoo._pretrained.facts import class_positions, label_names
from capszoo.data import PREFIXES, ImageSet, check_name, load_dataset
from capszoo.data.readers import MODES
from capszoo.data.specs import RESIZED, is_data_set
from capszoo.errors import CapszooError
from capszoo.preprocess import find_images, load_image, model_framing, model_input_size, model_transform

#: Images that the command uses of those given, evenly spaced: to calibrate int8, and to verify an export.
CALIBRATION_IMAGES, VERIFY_IMAGES = 512, 2000


@dataclass(frozen=True)
class RealImages:
    """Images in the format of the exported graph's input.

    Attributes:
        images: ``[b, c, h, w]``, normalised float32, or uint8.
        labels: ``[b]``, the classes; None if they are not known.
        source: source of the images, in words.
    """

    images: Tensor
    labels: Tensor | None
    source: str

    def __len__(self) -> int:
        return len(self.images)


def open_images(
    model: nn.Module,
    source: str,
    split: str = "test",
    limit: int | None = None,
    uint8_input: bool = False,
    data: str | Path | None = None,
    skipped: list[str] | None = None,
) -> RealImages:
    """Images of a data set, a file or a folder.

    Args:
        model: model whose transform is applied.
        source: the name of a data set for :func:`capszoo.data.load_dataset`, or a path. If every file is in a
            folder named after a class, or its number, the classes are known.
        split: of a data set.
        limit: maximum number of images, evenly spaced.
        uint8_input: return uint8.
        data: folder of the data sets; None uses ``CAPSZOO_DATA``.
        skipped: receives a line for each image that cannot be read, which is skipped; None refuses such images.

    Raises:
        CapszooError: no such data set or path, other classes than the model's, or several classes per image.
    """
    if is_data_set(source):
        return _of_data_set(model, source, split, limit, uint8_input, data, skipped)
    if not Path(source).exists():
        try:
            check_name(source)
        except CapszooError as e:
            raise CapszooError(f"{source} is no file, no folder and no data set: {e}") from None
    files = find_images([source])
    files = [files[i] for i in _spread(len(files), limit)]
    if skipped is not None:
        files = _readable(files, skipped)
    images = transformed(model, map(load_image, files), uint8_input)
    return RealImages(images, _classes(model, files), source)


def _of_data_set(
    model: nn.Module,
    name: str,
    split: str,
    limit: int | None,
    uint8_input: bool,
    data: str | Path | None,
    skipped: list[str] | None,
) -> RealImages:
    sizes: dict[str, Any] = {}
    channels = model_input_size(model)[0]
    if name.startswith(tuple(PREFIXES)):
        sizes["framing"] = model_framing(model)
        if channels in MODES:
            sizes["channels"] = channels
    if name.startswith(RESIZED):
        # framed once, at the size of which the transform takes the middle
        transform = model_transform(model)
        rows, columns = transform.object_size or transform.size
        side = (round(rows / transform.crop_pct), round(columns / transform.crop_pct))
        sizes |= {"size": side, "resize": side}
    dataset = load_dataset(name, split, data, skipped=skipped, **sizes)
    classes = int(getattr(model, "num_classes", 0))
    if dataset.spec.multi_label:
        raise CapszooError(f"{name} has several classes in an image", "name a data set with one")
    if dataset.spec.num_classes != classes:
        raise CapszooError(
            f"{name} has {dataset.spec.num_classes} classes, the model {classes}",
            "name the model's own data set",
        )
    if not hasattr(dataset, "images"):
        raise CapszooError(
            f"{name} is too large to be held in memory", "give a folder with some of its images"
        )
    if isinstance(dataset, ImageSet):
        dataset = dataset.fixed()  # composed, as in training
    picked = _spread(len(dataset), limit)
    pictures = (Image.fromarray(dataset.images[i].permute(1, 2, 0).numpy().squeeze()) for i in picked)
    labels: Tensor | None = dataset.labels[picked].long()
    if name.startswith(tuple(PREFIXES)):  # its classes are in the order of their names, not in the model's
        positions = class_positions(label_names(model), dataset.spec.label_names)
        labels = None if None in positions else torch.tensor(positions)[labels]
    return RealImages(transformed(model, pictures, uint8_input), labels, f"{name} ({split})")


def _readable(files: Sequence[Path], skipped: list[str]) -> list[Path]:
    """The files that can be read; a line about each of the others is added to ``skipped``."""
    pictures = []
    for file in files:
        try:
            load_image(file)
        except CapszooError as error:
            skipped.append(str(error))
        else:
            pictures.append(file)
    if not pictures:
        raise CapszooError(f"none of the {len(files)} images can be read", skipped[0])
    return pictures


def transformed(model: nn.Module, pictures: Iterable[Image.Image], uint8_input: bool = False) -> Tensor:
    """Images through the model's transform: ``[b, c, h, w]``, normalised float32, or uint8."""
    transform = model_transform(model)
    if not uint8_input:
        return torch.stack([transform(picture) for picture in pictures])
    views = [np.asarray(transform.view(picture), dtype=np.uint8) for picture in pictures]
    pixels = np.stack(views).reshape(len(views), *transform.size, transform.channels)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))


def _classes(model: nn.Module, files: Sequence[Path]) -> Tensor | None:
    """Class of each file, from the name of its folder; None unless all of them have one."""
    names = label_names(model)
    index = {str(i): i for i in range(len(names))} | {name: i for i, name in enumerate(names)}
    indices = [index.get(file.parent.name) for file in files]
    labels = [label for label in indices if label is not None]
    return torch.tensor(labels) if len(labels) == len(files) else None


def _spread(count: int, limit: int | None) -> list[int]:
    """Indices of at most ``limit`` of ``count`` items, evenly spaced."""
    taken = count if limit is None else min(limit, count)
    return [i * count // taken for i in range(taken)]
