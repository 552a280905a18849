"""A PyTorch module that runs on TensorRT, through Torch-TensorRT.

>>> from capszoo.export.to_torch_tensorrt import compile_module
>>> fast = compile_module(model, batch=(1, 8, 32), precision="fp16")  # doctest: +SKIP
>>> scores = fast(images.cuda())  # doctest: +SKIP

Operators that TensorRT does not support run in PyTorch. The module is compared with the original on the gate's probes
before it is returned. ``make test-trt-rtx`` converts and builds a model of each routing with Torch-TensorRT 2.14 on
TensorRT-RTX, without a GPU; no engine has been run, since that needs an NVIDIA GPU.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from capszoo.errors import UsageError, first_line

from .compare import as_arrays
from .options import BuildOptions, ExportOptions, collect
from .prepare import PreparedModel, in_own_precision, prepare
from .report import ExportError
from .verify.gate import verify_against_eager

__all__ = ["compile_module", "find_torch_tensorrt"]

INSTALL = "pip install torch-tensorrt on a machine with an NVIDIA GPU"


def find_torch_tensorrt() -> Any | None:
    """Torch-TensorRT, or None."""
    try:
        return importlib.import_module("torch_tensorrt")
    except (
        Exception
    ):  # without its libraries, its torch or a driver it raises several kinds, Exception itself too
        return None


@in_own_precision()
def compile_module(
    model: nn.Module | str,
    export_options: ExportOptions | None = None,
    *,
    options: BuildOptions | None = None,
    device: str = "cuda",
    torch_tensorrt: Any = None,
    **changes: Any,
) -> nn.Module:
    """Compile a classifier with Torch-TensorRT; the model determines the precision, as for the other formats.

    Args:
        model: a module (not modified), or a name for ``capszoo.create_model``.
        export_options: see :class:`capszoo.export.options.ExportOptions`; no int8, and no options of the ONNX file.
        options: settings for building engines.
        device: of the result.
        torch_tensorrt: the API; None imports it.
        **changes: export options by keyword, such as ``precision="fp16"``.

    Returns:
        A module with float32 (or uint8) input and float32 output on ``device``.

    Raises:
        ExportError: Torch-TensorRT is missing, cannot compile the model, or the result differs from the original.
        UsageError: invalid options.
    """
    export_options = collect(ExportOptions, export_options, changes)
    if export_options.precision == "int8":
        raise UsageError(
            "torch_tensorrt takes no int8 here",
            "export --precision int8 to ONNX and build with --format tensorrt",
        )
    trt = torch_tensorrt or find_torch_tensorrt()
    if trt is None:
        raise ExportError("Torch-TensorRT is not installed, or does not start here", INSTALL)
    if device == "cuda" and not torch.cuda.is_available():
        raise ExportError("Torch-TensorRT needs an NVIDIA GPU", "torch.cuda.is_available() is False")
    options = options or BuildOptions()
    prepared = prepare(model, export_options)
    prepared.served.to(device)
    program = prepared.trace(count=prepared.batch[1])  # its profile's usual batch is the example's
    arguments = _arguments(trt.dynamo.compile, options)
    if export_options.precision == "fp32":
        arguments["disable_tf32"] = True  # it rounds to 10 bits, which the gate of fp32 does not allow
    try:
        compiled: nn.Module = trt.dynamo.compile(program, inputs=[_input(trt, prepared)], **arguments)
    except Exception as e:  # the library raises many kinds, without a common base
        raise ExportError(f"{prepared.name}: Torch-TensorRT cannot compile it: {first_line(e)}") from e
    if export_options.check:
        verify_against_eager(prepared, _Runner(compiled, device))
    return compiled


def _input(trt: Any, prepared: PreparedModel) -> Any:
    """The input with its batch profile."""
    smallest, usual, largest = prepared.batch
    dtype = torch.uint8 if prepared.input_dtype == "uint8" else torch.float32
    if smallest == largest:
        return trt.Input(shape=(usual, *prepared.size), dtype=dtype)
    shapes = {
        f"{key}_shape": (n, *prepared.size)
        for key, n in zip(("min", "opt", "max"), prepared.batch, strict=True)
    }
    return trt.Input(**shapes, dtype=dtype)


def _arguments(function: Any, options: BuildOptions) -> dict[str, Any]:
    """Build options under the library's names."""
    arguments: dict[str, Any] = dict(
        workspace_size=options.workspace_mib << 20,
        optimization_level=options.optimization_level,
        version_compatible=options.version_compatible,
        hardware_compatible=options.hardware_compatible,
        immutable_weights=not options.refit,
    )
    if options.timing_cache:
        arguments["timing_cache_path"] = options.timing_cache
    parameters = inspect.signature(function).parameters
    # a release that always types networks strongly, or always refits, may have dropped these two
    if "immutable_weights" not in parameters:
        del arguments["immutable_weights"]
    if "use_explicit_typing" in parameters:
        arguments["use_explicit_typing"] = True
    return arguments


class _Runner:
    """Runner for the compiled module, with numpy arrays."""

    name = "torch_tensorrt"

    def __init__(self, module: nn.Module, device: str) -> None:
        self.module, self.device = module, device

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        with torch.inference_mode():
            outputs = self.module(torch.from_numpy(images).to(self.device))
        return as_arrays(outputs)
