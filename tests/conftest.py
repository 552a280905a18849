"""What every test shares: one thread, a fixed seed, and reasons for skipping what this machine cannot run."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from capszoo.data import DATASETS
from tests.support.command import write_run
from tests.support.recipes import COUNTS, write_digits

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist share the cores: more than one thread each makes all of them slower.
    # By the environment too, since processes that a test starts are compared with the test's own, bit for bit.
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Take what is imported by now out of the garbage collector's view: it takes 0.2 s to go through torch and timm."""
    if "onnxscript" in sys.modules:
        _keep_operators()
    _freeze()


def _keep_operators() -> None:
    """torch.onnx describes its 540 operators anew for every export, which takes a fifth of a small network's time."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # another version: the exports take longer
        return
    described = functools.cache(ONNXRegistry.from_torchlib)

    def registry(opset_version: int) -> ONNXRegistry:
        one = copy.copy(described(opset_version))
        one.functions = {operator: [*ways] for operator, ways in one.functions.items()}
        return one

    ONNXRegistry.from_torchlib = staticmethod(registry)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules report what is not collected at the end


_FROZEN = 0


def _freeze() -> None:
    global _FROZEN
    gc.collect()
    gc.freeze()
    _FROZEN = len(sys.modules)


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> Iterator[None]:
    """The same for large libraries that a module's tests import (onnx, matplotlib, the parts of torch.export)."""
    yield
    if len(sys.modules) > _FROZEN + 100:
        _freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
    no_tensorrt = pytest.mark.skip(
        reason="needs TensorRT: neither tensorrt nor tensorrt_rtx is installed (pip install -e '.[tensorrt]')"
    )
    has_tensorrt = any(importlib.util.find_spec(name) for name in ("tensorrt", "tensorrt_rtx"))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("tensorrt") and not has_tensorrt:
            item.add_marker(no_tensorrt)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exported files of this user's cache answer no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAPSZOO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def full_data() -> None:
    """Skips a test that needs the full data sets, in the folders that ``CAPSZOO_DATA`` names."""
    if not os.environ.get("CAPSZOO_DATA"):
        pytest.skip("needs full data sets: set CAPSZOO_DATA to their folder")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a grey picture of the right size, a larger colour one in a sub-folder, and a text file."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "more").mkdir()
    Image.effect_noise((20, 20), 80).save(folder / "a.png")
    Image.effect_noise((50, 30), 80).convert("RGB").save(folder / "more" / "b.jpg")
    (folder / "notes.txt").write_text("not a picture")
    return folder


@pytest.fixture
def tiny_mnist(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a data set named `mnist` with 120 training and 40 test images."""
    folder = write_digits(root, tmp_path / "data")
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], counts=COUNTS))
    return folder
