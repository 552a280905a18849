"""The queue: the next recipes to train, their target accuracies, and the progress of each.

`recipes/queue.yaml` lists them, highest value first. `capszoo train --queue` trains them in that order, but started
runs first, some side by side. It skips finished runs, and seeds whose result is in the zoo if the zoo's checkpoint has
the target accuracy; naming a recipe trains these, too. A folder of states (`state_folder`) transfers the runs to
another machine and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from rich.console import Console

from capszoo._pretrained.files import bundled_tags
from capszoo._utils.process import is_quiet
from capszoo.data.folders.common import usable_cores

from ..config import CONFIGS, RecipeError, load_recipe
from ..weights import finished_metadata
from ..yaml_tree import YamlError, read_yaml
from .history import read_records
from .multi_run import Job, run_jobs, train_arguments
from .run_folder import check_run, compared_settings
from .state_folder import load_states, save_states

__all__ = ["QueueItem", "QueueState", "choose_items", "queue_state", "read_queue", "train_queue"]

QUEUE = CONFIGS.parent / "queue.yaml"

#: Number of simultaneous runs on one GPU, which a single small network does not fill: five were the most that were
#: tried on an H200 (docs/dev/gpu.md).
GPU_RUNS = 5


class QueueItem(BaseModel):
    """One recipe to train.

    Attributes:
        tag: name of the recipe, `<arch>.<tag>`, or a YAML file.
        profile: one of its profiles; None: the recipe without a profile.
        set: further `key=value` settings.
        seeds: one run for each.
        reference: the paper's accuracy in per cent.
        at_least: target accuracy in per cent.
        cost: measured or estimated cost, in words.
        note: further information.
        tried: what missed the target, or why no run has tried, in words.
        tier: 1 is trained first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tag: str
    profile: str | None = None
    set: tuple[str, ...] = ()
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    reference: float | None = None
    at_least: float | None = None
    cost: str = ""
    note: str = ""
    tried: str = ""
    tier: int | None = None


@dataclass(frozen=True)
class QueueState:
    """Progress of one run of the queue.

    Attributes:
        out: its folder.
        epoch, epochs: epochs trained, and in all.
        top1: accuracy on the test set of the finished run, in per cent.
        bundled: accuracy of the checkpoint in the zoo.
        in_zoo: the zoo has the result of this seed, and its checkpoint reaches the target accuracy or had the same
            settings, so that training would repeat it.
    """

    item: QueueItem
    seed: int
    out: Path
    epoch: int
    epochs: int
    top1: float | None
    bundled: float | None
    in_zoo: bool = False

    @property
    def finished(self) -> bool:
        return self.top1 is not None


def read_queue(path: Path = QUEUE) -> list[QueueItem]:
    """The items of a queue file, in order.

    Raises:
        RecipeError: the file cannot be read, or an item is invalid; the message names it.
    """
    try:
        tree: Any = read_yaml(path.read_text(encoding="utf-8"))
        items = TypeAdapter(list[QueueItem]).validate_python(tree["queue"])
    except (OSError, UnicodeDecodeError, YamlError, KeyError, TypeError) as error:
        raise RecipeError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        number, *keys = first["loc"] or (0,)
        where = ".".join(map(str, keys))
        raise RecipeError(f"{path}: item {int(number) + 1}: '{where}' is wrong: {first['msg']}") from error
    names = [load_recipe(item.tag, list(item.set), item.profile).name for item in items]  # checks the recipes
    folders = [
        _folder(name, item, seed) for name, item in zip(names, items, strict=True) for seed in item.seeds
    ]
    twice = next((folder for k, folder in enumerate(folders) if folder in folders[:k]), None)
    if twice is not None:
        raise RecipeError(f"{path}: two runs have the folder {twice}: name each recipe and seed once")
    return items


def _folder(name: str, item: QueueItem, seed: int) -> str:
    return name if item.seeds == (0,) else f"{name}.seed{seed}"


def choose_items(items: Sequence[QueueItem], only: Sequence[str]) -> list[QueueItem]:
    """The items with these names; all of them for no names.

    Raises:
        RecipeError: the queue has no item of that name.
    """
    unknown = [name for name in only if name not in {item.tag for item in items}]
    if unknown:
        raise RecipeError(f"the queue has no {unknown[0]}: it has {', '.join(item.tag for item in items)}")
    return [item for item in items if not only or item.tag in only]


def _started(one: QueueState) -> bool:
    """True if a run has a checkpoint, maybe of its first epoch."""
    return one.epoch > 0 or any((one.out / "checkpoints").glob("step-*"))


