"""Batched augmentation against loops over images and against torchvision's operations on single images."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capszoo.data import Augment, DataError, normalize
from capszoo.data.augment import affine_matrices, erase, jitter, resize, shift_in_margin, warp
from tests.support.errors import refuses
from tests.support.formats import STRONG


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def augmented(images: Tensor, augment: Augment, seed: int = 3, size: tuple[int, int] | None = None) -> Tensor:
    h, w = images.shape[2:]
    size = size or (h, w)
    draws = augment.draw(len(images), (h - size[0], w - size[1]), generator(seed), size=size)
    return augment.apply(images, draws, size)


@pytest.mark.parametrize("pad_mode", ["constant", "reflect"])
@pytest.mark.parametrize(("shift", "flip"), [(0, False), (2, False), (0, True), (4, True)])
def test_shift_and_flip(pad_mode: Any, shift: int, flip: bool) -> None:
    images = torch.randint(1, 256, (9, 3, 7, 6), dtype=torch.uint8)
    result = augmented(images, Augment(shift=shift, flip=flip, pad_mode=pad_mode))
    random = generator()
    top, left = torch.randint(0, 2 * shift + 1, (2, 9), generator=random).tolist()
    mirrored = torch.rand(9, generator=random) < 0.5
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (shift, shift), (shift, shift)), mode=pad_mode)
    for n in range(9):
        window = padded[n, :, top[n] : top[n] + 7, left[n] : left[n] + 6]
        assert np.array_equal(result[n].numpy(), window[:, :, ::-1] if flip and mirrored[n] else window)
    assert (result is images) == (not shift and not flip)
    with refuses(DataError, names=["reflected"]):
        augmented(images, Augment(shift=6, pad_mode="reflect"))


def test_cutout_sets_a_square_to_the_mean() -> None:
    images = torch.full((400, 2, 9, 8), 200, dtype=torch.uint8)
    augment = Augment(cutout=3)
    draws = augment.draw(400, (0, 0), generator(), size=(9, 8))
    result = augment.apply(images, draws, (9, 8), (0.5, 0.1))
    for n in range(400):
        expected = images[n].clone()
        y, x = int(draws["cut_row"][n]), int(draws["cut_col"][n])
        rows, cols = slice(max(y - 1, 0), y + 2), slice(max(x - 1, 0), x + 2)
        expected[0, rows, cols], expected[1, rows, cols] = 128, 26
        assert torch.equal(result[n], expected)
    assert draws["cut_row"].unique().tolist() == list(range(9)), "the middle may lie anywhere"
    assert draws["cut_col"].unique().tolist() == list(range(8))


def test_cutout_draws_last() -> None:
    """Runs with and without cutout see the same crops and flips."""
    plain = Augment(shift=2, flip=True, brightness=0.1).draw(9, (0, 0), generator())
    cut = Augment(shift=2, flip=True, brightness=0.1, cutout=4).draw(9, (0, 0), generator(), size=(8, 8))
    assert all(torch.equal(plain[name], cut[name]) for name in plain) and len(cut) == len(plain) + 2


def test_patches_of_larger_images() -> None:
    """34 pixels to 32: each of the nine windows, with no black in it."""
    images = torch.arange(1, 35, dtype=torch.uint8).expand(600, 3, 34, 34)
    images = images + 34 * torch.arange(6, dtype=torch.uint8).repeat(100)[:, None, None, None]
    result = augmented(images, Augment(), size=(32, 32))
    assert result.shape == (600, 3, 32, 32) and int(result.min()) > 0
    left = result[:, 0, 0, 0].long() - 34 * torch.arange(6).repeat(100) - 1
    assert torch.bincount(left, minlength=3).tolist() == pytest.approx([200] * 3, abs=50)
    assert bool((result.diff(dim=3) == 1).all())


def naive_warp(image: Tensor, matrix: Tensor) -> Tensor:
    """One image [c, h, w], pixel by pixel, from the matrix's meaning."""
    c, h, w = image.shape
    (a, b), (p, q) = matrix.double().tolist()
    determinant = a * q - b * p
    out = torch.zeros(c, h, w, dtype=torch.float64)
    for row in range(h):
        for col in range(w):
            x, y = col - (w - 1) / 2, row - (h - 1) / 2
            from_x = (q * x - b * y) / determinant + (w - 1) / 2
            from_y = (-p * x + a * y) / determinant + (h - 1) / 2
            for dy in (0, 1):
                for dx in (0, 1):
                    i, j = math.floor(from_y) + dy, math.floor(from_x) + dx
                    weight = (1 - abs(from_y - i)) * (1 - abs(from_x - j))
                    if 0 <= i < h and 0 <= j < w:
                        out[:, row, col] += weight * image[:, i, j]
    return out


