"""The Torch-TensorRT path against an imitation of its documented API; the real one where it and a GPU are at hand."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from capszoo.errors import UsageError
from capszoo.export import to_torch_tensorrt
from capszoo.export.to_onnx import ExportError
from capszoo.export.to_tensorrt import BuildOptions
from capszoo.export.to_torch_tensorrt import compile_module, find_torch_tensorrt
from tests.support.errors import refuses
from tests.support.toys import ToyCaps


def fake(wrong: bool = False, fails: bool = False, strong_only: bool = False) -> Any:
    """What the code uses of torch_tensorrt; ``fake.calls`` holds the arguments of each compilation."""
    trt: Any = types.ModuleType("torch_tensorrt")
    trt.calls = []

    class Input:
        def __init__(self, shape: Any = None, *, dtype: Any, **shapes: Any) -> None:
            self.shape, self.dtype, self.shapes = shape, dtype, shapes

    def compiled(program: torch.export.ExportedProgram, inputs: Any, arguments: dict[str, Any]) -> Any:
        if fails:
            raise RuntimeError("no converter\nfor aten.nothing")
        trt.calls.append((program, inputs[0], arguments))
        module = program.module()
        return (lambda x: module(x) + 1) if wrong else module

    def compile_(
        exported_program: Any,
        inputs: Any = None,
        *,
        workspace_size: int = 0,
        optimization_level: int | None = None,
        version_compatible: bool = False,
        hardware_compatible: bool = False,
        immutable_weights: bool = True,
        timing_cache_path: str = "",
        use_explicit_typing: bool = False,
        disable_tf32: bool = False,
    ) -> Any:
        given = dict(locals())
        return compiled(given.pop("exported_program"), given.pop("inputs"), given)

    def newer(
        exported_program: Any,
        inputs: Any = None,
        *,
        workspace_size: int = 0,
        optimization_level: int | None = None,
        version_compatible: bool = False,
        hardware_compatible: bool = False,
        disable_tf32: bool = False,
    ) -> Any:
        given = dict(locals())
        return compiled(given.pop("exported_program"), given.pop("inputs"), given)

    trt.Input = Input
    trt.dynamo = types.SimpleNamespace(compile=newer if strong_only else compile_)
    return trt


def test_a_module_with_a_batch_profile() -> None:
    trt, model = fake(), ToyCaps(2).eval()
    fast = compile_module(model, batch=(1, 3, 4), device="cpu", torch_tensorrt=trt)
    x = torch.randn(3, 1, 10, 10)
    assert torch.allclose(fast(x), model(x), atol=1e-5)
    ((program, given, arguments),) = trt.calls
    assert isinstance(program, torch.export.ExportedProgram)
    assert given.shapes == {
        "min_shape": (1, 1, 10, 10),
        "opt_shape": (3, 1, 10, 10),
        "max_shape": (4, 1, 10, 10),
    }
    assert program.example_inputs[0][0].shape[0] == 3, (
        "the usual batch, which the library takes as the optimum"
    )
    assert given.dtype is torch.float32 and arguments["use_explicit_typing"] is True
    assert arguments["workspace_size"] == 4096 << 20 and arguments["immutable_weights"] is True
    assert arguments["disable_tf32"] is True, "the gate of fp32 allows no rounding to 10 bits"


def test_options_a_fixed_batch_and_uint8() -> None:
    trt = fake()
    options = BuildOptions(
        workspace_mib=8, optimization_level=5, timing_cache="t", refit=True, hardware_compatible=True
    )
    outputs = ("scores", "couplings")
    compile_module(
        ToyCaps(2).eval(),
        batch=3,
        uint8_input=True,
        outputs=outputs,
        options=options,
        device="cpu",
        torch_tensorrt=trt,
    )
    ((_, given, arguments),) = trt.calls
    assert given.shape == (3, 1, 10, 10) and given.dtype is torch.uint8
    assert arguments["timing_cache_path"] == "t" and arguments["immutable_weights"] is False
    assert arguments["optimization_level"] == 5 and arguments["hardware_compatible"] is True


def test_a_release_without_the_older_options() -> None:
    trt = fake(strong_only=True)
    compile_module(ToyCaps(1).eval(), batch=2, precision="fp16", device="cpu", torch_tensorrt=trt)
    assert "use_explicit_typing" not in trt.calls[0][2]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"wrong": True}, "torch_tensorrt"),
        ({"fails": True}, "Torch-TensorRT"),
    ],
)
def test_refusals(faults: dict[str, bool], message: str) -> None:
    with refuses(ExportError, names=message) as caught:
        compile_module(ToyCaps(1).eval(), batch=2, device="cpu", torch_tensorrt=fake(**faults))
    assert "\n" not in str(caught.value)


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_torch_tensorrt, "find_torch_tensorrt", lambda: None)
    with refuses(ExportError, names=["installed", "torch-tensorrt"]):
        compile_module(ToyCaps(1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses(ExportError, names=["NVIDIA", "GPU"]):
        compile_module(ToyCaps(1), torch_tensorrt=fake())
    with pytest.raises(UsageError, match="no int8"):
        compile_module(ToyCaps(1), precision="int8")


@pytest.mark.gpu
def test_the_real_one() -> None:
    if find_torch_tensorrt() is None:
        pytest.skip("needs Torch-TensorRT: pip install torch-tensorrt")
    model = ToyCaps(2).eval()
    fast = compile_module(model, batch=(1, 2, 4))
    x = torch.randn(3, 1, 10, 10)
    assert torch.allclose(fast(x.cuda()).cpu(), model(x), atol=1e-3)
