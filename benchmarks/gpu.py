"""The routing layers on a GPU: time, floor, memory and launches, against the reference and the backbone alone.

    python benchmarks/gpu.py --out gpu.json        # everything, at most ten minutes on an H200

`benchmarks/gpu_day.py` measures the same in steps that can be interrupted and resumed, and more.

First, correctness: each layer at a small batch, in every dtype, on new random inputs and in memory filled with NaN,
values and gradients against the reference in float64. Layers that fail are not timed. Then, in bfloat16:

* forward, and forward with backward, of the default engine ("fused" in tables and files; of dynamic and EM routing the
  reference), the reference, and the reference under torch.compile: medians of CUDA events, with an empty cache and
  the launches queued before (the GPU's time alone);
* the floors: operations at the rate of a large matrix product, bytes at that of a large copy (both measured first),
  and the products with parents and couplings, for which tensor cores cannot be used, at the data sheet's float32 rate;
* peak memory above the inputs, and number of kernel launches (from the profiler; torch.compile's are not counted);
* a training step (autocast, SGD) of `idpa_resnet` at batch 128 against that of its backbone without capsules.

Measurements that do not fit `--limit` seconds are skipped and listed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a plain checkout works too

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import build
from capszoo import layers
from capszoo.layers.engine_choice import use_engines

#: ``||found - expected|| / ||expected||`` that rounding in a dtype explains.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}

#: Multiply-adds a second outside of the tensor cores: H100 and H200 (SXM) have 132 x 128 lanes at 1.98 GHz, data sheet.
CORE_RATE = 33.5e12


@dataclass(frozen=True)
class Case:
    """A layer and the minimum cost of a batch.

    Multiply-adds and bytes are those of the task, not of an algorithm: votes formed once, input, weights and result
    moved once. ``passes`` counts the iterations that need votes.
    """

    name: str
    build: Callable[[], nn.Module]
    size: tuple[int, ...]
    batch: int
    routings: int
    """Of an image."""
    children: int
    parents: int
    depth: int
    """Multiply-adds of one number of a vote."""
    pose: int
    """Numbers in a parent's pose."""
    passes: int
    positive: bool = False
    """Inputs lie in 0..1 (activations among them)."""

    def input(self, batch: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        x = torch.rand if self.positive else torch.randn
        return x(batch, *self.size, device=device).to(dtype)

    def result(self, layer: Any, x: Tensor) -> Tensor:
        """The compared result: poses."""
        return layer.route(x)[0] if isinstance(layer, layers.ConvEM) else layer(x)

    def expected(self, layer: Any, x: Tensor) -> Tensor:
        """The same by the reference engine."""
        with use_engines("reference"):
            return self.result(layer, x)

    def numbers(self) -> int:
        """Number of elements in all votes of a batch."""
        return self.batch * self.routings * self.children * self.parents * self.pose

    def macs(self, backward: bool) -> int:
        """Votes, agreements and sums; with backward three times as many."""
        return self.numbers() * (self.depth + 2 * self.passes) * (3 if backward else 1)

    def core_macs(self, backward: bool) -> int:
        """Multiply-adds of votes with scalars of their parent or coupling, including recomputation.

        Forward: agreement and sum. Backward: agreement, gradients of couplings and parents; and, for the children's
        and weights' gradients, agreement, gradient of couplings, and two for the votes' gradient.
        """
        return self.numbers() * self.passes * (2 + (7 if backward else 0))

    def moved(self, weights: int, backward: bool, item: int = 2) -> int:
        """Bytes: input, weights, result; for backward also these again and the gradients of input and weights."""
        inputs = self.batch * torch.Size(self.size).numel()
        results = self.batch * self.routings * self.parents * self.pose
        forward = inputs + weights + results
        return item * (forward + (2 * (inputs + weights) + results if backward else 0))


def cases() -> list[Case]:
    return [
        Case(
            "IDPA conv, 32x4x4, 16x16 to 7x7, 2 it.",
            lambda: layers.ConvIDPA(32, 32, 16, kernel_size=3, stride=2, num_iters=2),
            (512, 16, 16),
            128,
            49,
            288,
            32,
            4,
            16,
            1,
        ),
        Case(
            "IDPA classes, 800 to 10, 4x4, 2 it.",
            lambda: layers.FCIDPA(800, 10, 16, num_iters=2),
            (800, 16),
            128,
            1,
            800,
            10,
            4,
            16,
            1,
        ),
        Case(
            "dynamic, 1152x8 to 10x16, 3 it.",
            lambda: layers.DynamicRouting(1152, 8, 10, 16, 3),
            (1152, 8),
            512,
            1,
            1152,
            10,
            8,
            16,
            2,
        ),
    ]


def em_layer(in_caps: int, out_caps: int) -> nn.Module:
    """ConvEM 3x3 of stride 2 with the temperatures of the networks, relative to the children of a parent."""
    lam = 0.1 * out_caps / (9 * in_caps)
    return layers.ConvEM(in_caps, out_caps, 4, 3, 2, 2, lam_start=lam, lam_step=lam, init_beta_v=1.0)


def em_case() -> Case:
    """EM has no kernel, as dynamic routing: its default engine is the reference. It computes in float32."""
    return Case(
        "EM conv, 32 to 32 types 4x4, 16x16 to 7x7, 2 it.",
        lambda: em_layer(32, 32),
        (32 * 17, 16, 16),
        32,
        49,
        288,
        32,
        4,
        16,
        2,
        True,
    )


def tiny_cases() -> dict[str, Case]:
    """One case for each of `all_cases`, small enough for Triton's interpreter to take only seconds."""
    return {
        "idpa_conv": Case(
            "IDPA conv, tiny", lambda: layers.ConvIDPA(2, 3, 16, kernel_size=3, stride=2, num_iters=2),
            (32, 5, 5), 2, 4, 18, 3, 4, 16, 1,
        ),
        "idpa_classes": Case(
            "IDPA classes, tiny", lambda: layers.FCIDPA(11, 4, 16, num_iters=2), (11, 16), 2, 1, 11, 4, 4, 16, 1
        ),
        "dynamic": Case(
            "dynamic, tiny", lambda: layers.DynamicRouting(9, 8, 4, 16, 3), (9, 8), 3, 1, 9, 4, 8, 16, 2
        ),
        "em": Case(
            "EM conv, tiny", lambda: em_layer(2, 3), (34, 5, 5), 2, 4, 18, 3, 4, 16, 2, True
        ),
    }  # fmt: skip


def all_cases() -> dict[str, Case]:
    """IDPA, which has kernels; dynamic and EM routing, which have none."""
    return {**dict(zip(("idpa_conv", "idpa_classes", "dynamic"), cases(), strict=True)), "em": em_case()}


def poison(device: torch.device) -> None:
    """Fill the memory of the next tensors with NaN."""
    if device.type == "cuda":
        blocks = [torch.full((n,), float("nan"), device=device) for n in (2**28, 2**24, 2**22, 2**18)]
        del blocks


def gradients(
    layer: nn.Module, x: Tensor, seed: Tensor, form: Callable[[Any, Tensor], Tensor]
) -> list[Tensor]:
    """The result of a form of a layer, and the gradients of its input and of the weights that it depends on."""
    x = x.detach().requires_grad_()
    y = form(layer, x)
    found = torch.autograd.grad(y, [x, *layer.parameters()], seed.to(y.dtype), allow_unused=True)
    return [y.detach(), *(gradient for gradient in found if gradient is not None)]


@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
def check(case: Case, dtype: torch.dtype, batch: int, device: torch.device) -> float:
    """Largest relative error of the result and of every gradient, against the reference in float64.

    Without TF32, which cuDNN takes for float32 convolutions by default: it rounds to 10 bits, an error of 2e-4 in IDPA.
    """
    layer = case.build().to(device, dtype)
    x = case.input(batch, device, dtype)
    with torch.no_grad():
        seed = torch.randn_like(case.expected(layer, x))
    found = []
    for _ in loop_splits(device):
        poison(device)
        found.append(gradients(layer, x, seed, case.result))
    expected = gradients(layer.double(), x.double(), seed.double(), case.expected)
    errors = [
        float((f.double() - e).norm() / e.norm()) if bool(torch.isfinite(f).all()) else float("inf")
        for ours in found
        for f, e in zip(ours, expected, strict=True)
    ]
    return max(errors)


def loop_splits(device: torch.device) -> Iterator[None]:
    """Run the body once for each way in which the kernels divide their loops, where they run on CUDA.

    A small batch splits the loop over the children into parts and adds them in a second kernel. A large batch has one
    part, whose kernel normalises by itself: another code path, which is the one that `measure` times.
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


def timed(
    runs: list[Callable[[], object]], device: torch.device, seconds: float = 1.0, *, alone: bool = False
) -> float:
    """Median milliseconds of one run; the runs (the same work on different inputs) take turns.

    Args:
        runs: the work.
        device: where it runs.
        seconds: of measuring, at least 20 and at most 500 runs.
        alone: the GPU's time alone. Before each run its cache is emptied, and it is kept busy until the host has queued
            the run; else a short run is as slow as the host's launches.
    """
    for run in runs[:2] * 2:
        run()
    if device.type != "cuda":
        start = time.perf_counter()
        runs[0]()
        return (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize(device)
    times: list[float] = []
    if alone:
        begin = time.perf_counter()
        runs[0]()
        queued = time.perf_counter() - begin  # seconds that the host needs for one run
        torch.cuda.synchronize(device)
        cycles = int(min(2 * queued + 1e-3, 0.05) * 2e9)
        flush = torch.empty(2**26, dtype=torch.int32, device=device)  # 256 MB, more than the L2 cache
    begin = time.perf_counter()
    while len(times) < 20 or (time.perf_counter() - begin < seconds and len(times) < 500):
        pairs = []
        for run in runs:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if alone:
                flush.zero_()
                torch.cuda._sleep(cycles)
            pair[0].record()
            run()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize(device)
        times += [start.elapsed_time(end) for start, end in pairs]
    return statistics.median(times)


def peak_mib(run: Callable[[], object], device: torch.device) -> float:
    """Peak memory above the previous allocation."""
    if device.type != "cuda":
        return float("nan")
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def launches(run: Callable[[], object], device: torch.device) -> int:
    """Number of kernels that one run starts on the device (including copies and fills)."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize(device)
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


@dataclass(frozen=True)
class Machine:
    """Multiply-adds per second of a large bfloat16 product, bytes (read and written) per second of a large copy."""

    macs: float
    bytes: float


def measure_machine(device: torch.device, n: int = 8192) -> Machine:
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    source = torch.randn(4 * n * n, device=device)
    target = torch.empty_like(source)
    product = timed([lambda: torch.mm(a, b)], device) / 1e3
    copy = timed([lambda: target.copy_(source)], device) / 1e3
    return Machine(n**3 / product, 2 * source.numel() * 4 / copy)


@dataclass
class Row:
    """Milliseconds, milliseconds of the floors, MiB, launches; of a layer, forward or with backward."""

    name: str
    what: str
    fused_ms: float
    reference_ms: float
    compiled_ms: float | None
    tensor_floor_ms: float
    bytes_floor_ms: float
    core_floor_ms: float
    fused_mib: float
    reference_mib: float
    fused_launches: int
    reference_launches: int

    @property
    def of_floor(self) -> float:
        return max(self.tensor_floor_ms, self.bytes_floor_ms) / self.fused_ms


def runs_of(
    form: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], inputs: list[Tensor], backward: bool
) -> list[Callable[[], object]]:
    def run(x: Tensor) -> object:
        if not backward:
            with torch.no_grad():
                return form(x)
        y = form(x)
        return torch.autograd.grad(y, [x, *parameters], torch.ones_like(y), allow_unused=True)

    return [lambda x=x: run(x) for x in inputs]  # type: ignore[misc]


