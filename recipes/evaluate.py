"""Accuracy of a model on a data set: what `capszoo eval` counts, and `python -m capszoo.recipes.evaluate` in short.

For a name with weights the data set is that of its metadata, and the figure is held against the stated one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from capszoo.data import Batches, DataError, ImageSet, StreamedSet
from capszoo.errors import CapszooError
from capszoo.models._pretrained import WeightsError

from .evaluation.target import Subject, prepare

__all__ = [
    "ClassFigures",
    "EvalResult",
    "Tally",
    "all_right",
    "assess",
    "count_correct",
    "evaluate",
    "main",
    "scored",
    "stated_top1",
]


def answers(scores: Tensor, labels: Tensor, count: int | None = None, threshold: float = 0.5) -> Tensor:
    """The classes that the scores name: zeros and ones [b, n], as the labels."""
    if count:
        return torch.zeros_like(labels).scatter_(1, scores.topk(count, dim=1).indices, 1.0)
    return (scores > threshold).to(labels.dtype)


def all_right(scores: Tensor, labels: Tensor, count: int | None = None, threshold: float = 0.5) -> Tensor:
    """Which images are recognised: bool [b].

    Arguments:
        scores: [b, n].
        labels: classes [b]; or [b, n] with a one for each class that is there, all of which must be found and no other.
        count: how many classes each image has, where that is known: the highest so many scores are the answer.
        threshold: else the scores above it are the answer (0.5 for capsule lengths, 0 for logits).
    """
    if labels.dim() == 1:
        return scores.argmax(1) == labels
    return (answers(scores, labels, count, threshold) == labels).all(1)


@dataclass(frozen=True)
class ClassFigures:
    """One class: images that have it, and in per cent how many of these are found (recall), how many of those taken
    for it are it (precision), and their harmonic mean; None where there is nothing to divide by."""

    label: str
    n: int
    recall: float | None
    precision: float | None
    f1: float | None


@dataclass(frozen=True)
class EvalResult:
    """What was counted over `n` images; accuracies are per cent.

    Attributes:
        errors: images that are not recognised (`all_right`).
        top1, top5: of images with one label; top5 only where there are more than five classes.
        exact_set: of images with several labels: all of them found, and no other.
        confusion: int64 [n, n], row the label, column the answer; None with several labels.
    """

    n: int
    errors: int
    top1: float | None
    top5: float | None
    exact_set: float | None
    per_class: tuple[ClassFigures, ...]
    confusion: Tensor | None

    @property
    def accuracy(self) -> float:
        return 100 * (self.n - self.errors) / self.n


class Tally:
    """Counts over batches of scores; holds nothing that grows with the number of images.

    Arguments:
        num_classes: columns of the scores.
        count: labels of each image; None where that varies (see `all_right`).
        threshold: of a score, where several labels are sought.
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
        """Scores [b, n] and labels [b] or [b, n]."""
        n = self.num_classes
        self.totals[0] += all_right(scores, labels, self.count, self.threshold).sum()
        self.totals[2] += torch.isfinite(scores).all(1).sum()
        self.totals[3] += len(labels)
        if self.single:
            self.totals[1] += (scores.topk(min(5, n), dim=1).indices == labels[:, None]).sum()
            cells = labels * n + scores.argmax(1)
            self.table += torch.bincount(cells, minlength=n * n).view(n, n)
        else:  # there and found, there, found
            found = answers(scores, labels, self.count, self.threshold)
            self.table += torch.stack([(found * labels).sum(0), labels.sum(0), found.sum(0)]).long()

    def result(self, label_names: Sequence[str]) -> EvalResult:
        """The figures; `CapszooError` where there were no images, or scores that are not finite."""
        right, first_five, finite, n = self.totals.tolist()
        if not n:
            raise CapszooError("there are no images to evaluate", "give a data set that has some")
        if finite < n:
            raise CapszooError(
                f"the scores of {n - finite} of {n} images are NaN or infinite", "the weights are damaged"
            )
        table = self.table.cpu()
        hits, there, found = (table.diag(), table.sum(1), table.sum(0)) if self.single else table
        return EvalResult(
            n=n,
            errors=n - right,
            top1=100 * right / n if self.single else None,
            top5=100 * first_five / n if self.single and self.num_classes > 5 else None,
            exact_set=None if self.single else 100 * right / n,
            per_class=tuple(
                ClassFigures(label, t, _per_cent(h, t), _per_cent(h, f), _per_cent(2 * h, t + f))
                for label, h, t, f in zip(
                    label_names, hits.tolist(), there.tolist(), found.tolist(), strict=True
                )
            ),
            confusion=table if self.single else None,
        )


def _per_cent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


