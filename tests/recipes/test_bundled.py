"""Every bundled checkpoint against its metadata: checksum, golden outputs, accuracy on fixed images."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import capszoo
from capszoo._pretrained.catalogue import checkpoints
from capszoo.data import DataError, dataset_spec, load_dataset, normalize
from capszoo.recipes.evaluate import evaluate
from capszoo.recipes.evaluation.metrics import reproduced
from capszoo.recipes.weights import golden_file
from tests.support import PACKED, is_packed, packed
from tests.support.zoo import slow_unless

TAGS = sorted(checkpoints(aliases=False))


#: One of each data set: a wrong normalisation or order of classes is seen; the golden outputs hold the others.
QUICK = {checkpoints(aliases=False)[tag].raw["dataset"]["name"]: tag for tag in reversed(TAGS)}


@pytest.mark.parametrize("tag", slow_unless(QUICK.values(), TAGS))
def test_accuracy_within_the_sampling_error(tag: str, root: Path) -> None:
    raw = checkpoints(aliases=False)[tag].raw
    if not is_packed(raw["dataset"]["name"]):
        pytest.skip(f"no packed images of {raw['dataset']['name']}")
    images = packed(root, raw["dataset"]["name"])
    images = replace(images, images=images.images[:100], labels=images.labels[:100])
    found = evaluate(tag, images)
    assert found["n"] == 100 and found["stated"] is None
    p = raw["metrics"]["test"]["top1"] / 100
    tolerance = 4 * math.sqrt(p * (1 - p) / found["n"]) + 1 / found["n"]
    assert abs(found["top1"] / 100 - p) <= tolerance, f"{found['top1']} here, {100 * p} on the whole test set"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PACKED))
def test_packed_images_are_the_first_of_the_test_set(name: str, root: Path) -> None:
    try:
        whole = load_dataset(name, "test")
    except DataError as error:
        pytest.skip(f"the whole set is not at hand: {error}")
    part = packed(root, name)
    assert torch.equal(part.images, whole.images[:1000]) and torch.equal(part.labels, whole.labels[:1000])


@pytest.mark.parametrize("tag", TAGS)
def test_golden_outputs(tag: str) -> None:
    info = checkpoints(aliases=False)[tag]
    golden = np.load(golden_file(info))
    model = capszoo.create_model(tag, pretrained=True).eval()
    with torch.no_grad():
        scores = model(normalize(torch.from_numpy(golden["pixels"]), info.mean, info.std))
    expected = torch.from_numpy(golden["scores"])
    torch.testing.assert_close(scores, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    assert info.raw["num_params"] == sum(p.numel() for p in model.parameters())
    assert model.pretrained_cfg["mean"] == info.mean and model.pretrained_cfg["input_size"] == info.input_size


@pytest.mark.parametrize("tag", TAGS)
def test_metadata(tag: str) -> None:
    info = checkpoints(aliases=False)[tag]
    raw = info.raw
    spec = dataset_spec(raw["dataset"]["name"])
    size = raw["recipe"]["data"].get("size")
    seen = (spec.input_size[0], size, size) if size else spec.input_size
    assert info.tag.startswith(spec.name) and info.input_size == seen
    assert info.label_names == spec.label_names and info.num_classes == spec.num_classes
    test = raw["metrics"]["test"]
    assert test["n"] == spec.counts["test"] and test["top1"] == pytest.approx(
        100 - 100 * test["errors"] / test["n"]
    )
    assert (
        raw["seed"] == raw["recipe"]["seed"]
        and raw["commit"]
        and raw["hardware"]
        and raw["train_seconds"] > 0
    )
    assert raw["recipe"]["arch"] == info.architecture and raw["recipe"]["tag"] == info.tag


@pytest.mark.slow
@pytest.mark.usefixtures("full_data")
@pytest.mark.parametrize("tag", TAGS)
def test_whole_test_set_reproduces_the_stated_accuracy(tag: str) -> None:
    """In whichever folder of CAPSZOO_DATA the data set lies."""
    found = evaluate(tag)
    info = checkpoints(aliases=False)[tag]
    dataset = info.raw["dataset"]
    count = dataset_spec(dataset["name"]).counts["test"]
    assert found["n"] == count and reproduced(found["stated"], found["top1"], found["n"])
    assert found["stated"] == pytest.approx(found["top1"], abs=210 / count)  # two images
    if dataset["name"] != "affnist":  # some of its rotated pixels differ by one grey level between processors
        images = load_dataset(dataset["name"], "test", size=info.raw["recipe"]["data"].get("size"))
        assert images.fingerprint() == dataset["sha256"]["test"]
