"""Accuracy of a model on a data set, as ``capszoo eval`` counts it.

For a name with weights the data set is that of its metadata, and the accuracy is compared with the stated one.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from capszoo.data import ImageSet, StreamedSet
from capszoo.errors import UsageError
from capszoo.models._inspect import evaluating

from .evaluation.metrics import assess, stated_top1
from .evaluation.target import in_float32, prepare

__all__ = ["evaluate"]


@in_float32
def evaluate(
    model: nn.Module | str | Path,
    dataset: str | ImageSet | StreamedSet | None = None,
    split: str = "test",
    data: str | Path | None = None,
    *,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
) -> dict[str, Any]:
    """Top-1 accuracy, in float32 and eval mode; an image with several labels counts if exactly these are predicted.

    Args:
        model: a name with weights (``resnet20_routingcaps.mnist``), the path of a weights file, or a module, which is
            moved to the device; each of its parts keeps its mode.
        dataset: a name, or a loaded set (``ImageSet`` or ``StreamedSet``); None uses the data set that the weights were
            trained on.
        split: "test", "train" or another split of the data set.
        data: folder of the data set; None uses ``CAPSZOO_DATA``.
        batch_size: images per forward pass; None: 500, and less for large images and on a GPU.
        device: None selects CUDA if available.

    Returns:
        ``{"model", "dataset", "split", "accuracy", "top1" (per cent), "errors", "n", "stated", "notes", "per_class"}``:
        ``accuracy`` is the kind of ``top1``, "top-1" or, for images with several labels, the "exact set"; ``stated`` is
        the metadata's top1 for this split, if all of its images were evaluated, else None; ``notes`` are lines about
        classes that differ; ``per_class`` has for each class ``{"label", "n", "right"}``, the images of it and those
        recognised.

    Raises:
        UsageError: ``batch_size`` is below 1.
        DataError, WeightsError, CapszooError: something is missing or does not fit.
    """
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, not {batch_size}")
    with evaluating(model) if isinstance(model, nn.Module) else nullcontext():
        target = prepare(model, dataset, split, data, device=device)
        result = assess(target, batch_size)
    return {
        "model": target.name,
        "dataset": target.images.spec.name,
        "split": target.images.split,
        "accuracy": target.images.spec.accuracy,
        "top1": round(result.accuracy, 4),
        "errors": result.errors,
        "n": result.n,
        "stated": stated_top1(target),
        "notes": list(target.notes),
        "per_class": [{"label": row.label, "n": row.n, "right": row.right} for row in result.per_class],
    }
