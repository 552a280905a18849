"""The baselines: sizes, and what their tables say layer by layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import capszoo
from capszoo.models.cnn_baselines import GridPool
from tests.support.errors import refuses

#: Small configurations, for what does not need the paper's widths.
SMALL = {
    "cnn_sabour": {"widths": (8, 8, 4), "hidden": (12, 6)},
    "cnn_multimnist": {"width": 16, "hidden": 12},
    "cnn_multimnist_fc": {"width": 16, "hidden": 12},
    "cnn_baseline": {"width": 16},
    "cnn6": {"widths": (4, 4, 8, 8, 16)},
    "cnn6_wide": {"widths": (4, 4, 8, 8, 16)},
}


def _layer(conv: nn.Conv2d, x: torch.Tensor, stride: int, padding: int) -> torch.Tensor:
    return F.relu(F.conv2d(x, conv.weight, conv.bias, stride, padding))


def _bn(bn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(bn, nn.BatchNorm2d)
    return F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=bn.eps)


def _with_statistics(name: str) -> nn.Module:
    """A small model in eval mode whose BatchNorms have statistics other than their initial ones."""
    model = capszoo.create_model(name, dtype=torch.float64, **SMALL[name]).train()
    model(torch.rand(4, model.in_chans, *model.img_size, dtype=torch.float64) * 3)
    return model.eval()


def test_baseline_is_table_2() -> None:
    model = _with_statistics("cnn_baseline")
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    one, two, three = model.stages
    y = _layer(one.conv, x, 2, 1)
    y = F.avg_pool2d(_bn(two.bn, _layer(two.conv, y, 2, 1)), 2)
    y = F.avg_pool2d(_bn(three.bn, _layer(three.conv, y, 2, 1)), 2)
    assert y.shape == (2, 16, 1, 1)
    torch.testing.assert_close(model(x), model.fc(y.flatten(1)))


@pytest.mark.parametrize("name", ["cnn_multimnist", "cnn_multimnist_fc"])
def test_multimnist_is_table_12(name: str) -> None:
    model = _with_statistics(name)
    x = torch.randn(2, 1, 36, 36, dtype=torch.float64)
    one, two, three = model.stages
    y = _layer(one.conv, x, 2, 1)
    y = _bn(two.bn, _layer(two.conv, y, 2, 0))
    y = _bn(three.bn, _layer(three.conv, y, 1, 0))
    if name == "cnn_multimnist":  # the linear layer at every position, then the average, in the table's order
        y = model.neck(y.permute(0, 2, 3, 1)).mean((1, 2))
    else:
        y = model.neck(y.flatten(1))
    torch.testing.assert_close(model(x), model.fc(y))


def test_sabour_layers() -> None:
    model = capszoo.create_model("cnn_sabour", dtype=torch.float64, **SMALL["cnn_sabour"]).eval()
    x = torch.randn(2, 1, 28, 28, dtype=torch.float64)
    y = x
    for stage in model.stages:
        y = _layer(stage.conv, y, 1, 2)
    y = F.relu(model.neck.fc1(y.flatten(1)))
    y = F.relu(model.neck.fc2(y))
    torch.testing.assert_close(model(x), model.fc(y))
    torch.manual_seed(0)
    assert not torch.equal(model.train()(x), model(x))  # dropout


def test_six_layers() -> None:
    model = _with_statistics("cnn6")
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y = x
    for stage, stride in zip(model.stages, (1, 1, 2, 2, 1), strict=True):
        y = F.relu(_bn(stage.bn, F.conv2d(y, stage.conv.weight, None, stride, 1)))
    torch.testing.assert_close(model(x), model.fc(F.avg_pool2d(y, 4).flatten(1)))
    assert capszoo.create_model("cnn6_wide", device="meta").fc.in_features == 1280


@pytest.mark.parametrize(
    ("size", "h", "w"), [(1, 5, 4), (2, 8, 8), (2, 7, 5), (2, 1, 3), (3, 7, 8), (4, 3, 9)]
)
def test_grid_pool_is_adaptive_average_pooling(size: int, h: int, w: int) -> None:
    x = torch.randn(2, 3, h, w, dtype=torch.float64)
    pool = GridPool(size)
    torch.testing.assert_close(pool(x), F.adaptive_avg_pool2d(x, size).flatten(1))
    torch.testing.assert_close(torch.fx.symbolic_trace(pool)(x), pool(x))
    torch.testing.assert_close(torch.jit.script(pool)(x), pool(x))


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("cnn_multimnist", {"pool": "max"}, ("avg", "linear")),
        ("cnn_baseline", {"global_pool": "max"}, ("avg", "global_pool")),
        ("cnn_multimnist_fc", {"img_size": 4}, "small"),
        ("cnn6", {"pool_grid": 0}, ("pool_grid", "1")),
        ("cnn6", {"widths": (4, 4, 4, 4)}, ("widths", "5")),
        ("cnn_sabour", {"widths": (4, 4)}, ("widths", "3")),
        ("cnn_baseline", {"img_size": 4}, "small"),
        ("resnet18_encap", {"depths": (0, 2, 2, 2)}, "depths"),
        ("efficient_capsnet", {"strides": (1, 2, 2, 0)}, "strides"),
        ("idpa_cnn", {"primary_stride": 0}, "primary_stride"),
        ("capsnet_em", {"stem_stride": 0}, "stem_stride"),
        ("capsnet_dynamic", {"stem_stride": 0}, "stem_stride"),
    ],
)
def test_wrong_arguments(name: str, args: dict, message: str) -> None:
    with refuses(ValueError, names=message):
        capszoo.create_model(name, device="meta", **args)
