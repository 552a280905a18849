"""Batched augmentation against a loop over images, and batches that are the same from any position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from capszoo.data import Batches, DataError, ImageSet, crop_and_flip, dataset_spec, normalize


def naive_crop_and_flip(images: Tensor, shift: int, flip: bool, generator: torch.Generator) -> Tensor:
    b, c, h, w = images.shape
    offsets = torch.randint(0, 2 * shift + 1, (2, b, 1), generator=generator)
    mirrored = torch.rand(b, 1, generator=generator) < 0.5
    out = torch.zeros_like(images)
    for n in range(b):
        for y in range(h):
            for x in range(w):
                from_y = y + int(offsets[0, n]) - shift
                from_x = (w - 1 - x if flip and mirrored[n] else x) + int(offsets[1, n]) - shift
                if 0 <= from_y < h and 0 <= from_x < w:
                    out[n, :, y, x] = images[n, :, from_y, from_x]
    return out


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("shift", "flip"), [(0, False), (2, False), (0, True), (4, True)])
def test_crop_and_flip(channels: int, shift: int, flip: bool) -> None:
    images = torch.randint(1, 256, (9, channels, 7, 6), dtype=torch.uint8)
    result = crop_and_flip(images, shift, flip, torch.Generator().manual_seed(3))
    assert torch.equal(result, naive_crop_and_flip(images, shift, flip, torch.Generator().manual_seed(3)))
    if shift or flip:
        assert not torch.equal(result, images)
    else:
        assert result is images


def test_crop_keeps_every_shift_and_both_sides() -> None:
    images = torch.zeros(4000, 1, 5, 5, dtype=torch.uint8)
    images[:, :, 2, 1] = 1
    result = crop_and_flip(images, 1, True, torch.Generator().manual_seed(0))
    where = result.float().mean(0)[0]
    assert torch.equal(where > 0, torch.tensor([[0] * 5, *[[1] * 5] * 3, [0] * 5]).bool())
    # Columns 0, 1, 2 by shift, 2, 3, 4 mirrored: the middle one twice as often, each row one third.
    expected = torch.tensor([1, 1, 2, 1, 1]) / 18
    torch.testing.assert_close(where[1:4], expected.expand(3, 5), atol=0.02, rtol=0)


def test_normalize() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.1)
    expected = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(normalize(images, mean, std).double(), expected, atol=1e-5, rtol=0)


@pytest.fixture
def numbered() -> ImageSet:
    """50 images whose pixels say which they are."""
    images = torch.arange(50, dtype=torch.uint8).view(50, 1, 1, 1).expand(50, 1, 6, 6).contiguous() + 1
    return ImageSet(dataset_spec("mnist"), "train", images, torch.arange(50) % 10)


def test_an_epoch_shows_each_image_once(numbered: ImageSet) -> None:
    seen = torch.cat([batch.pixels[:, 0, 0, 0] for batch in Batches(numbered, 10, train=True).epoch(0)])
    assert sorted(seen.tolist()) == list(range(1, 51)) and seen.tolist() != list(range(1, 51))
    other = torch.cat([batch.pixels[:, 0, 0, 0] for batch in Batches(numbered, 10, train=True).epoch(1)])
    assert seen.tolist() != other.tolist()
    evaluation = Batches(numbered, 20)
    assert [len(batch.labels) for batch in evaluation.epoch()] == [20, 20, 10] and len(evaluation) == 3
    assert torch.cat([batch.labels for batch in evaluation.epoch()]).tolist() == numbered.labels.tolist()
    assert len(Batches(numbered, 20, train=True)) == 2


def test_batches_are_the_same_from_any_position(numbered: ImageSet) -> None:
    batches = Batches(numbered, 8, train=True, shift=2, flip=True, seed=5)
    whole = list(batches.epoch(3))
    rest = list(batches.epoch(3, start=4))
    assert len(rest) == len(whole) - 4
    for one, other in zip(whole[4:], rest, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_processes_share_the_global_batch(numbered: ImageSet) -> None:
    options = {"train": True, "shift": 2, "flip": True, "seed": 1}
    alone = list(Batches(numbered, 8, **options).epoch(0))
    shares = [list(Batches(numbered, 8, rank=rank, world=2, **options).epoch(0)) for rank in (0, 1)]
    for number, batch in enumerate(alone):
        for rank in (0, 1):
            assert torch.equal(batch.images[rank::2], shares[rank][number].images)
            assert torch.equal(batch.labels[rank::2], shares[rank][number].labels)


def test_too_few_images_for_a_batch(numbered: ImageSet) -> None:
    with pytest.raises(DataError, match="50 training images do not fill one batch of 64"):
        Batches(numbered, 64, train=True)
