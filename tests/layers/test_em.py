"""EM routing against the naive procedure, in float64, values and gradients; and its invariants."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn
from torch.utils._pytree import tree_leaves

from capszoo.layers import ClassEM, ConvEM, SharedEM, em_routing, shared_em_routing
from capszoo.layers._native.build import compiler
from capszoo.layers.em import blocked
from capszoo.layers.em.blocked import VoteBuffer
from capszoo.layers.em.steps import MIN_SHARE, parent_logits
from capszoo.layers.engine_choice import record_engines, use_engines
from capszoo.layers.tuning import tuned
from tests.reference import em as naive
from tests.support import LargestTensor
from tests.support.layers import assert_same

F64 = torch.float64
ATOL = 1e-9


def betas(parents: int) -> tuple[Tensor, Tensor]:
    """Costs that leave the sigmoids in their curved part."""
    return (
        (0.3 + 0.1 * torch.randn(parents, dtype=F64)).requires_grad_(),
        (0.5 * torch.randn(parents, dtype=F64)).requires_grad_(),
    )


def randomise(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)


def capsule_map(
    batch: int, capsules: int, rows: int, height: int, width: int, dtype: torch.dtype = F64
) -> Tensor:
    poses = torch.randn(batch, capsules * rows * rows, height, width, dtype=dtype)
    return torch.cat([poses, torch.rand(batch, capsules, height, width, dtype=dtype)], dim=1)


# -- the pure function --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize_cost", [False, True])
@pytest.mark.parametrize("num_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 4, 3, 2), (2, 3, 1, 3), (2, 1, 3, 2), (2, 4, 3, 3)])
def test_function_equals_procedure_1(shape: tuple[int, ...], num_iters: int, normalize_cost: bool) -> None:
    b, i, j, e = shape
    votes = torch.randn(b, i, j, e, dtype=F64, requires_grad=True)
    activations = torch.rand(b, i, dtype=F64, requires_grad=True)
    beta_v, beta_a = betas(j)
    poses, logits, couplings = em_routing(
        votes.permute(0, 2, 1, 3), activations, beta_v, beta_a, num_iters, normalize_cost=normalize_cost
    )
    expected = naive.route(votes, activations, beta_v, beta_a, num_iters, normalize_cost=normalize_cost)
    fast = [poses, torch.sigmoid(logits), couplings.transpose(1, 2)]
    if num_iters == 1:
        torch.testing.assert_close(fast.pop(), expected[2])  # a constant: no gradient
    if normalize_cost and j == 1:  # the cost of an only parent is -5, whatever the betas
        inputs = [votes, beta_a] if i > 1 else [votes]
    elif i == 1 and j > 1:  # one vote has no variance: its activation is lost in the weighted mean
        inputs = [votes, beta_v, beta_a]
    else:
        inputs = [votes, activations, beta_v, beta_a]
    assert_same(fast, expected[: len(fast)], inputs, ATOL)


@pytest.mark.parametrize("num_iters", [1, 2, 3])
def test_temperature_floor_and_eps_are_the_arguments(num_iters: int) -> None:
    votes = torch.randn(2, 4, 3, 2, dtype=F64, requires_grad=True)
    activations = torch.rand(2, 4, dtype=F64, requires_grad=True)
    beta_v, beta_a = betas(3)
    settings = {"lam_start": 0.3, "lam_step": 0.5, "var_floor": 0.8, "eps": 0.05}
    poses, logits, couplings = em_routing(
        votes.permute(0, 2, 1, 3), activations, beta_v, beta_a, num_iters, **settings
    )
    expected = naive.route(votes, activations, beta_v, beta_a, num_iters, **settings)
    assert_same([poses, torch.sigmoid(logits)], expected[:2], [votes, activations, beta_v, beta_a], ATOL)
    torch.testing.assert_close(couplings.transpose(1, 2), expected[2], atol=1e-9, rtol=1e-9)
    for name in settings:  # and none of them is ignored
        others = {key: value for key, value in settings.items() if key != name}
        other = em_routing(votes.permute(0, 2, 1, 3), activations, beta_v, beta_a, num_iters, **others)
        if name != "lam_step" or num_iters > 1:
            assert (other[1] - logits).abs().max() > 1e-4, name


def test_agreement_raises_the_activation_and_the_couplings() -> None:
    votes = torch.randn(1, 3, 12, 4, dtype=F64)
    votes[0, 1, :9] = 0.05 * votes[0, 1, :9] + 1.0  # nine children agree about parent 1
    zeros = torch.zeros(3, dtype=F64)
    _, logits, couplings = em_routing(votes, torch.full((1, 12), 0.8, dtype=F64), zeros, zeros, 3)
    assert logits.argmax() == 1
    assert couplings[0, 1, :9].mean() > 0.9 and couplings[0, 1, 9:].mean() < 0.3


@pytest.mark.parametrize(
    ("centre", "spread"),
    [
        pytest.param(0.0, 1.0, marks=pytest.mark.slow),
        pytest.param(100.0, 30.0, marks=pytest.mark.slow),
        (1000.0, 1.0),
        (0.0, 1e-3),
    ],
)
def test_float32_is_as_accurate_as_the_naive_form(centre: float, spread: float) -> None:
    """Sums of squares do not cancel: the float32 error is within twice that of the form that subtracts first.

    The root mean square over 64 inputs: the largest error of a few depends on the processor's order of summation.
    """
    generator = torch.Generator().manual_seed(4)
    votes = centre + spread * torch.randn(64, 10, 3, 4, generator=generator)
    activations = torch.rand(64, 10, generator=generator)
    beta_v, beta_a = torch.full((3,), -0.5), torch.zeros(3)
    exact = naive.route(votes.double(), activations.double(), beta_v.double(), beta_a.double(), 3)
    plain = naive.route(votes, activations, beta_v, beta_a, 3)
    poses, _, couplings = em_routing(votes.permute(0, 2, 1, 3), activations, beta_v, beta_a, 3)
    for fast, slow, right in ((poses, plain[0], exact[0]), (couplings.transpose(1, 2), plain[2], exact[2])):
        error, of_naive = ((one - right).square().mean().sqrt() for one in (fast, slow))
        assert error <= 2 * of_naive


# -- convolution --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_iters", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("batch", "caps", "parents", "rows", "kernel", "stride", "size"),
    [(1, 1, 2, 2, 3, 2, (5, 6)), (1, 1, 2, 4, 2, 1, (2, 3)), (2, 3, 2, 2, 1, 1, (1, 2))],
)
def test_convolution_equals_naive(
    batch: int,
    caps: int,
    parents: int,
    rows: int,
    kernel: int,
    stride: int,
    size: tuple[int, int],
    num_iters: int,
) -> None:
    layer = ConvEM(caps, parents, rows, kernel, stride, num_iters).double()
    randomise(layer)
    x = capsule_map(batch, caps, rows, *size).requires_grad_()
    poses, activations, couplings = naive.convolution(
        x, layer.weight, layer.beta_v, layer.beta_a, kernel, stride, num_iters
    )
    assert poses.shape[1:3] == layer.grid_size(*size)
    expected = torch.cat([poses.flatten(3), activations], dim=3).permute(0, 3, 1, 2)
    assert_same(layer(x), expected, [x, *layer.parameters()], ATOL)
    fast = layer.route(x)
    torch.testing.assert_close(fast[0], poses, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(torch.sigmoid(fast[1]), activations, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(fast[2].transpose(3, 4), couplings, atol=1e-9, rtol=1e-9)


def test_class_layer_equals_naive() -> None:
    for num_iters in (1, 2, 3, 4):
        for caps, rows, size in ((1, 2, (2, 3)), (2, 3, (1, 1))):
            layer = ClassEM(caps, 2, rows, num_iters).double()
            randomise(layer)
            x = capsule_map(2, caps, rows, *size).requires_grad_()
            expected = naive.classes(x, layer.weight, layer.beta_v, layer.beta_a, num_iters)
            poses, logits = layer(x)
            assert_same([poses, torch.sigmoid(logits)], expected[:2], [x, *layer.parameters()], ATOL)
            couplings = layer.route(x)[2].flatten(2).transpose(1, 2)
            torch.testing.assert_close(couplings, expected[2], atol=1e-9, rtol=1e-9)


def test_weights_are_not_expanded_over_the_batch() -> None:
    """Votes, and nothing larger."""
    layer = ConvEM(4, 5, stride=2)
    x = capsule_map(16, 4, 4, 9, 9, torch.float32).requires_grad_()
    with use_engines("reference"), LargestTensor() as made:
        layer(x).sum().backward()
    assert made.numel == 16 * 16 * 36 * 5 * 16


@pytest.mark.parametrize("num_iters", [1, 2, 3])
def test_blocks_are_freed(num_iters: int) -> None:
    """No buffer of votes outlives its training step."""
    layer = ConvEM(4, 4, num_iters=num_iters)
    x = capsule_map(2, 4, 4, 8, 8, torch.float32).requires_grad_()
    with tuned(em_blocked_min_votes=0, em_block_votes=1 << 14), record_engines() as choices:
        layer(x).sum().backward()
    assert [choice.engine.name for choice in choices] == ["blocked"]
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, VoteBuffer)]


@pytest.mark.parametrize("num_iters", [1, 2])
@pytest.mark.parametrize("output", [0, 1])
def test_a_loss_on_one_output_alone(output: int, num_iters: int) -> None:
    """With one iteration, poses do not depend on the votes' squares: their gradient is 0, not what a buffer held."""
    layer = ConvEM(2, 3, 3, 2, num_iters=num_iters).double()
    x = capsule_map(2, 2, 3, 5, 5, F64).requires_grad_()
    found = []
    for name in ("blocked", "native", "reference"):  # without a compiler, "native" is "blocked"
        stale = [torch.full((2000,), torch.nan, dtype=F64) for _ in range(50)]
        del stale  # the memory that the operator's buffers are likely to get
        with (
            tuned(em_blocked_min_votes=0, em_block_votes=2000),
            use_engines(name),
            record_engines() as choices,
        ):
            loss = layer.route(x)[output].square().sum()
            found.append(torch.autograd.grad(loss, [x, layer.weight]))
        wanted = "blocked" if name == "native" and not compiler() else name
        assert [choice.engine.name for choice in choices] == [wanted]
    for *engines, grad in zip(*found, strict=True):
        assert all((other - grad).abs().max() <= 1e-10 * grad.abs().max() for other in engines)


