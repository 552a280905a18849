"""Dynamic routing against the naive procedure, in float64, values and gradients; and its invariants."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, library

from capszoo.layers import (
    Conv3dDynamicRouting,
    ConvDynamicRouting,
    DynamicRouting,
    SharedDynamicRouting,
    dynamic_routing,
)
from capszoo.layers.dynamic.blocked import route_votes
from capszoo.layers.dynamic.routing import shared_dynamic_routing
from capszoo.layers.engine import choose
from capszoo.layers.engine_choice import record_engines, use_engines
from capszoo.layers.tuning import tuned
from tests.reference import dynamic as naive
from tests.support import LargestTensor
from tests.support.layers import assert_same, dense_transforms

F64 = torch.float64
AXES = ["parents", "children"]
INITS = ["zero", "random", "learned"]


def start_of(layer: torch.nn.Module) -> Tensor | None:
    start = layer.start
    if isinstance(start, torch.nn.Parameter):  # not zeros, or the test would not see them
        torch.nn.init.normal_(start)
    return None if start is None else start.t()


# -- the pure function ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softmax_over", AXES)
@pytest.mark.parametrize("num_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 6, 3, 4), (2, 5, 1, 3), (3, 1, 4, 2), (2, 7, 4, 5)])
def test_function_equals_procedure_1(shape: tuple[int, ...], num_iters: int, softmax_over: str) -> None:
    b, i, j, e = shape
    votes = torch.randn(b, i, j, e, dtype=F64, requires_grad=True)
    poses, couplings = dynamic_routing(votes.permute(0, 2, 1, 3), num_iters, softmax_over)
    expected_poses, expected_couplings = naive.route(votes, num_iters, softmax_over)
    assert_same(poses, expected_poses, [votes])
    torch.testing.assert_close(couplings, expected_couplings.transpose(1, 2), atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("softmax_over", AXES)
@pytest.mark.parametrize("num_iters", [1, 2, 3])
def test_start_logits(num_iters: int, softmax_over: str) -> None:
    votes = torch.randn(2, 6, 3, 4, dtype=F64, requires_grad=True)
    start = torch.randn(6, 3, dtype=F64, requires_grad=True)
    poses, couplings = dynamic_routing(votes.permute(0, 2, 1, 3), num_iters, softmax_over, start.t())
    expected_poses, expected_couplings = naive.route(votes, num_iters, softmax_over, start)
    assert_same(poses, expected_poses, [votes, start])
    torch.testing.assert_close(couplings, expected_couplings.transpose(1, 2), atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("softmax_over", AXES)
def test_agreement_is_rewarded(softmax_over: str) -> None:
    """Children that agree about a parent are coupled to it more strongly with every iteration."""
    votes = 0.3 * torch.randn(1, 3, 12, 4, dtype=F64)
    votes[0, 1, :6] = torch.tensor([2.0, 0.0, 0.0, 0.0], dtype=F64)  # six of them agree about parent 1
    shares = [dynamic_routing(votes, t, softmax_over)[1][0, 1, :6].mean() for t in (1, 2, 3, 4)]
    assert shares[0] < shares[1] < shares[2] < shares[3]


# -- fully connected --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("softmax_over", AXES)
@pytest.mark.parametrize("num_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_layer_equals_naive(batch: int, num_iters: int, softmax_over: str, init: str) -> None:
    layer = DynamicRouting(7, 3, 4, 5, num_iters, softmax_over, init, weight_std=0.5).double()
    start = start_of(layer)
    x = torch.randn(batch, 7, 3, dtype=F64, requires_grad=True)
    expected, expected_couplings = naive.route(
        naive.dense_votes(x, dense_transforms(layer)), num_iters, softmax_over, start
    )
    assert_same(layer(x), expected, [x, *layer.parameters()])
    poses, couplings = layer.route(x)
    torch.testing.assert_close(poses, expected, atol=1e-11, rtol=1e-10)
    torch.testing.assert_close(couplings, expected_couplings.transpose(1, 2), atol=1e-11, rtol=1e-10)


def test_one_iteration_forms_no_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = DynamicRouting(64, 4, 10, 8, num_iters=1)
    monkeypatch.setattr(layer, "votes", None)
    x = torch.randn(32, 64, 4)
    with LargestTensor() as made:
        layer(x)
        layer.route(x)
    assert made.numel <= layer.weight.numel() < 32 * 64 * 10 * 8


def test_weights_are_not_expanded_over_the_batch() -> None:
    layer = DynamicRouting(64, 8, 10, 4)
    x = torch.randn(16, 64, 8, requires_grad=True)
    with LargestTensor() as made:
        layer(x).sum().backward()
    assert made.numel == max(16 * 64 * 10 * 4, layer.weight.numel())  # the votes, not d times as many


def test_blocks_hold_memory_down() -> None:
    """Without a gradient no more votes are formed than those of a block."""
    layer, x = DynamicRouting(64, 4, 10, 16), torch.randn(9, 64, 4)
    with tuned(dynamic_block_votes=2 * 64 * 10 * 16), use_engines("blocked"), torch.no_grad():
        with LargestTensor() as made:
            layer(x)
    assert made.numel == 2 * 64 * 10 * 16


@pytest.mark.parametrize("in_dim", [8, 16])
@pytest.mark.parametrize("init", ["zero", "learned"])
def test_autocast(init: str, in_dim: int) -> None:
    """Iterations in float32, whose products copy no votes; poses have the type of autocast, gradients their own."""
    layer, x = DynamicRouting(40, in_dim, 10, 16, init=init), torch.randn(20, 40, in_dim, requires_grad=True)
    start_of(layer)
    inputs = [x, *layer.parameters()]
    expected = layer(x)
    expected_grads = torch.autograd.grad(expected.square().sum(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16), use_engines("blocked"), record_engines() as choices:
        poses = layer(x)
    assert [choice.engine.name for choice in choices] == ["blocked"] and poses.dtype == torch.bfloat16
    grads = torch.autograd.grad(poses.float().square().sum(), inputs)
    for found, right in zip((poses.float(), *grads), (expected, *expected_grads), strict=True):
        assert found.dtype == right.dtype
        assert (found - right).abs().max() <= 0.03 * right.abs().max()


def chosen(images: int, in_dim: int, out_caps: int = 10, dtype: torch.dtype = torch.float32) -> str:
    with torch.device("meta"):
        layer, x = (
            DynamicRouting(1152, in_dim, out_caps, 16).to(dtype),
            torch.empty(images, 1152, in_dim, dtype=dtype),
        )
    return choose(layer, layer.describe([x], 3, False)._replace(device="cpu")).name


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSZOO_NATIVE", "0")
    # the votes of 6 images have 1.1 million elements
    assert chosen(6, 8) == chosen(6, 16) == chosen(32, 8, out_caps=28) == "blocked"
    assert chosen(5, 8) == chosen(5, 8, dtype=torch.bfloat16) == "reference"
    assert chosen(32, 8, out_caps=29) == "reference"  # the votes of one image are too many


@pytest.mark.parametrize("softmax_over", AXES)
def test_gradients_in_blocks(softmax_over: str) -> None:
    """The written-out gradients, those through the couplings among them, against finite differences."""
    layer = DynamicRouting(5, 2, 3, 2, 3, softmax_over, "learned", weight_std=0.5).double()
    start_of(layer)
    x = torch.randn(5, 5, 2, dtype=F64, requires_grad=True)

    def route(x: Tensor, weight: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(layer, {"weight": weight, "start": start}, x, {"method": "route"})

    with tuned(dynamic_block_votes=2 * 5 * 3 * 2), use_engines("blocked"), record_engines() as choices:
        assert torch.autograd.gradcheck(route, (x, layer.weight, layer.start))
    assert {choice.engine.name for choice in choices} == {"blocked"}


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("stored", [False, True])
def test_the_operator_is_sound(stored: bool, axis: int) -> None:
    """Schema, fake kernels, autograd registration and AOT tracing, as PyTorch checks them."""
    tensors = (
        torch.randn(6, 5, 2, dtype=F64),
        torch.randn(5, 2, 3 * 2, dtype=F64),
        torch.randn(3, 5, dtype=F64),
    )
    given = [t.requires_grad_() for t in tensors]
    # the layer has 60 weights; the votes of an image have 30 elements
    with tuned(dynamic_block_votes=59 if stored else 60):
        assert len(route_votes(*given, 3, 3, axis)[3]) == (6 if stored else 0)
        library.opcheck(route_votes, (*given, 3, 3, axis))


# -- convolutional ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_iters", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"), [((4, 3), 3, 1, 0), ((5, 4), 3, 2, 1), ((3, 3), 2, 1, 0)]
)
@pytest.mark.parametrize("softmax_over", AXES)
def test_conv_equals_naive(
    size: tuple[int, int], kernel: int, stride: int, padding: int, num_iters: int, softmax_over: str
) -> None:
    layer = ConvDynamicRouting(
        2, 3, 4, 2, kernel, stride, padding, num_iters, softmax_over, weight_std=0.5
    ).double()
    x = torch.randn(2, 2 * 3, *size, dtype=F64, requires_grad=True)
    transforms = dense_transforms(layer.window).reshape(kernel, kernel, 2, 4, 2, 3)
    caps = x.reshape(2, 2, 3, *size).permute(0, 3, 4, 1, 2)
    expected = naive.conv_route(caps, transforms, stride, padding, num_iters, softmax_over)
    expected = expected.flatten(3).permute(0, 3, 1, 2)
    assert_same(layer(x), expected, [x, layer.window.weight])
    poses, couplings = layer.route(x)
    torch.testing.assert_close(poses, expected, atol=1e-11, rtol=1e-10)
    over = couplings.sum(3 if softmax_over == "parents" else 4)
    torch.testing.assert_close(over, torch.ones_like(over))


# -- transforms shared over the grid ----------------------------------------------------------------------------


def shared_parts(layer: SharedDynamicRouting) -> tuple[Tensor, Tensor]:
    """Transforms ``[g, j, e, d]`` and offsets ``[g, j, e]``."""
    weight = layer.weight.reshape(layer.out_caps, layer.out_dim, layer.groups, layer.in_dim)
    return weight.permute(2, 0, 1, 3), layer.bias.permute(2, 0, 1)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("softmax_over", AXES)
@pytest.mark.parametrize("num_iters", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_shared_equals_naive(batch: int, num_iters: int, softmax_over: str, init: str) -> None:
    layer = SharedDynamicRouting(3, 4, 5, 2, num_iters, softmax_over, init, positions=6).double()
    start = start_of(layer)
    x = torch.randn(batch, 3, 4, 6, dtype=F64, requires_grad=True)
    votes = naive.shared_votes(x.transpose(2, 3), *shared_parts(layer))
    expected, expected_couplings = naive.route(votes, num_iters, softmax_over, start)
    assert_same(layer(x), expected, [x, *layer.parameters()])
    poses, couplings = layer.route(x)
    torch.testing.assert_close(poses, expected, atol=1e-11, rtol=1e-10)
    torch.testing.assert_close(couplings, expected_couplings.transpose(1, 2), atol=1e-11, rtol=1e-10)


def test_shared_layer_never_makes_votes() -> None:
    layer = SharedDynamicRouting(8, 4, 64, 16, num_iters=3)
    x = torch.randn(4, 8, 4, 16, requires_grad=True)
    with LargestTensor() as made:
        layer(x).sum().backward()
    parameters = sum(p.numel() for p in layer.parameters())
    couplings = 4 * 8 * 16 * 64
    assert made.numel <= max(couplings, parameters) < couplings * 16  # which the votes would be


def test_shared_layer_routes_half_types_in_float32() -> None:
    """On a CPU, without a gradient; the poses keep the type."""
    layer, x = SharedDynamicRouting(3, 8, 10, 16), torch.randn(2, 3, 8, 25)
    expected = layer(x)
    with torch.no_grad(), record_engines() as choices:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            poses = layer(x)
        half = layer.bfloat16()(x.bfloat16())
    assert poses.dtype == half.dtype == torch.bfloat16
    for found in (poses, half):
        assert (found.float() - expected).abs().max() <= 0.02 * expected.abs().max()
    with record_engines() as more:
        layer(x.bfloat16())
    assert [choice.engine.name for choice in choices + more] == ["float32", "float32", "reference"]


@pytest.mark.parametrize("need_couplings", [False, True])
def test_shared_routing_in_float16_over_more_children_than_its_largest_number(need_couplings: bool) -> None:
    """Couplings before their division are near 1 each, and float16 ends at 65504."""
    layer, x = SharedDynamicRouting(2, 2, 3, 4), torch.rand(1, 2, 2, 40_000)
    with torch.no_grad():
        expected = layer(x)
        half = [t.half() for t in (x, layer.weight, layer.bias)]
        poses, couplings = shared_dynamic_routing(
            half[0], half[1], half[2], 3, "children", None, need_couplings
        )
    torch.testing.assert_close(poses.float(), expected, atol=0.01, rtol=0)
    assert (couplings is not None) == need_couplings
    if couplings is not None:
        torch.testing.assert_close(couplings.float().sum(2), torch.ones(1, 3), atol=0.01, rtol=0)


# -- every layer ------------------------------------------------------------------------------------------------


# -- one kernel, routed over types and positions ------------------------------------------------------------------


@pytest.mark.parametrize(("num_iters", "stride", "padding"), [(1, 1, 1), (3, 1, 1), (2, 2, 0)])
def test_conv3d_layer_equals_naive(num_iters: int, stride: int, padding: int) -> None:
    layer = Conv3dDynamicRouting(3, 2, 2, 3, stride=stride, padding=padding, num_iters=num_iters).double()
    torch.nn.init.normal_(layer.bias, std=0.3)
    x = torch.randn(2, 6, 3, 3, dtype=F64, requires_grad=True)
    kernel = layer.weight.unflatten(0, (2, 3)).permute(3, 4, 0, 1, 2)
    children = x.unflatten(1, (3, 2)).permute(0, 3, 4, 1, 2)
    expected, expected_couplings = naive.conv3d_route(
        children, kernel, layer.bias, stride, padding, num_iters
    )
    assert_same(layer(x), expected.permute(0, 3, 4, 1, 2).flatten(1, 2), [x, *layer.parameters()])
    _, couplings = layer.route(x)
    torch.testing.assert_close(couplings, expected_couplings.permute(0, 4, 2, 3, 1).flatten(1, 3))
    torch.testing.assert_close(couplings.sum(1), torch.ones_like(couplings[:, 0]))
