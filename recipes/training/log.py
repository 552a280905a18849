"""Progress output of a run: metrics.jsonl, TensorBoard events, curves.png, a progress bar, a line per epoch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from capszoo._utils.files import write_atomically
from capszoo._utils.process import is_quiet
from capszoo.errors import first_line, install_hint

from ..evaluation.plots import draw_curves
from .distributed import TrainingError
from .history import read_records

if TYPE_CHECKING:
    from accelerate import Accelerator

try:
    import matplotlib  # noqa: F401  (missing, it is missed before the first epoch, not after it)
    from torch.utils.tensorboard import SummaryWriter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"training needs matplotlib and tensorboard: {install_hint('train')}"
    ) from error


SECONDS_BETWEEN_LINES = 60
#: factor of the training loss, and points of training accuracy, that an epoch loses in a setback
SETBACK_LOSS, SETBACK_TOP1 = 1.25, 2.0
#: Under which trackers list the runs.
PROJECT = "capszoo"
SECONDS_BETWEEN_CURVES = 60  # drawing takes a second, as long as an epoch of a small run


def epoch_line(record: Mapping[str, Any], epochs: int) -> str:
    """Summarise an epoch in one line.

    Args:
        record: record of the epoch, from ``metrics.jsonl``.
        epochs: of the whole run.
    """
    parts = [f"epoch {record['epoch']}/{epochs}"]
    if record.get("train_loss") is not None:
        parts.append(f"loss {record['train_loss']:.4f}")
    parts.append(f"training accuracy {record['train_top1']:.2f}%")
    if record.get("val_top1") is not None:
        parts.append(f"validation accuracy {record['val_top1']:.2f}%")
    if record.get("size") is not None:
        parts.append(f"images of {record['size']} pixels")
    parts += [f"lr {record['lr']:.3g}", f"{record['images_per_s']:,} images/s"]
    return ", ".join([*parts, str(timedelta(seconds=round(record["seconds"])))])


def setback_line(record: Mapping[str, Any], before: Mapping[str, Any] | None) -> str | None:
    """Say that training lost what it had learned in an epoch, as after one very large gradient; None if it did not.

    Args:
        record: record of the epoch, from ``metrics.jsonl``.
        before: that of the epoch before it, if there is one.
    """
    if before is None or record.get("size") != before.get("size"):
        return None
    loss, earlier = record.get("train_loss"), before.get("train_loss")
    if loss is None or earlier is None:
        return None
    if loss < SETBACK_LOSS * earlier or record["train_top1"] > before["train_top1"] - SETBACK_TOP1:
        return None
    return (
        f"the training loss rose from {earlier:.4g} to {loss:.4g}: one very large gradient can cause this. If the "
        "accuracy does not recover, start again in another --out with --set clip_grad=2 (our recipes: 1 to 2)"
    )


def weights_line(path: Path) -> str:
    """Path of a finished run's weights, as a line."""
    return f"weights in {path}"


def accuracy_line(split: str, accuracy: str, figures: Mapping[str, Any]) -> str:
    """The accuracy on a split, in one line.

    Args:
        split: "validation" or "test".
        accuracy: kind of the accuracy, ``DatasetSpec.accuracy``.
        figures: metrics with ``top1`` (per cent) and ``n``.
    """
    return f"{split}: {accuracy} {figures['top1']:.2f}% of {figures['n']:,} images"


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, str | int | float | bool]:
    """A tree of settings with dotted keys, and lists as text: what every tracker takes."""
    entries: dict[str, str | int | float | bool] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            entries |= _flat(value, f"{above}{key}.")
        elif value is not None:
            entries[f"{above}{key}"] = value if isinstance(value, (str, int, float, bool)) else str(value)
    return entries


