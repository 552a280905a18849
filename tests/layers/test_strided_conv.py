"""The strided convolution whose gradients are matrix products in bfloat16 on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import library, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.flop_counter import FlopCounterMode

from capszoo.layers import PrimaryCaps2d, use_engines
from capszoo.layers._strided_conv import StridedConv2d, strided_conv
from capszoo.layers.tuning import tuned

#: Channels in and out, kernel, stride, height and width. None has outputs of one column: oneDNN's own convolution to
#: such outputs is wrong in bfloat16 at some sizes.
SIZES = [
    (5, 7, 9, 2, 21, 24),
    (8, 16, 9, 2, 20, 20),
    (3, 4, 10, 3, 10, 17),
    (2, 6, 11, 4, 31, 15),
    (134, 6, 9, 2, 14, 13),  # more channels than a block of the C++ code
    (3, 5, 2, 3, 8, 9),  # inputs that no tap reaches
]


def chosen(layer: StridedConv2d, x: torch.Tensor) -> bool:
    """True if the gradients of this call are matrix products."""
    found = layer(x).grad_fn
    return "strided_conv" in str(found)


def gradients(layer: nn.Module, x: torch.Tensor, seed: torch.Tensor, autocast: bool) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], seed.to(y.dtype))]


def test_flops_are_those_of_the_convolution() -> None:
    counts, layer = [], StridedConv2d(3, 4, 10, 3)
    for engines in ((), ("reference",)):
        x = torch.randn(2, 3, 13, 17, requires_grad=True)
        with (
            FlopCounterMode(display=False) as counter,
            use_engines(*engines),
            torch.autocast("cpu", torch.bfloat16),
        ):
            y = layer(x)
            assert ("strided_conv" in str(y.grad_fn)) == (not engines)
            y.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients_equal_those_of_the_convolution(size: Any, bias: bool, channels_last: bool) -> None:
    """Exact to two roundings to bfloat16; blocks of images that do not divide the batch."""
    c, o, k, stride, h, w = size
    layer = StridedConv2d(c, o, k, stride, bias=bias)
    x = torch.randn(5, c, h, w).bfloat16().float()
    layer.weight.data = layer.weight.data.bfloat16().float()
    if channels_last:
        x, layer = x.to(memory_format=torch.channels_last), layer.to(memory_format=torch.channels_last)
    seed = torch.randn_like(layer(x)).bfloat16()
    with tuned(strided_conv_block_images=2, strided_conv_min_kernel=2):
        with torch.autocast("cpu", torch.bfloat16):
            assert chosen(layer, x)
        found = gradients(layer, x, seed, True)
    with use_engines("reference"):
        plain = gradients(layer, x, seed, True)
    assert found[0].dtype == torch.bfloat16 and found[0].is_contiguous(memory_format=torch.channels_last)
    expected = gradients(layer.double(), x.double(), seed, False)
    for f, p, e in zip(found, plain, expected, strict=True):
        assert f.dtype == p.dtype and f.shape == e.shape
        assert error(f, e) < max(4e-3, 1.5 * error(p, e))


def test_where_it_is_chosen() -> None:
    layer, x = StridedConv2d(4, 8, 9, 2), torch.randn(2, 4, 20, 20)
    assert not chosen(layer, x), "float32"
    assert chosen(layer.bfloat16(), x.bfloat16()), "bfloat16 without autocast"
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert chosen(layer, x)
        for names in (("reference",), ("blocked", "reference")):  # as a routing layer without "blocked"
            with use_engines(*names):
                assert not chosen(layer, x)
        with use_engines("blocked"):
            assert chosen(layer, x)
        with torch.no_grad():
            assert layer(x).grad_fn is None
        for other in (
            StridedConv2d(4, 8, 7, 2),
            StridedConv2d(4, 8, 9, 1),
            StridedConv2d(4, 8, 9, 2, 1),
            StridedConv2d(4, 8, 9, 2, groups=2),
            StridedConv2d(4, 8, 9, 2, dilation=2),
            StridedConv2d(4, 8, 9, (2, 3)),
        ):
            assert not chosen(other, x), other
    with torch.autocast("cpu", torch.float16):
        assert not chosen(layer, x)
    with pytest.raises(RuntimeError, match="same"):  # PyTorch's own message
        layer(x.bfloat16())


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = StridedConv2d(4, 8, 9, 2).bfloat16(), torch.randn(2, 4, 20, 20).bfloat16()
    assert chosen(layer, x)
    monkeypatch.setenv("CAPSZOO_NATIVE", "0")
    assert not chosen(layer, x)


def test_threads_do_not_change_the_sums() -> None:
    layer = StridedConv2d(4, 8, 9, 2).bfloat16()
    x = torch.randn(7, 4, 20, 20).bfloat16()
    seed, before = torch.randn_like(layer(x)), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients(layer, x, seed, False)[1])
    finally:
        torch.set_num_threads(before)
    assert found[0].equal(found[1]) and found[0].equal(found[2])


def test_infinity_and_nan_are_kept() -> None:
    layer = StridedConv2d(4, 8, 9, 2, bias=False).bfloat16()
    x = torch.randn(2, 4, 20, 20).bfloat16()
    seed = torch.randn_like(layer(x))
    seed[0, 0, 2, 3], seed[1, 0, 0, 0] = torch.nan, torch.inf
    found = gradients(layer, x, seed, False)[1]
    with use_engines("reference"):
        expected = gradients(layer, x, seed, False)[1]
    assert found.isnan().equal(expected.isnan()) and found.isnan().any()
    assert found.isinf().equal(expected.isinf()) and found.isinf().any()


def test_gradients_that_are_not_wanted() -> None:
    layer, x = StridedConv2d(4, 8, 9, 2), torch.randn(2, 4, 20, 20)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
        assert layer.weight.grad is not None and x.grad is None
        layer.requires_grad_(False)
        layer.zero_grad()
        x.requires_grad_()
        layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is None


def test_an_empty_batch() -> None:
    layer, x = StridedConv2d(4, 8, 9, 2), torch.randn(0, 4, 20, 20, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    assert layer.weight.grad is not None and not layer.weight.grad.any()
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.slow
def test_compiled() -> None:
    layer, x = StridedConv2d(4, 8, 9, 2), torch.randn(3, 4, 20, 22)
    with torch.autocast("cpu", torch.bfloat16):
        seed = torch.randn_like(layer(x))
    eager = gradients(layer, x, seed, True)
    compiled = gradients(torch.compile(layer, fullgraph=True), x, seed, True)
    for e, c in zip(eager, compiled, strict=True):
        torch.testing.assert_close(c, e)
    seen: list[str] = []

    def noting(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return aot_eager(graph, inputs)

    gradients(torch.compile(layer, backend=noting, fullgraph=True), x, seed, True)
    assert any("strided_conv" in target for target in seen)


def test_operators() -> None:
    """Schema, fake kernels, autograd registration and AOT tracing, as PyTorch checks them."""
    x = torch.randn(3, 4, 12, 14, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(6, 4, 9, 9, dtype=torch.bfloat16, requires_grad=True)
    for bias in (None, torch.randn(6, dtype=torch.bfloat16, requires_grad=True)):
        library.opcheck(strided_conv, (x, weight, bias, 2))


def test_it_is_differentiable_once() -> None:
    layer, x = StridedConv2d(4, 8, 9, 2), torch.randn(2, 4, 20, 20, requires_grad=True)

    def second() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x).float().square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        first.square().sum().backward()

    with pytest.raises(RuntimeError, match="use_engines\\('reference'\\)"):
        second()
    with use_engines("reference"):
        second()


def test_transforms_and_graphs_use_the_convolution() -> None:
    layer = PrimaryCaps2d(4, 2, 4, kernel_size=9, stride=2).bfloat16()
    x = torch.randn(2, 4, 20, 20, dtype=torch.bfloat16)
    expected = layer(x)
    torch.testing.assert_close(torch.func.vmap(lambda one: layer(one[None])[0])(x), expected)
    assert "capszoo::" not in str(torch.jit.script(layer).inlined_graph)
    assert "capszoo" not in torch.fx.symbolic_trace(layer).code
