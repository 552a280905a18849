"""Names of devices; imports no torch."""

from __future__ import annotations

from .errors import UsageError

__all__ = ["DEVICES", "check_device"]

#: Names of devices; ``cuda:N`` is valid too.
DEVICES = ("auto", "cpu", "cuda", "mps")


def check_device(name: str | None) -> str | None:
    """Return the name; raise `UsageError` if no machine has such a device. Only torch knows whether this one does."""
    kind, _, number = (name or "auto").partition(":")
    if kind not in DEVICES or (number and not number.isdigit()):
        raise UsageError(f"unknown device '{name}'", f"use {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    return name
