"""The Triton kernels on a CPU, in Triton's interpreter: run by test_triton.py, in a process of its own.

The interpreter is chosen when Triton is imported, by TRITON_INTERPRET=1, for the whole process. It runs the kernels
that a GPU would, with their masks, loops and reductions, on NumPy arrays; only the rounding inside a product differs.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn
from torch._dynamo.backends.debugging import aot_eager

from capszoo import layers
from capszoo.layers import _triton
from capszoo.layers._triton import launch
from capszoo.layers._triton.ops import fused_norm, fused_norm_backward, fused_pass, fused_pass_backward
from capszoo.layers.idpa import engines
from tests.reference import idpa as naive_idpa
from tests.support.layers import describe

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before Triton is imported"

F64 = torch.float64

#: ``|found - expected| / |expected|`` over a whole tensor, against float64 on the same (rounded) inputs.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}

#: b, h, w, types, kernel, stride, parents, p, q, r: matrix and vector poses, odd sizes, one of everything.
SHAPES = {
    "conv 4x4": (2, 5, 6, 3, 3, 2, 5, 4, 4, 4),
    "conv 3x3, overlapping": (1, 4, 5, 2, 2, 1, 3, 3, 3, 3),
    "conv 6x6": (1, 3, 3, 1, 3, 1, 2, 6, 6, 6),
    "connected 4x4": (3, 1, 1, 11, 1, 1, 10, 4, 4, 4),
    "connected vectors": (5, 1, 1, 7, 1, 1, 10, 1, 8, 16),
    "single": (1, 1, 1, 1, 1, 1, 1, 2, 2, 2),
}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(_triton, "_on_cpu", True)
    yield


#: What follows the sums.
NORMS = ("none", "layer")

EPS = 1e-5


def problem(
    shape: tuple[int, ...], dtype: torch.dtype, norm: str = "none"
) -> tuple[list[Tensor], tuple[float, int, int]]:
    """Children, weights and parents, for LayerNorm its weight and bias (float32); scale, kernel and stride."""
    b, h, w, i, k, stride, j, p, q, r = shape
    routings = b * ((h - k) // stride + 1) * ((w - k) // stride + 1)
    children = torch.randn(b, h, w, i, p * q)
    weight = torch.randn(k * k * i, q, j, r) * q**-0.5
    parents = torch.randn(routings, j, p * r)
    tensors = [t.to(dtype) for t in (children, weight, parents)]
    if norm == "layer":
        tensors += [1 + torch.randn(p * r) / 4, torch.randn(p * r)]
    return [t.requires_grad_() for t in tensors], ((p * r) ** -0.5, k, stride)


def routed(
    tensors: list[Tensor],
    options: tuple[float, int, int],
    couplings: bool = False,
    norm: str = "none",
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    affine = tensors[3:] if norm == "layer" else (None, None)
    return fused_pass(*tensors[:3], couplings, keep, *options, norm, *affine, EPS)


def normalised(sums: Tensor, norm: str, *affine: Tensor) -> Tensor:
    """``[n, j, e]``, capsule by capsule."""
    if norm == "none" or sums.numel() == 0:
        return sums
    rows = [naive_idpa.layer_norm(row, *affine, EPS) for row in sums.flatten(0, 1)]
    return torch.stack(rows).reshape(sums.shape)


def plainly(tensors: list[Tensor], options: tuple[float, int, int], norm: str) -> tuple[Tensor, Tensor]:
    """The pass with its votes formed, ``[n, i, j, e]``."""
    children, weight, parents, *affine = tensors
    scale, k, stride = options
    c, q, j, r = weight.shape
    windows = children.unfold(1, k, stride).unfold(2, k, stride)  # [b, h', w', i, d, k, l]
    windows = windows.permute(0, 1, 2, 5, 6, 3, 4).reshape(parents.shape[0], c, -1, q)
    votes = torch.einsum("nipq,iqjr->nijpr", windows, weight).flatten(3)
    couplings = (torch.einsum("nije,nje->nij", votes, parents) * scale).softmax(dim=-1)
    return normalised(torch.einsum("nij,nije->nje", couplings, votes), norm, *affine), couplings


def error(found: Tensor, expected: Tensor) -> float:
    """NaN and what was never written do not pass."""
    distance = float((found.detach().to(F64) - expected.detach()).norm() / expected.norm().clamp(min=1e-12))
    return distance if torch.isfinite(found).all() else float("inf")


def check(
    tensors: list[Tensor], options: tuple[float, int, int], couplings: bool, norm: str = "none"
) -> None:
    dtype = tensors[0].dtype
    # gradients of four numbers, through four roundings that nothing averages (the reference in bfloat16: up to 1.7e-2)
    tolerance = TOLERANCE[dtype] * (3 if tensors[0].numel() < 8 else 1)
    exact = [t.detach().to(F64).requires_grad_() for t in tensors]
    expected = plainly(exact, options, norm)[: 1 + couplings]
    found = routed(tensors, options, couplings, norm)[: 1 + couplings]
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == dtype and f.shape == e.shape
        assert error(f, e) < tolerance
    seeds = [torch.randn_like(f) for f in found]
    gradients = torch.autograd.grad(found, tensors, seeds)
    exact_gradients = torch.autograd.grad(expected, exact, [s.to(F64) for s in seeds])
    for t, f, e in zip(tensors, gradients, exact_gradients, strict=True):
        assert f.dtype == t.dtype and f.shape == e.shape
        if e.norm() > 1e-9:  # with one parent, couplings are constant and so is what follows from them
            assert error(f, e) < tolerance
        else:
            assert f.abs().max() < 1e-5


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients(shape: tuple[int, ...], norm: str) -> None:
    check(*problem(shape, torch.float32, norm), couplings=True, norm=norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_half_types(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With LayerNorm, as in the layers."""
    check(*problem(shape, dtype, "layer"), couplings=True, norm="layer")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [SHAPES["conv 4x4"], (20, 1, 1, 19, 1, 1, 10, 1, 8, 16)], ids=str)
