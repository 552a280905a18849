"""What a published file may say about the machine on which a run was trained."""

from __future__ import annotations

import re
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

__all__ = ["public"]


def public(value: Any) -> Any:
    """The same value with paths of this machine reduced to their last part (`imagefolder:/home/me/pets`)."""
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(item) for item in value]
    found = (
        re.fullmatch(r"((?:[\w-]{2,}:)*)(/.*|~.*|\.\.?[/\\].*|[A-Za-z]:[\\/].*|\\.*)", value)
        if isinstance(value, str)
        else None
    )
    if not found:
        return value
    kind: type[PurePath] = PureWindowsPath if "\\" in found[2] else PurePosixPath
    return f"{found[1] or ''}{kind(found[2]).name}"
