"""Checkpoints of a run: one folder each, written under a temporary name and renamed, verified when read.

``checkpoints/step-00000429/`` contains ``model.safetensors`` (and ``ema``, ``feedback`` and ``best``, where the run has
them), ``optimizer.pt`` (the optimiser's state and, in fp16, the loss scaler's, read with ``weights_only=True``) and,
written last, ``state.json`` with the position of the run and every file's sha256. If a folder fails verification, the
previous one is used.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from capszoo._pretrained.files import sha256_of
from capszoo._utils.files import replacing, write_atomically
from capszoo.metadata import first_complaint

#: Number of checkpoints of a run.
KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint: weights by file name, the optimiser's tensors, the position in the run."""

    weights: dict[str, dict[str, Tensor]]
    optimizer: dict[str, Any]
    state: dict[str, Any]


def _safetensors_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    return to_safetensors({key: value.detach().cpu().contiguous() for key, value in tensors.items()})


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, completely or not at all."""
    write_atomically(path, _safetensors_bytes(tensors))


def _contents(
    weights: Mapping[str, Mapping[str, Tensor]], optimizer: Mapping[str, Any]
) -> Iterator[tuple[str, bytes]]:
    for name, tensors in weights.items():
        yield f"{name}.safetensors", _safetensors_bytes(tensors)
    buffer = io.BytesIO()
    torch.save(dict(optimizer), buffer)
    yield "optimizer.pt", buffer.getvalue()


def save_checkpoint(
    run: Path,
    step: int,
    weights: Mapping[str, Mapping[str, Tensor]],
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Path:
    """Write the checkpoint of ``step``, delete all but the newest ones, and return its folder."""
    target = run / "checkpoints" / f"step-{step:08d}"
    # one of the same position, after a resume, has the same content
    with replacing(target, folder=True) as work:
        digests = {}
        # Written by Python, not by the libraries: a full disk is then an OSError with a clear message.
        for name, content in _contents(weights, optimizer):
            write_atomically(work / name, content)
            digests[name] = hashlib.sha256(content).hexdigest()
        write_atomically(work / "state.json", json.dumps({**state, "step": step, "files": digests}, indent=1))
    every = checkpoint_folders(run)
    now = every.index(target) + 1
    # those of later steps are damaged: else the run would have resumed from them
    for old in every[: max(0, now - KEEP)] + every[now:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def checkpoint_folders(run: Path) -> list[Path]:
    """Folders of a run's checkpoints, oldest first; those of other names, such as copies, are the user's."""
    folders = [
        path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)
    ]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """Number of updates of the checkpoint in a folder."""
    return int(folder.name.removeprefix("step-"))


class _Position(BaseModel):
    """What a ``state.json`` must state, by type: ``true`` is no number."""

    model_config = ConfigDict(strict=True)

    step: int = Field(ge=0)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    sums: list[float] = Field(min_length=3, max_length=3)
    images: dict[str, int]
    threads: int | None = Field(None, ge=1)
    files: dict[str, str]


def _read_position(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise ValueError("state.json holds no object")
    try:
        _Position.model_validate(state)
    except ValidationError as error:
        raise ValueError(f"state.json: {': '.join(first_complaint(error))}") from error
    return state


def _read(folder: Path) -> Checkpoint:
    """Read a checkpoint and verify its checksums; raises many kinds of errors for a damaged one."""
    state = _read_position(folder)
    files = state["files"]
    if not {"model.safetensors", "optimizer.pt"} <= files.keys():
        raise ValueError("state.json does not name the files of a checkpoint")
    for name, digest in files.items():
        if Path(name).name != name or sha256_of(folder / name) != digest:
            raise ValueError(f"{name[:60]} does not match its checksum")
    weights = {
        Path(name).stem: load_file(folder / name) for name in sorted(files) if name.endswith(".safetensors")
    }
    optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    if not isinstance(optimizer, dict):
        raise ValueError("optimizer.pt holds no mapping")
    return Checkpoint(weights, optimizer, state)


def latest_checkpoint(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint of a run, and one line about each newer one that is damaged."""
    skipped: list[str] = []
    for folder in reversed(checkpoint_folders(run)):
        try:
            return _read(folder), skipped
        # SafetensorError, UnpicklingError, RecursionError, …: the previous one may be valid
        except Exception as error:
            reason = (" ".join(str(error).split()) or type(error).__name__)[:200]
            skipped.append(f"skipped the damaged checkpoint {folder.name}: {reason}")
    return None, skipped


def newest_position(run: Path) -> dict[str, Any]:
    """The newest position in a run that can be read, without its files; empty if there is none."""
    for folder in reversed(checkpoint_folders(run)):
        with suppress(OSError, ValueError, RecursionError):
            return _read_position(folder)
    return {}
