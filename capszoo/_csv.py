"""Tables for other programs: CSV files, written whole or not at all."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .errors import CapszooError

__all__ = ["write_csv"]


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a table; None is an empty cell.

    Args:
        path: of the file; its folder is made.
        header: names of the columns.
        rows: their values.

    Raises:
        CapszooError: the file cannot be written.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            writer.writerows(rows)
        temporary.replace(path)
    except OSError as e:
        raise CapszooError(f"{path}: cannot be written ({e.strerror})", "choose another place") from None
    finally:
        if path.parent.is_dir():
            temporary.unlink(missing_ok=True)
    return path
