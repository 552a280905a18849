"""Batches of a data set, reproducible at any position.

The order of an epoch depends only on (seed, epoch), and the random numbers of a batch only on (seed, epoch, step). So a
run that resumes in the middle of an epoch sees exactly the images of the uninterrupted run, and so do several processes
that share a global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .augment import Augment, Draws, normalize, send, share
from .errors import DataError
from .generate import ByClass, Composed
from .sets import ImageSet, StreamedSet, keyed_generator

#: Elements of the images that are augmented together; in float32, with what the operations keep, about 100 MB.
LARGEST_GROUP = 2**23


def balanced_order(labels: Tensor, generator: torch.Generator) -> Tensor:
    """As many indices as there are images, in random order, with each class equally often (or one less).

    Images of a small class occur several times, each of them once before any is repeated; of a large class, each epoch
    has different images. If all classes have the same size, this is a permutation.

    Args:
        labels: int64 [n].
        generator: source of random numbers.
    """
    classes = labels.unique()
    share, extra = divmod(len(labels), len(classes))
    lucky = torch.randperm(len(classes), generator=generator)[:extra].tolist()
    picked = []
    for number, kind in enumerate(classes):
        mine = (labels == kind).nonzero().flatten()
        wanted = share + (number in lucky)
        rounds = [torch.randperm(len(mine), generator=generator) for _ in range(-(-wanted // len(mine)))]
        picked += [mine[torch.cat(rounds)[:wanted]]] if rounds else []
    return torch.cat(picked)[torch.randperm(len(labels), generator=generator)]


class Batch(NamedTuple):
    """One batch.

    ``images`` float32 [b, c, h, w], normalised; ``labels`` int64 [b], or float [b, n] of zeros and ones; ``pixels``
    uint8 [b, c, h, w], before normalisation. Composed images also have ``parts`` uint8 [b, k, c, h, w], each object
    alone, and ``part_labels`` int64 [b, k], -1 for none.
    """

    images: Tensor
    labels: Tensor
    pixels: Tensor
    parts: Tensor | None = None
    part_labels: Tensor | None = None

    def chunk(self, count: int) -> list[Batch]:
        """Split into ``count`` parts of (nearly) equal size."""
        parts = len(self.labels.chunk(count))
        columns = [(None,) * parts if column is None else column.chunk(count) for column in self]
        return [Batch(*row) for row in zip(*columns, strict=True)]  # type: ignore[arg-type]


class Batches:
    """Iterate over a data set.

    Args:
        data: an ``ImageSet`` on the device of the batches, or a ``StreamedSet`` configured for it. In evaluation,
            composed images are created once, with a fixed seed.
        batch_size: images per step over all processes together.
        train: shuffle, augment and drop the last incomplete batch.
        augment: augmentation in training. Images larger than the data set's input size are cropped to
            it: at random in training, in the middle otherwise.
        seed: of order, composition and augmentation.
        rank, world: this process takes images rank, rank + world, … of each global batch.
        mean, std: normalisation; None uses the data set's.
        balance: in training, show each class equally often (see ``balanced_order``).
        cutout_epochs: number of first epochs in which ``augment.cutout`` is on; None: all.
    """

    def __init__(
        self,
        data: ImageSet | StreamedSet,
        batch_size: int,
        *,
        train: bool = False,
        augment: Augment | None = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        balance: bool = False,
        cutout_epochs: int | None = None,
    ) -> None:
        if train and len(data) < batch_size:
            raise DataError(
                f"{len(data)} training images do not fill one batch of {batch_size}: lower batch_size"
            )
        if balance and (data.spec.multi_label or (isinstance(data, ImageSet) and data.composer)):
            raise DataError(f"{data.spec.title}: classes can be balanced where each image has one label only")
        self.balance = balance and train
        self.data = data if train else data.fixed()
        self.batch_size, self.train, self.seed = batch_size, train, seed
        self.augment = (augment or Augment()) if train else Augment()
        self.cutout_epochs = cutout_epochs
        self.rank, self.world = rank, world
        self.mean = mean or data.spec.mean
        self.std = std or data.spec.std
        self.augment.check_channels(data.spec.input_size[0])
        self.target = data.spec.input_size[1:]
        self.margin = (data.size[0] - self.target[0], data.size[1] - self.target[1])
        if min(self.margin) < 0:
            raise DataError(
                f"{data.spec.title}: images of {data.size} pixels are smaller than the input {self.target}"
            )
        self.index: ByClass | None = None
        if train and isinstance(data, ImageSet) and data.composer:
            self.index = ByClass.of(data.labels, data.spec.num_classes)
            if data.spec.multi_label and self.augment.changes:
                # The parts of an image would need the same augmentation; the protocols have none.
                raise DataError(
                    f"{data.spec.title} is composed afresh for every batch: augment must be left out"
                )

    @property
    def device(self) -> torch.device:
        return self.data.device

    def __len__(self) -> int:
        full, rest = divmod(len(self.data), self.batch_size)
        return full if self.train else full + (rest > 0)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from batch number ``start`` on."""
        n = len(self.data)
        order = torch.arange(n)
        if self.balance:
            order = balanced_order(self.data.labels.cpu(), keyed_generator(self.seed, epoch))
        elif self.train:
            order = self.data.order(keyed_generator(self.seed, epoch))
        steps = range(start, len(self))
        globally = [order[step * self.batch_size : (step + 1) * self.batch_size] for step in steps]
        mine = [picked[self.rank :: self.world] for picked in globally]
        augment = self.augment
        if self.cutout_epochs is not None and epoch >= self.cutout_epochs:
            augment = replace(augment, cutout=0)
        # One half of the images, drawn once, is mirrored in even epochs, the other half in odd ones.
        alternating = augment.flip == "alternating"
        mirrored = (
            torch.rand(n, generator=keyed_generator(self.seed, "mirrored")) < 0.5 if alternating else None
        )
        streamed = self.data.read(mine) if isinstance(self.data, StreamedSet) else None
        group = self._at_once()
        for first in range(0, len(steps), group):
            part = slice(first, first + group)
            drawn = []
            for step, everyone in zip(steps[part], globally[part], strict=True):
                # Random numbers are drawn for the whole global batch; each process uses its share.
                draws = self._draw(
                    everyone,
                    keyed_generator(self.seed, epoch, step),
                    augment,
                    None if mirrored is None else mirrored[everyone] ^ (epoch % 2 == 1),
                )
                drawn.append([share(some, self.rank, self.world) for some in draws])
            composing, augmenting = (
                {name: torch.cat([one[name] for one in same]) for name in same[0]}
                for same in zip(*drawn, strict=True)
            )
            picked = mine[part]
            if streamed is not None:
                composed = Composed(next(streamed), self.data.labels[picked[0].to(self.device)])
            else:
                composed = self._pick(torch.cat(picked), composing)
            pixels = augment.apply(composed.images, augmenting, self.target, self.mean)
            sizes = [len(one) for one in picked]
            images = normalize(pixels, self.mean, self.std)
            columns = (images, composed.labels, pixels, composed.parts, composed.part_labels)
            split = [[None] * len(sizes) if c is None else c.split(sizes) for c in columns]
            yield from (Batch(*row) for row in zip(*split, strict=True))

    def _at_once(self) -> int:
        """Number of batches that are composed and augmented together.

        On a GPU, a batch is some 50 kernels of a few microseconds, which the CPU starts as slowly for one batch as for
        16. Each image is computed alone, so that its values do not depend on this number.
        """
        if isinstance(self.data, StreamedSet) or self.device.type != "cuda":
            return 1
        elements = self.batch_size * self.data.spec.input_size[0] * self.data.size[0] * self.data.size[1]
        return max(1, min(16, LARGEST_GROUP // elements))

    def _draw(
        self, picked: Tensor, generator: torch.Generator, augment: Augment, mirrored: Tensor | None
    ) -> tuple[Draws, Draws]:
        """Random numbers of a global batch, for composition and for augmentation."""
        if not self.train:
            if not any(self.margin):
                return {}, {}
            middle = {
                name: torch.full((len(picked),), space // 2)
                for name, space in zip(("top", "left"), self.margin, strict=True)
            }
            return {}, middle
        composing: Draws = {}
        if self.index is not None:
            composing = self.data.composer.draw(self.index, picked, generator)  # type: ignore[union-attr]
        augmenting = augment.draw(len(picked), self.margin, generator, mirrored, self.target)
        return composing, augmenting

    def _pick(self, picked: Tensor, draws: Draws) -> Composed:
        data = self.data
        assert isinstance(data, ImageSet)
        there = send(picked, data.device)
        if data.composer:
            return data.composer.compose(data.images, data.labels, there, draws)
        parts = None if data.parts is None else data.parts[there]
        part_labels = None if data.part_labels is None else data.part_labels[there]
        return Composed(data.images[there], data.labels[there], parts, part_labels)
