"""Plots of training: curves of a run, several runs in one picture, routing by epoch; see also ``report_plots``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capszoo._utils.files import write_atomically
from capszoo.errors import CapszooError, UsageError
from capszoo.explain.plotting import new_figure, require_matplotlib, save_with_numbers

from .report_plots import agreement_panel

#: Keys of a record, in words.
NAMES = {
    "train_loss": "training loss",
    "train_top1": "training accuracy",
    "val_top1": "validation accuracy",
    "lr": "learning rate",
}

#: Panels of a run's curves and the keys of a record that they show.
CURVE_PANELS = {
    "loss": ("train_loss",),
    "accuracy (%)": ("train_top1", "val_top1"),
    "learning rate": ("lr",),
}

#: Panels that several runs share, and the keys of a record of which the first that a run has is drawn.
RUN_PANELS = {"training loss": ("train_loss",), "accuracy (%)": ("val_top1", "train_top1")}

#: Epochs in the figure of routing, as many as in Li et al. 2018, Fig. 2.
SHOWN = 4


def draw_curves(path: Path, title: str, records: Sequence[Mapping[str, Any]], **metadata: str) -> None:
    """Plot loss, top-1 and learning rate by epoch; the file is written completely or not at all.

    Args:
        path: .png or .svg.
        title: above the curves.
        records: the epochs' records.
        metadata: stored in the file, under the keys of its format (``Description``).
    """
    require_matplotlib("curves")
    import matplotlib

    kind = path.suffix.lstrip(".")
    # Text stays text and nothing depends on the date, so that the same curves give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure = new_figure(12, 3.6)
        for axes, (label, keys) in zip(
            figure.subplots(1, len(CURVE_PANELS)), CURVE_PANELS.items(), strict=True
        ):
            for key in keys:
                _draw_line(axes, records, "epoch", key, NAMES[key])
            axes.set(xlabel="epoch", ylabel=label)
            if len(axes.lines) > 1:
                axes.legend()
        figure.suptitle(f"Training of {title}", parse_math=False)  # a folder $A_$B is no formula
        picture = io.BytesIO()
        about: dict[str, Any] = {**metadata, **({"Date": None} if kind == "svg" else {})}
        figure.savefig(picture, format=kind, dpi=100, metadata=about)
    write_atomically(path, picture.getvalue())


def _draw_line(axes: Any, records: Sequence[Mapping[str, Any]], x: str, key: str, label: str) -> None:
    points = [(record[x], record[key]) for record in records if record.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else "", label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def draw_runs(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path, x: str = "epoch", log: bool = False
) -> Path:
    """Draw training loss and accuracy (on validation images, if there are any), one line per run.

    Args:
        runs: name to records, see ``find_runs``.
        path: of the file.
        x: "epoch" or "images" (those seen in training; runs may have different numbers per epoch).
        log: draw the loss on a logarithmic axis.

    Raises:
        UsageError: "images" if the records do not contain them.
    """
    for name, records in runs.items():
        if any(x not in record for record in records):
            raise UsageError(f"{name} does not say how many images it had seen", "leave --x images out")
    figure = new_figure(9, 3.4)
    for axes, (label, keys) in zip(figure.subplots(1, len(RUN_PANELS)), RUN_PANELS.items(), strict=True):
        for name, records in runs.items():
            key = next((key for key in keys if any(r.get(key) is not None for r in records)), keys[0])
            what = f"{name}, {'validation' if key.startswith('val') else 'training'}"
            _draw_line(axes, records, x, key, what)
        axes.set(xlabel="training images seen" if x == "images" else x, ylabel=label)
        axes.legend(fontsize=8)
        if log and "loss" in label:
            axes.set_yscale("log")
    figure.suptitle(" and ".join(runs) if len(runs) < 3 else f"{len(runs)} runs", fontsize=10)
    columns = ["epoch", *(["images"] if x == "images" else []), *NAMES]
    rows = [[name, *(r.get(key) for key in columns)] for name, records in runs.items() for r in records]
    return save_with_numbers(figure, path, ["run", *columns], rows)


def shown_epochs(epochs: Sequence[int]) -> list[int]:
    """At most ``SHOWN`` of the epochs: the first, the last, and others at equal ratios between (paper: 1 to 200)."""
    first, last = epochs[0], epochs[-1]
    wanted = [first * (last / first) ** (k / (SHOWN - 1)) for k in range(SHOWN)]
    return sorted({min(epochs, key=lambda epoch: abs(epoch - value)) for value in wanted})


def draw_routing_probe(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path) -> Path:
    """Draw the curves of Li et al. 2018 ("Neural Network Encapsulation"), Fig. 2, at some epochs, one row per run.

    Votes by their cosine with the parent capsule: their share (grey) and their mean length (blue).

    Args:
        runs: name to the epochs' records of ``metrics.jsonl``.
        path: of the file.

    Raises:
        CapszooError: a run without such records.
    """
    rows = {}
    for name, records in runs.items():
        epochs = {
            record["epoch"]: record["routing"] for record in records if "share" in record.get("routing", {})
        }
        if not epochs:
            raise CapszooError(
                f"{name} has no routing statistics",
                "train a network that has votes, with --set routing_images=200",
            )
        rows[name] = {epoch: epochs[epoch] for epoch in shown_epochs(sorted(epochs))}
    columns = max(map(len, rows.values()))
    figure = new_figure(3.4 * columns, 2.7 * len(rows))
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, chosen) in zip(grid, rows.items(), strict=True):
        for axes, (epoch, values) in zip(line, chosen.items(), strict=False):
            agreement_panel(axes, values["share"], values["length"])
            axes.set_title(f"{name}, epoch {epoch}", fontsize=10)
        for axes in line[len(chosen) :]:
            axes.set_axis_off()
    figure.suptitle("Votes by their agreement with the parent capsule", fontsize=11)
    numbers = [
        [name, epoch, (2 * k + 1) / len(values["share"]) - 1, share, length]
        for name, chosen in rows.items()
        for epoch, values in chosen.items()
        for k, (share, length) in enumerate(zip(values["share"], values["length"], strict=True))
    ]
    return save_with_numbers(
        figure, path, ["run", "epoch", "cosine", "share of votes %", "mean length"], numbers
    )
