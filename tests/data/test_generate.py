"""Composed sets: what their protocols say, per image, reproducibly, and from held-out digits alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from capszoo.data import (
    DATASETS,
    Augment,
    Batch,
    Batches,
    DataError,
    ImageSet,
    dataset_spec,
    load_dataset,
    split_validation,
)
from capszoo.data.generate import ByClass, Distort, Overlay, Scatter
from capszoo.data.sources import compose
from tests.support import packed
from tests.support.errors import refuses
from tests.support.formats import write_idx


@pytest.fixture(scope="module")
def digits(root: Path) -> ImageSet:
    """1,000 real digits."""
    return replace(packed(root, "mnist"), split="train")


def composed(name: str, digits: ImageSet, split: str = "train") -> ImageSet:
    return compose(dataset_spec(name), split, digits)


def first_batch(name: str, digits: ImageSet, size: int = 200):
    return next(Batches(composed(name, digits), size, train=True, seed=1).epoch())


def test_affnist_trains_on_whole_digits_at_all_places(digits: ImageSet) -> None:
    batch = first_batch("affnist", digits, 1000)
    assert batch.pixels.shape == (1000, 1, 40, 40) and batch.parts is None
    assert sorted(batch.labels.tolist()) == sorted(digits.labels.tolist())
    ink = batch.pixels.flatten(1).long().sum(1).sort().values
    assert torch.equal(ink, digits.images.flatten(1).long().sum(1).sort().values), "nothing is cut or changed"
    draws = Scatter().draw(
        ByClass.of(digits.labels, 10), torch.arange(4000), torch.Generator().manual_seed(0)
    )
    places = (draws["corner"] * 13).long()
    assert set(places[:, 0].tolist()) == set(places[:, 1].tolist()) == set(range(13))


def test_affnist_test_digits_are_distorted_and_whole(digits: ImageSet) -> None:
    test = composed("affnist", digits, "test")
    assert test.images.shape == (1000, 1, 40, 40) and torch.equal(test.labels, digits.labels)
    assert torch.equal(test.images, composed("affnist", digits, "test").images), "fixed"
    # Ink is conserved up to the area's factor (scales 0.8 to 1.2 on both sides): nothing is cut off.
    ratio = test.images.flatten(1).double().sum(1) / digits.images.flatten(1).double().sum(1)
    assert 0.6 < float(ratio.min()) < 0.7 and 1.38 < float(ratio.max()) < 1.5
    expanded = composed("affnist", digits, "expanded")
    assert torch.equal(expanded.images.flatten(1).long().sum(1), digits.images.flatten(1).long().sum(1))


def test_distorted_digits_stand_anywhere_inside() -> None:
    image = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    image[:, :, 9:19, 4:24] = 255  # 10 x 20
    data = ImageSet(dataset_spec("mnist"), "test", image.expand(3000, -1, -1, -1), torch.zeros(3000).long())
    still = replace(data, composer=Distort(rotation=0, shear=0, scale=(1, 1))).fixed()
    assert bool((still.images.flatten(1).long().sum(1) == 255 * 200).all())
    first = [(still.images.amax(axis)[:, 0] > 0).byte().argmax(1) for axis in (3, 2)]
    assert set(first[0].tolist()) == set(range(31)) and set(first[1].tolist()) == set(range(21))


def test_multimnist(digits: ImageSet) -> None:
    batch = first_batch("multimnist", digits)
    assert batch.pixels.shape == (200, 1, 36, 36) and batch.images.dtype == torch.float32
    assert batch.labels.dtype == torch.float32 and bool((batch.labels.sum(1) == 2).all())
    assert batch.parts is not None and batch.part_labels is not None
    assert torch.equal(batch.parts.long().sum(1).clamp(max=255), batch.pixels.long()), "added and clipped"
    assert bool((batch.part_labels[:, 0] != batch.part_labels[:, 1]).all()), "two different digits"
    hot = torch.nn.functional.one_hot(batch.part_labels, 10).sum(1)
    assert torch.equal(hot.float(), batch.labels)
    # Each part is a whole digit of its label, moved by at most 4 pixels.
    known = {
        tuple(image.flatten().tolist()): int(label)
        for image, label in zip(digits.images, digits.labels, strict=True)
    }
    for part, label in list(zip(batch.parts.flatten(0, 1), batch.part_labels.flatten(), strict=True))[:40]:
        windows = (part[0, y : y + 28, x : x + 28] for y in range(9) for x in range(9))
        found = [known[key] for window in windows if (key := tuple(window.flatten().tolist())) in known]
        assert int(label) in found


def test_second_digits_are_uniform_over_other_classes() -> None:
    labels = torch.tensor([0] * 5 + [1] * 1 + [2] * 4)[torch.randperm(10)]
    index = ByClass.of(labels, 10)
    picked = torch.arange(10).repeat(3000)
    other = Overlay().draw(index, picked, torch.Generator().manual_seed(0))["other"]
    assert bool((labels[other] != labels[picked]).all())
    for digit in range(10):
        seen = torch.bincount(other[picked == digit], minlength=10).double()
        strangers = labels != labels[digit]
        expected = 3000 / int(strangers.sum()) * strangers
        assert bool(((seen - expected).abs() <= 5 * expected.clamp(min=1).sqrt()).all())


def test_diverse_multimnist(digits: ImageSet) -> None:
    test = composed("diverse_multimnist", digits, "test")
    count = test.labels.sum(1)
    assert set(count.tolist()) == {1.0, 2.0}
    assert float((count == 1).double().mean()) == pytest.approx(1 / 6, abs=0.04)
    single = count == 1
    assert test.parts is not None and test.part_labels is not None
    assert not test.parts[single, 1].any() and bool((test.part_labels[single, 1] == -1).all())
    assert torch.equal(test.images[single], test.parts[single, 0])
    assert bool((test.part_labels[~single] >= 0).all())


@pytest.mark.parametrize("name", ["affnist", "multimnist", "diverse_multimnist"])
def test_fresh_and_reproducible(name: str, digits: ImageSet) -> None:
    def batches(seed: int, epoch: int, start: int = 0, **process: int) -> Iterator[Batch]:
        return Batches(composed(name, digits), 64, train=True, seed=seed, **process).epoch(epoch, start)

    whole = list(batches(3, 1))
    assert torch.equal(next(batches(3, 1, start=9)).pixels, whole[9].pixels)
    for rank in (0, 1):
        for mine, everyone in zip(next(batches(3, 1, rank=rank, world=2)), whole[0], strict=True):
            assert everyone is None if mine is None else torch.equal(mine, everyone[rank::2])
    one_digit = composed(name, digits.subset(torch.tensor([0, 1]).repeat(8)))
    images = next(Batches(one_digit, 16, train=True).epoch()).pixels
    assert len({tuple(image.flatten().tolist()) for image in images}) > 10, "each image has its own numbers"
    for other in (batches(3, 2), batches(4, 1)):
        assert not torch.equal(next(other).pixels, whole[0].pixels)


def test_validation_images_are_fixed_and_of_held_out_digits(digits: ImageSet) -> None:
    numbered = replace(digits, images=torch.zeros_like(digits.images))
    numbered.images[:, 0, 0, 0], numbered.images[:, 0, 0, 1] = (
        1 + torch.arange(1000) % 250,
        1 + torch.arange(1000) // 250,
    )
    rest, validation = split_validation(composed("multimnist", numbered), 300)
    assert isinstance(rest, ImageSet) and isinstance(validation, ImageSet)
    assert len(rest) == 700 and rest.composer and not validation.composer
    assert validation.images.shape == (300, 1, 36, 36) and validation.labels.shape == (300, 10)

    def seen(data: ImageSet, train: bool) -> set[tuple[int, ...]]:
        """The two marked pixels of each digit, wherever it stands."""
        parts = [batch.parts.flatten(0, 2) for batch in Batches(data, 100, train=train).epoch()]  # type: ignore[union-attr]
        return {tuple(part[part > 0].tolist()) for part in torch.cat(parts)}

    twice = [list(Batches(validation, 100).epoch()) for _ in range(2)]
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(*twice, strict=True))
    training, held = seen(rest, True), seen(validation, False)
    assert training and held and not training & held


def test_by_name_from_mnist_files(digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stem, part in (("train", slice(0, 60)), ("t10k", slice(60, 100))):
        write_idx(tmp_path / f"{stem}-images-idx3-ubyte", digits.images[part, 0].numpy())
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte", digits.labels[part].numpy())
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], counts={"train": 60, "test": 40}))
    for name in ("affnist", "multimnist", "diverse_multimnist"):
        train, test = (load_dataset(name, split, tmp_path) for split in ("train", "test"))
        assert isinstance(train, ImageSet) and isinstance(test, ImageSet)
        assert (len(train), len(test)) == (60, 40) and train.composer and not test.composer
        assert train.size == test.size == train.spec.input_size[1:] and test.spec.name == name
        assert train.fingerprint() != test.fingerprint()
        batch = next(Batches(train, 8).epoch())  # evaluation on training digits works too
        assert batch.pixels.shape[1:] == train.spec.input_size
    assert len(load_dataset("affnist", "expanded", tmp_path)) == 40
    with refuses(DataError, names=["train", "expanded"]):
        load_dataset("affnist", "validation", tmp_path)
    assert len(load_dataset("multimnist", "train", tmp_path, size=36, resize=36)) == 60
    with refuses(DataError, names=["36", "composed"]):
        load_dataset("multimnist", "train", tmp_path, resize=40)


def test_mistakes_are_one_line(digits: ImageSet) -> None:
    with refuses(DataError, names=["augment", "left"]):
        Batches(composed("multimnist", digits), 8, train=True, augment=Augment(flip=True))
    Batches(composed("affnist", digits), 8, train=True, augment=Augment(rotation=5))
    ones = digits.subset((digits.labels == 1).nonzero()[:, 0])
    with refuses(DataError, names=["two", "classes"]):
        next(Batches(composed("multimnist", ones), 8, train=True).epoch())
