"""A run's folder: its lock, its recipe, the settings of each session, and a check of the disk space."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

import timm
import torch
import yaml
from torch import nn

from capszoo._pretrained.info import run_weights
from capszoo._utils.files import not_writable, remove_stale, write_atomically
from capszoo._version import __version__
from capszoo.data.specs import same_place
from capszoo.errors import CapszooError

from ..config import DERIVED_KEYS, MACHINE_KEYS, NEUTRAL_KEYS, Recipe
from ..yaml_tree import YamlError, read_yaml
from .checkpoints import KEEP, checkpoint_folders, newest_position
from .distributed import TrainingError

#: Lock file in a run's folder, held by the process that trains into it.
LOCK = ".lock"


def check_run(recipe: Recipe, out: Path, resume: bool) -> None:
    """Refuse a folder with another recipe's run, or one whose recipe cannot be read; writes nothing.

    A recipe of which no checkpoint was made, such as after a start that failed, may be another one.
    """
    before = out / "recipe.yaml"
    if not before.is_file():
        if traces := [name for name in _TRACES if (out / name).exists()]:
            raise TrainingError(
                f"{out} holds {traces[0]} of a run, but not its recipe.yaml: put it back, or choose another --out"
            )
        return
    if not resume:
        raise TrainingError(f"{out} already holds a run: choose another --out, or resume it")
    old, reason = None, "it holds no recipe"
    try:
        old = read_yaml(before.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YamlError) as error:
        reason = getattr(error, "strerror", None) or "damaged"
    if not isinstance(old, dict) or not isinstance(old.get("data") or {}, dict) or not old:
        raise TrainingError(f"cannot read {before}: {reason}: put it back, or choose another --out")
    with suppress(ValueError):  # a run of an earlier version lacks newer keys
        old = Recipe.model_validate(old).model_dump(mode="json")
    wanted_recipe = recipe.model_dump(mode="json")
    for key in (MACHINE_KEYS | NEUTRAL_KEYS) & old.keys():
        old[key] = wanted_recipe[key]
    if same_place(str((old.get("data") or {}).get("name")), recipe.data.name):
        old["data"]["name"] = recipe.data.name
    key, was, wanted = first_difference(old, wanted_recipe)
    if key and not is_unused(out):
        resumed = f"resume that run: capszoo train {shlex.quote(str(before))} --out {shlex.quote(str(out))}"
        raise TrainingError(
            f"{out} holds a run with {key}={was}, this recipe says {wanted}: choose another --out, "
            f"or {_start_from(out) or resumed}"
        )


def _start_from(out: Path) -> str:
    """How to start another run from a finished one; empty if the run has written no weights yet."""
    if out.name.startswith("fold-"):  # a recipe does not state which images are a fold's
        return "give the options of the call that began these folds"
    try:
        run_weights(out)
    except CapszooError:
        return ""
    return f"start from its weights: capszoo finetune {shlex.quote(str(out))} --data DATA --out NEW"


def is_unused(out: Path) -> bool:
    """True for a folder that has no checkpoint, no record of an epoch and no weights of a run."""
    records = out / "metrics.jsonl"
    written = records.is_file() and records.stat().st_size
    return not (written or checkpoint_folders(out) or any(out.glob("*.safetensors")))


def check_counts(out: Path, counts: Mapping[str, int]) -> None:
    """Refuse more or fewer images than those of the run so far, also where the user accepts other ones.

    Epochs of another number of updates would shift. Another number of images would be split differently: images that
    were trained on would become validation images.

    Args:
        out: the run's folder; its newest checkpoint states the numbers.
        counts: number of images of each split.

    Raises:
        TrainingError: the numbers differ; the message names the split.
    """
    before = newest_position(out).get("images", {})
    for split, now in counts.items():
        was = before.get(split, now)
        if split != "test" and was != now:
            raise TrainingError(
                f"the run in {out} has {was:,} images of {split}, now there are {now:,}: put the images back, "
                f"choose another --out{', or ' if (start := _start_from(out)) else ''}{start}"
            )


class FolderBefore:
    """What a run's folder holds before its start, to remove what a start that failed has written.

    Args:
        out: the folder, which need not exist.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.unused = is_unused(out)
        self.entries = set(out.iterdir()) if out.is_dir() else set()
        self.missing = [
            parent for parent in (out, *out.parents) if not parent.exists()
        ]  # the innermost first

    def restore(self) -> None:
        """Remove what has come into the folder; nothing if it held a run before."""
        if not self.unused:
            return
        for entry in set(self.out.iterdir()) - self.entries if self.out.is_dir() else ():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with suppress(OSError):
                    entry.unlink()
        for parent in self.missing:
            with suppress(OSError):  # not empty
                parent.rmdir()


#: Files of a run besides its recipe.
_TRACES = ("checkpoints", "metrics.jsonl", "sessions.json")


