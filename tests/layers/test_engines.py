"""Every engine of every routing layer against the layer's reference, which tests/reference/ holds against loops.

To cover another layer, add it to :data:`CASES`. Fused engines need a GPU or Triton's interpreter: test_triton.py.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from capszoo import create_model
from capszoo.layers import (
    FCIDPA,
    CapConv,
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
    RoutingCaps,
    RoutingPool2d,
    SelfAttentionRouting,
    SelfRouting,
    SharedDynamicRouting,
    SharedEM,
    engine_report,
)
from capszoo.layers._native.build import compiler
from capszoo.layers._triton.ops import fused_pass
from capszoo.layers.engine import Engine, Reference, RoutingLayer
from capszoo.layers.engine_choice import TARGETS, record_engines, use_engines
from capszoo.layers.idpa.blocked import idpa_pass
from capszoo.layers.tuning import TUNING, tuned
from tests.support import LargestTensor
from tests.support.errors import refuses

F64 = torch.float64
#: largest deviation of an engine from the reference, as a share of the largest value
ATOL = {F64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """A small module with routing.

    Attributes:
        name: of the case.
        build: the module, which is then put into float64 and shaken.
        size: of its input, without the batch; a module with several inputs has several sizes.
        tuning: thresholds that make blocks which divide neither the batch (7) nor the children.
        route: poses, activations and couplings; by default ``module.route(*x)``.
        huge: scale of inputs from which all results are finite.
    """

    name: str
    build: Callable[[], nn.Module]
    size: tuple[int, ...] | tuple[tuple[int, ...], ...]
    tuning: dict[str, int] = field(default_factory=dict)
    route: Callable[..., Any] = lambda module, *x: module.route(*x)
    huge: float = 1e6

    def inputs(self, batch: int) -> list[Tensor]:
        sizes = self.size if isinstance(self.size[0], tuple) else (self.size,)
        return [torch.randn(batch, *size, dtype=F64, requires_grad=True) for size in sizes]  # type: ignore[misc]

    def module(self) -> nn.Module:
        """In float64, with parameters away from their special initial values."""
        torch.manual_seed(0)
        module = self.build().double().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return module


def idpa_route(layer: Any, x: Tensor) -> Any:
    """Three iterations; the children are those of one iteration."""
    caps = x.permute(0, 2, 3, 1).unflatten(-1, [layer.in_caps, layer.in_dim]) if x.dim() == 4 else x
    poses, _, couplings = layer.route([caps], [], layer.num_iters)
    return poses, couplings


def idpa_stack(num_iters: int, routing: str, pose: str = "matrix", **options: Any) -> IDPAStack:
    first = {"in_dim": 4, "out_dim": 4, "pose": pose, **options}
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", ConvIDPA(2, 3, kernel_size=2, stride=2, **first)),
        ("conv2", ConvIDPA(3, 5, kernel_size=2, **first)),
        ("classes", FCIDPA(5, 3, **first)),
    ]
    return IDPAStack(OrderedDict(layers), num_iters, routing)


class Packed(nn.Module):
    """A layer of EM routing on children whose activations, the last channels, are made positive."""

    def __init__(self, layer: nn.Module, channels: int) -> None:
        super().__init__()
        self.layer, self.channels = layer, channels

    def _children(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, : self.channels], x[:, self.channels :].sigmoid()], dim=1)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self._children(x))

    def route(self, x: Tensor) -> Any:
        return self.layer.route(self._children(x))


class PackedShared(Packed):
    """The same for :class:`SharedEM`, whose activations are an input of their own."""

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        groups = self.layer.groups
        return x[:, : self.channels].unflatten(1, [groups, -1]), x[:, self.channels :].sigmoid()

    def forward(self, x: Tensor) -> Any:
        return self.layer(*self._split(x))

    def route(self, x: Tensor) -> Any:
        return self.layer.route(*self._split(x))


class PackedChildren(nn.Module):
    """A fully connected layer on children ``[b, i, d + 1]`` whose activations, the last column, are made positive."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x[..., :-1], x[..., -1].sigmoid())

    def route(self, x: Tensor) -> Any:
        return self.layer.route(x[..., :-1], x[..., -1].sigmoid())


#: blocks of three rows of the first case
SELF_ROUTING = {"self_routing_block_elements": 3 * 5 * 3}