def measure(
    case: Case,
    machine: Machine,
    device: torch.device,
    with_compile: bool,
    copies: int = 4,
    backend: str = "inductor",
) -> list[Row]:
    layer = case.build().to(device, torch.bfloat16)
    parameters = list(layer.parameters())
    weights = sum(p.numel() for p in parameters)
    inputs = [case.input(case.batch, device, torch.bfloat16).requires_grad_() for _ in range(copies)]

    def expected(x: Tensor) -> Tensor:
        return case.expected(layer, x)

    def result(x: Tensor) -> Tensor:
        return case.result(layer, x)

    rows = []
    for backward in (False, True):
        fused = runs_of(result, parameters, inputs, backward)
        fused_ms, fused_mib = timed(fused, device, alone=True), peak_mib(fused[0], device)
        fused_launches = launches(fused[0], device)
        reference = runs_of(expected, parameters, inputs, backward)
        reference_ms, reference_mib = timed(reference, device, alone=True), peak_mib(reference[0], device)
        reference_launches = launches(reference[0], device)
        compiled_ms = None
        if with_compile:
            with use_engines("reference"):
                compiled = compiled_runs(case, layer, inputs, backward, backend)
                compiled_ms = timed(compiled, device, alone=True)
        torch._dynamo.reset()
        rows.append(
            Row(
                case.name,
                "forward and backward" if backward else "forward",
                fused_ms,
                reference_ms,
                compiled_ms,
                case.macs(backward) / machine.macs * 1e3,
                case.moved(weights, backward) / machine.bytes * 1e3,
                case.core_macs(backward) / CORE_RATE * 1e3,
                fused_mib,
                reference_mib,
                fused_launches,
                reference_launches,
            )
        )
    return rows


