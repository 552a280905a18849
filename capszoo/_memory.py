"""Keep what PyTorch frees on a CPU for what it asks for next.

glibc hands a large block back to the system when it is freed, and the next one comes as new pages, which the kernel
clears one by one: up to a third of the time of a training step (docs/dev/measurements.md, "Memory that is kept").
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Tell the C library to give no freed memory back to the system until the process ends.

    Training and evaluation on a CPU call it (:mod:`capszoo.recipes`). Call it once in a program of your
    own, before its first large tensors. The process stays as large as it was at its largest. The environment variable
    ``CAPSZOO_KEEP_MEMORY=0`` forbids it.

    Returns:
        Whether it will: False without glibc (macOS, Windows, musl), or where the variable forbids it.
    """
    if sys.platform != "linux" or os.environ.get("CAPSZOO_KEEP_MEMORY", "1") == "0":
        return False
    try:
        libc = ctypes.CDLL(None)
    except OSError:  # a program that is linked statically
        return False
    if not (hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt")):
        return False
    # no block is a mapping of its own, which ends when the block is freed; and the heap is never cut (-1: never)
    return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, -1))