EM = {
    "em_blocked_min_votes": 0,
    "em_block_votes": 5 * 8 * 3 * 4,
    "em_chunk_votes": 4 * 8 * 3 * 4,
    "em_shared_block_elements": 200,
}

#: blocks of three images
DYNAMIC = {"dynamic_block_votes": 3 * 7 * 4 * 5}

IDPA = {"idpa_block_votes": 150, "idpa_chunk_votes": 300, "idpa_masked_max_parents": 18}

CASES = [
    Case("idpa conv", lambda: ConvIDPA(2, 3, 9, kernel_size=3, num_iters=3), (18, 4, 3), IDPA, idpa_route),
    Case(
        "idpa conv, padding",
        lambda: ConvIDPA(2, 4, 4, stride=2, padding=1, num_iters=2, parent_init="learned"),
        (8, 4, 5),
        IDPA,
        idpa_route,
    ),
    Case(
        "idpa conv, vectors",
        lambda: ConvIDPA(2, 3, 3, 5, kernel_size=2, pose="vector", num_iters=3),
        (6, 4, 3),
        IDPA,
        idpa_route,
    ),
    Case("idpa fc", lambda: FCIDPA(7, 18, 4, num_iters=3), (7, 4), IDPA, idpa_route),
    Case("idpa fc, vectors", lambda: FCIDPA(7, 5, 3, 2, 3, "vector"), (7, 3), IDPA, idpa_route),
    Case(
        "idpa stack",
        lambda: idpa_stack(4, "concurrent"),
        (5, 4, 2, 4),
        IDPA,
        lambda stack, x: stack.run_full(x),
    ),
    Case(
        "idpa stack, sequential",
        lambda: idpa_stack(3, "sequential", "vector", parent_init="learned"),
        (5, 4, 2, 4),
        IDPA,
        lambda stack, x: stack.run_full(x),
    ),
    Case("capconv", lambda: EncapModule(4, 8, 2, 2, groups=4), (4, 5, 5), route=lambda module, x: module(x)),
    Case(
        "capconv, master alone",
        lambda: EncapModule(4, 8, 2, 2, groups=4, mode="master"),
        (4, 5, 5),
        route=lambda module, x: module(x),
    ),
    Case("dynamic", lambda: DynamicRouting(7, 3, 4, 5, 3, weight_std=0.5), (7, 3), DYNAMIC),
    Case(
        "dynamic, over children, learned",
        lambda: DynamicRouting(7, 3, 4, 8, 3, "children", "learned", 0.5),
        (7, 3),
        DYNAMIC,
    ),
    Case(
        "dynamic, random start",
        lambda: DynamicRouting(7, 3, 4, 5, 2, init="random", weight_std=0.5),
        (7, 3),
        DYNAMIC,
    ),
    Case(
        "dynamic conv",
        lambda: ConvDynamicRouting(2, 3, 4, 6, stride=2, padding=1, weight_std=0.5),
        (6, 5, 4),
        DYNAMIC,
    ),
    Case("dynamic, one iteration", lambda: DynamicRouting(7, 3, 4, 5, 1, init="learned"), (7, 3)),
    Case("dynamic conv 3d", lambda: Conv3dDynamicRouting(3, 2, 4, 5, padding=1), (6, 4, 3)),
    Case("dynamic, shared", lambda: SharedDynamicRouting(3, 4, 5, 2, init="learned", positions=6), (3, 4, 6)),
    Case("em conv", lambda: Packed(ConvEM(2, 3, 2, 2, 1, 3), 8), (10, 4, 4), EM, huge=1e4),
    Case(
        "em conv, normalised",
        lambda: Packed(ConvEM(2, 3, 2, 2, 1, 2, normalize_cost=True), 8),
        (10, 4, 4),
        EM,
        huge=1e4,
    ),
    Case("self-routing", lambda: PackedChildren(SelfRouting(5, 3, 4, 2)), (5, 4), SELF_ROUTING),
    Case(
        "self-routing conv",
        lambda: Packed(ConvSelfRouting(2, 3, 4, 5, stride=2, padding=1), 6),
        (8, 5, 4),
        SELF_ROUTING,
    ),
    Case("em class", lambda: Packed(ClassEM(2, 3, 2, 3), 8), (10, 3, 2), EM, huge=1e4),
    Case("self-attention", lambda: SelfAttentionRouting(7, 3, 4, 5), (7, 3)),
    Case("heinsen", lambda: HeinsenRouting(7, 3, 4, 5), (7, 3), huge=1e5),
    Case("heinsen, any number", lambda: HeinsenRouting(0, 16, 4, 1, 3), (7, 16), huge=1e5),
    Case("routing pool", lambda: RoutingPool2d(4), (8, 4, 4)),
    Case("routing pool, cells", lambda: RoutingPool2d(4, output_size=2, activation="squash"), (8, 4, 4)),
    Case("routing caps", lambda: RoutingCaps(2, 4, 3, lam=15.0), (8, 4, 4)),
    Case("em, shared", lambda: PackedShared(SharedEM(3, 2, 7, 4), 6), (9, 5), EM),
]


