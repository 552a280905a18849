"""Squash against the formula; its behaviour where the formula divides by zero or overflows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from capszoo.layers import Squash, exponential_squash, squash
from tests.reference.squash import squash as naive_squash


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (3, 4, 8), (2, 3, 1, 16)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_equals_the_formula(shape: tuple[int, ...], scale: float) -> None:
    s = (torch.randn(shape, dtype=torch.float64) * scale).requires_grad_()
    fast, naive = squash(s), naive_squash(s)
    torch.testing.assert_close(fast, naive, atol=1e-12, rtol=1e-12)
    weights = torch.randn(shape, dtype=torch.float64)
    (grad,) = torch.autograd.grad((fast * weights).sum(), s)
    (expected,) = torch.autograd.grad((naive * weights).sum(), s)
    torch.testing.assert_close(grad, expected, atol=1e-12, rtol=1e-9)


def test_along_another_axis() -> None:
    s = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(squash(s, dim=1), squash(s.movedim(1, -1)).movedim(-1, 1), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_zero_capsule(dtype: torch.dtype) -> None:
    s = torch.zeros(2, 3, 8, dtype=dtype, requires_grad=True)
    v = squash(s)
    v.sum().backward()
    assert v.dtype == dtype
    assert torch.equal(v, torch.zeros_like(v))
    assert s.grad is not None and torch.isfinite(s.grad).all()


@pytest.mark.parametrize(
    ("dtype", "length"),
    [(torch.float16, 300.0), (torch.bfloat16, 1e18), (torch.float32, 1e18), (torch.float64, 1e18)],
)
def test_long_capsules_reach_length_one(dtype: torch.dtype, length: float) -> None:
    """|s|^2 is beyond float16 from 256 on; computed there, the result would be 0 or NaN."""
    s = torch.full((4, 16), length / 4, dtype=dtype, requires_grad=True)
    v = squash(s)
    v.sum().backward()
    torch.testing.assert_close(v.double().norm(dim=-1), torch.ones(4).double(), atol=4e-3, rtol=0)
    assert s.grad is not None and torch.isfinite(s.grad).all()


@pytest.mark.parametrize("function", [squash, exponential_squash])
def test_the_documented_limit_of_long_capsules(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """To 1e19 the length is at most 1; above, it grows, as the module's docstring says."""
    lengths = torch.tensor([1e18, 9e18, 1e25, 1e30])
    s = torch.stack([lengths, torch.zeros(4)], dim=1).requires_grad_()
    found = function(s).norm(dim=1)
    assert torch.autograd.grad(found.sum(), s)[0].isfinite().all()
    assert (found[:2] <= 1 + 1e-6).all()
    torch.testing.assert_close(found[2:], lengths[2:] / 1e19)


def test_module_squashes_each_group_of_channels() -> None:
    x = torch.randn(2, 12, 5, 4)
    y = Squash(dim=1, pose_dim=4)(x)
    for cap in range(3):
        torch.testing.assert_close(y[:, cap * 4 : cap * 4 + 4], squash(x[:, cap * 4 : cap * 4 + 4], dim=1))
    torch.testing.assert_close(Squash()(x), squash(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_script_and_fx(dtype: torch.dtype) -> None:
    module = Squash(dim=1, pose_dim=4)
    x = torch.randn(2, 12, 5, 4, dtype=dtype)
    for other in (torch.jit.script(module), torch.fx.symbolic_trace(module)):
        assert torch.equal(other(x), module(x))
        assert other(x).dtype == dtype
