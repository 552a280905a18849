"""Plots of an evaluation: confusion matrix, robustness (of one model or several), routing.

Beside each picture, a ``.csv`` file of the same name has its data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from capszoo._utils.files import write_atomically
from capszoo.errors import CapszooError
from capszoo.explain.convergence import IterationChanges
from capszoo.explain.plotting import new_figure, save_with_numbers
from capszoo.explain.routing_stats import RoutingStats
from capszoo.metadata import first_complaint

from .calibration import CalibrationResult
from .corruptions import CorruptionResult
from .metrics import EvalResult, share_interval
from .report import Report

Percent = Annotated[float, Field(ge=0, le=100)]


class _Measured(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Sweep(_Measured):
    name: str
    unit: str
    amounts: list[float] = Field(min_length=1)
    accuracy: list[Percent]

    @model_validator(mode="after")
    def _of_one_length(self) -> _Sweep:
        if len(self.amounts) != len(self.accuracy):
            raise ValueError("amounts and accuracy differ in length")
        return self


class _Attack(_Measured):
    eps: float
    steps: int
    accuracy: Percent


class _Robustness(_Measured):
    sweeps: list[_Sweep]
    pgd: list[_Attack]


class _Drawn(_Measured):
    """What ``draw_robustness`` draws of an ``eval.json``."""

    dataset: str
    split: str
    n: int = Field(ge=1, le=10**12)
    top1: Percent | None = None
    exact_set: Percent | None = None
    robustness: _Robustness | None = None


def draw_report(report: Report, folder: Path, kind: str = "png") -> list[Path]:
    """Draw all available plots; return the pictures and their data files.

    Args:
        report: of an evaluation.
        folder: target folder.
        kind: png, pdf or svg.
    """
    title = f"{report.target.name} on {report.target.images.spec.name} ({report.target.part}), n = {report.result.n:,}"
    written = []
    if report.result.confusion is not None:
        written.append(draw_confusion(report.result, title, folder / f"confusion.{kind}"))
    if report.sweeps or report.attacks:
        written.append(draw_robustness({report.target.name: report.to_dict()}, folder / f"robustness.{kind}"))
    if report.routing:
        path = folder / f"routing.{kind}"
        written.append(_draw_routing(report.routing, report.iterations, title, path))
    if report.corruptions:
        path = folder / f"corruptions.{kind}"
        written.append(_draw_corruptions(report.corruptions, report.result.accuracy, title, path))
    if report.calibration:
        written.append(_draw_calibration(report.calibration, title, folder / f"calibration.{kind}"))
    return [file for path in written for file in (path, path.with_suffix(".csv"))]


def draw_confusion(result: EvalResult, title: str, path: Path, percent: bool = False) -> Path:
    """Draw the confusion matrix of a result that has one.

    Args:
        result: a result with a confusion matrix.
        title: above the matrix.
        path: of the file.
        percent: write shares of a row into the cells instead of numbers of images.
    """
    assert result.confusion is not None
    table = result.confusion
    rows = table.sum(1, keepdim=True)
    share = (table / rows.clamp(min=1)).numpy()
    labels = [figures.label for figures in result.per_class]
    few = len(labels) <= 25
    side = max(5.0, min(14.0, 0.55 * len(labels))) if few else 9.0
    figure = new_figure(side + 1.2, side + 0.4)
    axes = figure.subplots()
    # Colour by the square root: a few errors among hundreds of images would be invisible otherwise.
    picture = axes.imshow(share**0.5, cmap="Blues", vmin=0, vmax=1)
    if few:
        axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
        axes.set_yticks(range(len(labels)), labels)
        for row, column in table.nonzero().tolist():
            colour = "white" if share[row, column] > 0.4 else "black"
            text = f"{share[row, column]:.0%}" if percent else str(int(table[row, column]))
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    bar = figure.colorbar(picture, ax=axes, label="share of the true class's images (square-root scale)")
    shown = (0, 0.01, 0.1, 0.25, 0.5, 1)
    bar.set_ticks([tick**0.5 for tick in shown], labels=[f"{tick:.0%}" for tick in shown])
    axes.set(xlabel="predicted class", ylabel="true class")
    figure.suptitle(title, fontsize=10)
    numbers = [[label, *row] for label, row in zip(labels, table.tolist(), strict=True)]
    return save_with_numbers(figure, path, ["true class \\ predicted", *labels], numbers)


def draw_robustness(reports: Mapping[str, Mapping[str, Any]], path: str | Path) -> Path:
    """Accuracy under affine changes and PGD with 95% intervals, one line per model; dotted: unchanged images.

    Args:
        reports: name to the content of ``eval.json`` of an evaluation with ``--robustness``.
        path: of the file.

    Raises:
        CapszooError: a report without robustness, or a damaged one.
    """
    panels: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    drawn: dict[str, _Drawn] = {}
    for name, report in reports.items():
        try:
            drawn[name] = _Drawn.model_validate(report)
        except ValidationError as error:
            raise CapszooError(
                f"{name}: the report is damaged ({': '.join(first_complaint(error))})",
                "write it again with capszoo eval --robustness --out",
            ) from None
        measured = drawn[name].robustness or _Robustness(sweeps=[], pgd=[])
        own = {
            (sweep.name, sweep.unit): list(zip(sweep.amounts, sweep.accuracy, strict=True))
            for sweep in measured.sweeps
        }
        if measured.pgd:
            key = f"PGD, {measured.pgd[0].steps} steps", "radius, of 255"
            own[key] = [(255 * entry.eps, entry.accuracy) for entry in measured.pgd]
        if not own:
            raise CapszooError(f"{name} holds no robustness", "measure it with capszoo eval --robustness")
        for key, points in own.items():
            panels.setdefault(key, {})[name] = points
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4 * columns, 2.8 * rows + 0.8)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    numbers: list[list[Any]] = []
    colours = {name: f"C{i}" for i, name in enumerate(reports)}
    shown: dict[str, Any] = {}  # a model may be missing in the first panel
    for axes, ((what, unit), lines) in zip(grid, panels.items(), strict=False):
        for order, (name, points) in enumerate(lines.items()):
            n, colour = drawn[name].n, colours[name]
            bounds = [share_interval(accuracy, n) for _, accuracy in points]
            spread = [
                [max(0.0, a - low) for (_, a), (low, _) in zip(points, bounds, strict=True)],
                [max(0.0, high - a) for (_, a), (_, high) in zip(points, bounds, strict=True)],
            ]
            amounts, accuracy = zip(*points, strict=True)
            style = {"marker": ".", "color": colour, "capsize": 2, "linewidth": 1.2, "elinewidth": 0.8}
            axes.errorbar(amounts, accuracy, yerr=spread, label=f"{name}, n = {n:,}", **style)
            clean = drawn[name].top1 or drawn[name].exact_set
            if clean is not None:
                label = None if order else "unchanged images"
                axes.axhline(clean, color=colour, linewidth=0.8, linestyle=":", label=label)
            numbers += [[name, what, unit, x, y, *b, n] for (x, y), b in zip(points, bounds, strict=True)]
        axes.set(ylim=(-2, 102), xlabel=unit, ylabel="accuracy (%)")
        axes.set_title(what, fontsize=10)
        axes.grid(alpha=0.3)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.legend(
        list(shown.values()), list(shown), loc="outside lower center", ncols=2, fontsize=8, frameon=False
    )
    sets = ", ".join(dict.fromkeys(f"{one.dataset} ({one.split})" for one in drawn.values()))
    figure.suptitle(f"Robustness on {sets}, 95% intervals", fontsize=11)
    header = ["model", "change", "unit", "amount", "accuracy %", "low %", "high %", "n"]
    return save_with_numbers(figure, path, header, numbers)


def agreement_panel(axes: Any, share: Sequence[float], length: Sequence[float | None]) -> None:
    """Draw votes by cosine into axes: their share in per cent as grey bars, their mean length as a blue line."""
    count = len(share)
    cosine = [(2 * k + 1) / count - 1 for k in range(count)]
    axes.bar(cosine, share, width=1.9 / count, color="lightgrey")
    axes.set(
        xlabel="cosine of vote and parent", ylabel="share of the votes (%)", xlim=(-1, 1), ylim=(0, None)
    )
    lengths = axes.twinx()
    points = [(c, value) for c, value in zip(cosine, length, strict=True) if value is not None]
    lengths.plot(*zip(*points, strict=True), color="tab:blue", marker=".")
    lengths.set_ylabel("mean length of the votes", color="tab:blue")
    lengths.set_ylim(bottom=0)


def _draw_routing(
    stats: RoutingStats, iterations: tuple[IterationChanges, ...], title: str, path: Path
) -> Path:
    """Plot entropy and dead capsules by layer, votes by agreement, change by iteration; only what was measured."""
    with_logits = [changes for changes in iterations if changes.logits]
    panels = ["couplings", *["votes"] * bool(stats.curve), *["iterations"] * bool(with_logits)]
    layers = list(range(1, len(stats.layers) + 1))
    wide = max(2.6, 0.9 * len(layers) + 1.4)
    widths = {"couplings": wide, "votes": 4.6, "iterations": 4.2}
    figure = new_figure(sum(widths[panel] for panel in panels), 3.6)
    grid = figure.subplots(1, len(panels), squeeze=False, width_ratios=[widths[p] for p in panels])[0]
    for axes, panel in zip(grid, panels, strict=True):
        if panel == "couplings":
            _draw_layers(axes, stats, layers)
        elif panel == "votes" and stats.curve:
            agreement_panel(axes, stats.curve.share, stats.curve.length)
            parent = "the class's capsule" if stats.curve.classes else "the pooled capsule"
            axes.set_title(f"Agreement of votes with {parent}", fontsize=10)
        else:
            _draw_iterations(axes, iterations)
    figure.suptitle(title, fontsize=11)
    rows: list[list[Any]] = []
    for number, layer in enumerate(stats.layers, 1):
        rows.append(["entropy (1: even)", number, layer.entropy])
        rows.append(["share of dead capsules", number, layer.dead / layer.competing])
        if layer.negative is not None:
            rows.append(["share of negative credit", number, layer.negative])
    if stats.curve:
        for cosine, share, length in zip(
            stats.curve.cosine, stats.curve.share, stats.curve.length, strict=True
        ):
            rows += [["share of votes %", cosine, share], ["mean length of votes", cosine, length]]
    for number, changes in enumerate(iterations, 1):
        rows += [
            [f"change of logits, layer {number}, iteration", t, v] for t, v in enumerate(changes.logits, 1)
        ]
    return save_with_numbers(figure, path, ["what", "at", "value"], rows)


def _draw_corruptions(results: Sequence[CorruptionResult], unchanged: float, title: str, path: Path) -> Path:
    """Plot each corruption's mean accuracy as a bar, in its group's colour, and its severities as points."""
    figure = new_figure(7.0, 0.32 * len(results) + 1.6)
    axes = figure.subplots()
    groups = {
        group: f"C{k}" for k, group in enumerate(dict.fromkeys(corruption.group for corruption in results))
    }
    labelled: set[str] = set()
    for row, corruption in enumerate(results):
        label = None if corruption.group in labelled else corruption.group
        labelled.add(corruption.group)
        axes.barh(row, corruption.mean, color=groups[corruption.group], alpha=0.6, label=label)
        if len(corruption.accuracy) > 1:
            axes.plot(corruption.accuracy, [row] * len(corruption.accuracy), "k.", markersize=4)
    axes.axvline(unchanged, color="black", linewidth=0.8, linestyle=":", label="unchanged images")
    axes.set(xlim=(0, 102), xlabel="accuracy (%); points: severities")
    axes.set_yticks(range(len(results)), [corruption.name for corruption in results])
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(groups) + 1, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    rows = [
        [corruption.name, corruption.group, k, accuracy]
        for corruption in results
        for k, accuracy in enumerate(corruption.accuracy, 1)
    ]
    return save_with_numbers(figure, path, ["corruption", "group", "severity", "accuracy %"], rows)


def _draw_calibration(calibration: CalibrationResult, title: str, path: Path) -> Path:
    """Plot accuracy against confidence by bin, of the probabilities and of the scaled ones; labels: share of images."""
    panels = [(f"probabilities of the {calibration.kind}", calibration.raw)]
    if calibration.scaled is not None:
        panels.append((f"at temperature {calibration.temperature:.2f}", calibration.scaled))
    figure = new_figure(4.2 * len(panels), 4.4)
    numbers: list[list[Any]] = []
    for axes, (name, reliability) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        width = 100 / len(reliability.bins)
        n = sum(filled[0] for filled in reliability.bins if filled)
        axes.plot([0, 100], [0, 100], color="black", linewidth=0.8, linestyle=":", label="calibrated")
        for bin_index, filled in enumerate(reliability.bins):
            if filled is None:
                continue
            count, confidence, accuracy = filled
            axes.bar((bin_index + 0.5) * width, accuracy, 0.92 * width, color="tab:blue", alpha=0.6)
            axes.plot(confidence, accuracy, ".", color="tab:orange", zorder=3)
            share = f"{100 * count / n:.0f}%" if count >= 0.005 * n else "<1%"
            axes.annotate(share, ((bin_index + 0.5) * width, 1), ha="center", fontsize=6)
            numbers.append([name, bin_index * width, (bin_index + 1) * width, count, confidence, accuracy])
        axes.plot([], [], ".", color="tab:orange", label="mean confidence of a bin")
        axes.set(xlim=(0, 100), ylim=(0, 102), xlabel="confidence (%)", ylabel="accuracy (%)", aspect="equal")
        axes.set_title(f"{name}: ECE {reliability.ece:.2f}%", fontsize=10)
        axes.legend(fontsize=8, loc="upper left", frameon=False)
    figure.suptitle(title, fontsize=10)
    return save_with_numbers(
        figure, path, ["probabilities", "from %", "to %", "images", "confidence %", "accuracy %"], numbers
    )


def _draw_layers(axes: Any, stats: RoutingStats, layers: list[int]) -> None:
    for shift, label, values in (
        (-0.2, "entropy (1: even)", [layer.entropy for layer in stats.layers]),
        (0.2, "share of dead capsules", [layer.dead / layer.competing for layer in stats.layers]),
    ):
        heights = [value or 0.0 for value in values]
        bars = axes.bar([layer + shift for layer in layers], heights, width=0.36, label=label)
        texts = ["none" if value is None else f"{value:.2f}" for value in values]
        axes.bar_label(bars, texts, padding=1, fontsize=8)
    axes.set(
        ylim=(0, 1.35),
        yticks=[0, 0.25, 0.5, 0.75, 1],
        xlim=(0.4, len(layers) + 0.6),
        xlabel="routing layer",
        ylabel="entropy, share",
        xticks=layers,
    )
    axes.set_title("Couplings", fontsize=10)
    axes.legend(fontsize=8, loc="upper center", frameon=False)


def _draw_iterations(axes: Any, layers: tuple[IterationChanges, ...]) -> None:
    """Plot the logits' change by iteration, from zero; iterations beyond the network's number are hollow."""
    for number, layer in enumerate(layers, 1):
        if not layer.logits:  # credit
            continue
        points = list(enumerate(layer.logits, 1))
        (line,) = axes.plot(*zip(*points, strict=True), label=f"layer {number}" if len(layers) > 1 else None)
        for t, change in points:
            inside = line.get_color() if t <= layer.own else "white"
            axes.plot(t, change, marker="o", color=line.get_color(), markerfacecolor=inside)
    axes.set(xlabel="routing iteration", ylabel="mean change of the logits")
    axes.set_ylim(0, 1.12 * max(max(layer.logits, default=0) for layer in layers) or 1)
    axes.set_xticks(range(1, len(layers[0].couplings) + 1))
    axes.set_title("Change by iteration", fontsize=10)
    axes.plot([], [], "o", color="grey", label="iterations of the network")
    axes.plot([], [], "o", color="grey", markerfacecolor="white", label="further iterations")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def write(report: Report, folder: Path, kind: str = "png") -> list[Path]:
    """Write eval.json, the pictures (png, pdf or svg) and their data (csv) to a folder, which need not exist."""
    document = json.dumps(report.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(folder / "eval.json", document)
    return [folder / "eval.json", *draw_report(report, folder, kind)]
