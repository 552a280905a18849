"""A run's folder: whose run it holds, its recipe, what each start worked with, whether the disk has room."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from torch import nn

import capszoo

from ..config import Recipe
from .checkpoints import clear_leftovers, room_missing, write_atomically
from .distributed import TrainingError

__all__ = ["check_room", "check_run", "note_session", "open_run", "versions"]


def check_run(recipe: Recipe, out: Path, resume: bool) -> None:
    """Refuse a folder that holds another recipe's run; nothing is written."""
    for before in (out / "recipe.yaml", out / "recipe.json"):  # older runs have the latter
        if before.is_file():
            break
    else:
        return
    if not resume:
        raise TrainingError(f"{out} already holds a run: choose another --out, or resume it")
    try:
        old = yaml.safe_load(before.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise TrainingError(
            f"cannot read {before}: {getattr(error, 'strerror', None) or 'damaged'}"
        ) from error
    with suppress(ValueError):  # a run of an earlier version lacks the keys that are new
        old = Recipe.model_validate(old).model_dump(mode="json")
    key, was, wanted = _first_difference(old, recipe.model_dump(mode="json"))
    if key:
        raise TrainingError(
            f"{out} holds a run with {key}={was}, this recipe says {wanted}: choose another --out, "
            f"or go on with the run's own: {before}"
        )


def open_run(recipe: Recipe, out: Path) -> None:
    """Make the run's folder; the first thing that is written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_atomically(out / "recipe.yaml", f"# The recipe of this run, every key resolved.\n{text}")
        clear_leftovers(out)
    except OSError as error:
        raise TrainingError(f"cannot write to {out}: {error.strerror or error}") from error


def _first_difference(old: Any, new: Any, prefix: str = "") -> tuple[str, Any, Any]:
    """The first dotted key in which two trees differ, and both values; an empty key where they are equal."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return ("", None, None) if old == new else (prefix, old, new)
    for key in sorted(old.keys() | new.keys()):
        found = _first_difference(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
        if found[0]:
            return found
    return "", None, None


def note_session(out: Path, session: dict[str, Any]) -> None:
    """Add what this start of the run works with to the run's `sessions.json`."""
    path = out / "sessions.json"
    before: list[Any] = []
    with suppress(OSError, ValueError):
        before = json.loads(path.read_text(encoding="utf-8"))
    write_atomically(path, json.dumps([*before, session], indent=1) + "\n")


def check_room(out: Path, recipe: Recipe, net: nn.Module) -> None:
    """Raise `TrainingError` where the disk has no room for the run's checkpoints."""
    weights = sum(t.numel() * t.element_size() for t in net.state_dict().values())
    moments = 2 * sum(p.numel() * p.element_size() for p in net.parameters())  # the most that optimisers keep
    copies = (
        1 + (recipe.ema_decay is not None) + (recipe.early_stop is not None)
    )  # an average, the best epoch's
    needed = weights * copies + moments
    if missing := room_missing(out, needed):
        raise TrainingError(
            f"no room for checkpoints of about {needed / 1e6:,.2f} MB in {out}: "
            f"{missing / 1e6:,.2f} MB more must be free; make room or choose another --out"
        )


def versions() -> dict[str, str]:
    """Versions of what a run's result depends on."""
    import accelerate

    python = ".".join(map(str, sys.version_info[:3]))
    modules = {"torch": torch, "timm": timm, "accelerate": accelerate, "capszoo": capszoo}
    return {"python": python, **{name: module.__version__ for name, module in modules.items()}}
