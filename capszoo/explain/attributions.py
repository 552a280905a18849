"""Attributions of a class score to the tiles of an image, by captum: gradient × pixel, and occlusion.

Both are relative to black: the value of a tile estimates by how much the score falls if the tile is blackened. The
gradient's estimate is of first order, that of occlusion is measured. They need no couplings, so that networks without
capsules have them, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import CapszooError, require

#: Tiles along the shorter side of an image.
TILES = 7

#: Images of one forward pass of occlusion.
_TOGETHER = 25


class _OfPixels(nn.Module):
    """The scores of pixels in 0..1, for which zero is black."""

    def __init__(self, model: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.model, self.mean, self.std = model, mean, std

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model((pixels - self.mean) / self.std)


def tile_index(height: int, width: int) -> tuple[Tensor, tuple[int, int]]:
    """Number of the tile of each pixel ``[height, width]``, row by row from 0; and the rows and columns of tiles.

    ``TILES`` lie along the shorter side; the longer side has as many of about the same size as fit.
    """
    short = min(height, width)
    rows, columns = (min(side, round(TILES * side / short)) for side in (height, width))
    row, column = ((torch.arange(side) * count) // side for side, count in ((height, rows), (width, columns)))
    return row[:, None] * columns + column, (rows, columns)


def require_captum(method: str) -> None:
    """Raise ``CapszooError`` if the library of an attribution is not installed."""
    require(f"the {method} map", ["captum"], "explain")


def attribution(
    method: str, model: nn.Module, pixels: Tensor, target: int, mean: Tensor, std: Tensor
) -> Tensor:
    """Share of each tile in the score of a class ``[rows, columns]``, in units of the score.

    Args:
        method: a key of ``ATTRIBUTIONS``.
        model: a classifier in eval mode.
        pixels: one image ``[1, c, h, w]`` in 0..1.
        target: index of the class.
        mean, std: of the model's normalisation, ``[c, 1, 1]``.

    Raises:
        CapszooError: captum is not installed.
    """
    require_captum(method)
    index, grid = tile_index(*pixels.shape[-2:])
    values = ATTRIBUTIONS[method](_OfPixels(model, mean, std), pixels, target, index.to(pixels.device))
    return values.detach().float().cpu().reshape(grid)


def _gradient(scores: nn.Module, pixels: Tensor, target: int, index: Tensor) -> Tensor:
    """Gradient × pixel (Shrikumar et al. 2016, arXiv:1605.01713), summed over the pixels of a tile."""
    from captum.attr import InputXGradient

    if next(scores.parameters(), None) is None:
        raise CapszooError("an exported file has no gradients", "use --method occlusion")
    with torch.enable_grad():
        values = InputXGradient(scores).attribute(pixels.clone().requires_grad_(), target=target)
    sums = torch.zeros(int(index.max()) + 1, dtype=values.dtype, device=values.device)
    return sums.index_add_(0, index.flatten(), values.detach().sum((0, 1)).flatten())


def _occlusion(scores: nn.Module, pixels: Tensor, target: int, index: Tensor) -> Tensor:
    """Fall of the score if one tile is blackened (Zeiler, Fergus 2014, arXiv:1311.2901)."""
    from captum.attr import FeatureAblation

    with torch.no_grad():
        values = FeatureAblation(scores).attribute(
            pixels,
            baselines=0.0,
            target=target,
            feature_mask=index[None, None],
            perturbations_per_eval=_TOGETHER,
        )
    sums = torch.zeros(int(index.max()) + 1, dtype=values.dtype, device=values.device)
    return sums.index_copy_(0, index.flatten(), values[0, 0].flatten())  # a tile's pixels have one value


#: Maps by captum: method → tile values of the scores of pixels.
ATTRIBUTIONS: dict[str, Callable[[nn.Module, Tensor, int, Tensor], Tensor]] = {
    "gradient": _gradient,
    "occlusion": _occlusion,
}
