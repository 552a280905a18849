"""Cells of a feature map are drawn at the centres of their receptive fields."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import capszoo
from capszoo.explain import explain
from capszoo.explain.cell_centres import CellCentres, centres_of, recorded_centres
from tests.support.explain import flat_map


def _receptive_field(net: nn.Module, size: int, cell: int) -> tuple[float, float]:
    """First and last pixel row that a cell of the map's first column depends on."""
    x = torch.rand(1, 1, size, size, requires_grad=True)
    (grad,) = torch.autograd.grad(net(x)[0, 0, cell].sum(), x)
    rows = grad[0, 0].abs().sum(dim=1).nonzero().flatten().tolist()
    return rows[0], rows[-1]


CHAINS = {
    "unpadded": [nn.Conv2d(1, 1, 9), nn.Conv2d(1, 1, 9, stride=2)],
    "padded, strided": [nn.Conv2d(1, 1, 3, 2, 1), nn.Conv2d(1, 1, 3, 2, 1)],
    "dilated": [nn.Conv2d(1, 1, 3, dilation=2), nn.Conv2d(1, 1, 3, 2)],
    "pooled": [nn.Conv2d(1, 1, 5, padding="same"), nn.AvgPool2d(2), nn.Conv2d(1, 1, 3)],
    "patches": [nn.Conv2d(1, 1, 4, 4), nn.Conv2d(1, 1, 1)],
}


@pytest.mark.parametrize("layers", CHAINS.values(), ids=CHAINS)
def test_centres_are_those_of_the_receptive_fields(layers: list[nn.Module]) -> None:
    net = nn.Sequential(*layers)
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    with recorded_centres(net, (28, 28)) as found:
        grid = net(torch.rand(1, 1, 28, 28)).shape[2:]
    y, x = centres_of((grid[0], grid[1]), found, (28, 28))
    assert y == x and not any(module._forward_hooks for module in net)
    cell = grid[0] // 2  # its field is within the image
    first, last = _receptive_field(net, 28, cell)
    assert y.first + cell * y.step == pytest.approx((first + last + 1) / 2)


def test_a_grid_that_is_not_found_divides_the_image_evenly() -> None:
    assert centres_of((2, 4), {}, (8, 8)) == (CellCentres(2, 4), CellCentres(1, 2))


def test_behind_a_head_that_averages_the_map_first() -> None:
    net = capszoo.attach_head("resnet18", "dynamic", num_classes=3, img_size=(128, 192), max_grid=3)
    found = explain(net.eval(), torch.zeros(3, 128, 192))
    assert found.heat.shape == (2, 3)  # the map of 4x6, two by two
    assert found.centres == (CellCentres(16.5, 64), CellCentres(16.5, 64))


def test_the_overlay_has_a_cell_at_its_centre_and_nothing_outside() -> None:
    values = torch.ones(3, 3)
    values[0, 2] = 9
    found = flat_map(values, centres=(CellCentres(4.5, 2), CellCentres(3.5, 2)))
    heat = found.heat_at(12, 12)
    assert heat[4, 7] == heat.max() == found.relative[0, 2]  # the pixel whose centre is (4.5, 7.5)
    assert heat[6, 3] == found.relative[1, 0]
    assert (heat[:3] == 1).all() and (heat[10:] == 1).all() and (heat[:, :2] == 1).all()
