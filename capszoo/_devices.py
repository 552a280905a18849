"""Names of devices, and Inductor's options on them; imports no torch."""

from __future__ import annotations

import re

from .errors import UsageError

__all__ = ["DEVICES", "check_device", "inductor_options"]

#: Names of devices; ``cuda:N`` is valid too.
DEVICES = ("auto", "cpu", "cuda", "mps")


def check_device(name: str | None) -> str | None:
    """Return the name; raise `UsageError` if no machine has such a device. Only torch knows whether this one does."""
    known = name is None or name in DEVICES or re.fullmatch(r"cuda:[0-9]{1,3}", name)
    if not known:
        raise UsageError(f"unknown device '{name}'", f"use {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    return name


def inductor_options(device_type: str, *, channels_last: bool) -> dict[str, bool] | None:
    """Argument `options` of torch.compile for a network of that layout.

    On a CPU, Inductor runs the convolutions of a contiguous network channels-last by default, and converts in between.
    """
    return {"layout_optimization": False} if device_type == "cpu" and not channels_last else None