def test_loops_in_parts(shape: tuple[int, ...], norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many multiprocessors and little work: loops are split, and their parts added up, before the norm."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    check(*problem(shape, torch.float32, norm), couplings=True, norm=norm)


def test_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tiles that are tried on a GPU give the same numbers."""
    tensors, options = problem((1, 3, 3, 3, 2, 1, 9, 4, 4, 4), torch.float32, "layer")
    real = launch.configs
    for place in range(3):
        monkeypatch.setattr(
            launch, "configs", lambda *sizes, place=place: real(*sizes)[place:] or real(*sizes)
        )
        launch._tuned.cache_clear()
        check(tensors, options, couplings=False, norm="layer")
    launch._tuned.cache_clear()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_extremes(scale: float, norm: str) -> None:
    """Children that are all zero, and agreements whose exponentials would overflow."""
    tensors, options = problem(SHAPES["connected 4x4"], torch.float32, norm)
    x = (tensors[0].detach() * scale).requires_grad_()
    poses, couplings, _ = routed([x, *tensors[1:]], options, True, norm)
    assert torch.isfinite(poses).all()
    torch.testing.assert_close(couplings.sum(dim=-1), torch.ones_like(couplings[..., 0]))
    for grad in torch.autograd.grad(poses.square().sum(), [x, *tensors[1:]]):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("norm", NORMS)
def test_no_routings(norm: str) -> None:
    tensors, options = problem((0, 1, 1, 3, 1, 1, 4, 2, 2, 2), torch.float32, norm)
    poses = routed(tensors, options, norm=norm)[0]
    assert poses.shape == (0, 4, 4)
    grads = torch.autograd.grad(poses.sum(), tensors)
    assert [g.shape for g in grads] == [t.shape for t in tensors] and not any(g.any() for g in grads)


def test_strides_and_mismatches() -> None:
    tensors, options = problem(SHAPES["conv 4x4"], torch.float32, "layer")
    expected = routed(tensors, options, norm="layer")[0]
    turned = [t.detach().transpose(0, -1).contiguous().transpose(0, -1) for t in tensors[:3]]
    turned += [t.detach().repeat_interleave(2)[::2] for t in tensors[3:]]
    torch.testing.assert_close(routed(turned, options, norm="layer")[0], expected)
    with pytest.raises(ValueError, match="do not belong together"):
        routed([tensors[0], tensors[1][1:], tensors[2]], options)
    with pytest.raises(ValueError, match="cast one of them"):
        routed([tensors[0], tensors[1].half(), tensors[2]], options)
    with pytest.raises(ValueError, match="no use for a weight"):
        routed([*tensors[:3], tensors[3][1:], tensors[4]], options, norm="layer")
    with pytest.raises(ValueError, match="must be 'none' or 'layer'"):
        routed(tensors, options, norm="batch")


def test_sums_are_kept_for_the_gradient_alone() -> None:
    tensors, options = problem(SHAPES["conv 4x4"], torch.float32, "layer")
    plain = routed(tensors, options)
    assert plain[2].shape == (0,)
    torch.testing.assert_close(routed(tensors, options, norm="layer")[2], plain[0])
    poses, _, sums = routed(tensors, options, norm="layer", keep=False)
    assert sums.shape == (0,)
    with pytest.raises(RuntimeError, match="keep=True"):
        poses.sum().backward()


@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_norm_alone(dtype: torch.dtype, norm: str, scale: float) -> None:
    """Of sums that a convolution made: poses of one number to more than a tile is wide, and several tiles."""
    for shape in ((2, 3, 1), (1, 5, 9), (70, 3, 16), (3, 2, 144)):
        sums = torch.randn(shape).to(dtype).requires_grad_()
        affine = [torch.randn(shape[2], requires_grad=True) for _ in range(2)] if norm == "layer" else []
        exact = [t.detach().to(F64).requires_grad_() for t in (sums, *affine)]
        expected = normalised(exact[0] * scale, norm, *exact[1:])
        found = fused_norm(sums, scale, norm, *(affine or (None, None)), EPS)
        assert found.dtype == dtype and error(found, expected) < TOLERANCE[dtype]
        seed = torch.randn_like(found)
        gradients = torch.autograd.grad(found, [sums, *affine], seed)
        for f, e in zip(gradients, torch.autograd.grad(expected, exact, seed.to(F64)), strict=True):
            # (LayerNorm of one number: the bias, and no gradient)
            assert error(f, e) < TOLERANCE[dtype] or (e.norm() < 1e-9 and f.abs().max() < 1e-5)


def test_the_operators_are_sound() -> None:
    """Schema, fake kernels, autograd registration and AOT tracing, as PyTorch checks them."""
    shape = (2, 3, 3, 2, 2, 1, 3, 2, 2, 2)
    for norm, couplings in (("layer", False), ("none", True)):
        tensors, options = problem(shape, torch.float32, norm)
        affine = tensors[3:] or (None, None)
        rest = (*options, norm, *affine, EPS)
        library.opcheck(fused_pass, (*tensors[:3], couplings, True, *rest))
        given = [t.detach() for t in tensors[:3]]
        grad = torch.randn_like(given[2])
        library.opcheck(fused_pass_backward, (*given, grad, None, *options))
        library.opcheck(fused_norm, (tensors[2], 0.5, norm, *affine, EPS))
        affine = tuple(None if t is None else t.detach() for t in affine)
        library.opcheck(fused_norm_backward, (grad, given[2], 0.5, norm, *affine, EPS))


def use_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every pass that goes through the kernels."""
    used: list[int] = []

    def counted(*arguments: Any) -> Any:
        used.append(1)
        return fused_pass(*arguments)

    monkeypatch.setattr(engines, "fused_pass", counted)
    return used


@pytest.mark.parametrize("routing", ["concurrent", "sequential"])
def test_idpa_stack_against_the_naive_reference(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layers, padding, three iterations; the passes that Procedure 2 needs go through the kernels."""
    conv = layers.ConvIDPA(2, 3, 4, stride=2, padding=1)
    stack = layers.IDPAStack(OrderedDict(conv=conv, classes=layers.FCIDPA(12, 4, 4)), 3, routing)
    x = torch.randn(1, 3, 4, 2, 4, requires_grad=True)
    used = use_of(monkeypatch)
    found = stack(x)
    assert len(used) == (3 if routing == "concurrent" else 4)
    exact = x.detach().to(F64).requires_grad_()
    specs = [describe(layer.double()) for layer in copy.deepcopy(stack)]
    poses, _, _ = naive_idpa.inference(naive_idpa.grid(exact[0]), specs, 3, routing)
    expected = naive_idpa.stack(poses[-1])[None]
    torch.testing.assert_close(found, expected.float(), rtol=2e-4, atol=2e-5)
    seed = torch.randn_like(found)
    (grad,) = torch.autograd.grad(found, x, seed, retain_graph=True)
    (exact_grad,) = torch.autograd.grad(expected, exact, seed.to(F64))
    assert error(grad, exact_grad) < 1e-4

    weights = torch.autograd.grad(found, list(stack.parameters()), seed)
    layers.use_triton(False)
    try:
        plain = stack(x)
        assert len(used) == (3 if routing == "concurrent" else 4)
        for f, e in zip(weights, torch.autograd.grad(plain, list(stack.parameters()), seed), strict=True):
            assert error(f, e.to(F64)) < 1e-4
    finally:
        layers.use_triton(True)


class Half(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


@pytest.mark.parametrize(
    "what", ["no norm", "subclass", "hook", "no bias", "no dropout module", "dropout in training"]
)
def test_what_is_not_a_layer_norm_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No norm, another one, and dropout between sum and norm: sums from the kernels, the rest as in the reference."""
    layer = layers.FCIDPA(9, 3, 4, num_iters=3, drop=0.5, layer_norm=what != "no norm").eval()
    if what == "subclass":
        layer.norm = Half(4)
    elif what == "hook":
        layer.norm.register_forward_hook(lambda module, given, out: 2 * out)
    elif what == "no bias":
        layer.norm = nn.LayerNorm(4, bias=False)
    elif what == "no dropout module":
        layer.drop = nn.Identity()
    elif what == "dropout in training":
        layer.drop.train()
    x = torch.randn(2, 9, 4)
    used, seed, outcomes = use_of(monkeypatch), torch.randn(2, 3, 4), []
    for on in (True, False):
        layers.use_triton(on)
        torch.manual_seed(1)
        poses = layer(x)
        outcomes.append([poses, *torch.autograd.grad(poses, list(layer.parameters()), seed)])
    layers.use_triton(True)
    assert len(used) == 2
    for found, expected in zip(*outcomes, strict=True):
        assert error(found, expected.to(F64)) < 1e-4


def test_autocast_computes_in_its_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layers.FCIDPA(6, 3, 4), torch.randn(2, 6, 4)
    used = use_of(monkeypatch)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert len(used) == 2
    difference = (found.float() - expected).abs().max()
    assert 0 < difference < 0.1  # poses are LayerNorm's, of size 1; not equal: it was bfloat16
    found.float().square().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


def test_tensors_on_several_devices_are_refused() -> None:
    children, weight, parents = torch.zeros(1, 3, 3, 1, 4), torch.zeros(9, 2, 2, 2), torch.zeros(1, 2, 4)
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        launch.Pass(children, weight.to("meta"), parents, 1.0, 3, 1)


def test_what_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64, deep votes, too many parents, activations, dynamic routing: the reference."""
    used = use_of(monkeypatch)
    x = torch.randn(2, 6, 4)
    layers.FCIDPA(6, 3, 4).double()(x.double())
    layers.FCIDPA(6, 3, 25, 25, pose="vector")(torch.randn(2, 6, 25))
    layers.FCIDPA(6, 600, 4)(x)
    layers.DynamicRouting(6, 4, 3, 4)(x)
    layers.FCIDPA(6, 3, 4, activations=True).route([x], [torch.rand(2, 6)], 2)
    assert not used
    layers.FCIDPA(6, 3, 4)(x)
    assert used


def test_compiles_as_one_graph() -> None:
    """torch.compile sees one operator an iteration, norm included, and one after the first pass's product."""
    layer, x = layers.FCIDPA(6, 3, 4), torch.randn(2, 6, 4)
    expected = layer(x)
    expected.square().sum().backward()
    grad = layer.weight.grad
    layer.weight.grad = None
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return aot_eager(graph, inputs)

    found = torch.compile(layer, backend=backend, fullgraph=True)(x)
    passes = layer.num_iters - 1
    assert sum("fused_pass" in node for node in nodes) == passes
    assert sum("fused_norm" in node for node in nodes) == 1
    assert not any("layer_norm" in node or "softmax" in node for node in nodes)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, grad)
