"""Settings of this process: how much it prints, and whether freed memory is kept."""

from __future__ import annotations

import ctypes
import os
import sys
from enum import IntEnum

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


class Verbosity(IntEnum):
    """QUIET: results and errors. NORMAL: notes and progress too. VERBOSE: the libraries' messages too."""

    QUIET = -1
    NORMAL = 0
    VERBOSE = 1


_current = Verbosity.NORMAL


def set_verbosity(value: Verbosity) -> None:
    """Set how much this process prints."""
    global _current
    _current = value


def is_quiet() -> bool:
    return _current is Verbosity.QUIET


def is_verbose() -> bool:
    return _current is Verbosity.VERBOSE
