"""C++ for CPUs, compiled on first use (``build``): routing, called through operators (``ops``, ``dynamic_ops``), and
the sums of ``capszoo.layers._strided_conv``.

A machine without a C++ compiler uses the other engines.
"""

import torch

from .._precision import wide_type
from ..engine import Call
from ..tuning import TUNING
from .build import build_error, compiler


def not_native(call: Call, source: str, forced: bool, **sizes: int) -> str:
    """Why the C++ code cannot compute the call (in float32 or wider), or does not pay; an empty string if it does.

    It is compiled for these sizes if all else is given, unless that was done before.
    """
    dtype = wide_type(call.dtype)
    if reason := no_compiler(dtype):
        return reason
    if not forced and call.grad and call.votes < TUNING.native_min_votes:
        return "needs votes of at least TUNING.native_min_votes elements"
    if not forced and not call.grad and call.votes < TUNING.native_min_votes_without_grad:
        return "needs votes of at least TUNING.native_min_votes_without_grad elements"
    return does_not_build(source, dtype, **sizes)


def no_compiler(dtype: torch.dtype) -> str:
    """Explain why no C++ code can compute in this dtype here; an empty string if it can."""
    if dtype not in (torch.float32, torch.float64):
        return "needs float32 or float64"
    return "" if compiler() else "needs a C++ compiler (CXX, g++ or clang++), and CAPSZOO_NATIVE other than 0"


def does_not_build(source: str, dtype: torch.dtype, **sizes: int) -> str:
    """Compile ``source`` for these sizes unless that was done before: a sentence if it fails, else an empty string."""
    return build_error(source, dtype == torch.float64, **sizes)
