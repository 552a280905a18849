"""How well a network's outputs tell images of its own data set from those of another: AUROC of each score.

==================== =============================================================================================
score                of an image; a larger one is taken for an image of the data set
==================== =============================================================================================
max probability      the largest probability of a class (Hendrycks, Gimpel 2017, arXiv:1610.02136)
energy               log Σ exp(logits) (Liu et al. 2020, arXiv:2010.03759); not for normalised scores, where it is 0
max activation       the largest activation of a class capsule: its length, in networks that score by lengths
reconstruction       minus the mean squared error of the decoder's image of the predicted class, with a decoder
coupling entropy     minus the mean entropy of the last routing layer's couplings, as a share of its maximum; not of
                     credit (Heinsen's routing), which is no share
==================== =============================================================================================

AUROC is the share of pairs of an image of each set that a score puts in this order: 0.5 is chance. It is computed by
torchmetrics, its 95% interval by the formula of Hanley and McNeil (1982).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capszoo.data import PREFIXES, DataError, ImageSet, load_dataset
from capszoo.data.folders import find_splits
from capszoo.errors import NoCapsules, require
from capszoo.explain.routing_stats import coupling_entropy
from capszoo.scores import probabilities, score_kind

from .target import EvalTarget, drawn

#: Largest energy of scores that are logarithms of probabilities.
NORMALISED = 1e-3


@dataclass(frozen=True)
class OutlierScore:
    """AUROC of one score, and its 95% interval."""

    score: str
    auroc: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class OutlierResult:
    """AUROC of every score that the network has.

    Attributes:
        dataset: name of the other data set.
        n, others: images of the own and of the other data set.
    """

    dataset: str
    n: int
    others: int
    scores: tuple[OutlierScore, ...]


def require_auroc() -> None:
    """Raise ``CapszooError`` if torchmetrics is not installed."""
    require("AUROC", ("torchmetrics",), "train")


def other_images(
    target: EvalTarget, name: str, data: str | Path | None, limit: int | None, seed: int
) -> ImageSet:
    """Test images of another data set at the size of the model's; all images of a set without splits.

    Raises:
        DataError: the set is missing, is the model's own, or has other channels.
    """
    spec = target.images.spec
    if name == spec.name:
        raise DataError(f"{name} is the data set itself", "name another one, such as fashion_mnist for mnist")
    height, width = spec.input_size[1:]
    without_test = name.startswith(tuple(PREFIXES)) and find_splits(name, data) == {"train"}
    split = "train" if without_test else "test"
    images = drawn(load_dataset(name, split, data, size=(height, width)), limit, seed).fixed()
    assert isinstance(images, ImageSet)
    if images.spec.input_size[0] != spec.input_size[0]:
        raise DataError(
            f"{name} has {images.spec.input_size[0]} channels, the model takes {spec.input_size[0]}",
            "name a data set with as many",
        )
    return images


@torch.no_grad()
def outlier_scores(
    target: EvalTarget, batch_size: int | None = None, progress: Callable[[int], None] | None = None
) -> dict[str, Tensor]:
    """Scores ``[n]`` of the target's images by name, see the table above."""
    net: Any = target.net
    kind = score_kind(net)
    parts: dict[str, list[Tensor]] = {}
    for batch in target.batches(batch_size, progress):
        x = batch.images.contiguous(memory_format=torch.channels_last)
        by_name = _capsule_scores(net, x, batch.pixels)
        scores = by_name.pop("scores") if by_name else net(x)
        by_name["max probability"] = probabilities(scores.float(), kind).amax(1)
        if kind == "logits":
            by_name["energy"] = scores.float().logsumexp(1)
        for name, values in by_name.items():
            parts.setdefault(name, []).append(values.float().cpu())
    scores_of = {name: torch.cat(pieces) for name, pieces in parts.items()}
    if "energy" in scores_of and bool((scores_of["energy"].abs() < NORMALISED).all()):
        del scores_of["energy"]  # the logits are log-probabilities
    return scores_of


def _capsule_scores(net: Any, x: Tensor, pixels: Tensor) -> dict[str, Tensor]:
    """Scores of capsules ``[b]``, and the class scores ``[b, n]``; empty without capsules."""
    try:
        out = net.forward_capsules(x)
    except (AttributeError, NotImplementedError, NoCapsules):
        return {}
    by_name = {"scores": out.scores, "max activation": out.activations.flatten(1).amax(1)}
    if getattr(net, "decoder", None) is not None:
        image = net.reconstruct(out.poses, out.scores.argmax(1)).float()
        by_name["reconstruction"] = -(image - pixels.float() / 255).square().flatten(1).mean(1)
    layout = net.coupling_layouts()[-1] if out.couplings else None
    if layout is not None and layout.over is not None:
        axis = layout.parents if layout.over == "parents" else layout.parents + 1
        couplings = out.couplings[-1].float().flatten(layout.parents + 1)
        if couplings.shape[axis] > 1:
            by_name["coupling entropy"] = -coupling_entropy(couplings, axis).flatten(1).mean(1)
    return by_name


def auroc(inside: Tensor, others: Tensor) -> tuple[float, tuple[float, float]]:
    """AUROC of scores ``[n]`` of own images against those ``[m]`` of others, and its 95% interval."""
    from torchmetrics.functional.classification import binary_auroc

    values = torch.cat([inside, others]).double()
    # torchmetrics takes values outside 0..1 for logits, and their sigmoid would tie the large ones
    _, ranks = values.unique(return_inverse=True)
    labels = torch.cat([torch.ones(len(inside)), torch.zeros(len(others))]).long()
    area = float(binary_auroc(ranks.double() / max(int(ranks.max()), 1), labels))
    n, m = len(inside), len(others)
    inner = min(max(area, 0.5 / (n * m)), 1 - 0.5 / (n * m))  # at 0 and 1 the formula's spread is none
    first, second = inner / (2 - inner), 2 * inner**2 / (1 + inner)
    spread = inner * (1 - inner) + (n - 1) * (first - inner**2) + (m - 1) * (second - inner**2)
    half = 1.96 * (max(spread, 0.0) / (n * m)) ** 0.5
    return area, (max(0.0, area - half), min(1.0, area + half))


def outliers(
    target: EvalTarget,
    other: ImageSet,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> OutlierResult:
    """Compare the scores of the target's images with those of another set's.

    Raises:
        UsageError: several crops of each image.
    """
    target.require_one_view("outliers are measured")
    scores = outlier_scores(target, batch_size, progress)
    apart = outlier_scores(target.on(other), batch_size)
    results = tuple(OutlierScore(name, *auroc(values, apart[name])) for name, values in scores.items())
    return OutlierResult(other.spec.name, target.n, len(other), results)
