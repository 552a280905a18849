"""DeepCaps: the release's counts, its class layer against the naive one, its map, the decoder that classes share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import capszoo
from capszoo.models._blocks import Decoder, SharedDecoder
from tests.reference import dynamic as naive
from tests.support.errors import refuses
from tests.support.zoo import calibrate, images

SMALL: dict[str, Any] = {"num_classes": 3, "img_size": 12, "caps_types": 2, "stem_chans": 6, "class_dim": 5}


def test_class_layer_equals_the_naive_one() -> None:
    torch.manual_seed(0)
    net = capszoo.create_model("deepcaps", dtype=torch.float64, **SMALL).eval()
    calibrate(net)
    nn.init.normal_(net.class_caps.weight)
    x = images(net, 2).double()
    with torch.no_grad():
        third = net.forward_features(x)  # [b, 16, 2, 2]
        block = net.block4
        below = block.down(third)  # [b, 16, 1, 1]
        kernel = block.skip.weight.unflatten(0, (2, 8)).permute(3, 4, 0, 1, 2)
        capsules = below.unflatten(1, (2, 8)).permute(0, 3, 4, 1, 2)
        skip, skip_couplings = naive.conv3d_route(capsules, kernel, block.skip.bias, 1, 1, 3)
        fourth = block.conv2(block.conv1(below)) + skip.permute(0, 3, 4, 1, 2).flatten(1, 2)
        children = torch.cat(
            [at.unflatten(1, (2, 8)).permute(0, 3, 4, 1, 2).flatten(1, 3) for at in (fourth, third)], dim=1
        )
        transforms = net.class_caps.weight.reshape(10, 8, 3, 5).permute(0, 2, 3, 1)
        poses, couplings = naive.route(naive.dense_votes(children, transforms), 3)
        out = net.forward_capsules(x)
    torch.testing.assert_close(out.poses, poses)
    torch.testing.assert_close(out.scores, poses.norm(dim=-1))
    torch.testing.assert_close(out.couplings[0], skip_couplings.permute(0, 4, 2, 3, 1).flatten(1, 3))
    torch.testing.assert_close(out.couplings[1], couplings.transpose(1, 2))


@pytest.mark.parametrize(("side", "grid"), [(28, 4), (20, 3)])
def test_map_adds_the_shares_of_both_blocks(side: int, grid: int) -> None:
    torch.manual_seed(0)
    net = capszoo.create_model("deepcaps", **{**SMALL, "img_size": side}).eval()
    calibrate(net)
    x = images(net, 1)
    with torch.no_grad():
        third = net.forward_features(x)
        children = net._children(third)
        share = net.class_caps.route(children)[1] * net.class_caps.votes(children).norm(dim=-1)
        expected = torch.zeros(3, grid, grid)
        for n in range(3):
            for child in range(2 * 2 * 2):  # of the fourth block: row, column, type
                row, column = divmod(child // 2, 2)
                window = expected[
                    n, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2
                ]  # narrower at an edge
                window += share[0, n, child] / window.numel()
            for child in range(grid * grid * 2):
                row, column = divmod(child // 2, grid)
                expected[n, row, column] += share[0, n, 8 + child]
        expected /= expected.sum((1, 2), keepdim=True)
        torch.testing.assert_close(net.coupling_map(x)[0], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("side", "first"), [(28, (7, 7)), (32, (8, 8)), (64, (8, 8)), ((30, 17), (8, 5))], ids=str
)
def test_shared_decoder(side: Any, first: tuple[int, int]) -> None:
    size = (side, side) if isinstance(side, int) else side
    decoder = SharedDecoder(4, 5, 3, size).eval()
    assert decoder.grid == first
    poses = torch.randn(2, 4, 5)
    with torch.no_grad():
        picture = decoder(poses, torch.tensor([1, 3]))
        assert picture.shape == (2, 3, *size)
        swapped = poses[:, [1, 0, 3, 2]]  # another class with the same capsule: the same picture
        assert torch.equal(decoder(swapped, torch.tensor([0, 2])), picture)
    widths = [m.out_channels for m in decoder.layers]
    assert widths == ([64, 32, 16, 8, 3] if side == 64 else [64, 32, 16, 3])


def test_decoders_are_chosen_by_name() -> None:
    def kind(name: str, decoder: Any) -> type:
        return type(capszoo.create_model(name, device="meta", decoder=decoder).decoder)

    assert kind("deepcaps", True) is kind("deepcaps", "shared") is kind("capsnet_dynamic", "shared")
    assert kind("capsnet_dynamic", "shared") is kind("hvc", "shared") is SharedDecoder
    assert kind("deepcaps", "dense") is kind("capsnet_dynamic", True) is Decoder
    with refuses(ValueError, names=["decoder", "dense", "shared", "sharde"]):
        kind("capsnet_dynamic", "sharde")


def test_what_does_not_fit_is_refused() -> None:
    with refuses(ValueError, names=["caps_dims"]):
        capszoo.create_model("deepcaps", device="meta", caps_dims=(4, 8, 8, 4))
    with refuses(ValueError, names=["routing_iters", "0"]):
        capszoo.create_model("deepcaps", device="meta", num_classes=0, routing_iters=0)
