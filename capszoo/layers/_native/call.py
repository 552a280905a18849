"""Call the C++ functions: tensors as pointers, in threads."""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

import torch
from torch import Tensor


def arguments(*values: Any) -> list[Any]:
    """Tensors (contiguous; None and empty ones become null), integers and floats as arguments of a C function."""
    return [
        ctypes.c_int64(v)
        if isinstance(v, int)
        else ctypes.c_double(v)
        if isinstance(v, float)
        else _pointer(v)
        for v in values
    ]


def _pointer(tensor: Optional[Tensor]) -> ctypes.c_void_p:
    if tensor is None or not tensor.numel():
        return ctypes.c_void_p(None)
    if tensor.device.type != "cpu":
        raise RuntimeError(f"expected all tensors on the CPU, but found one on {tensor.device}")
    return ctypes.c_void_p(tensor.data_ptr())


def parts_of(count: int) -> int:
    """Number of parts in which ``count`` items are computed: torch's number of threads, if there are so many items."""
    return max(1, min(count, torch.get_num_threads()))


def in_threads(compute: Callable[[int, int, int], object], count: int) -> None:
    """Call ``compute(part, first, last)`` for equal parts of ``count`` items. A C function releases Python's lock."""
    parts = parts_of(count)
    bounds = [count * k // parts for k in range(parts + 1)]
    if parts == 1:
        compute(0, 0, count)
    else:
        list(_threads(torch.get_num_threads()).map(compute, range(parts), bounds[:-1], bounds[1:]))


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads that stay: starting them takes longer than a small call."""
    return ThreadPoolExecutor(count)


if hasattr(os, "register_at_fork"):  # a forked process has none of them
    os.register_at_fork(after_in_child=_threads.cache_clear)
