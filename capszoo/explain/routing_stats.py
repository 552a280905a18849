"""Measure the routing of a network over a set of images: coupling entropy, dead capsules, agreement of the votes.

All statistics are computed in one evaluation of the images:

* the entropy of each layer's couplings, over the axis that they sum to 1 over (the parents of a child, or the children
  of a parent), divided by its maximum: 1 is even couplings, 0 is a single coupling of 1;
* dead capsules: those that compete for couplings (the parents, or the children) and never, in any image, get more than
  ``DEAD`` of an even share;
* of credit (Heinsen's routing), which is no share, no entropy: how much of its size is negative, and as dead those
  parents that never assign more than ``DEAD`` of an even share of its size;
* the curves of Li et al. 2018 ("Neural Network Encapsulation"), Fig. 2: votes sorted by their cosine with the parent
  capsule, and for each cosine the share of the votes and their mean length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CapszooError, NoCapsules
from ..models._base import CouplingLayout
from ..models._inspect import evaluating

__all__ = ["AgreementCurve", "LayerStats", "RoutingStats", "canonical", "coupling_entropy", "routing_stats"]

#: Share of an even share that a living capsule gets at least once.
DEAD = 0.1

#: Bins of the cosine from -1 to 1.
BINS = 20


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one routing layer.

    Attributes:
        positions: number of positions that are routed separately.
        parents, children: number of capsules at each position.
        over: the axis that the couplings sum to 1 over, ``"parents"`` or ``"children"``; None for credit.
        entropy: mean normalised entropy; None if the axis has only one capsule, and for credit.
        peak: mean of the largest coupling; None for credit.
        dead: number of competing capsules (``over``; the parents of credit) that never get more than ``DEAD`` of an
            even share.
        negative: negative credit as a share of the sum of all sizes, 0 to 1; None for shares.
    """

    positions: int
    parents: int
    children: int
    over: str | None
    entropy: float | None
    peak: float | None
    dead: int
    negative: float | None = None

    @property
    def competing(self) -> int:
        return self.children if self.over == "children" else self.parents


@dataclass(frozen=True)
class AgreementCurve:
    """Votes by their cosine with the parent capsule (Fig. 2).

    Attributes:
        cosine: middle of each bin.
        share: per cent of the votes in each bin.
        length: mean length of the votes in each bin; None for an empty bin.
        classes: whether the parent is the capsule of the image's class; otherwise all parents are used.
    """

    cosine: tuple[float, ...]
    share: tuple[float, ...]
    length: tuple[float | None, ...]
    classes: bool


@dataclass(frozen=True)
class RoutingStats:
    """All statistics, over ``n`` images.

    Attributes:
        layers: routing layers in order; empty without routing.
        never_predicted: classes that have the highest score for no image.
        curve: None if the network has no votes, or no image has a class.
    """

    n: int
    layers: tuple[LayerStats, ...]
    never_predicted: tuple[int, ...]
    curve: AgreementCurve | None


def coupling_entropy(couplings: Tensor, dim: int) -> Tensor:
    """Entropy along the axis over which couplings sum to 1, divided by its maximum; NaN for an axis of length one."""
    count = couplings.shape[dim]
    if count == 1:
        return torch.full_like(couplings.select(dim, 0), math.nan)
    return torch.special.entr(couplings).sum(dim) / math.log(count)


def canonical(couplings: Tensor, layout: CouplingLayout) -> Tensor:
    """Couplings of a network as ``[b, positions, parents, children]``, float32."""
    b, parents = couplings.shape[0], couplings.shape[layout.parents]
    positions = math.prod(couplings.shape[1 : layout.parents])
    return couplings.float().reshape(b, positions, parents, -1)


class _Layer:
    """Sums over the images, for one layer."""

    def __init__(self, layout: CouplingLayout) -> None:
        self.over = layout.over
        self.layout = layout
        self.shape = (0, 0, 0)
        self.entropy = self.peak = self.negative = self.size = 0.0
        self.count = 0
        self.most: Tensor | None = None

    def add(self, couplings: Tensor) -> None:
        c = canonical(couplings, self.layout)
        self.shape = (c.shape[1], c.shape[2], c.shape[3])
        share = self._credit(c) if self.over is None else self._shares(c)  # [b, competing]
        most = share.amax(0)
        self.most = most if self.most is None else torch.maximum(self.most, most)

    def _shares(self, c: Tensor) -> Tensor:
        dim = 2 if self.over == "parents" else 3
        total = c.sum(dim)
        if not bool(((total - 1).abs() < 1e-2).all()):  # also true for NaN
            raise CapszooError(f"couplings do not sum to 1 over the {self.over}", "the weights are damaged")
        self.entropy += float(coupling_entropy(c, dim).cpu().double().sum())
        self.peak += float(c.amax(dim).cpu().double().sum())
        self.count += total.numel()
        # A parent's share in an image is over all children; a child may contribute to a single position or parent.
        return c.mean((1, 3)) if self.over == "parents" else c.amax((1, 2))

    def _credit(self, c: Tensor) -> Tensor:
        sizes = c.abs().sum((1, 3))  # [b, parents]
        if not bool(torch.isfinite(sizes).all()):
            raise CapszooError("the credit is not finite", "the weights are damaged")
        self.size += float(sizes.cpu().double().sum())
        self.negative += float(c.clamp(max=0).cpu().double().sum().abs())
        return sizes / sizes.sum(1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)

    def result(self) -> LayerStats:
        assert self.most is not None
        dead = int((self.most < DEAD * (1 / len(self.most))).sum())
        if self.over is None:
            negative = self.negative / self.size if self.size else 0.0
            return LayerStats(*self.shape, None, None, None, dead, negative)
        entropy = None if math.isnan(self.entropy) else self.entropy / self.count
        return LayerStats(*self.shape, self.over, entropy, self.peak / self.count, dead)


