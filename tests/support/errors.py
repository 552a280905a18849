"""Errors as tests state them: their class, and the names in them (options, files, keys, the nearest name)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from capszoo.data import DataError
from capszoo.errors import CapszooError


def assert_names(line: str, names: Iterable[object]) -> None:
    """Each name stands in the line as a whole: ``--data`` is not named by ``--data-format``, nor ``8`` by ``18``."""
    for name in [names] if isinstance(names, str) else map(str, names):
        start = r"(?<![\w-])" if re.match(r"[\w-]", name) else ""
        end = r"(?![\w-])" if re.search(r"[\w-]$", name) else ""
        assert re.search(f"{start}{re.escape(name)}{end}", line), f"{name!r} is not named in {line!r}"


def assert_form(error: CapszooError) -> None:
    """One line of at most 300 characters, each path counted by its last part, and a remedy.

    Damaged data have no remedy but other data, so that a :class:`DataError` need not state it.
    """
    line = str(error)
    assert line and "\n" not in line, line
    assert len(re.sub(r"/\S*/", "", line)) <= 300, line
    if not isinstance(error, DataError):
        assert error.remedy or re.search(r"[:;] |did you mean|\bmust\b|\bUse\b", line), f"no remedy: {line}"


@contextmanager
def refuses(
    error: type[BaseException] | tuple[type[BaseException], ...], *, names: Iterable[object]
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """What is within raises this error, which names these; an error of ours has the form of all of ours."""
    assert names, "an error that names nothing is no help"
    with pytest.raises(error) as caught:
        yield caught
    assert_names(str(caught.value), names)
    if isinstance(caught.value, CapszooError):
        assert_form(caught.value)
