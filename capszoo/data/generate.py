"""Compose sets from digits, in batches, on the digits' device: affNIST's protocol, MultiMNIST, DiverseMultiMNIST.

A composer draws the random numbers of a whole global batch on the CPU (``draw``) and composes images from one process's
share of them (``compose``), so that images are functions of (seed, epoch, step) for any number of processes.

Sources: MultiMNIST and the expanded (shifted) MNIST, Sabour et al. 2017, sections 5.2 and 6; DiverseMultiMNIST, Tsai
et al. 2020 (arXiv 2002.04764), appendix B.2; affNIST's ranges, the page of its author (Tieleman): rotation within 20
degrees, shear within 0.2, each side scaled independently by 0.8 to 1.2, moved to any place where no ink is cut off.

Letters: ``b`` batch, ``c h w`` image, ``n`` classes, ``k`` digits of an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .augment import Draws, affine_matrices, crop, warp
from .errors import DataError


class ByClass(NamedTuple):
    """Digits sorted by class, on the CPU: ``labels`` [n], ``order`` [n], and of each class its ``start`` in
    ``order`` and its ``number`` of digits."""

    labels: Tensor
    order: Tensor
    start: Tensor
    number: Tensor

    @classmethod
    def of(cls, labels: Tensor, num_classes: int) -> ByClass:
        labels = labels.cpu()
        number = torch.bincount(labels, minlength=num_classes)
        return cls(labels, labels.argsort(stable=True), number.cumsum(0) - number, number)


class Composed(NamedTuple):
    """Images composed from digits.

    ``images`` uint8 [b, c, h, w]; ``labels`` [b] classes or float [b, n] with a one for each class present; ``parts``
    uint8 [b, k, c, h, w], each digit alone, black for a missing one, and ``part_labels`` int64 [b, k], -1 for it.
    """

    images: Tensor
    labels: Tensor
    parts: Tensor | None = None
    part_labels: Tensor | None = None


class Composer(Protocol):
    """A way to compose images from digits; equal settings have equal ``repr``."""

    @property
    def size(self) -> int:
        """Side of the images in pixels."""

    def draw(self, index: ByClass, picked: Tensor, generator: torch.Generator) -> Draws:
        """Random numbers for the digits ``picked`` [b], on the CPU."""

    def compose(self, digits: Tensor, labels: Tensor, picked: Tensor, draws: Draws) -> Composed:
        """Images around the digits ``picked`` [b] of ``digits`` uint8 [n, c, h, w] with ``labels`` [n]."""


def place(digits: Tensor, top: Tensor, left: Tensor, size: int) -> Tensor:
    """Place digits uint8 [b, c, h, w] on black squares, upper left corners at (top, left) [b]; crop parts outside."""
    room = size - min(digits.shape[2:])
    return crop(digits, room - top, room - left, (size, size), padding=room)


@dataclass(frozen=True)
class Scatter:
    """One digit, unchanged, at a random place: affNIST's training set, and the expanded MNIST test set."""

    size: int = 40

    def draw(self, index: ByClass, picked: Tensor, generator: torch.Generator) -> Draws:
        corners = torch.rand(len(picked), 2, generator=generator)
        return {"corner": corners}

    def compose(self, digits: Tensor, labels: Tensor, picked: Tensor, draws: Draws) -> Composed:
        chosen = digits[picked]
        rows, cols = (self.size - side + 1 for side in chosen.shape[2:])
        top, left = (draws["corner"] * torch.tensor([rows, cols])).long().unbind(1)
        return Composed(place(chosen, top, left, self.size), labels[picked])


