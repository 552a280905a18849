"""An evaluation whole: what was asked for is measured, kept as one document, and drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from capszoo.errors import CapszooError
from capszoo.explain.convergence import RoundChanges, round_changes
from capszoo.explain.plotting import new_figure, save
from capszoo.explain.routing_stats import DEAD, RoutingStats, routing_stats

from ..evaluate import EvalResult, assess, stated_top1
from ..training.checkpoints import write_atomically
from ..training.routing_probe import agreement_panel
from .robustness import (
    STEPS,
    AffnistResult,
    AttackResult,
    SweepResult,
    affnist,
    attack,
    default_eps,
    sweeps,
)
from .target import Subject

__all__ = ["Report", "draw", "draw_confusion", "measure", "write"]

ROUND_IMAGES = 100
"""Images on which each round of routing is looked at: the first ones, for it takes a pass for every round."""

Advance = Callable[[int], None]
Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""From what is done and how many images it takes, a bar and the function that advances it."""


@dataclass(frozen=True)
class Report:
    """What was measured; None or empty where it was not asked for.

    Attributes:
        seed: of the images drawn by a limit, and of PGD's start.
        limit: images asked for, None for all.
        stated: top-1 of the weights' metadata for these images, where it states one.
        rounds: of the routing layers, on the first `ROUND_IMAGES`.
    """

    subject: Subject
    result: EvalResult
    seed: int
    limit: int | None
    stated: float | None
    sweeps: tuple[SweepResult, ...] = ()
    attacks: tuple[AttackResult, ...] = ()
    affnist: AffnistResult | None = None
    routing: RoutingStats | None = None
    rounds: tuple[RoundChanges, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON: per cent everywhere but in the confusion matrix, whose rows are labels and columns answers."""
        subject, result = self.subject, self.result
        found: dict[str, Any] = {
            "model": subject.name,
            "dataset": subject.images.spec.name,
            "split": subject.images.split,
            "n": result.n,
            "of": subject.whole,
            "seed": self.seed,
            "crops": str(subject.crops) if subject.crops else "single",
            "threshold": subject.threshold if subject.images.spec.labels_per_image is None else None,
            "errors": result.errors,
            "top1": _rounded(result.top1),
            "top5": _rounded(result.top5),
            "exact_set": _rounded(result.exact_set),
            "stated": self.stated,
            "per_class": [_rounded(asdict(figures)) for figures in result.per_class],
            "confusion": None if result.confusion is None else result.confusion.tolist(),
        }
        if self.sweeps or self.attacks:
            found["robustness"] = {
                "sweeps": [_rounded(asdict(sweep)) for sweep in self.sweeps],
                "pgd": [asdict(one) | {"accuracy": _rounded(one.accuracy)} for one in self.attacks],
                "affnist": _rounded(asdict(self.affnist)) if self.affnist else None,
            }
        if self.routing:
            found["routing"] = asdict(self.routing) | {"dead_below": DEAD}
            found["routing"]["rounds"] = [asdict(layer) for layer in self.rounds]
            found["routing"]["rounds_n"] = min(ROUND_IMAGES, result.n)
        return found


def _rounded(value: Any) -> Any:
    """Per cents with four decimals."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


def measure(
    subject: Subject,
    *,
    batch_size: int = 500,
    robustness: bool = False,
    routing: bool = False,
    radii: tuple[float, ...] | None = None,
    steps: int = STEPS,
    data: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Measure what is asked for.

    Arguments:
        robustness: sweeps, affNIST's protocol and PGD at `radii` (None: `default_eps`) in `steps` steps.
        routing: routing statistics.
        data: folder of MNIST, for affNIST's protocol; None asks `CAPSZOO_DATA`.
        limit: use so many of affNIST's images (the subject's own are limited already).
        seed: of PGD's start and of that choice.
        progress: shows how far it is.
    """

    def bar(what: str) -> AbstractContextManager[Advance]:
        return progress(what, subject.n) if progress else nullcontext(lambda count: None)

    with bar("evaluating") as advance:
        result = assess(subject, batch_size, advance)
    found: dict[str, Any] = {}
    if robustness:
        with bar("sweeps") as advance:
            found["sweeps"] = sweeps(subject, batch_size=batch_size, progress=advance)
        if not subject.images.spec.multi_label:
            tried = radii or default_eps(subject.images.spec.input_size[0])
            with bar("PGD") as advance:
                found["attacks"] = attack(subject, tried, steps, seed, min(batch_size, 250), advance)
        found["affnist"] = affnist(subject, data, limit, seed, batch_size)
    if routing:
        with bar("routing") as advance:
            batches = ((b.images, b.labels) for b in subject.batches(min(batch_size, 50), advance))
            if subject.crops:
                raise CapszooError("routing statistics are of one view of each image", "leave --crops out")
            found["routing"] = routing_stats(subject.net, batches)
            few = subject.on(subject.images.fixed().subset(torch.arange(min(ROUND_IMAGES, subject.n))))
            found["rounds"] = round_changes(subject.net, (b.images for b in few.batches(min(batch_size, 50))))
    return Report(subject, result, seed, limit, stated_top1(subject), **found)


def write(report: Report, folder: Path) -> list[Path]:
    """The document and the figures, as files of a folder (made where it is not there)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        document = json.dumps(report.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_atomically(folder / "eval.json", document)
    except OSError as error:
        raise CapszooError(
            f"{folder}: cannot be written ({error.strerror})", "choose another folder"
        ) from None
    return [folder / "eval.json", *draw(report, folder)]


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw everything there is to draw; returns the files."""
    title = f"{report.subject.name} on {report.subject.images.spec.name}, n = {report.result.n:,}"
    written = []
    if report.result.confusion is not None:
        written.append(draw_confusion(report.result, title, folder / "confusion.png"))
    if report.sweeps or report.attacks:
        written.append(_draw_robustness(report, title, folder / "robustness.png"))
    if report.routing:
        written.append(_draw_routing(report.routing, report.rounds, title, folder / "routing.png"))
    return written


def draw_confusion(result: EvalResult, title: str, path: Path) -> Path:
    """Draw the confusion matrix of a result that has one; colours are shares of a row's images."""
    assert result.confusion is not None
    table = result.confusion
    rows = table.sum(1, keepdim=True)
    share = (table / rows.clamp(min=1)).numpy()
    labels = [figures.label for figures in result.per_class]
    few = len(labels) <= 25
    side = max(4.5, min(14.0, 0.55 * len(labels))) if few else 9.0
    figure = new_figure(side + 0.8, side)
    axes = figure.subplots()
    # By the square root, or a few errors among hundreds of images could not be seen.
    picture = axes.imshow(share**0.5, cmap="Blues", vmin=0, vmax=1)
    if few:
        axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
        axes.set_yticks(range(len(labels)), labels)
        for row, column in table.nonzero().tolist():
            colour = "white" if share[row, column] > 0.4 else "black"
            count = int(table[row, column])
            axes.text(column, row, str(count), ha="center", va="center", fontsize=8, color=colour)
    bar = figure.colorbar(picture, ax=axes, label="share of the label's images")
    shown = (0, 0.01, 0.1, 0.25, 0.5, 1)
    bar.set_ticks([tick**0.5 for tick in shown], labels=[f"{tick:.0%}" for tick in shown])
    axes.set(xlabel="answer", ylabel="label")
    axes.set_title(title, fontsize=10)
    return save(figure, path)


def _draw_robustness(report: Report, title: str, path: Path) -> Path:
    panels = [(s.name, s.unit, s.amounts, s.accuracy) for s in report.sweeps]
    if report.attacks:
        eps = tuple(one.eps for one in report.attacks)
        steps = report.attacks[0].steps
        panels.append((f"PGD, {steps} steps", "eps", eps, tuple(one.accuracy for one in report.attacks)))
    columns = 3
    rows = -(-len(panels) // columns)
    figure = new_figure(4 * columns, 2.8 * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, unit, amounts, accuracy) in zip(grid, panels, strict=False):
        axes.plot(amounts, accuracy, marker=".")
        axes.axhline(report.result.accuracy, color="grey", linewidth=0.8, linestyle=":")
        axes.set(ylim=(-2, 102), xlabel=unit, ylabel="recognised, %")
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=11)
    return save(figure, path)


def _draw_routing(stats: RoutingStats, rounds: tuple[RoundChanges, ...], title: str, path: Path) -> Path:
    figure = new_figure(13, 3.4)
    left, right, third = figure.subplots(1, 3)
    layers = range(1, len(stats.layers) + 1)
    for shift, label, values in (
        (-0.2, "entropy, 1 = even", [layer.entropy or 0.0 for layer in stats.layers]),
        (0.2, "share of dead capsules", [layer.dead / layer.competing for layer in stats.layers]),
    ):
        left.bar([layer + shift for layer in layers], values, width=0.4, label=label)
    left.set(ylim=(0, 1.05), xlabel="routing layer", xticks=list(layers))
    left.legend(fontsize=8)
    if stats.curve:
        agreement_panel(right, stats.curve.share, stats.curve.length)
    else:
        right.set_axis_off()
    if rounds:
        _draw_rounds(third, rounds)
    else:
        third.set_axis_off()
    figure.suptitle(title, fontsize=11)
    return save(figure, path)


def _draw_rounds(axes: Any, layers: tuple[RoundChanges, ...]) -> None:
    """The logits' change by round, on a logarithmic axis; rounds that the network does not make are hollow."""
    for number, layer in enumerate(layers, 1):
        points = [(t, change) for t, change in enumerate(layer.logits, 1) if change > 0]
        if not points:
            continue
        (line,) = axes.plot(*zip(*points, strict=True), label=f"layer {number}")
        for t, change in points:
            inside = line.get_color() if t <= layer.own else "white"
            axes.plot(t, change, marker="o", color=line.get_color(), markerfacecolor=inside)
    axes.set_yscale("log", subs=(2, 5))
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis("{x:g}")
    axes.set(xlabel="round of routing", ylabel="mean change of the logits")
    axes.set_xticks(range(1, len(layers[0].logits) + 1))
    axes.grid(alpha=0.3)
    if len(layers) > 1:
        axes.legend(fontsize=8)
