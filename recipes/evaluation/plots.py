"""Several runs in one figure: with one and with three iterations, with and without feedback, by epochs or by images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from capszoo.errors import CapszooError, UsageError
from capszoo.explain.plotting import new_figure, save
from capszoo.models._pretrained import bundled_tags

from ..training.history import read_records, records_of

__all__ = ["draw_runs", "find_runs"]

PANELS = {"training loss": ("train_loss",), "top-1, %": ("val_top1", "train_top1")}
"""Panels, and the keys of a record of which the first that a run has is drawn."""


def find_runs(names: Sequence[str | Path]) -> dict[str, list[dict[str, Any]]]:
    """The epochs' records of runs: folders (unfinished ones, too), or checkpoints of the zoo with a history.

    Records of a folder get `images`, the training images seen so far.

    Returns records by the folder's last name, or the whole path where two are alike.

    Raises:
        CapszooError: nothing of the name, or no epoch has ended yet.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    last = [Path(name).resolve().name if Path(name).is_dir() else str(name) for name in names]
    for name, short in zip(map(str, names), last, strict=True):
        records = _records(name)
        if not records:
            raise CapszooError(f"{name}: no epoch has ended yet", "wait for the first")
        found[short if last.count(short) == 1 else name] = records
    return found


def _records(name: str) -> list[dict[str, Any]]:
    folder = Path(name)
    if name in bundled_tags():
        return records_of(bundled_tags()[name].raw.get("history", {}))
    if not (folder / "recipe.yaml").is_file():
        raise CapszooError(
            f"{name}: neither the folder of a run nor a checkpoint of the zoo", "give what --out of train was"
        )
    batch = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))["batch_size"]
    return [record | {"images": record["step"] * batch} for record in read_records(folder / "metrics.jsonl")]


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
    for axes, (label, keys) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
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