@pytest.mark.parametrize("size", [(8, 8), (6, 9)])
def test_warp(size: tuple[int, int]) -> None:
    images = torch.rand(4, 2, *size, generator=generator())
    settings = [[0, 30, -17, 5], [0, 0, 0.3, -0.2], [1, 1, 0.8, 1.3], [1, 1, 1.2, 0.9]]
    matrices = affine_matrices(*torch.tensor(settings))
    result = warp(images, matrices)
    for n in range(4):
        expected = naive_warp(images[n].double(), matrices[n])
        torch.testing.assert_close(result[n].double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(result[0], images[0], atol=1e-5, rtol=0)


def test_directions_of_the_matrices() -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    x_axis, y_axis = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])  # y points downwards
    quarter = affine_matrices(90 * one, zero, one, one)[0]
    torch.testing.assert_close(quarter @ x_axis, -y_axis, atol=1e-6, rtol=0)  # counter-clockwise: to the top
    sheared = affine_matrices(zero, 0.5 * one, one, one)[0]
    torch.testing.assert_close(sheared @ y_axis, torch.tensor([0.5, 1.0]))
    scaled = affine_matrices(zero, zero, 2 * one, 3 * one)[0]
    torch.testing.assert_close(scaled @ torch.ones(2), torch.tensor([3.0, 2.0]))
    images = torch.zeros(1, 1, 5, 5)
    images[0, 0, 2, 4] = 1
    assert warp(images, quarter[None])[0, 0].round().nonzero().tolist() == [[0, 2]]


def test_a_quarter_turn_is_exact() -> None:
    images = torch.randint(0, 256, (3, 3, 7, 7), dtype=torch.uint8)
    quarter = affine_matrices(*torch.tensor([90.0, 0, 1, 1]).expand(3, 4).T)
    assert torch.equal(Augment().apply(images, {"matrix": quarter}, (7, 7)), images.rot90(1, (2, 3)))


def test_jitter_is_torchvisions() -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    images = torch.rand(6, 3, 9, 8, generator=generator())
    images[5] = 0.5  # grey: it has no hue
    factors = {name: 0.6 + 0.8 * torch.rand(6, generator=generator(k)) for k, name in enumerate("bcs")}
    hue = 0.4 * torch.rand(6, generator=generator(9)) - 0.2
    result = jitter(images, factors["b"], factors["c"], factors["s"], hue)
    for n in range(6):
        expected = functional.adjust_brightness(images[n], float(factors["b"][n]))
        expected = functional.adjust_contrast(expected, float(factors["c"][n]))
        expected = functional.adjust_saturation(expected, float(factors["s"][n]))
        expected = functional.adjust_hue(expected, float(hue[n]))
        torch.testing.assert_close(result[n], expected, atol=1e-4, rtol=0)
    grey = torch.rand(2, 1, 4, 4, generator=generator())
    bright = jitter(grey, brightness=torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(bright, torch.stack((grey[0] / 2, grey[1])))


def test_everything_together_is_per_image_and_reproducible() -> None:
    images = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8).expand(8, -1, -1, -1)
    result = augmented(images, STRONG)
    assert result.dtype == torch.uint8 and result.shape == images.shape
    assert len({tuple(image.flatten().tolist()) for image in result}) == 8, "each image has its own numbers"
    assert torch.equal(result, augmented(images, STRONG))
    assert not torch.equal(result, augmented(images, STRONG, 4))


def test_drawn_numbers_keep_their_ranges() -> None:
    draws = STRONG.draw(4000, (0, 0), generator())
    for name in ("brightness", "contrast", "saturation"):
        assert 0.8 <= float(draws[name].min()) < 0.81 and 1.19 < float(draws[name].max()) <= 1.2
    assert -0.2 <= float(draws["hue"].min()) < -0.19 and 0.19 < float(draws["hue"].max()) <= 0.2
    scale = replace(STRONG, tilt=0, squeeze=0).draw(4000, (0, 0), generator())["matrix"].det().sqrt()
    assert 0.8 - 1e-6 <= float(scale.min()) < 0.81 and 1.19 < float(scale.max()) <= 1.2 + 1e-6
    assert set(draws["top"].tolist()) == set(draws["left"].tolist()) == set(range(7))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shift": -1}, ("augment.shift", "-1", "0")),
        ({"hue": 0.6}, ("augment.hue", "0.6", "0", "0.5")),
        ({"scale": (1.2, 0.8)}, ("augment.scale", "1.2", "0.8")),
        ({"rotation": 270}, ("augment.rotation", "270")),
        ({"resize": 0}, ("augment.resize", "0")),
        ({"squeeze": 1.0}, ("augment.squeeze", "1.0")),
        ({"erase": -1}, ("augment.erase", "-1")),
    ],
)
def test_impossible_settings(settings: dict, message: str) -> None:
    with refuses(DataError, names=message):
        Augment(**settings)


