"""Sinkhorn plan, divergence and unit against loops, and what they promise."""

from __future__ import annotations

import pytest
import torch

from capszoo.layers.sinkhorn import SinkhornUnit, feature_kl, ground_cost, sinkhorn_divergence, sinkhorn_plan
from tests.reference import sinkhorn as reference


def samples(n: int, m: int, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, features, dtype=torch.float64, requires_grad=True)
    y = torch.randn(m, features, dtype=torch.float64, requires_grad=True)
    return x, y


@pytest.mark.parametrize("cost", ["cosine", "l2"])
@pytest.mark.parametrize("bias_fix", [True, False])
@pytest.mark.parametrize("backprop_plan", [False, True])
@pytest.mark.parametrize(
    "n, m, features, iters, epsilon", [(4, 4, 3, 10, 1.0), (3, 5, 2, 1, 0.5), (1, 1, 4, 2, 1.0)]
)
def test_divergence_is_the_reference(cost, bias_fix, backprop_plan, n, m, features, iters, epsilon) -> None:
    x, y = samples(n, m, features)
    got = sinkhorn_divergence(x, y, iters, epsilon, cost, bias_fix, backprop_plan)
    want = reference.divergence(x, y, iters, epsilon, cost, bias_fix, backprop_plan)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    for a, b in zip(torch.autograd.grad(got, [x, y]), torch.autograd.grad(want, [x, y]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("iters", [1, 2, 3, 4, 50])
def test_plan_is_a_transport_plan(iters) -> None:
    cost = torch.rand(5, 3, dtype=torch.float64)
    plan = sinkhorn_plan(cost, iters, 0.5)
    torch.testing.assert_close(plan, reference.plan(cost, iters, 0.5), rtol=0, atol=1e-12)
    assert (plan >= 0).all()
    torch.testing.assert_close(plan.sum(0), torch.full((3,), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(plan.sum(), torch.tensor(1.0, dtype=torch.float64))
    if iters == 50:
        torch.testing.assert_close(plan.sum(1), torch.full((5,), 0.2, dtype=torch.float64), rtol=0, atol=1e-9)


def test_small_epsilon_finds_the_permutation() -> None:
    order = torch.tensor([2, 0, 3, 1])
    cost = torch.ones(4, 4)
    cost[torch.arange(4), order] = 0.0
    plan = sinkhorn_plan(cost, 10, 0.01)
    assert torch.equal(plan.argmax(1), order)
    torch.testing.assert_close(plan.amax(1), torch.full((4,), 0.25))


def test_plan_survives_costs_that_underflow() -> None:
    cost = torch.rand(4, 4) + 1e4  # exp(-1e4) is zero in float32
    torch.testing.assert_close(sinkhorn_plan(cost), sinkhorn_plan(cost - 1e4), rtol=1e-2, atol=1e-3)
    far = torch.rand(4, 4)
    far[:, 2] = 1e4  # a column no row can reach
    far.requires_grad_()
    plan = sinkhorn_plan(far)
    assert torch.isfinite(plan).all()
    plan.sum().backward()
    assert torch.isfinite(far.grad).all()


def test_plan_keeps_the_mass_of_a_column_that_is_far_from_every_row() -> None:
    cost = torch.cdist(torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 0.0], [0.0, 1000.0]]))
    plan = sinkhorn_plan(cost, 50)
    for axis in (0, 1):
        torch.testing.assert_close(plan.sum(axis), torch.full((2,), 0.5))
    torch.testing.assert_close(plan, sinkhorn_plan(cost.double(), 50).float())


def test_divergence_of_a_sample_with_itself_in_any_order_is_zero() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    assert abs(float(sinkhorn_divergence(x, x[torch.randperm(6)], 200, 0.5))) < 1e-9
    assert abs(float(sinkhorn_divergence(x, x))) == 0.0
    # without the bias fix it is not
    assert float(sinkhorn_divergence(x, x, bias_fix=False)) > 0.1


@pytest.mark.parametrize("cost", ["cosine", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fill", [0.0, 1.0, 1e4])
def test_finite(cost, dtype, fill) -> None:
    x = torch.full((4, 8), fill, dtype=dtype, requires_grad=True)
    y = torch.randn(4, 8).to(dtype).requires_grad_()
    loss = sinkhorn_divergence(x, y, cost=cost, backprop_plan=True)
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    for grad in torch.autograd.grad(loss, [x, y]):
        assert torch.isfinite(grad).all()


def test_zero_sample_is_at_cosine_distance_one() -> None:
    x, y = torch.zeros(1, 3), torch.eye(3)
    assert torch.equal(ground_cost(x, y), torch.ones(1, 3))
    assert torch.equal(ground_cost(y, y), 1 - torch.eye(3))


def test_cosine_cost_of_huge_samples() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(ground_cost(1e30 * x, y), ground_cost(x, y))


def test_kl_is_the_reference() -> None:
    x, y = samples(3, 3, 4)
    got, want = feature_kl(x, y), reference.kl(x, y)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, [x, y]), torch.autograd.grad(want, [x, y]), strict=True):
        torch.testing.assert_close(a, b)
    assert float(feature_kl(x, x)) == 0.0 and float(got) > 0.0


@pytest.mark.parametrize(
    "low, high, stride",
    [((8, 8), (4, 4), 2), ((7, 5), (4, 3), 2), ((6, 4), (6, 4), 1), ((9, 8), (3, 8), (3, 1))],
)
@pytest.mark.parametrize(
    "options", [{}, dict(generator="cnn"), dict(critic=False), dict(metric="kl"), dict(cost="l2")]
)
def test_unit_rebuilds_the_lower_grid(low, high, stride, options) -> None:
    unit = SinkhornUnit(8, 16, stride, groups=4, **options)
    # of few samples, all may have one direction in the critic's two numbers: nothing would depend on them
    y = torch.randn(16, 8, *low, requires_grad=True)
    z = torch.randn(16, 16, *high, requires_grad=True)
    rebuilt = unit.generate(z, low)
    assert rebuilt.shape == y.shape
    lengths = rebuilt.unflatten(1, (4, 2)).norm(dim=2)
    assert (lengths.max() < 1.0) == (options.get("generator") != "cnn")
    loss = unit(y, z)
    assert loss.shape == () and torch.isfinite(loss)
    loss.backward()
    assert torch.isfinite(y.grad).all() and torch.isfinite(z.grad).all()
    assert z.grad.abs().sum() > 0
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in unit.parameters())


