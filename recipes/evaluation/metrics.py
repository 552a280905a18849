"""Metrics from scores: accuracy, recall and precision by class, exact sets, and whether a stated accuracy is met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from capszoo.data import Batches
from capszoo.errors import CapszooError
from capszoo.models._inspect import evaluating
from capszoo.scores import score_kind

from .ranking import Ranking, rank
from .target import EvalTarget


def predicted(scores: Tensor, labels: Tensor, count: int | None = None, threshold: float = 0.5) -> Tensor:
    """The answer to each image: its class [b, 1], or zeros and ones [b, n] in the format of the labels.

    Args: as for ``all_right``.
    """
    if labels.dim() == 1:
        return scores.argmax(1, keepdim=True)
    if count:
        return torch.zeros_like(labels).scatter_(1, scores.topk(count, dim=1).indices, 1.0)
    return (scores > threshold).to(labels.dtype)


def all_right(scores: Tensor, labels: Tensor, count: int | None = None, threshold: float = 0.5) -> Tensor:
    """Whether each image is recognised: bool [b].

    Args:
        scores: [b, n].
        labels: classes [b]; or [b, n] with a one for each class present, all of which must be predicted and no other.
        count: number of classes of each image, if known: this many of the highest scores are the answer.
        threshold: otherwise the scores above it are the answer (0.5 for capsule lengths, 0 for logits).
    """
    right = predicted(scores, labels, count, threshold) == (labels[:, None] if labels.dim() == 1 else labels)
    return right.all(1)


@dataclass(frozen=True)
class ClassFigures:
    """Results of one class: its number of images and how many of them are predicted as it, and in per cent their share
    (recall), the share of predictions of it that is right (precision), and their harmonic mean; None for a denominator
    of 0."""

    label: str
    n: int
    right: int
    recall: float | None
    precision: float | None
    f1: float | None


@dataclass(frozen=True)
class EvalResult:
    """Results over ``n`` images; accuracies are in per cent.

    Attributes:
        errors: number of images that are not recognised (``all_right``).
        top1, top5: for images with one label; top5 only for more than five classes.
        exact_set: for images with several labels: all of them predicted, and no other.
        confusion: int64 [n, n], rows are labels, columns answers; None with several labels.
        ranking: AUROC and the like; None unless it was asked for.
    """

    n: int
    errors: int
    top1: float | None
    top5: float | None
    exact_set: float | None
    per_class: tuple[ClassFigures, ...]
    confusion: Tensor | None
    ranking: Ranking | None = None

    @property
    def accuracy(self) -> float:
        return 100 * (self.n - self.errors) / self.n


class Tally:
    """Counts over batches of scores; its memory does not grow with the number of images.

    Args:
        num_classes: columns of the scores.
        count: labels of each image; None if that varies (see ``all_right``).
        threshold: score from which a class counts as present, for several labels.
        device: of the scores.
    """

    def __init__(
        self, num_classes: int, count: int | None, threshold: float, device: torch.device | str = "cpu"
    ) -> None:
        self.count, self.threshold, self.num_classes = count, threshold, num_classes
        self.single = count == 1
        whole = {"dtype": torch.int64, "device": device}
        self.totals = torch.zeros(4, **whole)  # type: ignore[call-overload]  # right, in the first five, finite, all
        rows = num_classes if self.single else 3
        self.table = torch.zeros(rows, num_classes, **whole)  # type: ignore[call-overload]

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Add scores [b, n] and labels [b] or [b, n]."""
        n = self.num_classes
        self.totals[0] += all_right(scores, labels, self.count, self.threshold).sum()
        self.totals[2] += torch.isfinite(scores).all(1).sum()
        self.totals[3] += len(labels)
        if self.single:
            self.totals[1] += (scores.topk(min(5, n), dim=1).indices == labels[:, None]).sum()
            cells = labels * n + scores.argmax(1)
            self.table += torch.bincount(cells, minlength=n * n).view(n, n)
        else:  # present and predicted, present, predicted
            answered = predicted(scores, labels, self.count, self.threshold)
            self.table += torch.stack([(answered * labels).sum(0), labels.sum(0), answered.sum(0)]).long()

    def result(self, label_names: Sequence[str]) -> EvalResult:
        """The metrics; raises ``CapszooError`` if there are no images, or scores that are not finite."""
        right, first_five, finite, n = self.totals.tolist()
        if not n:
            raise CapszooError("there are no images to evaluate", "give a data set that has some")
        if finite < n:
            raise CapszooError(
                f"the scores of {n - finite} of {n} images are NaN or infinite", "the weights are damaged"
            )
        table = self.table.cpu()
        hits, there, predicted = (table.diag(), table.sum(1), table.sum(0)) if self.single else table
        return EvalResult(
            n=n,
            errors=n - right,
            top1=100 * right / n if self.single else None,
            top5=100 * first_five / n if self.single and self.num_classes > 5 else None,
            exact_set=None if self.single else 100 * right / n,
            per_class=tuple(
                ClassFigures(label, t, h, _per_cent(h, t), _per_cent(h, f), _per_cent(2 * h, t + f))
                for label, h, t, f in zip(
                    label_names, hits.tolist(), there.tolist(), predicted.tolist(), strict=True
                )
            ),
            confusion=table if self.single else None,
        )