class _LogConsole(Console):
    """A console that a reader may leave, as ``capszoo train … | head`` does: training goes on without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # also for what is printed later
        with suppress(OSError, ValueError):
            print(
                "note: stdout is closed; training goes on, and metrics.jsonl has its epochs", file=sys.stderr
            )


class RunLog:
    """The log of one run; inactive on all processes but the first.

    Args:
        out: folder of the run.
        active: False on the other processes.
        total: updates of the whole run.
        done: updates made by earlier sessions; their records of later updates are dropped.
        accelerator: its trackers log as well; None for none.
        settings: what the trackers state of the run.
    """

    def __init__(
        self,
        out: Path,
        active: bool,
        total: int,
        done: int,
        accelerator: Accelerator | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.out, self.active, self.total, self.done = out, active, total, done
        self.accelerator = accelerator if accelerator is not None and accelerator.log_with else None
        self.metrics = out / "metrics.jsonl"
        self.began = self.shown = self.drawn = time.monotonic()
        self.console = _LogConsole(quiet=not active or is_quiet(), highlight=False, emoji=False)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (active and self.console.is_terminal and not is_quiet()),
        )
        self.task = self.progress.add_task("training", total=total, completed=done, note="")
        self.events: Any = None
        if active:
            self._forget_after(done)
            self._start_trackers(settings or {})
            # TensorBoard purges an earlier session's events of updates that this one repeats.
            self.events = SummaryWriter(str(out / "tensorboard"), purge_step=done + 1, flush_secs=30)

    def _start_trackers(self, settings: Mapping[str, Any]) -> None:
        if self.accelerator is None:
            return
        named = {"wandb": {"name": self.out.name, "dir": str(self.out)}}
        named |= {"mlflow": {"run_name": self.out.name}, "trackio": {"name": self.out.name}}
        try:
            self.accelerator.init_trackers(PROJECT, _flat(settings), named)
        except Exception as error:  # of the tracker's library: no account, no connection, …
            names = ", ".join(map(str, self.accelerator.log_with))
            raise TrainingError(
                f"{names} cannot start: {first_line(error)}", "log in to it, or leave --log-with out"
            ) from error

    def _scalars(self, values: dict[str, Any], step: int) -> None:
        for key, value in values.items():
            self.events.add_scalar(key, value, step)
        if self.accelerator is not None:
            self.accelerator.log(values, step=step)

    def _forget_after(self, step: int) -> None:
        if self.metrics.is_file():
            write_atomically(
                self.metrics, "".join(f"{json.dumps(record)}\n" for record in self.records(step))
            )

    def records(self, up_to: int | None = None) -> list[dict[str, Any]]:
        """The epochs' records, up to an update, without a line truncated by a kill."""
        return [r for r in read_records(self.metrics) if up_to is None or r["step"] <= up_to]

    def before(self, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """Record of the epoch before the one of ``record``; None for the first, and on processes that do not log."""
        records = self.records(record["step"] - 1) if self.active else []
        return records[-1] if records else None

    def epoch(self, record: dict[str, Any], last: bool = False) -> None:
        """Write the record of an epoch: a line and scalars; the curves after the last epoch and once a minute.

        Raises:
            OSError: a file cannot be written.
        """
        if not self.active:
            return
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        scalars = {
            f"epoch/{key}": value
            for key, value in record.items()
            if key not in ("epoch", "step", "routing", "val_right") and value is not None
        }
        self._scalars(scalars, record["step"])
        self.events.flush()
        if last or time.monotonic() - self.drawn > SECONDS_BETWEEN_CURVES:
            draw_curves(self.out / "curves.png", self.out.name, self.records())
            self.drawn = time.monotonic()

    def update(self, step: int, loss: float, lr: float, rate: float, note: str) -> None:
        """Log the mean loss since the last call and move the bar; without a terminal, print one line a minute."""
        if not self.active:
            return
        self._scalars({"update/loss": loss, "update/lr": lr, "update/images_per_s": rate}, step)
        note = f"{note}  loss {loss:.4f}  {rate:.0f} images/s"
        self.progress.update(self.task, completed=step, note=note)
        if not self.console.is_terminal and time.monotonic() - self.shown > SECONDS_BETWEEN_LINES:
            self.shown = time.monotonic()
            left = (self.shown - self.began) * (self.total - step) / max(step - self.done, 1)
            self.say(f"update {step}/{self.total}  {note}  {timedelta(seconds=round(left))} left")

    def say(self, line: str) -> None:
        self.progress.console.print(line, soft_wrap=True, markup=False)

    def result(self, line: str) -> None:
        """Print a line, also with ``--quiet``."""
        if self.active and is_quiet():
            print(line)
        else:
            self.say(line)

    def close(self) -> None:
        self.progress.stop()
        if self.events is not None:
            with suppress(OSError):  # a full disk has been reported already
                self.events.close()
        if self.accelerator is not None and self.active:
            self.accelerator.end_training()
