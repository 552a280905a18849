"""Errors that a user can fix: one line that states what is wrong, and how to fix it.

This module imports nothing heavy, so that the command line can name an error without loading torch.
"""

from __future__ import annotations

import difflib
import importlib.util
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

__all__ = [
    "CapszooError",
    "NoCapsules",
    "UnknownArgument",
    "UnknownModel",
    "UsageError",
    "WeightsError",
    "first_line",
    "install_hint",
    "require",
    "spelling_difference",
    "unknown_name",
]


class CapszooError(Exception):
    """A failure with a reason that the user can act on; the command line prints it without a traceback.

    Args:
        message: what is wrong, in one line.
        remedy: how to fix it, in one line; printed after the message.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}: {self.remedy}" if self.remedy else self.message


class UsageError(CapszooError, ValueError):
    """The call itself is invalid (an impossible batch profile, an unknown gate)."""

    exit_code = 2


class NoCapsules(RuntimeError):
    """A plain network, one of the papers' baselines, was asked for capsules."""


class UnknownModel(CapszooError, ValueError):
    """A name that is no model of the zoo, or a tag without weights; the message suggests the nearest."""

    exit_code = 2


class UnknownArgument(CapszooError, TypeError):
    """A keyword that the model does not accept; the message suggests the nearest valid one."""

    exit_code = 2


class WeightsError(CapszooError, RuntimeError):
    """Weights are missing, damaged or do not fit."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 300 characters; its class if the message is empty."""
    text = str(error).strip()
    return text.splitlines()[0].strip()[:300] if text else type(error).__name__


def install_hint(extra: str) -> str:
    """The command that installs an extra of this package, which is a checkout or comes from a wheel."""
    if (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file():
        return f"in the checkout: pip install -e '.[{extra}]'"
    return f"pip install 'capszoo[{extra}]'"


def require(what: str, modules: Sequence[str], extra: str, error: type[CapszooError] = CapszooError) -> None:
    """Raise ``error`` if modules that ``what`` needs are not installed, before anything else is done.

    Args:
        what: the work, as the subject of the sentence.
        modules: their import names; nothing is imported.
        extra: extra of this package that installs them.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise error(f"{what} needs {', '.join(missing)}", install_hint(extra))


#: What names that look alike may differ in, and a function that removes this difference.
_FORMS: dict[str, Callable[[str], str]] = {
    "Unicode form": lambda name: unicodedata.normalize("NFC", name),
    "case": str.casefold,
    "spaces or underscores": lambda name: "".join(name.replace("_", " ").split()),
}


def spelling_difference(name: str, other: str) -> str:
    """What two names that look alike differ in, such as ``"case"``; empty for equal names and for other words."""

    def same(forms: Iterable[str]) -> bool:
        first, second = name, other
        for form in forms:
            first, second = _FORMS[form](first), _FORMS[form](second)
        return first == second

    if name == other or not same(_FORMS):
        return ""
    return " and ".join(form for form in _FORMS if not same(set(_FORMS) - {form})) or "Unicode form"


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """One line stating that ``name`` is not a valid ``kind``, and the nearest valid name, whatever its case.

    Args:
        kind: kind of thing that is named, e.g. ``"model"`` or ``"argument of idpa_resnet"``.
        name: the invalid name.
        valid: every valid name.
    """
    options = sorted(set(valid))
    shown_name = name if len(name) <= 60 else f"{name[:60]}…"
    word, folded = name.casefold(), {option.casefold(): option for option in options}
    close = difflib.get_close_matches(word, folded, n=3, cutoff=0.4)
    if not close:
        # difflib scores a long name low against a short fragment of it, which is what people type
        close = [option for option in folded if word and (word in option or option in word)][:3]
    close = [folded[option] for option in close]
    if close:
        return f"unknown {kind} '{shown_name}': did you mean {' or '.join(repr(c) for c in close)}?"
    shown = ", ".join(options[:8]) + (", …" if len(options) > 8 else "")
    return f"unknown {kind} '{shown_name}': valid are {shown}"
