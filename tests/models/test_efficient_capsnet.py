"""Efficient-CapsNet: its three sizes, its head against the reference, its coupling map, its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import capszoo
from tests.reference import dynamic as naive_votes
from tests.reference import self_attention as naive
from tests.support.errors import refuses
from tests.support.zoo import calibrate, images

SMALLNORB: dict[str, Any] = {
    "img_size": 48,
    "in_chans": 2,
    "kernels": (7, 3, 3, 3),
    "strides": (2, 1, 1, 2),
    "norm": "instance",
    "num_classes": 5,
}


def test_head_equals_the_reference() -> None:
    model = capszoo.create_model("efficient_capsnet", num_classes=3, dtype=torch.float64).eval()
    calibrate(model)
    torch.nn.init.normal_(model.class_caps.bias)
    x = images(model).double()
    with torch.no_grad():
        children = model.forward_features(x).reshape(2, 16, 8)
        transforms = model.class_caps.weight.reshape(16, 8, 3, 16).permute(0, 2, 3, 1)
        poses, couplings = naive.route(
            naive_votes.dense_votes(children, transforms), model.class_caps.bias.t()
        )
        out = model.forward_capsules(x)
        torch.testing.assert_close(out.poses, poses)
        torch.testing.assert_close(out.couplings[0], couplings.transpose(1, 2))
        torch.testing.assert_close(model(x), poses.norm(dim=-1))


@pytest.mark.parametrize("grid", [{}, {"primary_kernel": 3, "primary_stride": 4}], ids=["one", "several"])
def test_coupling_map_position_by_position(grid: dict[str, Any]) -> None:
    """Each child's coupling times its vote's length, shared out by what each position adds to the child."""
    model = capszoo.create_model("efficient_capsnet", num_classes=3, dtype=torch.float64, **grid).eval()
    calibrate(model)
    x = images(model, 1).double()
    with torch.no_grad():
        conv4 = model.stages[:4](x)[0]  # [128, 9, 9]
        children = model._children(model.forward_features(x))
        couplings, votes = model.class_caps.route(children)[1][0], model.class_caps.votes(children)[0]
        primary = model.stages.primary
        (k, m), s = primary.kernel_size, primary.stride[0]
        expected = torch.zeros(3, 9, 9, dtype=torch.float64)
        child = 0
        for row in range(model.grid[0]):
            for column in range(model.grid[1]):
                place = (slice(row * s, row * s + k), slice(column * s, column * s + m))
                for kind in range(16):
                    channels = slice(8 * kind, 8 * kind + 8)
                    terms = conv4[channels, place[0], place[1]].abs().clamp_min(1e-6)
                    adds = (primary.weight[channels, 0].abs() * terms).sum(0)
                    for n in range(3):
                        share = couplings[n, child] * votes[n, child].norm()
                        expected[n, place[0], place[1]] += share * adds / adds.sum()
                    child += 1
        expected /= expected.sum((1, 2), keepdim=True)
        torch.testing.assert_close(model.coupling_map(x)[0], expected)


@pytest.mark.slow
def test_instance_norm_passes_the_export_gate(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    from capszoo.export.to_onnx import export

    model = capszoo.create_model("efficient_capsnet", **SMALLNORB).eval()
    assert export(model, tmp_path / "model.onnx", gate="quick").passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": "layer"}, ("batch", "instance", "layer")),
        ({"caps_dim": 7}, ("caps_dim=7", "128")),
        ({"kernels": (5, 3, 3)}, ("kernels", "numbers")),
        ({"img_size": 9}, "small"),
        ({"primary_kernel": 10}, "small"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with refuses(ValueError, names=message):
        capszoo.create_model("efficient_capsnet", device="meta", **arguments)
