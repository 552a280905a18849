"""Calibration error and temperature scaling against values that are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from capszoo.data import ImageSet
from capszoo.recipes.evaluation.calibration import (
    BINS,
    _scaled,
    calibrate,
    fit_temperature,
    held_out_images,
    reliability,
)
from capszoo.recipes.evaluation.target import EvalTarget, prepare
from capszoo.scores import probabilities
from tests.support import packed

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def target() -> EvalTarget:
    return prepare("efficient_capsnet.mnist", packed(ROOT, "mnist").subset(torch.arange(200)), device="cpu")


def test_reliability_by_hand() -> None:
    p = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.62, 0.38], [0.38, 0.62]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 1])
    found = reliability(p.log(), labels, bins=10)
    # two images of confidence 0.95, one of them right; two of confidence 0.62, both right
    assert found.ece == pytest.approx(100 * (2 * abs(0.95 - 0.5) + 2 * abs(0.62 - 1)) / 4)
    assert found.confidence == pytest.approx(78.5)
    assert found.nll == pytest.approx(-float(torch.tensor([0.95, 0.05, 0.62, 0.62]).log().mean()), abs=1e-6)
    filled = {place: one for place, one in enumerate(found.bins) if one}
    assert filled == {6: (2, pytest.approx(62), 100), 9: (2, pytest.approx(95), 50)}


def test_the_edges_of_the_bins() -> None:
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    found = reliability(p.clamp_min(1e-12).log(), torch.tensor([0, 0]), bins=2)
    assert found.bins == ((1, 50.0, 100.0), (1, 100.0, 100.0)), "a bin contains its upper edge"
    assert len(reliability(p.clamp_min(1e-12).log(), torch.tensor([0, 0])).bins) == BINS


def test_the_temperature_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    for true in (0.25, 1.0, 3.0):
        logs = (logits * true).log_softmax(1)  # too sure by this factor
        assert fit_temperature(logs, labels) == pytest.approx(true, rel=0.03)
        scaled = _scaled(logs, true)
        assert torch.equal(scaled.argmax(1), logits.argmax(1)), "no prediction changes"
        assert reliability(scaled, labels).ece < 1.0
    assert reliability((logits * 3).log_softmax(1), labels).ece > 10


def test_lengths_are_raised_to_a_power() -> None:
    lengths = torch.tensor([[0.9, 0.3, 0.1]], dtype=torch.float64)
    scaled = _scaled(probabilities(lengths, "lengths").log(), 0.5).exp()
    torch.testing.assert_close(scaled, lengths**2 / (lengths**2).sum())


def test_a_logit_far_below_counts_in_full(target: EvalTarget) -> None:
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(target.images.fixed().images[0].numel(), 10)
    )
    torch.nn.init.zeros_(net[1].weight)
    torch.nn.init.zeros_(net[1].bias)
    net[1].bias.data[3] = 60
    share = float((target.images.labels != 3).float().mean())
    found = calibrate(replace(target, net=net.eval()), "", 50)
    assert found.kind == "logits" and found.raw.nll == pytest.approx(60 * share)


def test_calibrate(target: EvalTarget) -> None:
    held_out = target.on(packed(ROOT, "mnist").subset(torch.arange(200, 400)))
    assert "200" in calibrate(target, held_out).reason, "all are recognised, by every temperature"
    assert isinstance(held_out.images, ImageSet)
    wrong = held_out.images.labels.clone()
    wrong[0] = (wrong[0] + 1) % 10
    held_out = target.on(replace(held_out.images, labels=wrong))
    found = calibrate(target, held_out)
    assert found.kind == "lengths" and found.fitted_on == 200 and found.scaled is not None
    assert found.temperature is not None and found.temperature < 1, "lengths are too unsure"
    assert found.scaled.ece < 5 < 20 < found.raw.ece and found.scaled.nll < found.raw.nll
    assert sum(one[0] for one in found.raw.bins if one) == 200
    alone = calibrate(target, "there are none", batch_size=30)
    assert alone.raw.ece == pytest.approx(found.raw.ece, abs=1e-3)
    assert (alone.temperature, alone.scaled, alone.reason) == (None, None, "there are none")


def test_held_out_images(target: EvalTarget, tiny_mnist: Path) -> None:
    name = "efficient_capsnet.mnist"
    own = replace(target, images=replace(target.images, split="validation"))  # type: ignore[arg-type]
    assert "it is measured on" in str(held_out_images(own, name, None, str(tiny_mnist)))
    missing = held_out_images(target, name, None, str(tiny_mnist.parent / "none"))
    assert isinstance(missing, str) and "no such folder" in missing
