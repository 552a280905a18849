"""Routing pooling in timm's own models."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

import capszoo
from capszoo.layers import RoutingPool2d
from capszoo.models._surgery import ChannelsLastRoutingPool2d
from tests.support.errors import refuses

#: Small models of the families that have to work, and where their pool lies.
MODELS = {
    "test_resnet": "global_pool",
    "test_convnext": "head.global_pool",
    "test_efficientnet": "global_pool",
    "mobilenetv3_small_050": "global_pool",
    "regnetx_002": "head.global_pool",
}


def _model(name: str, **kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, num_classes=5, **kwargs).eval()


@pytest.mark.parametrize("name", MODELS)
def test_replaces_the_pool(name: str) -> None:
    x = torch.randn(2, 3, 64, 96)
    model = _model(name)
    before, keys = model(x), list(model.state_dict())
    assert capszoo.replace_global_pool(model, lam=0.0, caps_dim=8) is model
    pool = model.get_submodule(MODELS[name])
    assert isinstance(pool, RoutingPool2d)
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)  # λ = 0 is what was there
    assert list(model.state_dict()) == keys

    routed = capszoo.replace_global_pool(_model(name), lam=20.0, caps_dim=8)
    assert (routed(x) - before).abs().max() > 1e-4
    features = routed.forward_features(x)
    if name == "mobilenetv3_small_050":  # a convolution follows the pool
        assert routed.get_submodule(MODELS[name])(features).shape == (2, features.shape[1], 1, 1)
    couplings = routed.get_submodule(MODELS[name]).couplings(features)
    assert couplings.shape == (2, features.shape[1] // 8, *features.shape[2:])
    torch.testing.assert_close(couplings.sum((2, 3)), torch.ones(couplings.shape[:2]))


@pytest.mark.parametrize("name", MODELS)
def test_reset_classifier(name: str) -> None:
    x = torch.randn(1, 3, 64, 64)
    where = MODELS[name]
    model = capszoo.replace_global_pool(_model(name), lam=7.0, caps_dim=4, num_iters=2)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    for classes in (3, 0, 4):
        model.reset_classifier(classes)
        assert "caps_dim=4, lam=7, num_iters=2" in repr(model.get_submodule(where))
        assert model(x).shape == (1, classes or model.head_hidden_size)
        torch.testing.assert_close(model.forward_head(model.forward_features(x), pre_logits=True), pooled)
    model.reset_classifier(4, "avg")
    assert not isinstance(model.get_submodule(where), RoutingPool2d)
    model.reset_classifier(4)  # keeps what there is
    assert not isinstance(model.get_submodule(where), RoutingPool2d) and model(x).shape == (1, 4)
    model.reset_classifier(4, "routing")
    assert isinstance(model.get_submodule(where), RoutingPool2d) and model(x).shape == (1, 4)
    assert inspect.signature(model.reset_classifier).parameters["global_pool"].default is None


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext"])
def test_copies_pickles_scripts_and_traces(name: str) -> None:
    x = torch.randn(1, 3, 64, 64)
    original = _model(name)
    kind = type(original)
    model = capszoo.replace_global_pool(original, caps_dim=8)
    assert isinstance(model, kind)
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        twin.reset_classifier(2)
        assert twin(x).shape == (1, 2) and model(x).shape == (1, 5)
        assert isinstance(twin.get_submodule(MODELS[name]), RoutingPool2d)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), expected)
    torch.testing.assert_close(torch.jit.script(model)(x), expected)


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext"])
def test_save_for_hf_and_load_as_documented(name: str, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 64, 64)
    model = capszoo.replace_global_pool(_model(name), lam=20.0, caps_dim=8)
    save_for_hf(model, tmp_path, safe_serialization=True)
    with refuses(AssertionError, names=["Invalid", "routing"]):  # not another pooling, silently
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, global_pool="avg").eval()
    capszoo.replace_global_pool(again, lam=20.0, caps_dim=8)
    assert torch.equal(again(x), model(x))


def test_channels_last_features() -> None:
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=56,
        embed_dim=16,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 1, 1),
        num_classes=3,
    ).eval()
    x = torch.randn(2, 3, 56, 56)
    before = model(x)
    capszoo.replace_global_pool(model, lam=0.0)
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
    pool = model.head.global_pool
    assert isinstance(pool, ChannelsLastRoutingPool2d)
    features = torch.randn(2, 3, 5, 32)
    kept = ChannelsLastRoutingPool2d(RoutingPool2d(16))(features)
    torch.testing.assert_close(kept, RoutingPool2d(16)(features.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
    assert pool.couplings(features).shape == (2, 2, 3, 5)


def test_clear_errors() -> None:
    def fails(model: nn.Module, match: str, **kwargs: float) -> None:
        before = repr(model)
        with pytest.raises(ValueError, match=match) as caught:
            capszoo.replace_global_pool(model, **kwargs)
        assert "\n" not in str(caught.value)
        assert repr(model) == before

    fails(_model("test_vit"), "VisionTransformer has no global average pooling")
    fails(_model("test_resnet", global_pool="max"), "'max': create the model with global_pool='avg'")
    fails(_model("test_resnet", global_pool=""), "'off': create the model")
    fails(
        _model("test_resnet"), r"caps_dim=7 does not divide the \d+ channels of ResNet: use \d+", caps_dim=7
    )
    fails(_model("test_resnet"), "lam must be 0", lam=-1)
    fails(_model("test_resnet"), "num_iters must be at least 1", num_iters=0)
    fails(capszoo.replace_global_pool(_model("test_resnet"), caps_dim=8), "routing pooling already")
