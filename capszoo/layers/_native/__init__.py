"""Routing in C++ for CPUs: compiled on first use (``build``) and called through one operator (``ops``).

A machine without a C++ compiler uses the other engines.
"""

import torch

from ..engine import Call
from ..tuning import TUNING
from .build import build_error, compiler

__all__ = ["does_not_build", "not_native", "too_few_votes"]

#: Largest Q * R: the transforms of more elements fill the registers many times.
_MAX_TRANSFORM = 64


def not_native(dtype: torch.dtype, inner: int, cols: int) -> str:
    """Explain why the C++ code cannot compute votes of these sizes; an empty string if it can.

    Args:
        dtype: of the computation.
        inner, cols: columns of a child's and of a parent's pose.
    """
    if inner * cols > _MAX_TRANSFORM:
        return "a transform has more elements than its code keeps in registers"
    if dtype not in (torch.float32, torch.float64):
        return "computes in float32 and float64"
    return "" if compiler() else "there is no C++ compiler (CXX, g++ or clang++), or CAPSZOO_NATIVE is 0"


def too_few_votes(call: Call) -> str:
    """Reason why the C++ code does not pay for so few votes; an empty string if it does."""
    if call.grad and call.votes < TUNING.native_min_votes:
        return "its votes have fewer elements than TUNING.native_min_votes"
    if not call.grad and call.votes < TUNING.native_min_votes_without_grad:
        return "its votes have fewer elements than TUNING.native_min_votes_without_grad"
    return ""


def does_not_build(dtype: torch.dtype, rows: int, inner: int, cols: int, squares: bool) -> str:
    """Compile the code for these sizes unless that was done before: a sentence if it fails, else an empty string."""
    return build_error(rows, inner, cols, dtype == torch.float64, squares)
