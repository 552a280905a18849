"""Routing pooling against its naive form, and the properties the paper claims for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capszoo.layers import RoutingCaps, RoutingPool2d, routing_caps, routing_pool
from tests.reference import routing_pool as reference
from tests.support.errors import refuses


def _grads(fn: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Poses, couplings and the gradients of a fixed weighting of both, for every input."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    poses, couplings = fn(*leaves)
    gen = torch.Generator().manual_seed(7)
    weights = [torch.randn(t.shape, generator=gen, dtype=t.dtype) for t in (poses, couplings)]
    loss = (poses * weights[0]).sum() + (couplings * weights[1]).sum()
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return (poses.detach(), couplings.detach(), *grads)


def _assert_same(ours: tuple[Tensor, ...], naive: tuple[Tensor, ...]) -> None:
    for a, b in zip(ours, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


# -- against the reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (1, 2, 5, 3), (3, 2, 6, 4)])
def test_pool_equals_reference(shape: tuple[int, ...], num_iters: int) -> None:
    x = torch.randn(*shape, dtype=torch.float64)
    for lam, activation in [(0.5, "identity"), (5.0, "squash"), (0.0, "norm"), (1.0, "norm")]:
        _assert_same(
            _grads(lambda u, k=(lam, activation): routing_pool(u, k[0], num_iters, k[1]), x),
            _grads(lambda u, k=(lam, activation): reference.routing_pool(u, k[0], num_iters, k[1]), x),
        )


@pytest.mark.parametrize("num_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2, 1, 3), (1, 2, 3, 4, 3, 5), (3, 2, 4, 3, 2, 4)])
def test_caps_equals_reference(shape: tuple[int, ...], num_iters: int) -> None:
    b, g, locations, d, n, e = shape
    x = torch.randn(b, g, locations, d, dtype=torch.float64)
    weight = torch.randn(n, g * d, e, dtype=torch.float64)
    for lam, activation in [(1.0, "squash"), (5.0, "identity"), (0.0, "squash")]:
        _assert_same(
            _grads(lambda u, w, k=(lam, activation): routing_caps(u, w, k[0], num_iters, k[1]), x, weight),
            _grads(
                lambda u, w, k=(lam, activation): reference.routing_caps(u, w, k[0], num_iters, k[1]),
                x,
                weight,
            ),
        )


def test_modules_cut_the_map_into_capsules_by_channel() -> None:
    x = torch.randn(2, 12, 3, 5, dtype=torch.float64)
    # [b, g, l, e]
    children = torch.stack(
        [torch.stack([x[:, g * 4 : g * 4 + 4, p // 5, p % 5] for p in range(15)], 1) for g in range(3)], 1
    )
    pool = RoutingPool2d(caps_dim=4, lam=2.0)
    poses, couplings = reference.routing_pool(children, 2.0, 3)
    torch.testing.assert_close(pool(x), poses.reshape(2, 12, 1, 1), rtol=0, atol=1e-9)
    torch.testing.assert_close(pool.couplings(x), couplings.reshape(2, 3, 3, 5), rtol=0, atol=1e-9)

    caps = RoutingCaps(3, 4, out_caps=5, out_dim=6, lam=2.0).double()
    poses, couplings = reference.routing_caps(children, caps.weight, 2.0, 3)
    ours, ours_c = caps.route(x)
    torch.testing.assert_close(ours, poses, rtol=0, atol=1e-9)
    torch.testing.assert_close(caps(x), ours, rtol=0, atol=0)
    torch.testing.assert_close(ours_c, couplings.reshape(2, 5, 3, 3, 5), rtol=0, atol=1e-9)


def test_cells_are_pooled_each_by_itself() -> None:
    x = torch.randn(2, 8, 4, 6)
    pool, one = RoutingPool2d(4, 3.0, output_size=(2, 3)), RoutingPool2d(4, 3.0)
    out, c = pool(x), pool.couplings(x)
    assert out.shape == (2, 8, 2, 3) and c.shape == (2, 2, 4, 6)
    for row in range(2):
        for col in range(3):
            cell = x[:, :, row * 2 : row * 2 + 2, col * 2 : col * 2 + 2]
            torch.testing.assert_close(out[:, :, row : row + 1, col : col + 1], one(cell))
            ours = c[:, :, row * 2 : row * 2 + 2, col * 2 : col * 2 + 2]
            torch.testing.assert_close(ours, one.couplings(cell))
    with pytest.raises(AssertionError, match="2x3 cells"):
        pool(x[:, :, :3])


# -- what the paper claims ------------------------------------------------------------------------------------


def test_lam_zero_is_average_pooling() -> None:
    x = torch.randn(2, 32, 7, 9)
    assert torch.equal(RoutingPool2d(16, lam=0.0)(x), x.mean((2, 3), keepdim=True))  # bitwise
    torch.testing.assert_close(RoutingPool2d(16, 0.0)(x), F.adaptive_avg_pool2d(x, 1), rtol=0, atol=1e-7)
    torch.testing.assert_close(
        RoutingPool2d(16, 0.0, output_size=(7, 3))(x), F.avg_pool2d(x, (1, 3)), rtol=0, atol=1e-6
    )
    assert torch.equal(RoutingPool2d(16, 0.0).couplings(x), torch.full((2, 2, 7, 9), 1 / 63))
    # and it is the limit of small λ, so that the short cut hides nothing
    torch.testing.assert_close(RoutingPool2d(16, 1e-6)(x), x.mean((2, 3), keepdim=True), rtol=0, atol=1e-5)
    caps = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    weight = torch.randn(3, 8, 6, dtype=torch.float64)
    for zero, small in zip(routing_caps(caps, weight, 0.0), routing_caps(caps, weight, 1e-9), strict=True):
        torch.testing.assert_close(zero, small, rtol=0, atol=1e-8)


def test_large_lam_takes_the_winner() -> None:
    x = torch.randn(3, 2, 20, 8)
    poses, couplings = routing_pool(x, lam=1e3)
    winner = couplings.argmax(-1)  # [b, g]
    torch.testing.assert_close(couplings.amax(-1), torch.ones(3, 2), rtol=0, atol=1e-3)
    torch.testing.assert_close(poses, x.gather(2, winner[:, :, None, None].expand(-1, -1, 1, 8)).squeeze(2))


def test_agreeing_children_get_more_and_opposing_less() -> None:
    e1 = torch.eye(4)[0]
    x = torch.stack([e1, e1 * 2, e1 * 3, -e1])[None, None]  # [1, 1, 4, 4]
    _, c = routing_pool(x, lam=1.0, num_iters=1)
    assert torch.allclose(c[0, 0, :3], c[0, 0, :1].expand(3))  # the cosine counts, not the length
    assert torch.allclose(c[0, 0, 3] / c[0, 0, 0], torch.tensor(-2.0).exp())  # exp(-1) / exp(1)


# -- invariants of every routing ------------------------------------------------------------------------------


def test_couplings_sum_to_one_over_children() -> None:
    x, weight = torch.randn(2, 3, 6, 4), torch.randn(5, 12, 7)
    _, c = routing_pool(x, 5.0)
    torch.testing.assert_close(c.sum(-1), torch.ones(2, 3))
    _, c = routing_caps(x, weight, 5.0)
    torch.testing.assert_close(c.sum((2, 3)), torch.ones(2, 5))
    assert (c.sum(1) - 1).abs().min() > 1e-3  # and not over the classes


def test_order_of_children_does_not_matter() -> None:
    x, weight = torch.randn(2, 3, 6, 4, dtype=torch.float64), torch.randn(5, 12, 7, dtype=torch.float64)
    order = torch.randperm(6)
    poses, c = routing_pool(x, 5.0)
    poses2, c2 = routing_pool(x[:, :, order], 5.0)
    torch.testing.assert_close(poses, poses2)
    torch.testing.assert_close(c[:, :, order], c2)
    poses, c = routing_caps(x, weight, 5.0)
    poses2, c2 = routing_caps(x[:, :, order], weight, 5.0)
    torch.testing.assert_close(poses, poses2)
    torch.testing.assert_close(c[..., order], c2)
    types = torch.tensor([2, 0, 1])  # types move together with their transforms
    moved = weight.reshape(5, 3, 4, 7)[:, types].reshape(5, 12, 7)
    torch.testing.assert_close(poses, routing_caps(x[:, types], moved, 5.0)[0])


def test_scaling_the_input_scales_the_pool() -> None:
    x = torch.randn(2, 8, 3, 3, dtype=torch.float64)
    pool = RoutingPool2d(4)
    torch.testing.assert_close(pool(x * 8), pool(x) * 8)
    torch.testing.assert_close(pool.couplings(x * 8), pool.couplings(x))


def test_memory_format_does_not_matter() -> None:
    x = torch.randn(2, 16, 5, 4)
    last = x.to(memory_format=torch.channels_last)
    for layer in (RoutingPool2d(8), RoutingPool2d(8, output_size=(5, 2)), RoutingCaps(2, 8, 3)):
        torch.testing.assert_close(layer(x), layer(last), rtol=1e-5, atol=1e-6)


# -- numbers --------------------------------------------------------------------------------------------------

LAYERS = {
    "pool": lambda: RoutingPool2d(4, lam=5.0),
    "pool-squash": lambda: RoutingPool2d(4, lam=500.0, activation="squash"),
    "pool-norm": lambda: RoutingPool2d(4, activation="norm"),
    "pool-cells": lambda: RoutingPool2d(4, output_size=2),
    "caps": lambda: RoutingCaps(2, 4, 3, lam=15.0),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_constant_and_huge_inputs(layer: str, dtype: torch.dtype) -> None:
    module = LAYERS[layer]().to(dtype)
    mixed = torch.randn(2, 8, 4, 4)
    mixed[:, :, 1:3] = 0.0
    inputs = [torch.zeros(2, 8, 4, 4), torch.full((2, 8, 4, 4), 3.0), torch.full((2, 8, 4, 4), -1.0), mixed]
    inputs += [torch.randn(2, 8, 4, 4) * 1e4] if dtype == torch.float16 else [torch.randn(2, 8, 4, 4) * 1e9]
    for x in inputs:
        x = x.to(dtype).requires_grad_()
        out = module(x)
        assert out.dtype == dtype and out.isfinite().all()
        out.float().mean().backward()
        assert x.grad is not None and x.grad.isfinite().all()
        for p in module.parameters():
            assert p.grad is not None and p.grad.isfinite().all()


def test_zero_capsules_stay_zero() -> None:
    x = torch.zeros(1, 8, 3, 3)
    assert torch.equal(RoutingPool2d(4)(x), torch.zeros(1, 8, 1, 1))
    assert torch.equal(RoutingPool2d(4, activation="norm")(x), torch.zeros(1, 8, 1, 1))
    torch.testing.assert_close(RoutingPool2d(4).couplings(x), torch.full((1, 2, 3, 3), 1 / 9))
    assert torch.equal(RoutingCaps(2, 4, 3)(x), torch.zeros(1, 3, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_routed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 5, 5).to(dtype)
    caps = RoutingCaps(2, 4, 3, lam=15.0).to(dtype)
    exact, exact_c = routing_caps(caps._children(x).float(), caps.weight.float(), 15.0)
    poses, c = caps.route(x)
    assert poses.dtype == dtype and c.dtype == torch.float32
    torch.testing.assert_close(c.flatten(2), exact_c.flatten(2))
    torch.testing.assert_close(poses, exact.to(dtype))


def test_autocast_leaves_the_routing_in_float32() -> None:
    x = torch.randn(2, 8, 5, 5)
    for layer in (RoutingPool2d(4, 15.0), RoutingCaps(2, 4, 3, lam=15.0)):
        exact = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer(x), exact)


# -- modules --------------------------------------------------------------------------------------------------


def test_script_trace_and_meta() -> None:
    x = torch.randn(2, 16, 4, 6)
    for layer in (
        RoutingPool2d(8),
        RoutingPool2d(8, lam=0.0, flatten=True),
        RoutingPool2d(8, output_size=2, activation="squash"),
        RoutingCaps(2, 8, 3),
    ):
        expected = layer(x)
        assert torch.equal(torch.fx.symbolic_trace(layer)(x), expected)
        torch.testing.assert_close(torch.jit.script(layer)(x), expected)
        assert layer.to("meta")(x.to("meta")).shape == expected.shape


def test_shapes_and_repr() -> None:
    x = torch.randn(2, 32, 4, 4)
    assert RoutingPool2d(16)(x).shape == (2, 32, 1, 1)
    assert RoutingPool2d(16, flatten=True)(x).shape == (2, 32)
    assert sum(p.numel() for p in RoutingPool2d(16).parameters()) == 0
    assert sum(p.numel() for p in RoutingCaps(4, 16, 10).parameters()) == 10_240
    assert "lam=5" in repr(RoutingPool2d(16)) and "4x16 -> 10x16" in repr(RoutingCaps(4, 16, 10))


#: the functions with arguments of their own
FUNCTIONS: tuple[Callable[[dict[str, Any]], object], ...] = (
    lambda wrong: routing_pool(torch.ones(1, 2, 3, 4), **wrong),
    lambda wrong: routing_caps(torch.ones(1, 2, 3, 4), torch.ones(5, 8, 6), **wrong),
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoutingPool2d(0), "caps_dim must be at least 1"),
        (lambda: RoutingPool2d(lam=-1.0), "lam must be 0"),
        (lambda: RoutingPool2d(num_iters=0), "num_iters must be at least 1"),
        (lambda: RoutingPool2d(activation="relu"), "activation must be one of"),
        *(
            (lambda function=function, wrong=wrong: function(wrong), message)
            for function in FUNCTIONS
            for wrong, message in (
                ({"num_iters": 0}, "num_iters must be at least 1, not 0"),
                ({"num_iters": -3}, "num_iters must be at least 1, not -3"),
                ({"activation": "sqaush"}, "activation must be one of .*, not 'sqaush'"),
                ({"lam": -1.0}, "lam must be 0"),
            )
        ),
        (lambda: RoutingPool2d(output_size=0), "output_size"),
        (lambda: RoutingPool2d(output_size=2, flatten=True), "flatten needs"),
        (lambda: RoutingCaps(0, 4, 3), "at least 1"),
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_scripted_functions_refuse_wrong_arguments() -> None:
    with refuses(torch.jit.Error, names=["num_iters", "1", "0"]):
        torch.jit.script(routing_pool)(torch.ones(1, 2, 3, 4), num_iters=0)
    with refuses(torch.jit.Error, names=["identity", "squash", "norm", "sqaush"]):
        torch.jit.script(routing_caps)(torch.ones(1, 2, 3, 4), torch.ones(5, 8, 6), activation="sqaush")


def test_channels_that_cannot_be_cut() -> None:
    with refuses(AssertionError, names=["caps_dim=5"]):
        RoutingPool2d(5)(torch.randn(1, 12, 2, 2))
    with refuses(AssertionError, names=["caps_dim=5"]):
        RoutingPool2d(5, lam=0.0)(torch.randn(1, 12, 2, 2))


@pytest.mark.parametrize(
    "options", [{}, {"lam": 0.0}, {"output_size": 2}, {"flatten": True}, {"lam": 0.0, "flatten": True}]
)
def test_route_is_forward_and_couplings(options: dict) -> None:
    pool, x = RoutingPool2d(caps_dim=2, **options), torch.randn(3, 6, 4, 2)
    pooled, couplings = pool.route(x)
    assert torch.equal(pooled, pool(x))
    assert couplings.shape == (3, 3, 4, 2) and torch.equal(couplings, pool.couplings(x))
