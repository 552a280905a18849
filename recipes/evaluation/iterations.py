"""Accuracy of a trained network with other numbers of routing iterations than its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from capszoo.errors import CapszooError, UsageError
from capszoo.explain.convergence import all_iterations
from capszoo.models._inspect import routing_iterations

from .metrics import all_right, predicted, scored
from .target import EvalTarget


@dataclass(frozen=True)
class IterationAccuracy:
    """The network with one number of iterations in all routing layers.

    Attributes:
        iterations: their number.
        accuracy: top-1, or exact sets for images with several labels, in per cent.
        changed: number of images with another answer than with the network's own iterations.
    """

    iterations: int
    accuracy: float
    changed: int


def parse_iterations(text: str) -> tuple[int, ...]:
    """Parse counts such as ``1,2,3``; raises ``UsageError`` for one that is not a number from 1, or is given twice."""
    words = [word.strip() for word in text.split(",")]
    counts = tuple(int(word) if word.isdecimal() else 0 for word in words)
    if min(counts) < 1 or len(set(counts)) < len(counts):
        raise UsageError(f"--routing-iters {text} is invalid", "give different numbers, such as 1,2,3")
    return counts


def check_iterations(target: EvalTarget) -> None:
    """Raise ``CapszooError`` for a network that does not iterate."""
    if not routing_iterations(target.net):
        raise CapszooError(f"{target.name} has no routing iterations", "leave --routing-iters out")


@torch.no_grad()
def accuracy_by_iterations(
    target: EvalTarget,
    counts: Sequence[int],
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[IterationAccuracy, ...]:
    """Evaluate the same weights with each number of iterations.

    Args:
        target: a network that routes by iterations, and its images.
        counts: numbers of iterations; each takes a pass over the images, and the network's own number one more.
        batch_size: images per forward pass; None: the target's.
        progress: called with the number of images after each batch of any pass.

    Raises:
        CapszooError: the network does not iterate.
    """
    check_iterations(target)
    default_answers, _ = _answers(target, batch_size, progress)
    results = []
    for count in counts:
        with all_iterations(target.net, count):
            answers, right = _answers(target, batch_size, progress)
        changed = int((answers != default_answers).any(1).sum())
        results.append(IterationAccuracy(count, 100 * right / target.n, changed))
    return tuple(results)


def _answers(
    target: EvalTarget, batch_size: int | None, progress: Callable[[int], None] | None
) -> tuple[Tensor, int]:
    """The answers to all images, [n, 1] or [n, classes], and how many are right."""
    per_image = target.images.spec.labels_per_image
    answers, right = [], 0
    for scores, labels in scored(target, batch_size, progress):
        answers.append(predicted(scores, labels, per_image, target.threshold))
        right += int(all_right(scores, labels, per_image, target.threshold).sum())
    return torch.cat(answers).cpu(), right
