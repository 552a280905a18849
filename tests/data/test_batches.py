"""Batches are the same from any position, for any number of processes, and for ever."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from capszoo.data import Augment, Batch, Batches, DataError, ImageSet, dataset_spec, split_validation
from capszoo.data.batches import balanced_order
from capszoo.data.generate import Overlay
from capszoo.data.sets import stratified_folds
from tests.support.errors import refuses
from tests.support.formats import STRONG


@pytest.fixture
def numbered() -> ImageSet:
    """50 images whose pixels say which they are."""
    images = torch.arange(50, dtype=torch.uint8).view(50, 1, 1, 1).expand(50, 1, 28, 28).contiguous() + 1
    return ImageSet(dataset_spec("mnist"), "train", images, torch.arange(50) % 10)


@pytest.fixture
def colour() -> ImageSet:
    images = torch.randint(0, 256, (50, 3, 34, 34), dtype=torch.uint8)
    return ImageSet(dataset_spec("cifar10"), "train", images, torch.arange(50) % 10)


def same(one: Any, other: Any) -> bool:
    return one is other is None or torch.equal(one, other)


def test_an_epoch_shows_each_image_once(numbered: ImageSet) -> None:
    seen = torch.cat([batch.pixels[:, 0, 0, 0] for batch in Batches(numbered, 10, train=True).epoch(0)])
    assert sorted(seen.tolist()) == list(range(1, 51)) and seen.tolist() != list(range(1, 51))
    other = torch.cat([batch.pixels[:, 0, 0, 0] for batch in Batches(numbered, 10, train=True).epoch(1)])
    assert seen.tolist() != other.tolist()
    evaluation = Batches(numbered, 20)
    assert [len(batch.labels) for batch in evaluation.epoch()] == [20, 20, 10] and len(evaluation) == 3
    assert torch.cat([batch.labels for batch in evaluation.epoch()]).tolist() == numbered.labels.tolist()
    assert len(Batches(numbered, 20, train=True)) == 2


REGULARISED = Augment(shift=4, flip="alternating", pad_mode="reflect", cutout=8)


@pytest.mark.parametrize("augment", [STRONG, REGULARISED])
def test_batches_are_the_same_from_any_position(colour: ImageSet, augment: Augment) -> None:
    batches = Batches(colour, 8, train=True, augment=augment, seed=5)
    whole = list(batches.epoch(3))
    rest = list(batches.epoch(3, start=4))
    assert len(rest) == len(whole) - 4 and whole[0].images.shape == (8, 3, 32, 32)
    for one, other in zip(whole[4:], rest, strict=True):
        assert all(same(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(whole[0].pixels, next(batches.epoch(4)).pixels)


@pytest.mark.parametrize("augment", [STRONG, REGULARISED, Augment()])
@pytest.mark.parametrize("train", [True, False])
def test_a_gpu_prepares_several_batches_together(
    colour: ImageSet, train: bool, augment: Augment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and memory formats of the batches do not depend on it, nor does a start in the middle of an epoch."""
    batches = Batches(colour, 8, train=train, augment=augment, seed=5)
    alone = list(batches.epoch(1))
    calls: list[int] = []
    apply = Augment.apply
    monkeypatch.setattr(Augment, "apply", lambda *args: (calls.append(len(args[1])), apply(*args))[1])
    monkeypatch.setattr(Batches, "device", torch.device("cuda"))
    monkeypatch.setattr("capszoo.data.batches.LARGEST_GROUP", 4 * 8 * 3 * 34 * 34)
    for start in (0, 3):
        together = list(batches.epoch(1, start))
        assert len(together) == len(alone) - start
        for one, other in zip(alone[start:], together, strict=True):
            assert all(same(a, b) for a, b in zip(one, other, strict=True))
            assert one.images.stride() == other.images.stride()
    assert calls == ([32, 16, 24] if train else [32, 18, 26])


