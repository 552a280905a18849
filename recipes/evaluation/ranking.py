"""How well scores rank images: AUROC, average precision, and the sensitivity at a specificity, by torchmetrics.

Each class is ranked against the others (one-vs-rest); with several labels an image, its presence against its absence.
Of two classes with one label an image, only the second is ranked, the positive one. Figures are shares between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from capszoo.errors import UsageError, require
from capszoo.scores import probabilities

SPECIFICITY = 0.95


@dataclass(frozen=True)
class ClassRanking:
    """Figures of one class; None where all images or none are of it.

    Attributes:
        label: name of the class.
        auroc: area under the receiver operating characteristic: the probability that an image of the class has a
            higher score than another image; ties count half.
        average_precision: mean of the precisions at the scores of the class's images (the area under the steps of the
            precision-recall curve).
        sensitivity: the largest recall of a threshold whose specificity is at least the stated one.
    """

    label: str
    auroc: float | None
    average_precision: float | None
    sensitivity: float | None


@dataclass(frozen=True)
class Ranking:
    """Figures of all classes and their means.

    Attributes:
        kind: "binary" (of the second class), "one-vs-rest" or "multi-label".
        specificity: that of ``sensitivity``.
        auroc, average_precision, sensitivity: means over the classes that have some; None without any.
    """

    kind: str
    specificity: float
    auroc: float | None
    average_precision: float | None
    sensitivity: float | None
    per_class: tuple[ClassRanking, ...]


def can_rank() -> bool:
    """Whether torchmetrics is installed: environments older than this measurement lack it."""
    return find_spec("torchmetrics") is not None


def check_specificity(specificity: float) -> float:
    """Return the specificity; raise ``UsageError`` if it is no share, or torchmetrics is missing."""
    if not 0 <= specificity <= 1:
        raise UsageError(f"a specificity of {specificity:g} is impossible", "give a number from 0 to 1")
    require("AUROC", ("torchmetrics",), "train")
    return specificity


def rank(
    scores: Tensor,
    labels: Tensor,
    label_names: Sequence[str],
    kind: str = "logits",
    specificity: float = SPECIFICITY,
) -> Ranking:
    """Rank all images of a data set by the score of each class.

    Args:
        scores: [b, n], finite.
        labels: classes [b]; or [b, n] with a one for each class present.
        label_names: of the n classes.
        kind: of the scores (``capszoo.scores.SCORE_KINDS``). With one label an image, images are compared by their
            probabilities, because a logit alone says little about another image's; with several, by the scores.
        specificity: for the sensitivity, a share.
    """
    scores, single = scores.double(), labels.dim() == 1
    if single:
        scores = probabilities(scores, kind)
        labels = torch.nn.functional.one_hot(labels, scores.shape[1])
    named = "one-vs-rest" if single else "multi-label"
    classes = range(scores.shape[1])
    if single and len(classes) == 2:
        named, classes = "binary", range(1, 2)
    figures = {k: _figures(scores[:, k], labels[:, k].long(), specificity) for k in classes}
    means = []
    for column in zip(*figures.values(), strict=True):
        defined = [value for value in column if value is not None]
        means.append(sum(defined) / len(defined) if defined else None)
    rows = tuple(ClassRanking(label_names[k], *row) for k, row in figures.items())
    return Ranking(named, specificity, means[0], means[1], means[2], rows)


def _figures(
    scores: Tensor, present: Tensor, specificity: float
) -> tuple[float | None, float | None, float | None]:
    """AUROC, average precision and sensitivity of scores [b] and zeros and ones [b]."""
    from torchmetrics.functional.classification import (
        binary_auroc,
        binary_average_precision,
        binary_sensitivity_at_specificity,
    )

    if not 0 < int(present.sum()) < len(present):
        return None, None, None
    # torchmetrics takes values outside 0..1 for logits, and their sigmoid would tie the large ones
    low, high = scores.min(), scores.max()
    scores = (scores - low) / (high - low).clamp_min(torch.finfo(scores.dtype).tiny)
    sensitivity, _ = binary_sensitivity_at_specificity(scores, present, min_specificity=specificity)
    return (
        float(binary_auroc(scores, present)),
        float(binary_average_precision(scores, present)),
        float(sensitivity),
    )