def pooled(results: Sequence[EvalResult]) -> EvalResult:
    """The result over the images of several results of images with one label, such as those of folds."""
    tables = [result.confusion for result in results if result.confusion is not None]
    table = torch.stack(tables).sum(0)
    tally, n = Tally(len(table), 1, 0.0), int(table.sum())
    tally.table, tally.totals = table, torch.tensor([int(table.diag().sum()), 0, n, n])
    whole = tally.result([figures.label for figures in results[0].per_class])
    return replace(whole, top5=None)  # which the tables do not tell


def _per_cent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


@torch.no_grad()
def scored(
    target: EvalTarget, batch_size: int | None, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores [b, n] and labels of every image: of one view, or the mean over its crops."""
    for batch in target.batches(batch_size, progress):
        if target.crops is None:
            yield target.net(batch.images.contiguous(memory_format=torch.channels_last)), batch.labels
            continue
        total: Any = 0
        for view in target.crops.views(batch.pixels):
            total = total + target.net(target.normalised(view))
        yield total / len(target.crops), batch.labels


def assess(
    target: EvalTarget,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    specificity: float | None = None,
) -> EvalResult:
    """Compute all metrics, in float32 and eval mode; with a ``specificity`` also the ranking, of all scores."""
    spec = target.images.spec
    tally = Tally(spec.num_classes, spec.labels_per_image, target.threshold, target.images.device)
    kept: list[tuple[Tensor, Tensor]] = []
    for scores, labels in scored(target, batch_size, progress):
        tally.add(scores, labels)
        if specificity is not None:
            kept.append((scores.cpu(), labels.cpu()))
    result = tally.result(spec.label_names)
    if specificity is None:
        return result
    scores, labels = (torch.cat(column) for column in zip(*kept, strict=True))
    return replace(
        result, ranking=rank(scores, labels, spec.label_names, score_kind(target.net), specificity)
    )


@torch.no_grad()
def count_correct(
    net: nn.Module,
    batches: Batches,
    autocast: AbstractContextManager[Any] | None = None,
    threshold: float = 0.5,
) -> Tensor:
    """Run the net in eval mode over one epoch; return its right answers and its images by class.

    Args:
        net: the network.
        batches: images, on the net's device.
        autocast: context of the forward passes.
        threshold: for images with a varying number of labels, see ``all_right``.

    Returns:
        int64 (right, all) ``[2, n]`` on the data's device, a column for each of n classes; images with several labels
        have a single column.
    """
    spec = batches.data.spec
    columns = 1 if spec.multi_label else spec.num_classes
    totals = torch.zeros(2, columns, dtype=torch.int64, device=batches.device)
    with evaluating(net), autocast or nullcontext():
        for batch in batches.epoch():
            images = batch.images.contiguous(memory_format=torch.channels_last)
            right = all_right(net(images), batch.labels, spec.labels_per_image, threshold)
            label = torch.zeros_like(right, dtype=torch.int64) if spec.multi_label else batch.labels
            totals[0] += torch.bincount(label[right], minlength=columns)
            totals[1] += torch.bincount(label, minlength=columns)
    return totals


def mean_recall(right: Sequence[int], images: Sequence[int]) -> float:
    """Mean of the recalls in per cent, over the classes that have images."""
    recalls = [100 * r / n for r, n in zip(right, images, strict=True) if n]
    return sum(recalls) / len(recalls)


def recall_line(split: str, names: Sequence[str], right: Sequence[int], images: Sequence[int]) -> str | None:
    """The lowest recall of a class, and the classes without images, in one line; None for equal recalls of all.

    Args:
        split: "validation" or "test".
        names: of the classes.
        right, images: number of right answers and of images of each class.
    """
    empty = [name for name, n in zip(names, images, strict=True) if not n]
    recalls = [(r / n, k) for k, (r, n) in enumerate(zip(right, images, strict=True)) if n]
    parts = []
    if recalls and min(recalls)[0] < max(recalls)[0]:
        share, k = min(recalls)
        lowest = f"lowest {100 * share:.2f}% ({names[k]}, {right[k]:,} of {images[k]:,} images)"
        parts.append(f"mean {mean_recall(right, images):.2f}%, {lowest}")
    if empty:
        more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        parts.append(f"no images of {', '.join(empty[:5])}{more}")
    return f"recall ({split}): {'; '.join(parts)}" if parts else None


def stated_top1(target: EvalTarget) -> float | None:
    """The accuracy in the weights' metadata for these images; None if they state none."""
    info = target.info
    if info is None or target.crops or info.metadata.dataset.name != target.images.spec.name:
        return None
    recorded = info.metadata.metrics.get(target.images.split)
    return recorded.top1 if recorded and recorded.n == target.n else None


def reproduced(recorded: float, measured: float, n: int) -> bool:
    """True if two accuracies differ by at most two images, which processors may round to different answers."""
    return abs(recorded - measured) <= 100 * 2 / n + 1e-9


def share_interval(accuracy: float, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion, in per cent.

    Args:
        accuracy: in per cent.
        n: number of images.
    """
    z, p = 1.96, accuracy / 100
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)
