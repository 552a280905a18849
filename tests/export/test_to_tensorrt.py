"""The TensorRT builder against a small imitation of TensorRT's API; against the real thing where that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capszoo._utils.files import NotWritable
from capszoo.errors import CapszooError, UsageError
from capszoo.export import to_onnx, to_tensorrt
from capszoo.export.to_onnx import ExportError, ExportReport
from capszoo.export.to_tensorrt import BuildOptions, TensorRTRunner, build_engine, trtexec_line
from tests.support.errors import refuses
from tests.support.toys import ToyCaps

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def fake_tensorrt(version: str = "10.13.0", **faults: Any) -> Any:  # noqa: C901 - it holds the classes of an API
    """What the code uses of TensorRT's API, with a record of every call (``trt.calls``).

    Args:
        version: 11 and later have no STRONGLY_TYPED flag.
        faults: ``parse`` (error texts), ``build`` (error text), ``no_builder``, ``no_profile``, ``foreign`` (the
            engine belongs to another GPU).
    """
    trt: Any = types.ModuleType(faults.get("name", "tensorrt"))
    trt.__version__ = version
    calls = trt.calls = []

    def record(name: str, result: Any = None) -> Any:
        def call(*arguments: Any) -> Any:
            calls.append((name, *arguments))
            return result

        return call

    class ILogger:
        ERROR, INTERNAL_ERROR, WARNING = "error", "internal", "warning"

    class Flags:
        if int(version.split(".")[0]) < 11:
            STRONGLY_TYPED = 1

    class Members:
        TF32, REFIT, VERSION_COMPATIBLE = "TF32", "REFIT", "VERSION_COMPATIBLE"
        AMPERE_PLUS, DETAILED, WORKSPACE = "AMPERE_PLUS", "DETAILED", "WORKSPACE"
        INPUT, OUTPUT, JSON = "input", "output", "json"

    class Network:
        num_inputs, num_layers = 1, 17

        def get_input(self, i: int) -> Any:
            return types.SimpleNamespace(name="input")

    class Config:
        builder_optimization_level, profiling_verbosity, hardware_compatibility_level = -1, "", ""
        set_memory_pool_limit, set_flag = staticmethod(record("pool")), staticmethod(record("flag"))
        clear_flag = staticmethod(record("clear"))
        used_cache: Any = None

        def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
            if cache.data == b"of another GPU":
                return False
            self.used_cache = cache
            return True

        def create_timing_cache(self, data: bytes) -> Any:
            calls.append(("cache", data))
            if data == b"damaged":
                return None
            return types.SimpleNamespace(data=data, serialize=lambda: b"measured")

        def get_timing_cache(self) -> Any:
            return self.used_cache

        def add_optimization_profile(self, profile: Any) -> int:
            return -1 if faults.get("no_profile") else 0

    class Builder:
        def __new__(cls, log: Any) -> Any:
            if faults.get("no_builder"):
                log.log(ILogger.ERROR, "CUDA initialization failure\n35")
                raise TypeError("pybind11::init(): factory function returned nullptr")
            return super().__new__(cls)

        def __init__(self, log: Any) -> None:
            self.log = log

        def create_network(self, flags: int) -> Network:
            calls.append(("network", flags))
            return Network()

        def create_builder_config(self) -> Config:
            trt.config = Config()
            return trt.config

        def create_optimization_profile(self) -> Any:
            return types.SimpleNamespace(set_shape=record("shape"))

        def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
            if faults.get("build"):
                self.log.log(ILogger.ERROR, faults["build"])
                return None
            return b"an engine"

    class OnnxParser:
        def __init__(self, network: Any, log: Any) -> None:
            self.errors = faults.get("parse", [])
            self.num_errors = len(self.errors)

        def parse_from_file(self, path: str) -> bool:
            calls.append(("parse", path))
            return not self.errors

        def get_error(self, i: int) -> Any:
            text = self.errors[i]
            return types.SimpleNamespace(desc=lambda: text, node_operator=lambda: "Einsum")

    class Context:
        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            self.batch = shape[0]
            return shape[0] <= 4

        def set_tensor_address(self, name: str, address: int) -> None:
            calls.append(("address", name, address != 0))

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return (self.batch, 5)

        def execute_async_v3(self, stream: int) -> bool:
            return not faults.get("run")

    class Engine:
        num_io_tensors = 2

        def get_tensor_name(self, i: int) -> str:
            return ("input", "scores")[i]

        def get_tensor_mode(self, name: str) -> str:
            return "input" if name == "input" else "output"

        def create_execution_context(self) -> Context:
            return Context()

        def create_engine_inspector(self) -> Any:
            return types.SimpleNamespace(get_engine_information=lambda kind: '{"Layers": []}')

    class Runtime:
        engine_host_code_allowed = False

        def __init__(self, log: Any) -> None:
            trt.runtime = self

        def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
            return None if faults.get("foreign") else Engine()

    for kind in (ILogger, Builder, OnnxParser, Runtime):
        setattr(trt, kind.__name__, kind)
    trt.NetworkDefinitionCreationFlag = Flags
    trt.BuilderFlag = trt.HardwareCompatibilityLevel = trt.ProfilingVerbosity = Members
    trt.MemoryPoolType = trt.TensorIOMode = trt.LayerInformationFormat = Members
    trt.ComputeCapability = type("ComputeCapability", (), {})
    return trt


def exported(folder: Path, batch: Any = (1, 2, 4)) -> tuple[to_onnx.PreparedModel, ExportReport]:
    job = to_onnx.prepare(ToyCaps(1).eval(), batch=batch, check=False)
    return job, to_onnx.write(job, folder / "model.onnx")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, to_onnx.PreparedModel, ExportReport]:
    folder = tmp_path_factory.mktemp("onnx")
    return folder / "model.onnx", *exported(folder)


Toy = tuple[Path, to_onnx.PreparedModel, ExportReport]


@pytest.mark.parametrize(("version", "flags"), [("10.9.0", 2), ("10.15.1", 2), ("11.1.0", 0)])
def test_networks_are_strongly_typed(version: str, flags: int, toy: Toy, tmp_path: Path) -> None:
    onnx, _, report = toy
    trt = fake_tensorrt(version)
    built = build_engine(onnx, tmp_path / "x.plan", report, trt=trt)
    assert ("network", flags) in trt.calls and ("parse", str(onnx)) in trt.calls
    assert ("shape", "input", [1, 1, 10, 10], [2, 1, 10, 10], [4, 1, 10, 10]) in trt.calls
    assert (tmp_path / "x.plan").read_bytes() == b"an engine"
    assert (built.api, built.layers, built.file_bytes) == (f"tensorrt {version}", 17, 9)
    assert json.loads(built.inspection) == {"Layers": []}
    assert ("clear", "TF32") in trt.calls, "the gate of fp32 allows no rounding to 10 bits"
    assert trt.runtime.engine_host_code_allowed, "a version-compatible plan of our own holds code"


def test_options_reach_the_builder(toy: Toy, tmp_path: Path) -> None:
    onnx, _, report = toy
    cache = tmp_path / "timing.cache"
    options = BuildOptions(
        workspace_mib=64,
        optimization_level=5,
        timing_cache=str(cache),
        version_compatible=True,
        hardware_compatible=True,
        refit=True,
    )
    trt = fake_tensorrt()
    build_engine(onnx, tmp_path / "x.plan", report, options, trt)
    assert ("pool", "WORKSPACE", 64 << 20) in trt.calls
    assert ("flag", "VERSION_COMPATIBLE") in trt.calls and ("flag", "REFIT") in trt.calls
    assert trt.config.builder_optimization_level == 5
    assert trt.config.hardware_compatibility_level == "AMPERE_PLUS"
    assert trt.config.profiling_verbosity == "DETAILED"
    assert ("cache", b"") in trt.calls and cache.read_bytes() == b"measured"
    again = fake_tensorrt()
    build_engine(onnx, tmp_path / "x.plan", report, options, again)
    assert ("cache", b"measured") in again.calls
    for useless in (b"of another GPU", b"damaged"):
        cache.write_bytes(useless)
        other = fake_tensorrt()
        build_engine(onnx, tmp_path / "x.plan", report, options, other)
        assert [c for c in other.calls if c[0] == "cache"] == [("cache", useless), ("cache", b"")]
        assert cache.read_bytes() == b"measured"
    never = fake_tensorrt()
    in_a_file = replace(options, timing_cache=str(cache / "x"))
    with pytest.raises(NotWritable):
        build_engine(onnx, tmp_path / "x.plan", report, in_a_file, never)
    half = fake_tensorrt()
    build_engine(onnx, tmp_path / "x.plan", replace(report, precision="fp16"), options, half)
    assert ("clear", "TF32") not in half.calls
    plain = fake_tensorrt()
    build_engine(onnx, tmp_path / "x.plan", report, BuildOptions(detailed=False), plain)
    assert (
        not [c for c in plain.calls if c[0] in ("flag", "cache")] and plain.config.profiling_verbosity == ""
    )


def test_a_fixed_batch_needs_no_profile(tmp_path: Path) -> None:
    _, report = exported(tmp_path, 3)
    trt = fake_tensorrt()
    build_engine(tmp_path / "model.onnx", tmp_path / "x.plan", report, trt=trt)
    assert not [c for c in trt.calls if c[0] == "shape"]
    assert not any("Shapes" in word for word in trtexec_line(report, BuildOptions(), "a", "b"))


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"version": "10.8.0"}, ("10.8.0", "checkout")),
        ({"version": "8.6.1"}, "old"),
        ({"parse": ["no importer", "bad\nshape"]}, ("Einsum", "importer")),
        ({"build": "out of\nluck"}, ("failed", "engine")),
        ({"build": "Error 2: OutOfMemory"}, ("OutOfMemory", "--workspace", "MIB")),
        ({"no_builder": True}, ("CUDA", "35")),
        ({"no_profile": True}, ("rejected", "optimisation")),
    ],
)
def test_refusals_are_one_line_and_write_nothing(
    faults: dict[str, Any], message: str, toy: Toy, tmp_path: Path
) -> None:
    onnx, _, report = toy
    with refuses(ExportError, names=message) as caught:
        build_engine(onnx, tmp_path / "x.plan", report, trt=fake_tensorrt(**faults))
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_impossible_options(toy: Toy, tmp_path: Path) -> None:
    with refuses(ExportError, names=["ComputeCapability.SM42"]):
        build_engine(toy[0], tmp_path / "x", toy[2], BuildOptions(compute_capability="SM42"), fake_tensorrt())
    with refuses(UsageError, names=["0", "MiB"]):
        BuildOptions(workspace_mib=0)
    with refuses(UsageError, names=["9", "optimisation"]):
        BuildOptions(optimization_level=9)


def test_trtexec_line(toy: Toy) -> None:
    _, _, report = toy
    assert trtexec_line(report, BuildOptions(refit=True, timing_cache="t"), "m.onnx", "m.plan") == [
        "trtexec",
        "--onnx=m.onnx",
        "--saveEngine=m.plan",
        "--minShapes=input:1x1x10x10",
        "--optShapes=input:2x1x10x10",
        "--maxShapes=input:4x1x10x10",
        "--memPoolSize=workspace:4096",
        "--builderOptimizationLevel=3",
        "--timingCacheFile=t",
        "--refit",
        "--profilingVerbosity=detailed",
        "--noTF32",
    ]
    line = trtexec_line(report, BuildOptions(version_compatible=True, hardware_compatible=True), "a", "b")
    assert {"--versionCompatible", "--hardwareCompatibilityLevel=ampere+"} <= set(line)
    assert not any(word.startswith(("--fp16", "--int8", "--best")) for word in line)  # 11 dropped them


def test_write(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx, job, report = toy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "model.onnx").write_bytes(onnx.read_bytes())
    described, steps = to_tensorrt.write(job, report, tmp_path, BuildOptions(), trt=fake_tensorrt())
    assert described["note"] == "" and described["file"] == "tensorrt/model.plan"
    assert [step.passed for step in steps] == [True, None]
    written = {"profile.json", "build_engine.sh", "model.plan", "layers.json"}
    assert {f.name for f in (tmp_path / "tensorrt").iterdir()} == written


def test_write_without_tensorrt(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, job, report = toy
    monkeypatch.setattr(to_tensorrt, "find_tensorrt", lambda: None)
    described, steps = to_tensorrt.write(job, report, tmp_path, BuildOptions())
    assert "pip install -e '.[tensorrt]'" in described["note"] and described["file"] is None
    assert [step.passed for step in steps] == [None, None]
    profile = json.loads((tmp_path / "tensorrt" / "profile.json").read_text())
    assert profile["shapes"] == {"min": [1, 1, 10, 10], "opt": [2, 1, 10, 10], "max": [4, 1, 10, 10]}
    assert described["trtexec"] in (tmp_path / "tensorrt" / "build_engine.sh").read_text()
    with refuses(ExportError, names=["TensorRT"]):
        build_engine(tmp_path / "model.onnx", tmp_path / "x.plan", report)
    with refuses(CapszooError, names=["TensorRT"]):
        TensorRTRunner(tmp_path / "x.plan")


def test_write_without_a_gpu(toy: Toy, tmp_path: Path) -> None:
    onnx, job, report = toy
    (tmp_path / "model.onnx").write_bytes(onnx.read_bytes())
    described, steps = to_tensorrt.write(
        job, report, tmp_path, BuildOptions(), trt=fake_tensorrt(no_builder=True)
    )
    assert described["file"] is None and "cannot create a builder: CUDA initialization" in described["note"]
    assert [step.passed for step in steps] == [None, None]
    assert {f.name for f in (tmp_path / "tensorrt").iterdir()} == {"profile.json", "build_engine.sh"}


def test_script_runs_trtexec(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for trtexec that prints its arguments: --stronglyTyped only where that is an option."""
    _, job, report = toy
    monkeypatch.setattr(to_tensorrt, "find_tensorrt", lambda: None)
    to_tensorrt.write(job, report, tmp_path, BuildOptions())
    served = tmp_path / "triton-tensorrt" / "toy" / "1"
    served.mkdir(parents=True)
    (tmp_path / "tensorrt" / "model.plan").write_bytes(b"an engine")
    program = tmp_path / "trtexec"
    for options, typed in (("--stronglyTyped", True), ("--verbose", False)):
        program.write_text(f'#!/bin/sh\n[ "$1" = --help ] && echo "{options}" || echo "$@"\n')
        program.chmod(0o755)
        done = subprocess.run(
            ["sh", str(tmp_path / "tensorrt" / "build_engine.sh"), "--skipInference"],
            capture_output=True,
            text=True,
            timeout=30,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        )
        assert done.returncode == 0, done.stderr
        words = done.stdout.split()
        assert "--onnx=../model.onnx" in words and "--skipInference" in words
        assert ("--stronglyTyped" in words) is typed
    assert (served / "model.plan").read_bytes() == b"an engine"


