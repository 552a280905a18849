"""The routing-pooling networks: sizes, heads against the reference, couplings, pooling by argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune

import capszoo
from capszoo.errors import NoCapsules
from capszoo.layers import RoutingPool2d
from tests.reference import routing_pool as reference
from tests.support.errors import refuses
from tests.support.zoo import images, relative_difference, small


@pytest.mark.parametrize("name", ["cnn_routingpool", "resnet20_routingpool"])
def test_pool_head_equals_reference(name: str) -> None:
    model = capszoo.create_model(name, num_classes=4, lam=3.0, img_size=12, dtype=torch.float64).eval()
    x = torch.randn(2, 3, 12, 8, dtype=torch.float64)
    with torch.no_grad():
        features = model.forward_features(x)
        children = features.reshape(2, 4, 16, -1).transpose(2, 3)  # [b, g, l, e]
        poses, couplings = reference.routing_pool(children, 3.0, 3)
        scores = F.linear(poses.flatten(1), model.fc.weight, model.fc.bias)
        torch.testing.assert_close(model(x), scores, rtol=0, atol=1e-9)
        out = model.forward_capsules(x)
        torch.testing.assert_close(out.couplings[0].flatten(2), couplings, rtol=0, atol=1e-9)
        # each pooled capsule's part in each score, and the map weighted by the parts above zero
        parts = torch.stack([(poses * w.reshape(4, 16)).sum(-1) for w in model.fc.weight], 1)  # [b, n, g]
        torch.testing.assert_close(out.poses, parts, rtol=0, atol=1e-9)
        torch.testing.assert_close(parts.sum(-1) + model.fc.bias, scores)
        share = parts.clamp_min(1e-6)
        share = share / share.sum(-1, keepdim=True)
        expected = (share[..., None] * couplings[:, None]).sum(2).reshape(2, 4, *features.shape[2:])
        torch.testing.assert_close(model.coupling_map(x).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("caps_dim", [16, 32])
def test_caps_head_equals_reference(caps_dim: int) -> None:
    model = capszoo.create_model(
        "resnet20_routingcaps", num_classes=3, lam=5.0, caps_dim=caps_dim, img_size=12, dtype=torch.float64
    ).eval()
    x = torch.randn(2, 1, 12, 8, dtype=torch.float64)
    with torch.no_grad():
        features = model.forward_features(x)  # [b, 64, 3, 2]
        children = features.reshape(2, 64 // caps_dim, caps_dim, 6).transpose(2, 3)
        poses, couplings = reference.routing_caps(children, model.class_caps.weight, 5.0, 3)
        out = model.forward_capsules(x)
        torch.testing.assert_close(out.poses, poses, rtol=0, atol=1e-9)
        torch.testing.assert_close(out.couplings[0].flatten(3), couplings, rtol=0, atol=1e-9)
        torch.testing.assert_close(model(x), poses.norm(dim=-1), rtol=0, atol=1e-9)
        torch.testing.assert_close(out.scores, model(x))
        heat = couplings.sum(2).reshape(2, 3, 3, 2)
        torch.testing.assert_close(model.coupling_map(x), heat, rtol=0, atol=1e-9)


def test_lam_zero_is_the_average_pooling_twin() -> None:
    zero = capszoo.create_model("resnet20_routingpool", lam=0.0).eval()
    twin = capszoo.create_model("resnet20_routingpool", pool="avg").eval()
    routed = capszoo.create_model("resnet20_routingpool").eval()
    for other in (twin, routed):
        other.load_state_dict(zero.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(zero(x), twin(x))
    assert not torch.allclose(routed(x), twin(x))
    torch.testing.assert_close(zero.coupling_map(x), torch.full((2, 10, 8, 8), 1 / 64))


def test_max_pooling_and_its_positions() -> None:
    model = capszoo.create_model("cnn_routingpool", pool="max", img_size=8).eval()
    x = torch.randn(2, 3, 8, 8)
    features = model.forward_features(x)
    torch.testing.assert_close(model(x), model.fc(F.adaptive_max_pool2d(features, 1).flatten(1)))
    heat = model.coupling_map(x)
    assert model.forward_capsules(x).couplings == ()
    torch.testing.assert_close(heat.sum((2, 3)), torch.ones(2, 10))
    taken = F.one_hot(features.flatten(2).argmax(2), 64).sum(1).reshape(2, 8, 8) > 0
    assert (heat.sum(1)[~taken] == 0).all()


def test_pool_is_chosen_by_argument_and_kept() -> None:
    model = capszoo.create_model("resnet20_routingpool", lam=2.0, caps_dim=8, routing_iters=2)
    assert repr(model.pool) == repr(RoutingPool2d(8, 2.0, 2, flatten=True))
    model.reset_classifier(5)
    assert isinstance(model.pool, RoutingPool2d) and model.fc.out_features == 5
    model.reset_classifier(5, "avg")
    assert model.global_pool == "avg" and not isinstance(model.pool, RoutingPool2d)
    x = torch.randn(1, 3, 16, 16)
    model.reset_classifier(0, "")
    assert model(x).shape == (1, 64, 4, 4)
    with refuses(RuntimeError, names=["classes"]):
        model.coupling_map(x)
    model.reset_classifier(3)  # a classifier needs pooled features: the model's own pooling is back
    assert isinstance(model.pool, RoutingPool2d) and model(x).shape == (1, 3)
    other = capszoo.create_model("resnet20_routingpool", global_pool="max")
    assert other.global_pool == "max"
    other.reset_classifier(0, "")
    other.reset_classifier(3)
    assert other.global_pool == "max", "the pooling that the caller chose"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "resnet20_routingpool",
            {"caps_dim": 24},
            "caps_dim=24 does not divide the 64 channels: use one of 1, 2",
        ),
        ("resnet20_routingcaps", {"caps_dim": 0}, "use one of"),
        ("resnet20_routingpool", {"pool": "mean"}, "pool must be one of 'routing', 'avg', 'max'"),
        (
            "resnet20_routingpool",
            {"global_pool": "catavgmax"},
            "global_pool must be .routing., .avg., .max. or",
        ),
        ("resnet20_routingcaps", {"global_pool": "max"}, "global_pool must be 'avg' or ''"),
        ("resnet20_routingcaps", {"lam": -1.0}, "lam must be 0"),
        ("resnet20_routingcaps", {"routing_iters": 0}, "num_iters must be at least 1"),
        ("resnet20_routingpool", {"depth": 21}, "6n"),
    ],
)
def test_wrong_arguments(name: str, args: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capszoo.create_model(name, device="meta", **args)


@pytest.mark.parametrize("head", [False, True])
def test_parts_and_bias_are_the_scores_in_training_too(head: bool) -> None:
    """Parts and scores are those of the same pooled capsules, after dropout."""
    if head:
        model = capszoo.attach_head("test_resnet", "routing_pool", num_classes=3, img_size=64, drop_rate=0.5)
        bias = model.head.classes.bias
    else:
        model = capszoo.create_model("resnet20_routingpool", num_classes=3, drop_rate=0.5)
        bias = model.fc.bias
    x = torch.randn(2, 3, *model.img_size)
    out = model.train().forward_capsules(x)
    torch.testing.assert_close(out.poses.sum(-1) + bias, out.scores)
    assert not torch.equal(model(x), model(x)), "dropout is not applied"


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_pooling_without_routing_has_no_votes(pool: str) -> None:
    model = capszoo.create_model("cnn_routingpool", pool=pool, img_size=8).eval()
    with refuses(NoCapsules, names=["votes"]):
        model.class_votes(torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("kind", ["quantised", "sequential", "pruned"])
@pytest.mark.parametrize("name", ["resnet20_routingpool", "caps_head"])
def test_the_classifier_may_be_another_module(name: str, kind: str) -> None:
    """The contributions come from calls of the classifier, whatever it is."""
    arguments: dict[str, Any] = {"routing": "routing_pool", "proj_chans": 32} if name == "caps_head" else {}
    model: Any = small(name, **arguments).eval()
    owner, key = (model.head, "classes") if name == "caps_head" else (model, "fc")
    linear = getattr(owner, key)
    x = images(model, 3)
    with torch.no_grad():
        before, heat = model.forward_capsules(x), model.coupling_map(x)
        torch.testing.assert_close(before.poses.sum(2) + linear.bias, before.scores, rtol=1e-4, atol=1e-5)
        if kind == "quantised":
            model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
        elif kind == "sequential":
            setattr(owner, key, torch.nn.Sequential(torch.nn.Dropout(0.5), linear).eval())
        else:
            prune.random_unstructured(linear, "weight", amount=0.5)
            linear.weight_mask.fill_(1.0)
            linear.weight = torch.zeros_like(linear.weight)  # until the next call
            assert torch.equal(model.coupling_map(x), heat)
        after = model.forward_capsules(x)
        tolerance = 0.05 if kind == "quantised" else 1e-6
        assert relative_difference(before.poses, after.poses) < tolerance
        assert relative_difference(heat, model.coupling_map(x)) < tolerance
