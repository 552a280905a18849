"""The Torch-TensorRT path: the library converts and builds (``make test-trt-rtx``), and its errors, imitated."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from capszoo.errors import UsageError
from capszoo.export import to_torch_tensorrt
from capszoo.export.to_onnx import ExportError
from capszoo.export.to_tensorrt import BuildOptions, find_rtx
from capszoo.export.to_torch_tensorrt import compile_module, find_torch_tensorrt
from tests.support import zoo
from tests.support.errors import refuses
from tests.support.toys import ToyCaps


def fake(wrong: bool = False, fails: bool = False) -> Any:
    """What the code uses of an older release; ``fake.calls`` holds the arguments of each compilation."""
    trt: Any = types.ModuleType("torch_tensorrt")
    trt.calls = []

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
        if fails:
            raise RuntimeError("no converter\nfor aten.nothing")
        trt.calls.append(dict(locals()))
        module = exported_program.module()
        return (lambda x: module(x) + 1) if wrong else module

    trt.Input = lambda shape=None, *, dtype, **shapes: types.SimpleNamespace(
        shape=shape, dtype=dtype, **shapes
    )
    trt.dynamo = types.SimpleNamespace(compile=compile_)
    return trt


def test_build_options_and_the_types_of_older_releases() -> None:
    """The real library of the tests below types a network strongly without being told so."""
    trt = fake()
    options = BuildOptions(
        workspace_mib=8, optimization_level=5, timing_cache="t", refit=True, hardware_compatible=True
    )
    compile_module(ToyCaps(2).eval(), batch=3, options=options, device="cpu", torch_tensorrt=trt)
    (arguments,) = trt.calls
    assert arguments["use_explicit_typing"] is True and arguments["workspace_size"] == 8 << 20
    assert arguments["timing_cache_path"] == "t" and arguments["immutable_weights"] is False
    assert arguments["optimization_level"] == 5 and arguments["hardware_compatible"] is True


def test_the_middle_of_the_profile_is_what_the_library_sees() -> None:
    """It takes the example's batch as the middle of its own profile, whatever the input states."""
    trt = fake()
    compile_module(ToyCaps(1).eval(), batch=(1, 8, 32), device="cpu", torch_tensorrt=trt)
    program = trt.calls[0]["exported_program"]
    (images,) = (n.meta["val"] for n in program.graph.nodes if n.name in program.graph_signature.user_inputs)
    assert images.shape[0].node.hint == 8


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


# -- the real library, which converts and builds without a GPU (make test-trt-rtx) ---------------------------------


@dataclass
class Built:
    """An engine that the library built: its optimisation profile, its bytes, and how many layers have which type."""

    profile: list[tuple[int, ...]]
    types: Counter[str]
    num_bytes: int = 0