@torch.no_grad()
def scored(
    subject: Subject, batch_size: int, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores [b, n] and labels of every image: those of one view, or the mean over its crops."""
    for batch in subject.batches(batch_size, progress):
        if subject.crops is None:
            yield subject.net(batch.images.contiguous(memory_format=torch.channels_last)), batch.labels
            continue
        total: Any = 0
        for view in subject.crops.views(batch.pixels):
            total = total + subject.net(subject.normalised(view))
        yield total / len(subject.crops), batch.labels


def assess(
    subject: Subject, batch_size: int = 500, progress: Callable[[int], None] | None = None
) -> EvalResult:
    """Everything that is counted, in float32 and eval mode."""
    spec = subject.images.spec
    tally = Tally(spec.num_classes, spec.labels_per_image, subject.threshold, subject.images.device)
    for scores, labels in scored(subject, batch_size, progress):
        tally.add(scores, labels)
    return tally.result(spec.label_names)


@torch.no_grad()
def count_correct(
    net: nn.Module,
    batches: Batches,
    autocast: AbstractContextManager[Any] | None = None,
    threshold: float = 0.5,
) -> Tensor:
    """Run the net in eval mode over one epoch; returns int64 (right, all) [2] on the data's device.

    `threshold` counts where images have several labels, in a number that varies: see `all_right`.
    """
    was_training = net.training
    net.eval()
    totals = torch.zeros(2, dtype=torch.int64, device=batches.device)
    with autocast or nullcontext():
        for batch in batches.epoch():
            images = batch.images.contiguous(memory_format=torch.channels_last)
            known = batches.data.spec.labels_per_image
            totals[0] += all_right(net(images), batch.labels, known, threshold).sum()
            totals[1] += len(batch.labels)
    net.train(was_training)
    return totals


def stated_top1(subject: Subject) -> float | None:
    """The accuracy that the weights' metadata state for these images; None where they state none."""
    info = subject.info
    if info is None or subject.crops or info.raw.get("dataset", {}).get("name") != subject.images.spec.name:
        return None
    stated = info.raw.get("metrics", {}).get(subject.images.split, {})
    return stated.get("top1") if stated.get("n") == subject.n else None


def reproduced(stated: float, found: float, n: int) -> bool:
    """Whether a figure is the stated one: an image may fall on the other side where a processor rounds differently."""
    return abs(stated - found) <= 100 * 2 / n + 1e-9


def evaluate(
    model: nn.Module | str | Path,
    dataset: str | ImageSet | StreamedSet | None = None,
    split: str = "test",
    data: str | Path | None = None,
    *,
    batch_size: int = 500,
    device: str | torch.device | None = None,
) -> dict[str, Any]:
    """Top-1 accuracy, in float32 and eval mode; an image with several labels counts where exactly these are found.

    Arguments:
        model: a module, a name with weights (`resnet20_routingcaps.mnist`), or the path of a weights file.
        dataset: a name, or images in memory; None takes the data set the weights were trained on.
        split: "test", "train" or another split of the data set.
        data: folder of the data set; None asks `CAPSZOO_DATA`.
        device: None takes CUDA where there is one.

    Returns `{"model", "dataset", "split", "accuracy", "top1" (per cent), "errors", "n", "stated"}`: `accuracy` says
    what `top1` counts, "top-1" or, of images with several labels, the "exact set"; `stated` is the metadata's top1
    for a whole test split, else None.
    """
    subject = prepare(model, dataset, split, data, device=device)
    result = assess(subject, batch_size)
    return {
        "model": subject.name,
        "dataset": subject.images.spec.name,
        "split": subject.images.split,
        "accuracy": subject.images.spec.accuracy,
        "top1": round(result.accuracy, 4),
        "errors": result.errors,
        "n": result.n,
        "stated": stated_top1(subject),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code: 0, or 1 for a failure or a figure that differs from the stated one."""
    parser = argparse.ArgumentParser(prog="python -m capszoo.recipes.evaluate", description=__doc__)
    parser.add_argument(
        "model", help="name with weights, or path of a .safetensors file with its .json beside it"
    )
    parser.add_argument("--dataset", help="default: the one the weights were trained on")
    parser.add_argument("--split", default="test", help="test (the default), train, …")
    parser.add_argument("--data", help="folder of the data set; default: CAPSZOO_DATA")
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--device")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    try:
        result = evaluate(
            args.model, args.dataset, args.split, args.data, batch_size=args.batch_size, device=args.device
        )
    except (CapszooError, DataError, WeightsError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['model']} on {result['dataset']} ({result['split']}, n={result['n']}): "
            f"{result['accuracy']} {result['top1']:.2f}%, {result['errors']} wrong"
        )
    if result["stated"] is None:
        return 0
    same = reproduced(result["stated"], result["top1"], result["n"])
    if not args.json:
        print(f"stated in the metadata: {result['stated']:.2f}%: {'reproduced' if same else 'DIFFERS'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
