"""The examples of docstrings run and print what they say; the main public functions have one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import shutil
from pathlib import Path

import pytest

import capszoo

#: Public functions whose docstring must have an example, by the module that defines them.
WITH_EXAMPLE = {
    "capszoo": ("attach_head", "create_model", "list_models", "model_info"),
    "capszoo.explain": ("explain",),
    "capszoo.explain.reconstructions": ("perturb",),
    "capszoo.inference": ("load_model", "predict"),
    "capszoo.layers": ("squash",),
    "capszoo.scores": ("probabilities",),
}

#: Modules whose own docstring must have an example.
MODULES = ("capszoo", "capszoo.explain", "capszoo.export.bundle", "capszoo.export.to_onnx", "capszoo.facade")


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


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_main_functions_have_an_example(name: str) -> None:
    module = importlib.import_module(name)
    for function in WITH_EXAMPLE[name]:
        assert ">>> " in (inspect.getdoc(getattr(module, function)) or ""), function


@pytest.mark.parametrize("name", MODULES)
def test_main_modules_have_an_example(name: str) -> None:
    assert ">>> " in (importlib.import_module(name).__doc__ or "")
