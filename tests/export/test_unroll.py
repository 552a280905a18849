"""The prepared copy computes the same, with fewer modules, and the original stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from capszoo.errors import UsageError
from capszoo.export import unroll
from capszoo.export.unroll import fold_batchnorm, prepare_for_export, routing_iterations
from tests.support.errors import refuses
from tests.support.toys import ToyCaps


def count_norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def with_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.double().eval()


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_prepared_equals_original_in_float64(iterations: int) -> None:
    model = ToyCaps(iterations).double().eval()
    prepared = prepare_for_export(model)
    x = torch.randn(3, 1, 10, 10, dtype=torch.float64)
    torch.testing.assert_close(prepared(x), model(x), atol=1e-12, rtol=0)
    assert count_norms(model) == 1 and count_norms(prepared) == 0


def test_original_is_untouched() -> None:
    model = ToyCaps(decoder=True).train()
    before = copy.deepcopy(model.state_dict())
    prepared = prepare_for_export(model, routing_iters=1)
    assert model.training and not prepared.training
    assert routing_iterations(model) == [3] and routing_iterations(prepared) == [1]
    assert model.decoder is not None and prepared.decoder is None
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in prepared.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_iterations_are_those_asked_for() -> None:
    model = ToyCaps(3).double().eval()
    other = ToyCaps(2).double().eval()
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 1, 10, 10, dtype=torch.float64)
    torch.testing.assert_close(prepare_for_export(model, 2)(x), other(x), atol=1e-12, rtol=0)
    assert not torch.allclose(prepare_for_export(model, 2)(x), model(x))


def test_impossible_iterations_are_refused() -> None:
    with pytest.raises(UsageError, match="1 or more"):
        prepare_for_export(ToyCaps(), 0)
    with refuses(UsageError, names=["routing"]):
        unroll.set_routing_iterations(nn.Conv2d(1, 1, 1), 2)


class Net(nn.Module):
    """Parts, and a forward that is a function of them and the input."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Standardised(nn.Conv2d):
    """A convolution with other weights than its own: not linear in ``weight``."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight / self.weight.std(), self.bias)


def unsafe() -> dict[str, nn.Module]:
    """Networks whose norm must not be folded."""

    def parts() -> dict[str, nn.Module]:
        return {"conv": nn.Conv2d(2, 4, 3), "norm": nn.BatchNorm2d(4)}

    def two_readers(net: Any, x: Tensor) -> Tensor:
        y = net.conv(x)
        return net.norm(y) + y

    hooked = nn.Sequential(*parts().values())
    hooked[0].register_forward_hook(lambda module, inputs, output: output.square())
    conv = nn.Conv2d(2, 4, 3)
    return {
        "two readers": Net(two_readers, **parts()),
        "two names": Net(
            lambda m, x: m.norm(m.stem(x)), a=conv, stem=nn.Sequential(conv), norm=nn.BatchNorm2d(4)
        ),
        "shared norm": Net(lambda m, x: m.norm(m.conv(x)) * m.norm(m.b(x)), b=nn.Conv2d(2, 4, 3), **parts()),
        "shared convolution": Net(
            lambda m, x: m.conv(m.norm(m.conv(x))), conv=nn.Conv2d(2, 2, 3, padding=1), norm=nn.BatchNorm2d(2)
        ),
        "weight read apart": Net(lambda m, x: m.norm(m.conv(x)) * m.norm.weight.view(1, -1, 1, 1), **parts()),
        "other weights": nn.Sequential(Standardised(2, 4, 3), nn.BatchNorm2d(4)),
        "no statistics": nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
        "hooked": hooked,
        "untraceable": Net(lambda m, x: m.norm(m.conv(x)) if x.sum() > -1e9 else x, **parts()),
    }


UNSAFE = unsafe()


def test_a_decoder_that_computes_the_scores_stays() -> None:
    model = Net(
        lambda m, x: m.decoder(m.encoder(x)), encoder=nn.Linear(4, 3), decoder=nn.Linear(3, 2)
    ).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(prepare_for_export(model)(x), model(x))


@pytest.mark.parametrize("kind", UNSAFE)
def test_unsafe_norms_stay(kind: str) -> None:
    model = with_statistics(UNSAFE[kind])
    prepared = prepare_for_export(model)
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    assert count_norms(prepared) == 1
    torch.testing.assert_close(prepared(x), model(x), atol=1e-12, rtol=0)


def test_a_safe_norm_of_such_a_network_is_folded() -> None:
    net = Net(lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4))
    assert fold_batchnorm(net.eval()) == 1


class Scaled(nn.Conv2d):
    """A subclass that declares itself linear in its weights."""

    folds_batchnorm = True

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight, self.bias, groups=self.groups)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 8, 3, groups=2),
        nn.Conv2d(4, 8, 3, stride=2, bias=False),
        Scaled(4, 8, 1, groups=4),
    ],
    ids=["grouped", "no-bias", "declared"],
)
def test_safe_norms_are_folded(conv: nn.Module) -> None:
    model = with_statistics(nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU()))
    prepared = copy.deepcopy(model)
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    assert fold_batchnorm(prepared) == 1 and count_norms(prepared) == 0
    torch.testing.assert_close(prepared(x), model(x), atol=1e-12, rtol=0)


class Prepares(nn.Module):
    """Notes its call; a leaf gives a replacement, the outer one changes in place."""

    calls: list[str] = []

    def __init__(self, name: str, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.name, self.inner, self.ready = name, inner, False

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.inner is None else self.inner(x)

    def prepare_for_export(self) -> nn.Module | None:
        self.calls.append(self.name)
        self.ready = True
        if self.inner is None:
            return Doubled()
        return None


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


def test_hooks_run_children_first_and_may_replace_their_module() -> None:
    Prepares.calls.clear()
    model = nn.Sequential(Prepares("outer", Prepares("inner")), nn.Identity())
    prepared = prepare_for_export(model)
    assert Prepares.calls == ["inner", "outer"]
    assert isinstance(prepared[0].inner, Doubled) and prepared[0].ready
    assert not model[0].ready and isinstance(model[0].inner, Prepares)
    x = torch.randn(2, 3)
    assert torch.equal(prepared(x), model(x))
