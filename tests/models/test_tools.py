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
