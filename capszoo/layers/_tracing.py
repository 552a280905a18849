"""Detect tracing and export, which need plain operations only."""

import torch
from torch import Tensor

__all__ = ["is_tracing"]

#: The variable that ``torch.compiler.is_exporting`` returns. In torch 2.11, torch.compile replaces a call of that
#: function by True, although nothing is exported: every compiled network would be computed by its reference.
_HAS_FLAG = hasattr(torch.compiler, "_is_exporting_flag")


def is_tracing(x: Tensor) -> bool:
    """True while ``x`` is traced by FX or TorchScript, or exported. (torch.compile stays in Python.)"""
    if isinstance(x, torch.fx.Proxy) or torch.jit.is_tracing():
        return True
    return torch.compiler._is_exporting_flag if _HAS_FLAG else torch.compiler.is_exporting()
