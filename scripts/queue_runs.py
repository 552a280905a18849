"""The zoo's next runs, planned and trained: maintainers run it when a machine is free.

    python scripts/queue_runs.py list                             # the runs of queue.yaml, and how far each has come
    python scripts/queue_runs.py train --data DATA --minutes 25   # the next ones, started runs first
    python scripts/queue_runs.py train TAG --state DIR            # this one; take runs from DIR, write them there

``train`` skips finished runs, and seeds whose result is in the zoo if the zoo's checkpoint reaches the target or was
trained with the same settings; naming a recipe trains these, too. A packed run has the newest checkpoint (weights,
momentum, moving average, position), or the weights of a finished run, with recipe and records. It ends with the same
weights bit for bit on the same type of processor.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import sys
import tarfile
import threading
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import torch
import yaml

from capszoo._pretrained.catalogue import checkpoints
from capszoo._utils.files import replacing
from capszoo.data.folders.common import usable_cores
from capszoo.errors import CapszooError
from capszoo.recipes.config import load_recipe
from capszoo.recipes.training.checkpoints import latest_checkpoint
from capszoo.recipes.training.distributed import Stopped
from capszoo.recipes.training.history import read_records
from capszoo.recipes.training.multi_run import Job, run_jobs, train_arguments
from capszoo.recipes.training.run_folder import compared_settings
from capszoo.recipes.weights import SUFFIXES, finished_metadata, finished_run

QUEUE = Path(__file__).with_name("queue.yaml")

PART_BYTES = 15_000_000

#: Simultaneous runs on one GPU, which a single small network does not fill: five were the most that were tried on an
#: H200 (docs/dev/gpu.md).
GPU_RUNS = 5


@dataclass(frozen=True)
class QueueItem:
    """A recipe of queue.yaml: its profile and settings, a run for each seed, the paper's and the target accuracy in %.

    ``cost``, ``note`` and ``tried`` (what missed the target) are words. Tier 1 is trained first.
    """

    tag: str
    profile: str | None = None
    set: Sequence[str] = ()
    seeds: Sequence[int] = (0,)
    reference: float | None = None
    at_least: float | None = None
    cost: str = ""
    note: str = ""
    tried: str = ""
    tier: int | None = None


@dataclass(frozen=True)
class Run:
    """A run of the queue: its folder, its epochs, and the zoo's accuracy in %.

    ``in_zoo``: the zoo has the result of this seed, so that training would repeat it.
    """

    item: QueueItem
    seed: int
    folder: Path
    epochs: int
    zoo: float | None
    in_zoo: bool

    @property
    def position(self) -> tuple[bool, int]:
        return position(self.folder)


def read_queue(path: Path = QUEUE) -> list[QueueItem]:
    """The items of a queue file, in order."""
    return [QueueItem(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["queue"]]


def runs_of(items: Sequence[QueueItem], out: Path) -> list[Run]:
    """The runs of these items, in a folder of runs."""
    found = []
    for item in items:
        recipe = load_recipe(item.tag, list(item.set), item.profile)
        info = checkpoints(aliases=False).get(recipe.name)
        shipped: dict[str, Any] = info.raw if info else {}
        zoo = shipped.get("metrics", {}).get("test", {}).get("top1")
        reached = zoo is not None and item.at_least is not None and zoo >= item.at_least
        settings = compared_settings(recipe.model_dump(mode="json"))
        same = "recipe" in shipped and compared_settings(shipped["recipe"]) == settings
        seeds = [shipped.get("seed"), *shipped.get("seeds", {}).get("seeds", [])] if reached or same else []
        for seed in item.seeds:
            name = recipe.name if list(item.seeds) == [0] else f"{recipe.name}.seed{seed}"
            found.append(Run(item, seed, out / name, recipe.epochs, zoo, seed in seeds))
    return found


def position(run: Path) -> tuple[bool, int]:
    """Whether a run is finished, and the number of updates at its newest checkpoint (-1: none)."""
    steps = [int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*")]
    return finished_metadata(run) is not None, max(steps, default=-1)


def pack(run: Path, parent: Path, part_bytes: int = PART_BYTES) -> Path:
    """Write a run to ``parent/<name of the run>``, in place of what is there, and return this folder."""
    target = parent / run.name
    files = [run / name for name in ("recipe.yaml", "sessions.json", "metrics.jsonl")]
    finished, step = position(run)
    if finished:
        weights = finished_run(run)
        files += [weights.with_name(weights.stem + suffix) for suffix in SUFFIXES]
    else:
        checkpoint, _ = latest_checkpoint(run)  # a damaged one is left behind
        if checkpoint is None:
            raise CapszooError(f"{run} holds no checkpoint of a run")
        step = checkpoint.state["step"]
        files += sorted((run / "checkpoints" / f"step-{step:08d}").iterdir())
    if packed_position(target) > (finished, step):
        raise CapszooError(f"{target} is further than {run}", "move one of them away")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in filter(Path.is_file, files):
            tar.add(file, str(file.relative_to(run)))
    content = buffer.getvalue()
    manifest = {"position": [finished, step], "sha256": hashlib.sha256(content).hexdigest()}
    with replacing(target, folder=True) as new:
        for start in range(0, len(content), part_bytes):
            (new / f"run.tar.{start // part_bytes:03d}").write_bytes(content[start : start + part_bytes])
        (new / "manifest.json").write_text(json.dumps(manifest) + "\n")
    return target


def packed_position(folder: Path) -> tuple[bool, int]:
    """The ``position`` of a packed run; that of a run without a checkpoint if there is none."""
    file = folder / "manifest.json"
    finished, step = json.loads(file.read_text())["position"] if file.is_file() else (False, -1)
    return finished, step


def unpack(folder: Path, run: Path) -> None:
    """Recreate a run that ``pack`` wrote, all of it or nothing; the run must not exist."""
    if run.exists():
        raise CapszooError(f"{run} exists", "choose another folder, or move it away")
    manifest = json.loads((folder / "manifest.json").read_text())
    content = b"".join(part.read_bytes() for part in sorted(folder.glob("run.tar.*")))
    if hashlib.sha256(content).hexdigest() != manifest["sha256"]:
        raise CapszooError(f"{folder} is damaged: its parts do not have the checksum of the manifest")
    with replacing(run, folder=True) as new, tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(new, filter="data")


def train(args: Namespace, runs: Sequence[Run]) -> None:
    """Train the runs that are not finished, until the time is over, and pack all of them."""
    for run in runs if args.state else ():
        if packed_position(args.state / run.folder.name) > run.position:
            unpack(args.state / run.folder.name, run.folder)  # an error if the folder has an earlier state
    waiting = [run for run in runs if not run.position[0] and (args.recipes or not run.in_zoo)]
    waiting.sort(key=lambda run: run.position[1] < 0)  # stable: started runs first, else the queue's order
    jobs = [
        Job(run.item.tag, run.folder, (*arguments, "--set", f"seed={run.seed}"))
        for run in waiting
        for arguments in [train_arguments([*run.item.set, *args.set], args.data, args.cpu, run.item.profile)]
    ]
    end = time.monotonic() + 60 * args.minutes
    # as Ctrl-C does: each run finishes its update and saves a checkpoint
    timer = threading.Timer(60 * args.minutes, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    try:
        timer.start()
        run_jobs(jobs, args.parallel)
    except Stopped:
        if time.monotonic() < end:
            raise
    finally:
        timer.cancel()
        for run in runs if args.state else ():
            if max(run.position) > -1:
                pack(run.folder, args.state)


def show(runs: Sequence[Run]) -> None:
    """Print how far each run has come."""
    print(f"{'run':44} {'epochs':>9} {'test, %':>8} {'target':>8} {'zoo':>8} {'paper':>8}")
    for run in runs:
        records = read_records(run.folder / "metrics.jsonl")
        metadata = finished_metadata(run.folder) or {}
        top1 = metadata.get("metrics", {}).get("test", {}).get("top1")
        epochs = "in zoo" if run.in_zoo and not metadata else f"{len(records)}/{run.epochs}"
        figures = (top1, run.item.at_least, run.zoo, run.item.reference)
        cells = " ".join(f"{'–' if value is None else f'{value:.2f}':>8}" for value in figures)
        print(f"{run.folder.name:44} {epochs:>9} {cells}")


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cores = min(GPU_RUNS if torch.cuda.is_available() else 2, usable_cores())
    for name in ("list", "train"):
        command = commands.add_parser(name)
        command.add_argument("recipes", nargs="*", metavar="TAG", help="only these recipes of the queue")
        command.add_argument("--out", type=Path, default=Path("runs"), help="folder of all runs")
    command.add_argument("--data", help="as for capszoo train")
    command.add_argument("--cpu", action="store_true", help="leave a GPU unused")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all runs")
    command.add_argument("--parallel", type=int, default=cores, help=f"simultaneous runs (default: {cores})")
    command.add_argument(
        "--minutes", type=float, default=10**5, help="then stop all runs; it may take 3 minutes"
    )
    command.add_argument("--state", type=Path, help="take runs from this folder, and write them there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        items = read_queue()
        if unknown := set(args.recipes) - {item.tag for item in items}:
            raise CapszooError(f"{QUEUE} has no {', '.join(sorted(unknown))}")
        runs = runs_of([item for item in items if not args.recipes or item.tag in args.recipes], args.out)
        if args.command == "train":
            train(args, runs)
        show(runs)
    except (CapszooError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
