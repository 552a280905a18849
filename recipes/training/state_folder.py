"""The runs of a queue in one folder of small files, to transfer results from a machine that is available for an hour.

`save_states` writes `<run>.state/` for an unfinished run (`transfer.export_state`) and `<run>.finished/` for
a finished one: its weights, metadata, golden outputs and records, with files above `PART_BYTES` cut into parts, and
every file's sha256. `load_states` recreates the runs on another machine.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capszoo._utils.files import not_writable, replace_folder
from capszoo.errors import WeightsError

from ..config import Recipe
from ..weights import SUFFIXES, finished_run
from ..yaml_tree import read_yaml
from .checkpoints import write_atomically
from .distributed import TrainingError
from .run_folder import check_run, closing_lock
from .transfer import COPIED, PART_BYTES, export_state, import_state

__all__ = ["load_states", "save_states"]

FORMAT = 1


def _weights(run: Path) -> Path | None:
    """The weights of a finished run; None if it is not finished."""
    try:
        return finished_run(run)
    except (WeightsError, OSError, ValueError):
        return None


def _step(run: Path) -> int:
    """Number of updates at the newest checkpoint of a run; -1 without one."""
    steps = (path.name.removeprefix("step-") for path in run.glob("checkpoints/step-*"))
    return max((int(step) for step in steps if step.isdecimal()), default=-1)


def _recover(target: Path) -> None:
    """Undo a replacement by `save_states` that was killed between its two renames."""
    replaced = target.with_name(f".{target.name}.old")
    if not target.exists() and replaced.exists():
        replaced.rename(target)


def _export_finished(run: Path, weights: Path, target: Path, part_bytes: int) -> None:
    """Write a finished run's files, cut if they are too large, and the manifest."""
    target.mkdir(parents=True)
    files = [weights.with_name(weights.stem + suffix) for suffix in SUFFIXES]
    manifest: dict[str, Any] = {"format": FORMAT, "files": {}}
    for file in [*files, *(run / name for name in COPIED)]:
        if not file.is_file():
            continue
        content = file.read_bytes()
        pieces = [content[start : start + part_bytes] for start in range(0, len(content), part_bytes)] or [
            b""
        ]
        names = [file.name] if len(pieces) == 1 else [f"{file.name}.{n:03d}" for n in range(len(pieces))]
        for name, piece in zip(names, pieces, strict=True):
            write_atomically(target / name, piece)
        manifest["files"][file.name] = {"sha256": hashlib.sha256(content).hexdigest(), "parts": names}
    write_atomically(target / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def _import_finished(source: Path, run: Path) -> None:
    """Recreate a finished run from the output of `_export_finished`; verifies everything before writing."""
    contents: dict[str, bytes] = {}
    try:
        manifest = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, this version reads {FORMAT}")
        for name, entry in manifest["files"].items():
            if any(Path(part).name != part for part in (name, *entry["parts"])):
                raise ValueError(f"{name!r} or one of its parts is not a file name")
            contents[name] = b"".join((source / part).read_bytes() for part in entry["parts"])
            if hashlib.sha256(contents[name]).hexdigest() != entry["sha256"]:
                raise ValueError(f"{name} does not match its checksum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{source} is not a finished run, or damaged: {error}") from error
    if (run / "recipe.yaml").is_file() and "recipe.yaml" in contents:  # a run of other settings stays
        try:
            recipe = Recipe.model_validate(read_yaml(contents["recipe.yaml"].decode()))
        except ValueError as error:
            raise TrainingError(f"{source} is not a finished run, or damaged: {error}") from error
        check_run(recipe, run, resume=True)
    try:
        run.mkdir(parents=True, exist_ok=True)
        with closing_lock(run) as lock:
            lock.acquire()
            # the weights' metadata last: they mark the run as finished
            for name in sorted(contents, key=lambda name: name.endswith(".json") and name not in COPIED):
                write_atomically(run / name, contents[name])
    except OSError as error:
        raise TrainingError(not_writable(run, error)) from error


def _saved_step(state: Path) -> int:
    """Number of updates of a state from `export_state`."""
    try:
        return int(json.loads((state / "manifest.json").read_text(encoding="utf-8"))["state"]["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{state} is not the state of a run, or damaged: {error}") from error


def load_states(runs: Sequence[Path], folder: Path) -> list[Path]:
    """Recreate runs from an earlier `save_states`.

    A run that already exists in its folder is not changed, unless the folder has it finished and the run is not.

    Args:
        runs: folders of runs; states of other runs are ignored.
        folder: output of `save_states`; need not exist.

    Returns:
        The runs that were recreated.

    Raises:
        TrainingError: a file is damaged, or a state is newer than the existing run.
    """
    made = []
    for run in runs:
        if _weights(run):
            continue
        finished, state = folder / f"{run.name}.finished", folder / f"{run.name}.state"
        try:
            for target in (finished, state):
                _recover(target)
        except OSError as error:
            raise TrainingError(not_writable(folder, error)) from error
        if finished.is_dir():
            _import_finished(finished, run)
            made.append(run)
        elif state.is_dir():
            if _step(run) < 0 and not (run / "recipe.yaml").exists():
                import_state(state, run)
                made.append(run)
                continue
            saved = _saved_step(state)
            if saved > _step(run):
                raise TrainingError(
                    f"{run} is at update {max(_step(run), 0)}, {state} at {saved}: move one of them away"
                )
    return made


def save_states(runs: Sequence[Path], folder: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write the state of runs as files of a bounded size, replacing those of an earlier call.

    Args:
        runs: folders of runs; those without a checkpoint are skipped.
        folder: target folder; created if necessary.
        part_bytes: largest size of a part.

    Returns:
        The folders written.

    Raises:
        TrainingError: the folder cannot be written; or a run is damaged, after the others have been written.
    """
    written, failed = [], list[TrainingError]()
    for run in runs:
        weights = _weights(run)
        if not weights and _step(run) < 0:
            continue
        target = folder / f"{run.name}.{'finished' if weights else 'state'}"
        temporary, replaced = (folder / f".{target.name}.{suffix}" for suffix in ("tmp", "old"))
        try:
            _recover(target)
            for old in (temporary, replaced):
                shutil.rmtree(old, ignore_errors=True)
            if weights:
                _export_finished(run, weights, temporary, part_bytes)
            else:
                export_state(run, temporary, part_bytes)
            replace_folder(temporary, target, replaced)
            if weights:
                shutil.rmtree(folder / f"{run.name}.state", ignore_errors=True)
            written.append(target)
        except TrainingError as error:  # a damaged run: the others are saved nevertheless
            failed.append(error)
        except OSError as error:
            raise TrainingError(not_writable(folder, error)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    if failed:
        raise failed[0]
    return written
