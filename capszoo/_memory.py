"""Reuse the memory that PyTorch frees on a CPU for its next allocations.

glibc returns a large block to the system when it is freed, and the next one consists of new pages, which the kernel
clears one by one: up to a third of the time of a training step (docs/dev/measurements.md, "Memory that is kept").
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Tell the C library to return no freed memory to the system until the process ends.

    Training and evaluation on a CPU call it (:mod:`capszoo.recipes`). In other programs, call it once, before the
    first large tensors. The process keeps its maximum memory size. The environment variable
    ``CAPSZOO_KEEP_MEMORY=0`` disables it.

    Returns:
        True if enabled: False without glibc (macOS, Windows, musl), or if the variable disables it.
    """
    if sys.platform != "linux" or os.environ.get("CAPSZOO_KEEP_MEMORY", "1") == "0":
        return False
    try:
        libc = ctypes.CDLL(None)
    except OSError:  # a statically linked program
        return False
    if not (hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt")):
        return False
    # no block is a separate mapping, which would be unmapped when freed; and the heap is never trimmed (-1: never)
    return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, -1))