def test_composed_batches_are_prepared_together(monkeypatch: pytest.MonkeyPatch, numbered: ImageSet) -> None:
    digits = replace(numbered, spec=dataset_spec("multimnist"), composer=Overlay())
    batches = Batches(digits, 8, train=True, seed=2)
    alone = list(batches.epoch())
    monkeypatch.setattr(Batches, "device", torch.device("cuda"))
    calls, compose = [], Overlay.compose
    monkeypatch.setattr(Overlay, "compose", lambda *args: (calls.append(len(args[3])), compose(*args))[1])
    together = list(batches.epoch())
    assert calls == [48]
    assert len(alone) == len(together) == 6
    for one, other in zip(alone, together, strict=True):
        assert one.parts is not None and all(same(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("augment", [STRONG, REGULARISED])
@pytest.mark.parametrize("train", [True, False])
def test_processes_share_the_global_batch(colour: ImageSet, train: bool, augment: Augment) -> None:
    options: dict[str, Any] = {"train": train, "augment": augment, "seed": 1}
    alone = list(Batches(colour, 8, **options).epoch(0))
    shares = [list(Batches(colour, 8, rank=rank, world=2, **options).epoch(0)) for rank in (0, 1)]
    for number, batch in enumerate(alone):
        for rank in (0, 1):
            torch.testing.assert_close(batch.images[rank::2], shares[rank][number].images, atol=0, rtol=0)
            assert torch.equal(batch.labels[rank::2], shares[rank][number].labels)


def test_cutout_ends_before_the_last_epochs(colour: ImageSet) -> None:
    cut = Batches(colour, 50, train=True, augment=Augment(cutout=16), cutout_epochs=1)
    plain = Batches(colour, 50, train=True, augment=Augment())
    assert not torch.equal(next(cut.epoch(0)).pixels, next(plain.epoch(0)).pixels)
    assert torch.equal(next(cut.epoch(1)).pixels, next(plain.epoch(1)).pixels)


def test_the_middle_is_cropped_in_evaluation(colour: ImageSet) -> None:
    batch = next(Batches(colour, 50, augment=STRONG).epoch())
    assert torch.equal(batch.pixels, colour.images[:, :, 1:33, 1:33])


# The streams that finished and interrupted runs were trained on, recorded at commit e006481.
STREAMS = {
    "cifar10": {(4, True): "9cefed57a074f6f4", (2, False): "5f353436d476523e", (0, True): "c4a9da5b2fabdbe1"},
    "mnist": {(4, True): "f7d7dab96f36df2b", (2, False): "0deeab3e5023dd6b", (0, True): "e6d1fde3e82ff70b"},
}


def test_old_runs_go_on_with_the_same_images() -> None:
    random = torch.Generator().manual_seed(0)
    for name, streams in STREAMS.items():
        c, h, w = dataset_spec(name).input_size
        images = torch.randint(0, 256, (200, c, h, w), dtype=torch.uint8, generator=random)
        data = ImageSet(dataset_spec(name), "train", images, torch.arange(200) % 10)
        for (shift, flip), expected in streams.items():
            digest = hashlib.sha256()
            batches = Batches(data, 64, train=True, augment=Augment(shift=shift, flip=flip), seed=7)
            for epoch in (0, 3):
                for batch in batches.epoch(epoch):
                    for tensor in (batch.pixels, batch.labels):
                        digest.update(tensor.contiguous().numpy().tobytes())
            assert digest.hexdigest()[:16] == expected, (name, shift, flip)


def test_chunks() -> None:
    images, parts = torch.rand(6, 1, 2, 2), torch.rand(6, 2, 1, 2, 2)
    plain = Batch(images, torch.arange(6), images)
    for batch in (plain, Batch(*plain[:3], parts, parts[:, :, 0, 0, 0])):
        chunks = batch.chunk(3)
        assert len(chunks) == 3
        for column, pieces in zip(batch, zip(*chunks, strict=True), strict=True):
            assert all(map(same, pieces, [None] * 3 if column is None else column.chunk(3)))


def test_mistakes_are_one_line(numbered: ImageSet, colour: ImageSet) -> None:
    with refuses(DataError, names=["50", "64", "training"]):
        Batches(numbered, 64, train=True)
    with pytest.raises(DataError, match="need 3 channels"):
        Batches(numbered, 8, train=True, augment=Augment(saturation=0.1))
    small = ImageSet(colour.spec, "train", colour.images[:, :, :30, :30], colour.labels)
    with refuses(DataError, names=["30", "32", "smaller"]):
        Batches(small, 8)


def test_balanced_order_by_hand() -> None:
    """8, 3 and 1 images: each class comes four times; the small one again and again, of the large one half."""
    labels = torch.tensor([0] * 8 + [1] * 3 + [2])
    seen = torch.zeros(12, dtype=torch.int64)
    for seed in range(40):
        order = balanced_order(labels, torch.Generator().manual_seed(seed))
        assert torch.bincount(labels[order]).tolist() == [4, 4, 4]
        assert order[labels[order] == 0].unique().numel() == 4, "no image of the large class twice"
        assert sorted(torch.bincount(order, minlength=12)[8:11].tolist()) == [1, 1, 2]
        seen += torch.bincount(order, minlength=12)
    assert seen[:8].min() > 0 and seen[11] == 160, "other epochs show the others"
    assert not torch.equal(order, order.sort().values)
    uneven = torch.tensor([0] * 9 + [1] * 2)
    assert sorted(torch.bincount(uneven[balanced_order(uneven, torch.Generator())]).tolist()) == [5, 6]


def test_balance_of_equal_classes_is_a_permutation(numbered: ImageSet) -> None:
    batches = Batches(numbered, 10, train=True, balance=True, seed=3)
    seen = torch.cat([batch.pixels[:, 0, 0, 0] for batch in batches.epoch(0)])
    assert sorted(seen.tolist()) == list(range(1, 51)) and seen.tolist() != list(range(1, 51))
    rest = torch.cat([batch.pixels[:, 0, 0, 0] for batch in batches.epoch(0, start=3)])
    assert torch.equal(rest, seen[30:])


def test_stratified_validation_by_hand(numbered: ImageSet) -> None:
    """12, 5, 2 and 1 images, a quarter of 20: 3, 1, 1 (of two, one) and none (of one)."""
    labels = torch.tensor([0] * 12 + [1] * 5 + [2] * 2 + [3])
    data = ImageSet(numbered.spec, "train", numbered.images[:20], labels)
    rest, held_out = split_validation(data, 5, 0, stratified=True)
    assert torch.bincount(held_out.labels, minlength=4).tolist() == [3, 1, 1, 0]
    pixels = torch.cat([part.images[:, 0, 0, 0] for part in (rest, held_out)])  # type: ignore[union-attr]
    assert sorted(pixels.tolist()) == list(range(1, 21))
    again, _ = split_validation(data, 5, 0, stratified=True)
    other, _ = split_validation(data, 5, 1, stratified=True)
    assert torch.equal(again.images, rest.images) and not torch.equal(other.images, rest.images)  # type: ignore[union-attr]


def test_stratified_folds_by_hand(numbered: ImageSet) -> None:
    labels = torch.arange(len(numbered)) % 3
    spec = replace(numbered.spec, label_names=("a", "b", "c"))
    data = replace(numbered, spec=spec, labels=labels)
    folds = stratified_folds(data, 4)
    assert torch.equal(torch.cat([fold.labels for _, fold in folds]).bincount(), labels.bincount())
    for rest, fold in folds:
        assert len(rest) + len(fold) == len(data) and (rest.split, fold.split) == ("train", "test")
        counts = fold.labels.bincount(minlength=3)
        assert (counts - labels.bincount() / 4).abs().max() < 1, "a share of each class, rounded"
    assert sorted(len(fold) for _, fold in folds) == [12, 12, 13, 13]
    with refuses(DataError, names=["c", "folds"]):
        stratified_folds(data, len(data))
