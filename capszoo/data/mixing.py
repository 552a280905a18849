"""Mixup and CutMix: a training image is combined with another one of its batch, and their labels with the same shares.

The other image (the partner) is half a batch away. For any even share of a batch, it belongs to the same process, so
that the mixed images are the same for every number of processes.

Sources: mixup, Zhang et al. 2018 (arXiv:1710.09412, Eq. 1); CutMix, Yun et al. 2019 (arXiv:1905.04899, Eqs. 1 and 2).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .augment import Draws, rectangles, send

__all__ = ["draw_mixing", "mix_images", "mix_labels", "own_shares", "partners"]


def draw_mixing(
    n: int, size: tuple[int, int], mixup: float, cutmix: float, prob: float, generator: torch.Generator
) -> Draws:
    """Draw the random numbers of a batch, separate ones for each image.

    Args:
        n: images in the global batch.
        size: rows and columns of the images.
        mixup, cutmix: alpha of each one's Beta(alpha, alpha); 0: off. With both, an image gets either with
            probability 1/2.
        prob: share of the images that are mixed.
        generator: generator for this batch.

    Returns:
        `blend` float32 [n], the image's own share in mixup (1 without it); `paste` int64 [n, 4], first and last (not
        included) row, first and last column of the partner's rectangle in CutMix (empty without it).
    """
    # torch has no beta distribution with a generator of its own
    numbers = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
    mixed = numbers.random(n) < prob
    pasted = numbers.random(n) < (0.5 if mixup and cutmix else bool(cutmix))
    blend = np.where(mixed & ~pasted, numbers.beta(mixup, mixup, n), 1.0) if mixup else np.ones(n)
    # The share of the rectangle before it is clipped at the image's edges.
    ratio = (
        np.where(mixed & pasted, np.sqrt(1 - numbers.beta(cutmix, cutmix, n)), 0.0) if cutmix else np.zeros(n)
    )
    edges = []
    for places in size:
        side = (places * ratio).astype(np.int64)
        first = numbers.integers(0, places, n) - side // 2
        edges += [first.clip(0, places), (first + side).clip(0, places)]
    return {"blend": torch.from_numpy(blend).float(), "paste": torch.from_numpy(np.stack(edges, axis=1))}


def partners(sizes: list[int], device: torch.device) -> Tensor:
    """Each image's partner [b] in consecutive batches, or one process's shares of them, which have even `sizes`."""
    first = np.cumsum([0, *sizes[:-1]])
    rolled = [torch.arange(size).roll(size // 2) + int(at) for size, at in zip(sizes, first, strict=True)]
    return send(torch.cat(rolled), device)


def own_shares(draws: Draws, size: tuple[int, int]) -> Tensor:
    """Share [b] of each image in its mixture: that of mixup, or of the pixels that CutMix leaves."""
    top, bottom, left, right = draws["paste"].unbind(1)
    return draws["blend"] * (1 - (bottom - top) * (right - left) / (size[0] * size[1]))


def mix_images(images: Tensor, partner: Tensor, draws: Draws) -> Tensor:
    """Mix uint8 [b, c, h, w], each with its partner [b], by the random numbers of `draw_mixing`; returns the same."""
    others = images[partner]
    own = send(draws["blend"], images.device)[:, None, None, None]
    blended = torch.lerp(others.float(), images.float(), own).round_().to(images.dtype)
    inside = rectangles(images, *send(draws["paste"], images.device).unbind(1))
    return torch.where(inside, others, blended)


def mix_labels(labels: Tensor, partner: Tensor, own: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Labels of mixed images.

    Args:
        labels: int64 [b].
        partner: of each image [b].
        own: shares of the images themselves [b].
        num_classes: n.

    Returns:
        The label with the larger share [b], and class probabilities float32 [b, n].
    """
    own, others = send(own, labels.device), labels[partner]
    probabilities = torch.lerp(
        F.one_hot(others, num_classes).float(), F.one_hot(labels, num_classes).float(), own[:, None]
    )
    return torch.where(own >= 0.5, labels, others), probabilities
