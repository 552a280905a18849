"""A tiny MNIST on disk: real images in idx files, under a data set whose official counts say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from capszoo.data import DATASETS
from tests.data.formats import write_idx
from tests.support import PACKED

COUNTS = {"train": 120, "test": 40}


def write_digits(root: Path, folder: Path) -> Path:
    """Real digits as idx files below `folder`, as many as `COUNTS` says."""
    digits = np.load(root / "tests" / "fixtures" / PACKED["mnist"])
    (folder / "mnist").mkdir(parents=True)
    for stem, part in (("train", slice(0, 120)), ("t10k", slice(120, 160))):
        write_idx(folder / "mnist" / f"{stem}-images-idx3-ubyte", digits["images"][part])
        write_idx(folder / "mnist" / f"{stem}-labels-idx1-ubyte", digits["labels"][part])
    return folder


@pytest.fixture
def tiny_mnist(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a data set named `mnist` with 120 training and 40 test images."""
    folder = write_digits(root, tmp_path / "data")
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], counts=COUNTS))
    return folder


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
