"""TensorRT engines from the exported ONNX file, on TensorRT's Python API (10.9 and later, and 11).

The network is strongly typed: the graph determines the precision, as TensorRT 11 requires and 10 supports. An engine
only runs on the kind of GPU and the TensorRT version that built it (unless built to be compatible), so the ONNX file,
the profile and the ``trtexec`` line that builds it elsewhere are written in any case.

The API is an argument: NVIDIA's TensorRT-RTX, whose parser and builder run without a GPU, has the same one.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from capszoo._utils.files import check_writable, write_atomically
from capszoo.errors import CapszooError, first_line, install_hint

from .options import BuildOptions
from .prepare import PreparedModel
from .report import ExportError, ExportReport, GateStep
from .to_aoti import RECOMPILED
from .verify.gate import verify_against_eager

__all__ = [
    "BuildOptions",
    "EngineReport",
    "TensorRTRunner",
    "build_engine",
    "find_tensorrt",
    "trtexec_line",
    "write",
]

#: Installation instructions; printed if TensorRT is missing.
INSTALL = f"{install_hint('tensorrt')}, on a machine with an NVIDIA GPU (TensorRT 10.9 or later)"

_FOLDER = "tensorrt"

#: The engine, and what else a build writes, by path in a bundle.
PLAN = f"{_FOLDER}/model.plan"
BUILT = (PLAN, f"{_FOLDER}/layers.json")


@dataclass(frozen=True)
class EngineReport:
    """A built engine.

    Attributes:
        api: library and version.
        layers: layers of the parsed network.
        file_bytes: size of the engine.
        inspection: layer information in JSON, if the engine could be loaded for it.
    """

    api: str
    layers: int
    file_bytes: int
    inspection: str = ""


def find_tensorrt() -> Any | None:
    """TensorRT's Python API, or None."""
    try:
        return importlib.import_module("tensorrt")
    except (ImportError, OSError):  # OSError: its libraries are missing
        return None


def find_rtx() -> Any | None:
    """TensorRT-RTX's Python API, or None; it checks the graph without a GPU, but is not TensorRT."""
    for name in ("tensorrt_rtx", "tensorrt_rtx_bindings"):
        with suppress(ImportError, OSError):
            return importlib.import_module(name)
    return None


def rtx_step(onnx: Path, report: ExportReport, rtx: Any = None) -> GateStep:
    """Gate, step 4: NVIDIA's parser and builder accept the graph, if TensorRT-RTX is installed.

    Raises:
        ExportError: they refuse it; the report has the failed step.
    """
    name = "TensorRT-RTX parses and builds the graph"
    rtx = rtx or find_rtx()
    if rtx is None:
        return GateStep(name, None, "not run: TensorRT-RTX is not installed")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # for a GPU that this machine may lack, with its memory: EM's votes of 32 images take more than a GiB
        options = BuildOptions(compute_capability="SM89", detailed=False, workspace_mib=16384)
        try:
            built = build_engine(onnx, Path(folder) / "rtx.plan", report, options, rtx)
        except ExportError as error:
            report.gate.append(GateStep(name, False, error.message, time.perf_counter() - start))
            error.report = report
            raise
    detail = f"{built.api} for SM89, {built.layers} layers; built, not run, and not TensorRT itself"
    return GateStep(name, True, detail, time.perf_counter() - start)


def built_later(folder: Path, name: str) -> set[str]:
    """Files that a user of a bundle makes in it: engine, its copy for Triton, timing cache, AOTInductor's package."""
    files = {*BUILT, RECOMPILED, f"triton-tensorrt/{name}/1/model.plan"}
    cache = stated_option(folder, "timing_cache")
    named = isinstance(cache, str) and cache
    return files | ({Path(os.path.normpath(Path(_FOLDER) / cache)).as_posix()} if named else set())


def stated_option(folder: Path, option: str) -> Any:
    """A build option of a bundle's engine (:class:`.BuildOptions`); None if its profile does not state it."""
    try:
        return json.loads((folder / _FOLDER / "profile.json").read_text("utf-8"))["options"][option]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def shapes(report: ExportReport) -> dict[str, list[int]]:
    """The optimisation profile: ``min``, ``opt`` and ``max`` shapes of the input."""
    rest = [int(size) for size in report.input_shape[1:]]
    return {key: [count, *rest] for key, count in zip(("min", "opt", "max"), report.batch, strict=True)}


