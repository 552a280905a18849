"""Corrupted images: what each corruption does to known images, and the accuracy on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from capszoo.data import keyed_generator
from capszoo.recipes.evaluation.corruptions import (
    CIFAR_C,
    MNIST_C,
    Corruption,
    CorruptionResult,
    _plasma,
    corrupt,
    corruptions,
    mean_accuracy,
)
from capszoo.recipes.evaluation.target import EvalTarget, prepare
from tests.support import packed

ROOT = Path(__file__).resolve().parents[3]
EVERY = [("cifar10", name) for name in CIFAR_C] + [("mnist", name) for name in MNIST_C]
#: Corruptions that leave an image of one colour as it is.
SPATIAL = ("defocus blur", "glass blur", "zoom blur", "elastic", "pixelate", "jpeg", "contrast")


def done(
    chosen: dict[str, Corruption], name: str, pixels: Tensor, severity: int = 1, seed: int = 0
) -> Tensor:
    return corrupt(pixels, chosen[name], severity, keyed_generator(seed))


@pytest.mark.parametrize(("data", "name"), EVERY)
def test_every_corruption_changes_the_images_as_its_generator_decides(data: str, name: str) -> None:
    chosen = CIFAR_C if data == "cifar10" else MNIST_C
    pixels = packed(ROOT, data).images[:6]
    before = pixels.clone()
    last = len(chosen[name].severities)
    changed = done(chosen, name, pixels, last)
    assert changed.dtype == torch.uint8 and changed.shape == pixels.shape
    assert torch.equal(pixels, before), "the originals stay"
    assert all(not torch.equal(a, b) for a, b in zip(changed, pixels, strict=True))
    assert torch.equal(changed, done(chosen, name, pixels, last))
    assert done(chosen, name, pixels[:1], last).shape == pixels[:1].shape, "one image alone"


@pytest.mark.parametrize("name", [name for name in CIFAR_C if name not in ("glass blur", "elastic")])
def test_severities_grow(name: str) -> None:
    pixels = packed(ROOT, "cifar10").images[:40]
    differences = [float((done(CIFAR_C, name, pixels, k).float() - pixels).abs().mean()) for k in range(1, 6)]
    assert differences == sorted(differences) and differences[-1] > 1.3 * differences[0]


@pytest.mark.parametrize("name", SPATIAL)
@pytest.mark.parametrize("severity", [1, 5])
def test_one_colour_stays(name: str, severity: int) -> None:
    pixels = torch.tensor([200, 90, 30], dtype=torch.uint8).view(1, 3, 1, 1).expand(2, 3, 32, 32)
    changed = done(CIFAR_C, name, pixels, severity)
    tolerance = 4 if name == "jpeg" else 0  # its colours are quantised
    assert int((changed.int() - pixels).abs().max()) <= tolerance


def test_noise_has_the_stated_size() -> None:
    grey = torch.full((20, 3, 32, 32), 128, dtype=torch.uint8)
    level = 128 / 255
    gaussian = done(CIFAR_C, "gaussian noise", grey, 5).float() / 255
    assert float(gaussian.std()) == pytest.approx(0.10, rel=0.03)
    assert float(gaussian.mean()) == pytest.approx(level, abs=0.003)
    shot = done(CIFAR_C, "shot noise", grey, 3).float() / 255
    assert float(shot.std()) == pytest.approx((level / 100) ** 0.5, rel=0.03), (
        "a Poisson variable of 100 photons"
    )
    impulse = done(CIFAR_C, "impulse noise", grey, 5)
    assert float((impulse == 0).float().mean()) == pytest.approx(0.035, rel=0.1)
    assert float((impulse == 255).float().mean()) == pytest.approx(0.035, rel=0.1)
    assert int(((impulse != 0) & (impulse != 255) & (impulse != 128)).sum()) == 0


def test_colours() -> None:
    pixels = torch.tensor([[100, 50, 0], [0, 0, 0]], dtype=torch.uint8).view(2, 3, 1, 1).expand(2, 3, 32, 32)
    bright = done(CIFAR_C, "brightness", pixels, 5)[:, :, 0, 0].tolist()
    value = 100 + 0.3 * 255
    assert bright[0] == pytest.approx([value, value / 2, 0], abs=0.6), "hue and saturation stay"
    assert bright[1] == pytest.approx([0.3 * 255] * 3, abs=0.6)
    halves = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    halves[..., 16:] = 200
    contrast = done(CIFAR_C, "contrast", halves, 2)
    assert contrast[0, 0, 0, 0] == 50 and contrast[0, 0, 0, 31] == 150


@pytest.mark.parametrize(("chosen", "channels", "side"), [(CIFAR_C, 3, 32), (MNIST_C, 1, 28)])
def test_glass_takes_values_from_above_and_left(
    chosen: dict[str, Corruption], channels: int, side: int
) -> None:
    point = torch.zeros(400, channels, side, side, dtype=torch.uint8)
    point[:, :, 10, 12] = 255
    apply = chosen["glass blur"].apply
    moved = apply(point.float() / 255, (0.05, 1), keyed_generator(0))  # a blur of nothing
    lit = (moved[:, 0].amax(0) > 0.5).nonzero()
    if channels == 3:
        assert (lit - torch.tensor([10, 12])).unique().tolist() == [0, 1], (
            "each pixel has its own, or a neighbour's"
        )
        assert float(moved[:, 0].sum((1, 2)).mean()) == pytest.approx(1, abs=0.15)
    else:
        assert torch.equal(moved.sum((1, 2, 3)), torch.ones(400)), "swapped: every value is kept"
        assert len(lit) > 4


def test_elastic_without_movement_is_the_image() -> None:
    pixels = packed(ROOT, "cifar10").images[:3].float() / 255
    still = CIFAR_C["elastic"].apply(pixels, (0, 0.1, 0), keyed_generator(0))
    torch.testing.assert_close(still, pixels, atol=1e-4, rtol=0)
    shifted = CIFAR_C["elastic"].apply(pixels, (0, 0, 0.08), keyed_generator(0))
    assert float((shifted - pixels).abs().mean()) > 0.01


def test_digits_are_moved_and_drawn_on() -> None:
    point = torch.zeros(40, 1, 28, 28, dtype=torch.uint8)
    point[:, :, 14, 14] = 200
    places = {divmod(int(one.flatten().argmax()), 28) for one in done(MNIST_C, "translate", point)}
    assert places == {(11, 11), (11, 17), (17, 11), (17, 17)}
    stripe = done(MNIST_C, "stripe", torch.full((1, 1, 28, 28), 55, dtype=torch.uint8))[0, 0, 0]
    assert stripe.tolist() == [200] * 7 + [55] * 14 + [200] * 7
    black = torch.zeros(30, 1, 28, 28, dtype=torch.uint8)
    dots = done(MNIST_C, "dotted line", black)[:, 0].amax(1) > 100  # by column
    assert dots.float().mean(0).round().tolist() == [0, 0, 1, 1] * 6 + [0, 0, 1, 0]
    zigzag = done(MNIST_C, "zigzag", black)[:, 0].amax(1) > 100
    assert not zigzag[:, :2].any() and float(zigzag[:, 3:24].float().mean()) > 0.9
    turned = packed(ROOT, "mnist").images[:60]
    for name in ("shear", "rotate"):
        sides = done(MNIST_C, name, turned[:1].expand(20, 1, 28, 28))
        assert len({int(one.float().argmax()) for one in sides}) == 2


@pytest.fixture(scope="module")
def target() -> EvalTarget:
    return prepare("efficient_capsnet.mnist", packed(ROOT, "mnist").subset(torch.arange(100)), device="cpu")


class Recorder(nn.Module):
    """Remembers its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x.new_zeros(len(x), 10)


