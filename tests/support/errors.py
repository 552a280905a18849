"""Errors as tests state them: their class, and the names in them (options, files, keys, the nearest name)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from capszoo.errors import CapszooError


def assert_names(line: str, names: Iterable[object]) -> None:
    """Each name stands in the line as a whole: ``--data`` is not named by ``--data-format``, nor ``8`` by ``18``."""
    for name in map(str, names):
        start = r"(?<![\w-])" if re.match(r"[\w-]", name) else ""
        end = r"(?![\w-])" if re.search(r"[\w-]$", name) else ""
        assert re.search(f"{start}{re.escape(name)}{end}", line), f"{name!r} is not named in {line!r}"


@contextmanager
def refuses(
    error: type[BaseException] | tuple[type[BaseException], ...], *, names: Iterable[object]
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """What is within raises this error, which names these; one of ours has the form of all of ours.

    The form: one line of at most 300 characters (paths of temporary folders do not count), and a remedy.
    """
    names = list(names)
    assert names, "an error that names nothing is no help"
    with pytest.raises(error) as caught:
        yield caught
    line = str(caught.value)
    assert_names(line, names)
    if isinstance(caught.value, CapszooError):
        assert "\n" not in line, line
