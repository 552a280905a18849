"""Convolutions that the graph for a CPU computes as matrix products: the same function, only where asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from capszoo.export.passes.conv_to_matmul import (
    PixelProduct,
    WindowProduct,
    convs_to_matmul,
    gains_as_product,
)
from capszoo.export.to_onnx import ExportError, export
from capszoo.models.idpa import PrimaryConv
from tests.support.errors import refuses

F64 = torch.float64


class Small(nn.Module):
    """A map of 6x6, then 3x3: the second convolution is one of many weights on a map no wider than its kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 128, 3, 1, 1)
        self.second = nn.Conv2d(128, 256, 3, 2, 1)
        self.twice = nn.Conv2d(256, 256, 3, 1, 1)  # on two sizes of map
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu()
        x = self.twice(x)
        x = self.twice(x[:, :, :2, :2].relu())
        return self.head(x.mean(dim=(2, 3)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [
        (7, 2, 3, (8, 8)),
        (5, 1, 2, (4, 4)),
        (3, 2, 1, (4, 5)),
        ((3, 5), (2, 1), (1, 2), (5, 3)),
        (3, 1, 0, (5, 5)),
    ],
)
def test_windows_equal_the_convolution(
    kernel: int | tuple[int, int],
    stride: int | tuple[int, int],
    padding: int,
    size: tuple[int, int],
    bias: bool,
) -> None:
    conv = nn.Conv2d(4, 6, kernel, stride, padding, bias=bias).double()
    x = torch.randn(3, 4, *size, dtype=F64)
    torch.testing.assert_close(WindowProduct(conv, size)(x), conv(x), atol=1e-12, rtol=0)


def test_primary_capsules_by_a_product_equal_the_convolution() -> None:
    for kernel, stride in ((1, 1), (3, 2), (1, 2)):
        net = nn.Sequential(PrimaryConv(5, 8, kernel, stride)).double()
        x = torch.randn(2, 5, 6, 7, dtype=F64)
        expected = net(x)
        with convs_to_matmul(net, x):
            assert isinstance(net[0].conv, PixelProduct) == ((kernel, stride) == (1, 1))
            torch.testing.assert_close(net(x), expected, atol=1e-12, rtol=0)


def test_which_convolutions() -> None:
    def gains(size: int, *args: int, chans: int = 256, **kwargs: object) -> bool:
        with torch.device("meta"):
            return gains_as_product(nn.Conv2d(chans, chans, *args, **kwargs), (size, size))  # type: ignore[arg-type]

    assert gains(8, 7, 2, 3) and gains(14, 7, 2, 3) and gains(4, 5, 1, 2) and gains(4, 3, 2, 1)
    assert not gains(16, 7, 2, 3) and not gains(7, 5, 1, 2) and not gains(8, 3, 2, 1)  # wider than the kernel
    assert not gains(8, 7, 2, 0)  # no border
    assert not gains(8, 7, 2, 3, chans=64) and not gains(8, 7, 2, 3, groups=2)
    assert not gains(8, 7, 2, 3, padding_mode="circular") and not gains(8, 7, 1, 6, dilation=2)
    with torch.device("meta"):
        assert not gains_as_product(nn.Conv2d(256, 256, 5, padding="same"), (4, 4))
        hooked = nn.Conv2d(256, 256, 5, 1, 2)
        assert gains_as_product(hooked, (4, 4))
        hooked.register_forward_hook(lambda module, inputs, output: output * 2)
        assert not gains_as_product(hooked, (4, 4))


def test_a_model_that_does_not_run_is_an_export_error(tmp_path: Path) -> None:
    with refuses(ExportError, names=["trace"]):
        export(Small(), tmp_path / "x.onnx", input_size=(4, 6, 6))
    assert not list(tmp_path.iterdir())


def test_the_model_is_itself_again() -> None:
    model, x = Small().eval(), torch.randn(2, 3, 6, 6)
    modules, expected = list(model.modules()), model(x)
    with pytest.raises(RuntimeError, match="inside"), convs_to_matmul(model, x[:1]):
        assert isinstance(model.second, WindowProduct)
        assert model.first is modules[1] and model.twice is modules[3]
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
        raise RuntimeError("inside")
    assert list(model.modules()) == modules and torch.equal(model(x), expected)
    assert not any(module._forward_pre_hooks for module in modules)


@pytest.mark.parametrize(
    ("options", "convolutions"),
    [
        ({}, 3),
        pytest.param({"batch": 4}, 3, marks=pytest.mark.slow),
        ({"runtime": "gpu"}, 4),
        pytest.param({"precision": "fp16"}, 4, marks=pytest.mark.slow),
    ],
)
def test_exported(options: dict[str, object], convolutions: int, tmp_path: Path) -> None:
    report = export(
        Small(),
        tmp_path / "x.onnx",
        input_size=(3, 6, 6),
        gate="quick",
        **options,  # type: ignore[arg-type]
    )
    assert report.passed and report.node_types["Conv"] == convolutions
    assert report.node_types.get("Gather", 0) == 4 - convolutions
