"""The benchmark of the input pipeline: its table, and that it measures every kind of data."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.support import load_script


@pytest.fixture(scope="module")
def bench(root: Path) -> ModuleType:
    return load_script(root / "benchmarks" / "data.py")


def test_a_row_states_the_pipeline_s_share(bench: ModuleType) -> None:
    line = bench.row("x", 128, (0.002, 0.018, 0.021))
    assert line == "| x | 2.00 | 64,000 | 18.0 | 6,095 | 10.0% |"


def test_table(bench: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert bench.main(["--batch", "2", "--steps", "1", "--only", "digit", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    names = [line.split(" | ")[0] for line in lines[4:]]
    assert names == [
        "| affnist: digit at a random place",
        "| multimnist: two digits",
        "| diverse_multimnist: one or two digits",
    ]
    assert bench.main(["--only", "nothing like it"]) == 2


def test_every_setting_makes_a_batch(bench: ModuleType) -> None:
    for setting in bench.SETTINGS:
        data = bench.make(setting, 12, "cpu")
        batch = next(bench.Batches(data, 4, train=True, augment=setting.augment).epoch())
        assert batch.images.shape == (4, *data.spec.input_size), setting.title
