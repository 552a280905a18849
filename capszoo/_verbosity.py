"""How much the commands print: `--quiet` and `--verbose`, set once by the command line."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Verbosity", "is_quiet", "is_verbose", "set_verbosity"]


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