def queue_state(
    items: Sequence[QueueItem], out: str | Path | None = None, overrides: Sequence[str] = ()
) -> list[QueueState]:
    """Progress of each run of the queue in a folder of runs (None: `runs`), with these `key=value` settings."""
    parent = Path(out) if out else Path("runs")
    states = []
    for item in items:
        recipe = load_recipe(item.tag, list(item.set), item.profile)
        changed = load_recipe(item.tag, [*item.set, *overrides], item.profile) if overrides else recipe
        shipped = bundled_tags().get(recipe.name)
        raw = shipped.raw if shipped else {}
        known = raw.get("metrics", {}).get("test", {}).get("top1")
        reached = known is not None and item.at_least is not None and known >= item.at_least
        same = "recipe" in raw and compared_settings(raw["recipe"]) == compared_settings(
            recipe.model_dump(mode="json")
        )
        seeds = {raw.get("seed"), *raw.get("seeds", {}).get("seeds", [])} if reached or same else set()
        for seed in item.seeds:
            folder = parent / _folder(recipe.name, item, seed)
            records = read_records(folder / "metrics.jsonl")
            metadata = finished_metadata(folder) or {}
            top1 = metadata.get("metrics", {}).get("test", {}).get("top1")
            epoch = records[-1]["epoch"] if records else 0
            states.append(QueueState(item, seed, folder, epoch, changed.epochs, top1, known, seed in seeds))
    return states


def train_queue(
    out: str | Path | None = None,
    data: str | Path | None = None,
    cpu: bool = False,
    parallel: int | None = None,
    minutes: float | None = None,
    only: Sequence[str] = (),
    overrides: Sequence[str] = (),
    path: Path = QUEUE,
    state: str | Path | None = None,
) -> bool:
    """Train the unfinished items of the queue, started runs first.

    Args:
        out: folder of all runs; None: `runs`.
        data, cpu: as for `train`.
        parallel: number of simultaneous runs, on one GPU or on the CPU's cores; None: at most 2 on a CPU and 5 on a
            GPU, never more than there are cores.
        minutes: time after which all runs stop with checkpoints.
        only: names of recipes, which are trained even if the zoo has their result; empty: all.
        overrides: settings for all of them, such as `precision=bf16` or `compile=true`.
        path: the queue's file.
        state: folder of files of at most 16 MB; runs that are in it but not in `out` are imported first, and
            each run's state is written to it at the end, also after an error or a signal that this process catches.

    Returns:
        True if the whole queue is finished.

    Raises:
        RecipeError: one of `only` is not in the queue, or `overrides` set the seed.
        TrainingError: a folder holds a run with other settings. Also the errors of `run_jobs`, `load_states` and
            `save_states`.
    """
    if any(override.partition("=")[0] == "seed" for override in overrides):
        raise RecipeError(
            "the queue states the seeds of its items: leave --seed (--set seed=) out, or train the recipe alone"
        )
    items = choose_items(read_queue(path), only)
    folders = [one.out for one in queue_state(items, out)]
    if state:
        load_states(folders, Path(state))
    try:
        return _train_unfinished(items, out, data, cpu, parallel, minutes, overrides, bool(only))
    finally:
        if state:
            save_states(folders, Path(state))


def _runs_at_once(cpu: bool) -> int:
    return min(2 if cpu or not torch.cuda.is_available() else GPU_RUNS, usable_cores())


def _train_unfinished(
    items: Sequence[QueueItem],
    out: str | Path | None,
    data: str | Path | None,
    cpu: bool,
    parallel: int | None,
    minutes: float | None,
    overrides: Sequence[str],
    named: bool,
) -> bool:
    """Train the unfinished ones of these items; arguments and result as for `train_queue`.

    `named`: the user named the items, so that those in the zoo are trained, too.
    """
    every = queue_state(items, out)
    for one in every:  # a run with other settings, such as another profile, is not this item's
        settings = [*one.item.set, *overrides, f"seed={one.seed}"]
        check_run(load_recipe(one.item.tag, settings, one.item.profile), one.out, resume=True)
    states = [one for one in every if not one.finished]
    console = Console(quiet=is_quiet(), highlight=False, emoji=False)
    for one in [] if named else [one for one in states if one.in_zoo]:
        states.remove(one)
        console.print(
            f"{one.item.tag}, seed {one.seed}: left out: the zoo has it, {one.bundled:.2f}% on the test images; "
            f"--queue {one.item.tag} trains it",
            soft_wrap=True,
            markup=False,
        )
    if not states:
        return True
    # stable: started runs first, else the queue's order
    states.sort(key=lambda one: not _started(one))
    jobs = [
        Job(
            one.item.tag,
            one.out,
            (
                *train_arguments([*one.item.set, *overrides], data, cpu, one.item.profile),
                "--set",
                f"seed={one.seed}",
            ),
        )
        for one in states
    ]
    return run_jobs(jobs, parallel or _runs_at_once(cpu), minutes)
