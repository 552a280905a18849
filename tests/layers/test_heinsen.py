"""Heinsen's routing against the naive procedure, in float64; and what is stated of it."""

from __future__ import annotations

import pytest
import torch

from capszoo.layers import HeinsenRouting
from tests.reference import heinsen as naive
from tests.support.errors import refuses
from tests.support.layers import Largest, assert_same, shaken

F64 = torch.float64


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("in_caps", [4, 0], ids=["fixed", "any number"])
@pytest.mark.parametrize(
    ("num_iters", "out_caps", "out_dim"), [(1, 3, 4), (2, 3, 4), (3, 3, 4), (2, 3, 1), (2, 1, 4)]
)
def test_layer_equals_the_procedure(in_caps: int, num_iters: int, out_caps: int, out_dim: int) -> None:
    layer = shaken(HeinsenRouting(in_caps, 3, out_caps, out_dim, num_iters))
    x = torch.randn(2, 4, 3, dtype=F64, requires_grad=True)
    poses, credit = layer.route(x)
    expected, expected_credit = naive.route(layer, x)
    # the predictions have a part from the second iteration on, and one parent uses all
    idle = ("pred_", "score_") if num_iters == 1 or out_caps == 1 else ()
    idle += ("beta_ign",) if out_caps == 1 else ()
    weights = [p for name, p in layer.named_parameters() if not name.startswith(idle)]
    assert_same(poses, expected, [x, *weights])
    assert_same(credit, expected_credit, [x, layer.act_weight, *layer.beta_use.parameters()])
    assert torch.equal(layer(x), poses)


def test_credit_is_of_both_signs_and_makes_the_parents() -> None:
    layer = shaken(HeinsenRouting(6, 3, 4, 1))
    x = torch.randn(5, 6, 3, dtype=F64)
    poses, credit = layer.route(x)
    scaled = x[:, None] * layer.vote_scale[:, None] / 6**0.5  # [b, j, i, d]
    votes = scaled @ layer.weight + layer.vote_bias[:, None]
    torch.testing.assert_close((credit[..., None] * votes).sum(2), poses)
    assert (credit > 0).any() and (credit < 0).any()


def test_any_number_of_children_in_any_order() -> None:
    layer = HeinsenRouting(0, 3, 4, 5).to(F64)
    for count in (1, 4, 9):
        x, order = torch.randn(2, count, 3, dtype=F64), torch.randperm(count)
        (poses, credit), (again, moved) = layer.route(x), layer.route(x[:, order])
        torch.testing.assert_close(again, poses)
        torch.testing.assert_close(moved, credit[:, :, order])


def test_no_vote_is_formed() -> None:
    layer = HeinsenRouting(50, 8, 20, 16)
    with Largest() as seen:
        layer(torch.randn(3, 50, 8))
    assert seen.numbers == 3 * 50 * 20 < 3 * 50 * 20 * 16


@pytest.mark.parametrize("in_caps", [6, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["zero", "constant", "huge"])
def test_awkward_inputs(in_caps: int, dtype: torch.dtype, kind: str) -> None:
    layer = HeinsenRouting(in_caps, 8, 4, 5).to(dtype)
    # a benefit may be linear in the child, so that a sum of votes grows as its square, and float16 ends at 65504
    scale = 30.0 if dtype == torch.float16 else 1e5
    x = {"zero": torch.zeros(2, 6, 8), "constant": torch.ones(2, 6, 8), "huge": torch.randn(2, 6, 8) * scale}[
        kind
    ]
    x = x.to(dtype).requires_grad_()
    poses, credit = layer.route(x)
    assert poses.dtype == credit.dtype == dtype
    poses.float().square().sum().backward()
    for value in (poses, credit, x.grad, *(p.grad for p in layer.parameters())):
        assert torch.isfinite(value).all()


def test_parameters_are_those_of_the_release() -> None:
    """By the shapes in the paper's release: A, F, G, S, and β as two tables or two linear layers."""

    def count(layer: HeinsenRouting) -> int:
        return sum(p.numel() for p in layer.parameters())

    n, d, m, h = 64, 1024, 64, 1024
    shared = m * d + d * h + m * h + h * d + 2 * m * d
    assert count(HeinsenRouting(n, d, m, h)) == n * d + n + shared + 2 * n * m + 2 * n * m
    assert count(HeinsenRouting(0, d, m, h)) == d + 1 + shared + 2 * m + 2 * (d * m + m)


@pytest.mark.parametrize("in_caps", [6, 0])
def test_graphs_have_its_values(in_caps: int) -> None:
    layer = HeinsenRouting(in_caps, 3, 4, 5).eval()
    x, scripted = torch.randn(2, 6, 3), torch.jit.script(layer)
    for graph in (scripted, torch.fx.symbolic_trace(layer), torch.export.export(layer, (x,)).module()):
        assert torch.equal(graph(x), layer(x))
    torch.testing.assert_close(scripted.route(x), layer.route(x))


def test_wrong_sizes_are_refused() -> None:
    with refuses(AssertionError, names=["number", "capsules"]):
        HeinsenRouting(6, 3, 4, 5)(torch.randn(1, 5, 3))
    with refuses(AssertionError, names=["dimension"]):
        HeinsenRouting(0, 3, 4, 5)(torch.randn(1, 5, 4))
    with refuses(ValueError, names=["in_caps"]):
        HeinsenRouting(-1, 3, 4, 5)
