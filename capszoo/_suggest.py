"""Name the nearest valid spelling in an error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["unknown_name"]


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """One line saying that ``name`` is not a valid ``kind``, and which valid name is the nearest.

    Args:
        kind: what the name stands for, e.g. ``"model"`` or ``"argument of idpa_resnet"``.
        name: what was given.
        valid: every valid name.
    """
    options = sorted(set(valid))
    close = difflib.get_close_matches(name, options, n=3, cutoff=0.4)
    if not close:
        # difflib scores long names low against a short fragment of theirs, which is what people type
        close = [option for option in options if name and (name in option or option in name)][:3]
    if close:
        return f"unknown {kind} '{name}': did you mean {' or '.join(repr(c) for c in close)}?"
    shown = ", ".join(options[:12]) + (", …" if len(options) > 12 else "")
    return f"unknown {kind} '{name}': valid are {shown}"
