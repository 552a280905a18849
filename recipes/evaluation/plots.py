"""Every figure of runs and evaluations: curves of a run, several runs in one figure, routing by epoch, reports."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capszoo.errors import CapszooError, UsageError
from capszoo.explain.convergence import IterationChanges
from capszoo.explain.plotting import new_figure, save
from capszoo.explain.routing_stats import RoutingStats

from ..training.checkpoints import write_atomically
from .metrics import EvalResult

if TYPE_CHECKING:
    from .report import Report

__all__ = ["draw_confusion", "draw_curves", "draw_dynamics", "draw_report", "draw_runs"]

CURVE_PANELS = {
    "loss": ("train_loss", "val_loss"),
    "top-1, %": ("train_top1", "val_top1"),
    "learning rate": ("lr",),
}
"""Panels of a run's curves and the keys of a record that they show."""

RUN_PANELS = {"training loss": ("train_loss",), "top-1, %": ("val_top1", "train_top1")}
"""Panels that several runs share, and the keys of a record of which the first that a run has is drawn."""

SHOWN = 4
"""Epochs in the figure of routing, as many as in Li et al. 2018, Fig. 2."""


def draw_curves(path: Path, title: str, records: Sequence[Mapping[str, Any]], **metadata: str) -> None:
    """Loss, top-1 and learning rate by epoch, as a picture that is there whole or not at all.

    Arguments:
        path: .png or .svg.
        metadata: kept inside the file, under the names that the format has for such (`Description`).
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("curves need matplotlib: pip install 'capszoo[train]'") from error

    kind = path.suffix.lstrip(".")
    # Text stays text and nothing depends on the day, so that the same curves give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure = new_figure(12, 3.6)
        for axes, (label, keys) in zip(
            figure.subplots(1, len(CURVE_PANELS)), CURVE_PANELS.items(), strict=True
        ):
            drawn = 0
            for key in keys:
                points = [(r["epoch"], r[key]) for r in records if r.get(key) is not None]
                if points:
                    marker = "." if len(points) < 30 else ""
                    axes.plot(*zip(*points, strict=True), marker=marker, label=key)
                    drawn += 1
            axes.set(xlabel="epoch", ylabel=label)
            axes.grid(alpha=0.3)
            if drawn > 1:
                axes.legend()
        figure.suptitle(title)
        picture = io.BytesIO()
        about: dict[str, Any] = {**metadata, **({"Date": None} if kind == "svg" else {})}
        figure.savefig(picture, format=kind, dpi=100, metadata=about)
    write_atomically(path, picture.getvalue())


def draw_runs(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path, x: str = "epoch", log: bool = False
) -> Path:
    """Draw training loss and accuracy (on validation images, where there are any), a line for each run.

    Arguments:
        runs: name to records, see `find_runs`.
        x: "epoch" or "images" (those seen in training, of which two runs may have other numbers an epoch).
        log: the loss on a logarithmic axis.

    Raises:
        UsageError: "images" where the records do not say.
    """
    for name, records in runs.items():
        if any(x not in record for record in records):
            raise UsageError(f"{name} does not say how many images it had seen", "leave --x images out")
    figure = new_figure(9, 3.4)
    for axes, (label, keys) in zip(figure.subplots(1, len(RUN_PANELS)), RUN_PANELS.items(), strict=True):
        for name, records in runs.items():
            key = next((key for key in keys if any(r.get(key) is not None for r in records)), keys[0])
            points = [(r[x], r[key]) for r in records if r.get(key) is not None]
            if points:
                what = f"{name}, {'validation' if key.startswith('val') else 'training'}"
                axes.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else "", label=what)
        axes.set(xlabel="training images seen" if x == "images" else x, ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        if log and "loss" in label:
            axes.set_yscale("log")
    return save(figure, path)


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
    """Draw the curves of Li et al. 2018 ("Neural Network Encapsulation"), Fig. 2, at some epochs, a row for each run.

    Votes by their cosine with the parent capsule: the share of them (grey) and their mean length (blue).

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


def draw_report(report: Report, folder: Path) -> list[Path]:
    """Draw everything there is to draw; returns the files."""
    title = f"{report.target.name} on {report.target.images.spec.name}, n = {report.result.n:,}"
    written = []
    if report.result.confusion is not None:
        written.append(draw_confusion(report.result, title, folder / "confusion.png"))
    if report.sweeps or report.attacks:
        written.append(_draw_robustness(report, title, folder / "robustness.png"))
    if report.routing:
        written.append(_draw_routing(report.routing, report.iterations, title, folder / "routing.png"))
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


def _draw_routing(
    stats: RoutingStats, iterations: tuple[IterationChanges, ...], title: str, path: Path
) -> Path:
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
    if iterations:
        _draw_iterations(third, iterations)
    else:
        third.set_axis_off()
    figure.suptitle(title, fontsize=11)
    return save(figure, path)


def _draw_iterations(axes: Any, layers: tuple[IterationChanges, ...]) -> None:
    """The logits' change by iteration, on a logarithmic axis; iterations that the network does not make are hollow."""
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
    axes.set(xlabel="iteration of routing", ylabel="mean change of the logits")
    axes.set_xticks(range(1, len(layers[0].logits) + 1))
    axes.grid(alpha=0.3)
    if len(layers) > 1:
        axes.legend(fontsize=8)
