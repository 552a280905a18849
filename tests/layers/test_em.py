"""EM routing against the naive procedure, in float64, values and gradients; and its invariants."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn
from torch.utils._pytree import tree_leaves

from capszoo.layers import ClassEM, ConvEM, SharedEM, _blockwise, em_routing, shared_em_routing
from capszoo.layers._native.build import compiler
from capszoo.layers.em import blocked
from capszoo.layers.em.blocked import VoteBuffer
from capszoo.layers.em.steps import MIN_SHARE, parent_logits
from capszoo.layers.engine_choice import record_engines, use_engines
from capszoo.layers.tuning import tuned
from tests.reference import em as naive
from tests.support import LargestTensor
from tests.support.layers import Largest

F64 = torch.float64


def assert_same(fast: list[Tensor], expected: list[Tensor], inputs: list[Tensor], atol: float = 1e-9) -> None:
    """Equal values, and equal gradients of a random functional of all of them."""
    for a, b in zip(fast, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-9)
    weights = [torch.randn(t.shape, dtype=F64) for t in fast]
    grads = torch.autograd.grad(sum((t * w).sum() for t, w in zip(fast, weights, strict=True)), inputs)
    expected_grads = torch.autograd.grad(
        sum((t * w).sum() for t, w in zip(expected, weights, strict=True)), inputs
    )
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert expected_grad.abs().max() > 0
        torch.testing.assert_close(grad, expected_grad, atol=atol, rtol=1e-8)


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
    assert_same(fast, list(expected[: len(fast)]), inputs)


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
    assert_same([poses, torch.sigmoid(logits)], list(expected[:2]), [votes, activations, beta_v, beta_a])
    torch.testing.assert_close(couplings.transpose(1, 2), expected[2], atol=1e-9, rtol=1e-9)
    for name in settings:  # and none of them is ignored
        others = {key: value for key, value in settings.items() if key != name}
        other = em_routing(votes.permute(0, 2, 1, 3), activations, beta_v, beta_a, num_iters, **others)
        if name != "lam_step" or num_iters > 1:
            assert (other[1] - logits).abs().max() > 1e-4, name


def test_mean_may_be_given() -> None:
    votes = torch.randn(3, 4, 7, 5, dtype=F64)  # [b, j, i, e]
    activations = torch.rand(3, 7, dtype=F64)
    beta_v, beta_a = betas(4)
    weights = activations + 1e-4
    mean = (votes * weights[:, None, :, None]).sum(2) / weights.sum(1)[:, None, None]
    for num_iters in (1, 3):
        plain = em_routing(votes, activations, beta_v, beta_a, num_iters)
        given = em_routing(votes, activations, beta_v, beta_a, num_iters, mean=mean)
        for a, b in zip(plain, given, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("num_iters", [1, 2, 3])
def test_couplings_sum_to_one_over_the_parents_only(num_iters: int) -> None:
    votes = torch.randn(2, 5, 9, 4, dtype=F64)
    couplings = em_routing(votes, torch.rand(2, 9, dtype=F64), *betas(5), num_iters)[2]
    assert couplings.shape == (2, 5, 9)
    torch.testing.assert_close(couplings.sum(1), torch.ones(2, 9, dtype=F64))
    assert (couplings.sum(2) - 1).abs().min() > 1e-3


def test_permuting_children_changes_nothing() -> None:
    votes, activations = torch.randn(2, 4, 11, 3, dtype=F64), torch.rand(2, 11, dtype=F64)
    order = torch.randperm(11)
    beta_v, beta_a = betas(4)
    plain = em_routing(votes, activations, beta_v, beta_a, 3)
    other = em_routing(votes[:, :, order], activations[:, order], beta_v, beta_a, 3)
    torch.testing.assert_close(other[0], plain[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(other[1], plain[1], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(other[2], plain[2][:, :, order], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("num_iters", [1, 2, 3])
def test_responds_to_its_input_activations(num_iters: int) -> None:
    """Activations weigh the votes (an implementation that only scales all of them alike would pass neither test)."""
    votes = torch.randn(1, 3, 8, 4, dtype=F64)
    beta_v, beta_a = betas(3)
    even = em_routing(votes, torch.full((1, 8), 0.5, dtype=F64), beta_v, beta_a, num_iters)
    uneven = torch.full((1, 8), 0.5, dtype=F64)
    uneven[0, 0] = 0.9
    changed = em_routing(votes, uneven, beta_v, beta_a, num_iters)
    for a, b in zip(even[:2], changed[:2], strict=True):
        assert (a - b).abs().min() > 1e-4
    alone = torch.zeros(1, 8, dtype=F64)
    alone[0, 3] = 1.0  # a child that is there alone decides the poses
    poses = em_routing(votes, alone, beta_v, beta_a, 1)[0]
    torch.testing.assert_close(poses, votes[:, :, 3], atol=1e-3, rtol=1e-3)


def test_agreement_raises_the_activation_and_the_couplings() -> None:
    votes = torch.randn(1, 3, 12, 4, dtype=F64)
    votes[0, 1, :9] = 0.05 * votes[0, 1, :9] + 1.0  # nine children agree about parent 1
    zeros = torch.zeros(3, dtype=F64)
    _, logits, couplings = em_routing(votes, torch.full((1, 12), 0.8, dtype=F64), zeros, zeros, 3)
    assert logits.argmax() == 1
    assert couplings[0, 1, :9].mean() > 0.9 and couplings[0, 1, 9:].mean() < 0.3


def test_normalised_costs_span_five_and_keep_the_order() -> None:
    votes, activations = 0.1 * torch.randn(4, 6, 30, 8), torch.rand(4, 30)
    beta = torch.zeros(6)
    plain = em_routing(votes, activations, beta, beta, 1)[1]
    scaled = em_routing(votes, activations, beta, beta, 1, normalize_cost=True)[1]
    assert plain.abs().min() > 5  # each sigmoid is saturated without
    torch.testing.assert_close(scaled.amax(1), torch.full((4,), 5.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.amin(1), torch.full((4,), -5.0), atol=1e-5, rtol=0)
    assert torch.equal(scaled.argsort(1), plain.argsort(1))


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


def test_refuses_zero_iterations() -> None:
    with pytest.raises(ValueError, match="num_iters"):
        em_routing(torch.randn(1, 2, 3, 4), torch.rand(1, 3), torch.zeros(2), torch.zeros(2), 0)


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
    assert_same([layer(x)], [expected], [x, *layer.parameters()])
    fast = layer.route(x)
    torch.testing.assert_close(fast[0], poses, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(torch.sigmoid(fast[1]), activations, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(fast[2].transpose(3, 4), couplings, atol=1e-9, rtol=1e-9)


def test_convolution_normalises_each_window_separately() -> None:
    layer = ConvEM(2, 3, pose_size=2, kernel_size=3, stride=1, num_iters=2).double()
    randomise(layer)
    x = capsule_map(1, 2, 2, 5, 5)
    couplings = layer.route(x)[2]  # [b, h', w', j, i]
    torch.testing.assert_close(couplings.sum(3), torch.ones(1, 3, 3, 18, dtype=F64))
    alone = layer.route(x[:, :, :3, :3])[2]  # the first window cut out of the image
    torch.testing.assert_close(alone[:, 0, 0], couplings[:, 0, 0])
    # the centre of the image lies in all windows, as tap (2 - y, 2 - x): nine couplings of its own, not one shared
    centre = torch.stack(
        [couplings[0, y, z, :, ((2 - y) * 3 + (2 - z)) * 2] for y in range(3) for z in range(3)]
    )
    assert centre.std(dim=0).min() > 1e-3


def test_class_layer_equals_naive() -> None:
    for num_iters in (1, 2, 3, 4):
        for caps, rows, size in ((1, 2, (2, 3)), (2, 3, (1, 1))):
            layer = ClassEM(caps, 2, rows, num_iters).double()
            randomise(layer)
            x = capsule_map(2, caps, rows, *size).requires_grad_()
            expected = naive.classes(x, layer.weight, layer.beta_v, layer.beta_a, num_iters)
            poses, logits = layer(x)
            assert_same([poses, torch.sigmoid(logits)], list(expected[:2]), [x, *layer.parameters()])
            couplings = layer.route(x)[2].flatten(2).transpose(1, 2)
            torch.testing.assert_close(couplings, expected[2], atol=1e-9, rtol=1e-9)


def test_class_layer_takes_any_grid_and_sees_places() -> None:
    layer = ClassEM(3, 4, pose_size=2)
    for size in ((1, 1), (2, 5), (7, 3)):
        assert layer(capsule_map(2, 3, 2, *size, dtype=torch.float32))[1].shape == (2, 4)
    x = capsule_map(1, 3, 2, 2, 2, dtype=torch.float32)
    assert (layer(x)[0] - layer(x.flip(3))[0]).abs().max() > 1e-3


def test_weights_are_not_expanded_over_the_batch() -> None:
    """Votes, and nothing larger."""
    layer = ConvEM(4, 5, stride=2)
    x = capsule_map(16, 4, 4, 9, 9, torch.float32).requires_grad_()
    with use_engines("reference"), LargestTensor() as made:
        layer(x).sum().backward()
    assert made.numel == 16 * 16 * 36 * 5 * 16


def test_blocks_hold_memory_down() -> None:
    """Votes are formed in the buffers of a block alone, forward and backward."""
    layer = ConvEM(8, 16, stride=1)
    for batch in (4, 12):
        x = capsule_map(batch, 8, 4, 10, 10, torch.float32).requires_grad_()
        with (
            tuned(em_blocked_min_votes=0, em_block_votes=1 << 18),
            use_engines("blocked"),
            record_engines() as choices,
            Largest() as seen,
        ):
            layer(x).sum().backward()
        assert [choice.engine.name for choice in choices] == ["blocked"]
        votes = 64 * batch * 72 * 16 * 16
        assert 0 < seen.numbers <= votes // 8  # the windows themselves are a fifteenth


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
    assert_same([poses, torch.sigmoid(logits)], list(expected[:2]), inputs, atol=1e-8)
    couplings = layer.route(x, activations)[2]  # [b, j, g, s]
    torch.testing.assert_close(couplings.flatten(2).transpose(1, 2), expected[2], atol=1e-9, rtol=1e-9)


def test_shared_works_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parents, and of groups of children."""
    layer = SharedEM(3, 2, 7, 4, 3)
    x, activations = torch.randn(2, 3, 2, 5, requires_grad=True), torch.rand(2, 3, 5)
    made: list[int] = []
    apply = _blockwise._Blockwise.apply
    monkeypatch.setattr(_blockwise._Blockwise, "apply", lambda *a: (made.append(a[3]), apply(*a))[1])
    with tuned(em_shared_block_elements=200):
        layer(x, activations)
    # products, first moments; twice forms, weighted features, moments
    assert len(made) == 8 and max(made) < 7


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