class Kept:
    """In place of TensorRT's runtime, which needs a GPU to read an engine: it keeps the bytes."""

    def __init__(self, logger: Any) -> None:
        pass

    def deserialize_cuda_engine(self, data: Any) -> Any:
        return types.SimpleNamespace(serialize=lambda: data, get_aliased_input_tensor=lambda name: None)


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Any, list[Built]]]:
    """Torch-TensorRT on TensorRT-RTX, and the engines that it built.

    It converts and builds for a GPU of compute capability 8.9. In place of each engine the module that it returns
    keeps the graph that was converted, so that the gate compares what the library's passes made of the model, on the
    CPU, with the original.
    """
    if find_rtx() is None or importlib.util.find_spec("torch_tensorrt") is None:
        pytest.skip("needs Torch-TensorRT on TensorRT-RTX: make test-trt-rtx brings and runs it")
    built: list[Built] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "get_device_capability": (8, 9),
            "current_device": 0,
            "get_device_name": "none",
            "mem_get_info": (16 << 30, 16 << 30),
            "empty_cache": None,
        }.items():
            patch.setattr(torch.cuda, name, lambda *device, value=value: value)
        rtx: Any = importlib.import_module("tensorrt_rtx_bindings")
        patch.setitem(sys.modules, "tensorrt_rtx", rtx)  # the name that it imports
        patch.setitem(sys.modules, "tensorrt", None)  # it puts RTX there, for as long as these tests run
        library = importlib.import_module("torch_tensorrt")
        for name, module in list(sys.modules.items()):
            if name.startswith("torch_tensorrt") and hasattr(module, "to_torch_device"):
                patch.setattr(module, "to_torch_device", lambda device: torch.device("cpu"))
        patch.setattr(rtx, "Runtime", Kept)
        compiler = importlib.import_module("torch_tensorrt.dynamo._compiler")
        interpreter = importlib.import_module(
            "torch_tensorrt.dynamo.conversion._TRTInterpreter"
        ).TRTInterpreter
        interpret = importlib.import_module("torch_tensorrt.dynamo.conversion").interpret_module_to_result
        configured = interpreter._populate_trt_builder_config

        def configure(self: Any, *arguments: Any, **options: Any) -> Any:
            config = configured(self, *arguments, **options)
            config.num_compute_capabilities = 1
            config.set_compute_capability(rtx.ComputeCapability.SM89, 0)
            (name,) = self._input_names
            (profile,) = self.optimization_profiles or [None]
            layers = [self.ctx.net.get_layer(i).get_output(0) for i in range(self.ctx.net.num_layers)]
            shapes = [tuple(shape) for shape in profile.get_shape(name)] if profile else []
            built.append(Built(shapes, Counter(str(output.dtype) for output in layers)))
            return config

        def convert(module: Any, inputs: Any, settings: Any, name: str = "", engine_cache: Any = None) -> Any:
            graph = copy.deepcopy(module)  # the library takes the weights out of the one that it converts
            engine = interpret(module, inputs, settings, engine_cache=engine_cache).serialized_engine
            built[-1].num_bytes = len(engine)
            graph.set_output_tensors_as_unowned = lambda unowned: None  # the library's modules have it
            return graph

        patch.setattr(interpreter, "_populate_trt_builder_config", configure)
        patch.setattr(compiler, "convert_module", convert)
        yield library, built


@pytest.mark.rtx
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", zoo.PER_ROUTING)
def test_each_routing_is_converted_and_built(
    name: str, precision: str, real: tuple[Any, list[Built]]
) -> None:
    library, built = real
    model = zoo.small(name)
    zoo.calibrate(model)
    built.clear()
    compiled = compile_module(
        model.eval(), batch=(1, 8, 32), precision=precision, device="cpu", torch_tensorrt=library
    )
    (engine,) = built
    assert engine.profile == [(batch, model.in_chans, *model.img_size) for batch in (1, 8, 32)]
    left = [node.target for node in compiled.graph.nodes if node.op not in ("placeholder", "output")]  # type: ignore[union-attr]
    assert left == ["_run_on_acc_0"], "no operator is left to PyTorch"
    assert engine.num_bytes > 0 and engine.types["DataType.FLOAT"]  # norms and softmax, in half precision too
    assert bool(engine.types["DataType.HALF"]) == (precision == "fp16")


@pytest.mark.rtx
def test_a_fixed_batch_of_uint8_with_couplings(real: tuple[Any, list[Built]]) -> None:
    library, built = real
    built.clear()
    model, outputs = ToyCaps(2).eval(), ("scores", "couplings")
    compile_module(model, batch=3, uint8_input=True, outputs=outputs, device="cpu", torch_tensorrt=library)
    assert len(built) == 1 and built[0].profile == []


@pytest.mark.gpu
def test_the_real_one() -> None:
    if find_torch_tensorrt() is None:
        pytest.skip("needs Torch-TensorRT: pip install torch-tensorrt")
    model = ToyCaps(2).eval()
    fast = compile_module(model, batch=(1, 2, 4))
    x = torch.randn(3, 1, 10, 10)
    assert torch.allclose(fast(x.cuda()).cpu(), model(x), atol=1e-3)
