"""C++ for CPUs, compiled on first use (``build``): routing, called through operators (``ops``, ``dynamic_ops``), and
the sums of ``capszoo.layers._strided_conv``.

A machine without a C++ compiler uses the other engines.
"""

import torch

from ..engine import Call
from ..tuning import TUNING
from .build import build_error, compiler

__all__ = ["does_not_build", "not_native", "too_few_votes"]


def not_native(dtype: torch.dtype) -> str:
    """Explain why no C++ code can compute in this dtype here; an empty string if it can."""
    if dtype not in (torch.float32, torch.float64):
        return "needs float32 or float64"
    return "" if compiler() else "needs a C++ compiler (CXX, g++ or clang++), and CAPSZOO_NATIVE other than 0"


def too_few_votes(call: Call) -> str:
    """Reason why the C++ code does not pay for so few votes; an empty string if it does."""
    if call.grad and call.votes < TUNING.native_min_votes:
        return "needs votes of at least TUNING.native_min_votes elements"
    if not call.grad and call.votes < TUNING.native_min_votes_without_grad:
        return "needs votes of at least TUNING.native_min_votes_without_grad elements"
    return ""


def does_not_build(source: str, dtype: torch.dtype, **sizes: int) -> str:
    """Compile ``source`` for these sizes unless that was done before: a sentence if it fails, else an empty string."""
    return build_error(source, dtype == torch.float64, **sizes)
