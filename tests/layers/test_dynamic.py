"""Dynamic routing against the naive procedure, in float64, values and gradients; and its invariants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, library

from capszoo.layers import (
    Conv3dDynamicRouting,
    ConvDynamicRouting,
    DynamicRouting,
    SharedDynamicRouting,
    dynamic_routing,
    squash,
)
from capszoo.layers.dynamic.blocked import route_votes
from capszoo.layers.dynamic.routing import shared_dynamic_routing
from capszoo.layers.engine import choose
from capszoo.layers.engine_choice import record_engines, use_engines
from capszoo.layers.tuning import tuned
from tests.reference import dynamic as naive
from tests.support import LargestTensor
from tests.support.errors import refuses
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


@pytest.mark.parametrize("num_iters", [1, 3])
@pytest.mark.parametrize("softmax_over", AXES)
def test_couplings_sum_to_one_over_the_stated_axis_only(softmax_over: str, num_iters: int) -> None:
    votes = torch.randn(2, 5, 9, 4, dtype=F64)  # 5 parents, 9 children
    couplings = dynamic_routing(votes, num_iters, softmax_over)[1]
    assert couplings.shape == (2, 5, 9)
    over, other = (1, 2) if softmax_over == "parents" else (2, 1)
    torch.testing.assert_close(couplings.sum(over), torch.ones_like(couplings.sum(over)))
    assert (couplings.sum(other) - 1).abs().min() > 1e-3


@pytest.mark.parametrize("softmax_over", AXES)
def test_first_iteration_is_a_scaled_sum(softmax_over: str) -> None:
    votes = torch.randn(2, 5, 9, 4, dtype=F64)
    poses, _ = dynamic_routing(votes, 1, softmax_over)
    torch.testing.assert_close(poses, squash(votes.sum(2) / (5 if softmax_over == "parents" else 9)))


@pytest.mark.parametrize("softmax_over", AXES)
def test_permuting_children_changes_nothing(softmax_over: str) -> None:
    votes = torch.randn(2, 4, 11, 3, dtype=F64)
    order = torch.randperm(11)
    poses, couplings = dynamic_routing(votes, 3, softmax_over)
    other_poses, other_couplings = dynamic_routing(votes[:, :, order], 3, softmax_over)
    torch.testing.assert_close(other_poses, poses, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(other_couplings, couplings[:, :, order], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("softmax_over", AXES)
def test_agreement_is_rewarded(softmax_over: str) -> None:
    """Children that agree about a parent are coupled to it more strongly with every iteration."""
    votes = 0.3 * torch.randn(1, 3, 12, 4, dtype=F64)
    votes[0, 1, :6] = torch.tensor([2.0, 0.0, 0.0, 0.0], dtype=F64)  # six of them agree about parent 1
    shares = [dynamic_routing(votes, t, softmax_over)[1][0, 1, :6].mean() for t in (1, 2, 3, 4)]
    assert shares[0] < shares[1] < shares[2] < shares[3]


@pytest.mark.parametrize(("num_iters", "axis"), [(0, "parents"), (3, "children of")])
def test_function_refuses(num_iters: int, axis: str) -> None:
    with pytest.raises(ValueError, match="num_iters" if num_iters < 1 else "softmax_over"):
        dynamic_routing(torch.randn(1, 2, 3, 4), num_iters, axis)


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


def test_blocks_when_children_need_no_gradient() -> None:
    layer, x = DynamicRouting(7, 3, 4, 5), torch.randn(9, 7, 3)
    expected = torch.autograd.grad(layer(x).square().sum(), [layer.weight])
    with tuned(dynamic_block_votes=4 * 7 * 4 * 5), use_engines("blocked"), record_engines() as choices:
        found = torch.autograd.grad(layer(x).square().sum(), [layer.weight])
    assert [choice.engine.name for choice in choices] == ["blocked"]
    torch.testing.assert_close(found, expected)


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


def test_compiled_training_is_one_graph() -> None:
    layer, x = DynamicRouting(7, 3, 4, 5), torch.randn(9, 7, 3, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    with use_engines("blocked"), record_engines() as choices:
        y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert [choice.engine.name for choice in choices] == ["blocked"]
    found = torch.autograd.grad(y.square().sum(), [x, layer.weight])
    torch.testing.assert_close(found, expected)


def test_wrong_number_of_children() -> None:
    with refuses(AssertionError, names=["child", "capsules"]):
        DynamicRouting(20, 4, 5, 6)(torch.randn(2, 19, 4))


@pytest.mark.parametrize("kwargs", [{"num_iters": 0}, {"softmax_over": "both"}, {"init": "ones"}])
def test_bad_settings(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        DynamicRouting(4, 2, 3, 2, **kwargs)


def test_starts() -> None:
    assert DynamicRouting(4, 2, 3, 2).start is None
    random = DynamicRouting(4, 2, 3, 2, init="random")
    assert "start" in dict(random.named_buffers()) and random.start.std() > 0
    learned = DynamicRouting(4, 2, 3, 2, init="learned")
    assert "start" in dict(learned.named_parameters()) and not learned.start.any()


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


def test_one_iteration_of_the_conv_layer_is_a_convolution() -> None:
    layer = ConvDynamicRouting(4, 3, 5, 2, num_iters=1)
    x = torch.randn(2, 12, 6, 7)
    kernel = (
        dense_transforms(layer.window)
        .reshape(3, 3, 4, 5, 2, 3)
        .permute(3, 4, 2, 5, 0, 1)
        .reshape(10, 12, 3, 3)
    )
    expected = squash(torch.nn.functional.conv2d(x, kernel).unflatten(1, (5, 2)) / 5, dim=2).flatten(1, 2)
    torch.testing.assert_close(layer(x), expected, atol=1e-6, rtol=1e-5)


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


def test_shared_votes_are_those_of_a_grouped_convolution() -> None:
    """The authors' form: a biased 1x1 convolution with one group per capsule type, then Procedure 1."""
    layer = SharedDynamicRouting(4, 3, 6, 5, num_iters=3).double()
    x = torch.randn(2, 12, 3, 2, dtype=F64)
    transforms, offsets = shared_parts(layer)
    # [b, g*j*e, h, w]
    votes = torch.nn.functional.conv2d(
        x, transforms.reshape(4 * 6 * 5, 3, 1, 1), offsets.reshape(-1), groups=4
    )
    votes = votes.reshape(2, 4, 6, 5, 6).permute(0, 2, 1, 4, 3).reshape(2, 6, 24, 5)  # [b, j, g*p, e]
    expected = dynamic_routing(votes, 3, "children")[0]
    torch.testing.assert_close(layer(x.reshape(2, 4, 3, 6)), expected, atol=1e-11, rtol=1e-10)


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