def test_unit_is_generator_critic_and_divergence() -> None:
    unit = SinkhornUnit(8, 8, 1, groups=4, num_iters=3, epsilon=0.5).double()
    y, z = torch.rand(4, 8, 6, 6, dtype=torch.float64), torch.rand(4, 8, 6, 6, dtype=torch.float64)
    fake = unit.critic(unit.generate(z, (6, 6))).flatten(1)
    real = unit.critic(y).flatten(1)
    assert fake.shape == (4, 4)
    want = reference.divergence(fake + 1e-30, real + 1e-30, 3, 0.5, "cosine", True, False)
    got = unit(y, z)
    if (fake.norm(dim=1) > 1e-3).all() and (real.norm(dim=1) > 1e-3).all():
        torch.testing.assert_close(got, want)
    else:
        pytest.fail("the seed gives a dead critic output: choose another")


def test_unit_parameters() -> None:
    # module 2 of encapnet_v1, first unit: grouped deconvolution 128 -> 64, critic 64 -> 16 -> 1
    unit = SinkhornUnit(64, 128, 2)
    assert unit.deconv.weight.shape == (128, 2, 3, 3)
    assert SinkhornUnit(64, 128, 2, generator="cnn").deconv.weight.shape == (128, 64, 3, 3)


def test_one_sample_costs_nothing() -> None:
    unit = SinkhornUnit(4, 4, 1, groups=2)
    y, z = torch.randn(1, 4, 2, 2, requires_grad=True), torch.randn(1, 4, 2, 2, requires_grad=True)
    loss = unit(y, z)
    loss.backward()
    assert float(loss) == 0.0 and not y.grad.any() and not z.grad.any()


def test_autocast_keeps_the_divergence_in_float32() -> None:
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    want = sinkhorn_divergence(x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sinkhorn_divergence(x, y), want)