class _Curve:
    """Statistics of votes by cosine."""

    def __init__(self) -> None:
        self.number = torch.zeros(BINS, dtype=torch.float64, device="cpu")
        self.length = torch.zeros(BINS, dtype=torch.float64, device="cpu")
        self.classes = False

    def add(self, votes: Tensor, poses: Tensor) -> None:
        """Add votes ``[b, j, i, e]`` and parents ``[b, j, e]``."""
        votes, poses = votes.float(), poses.float()
        lengths = torch.linalg.vector_norm(votes, dim=-1)  # [b, j, i]
        along = torch.matmul(votes, poses.unsqueeze(-1)).squeeze(-1)
        cosine = along / (lengths * torch.linalg.vector_norm(poses, dim=-1, keepdim=True)).clamp_min(1e-12)
        place = ((cosine + 1) * (BINS / 2)).long().clamp_(0, BINS - 1).flatten().cpu()
        self.number += torch.bincount(place, minlength=BINS)
        self.length += torch.bincount(place, lengths.flatten().cpu().double(), minlength=BINS)

    def result(self) -> AgreementCurve:
        lengths = (self.length / self.number).tolist()
        return AgreementCurve(
            cosine=tuple((2 * k + 1) / BINS - 1 for k in range(BINS)),
            share=tuple((100 * self.number / self.number.sum()).tolist()),
            length=tuple(None if math.isnan(length) else length for length in lengths),
            classes=self.classes,
        )


@torch.no_grad()
def routing_stats(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor | None]]) -> RoutingStats:
    """Statistics of a capsule network's routing.

    Args:
        model: a network of the zoo; run in eval mode.
        batches: images ``[b, c, h, w]``, normalised, on the model's device, and their classes ``[b]`` or zeros and ones
            ``[b, n]``; without labels the parent of the curve is the predicted class's capsule.

    Raises:
        CapszooError: no capsule network, couplings that are not finite or do not sum to 1, or no images.
    """
    forward: Any = getattr(model, "forward_capsules", None)
    if forward is None or not hasattr(model, "coupling_layouts"):
        raise CapszooError(f"{type(model).__name__} is no capsule network", "choose one: `capszoo list`")
    layers = [_Layer(layout) for layout in model.coupling_layouts()]  # type: ignore[operator]
    curve: _Curve | None = _Curve()
    predicted: Tensor | None = None
    n = 0
    with evaluating(model):
        for images, labels in batches:
            try:
                output = forward(images)
            except NoCapsules as error:
                raise CapszooError(str(error), "choose another: `capszoo list`") from None
            for layer, couplings in zip(layers, output.couplings, strict=True):
                layer.add(couplings)
            answer = output.scores.argmax(1)
            counts = torch.bincount(answer, minlength=output.scores.shape[1]).cpu()
            predicted = counts if predicted is None else predicted + counts
            n += len(images)
            if curve is not None:
                curve = _add_votes(curve, model, images, answer if labels is None else labels)
    if predicted is None:
        raise CapszooError("there are no images", "give at least one")
    return RoutingStats(
        n,
        tuple(layer.result() for layer in layers),
        tuple((predicted == 0).nonzero()[:, 0].tolist()),
        None if curve is None or not bool(curve.number.sum()) else curve.result(),
    )


def _add_votes(curve: _Curve, model: nn.Module, images: Tensor, labels: Tensor) -> _Curve | None:
    try:
        votes, poses, classes = model.class_votes(images)  # type: ignore[operator]
    except (NotImplementedError, NoCapsules):
        return None
    curve.classes = classes
    if classes:  # each of an image's
        single = torch.arange(len(labels), device=labels.device), labels
        own = single if labels.dim() == 1 else labels.nonzero(as_tuple=True)
        votes, poses = votes[own].unsqueeze(1), poses[own].unsqueeze(1)
    curve.add(votes, poses)
    return curve
