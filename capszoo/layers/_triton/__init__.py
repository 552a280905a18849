"""Fused IDPA for GPUs, in Triton: the dispatch, the operators (``ops``) and their kernels (``kernels``).

Triton is imported only when a kernel is about to run. A machine without it uses the reference.
"""

import importlib.util
import os

import torch
from torch import Tensor

_FOUND = importlib.util.find_spec("triton") is not None

_enabled = os.environ.get("CAPSZOO_TRITON", "1") != "0"

#: Tests set this under TRITON_INTERPRET=1, to run CPU tensors through the kernels in Triton's interpreter.
_on_cpu = False

#: Largest padded row of parents, in elements j*r: a tile of 16 rows of more fits neither registers nor shared memory.
_MAX_WIDTH = {torch.float32: 256, torch.bfloat16: 512, torch.float16: 512}

#: Largest p and q. With a larger q, votes are mostly matrix product: storing them costs less than computing them
#: thrice.
_MAX_DEPTH = 16


def use_triton(on: bool = True) -> None:
    """Enable the Triton kernels of IDPA for CUDA tensors; with False, the reference computes them on a GPU.

    The environment variable ``CAPSZOO_TRITON=0`` does the same from the start. Code that is already compiled is not
    affected.
    """
    global _enabled
    _enabled = on


#: Shared memory of the backward pass in float32 where a row of parents has 256 elements, as compiled for sm_90.
_WIDE_BYTES = 132_096


def padded(parents: int, rows: int, inner: int, cols: int) -> tuple[int, int, int, int]:
    """j, p, q and r as powers of two, so that a row of parents (j*r) has at least 16 elements."""
    p, q, r = (1 << (size - 1).bit_length() for size in (rows, inner, cols))
    j = max(1 << (parents - 1).bit_length(), 16 // r, 2)
    return j, p, q, r


def not_fused(
    device: str,
    dtype: torch.dtype,
    grad: bool,
    weight: Tensor,
    parents: int,
    rows: int,
    inner: int,
    cols: int,
) -> str:
    """Explain why the kernels cannot compute votes of these sizes; an empty string if they can.

    They need CUDA (compute capability 8 or later), float32 or half precision, and sizes that fit a tile.

    Args:
        device: device type of the children.
        dtype: dtype of the computation (:func:`.._precision.working_type`).
        grad: gradients are needed.
        weight: weights that form the votes.
        parents, rows, inner, cols: sizes j, p, q and r.
    """
    if not _enabled:
        return "needs Triton, which is switched off (use_triton, CAPSZOO_TRITON)"
    if not _FOUND:
        return "needs Triton, which is not installed"
    if device != "cuda" and not (_on_cpu and device == "cpu"):
        return "needs CUDA"
    j, p, q, r = padded(parents, rows, inner, cols)
    if p > _MAX_DEPTH or q > _MAX_DEPTH:
        return "needs poses whose rows and columns fit its tiles"
    if j * r > _MAX_WIDTH.get(dtype, 0):
        return "needs parents' poses that fit its tiles in this type"
    if weight.device.type == "cuda":
        about = torch.cuda.get_device_properties(weight.device)
        if torch.version.hip is not None or about.major < 8:
            return "needs compute capability 8"
        if (
            grad
            and dtype == torch.float32
            and j * r > 128
            and about.shared_memory_per_block_optin < _WIDE_BYTES
        ):
            return "needs more shared memory than this GPU has, for float32 gradients of so wide parents"
    return ""
