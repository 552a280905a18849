"""Explanations: the heat map is the model's own, and belongs to the class asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
import torch.nn as nn
from matplotlib import font_manager
from PIL import Image

import capszoo
from capszoo._utils.files import NotWritable
from capszoo.errors import CapszooError, UsageError
from capszoo.explain import explain, heat_map, save_figure, save_heat_grid
from capszoo.explain.cell_centres import CellCentres
from capszoo.explain.heat_map import MEANINGS, METHODS
from capszoo.explain.plotting import save_columns
from capszoo.preprocess import model_transform
from tests.support.errors import refuses
from tests.support.explain import flat_map
from tests.support.toys import ToyCaps


@pytest.fixture
def model() -> ToyCaps:
    return ToyCaps(decoder=True).train()


@pytest.fixture
def picture() -> Image.Image:
    return Image.effect_noise((14, 10), 90)


def test_characters_that_the_default_font_lacks(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another font that comes with matplotlib has the first; none that it brings has the second."""
    own = [font for font in font_manager.fontManager.ttflist if matplotlib.get_data_path() in font.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    pictures = [torch.zeros(1, 8, 8)]
    save_columns([("\u1d81", pictures), ("plain", pictures)], ["row"], tmp_path / "a.png")
    assert not caplog.messages
    save_columns([("\u732b", pictures)], ["row"], tmp_path / "b.png")
    assert caplog.messages == ["no installed font has the characters \u732b: they become boxes"]
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_explanation(model: ToyCaps, picture: Image.Image) -> None:
    explanation = explain(model, picture)
    assert model.training  # its mode comes back
    model.eval()
    x = model_transform(model)(picture)[None]
    with torch.no_grad():
        output = model.forward_capsules(x)
        heat = model.coupling_map(x)
    predicted = int(output.scores.argmax())
    assert explanation.predicted == explanation.target == predicted
    torch.testing.assert_close(explanation.scores, output.scores[0])
    torch.testing.assert_close(explanation.heat, heat[0, predicted])
    assert explanation.heat.sum().item() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(explanation.couplings[0], output.couplings[0])
    assert explanation.labels == tuple("abcde")
    image = explanation.image
    assert image.shape == (1, 10, 10) and 0 <= image.min() <= image.max() <= 1
    rebuilt = model.reconstruct(output.poses, torch.tensor([predicted]))[0].detach()
    torch.testing.assert_close(explanation.reconstruction, rebuilt)


def test_another_class_has_another_map(model: ToyCaps, picture: Image.Image) -> None:
    by_index, by_name = explain(model, picture, 3), explain(model, picture, "d")
    assert by_index.target == by_name.target == 3 and torch.equal(by_index.heat, by_name.heat)
    others = [explain(model, picture, i).heat for i in range(5) if i != 3]
    assert not any(torch.allclose(by_index.heat, heat) for heat in others)
    tensor = model_transform(model)(picture)
    assert torch.equal(explain(model, tensor, 3).heat, by_index.heat)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("grid", [False, True])
def test_a_sentence_below_each_map_says_what_it_shows(
    model: ToyCaps,
    picture: Image.Image,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    grid: bool,
) -> None:
    kept: list[Any] = []
    real = heat_map.save
    monkeypatch.setattr(heat_map, "save", lambda figure, *rest: kept.append(figure) or real(figure, *rest))
    found = explain(model, picture, method=method)
    save_heat_grid([found], tmp_path / "a.png") if grid else found.save(tmp_path / "a.png")
    assert found.meaning == MEANINGS[method] and " not " in found.meaning
    assert found.meaning in {text.get_text() for text in kept[0].findobj(matplotlib.text.Text)}


class _Linear(nn.Module):
    """Scores that are linear in the pixels, of no capsule network; its input is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.in_chans, self.img_size, self.num_classes = 1, (14, 21), 3
        self.fc = nn.Linear(14 * 21, 3)
        self.pretrained_cfg = {"mean": (0.2,), "std": (0.5,), "label_names": tuple("abc")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.flatten(1))


@pytest.mark.parametrize("method", ["gradient", "occlusion"])
def test_attributions_of_linear_scores_are_exact(method: str) -> None:
    """What a tile adds to a score that is linear in the pixels, against black."""
    net, pixels = _Linear(), torch.rand(1, 14, 21)
    found = explain(net, (pixels - 0.2) / 0.5, "b", method=method)
    weight = net.fc.weight[1].detach().view(14, 21) / 0.5
    assert found.heat.shape == (7, 10), "seven tiles along the shorter side"
    torch.testing.assert_close(found.heat, _by_tiles(weight * pixels[0]), rtol=1e-4, atol=1e-5)
    assert found.relative.abs().max() == pytest.approx(1) and found.neutral == 0
    assert found.heat_at(28, 42).abs().max() <= 1 and not net.fc.weight.grad


def _by_tiles(values: torch.Tensor) -> torch.Tensor:
    """Sums over the tiles of 14 x 21 pixels, written out."""
    sums = torch.zeros(7, 10)
    for y in range(14):
        for x in range(21):
            sums[y * 7 // 14, x * 10 // 21] += values[y, x]
    return sums


def test_methods_that_do_not_exist_or_lack_their_library(
    model: ToyCaps, picture: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="gradient"):
        explain(model, picture, method="gradients")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with pytest.raises(CapszooError, match=r"captum.*'\.\[explain\]'"):
        explain(model, picture, method="occlusion")


def test_noise_about_an_even_share_is_not_drawn(tmp_path: Path) -> None:
    noise = torch.ones(6, 6) + 0.08 * torch.linspace(-1, 1, 36).view(6, 6)
    even, rounding, strong = (
        flat_map(values) for values in (noise, 1 + 1e-7 * noise, torch.ones(6, 6) + 2 * torch.eye(6))
    )
    assert even.is_even and rounding.is_even and not strong.is_even
    coloured = []
    for number, explanation in enumerate((even, rounding, strong)):
        path = save_figure(explanation, tmp_path / f"{number}.png")
        with Image.open(path) as figure:
            pixels = np.asarray(figure.convert("RGB")).astype(int)
        coloured.append(int((pixels.max(axis=2) - pixels.min(axis=2) > 40).sum()))
    assert coloured[0] == coloured[1] == 0 and coloured[2] > 1000


def test_uncovered_cells_are_left_out(tmp_path: Path) -> None:
    covered = torch.ones(4, 4, dtype=torch.bool)
    covered[-1] = False
    explanation = flat_map(covered.float(), covered=covered)
    assert explanation.relative[:3].allclose(torch.ones(3, 4)) and explanation.relative[3].isnan().all()
    assert explanation.is_even  # what is covered is
    assert explanation.heat_at(8, 8).isfinite().all()
    whole = flat_map(torch.ones(4, 4))
    drawn = [
        save_figure(one, tmp_path / f"{i}.png").read_bytes() for i, one in enumerate((explanation, whole))
    ]
    assert drawn[0] != drawn[1]  # hatched


def test_the_strips_that_no_idpa_window_sees_are_uncovered() -> None:
    model = capszoo.create_model("idpa_cnn", pretrained=True).eval()
    found = explain(model, torch.zeros(1, 28, 28))
    assert not found.covered.all() and found.covered.any()
    assert (found.heat[~found.covered] == 0).all() and (found.heat[found.covered] > 0).all()
    assert found.name == "idpa_cnn.mnist" and found.score_kind == "logits"


def test_the_strips_that_a_strided_primary_convolution_leaves_out_are_uncovered() -> None:
    model = capszoo.create_model(
        "efficient_capsnet", img_size=36, primary_kernel=5, primary_stride=2, strides=(1, 1, 2, 2)
    )
    found = explain(model.eval(), torch.rand(1, 36, 36))
    assert torch.equal(found.covered, found.heat > 0) and not found.covered.all()


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_pooling_without_routing_has_no_couplings_to_show(pool: str) -> None:
    model = capszoo.create_model("cnn_routingpool", pool=pool, img_size=16)
    with refuses(CapszooError, names=["routing"]):
        explain(model, torch.zeros(3, 16, 16))


@pytest.mark.parametrize(
    ("name", "quantity", "first", "step"),
    [
        ("resnet20_routingcaps", "coupling", 0.5, 4),
        ("cnn_routingpool", "coupling", 0.5, 1),
        ("capsnet_dynamic", "coupling × vote length", 8.5, 2),
        ("resnet20_idpa", "coupling", 0.5, 4),
        ("idpa_cnn", "coupling", 0.5, 2),
        ("resnet20_dynamic", "coupling × vote length", 0.5, 4),
        ("efficient_capsnet", "coupling × vote length", 5.5, 2),
        ("deepcaps", "coupling × vote length", 0.5, 8),
        ("capsnet6_dynamic", "coupling × capsule length", 0.5, 4),
        ("capsnet_em_norb_small", "coupling × activation", 8.5, 4),
        ("resnet20_selfrouting", "coupling × activation", 0.5, 4),
        ("resnet20_heinsen", "positive credit", 0.5, 4),
        ("encapnet6_master", "vote component", 0.5, 8),
        ("hvc", "vote component", 3.5, 1),
    ],
)
def test_the_explanation_names_what_its_shares_are_of_and_where(
    name: str, quantity: str, first: float, step: float
) -> None:
    net = capszoo.create_model(name, num_classes=3, in_chans=1)
    size = model_transform(net)
    found = explain(net, torch.rand(size.channels, *size.size))
    assert found.quantity == quantity == net.map_quantity
    assert found.heat.min() >= 0 and found.heat.sum().item() == pytest.approx(1, abs=1e-3)
    assert found.centres == (CellCentres(first, step), CellCentres(first, step))


def test_errors(model: ToyCaps, picture: Image.Image) -> None:
    with refuses(UsageError, names=["z"]):
        explain(model, picture, "z")
    with refuses(UsageError, names=["5", "class"]):
        explain(model, picture, 5)
    with refuses(UsageError, names=["1", "9", "10", "image"]):
        explain(model, torch.zeros(1, 9, 10))
    with refuses(UsageError, names=["torch.uint8"]):
        explain(model, torch.zeros(1, 10, 10, dtype=torch.uint8))
    with refuses(CapszooError, names=["capsule", "network"]):
        explain(nn.Linear(2, 2), picture)

    class NoRouting(ToyCaps):
        def coupling_map(self, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    with refuses(CapszooError, names=["couplings", "show"]):
        explain(NoRouting(), picture)
    with torch.no_grad():
        model.class_caps.weight.fill_(float("nan"))
    with pytest.raises(CapszooError, match="NaN"):
        explain(model, picture)


@pytest.mark.parametrize("decoder", [False, True])
def test_figure_has_its_panels(picture: Image.Image, tmp_path: Path, decoder: bool) -> None:
    found = explain(ToyCaps(decoder=decoder), picture)
    path = save_figure(found, tmp_path / "deep" / "heat.png")
    with Image.open(path) as figure:
        bar = 0.0 if found.is_even else 0.7  # inches
        panels = (figure.width / figure.height * 3.4 - bar) / 2.6
        assert panels == pytest.approx(4 if decoder else 3, abs=0.1)
        colours = figure.convert("RGB").getcolors(maxcolors=figure.width * figure.height)
        assert colours is not None and len(colours) > 100  # something was drawn


def test_figure_errors(model: ToyCaps, picture: Image.Image, tmp_path: Path) -> None:
    explanation = explain(model, picture)
    with refuses(UsageError, names=["write", "file"]):
        save_figure(explanation, tmp_path / "heat.xyz")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable):
        save_figure(explanation, tmp_path / "file" / "heat.png")
    (tmp_path / "mine.csv").write_text("mine")
    with refuses(CapszooError, names=["mine.csv"]):
        explanation.save(tmp_path / "mine.png")
    assert (tmp_path / "mine.csv").read_text() == "mine" and not (tmp_path / "mine.png").exists()
    picture.save(tmp_path / "mine.png")  # a picture of that name does not make the table ours
    with refuses(CapszooError, names=["mine.csv"]):
        explanation.save(tmp_path / "mine.pdf")
    explanation.save(tmp_path / "heat.png")
    explanation.save(tmp_path / "heat.pdf")  # its own table is replaced
