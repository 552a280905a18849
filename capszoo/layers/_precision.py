"""Half precision: which steps are computed in float32 regardless."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .engine_choice import STATE


def upcast_half(x: Tensor) -> Tensor:
    """``x`` as float32 if it is float16 or bfloat16, else ``x`` itself (float64 stays float64).

    A leaf for FX, whose tracer cannot branch on a dtype. A file that uses this function in traced code must also
    call ``torch.fx.wrap("upcast_half")`` at its top level.
    """
    if x.dtype == torch.float16 or x.dtype == torch.bfloat16:
        return x.float()
    return x


torch.fx.wrap("upcast_half")


def finite_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as ``dtype``; what float16 cannot represent becomes its largest value instead of an infinity.

    A leaf for FX, like :func:`upcast_half`.
    """
    if dtype == torch.float16:
        x = x.clamp(-65504.0, 65504.0)  # a literal: TorchScript has no torch.finfo
    return x.to(dtype)


torch.fx.wrap("finite_cast")


def working_type(x: Tensor) -> torch.dtype:
    """The dtype in which matrix products with ``x`` are computed: that of ``x``, or autocast's where it is on."""
    device = STATE.device or x.device.type  # an engine report assumes a device for tensors on the meta device
    if x.dtype == torch.float32 and device in ("cuda", "cpu") and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """``dtype`` for float32 and float64, float32 for half precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
