"""Detect tracing and export, which need plain operations only."""

import torch
from torch import Tensor

__all__ = ["is_tracing"]


def is_tracing(x: Tensor) -> bool:
    """True while ``x`` is traced by FX or TorchScript, or exported. (torch.compile stays in Python.)"""
    return isinstance(x, torch.fx.Proxy) or torch.jit.is_tracing() or torch.compiler.is_exporting()
