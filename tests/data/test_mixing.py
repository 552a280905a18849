"""Mixup and CutMix against loops over images, and their losses against the mean of two losses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capszoo.data import Augment, Batches, DataError, ImageSet, dataset_spec
from capszoo.data.mixing import draw_mixing, mix_images, mix_labels, own_shares, partners
from capszoo.losses import create_loss
from capszoo.recipes.config import Recipe, RecipeError, load_recipe
from capszoo.recipes.training.step import create_step


def draw(n: int, mixup: float = 0.0, cutmix: float = 0.0, prob: float = 1.0) -> dict[str, Tensor]:
    return draw_mixing(n, (9, 8), mixup, cutmix, prob, torch.Generator().manual_seed(3))


def test_partners_are_half_a_batch_away() -> None:
    cpu = torch.device("cpu")
    assert partners([4, 4, 2], cpu).tolist() == [2, 3, 0, 1, 6, 7, 4, 5, 9, 8]
    whole = partners([8], cpu)
    for rank in (0, 1):  # of each process's share
        assert torch.equal(torch.arange(8)[rank::2][partners([4], cpu)], whole[rank::2])


@pytest.mark.parametrize(("mixup", "cutmix", "prob"), [(0.4, 0, 1), (0, 1.0, 1), (0.4, 1.0, 0.7)])
def test_images_and_labels_by_hand(mixup: float, cutmix: float, prob: float) -> None:
    images = torch.randint(0, 256, (40, 3, 9, 8), dtype=torch.uint8)
    labels, draws = torch.arange(40) % 5, draw(40, mixup, cutmix, prob)
    partner = partners([40], images.device)
    found, own = mix_images(images, partner, draws), own_shares(draws, (9, 8))
    main, targets = mix_labels(labels, partner, own, 5)
    kinds = set()
    for n in range(40):
        other, blend = (n + 20) % 40, float(draws["blend"][n])
        top, bottom, left, right = draws["paste"][n].tolist()
        pixels = (bottom - top) * (right - left)
        kinds.add((blend < 1, pixels > 0))
        expected = torch.lerp(images[other].float(), images[n].float(), blend).round().to(torch.uint8)
        expected[:, top:bottom, left:right] = images[other, :, top:bottom, left:right]
        assert torch.equal(found[n], expected)
        share = blend * (1 - pixels / 72)
        assert float(own[n]) == pytest.approx(share, abs=1e-6)
        chances = [0.0] * 5
        chances[labels[n]] += share
        chances[labels[other]] += 1 - share
        assert targets[n].tolist() == pytest.approx(chances, abs=1e-6)
        assert int(main[n]) == int(labels[n] if share >= 0.5 else labels[other])
    wanted = {(True, False)} if mixup else set()
    wanted |= {(False, True)} if cutmix else set()
    assert kinds - {(False, False)} == wanted, "never both on one image"
    assert ((False, False) in kinds) >= (prob < 1)


def test_shares_have_their_distribution() -> None:
    """Beta(a, a) has the variance 1 / (4 (2a + 1)); CutMix's before its rectangles are clipped."""
    for alpha in (0.2, 1.0):
        own = draw(20_000, mixup=alpha)["blend"]
        assert float(own.mean()) == pytest.approx(0.5, abs=0.01)
        assert float(own.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)
    half = draw(20_000, 0.2, 1.0, 0.5)
    blended = half["blend"] < 1
    areas = (half["paste"][:, 1] - half["paste"][:, 0]) * (half["paste"][:, 3] - half["paste"][:, 2])
    assert float(blended.float().mean()) == pytest.approx(0.25, abs=0.02)
    assert 0.15 < float((areas > 0).float().mean()) < 0.26 and not bool((blended & (areas > 0)).any())
    large = draw_mixing(20_000, (400, 400), 0.0, 1.0, 1.0, torch.Generator().manual_seed(1))
    top, bottom, left, right = large["paste"].unbind(1)
    inner = (top > 0) & (bottom < 400) & (left > 0) & (right < 400)
    sides = (bottom - top)[inner], (right - left)[inner]
    assert torch.equal(*sides), "a rectangle of the image's proportions"
    # Uniform share u of the area; its square of side sqrt(u) lies inside with probability (1 - sqrt(u))^2.
    assert float(inner.float().mean()) == pytest.approx(1 / 6, abs=0.01)