def test_shared_layer_takes_any_grid() -> None:
    layer = SharedDynamicRouting(3, 4, 5, 2)
    assert layer(torch.randn(2, 3, 4, 6)).shape == layer(torch.randn(2, 3, 4, 35)).shape == (2, 5, 2)
    with pytest.raises(ValueError, match="positions"):
        SharedDynamicRouting(3, 4, 5, 2, init="learned")


# -- every layer ------------------------------------------------------------------------------------------------


LAYERS = {
    "dense": (lambda **kw: DynamicRouting(24, 4, 5, 6, **kw), (24, 4)),
    "conv": (lambda **kw: ConvDynamicRouting(6, 4, 5, 6, **kw), (24, 5, 5)),
    "shared": (lambda **kw: SharedDynamicRouting(4, 4, 5, 6, positions=6, **kw), (4, 4, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("softmax_over", AXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["zero", "constant", "random", "huge"])
def test_finite(name: str, softmax_over: str, dtype: torch.dtype, kind: str) -> None:
    """Zero, constant and huge capsules: finite outputs and gradients, and the dtype of the input."""
    make, shape = LAYERS[name]
    layer = make(softmax_over=softmax_over).to(dtype)
    x = {
        "zero": torch.zeros(2, *shape),
        "constant": torch.ones(2, *shape),
        "random": torch.randn(2, *shape),
        "huge": torch.randn(2, *shape) * (1e2 if dtype == torch.float16 else 1e6),
    }[kind]
    x = x.to(dtype).requires_grad_()
    y = layer(x)
    y.float().sum().backward()
    assert y.dtype == dtype
    assert torch.isfinite(y).all()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None and torch.isfinite(tensor.grad).all()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(name: str, dtype: torch.dtype) -> None:
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(3, *shape)
    expected = layer(x)
    # eight bits of mantissa for bfloat16, eleven for float16, a few roundings deep
    tolerance = (0.04 if dtype == torch.bfloat16 else 0.005) * float(expected.detach().abs().max())
    torch.testing.assert_close(layer.to(dtype)(x.to(dtype)).float(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("softmax_over", "init"), [("parents", "zero"), ("children", "learned"), ("parents", "random")]
)
@pytest.mark.parametrize("num_iters", [1, 3])
def test_script_fx_and_meta(name: str, softmax_over: str, init: str, num_iters: int) -> None:
    make, shape = LAYERS[name]
    layer = make(softmax_over=softmax_over, init=init, num_iters=num_iters)
    x = torch.randn(3, *shape)
    expected = layer(x)
    for other in (torch.jit.script(layer), torch.fx.symbolic_trace(layer)):
        assert torch.equal(other(x), expected)
        assert torch.equal(other(x[:2]), layer(x[:2]))  # no batch size baked in
    assert layer.to("meta")(x.to("meta")).shape == expected.shape


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


def test_conv3d_layer_is_a_3d_convolution() -> None:
    """Its first sums are those of a 3-D convolution whose depth and stride along it are a child's pose."""
    layer = Conv3dDynamicRouting(3, 2, 4, 5, padding=1, num_iters=1).double()
    x = torch.randn(2, 6, 4, 3, dtype=F64)
    kernel = layer.weight.unsqueeze(1)  # [j*e, 1, d, k, l]
    votes = torch.nn.functional.conv3d(x.unsqueeze(1), kernel, stride=(2, 1, 1), padding=(0, 1, 1))
    sums = votes.sum(2).unflatten(1, (4, 5)) / (4 * 4 * 3) + layer.bias[:, :, None, None]
    torch.testing.assert_close(layer(x), squash(sums, dim=2).flatten(1, 2))


@pytest.mark.parametrize("value", [0.0, 0.5, 1e6])
def test_conv3d_layer_is_finite(value: float) -> None:
    layer = Conv3dDynamicRouting(3, 2, 4, 3, padding=1)
    x = torch.full((1, 6, 3, 3), value, requires_grad=True)
    poses = layer(x)
    poses.sum().backward()
    assert poses.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
    with refuses(AssertionError, names=["channels"]):
        layer(x[:, :4])
