"""Apply a model to image files: resolve its name, and predict.

The functions behind ``capszoo predict`` and ``capszoo explain``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from ._pretrained.facts import label_names
from .checkpoint import NoWeights, load_model
from .errors import CapszooError, UsageError
from .models._inspect import evaluating, first_parameter
from .preprocess import ImageLike, ImageTransform, as_image, is_image_like, model_transform
from .scores import ImagePrediction, ScoredClass, probabilities, score_kind

__all__ = ["ImagePrediction", "NoWeights", "ScoredClass", "label_names", "load_model", "predict"]


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
        images: one image or several: files, pictures, arrays (see ``capszoo.preprocess.as_image``).
        topk: classes per image, limited to the number of classes.
        batch_size: images per forward pass.
        advance: called with the number of images done after each batch.
        transform: how images are read; None uses ``capszoo.preprocess.model_transform`` of the model.

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
    kind = score_kind(model)
    found = [ImagePrediction(name, score_kind=kind) for name, _ in chunk]
    tensors: dict[int, Tensor] = {}
    for i, (name, source) in enumerate(chunk):
        try:
            image = as_image(source)
            view, notes = transform.read(image, name)
        except UsageError:
            raise
        except CapszooError as e:
            found[i] = replace(found[i], error=str(e))
        else:
            tensors[i] = transform.normalise(view)
            found[i] = replace(found[i], size=image.size, notes=notes)
    if not tensors:
        return found
    like = first_parameter(model)
    with evaluating(model), torch.inference_mode():
        scores = model(torch.stack([*tensors.values()]).to(like.device, like.dtype)).float().cpu()
    values, indices = scores.topk(topk, dim=1)
    shares = probabilities(scores, kind).gather(1, indices)
    for i, *ranked in zip(tensors, indices.tolist(), values.tolist(), shares.tolist(), strict=True):
        top = (ScoredClass(c, labels[c], score, share) for c, score, share in zip(*ranked, strict=True))
        found[i] = replace(found[i], top=tuple(top))
    return found