def routing_layers(module: nn.Module) -> list[RoutingLayer]:
    return [m for m in module.modules() if isinstance(m, RoutingLayer)]


def engines_of(case: Case) -> dict[str, type[Engine]]:
    """Those that run here, by name: not the reference, nor the fused ones, nor without a compiler the native ones."""
    found = {e.name: e for layer in routing_layers(case.build()) for e in layer.engines}
    absent = ("reference", "fused") if compiler() else ("reference", "fused", "native")
    return {name: e for name, e in found.items() if name not in absent}


#: cases that an engine refuses
REFUSED = {
    "native": ("dynamic, over children", "dynamic, random start", "dynamic, one iteration"),
    "blocked": ("dynamic, one iteration",),
    "one_convolution": ("capconv: ",),
}

PAIRS = [
    pytest.param(case, e, id=f"{case.name}: {name}")
    for case in CASES
    for name, e in engines_of(case).items()
    if not f"{case.name}: {name}".startswith(REFUSED.get(name, ()))
]
#: compiled in the quick tests
QUICK = ("idpa stack: native", "dynamic: native", "dynamic: blocked", "em conv: native")


def flat(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def routed(case: Case, name: str, module: nn.Module, x: Sequence[Tensor]) -> list[Tensor]:
    """Poses, activations and couplings by an engine; fails if no layer used it."""
    with tuned(**case.tuning), use_engines(name), record_engines() as choices:
        given = flat(case.route(module, *x))
    assert name in {choice.engine.name for choice in choices}, f"{name} was not used"
    return given


def gradients(values: Sequence[Tensor], inputs: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Those of a random functional of float results; zero where a parameter has no part."""
    torch.manual_seed(1)
    terms = [(v.double() * torch.randn(v.shape, dtype=F64)).sum() for v in values if v.requires_grad]
    grads = torch.autograd.grad(
        torch.stack(terms).sum(), list(inputs), allow_unused=True, create_graph=create_graph
    )
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True)]


def deviation(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest, as a share of each tensor's largest value (or of 1e-3 where there is none)."""
    assert [t.shape for t in found] == [t.shape for t in expected]
    pairs = [(f.double(), e.double()) for f, e in zip(found, expected, strict=True) if e.numel()]
    return largest([(f - e).abs().max() / e.abs().max().clamp(min=1e-3) for f, e in pairs])


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest root mean square deviation of a tensor, as a share of that tensor's root mean square."""
    pairs = [(f.double(), e.double()) for f, e in zip(found, expected, strict=True) if e.numel()]
    return largest([(f - e).norm() / e.norm().clamp(min=1e-6) for f, e in pairs])


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def largest(values: list[Tensor]) -> float:
    """NaN if one of the values is (which Python's ``max`` is not)."""
    return torch.stack(values).max().item()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh() -> Iterator[None]:
    """What was compiled is forgotten afterwards."""
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reset_parameters_fills_every_parameter_and_buffer(case) -> None:
    """As torch.nn's layers do: a network that was built on the meta device becomes one with fresh weights."""
    module, fresh = case.build(), {}
    for name, tensor in module.state_dict().items():
        fresh[name] = tensor.double().std(correction=0)
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    for name, tensor in module.state_dict().items():
        assert not tensor.isnan().any() and (tensor != -1).all(), name
        deviation = tensor.double().std(correction=0)
        assert 0.3 * fresh[name] <= deviation <= 3 * fresh[name], name


@pytest.mark.parametrize(("case", "engine"), PAIRS)
@pytest.mark.parametrize("batch", [1, 7])
def test_float64(case: Case, engine: type[Engine], batch: int) -> None:
    """Values, couplings and gradients of everything."""
    module, x = case.module(), case.inputs(batch)
    inputs = [*x, *module.parameters()]
    expected, found = (routed(case, name, module, x) for name in ("reference", engine.name))
    assert deviation(found, expected) < ATOL[F64]
    grads = gradients(expected, inputs)
    assert sum(bool(g.abs().max() > 0) for g in grads) > len(grads) / 2
    assert deviation(gradients(found, inputs), grads) < 1e-9


@pytest.mark.parametrize(
    ("case", "engine", "dtype"),
    [
        pytest.param(*p.values, dtype, id=f"{p.id}, {str(dtype)[6:]}")
        for p in PAIRS
        for dtype in ATOL
        if dtype != F64 and (dtype == torch.float32 or p.values[1].name != "recompute")  # type: ignore[attr-defined]
    ],
)
def test_precision(case: Case, engine: type[Engine], dtype: torch.dtype) -> None:
    """As near to float64 as its class says, or as the reference is in the same type; types are kept."""
    module, x = case.module().to(dtype), [t.detach().to(dtype) for t in case.inputs(7)]
    expected, found = (routed(case, name, module, x) for name in ("reference", engine.name))
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    exact = routed(case, "reference", module.double(), [t.double() for t in x])
    assert distance(found, exact) < max(ATOL[dtype], 2 * distance(expected, exact))


@pytest.mark.parametrize(("case", "engine"), PAIRS)
@pytest.mark.parametrize(
    ("children", "weights"),
    [(F64, torch.float32), (torch.float32, F64), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_children_and_weights_of_different_types(
    case: Case, engine: type[Engine], children: torch.dtype, weights: torch.dtype
) -> None:
    """An engine refuses what the reference refuses, and else returns its values in the same types."""
    module, x = case.module().to(weights), [t.detach().to(children) for t in case.inputs(7)]
    found = []
    for name in ("reference", engine.name):
        with tuned(**case.tuning), use_engines(name):
            try:
                found.append(flat(case.route(module, *x)))
            except RuntimeError as error:
                assert re.search("type", str(error))
                found.append([])
    assert [t.dtype for t in found[1]] == [t.dtype for t in found[0]]
    if found[0]:
        assert distance(found[1], found[0]) < ATOL[torch.bfloat16]


@pytest.mark.parametrize(("case", "engine"), PAIRS)
def test_autocast(case: Case, engine: type[Engine]) -> None:
    """Under bfloat16 autocast, where it can run: as near to float64 as its class says, or as the reference is."""
    module, x = case.module().float(), [t.detach().float() for t in case.inputs(7)]
    with torch.autocast("cpu", torch.bfloat16), tuned(**case.tuning), use_engines(engine.name):
        with record_engines() as choices:
            found = flat(case.route(module, *x))
        if all(choice.engine.name != engine.name for choice in choices):
            assert all(engine.refusal(choice.layer, choice.call, True) for choice in choices)
            return
        with use_engines("reference"):
            expected = flat(case.route(module, *x))
    assert [t.dtype for t in found] == [t.dtype for t in expected]  # whichever engine a batch's size selects
    exact = routed(case, "reference", module.double(), [t.double() for t in x])
    allowed = max(ATOL[torch.bfloat16], 2 * distance(expected, exact))
    assert distance(found, exact) < allowed


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if any(not layer.autocasts for layer in routing_layers(case.build()))],
    ids=lambda case: case.name,
)
def test_float32_inside(case: Case) -> None:
    """Autocast changes nothing, and a layer in half precision hardly more than round activations and results."""
    module, x = case.build(), [t.detach().bfloat16().float() for t in case.inputs(2)]
    expected = flat(case.route(module, *x))
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(flat(case.route(module, *x)), expected)
    module = module.bfloat16()
    half = flat(case.route(module, *(t.bfloat16() for t in x)))
    assert distance(half, flat(case.route(module.float(), *x))) < 0.01


@pytest.mark.parametrize(("case", "engine"), PAIRS)
def test_checkpointing(case: Case, engine: type[Engine]) -> None:
    """Activation checkpointing lets a backward pass read its saved tensors once."""
    module, x = case.module(), case.inputs(7)
    inputs = [*x, *module.parameters()]
    expected = gradients(routed(case, engine.name, module, x), inputs)
    with tuned(**case.tuning), use_engines(engine.name):
        found = checkpoint(lambda *x: tuple(flat(case.route(module, *x))), *x, use_reentrant=False)
        grads = gradients(found, inputs, create_graph=True)  # as for a second gradient
    assert deviation(grads, expected) < 1e-9


@pytest.mark.parametrize(("case", "engine"), PAIRS)
@pytest.mark.parametrize("scale", [0.0, 1e5], ids=["zero", "huge"])
def test_zero_and_huge(case: Case, engine: type[Engine], scale: float) -> None:
    module = case.module().float()
    x = [(t.detach() * scale).float().requires_grad_() for t in case.inputs(2)]
    found = routed(case, engine.name, module, x)
    assert all(torch.isfinite(t).all() for t in [*found, *gradients(found, [*x, *module.parameters()])])


@pytest.mark.parametrize(("case", "engine"), PAIRS)
def test_no_images(case: Case, engine: type[Engine]) -> None:
    """An empty batch goes to the reference, whatever is forced or pays: empty results, and gradients of zero."""
    module, x = case.module(), case.inputs(0)
    with tuned(**case.tuning), use_engines(engine.name), record_engines() as choices:
        found = flat(case.route(module, *x))
    assert {choice.engine for choice in choices} == {Reference}
    assert "needs at least one image" in choices[0].refused().values()
    assert all(not t.numel() for t in found)
    assert all(not g.any() for g in gradients(found, [*x, *module.parameters()]))


@pytest.mark.parametrize(("case", "engine"), PAIRS)
def test_couplings_change_nothing(case: Case, engine: type[Engine]) -> None:
    """forward, which asks for no couplings, gives what route does; without gradients too."""
    module, x = case.module(), case.inputs(7)
    with tuned(**case.tuning), use_engines(engine.name), record_engines() as choices:
        plain, first = flat(module(*x)), len(choices)
        with torch.no_grad():
            frozen = flat(module(*x))
    for part in (choices[:first], choices[first:]):
        assert engine.name in {choice.engine.name for choice in part}
    with use_engines("reference"):
        expected = flat(module(*x))
    assert deviation(plain, expected) < ATOL[F64] and deviation(frozen, expected) < ATOL[F64]


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        p
        for p in PAIRS
        if not re.search("chunked|masked|frozen|convolution|recompute|dynamic.*: blocked", p.id)
    ],
)
def test_keeps_no_votes(case: Case, engine: type[Engine]) -> None:
    """No tensor is as large as the votes of a layer, and none is kept for the backward pass."""
    module, x = case.module(), case.inputs(64)
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with tuned(**case.tuning), use_engines(engine.name), record_engines() as choices:
        with LargestTensor() as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            module(*x)
    used = [choice.call for choice in choices if choice.engine is engine]
    most = max(call.votes for call in used)
    floor = max(call.routings * call.children * call.child_dim for call in used)
    assert seen.numel < max(most, floor + 1) or seen.numel <= floor
    if most > 2 * floor:
        assert max(saved.values()) <= max(most // 2, floor)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_leaves_python(case: Case) -> None:
    """Scripted, traced by FX and exported, a module is its reference to the last bit, whatever is forced or pays."""
    module, x = case.module(), [t.detach() for t in case.inputs(2)]
    one = [t[:1] for t in x]
    with use_engines("reference"):
        expected, first = flat(module(*x)), flat(module(*one))
    names = [name for name, engine in engines_of(case).items() if not engine.targets]
    with tuned(idpa_blocked_min_votes=0, em_blocked_min_votes=0), use_engines(*names or ["reference"]):
        plain = [torch.jit.script(module), torch.fx.symbolic_trace(module)]
        exported = torch.export.export(module, tuple(x)).module()
    for found in (*(flat(variant(*x)) for variant in plain), flat(exported(*x))):
        assert equal(found, expected)
    for variant in plain:  # no batch size is a constant
        assert equal(flat(variant(*one)), first)
    assert [t.shape for t in flat(module.to("meta")(*(t.to("meta") for t in x)))] == [
        t.shape for t in expected
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_awkward_inputs(case: Case, dtype: torch.dtype) -> None:
    """Finite results and gradients, of the input's type; half precision is near float32."""
    scale = 30.0 if dtype == torch.float16 else case.huge  # float16 ends at 65504
    random = [t.detach() for t in case.inputs(2)]
    module = case.build().to(dtype)
    for kind, values in {
        "zero": [0 * t for t in random],
        "constant": [0 * t + 0.5 for t in random],
        "absent": [0 * t - 20 for t in random],  # of children with activations: none is there
        "random": random,
        "huge": [t * scale for t in random],
    }.items():
        x = [t.to(dtype).requires_grad_() for t in values]
        found = flat(module(*x))
        assert all(t.dtype == dtype and t.isfinite().all() for t in found), kind
        if kind == "random":
            exact = flat(copy.deepcopy(module).float()(*(t.float() for t in x)))
            assert distance(found, exact) < 0.05
        if dtype == torch.float16 and kind in ("absent", "huge"):
            continue  # gradients may be beyond 65504
        grads = torch.autograd.grad(
            torch.stack([t.float().sum() for t in found]).sum(), [*x, *module.parameters()], allow_unused=True
        )
        assert all(g.isfinite().all() for g in grads if g is not None), kind


#: An engine of graphs for each layer; the layer's other options are in the slow sweep.
WRITTEN = (
    "idpa conv: chunked",
    "idpa fc: masked",
    "idpa stack: chunked",
    "em conv: chunked",
    "em class: frozen",
)


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        pytest.param(*p.values, id=p.id, marks=() if p.id in WRITTEN else pytest.mark.slow)
        for p in PAIRS
        if p.values[1].targets  # type: ignore[attr-defined]
    ],
)
def test_writes_graphs(case: Case, engine: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported for its target with a free batch; frozen weights are constants and not part of a checkpoint."""
    module, x = case.module().requires_grad_(False), [t.detach() for t in case.inputs(2)]
    expected, keys = flat(module(*x)), list(module.state_dict())
    for layer in routing_layers(module):
        layer.freeze(engine.targets[0])
    assert list(module.state_dict()) == keys
    monkeypatch.setattr(engine, "prepare", None)
    batch = torch.export.Dim("batch", min=1, max=64)
    with tuned(**case.tuning), use_engines(target=engine.targets[0]), record_engines() as choices:
        program = torch.export.export(module, tuple(x), dynamic_shapes=tuple({0: batch} for _ in x))
    assert engine in {choice.engine for choice in choices}
    # layers of another kind have an engine of their own
    assert all(choice.engine is Reference or choice.engine.targets for choice in choices)
    assert deviation(flat(program.module()(*x)), expected) < ATOL[F64]
    more = [torch.cat([t, t, t]) for t in x]
    assert deviation(flat(program.module()(*more)), flat(module(*more))) < ATOL[F64]
    assert not any("capszoo" in str(node.target) for node in program.graph.nodes)


COMPILED = [
    pytest.param(*p.values, id=p.id, marks=() if p.id in QUICK else pytest.mark.slow)
    for p in PAIRS
    if "compiled" in p.values[1].modes and not p.values[1].targets  # type: ignore[attr-defined]
]


@pytest.mark.parametrize(("case", "engine"), COMPILED)
def test_compiles(case: Case, engine: type[Engine], fresh: None) -> None:
    """One graph, gradients included."""
    module, x = case.module(), case.inputs(3)
    inputs = [*x, *module.parameters()]
    with tuned(**case.tuning), use_engines(engine.name), record_engines() as choices:
        expected = flat(module(*x))
        eager = len(choices)
        found = flat(torch.compile(module, backend="aot_eager", fullgraph=True)(*x))
    assert engine in [choice.engine for choice in choices[eager:]]
    assert deviation(found, expected) < ATOL[F64]
    assert deviation(gradients(found, inputs), gradients(expected, inputs)) < 1e-9


ONCE = ("idpa fc: blocked", "idpa fc: native", "dynamic: blocked", "dynamic: native", "em conv: blocked")
ONCE += ("em conv: native", "em, shared: blocked", "self-routing: vote_free")
ONCE += ("capconv: recompute", "capconv, master alone: recompute")


@pytest.mark.parametrize(("case", "engine"), [p for p in PAIRS if p.id in ONCE])
def test_a_second_gradient_names_the_remedy(case: Case, engine: type[Engine]) -> None:
    module, x = case.module(), case.inputs(2)
    with tuned(**case.tuning), use_engines(engine.name):
        total = torch.stack([t.square().sum() for t in flat(module(*x))]).sum()
    (grad,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"use_engines\('reference'\)"):
        torch.autograd.grad(grad.sum(), x, allow_unused=True)


BATCHED = ("idpa fc: native", "em conv: native", "capconv: recompute", "capconv, master alone: recompute")


@pytest.mark.parametrize(("case", "engine"), [p for p in PAIRS if p.id in BATCHED])
def test_batched_gradients_name_the_remedy(case: Case, engine: type[Engine]) -> None:
    module, x = case.module(), case.inputs(2)
    with tuned(**case.tuning), use_engines(engine.name):
        out = flat(module(*x))[0]
    with pytest.raises(RuntimeError, match=r"use_engines\('reference'\)"):
        torch.autograd.grad(
            out, x, torch.ones(2, *out.shape, dtype=out.dtype), is_grads_batched=True, allow_unused=True
        )


#: engines in plain operations that compute something twice; a product with a buffer, which has one gradient
UNCOUNTED = ("em, shared: blocked", "dynamic, random start: blocked")
#: not those for exported graphs, nor those that refuse the hooks by which PyTorch's counter finds modules
COUNTED = [
    p
    for p in PAIRS
    if not p.values[1].targets and not str(p.id).startswith("capconv") and p.id not in UNCOUNTED  # type: ignore[attr-defined]
]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("case", "engine"), COUNTED)
def test_flops_are_those_of_the_reference(case: Case, engine: type[Engine], training: bool) -> None:
    counts = []
    for name in ("reference", engine.name):
        module, x = case.module(), [t.detach().requires_grad_(training) for t in case.inputs(7)]
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            values = routed(case, name, module, x)
            if training:
                torch.stack([t.sum() for t in values if t.requires_grad]).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("fresh", [True, False])
def test_flops_of_the_fused_iteration_are_those_of_the_blocked_one(fresh: bool) -> None:
    children, weight = torch.empty(2, 5, 4, 3, 6, device="meta"), torch.empty(12, 3, 4, 3, device="meta")
    parents = torch.empty(24, 4, 6, device="meta")  # 4x3 positions, windows of 2x2 places
    counts = []
    for window in (True, False):
        with FlopCounterMode(display=False) as counter:
            if window:
                fused_pass(children, weight, parents, False, False, 1.0, 2, 1, "none", None, None, 0.0, fresh)
            else:
                idpa_pass(torch.empty(24, 12, 2, 3, device="meta"), weight, parents, fresh, False)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# -- choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_small_layers_use_their_reference(case: Case) -> None:
    module, x = case.module().float(), [t.detach().float() for t in case.inputs(2)]
    with torch.no_grad(), record_engines() as choices:
        module(*x)
    assert choices and {choice.engine for choice in choices} == {Reference}
    for choice in choices:
        assert all(reason.startswith("needs ") for reason in choice.refused().values()), choice.refused()


def subclasses(base: type[Engine]) -> list[type[Engine]]:
    return [base, *(c for child in base.__subclasses__() for c in subclasses(child))]


def test_evidence_of_every_engine() -> None:
    """docs/dev/engines.md has a table under the heading that each engine names, and its command."""
    text = (ROOT / "docs" / "dev" / "engines.md").read_text()
    sections = {part.split("\n", 1)[0].strip("# "): part for part in text.split("\n#")}
    shipped = [e for e in subclasses(Engine) if "name" in vars(e) and e.__module__.startswith("capszoo.")]
    assert len(shipped) >= 4
    for engine in shipped:
        assert engine.evidence in sections, f"{engine.__module__}.{engine.__name__}: {engine.evidence!r}"
        assert "\n|" in sections[engine.evidence], f"{engine.evidence}: no table"
        commands = ("benchmarks/", "No command is on record")
        section = " ".join(sections[engine.evidence].split())
        assert any(part in section for part in commands), f"{engine.evidence}: no command"


def test_force_and_fall_back() -> None:
    layer, x = FCIDPA(6, 3, 4), torch.randn(2, 6, 4)
    with record_engines() as choices:
        for names in (("blocked",), ("fused",), ("fused", "blocked"), ("reference", "blocked")):
            with use_engines(*names):
                layer(x)
        with use_engines("blocked"), use_engines(target="gpu"):
            layer(x)
    # fused cannot run on a CPU: forced, it is passed over
    assert [c.engine.name for c in choices] == ["blocked", "reference", "blocked", "reference", "blocked"]
    with (
        refuses(ValueError, names=["blokced", "blocked"]),
        use_engines("blokced"),
    ):
        pass
    with refuses(ValueError, names=["onnx_cpu"]), use_engines(target="tpu"):
        pass
    assert TARGETS == ("onnx_cpu", "gpu")


def test_autocast_of_another_device() -> None:
    """Layers that compute in float32 leave the input's autocast alone, whatever other devices' is."""
    x = torch.randn(2, 8, 2, 2)
    expected = RoutingPool2d(4)(x)
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert torch.equal(RoutingPool2d(4)(x), expected)
    finally:
        torch.set_autocast_enabled("cuda", before)
    with torch.autocast("cpu", torch.bfloat16):
        assert engine_report(create_model("capsnet_em_norb_small"))


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (CapConv(8, 8, groups=4), (8, 4, 4)),
        (DynamicRouting(64, 8, 10, 16), (64, 8)),
        (FCIDPA(40, 5, 4), (40, 4)),
    ],
    ids=["capconv", "dynamic", "idpa"],
)
def test_per_sample_gradients(layer: Any, size: tuple[int, ...]) -> None:
    """torch.func's transforms take the reference, whose operations have rules for them."""
    layer, x = layer.double().eval(), torch.randn(16, *size, dtype=torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)

    def loss(values: Any, x: torch.Tensor) -> torch.Tensor:
        return (
            torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x[None],))
            .square()
            .sum()
        )

    with tuned(native_min_votes=0, idpa_blocked_min_votes=0, dynamic_native_min_routings=0):
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x)
        for n in (0, 15):
            expected = torch.autograd.grad(loss(values, x[n]), values)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a[n], b)


