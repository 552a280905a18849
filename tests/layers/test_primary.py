"""Primary capsules: a capsule is d channels at one grid position."""

from __future__ import annotations

import pytest
import torch

from capszoo.layers import PrimaryCaps2d, capsules_from_map, squash
from tests.reference.primary import capsules_of


@pytest.mark.parametrize("channels_last", [False, True])
def test_order_of_numbers(channels_last: bool) -> None:
    x = torch.randn(2, 12, 3, 5, dtype=torch.float64)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    caps = capsules_from_map(x, 4)
    assert caps.shape == (2, 3 * 5 * 3, 4)
    torch.testing.assert_close(caps, capsules_of(x, 4).reshape(2, 45, 4), rtol=0, atol=0)
    if channels_last:
        assert caps.data_ptr() == x.data_ptr()  # a view, not a copy


@pytest.mark.parametrize("activation", ["identity", "squash"])
def test_forward(activation: str) -> None:
    layer = PrimaryCaps2d(3, 4, 8, kernel_size=5, stride=2, padding=1, activation=activation).double()
    x = torch.randn(2, 3, 11, 14, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (2, 32, *layer.grid_size(11, 14))
    plain = layer.conv(x)
    if activation == "identity":
        assert torch.equal(y, plain)
    else:
        caps = capsules_of(plain, 8)
        torch.testing.assert_close(capsules_of(y, 8), squash(caps), rtol=1e-12, atol=1e-12)
        assert (capsules_from_map(y, 8).norm(dim=-1) < 1).all()


def test_script_fx_and_bias() -> None:
    layer = PrimaryCaps2d(3, 4, 8, 3, bias=False, activation="squash")
    assert layer.conv.bias is None
    x = torch.randn(2, 3, 9, 9)
    for other in (torch.jit.script(layer), torch.fx.symbolic_trace(layer)):
        assert torch.equal(other(x), layer(x))
