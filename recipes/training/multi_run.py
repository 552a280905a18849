"""Several runs on one machine, each in a separate process: recipes side by side, or one recipe's seeds.

Each run writes to its folder as in a single run, and its output to ``<folder>.log`` beside it. A failed run
does not affect the others. Ctrl-C and SIGTERM stop all of them, each with a checkpoint; the same command resumes them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from capszoo._utils.files import not_writable, write_atomically
from capszoo._utils.process import is_quiet
from capszoo.data.folders.common import usable_cores

from ..config import RecipeError, load_recipe
from ..weights import amend_metadata, finished_metadata, finished_run, images_sha256, seeds_summary
from .distributed import Stopped, StopRequest, TrainingError
from .history import trained_images
from .run_folder import check_run

LOOK_SECONDS = 0.5

#: Seconds that a run has to finish its update and save a checkpoint; compiling a network takes a minute or two.
STOP_SECONDS = 180.0


@dataclass(frozen=True)
class Job:
    """A run to execute: a recipe, its folder, and further arguments of ``capszoo train``."""

    recipe: str
    out: Path
    arguments: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        return self.out.with_name(f"{self.out.name}.log")


#: Exit codes of a run that SIGTERM stopped: with a checkpoint, or before its first update.
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)


@dataclass
class _Process:
    job: Job
    process: subprocess.Popen[bytes]
    told: bool = False

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def state(self) -> str:
        code = self.process.poll()
        if code in STOPPED:
            return "stopped"
        return {None: "running", 0: "finished"}.get(code, f"failed ({code})")

    def last_line(self) -> str:
        """The last line that the run printed."""
        with self.job.log.open("rb") as file:
            file.seek(max(0, self.job.log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _table(processes: list[_Process]) -> Table:
    table = Table("run", "state", "last line", box=None, pad_edge=False)
    for process in processes:
        table.add_row(
            process.job.out.name,
            process.state,
            process.last_line(),
            style="red" if "failed" in process.state else "",
        )
    return table


def _start(job: Job, environment: dict[str, str]) -> _Process:
    command = [sys.executable, "-m", "capszoo", "train", job.recipe, "--out", str(job.out)]
    job.out.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as file:
        # A separate session, so that Ctrl-C reaches a run only once, from this process.
        process = subprocess.Popen(
            [*command, *job.arguments], stdout=file, stderr=file, env=environment, start_new_session=True
        )
    return _Process(job, process)


def run_jobs(jobs: Sequence[Job], parallel: int | None = None) -> None:
    """Execute runs, some of them at the same time, and return when all have ended.

    Args:
        jobs: in the order in which they start.
        parallel: number of simultaneous runs, which share the CPU's cores; None: all.

    Raises:
        Stopped: a signal came. TrainingError: a run failed, or its folder cannot be written. Both are raised after the
            other runs have ended or saved a checkpoint.
    """
    parallel = min(parallel or len(jobs), len(jobs))
    # Each run gets its share of the cores; otherwise all would use all of them and wait for each other.
    threads = str(max(1, usable_cores() // max(parallel, 1)))
    defaults = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    environment = {**defaults, **os.environ, "PYTHONUNBUFFERED": "1"}
    console = Console(quiet=is_quiet(), highlight=False, emoji=False, markup=False)
    waiting, processes, unstarted = list(jobs), list[_Process](), list[str]()
    began, images = time.monotonic(), _images(jobs)
    with StopRequest() as stop, Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            stopping, killed = False, float("inf")
            while waiting or any(process.running for process in processes):
                if stop.number and not stopping:
                    stopping, waiting = True, []
                    console.print("stopping: each run finishes its current update and saves a checkpoint")
                    for process in processes:
                        if process.running:
                            process.process.send_signal(signal.SIGTERM)
                    killed = time.monotonic() + STOP_SECONDS
                if time.monotonic() > killed:  # one that hangs must not cost the states of the others
                    _kill(processes)
                while waiting and sum(process.running for process in processes) < parallel:
                    job = waiting.pop(0)
                    try:
                        processes.append(_start(job, environment))
                    except OSError as error:
                        unstarted.append(
                            f"cannot start {job.out.name}: {not_writable(job.out.parent, error)}"
                        )
                        continue
                    console.print(f"{job.out.name}: started, printing to {job.log}", soft_wrap=True)
                _tell(processes, console)
                if console.is_terminal:
                    live.update(_table(processes), refresh=True)
                time.sleep(LOOK_SECONDS)
        finally:
            # a second Ctrl-C, or an error of ours: leave no process running
            _kill(processes)
    _tell(processes, console)
    images, seconds = _images(jobs) - images, time.monotonic() - began
    if images > 0:  # a single run's rate says little where runs share a device
        rate = f"{images:,} images in {seconds:,.0f} s: {images / seconds:,.0f} images/s"
        console.print(f"{rate} over all runs, start, validation and evaluation included", soft_wrap=True)
    failed = [
        process.job.out.name
        for process in processes
        if process.process.returncode and not (stopping and process.process.returncode in STOPPED)
    ]
    if stop.number:
        count = sum(process.process.returncode in STOPPED for process in processes)
        raise Stopped(
            f"stopped {count} of {len(processes)} runs"
            + (f", {len(failed)} failed: {', '.join(failed)}" if failed else "")
            + "; the same command resumes",
            stop.number,
        )
    if unstarted:
        raise TrainingError(unstarted[0])
    if failed:
        raise TrainingError(
            f"{len(failed)} of {len(processes)} runs failed: {', '.join(failed)}; their logs say why"
        )


def _kill(processes: list[_Process]) -> None:
    for process in processes:
        if process.running:
            process.process.kill()


def _tell(processes: list[_Process], console: Any) -> None:
    """Report once how each ended run has ended."""
    for process in processes:
        if not process.running and not process.told:
            process.told = True
            console.print(f"{process.job.out.name}: {process.state}: {process.last_line()}", soft_wrap=True)


def _images(jobs: Sequence[Job]) -> int:
    return sum(trained_images(job.out) for job in jobs)


def train_arguments(
    overrides: Sequence[str] | None, data: str | Path | None, cpu: bool, profile: str | None
) -> tuple[str, ...]:
    """Arguments of ``capszoo train`` after the recipe and its folder."""
    options = [part for override in overrides or () for part in ("--set", override)]
    options += ["--data", str(data)] if data else []
    options += ["--profile", profile] if profile else []
    return (*options, *(["--device", "cpu"] if cpu else []))


def train_together(
    recipes: list[str],
    overrides: list[str] | None = None,
    out: str | Path | None = None,
    data: str | Path | None = None,
    cpu: bool = False,
    profile: str | None = None,
) -> None:
    """Train several recipes at the same time, and return when all have ended.

    Args:
        recipes: paths of YAML files, or names of recipes in the package.
        overrides, data, cpu, profile: as for ``train``, for all of them.
        out: folder with a sub-folder for each run; None: ``runs``.

    Raises:
        RecipeError: before anything starts. Stopped: after a signal. TrainingError: at the end, if a run failed.
    """
    names = [load_recipe(recipe, overrides, profile).name for recipe in recipes]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"two of the recipes are {name}: they would write to the same folder")
    parent = Path(out) if out else Path("runs")
    arguments = train_arguments(overrides, data, cpu, profile)
    run_jobs([Job(recipe, parent / name, arguments) for recipe, name in zip(recipes, names, strict=True)])


def train_seeds(
    recipe: str,
    seeds: Sequence[int],
    overrides: list[str] | None = None,
    out: str | Path | None = None,
    data: str | Path | None = None,
    cpu: bool = False,
    profile: str | None = None,
    parallel: int = 1,
) -> dict[str, Any]:
    """Train a recipe with several seeds, and summarise the runs.

    The runs are in ``<out>/<recipe>.seed<N>``. The summary, which includes finished runs of other seeds there, is
    written to ``<out>/<recipe>.seeds.json`` and into the metadata of every run, so that a bundled checkpoint states the
    mean besides its accuracy. The same command resumes stopped runs, and does not change finished ones.

    Args:
        seeds: at least one, all different.
        out: folder of all runs; None: ``runs``.
        parallel: number of simultaneous runs.
        recipe, overrides, data, cpu, profile: as for ``train``.

    Returns:
        The summary (see ``seeds_summary``).

    Raises:
        RecipeError: a seed is given twice, or ``overrides`` set it too.
        TrainingError: a folder holds a run with other settings. Also the errors of ``run_jobs``.
    """
    if len(set(seeds)) != len(seeds) or not seeds:
        raise RecipeError(f"--seeds takes different numbers, e.g. 0,1,2; got {','.join(map(str, seeds))}")
    if any(override.partition("=")[0] == "seed" for override in overrides or ()):
        raise RecipeError("--seeds and --seed (or --set seed=) both set the seed: give one of them")
    resolved = load_recipe(recipe, overrides, profile)
    parent = Path(out) if out else Path("runs")
    folders = {seed: parent / f"{resolved.name}.seed{seed}" for seed in seeds}

    def check(seed: int, folder: Path) -> None:
        """Refuse a run with other settings: it is no run of this recipe."""
        check_run(load_recipe(recipe, [*(overrides or ()), f"seed={seed}"], profile), folder, resume=True)

    for seed, folder in folders.items():
        check(seed, folder)
    arguments = train_arguments(overrides, data, cpu, profile)
    open_runs = [
        Job(recipe, folder, (*arguments, "--set", f"seed={seed}"))
        for seed, folder in folders.items()
        if finished_metadata(folder) is None
    ]
    if open_runs:
        run_jobs(open_runs, parallel)
    finished = {seed: finished_metadata(folder) or {} for seed, folder in folders.items()}
    images = images_sha256(finished[seeds[0]])
    other = next((seed for seed in finished if images_sha256(finished[seed]) != images), None)
    if other is not None:
        raise TrainingError(
            f"{folders[other]} was trained on other images than {folders[seeds[0]]}, so they have no mean: "
            "choose another --out"
        )
    for folder in parent.glob(f"{resolved.name}.seed*"):
        number = folder.name.removeprefix(f"{resolved.name}.seed")
        info = finished_metadata(folder) if number.isdecimal() and int(number) not in folders else None
        if info and images_sha256(info) == images:
            with suppress(TrainingError):
                check(int(number), folder)
                finished[int(number)], folders[int(number)] = info, folder
    summary = seeds_summary(resolved.name, dict(sorted(finished.items())), resolved.epochs)
    for folder in folders.values():
        amend_metadata(finished_run(folder), seeds=summary)
    write_atomically(parent / f"{resolved.name}.seeds.json", json.dumps(summary, indent=1) + "\n")
    return summary
