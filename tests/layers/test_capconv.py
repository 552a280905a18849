"""capConv, the encapsulated module and capFC against loops, and what they promise."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from timm.utils.model import freeze_batch_norm_2d
from torch import Tensor, nn

from capszoo.layers.capconv import (
    CapConv,
    CapFC,
    CoefficientConv2d,
    EncapModule,
    MasterAide,
    squash_groups,
)
from capszoo.layers.capconv.routing import groups_together, merge_groups
from capszoo.layers.engine_choice import record_engines, use_engines
from capszoo.layers.squash import squash
from tests.reference import capconv as reference
from tests.support.errors import refuses


def disturbed(module: nn.Module) -> nn.Module:
    """The module in float64 with norms that are not the identity."""
    module = module.double()
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.uniform_(m.bias, -0.3, 0.6)
            m.running_mean.uniform_(-0.2, 0.2)
            m.running_var.uniform_(0.3, 1.5)
    return module


def gradients(output: Tensor, module: nn.Module, x: Tensor) -> list[Tensor]:
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    grads = torch.autograd.grad((output * weight).sum(), [x, *module.parameters()])
    return list(grads)


def compare(module: nn.Module, got: Tensor, want: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    for a, b in zip(gradients(got, module, x), gradients(want, module, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode, coefficients", [("master", "both"), ("master_aide", "own")])
@pytest.mark.parametrize("kernel, stride, chans", [(3, 2, (2, 4)), (1, 1, (4, 4)), (1, 2, (4, 6))])
def test_layer_is_the_reference(mode, coefficients, kernel, stride, chans, training) -> None:
    layer = disturbed(CapConv(*chans, kernel, stride, groups=2, mode=mode, coefficients=coefficients))
    layer.train(training)
    x = torch.randn(2, chans[0], 3, 2, dtype=torch.float64, requires_grad=True)
    skip = torch.randn_like(layer(x)).detach()
    compare(layer, layer(x, skip), reference.capconv(layer, x, skip, training), x)


@pytest.mark.parametrize("coefficients", ["cross", "both"])
def test_coefficient_sources(coefficients) -> None:
    layer = disturbed(CapConv(4, 4, 1, 1, groups=2, coefficients=coefficients)).eval()
    x = torch.randn(1, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    compare(layer, layer(x), reference.capconv(layer, x, None, False), x)


@pytest.mark.parametrize(
    "skip1, skip2, depth, mode",
    [
        (True, True, 3, "master"),
        (False, True, 2, "master_aide"),
        (True, False, 3, "master"),
        (True, True, 1, "master"),
    ],
)
def test_module_is_the_reference(skip1, skip2, depth, mode) -> None:
    module = EncapModule(2, 4, depth, 2, groups=2, mode=mode, skip_type1=skip1, skip_type2=skip2)
    module = disturbed(module).eval()
    assert (module.skip is not None) == skip1
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    compare(module, module(x), reference.module(module, x, False), x)


def normless(groups: int, d: int) -> CapConv:
    """A layer of squash alone: a norm that changes nothing, of a convolution that changes nothing; poses above zero."""
    layer = CapConv(groups * d, groups * d, 1, 1, groups, "master").eval()
    layer.conv, layer.bn.eps = nn.Identity(), 0.0
    return layer


@pytest.mark.parametrize("size", [0.0, 1e-8, 1e-3, 1.0, 300.0])
@pytest.mark.parametrize("groups, d", [(2, 3), (4, 1)])
def test_squash_of_the_recomputing_engine_is_the_plain_one(size, groups, d) -> None:
    layer = normless(groups, d).double()
    x = (size * torch.rand(2, groups * d, 3, 2, dtype=torch.float64)).requires_grad_()
    want = squash_groups(x, groups)
    with record_engines() as choices:
        got = layer(x)
    assert choices[0].engine.name == "recompute" and torch.equal(got, want)
    weight = torch.randn_like(want)
    (a,), (b,) = (torch.autograd.grad((y * weight).sum(), x) for y in (got, want))
    if size:  # at zero the engine has the gradient of ReLU, which is zero
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * b.abs().max().item() if d > 1 else 1e-15)


def test_squash_of_float32_keeps_its_gradient_at_any_size() -> None:
    layer = normless(1, 2)
    for size in (1e-15, 1e-5, 1e5, 1e12, 1e18):
        x = (size * torch.ones(1, 2, 1, 1)).requires_grad_()
        exact = x.detach().double().requires_grad_()
        (got,) = torch.autograd.grad(layer(x)[0, 0, 0, 0], x)
        (want,) = torch.autograd.grad(squash(exact, 1)[0, 0, 0, 0], exact)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("mode", ["master", "master_aide"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_recomputing_trains_as_the_reference_does(mode, layout) -> None:
    """Values, gradients and running statistics of a step in training mode."""
    module = disturbed(EncapModule(4, 8, 3, 2, groups=4, mode=mode)).train().to(memory_format=layout)
    x = torch.randn(3, 4, 6, 5, dtype=torch.float64, requires_grad=True)
    start = {k: v.clone() for k, v in module.state_dict().items()}
    results = []
    for names in (("reference",), ("recompute", "one_convolution")):
        module.load_state_dict(start)
        with use_engines(*names), record_engines() as choices:
            out = module(x.to(memory_format=layout))
        assert {c.engine.name for c in choices} == set(names if mode == "master" else names[:1])
        grads = torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])
        results.append([out.detach(), *grads, *[b.clone() for b in module.buffers()]])
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_recomputing_keeps_less() -> None:
    """Of a unit with both branches and a skip: input, both convolutions, coefficients, sum and result."""
    layer = CapConv(32, 32, 1, 1, groups=4).train()
    x = torch.randn(2, 32, 8, 8, requires_grad=True)
    kept = {}
    for name in ("reference", "recompute"):
        seen: dict[int, int] = {}

        def pack(t: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            if t.dim() > 3 and t.shape[-1] == 8:
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with use_engines(name), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = layer(x)
        kept[name] = sum(seen.values()) / (out.numel() * 4)
        del out
    assert kept["recompute"] < 4.5 < 9 < kept["reference"]


def test_recomputing_refuses_what_it_does_not_know() -> None:
    x = torch.randn(2, 8, 5, 5, requires_grad=True)
    hooked, synced, own = (CapConv(8, 8, 1, 1, groups=4) for _ in range(3))
    hooked.squash.register_forward_hook(lambda *_: None)
    synced.bn = nn.BatchNorm2d(8, affine=False)
    own.conv = MasterAide(8, 8, 1, 1, 4, "own")
    reasons = []
    for layer in (hooked, synced, own):
        with record_engines() as choices:
            layer(x).sum().backward()
        reasons.append([r for c in choices for r in c.refused().values()])
    assert reasons[0] == reasons[1] == ["needs the original norm and squash, without hooks"]
    assert reasons[2] == ["needs coefficients that each come from both branches"]
    with torch.no_grad(), record_engines() as choices:
        CapConv(8, 8, 1, 1, groups=4)(x)
    assert {c.engine.name for c in choices} == {"reference"}
    for mode in ("master", "master_aide"):
        with refuses(ValueError, names=["1", "channel"]):
            CapConv(8, 8, 1, 1, groups=4, mode=mode)(x[:1, :, :1, :1])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["frozen norm", "other norm", "folded norm", "no squash", "own forward"])
def test_replaced_norms_and_squashes_are_used(kind: str, training: bool) -> None:
    """Such as timm's `freeze_batch_norm_2d`, or a BatchNorm that was folded into its convolution."""
    module = EncapModule(4, 8, 2, 2, groups=4).double()
    for layer in [m for m in module.modules() if isinstance(m, (CapConv, MasterAide))]:
        for name in [n for n in ("bn", "master_bn", "aide_bn") if hasattr(layer, n)]:
            if kind == "frozen norm":
                setattr(layer, name, freeze_batch_norm_2d(getattr(layer, name)))
            elif kind == "other norm":
                setattr(layer, name, nn.GroupNorm(2, 8).double())
            elif kind == "folded norm":
                setattr(layer, name, nn.Identity())
        if kind == "no squash":
            layer.squash = nn.Identity()
        elif kind == "own forward":
            layer.squash.forward = lambda x: 0.5 * x
    module.train(training)
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64)
    with use_engines("reference"):
        expected = copy.deepcopy(module)(x)
    with use_engines("recompute"):
        assert torch.equal(module(x), expected)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("groups, d, grid, n", [(2, 3, (2, 3), 2), (1, 1, (1, 1), 1), (3, 2, (1, 2), 5)])