def trtexec_line(report: ExportReport, options: BuildOptions, onnx: str, engine: str) -> list[str]:
    """The ``trtexec`` call that builds the same engine, as arguments (TensorRT 10 needs ``--stronglyTyped`` added)."""
    line = ["trtexec", f"--onnx={onnx}", f"--saveEngine={engine}"]
    if report.batch[0] != report.batch[2]:
        for key, shape in shapes(report).items():
            line.append(f"--{key}Shapes={report.input_name}:{'x'.join(map(str, shape))}")
    line.append(f"--memPoolSize=workspace:{options.workspace_mib}")
    line.append(f"--builderOptimizationLevel={options.optimization_level}")
    if options.timing_cache:
        line.append(f"--timingCacheFile={options.timing_cache}")
    if options.version_compatible:
        line.append("--versionCompatible")
    if options.hardware_compatible:
        line.append("--hardwareCompatibilityLevel=ampere+")
    if options.refit:
        line.append("--refit")
    if options.detailed:
        line.append("--profilingVerbosity=detailed")
    if report.precision == "fp32":
        line.append("--noTF32")
    return line


class NoBuilder(ExportError):
    """TensorRT is installed, but cannot build on this machine: it has no usable GPU."""


def build_engine(
    onnx: str | os.PathLike[str],
    engine: str | os.PathLike[str],
    report: ExportReport,
    options: BuildOptions | None = None,
    trt: Any = None,
) -> EngineReport:
    """Build an engine from an ONNX file.

    Args:
        onnx: the file.
        engine: file to write.
        report: of the export: input name, shape and batch profile.
        options: build settings.
        trt: the API; None imports ``tensorrt``.

    Raises:
        ExportError: TensorRT is missing or too old, or cannot parse or build the graph.
    """
    options = options or BuildOptions()
    trt = trt or find_tensorrt()
    if trt is None:
        raise ExportError("TensorRT is not installed", INSTALL)
    api = f"{trt.__name__.split('.')[0]} {trt.__version__}"
    if "rtx" not in trt.__name__ and _version(trt.__version__) < (10, 9):
        raise ExportError(f"{api} is too old", INSTALL)
    log = _logger(trt)
    try:
        builder = trt.Builder(log)
    except TypeError as error:  # of pybind11: the factory returned a null pointer
        raise NoBuilder(
            f"{api} cannot create a builder: {log.last or first_line(error)}", "it needs an NVIDIA GPU"
        ) from error
    # TensorRT 11 has only strongly typed networks, 10 needs the flag
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx)):
        errors = [_parser_error(parser.get_error(i)) for i in range(parser.num_errors)]
        raise ExportError(f"{api} cannot parse the graph: {'; '.join(errors) or log.last}")
    config = builder.create_builder_config()
    cache = _configure(trt, config, options, api)
    if report.precision == "fp32" and (tf32 := getattr(trt.BuilderFlag, "TF32", None)) is not None:
        config.clear_flag(tf32)  # on by default: it rounds to 10 bits, which the gate of fp32 does not allow
    _add_profile(builder, network, config, report)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        remedy = (
            "allow more memory (--workspace MIB), or a smaller largest batch"
            if "OutOfMemory" in log.last
            else ""
        )
        raise ExportError(f"{api} failed to build the engine: {log.last or 'no reason given'}", remedy)
    data = bytes(plan)
    Path(engine).write_bytes(data)
    if options.timing_cache and cache is not None:
        made = bytes((config.get_timing_cache() or cache).serialize())
        write_atomically(Path(options.timing_cache), made)  # a later build reads it: never half of it
    return EngineReport(api, int(network.num_layers), len(data), _inspect(trt, log, data, options))


