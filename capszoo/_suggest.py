"""Suggest the nearest valid spelling in an error message."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Callable, Iterable

__all__ = ["spelling_difference", "unknown_name"]

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
    word, folded = name.casefold(), {option.casefold(): option for option in options}
    close = difflib.get_close_matches(word, folded, n=3, cutoff=0.4)
    if not close:
        # difflib scores a long name low against a short fragment of it, which is what people type
        close = [option for option in folded if word and (word in option or option in word)][:3]
    close = [folded[option] for option in close]
    if close:
        return f"unknown {kind} '{name}': did you mean {' or '.join(repr(c) for c in close)}?"
    shown = ", ".join(options[:12]) + (", …" if len(options) > 12 else "")
    return f"unknown {kind} '{name}': valid are {shown}"
