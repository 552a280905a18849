"""The notebooks run from the first cell to the last, on a CPU, in under two minutes each."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip(
    "nbformat", reason="needs nbformat: make test-site runs this in the site's environment"
)
nbclient = pytest.importorskip(
    "nbclient", reason="needs nbclient: make test-site runs this in the site's environment"
)

NOTEBOOKS = ("hello-capsules", "fine-tune", "capsule-head", "export-and-serve")

#: Seconds for each.
LIMIT = 120


def test_all_of_them_are_listed(root: Path) -> None:
    folder = root / "docs" / "notebooks"
    assert {path.stem for path in folder.glob("*.ipynb")} == set(NOTEBOOKS)
    index = (folder / "index.md").read_text(encoding="utf-8")
    assert all(f"\n{name}\n" in index for name in NOTEBOOKS)
    assert '\\"serve\\"' in (folder / "export-and-serve.ipynb").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(root / "docs" / "notebooks" / f"{name}.ipynb", as_version=4)
    assert "pip install" in notebook.cells[1].source
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    start = time.perf_counter()
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    taken = time.perf_counter() - start
    print(f"{name}: {taken:.0f} s")
    assert taken < LIMIT
