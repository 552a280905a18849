"""Batches of an in-memory data set, reproducible at any position.

The order of an epoch depends on (seed, epoch) and the augmentation of a batch on (seed, epoch, step) alone, so a run
that resumes in the middle of an epoch sees exactly what the uninterrupted run saw, and so do several processes that
share a global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .augment import crop_and_flip, normalize
from .errors import DataError
from .sources import ImageSet

__all__ = ["Batch", "Batches", "keyed_generator"]


class Batch(NamedTuple):
    """`images` float32 [b, c, h, w], normalised; `labels` [b]; `pixels` uint8 [b, c, h, w], before normalisation."""

    images: Tensor
    labels: Tensor
    pixels: Tensor


def keyed_generator(*key: int) -> torch.Generator:
    """A CPU generator seeded by a hash of the key, so that neighbouring keys give unrelated streams."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


class Batches:
    """Iterate over an `ImageSet`.

    Arguments:
        data: the images, already on the device where batches are wanted.
        batch_size: images per step over all processes together.
        train: shuffle, augment and drop the last incomplete batch.
        shift, flip: see `crop_and_flip`; used in training only.
        seed: of order and augmentation.
        rank, world: this process takes images rank, rank + world, … of each global batch.
        mean, std: normalisation; None takes the data set's.
    """

    def __init__(
        self,
        data: ImageSet,
        batch_size: int,
        *,
        train: bool = False,
        shift: int = 0,
        flip: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
    ) -> None:
        if train and len(data) < batch_size:
            raise DataError(f"{len(data)} training images do not fill one batch of {batch_size}")
        self.data, self.batch_size, self.train = data, batch_size, train
        self.shift, self.flip, self.seed = shift, flip, seed
        self.rank, self.world = rank, world
        self.mean = mean or data.spec.mean
        self.std = std or data.spec.std

    def __len__(self) -> int:
        full, rest = divmod(len(self.data), self.batch_size)
        return full if self.train else full + (rest > 0)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from batch number `start` on."""
        n, device = len(self.data), self.data.images.device
        order = (
            torch.randperm(n, generator=keyed_generator(self.seed, epoch)) if self.train else torch.arange(n)
        )
        for step in range(start, len(self)):
            picked = order[step * self.batch_size : (step + 1) * self.batch_size].to(device)
            pixels = self.data.images[picked]
            if self.train:
                # Every process augments the whole global batch (microseconds) and keeps its share.
                generator = keyed_generator(self.seed, epoch, step)
                pixels = crop_and_flip(pixels, self.shift, self.flip, generator)
            pixels = pixels[self.rank :: self.world]
            labels = self.data.labels[picked][self.rank :: self.world]
            yield Batch(normalize(pixels, self.mean, self.std), labels, pixels)
