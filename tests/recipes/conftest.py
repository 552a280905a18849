"""A tiny MNIST on disk: real images in idx files, under a data set whose official counts say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capszoo.data import ImageSet
from tests.support import packed
from tests.support.recipes import COUNTS, write_digits, write_photos


@pytest.fixture
def data(root: Path, tmp_path: Path) -> Path:
    """A folder with 120 training and 40 test images of MNIST, and their counts for the processes."""
    folder = write_digits(root, tmp_path / "data")
    (folder / "counts.json").write_text(json.dumps(COUNTS))
    return folder


@pytest.fixture(autouse=True)
def _quick_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes most of the time of a run of a few updates: git, and the curves at its end.

    Only tests that request `real_curves` see these.
    """
    monkeypatch.setattr("capszoo.recipes.train.source_commit", lambda: "0" * 40)
    if "real_curves" not in request.fixturenames:
        monkeypatch.setattr(
            "capszoo.recipes.training.log.draw_curves", lambda path, *_, **__: path.write_bytes(b"curves")
        )


@pytest.fixture
def real_curves() -> None:
    """Curves of a run are drawn."""


@pytest.fixture(scope="module")
def digits(root: Path) -> ImageSet:
    return packed(root, "mnist")


@pytest.fixture
def photos(digits: ImageSet, tmp_path: Path) -> Path:
    """Three classes of 10, 12 and 8 images, without splits."""
    return write_photos(digits, tmp_path / "My photos", {"one": 10, "three": 12, "eight": 8})
