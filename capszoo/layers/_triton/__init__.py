"""Fused routing for GPUs, in Triton: which tensors go there, the operators (``ops``), their kernels (``kernels``).

Triton itself is imported when a kernel is about to run, no earlier: a machine without it works, by the reference.
"""

import importlib.util
import os

import torch
from torch import Tensor

from .._precision import working_type
from .._tracing import is_tracing

__all__ = ["fused", "not_fused", "use_triton", "working_type"]

_FOUND = importlib.util.find_spec("triton") is not None

_enabled = os.environ.get("CAPSZOO_TRITON", "1") != "0"

#: Tests set this, under TRITON_INTERPRET=1: tensors of a CPU go through the kernels too, in Triton's interpreter.
_on_cpu = False

#: Numbers j*r of a row of parents, padded, beyond which a tile of 16 rows does not fit registers and shared memory.
_MAX_WIDTH = {torch.float32: 256, torch.bfloat16: 512, torch.float16: 512}

#: The deepest vote (q). Deeper ones are mostly matrix product: keeping them costs less than making them three times.
_MAX_DEPTH = 16


def use_triton(on: bool = True) -> None:
    """Whether CUDA tensors are routed by the Triton kernels; False chooses the reference everywhere.

    The environment variable ``CAPSZOO_TRITON=0`` does the same from the start. What was compiled before stays as it is.
    """
    global _enabled
    _enabled = on


def padded(parents: int, rows: int, inner: int, cols: int) -> tuple[int, int, int, int]:
    """j, p, q and r as powers of two, a row of parents having 16 numbers at least."""
    p, q, r = (1 << (size - 1).bit_length() for size in (rows, inner, cols))
    j = max(1 << (parents - 1).bit_length(), 16 // r, 2)
    return j, p, q, r


def not_fused(
    device: str, dtype: torch.dtype, weight: Tensor, parents: int, rows: int, inner: int, cols: int
) -> str:
    """Why the kernels cannot compute votes of these sizes; empty where they can.

    They need CUDA (compute capability 8 or later), float32 or half precision, and sizes that fit a tile.

    Args:
        device: type of the children's device.
        dtype: in which is computed (:func:`.working_type`).
        weight: of the votes.
        parents, rows, inner, cols: j, p, q and r.
    """
    if not _enabled:
        return "Triton is switched off (use_triton, CAPSZOO_TRITON)"
    if not _FOUND:
        return "Triton is not installed"
    if device != "cuda" and not (_on_cpu and device == "cpu"):
        return "runs on CUDA alone"
    j, p, q, r = padded(parents, rows, inner, cols)
    if p > _MAX_DEPTH or q > _MAX_DEPTH:
        return "poses have more rows or columns than its tiles"
    if j * r > _MAX_WIDTH.get(dtype, 0):
        return "the parents' poses in this type are wider than its tiles"
    if weight.device.type == "cuda":
        old = torch.version.hip is not None or torch.cuda.get_device_properties(weight.device).major < 8
        return "needs compute capability 8" if old else ""
    return ""


def fused(x: Tensor, weight: Tensor, parents: int, rows: int, inner: int, cols: int) -> bool:
    """Whether the kernels take these children and weights; never where code is traced, scripted or exported."""
    if is_tracing(x) or working_type(x) != working_type(weight):
        return False
    return not not_fused(x.device.type, working_type(x), weight, parents, rows, inner, cols)