def test_cap_fc_is_the_reference(groups, d, grid, n, batch) -> None:
    layer = CapFC(n, d, groups, grid).double()
    x = torch.randn(batch, groups * d, *grid, dtype=torch.float64, requires_grad=True)
    assert layer.weight.shape == (d, groups * grid[0] * grid[1], n)
    compare(layer, layer(x), reference.cap_fc(x, layer.weight), x)
    poses = layer(x)
    share = layer.double().contributions(x.detach(), poses.detach())
    want = reference.contributions(x.detach(), layer.weight.detach(), poses.detach())
    torch.testing.assert_close(share.double(), want, rtol=0, atol=1e-6)
    torch.testing.assert_close(share.sum((2, 3)), torch.ones(batch, n), rtol=0, atol=1e-6)


def test_contributions_of_nothing_are_uniform() -> None:
    layer = CapFC(3, 2, 2, (2, 2))
    x = torch.zeros(1, 4, 2, 2)
    assert torch.equal(layer.contributions(x, layer(x)), torch.full((1, 3, 2, 2), 0.25))


@pytest.mark.parametrize(
    "groups, maps, d, together", [(32, 2, 3, 4), (32, 1, 2, 8), (6, 2, 2, 2), (1, 1, 3, 1), (2, 16, 2, 1)]
)
def test_merged_groups_are_the_grouped_convolution(groups, maps, d, together) -> None:
    x = torch.randn(2, groups * d, 5, 4, dtype=torch.float64)
    weight = torch.randn(groups * maps, d, 3, 3, dtype=torch.float64)
    assert groups_together(groups * maps, groups) == together
    merged = merge_groups(weight, groups, together)
    assert merged.shape == (groups * maps, together * d, 3, 3)
    got = F.conv2d(x, merged, None, 1, 1, 1, groups // together)
    torch.testing.assert_close(got, F.conv2d(x, weight, None, 1, 1, 1, groups), rtol=0, atol=1e-12)


@pytest.mark.parametrize("coefficients", ["own", "both"])
def test_prepared_for_export_the_merged_weights_are_constants(coefficients) -> None:
    layer = disturbed(MasterAide(16, 16, 1, 1, 8, coefficients)).eval()
    x = torch.rand(2, 16, 4, 4, dtype=torch.float64)
    before = layer(x).detach()
    for module in (layer.coef_master, layer.coef_aide, layer):
        module.prepare_for_export()
    keepers = [
        m
        for m in layer.modules()
        if isinstance(m, (CoefficientConv2d, MasterAide)) and m.graph_weight is not None
    ]
    assert len(keepers) == (1 if coefficients == "both" else 2)
    nn.init.zeros_(layer.coef_master.weight)  # nothing is computed from them any more
    nn.init.zeros_(layer.coef_aide.weight)
    torch.testing.assert_close(layer(x), before)
    assert not any("graph_weight" in key for key in layer.state_dict())


def test_autocast_keeps_maps_in_half_precision() -> None:
    """The bias of a grouped 1x1 convolution, float32, does not widen them."""
    layer = CapConv(8, 8, 1, 1, groups=4, mode="master")
    with torch.autocast("cpu", torch.bfloat16):
        y = layer.conv(torch.randn(2, 8, 3, 3))
    assert y.dtype == torch.bfloat16


def test_one_convolution_pays_for_few_dimensions_in_training() -> None:
    for dim, grad, expected in (
        (1, True, "one_convolution"),
        (8, True, "reference"),
        (1, False, "reference"),
    ):
        module = EncapModule(4 * dim, 8 * dim, 1, 2, groups=4, mode="master")
        with record_engines() as choices, torch.set_grad_enabled(grad):
            module(torch.randn(1, 4 * dim, 4, 4))
        assert choices[0].engine.name == expected


def test_a_hook_on_the_skip_is_called_in_training() -> None:
    module, calls = EncapModule(4, 8, 1, 2, groups=4, mode="master"), []
    assert module.skip is not None
    module.skip.register_forward_hook(lambda *_: calls.append(1))
    module(torch.randn(1, 4, 4, 4))
    assert calls == [1]
