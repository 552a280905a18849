"""The tests of what is claimed of capsules, on networks whose answers are known."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from capszoo.data import DATASETS, DataError, ImageSet
from capszoo.errors import CapszooError
from capszoo.models import CapsuleOutput
from capszoo.models._base import CouplingLayout
from capszoo.recipes.evaluation import outliers as outliers_module
from capszoo.recipes.evaluation.adversarial import adversarial, parse_attacks
from capszoo.recipes.evaluation.deletions import deletions
from capszoo.recipes.evaluation.outliers import auroc, other_images, outlier_scores, outliers
from capszoo.recipes.evaluation.pose import pose_probe, ridge_scores
from capszoo.recipes.evaluation.target import EvalTarget, prepare
from tests.support.errors import refuses

needs_torchmetrics = pytest.mark.skipif(
    importlib.util.find_spec("torchmetrics") is None, reason="needs torchmetrics, of capszoo[train]"
)

SIDE = 14


def images(count: int, pixels: Tensor | None = None, labels: Tensor | None = None) -> ImageSet:
    if pixels is None:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(40, 160, (count, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    labels = torch.zeros(count, dtype=torch.int64) if labels is None else labels
    spec = replace(DATASETS["mnist"], input_size=(1, SIDE, SIDE), label_names=("a", "b", "c"))
    spec = replace(spec, mean=(0.0,), std=(1.0,))
    return ImageSet(spec, "test", pixels, labels)


class _Known(nn.Module):
    """Three classes. The pose is the centre of the light, the activation the amount of light, both exactly.

    The first score is a sum of the pixels, weighted by rows, and the coupling map shows these weights; ``sign=-1``
    turns the map round.
    """

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.in_chans, self.img_size, self.num_classes = 1, (SIDE, SIDE), 3
        self.map_quantity = "coupling"
        weight = torch.linspace(0.02, 0.2, SIDE)[:, None].expand(SIDE, SIDE)
        self.weight = nn.Parameter(weight.clone())
        self.sign = sign
        self.pretrained_cfg = {"mean": (0.0,), "std": (1.0,), "label_names": ("a", "b", "c")}

    def forward(self, x: Tensor) -> Tensor:
        light = (x[:, 0] * self.weight).sum((1, 2))
        return torch.stack([light, torch.ones_like(light), torch.zeros_like(light)], 1)

    def forward_capsules(self, x: Tensor) -> CapsuleOutput:
        place = torch.arange(SIDE) - (SIDE - 1) / 2
        light = x[:, 0].sum((1, 2)).clamp_min(1e-9)
        centre = torch.stack([(x[:, 0] * place[:, None]).sum((1, 2)), (x[:, 0] * place).sum((1, 2))], 1)
        poses = (centre / light[:, None])[:, None].expand(-1, 3, -1)
        even = torch.full((len(x), 3, 5), 1 / 3)
        return CapsuleOutput(self(x), poses, light[:, None].expand(-1, 3), (even,))

    def coupling_layouts(self) -> tuple[CouplingLayout, ...]:
        return (CouplingLayout(1, "parents"),)

    def coupling_map(self, x: Tensor) -> Tensor:
        heat = (self.weight.detach() * self.sign).expand(len(x), 3, -1, -1)
        heat = heat - heat.amin() + 1e-3
        return heat / heat.sum((2, 3), keepdim=True)


def target(found: ImageSet, net: nn.Module | None = None) -> EvalTarget:
    return prepare(net or _Known(), found, device="cpu")


def test_a_regression_reads_what_is_there() -> None:
    generator = torch.Generator().manual_seed(1)
    pose = torch.randn(2000, 2, generator=generator)
    mixed = pose @ torch.randn(2, 6, generator=generator)
    exact, interval = ridge_scores(mixed, pose, 1000)
    assert exact > 0.999 and interval[0] <= exact <= interval[1]
    noisy = pose + 0.5 * torch.randn(2000, 2, generator=generator)
    found, interval = ridge_scores(noisy, pose, 1000)
    assert found == pytest.approx(1 / 1.25, abs=0.03), "signal over signal and noise"
    assert interval[0] < found < interval[1] and interval[1] - interval[0] < 0.1
    nothing, interval = ridge_scores(torch.randn(2000, 300, generator=generator), pose, 1000)
    assert abs(nothing) < 0.03 and interval[0] < 0
    constant, _ = ridge_scores(torch.ones(2000, 3), pose, 1000)
    assert abs(constant) < 0.01


def test_a_pose_that_is_right_by_construction() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.zeros(240, 1, SIDE, SIDE, dtype=torch.uint8)
    pixels[:, :, 5:9, 5:9] = torch.randint(40, 255, (240, 1, 4, 4), generator=generator, dtype=torch.uint8)
    found = pose_probe(target(images(240, pixels)))
    assert (found.n, found.fitted) == (120, 120)
    r2 = {(one.change, one.source): one.r2 for one in found.scores}
    assert r2["shift", "class poses"] > 0.95, "the light's centre moves with the image, but starts at random"
    assert abs(r2["shift", "class activations"]) < 0.1, "the amount of light does not"
    again = pose_probe(target(images(240, pixels)))
    assert again == found
    with refuses(CapszooError, names=["--limit"]):
        pose_probe(target(images(4)))


def test_a_map_that_is_right_by_construction() -> None:
    pytest.importorskip("captum")
    by_method = {one.method: one for one in deletions(target(images(8)))}
    assert set(by_method) == {"couplings", "gradient", "occlusion"}
    for one in by_method.values():
        assert one.n == 8 and one.interval is not None and one.interval[0] > 0
    assert by_method["couplings"].random == by_method["occlusion"].random
    reverse = deletions(target(images(8), _Known(-1)))[0]
    assert reverse.interval is not None and reverse.interval[1] < 0


@needs_torchmetrics
def test_auroc_of_known_scores() -> None:
    area, _ = auroc(torch.tensor([3.0, 2.0]), torch.tensor([1.0, 2.0]))
    assert area == pytest.approx(3.5 / 4), "a tie counts half"
    perfect, (low, high) = auroc(torch.tensor([3.0, 2.0]), torch.tensor([1.0, 0.0]))
    assert (perfect, high) == (1, 1) and low < 0.9, "few images in perfect order say little"
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(3000, generator=generator) + 1
    others = torch.randn(3000, generator=generator)
    expected = 0.5 * (1 + math.erf(0.5))  # of two normals a deviation apart
    for scale in (1.0, 1e4):
        area, (low, high) = auroc(scale * own, scale * others)
        assert area == pytest.approx(expected, abs=0.015) and low < area < high < low + 0.04


def test_scores_of_outliers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outlier_scores(target(images(6)))
    assert set(found) == {"max probability", "energy", "max activation", "coupling entropy"}
    torch.testing.assert_close(found["coupling entropy"], torch.full((6,), -1.0))
    x = images(6).images.float() / 255
    torch.testing.assert_close(found["max activation"], x.sum((1, 2, 3)))
    torch.testing.assert_close(found["energy"], _Known()(x).detach().logsumexp(1))

    class Normalised(_Known):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).log_softmax(1)

    assert "energy" not in outlier_scores(target(images(6), Normalised())), "it would be rounding alone"
    monkeypatch.setattr(_Known, "coupling_layouts", lambda self: (CouplingLayout(1, None),))
    assert "coupling entropy" not in outlier_scores(target(images(2))), "credit is no share"


@needs_torchmetrics
def test_dark_images_are_told_from_bright_ones() -> None:
    bright = target(images(20))
    dark = replace(images(20), images=images(20).images // 8, spec=replace(images(1).spec, name="night"))
    found = outliers(bright, dark)
    assert (found.dataset, found.n, found.others) == ("night", 20, 20)
    areas = {one.score: one.auroc for one in found.scores}
    assert areas["max activation"] == 1 and areas["coupling entropy"] == 0.5


def test_other_data_sets_must_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with refuses(DataError, names=["mnist"]):
        other_images(target(images(4)), "mnist", None, None, 0)

    def colour(name: str, *_: Any, **__: Any) -> ImageSet:
        spec = replace(DATASETS["cifar10"], input_size=(3, SIDE, SIDE))
        return ImageSet(spec, "test", torch.zeros(4, 3, SIDE, SIDE, dtype=torch.uint8), torch.zeros(4).long())

    for name in ("cat", "dog"):  # images by class without splits
        (tmp_path / "flat" / name).mkdir(parents=True)
        Image.new("L", (20, 20), 9).save(tmp_path / "flat" / name / "0.png")
    found = other_images(target(images(4)), f"imagefolder:{tmp_path / 'flat'}", None, None, 0)
    assert len(found) == 2 and found.spec.input_size == (1, SIDE, SIDE)
    monkeypatch.setattr(outliers_module, "load_dataset", colour)
    with refuses(DataError, names=["cifar10", 3, 1]):
        other_images(target(images(4)), "cifar10", None, None, 0)


class _Regions(nn.Module):
    """The class is the brightest of three regions: the smallest change of the pixels that alters it is known.

    ``hidden`` rounds the pixels first, which takes the gradients away.
    """

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.in_chans, self.img_size, self.num_classes = 1, (SIDE, SIDE), 3
        self.scale = nn.Parameter(torch.tensor(10.0))
        self.hidden = hidden
        self.pretrained_cfg = {"mean": (0.0,), "std": (1.0,), "label_names": ("a", "b", "c")}

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 32).round() / 32 if self.hidden else x
        return self.scale * torch.stack([part.mean((1, 2)) for part in x[:, 0, :12].split(4, dim=1)], 1)


def _by_margin(count: int) -> tuple[ImageSet, Tensor]:
    """Images whose class needs a change of 0.01 to 0.2 of each pixel, and this change."""
    needed = torch.linspace(0.01, 0.2, count)
    pixels = torch.full((count, 1, SIDE, SIDE), 0.4)
    labels = torch.arange(count) % 3
    for k in range(count):
        pixels[k, 0, 4 * labels[k] : 4 * labels[k] + 4] += 2 * needed[k]
    return images(count, (pixels * 255).round().to(torch.uint8), labels), needed


@pytest.mark.slow
def test_attacks_find_the_exact_radius() -> None:
    pytest.importorskip("art", reason="needs capszoo[attack]: make test-runtimes has it")
    found, needed = _by_margin(40)
    result = adversarial(target(found, _Regions()), (0.0, 0.05, 0.1), steps=20)
    assert not result.masked and result.zero_gradient == 0 and result.not_rising == 0
    clean, *attacked = result.radii
    assert clean.accuracy == 100 and clean.after == {"clean": 40}
    for one in attacked:
        expected = int((needed > one.eps).sum())
        assert abs(one.after["cross-entropy"] - expected) <= 1, "half a step of 8 bits"
        assert one.after["square"] <= one.after["margin"] <= one.after["cross-entropy"]
        assert one.interval[0] < one.accuracy < one.interval[1]
    assert adversarial(target(found, _Regions()), (0.05,), steps=20).radii[0] == attacked[0]


@pytest.mark.slow
def test_masked_gradients_are_reported() -> None:
    pytest.importorskip("art", reason="needs capszoo[attack]: make test-runtimes has it")
    found, _ = _by_margin(20)
    result = adversarial(target(found, _Regions(hidden=True)), (0.1,), steps=10)
    assert result.masked and result.zero_gradient == 1
    after = result.radii[0].after
    assert after["square"] < after["margin"], "what reads no gradients is not deceived"


def test_attacks_are_known_by_name() -> None:
    assert parse_attacks("square, apgd") == ("apgd", "square")