@pytest.mark.parametrize("need_couplings", [False, True])
def test_the_operator_is_sound(need_couplings: bool) -> None:
    """Schema, fake kernels, autograd registration and AOT tracing, as PyTorch checks them."""
    layer = ConvEM(2, 3, 2, 2, 1).double()
    tensors = (torch.randn(12, 8, 4, dtype=F64), torch.rand(12, 8, dtype=F64), layer.weight.transpose(1, 2))
    tensors = (*tensors, layer.beta_v, layer.beta_a)
    arguments = (*(t.detach().requires_grad_() for t in tensors), *layer.settings(2), need_couplings)
    with tuned(em_block_votes=5 * 96):
        library.opcheck(blocked.em_windows, arguments)


# -- shared transforms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize_cost", [False, True])
@pytest.mark.parametrize("num_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 3, 2, 2, 2, 3), (2, 2, 3, 1, 3, 2), (2, 1, 2, 3, 2, 3)])
def test_shared_equals_naive(shape: tuple[int, ...], num_iters: int, normalize_cost: bool) -> None:
    batch, groups, d, places, parents, e = shape
    layer = SharedEM(groups, d, parents, e, num_iters, normalize_cost=normalize_cost).double()
    randomise(layer)
    x = torch.randn(batch, groups, d, places, dtype=F64, requires_grad=True)
    activations = torch.rand(batch, groups, places, dtype=F64, requires_grad=True)
    votes = naive.shared_votes(x, layer.weight, layer.bias)
    expected = naive.route(
        votes, activations.flatten(1), layer.beta_v, layer.beta_a, num_iters, normalize_cost=normalize_cost
    )
    poses, logits = layer(x, activations)
    inputs = [x, activations, layer.weight, layer.bias, layer.beta_a]
    assert_same([poses, torch.sigmoid(logits)], expected[:2], inputs, ATOL)
    couplings = layer.route(x, activations)[2]  # [b, j, g, s]
    torch.testing.assert_close(couplings.flatten(2).transpose(1, 2), expected[2], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("centre", "spread"), [(0.0, 1.0), (30.0, 0.1), (1000.0, 30.0)])
def test_shared_float32_does_not_cancel(centre: float, spread: float) -> None:
    """Poses that all but agree in a type, far from zero: as accurate as votes that are subtracted before squaring."""
    generator = torch.Generator().manual_seed(1)
    x = centre + spread * torch.randn(2, 3, 4, 20, generator=generator)
    activations = torch.rand(2, 3, 20, generator=generator)
    weight = torch.randn(5, 3, 4, 6, generator=generator)
    bias = torch.randn(5, 3, 6, generator=generator)
    arguments = (x, activations, weight, bias, torch.full((5,), -5.0), torch.zeros(5))
    exact = shared_em_routing(*(t.double() for t in arguments), lam_step=0.0)
    votes = torch.einsum("bgds,jgde->bjgse", x, weight) + bias[None, :, :, None]
    plain = em_routing(
        votes.flatten(2, 3), activations.flatten(1), *arguments[4:], 3, lam_step=0.0, normalize_cost=True
    )
    for fast, slow, right in zip(shared_em_routing(*arguments, lam_step=0.0), plain, exact, strict=True):
        error = (fast - right).abs().max()
        assert error <= 2 * (slow.reshape(right.shape) - right).abs().max() + 1e-5 * right.abs().max()


def test_rounding_is_not_blown_up_to_a_range_of_costs() -> None:
    """Parents whose masses and variances differ by a few units in the last place keep one activation."""
    rounding = 1 + 3e-7 * torch.randn(2, 10)
    mass, variance = 200 * rounding, 1e-4 * rounding.flip(0).unsqueeze(2).expand(-1, -1, 16)
    beta_v, beta_a = torch.full((10,), -5.0), torch.zeros(10)
    logits = parent_logits(mass, variance, beta_v, beta_a, 1.0, True, MIN_SHARE)[0]
    torch.testing.assert_close(logits, torch.full_like(logits, 5.0), atol=1e-3, rtol=0)
    first = parent_logits(mass[:, :1], variance, beta_v, beta_a, 1.0, True, 0.0)[0]
    torch.testing.assert_close(first, torch.full_like(first, 5.0), atol=1e-3, rtol=0)


def test_a_parent_of_one_child_keeps_a_variance() -> None:
    """Float32 has no digits left of the variance of a single vote far from the mean: there is a bound instead."""
    generator = torch.Generator().manual_seed(0)
    votes = 100 * torch.randn(4, 6, 12, 4, generator=generator)
    arguments = (torch.ones(4, 12), torch.full((6,), -5.0), torch.zeros(6))
    settings: dict[str, Any] = {"num_iters": 4, "normalize_cost": True, "lam_step": 0.0}
    right = em_routing(votes.double(), *(t.double() for t in arguments), **settings)
    assert right[2].sum(2).min() < 1.01  # a parent was left with one child, or none
    for a, b in zip(em_routing(votes, *arguments, **settings), right, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5 * b.abs().max().item(), rtol=0)


def test_shared_makes_no_votes() -> None:
    layer = SharedEM(8, 4, 40, 16)
    x, activations = torch.randn(4, 8, 4, 30), torch.rand(4, 8, 30)
    with LargestTensor() as made, torch.no_grad():
        layer(x, activations)
    assert made.numel <= 4 * 40 * (8 * 30) * 16 / 8


# -- all layers ---------------------------------------------------------------------------------------------------


def test_shared_transforms_of_children_whose_moments_would_overflow() -> None:
    layer = SharedEM(4, 8, 6, 5)
    for x, activations in ((1e18, 1e18), (1e18, 1.0), (1.0, 1e18)):
        out = layer(x * torch.randn(2, 4, 8, 9), torch.full((2, 4, 9), activations))
        assert all(t.isfinite().all() for t in out)


def test_votes_ignore_autocast() -> None:
    for layer, size in (
        (ConvEM(2, 3), (34, 4, 4)),
        (ClassEM(2, 3), (34, 4, 4)),
        (SharedEM(3, 2, 7, 4), (3, 2, 5)),
    ):
        x = torch.randn(2, *size)
        expected = tree_leaves(layer.votes(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert all(map(torch.equal, tree_leaves(layer.votes(x)), expected))


@pytest.mark.parametrize(("centre", "spread"), [(0.0, 1.0), (100.0, 30.0), (100.0, 1.0)])
def test_chunked_in_float32(centre: float, spread: float) -> None:
    torch.manual_seed(0)
    layer = ConvEM(4, 6, num_iters=3, lam_start=0.1, lam_step=0.1)
    x = torch.rand(2, 68, 5, 5)
    x[:, :64] = centre + spread * torch.randn(2, 64, 5, 5)
    exact = copy.deepcopy(layer).double().route(x.double())
    with use_engines("chunked"), record_engines() as choices:
        found = layer.route(x)
    assert [choice.engine.name for choice in choices] == ["chunked"]
    for a, b in zip(found[:2], exact[:2], strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


def test_activations_do_not_saturate_at_the_start() -> None:
    torch.manual_seed(0)
    x = capsule_map(8, 8, 4, 9, 9, torch.float32)
    first = ConvEM(8, 16, stride=2, normalize_cost=True)(x)
    second = ConvEM(16, 16, normalize_cost=True)(first)
    for y in (first, second):
        a = y[:, -16:]
        assert 0.1 < a.mean() < 0.9 and a.std() > 0.1
        assert ((a > 0.01) & (a < 0.99)).float().mean() > 0.3


def test_a_single_child_has_no_variance_to_compute_from_moments() -> None:
    layer = ConvEM(1, 3, 4, kernel_size=1, num_iters=3)
    x = torch.cat([torch.randn(2, 16, 3, 3) * 1000, torch.rand(2, 1, 3, 3)], dim=1)
    with use_engines("reference"):
        expected = layer.route(x)
    with use_engines(target="onnx_cpu"), record_engines() as choices:
        found = layer.route(x)
    assert [choice.engine.name for choice in choices] == ["frozen"]
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other)


def test_class_logits_stay_finite_in_float16() -> None:
    # without normalised costs they grow with the number of children
    layer = ClassEM(2, 3, lam_start=1.0).half().eval()
    x = torch.rand(2, 2 * 17, 48, 48, generator=torch.Generator().manual_seed(0)).half()
    logits = layer(x)[1]
    wide = layer.float()(x.float())[1]
    assert wide.abs().max() > 65504
    assert logits.dtype == torch.float16 and logits.isfinite().all()
    torch.testing.assert_close(logits.float(), wide.clamp(-65504, 65504), rtol=1e-2, atol=1.0)
