"""Names of devices; imports no torch."""

from __future__ import annotations

from .errors import UsageError

__all__ = ["DEVICES", "check_device"]

#: Names of devices; ``cuda:N`` is a further one.
DEVICES = ("auto", "cpu", "cuda", "mps")


def check_device(name: str | None) -> str | None:
    """The name itself; `UsageError` where no machine has such a device. Whether this one does, torch says."""
    kind, _, number = (name or "auto").partition(":")
    if kind not in DEVICES or (number and not number.isdigit()):
        raise UsageError(f"unknown device '{name}'", f"use {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    return name
