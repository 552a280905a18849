"""The queue: which recipes to train next, what is aimed at, and how far each has come.

`recipes/queue.yaml` lists them, highest value first. `capszoo train --queue` trains them in that order, some side by
side, resumes what was begun and leaves out what is finished.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from capszoo.models._pretrained import bundled_tags

from ..config import CONFIGS, RecipeError, load_recipe
from .history import read_records
from .multi_run import Job, _arguments, finished_metadata, run_jobs

__all__ = ["QueueItem", "QueueState", "queue_state", "read_queue", "train_queue"]

QUEUE = CONFIGS.parent / "queue.yaml"


class QueueItem(BaseModel):
    """One recipe to train.

    Attributes:
        tag: name of the recipe, `<arch>.<tag>`, or a YAML file.
        profile: one of its profiles; None: the paper's settings.
        set: further `key=value` settings.
        seeds: one run for each.
        reference: the paper's accuracy in per cent.
        at_least: accuracy in per cent that is aimed at.
        cost: measured or estimated cost, in words.
        note: what else there is to know.
        tier: 1 is trained first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tag: str
    profile: str | None = None
    set: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    reference: float | None = None
    at_least: float | None = None
    cost: str = ""
    note: str = ""
    tier: int | None = None


@dataclass(frozen=True)
class QueueState:
    """How far one run of the queue has come.

    Attributes:
        out: its folder.
        epoch, epochs: epochs trained, and in all.
        top1: accuracy on the test set of the finished run, in per cent.
        bundled: that of the checkpoint in the zoo.
    """

    item: QueueItem
    seed: int
    out: Path
    epoch: int
    epochs: int
    top1: float | None
    bundled: float | None

    @property
    def finished(self) -> bool:
        return self.top1 is not None


def read_queue(path: Path = QUEUE) -> list[QueueItem]:
    """The items of a queue file, in order.

    Raises:
        RecipeError: the file cannot be read, or an item is wrong; the message names it.
    """
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        items = TypeAdapter(list[QueueItem]).validate_python(tree["queue"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise RecipeError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        number, *keys = first["loc"] or (0,)
        where = ".".join(map(str, keys))
        raise RecipeError(f"{path}: item {int(number) + 1}: '{where}' is wrong: {first['msg']}") from error
    for item in items:
        load_recipe(item.tag, list(item.set), item.profile)
    return items


def _name(item: QueueItem) -> str:
    return load_recipe(item.tag, list(item.set), item.profile).name


def _folder(parent: Path, item: QueueItem, seed: int) -> Path:
    return parent / (_name(item) if item.seeds == (0,) else f"{_name(item)}.seed{seed}")


def queue_state(items: Sequence[QueueItem], out: str | Path | None = None) -> list[QueueState]:
    """How far each run of the queue has come in a folder of runs (None: `runs`)."""
    parent = Path(out) if out else Path("runs")
    states = []
    for item in items:
        epochs = load_recipe(item.tag, list(item.set), item.profile).epochs
        shipped = bundled_tags().get(_name(item))
        known = shipped.raw.get("metrics", {}).get("test", {}).get("top1") if shipped else None
        for seed in item.seeds:
            folder = _folder(parent, item, seed)
            records = read_records(folder / "metrics.jsonl")
            metadata = finished_metadata(folder) or {}
            top1 = metadata.get("metrics", {}).get("test", {}).get("top1")
            epoch = records[-1]["epoch"] if records else 0
            states.append(QueueState(item, seed, folder, epoch, epochs, top1, known))
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
) -> bool:
    """Train what the queue lists and is not finished, begun runs first.

    Args:
        out: folder of all runs; None: `runs`.
        data, cpu: as for `train`.
        parallel: runs at the same time; None: one for each core of a CPU, at most 2.
        minutes: time after which all stop with checkpoints.
        only: names of recipes; empty: all.
        overrides: settings for all of them, such as `precision=bf16`.

    Returns:
        Whether the whole queue is finished.

    Raises:
        RecipeError: the queue does not name one of `only`. Further as `run_jobs`.
    """
    items = read_queue(path)
    unknown = [name for name in only if name not in {item.tag for item in items}]
    if unknown:
        raise RecipeError(f"the queue has no {unknown[0]}: it has {', '.join(item.tag for item in items)}")
    states = [
        state
        for state in queue_state([item for item in items if not only or item.tag in only], out)
        if not state.finished
    ]
    if not states:
        return True
    states.sort(key=lambda state: state.epoch == 0)  # stable: what was begun first, else the queue's order
    jobs = [
        Job(
            state.item.tag,
            state.out,
            (
                *_arguments([*state.item.set, *overrides], data, cpu, state.item.profile),
                "--set",
                f"seed={state.seed}",
            ),
        )
        for state in states
    ]
    return run_jobs(jobs, parallel or min(2, os.cpu_count() or 1), minutes)
