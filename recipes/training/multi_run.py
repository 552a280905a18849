"""Several recipes side by side on one machine, each in a process of its own: one small model alone leaves a GPU idle.

Each run writes to `<runs>/<arch>.<tag>/` as it would alone, and what it prints to `<runs>/<arch>.<tag>.log`. One that
fails leaves the others alone. Ctrl-C and SIGTERM stop all of them, each with a checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..config import RecipeError, load_recipe
from .distributed import Stopped, StopRequest, TrainingError

__all__ = ["train_together"]

LOOK_SECONDS = 0.5


@dataclass
class _Run:
    name: str
    log: Path
    process: subprocess.Popen[bytes]
    told: bool = False

    @property
    def state(self) -> str:
        code = self.process.poll()
        return {None: "running", 0: "finished"}.get(code, f"failed ({code})")

    def last_line(self) -> str:
        """What the run printed last."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _table(runs: list[_Run]) -> Table:
    table = Table("recipe", "state", "last line", box=None, pad_edge=False)
    for run in runs:
        table.add_row(run.name, run.state, run.last_line(), style="red" if "failed" in run.state else "")
    return table


def train_together(
    recipes: list[str],
    overrides: list[str] | None = None,
    out: str | Path | None = None,
    data: str | Path | None = None,
    cpu: bool = False,
    profile: str | None = None,
) -> None:
    """Train several recipes at the same time, to the end of the last.

    Arguments:
        recipes: paths of YAML files, or names of recipes that come with the package.
        overrides, data, cpu, profile: as for `train`, for all of them.
        out: folder in which each run has its own; None: `runs`.

    Raises `RecipeError` before anything starts, `Stopped` after a signal, and `TrainingError` at the end where a run
    failed.
    """
    names = [load_recipe(recipe, overrides, profile).name for recipe in recipes]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"two of the recipes are {name}: they would write to the same folder")
    parent = Path(out) if out else Path("runs")
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"cannot write to {parent}: {error.strerror or error}") from error

    options = [part for override in overrides or () for part in ("--set", override)]
    options += ["--data", str(data)] if data else []
    options += ["--profile", profile] if profile else []
    options += ["--cpu"] if cpu else []
    # Without a share of the cores each, all would use all of them and wait for each other.
    threads = str(max(1, (os.cpu_count() or 1) // len(names)))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"}

    def start(recipe: str, name: str) -> _Run:
        log = parent / f"{name}.log"
        command = [
            sys.executable,
            "-m",
            "capszoo.recipes.train",
            recipe,
            "--out",
            str(parent / name),
            *options,
        ]
        with log.open("ab") as file:
            # A session of its own, so that Ctrl-C reaches a run once, from here.
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        return _Run(name, log, process)

    console = Console(highlight=False)
    runs: list[_Run] = []
    with StopRequest() as stop, Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            runs += [start(recipe, name) for recipe, name in zip(recipes, names, strict=True)]
            for run in runs:
                console.print(f"{run.name}: started, printing to {run.log}", soft_wrap=True, markup=False)
            passed_on = False
            while any(run.process.poll() is None for run in runs):
                if stop.number and not passed_on:
                    passed_on = True
                    console.print("stopping: each run makes its update to the end and saves", markup=False)
                    _signal(runs, signal.SIGTERM)
                _tell(runs, console)
                if console.is_terminal:
                    live.update(_table(runs), refresh=True)
                time.sleep(LOOK_SECONDS)
        finally:
            _signal(runs, signal.SIGKILL)  # a second Ctrl-C, or an error of ours: leave nobody behind
    _tell(runs, console)
    failed = [run.name for run in runs if run.process.returncode]
    if stop.number:
        raise Stopped(f"stopped {len(failed)} of {len(runs)} runs; the same command goes on", stop.number)
    if failed:
        raise TrainingError(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; their logs say why"
        )


def _signal(runs: list[_Run], number: int) -> None:
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(number)


def _tell(runs: list[_Run], console: Any) -> None:
    """Say once of each run that has ended how it did."""
    for run in runs:
        if run.process.poll() is not None and not run.told:
            run.told = True
            console.print(f"{run.name}: {run.state}: {run.last_line()}", soft_wrap=True, markup=False)
