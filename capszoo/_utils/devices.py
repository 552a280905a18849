"""Names of devices, the device of a name, and Inductor's options on a device; torch is imported on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

import re

from ..errors import UsageError

#: Names of devices; ``cuda:N`` is valid too.
DEVICES = ("auto", "cpu", "cuda", "mps")


def check_device(name: str | None) -> str | None:
    """Return the name; raise ``UsageError`` if no machine has such a device. Only torch knows whether this one does."""
    valid = name is None or name in DEVICES or re.fullmatch(r"cuda:[0-9]{1,3}", name)
    if not valid:
        raise UsageError(f"unknown device '{name}'", f"use {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    return name


def inductor_options(device_type: str, *, channels_last: bool) -> dict[str, bool] | None:
    """Argument ``options`` of torch.compile for a network of that layout.

    On a CPU, Inductor runs the convolutions of a contiguous network channels-last by default, and converts in between.
    """
    return {"layout_optimization": False} if device_type == "cpu" and not channels_last else None


def default_device() -> torch.device:
    """CUDA if available, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_device(name: str | torch.device | None = None) -> torch.device:
    """Resolve the name of a device.

    Args:
        name: ``cpu``, ``cuda`` (or ``cuda:N``), ``mps``; ``auto`` or None selects CUDA if available, else the CPU.

    Raises:
        UsageError: an unknown device, or one that this machine does not have.
    """
    import torch

    if isinstance(name, torch.device):
        return name
    if name in (None, "auto"):
        return default_device()
    check_device(str(name))
    kind, _, number = str(name).partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise UsageError(f"there is no device '{name}' on this machine", "use --device cpu")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UsageError("there is no device 'mps' on this machine", "use --device cpu")
    return torch.device(str(name))
