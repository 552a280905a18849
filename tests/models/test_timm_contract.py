"""What timm asks of a model, on test-sized configurations of ours: the quick part of ``make test-timm``.

That target runs timm's own test file on the models at their full size; the tests here hold the same contract in the
time that ``make test`` has.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.models import FeatureInfo, save_for_hf
from timm.models._manipulate import group_parameters
from timm.optim import create_optimizer_v2
from torch import fx
from torch.autograd import forward_ad

import capszoo
from capszoo import CapsuleNet
from capszoo.errors import UnknownArgument
from capszoo.layers import use_engines
from tests.support.errors import refuses
from tests.support.zoo import calibrate, each_family, images, names, small, small_arguments

NAMES = names()


def _meta(name: str, **kwargs: object) -> CapsuleNet:
    return timm.create_model(name, device="meta", **kwargs).eval()


@each_family()
def test_features_and_head_fit_the_configuration(name: str) -> None:
    model = _meta(name)
    cfg = model.default_cfg
    x = torch.randn(1, *cfg["input_size"], device="meta")
    features = model.forward_features(x)
    assert features.shape == (1, model.num_features, *cfg["pool_size"])
    assert model.forward_head(features, pre_logits=True).shape == (1, model.head_hidden_size)
    assert model(x).shape == (1, model.num_classes)
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"meta"}
    keys = set(model.state_dict())
    classifiers = (cfg["classifier"],) if isinstance(cfg["classifier"], str) else cfg["classifier"]
    for module in (*classifiers, cfg["first_conv"]):
        assert f"{module}.weight" in keys
    assert model.to(torch.bfloat16)(x.to(torch.bfloat16)).dtype == torch.bfloat16, "after a forward pass"


@each_family()
def test_reset_classifier(name: str) -> None:
    """Device, type and mode stay those of the model."""
    model = _meta(name).to(torch.float64)
    cfg = model.default_cfg
    x = torch.randn(2, *cfg["input_size"], device="meta", dtype=torch.float64)
    model.reset_classifier(7)
    assert model.num_classes == 7 and model(x).shape == (2, 7)
    head = model.get_classifier()
    parameters = [
        p for module in (head if isinstance(head, (tuple, list)) else (head,)) for p in module.parameters()
    ]
    assert {(p.device.type, p.dtype) for p in parameters} == {("meta", torch.float64)}
    assert not any(module.training for module in model.modules())
    model.reset_classifier(0)
    assert model.num_classes == 0 and model(x).shape == (2, model.head_hidden_size)
    model.reset_classifier(0, "")
    assert model(x).shape == (2, model.num_features, *cfg["pool_size"])
    x = x.float()
    assert _meta(name, num_classes=0)(x).shape == (2, model.head_hidden_size)
    assert _meta(name, num_classes=0, global_pool="")(x).shape == (2, model.num_features, *cfg["pool_size"])


@each_family()
def test_new_head_on_a_frozen_body_is_what_trains(name: str) -> None:
    model = _meta(name)
    model.requires_grad_(False)
    model.reset_classifier(4)
    trainable = {k for k, p in model.named_parameters() if p.requires_grad}
    cfg = model.default_cfg
    classifiers = (cfg["classifier"],) if isinstance(cfg["classifier"], str) else cfg["classifier"]
    assert trainable and all(key.startswith(tuple(f"{c}." for c in classifiers)) for key in trainable)
    model.requires_grad_(False)
    model.reset_classifier(0)
    model.reset_classifier(0, "")
    assert not any(p.requires_grad for p in model.parameters())


@each_family()
def test_a_state_dict_is_all_that_a_model_on_meta_needs(name: str) -> None:
    """No buffer outside of it, which `to_empty` would leave uninitialised and `assign=True` on the meta device."""
    model = _meta(name)
    state = {k: torch.zeros_like(t, device="cpu") for k, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.to(torch.float64).to("cpu")
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cpu"}


@each_family()
def test_parameter_groups(name: str) -> None:
    model = _meta(name)
    groups = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    assert len(set(groups.values())) > 1
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, weight_decay=1e-4, layer_decay=0.9)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))


@each_family()
def test_intermediates_and_features_only(name: str) -> None:
    model = small(name).eval()
    x = images(model, 1)
    info = FeatureInfo(model.feature_info, len(model.feature_info))
    assert len(info.channels()) >= 3
    with torch.no_grad():
        final, levels = model.forward_intermediates(x)
        torch.testing.assert_close(final, model.forward_features(x))
        backbone = small(name, features_only=True).eval()
        assert backbone.feature_info.channels() == info.channels()
        given = backbone(x)
    h, w = model.img_size
    for level, same, channels, reduction in zip(
        levels, given, info.channels(), info.reduction(), strict=True
    ):
        torch.testing.assert_close(level, same)
        assert level.shape[:2] == (1, channels)
        for actual, size in ((level.shape[2], h), (level.shape[3], w)):
            assert size / (2 * reduction) < actual <= -(-size // reduction) + 1, f"reduction {reduction}"
    with torch.no_grad():
        last = model.forward_intermediates(x, indices=1, intermediates_only=True)
        first = model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(last[0], levels[-1])
    torch.testing.assert_close(first[0], levels[0])


@pytest.mark.parametrize("extractor", ["hook", "fx"])
def test_timm_s_other_extractors(extractor: str) -> None:
    name = "resnet20_routingpool"
    backbone = small(name, features_only=True, feature_cls=extractor, out_indices=(1, 2)).eval()
    x = images(small(name), 1)
    with torch.no_grad():
        for found, same in zip(backbone(x), small(name).eval().forward_intermediates(x)[1][1:3], strict=True):
            assert found.shape == same.shape
    with refuses(ValueError, names=["out_indices"]):
        small(name, features_only=True, feature_cls=extractor)
    with refuses(ValueError, names=["list", "getter", "feature_cls"]):
        small(name, features_only=True, feature_cls="list")


@pytest.mark.parametrize("name", ["resnet20_em", "resnet20_selfrouting"])
def test_a_refused_classifier_changes_nothing(name: str) -> None:
    model = small(name).eval()
    x, layer = images(model, 1), model.get_classifier()
    for wrong, error in ((1, ValueError), (2.0, TypeError), (-1, ValueError)):
        with pytest.raises(error):
            model.reset_classifier(wrong)
    assert model.get_classifier() is layer and model(x).shape == (1, model.num_classes)


def test_numbers_of_numpy_can_be_saved(tmp_path: Path) -> None:
    model = small("resnet20_routingpool", img_size=np.int64(16), lam=np.float32(2.0), num_classes=np.int64(3))
    model.reset_classifier(np.int64(4))
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    again = capszoo.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert again.num_classes == 4 and again.img_size == (16, 16)


@each_family()
def test_pruned_layers_leave_nothing_unused(name: str) -> None:
    model = small(name)
    x = images(model, 2)
    for index in range(len(model.feature_info)):
        pruned = copy.deepcopy(model).train()
        take = pruned.prune_intermediate_layers([index])
        pruned.forward_intermediates(x, indices=take, intermediates_only=True)[0].sum().backward()
        assert not [k for k, p in pruned.named_parameters() if p.grad is None], f"pruned to level {index}"


@each_family()
def test_fx_trace_is_bit_exact(name: str) -> None:
    model = small(name).eval()
    calibrate(model)
    traced = fx.symbolic_trace(model)
    *_, last, output = traced.graph.nodes
    assert output.args[0] is last, "timm takes the last operation for the result"
    with torch.no_grad():
        for batch in (1, 3):  # the trace must not hold a batch
            x = images(model, batch)
            with use_engines("reference"):
                assert torch.equal(traced(x), model(x))
            # capsnet6_em takes blocks even at this size, which some processors round differently
            torch.testing.assert_close(traced(x), model(x), rtol=1e-5, atol=1e-5)


@each_family()
def test_torchscript(name: str) -> None:
    model = small(name).eval()
    calibrate(model)
    scripted = torch.jit.script(model)
    with torch.no_grad():
        for batch in (1, 3):
            x = images(model, batch)
            torch.testing.assert_close(scripted(x), model(x), rtol=1e-4, atol=1e-5)


@each_family()
def test_dtype_is_that_of_the_model_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dtype=` does not change PyTorch's default type, which other threads use."""
    monkeypatch.setattr(torch, "set_default_dtype", None)
    model = _meta(name, dtype=torch.bfloat16)
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.bfloat16}
    x = torch.randn(1, *model.default_cfg["input_size"], device="meta", dtype=torch.bfloat16)
    assert model(x).dtype == torch.bfloat16


