"""Sizes and settings out of range: every layer and every head names the argument."""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capszoo.layers import (
    FCIDPA,
    CapConv,
    CapFC,
    CapsuleNorm,
    ClassEM,
    Conv3dDynamicRouting,
    ConvDynamicRouting,
    ConvEM,
    ConvIDPA,
    ConvSelfRouting,
    DynamicRouting,
    EncapModule,
    HeinsenRouting,
    IDPAStack,
    MasterAide,
    PrimaryCaps2d,
    RoutingCaps,
    RoutingPool2d,
    SelfAttentionRouting,
    SelfRouting,
    SharedDynamicRouting,
    SharedEM,
    SinkhornUnit,
    dynamic_routing,
    em_routing,
    engine_report,
    ground_cost,
    idpa_routing,
    routing_caps,
    routing_pool,
    shared_em_routing,
    sinkhorn_plan,
)
from capszoo.models._heads import create_head
from tests.support.errors import refuses

VOTES = dict(in_caps=2, in_dim=4, out_caps=3, out_dim=4)
WINDOW = dict(kernel_size=3, stride=1)
SHARED = dict(groups=2, in_dim=4, out_caps=3, out_dim=4)
GROUPED = dict(in_chans=8, out_chans=8, groups=4)

#: layer, valid arguments, the smallest value of each argument that is checked
LAYERS: list[tuple[Any, dict[str, Any], dict[str, int]]] = [
    (DynamicRouting, VOTES, dict.fromkeys(VOTES, 1)),
    (ConvDynamicRouting, VOTES | WINDOW, dict.fromkeys(VOTES | WINDOW, 1) | {"padding": 0}),
    (SharedDynamicRouting, SHARED, dict.fromkeys(SHARED, 1)),
    (ConvEM, {"in_caps": 2, "out_caps": 3}, dict.fromkeys(("in_caps", "out_caps", *WINDOW), 1)),
    (ClassEM, {"in_caps": 2, "num_classes": 3}, {"in_caps": 1, "num_classes": 1, "pose_size": 2}),
    (SharedEM, SHARED, dict.fromkeys(SHARED, 1)),
    (
        ConvIDPA,
        {"in_caps": 2, "out_caps": 3},
        dict.fromkeys(("in_caps", "out_caps", "in_dim", *WINDOW), 1) | {"padding": 0},
    ),
    (FCIDPA, {"in_caps": 2, "out_caps": 3, "pose": "vector"}, dict.fromkeys(VOTES, 1)),
    (SelfRouting, VOTES, dict.fromkeys(VOTES, 1) | {"out_dim": 0}),
    (ConvSelfRouting, VOTES | WINDOW, dict.fromkeys(VOTES | WINDOW, 1) | {"padding": 0}),
    (SelfAttentionRouting, VOTES, dict.fromkeys(VOTES, 1)),
    (HeinsenRouting, VOTES, dict.fromkeys((*VOTES, "num_iters"), 1) | {"in_caps": 0}),
    (
        PrimaryCaps2d,
        {"in_chans": 3, "num_caps": 2, "pose_dim": 4, "kernel_size": 3},
        dict.fromkeys(("in_chans", "num_caps", "pose_dim", *WINDOW), 1) | {"padding": 0},
    ),
    (
        RoutingCaps,
        {"in_types": 2, "in_dim": 4, "out_caps": 3},
        dict.fromkeys(("in_types", "in_dim", "out_caps", "out_dim", "num_iters"), 1),
    ),
    (CapConv, GROUPED, dict.fromkeys((*GROUPED, *WINDOW), 1)),
    (
        MasterAide,
        GROUPED | WINDOW | {"coefficients": "both"},
        dict.fromkeys((*GROUPED, *WINDOW), 1),
    ),
    (EncapModule, GROUPED, dict.fromkeys((*GROUPED, "stride", "depth"), 1)),
    (CapFC, {"num_classes": 3}, dict.fromkeys(("num_classes", "pose_dim", "groups", "grid"), 1)),
    (
        SinkhornUnit,
        {"low_chans": 8, "high_chans": 8, "groups": 4},
        dict.fromkeys(("low_chans", "high_chans", "groups", "stride", "num_iters"), 1),
    ),
]