class RunLock:
    """Lock a run's folder, so that no other process on this machine or a shared disk trains into it.

    The lock is released when the process that holds it ends for any reason, so a stale one can be acquired; a
    paused process keeps it. On a file system without locks the run continues without one.

    Args:
        out: the folder.

    ``acquired`` is True after the first ``acquire``, also on a file system without locks.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.acquired = False
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Acquire the lock, unless this process already holds it; the folder must exist.

        Raises:
            TrainingError: another process holds it; the message names its number and machine.
        """
        if self._file is not None or fcntl is None:
            self.acquired = True
            return
        try:
            file = open(self.out / LOCK, "a+", encoding="utf-8")
        except OSError as error:
            raise TrainingError(not_writable(self.out, error)) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = "".join(c for c in file.read(300).strip() if c.isprintable()) or "another process"
            file.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                self.acquired = True
                return  # a file system without locks
            raise TrainingError(
                f"{self.out} is in use by {holder}: wait for it, stop it, or choose another --out"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._file, self.acquired = file, True

    def close(self) -> None:
        """Release the lock, if it is held."""
        if self._file is not None:
            self._file.close()
            self._file = None


def check_data(out: Path, fingerprints: Mapping[str, str], accept: bool = False) -> None:
    """Refuse to continue with other images than those of the run so far.

    Args:
        out: the run's folder; its ``sessions.json`` states the images of each session.
        fingerprints: sha256 of each split.
        accept: continue anyway.

    Raises:
        TrainingError: the newest session with fingerprints had others; the message names the splits.
    """
    before: Any = next(
        (session["data"] for session in reversed(read_sessions(out)) if session.get("data")), {}
    )
    if accept or not isinstance(before, dict):
        return
    changed = [split for split, digest in fingerprints.items() if before.get(split, digest) != digest]
    if changed:
        raise TrainingError(
            f"the images of {' and '.join(changed)} are not those that {out} was trained on so far: put them back, "
            f"choose another --out, or {_start_from(out) or 'continue with --accept-data'}"
        )


def open_run(recipe: Recipe, out: Path, lock: RunLock) -> None:
    """Create the run's folder and lock it; this is the first write of a run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not lock.acquired:
            lock.acquire()
            check_run(recipe, out, resume=False)  # another process may have begun a run since the first check
        if is_unused(out):  # a start that failed may have left them
            (out / "sessions.json").unlink(missing_ok=True)
        text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_atomically(out / "recipe.yaml", f"# The recipe of this run, every key resolved.\n{text}")
        for folder in (out, out / "checkpoints"):  # what a killed process left incomplete
            remove_stale(folder, owned=True)
    except OSError as error:
        raise TrainingError(not_writable(out, error)) from error


def compared_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recorded recipe that runs of one recipe share, whatever their seed and machine."""
    whole = Recipe.model_validate(recipe).model_dump(mode="json")  # earlier versions lack newer keys
    return {key: value for key, value in whole.items() if key not in MACHINE_KEYS | NEUTRAL_KEYS | {"seed"}}


def first_difference(old: Any, new: Any) -> tuple[str, Any, Any]:
    """The first dotted key in which two trees differ, and both values; an empty key if they are equal.

    Keys that fine-tuning derives from others come last.
    """
    differences = sorted(_differences(old, new, ""), key=lambda one: (one[0] in DERIVED_KEYS, one[0]))
    return differences[0] if differences else ("", None, None)


def _differences(old: Any, new: Any, prefix: str) -> list[tuple[str, Any, Any]]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [(prefix, old, new)]
    differences = []
    for key in old.keys() | new.keys():
        differences += _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    return differences


def read_sessions(out: Path) -> list[dict[str, Any]]:
    """The sessions that a run's ``sessions.json`` states, oldest first; none if it cannot be read."""
    sessions: Any = []
    with suppress(OSError, ValueError, RecursionError):
        sessions = json.loads((out / "sessions.json").read_text(encoding="utf-8"))
    return (
        [session for session in sessions if isinstance(session, dict)] if isinstance(sessions, list) else []
    )


def note_session(out: Path, session: dict[str, Any]) -> None:
    """Append the settings of this session to the run's ``sessions.json``."""
    write_atomically(out / "sessions.json", json.dumps([*read_sessions(out), session], indent=1) + "\n")


def check_room(out: Path, recipe: Recipe, net: nn.Module) -> None:
    """Raise ``TrainingError`` if the disk has no room for the run's checkpoints."""
    weights = sum(t.numel() * t.element_size() for t in net.state_dict().values())
    moments = 2 * sum(p.numel() * p.element_size() for p in net.parameters())  # the most that optimisers keep
    # the moving average, the best epoch's weights
    copies = 1 + (recipe.ema_decay is not None) + (recipe.early_stop is not None)
    needed = weights * copies + moments
    # one more than are kept, because the oldest is deleted after the newest is written
    held = sum(path.stat().st_size for path in (out / "checkpoints").rglob("*") if path.is_file())
    missing = needed * (KEEP + 1) - held - shutil.disk_usage(out).free
    if missing > 0:
        raise TrainingError(
            f"no room for checkpoints of about {needed / 1e6:,.2f} MB in {out}: "
            f"{missing / 1e6:,.2f} MB more must be free; make room or choose another --out"
        )


def versions() -> dict[str, str]:
    """Versions of the software that a run's result depends on."""
    import accelerate

    python = ".".join(map(str, sys.version_info[:3]))
    modules = {"torch": torch, "timm": timm, "accelerate": accelerate}
    versions = {name: module.__version__ for name, module in modules.items()}
    return {"python": python, **versions, "capszoo": __version__}
