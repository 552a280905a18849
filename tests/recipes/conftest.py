"""A tiny MNIST on disk: real images in idx files, under a data set whose official counts say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from capszoo.data import DATASETS
from tests.data.formats import write_idx


@pytest.fixture
def tiny_mnist(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a data set named `mnist` with 120 training and 40 test images."""
    packed = np.load(root / "tests" / "fixtures" / "mnist_test_1000.npz")
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    for stem, part in (("train", slice(0, 120)), ("t10k", slice(120, 160))):
        write_idx(folder / f"{stem}-images-idx3-ubyte", packed["images"][part])
        write_idx(folder / f"{stem}-labels-idx1-ubyte", packed["labels"][part])
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], counts={"train": 120, "test": 40}))
    return folder.parent


@pytest.fixture
def data(root: Path, tmp_path: Path) -> Path:
    """A folder with 120 training and 40 test images of MNIST, and their counts for the processes."""
    packed = np.load(root / "tests" / "fixtures" / "mnist_test_1000.npz")
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    for stem, part in (("train", slice(0, 120)), ("t10k", slice(120, 160))):
        write_idx(folder / f"{stem}-images-idx3-ubyte", packed["images"][part])
        write_idx(folder / f"{stem}-labels-idx1-ubyte", packed["labels"][part])
    (folder.parent / "counts.json").write_text(json.dumps({"train": 120, "test": 40}))
    return folder.parent