EM_SETTINGS = {"var_floor": True, "eps": True, "lam_start": False, "lam_step": False, "init_beta_v": None}

#: layer, valid arguments, settings: True if they must be positive, False if 0 or more, None if any finite number
SETTINGS: list[tuple[Any, dict[str, Any], dict[str, bool | None]]] = [
    (ConvEM, {"in_caps": 2, "out_caps": 3}, EM_SETTINGS | {"init_noise": False}),
    (ClassEM, {"in_caps": 2, "num_classes": 3}, EM_SETTINGS | {"init_noise": False}),
    (SharedEM, SHARED, EM_SETTINGS),
    (ConvIDPA, {"in_caps": 2, "out_caps": 3}, {"eps": True}),
    (FCIDPA, {"in_caps": 2, "out_caps": 3}, {"eps": True}),
    (CapsuleNorm, {"pose_dim": 4}, {"eps": True}),
    (DynamicRouting, VOTES, {"weight_std": True}),
    (ConvDynamicRouting, VOTES | WINDOW, {"weight_std": True}),
    (RoutingPool2d, {}, {"lam": False}),
    (RoutingCaps, {"in_types": 2, "in_dim": 4, "out_caps": 3}, {"lam": False}),
    (SinkhornUnit, {"low_chans": 8, "high_chans": 8, "groups": 4}, {"epsilon": True}),
]

HEADS = [
    ("dynamic", {"proj_chans": 0, "max_grid": 0, "caps_types": 1, "caps_dim": 1, "class_dim": 1}),
    ("self_attention", {"proj_chans": 0, "max_grid": 0, "caps_types": 1, "caps_dim": 1, "class_dim": 1}),
    ("em", {"proj_chans": 0, "max_grid": 0, "caps_types": 1, "caps_dim": 1, "num_iters": 1}),
    ("idpa", {"proj_chans": 0, "max_grid": 0, "caps_types": 1, "caps_dim": 1, "num_iters": 1}),
    ("self_routing", {"proj_chans": 0, "max_grid": 0, "caps_types": 1, "caps_dim": 1}),
    ("conv", {"proj_chans": 0, "max_grid": 0, "caps_types": 1, "caps_dim": 1}),
]


@pytest.mark.parametrize(
    ("layer", "valid", "name", "least"),
    [(layer, valid, name, least) for layer, valid, sizes in LAYERS for name, least in sizes.items()],
)
def test_a_size_below_its_least_is_named(layer: Any, valid: dict[str, Any], name: str, least: int) -> None:
    layer(**valid)
    if name == "num_classes" and layer is ClassEM:
        name, valid = "out_caps", valid | {name: 0}  # the classes are its parents
    else:
        valid = valid | {name: least - 1}
    with pytest.raises(ValueError, match=rf"\b{name}\b.*must be (at least {least}|{least} or more|odd)"):
        layer(**valid)


@pytest.mark.parametrize(
    ("layer", "valid", "name", "positive"),
    [(layer, valid, name, positive) for layer, valid, names in SETTINGS for name, positive in names.items()],
)
def test_a_setting_out_of_range_is_named(
    layer: Any, valid: dict[str, Any], name: str, positive: bool | None
) -> None:
    layer(**valid | {name: 1.0 if positive else 0.0})
    refused = {True: [0.0, -1.0], False: [-1.0], None: []}[positive]
    for value in (*refused, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"\b{name} must be .*finite.*, not {value}"):
            layer(**valid | {name: value})


@pytest.mark.parametrize(
    ("routing", "name", "least"),
    [(routing, name, least) for routing, sizes in HEADS for name, least in sizes.items()],
)
def test_heads_name_a_size_below_its_least(routing: str, name: str, least: int) -> None:
    with pytest.raises(ValueError, match=rf"\b{name} must be at least {least}, not {least - 1}"):
        create_head(16, (4, 4), 3, routing, **{name: least - 1})


