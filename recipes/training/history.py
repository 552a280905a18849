"""The history of a run, epoch by epoch: its records, and the summary stored with its weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from capszoo._pretrained.catalogue import checkpoints
from capszoo.errors import CapszooError
from capszoo.metadata import first_complaint

from ..yaml_tree import YamlError, read_yaml
from .checkpoints import checkpoint_folders, step_of

_logger = logging.getLogger("capszoo.training")


#: Keys of an epoch's record that are stored with the weights; the seconds of training are for time to accuracy.
KEPT = ("epoch", "lr", "train_loss", "train_top1", "val_top1", "val_recall", "seconds")


class _Votes(BaseModel):
    """Votes by their agreement, see ``capszoo.explain.routing_stats.AgreementCurve``."""

    model_config = ConfigDict(strict=True)

    share: list[float] = Field(default=[], min_length=1)
    length: list[float | None] = []

    @model_validator(mode="after")
    def _of_one_length(self) -> _Votes:
        if len(self.share) != len(self.length):
            raise ValueError("share and length differ in length")
        return self


class _Epoch(BaseModel):
    """What ``capszoo curves`` draws of an epoch's record."""

    model_config = ConfigDict(strict=True)

    epoch: int = Field(ge=1, le=10**9)
    step: int = Field(ge=0, le=10**15)
    lr: float | None = None
    train_loss: float | None = None
    train_top1: float | None = None
    val_top1: float | None = None
    routing: _Votes = _Votes()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The epochs' records of a ``metrics.jsonl``; empty if there is no file.

    A damaged line, without the numbers of its epoch and update, is left out with a warning; the last one, which a kill
    may have truncated, silently.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        record: Any = None
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
        if isinstance(record, dict) and _placed(record):
            records.append(record)
        elif number < len(lines) or record is not None:
            _logger.warning("%s: line %d is no record of an epoch and is left out", path, number)
    return records


def _placed(record: Mapping[str, Any]) -> bool:
    """Whether a record states its epoch and its update; by type, as ``true`` is an int."""
    return all(
        type(record.get(key)) is int and record[key] >= least for key, least in (("epoch", 1), ("step", 0))
    )


def history_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The records as a few columns of numbers: small enough for the metadata of the weights."""
    columns = {key: [record.get(key) for record in records] for key in KEPT}
    return {key: column for key, column in columns.items() if any(value is not None for value in column)}


def records_of(history: Mapping[str, Sequence[float | None]]) -> list[dict[str, Any]]:
    """Inverse of ``history_of``."""
    return [dict(zip(history, row, strict=True)) for row in zip(*history.values(), strict=True)]


def find_runs(names: Sequence[str | Path]) -> dict[str, list[dict[str, Any]]]:
    """The epochs' records of runs: folders (also unfinished ones), or checkpoints of the zoo with a history.

    Records of a folder get ``images``, the number of training images processed so far.

    Returns:
        Records by the folder's last name, or by the whole path if two names are equal.

    Raises:
        CapszooError: there is no such run, or no epoch has ended yet.
    """
    runs_by_name: dict[str, list[dict[str, Any]]] = {}
    last = [Path(name).resolve().name if Path(name).is_dir() else str(name) for name in names]
    for name, short in zip(map(str, names), last, strict=True):
        records = _records(name)
        if not records:
            raise CapszooError(f"{name}: no epoch has ended yet", "wait for the first")
        runs_by_name[short if last.count(short) == 1 else name] = records
    return runs_by_name


def trained_images(run: Path) -> int:
    """Training images up to the newest checkpoint or the last complete epoch of a run's folder; 0 without either."""
    try:
        batch = _batch_size(run / "recipe.yaml")
    except (CapszooError, OSError):
        return 0  # absent, or damaged: the run itself says so
    epochs = [record["step"] for record in read_records(run / "metrics.jsonl")]
    saved = [step_of(folder) for folder in checkpoint_folders(run)]
    return batch * max([0, *epochs, *saved])


def _records(name: str) -> list[dict[str, Any]]:
    folder = Path(name)
    if name in checkpoints():
        return records_of(checkpoints()[name].metadata.history)
    if not (folder / "recipe.yaml").is_file():
        raise CapszooError(
            f"{name}: neither the folder of a run nor a checkpoint of the zoo",
            "give the folder that capszoo train --out wrote",
        )
    batch, file = _batch_size(folder / "recipe.yaml"), folder / "metrics.jsonl"
    records = read_records(file)
    for number, record in enumerate(records, 1):
        try:
            _Epoch.model_validate(record)
        except ValidationError as error:
            raise CapszooError(
                f"{file}: record {number} is damaged ({': '.join(first_complaint(error))})",
                "put the file back, or leave the run out",
            ) from None
    return [record | {"images": record["step"] * batch} for record in records]


def _batch_size(file: Path) -> int:
    try:
        return int(read_yaml(file.read_text(encoding="utf-8"))["batch_size"])
    except (YamlError, UnicodeDecodeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CapszooError(
            f"{file} is no recipe of a run", "put it back, or choose another folder"
        ) from error