def test_crops_and_flips_are_those_of_a_run_without() -> None:
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    data = ImageSet(dataset_spec("cifar10"), "train", images, torch.arange(16) % 10)
    plain = Augment(shift=4, flip=True, cutout=8)
    without = next(Batches(data, 16, train=True, augment=plain, seed=1).epoch())
    mixing = Batches(data, 16, train=True, augment=replace(plain, cutmix=1.0), seed=1, mix_epochs=2)
    mixed = next(mixing.epoch())
    partner = without.pixels[partners([16], images.device)]
    assert bool(((mixed.pixels == without.pixels) | (mixed.pixels == partner)).all())
    assert not torch.equal(mixed.pixels, without.pixels)
    assert mixed.targets is not None and mixed.targets.shape == (16, 10)
    assert torch.allclose(mixed.targets.sum(1), torch.ones(16))
    assert next(mixing.epoch(2)).targets is None and without.targets is None


@pytest.mark.parametrize(
    ("loss", "options"),
    [("margin", {}), ("cross_entropy", {}), ("cross_entropy", {"label_smoothing": 0.1}), ("bce", {})],
)
def test_the_loss_of_mixed_labels_is_the_mean_of_two(loss: str, options: dict[str, Any]) -> None:
    criterion = create_loss(loss, **options)
    scores, labels, partner = torch.rand(1, 5), torch.tensor([1, 4]), torch.tensor([1, 0])
    _, targets = mix_labels(labels, partner, torch.tensor([0.3, 1.0]), 5)
    both = [criterion(scores, label) for label in labels.split(1)]
    assert math.isclose(criterion(scores, targets[:1]), 0.3 * both[0] + 0.7 * both[1], rel_tol=1e-5)
    assert math.isclose(criterion(scores, targets[1:]), both[1], rel_tol=1e-5)


def test_mistakes_are_one_line() -> None:
    images, labels = torch.zeros(12, 3, 32, 32, dtype=torch.uint8), torch.arange(12) % 10
    data = ImageSet(dataset_spec("cifar10"), "train", images, labels)
    with pytest.raises(DataError, match="mix pairs of images: batch_size 6 must be a multiple of 4"):
        Batches(data, 6, train=True, augment=Augment(mixup=0.2), world=2)
    with pytest.raises(DataError, match="batch_size 1 must be at least 2"):
        Batches(data, 1, train=True, augment=Augment(mixup=0.2))
    odd = next(Batches(data, 5, train=True, augment=Augment(mixup=0.2)).epoch())
    assert odd.targets is not None and len(odd.targets) == 5
    Batches(data, 1, augment=Augment(mixup=0.2))  # evaluation has no augmentation
    several = replace(data, spec=replace(data.spec, labels_per_image=2))
    with pytest.raises(DataError, match=r"augment\.mixup and augment\.cutmix need images with one label"):
        Batches(several, 6, train=True, augment=Augment(cutmix=1.0))
    for wrong, message in [({"mixup": -1}, "mixup: -1 is out of range"), ({"mix_prob": 2}, "mix_prob")]:
        with pytest.raises(DataError, match=message):
            Augment(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.augment.mixup=0.2", "loss.name=spread"], "spread takes one label per image"),
        (["data.augment.cutmix=1", "loss.reconstruction=0.1"], "reconstruction does not go with"),
        (["data.augment.mixup=-1"], "data.augment.mixup"),
        (["data.augment.mix_prob=1.5"], "data.augment.mix_prob"),
    ],
)
def test_recipes_that_cannot_be_mixed(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("resnet20_routingpool.cifar10", changes)


def test_a_step_takes_the_mixed_labels() -> None:
    recipe = load_recipe("resnet20_routingpool.cifar10")
    step = create_step(recipe, nn.Flatten(), None, False)
    scores, labels, targets = torch.rand(4, 10), torch.arange(4), torch.rand(4, 10).softmax(1)
    loss = step(scores, labels, scores, targets=targets)[0]
    assert torch.equal(loss, step.criterion(scores, targets))
    assert not torch.equal(loss, step(scores, labels, scores)[0])


def test_a_recipe_reaches_the_batches() -> None:
    recipe = load_recipe("resnet20_routingpool.cifar10", ["data.augment.mixup=0.2", "data.augment.cutmix=1"])
    assert isinstance(recipe, Recipe)
    built = recipe.data.augment.build()
    assert (built.mixup, built.cutmix, built.mix_prob) == (0.2, 1.0, 1.0)
