"""The state of a run as plain files: to move a run to another machine, or to store it in a repository.

`export_state` writes the newest valid checkpoint (weights, moving average, optimiser state, position) as safetensors
files of a bounded size, with the run's recipe, records and sessions, and a manifest with every file's sha256.
`import_state` recreates a run from them that the same command resumes, with the same weights bit for bit as on the
first machine (same processor type and number of threads).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from capszoo._pretrained.files import sha256_of
from capszoo._utils.files import not_writable
from capszoo.errors import first_line

from .checkpoints import Checkpoint, check_position, latest_checkpoint, save_checkpoint, write_atomically
from .distributed import TrainingError

__all__ = ["PART_BYTES", "export_state", "import_state"]

#: Maximum bytes of a part; larger tensors are cut.
PART_BYTES = 15_000_000
FORMAT = 1
#: Key of a number in a parameter group that was a tensor (the count of updates of some optimisers).
TENSOR = "tensor"
COPIED = ("recipe.yaml", "sessions.json", "metrics.jsonl")


def _optimizer_tensors(optimizer: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state as tensors by name, and the rest as JSON.

    Raises:
        TrainingError: a setting of the optimiser is no number or word; the message names it.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in optimizer["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{key}"] = value
            else:
                numbers.setdefault(str(index), {})[key] = value
    groups = [{key: _as_number(value) for key, value in group.items()} for group in optimizer["param_groups"]]
    for key, value in [item for group in [*groups, *numbers.values()] for item in group.items()]:
        try:
            json.dumps(value)
        except TypeError:
            raise TrainingError(
                f"the optimizer's {key} is a {type(value).__name__}, which an exported state cannot hold"
            ) from None
    return tensors, {"param_groups": groups, "numbers": numbers}


def _as_number(value: Any) -> Any:
    """A tensor of one number as JSON; anything else unchanged."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return {TENSOR: value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    return value


def _from_number(stored: Any) -> Any:
    """Inverse of `_as_number`."""
    if isinstance(stored, dict) and TENSOR in stored:
        return torch.tensor(stored[TENSOR], dtype=getattr(torch, stored["dtype"]))
    return stored


def _pieces(tensors: dict[str, Tensor], limit: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, flat, those above `limit` bytes in several pieces."""
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().flatten()
        for number, piece in enumerate(flat.split(max(1, limit // flat.element_size()))):
            yield f"{name}#{number}", piece
        if not flat.numel():
            yield f"{name}#0", flat


def _parts(tensors: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, piece in _pieces(tensors, limit):
        amount = piece.numel() * piece.element_size()
        if part and size + amount > limit:
            yield part
            part, size = {}, 0
        part[name] = piece.clone()
        size += amount
    if part:
        yield part


@contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes the target, or moves into it if it exists. After an error nothing is left."""
    place = target.resolve()
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if not place.exists():
            temporary.rename(place)  # a kill leaves all or nothing
            return
        for entry in sorted(temporary.iterdir()):
            entry.replace(place / entry.name)
    except OSError as error:
        raise TrainingError(not_writable(target, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export_state(run: str | Path, folder: str | Path, part_bytes: int = PART_BYTES) -> Path:
    """Write the newest checkpoint of a run as safetensors files.

    Args:
        run: folder of a run.
        folder: target folder; created if necessary, must be empty.
        part_bytes: largest size of one file's tensors.

    Returns:
        The manifest's path.

    Raises:
        TrainingError: the run has no valid checkpoint, or the folder is not empty or cannot be written.
    """
    source, target = Path(run), Path(folder)
    checkpoint, _ = latest_checkpoint(source)
    if checkpoint is None or not (source / "recipe.yaml").is_file():
        raise TrainingError(f"{source} holds no checkpoint of a run: give the folder that train wrote")
    if target.exists() and any(target.iterdir()):
        raise TrainingError(f"{target} is not empty: choose another folder")
    tensors = {
        f"{part}/{name}": value
        for part, weights in checkpoint.weights.items()
        for name, value in weights.items()
    }
    more, optimizer = _optimizer_tensors(checkpoint.optimizer["optimizer"])
    tensors |= more
    state = {key: value for key, value in checkpoint.state.items() if key != "files"}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "state": state,
        "optimizer": optimizer,
        "scaler": checkpoint.optimizer.get("scaler"),
        "tensors": {name: list(value.shape) for name, value in tensors.items()},
        "files": {},
    }
    with _writing(target) as temporary:
        for number, part in enumerate(_parts(tensors, part_bytes)):
            content = to_safetensors(part)
            name = f"state-{number:03d}.safetensors"
            write_atomically(temporary / name, content)
            manifest["files"][name] = hashlib.sha256(content).hexdigest()
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
                manifest["files"][name] = sha256_of(temporary / name)
        write_atomically(temporary / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return target / "manifest.json"


def _read(source: Path) -> Checkpoint:
    """Read the checkpoint in a folder from `export_state`; raises an error if it is damaged."""
    manifest = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, this version reads {FORMAT}")
    pieces: dict[str, Tensor] = {}
    for name, digest in manifest["files"].items():
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not a file name")
        if sha256_of(source / name) != digest:
            raise ValueError(f"{name} does not match its checksum")
        if name.endswith(".safetensors"):
            pieces |= load_file(source / name)
    weights: dict[str, dict[str, Tensor]] = {}
    state: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in manifest["optimizer"]["numbers"].items()
    }
    for name, shape in manifest["tensors"].items():
        found = [
            pieces[key] for key in (f"{name}#{number}" for number in range(len(pieces))) if key in pieces
        ]
        tensor = torch.cat(found).reshape(shape)
        part, _, rest = name.partition("/")
        if part == "optimizer":
            index, _, key = rest.partition("/")
            state.setdefault(int(index), {})[key] = tensor
        else:
            weights.setdefault(part, {})[rest] = tensor
    groups = [
        {key: _from_number(value) for key, value in group.items()}
        for group in manifest["optimizer"]["param_groups"]
    ]
    optimizer: dict[str, Any] = {"optimizer": {"state": state, "param_groups": groups}}
    if manifest["scaler"] is not None:
        optimizer["scaler"] = manifest["scaler"]
    check_position(manifest["state"])
    return Checkpoint(weights, optimizer, manifest["state"])


def import_state(folder: str | Path, run: str | Path) -> Path:
    """Recreate a run from the output of `export_state`; `capszoo train <run>/recipe.yaml --out <run>` resumes it.

    Args:
        folder: output of `export_state`.
        run: folder of the new run; must not contain one.

    Returns:
        The folder of the run.

    Raises:
        TrainingError: a file is missing, damaged or of another format, or `run` contains a run.
    """
    source, target = Path(folder), Path(run)
    if (target / "recipe.yaml").exists() or (target / "checkpoints").exists():
        raise TrainingError(f"{target} already holds a run: choose another folder")
    try:
        checkpoint = _read(source)
        step = checkpoint.state["step"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise TrainingError(f"{source} is not the state of a run, or damaged: {first_line(error)}") from error
    with _writing(target) as temporary:
        save_checkpoint(temporary, step, checkpoint.weights, checkpoint.optimizer, checkpoint.state)
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
    return target
