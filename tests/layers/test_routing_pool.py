"""Routing pooling against its naive form, and the properties the paper claims for it."""

from __future__ import annotations

from collections.abc import Callable

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


def test_memory_format_does_not_matter() -> None:
    x = torch.randn(2, 16, 5, 4)
    last = x.to(memory_format=torch.channels_last)
    for layer in (RoutingPool2d(8), RoutingPool2d(8, output_size=(5, 2)), RoutingCaps(2, 8, 3)):
        torch.testing.assert_close(layer(x), layer(last), rtol=1e-5, atol=1e-6)


# -- numbers --------------------------------------------------------------------------------------------------


def test_zero_capsules_stay_zero() -> None:
    x = torch.zeros(1, 8, 3, 3)
    assert torch.equal(RoutingPool2d(4)(x), torch.zeros(1, 8, 1, 1))
    assert torch.equal(RoutingPool2d(4, activation="norm")(x), torch.zeros(1, 8, 1, 1))
    torch.testing.assert_close(RoutingPool2d(4).couplings(x), torch.full((1, 2, 3, 3), 1 / 9))
    assert torch.equal(RoutingCaps(2, 4, 3)(x), torch.zeros(1, 3, 16))


# -- modules --------------------------------------------------------------------------------------------------


def test_shapes_and_repr() -> None:
    x = torch.randn(2, 32, 4, 4)
    assert RoutingPool2d(16)(x).shape == (2, 32, 1, 1)
    assert RoutingPool2d(16, flatten=True)(x).shape == (2, 32)
    assert sum(p.numel() for p in RoutingPool2d(16).parameters()) == 0
    assert sum(p.numel() for p in RoutingCaps(4, 16, 10).parameters()) == 10_240
    assert "lam=5" in repr(RoutingPool2d(16)) and "4x16 -> 10x16" in repr(RoutingCaps(4, 16, 10))


def test_scripted_functions_refuse_wrong_arguments() -> None:
    with refuses(torch.jit.Error, names=["num_iters", "1", "0"]):
        torch.jit.script(routing_pool)(torch.ones(1, 2, 3, 4), num_iters=0)
    with refuses(torch.jit.Error, names=["identity", "squash", "norm", "sqaush"]):
        torch.jit.script(routing_caps)(torch.ones(1, 2, 3, 4), torch.ones(5, 8, 6), activation="sqaush")


@pytest.mark.parametrize(
    "options", [{}, {"lam": 0.0}, {"output_size": 2}, {"flatten": True}, {"lam": 0.0, "flatten": True}]
)
def test_route_is_forward_and_couplings(options: dict) -> None:
    pool, x = RoutingPool2d(caps_dim=2, **options), torch.randn(3, 6, 4, 2)
    pooled, couplings = pool.route(x)
    assert torch.equal(pooled, pool(x))
    assert couplings.shape == (3, 3, 4, 2) and torch.equal(couplings, pool.couplings(x))
