"""``hf:OWNER/NAME``: data sets of the Hugging Face Hub, as the library datasets reads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from capszoo._utils.files import cache_folder, expanded, writable_cache
from capszoo.errors import CapszooError, first_line, install_hint

from ..errors import DataError
from ..readers import LABEL_COLUMNS, image_below
from ..sets import ImageSet, StreamedSet
from .common import SPLITS, Label, Reading, encode_labels, locate, open_source


@dataclass(frozen=True)
class _Rows:
    """Images in a data set of the library datasets, whose files are memory-mapped."""

    rows: Any
    column: str
    folder: Path

    def __len__(self) -> int:
        return len(self.rows)

    def encoded(self, index: int) -> tuple[bytes | Path, str]:
        row = f"row {index} of {self.column}"
        return _cell(self.rows[index][self.column], self.folder, row), row

    def files(self) -> str:
        # not the rows' own: it depends on the paths and times of the files
        paths = (path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        files = [
            f"{path.as_posix()} {(self.folder / path).stat().st_size}"
            for path in sorted(paths)
            if not any(part.startswith(".") for part in path.parts)  # caches of the Hub's client
        ]
        return "\n".join([*files, f"{self.column} {len(self.rows)} "])


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
    """Download a data set's repository from the Hub to ``folder``/OWNER/NAME, except files that already exist."""
    from huggingface_hub import snapshot_download

    from capszoo._utils.hub import limit_hub_waits

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
    download: str | Path | None,
    reading: Reading,
) -> ImageSet | StreamedSet:
    """A split of a Hub repository, downloaded earlier or now."""
    splits, folder = hub_splits(name, repository, data, download)  # raises an error if the library is missing
    import datasets

    names = SPLITS[split]
    part = next((part for part in names if part in splits), None)
    if part is None:
        raise DataError(f"{name} has the splits {', '.join(splits)}, none of {', '.join(names)}")
    rows = splits[part]
    training = splits.get("train", rows)
    image = next((key for key, kind in rows.features.items() if isinstance(kind, datasets.Image)), None)
    label = _label_column(rows)
    if image is None or label is None:
        what = "image" if image is None else "class label"
        raise DataError(
            f"{name} has no column of a {what} among {_described(rows)}: "
            "name that of the labels label, with whole numbers or text"
        )
    labels, label_names = _labels(name, part, rows, training, label)
    undecoded = (one.cast_column(image, datasets.Image(decode=False)) for one in (rows, training))
    source, looked = (_Rows(one, image, folder) for one in undecoded)
    return open_source(name, split, source, looked, labels, label_names, reading)


def _labels(name: str, part: str, rows: Any, training: Any, column: str) -> tuple[Tensor, list[str]]:
    """Class indices of a split's rows, and the names of the classes."""
    values = rows[column][:]
    if not all(map(_is_label, values)):
        raise DataError(f"{name}: some images of {part} have no label: it cannot be trained or tested on")
    names = getattr(rows.features[column], "names", None)
    if names is None:
        trained = {value for value in training[column][:] if _is_label(value)}
        return encode_labels(values, trained, f"{name} ({part})")
    if max(values, default=0) >= len(names):
        raise DataError(f"{name} ({part}): a label is {max(values)}, but there are {len(names)} class names")
    return torch.tensor(values, dtype=torch.int64), names


def _described(rows: Any) -> str:
    """Names and kinds of the columns."""
    import datasets

    def kind(feature: Any) -> str:
        return str(feature.dtype) if isinstance(feature, datasets.Value) else type(feature).__name__

    return ", ".join(f"{key} ({kind(feature)})" for key, feature in rows.features.items())


def _label_column(rows: Any) -> str | None:
    """The column of class labels: one that the repository declares, or one of numbers or text with a usual name."""
    import datasets

    kinds = rows.features
    declared = [key for key, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
    declared.sort(key=lambda key: key not in LABEL_COLUMNS)  # a usual name first
    plain = (
        key
        for key in LABEL_COLUMNS
        if key in kinds
        and str(getattr(kinds[key], "dtype", "")).startswith(("int", "uint", "string", "large_string"))
    )
    return next(itertools.chain(declared, plain), None)


def _is_label(value: Label | None) -> bool:
    return value is not None and (bool(value.strip()) if isinstance(value, str) else value >= 0)


def _is_unlabelled(rows: Any) -> bool:
    """True if there is a column of labels, but the first hundred images have none (empty, or -1)."""
    column = _label_column(rows)
    if column is None or not len(rows):
        return False
    return not any(map(_is_label, rows.select_columns([column])[:100][column]))


def hub_splits(
    name: str, repository: str, data: str | Path | None, download: str | Path | None
) -> tuple[Any, Path]:
    """All splits of a repository by name, through the library datasets, and its folder.

    The library's copy is in capszoo's cache: the folder may be read-only, or a backup.

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
        cache = writable_cache(cache_folder() / "datasets")
        dataset = read(str(folder.absolute()), configuration or None, cache_dir=str(cache))
    except CapszooError as error:
        raise DataError(f"{name}: {error.message}", error.remedy) from error
    except Exception as error:  # the library raises many kinds of errors
        raise DataError(f"{name}: {first_line(error)}") from error
    return {part: rows for part, rows in dataset.items() if not _is_unlabelled(rows)}, folder
