"""``medmnist:NAME``: files in the format of MedMNIST, made here with few images; strangers' files are refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capszoo.data import DataError, ImageSet, load_dataset, medmnist
from capszoo.data.download import RemoteFile, remote_files
from capszoo.data.folders import find_splits
from capszoo.data.medmnist import MEDMNIST
from capszoo.recipes.release.public import default_tag, is_private_set
from tests.support.command import succeeds
from tests.support.errors import refuses

COUNTS = (6, 4, 2)


def arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of a set with few images."""
    facts, found = MEDMNIST[name], {}
    draw = np.random.default_rng(0)
    for split, count in zip(("train", "val", "test"), COUNTS, strict=True):
        shape = (count, 28, 28) if facts.channels == 1 else (count, 28, 28, 3)
        found[f"{split}_images"] = draw.integers(0, 256, shape, dtype=np.uint8)
        labels = np.arange(count)[:, None] % len(facts.label_names)
        if facts.multi_label:
            labels = draw.integers(0, 2, (count, len(facts.label_names)))
        found[f"{split}_labels"] = labels.astype(np.uint8)
    return found


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a grey, a coloured and a multi-label set of few images."""
    folder = tmp_path / "data" / "medmnist"
    folder.mkdir(parents=True)
    for name in ("pneumoniamnist", "pathmnist", "chestmnist"):
        monkeypatch.setitem(MEDMNIST, name, replace(MEDMNIST[name], counts=COUNTS))
        np.savez_compressed(folder / f"{name}.npz", **arrays(name))
    return tmp_path / "data"


def read(name: str, split: str, data: Path) -> ImageSet:
    found = load_dataset(f"medmnist:{name}", split, data)
    assert isinstance(found, ImageSet)
    return found


def test_the_splits_of_the_authors(small: Path) -> None:
    assert find_splits("medmnist:pneumoniamnist", small) == {"train", "val", "test"}
    stored = arrays("pneumoniamnist")
    for split, count in zip(("train", "val", "test"), COUNTS, strict=True):
        found = read("pneumoniamnist", split, small)
        assert found.images.shape == (count, 1, 28, 28) and found.labels.dtype == torch.int64
        assert np.array_equal(found.images[:, 0].numpy(), stored[f"{split}_images"])
    assert found.spec.label_names == ("normal", "pneumonia") and not found.spec.multi_label
    colour = read("pathmnist", "train", small)
    assert colour.images.shape == (6, 3, 28, 28) and colour.spec.num_classes == 9
    assert np.array_equal(colour.images[2].permute(1, 2, 0).numpy(), arrays("pathmnist")["train_images"][2])
    larger = load_dataset("medmnist:pathmnist", "train", small, size=32)
    assert larger.spec.input_size == (3, 32, 32)


def test_several_labels_an_image(small: Path) -> None:
    found = read("chestmnist", "train", small)
    assert found.spec.multi_label and found.labels.dtype == torch.float32
    assert np.array_equal(found.labels.numpy(), arrays("chestmnist")["train_labels"])
    text = succeeds("data", "check", "medmnist:chestmnist", "--data", small)
    assert "14 classes" in text and "6 training, 4 validation and 2 test images" in text


def test_fine_tuning_takes_it(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from capszoo.recipes.finetune import finetune_recipe

    monkeypatch.setenv("CAPSZOO_DATA", str(small))
    recipe = finetune_recipe("resnet20_routingcaps.mnist", "medmnist:pneumoniamnist")
    assert (recipe.data.validation, recipe.data.test, recipe.data.channels) == ("own", True, None)
    assert recipe.tag == default_tag("medmnist:pneumoniamnist") == "pneumoniamnist"
    assert not is_private_set("medmnist:pneumoniamnist")


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("labels", None),
        ("images", np.zeros((6, 64, 64), np.uint8)),
        ("images", np.zeros((5, 28, 28), np.uint8)),
        ("images", np.zeros((6, 28, 28), np.float32)),
        ("labels", np.full((6, 1), 2, np.uint8)),
        ("labels", np.full((6, 1), "x", object)),  # a pickle
        ("whole", b"\x93NUMPY" * 10),
    ],
)
def test_other_files_are_refused(key: str, changed: Any, small: Path) -> None:
    found, file = arrays("pneumoniamnist"), small / "medmnist" / "pneumoniamnist.npz"
    found[f"train_{key}"] = changed
    np.savez(file, **{name: array for name, array in found.items() if array is not None})
    if key == "whole":
        file.write_bytes(changed)
    with refuses(DataError, names=["pneumoniamnist.npz"]):
        read("pneumoniamnist", "train", small)


def test_a_file_that_unpacks_to_more_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medmnist, "MAX_FILE_BYTES", 1000)
    with refuses(DataError, names=["pneumoniamnist.npz", "MiB"]):
        read("pneumoniamnist", "train", small)


def test_names_and_places(tmp_path: Path) -> None:
    with refuses(DataError, names=["pneumonia_mnist", "pneumoniamnist"]):
        load_dataset("medmnist:pneumonia_mnist", "train", tmp_path)
    with refuses(DataError, names=["bloodmnist.npz", "data fetch medmnist:bloodmnist"]):
        load_dataset("medmnist:bloodmnist", "train", tmp_path)
    assert len(MEDMNIST) == 12 and len({facts.md5 for facts in MEDMNIST.values()}) == 12
    (file,) = remote_files("medmnist:organsmnist", "test")
    assert (file.name, file.md5) == ("organsmnist.npz", MEDMNIST["organsmnist"].md5)


def test_it_is_fetched_and_checked(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download itself is tested with the other sets: here the file is there already, with the right checksum."""
    source = small / "medmnist" / "pneumoniamnist.npz"
    md5 = hashlib.md5(source.read_bytes()).hexdigest()
    monkeypatch.setitem(MEDMNIST, "pneumoniamnist", replace(MEDMNIST["pneumoniamnist"], md5=md5))
    text = succeeds("data", "fetch", "medmnist:pneumoniamnist", "--to", small)
    assert "capszoo data check medmnist:pneumoniamnist" in text
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    assert len(load_dataset("medmnist:pneumoniamnist", "val", nowhere, download=small)) == COUNTS[1]
    assert RemoteFile(("https://host/files/a.npz?download=1",), md5).name == "a.npz"
    listed = json.loads(succeeds("data", "list", "--json"))
    assert "medmnist:…" in {row["name"] for row in listed}
