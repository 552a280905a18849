"""`hf:OWNER/NAME`: data sets of the Hugging Face Hub, as the library datasets reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from capszoo._files import expanded
from capszoo.errors import first_line, install_hint

from ...images import Framing
from ..errors import DataError
from ..readers import decode_image, image_below, image_mode, mode_of
from ..sets import ImageSet, StreamedSet
from ..specs import Side
from .common import SPLITS, decode_or_stream, folder_spec, framing_text, locate, settled, sides, to_tensor

__all__ = ["fetch_repository", "hub_splits", "open_hub"]


@dataclass(frozen=True)
class _Rows:
    """Images in a data set of the library datasets, whose files are memory-mapped."""

    rows: Any
    column: str
    mode: str
    side: tuple[int, int]
    folder: Path
    framing: Framing = Framing()

    def decode(self, index: int) -> Tensor:
        row = f"row {index} of {self.column}"
        encoded = _cell(self.rows[index][self.column], self.folder, row)
        return to_tensor(decode_image(encoded, self.mode, row, self.side, self.framing))

    def fingerprint(self) -> str:
        # not the rows' own: it depends on the paths and times of the files
        paths = (path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        files = [
            f"{path.as_posix()} {(self.folder / path).stat().st_size}"
            for path in sorted(paths)
            if not any(part.startswith(".") for part in path.parts)  # caches of the Hub's client
        ]
        return "\n".join([*files, f"{self.column} {len(self.rows)} {framing_text(self.side, self.framing)}"])


def _cell(cell: dict[str, Any] | None, folder: Path, row: str) -> bytes | Path:
    """An image's bytes, or its file, which must be in the repository: a table could name any path."""
    if not cell or not (cell["bytes"] or cell["path"]):
        raise DataError(f"{row}: no image")
    try:
        return cell["bytes"] or image_below(folder, str(cell["path"]), row)
    except DataError as error:
        # its text has the folder, which would be published with the list of skipped rows
        file = PurePath(str(cell["path"])).name
        raise DataError(f"{row}: its file {file[:200]!r} is not in the repository") from error


def fetch_repository(repository: str, folder: str | Path) -> Path:
    """Download a data set's repository from the Hub to `folder`/OWNER/NAME, except files that already exist."""
    from huggingface_hub import snapshot_download

    from capszoo._hub import limit_hub_waits

    limit_hub_waits()
    target = expanded(folder) / repository
    try:
        snapshot_download(repository, repo_type="dataset", local_dir=target)
    except Exception as error:  # no network, no such repository, no access, disk full: many kinds
        raise DataError(f"cannot fetch hf:{repository}: {first_line(error)}") from error
    return target


def open_hub(
    name: str,
    repository: str,
    split: str,
    data: str | Path | None,
    size: Side | None,
    resize: Side | None,
    download: str | Path | None,
    skipped: list[str] | None,
    channels: int | None = None,
    framing: Framing | None = None,
) -> ImageSet | StreamedSet:
    """A split of a Hub repository, downloaded earlier or now."""
    found, folder = hub_splits(name, repository, data, download)  # raises an error if the library is missing
    import datasets

    names = SPLITS[split]
    part = next((part for part in names if part in found), None)
    if part is None:
        raise DataError(f"{name} has the splits {', '.join(found)}, none of {', '.join(names)}")
    rows = found[part]
    image = next((key for key, kind in rows.features.items() if isinstance(kind, datasets.Image)), None)
    label = _label_column(rows)
    if image is None or label is None:
        raise DataError(
            f"{name} has the columns {', '.join(rows.features)}: no image or no class label among them"
        )
    label_names = rows.features[label].names
    values = rows[label][:]
    if not all(_is_label(value) for value in values):
        raise DataError(f"{name}: some images of {part} have no label: it cannot be trained or tested on")
    if max(values, default=0) >= len(label_names):
        raise DataError(
            f"{name} ({part}): a label is {max(values)}, but there are {len(label_names)} class names"
        )
    labels = torch.tensor(values, dtype=torch.int64)
    rows = rows.cast_column(image, datasets.Image(decode=False))
    looked = (found["train"] if "train" in found else rows).cast_column(image, datasets.Image(decode=False))

    def mode_at(index: int) -> str:
        cell = looked[index][image]
        return image_mode(_cell(cell, folder, name), name)

    mode = mode_of(mode_at, len(looked), channels)
    size, side = sides(size, resize)
    spec = folder_spec(name, label_names, (3 if mode == "RGB" else 1, *size), len(labels), split)

    def image_at(index: int) -> tuple[bytes | Path, str]:
        return _cell(looked[index][image], folder, name), name

    spec, framing = settled(spec, framing, image_at, len(looked), side)
    return decode_or_stream(
        spec, split, _Rows(rows, image, mode, side, folder, framing), labels, side, skipped
    )


def _label_column(rows: Any) -> str | None:
    import datasets

    return next((key for key, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)), None)


def _is_label(value: int | None) -> bool:
    return value is not None and value >= 0


def _is_unlabelled(rows: Any) -> bool:
    """True if there is a column of labels, but the first hundred images have none (empty, or -1)."""
    column = _label_column(rows)
    if column is None or not len(rows):
        return False
    return not any(map(_is_label, rows.select_columns([column])[:100][column]))


def hub_splits(
    name: str, repository: str, data: str | Path | None, download: str | Path | None
) -> tuple[Any, Path]:
    """All splits of a repository by name, through the library datasets; and its folder, which also has the cache.

    A split without labels is left out: competitions publish their test images so.
    """
    configuration = None
    if not expanded(repository).is_dir():
        repository, _, configuration = repository.partition(":")
    try:
        folder = locate(name, repository, data)
    except DataError as error:
        if download is None:
            raise DataError(
                f"{name} is in no data folder, and fetched only when told where to: "
                f"capszoo data fetch hf:{repository} --to FOLDER, then give --data FOLDER in training, "
                f"--data hf:FOLDER/{repository} in finetune and eval"
            ) from error
        folder = fetch_repository(repository, download)
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"hf: needs the library datasets: {install_hint('train')}") from error
    read: Callable[..., Any] = datasets.load_dataset
    try:
        found = read(str(folder), configuration or None, cache_dir=str(folder / ".cache"))
    except Exception as error:  # the library raises many kinds of errors
        raise DataError(f"{name}: {first_line(error)}") from error
    return {part: rows for part, rows in found.items() if not _is_unlabelled(rows)}, folder
