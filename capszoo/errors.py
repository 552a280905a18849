"""Errors that a user can mend: one line that says what is wrong, and what to do about it.

This module imports nothing heavy, so that the command line can name an error without loading torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

__all__ = ["CapszooError", "UnknownArgument", "UnknownModel", "UsageError", "WeightsError", "require"]


class CapszooError(Exception):
    """Something failed for a reason that the user can act on; the command line prints it without a traceback.

    Args:
        message: what is wrong, in one line.
        remedy: what to do about it, in one line; printed after the message.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}: {self.remedy}" if self.remedy else self.message


class UsageError(CapszooError, ValueError):
    """The call itself makes no sense (an impossible batch profile, an unknown gate)."""

    exit_code = 2


class UnknownModel(ValueError):
    """A name that is no model of the zoo, or a tag that has no weights; the message names the nearest."""

    exit_code = 2


class UnknownArgument(TypeError):
    """A keyword that the model does not take; the message names the nearest one that it takes."""

    exit_code = 2


class WeightsError(RuntimeError):
    """Weights are missing, damaged or do not fit; the message is one line and says what to do."""

    exit_code = 1


def require(what: str, modules: Sequence[str], extra: str, error: type[CapszooError] = CapszooError) -> None:
    """Raise ``error``, before anything is done, where modules that ``what`` needs are not installed.

    Args:
        what: the work, as the subject of the sentence.
        modules: their names for import; nothing is imported.
        extra: of this package, which brings them.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise error(f"{what} needs {', '.join(missing)}", f"pip install 'capszoo[{extra}]'")
