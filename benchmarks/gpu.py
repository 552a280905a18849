"""All that needs a GPU, in one resumable command: maintainers run it when they have a card (docs/dev/gpu.md).

    python benchmarks/gpu.py --out bench/gpu --data DATA          # again, until it prints that all is done
    python benchmarks/gpu.py --out bench/gpu --steps tests,train --minutes 5
    python benchmarks/gpu.py --out /tmp/gpu --dry-run             # the same code on the CPU, with tiny sizes

It needs torch, timm, Triton and the checkout, no installation. Steps: ``tests`` (pytest's mark ``gpu``), ``check``
(each
routing layer against its reference in float64: new random inputs, memory filled with NaN), ``layers`` (time and
memory; a layer that failed its check is not timed), ``train`` (training steps of one network of each routing:
eager, compiled, as CUDA graphs; those with Triton kernels also without them), ``runs`` (short trainings on --data),
``onnxruntime`` and ``torch_tensorrt``.

Each step runs in a process of its own, which ends after nine minutes: a kernel that hangs or breaks the device costs
one measurement. ``<out>/<step>.json`` has the measurements so far; the same command goes on with the next one.
``<out>/report.md`` and ``report.json`` have all of them, with card and versions. Times are medians of ``n`` runs in
milliseconds. A folder holds the results of one card.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import build
from capszoo import layers
from capszoo._utils.files import write_atomically
from capszoo.layers import _triton
from capszoo.layers.engine_choice import use_engines

Item = Callable[[], dict[str, Any]]

#: Seconds limit for one process of a step. Another process goes on with the item that was running; an item that takes
#: a whole process is recorded as too slow.
LIMIT = 540

#: Exit code of a step whose device is broken: the next item needs a new process.
BROKEN = 3

#: ``||found - expected|| / ||expected||`` that rounding in a dtype explains.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}

#: Networks whose training steps are measured: one of each routing, and two to compare them with.
MODELS = {
    "IDPA": "idpa_resnet",
    "IDPA, backbone alone": "idpa_resnet@norm",
    "ResNet-18 (CIFAR)": "resnet18_cifar",
    "capConv": "encapnet_v1:mode=master",
    "routing pooling": "resnet20_routingpool",
    "dynamic": "capsnet_dynamic",
    "EM": "capsnet_em",
    "self-attention": "efficient_capsnet",
    "self-routing": "resnet20_selfrouting",
}
TINY_MODELS = {
    "IDPA": "idpa_cnn:num_caps=4,pose_dim=4,backbone_chans=8",
    "routing pooling": "resnet20_routingpool",
}

#: Networks with Triton kernels.
WITH_TRITON = ("IDPA",)

#: End of the name of an item that is measured without them.
WITHOUT = ", without Triton"

#: How a training step is compiled, and torch.compile's mode; None: eager.
KINDS: dict[str, str | None] = {"CUDA graphs": "reduce-overhead", "compiled": "default", "eager": None}

#: Short trainings: recipe, and its settings.
RUNS = {
    "idpa_resnet.cifar10": ("epochs=3", "compile=reduce-overhead"),
    "resnet20_routingpool.cifar10": ("epochs=3", "compile=reduce-overhead"),
    "capsnet_dynamic.mnist": ("epochs=2", "compile=true"),
}


class Settings(NamedTuple):
    """Settings of a step: folder of the results, folder of the data sets."""

    out: Path
    dry_run: bool = False
    data: Path | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry_run else "cuda")

    @property
    def backend(self) -> str:
        """Backend of torch.compile: the dry run traces and generates no code."""
        return "aot_eager" if self.dry_run else "inductor"

    @property
    def batch(self) -> int:
        return 2 if self.dry_run else 128

    @property
    def models(self) -> dict[str, str]:
        return TINY_MODELS if self.dry_run else MODELS


# --- measuring -----------------------------------------------------------------------------------------------------


def timed(run: Callable[[], object], device: torch.device, alone: bool = False) -> dict[str, float]:
    """Median milliseconds of a run, and the number of runs.

    Args:
        run: the work.
        device: where it runs.
        alone: the GPU's time alone. Before each run its cache is emptied, and it is kept busy until the host has queued
            the run. Otherwise a short run is as slow as the host's launches.
    """
    for _ in range(2 if device.type == "cpu" else 4):
        run()
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return {"ms": (time.perf_counter() - begin) * 1e3, "n": 1}
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    queued = time.perf_counter() - begin  # seconds that the host needs for one run
    torch.cuda.synchronize()
    flush = torch.empty(2**26, dtype=torch.int32, device=device)  # 256 MB, more than the L2 cache
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 20 or (time.perf_counter() - begin < 1 and len(times) < 500):
        pairs = []
        for _ in range(10):  # the host goes ahead, as in training
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if alone:
                flush.zero_()
                torch.cuda._sleep(int(min(2 * queued + 1e-3, 0.05) * 2e9))
            pair[0].record()
            run()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        times += [start.elapsed_time(end) for start, end in pairs]
    return {"ms": statistics.median(times), "n": len(times)}


def peak_mib(run: Callable[[], object], device: torch.device) -> float | None:
    """Peak memory above the previous allocation."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


