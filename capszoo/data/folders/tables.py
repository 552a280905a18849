"""``csv:FILE``: a table of file names and labels, beside its images."""

from __future__ import annotations

import csv
import io
import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from capszoo.errors import CapszooError
from capszoo.images import files_below, is_visible_image

from ..errors import DataError
from ..readers import LABEL_COLUMNS
from ..sets import ImageSet, Origin, StreamedSet
from .common import SPLITS, Reading, encode_labels, locate, open_source
from .images import Files

_FILE_COLUMNS = ("file_name", "filename", "file", "path", "image", "img", "image_id", "id", "id_code", "name")
_SPLIT_COLUMNS = ("split", "set", "subset")
_MAX_BYTES = 2**30


@dataclass(frozen=True)
class _Row:
    file: str
    label: str
    split: str


def _read(table: Path, files: _Files | None = None) -> list[_Row]:
    """The rows of a table; ``files`` tell a first row of names from that of an image without a suffix."""
    try:
        if table.stat().st_size > _MAX_BYTES:
            raise DataError(f"{table} has {table.stat().st_size:,} bytes, which no table of labels has")
        text = table.read_text(encoding="utf-8-sig")
        sign = next((sign for sign in "\t,;" if sign in text.lstrip().partition("\n")[0]), None)
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=sign) if sign else _two_columns(text)
        cells = [row for row in lines if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {table}: {error}", "save it as CSV in UTF-8") from error
    if not cells:
        raise DataError(f"{table} is empty", "give each image a row: file name, label")
    first = [cell.strip() for cell in cells[0]]
    file, label, split, start = _columns(table, first)
    named = first[0].casefold() in _FILE_COLUMNS and first[1].casefold() in LABEL_COLUMNS
    if start and len(first) == 2 and not named and files is not None and files.find(first[0]) is not None:
        start = 0
    rows = []
    for number, row in enumerate(cells[start:], start=start + 1):
        if len(row) != len(cells[0]):
            raise DataError(f"{table}: row {number} has {len(row)} cells, the first has {len(cells[0])}")
        part = row[split].strip().casefold() if split is not None else "train"
        rows.append(_Row(row[file].strip(), row[label].strip(), part))
    return rows


def _two_columns(text: str) -> Iterator[list[str]]:
    """Lines of a file name and a label, with a space between them."""
    return (line.rsplit(None, 1) for line in text.splitlines())


def _columns(table: Path, first: Sequence[str]) -> tuple[int, int, int | None, int]:
    """Columns of file names, labels and splits (None), and the number of rows above the first image.

    A table without a row of names has two columns, the first with the names of image files.
    """
    names = [name.casefold() for name in first]

    def column(usual: Sequence[str]) -> int | None:
        return next((names.index(name) for name in usual if name in names), None)

    file, label, split = column(_FILE_COLUMNS), column(LABEL_COLUMNS), column(_SPLIT_COLUMNS)
    if len(first) == 2:
        return 0, 1, None, int(not os.path.splitext(first[0])[1])
    if file is None or label is None:
        what = "file names" if file is None else "labels"
        usual = "file_name" if file is None else "label"
        raise DataError(
            f"{table} has no column of {what} among {', '.join(first)[:200]}", f"name that column {usual}"
        )
    return file, label, split, 1


class _Files:
    """The images below a folder, by their path, or by their file's name with or without its suffix."""

    def __init__(self, folder: Path) -> None:
        self.by_path: dict[str, str] = {}
        self.by_name: dict[str, list[str]] = {}
        try:
            for path in files_below(folder):
                relative = path.relative_to(folder)
                if not is_visible_image(str(relative)):
                    continue
                self.by_path[_normal(relative.as_posix())] = str(relative)
                short = {relative.name, relative.stem, relative.with_suffix("").as_posix()}
                for name in short:
                    self.by_name.setdefault(_normal(name), []).append(str(relative))
        except CapszooError as error:
            raise DataError(error.message, error.remedy) from error

    def find(self, named: str) -> str | None:
        """The path of an image that a table names; None if there is none, or several of this name."""
        name = _normal(named.replace("\\", "/").removeprefix("./"))
        if name in self.by_path:
            return self.by_path[name]
        rows = self.by_name.get(name, [])
        return rows[0] if len(rows) == 1 else None


def _normal(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _splits(rows: Sequence[_Row]) -> dict[str, list[_Row]]:
    """Rows by split."""
    rows_of: dict[str, list[_Row]] = {}
    spelled = {"training": "train", "testing": "test"} | dict.fromkeys(SPLITS["val"], "val")
    for row in rows:
        rows_of.setdefault(spelled.get(row.split, row.split), []).append(row)
    return rows_of


def table_splits(name: str, source: str, data: str | Path | None) -> set[str]:
    """Which of train, val and test a table has."""
    return set(_splits(_read(locate(name, source, data, "file")))) & SPLITS.keys()


def open_table(
    name: str, source: str, split: str, data: str | Path | None, reading: Reading
) -> ImageSet | StreamedSet:
    """A split of the images that a table names; without a column of splits all are training images."""
    table = locate(name, source, data, "file")
    files = _Files(table.parent)
    parts = _splits(_read(table, files))
    part = next((key for key in (split, *(["val"] if split == "test" else [])) if key in parts), None)
    if part is None:
        only = f" of a {split} split, only {', '.join(sorted(parts))}" if parts else ""
        raise DataError(f"{table} has no rows{only}")
    rows = _found(table, parts[part], files, reading.skipped)
    training = parts.get("train", parts[part])
    labels, label_names = encode_labels(
        [row.label for row in rows], {row.label for row in training}, f"{table} ({part})"
    )
    looked = rows if part == "train" else _found(table, training, files, [])
    own, trained = (Files(table.parent, tuple(row.file for row in some)) for some in (rows, looked))
    notes = [
        f"{len(parts[key]):,} rows {f'of the split {key}' if key else 'without a split'} are not read"
        for key in sorted(parts.keys() - SPLITS)
    ]
    unnamed = len(files.by_path) - sum(map(len, parts.values()))
    if unnamed > 0:
        notes.append(f"{unnamed:,} images are not in the table")
    origin = Origin(notes=tuple(notes))
    return open_source(name, split, own, trained, labels, label_names, reading, origin=origin)


def _found(table: Path, rows: Sequence[_Row], files: _Files, skipped: list[str] | None) -> list[_Row]:
    """Rows with the paths of their images, below the folder of the table: a table could name any file.

    Raises:
        DataError: an image is missing, unless ``skipped`` takes its line, or it stands there twice.
    """
    rows_of: dict[str, _Row] = {}
    missing = []
    for row in rows:
        path = files.find(row.file)
        if path is None:
            missing.append(f"{row.file[:200]!r} is the name of no image below {table.parent}, or of several")
        elif path in rows_of:
            raise DataError(f"{table} names {path} twice", "leave one row: an image has one label")
        else:
            rows_of[path] = _Row(path, row.label, row.split)
    if missing and skipped is None:
        more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
        raise DataError(f"{table}: {missing[0]}{more}", "put the table beside its images, or use --skip-bad")
    if missing and skipped is not None:
        skipped.extend(f"{table.name}: {line}" for line in missing)
    if not rows_of:
        raise DataError(f"{table}: none of its {len(rows):,} images is below {table.parent}")
    return list(rows_of.values())
