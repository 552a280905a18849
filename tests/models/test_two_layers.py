"""Heads of two capsule layers: couplings of both, shares handed down to the primary capsules, training, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import capszoo
from capszoo.export import to_onnx
from tests.support import warm

ROUTINGS = ("dynamic", "em", "selfrouting")
each_routing = pytest.mark.parametrize("routing", ROUTINGS)


def network(routing: str) -> Any:
    """A grid of 4x4 with primary capsules of two types, 2x2 with two types above them, three classes."""
    torch.manual_seed(0)
    model = capszoo.create_model(
        f"resnet20_{routing}", depth=2, img_size=16, num_classes=3, caps_types=2, caps_dim=4
    )
    warm(model, torch.randn(4, 3, 16, 16))
    return model.eval()


def handed_down(share: Tensor, couplings: Tensor) -> Tensor:
    """Shares ``[b, n, 2*2*j]`` and couplings ``[b, 2, 2, j, 9*i]`` to shares of positions ``[b, n, 4, 4]``."""
    b, n, j, types = share.shape[0], share.shape[1], couplings.shape[3], couplings.shape[4] // 9
    grid = share.reshape(b, n, 2, 2, j)
    found = torch.zeros(b, n, 4, 4)
    for y in range(2):
        for x in range(2):
            for parent in range(j):
                part = couplings[:, y, x, parent] / couplings[:, y, x, parent].sum(dim=1, keepdim=True)
                for k in range(3):
                    for l in range(3):  # noqa: E741
                        row, column = 2 * y + k - 1, 2 * x + l - 1
                        if 0 <= row < 4 and 0 <= column < 4:
                            first = (3 * k + l) * types
                            given = part[:, first : first + types].sum(dim=1, keepdim=True)
                            found[:, :, row, column] += grid[:, :, y, x, parent] * given
    return found


@each_routing
def test_couplings_of_both_layers(routing: str) -> None:
    model, x = network(routing), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        out = model.forward_capsules(x)
        assert torch.allclose(out.scores, model(x), atol=1e-5)
        below, classes = out.couplings
        assert below.shape == (2, 2, 2, 2, 18) and classes.shape == (2, 3, 8)
        assert torch.allclose(classes.sum(dim=1), torch.ones(2, 8), atol=1e-5)
        # the routing of each window: a child's couplings sum to 1 over its parents
        assert torch.allclose(below.sum(dim=3), torch.ones(2, 2, 2, 18), atol=1e-5)


@each_routing
def test_the_map_follows_the_couplings_of_both_layers(routing: str) -> None:
    model, x = network(routing), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        heat = model.coupling_map(x)
        routed = model.head.route(model.forward_features(x))
    expected = handed_down(routed.share.float(), routed.couplings[0].float())
    expected = expected / expected.sum(dim=(2, 3), keepdim=True)
    assert heat.shape == (2, 3, 4, 4)
    assert torch.allclose(heat, expected, atol=1e-5)


@each_routing
def test_every_parameter_is_trained(routing: str) -> None:
    model = network(routing).train()
    with torch.no_grad():  # self-routing's weights start at zero: even couplings, and no gradient below them
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.tensor([0, 1, 2, 0])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.slow
@each_routing
def test_the_exported_file_agrees(routing: str, tmp_path: Path) -> None:
    """Scores and the couplings of both layers, at any batch size."""
    outputs = ("scores", "couplings")
    report = to_onnx.export(
        network(routing), tmp_path / "x.onnx", outputs=outputs, batch=(1, 2, 3), gate="quick"
    )
    assert report.passed and sum(name.startswith("couplings") for name in report.outputs) == 2


@each_routing
def test_classes_do_not_start_saturated(routing: str) -> None:
    """A new network of the registered size: class activations near 1 would give the layers below no gradient."""
    torch.manual_seed(0)
    model = capszoo.create_model(f"resnet20_{routing}", depth=2).train()
    with torch.no_grad():
        active = model.forward_capsules(torch.randn(8, 3, 32, 32)).activations
    assert active.max() < 0.9


@pytest.mark.parametrize("routing", ["dynamic", "em"])
def test_a_share_is_weighted(routing: str) -> None:
    model, x = network(routing), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        out = model.head.route(model.forward_features(x))
        children, _ = model.head._routed_children(model.forward_features(x))
        votes = model.class_votes(x).votes
    weight = votes.norm(dim=-1) if routing == "dynamic" else model.head._activations(children)[:, None]
    torch.testing.assert_close(out.share, out.couplings[-1] * weight)
