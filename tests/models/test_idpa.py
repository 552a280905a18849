"""IDPA networks: sizes, the head against the naive Procedure 2, ablations, coupling maps, the classifier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import capszoo
from capszoo.models._adapt import adapt_state_dict
from capszoo.models.idpa import IdpaNet
from tests.reference import idpa as naive
from tests.support.errors import refuses
from tests.support.layers import assert_same, describe, shaken

F64 = torch.float64


def tiny(**kwargs: Any) -> IdpaNet:
    """Three classes, two types of 2x2 poses, all layers of a CIFAR-100 network; grids 10x9, 4x4, 2x2."""
    torch.manual_seed(0)
    small: dict[str, Any] = dict(backbone="conv", backbone_chans=5, num_caps=2, pose_dim=4, fc_caps=(3,))
    return IdpaNet(**{**small, "num_classes": 3, "in_chans": 1, "img_size": (20, 18), **kwargs})


def reference(model: IdpaNet, features: Tensor) -> tuple[Tensor, list[Any], list[Any]]:
    """Logits ``[n]`` of one image by the full Procedure 2, last poses and couplings of every layer."""
    x = features[0]
    primary = x.unflatten(0, (model.num_caps, model.pose_dim)).permute(2, 3, 0, 1)
    activation = None
    if model.activations:
        conv = model.primary_activation
        maps = torch.einsum("chw,oc->hwo", x, conv.weight[:, :, 0, 0]) + conv.bias
        activation = naive.grid(1 / (1 + torch.exp(-maps)))
    stack = model.capsules
    layers = [describe(layer) for layer in stack]
    poses, couplings, active = naive.inference(
        naive.grid(primary), layers, stack.num_iters, stack.routing, activation
    )
    logits = []
    for j, pose in enumerate(poses[-1]):
        pose = pose * active[-1][j] if model.activations else pose
        logits.append((pose * model.score.weight[0]).sum() + model.score.bias[0])
    return torch.stack(logits), poses, couplings


# -- sizes --------------------------------------------------------------------------------------------------------


def test_the_papers_shapes() -> None:
    """Tables 8 to 11, row by row."""
    expected = {
        "idpa_cnn": (512, (16, 16), [(7, 7, 32, 16), (5, 5, 32, 16), (10, 16)]),
        "idpa_cnn_cifar100": (1152, (16, 16), [(7, 7, 32, 36), (5, 5, 32, 36), (20, 36), (100, 36)]),
        "idpa_resnet": (512, (16, 16), [(7, 7, 32, 16), (5, 5, 32, 16), (10, 16)]),
        "idpa_multimnist": (1024, (8, 8), [(6, 6, 16, 64), (10, 64)]),
    }
    for name, (channels, grid, shapes) in expected.items():
        model = capszoo.create_model(name, device="meta")
        x = torch.empty(2, model.in_chans, *model.img_size, device="meta")
        features = model.forward_features(x)
        assert features.shape == (2, channels, *grid) and model.grid == grid
        poses, _, _ = model.capsules.run_full(model._primary_capsules(features)[0])
        assert [tuple(p.shape[1:]) for p in poses] == shapes
        assert model.capsules.num_iters == 2 and model.capsules.routing == "concurrent"


def test_wrong_arguments() -> None:
    with refuses(ValueError, names=["12x18"]):
        tiny(img_size=(12, 18))
    for argument, message in [("backbone", "resnet"), ("routing", "sequential"), ("global_pool", "avg")]:
        with pytest.raises(ValueError, match=message):
            tiny(**{argument: "max"})
    with pytest.raises(ValueError, match="square"):
        tiny(pose_dim=5)
    with refuses(ValueError, names=["num_iters"]):
        tiny(routing_iters=0)


# -- the head against Procedure 2 ---------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"pose": "vector"},
    {"routing": "sequential"},
    {"layer_norm": False},
    {"activations": True},
    {"parent_init": "learned", "scale_agreement": False},
]


@pytest.mark.parametrize("routing_iters", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))])
@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_scores_are_those_of_the_full_procedure(case: int, routing_iters: int) -> None:
    """Logits, and their gradients for every parameter: what the dependency cone leaves out does not matter."""
    model = shaken(tiny(routing_iters=routing_iters, **OPTIONS[case]))
    x = torch.randn(1, 1, 20, 18, dtype=F64)
    expected, poses, couplings = reference(model, model.forward_features(x))
    assert_same(model(x)[0], expected, list(model.parameters()))

    out = model.forward_capsules(x)
    torch.testing.assert_close(out.scores[0], expected, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(out.poses[0], naive.stack(poses[-1]), atol=1e-10, rtol=1e-9)
    for given, wanted in zip(out.couplings, couplings, strict=True):
        wanted = naive.stack(wanted).transpose(-1, -2)
        torch.testing.assert_close(given[0].reshape(wanted.shape), wanted)


def test_iterations_can_be_changed_afterwards() -> None:
    x = torch.randn(2, 1, 20, 18)
    model = tiny(routing_iters=1).eval()
    model.capsules.num_iters = 4
    assert torch.equal(model(x), tiny(routing_iters=4).eval()(x))


@pytest.mark.parametrize("routing_iters", [1, 2, 3, 4])
def test_pre_logits_are_the_class_layer_s_last_children(routing_iters: int) -> None:
    for arguments in ({}, {"fc_caps": ()}):
        model = tiny(routing_iters=routing_iters, **arguments).eval()
        seen: list[list[Tensor]] = []
        route = model.capsules.classes.route
        model.capsules.classes.route = lambda *args, seen=seen, route=route: (
            seen.append(args[0]) or route(*args)
        )
        x = model.forward_features(torch.randn(2, 1, 20, 18))
        model.forward_head(x)
        given = model.forward_head(x, pre_logits=True)
        last = seen[0][-1]
        expected = last.mean(dim=(1, 2)).flatten(1) if last.ndim == 5 else last.flatten(1)
        torch.testing.assert_close(given, expected)
        assert given.shape == (2, model.head_hidden_size)


def test_dropout_only_in_training() -> None:
    model = tiny(drop_rate=0.5)
    x = torch.randn(2, 1, 20, 18)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.parametrize("routing", ["concurrent", "sequential"])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_ablations_script_and_trace(routing: str) -> None:
    x = torch.randn(2, 1, 20, 18)
    for options in ({"activations": True}, {"layer_norm": False}, {"parent_init": "random"}):
        model = tiny(routing=routing, routing_iters=3, **options).eval()
        expected = model(x)
        assert torch.equal(torch.jit.script(model)(x), expected)
        assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)


# -- coupling maps ------------------------------------------------------------------------------------------------


def naive_shares(model: IdpaNet, x: Tensor) -> Tensor:
    """Share of each primary position in each class ``[n, h, w]``, by walking down the couplings of the full run.

    Equals the model's where its cone is the full run: sequential routing.
    """
    _, _, couplings = reference(model, model.forward_features(x))
    layers = list(model.capsules)
    share = torch.eye(model.num_classes, dtype=F64)  # [n, parents]
    for level in (3, 2):  # fully connected: couplings[i][j]
        c = naive.stack(couplings[level])
        share = torch.stack(
            [
                sum(share[n, j] * c[:, j] / c[:, j].sum() for j in range(c.shape[1]))
                for n in range(model.num_classes)
            ]
        )
    sizes = {1: (4, 4), 0: model.grid}
    for level in (1, 0):  # convolutional: couplings[y][x][(k l i)][j]
        c, layer = naive.stack(couplings[level]), layers[level]
        height, width, window, parents = c.shape
        below = torch.zeros(model.num_classes, *sizes[level], layer.in_caps, dtype=F64)
        above = share.reshape(model.num_classes, height, width, parents)
        for n in range(model.num_classes):
            for y in range(height):
                for z in range(width):
                    for m in range(window):
                        k, q, i = m // layer.in_caps // 3, m // layer.in_caps % 3, m % layer.in_caps
                        for j in range(parents):
                            part = above[n, y, z, j] * c[y, z, m, j] / c[y, z, :, j].sum()
                            below[n, y * layer.stride + k, z * layer.stride + q, i] += part
        share = below.flatten(1)
    return share.reshape(model.num_classes, *model.grid, model.num_caps).sum(dim=-1)


def test_shares_follow_the_couplings() -> None:
    model = shaken(tiny(routing="sequential", routing_iters=2)).eval()
    x = torch.randn(1, 1, 20, 18, dtype=F64)
    with torch.no_grad():
        primary, _ = model._primary_capsules(model.forward_features(x))
        shares = model.capsules.shares(primary)
        assert shares.shape == (1, 3, *model.grid, 2)
        torch.testing.assert_close(shares.sum(dim=(2, 3, 4)), torch.ones(1, 3, dtype=F64))
        torch.testing.assert_close(shares[0].sum(dim=-1), naive_shares(model, x))


def test_coupling_map() -> None:
    model = shaken(tiny(routing_iters=3)).eval()
    x = torch.randn(2, 1, 20, 18, dtype=F64)
    with torch.no_grad():
        heat = model.coupling_map(x)
    assert heat.shape == (2, 3, 10, 9)
    torch.testing.assert_close(heat.sum(dim=(2, 3)), torch.ones(2, 3, dtype=F64))
    # windows of stride 2 leave out the last row
    assert (heat[:, :, 9] == 0).all() and heat[:, :, :9].min() > 0
    assert (heat[:, 0] - heat[:, 1]).abs().max() > 1e-4

    model.capsules.num_iters = 1  # all couplings even: a flat map over what is seen
    with torch.no_grad():
        heat = model.coupling_map(x)
    torch.testing.assert_close(heat[:, :, :9], torch.full_like(heat[:, :, :9], 1 / 81))


@pytest.mark.parametrize(("name", "score"), [("idpa_cnn", "score"), ("resnet20_idpa", "head.score")])
def test_weights_with_and_without_classes(name: str, score: str) -> None:
    whole, body = (capszoo.create_model(name, img_size=16, num_classes=n) for n in (3, 0))
    found = adapt_state_dict(whole.state_dict(), described(body, 3))
    assert set(found) == set(body.state_dict()) and f"{score}.weight" not in found
    body.load_state_dict(found)
    again = described(whole, 0)
    again.load_state_dict(adapt_state_dict(body.state_dict(), again))
    assert {f"{score}.weight", f"{score}.bias"} < set(again.untrained)


def described(model: Any, num_classes: int) -> Any:
    """The model, whose configuration describes weights of so many classes."""
    model.pretrained_cfg = {**model.pretrained_cfg, "num_classes": num_classes, "input_size": (3, 16, 16)}
    return model


def test_training_memory_holds_no_votes_of_convolutions() -> None:
    """At two iterations the tensors saved for backward stay near the features' size (the released form: 155 MiB)."""
    model = capszoo.create_model("idpa_resnet").train()
    x = torch.randn(2, 3, 32, 32)
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        features = model.forward_features(x)
        body = sum(saved.values())
        model.forward_head(features)
    head = sum(saved.values()) - body - sum(p.nbytes for p in model.capsules.parameters())
    assert head / len(x) < 8 * 2**20


def test_learned_parents_and_costs_are_not_decayed() -> None:
    net = capszoo.create_model("idpa_cnn", device="meta", parent_init="learned", activations=True)
    own = {name.split(".")[-1] for name in net.no_weight_decay()}
    assert own == {"start", "beta_v", "beta_a"}
    assert not capszoo.create_model("idpa_cnn", device="meta").no_weight_decay()


def test_weights_of_another_size_than_they_state_are_refused() -> None:
    stored = capszoo.create_model("idpa_resnet", img_size=48).state_dict()
    net = capszoo.create_model("idpa_resnet")
    assert net.fit_to_size(stored, 48)[1] == ("capsules.classes.weight",)
    with refuses(ValueError, names=["capsules.classes.weight"]):
        net.fit_to_size(stored, 44)