def test_shared_permuting_places_changes_nothing() -> None:
    layer = SharedEM(3, 4, 5, 6).double()
    x, activations = torch.randn(2, 3, 4, 7, dtype=F64), torch.rand(2, 3, 7, dtype=F64)
    order = torch.randperm(7)
    for a, b in zip(layer(x, activations), layer(x[:, :, :, order], activations[:, :, order]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


# -- all layers ---------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """:class:`SharedEM` on a packed input, so that one test fits all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = SharedEM(3, 4, 5, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flatten(2)
        return self.layer(x[:, :12].unflatten(1, [3, 4]), x[:, 12:])


def layers() -> list[tuple[str, nn.Module, Tensor]]:
    torch.manual_seed(3)
    shared = torch.cat([torch.randn(2, 12, 5, 4), torch.rand(2, 3, 5, 4)], dim=1)
    return [
        ("conv", ConvEM(3, 5, stride=2, num_iters=3), capsule_map(2, 3, 4, 7, 6, torch.float32)),
        ("class", ClassEM(3, 5, num_iters=3), capsule_map(2, 3, 4, 5, 4, torch.float32)),
        ("shared", Packed(), shared),
    ]


each_layer = pytest.mark.parametrize(("name", "layer", "x"), layers())


def outputs(layer: Any, x: Tensor) -> list[Tensor]:
    y = layer(x)
    return list(y) if isinstance(y, tuple) else [y]


def half_types() -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16, torch.float16]


def test_shared_transforms_of_children_whose_moments_would_overflow() -> None:
    layer = SharedEM(4, 8, 6, 5)
    for x, activations in ((1e18, 1e18), (1e18, 1.0), (1.0, 1e18)):
        out = layer(x * torch.randn(2, 4, 8, 9), torch.full((2, 4, 9), activations))
        assert all(t.isfinite().all() for t in out)


@pytest.mark.parametrize("dtype", half_types())
@pytest.mark.parametrize("kind", ["random", "zero", "constant", "huge", "no activations"])
@each_layer
def test_finite(name: str, layer: nn.Module, x: Tensor, kind: str, dtype: torch.dtype) -> None:
    if kind == "huge" and dtype == torch.float16:
        pytest.skip("the votes of poses near float16's largest number do not fit into it")
    layer = type(layer)() if isinstance(layer, Packed) else type(layer)(3, 5, num_iters=3)
    x = {
        "random": x,
        "zero": torch.zeros_like(x),
        "constant": torch.full_like(x, 0.5),
        "huge": x * 1e4,
        "no activations": torch.cat([x[:, :-3], torch.zeros_like(x[:, -3:])], dim=1),
    }[kind]
    layer, x = layer.to(dtype), x.to(dtype, copy=True).requires_grad_()
    results = outputs(layer, x)
    assert all(t.dtype == dtype and torch.isfinite(t).all() for t in results)
    sum(t.float().mean() for t in results).backward()
    for tensor in (x, *layer.parameters()):
        assert torch.isfinite(tensor.grad).all()


@each_layer
def test_half_precision_is_float32_inside(name: str, layer: nn.Module, x: Tensor) -> None:
    rounded = x.bfloat16().float()
    layer = layer.to(torch.bfloat16)
    half = [t.float() for t in outputs(layer, x.bfloat16())]
    full = outputs(layer.float(), rounded)
    for a, b in zip(half, full, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=2**-8)  # nothing but the last rounding


@each_layer
def test_autocast_does_not_reach_inside(name: str, layer: nn.Module, x: Tensor) -> None:
    owner = layer.layer if isinstance(layer, Packed) else layer
    poses = x[:, :12].flatten(2).unflatten(1, [3, 4]) if owner is not layer else x
    expected = [*outputs(layer, x), *outputs(owner.votes, poses)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = [*outputs(layer, x), *outputs(owner.votes, poses)]
    for a, b in zip(given, expected, strict=True):
        assert torch.equal(a, b)


@each_layer
def test_meta(name: str, layer: nn.Module, x: Tensor) -> None:
    shapes = [t.shape for t in outputs(layer, x)]
    on_meta = (type(layer)() if isinstance(layer, Packed) else layer.__class__(3, 5, num_iters=3)).to("meta")
    if name == "conv":
        on_meta.stride = 2
    assert [t.shape for t in outputs(on_meta, x.to("meta"))] == shapes


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


@pytest.mark.parametrize("kwargs", [{"num_iters": 0}, {"pose_size": 1}])
@pytest.mark.parametrize("layer", [ConvEM, ClassEM])
def test_bad_settings(layer: type[nn.Module], kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        layer(2, 3, **kwargs)


def test_bad_settings_shared() -> None:
    with pytest.raises(ValueError, match="num_iters"):
        SharedEM(2, 3, 4, 5, num_iters=0)
    with pytest.raises(ValueError, match="num_iters"):
        shared_em_routing(
            *(torch.zeros(shape) for shape in ((1, 2, 3, 4), (1, 2, 4), (5, 2, 3, 6), (5, 2, 6), (5,), (5,))),
            num_iters=0,
        )


@pytest.mark.parametrize("layer", [ConvEM(3, 4), ClassEM(3, 4)])
def test_wrong_map_is_refused(layer: nn.Module) -> None:
    with pytest.raises(AssertionError, match="51 channels"):
        layer(torch.randn(2, 48, 5, 5))


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
