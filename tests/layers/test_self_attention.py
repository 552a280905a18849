"""Self-attention routing and its squash against the naive procedure, in float64; and their invariants."""

from __future__ import annotations

import pytest
import torch

from capszoo.layers import SelfAttentionRouting, Squash, exponential_squash, self_attention_routing
from tests.reference import dynamic as naive_votes
from tests.reference import self_attention as naive
from tests.reference.squash import exponential_squash_vector
from tests.support.layers import assert_same, dense_transforms

F64 = torch.float64


@pytest.mark.parametrize("scale", [1e-2, 1.0, 50.0])
def test_squash_equals_the_formula(scale: float) -> None:
    s = (torch.randn(7, 5, dtype=F64) * scale).requires_grad_()
    assert_same(exponential_squash(s), torch.stack([exponential_squash_vector(row) for row in s]), [s])
    groups = Squash(dim=1, pose_dim=5, exponential=True)(s.detach().reshape(1, 35, 1, 1))
    torch.testing.assert_close(groups.reshape(7, 5), exponential_squash(s.detach()))


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 300.0])
def test_squash_of_zero_and_long_capsules(dtype: torch.dtype, value: float) -> None:
    s = torch.full((2, 3, 8), value, dtype=dtype, requires_grad=True)
    v = exponential_squash(s)
    v.sum().backward()
    assert v.dtype == dtype and torch.isfinite(s.grad).all()
    lengths = v.double().norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, float(value > 0)), atol=4e-3, rtol=0)


@pytest.mark.parametrize("shape", [(1, 6, 3, 4), (2, 5, 1, 3), (3, 1, 4, 2), (2, 7, 4, 5)])
def test_function_equals_the_procedure(shape: tuple[int, ...]) -> None:
    b, i, j, e = shape
    votes = torch.randn(b, i, j, e, dtype=F64, requires_grad=True)
    bias = torch.randn(i, j, dtype=F64, requires_grad=True)
    poses, couplings = self_attention_routing(votes.permute(0, 2, 1, 3), bias.t())
    expected, expected_couplings = naive.route(votes, bias)
    assert_same(poses, expected, [votes, bias])
    torch.testing.assert_close(couplings, expected_couplings.transpose(1, 2), atol=1e-11, rtol=1e-10)
    torch.testing.assert_close(couplings.sum(1), torch.ones(b, i, dtype=F64))


def test_layer_equals_the_procedure() -> None:
    layer = SelfAttentionRouting(6, 3, 4, 5).to(F64)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 6, 3, dtype=F64, requires_grad=True)
    votes = naive_votes.dense_votes(x, dense_transforms(layer))
    expected, couplings = naive.route(votes, layer.bias.t())
    assert_same(layer(x), expected, [x, layer.weight, layer.bias])
    torch.testing.assert_close(layer.route(x)[1], couplings.transpose(1, 2))
