"""EncapNet: exact sizes, the head's arithmetic, its arguments and the feedback's places."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

import capszoo
from tests.reference import capconv as reference

TINY = dict(groups=4, depths=(1, 2, 3), strides=(1, 2, 2), pose_dims=(2, 2, 3), stem_chans=(4,), img_size=9)


def tiny(**kwargs):
    return timm.create_model("encapnet_v1", **{**TINY, **kwargs})


def warmed(model: nn.Module) -> nn.Module:
    """In evaluation mode, with norms that know the data: at first, squash after squash makes the scores vanish."""
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 1.0
    model.train()
    with torch.no_grad():
        model(torch.randn(8, model.in_chans, *model.img_size, dtype=next(model.parameters()).dtype))
    return model.eval()


def test_depth_counts_the_papers_layers() -> None:
    for name, layers in [("encapnet_v1", 18), ("encapnet_v2", 101), ("encapnet_v3", 101), ("encapnet6", 6)]:
        model = timm.create_model(name, device="meta")
        convolutional = sum(model.depths) + len(list(model.stages)) - len(model.depths)
        assert convolutional + 1 == layers  # and capFC


def test_published_shapes() -> None:
    model = timm.create_model("encapnet_v1", device="meta")
    x = torch.empty(2, 3, 32, 32, device="meta")
    shapes = [tuple(f.shape[1:]) for f in model.forward_intermediates(x, intermediates_only=True)]
    assert shapes == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]
    master = model.stages.module2.type1.conv.master
    assert master.weight.shape == (128, 2, 3, 3)  # 32 groups, pose 2 -> 4
    assert model.stages.module2.type1.conv.aide.weight.shape == (128, 64, 7, 7)
    assert model.stages.module2.type2[0].conv.aide.weight.shape == (128, 128, 5, 5)
    assert model.head.weight.shape == (16, 32 * 4 * 4, 10)
    large = timm.create_model("encapnet_v3", device="meta")
    assert large.grid == (7, 7) and large.stages.stem.conv.kernel_size == (7, 7)
    for i, module in enumerate([large.stages.module1, large.stages.module2, large.stages.module3]):
        assert hasattr(module.type1.conv, "aide") == (i == 2)
    six = timm.create_model("encapnet6", device="meta")
    assert six.stages.conv4(torch.empty(1, 128, 16, 16, device="meta")).shape == (1, 256, 8, 8)


def test_head_is_the_reference() -> None:
    model = warmed(tiny(num_classes=4).double())
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    features = model.forward_features(x)
    assert features.shape == (2, 12, 3, 3) and features.abs().max().item() > 1e-2
    poses = reference.cap_fc(features, model.head.weight)
    out = model.forward_capsules(x)
    torch.testing.assert_close(out.poses, poses, rtol=0, atol=1e-10)
    # lengths are computed in float32
    torch.testing.assert_close(model(x), poses.norm(dim=2), rtol=0, atol=1e-7)
    assert torch.equal(out.scores, model(x)) and torch.equal(out.activations, out.scores)
    assert out.couplings == ()
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features.mean((2, 3)))
    share = reference.contributions(features.detach(), model.head.weight.detach(), poses.detach())
    torch.testing.assert_close(model.coupling_map(x).double(), share, rtol=0, atol=1e-5)


def test_network_is_the_reference() -> None:
    model = warmed(
        tiny(num_classes=2, depths=(2,), strides=(2,), pose_dims=(2,), groups=2, img_size=(4, 3)).double()
    )
    x = torch.randn(1, 3, 4, 3, dtype=torch.float64)
    stem = model.stages.stem
    y = reference.convolution(x, stem.conv.weight, stem.conv.bias, 1, 1)
    y = reference.batch_norm(y, stem.bn, False).clamp(min=0)
    y = reference.module(model.stages.module1, y, False)
    torch.testing.assert_close(model.forward_features(x), y, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [9, (9, 14), (7, 5), 66])
def test_grid_of_any_size(size) -> None:
    model = tiny(img_size=size, num_classes=3).eval()
    x = torch.randn(1, 3, *model.img_size)
    assert model.forward_features(x).shape[-2:] == model.grid == model.head.grid
    assert (model.stages.stem.conv.stride == (2, 2)) == (size == 66)
    assert model(x).shape == (1, 3) and model.coupling_map(x).shape == (1, 3, *model.grid)
    with pytest.raises(AssertionError, match=f"{model.img_size[0]}x{model.img_size[1]}"):
        model(torch.randn(1, 3, model.img_size[0] + 8, model.img_size[1]))


def test_stem_can_be_chosen() -> None:
    assert tiny(img_size=80, stem="conv").stages.stem.conv.kernel_size == (3, 3)
    assert tiny(stem="resnet").grid == (1, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(mode="master"),  # rows 1 to 4 in the paper are without skip connections
        dict(mode="master", skip_type1=False, skip_type2=False),
        dict(coefficients="own", skip_type1=False, skip_type2=False),
        dict(coefficients="cross", skip_type1=False, skip_type2=False),
        dict(skip_type1=False, skip_type2=False),
        dict(skip_type2=False),
        dict(skip_type1=False),
        dict(),
        dict(aide=(True, False, True)),
    ],
)
def test_rows_of_table_3_train(arguments) -> None:
    model = tiny(**arguments)
    scores = model(torch.randn(4, 3, 9, 9))
    assert scores.max().item() > 1e-3
    scores.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    skips = [m.skip is not None for m in model.stages if hasattr(m, "skip")]
    assert skips == [arguments.get("skip_type1", True)] * 3
    kinds = [hasattr(m.type1.conv, "aide") for m in model.stages if hasattr(m, "type1")]
    assert kinds == list(arguments.get("aide", [arguments.get("mode") != "master"] * 3))
    for module in (m for m in model.stages if hasattr(m, "type2")):
        assert module.skip_type2 == arguments.get("skip_type2", True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(mode="aide"), "'master' or 'master_aide'"),
        (dict(coefficients="all"), "own, cross, both"),
        (dict(depths=(1, 2)), "one entry per module"),
        (dict(aide=(True,)), "one entry per module"),
        (dict(mode="master", aide=(True, True, True)), "leaves out every aide"),
        (dict(strides=(1, 2, 3)), "1 or 2"),
        (dict(stem="big"), "'auto', 'conv' or 'resnet'"),
        (dict(stem_chans=()), "one entry per stem layer"),
        (dict(stem_strides=(2,)), "a single stem layer has stride 1"),
        (dict(stem="resnet", stem_chans=(4, 8), stem_strides=(1, 2)), "is a single stem layer"),
        (dict(groups=3), "multiples of groups"),
    ],
)
def test_wrong_arguments_say_what_is_right(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**arguments)


def test_scores_keep_float64() -> None:
    model = warmed(tiny(num_classes=4).double())
    scores, poses = model.forward_poses(torch.randn(2, 3, 9, 9, dtype=torch.float64))
    assert scores.min() > 1e-5
    torch.testing.assert_close(scores, poses.norm(dim=2).clamp(min=1e-6), rtol=1e-12, atol=0)


def test_weights_keep_their_stem_at_a_size_for_which_another_is_built(tmp_path: Path) -> None:
    arguments = {"depths": (1, 1, 1, 1), "mode": "master"}
    small = capszoo.create_model("encapnet_v1", img_size=32, **arguments)
    save_for_hf(small, str(tmp_path / "small"), safe_serialization=True)
    large = capszoo.create_model(f"local-dir:{tmp_path / 'small'}", pretrained=True, img_size=72)
    stem = "stages.stem.conv.weight"
    assert torch.equal(large.state_dict()[stem], small.state_dict()[stem])
    save_for_hf(large, str(tmp_path / "large"), safe_serialization=True)
    again = capszoo.create_model(f"local-dir:{tmp_path / 'large'}", pretrained=True)
    assert again.img_size == (72, 72) and again.state_dict().keys() == large.state_dict().keys()
    assert again.state_dict()[stem].shape[-1] == 3
    assert capszoo.create_model("encapnet_v1", img_size=72, **arguments).state_dict()[stem].shape[-1] == 7