def _configure(trt: Any, config: Any, options: BuildOptions, api: str) -> Any:
    """Set the build configuration; return the timing cache, if there is one."""
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    if hasattr(config, "builder_optimization_level"):
        config.builder_optimization_level = options.optimization_level
    if options.detailed:
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for wanted, flag in ((options.version_compatible, "VERSION_COMPATIBLE"), (options.refit, "REFIT")):
        if wanted:
            config.set_flag(_member(trt.BuilderFlag, flag, api))
    if options.hardware_compatible:
        config.hardware_compatibility_level = _member(trt.HardwareCompatibilityLevel, "AMPERE_PLUS", api)
    if options.compute_capability:
        capability = _member(trt.ComputeCapability, options.compute_capability, api)
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)
    if not options.timing_cache:
        return None
    file = Path(options.timing_cache)
    check_writable(file)  # now rather than after the build
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    if cache is None or config.set_timing_cache(cache, False) is False:  # damaged, of another GPU or version
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _add_profile(builder: Any, network: Any, config: Any, report: ExportReport) -> None:
    """Add one profile for every input with a dynamic batch; without one TensorRT refuses to build."""
    if report.batch[0] == report.batch[2]:
        return
    profile, wanted = builder.create_optimization_profile(), shapes(report)
    for i in range(network.num_inputs):
        name = network.get_input(i).name
        profile.set_shape(name, wanted["min"], wanted["opt"], wanted["max"])
    if config.add_optimization_profile(profile) < 0:
        raise ExportError(f"TensorRT rejected the optimisation profile {wanted}")


def _inspect(trt: Any, log: Any, data: bytes, options: BuildOptions) -> str:
    """Layer information of the engine in JSON; empty if the engine cannot be loaded (another GPU, or none)."""
    if not options.detailed or options.compute_capability:
        return ""
    engine = _runtime(trt, log, own=True).deserialize_cuda_engine(data)
    if engine is None:
        return ""
    return str(engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))


def _runtime(trt: Any, log: Any, own: bool) -> Any:
    """A runtime; ``own``: for a plan that this process built.

    A version-compatible plan contains the runtime's code for the host, which is executed only for such plans.
    """
    runtime = trt.Runtime(log)
    if own and hasattr(runtime, "engine_host_code_allowed"):
        runtime.engine_host_code_allowed = True
    return runtime


