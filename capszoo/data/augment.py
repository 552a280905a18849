"""Augmentation of a batch as tensor operations, each image by its own random numbers, on the images' device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["crop_and_flip", "normalize"]


def crop_and_flip(images: Tensor, shift: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Shift each image by up to `shift` pixels each way, filling with black, and mirror half of them.

    A shift by at most s pixels is the usual "pad s, then crop at random" under another name.

    Arguments:
        images: [b, c, h, w], any dtype and memory format.
        shift: largest shift in pixels; 0 leaves the images where they are.
        flip: mirror each image left to right with probability one half.
        generator: a CPU generator, so that every device and every number of processes draws the same numbers.

    Returns [b, c, h, w].
    """
    b, _, h, w = images.shape
    if shift == 0 and not flip:
        return images
    device = images.device
    offsets = torch.randint(0, 2 * shift + 1, (2, b, 1), generator=generator)
    mirrored = torch.rand(b, 1, generator=generator) < 0.5
    rows = offsets[0] + torch.arange(h)  # [b, h]
    cols = offsets[1] + torch.arange(w)  # [b, w]
    if flip:
        cols = torch.where(mirrored, cols.flip(1), cols)
    padded = F.pad(images, (shift, shift, shift, shift)).permute(0, 2, 3, 1)
    batch = torch.arange(b, device=device)[:, None, None]
    # One gather does both; indexing a channels-last view keeps the result channels-last.
    picked = padded[batch, rows.to(device)[:, :, None], cols.to(device)[:, None, :]]  # [b, h, w, c]
    return picked.permute(0, 3, 1, 2)


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """uint8 [b, c, h, w] to float32 with (x / 255 − mean) / std per channel, in one multiply-add."""
    scale = torch.tensor([1 / (255 * s) for s in std], device=images.device).view(1, -1, 1, 1)
    offset = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=images.device).view(
        1, -1, 1, 1
    )
    return torch.addcmul(offset, images.float(), scale)
