"""HVC: its count of multiply-adds, its class layer against the naive one, its map, its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import capszoo
from tests.reference import hvc as naive
from tests.support.errors import refuses
from tests.support.zoo import images

SMALL: dict[str, Any] = {"num_classes": 3, "img_size": (19, 20), "widths": (2, 2, 2, 2, 2, 2, 2, 2, 3)}


def small_hvc() -> Any:
    """In float64, with every norm's statistics and biases different from their first values."""
    torch.manual_seed(0)
    net = capszoo.create_model("hvc", dtype=torch.float64, **SMALL)
    for name, tensor in net.state_dict().items():
        if name.endswith(("bias", "running_mean")):
            tensor.normal_(std=0.3)
        elif name.endswith(("running_var", "branch_weight")):
            tensor.uniform_(0.5, 1.5)
    return net


def branch_maps(net: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of the third, the sixth and the ninth convolution, one after the other."""
    maps = []
    for convs in (net.stages.level1, net.stages.level2.convs, net.stages.level3.convs):
        x = convs(x)
        maps.append(x)
    return maps


def test_multiply_adds_are_the_published_ones() -> None:
    net = capszoo.create_model("hvc").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(images(net, 1))
    assert counter.get_total_flops() / 2 == pytest.approx(157.8e6, rel=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_class_layer_equals_the_naive_one(training: bool) -> None:
    net = small_hvc().train(training)
    x = images(net, 2).double()
    layer = net.class_caps

    def statistics(norm: Any) -> Any:
        return None if training else (norm.running_mean.clone(), norm.running_var.clone())

    with torch.no_grad():
        maps = branch_maps(net.eval(), x)
        features = net.forward_features(x)
    net.train(training)
    branches, start, means = [], 0, statistics(layer.bn)
    for at, weight in zip(maps, layer.weight.split(layer.sizes), strict=True):
        dims = slice(start, start + at.shape[1])
        own = weight.unflatten(0, (at.shape[1], -1)).permute(2, 1, 0)  # [n, i, d]
        norm = None if training else (means[0][dims], means[1][dims])
        branches.append(naive.class_capsules(at, own, layer.bias[dims], norm, 1e-3))
        start = dims.stop
    expected = naive.merged(branches, layer.branch_weight, layer.merge_bias, statistics(layer.merge_bn), 1e-3)
    scores, poses = layer(features)
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(poses, torch.cat(branches, dim=2))
    parameters, factors = list(layer.parameters()), torch.randn_like(scores)
    found, wanted = (torch.autograd.grad((s * factors).sum(), parameters) for s in (scores, expected))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-6)


def test_contributions_sum_to_the_score() -> None:
    """Position by position; what the constant of the norms adds is left out."""
    net = small_hvc().eval()
    x = images(net, 1).double()
    with torch.no_grad():
        layer, features, maps = net.class_caps, net.forward_features(x), branch_maps(net, x)
        expected = torch.zeros(1, 3, 13, 14, dtype=torch.float64)
        poses, start = layer(features)[1][0], 0  # [n, c]
        for k, weight in enumerate(layer.weight.split(layer.sizes)):
            dims = slice(start, start + maps[k].shape[1])
            start = dims.stop
            factor = layer.branch_weight[k] / (layer.merge_bn.running_var[k] + 1e-3).sqrt()
            margin, (rows, columns) = 3 * k, maps[k].shape[2:]
            weight = weight.unflatten(0, (-1, rows * columns))
            for n in range(3):
                for row in range(rows):
                    for column in range(columns):
                        vote = maps[k][0, :, row, column] * weight[:, row * columns + column, n]
                        vote = vote / (layer.bn.running_var[dims] + 1e-3).sqrt()
                        component = torch.dot(vote, poses[n, dims]) / poses[n, dims].norm().clamp_min(1e-6)
                        expected[0, n, margin + row, margin + column] += (factor * component).clamp_min(0)
        expected /= expected.sum((2, 3), keepdim=True)
        torch.testing.assert_close(net.coupling_map(x), expected, atol=1e-6, rtol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    for arguments, names in (
        ({"img_size": 18}, ["img_size", "small"]),
        ({"widths": (8, 8)}, ["widths"]),
    ):
        with refuses(ValueError, names=names):
            capszoo.create_model("hvc", device="meta", **arguments)
    net = capszoo.create_model("hvc", decoder=True, **SMALL)
    with refuses(ValueError, names=["target"]):
        net.reconstruct(torch.zeros(1, 3, net.class_dim))
