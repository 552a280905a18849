"""Tools that act where a module is called: every weight is read within a call of the module that owns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune, spectral_norm

from capszoo.errors import NoCapsules
from capszoo.models._heads import HEADS, head_arguments
from tests.support.zoo import calibrate, images, names, relative_difference, slow_unless, small

#: Models that between them have every kind of layer with weights of its own.
MODELS: dict[str, dict[str, Any]] = {
    "capsnet6_dynamic": {},
    "capsnet6_em": {},
    "capsnet_em_norb_small": {},
    "efficient_capsnet": {},
    "encapnet6": {},
    "idpa_cnn": {},
    "resnet20_dynamic": {"depth": 2, "caps_types": 8},
    "resnet20_em": {"depth": 2, "caps_types": 8},
    "resnet20_routingcaps": {},
    "resnet20_routingpool": {},
    "resnet20_selfrouting": {"depth": 2, "caps_types": 8},
}
each_model = pytest.mark.parametrize("name", MODELS)
#: For hooks of one kind, which act at the same call whatever the layer computes.
some_models = pytest.mark.parametrize(
    "name", slow_unless(("capsnet_em_norb_small", "encapnet6", "idpa_cnn", "resnet20_routingcaps"), MODELS)
)

#: A head of two layers has all that one of a single layer has.
HEAD_CASES = [
    pytest.param(routing, depth, marks=() if depth == deepest else pytest.mark.slow)
    for routing in HEADS
    for deepest in [2 if "depth" in head_arguments(routing) else 1]
    for depth in range(1, deepest + 1)
]


def _model(name: str) -> Any:
    model = small(name, **MODELS.get(name, {})).eval()
    calibrate(model)
    return model


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with parameters of their own; the decoder takes no part in a forward pass."""
    return {
        name: module
        for name, module in model.named_modules()
        if not name.startswith("decoder") and any(True for _ in module.parameters(recurse=False))
    }


def _ways(model: Any) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """All that a network computes from images, by name; what it does not offer is left out."""
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "forward": model,
        "pre_logits": lambda x: model.forward_head(model.forward_features(x), pre_logits=True),
        "poses": lambda x: model.forward_poses(x)[1],
        "capsules": lambda x: model.forward_capsules(x).poses,
        "couplings": lambda x: torch.cat(
            [torch.ones(1), *(c.flatten() for c in model.forward_capsules(x).couplings)]
        ),
        "map": model.coupling_map,
        "votes": lambda x: model.class_votes(x).votes,
    }
    for name, way in list(ways.items()):
        try:
            way(images(model))
        except (NotImplementedError, NoCapsules):
            del ways[name]
    return ways


def _everything(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: way(x) for name, way in _ways(model).items()}


def _check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_difference(value, found[name]) < 1e-3, name


def _check_calls(model: Any, x: torch.Tensor) -> None:
    """A forward pass calls every owner of weights, and nothing reads them between the calls."""
    with torch.no_grad():
        expected = _everything(model, x)
        called = set()
        handles = [
            module.register_forward_hook(lambda module, *_: called.add(module))
            for module in _owners(model).values()
        ]
        _check_same({"forward": model(x)}, {"forward": expected["forward"]})
        assert called == set(_owners(model).values())
        for handle in handles:
            handle.remove()
        cpu_offload(model, torch.device("cpu"))
        assert all(p.is_meta for p in model.parameters())
        _check_same(_everything(model, x), expected)


@pytest.mark.parametrize("name", slow_unless((*MODELS, "deepcaps", "hvc"), names()))
def test_weights_are_read_within_calls(name: str) -> None:
    model = _model(name)
    _check_calls(model, images(model))


@pytest.mark.parametrize(("routing", "depth"), HEAD_CASES)
def test_weights_of_heads_are_read_within_calls(routing: str, depth: int) -> None:
    arguments: dict[str, Any] = {"depth": depth} if "depth" in head_arguments(routing) else {}
    model = small("caps_head", routing=routing, head_args=arguments).eval()
    calibrate(model)
    _check_calls(model, images(model))


def _with_weight(model: nn.Module) -> list[nn.Module]:
    """Owners of a ``weight`` of two axes or more."""
    return [
        m
        for m in _owners(model).values()
        if isinstance(getattr(m, "weight", None), nn.Parameter) and m.weight.ndim > 1
    ]


@some_models
def test_pruned_weights_can_be_loaded(name: str) -> None:
    """`load_state_dict` fills ``weight_orig``; its product with the mask is made at the next call."""
    model, plain = _model(name), _model(name)
    for module in _with_weight(model):
        prune.random_unstructured(module, "weight", amount=0.5)
    old = {key: value.clone() for key, value in model.state_dict().items()}
    state = {key: 0.7 * value if key.endswith("weight_orig") else value for key, value in old.items()}
    masked = {
        key.removesuffix("_orig"): value * state[key.removesuffix("orig") + "mask"]
        for key, value in state.items()
        if key.endswith("weight_orig")
    }
    assert len(masked) == len(_with_weight(plain))
    plain.load_state_dict({**plain.state_dict(), **masked})
    x = images(model)
    with torch.no_grad():
        expected, ways = _everything(plain, x), _ways(model)
        for method, way in ways.items():
            model.load_state_dict(old)
            model(x)
            model.load_state_dict(state)
            _check_same({method: way(x)}, {method: expected[method]})


@some_models
@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm], ids=["old", "new"])
def test_spectral_norm_trains(name: str, norm: Any) -> None:
    """The next call normalises the trained weights: its scores are those of a plain network with the result."""
    model, plain = _model(name), _model(name)
    names = [key for key, module in model.named_modules() if module in _with_weight(model)]
    for key in names:
        norm(model.get_submodule(key), n_power_iterations=5)
    x = images(model)
    with torch.no_grad():
        model.train()(x)  # in training it finds the largest singular values
    model.eval()(x).square().sum().backward()
    with torch.no_grad():
        before = {key: model.get_submodule(key).weight.clone() for key in names}
        for key in names:
            module = model.get_submodule(key)
            trained = module.weight_orig if norm is spectral_norm else module.parametrizations.weight.original
            assert trained.grad is not None, key
            trained.mul_(1 + 0.1 * torch.randn_like(trained))
        scores = model(x)
        after = {key: model.get_submodule(key).weight for key in names}
        own = {key: value for key, value in model.state_dict().items() if key in plain.state_dict()}
        plain.load_state_dict({**own, **{f"{key}.weight": after[key] for key in names}})
        _check_same({"forward": scores}, {"forward": plain(x)})
        assert all(relative_difference(before[key], after[key]) > 1e-2 for key in names)


@pytest.mark.filterwarnings("ignore")
@each_model
def test_layers_can_be_sharded(name: str) -> None:
    """FSDP2 gathers the weights of each layer at its call; outside they are DTensors, which mix with no tensor."""
    model = _model(name)
    x = images(model)
    model(x).sum().backward()
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    sharded = _model(name)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for owner in reversed(_owners(sharded).values()):  # children before their parents
            fully_shard(owner, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        scores = sharded(x)
        scores.sum().backward()
        with torch.no_grad():
            assert relative_difference(model(x), scores) < 1e-3
        for key, parameter in sharded.named_parameters():
            if expected[key] is not None and expected[key].abs().max() > 1e-4:
                assert relative_difference(expected[key], parameter.grad.full_tensor()) < 1e-2, key
    finally:
        torch.distributed.destroy_process_group()
