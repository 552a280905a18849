"""Record how routing changes in training: statistics of the same few images after each epoch.

The statistics are those in Fig. 2 of Li et al. 2018 ("Neural Network Encapsulation"): votes by their cosine with the
parent capsule, their share and their mean length; ``evaluation.plots.draw_routing_probe`` draws them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from capszoo.data import Batches, ImageSet, StreamedSet
from capszoo.errors import CapszooError
from capszoo.explain.routing_stats import routing_stats

from ..config import Recipe, RecipeError


class RoutingProbe:
    """Measure a net's routing on the first ``recipe.routing_images`` validation images.

    Args:
        recipe: determines the number of images.
        net: the net to be trained; run once, so that a net without routing is detected before the first update.
        validation: validation images, on the net's device.

    Raises:
        RecipeError: no validation images, or no capsules.
    """

    def __init__(self, recipe: Recipe, net: nn.Module, validation: ImageSet | StreamedSet) -> None:
        if not len(validation):
            raise RecipeError(
                f"{recipe.name}: routing_images needs validation images: set data.val_size, or leave it out"
            )
        some = validation.fixed().subset(torch.arange(min(recipe.routing_images, len(validation))))
        self.batches = Batches(some, 50)
        try:
            self.measure(net)
        except CapszooError as error:
            raise RecipeError(f"{recipe.name}: routing_images: {error}") from error

    def measure(self, net: nn.Module) -> dict[str, Any]:
        """Statistics for an epoch's record: each routing layer's entropy and dead capsules, and the curve."""
        batches = ((batch.images, batch.labels) for batch in self.batches.epoch())
        stats = routing_stats(net, batches)
        record: dict[str, Any] = {
            "n": stats.n,
            "entropy": [_short(layer.entropy) for layer in stats.layers],
            "dead": [layer.dead for layer in stats.layers],
        }
        negative = [_short(layer.negative) for layer in stats.layers]
        if any(share is not None for share in negative):  # of credit
            record["negative"] = negative
        if stats.curve:
            record["share"] = [_short(share) for share in stats.curve.share]
            record["length"] = [_short(length) for length in stats.curve.length]
        return record


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