def test_tilt_and_squeeze() -> None:
    """Half of the images turn, by a clipped normal number; widths shrink evenly; heights stay."""
    draws = Augment(tilt=30, squeeze=0.25).draw(8000, (0, 0), generator())["matrix"]
    turned = torch.rad2deg(torch.atan2(-draws[:, 1, 0], draws[:, 0, 0]))
    still = turned.abs() < 1e-4
    assert 0.47 < float(still.float().mean()) < 0.53
    assert 29 < float(turned.abs().max()) <= 30 + 1e-4
    assert float(turned[~still].std()) == pytest.approx(30 * 0.329, rel=0.05)
    width = draws.det()  # height 1
    assert 0.75 <= float(width.min()) < 0.76 and 0.99 < float(width.max()) <= 1
    assert float(width.mean()) == pytest.approx(0.875, abs=0.01)
    before = Augment(rotation=20).draw(5, (0, 0), generator())["matrix"]
    both = Augment(rotation=20, squeeze=0.25).draw(5, (0, 0), generator())["matrix"]
    torch.testing.assert_close((both @ before.inverse()).det() < 1, torch.ones(5).bool())


@pytest.mark.parametrize("channels", [1, 3])
def test_shift_in_margin_reaches_every_place_and_cuts_nothing(channels: int) -> None:
    images = torch.zeros(3000, channels, 7, 6, dtype=torch.uint8)
    images[:, -1, 2:4, 1:5] = torch.arange(1, 9, dtype=torch.uint8).view(2, 4)
    result = augmented(images, Augment(shift_in_margin=True))
    assert result.dtype == torch.uint8 and bool((result.sum((1, 2, 3)) == 36).all())
    corner = result[:, -1].flatten(1).eq(1).nonzero()[:, 1]
    counts = torch.bincount(corner, minlength=42).view(7, 6)
    assert torch.equal(counts[:6, :3] > 0, torch.ones(6, 3).bool()) and int(counts[:6, :3].sum()) == 3000
    assert int(counts.max()) < 1.5 * 3000 / 18, "every place is as likely"
    whole = torch.full((2, 1, 4, 4), 9, dtype=torch.uint8)
    assert torch.equal(shift_in_margin(whole, torch.rand(2, 2)), whole)
    assert not shift_in_margin(0 * whole, torch.rand(2, 2)).any()


def test_erase_blackens_one_square_inside() -> None:
    images = torch.full((2000, 2, 6, 5), 7, dtype=torch.uint8)
    black = augmented(images, Augment(erase=4)) == 0
    assert bool((black.sum((2, 3)) == 16).all()) and torch.equal(black[:, 0], black[:, 1])
    rows, cols = black[:, 0].any(2).int().argmax(1), black[:, 0].any(1).int().argmax(1)
    assert torch.bincount(rows).tolist() == pytest.approx([2000 / 3] * 3, rel=0.15)
    assert torch.bincount(cols).tolist() == pytest.approx([1000, 1000], rel=0.15)
    assert not erase(images[:1], torch.rand(1, 2), 9).any(), "a square larger than the image takes all of it"
    images = torch.full((50, 1, 6, 5), 200, dtype=torch.uint8)
    black = augmented(images, Augment(erase=4, contrast=0.9, brightness=0.5)) == 0
    assert bool((black.sum((2, 3)) >= 16).all()), "colours must not change the square"


def test_resize() -> None:
    images = torch.randint(0, 256, (5, 2, 8, 8), dtype=torch.uint8)
    assert resize(images, (8, 8)) is images
    halved = resize(torch.full((5, 2, 8, 8), 77, dtype=torch.uint8), (4, 4), chunk=2)
    assert halved.shape == (5, 2, 4, 4) and bool((halved == 77).all())
    assert torch.equal(resize(images, (11, 11), chunk=2), resize(images, (11, 11)))


def test_normalize() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.1)
    expected = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(normalize(images, mean, std).double(), expected, atol=1e-5, rtol=0)
