"""Values with which a routing starts: none, learned (a parameter), or drawn once (a buffer)."""

from typing import Callable, Optional

from torch import Tensor, nn

__all__ = ["reset_start"]


def reset_start(start: Optional[Tensor], draw: Callable[[Tensor], Tensor]) -> None:
    """Set a layer's start anew: learned values to zero, constant ones by `draw`, such as ``nn.init.normal_``."""
    if isinstance(start, nn.Parameter):
        nn.init.zeros_(start)
    elif start is not None:
        draw(start)
