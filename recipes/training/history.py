"""How a run went, epoch by epoch: the history that travels with its weights, and its picture."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from capszoo.explain.plotting import new_figure

from .checkpoints import write_atomically

__all__ = ["draw_curves", "history_of", "read_records", "records_of"]

#: What of an epoch's record is kept with the weights: no times, which say more about the machine than about the run.
KEPT = ("epoch", "lr", "train_loss", "train_top1", "val_loss", "val_top1")

#: Panels of the picture and the keys that they show.
PANELS = {
    "loss": ("train_loss", "val_loss"),
    "top-1, %": ("train_top1", "val_top1"),
    "learning rate": ("lr",),
}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The epochs' records of a `metrics.jsonl`; a line cut short by a kill is left out. Empty without the file."""
    found: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def history_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The records as a few columns of numbers: small enough to travel in the metadata of the weights."""
    columns = {key: [record.get(key) for record in records] for key in KEPT}
    return {key: column for key, column in columns.items() if any(value is not None for value in column)}


def records_of(history: Mapping[str, Sequence[float | None]]) -> list[dict[str, Any]]:
    """What `history_of` took apart."""
    return [dict(zip(history, row, strict=True)) for row in zip(*history.values(), strict=True)]


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
        for axes, (label, keys) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
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
