"""Time to accuracy: minutes and images until a run reached 90, 95 and 99% of its final validation accuracy."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capszoo.data import dataset_spec
from capszoo.explain.plotting import new_figure
from capszoo.models._pretrained import WeightsInfo

from ..training.checkpoints import write_atomically
from .paper_results import began_with

__all__ = ["SHARES", "Reached", "draw_time_to_accuracy", "time_table", "time_to_accuracy", "times_source"]

SHARES = (0.90, 0.95, 0.99)


@dataclass(frozen=True)
class Reached:
    """The first epoch whose validation accuracy reached a share of the last epoch's.

    Attributes:
        share: of the final validation accuracy, 0 to 1.
        epoch: counted from 1.
        images: training images processed by its end, with repetitions.
        minutes: of training by its end, including validation.
        exact: whether the run recorded the time of each epoch; else the minutes are proportional to the epoch.
    """

    share: float
    epoch: int
    images: int
    minutes: float
    exact: bool


def time_to_accuracy(info: WeightsInfo, shares: Sequence[float] = SHARES) -> list[Reached]:
    """When the run of a checkpoint reached shares of its final validation accuracy.

    Empty without a history, and for a run that began with trained weights, whose own time is not recorded.
    """
    if began_with(info):
        return []
    history: Mapping[str, Any] = info.raw.get("history") or {}
    accuracy = history.get("val_top1")
    recipe, seconds = info.raw.get("recipe"), info.raw.get("train_seconds")
    if not accuracy or not recipe or not seconds or accuracy[-1] is None:
        return []
    times: Sequence[float] = history.get("seconds") or ()
    exact = bool(times) and times[-1] is not None
    data, batch = recipe["data"], recipe["batch_size"]
    spec = dataset_spec(data["name"])
    training = min(spec.counts["train"] - data["val_size"], data.get("limit") or spec.counts["train"])
    updates = training // batch
    found = []
    for share in shares:
        number = next(
            i for i, value in enumerate(accuracy) if value is not None and value >= share * accuracy[-1]
        )
        epoch = int(history["epoch"][number])
        spent = times[number] if exact else seconds * (number + 1) / len(accuracy)
        found.append(Reached(share, epoch, epoch * updates * batch, spent / 60, exact))
    return found


def time_table(infos: Iterable[WeightsInfo]) -> list[str]:
    """The lines of a markdown table: minutes and images of each checkpoint's run, and its processor."""
    heads = " | ".join(f"{share:.0%}: minutes, epoch, images" for share in SHARES)
    lines = [f"| weights | {heads} | whole run, minutes | processor |", "|---|---|---|---|---:|---|"]
    for info in infos:
        found = time_to_accuracy(info)
        if not found:
            continue
        cells = " | ".join(
            f"{'' if one.exact else '~'}{one.minutes:.0f}, {one.epoch}, {one.images / 1e6:.2f} M"
            for one in found
        )
        whole = info.raw["train_seconds"] / 60
        lines.append(f"| `{info.name}` | {cells} | {whole:.0f} | {info.raw['hardware']} |")
    return lines


def times_source(infos: Iterable[WeightsInfo]) -> str:
    """Source of the picture's data, as stated in the picture."""
    drawn = [(info.name, [(one.minutes, one.epoch) for one in time_to_accuracy(info)]) for info in infos]
    return f"time to accuracy, {hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16]}"


def draw_time_to_accuracy(path: Path, infos: Sequence[WeightsInfo]) -> None:
    """One row per checkpoint: minutes until the shares of its final validation accuracy, on a logarithmic axis."""
    import matplotlib

    runs = [(info, found) for info in infos if (found := time_to_accuracy(info))]
    runs.sort(key=lambda run: run[1][-1].minutes)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "time to accuracy"}):
        figure = new_figure(9, 1.4 + 0.32 * len(runs))
        axes = figure.subplots()
        for share, marker, colour in zip(SHARES, "osD", ("#9ecae1", "#4292c6", "#084594"), strict=True):
            number = SHARES.index(share)
            minutes = [found[number].minutes for _, found in runs]
            axes.scatter(
                minutes, range(len(runs)), marker=marker, color=colour, label=f"{share:.0%}", zorder=2
            )
        for row, (_, found) in enumerate(runs):
            axes.plot([found[0].minutes, found[-1].minutes], [row, row], color="0.7", zorder=1)
        axes.set_yticks(range(len(runs)), [info.name for info, _ in runs])
        axes.set(
            xscale="log", xlabel="minutes of training (logarithmic; on the processor that the table names)"
        )
        axes.set_title("Time to 90, 95 and 99% of the final validation accuracy (one run each)")
        axes.grid(axis="x", alpha=0.3)
        axes.legend(title="share reached", loc="lower right")
        picture = io.BytesIO()
        kind = path.suffix.lstrip(".")
        about: dict[str, Any] = {
            "Description": times_source(infos),
            **({"Date": None} if kind == "svg" else {}),
        }
        figure.savefig(picture, format=kind, dpi=100, metadata=about)
    write_atomically(path, picture.getvalue())
