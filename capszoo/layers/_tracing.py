"""Detect tracing, export and transforms, which need plain operations only."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["is_tracing", "is_transformed"]

#: The variable that ``torch.compiler.is_exporting`` returns. In torch 2.11, torch.compile replaces a call of that
#: function by True, although nothing is exported: every compiled network would be computed by its reference.
_HAS_FLAG = hasattr(torch.compiler, "_is_exporting_flag")


def is_tracing(x: Tensor) -> bool:
    """True while ``x`` is traced by FX or TorchScript, or exported. (torch.compile stays in Python.)"""
    if isinstance(x, torch.fx.Proxy) or torch.jit.is_tracing():
        return True
    return torch.compiler._is_exporting_flag if _HAS_FLAG else torch.compiler.is_exporting()


def is_transformed() -> bool:
    """True under torch.func's transforms, and within a level of forward-mode differentiation."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