@each_family()
def test_copies_and_pickles(name: str) -> None:
    model = small(name).eval()
    x = images(model, 1)
    with torch.no_grad():
        expected = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(x), expected)


def test_names_do_not_collide_with_timm() -> None:
    """timm's registry identifies a module by its last path component, so ours must not be called like one of its."""
    from pathlib import Path

    from capszoo.models import MODULES

    theirs = {path.stem for path in Path(timm.models.__file__).parent.glob("*.py")}
    assert not theirs & set(MODULES)
    assert set(NAMES) == {name for module in MODULES for name in timm.list_models(module=module)}


@each_family()
def test_what_timm_s_train_script_passes_is_taken(name: str) -> None:
    """The arguments of its call of `create_model`, with the defaults of its command line."""
    untouched = dict(
        drop_path_rate=None, drop_block_rate=None, global_pool=None, bn_momentum=None, bn_eps=None
    )
    given = dict(in_chans=3, num_classes=4, drop_rate=0.0, scriptable=False, checkpoint_path="", **untouched)
    model = timm.create_model(name, **{**small_arguments(name), **given}, device="meta")
    assert model.num_classes == 4 and model.in_chans == 3


def test_names_are_listed_as_timm_lists_them() -> None:
    several = capszoo.list_models(["encapnet_v*", "idpa_cnn"])
    assert several == ["encapnet_v1", "encapnet_v2", "encapnet_v3", "idpa_cnn", "idpa_cnn_cifar100"]
    assert capszoo.list_models("encapnet_v*", exclude_filters=["*v2", "*v3"]) == ["encapnet_v1"]
    assert capszoo.list_models("cnn6*", exclude_filters="cnn6") == ["cnn6_wide"], "a word is the whole name"


@pytest.mark.parametrize("name", ["idpa_cnn", "capsnet_em_norb_small", "encapnet6"])
def test_forward_mode_and_vmap(name: str) -> None:
    model = small(name).eval()
    x = images(model, 2)
    direction = torch.randn_like(x)
    _, expected = torch.func.jvp(model, (x,), (direction,))
    with torch.no_grad(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, direction))).tangent
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        one_by_one = torch.func.vmap(lambda one: model(one[None])[0])(x)
        torch.testing.assert_close(one_by_one, model(x), rtol=1e-4, atol=1e-5)


def test_weights_are_never_loaded_in_part() -> None:
    with pytest.raises(UnknownArgument, match="pretrained_strict"):
        capszoo.create_model("resnet20_routingcaps.mnist", True, pretrained_strict=False)
