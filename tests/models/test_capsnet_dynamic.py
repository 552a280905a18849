"""Networks with dynamic routing: exact sizes, and each head against the naive procedure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import capszoo.models  # noqa: F401  (registers the models)
from capszoo.models.capsnet_dynamic import DynamicCapsNet, SixLayerCapsNet
from tests.reference import dynamic as naive
from tests.reference.primary import capsules_of
from tests.reference.squash import squash as naive_squash
from tests.support.errors import refuses

SMALL: dict[str, Any] = dict(num_classes=3, img_size=(11, 12), stem_chans=6, stem_kernel=3, caps_types=2)
SMALL.update(caps_dim=3, primary_kernel=3, class_dim=4)


def test_learned_start_adds_one_logit_per_pair() -> None:
    with torch.device("meta"):
        model = timm.create_model("capsnet6_dynamic", mid_caps=512, routing_init="learned")
        plain = timm.create_model("capsnet6_dynamic", mid_caps=512)
    extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in plain.parameters())
    assert extra == 512 * 2048 + 10 * 512
    assert model.no_weight_decay() == {"mid_caps.start", "class_caps.start"}
    assert model.fixed_input_size and not plain.fixed_input_size


@pytest.mark.parametrize("softmax_over", ["parents", "children"])
@pytest.mark.parametrize("routing_iters", [1, 3])
def test_dynamic_head_equals_naive(softmax_over: str, routing_iters: int) -> None:
    model = DynamicCapsNet(**SMALL, routing_iters=routing_iters, softmax_over=softmax_over).double().eval()
    x = torch.randn(2, 1, 11, 12, dtype=torch.float64)
    features = model.stages.primary(model.stages.conv1(x))
    capsules = naive_squash(capsules_of(features, 3)).flatten(1, 3)  # [b, h*w*types, d]
    layer = model.class_caps
    transforms = layer.weight.reshape(layer.in_caps, 3, 3, 4).permute(0, 2, 3, 1)
    poses, couplings = naive.route(naive.dense_votes(capsules, transforms), routing_iters, softmax_over)
    output = model.forward_capsules(x)
    torch.testing.assert_close(output.poses, poses, atol=1e-11, rtol=1e-10)
    torch.testing.assert_close(output.couplings[-1], couplings.transpose(1, 2), atol=1e-11, rtol=1e-10)
    torch.testing.assert_close(model(x), poses.norm(dim=-1), atol=1e-11, rtol=1e-10)
    torch.testing.assert_close(output.scores, model(x), atol=1e-12, rtol=1e-12)


def test_conv_capsules_equal_naive() -> None:
    model = DynamicCapsNet(**SMALL, conv_caps=True, routing_iters=2).double().eval()
    x = torch.randn(1, 1, 11, 12, dtype=torch.float64)
    features = model.stages.squash(model.stages.primary(model.stages.conv1(x)))
    window = model.stages.conv_caps.window
    transforms = window.weight.reshape(3, 3, 2, 3, 2, 3).permute(0, 1, 2, 4, 5, 3)
    grid = naive.conv_route(capsules_of(features, 3), transforms, 1, 0, 2)  # [b, h', w', j, e]
    layer = model.class_caps
    class_transforms = layer.weight.reshape(layer.in_caps, 3, 3, 4).permute(0, 2, 3, 1)
    poses, _ = naive.route(naive.dense_votes(grid.flatten(1, 3), class_transforms), 2)
    torch.testing.assert_close(model(x), poses.norm(dim=-1), atol=1e-11, rtol=1e-10)
    couplings = model.forward_capsules(x).couplings
    assert couplings[0].shape == (1, *grid.shape[1:3], 2, 18)
    assert couplings[1].shape == (1, 3, layer.in_caps)


@pytest.mark.parametrize("softmax_over", ["parents", "children"])
@pytest.mark.parametrize("routing_init", ["zero", "random", "learned"])
def test_six_layers_equal_naive(softmax_over: str, routing_init: str) -> None:
    model = SixLayerCapsNet(
        num_classes=3,
        img_size=(8, 6),
        widths=(3, 4, 5, 6),
        caps_types=2,
        mid_caps=6,
        mid_dim=4,
        class_dim=5,
        softmax_over=softmax_over,
        routing_init=routing_init,
    )
    model = model.double().eval()
    x = torch.randn(2, 3, 8, 6, dtype=torch.float64)
    features = model.forward_features(x)
    poses = features.reshape(2, 2, 3, -1).transpose(2, 3)  # [b, g, p, d]
    for layer in (model.mid_caps, model.class_caps):
        if routing_init == "learned":
            torch.nn.init.normal_(layer.start)
        weight = layer.weight.reshape(layer.out_caps, layer.out_dim, 2, -1).permute(2, 0, 1, 3)
        votes = naive.shared_votes(poses, weight, layer.bias.permute(2, 0, 1))
        start = None if layer.start is None else layer.start.t()
        poses, _ = naive.route(votes, 3, softmax_over, start)
        if layer is model.mid_caps:  # mid capsules: type by type, three positions each
            poses = poses.reshape(2, 2, 3, 4)
    torch.testing.assert_close(model(x), poses.norm(dim=-1), atol=1e-11, rtol=1e-10)
    output = model.forward_capsules(x)
    torch.testing.assert_close(output.poses, poses, atol=1e-11, rtol=1e-10)
    assert [c.shape for c in output.couplings] == [(2, 6, 8), (2, 3, 6)]
    pre_logits = model.forward_head(features, pre_logits=True)
    assert pre_logits.shape == (2, model.head_hidden_size) == (2, 8)


@pytest.mark.parametrize("name", ["capsnet6_dynamic", "capsnet6_em"])
@pytest.mark.parametrize("arguments", [{"mid_caps": 100}, {"caps_types": 0}, {"widths": (4, 8)}])
def test_six_layers_refuse_what_does_not_fit(name: str, arguments: dict[str, Any]) -> None:
    with refuses(ValueError, names=[*arguments]):
        timm.create_model(name, device="meta", **arguments)


def test_coupling_map_finds_where_a_class_was_routed_from() -> None:
    """Silence all capsules but those of one position: that position has all of the map."""
    model = timm.create_model("capsnet_dynamic").eval()

    def only_one(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros_like(output)
        kept[:, :, 2, 4] = output[:, :, 2, 4]
        return kept

    model.stages.squash.register_forward_hook(only_one)
    with torch.no_grad():
        maps = model.coupling_map(torch.randn(1, 1, 28, 28))
    assert (maps[:, :, 2, 4] > 0.99).all()


def test_decoder_follows_the_classes() -> None:
    model = timm.create_model("capsnet_dynamic", decoder=True)
    x = torch.randn(2, 1, 28, 28)
    assert model.reconstruct(model.forward_capsules(x).poses).shape == (2, 1, 28, 28)
    with refuses(ValueError, names=["num_classes", "0", "-1"]):
        model.reset_classifier(-1)
    assert model.num_classes > 0
    model.reset_classifier(4)
    assert model.reconstruct(model.forward_capsules(x).poses, torch.tensor([0, 3])).shape == (2, 1, 28, 28)
    model.reset_classifier(0)
    assert model.decoder is None and model(x).shape == (2, 256)
    with pytest.raises(RuntimeError, match="num_classes"):
        model.forward_capsules(x)
    model.reset_classifier(3)  # what the model was created with comes back
    assert model.reconstruct(model.forward_capsules(x).poses).shape == (2, 1, 28, 28)


def test_wrong_size_is_refused() -> None:
    model = timm.create_model("capsnet_dynamic")
    with pytest.raises(AssertionError, match="28x28"):
        model(torch.randn(1, 1, 32, 32))
    with pytest.raises(AssertionError, match="28x28"):
        model.forward_capsules(torch.randn(1, 1, 32, 32))
    with refuses(ValueError, names=["small"]):
        timm.create_model("capsnet_dynamic", img_size=12)


def test_distributed_data_parallel_without_the_decoder(tmp_path: Path) -> None:
    """As docs/fine-tune.md states: a loss of the scores alone leaves the decoder without gradients."""

    def two_steps(decoder: bool, **kwargs: bool) -> None:
        model = DistributedDataParallel(DynamicCapsNet(**SMALL, decoder=decoder), **kwargs)
        for _ in range(2):
            model(torch.randn(2, 1, 11, 12)).sum().backward()

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        two_steps(False)
        two_steps(True, find_unused_parameters=True)
        with refuses(RuntimeError, names=["Expected", "reduction"]):
            two_steps(True)
    finally:
        dist.destroy_process_group()
