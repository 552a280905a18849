"""How routing changes as a network learns: statistics of the same few images after each epoch, and their picture.

The picture is that of Li et al. 2018 ("Neural Network Encapsulation"), Fig. 2: votes by their cosine with the parent
capsule, the share of them (grey) and their mean length (blue), at some epochs from the first to the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from capszoo.data import Batches, ImageSet, StreamedSet
from capszoo.errors import CapszooError
from capszoo.explain.plotting import new_figure, save
from capszoo.explain.routing_stats import routing_stats

from ..config import Recipe, RecipeError

__all__ = ["RoutingProbe", "agreement_panel", "draw_dynamics"]

SHOWN = 4
"""Epochs in the picture, as many as in Fig. 2."""


class RoutingProbe:
    """Measures a net's routing on the first `recipe.routing_images` validation images.

    Arguments:
        net: to be trained; tried once, so that a net without routing is found before the first update.
        validation: on the net's device.

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
        """What goes into an epoch's record: of each routing layer its entropy and dead capsules, and the curve."""
        batches = ((batch.images, batch.labels) for batch in self.batches.epoch())
        found = routing_stats(net, batches)
        record: dict[str, Any] = {
            "n": found.n,
            "entropy": [_short(layer.entropy) for layer in found.layers],
            "dead": [layer.dead for layer in found.layers],
        }
        if found.curve:
            record["share"] = [_short(share) for share in found.curve.share]
            record["length"] = [_short(length) for length in found.curve.length]
        return record


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def agreement_panel(axes: Any, share: Sequence[float], length: Sequence[float | None]) -> None:
    """Draw votes by cosine into axes: their share in per cent as grey bars, their mean length as a blue line."""
    count = len(share)
    cosine = [(2 * k + 1) / count - 1 for k in range(count)]
    axes.bar(cosine, share, width=1.9 / count, color="lightgrey")
    axes.set(xlabel="cosine of vote and parent", ylabel="share of the votes, %")
    lengths = axes.twinx()
    points = [(c, value) for c, value in zip(cosine, length, strict=True) if value is not None]
    lengths.plot(*zip(*points, strict=True), color="tab:blue", marker=".")
    lengths.set_ylabel("mean length of the votes", color="tab:blue")
    lengths.set_ylim(bottom=0)


def shown_epochs(epochs: Sequence[int]) -> list[int]:
    """At most `SHOWN` of the epochs, the first and the last, others at equal ratios between them (paper: 1 to 200)."""
    first, last = epochs[0], epochs[-1]
    wanted = [first * (last / first) ** (k / (SHOWN - 1)) for k in range(SHOWN)]
    return sorted({min(epochs, key=lambda epoch: abs(epoch - value)) for value in wanted})


def draw_dynamics(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path) -> Path:
    """Draw the curves of Fig. 2 at some epochs, a row for each run.

    Arguments:
        runs: name to the epochs' records of `metrics.jsonl`.

    Raises:
        CapszooError: a run without such records.
    """
    rows = {}
    for name, records in runs.items():
        found = {
            record["epoch"]: record["routing"] for record in records if "share" in record.get("routing", {})
        }
        if not found:
            raise CapszooError(
                f"{name} kept no agreement of votes",
                "train it with --set routing_images=200, a net with votes",
            )
        rows[name] = {epoch: found[epoch] for epoch in shown_epochs(sorted(found))}
    columns = max(map(len, rows.values()))
    figure = new_figure(3.4 * columns, 2.7 * len(rows))
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, chosen) in zip(grid, rows.items(), strict=True):
        for axes, (epoch, values) in zip(line, chosen.items(), strict=False):
            agreement_panel(axes, values["share"], values["length"])
            axes.set_title(f"{name}, epoch {epoch}", fontsize=10)
        for axes in line[len(chosen) :]:
            axes.set_axis_off()
    return save(figure, path)