def test_tuned_is_put_back() -> None:
    before = TUNING.idpa_block_votes
    with pytest.raises(ZeroDivisionError), tuned(idpa_block_votes=3):
        assert TUNING.idpa_block_votes == 3
        _ = 1 // 0
    assert TUNING.idpa_block_votes == before
    with pytest.raises(TypeError), tuned(no_such_threshold=3):
        pass


def test_report() -> None:
    """Every layer by its name, with reasons; thresholds with their values; the model is left as it is."""
    model: Any = nn.Sequential(OrderedDict(routing=FCIDPA(6, 3, 16), drop=nn.Dropout(0.5)))
    model.default_cfg = {"input_size": (6, 16)}
    model.drop.eval()
    (choice,) = engine_report(model, batch=2)
    assert (choice.name, choice.engine) == ("routing", Reference)
    assert choice.call.routings == 2 and not choice.call.grad
    assert f"TUNING.idpa_blocked_min_votes ({TUNING.idpa_blocked_min_votes:,})" in choice.refused()["blocked"]
    (choice,) = engine_report(model, batch=2**20, training=True)
    assert choice.engine.name == ("native" if compiler() else "blocked") and choice.call.grad
    assert model.training and not model.drop.training and next(model.parameters()).device.type == "cpu"
    choice = engine_report(model, device="cuda")[0]
    assert choice.engine.name == "fused" or choice.refused()["fused"] in (
        "needs Triton, which is not installed",
        "needs compute capability 8",
    )


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize(
    "half", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["float32", "autocast"]
)
@pytest.mark.parametrize(
    ("build", "size"),
    [
        (lambda: EncapModule(8, 16, 2, 1, groups=4), (8, 6, 6)),
        (lambda: DynamicRouting(64, 8, 4, 16), (64, 8)),
        (lambda: RoutingPool2d(4), (8, 3, 3)),
    ],
    ids=["capconv", "dynamic", "routing_pool"],
)
def test_the_report_is_what_runs(
    build: Callable[[], nn.Module], size: tuple[int, ...], half: bool, mode: str
) -> None:
    model = build()
    run: Any = torch.compile(model, backend="aot_eager") if mode == "compiled" else model
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        reported = engine_report(model, 2, training=True, input_size=size, mode=mode)
        with record_engines() as choices:
            run(torch.randn(2, *size))
    assert [c.engine for c in reported] == [c.engine for c in choices] != []
    assert [c.call.mode for c in reported] == [c.call.mode for c in choices]


def test_refusals_say_what_an_engine_needs() -> None:
    for options, reason in (
        ({"softmax_over": "children"}, "needs a softmax over the parents"),
        ({"init": "learned"}, "needs first logits of zero"),
    ):
        (choice,) = engine_report(DynamicRouting(8, 4, 3, 4, **options), 2, input_size=(8, 4))
        assert choice.refused()["native"] == reason


def test_the_report_takes_a_model_s_own_channels_and_size() -> None:
    net = create_model("resnet20_idpa", in_chans=1, img_size=40)
    assert (
        [c.name for c in engine_report(net)]
        == [c.name for c in engine_report(net, input_size=(1, 40, 40))]
        != []
    )