# --- step: check, layers -------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A layer, the size of its input without the batch, and the batch. ``positive``: inputs lie in 0..1."""

    build: Callable[[], nn.Module]
    size: tuple[int, ...]
    batch: int
    positive: bool = False

    def input(self, batch: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return (torch.rand if self.positive else torch.randn)(batch, *self.size, device=device).to(dtype)

    def result(self, layer: Any, x: Tensor) -> Tensor:
        """The compared result: poses."""
        return layer.route(x)[0] if isinstance(layer, layers.ConvEM) else layer(x)


def em_layer(in_caps: int, out_caps: int) -> nn.Module:
    """ConvEM 3x3 of stride 2 with the temperatures of the networks, relative to the children of a parent."""
    lam = 0.1 * out_caps / (9 * in_caps)
    return layers.ConvEM(in_caps, out_caps, 4, 3, 2, 2, lam_start=lam, lam_step=lam, init_beta_v=1.0)


#: The layers of the networks: convolutions of 32 types of 4x4 capsules, 16x16 to 7x7; the classes; digit capsules.
CASES = {
    "idpa_conv": Case(lambda: layers.ConvIDPA(32, 32, 16, stride=2, num_iters=2), (512, 16, 16), 128),
    "idpa_classes": Case(lambda: layers.FCIDPA(800, 10, 16, num_iters=2), (800, 16), 128),
    "dynamic": Case(lambda: layers.DynamicRouting(1152, 8, 10, 16, 3), (1152, 8), 512),
    "em": Case(lambda: em_layer(32, 32), (32 * 17, 16, 16), 32, True),
}

#: Of the same routings, small enough for Triton's interpreter to take only seconds.
TINY_CASES = {
    "idpa_conv": Case(lambda: layers.ConvIDPA(2, 3, 16, stride=2, num_iters=2), (32, 5, 5), 2),
    "idpa_classes": Case(lambda: layers.FCIDPA(11, 4, 16, num_iters=2), (11, 16), 2),
    "dynamic": Case(lambda: layers.DynamicRouting(9, 8, 4, 16, 3), (9, 8), 3),
    "em": Case(lambda: em_layer(2, 3), (34, 5, 5), 2, True),
}


def gradients(
    form: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, seed: Tensor | None = None
) -> list[Tensor]:
    """The result of a form of a layer, and the gradients of its input and of the weights that it depends on."""
    x = x.detach().requires_grad_()
    y = form(x)
    seed = torch.ones_like(y) if seed is None else seed.to(y.dtype)
    found = torch.autograd.grad(y, [x, *layer.parameters()], seed, allow_unused=True)
    return [y.detach(), *(gradient for gradient in found if gradient is not None)]


def loop_splits(device: torch.device) -> Iterator[None]:
    """Run the body once for each way in which the kernels divide their loops, where they run on CUDA.

    A small batch splits the loop over the children into parts and adds them in a second kernel. A large batch has one
    part, whose kernel normalises by itself: another code path, which is the one that ``layers_`` times.
    """
    yield
    if device.type == "cuda":
        from capszoo.layers._triton import launch

        usual = launch._RESIDENT
        launch._RESIDENT = 0  # one part at any batch
        try:
            yield
        finally:
            launch._RESIDENT = usual


@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
def difference(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative difference of the result and of every gradient from the reference in float64.

    Without TF32, which cuDNN takes for float32 convolutions by default: it rounds to 10 bits, an error of 2e-4 in IDPA.
    """
    layer = case.build().to(device, dtype)
    form = functools.partial(case.result, layer)
    x = case.input(min(16, case.batch), device, dtype)
    with torch.no_grad():
        seed = torch.randn_like(form(x))
    found = []
    for _ in loop_splits(device):
        for size in (2**28, 2**24, 2**22, 2**18) if device.type == "cuda" else ():
            torch.full((size,), float("nan"), device=device)  # fills the memory of the next tensors
        found.append(gradients(form, layer, x, seed))
    with use_engines("reference"):
        expected = gradients(form, layer.double(), x.double(), seed)
    differences = [
        float((f.double() - e).norm() / e.norm()) if bool(torch.isfinite(f).all()) else float("inf")
        for ours in found
        for f, e in zip(ours, expected, strict=True)
    ]
    return max(differences)


def check(settings: Settings) -> dict[str, Item]:
    """Correctness of each layer in each dtype."""

    def one(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        found = difference(case, dtype, settings.device)
        return {"difference": found, "at most": TOLERANCE[dtype], "passed": found <= TOLERANCE[dtype]}

    return {
        f"{name}, {str(dtype).removeprefix('torch.')}": functools.partial(one, case, dtype)
        for name, case in cases(settings).items()
        for dtype in TOLERANCE
    }


def cases(settings: Settings) -> dict[str, Case]:
    return TINY_CASES if settings.dry_run else CASES


def layers_(settings: Settings) -> dict[str, Item]:
    """A layer in bfloat16 by its engine, by the reference, and by the compiled reference."""

    def one(name: str, case: Case, backward: bool) -> dict[str, Any]:
        checks = [value for key, value in read(settings.out, "check").items() if key.startswith(f"{name}, ")]
        if len(checks) < len(TOLERANCE) or not all(value.get("passed") for value in checks):
            return {"left_out": "not every check of it has passed"}
        layer: Any = case.build().to(settings.device, torch.bfloat16)
        x = case.input(case.batch, settings.device, torch.bfloat16)
        eager = functools.partial(case.result, layer)
        found: dict[str, Any] = {}
        for way in ("engine", "reference", "compiled reference"):
            torch._dynamo.reset()
            form = torch.compile(eager, backend=settings.backend) if "compiled" in way else eager
            with (
                use_engines("reference") if "reference" in way else nullcontext(),
                torch.set_grad_enabled(backward),
            ):
                run = functools.partial(gradients, form, layer, x) if backward else functools.partial(form, x)
                taken = timed(run, settings.device, alone=True)
                found |= {f"{way}, {key}": value for key, value in taken.items()}
                found[f"{way}, MiB"] = peak_mib(run, settings.device)
        return found

    parts = {"forward": False, "forward and backward": True}
    return {
        f"{name}, {part}": functools.partial(one, name, case, backward)
        for name, case in cases(settings).items()
        for part, backward in parts.items()
    }


# --- steps: train, runs, tests -------------------------------------------------------------------------------------


def train_step(spec: str, mode: str | None, settings: Settings) -> Callable[[], None]:
    """A training step under autocast, images and filters channels-last; ``mode`` is torch.compile's, None: eager."""
    model, size = build(spec)
    model.train().to(settings.device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    x = torch.rand(settings.batch, *size, device=settings.device).contiguous(
        memory_format=torch.channels_last
    )
    y = torch.zeros(settings.batch, dtype=torch.long, device=settings.device)
    kind = None if settings.dry_run else mode  # the dry run's backend has no modes
    network: Any = torch.compile(model, backend=settings.backend, mode=kind) if mode else model

    def step() -> None:
        with torch.autocast(settings.device.type, torch.bfloat16):
            scores = network(x)
        F.cross_entropy(scores.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # gradients are part of the step's own memory

    return step


def train(settings: Settings) -> dict[str, Item]:
    """Training steps of the networks."""

    def one(spec: str, mode: str | None, with_triton: bool) -> dict[str, Any]:
        torch._dynamo.reset()
        _triton.use_triton(with_triton)
        step = train_step(spec, mode, settings)
        taken = timed(step, settings.device)
        # graphs keep their memory between the steps
        mib = None if mode == "reduce-overhead" else peak_mib(step, settings.device)
        return {"model": spec, **taken, "images/s": settings.batch / taken["ms"] * 1e3, "MiB": mib}

    return {
        f"{name}, {kind}{'' if with_triton else WITHOUT}": functools.partial(one, spec, mode, with_triton)
        for kind, mode in KINDS.items()
        for name, spec in settings.models.items()
        for with_triton in ((True, False) if name in WITH_TRITON else (True,))
    }


def runs(settings: Settings) -> dict[str, Item]:
    """Short trainings by ``capszoo train``; the dry run has a few real digits from the tests."""

    def one(recipe: str, changes: Sequence[str]) -> dict[str, Any]:
        out, data = settings.out / "runs" / recipe, settings.data
        if settings.dry_run:
            from tests.recipes.conftest import write_digits

            data = settings.out / "digits"
            if not data.exists():
                write_digits(ROOT, data)
            changes = (*changes, f"data.name=idx:{data / 'mnist'}", "data.val_size=20", "batch_size=20")
        if data is None:
            return {"left_out": "no --data"}
        command = [sys.executable, "-m", "capszoo", "train", recipe, "--data", str(data), "--out", str(out)]
        for change in (*changes, "precision=bf16"):
            command += ["--set", change]
        call([*command, *(["--device", "cpu"] if settings.dry_run else [])])
        (file,) = out.glob("*.*.json")
        metadata = json.loads(file.read_text())
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        rate = records[-1]["step"] * metadata["recipe"]["batch_size"] / metadata["train_seconds"]
        test = metadata["metrics"]["test"]
        return {"seconds": metadata["train_seconds"], "images/s": rate, "top-1, %": test["top1"]}

    chosen = {"idpa_cnn.mnist": ("epochs=1", "tag=digits")} if settings.dry_run else RUNS
    return {recipe: functools.partial(one, recipe, changes) for recipe, changes in chosen.items()}


def call(command: Sequence[str], accepted: Sequence[int] = (0,)) -> str:
    """Run a command in the checkout and return what it printed.

    Raises:
        RuntimeError: its exit code is none of ``accepted``; the message has the end of the output.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in accepted:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def tests(settings: Settings) -> dict[str, Item]:
    """The tests marked ``gpu``, an item for each file."""
    marked = re.compile(r"^(\s*@|pytestmark = )pytest\.mark\.gpu\b", re.MULTILINE)
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text()))
    return {str(path.relative_to(ROOT)): functools.partial(run_tests, path) for path in files}


def run_tests(file: Path) -> dict[str, Any]:
    """pytest's count for the tests marked ``gpu`` in a file."""
    if missing := absent("pytest"):
        return missing
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(file)]
    if importlib.util.find_spec("xdist"):  # most of the time is Triton's compiler, on one core a test
        command += ["-n", str(max(1, min(6, (os.cpu_count() or 1) // 2)))]
    said = call(command, (0, 5))  # 5: the whole file is skipped
    return {"result": said.strip().splitlines()[-1]}


def absent(*modules: str) -> dict[str, Any]:
    """The result of an item whose modules are not all installed; empty if they are."""
    found = next((name for name in modules if importlib.util.find_spec(name) is None), "")
    return {"left_out": f"{found} is not installed"} if found else {}


# --- steps: onnxruntime, torch_tensorrt ----------------------------------------------------------------------------


def against_eager(
    model: nn.Module, x: Tensor, other: Callable[[], object], settings: Settings
) -> dict[str, Any]:
    model, x = model.to(settings.device), x.to(settings.device)
    with torch.inference_mode():
        eager = timed(lambda: model(x), settings.device)
    taken = timed(other, settings.device)
    return {"batch": len(x), **taken, **{f"eager, {key}": value for key, value in eager.items()}}


def exported(settings: Settings, one: Callable[[str, Settings], dict[str, Any]]) -> dict[str, Item]:
    """An item for each whole network."""
    names = list(settings.models)[:1] if settings.dry_run else list(settings.models)
    return {
        name: functools.partial(one, settings.models[name], settings) for name in names if "alone" not in name
    }


def onnxruntime_one(spec: str, settings: Settings) -> dict[str, Any]:
    """ONNX Runtime on CUDA (on the CPU in a dry run) against eager PyTorch."""
    if missing := absent("onnx", "onnxscript", "onnxruntime"):
        return missing
    import onnxruntime as ort

    from capszoo.export import to_onnx

    runtime, kind = ("cpu", "CPU") if settings.dry_run else ("gpu", "CUDA")
    if f"{kind}ExecutionProvider" not in ort.get_available_providers():
        return {"left_out": f"this onnxruntime has no {kind}ExecutionProvider"}
    model, size = build(spec)
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        to_onnx.export(model, path, batch=settings.batch, input_size=size, gate="quick", runtime=runtime)
        session = ort.InferenceSession(str(path), providers=[f"{kind}ExecutionProvider"])
    x = torch.rand(settings.batch, *size)
    binding = session.io_binding()
    value = ort.OrtValue.ortvalue_from_numpy(x.numpy(), settings.device.type)
    binding.bind_ortvalue_input(session.get_inputs()[0].name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name, settings.device.type)
    return against_eager(model, x, lambda: session.run_with_iobinding(binding), settings)


def torch_tensorrt_one(spec: str, settings: Settings) -> dict[str, Any]:
    """Torch-TensorRT against eager PyTorch."""
    if missing := absent("torch_tensorrt"):
        return missing
    from capszoo.export.to_torch_tensorrt import compile_module

    model, size = build(spec)
    fast = compile_module(model.eval(), batch=settings.batch, input_size=size)
    x = torch.rand(settings.batch, *size, device=settings.device)
    return against_eager(model, x, lambda: fast(x), settings)


STEPS: dict[str, Callable[[Settings], dict[str, Item]]] = {
    "tests": tests,
    "check": check,
    "layers": layers_,
    "train": train,
    "runs": runs,
    "onnxruntime": lambda settings: exported(settings, onnxruntime_one),
    "torch_tensorrt": lambda settings: exported(settings, torch_tensorrt_one),
}


# --- records, and one step in a separate process -------------------------------------------------------------------


def write(path: Path, content: Any) -> None:
    """Write JSON, completely or not at all."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def state(out: Path, step: str) -> dict[str, Any]:
    """``{"items": {name: result}, "running": name}`` of a step."""
    path = out / f"{step}.json"
    return json.loads(path.read_text()) if path.is_file() else {"items": {}, "running": None}


def read(out: Path, step: str) -> dict[str, Any]:
    """Measurements of a step."""
    items: dict[str, Any] = state(out, step)["items"]
    return items


def run_step(step: str, settings: Settings) -> int:
    """Run the step's missing measurements; return the exit code."""
    if settings.dry_run and step in (
        "check",
        "layers",
    ):  # whole networks would take minutes in the interpreter
        _triton._on_cpu = importlib.util.find_spec("triton") is not None
    path, done = settings.out / f"{step}.json", read(settings.out, step)
    for name, item in STEPS[step](settings).items():
        if name in done:
            continue
        write(path, {"items": done, "running": name})
        try:
            done[name] = item()
        except Exception as error:  # any error is recorded, and the others continue
            done[name] = {"error": f"{type(error).__name__}: {error}"}
        write(path, {"items": done, "running": None})
        if is_broken(str(done[name].get("error", ""))):
            return BROKEN
    return 0


def is_broken(error: str) -> bool:
    """True if the process can no longer use its device."""
    signs = ("CUDA error", "Triton Error [CUDA]", "CUDNN_STATUS", "CUBLAS_STATUS", "AcceleratorError:")
    return not error.startswith("RuntimeError: exit code") and any(sign in error for sign in signs)


def supervise(step: str, arguments: Sequence[str], settings: Settings, seconds: float) -> str:
    """Run a step in processes until it is finished; return its outcome in words.

    Args:
        step: name of the step.
        arguments: of this script, for the step's process.
        settings: settings of the run.
        seconds: remaining for this call.
    """
    end = time.monotonic() + seconds
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if settings.dry_run else {})}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--step", step]
    while waiting := [name for name in STEPS[step](settings) if name not in read(settings.out, step)]:
        limit = min(end - time.monotonic(), LIMIT)
        if limit <= 0:
            return f"{len(waiting)} items are left"
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its compilers, too
                process.wait()
        now = state(settings.out, step)
        late = code is None and (limit < LIMIT or waiting[0] in now["items"])
        if code in (0, BROKEN) or late:  # the running item had only what the others left of the limit
            continue
        error = f"took more than {LIMIT} s" if code is None else f"its process exited with {code}"
        # the running item is the cause; before the first one, the step itself
        for name in [now["running"]] if now["running"] else waiting:
            now["items"][name] = {"error": error}
        write(settings.out / f"{step}.json", {**now, "running": None})
    failed = [name for name, value in read(settings.out, step).items() if has_failed(value)]
    return f"{len(failed)} failed: {', '.join(failed)}" if failed else "done"


def has_failed(value: dict[str, Any]) -> bool:
    return "error" in value or value.get("passed") is False


# --- report --------------------------------------------------------------------------------------------------------


def table(items: dict[str, dict[str, Any]]) -> list[str]:
    """The items of a step, a row each; what is not a measurement stands below."""
    rows = {name: value for name, value in items.items() if not value.keys() & {"error", "left_out"}}
    keys = list(dict.fromkeys(key for value in rows.values() for key in value))
    lines = [f"| | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"] if rows else []
    for name, value in rows.items():
        lines.append(f"| {name} | {' | '.join(shown(value.get(key)) for key in keys)} |")
    others = {name: value for name, value in items.items() if name not in rows}
    return [*lines, "", *(f"- {name}: {shown(next(iter(value.values())))}" for name, value in others.items())]


def shown(value: Any) -> str:
    """A value in a cell, truncated."""
    if isinstance(value, float):
        return f"{value:.2g}" if abs(value) < 1 else f"{value:,.2f}"
    return "–" if value is None else " ".join(str(value).replace("|", "/").split())[-300:]


def write_report(settings: Settings, card: str) -> None:
    names = ("triton", "timm", "onnxruntime", "torch_tensorrt")
    versions = {"python": platform.python_version(), "torch": torch.__version__} | {
        name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)
    }
    steps = {step: read(settings.out, step) for step in STEPS}
    about = {"card": card, "dry_run": settings.dry_run, "versions": versions}
    write(settings.out / "report.json", {**about, "steps": steps})
    title = "# A dry run on the CPU: no figure says anything about a GPU" if settings.dry_run else f"# {card}"
    lines = [title, "", ", ".join(f"{key} {value}" for key, value in versions.items())]
    for step, items in steps.items():
        lines += ["", f"## {step}", "", *(table(items) if items else ["not run yet"])]
    (settings.out / "report.md").write_text("\n".join(lines) + "\n")


# --- command line --------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    begin = time.monotonic()
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; the same one resumes")
    parser.add_argument("--data", type=Path, help="folder of the data sets, for the step runs")
    parser.add_argument("--steps", default=",".join(STEPS), help="with commas (default: all)")
    parser.add_argument("--minutes", type=float, default=9, help="of this call (default: 9)")
    parser.add_argument("--retry", action="store_true", help="repeat what failed or was left out")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--step", choices=STEPS, help=SUPPRESS)  # passed to a step's process
    args = parser.parse_args(argv)
    args.steps = args.steps.split(",")
    if unknown := [step for step in args.steps if step not in STEPS]:
        parser.error(f"no step {unknown[0]!r}: the steps are {', '.join(STEPS)}")
    end = begin + 60 * args.minutes
    settings = Settings(args.out.resolve(), args.dry_run, args.data.resolve() if args.data else None)
    if args.step:
        return run_step(args.step, settings)
    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("error: torch.cuda.is_available() is False: --dry-run tries the code on the CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a step's process ends too
    card = "CPU" if args.dry_run else torch.cuda.get_device_name()
    settings.out.mkdir(parents=True, exist_ok=True)
    mark = settings.out / "card.json"
    if mark.is_file() and (before := json.loads(mark.read_text())) != card:
        sys.exit(f"error: {args.out} holds results of {before}, not of {card}: choose another --out")
    write(mark, card)
    arguments = ["--out", str(settings.out), *(["--data", str(settings.data)] if settings.data else [])]
    arguments += ["--dry-run"] if args.dry_run else []
    for step in args.steps:
        if args.retry:
            kept = {
                name: v
                for name, v in read(settings.out, step).items()
                if not has_failed(v) and "left_out" not in v
            }
            write(settings.out / f"{step}.json", {"items": kept, "running": None})
        began = time.monotonic()
        outcome = supervise(step, arguments, settings, end - began - 5)
        print(f"{step}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
        write_report(settings, card)
    left = [step for step in args.steps if STEPS[step](settings).keys() - read(settings.out, step).keys()]
    print(f"the same command resumes with {left[0]}" if left else f"all is done: {args.out / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