def _logger(trt: Any) -> Any:
    """A logger that stores the last error instead of printing everything."""

    class Log(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.last = " ".join(str(message).split())

    return Log()


def _member(kind: Any, name: str, api: str) -> Any:
    if not hasattr(kind, name):
        raise ExportError(f"{api} has no {kind.__name__}.{name}", "leave that option out")
    return getattr(kind, name)


def _parser_error(error: Any) -> str:
    operator = error.node_operator() if hasattr(error, "node_operator") else ""
    return " ".join(f"{operator + ': ' if operator else ''}{error.desc()}".split())


def _version(text: str) -> tuple[int, int]:
    major, minor = (*text.split("."), "0")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def write(
    prepared: PreparedModel,
    report: ExportReport,
    folder: Path,
    options: BuildOptions,
    trt: Any = None,
) -> tuple[dict[str, Any], list[GateStep]]:
    """Write the profile, the command, and, if TensorRT is installed, the engine into a bundle.

    Returns:
        The manifest's entry (``note`` is empty if the engine was built), and the steps of the gate.

    Raises:
        ExportError: TensorRT is installed and refuses the graph, or the engine's results differ.
    """
    engine_folder = folder / _FOLDER
    engine_folder.mkdir()
    line = trtexec_line(report, options, "../model.onnx", "model.plan")
    profile = {"input": report.input_name, "shapes": shapes(report), "options": asdict(options)}
    (engine_folder / "profile.json").write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    script = engine_folder / "build_engine.sh"
    # it runs on Linux, wherever it is written
    script.write_text(_SCRIPT.format(line=shlex.join(line)), encoding="utf-8", newline="\n")
    script.chmod(0o755)
    described: dict[str, Any] = {
        "file": None,
        "profile": f"{_FOLDER}/profile.json",
        "command": f"{_FOLDER}/build_engine.sh",
        "trtexec": shlex.join(line),
        "note": "",
        "readme": [
            f"TensorRT: `sh {_FOLDER}/build_engine.sh` builds `{_FOLDER}/model.plan` on the target's GPU."
        ],
    }
    name, parity = "TensorRT builds the engine", "TensorRT against eager"
    trt = trt or find_tensorrt()
    if trt is None:
        described["note"] = f"no engine was built, TensorRT is not installed: {INSTALL}"
        why = "not run: TensorRT is not installed"
        return described, [GateStep(name, None, why), GateStep(parity, None, why)]
    prepared.options.say("TensorRT builds the engine")
    plan = folder / PLAN
    try:
        built = build_engine(folder / "model.onnx", plan, report, options, trt)
    except NoBuilder as error:
        described["note"] = f"no engine was built: {error}"
        return described, [
            GateStep(name, None, f"not run: {error}"),
            GateStep(parity, None, "not run: no engine"),
        ]
    if built.inspection:
        (engine_folder / "layers.json").write_text(built.inspection, encoding="utf-8")
    described |= {"file": PLAN, "api": built.api, "layers": built.layers}
    described["readme"].append(f"`{_FOLDER}/model.plan` was built by {built.api} on this kind of GPU alone.")
    detail = f"{built.api}, {built.layers} layers, {built.file_bytes:,} bytes"
    steps = [GateStep(name, True, detail)]
    if torch.cuda.is_available():
        runner = TensorRTRunner(plan, trt, own=True)
        steps.append(GateStep(parity, True, verify_against_eager(prepared, runner)[0]))
    else:
        steps.append(GateStep(parity, None, "not run: torch finds no CUDA device"))
    return described, steps


_SCRIPT = """#!/bin/sh
# Builds model.plan for the GPU of this machine. Further arguments go to trtexec.
set -e
cd "$(dirname "$0")"
# precision lies in the graph: TensorRT 10 must be told, 11 knows nothing else
typed=$(trtexec --help | grep -q -- --stronglyTyped && echo --stronglyTyped || true)
{line} $typed "$@"
for place in ../triton-tensorrt/*/1; do
    [ ! -d "$place" ] || cp model.plan "$place/"
done
"""


class TensorRTRunner:
    """Runner for an engine, on CUDA memory allocated by PyTorch.

    Args:
        path: the ``.plan`` file.
        trt: the API; None imports ``tensorrt``.
        device: of the memory.
        own: whether this process built the file; code in a version-compatible plan is executed only then.
    """

    name = "tensorrt"

    def __init__(
        self, path: str | os.PathLike[str], trt: Any = None, device: str = "cuda", own: bool = False
    ) -> None:
        trt = trt or find_tensorrt()
        if trt is None:
            raise CapszooError("TensorRT is not installed", INSTALL)
        if device == "cuda" and not torch.cuda.is_available():
            raise CapszooError("a TensorRT engine needs an NVIDIA GPU", "torch.cuda.is_available() is False")
        self.trt, self.device = trt, device
        self.log = _logger(trt)
        try:
            self.runtime = _runtime(trt, self.log, own)
            self.engine = self.runtime.deserialize_cuda_engine(Path(path).read_bytes())
        except Exception as e:  # the bindings raise their own kinds of errors
            raise CapszooError(f"{path}: {first_line(e)}") from e
        if self.engine is None:
            why = self.log.last or "it was built for another GPU or TensorRT"
            raise CapszooError(f"{path} cannot be loaded: {why}", "build it again on this machine")
        self.context = self.engine.create_execution_context()
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        is_input = {n: self.engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT for n in names}
        self.input = next(n for n in names if is_input[n])
        self.outputs = [n for n in names if not is_input[n]]

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        x = torch.from_numpy(np.ascontiguousarray(images)).to(self.device)
        if not self.context.set_input_shape(self.input, tuple(x.shape)):
            raise CapszooError(
                f"batch {len(images)} is outside the engine's profile", "build it with a wider profile"
            )
        self.context.set_tensor_address(self.input, x.data_ptr())
        results = []
        for name in self.outputs:  # float32, as in the graph
            result = torch.empty(tuple(self.context.get_tensor_shape(name)), device=self.device)
            self.context.set_tensor_address(name, result.data_ptr())
            results.append(result)
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
        if not self.context.execute_async_v3(stream):
            raise CapszooError(f"the engine does not run: {self.log.last or 'no reason given'}")
        if self.device == "cuda":
            torch.cuda.synchronize()
        return [result.cpu().numpy() for result in results]
