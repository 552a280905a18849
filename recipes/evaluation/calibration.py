"""How well the probabilities agree with the accuracy, before and after temperature scaling.

The probabilities are those of ``capszoo.scores.probabilities``. Temperature scaling (Guo et al. 2017, arXiv:1706.04599)
raises them to the power of 1 / T and normalises: for logits that is the softmax of logits / T, for capsule lengths the
lengths to this power, divided by their sum. T minimises the negative log-likelihood of the images that training held
out. It changes no prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capszoo.errors import CapszooError
from capszoo.scores import probabilities, score_kind

from .metrics import scored
from .target import EvalTarget, prepare

#: Bins of equal width for the confidence.
BINS = 15

#: Probabilities below it count as this one: a capsule of length 0 has no logarithm.
SMALLEST = 1e-12


@dataclass(frozen=True)
class Reliability:
    """Agreement of confidence (the largest probability of an image) and accuracy.

    Attributes:
        ece: expected calibration error in per cent: the mean over images of the difference between accuracy and mean
            confidence of their bin.
        nll: mean negative log-likelihood of the labels, in nats.
        confidence: mean confidence in per cent.
        bins: number of images, mean confidence and accuracy in per cent of each bin; None for an empty one.
    """

    ece: float
    nll: float
    confidence: float
    bins: tuple[tuple[int, float, float] | None, ...]


@dataclass(frozen=True)
class CalibrationResult:
    """Reliability of the probabilities and of the scaled ones.

    Attributes:
        kind: of the scores (``capszoo.scores.SCORE_KINDS``).
        raw: of the probabilities.
        temperature, scaled, fitted_on: T, the reliability with it, the number of held-out images; None without them.
        reason: why there is no temperature.
    """

    kind: str
    raw: Reliability
    temperature: float | None = None
    scaled: Reliability | None = None
    fitted_on: int | None = None
    reason: str = ""


def reliability(logs: Tensor, labels: Tensor, bins: int = BINS) -> Reliability:
    """Compare confidence and accuracy.

    Args:
        logs: logarithms of probabilities [n, classes].
        labels: classes [n].
        bins: their number.
    """
    n = len(labels)
    confidence, predicted = logs.exp().max(1)
    confidence, right = confidence.clamp(max=1), (predicted == labels).to(logs)
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1  # a bin contains its upper edge
    count, sure, correct = (
        torch.bincount(place, weights, bins).tolist()
        for weights in (torch.ones_like(right), confidence, right)
    )
    return Reliability(
        ece=100 * sum(abs(a - b) for a, b in zip(sure, correct, strict=True)) / n,
        nll=float(-logs.gather(1, labels[:, None]).mean()),
        confidence=100 * float(confidence.mean()),
        bins=tuple(
            (int(k), 100 * a / k, 100 * b / k) if k else None
            for k, a, b in zip(count, sure, correct, strict=True)
        ),
    )


def fit_temperature(logs: Tensor, labels: Tensor) -> float:
    """The temperature with the smallest negative log-likelihood, from 0.01 to 100.

    Args:
        logs: logarithms of probabilities [n, classes].
        labels: classes [n].
    """
    from scipy.optimize import minimize_scalar

    def loss(exponent: float) -> float:
        return float(-_scaled(logs, math.exp(exponent)).gather(1, labels[:, None]).mean())

    edge = math.log(100)
    return math.exp(minimize_scalar(loss, bounds=(-edge, edge), method="bounded", options={"xatol": 1e-4}).x)


def _scaled(logs: Tensor, temperature: float) -> Tensor:
    return (logs / temperature).log_softmax(1)


def check_calibration(target: EvalTarget) -> None:
    """Raise ``CapszooError`` for images with several labels, or crops."""
    if target.images.spec.multi_label:
        raise CapszooError("calibration is defined here for one label an image", "leave --calibration out")
    target.require_one_view("calibration is measured")


def held_out_images(
    target: EvalTarget,
    model: str,
    dataset: str | None,
    data: str | None,
    skip_bad: bool = False,
    skip_unknown: bool = False,
) -> EvalTarget | str:
    """The model with the images that its training held out, or why there are none to fit a temperature on.

    Args:
        target: the model and the images that it is measured on.
        model, dataset, data, skip_bad, skip_unknown: what the target was prepared from (see ``target.prepare``).
    """
    if target.images.split != "test":
        return "it would be fitted on images that it is measured on"
    try:
        return prepare(
            model,
            dataset,
            "val",
            data,
            device=target.images.device,
            skip_bad=skip_bad,
            skip_unknown=skip_unknown,
        )
    except CapszooError as error:
        return str(error)


def calibrate(
    target: EvalTarget, held_out: EvalTarget | str, batch_size: int | None = None, progress: Any = None
) -> CalibrationResult:
    """Measure the calibration.

    Args:
        target: the model and its images.
        held_out: the same model with the images that training held out, on which the temperature is fitted; or why
            there are none.
        batch_size: images per forward pass; None: the target's.
        progress: called with the number of images after each batch.

    Raises:
        CapszooError: images with several labels, or crops.
    """
    check_calibration(target)
    kind = score_kind(target.net)
    logs, labels = _logarithms(target, kind, batch_size, progress)
    raw = reliability(logs, labels)
    if isinstance(held_out, str):
        return CalibrationResult(kind, raw, reason=held_out)
    held, classes = _logarithms(held_out, kind, batch_size)
    if bool((held.argmax(1) == classes).all()):
        return CalibrationResult(
            kind, raw, reason=f"all {held_out.n:,} held-out images are recognised: no T is best"
        )
    temperature = fit_temperature(held, classes)
    return CalibrationResult(
        kind, raw, temperature, reliability(_scaled(logs, temperature), labels), held_out.n
    )


def _logarithms(
    target: EvalTarget, kind: str, batch_size: int | None, progress: Any = None
) -> tuple[Tensor, Tensor]:
    """Logarithms of the probabilities [n, classes] in float64, and the labels [n]."""

    def logarithms(scores: Tensor) -> Tensor:
        if kind in ("logits", "log_probabilities"):  # exact, however small
            return scores.log_softmax(1)
        return probabilities(scores, kind).clamp_min(SMALLEST).log()

    parts = [
        (logarithms(scores.double()).cpu(), labels.cpu())
        for scores, labels in scored(target, batch_size, progress)
    ]
    logs, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return logs, labels
