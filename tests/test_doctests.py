"""The examples of docstrings run and print what they say; the main public functions have one."""

from __future__ import annotations

import doctest
import importlib
import re
import shutil
from pathlib import Path

import pytest

import capszoo


def _modules_with_examples() -> list[str]:
    root = Path(capszoo.__file__).resolve().parents[1]
    found = []
    for folder, package in (
        ("capszoo", "capszoo"),
        ("export", "capszoo.export"),
        ("recipes", "capszoo.recipes"),
    ):
        for file in sorted((root / folder).rglob("*.py")):
            if re.search(r"^\s*>>> ", file.read_text(encoding="utf-8"), flags=re.MULTILINE):
                parts = file.relative_to(root / folder).with_suffix("").parts
                found.append(".".join((package, *(part for part in parts if part != "__init__"))))
    return found


@pytest.mark.parametrize("name", _modules_with_examples())
def test_examples_print_what_they_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for digit in (3, 7):  # the files that the examples name
        file = Path(capszoo.__file__).parent / "assets" / f"digit_{digit}.png"
        shutil.copy(file, tmp_path / file.name)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    )
    tests = [test for test in doctest.DocTestFinder().find(importlib.import_module(name)) if test.examples]
    assert tests
    for test in tests:
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)