def test_runner(tmp_path: Path) -> None:
    (tmp_path / "x.plan").write_bytes(b"an engine")
    trt = fake_tensorrt()
    runner = TensorRTRunner(tmp_path / "x.plan", trt, device="cpu")
    (scores,) = runner(np.zeros((2, 1, 10, 10), np.float32))
    assert scores.shape == (2, 5) and scores.dtype == np.float32
    assert ("address", "input", True) in trt.calls and ("address", "scores", True) in trt.calls
    with refuses(CapszooError, names=["9", "outside"]):
        runner(np.zeros((9, 1, 10, 10), np.float32))
    with refuses(CapszooError, names=["GPU"]):
        TensorRTRunner(tmp_path / "x.plan", fake_tensorrt(foreign=True), device="cpu")
    stuck = TensorRTRunner(tmp_path / "x.plan", fake_tensorrt(run=True), device="cpu")
    with refuses(CapszooError, names=["run"]):
        stuck(np.zeros((2, 1, 10, 10), np.float32))


def test_the_stand_in_is_a_step_of_the_gate(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx, _, report = toy
    monkeypatch.setattr(to_tensorrt, "find_rtx", lambda: None)
    assert to_tensorrt.rtx_step(onnx, report).passed is None
    before = list(report.gate)
    with refuses(ExportError, names=["parse", "graph"]) as caught:
        to_tensorrt.rtx_step(onnx, report, fake_tensorrt("1.7.1", name="tensorrt_rtx", parse=["no importer"]))
    assert caught.value.report is report and report.gate[-1].passed is False
    report.gate[:] = before


# -- NVIDIA's own -------------------------------------------------------------------------------------------------


@pytest.mark.rtx
@pytest.mark.skipif(
    to_tensorrt.find_rtx() is None, reason="needs TensorRT-RTX: make test-trt-rtx brings and runs it"
)
def test_tensorrt_rtx_takes_uint8_and_refuses_nonsense(tmp_path: Path) -> None:
    job = to_onnx.prepare(ToyCaps(), uint8_input=True, outputs=("scores", "couplings"), check=False)
    report = to_onnx.write(job, tmp_path / "model.onnx")
    assert to_tensorrt.rtx_step(tmp_path / "model.onnx", report).passed
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with refuses(ExportError, names=["parse", "graph"]):
        to_tensorrt.rtx_step(tmp_path / "bad.onnx", report)


@pytest.mark.tensorrt
@pytest.mark.gpu
def test_a_real_engine_equals_eager(tmp_path: Path) -> None:
    if to_tensorrt.find_tensorrt() is None:
        pytest.skip("needs TensorRT itself; its stand-in builds nothing that runs here")
    job, report = exported(tmp_path)
    _, steps = to_tensorrt.write(job, report, tmp_path, BuildOptions())
    assert [step.passed for step in steps] == [True, True]
