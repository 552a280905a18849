"""The C++ code of the routing: its compiler, its cache, its threads. test_engines.py has its values and gradients."""

from __future__ import annotations

import platform
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import library

from capszoo.layers import FCIDPA, ConvEM, engine_report, use_engines
from capszoo.layers._native import build, call
from capszoo.layers._native.dynamic_ops import dynamic_in_lanes
from capszoo.layers._native.ops import grouped, in_lanes, routing_pass, ungrouped, weight_in_lanes
from capszoo.layers.dynamic.routing import dynamic_routing
from capszoo.layers.engine_choice import record_engines
from capszoo.layers.tuning import tuned
from tests.support.errors import refuses

CACHES = (build._compiler, build._build_error, build._folder, build.load)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for compiled code; nothing is remembered before or after."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for cached in CACHES:
        cached.cache_clear()
    yield tmp_path / "capszoo"
    for cached in CACHES:
        cached.cache_clear()


def chosen() -> str:
    """The engine of a layer with many votes, and its gradient."""
    layer, x = FCIDPA(40, 5, 4), torch.randn(3, 40, 4, requires_grad=True)
    with tuned(native_min_votes=0, idpa_blocked_min_votes=0), record_engines() as choices:
        layer(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    return str(choices[0].engine.name)


def test_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen() == "native"
    (file,) = fresh.iterdir()
    build.load.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)  # the second process only loads it
    assert chosen() == "native"
    assert list(fresh.iterdir()) == [file]


def test_a_damaged_file_is_compiled_again(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen() == "native"
    (whole,) = fresh.iterdir()
    damaged = tmp_path / "other" / "capszoo" / whole.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "other"))
    for cached in CACHES:
        cached.cache_clear()
    assert chosen() == "native" and damaged.stat().st_size > 1000


def test_tensors_of_another_device_are_refused() -> None:
    with refuses(RuntimeError, names=["CPU"]):
        call.arguments(torch.ones(2), torch.ones(2, device="meta"))


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, or CAPSZOO_NATIVE=0: the next engine, without a warning; the report says why."""
    monkeypatch.setenv("CAPSZOO_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == "blocked"
        with use_engines("native"):  # forced past "does not pay", not past "cannot"
            assert chosen() == "blocked"
    monkeypatch.setenv("CAPSZOO_NATIVE", "1")
    monkeypatch.setenv("CXX", str(fresh / "missing"))
    monkeypatch.setenv("PATH", str(fresh))
    assert chosen() == "blocked"
    layer = ConvEM(2, 3)
    layer.default_cfg = {"input_size": (34, 8, 8)}  # type: ignore[assignment]
    (choice,) = engine_report(layer, training=True)
    assert "needs a C++ compiler" in choice.refused()["native"]


def test_compiler_that_fails(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning with the compiler's words, then the next engine; nothing half-written is left."""
    script = fresh.parent / "cxx"
    script.write_text(
        "#!/bin/sh\necho 'no such flag' >&2\nprintf '\\351' >&2\nexit 1\n"
    )  # a byte that is no UTF-8
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.warns(UserWarning, match="other code is slower.*failed: no such flag") as seen:
        assert chosen() == "blocked"
        with use_engines("native"):
            assert chosen() == "blocked"
    assert len(seen) == 1
    assert not list(fresh.iterdir())