def test_the_images_do_not_depend_on_the_batch_size(target: EvalTarget) -> None:
    whole, parts = Recorder(), Recorder()
    corruptions(replace(target, net=whole), batch_size=100)
    corruptions(replace(target, net=parts), batch_size=40)
    assert [len(x) for x in whole.seen] == [100] * 12 and [len(x) for x in parts.seen] == [40, 40, 20] * 12
    torch.testing.assert_close(torch.cat(whole.seen), torch.cat(parts.seen))
    other = Recorder()
    corruptions(replace(target, net=other), seed=1, batch_size=100)
    same = [torch.equal(a, b) for a, b in zip(whole.seen, other.seen, strict=True)]
    fixed = ("scale", "brightness", "stripe")  # nothing is drawn for them
    assert same == [name in fixed for name in MNIST_C]


def test_the_mean_counts_corruptions_equally() -> None:
    results = [CorruptionResult("a", "noise", (10.0, 20.0)), CorruptionResult("b", "blur", (45.0,))]
    assert mean_accuracy(results) == 30


def test_fog_is_smoother_where_its_amplitude_falls_faster() -> None:
    def roughness(decay: float) -> float:
        field = _plasma(16, 32, decay, keyed_generator(0))
        assert field.amin((1, 2)).unique().tolist() == [0] and field.amax((1, 2)).unique().tolist() == [1]
        return float((field - field.roll(1, 1)).abs().mean())

    assert roughness(3) < roughness(2) < roughness(1.2)
