"""Half precision: what is computed in float32 all the same."""

import torch
from torch import Tensor

__all__ = ["upcast_half"]


def upcast_half(x: Tensor) -> Tensor:
    """``x`` as float32 if it is float16 or bfloat16, else ``x`` itself (float64 stays float64).

    A leaf for FX, whose tracer cannot branch on a dtype. A file that imports this function for code that is
    to be traced says ``torch.fx.wrap("upcast_half")`` at its top level as well.
    """
    if x.dtype == torch.float16 or x.dtype == torch.bfloat16:
        return x.float()
    return x


torch.fx.wrap("upcast_half")
