"""Folders that hold data sets: the caller's, or those of the environment variable ``CAPSZOO_DATA``."""

from __future__ import annotations

import os
from pathlib import Path

from .._utils.files import expanded
from .errors import DataError


def given_root(data: str | Path) -> Path:
    """The caller's data folder.

    Raises:
        DataError: there is no such folder.
    """
    root = expanded(data)
    if not root.is_dir():
        raise DataError(
            f"{root}: {'is a file' if root.exists() else 'no such folder'}; --data takes a folder"
        )
    return root


def environment_roots() -> list[Path]:
    """Folders of ``CAPSZOO_DATA``, which may be missing."""
    return [expanded(part) for part in os.environ.get("CAPSZOO_DATA", "").split(os.pathsep) if part]
