"""Whether code is being written down for something other than Python, which is given plain operations alone."""

import torch
from torch import Tensor

__all__ = ["is_tracing"]


def is_tracing(x: Tensor) -> bool:
    """Whether what is done with ``x`` is traced by FX or TorchScript, or exported. (torch.compile stays in Python.)"""
    return isinstance(x, torch.fx.Proxy) or torch.jit.is_tracing() or torch.compiler.is_exporting()
