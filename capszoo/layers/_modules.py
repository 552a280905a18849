"""Small parts of every layer: checked sizes, initial values of a routing, plain modules."""

import math
from typing import Callable, Optional

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


def at_least(least: int, **sizes: int) -> None:
    """Raise ValueError that names the first of the ``sizes`` below ``least``."""
    for name, size in sizes.items():
        if size < least:
            raise ValueError(f"{name} must be at least {least}, not {size}")


def positive(**settings: float) -> None:
    """Raise ValueError that names the first of the ``settings`` that is not a finite number above 0."""
    for name, value in settings.items():
        if not 0.0 < value < math.inf:  # also true of NaN
            raise ValueError(f"{name} must be positive and finite, not {value}")


def non_negative(**settings: float) -> None:
    """Raise ValueError that names the first of the ``settings`` that is not a finite number of 0 or more."""
    for name, value in settings.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or more and finite, not {value}")


def finite(**settings: float) -> None:
    """Raise ValueError that names the first of the ``settings`` that is infinite or NaN."""
    for name, value in settings.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, not {value}")


def reset_start(start: Optional[Tensor], draw: Callable[[Tensor], Tensor]) -> None:
    """Set a layer's start anew: learned values to zero, constant ones by ``draw``, such as ``nn.init.normal_``."""
    if isinstance(start, nn.Parameter):
        nn.init.zeros_(start)
    elif start is not None:
        draw(start)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module) -> bool:
    """True if a call of the module runs its class's ``forward`` and nothing else, such as hooks."""
    hooked = _has_any_global_hook() or any(getattr(module, name) for name in _HOOKS)
    return "forward" not in vars(module) and not hooked
