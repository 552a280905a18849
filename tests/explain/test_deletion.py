"""The deletion test tells a map that shows what a prediction depends on from one that does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn

from capszoo.errors import CapszooError
from capszoo.explain import deletion as module
from capszoo.explain.deletion import deletion


class _Brightness(nn.Module):
    """Two classes; the score of the first is a weighted sum of the pixels, by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.in_chans, self.img_size, self.num_classes = 1, (14, 14), 2
        self.weight = nn.Parameter(torch.linspace(0.02, 0.2, 14)[:, None].expand(14, 14).clone())
        self.pretrained_cfg = {"mean": (0.0,), "std": (1.0,), "label_names": ("bright", "dark")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bright = (x[:, 0] * self.weight).sum((1, 2))
        return torch.stack([bright, torch.full_like(bright, 1.0)], 1)


@pytest.fixture
def images() -> list[torch.Tensor]:
    return list(torch.rand(12, 1, 14, 14, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.2)


@pytest.mark.parametrize("method", ["gradient", "occlusion"])
def test_an_exact_map_passes(images: list[torch.Tensor], method: str) -> None:
    found = deletion(_Brightness(), images, method)
    assert found.n == 12 and found.correlation == pytest.approx(1)
    assert found.passed and found.hottest > found.random > found.coldest > 0


def test_a_reversed_map_fails(images: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.explain

    def reversed_map(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return replace(found, heat=-found.heat)

    right = deletion(_Brightness(), images, "occlusion")
    monkeypatch.setattr(module, "explain", reversed_map)
    found = deletion(_Brightness(), images, "occlusion")
    assert not found.passed and found.correlation == pytest.approx(-1)
    assert found.hottest == pytest.approx(right.coldest) and found.coldest == pytest.approx(right.hottest)
    assert found.gain[0] == pytest.approx(found.hottest - found.random)


def test_black_tiles_are_left_out(images: list[torch.Tensor]) -> None:
    black = torch.zeros(1, 14, 14)
    half = [image.clone() for image in images]
    for image in half:
        image[:, :7] = 0
    found = deletion(_Brightness(), [black, *half], "occlusion")
    assert found.n == 12, "a black image has nothing to blacken"
    with pytest.raises(CapszooError):
        deletion(_Brightness(), [black], "occlusion")
