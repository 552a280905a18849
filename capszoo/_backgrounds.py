"""Names of backgrounds for transparent pixels; imports nothing heavy."""

from __future__ import annotations

from .errors import UsageError

__all__ = ["BACKGROUNDS", "check_background"]

#: Backgrounds and their values.
BACKGROUNDS = {"black": 0, "white": 255}


def check_background(name: str | None) -> str | None:
    """Return the name; raise `UsageError` for an unknown one. None stands for the background of the weights."""
    if name is not None and name not in BACKGROUNDS:
        raise UsageError(f"no background '{name}'", f"use {' or '.join(BACKGROUNDS)}")
    return name
