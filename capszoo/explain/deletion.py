"""Deletion test of heat maps: does the score fall most where the map is hottest?

The tiles of an image (:func:`capszoo.explain.attributions.tile_index`) are blackened one after the other, the hottest
first, the coldest first and in random order. A map that shows what the prediction depends on makes the probability of
the predicted class fall sooner than random order does, and its reverse later (Petsiuk et al. 2018, arXiv:1806.07421).
Tiles that are black already change nothing and are left out.

>>> from capszoo.explain.deletion import deletion
>>> from capszoo.inference import load_model
>>> found = deletion(load_model("resnet20_routingcaps.mnist"), ["digit_3.png", "digit_7.png"], "occlusion")
>>> found.n, found.correlation > 0.9
(2, True)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import CapszooError
from ..models._inspect import evaluating, first_parameter
from ..preprocess import ImageLike, ImageTransform, model_transform
from ..scores import probabilities, score_kind
from .attributions import tile_index
from .heat_map import Explanation, explain, model_input

__all__ = ["Deletion", "deletion", "deletion_by_method"]

#: Largest value of a tile that counts as black: half a step of 8 bits, as normalisation rounds.
BLACK = 0.5 / 255


@dataclass(frozen=True)
class Deletion:
    """Result of :func:`deletion`; each fall is a mean over the images and the steps of an order.

    Attributes:
        n: images with at least two tiles to blacken.
        correlation: mean of Spearman's rank correlation between the map and the fall of the score if one tile alone is
            blackened; 0 where either is constant.
        hottest, coldest, random: fall of the predicted class's probability, in 0..1.
        gain: differences hottest - random and random - coldest.
        margin: half of their 95% intervals (Student's t), paired by image.
    """

    n: int
    correlation: float
    hottest: float
    coldest: float
    random: float
    gain: tuple[float, float]
    margin: tuple[float, float]

    @property
    def passed(self) -> bool:
        """Whether both orders differ from random order in the right sense, beyond the 95% interval."""
        return all(gain > margin for gain, margin in zip(self.gain, self.margin, strict=True))


def deletion(
    model: nn.Module, images: Iterable[ImageLike], method: str = "couplings", seed: int = 0
) -> Deletion:
    """Blacken the tiles of images in the order of a heat map of the predicted class.

    Args:
        model: a network of the zoo; run in eval mode.
        images: as for :func:`capszoo.explain.explain`.
        method: of the map, one of ``capszoo.explain.heat_map.METHODS``.
        seed: of the random orders.

    Raises:
        CapszooError: the model has no such map, or fewer than two images have tiles to blacken.
    """
    return deletion_by_method(model, images, [method], seed)[method]


def deletion_by_method(
    model: nn.Module, images: Iterable[ImageLike], methods: Sequence[str], seed: int = 0
) -> dict[str, Deletion]:
    """:func:`deletion` for several methods, which share the random orders and the falls of single tiles.

    Raises:
        CapszooError: as :func:`deletion`, if one of the methods has no map.
    """
    transform = model_transform(model)
    generator = torch.Generator().manual_seed(seed)
    index, grid = tile_index(*transform.size)
    rows: dict[str, list[tuple[float, ...]]] = {method: [] for method in methods}
    for image in images:
        pixels = model_input(transform, image)
        maps = {method: explain(model, pixels, method=method) for method in methods}
        explanation = maps[methods[0]]
        brightest = explanation.image.amax(0).flatten()
        largest = torch.zeros(int(index.max()) + 1).scatter_reduce(0, index.flatten(), brightest, "amax")
        visible = (largest > BLACK).nonzero()[:, 0]
        if len(visible) < 2:
            continue
        # at the tiles' centres
        heats = [heat_map.heat_at(*grid).flatten()[visible] for heat_map in maps.values()]
        orders = [torch.randperm(len(visible), generator=generator)]
        for heat in heats:
            orders += [heat.argsort(descending=True), heat.argsort()]
        singles, (random, *falls) = _falls(
            model, transform, explanation, [visible[order] for order in orders], visible, index
        )
        for method, heat, hottest, coldest in zip(methods, heats, falls[::2], falls[1::2], strict=True):
            rows[method].append((_rank_correlation(heat, singles), hottest, coldest, random))
    if any(len(entries) < 2 for entries in rows.values()):
        raise CapszooError("fewer than two images have anything to blacken", "give more images")
    return {method: _summary(torch.tensor(entries, dtype=torch.float64)) for method, entries in rows.items()}


def _falls(
    model: nn.Module,
    transform: ImageTransform,
    explanation: Explanation,
    orders: Sequence[Tensor],
    visible: Tensor,
    index: Tensor,
) -> tuple[Tensor, list[float]]:
    """Fall of one image's score, up to a constant, by each tile alone ``[tiles]``; of its probability by each order."""
    steps = len(visible)
    blackened = [visible[:, None, None] == index]  # [steps, h, w]
    for order in orders:
        rank = torch.full((int(index.max()) + 1,), steps).index_put((order,), torch.arange(steps))
        # all but the last step, after which the image is black in every order
        blackened.append(rank[index] < torch.arange(1, steps)[:, None, None])
    pixels = explanation.image * ~torch.cat(blackened)[:, None]
    like = first_parameter(model)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (transform.mean, transform.std))
    with evaluating(model), torch.inference_mode():
        scores = model(((pixels - mean) / std).to(like.device, like.dtype)).float().cpu()
    share = probabilities(scores[steps:], score_kind(model))[:, explanation.predicted]
    share = share.view(len(orders), steps - 1).mean(1)
    falls = float(explanation.probabilities[explanation.predicted]) - share
    return -scores[:steps, explanation.predicted], falls.tolist()


def _summary(rows: Tensor) -> Deletion:
    from scipy.stats import t

    n = len(rows)
    correlation, hottest, coldest, random = rows.mean(0).tolist()
    gains = torch.stack([rows[:, 1] - rows[:, 3], rows[:, 3] - rows[:, 2]])
    margins = float(t.ppf(0.975, n - 1)) * gains.std(1) / n**0.5
    gain, margin = ((float(a), float(b)) for a, b in (gains.mean(1), margins))
    return Deletion(n, correlation, hottest, coldest, random, gain, margin)


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's coefficient, equal values having their mean rank; 0 if all are equal."""
    from scipy.stats import rankdata

    ranks = torch.from_numpy(rankdata(torch.stack([a, b]), axis=1))
    return float(torch.corrcoef(ranks)[0, 1].nan_to_num(0))
