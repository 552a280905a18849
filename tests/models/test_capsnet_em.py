"""Networks with EM routing: their sizes, their heads against the naive procedure, what is particular to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import capszoo
from capszoo.layers import ClassEM, ConvEM
from capszoo.models.capsnet_em import EMCapsNet, SixLayerEMCapsNet
from tests.reference import em as naive
from tests.support.errors import refuses

F64 = torch.float64


def test_routing_iterations_of_the_papers() -> None:
    for name, iterations in (("capsnet_em", 2), ("capsnet_em_norb_small", 2), ("capsnet6_em", 3)):
        model = capszoo.create_model(name, device="meta")
        routing = [m.num_iters for m in model.modules() if hasattr(m, "num_iters")]
        assert routing and set(routing) == {iterations}
        changed = capszoo.create_model(name, device="meta", routing_iters=4)
        assert {m.num_iters for m in changed.modules() if hasattr(m, "num_iters")} == {4}


def _tiny(**kwargs: Any) -> EMCapsNet:
    arguments: dict[str, Any] = {"num_classes": 3, "in_chans": 1, "img_size": (17, 19), "caps": (1, 2, 2)}
    return EMCapsNet(
        **{**arguments, "stem_chans": 4, "stem_kernel": 5, "stem_padding": 0, "pose_size": 2, **kwargs}
    )


@pytest.mark.parametrize("normalize_cost", [False, True])
def test_matrix_network_equals_the_naive_procedure(normalize_cost: bool) -> None:
    """From the primary capsules on, with the temperature of each layer divided by its children per parent."""
    model = _tiny(normalize_cost=normalize_cost, lam_start=0.3, lam_step=0.2).double().eval()
    x = torch.randn(1, 1, 17, 19, dtype=F64)

    def settings(children: int, parents: int) -> dict[str, Any]:
        scale = parents / children
        return {"lam_start": 0.3 * scale, "lam_step": 0.2 * scale, "normalize_cost": normalize_cost}

    with torch.no_grad():
        maps = model.stages.primary(model.stages.stem(x))
        assert maps.shape == (1, 5, 7, 8)
        for layer, stride, children in ((model.stages.caps1, 2, 9), (model.stages.caps2, 1, 18)):
            poses, activations, _ = naive.convolution(
                maps, layer.weight, layer.beta_v, layer.beta_a, 3, stride, 2, **settings(children, 2)
            )
            maps = torch.cat([poses.flatten(3), activations], dim=3).permute(0, 3, 1, 2)
        torch.testing.assert_close(model.forward_features(x), maps)
        head = model.class_caps
        children = maps.shape[2] * maps.shape[3] * 2
        poses, activations, couplings = naive.classes(
            maps, head.weight, head.beta_v, head.beta_a, 2, **settings(children, 3)
        )
        out = model.forward_capsules(x)
    torch.testing.assert_close(torch.sigmoid(model(x)), activations)
    torch.testing.assert_close(out.activations, activations)
    torch.testing.assert_close(out.poses, poses)
    torch.testing.assert_close(out.couplings[-1].flatten(2).transpose(1, 2), couplings)


def test_six_layer_network_equals_the_naive_procedure() -> None:
    model = SixLayerEMCapsNet(
        num_classes=3, img_size=8, widths=(4, 4, 4, 6), caps_types=2, mid_caps=4, mid_dim=2, class_dim=3
    )
    model = model.double().eval()
    nn.init.normal_(model.mid_caps.bias)
    nn.init.normal_(model.class_caps.bias)
    x = torch.randn(2, 3, 8, 8, dtype=F64)
    settings: dict[str, Any] = {"lam_start": 1.0, "lam_step": 0.0, "normalize_cost": True}
    with torch.no_grad():
        maps = model.forward_features(x)
        assert maps.shape == (2, 8, 2, 2)
        poses, activations = maps[:, :6].reshape(2, 2, 3, 4), maps[:, 6:].reshape(2, 2, 4)
        for layer in (model.mid_caps, model.class_caps):
            votes = naive.shared_votes(poses, layer.weight, layer.bias)
            out, present, _ = naive.route(
                votes, activations.flatten(1), layer.beta_v, layer.beta_a, 3, **settings
            )
            if layer is model.mid_caps:  # [b, 4, 2]: two types at two places
                poses, activations = out.reshape(2, 2, 2, 2).transpose(2, 3), present.reshape(2, 2, 2)
        capsules = model.forward_capsules(x)
    torch.testing.assert_close(torch.sigmoid(model(x)), present)
    torch.testing.assert_close(capsules.activations, present)
    torch.testing.assert_close(capsules.poses, out)


def test_scores_are_logits_or_activations() -> None:
    x = torch.randn(4, 1, 17, 19)
    by_logits, by_activations = _tiny(), _tiny(scores="activations")
    by_activations.load_state_dict(by_logits.state_dict())
    by_logits.eval(), by_activations.eval()
    with torch.no_grad():
        logits, activations = by_logits(x), by_activations(x)
        assert torch.equal(by_activations.forward_capsules(x).scores, activations)
    torch.testing.assert_close(torch.sigmoid(logits), activations)
    with pytest.raises(ValueError, match="scores"):
        _tiny(scores="lengths")


@pytest.mark.parametrize("name", ["capsnet_em_norb_small", "capsnet_em", "capsnet6_em"])
def test_activations_start_neither_on_nor_off(name: str) -> None:
    torch.manual_seed(0)
    small = {"mid_caps": 64} if name == "capsnet6_em" else {}
    model = capszoo.create_model(name, **small).train()
    with torch.no_grad():
        out = model.forward_capsules(torch.randn(4, model.in_chans, 32, 32)).activations
    assert 0.05 < out.mean() < 0.95
    assert ((out > 0.01) & (out < 0.99)).float().mean() > 0.5


def test_dropout_turns_children_off_in_training_only() -> None:
    torch.manual_seed(0)
    model = _tiny(drop_rate=0.5, caps=(1, 2, 8))
    x = torch.randn(3, 1, 17, 19)
    features = model.eval().forward_features(x)
    with torch.no_grad():
        assert torch.equal(model.forward_head(features), model.forward_head(features))
        model.head_drop.train()
        children = model._children(features)
    poses, activations = children.split([8 * 4, 8], dim=1)
    assert torch.equal(poses, features[:, : 8 * 4])
    off = activations == 0
    assert 0.2 < off.float().mean() < 0.8
    torch.testing.assert_close(activations[~off], 2 * features[:, 8 * 4 :][~off])


def test_coupling_map_follows_the_active_capsules() -> None:
    """Where no capsule is active, nothing was routed from."""
    model = _tiny(img_size=33).eval()
    x = torch.randn(1, 1, 33, 33)
    features = model.forward_features(x)
    features[:, -2:, :, :2] = 0.0  # the left half
    model.forward_features = lambda _: features  # type: ignore[method-assign]
    with torch.no_grad():
        heat = model.coupling_map(x)
    assert heat.shape == (1, 3, *features.shape[-2:])
    torch.testing.assert_close(heat.sum((2, 3)), torch.ones(1, 3))
    assert heat[..., :2].sum() < 1e-3 < heat[..., 2:].min()


def test_betas_are_not_decayed() -> None:
    model = capszoo.create_model("capsnet_em", device="meta")
    assert model.no_weight_decay() == {
        f"{layer}.{beta}"
        for layer in ("stages.caps1", "stages.caps2", "class_caps")
        for beta in ("beta_v", "beta_a")
    }


def test_the_longest_capsule_is_not_reconstructed() -> None:
    model = capszoo.create_model("capsnet_em_norb_small", decoder=True).eval()
    with torch.no_grad():
        out = model.forward_capsules(torch.zeros(1, model.in_chans, *model.img_size))
        with refuses(ValueError, names=["target=scores.argmax"]):
            model.reconstruct(out.poses)
        assert model.reconstruct(out.poses, out.scores.argmax(1)).shape == (
            1,
            model.in_chans,
            *model.img_size,
        )


def test_any_number_of_layers() -> None:
    model = _tiny(caps=(2, 3, 2, 4, 2), img_size=40)
    assert [type(m) for m in model.stages][2:] == [ConvEM] * 4
    assert isinstance(model.get_classifier(), ClassEM)
    assert model(torch.randn(2, 1, 40, 40)).shape == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"img_size": 14}, "small"),
        ({"backbone": "vgg"}, "backbone"),
        ({"caps": (4,)}, "caps"),
        ({"routing_iters": 0}, "num_iters"),
        ({"global_pool": "max"}, "global_pool"),
    ],
)
def test_bad_settings(arguments: dict[str, Any], message: str) -> None:
    with refuses(ValueError, names=message):
        _tiny(**arguments)


def test_one_class_needs_costs_that_are_not_normalised() -> None:
    for create in (EMCapsNet, SixLayerEMCapsNet):
        small: dict[str, Any] = dict(img_size=28 if create is EMCapsNet else 16, in_chans=1)
        small |= (
            dict(caps=(2, 2, 2), stem_chans=8)
            if create is EMCapsNet
            else dict(widths=(4, 4, 8, 8), caps_types=2)
        )
        small |= {} if create is EMCapsNet else dict(mid_caps=4, mid_dim=4, class_dim=4)
        net = create(num_classes=2, normalize_cost=True, **small)
        with refuses(ValueError, names=["num_classes=2"]):
            net.reset_classifier(1)
        assert net(torch.rand(2, 1, *net.img_size)).shape == (2, 2), "it is as it was"
        with refuses(ValueError, names=["class", "constant"]):
            create(num_classes=1, normalize_cost=True, **small)
        assert create(num_classes=1, normalize_cost=False, **small).num_classes == 1
