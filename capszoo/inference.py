"""Apply a model to image files: resolve its name, and predict.

The functions behind ``capszoo predict`` and ``capszoo explain``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._modes import evaluating
from .checkpoint import NoWeights, resolve
from .errors import CapszooError, UsageError
from .predictions import ImagePrediction, ScoredClass
from .preprocess import ImageLike, ImageTransform, as_image, is_image_like, model_transform
from .scores import probabilities, score_kind

__all__ = [
    "ImagePrediction",
    "NoWeights",
    "ScoredClass",
    "label_names",
    "load_model",
    "predict",
]


def load_model(
    name: str, pretrained: bool = True, device: str | torch.device | None = None, **kwargs: Any
) -> nn.Module:
    """A model in eval mode, from any MODEL that :mod:`capszoo.checkpoint` accepts.

    Args:
        name: registered name, ``name.tag``, ``hf-hub:USER/NAME``, the folder of a finished training run, a folder with
            a ``config.json`` (timm's and the Hub's layout), or a ``.safetensors`` file beside its metadata.
        pretrained: load weights; False gives freshly initialised ones.
        device: device of the model: ``cpu``, ``cuda``, ``mps``; None or ``auto`` selects CUDA if available, else the
            CPU.
        **kwargs: as for :func:`capszoo.create_model`.

    Raises:
        UnknownModel: no such name.
        NoWeights: an architecture without weights, or without trained ones for this ``img_size``.
        CapszooError: there is nothing that can be loaded.
        WeightsError: the weights are damaged or do not fit.

    Examples:
        >>> net = load_model("resnet20_routingcaps.mnist", device="cpu")
        >>> net.training, net.num_classes
        (False, 10)
    """
    net = resolve(name).create(pretrained, device, **kwargs)
    untrained = getattr(net, "untrained", ())
    stated = (getattr(net, "pretrained_cfg", None) or {}).get("num_classes")
    # for other classes it is to be trained anyway
    if untrained and kwargs.get("num_classes", stated) == stated:
        rows, columns = net.img_size  # type: ignore[misc]
        raise NoWeights(
            f"{name} has no trained weights for {rows}x{columns} images: {untrained[0]} depends on the size",
            "leave the size out, or fine-tune the model at this size",
        )
    return net


def label_names(model: nn.Module) -> list[str]:
    """Names of a model's classes; their indices if the weights have no names (or are for other classes)."""
    count = int(getattr(model, "num_classes", 0))
    names = (getattr(model, "pretrained_cfg", None) or {}).get("label_names") or ()
    return [str(name) for name in names] if len(names) == count else [str(i) for i in range(count)]


def label_lines(labels: Sequence[str]) -> list[str]:
    """The lines of ``labels.txt``, one per class; a name's own line breaks become spaces."""
    return [" ".join(label.splitlines()) for label in labels]


def class_positions(own: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Index in a model's classes ``own`` of each class of a data set; None for a class that the model lacks.

    Args:
        own: names of the model's classes.
        names: names of the data set's classes, such as its folders, in any form of Unicode. Only classes without
            names, which are the integers from 0 on and none of the model's names, go by their order.
    """
    own, names = ([unicodedata.normalize("NFC", name) for name in side] for side in (own, names))
    position = {name: index for index, name in reversed(list(enumerate(own)))}
    nameless = set(names) == {str(i) for i in range(len(names))} and len(names) <= len(own)
    if nameless and position.keys().isdisjoint(names):
        return [int(name) for name in names]
    return [position.get(name) for name in names]


def predict(
    model: nn.Module,
    images: ImageLike | Iterable[ImageLike],
    topk: int = 5,
    batch_size: int = 32,
    advance: Callable[[int], None] | None = None,
    transform: ImageTransform | None = None,
) -> list[ImagePrediction]:
    """Classify images; for a file that cannot be read, the prediction states the error.

    Args:
        model: in eval mode, on its device.
        images: one image or several: files, pictures, arrays (see `capszoo.preprocess.as_image`).
        topk: classes per image, limited to the number of classes.
        batch_size: images per forward pass.
        advance: called with the number of images done after each batch.
        transform: how images are read; None uses `capszoo.preprocess.model_transform` of the model.

    Raises:
        UsageError: ``topk`` or ``batch_size`` below 1, a model without classes, or an array that is no image.
        CapszooError: an image that cannot be read, or a model that takes neither one channel nor three.

    Examples:
        >>> net = load_model("resnet20_routingcaps.mnist", device="cpu")
        >>> (found,) = predict(net, ["digit_3.png"], topk=2)
        >>> found.label, len(found.top)
        ('3', 2)
    """
    labels = label_names(model)
    for option, value in (("topk", topk), ("batch_size", batch_size)):
        if value < 1:
            raise UsageError(f"{option} is {value}", "give 1 or more")
    if not labels:
        raise UsageError(f"{type(model).__name__} has no classes", "create it with num_classes above 0")
    transform = transform or model_transform(model)
    pictures: Iterator[ImageLike] = iter([images] if is_image_like(images) else images)  # type: ignore[list-item, arg-type]
    named = ((_image_name(image, i), image) for i, image in enumerate(pictures))
    results: list[ImagePrediction] = []
    while chunk := list(islice(named, batch_size)):
        results.extend(_predict_chunk(model, transform, chunk, labels, min(topk, len(labels))))
        if advance:
            advance(len(chunk))
    return results


def _image_name(image: ImageLike, index: int) -> str:
    """Path of a file, also for a picture opened by Pillow; otherwise a number."""
    name = image if isinstance(image, (str, Path)) else getattr(image, "filename", "")
    return str(name or f"image {index + 1}")


def _predict_chunk(
    model: nn.Module,
    transform: ImageTransform,
    chunk: Sequence[tuple[str, ImageLike]],
    labels: list[str],
    topk: int,
) -> list[ImagePrediction]:
    tensors: list[Tensor] = []
    sizes: list[tuple[int, int]] = []
    notes: list[tuple[str, ...]] = []
    errors: dict[int, str] = {}
    for i, (name, given) in enumerate(chunk):
        try:
            image = as_image(given)
            view, said = transform.read(image, name)
        except UsageError:
            raise
        except CapszooError as e:
            errors[i] = str(e)
        else:
            tensors.append(transform.normalise(view))
            notes.append(said)
            sizes.append(image.size)
    kind = score_kind(model)
    found: Iterator[tuple[Any, ...]] = iter(())
    if tensors:
        like = next(model.parameters(), torch.empty(0))  # an exported file has none
        with evaluating(model), torch.inference_mode():
            scores = model(torch.stack(tensors).to(like.device, like.dtype)).float().cpu()
        values, indices = scores.topk(topk, dim=1)
        shares = probabilities(scores, kind).gather(1, indices)
        found = iter(zip(values.tolist(), indices.tolist(), shares.tolist(), sizes, notes, strict=True))
    results = []
    for i, (name, _) in enumerate(chunk):
        if i in errors:
            results.append(ImagePrediction(name, error=errors[i]))
            continue
        best, classes, probable, size, said = next(found)
        top = tuple(
            ScoredClass(c, labels[c], value, share)
            for value, c, share in zip(best, classes, probable, strict=True)
        )
        results.append(ImagePrediction(name, top, size, score_kind=kind, notes=said))
    return results
