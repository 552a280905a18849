"""The stored robustness of the bundled checkpoints, and the tables made of it."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import robustness
from capszoo._pretrained.catalogue import checkpoints
from tests.support import packed


def test_every_bundled_file_was_measured() -> None:
    assert list(robustness.current()) == list(checkpoints(aliases=False)), (
        "run python benchmarks/robustness.py, then make docs"
    )


def test_corrupted_accuracies_agree_with_the_stated_ones() -> None:
    for name, row in robustness.current().items():
        images = row["corruptions"]
        if images is None:  # of another size
            assert checkpoints(aliases=False)[name].input_size[1:] not in ((28, 28), (32, 32))
            continue
        stated = checkpoints(aliases=False)[name].raw["metrics"]["test"]["top1"]
        assert abs(images["clean"] - stated) < 4 * (stated * (100 - stated) / images["n"]) ** 0.5 + 0.1, name
        means = [statistics.fmean(one["accuracy"]) for one in images["each"]]
        assert len(means) == 12 and statistics.fmean(means) == pytest.approx(images["mean"], abs=1e-3), name
        assert images["mean"] < images["clean"]


def test_calibration_is_that_of_the_whole_test_set() -> None:
    for name, row in robustness.current().items():
        found, info = row["calibration"], checkpoints(aliases=False)[name]
        if found is None:
            assert info.score_kind.startswith("label_")
            continue
        assert found["n"] == info.raw["metrics"]["test"]["n"] and found["kind"] == info.score_kind
        # the mean over bins of |accuracy - confidence| is at least the difference of the means
        gap = abs(found["raw"]["confidence"] - info.raw["metrics"]["test"]["top1"])
        assert found["raw"]["ece"] >= gap - 0.05, name
        assert found["scaled"]["nll"] <= found["raw"]["nll"] + 0.001, name


@pytest.mark.parametrize("data", ["cifar10", "mnist"])
def test_the_pictures_are_of_the_corruptions(data: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = packed(Path(__file__).resolve().parents[1], data).images[robustness.IMAGE]
    path = robustness.picture(image.shape[0])
    with Image.open(path) as shown, Image.open(robustness.draw(image, tmp_path / path.name)) as again:
        stated = {picture.info["Description"] for picture in (shown, again)}
        old, new = (np.asarray(picture.convert("RGB"), dtype=float) for picture in (shown, again))
    # not equal in every pixel: processors round differently
    same = old.shape == new.shape and float(np.abs(old - new).mean()) < 1
    assert same and stated == {robustness.drawn_from(image)}, "python benchmarks/robustness.py --draw"
