"""Two models on the same images: the accuracy of each, and how often they agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from capszoo.errors import CapszooError

from .metrics import predicted
from .target import EvalTarget, in_float32


@dataclass(frozen=True)
class Agreement:
    """Counts over the same images.

    Attributes:
        n: images.
        accuracy: of each model, in per cent.
        same: images for which both predict the same class (for images with several labels: the same set).
        both_right, only_first, only_second, both_wrong: images by which model is right; they sum to ``n``.
    """

    n: int
    accuracy: tuple[float, float]
    same: int
    both_right: int
    only_first: int
    only_second: int
    both_wrong: int


def _order(first: EvalTarget, second: EvalTarget) -> Tensor | None:
    """Index of each class of the first model among those of the second; None if the order is the same."""
    one, two = first.images.spec.label_names, second.images.spec.label_names
    if one == two or len(set(one)) < len(one) or sorted(one) != sorted(two):
        return None
    return torch.tensor([two.index(name) for name in one])


@in_float32
@torch.inference_mode()
def agreement(
    first: EvalTarget,
    second: EvalTarget,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Agreement:
    """Compare two models image by image.

    Args:
        first: a model and its images.
        second: another model, on the same images in the same order (its own size and normalisation).
        batch_size: images per forward pass; None: the smaller one of the targets'.
        progress: called with the number of images after each batch.

    Raises:
        CapszooError: the two have different images.
    """
    if first.n != second.n:
        raise CapszooError(
            f"{first.n} and {second.n} images cannot be compared", "name one data set for both"
        )
    size = batch_size or min(first.batch_size, second.batch_size)
    counts = torch.zeros(5, dtype=torch.long)  # same answer; right: both, only first, only second, neither
    labels_per_image, order = first.images.spec.labels_per_image, _order(first, second)
    for a, b in zip(first.batches(size, progress), second.batches(size), strict=True):
        labels = b.labels
        if order is not None:
            labels = order.argsort().to(labels.device)[labels] if labels.dim() == 1 else labels[:, order]
        if not torch.equal(a.labels.cpu(), labels.cpu()):
            raise CapszooError("the images of the two models differ", "name one data set for both")
        scores = [target.net(batch.images).float() for target, batch in ((first, a), (second, b))]
        if order is not None:
            scores[1] = scores[1][:, order]
        answers = [
            predicted(s, a.labels, labels_per_image, target.threshold)
            for s, target in zip(scores, (first, second), strict=True)
        ]
        same = (answers[0] == answers[1]).all(1)
        truth = a.labels[:, None] if a.labels.dim() == 1 else a.labels
        one, two = ((answer == truth).all(1) for answer in answers)
        counts += torch.stack(
            [same.sum(), (one & two).sum(), (one & ~two).sum(), (~one & two).sum(), (~one & ~two).sum()]
        ).cpu()
    same_count, both, only_first, only_second, neither = counts.tolist()
    shares = (100 * (both + only_first) / first.n, 100 * (both + only_second) / first.n)
    return Agreement(first.n, shares, same_count, both, only_first, only_second, neither)
