"""Heinsen's routing against the naive procedure, in float64; and what is stated of it."""

from __future__ import annotations

import pytest
import torch

from capszoo.layers import HeinsenRouting
from tests.reference import heinsen as naive
from tests.support import LargestTensor
from tests.support.layers import assert_same, shaken

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


def test_no_vote_is_formed() -> None:
    layer = HeinsenRouting(50, 8, 20, 16)
    with LargestTensor() as seen:
        layer(torch.randn(3, 50, 8))
    assert seen.numel == 3 * 50 * 20 < 3 * 50 * 20 * 16


def test_parameters_are_those_of_the_release() -> None:
    """By the shapes in the paper's release: A, F, G, S, and β as two tables or two linear layers."""

    def count(layer: HeinsenRouting) -> int:
        return sum(p.numel() for p in layer.parameters())

    n, d, m, h = 64, 1024, 64, 1024
    shared = m * d + d * h + m * h + h * d + 2 * m * d
    assert count(HeinsenRouting(n, d, m, h)) == n * d + n + shared + 2 * n * m + 2 * n * m
    assert count(HeinsenRouting(0, d, m, h)) == d + 1 + shared + 2 * m + 2 * (d * m + m)
