"""The benchmark of the input pipeline: its table, and that it measures every kind of data."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.support import load_script


@pytest.fixture(scope="module")
def bench(root: Path) -> ModuleType:
    return load_script(root / "benchmarks" / "data.py")


def test_every_setting_makes_a_batch(bench: ModuleType) -> None:
    for setting in bench.SETTINGS:
        data = bench.make(setting, 12, "cpu")
        batch = next(bench.Batches(data, 4, train=True, augment=setting.augment).epoch())
        assert batch.images.shape == (4, *data.spec.input_size), setting.title