@dataclass(frozen=True)
class Distort:
    """One digit, rotated, sheared, scaled, and moved to a place where all its ink is inside: affNIST regenerated."""

    size: int = 40
    rotation: float = 20.0
    shear: float = 0.2
    scale: tuple[float, float] = (0.8, 1.2)

    def draw(self, index: ByClass, picked: Tensor, generator: torch.Generator) -> Draws:
        u = torch.rand(len(picked), 6, generator=generator)
        low, high = self.scale
        matrix = affine_matrices(
            (2 * u[:, 0] - 1) * self.rotation,
            (2 * u[:, 1] - 1) * self.shear,
            low + (high - low) * u[:, 2],
            low + (high - low) * u[:, 3],
        )
        return {"matrix": matrix, "corner": u[:, 4:]}

    def compose(self, digits: Tensor, labels: Tensor, picked: Tensor, draws: Draws) -> Composed:
        chosen = digits[picked].float()
        canvas = 2 * max(chosen.shape[2:])  # large enough for every distorted digit
        moved = warp(chosen, draws["matrix"], (canvas, canvas)).round().clamp(0, 255).to(torch.uint8)
        ink = moved.amax(1) > 0  # [b, h, w]
        top, left = (
            self._start(ink.any(axis).cpu(), draws["corner"][:, number], canvas)
            for number, axis in enumerate((2, 1))
        )
        return Composed(crop(moved, top, left, (self.size, self.size), padding=self.size), labels[picked])

    def _start(self, ink: Tensor, u: Tensor, canvas: int) -> Tensor:
        """First row (or column) of the window in the padded canvas, so that the ink [b, canvas] lies inside it."""
        first = ink.byte().argmax(1)
        last = canvas - 1 - ink.flip(1).byte().argmax(1)
        room = (self.size - (last - first + 1)).clamp(min=0)
        return first + self.size - (u * (room + 1)).long()


@dataclass(frozen=True)
class Overlay:
    """Two digits of different classes, each moved by up to ``shift`` pixels, added and clipped; or one digit alone.

    The first digit is the one picked; the second is drawn uniformly from all digits of other classes in the same set.

    Attributes:
        size: side of the image; a digit without a shift is in its middle.
        shift: largest shift, each way.
        single: probability of an image with only the first digit.
        num_classes: length of the target.
    """

    size: int = 36
    shift: int = 4
    single: float = 0.0
    num_classes: int = 10

    def draw(self, index: ByClass, picked: Tensor, generator: torch.Generator) -> Draws:
        if int((index.number > 0).sum()) < 2:
            raise DataError("overlapping digits of different classes need at least two classes")
        b, own = len(picked), index.labels[picked]
        corner = torch.randint(0, 2 * self.shift + 1, (b, 2, 2), generator=generator)
        # One of the n - counts digits of other classes: skip the block of the digit's class.
        u = torch.rand(b, dtype=torch.float64, generator=generator)
        other = (u * (len(index.labels) - index.number[own])).long()
        other += index.number[own] * (other >= index.start[own])
        alone = torch.rand(b, generator=generator) < self.single
        return {"corner": corner, "other": index.order[other], "alone": alone}

    def compose(self, digits: Tensor, labels: Tensor, picked: Tensor, draws: Draws) -> Composed:
        b, device = len(picked), digits.device
        second, alone = draws["other"].to(device), draws["alone"].to(device)
        margin = (self.size - torch.tensor(digits.shape[2:])) // 2 - self.shift
        top, left = (draws["corner"] + margin).flatten(0, 1).unbind(1)
        both = torch.stack((picked.to(device), second), dim=1)  # [b, 2]
        parts = place(digits[both.flatten()], top, left, self.size).unflatten(0, (b, 2))  # [b, 2, c, h, w]
        parts[:, 1].masked_fill_(alone[:, None, None, None], 0)
        summed = parts[:, 0].short() + parts[:, 1]
        present = labels[both]
        targets = F.one_hot(present, self.num_classes).float()  # [b, 2, n]
        targets[:, 1].masked_fill_(alone[:, None], 0)
        part_labels = torch.stack((present[:, 0], present[:, 1].masked_fill(alone, -1)), dim=1)
        return Composed(summed.clamp_(max=255).to(torch.uint8), targets.amax(1), parts, part_labels)
