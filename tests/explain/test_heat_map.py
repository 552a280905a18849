"""Explanations: the heat map is the model's own, and belongs to the class asked for."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from PIL import Image

from capszoo.errors import CapszooError, UsageError
from capszoo.explain import explain, save_figure
from capszoo.preprocess import model_transform
from tests.export.toys import ToyCaps


@pytest.fixture
def model() -> ToyCaps:
    return ToyCaps(decoder=True).train()


@pytest.fixture
def picture() -> Image.Image:
    return Image.effect_noise((14, 10), 90)


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
    assert (
        explanation.image.shape == (1, 10, 10)
        and 0 <= explanation.image.min() <= explanation.image.max() <= 1
    )
    rebuilt = model.reconstruct(output.poses, torch.tensor([predicted]))[0].detach()
    torch.testing.assert_close(explanation.reconstruction, rebuilt)


def test_another_class_has_another_map(model: ToyCaps, picture: Image.Image) -> None:
    by_index, by_name = explain(model, picture, 3), explain(model, picture, "d")
    assert by_index.target == by_name.target == 3
    assert torch.equal(by_index.heat, by_name.heat)
    others = [explain(model, picture, i).heat for i in range(5) if i != 3]
    assert not any(torch.allclose(by_index.heat, heat) for heat in others)


def test_tensor_and_picture_agree(model: ToyCaps, picture: Image.Image) -> None:
    tensor = model_transform(model)(picture)
    assert torch.equal(explain(model, tensor).heat, explain(model, picture).heat)


def test_heat_at_keeps_the_place(model: ToyCaps, picture: Image.Image) -> None:
    explanation = explain(model, picture)
    large = explanation.heat_at(40, 20)
    assert large.shape == (40, 20) and large.min() == 0 and large.max() == 1
    row, column = divmod(int(explanation.heat.argmax()), 2)
    top, left = divmod(int(large.argmax()), 20)
    assert (top // 20, left // 10) == (row, column)


def test_without_decoder_there_is_no_reconstruction(picture: Image.Image) -> None:
    assert explain(ToyCaps(), picture).reconstruction is None


def test_errors(model: ToyCaps, picture: Image.Image) -> None:
    with pytest.raises(UsageError, match="no class 'z': the classes are a, b, c, d, e"):
        explain(model, picture, "z")
    with pytest.raises(UsageError, match="no class '5'"):
        explain(model, picture, 5)
    with pytest.raises(UsageError, match=r"the image is \(1, 9, 10\), the model takes \(1, 10, 10\)"):
        explain(model, torch.zeros(1, 9, 10))
    with pytest.raises(CapszooError, match="no capsule network"):
        explain(nn.Linear(2, 2), picture)

    class NoRouting(ToyCaps):
        def coupling_map(self, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    with pytest.raises(CapszooError, match="no couplings to show"):
        explain(NoRouting(), picture)
    with torch.no_grad():
        model.class_caps.weight.fill_(float("nan"))
    with pytest.raises(CapszooError, match="NaN"):
        explain(model, picture)


@pytest.mark.parametrize("decoder", [False, True])
def test_figure_has_its_panels(picture: Image.Image, tmp_path: Path, decoder: bool) -> None:
    pytest.importorskip("matplotlib")
    path = save_figure(explain(ToyCaps(decoder=decoder), picture), tmp_path / "deep" / "heat.png")
    with Image.open(path) as figure:
        panels = figure.width / figure.height * 3.1 / 2.6
        assert panels == pytest.approx(4 if decoder else 3, abs=0.1)
        colours = figure.convert("RGB").getcolors(maxcolors=figure.width * figure.height)
        assert colours is not None and len(colours) > 100  # something was drawn


def test_figure_errors(model: ToyCaps, picture: Image.Image, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    explanation = explain(model, picture)
    with pytest.raises(UsageError, match="cannot write this kind of file"):
        save_figure(explanation, tmp_path / "heat.xyz")
    (tmp_path / "file").write_text("")
    with pytest.raises(CapszooError, match="cannot be written"):
        save_figure(explanation, tmp_path / "file" / "heat.png")


def test_missing_matplotlib_says_what_to_install(
    model: ToyCaps, picture: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    explanation = explain(model, picture)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CapszooError, match=r"pip install 'capszoo\[explain\]'"):
        save_figure(explanation, tmp_path / "heat.png")
