"""Small configurations of every registered model, shared by the sweeps over the registry.

Everything is read from the registry and from the constructors' signatures: a new model is swept without a line here,
unless it is too large for a test at its defaults.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import capszoo
from capszoo import CapsuleNet
from capszoo.errors import NoCapsules
from capszoo.layers.self_routing.layers import SelfRouting

#: Arguments that make a large model small; its structure stays.
SMALLER: dict[str, dict[str, Any]] = {
    "encapnet_v[123]": {"depths": (2, 2, 2, 2)},
    "capsnet6_*": {"mid_caps": 64},
    "*multimnist*": {"img_size": 28},
    "capsnet_em*": {"img_size": 24},
    "capsnet_dynamic": {"stem_chans": 64, "caps_types": 8},
    "cnn_routingpool": {"width": 16},
    "cnn_sabour": {"img_size": 20, "widths": (32, 32, 16), "hidden": (24, 16)},
    "resnet18_encap": {"widths": (16, 32, 32, 64)},
    "caps_head": {"img_size": 64, "backbone": "test_resnet"},
    "idpa_resnet": {"img_size": 24},
    "hvc": {"img_size": 20},
    "deepcaps": {"img_size": 16, "caps_types": 8},
}

#: Plain networks, the papers' baselines: they have no capsules to return.
WITHOUT_CAPSULES = (
    "cnn6*",
    "cnn_baseline",
    "cnn_multimnist*",
    "cnn_sabour",
    "resnet18_encap",
    "resnet20_avg",
    "resnet20_conv",
)

#: The quick sweeps' models. `test_the_quick_sweeps_see_every_class_and_layer` holds what classes of models and layers
#: of the registry they leave out. `make test-slow` sweeps the other models.
REPRESENTATIVES = (
    "caps_head",
    "capsnet6_dynamic",
    "capsnet6_em",
    "capsnet_dynamic",
    "capsnet_em_norb_small",
    "cnn6",
    "cnn_routingpool",
    "cnn_sabour",
    "deepcaps",
    "efficient_capsnet",
    "encapnet6",
    "hvc",
    "idpa_cnn",
    "idpa_resnet",
    "resnet18_encap",
    "resnet20_avg",
    "resnet20_conv",
    "resnet20_em",
    "resnet20_heinsen",
    "resnet20_routingcaps",
    "resnet20_routingpool",
    "resnet20_selfrouting",
)

#: One model a routing, for tests of what takes seconds a model.
PER_ROUTING = (
    "capsnet_dynamic",
    "capsnet_em_norb_small",
    "efficient_capsnet",
    "encapnet6_master",
    "resnet20_heinsen",
    "resnet20_idpa",
    "resnet20_routingcaps",
    "resnet20_routingpool",
    "resnet20_selfrouting",
)

#: Models for larger images are built for 32x32.
MAX_SIZE = 40


def names() -> list[str]:
    return capszoo.list_models()


def slow_unless(quick: Collection[str], values: Iterable[str]) -> list[Any]:
    """`values` for a parametrisation; those that are not in `quick` are left to `make test-slow`."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def each_family(*others: str) -> pytest.MarkDecorator:
    """Every registered model as ``name``; those that are no representative and not in ``others`` run in
    `make test-slow`."""
    return pytest.mark.parametrize("name", slow_unless({*REPRESENTATIVES, *others}, names()))


@cache
def signature(name: str) -> dict[str, inspect.Parameter]:
    """Constructor arguments of a model, by name."""
    model = capszoo.create_model(name, device="meta")
    return dict(inspect.signature(type(model).__init__).parameters)


@cache
def native(name: str) -> tuple[int, int, int]:
    """Channels, height and width that a model has by default."""
    model = capszoo.create_model(name, device="meta")
    return model.in_chans, *model.img_size


def has_capsules(name: str) -> bool:
    return not any(fnmatch.fnmatch(name, pattern) for pattern in WITHOUT_CAPSULES)


def has_couplings(model: CapsuleNet) -> bool:
    """Whether a model routes: EncapNets have capsules, but nothing that is shared out among parents."""
    with torch.inference_mode():
        try:
            return len(model.eval().forward_capsules(images(model, 1)).couplings) > 0
        except (NotImplementedError, NoCapsules):
            return False


def small_arguments(name: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {"img_size": 32} if max(native(name)[1:]) > MAX_SIZE else {}
    for pattern, smaller in SMALLER.items():
        if fnmatch.fnmatch(name, pattern):
            arguments |= smaller
    return arguments


def small(name: str, seed: int = 0, **kwargs: Any) -> CapsuleNet:
    """A model of test size, with reproducible random weights."""
    torch.manual_seed(seed)
    model = capszoo.create_model(name, **{**small_arguments(name), **kwargs})
    for module in model.modules():
        # it starts with weights of zero, which give the same scores for every image
        if isinstance(module, SelfRouting) and not kwargs.get("pretrained") and not module.weight.is_meta:
            nn.init.normal_(module.weight, std=0.1)
            nn.init.normal_(module.bias, std=0.1)
    return model


def images(
    model: CapsuleNet, batch: int = 2, seed: int = 1, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Reproducible noise of the model's input size, ``[b, c, h, w]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, model.in_chans, *model.img_size, generator=generator).to(dtype)


def calibrate(model: nn.Module) -> None:
    """Give every BatchNorm statistics other than its initial ones, so that a test of eval mode sees them."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            generator = torch.Generator().manual_seed(module.num_features)
            module.running_mean.uniform_(-0.1, 0.1, generator=generator)
            module.running_var.uniform_(0.8, 1.2, generator=generator)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference as a share of the largest value of ``a``."""
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-12))