def compiled_runs(
    case: Case, layer: nn.Module, inputs: list[Tensor], backward: bool, backend: str
) -> list[Callable[[], object]]:
    """Runs of a layer under torch.compile, which compiles in the first run for the engine that is then in force."""
    torch._dynamo.reset()
    form = torch.compile(lambda x: case.result(layer, x), backend=backend)
    return runs_of(form, list(layer.parameters()), inputs, backward)


def compile_reference(case: Case, device: torch.device, backend: str = "inductor") -> None:
    """Compile the reference as `measure` does, and measure nothing: torch keeps the code on disk."""
    layer = case.build().to(device, torch.bfloat16)
    x = case.input(case.batch, device, torch.bfloat16).requires_grad_()
    with use_engines("reference"):
        for backward in (False, True):
            compiled_runs(case, layer, [x], backward, backend)[0]()


def step_of(
    spec: str,
    batch: int,
    device: torch.device,
    compiled: bool,
    backend: str = "inductor",
    mode: str | None = None,
) -> Callable[[], object]:
    """A training step under autocast, images and filters channels-last; ``mode`` is torch.compile's."""
    model, size = build(spec)
    model.train().to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    x = torch.rand(batch, *size, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.zeros(batch, dtype=torch.long, device=device)
    network = torch.compile(model, backend=backend, mode=mode) if compiled else model

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            scores = network(x)
        F.cross_entropy(scores.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # gradients are part of the step's own memory

    return step


def measure_models(device: torch.device, batch: int, left: Callable[[], float]) -> dict[str, float]:
    """Milliseconds of training steps: backbone, whole model, whole model with the reference; each compiled too."""
    times: dict[str, float] = {}
    for compiled in (False, True):
        suffix = ", compiled" if compiled else ""
        for name, spec in (("backbone", "idpa_resnet@norm"), ("idpa_resnet", "idpa_resnet")):
            if left() < (90 if compiled else 30):
                print(f"left out, no time: {name}{suffix}", file=sys.stderr)
                continue
            torch._dynamo.reset()
            times[name + suffix] = timed([step_of(spec, batch, device, compiled)], device)
        if not compiled and left() > 30:
            with use_engines("reference"):
                times["idpa_resnet, reference"] = timed(
                    [step_of("idpa_resnet", batch, device, False)], device
                )
    return times


@dataclass
class Result:
    settings: dict[str, Any]
    machine: Machine | None = None
    errors: dict[str, float] = field(default_factory=dict)
    layers: list[Row] = field(default_factory=list)
    training_steps_ms: dict[str, float] = field(default_factory=dict)

    def write(self, path: Path | None) -> None:
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        content = asdict(self)
        for entry, row in zip(content["layers"], self.layers, strict=True):
            entry["of_floor"] = row.of_floor
        part.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(part, path)


def table(result: Result) -> str:
    """Markdown."""
    lines = [
        "| layer | | fused, ms | of the larger floor | reference / fused | compiled reference / fused "
        "| floors: tensor cores; bytes; other cores, ms | memory, MiB (reference) | launches (reference) |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result.layers:
        compiled = "" if row.compiled_ms is None else f"{row.compiled_ms / row.fused_ms:.1f}"
        lines.append(
            f"| {row.name} | {row.what} | {row.fused_ms:.3f} | {row.of_floor:.0%} "
            f"| {row.reference_ms / row.fused_ms:.1f} | {compiled} "
            f"| {row.tensor_floor_ms:.3f}; {row.bytes_floor_ms:.3f}; {row.core_floor_ms:.3f} "
            f"| {row.fused_mib:.0f} ({row.reference_mib:.0f}) | {row.fused_launches} ({row.reference_launches}) |"
        )
    steps = result.training_steps_ms
    if steps:
        lines += ["", "| training step | ms | x backbone |", "|---|---:|---:|"]
        for name, ms in steps.items():
            backbone = steps.get("backbone, compiled" if name.endswith("compiled") else "backbone")
            lines.append(f"| {name} | {ms:.2f} | {'' if backbone is None else f'{ms / backbone:.2f}'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write FILE.json, again after each step")
    parser.add_argument("--limit", type=float, default=600, help="seconds for everything (default: 600)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this needs a CUDA device, and torch.cuda.is_available() is False")
    begin = time.monotonic()

    def left() -> float:
        return args.limit - (time.monotonic() - begin)

    device = torch.device("cuda")
    result = Result(
        {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "limit": args.limit}
    )
    result.machine = measure_machine(device)
    print(f"{result.settings['device']}: {2 * result.machine.macs / 1e12:.0f} TFLOP/s, ", end="")
    print(f"{result.machine.bytes / 1e12:.2f} TB/s", flush=True)
    for case in cases():
        for dtype, tolerance in TOLERANCE.items():
            name = f"{case.name}, {dtype}"
            error = result.errors[name] = check(case, dtype, 8, device)
            print(f"error {error:.1e} (at most {tolerance:.0e}): {name}", flush=True)
            result.write(args.out)
            if not error <= tolerance:
                raise SystemExit(f"error: {name} is wrong by {error:.1e}: nothing was timed")
    # if time is short, the reference is compiled only for the first two
    for case in cases():
        if left() < 60:
            print(f"left out, no time: {case.name}", file=sys.stderr)
            continue
        result.layers += measure(case, result.machine, device, not args.no_compile and left() > 200)
        result.write(args.out)
    result.training_steps_ms = measure_models(device, 128, left)
    result.write(args.out)
    print("\n" + table(result))


if __name__ == "__main__":
    main()