def test_folder_that_cannot_be_written(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.parent.joinpath("file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(fresh.parent / "file"))
    assert chosen() == "native"


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64).requires_grad_()


def pass_arguments(squares: bool, even: bool = False, pull: bool = True) -> tuple[Any, ...]:
    """Arguments of :func:`routing_pass`: seven routings of 21 children and three parents."""
    n, i, j = 7, 21, 3
    tensors: list[Any] = [
        in_lanes(normal(n, i, 3, 3)),
        in_lanes(normal(n, i)),
        weight_in_lanes(normal(i, 3, j, 3)),
    ]
    tensors += [normal(n, j, 9), normal(n, j, 9) if squares and not even else None]
    tensors += [normal(n, j, 9) if pull and not even else None, None if even else normal(n, j)]
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
    return (*leaves, 0.01, i, squares, True, True)


def dynamic_arguments() -> tuple[Any, ...]:
    """Arguments of :func:`dynamic_in_lanes`: 20 routings of five children and three parents."""
    x, weight = normal(20, 5, 2), normal(5, 2, 3 * 4)
    first = torch.matmul(x.detach().flatten(1) / 3, weight.detach().flatten(0, 1)).view(20, 3, 4)
    return x, weight, grouped(first), 3


OPERATORS = [
    pytest.param(routing_pass, lambda: pass_arguments(True), id="squares"),
    pytest.param(routing_pass, lambda: pass_arguments(False), id="no squares"),
    pytest.param(routing_pass, lambda: pass_arguments(True, even=True), id="even"),
    pytest.param(routing_pass, lambda: pass_arguments(True, pull=False), id="no pull"),
    pytest.param(dynamic_in_lanes, dynamic_arguments, id="dynamic"),
]


def evaluate(operator: Any, given: tuple[Any, ...]) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """An operator's results, and gradients of a function of the first two."""
    found = [t for t in operator(*given) if t.numel()]
    total = torch.stack([t.sin().sum() for t in found[:2]]).sum()
    tensors = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    return found, torch.autograd.grad(total, tensors, allow_unused=True)


@pytest.mark.parametrize(("operator", "make"), OPERATORS)
def test_the_operators_are_sound(operator: Any, make: Any) -> None:
    """Schema, fake kernels, autograd registration and AOT tracing, as PyTorch checks them."""
    library.opcheck(operator, make())


@pytest.mark.parametrize(("operator", "make"), OPERATORS)
def test_threads_change_nothing(operator: Any, make: Any) -> None:
    """Each thread takes whole routings; only the transforms' gradient is added up in another order."""
    given = make()
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 16):
            torch.set_num_threads(count)
            results.append(evaluate(operator, given))
    finally:
        torch.set_num_threads(threads)
    for found, grads in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0][0], strict=True))
        for grad, expected in zip(grads, results[0][1], strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the processor types are those of x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3"])
def test_other_registers(processor: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of tensors does not depend on the registers' width, 16 bytes (x86-64) or 32 (v3); nor do results."""
    cases = [(case.values[0], case.values[1]()) for case in OPERATORS]
    expected = [evaluate(operator, given) for operator, given in cases]
    compiled = len(list(fresh.iterdir()))
    build.load.cache_clear()
    script = fresh.parent / "cxx"
    script.write_text(f'#!/bin/sh\nexec {build.compiler()} "$@" -march={processor}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    for (operator, given), values in zip(cases, expected, strict=True):
        torch.testing.assert_close(evaluate(operator, given), values, rtol=1e-10, atol=1e-10)
    assert len(list(fresh.iterdir())) == 2 * compiled > 0  # each was compiled again


@pytest.mark.parametrize(
    ("routings", "children", "parents", "child_dim", "parent_dim"),
    [(300, 6, 3, 5, 3), (17, 9, 2, 19, 21), (3, 1, 1, 1, 1), (8, 4, 2, 16, 33), (20, 3, 5, 64, 64)],
)
@pytest.mark.parametrize("num_iters", [2, 4])
def test_shapes_of_dynamic_routing(
    routings: int, children: int, parents: int, child_dim: int, parent_dim: int, num_iters: int
) -> None:
    """Poses that fill no tile of the C++ code, children that fill no block, more groups than one block: the reference's
    poses, couplings and gradients."""
    x = normal(routings, children, child_dim)
    weight = normal(children, child_dim, parents * parent_dim)
    votes = torch.einsum("nid,idk->nik", x, weight).unflatten(2, (parents, parent_dim)).transpose(1, 2)
    poses, couplings = dynamic_routing(votes, num_iters)
    first = (votes.mean(dim=2) * (children / parents)).detach()
    native, found, _ = dynamic_in_lanes(x, weight, grouped(first), num_iters)
    native, found = ungrouped(native, routings), ungrouped(found[-1], routings).transpose(1, 2)
    torch.testing.assert_close((native, found), (poses, couplings), rtol=1e-10, atol=1e-12)
    factors = torch.randn_like(poses), torch.randn_like(couplings)
    expected = torch.autograd.grad([poses, couplings], [x, weight], factors)
    grads = torch.autograd.grad([native, found], [x, weight], factors)
    torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-10)


def test_not_a_number_stays_one() -> None:
    """A child that is NaN or infinite is not hidden: the sums of its routing are NaN, those of others are not."""
    for bad in (float("nan"), float("inf")):
        layer, x = FCIDPA(40, 5, 4), torch.randn(3, 40, 4)
        x[1, 7, 2] = bad
        with use_engines("native"), record_engines() as choices:
            out = layer(x)
        assert choices[0].engine.name == "native"
        assert out[1].isnan().any() and out[[0, 2]].isfinite().all()