def zeros(*size: int) -> torch.Tensor:
    return torch.zeros(size)


UNIT = dict(low_chans=8, high_chans=8, groups=4)
SHARED_EM = [zeros(*size) for size in ((1, 2, 3, 4), (1, 2, 4), (5, 2, 3, 6), (5, 2, 6), (5,), (5,))]

#: what is refused, by which error, which names
REFUSED: list[tuple[Callable[[], Any], type[Exception], list[str]]] = [
    (lambda: sinkhorn_plan(zeros(0, 3)), ValueError, ["both", "samples"]),
    (lambda: sinkhorn_plan(zeros(3, 0)), ValueError, ["both", "samples"]),
    (lambda: sinkhorn_plan(zeros(2, 2), 0), ValueError, ["num_iters", "at least 1"]),
    (lambda: sinkhorn_plan(zeros(2, 2), 1, 0.0), ValueError, ["epsilon", "positive"]),
    (lambda: ground_cost(zeros(2, 2), zeros(2, 2), "l1"), ValueError, ["cosine", "l2"]),
    (lambda: SinkhornUnit(6, 8, groups=4), ValueError, ["multiples", "groups"]),
    (lambda: SinkhornUnit(**UNIT, generator="gan"), ValueError, ["capsule", "cnn"]),
    (lambda: SinkhornUnit(**UNIT, metric="js"), ValueError, ["sinkhorn", "kl"]),
    (lambda: SinkhornUnit(**UNIT, cost="l1"), ValueError, ["cosine", "l2"]),
    (lambda: dynamic_routing(zeros(1, 2, 3, 4), 0), ValueError, ["num_iters"]),
    (lambda: dynamic_routing(zeros(1, 2, 3, 4), 3, "both"), ValueError, ["softmax_over", "both"]),
    (lambda: DynamicRouting(**VOTES, num_iters=0), ValueError, ["num_iters"]),
    (lambda: DynamicRouting(**VOTES, softmax_over="both"), ValueError, ["softmax_over", "both"]),
    (lambda: DynamicRouting(**VOTES, init="ones"), ValueError, ["init", "ones"]),
    (lambda: SharedDynamicRouting(**SHARED, init="learned"), ValueError, ["positions"]),
    (lambda: em_routing(zeros(1, 2, 3, 4), zeros(1, 3), zeros(2), zeros(2), 0), ValueError, ["num_iters"]),
    (lambda: shared_em_routing(*SHARED_EM, num_iters=0), ValueError, ["num_iters"]),
    (lambda: ConvEM(2, 3, num_iters=0), ValueError, ["num_iters"]),
    (lambda: ConvEM(2, 3, pose_size=1), ValueError, ["pose_size"]),
    (lambda: ClassEM(2, 3, num_iters=0), ValueError, ["num_iters"]),
    (lambda: SharedEM(**SHARED, num_iters=0), ValueError, ["num_iters"]),
    (lambda: idpa_routing(zeros(1, 2, 3, 4), 0), ValueError, ["num_iters"]),
    (lambda: FCIDPA(3, 2, 5), ValueError, ["square", "pose='vector'"]),
    (lambda: ConvIDPA(3, 2, 16, 4), ValueError, ["square", "pose='vector'"]),
    (lambda: FCIDPA(3, 2, pose="tensor"), ValueError, ["matrix", "vector"]),
    (lambda: ConvIDPA(3, 2, parent_init="ones"), ValueError, ["zero", "random", "learned"]),
    (lambda: FCIDPA(3, 2, num_iters=0), ValueError, ["num_iters", "at least 1"]),
    (lambda: IDPAStack(OrderedDict(a=FCIDPA(3, 2)), 0), ValueError, ["num_iters"]),
    (lambda: IDPAStack(OrderedDict(a=FCIDPA(3, 2)), routing="parallel"), ValueError, ["sequential"]),
    (lambda: CapConv(6, 8, groups=4), ValueError, ["multiples", "groups"]),
    (lambda: CapConv(**GROUPED, coefficients="mine"), ValueError, ["own", "cross", "both"]),
    (lambda: CapConv(**GROUPED, mode="aide"), ValueError, ["master", "master_aide"]),
    (lambda: CapConv(**GROUPED, kernel_size=2), ValueError, ["kernel_size", "odd"]),
    (lambda: ConvSelfRouting(2, 3, 4, 0), ValueError, ["out_dim", "poses"]),
    (lambda: PrimaryCaps2d(3, 4, 8, 3, activation="relu"), ValueError, ["activation", "relu"]),
    (lambda: engine_report(FCIDPA(6, 3, 4), mode="graph"), ValueError, ["eager", "compiled", "graph"]),
    (lambda: RoutingPool2d(0), ValueError, ["caps_dim"]),
    (lambda: RoutingPool2d(activation="relu"), ValueError, ["activation", "relu"]),
    (lambda: RoutingPool2d(output_size=0), ValueError, ["output_size"]),
    (lambda: RoutingPool2d(output_size=2, flatten=True), ValueError, ["flatten", "output_size"]),
    (lambda: routing_pool(zeros(1, 2, 3, 4), num_iters=0), ValueError, ["num_iters"]),
    (lambda: routing_pool(zeros(1, 2, 3, 4), lam=-1.0), ValueError, ["lam", "-1.0"]),
    (lambda: routing_caps(zeros(1, 2, 3, 4), zeros(5, 8, 6), activation="sq"), ValueError, ["squash", "sq"]),
    # inputs
    (lambda: RoutingPool2d(5)(zeros(1, 12, 2, 2)), AssertionError, ["caps_dim=5"]),
    (lambda: RoutingPool2d(5, lam=0.0)(zeros(1, 12, 2, 2)), AssertionError, ["caps_dim=5"]),
    (lambda: DynamicRouting(**VOTES)(zeros(2, 3, 4)), AssertionError, ["number", "capsules"]),
    (lambda: DynamicRouting(**VOTES)(zeros(2, 2, 5)), AssertionError, ["dimension"]),
    (lambda: SelfAttentionRouting(**VOTES)(zeros(2, 3, 4)), AssertionError, ["number", "capsules"]),
    (lambda: SelfAttentionRouting(**VOTES)(zeros(2, 2, 5)), AssertionError, ["dimension"]),
    (lambda: SelfRouting(**VOTES)(zeros(2, 3, 4), zeros(2, 3)), AssertionError, ["number", "capsules"]),
    (lambda: SelfRouting(**VOTES)(zeros(2, 2, 5), zeros(2, 2)), AssertionError, ["dimension"]),
    (lambda: HeinsenRouting(**VOTES)(zeros(2, 3, 4)), AssertionError, ["number", "capsules"]),
    (lambda: HeinsenRouting(0, 4, 3, 4)(zeros(2, 3, 5)), AssertionError, ["dimension"]),
    (lambda: ConvSelfRouting(2, 3, 4, 5)(zeros(1, 6, 5, 5)), AssertionError, ["channels"]),
    (lambda: Conv3dDynamicRouting(3, 2, 4, 3)(zeros(1, 4, 3, 3)), AssertionError, ["channels"]),
    (lambda: ConvEM(3, 4)(zeros(2, 48, 5, 5)), AssertionError, ["51 channels"]),
    (lambda: ClassEM(3, 4)(zeros(2, 48, 5, 5)), AssertionError, ["51 channels"]),
    (lambda: ConvEM(2, 3)(zeros(2, 34, 2, 2)), AssertionError, ["smaller", "window"]),
    (lambda: ConvDynamicRouting(2, 4, 3, 4)(zeros(2, 8, 2, 2)), AssertionError, ["smaller", "window"]),
]


@pytest.mark.parametrize(("call", "error", "names"), REFUSED)
def test_refusals(call: Callable[[], Any], error: type[Exception], names: list[str]) -> None:
    with refuses(error, names=names):
        call()
