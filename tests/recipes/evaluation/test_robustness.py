"""Sweeps, attacks and affNIST's protocol: what they leave as it is, and what they must lower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from capszoo.errors import CapszooError, UsageError
from capszoo.recipes.evaluation.metrics import assess
from capszoo.recipes.evaluation.robustness import (
    SWEEPS,
    affnist,
    attack,
    attack_loss,
    default_eps,
    move,
    parse_radii,
    pgd,
)
from capszoo.recipes.evaluation.target import EvalTarget, prepare
from tests.support import packed
from tests.support.errors import refuses

MODEL = "resnet20_routingcaps.mnist"
NEUTRAL = {"rotation": 0.0, "translation x": 0.0, "translation y": 0.0, "scale": 1.0, "shear": 0.0}


@pytest.fixture(scope="module")
def target() -> EvalTarget:
    root = Path(__file__).resolve().parents[3]
    return prepare(MODEL, packed(root, "mnist").subset(torch.arange(0, 1000, 25)), device="cpu")


@pytest.mark.parametrize("name", SWEEPS)
def test_the_neutral_amount_changes_nothing(name: str) -> None:
    assert NEUTRAL[name] in SWEEPS[name][1]
    noise = torch.randint(0, 256, (3, 3, 13, 10), dtype=torch.uint8)
    assert torch.equal(move(noise, name, NEUTRAL[name]), noise)


def test_where_a_pixel_goes() -> None:
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[0, 0, 4, 6] = 200  # two to the right of the middle

    def lit(name: str, amount: float) -> tuple[int, int]:
        return divmod(int(move(image, name, amount)[0, 0].flatten().argmax()), 9)

    assert lit("rotation", 90) == (2, 4), "counter-clockwise: up"
    assert lit("translation x", 0.2) == (4, 8) and lit("translation x", -0.2) == (4, 4)
    assert lit("translation y", 0.2) == (6, 6) and lit("translation y", -0.2) == (2, 6)
    assert lit("scale", 2.0) == (4, 8)
    below = image.transpose(2, 3).contiguous()  # two below the middle
    moved = move(below, "shear", 0.5)
    assert divmod(int(moved[0, 0].flatten().argmax()), 9) == (6, 5), "half a pixel for each row"


def test_the_attack_stays_in_the_ball_and_in_the_image(target: EvalTarget) -> None:
    images = target.images.images[:8].float() / 255  # type: ignore[union-attr]
    labels = target.images.labels[:8]

    def forward(x: Tensor) -> Tensor:
        return target.net((x - 0.1307) / 0.3081)

    generator = torch.Generator().manual_seed(0)
    attacked, standing = pgd(forward, images, labels, 0.1, 5, generator)
    assert float((attacked - images).abs().max()) <= 0.1 + 1e-6
    assert 0 <= float(attacked.min()) and float(attacked.max()) <= 1
    assert float((attacked - images).abs().max()) > 0.05, "it went somewhere"
    with torch.no_grad():
        fooled = forward(attacked).argmax(1) != labels
    assert torch.equal(fooled, ~standing) and bool(fooled.any())
    clean, right = pgd(forward, images, labels, 0.0)
    assert torch.equal(clean, images)
    with torch.no_grad():
        assert torch.equal(right, forward(images).argmax(1) == labels)


def test_the_attack_finds_what_is_there() -> None:
    """One pixel decides: the attack must move it, and cannot where the ball is too small."""

    def forward(x: Tensor) -> Tensor:
        value = x[:, 0, 0, 0]
        return torch.stack([0.5 - value, value - 0.5], dim=1)

    images = torch.full((2, 1, 3, 3), 0.4)
    labels = torch.tensor([0, 0])
    assert pgd(forward, images, labels, 0.2, 5)[1].tolist() == [False, False]
    assert pgd(forward, images, labels, 0.05, 50)[1].tolist() == [True, True]
    assert attack_loss(forward(images), labels).tolist() == pytest.approx([-0.2, -0.2])
    assert pgd(forward, images, 1 - labels, 0.05, 3)[1].tolist() == [False, False], "wrong from the start"


def test_the_attack_starts_at_random() -> None:
    def forward(x: Tensor) -> Tensor:  # right for every image, with a gradient of zero
        return torch.stack([x.flatten(1).sum(1) * 0 + 1, x.flatten(1).sum(1) * 0], dim=1)

    images, labels = torch.full((2, 1, 3, 3), 0.5), torch.tensor([0, 0])
    starts = [
        pgd(forward, images, labels, 0.1, 1, torch.Generator().manual_seed(seed))[0] for seed in (0, 0, 1)
    ]
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])
    assert 0.05 < float((starts[0] - images).abs().max()) <= 0.1 + 1e-6
    assert len(starts[0].unique()) == images.numel()


def test_attacks_lower_the_accuracy(target: EvalTarget) -> None:
    at_zero, small, large = attack(target, (0.0, 0.05, 0.15), steps=4, batch_size=20)
    assert at_zero.accuracy == assess(target).accuracy
    assert large.accuracy < small.accuracy <= at_zero.accuracy and large.accuracy < 50
    assert large.step_size == pytest.approx(2.5 * 0.15 / 4)
    assert all(p.requires_grad for p in target.net.parameters())
    again = attack(target, (0.05,), steps=4, batch_size=20)
    assert again[0].accuracy == small.accuracy, "the start is seeded"


def test_affnist(target: EvalTarget, tiny_mnist: Path) -> None:
    found = affnist(target, tiny_mnist, limit=30)
    assert found.n == 30 and not found.trained and not found.reason
    assert found.regenerated is not None and found.expanded is not None
    assert 50 < found.regenerated <= 100 and 50 < found.expanded <= 100
    fixed = prepare("idpa_cnn.mnist", target.images, device="cpu")
    refused = affnist(fixed, tiny_mnist)
    assert refused.regenerated is None and "built for 28x28 pixels" in refused.reason
    root = Path(__file__).resolve().parents[3]
    colour = prepare("resnet20_routingpool.cifar10", packed(root, "cifar10"), device="cpu")
    assert "the model is of cifar10" in affnist(colour, tiny_mnist).reason


def test_errors(target: EvalTarget) -> None:
    assert parse_radii("0.1,8/255") == pytest.approx((0.1, 8 / 255))
    for text in ("x", "1/0", "2", "-0.1", ""):
        with refuses(UsageError, names=["invalid"]):
            parse_radii(text)
    images, labels = torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.long)
    with refuses(UsageError, names=["2", "eps"]):
        pgd(nn.Flatten(), images, labels, 2.0)
    with pytest.raises(UsageError, match="0 steps"):
        pgd(nn.Flatten(), images, labels, 0.1, 0)
    several = replace(target.images.spec, labels_per_image=2)
    with refuses(CapszooError, names=["label", "image"]):
        attack(replace(target, images=replace(target.images, spec=several)), (0.1,))
    assert default_eps(1)[0] == default_eps(3)[0] == 0.0
