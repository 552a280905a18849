"""Suggest the nearest valid spelling in an error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["unknown_name"]


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
