"""Time and memory of each model against a CIFAR ResNet-18: developers run it when a layer changes.

    python benchmarks/models.py                                   # every model, forward pass: make bench
    python benchmarks/models.py --train --memory                  # training step and peak memory as well
    python benchmarks/models.py --models idpa_resnet:routing_iters=1 'capsnet_em*' --iters 20

The yardstick is timm's ``resnet18`` with a 3x3 stem and no max-pool, 10 classes, on 3x32x32 images, in the same
batch size and on the same threads. Each measurement of a model is paired with one of the yardstick taken just
before it, and the median of the paired ratios is printed: a busy machine slows both. Peak memory is the
high-water mark of a new process that runs only two training steps.

``--channels-last`` and ``--compile`` apply to both the model and the yardstick when times are measured; memory is
measured eager and contiguous.

A model is given as ``name`` or ``name:argument=value,argument=value``; shell patterns select all matches.
``name@stage`` is the net up to and including that stage (of ``model.stages``), followed by average pooling: a capsule
network without its capsules. Multiply-adds are those of matrix products and convolutions, as counted by PyTorch's
counter; the last ratio is the time's over theirs, 1 if a net runs at ResNet-18's speed.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import capszoo
from capszoo._utils.devices import inductor_options
from capszoo._utils.files import write_atomically
from capszoo.layers.capconv import CoefficientConv2d

YARDSTICK = "resnet18_cifar"

#: Variants measured besides each model at its defaults.
VARIANTS = (
    "idpa_resnet:routing_iters=1",
    "capsnet_em_norb_small:in_chans=1,img_size=28,num_classes=10",
)

#: Models too large for the common batch on a small machine, and the batch of these models (and the yardstick).
SMALL_BATCH = {"encapnet_v2*": 2, "encapnet_v3*": 2}


@dataclass
class Row:
    """One line of the table. Ratios are to the yardstick in the same run; times in milliseconds, memory in MiB."""

    model: str
    params: int
    input_size: tuple[int, ...]
    batch: int
    mega_macs: float
    macs_ratio: float
    forward_ms: float | None = None
    forward_ratio: float | None = None
    train_ms: float | None = None
    train_ratio: float | None = None
    peak_mib: float | None = None
    peak_over_start_mib: float | None = None
    peak_ratio: float | None = None


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """``"name:a=1,b=avg"`` to the name and its arguments."""
    name, _, rest = spec.partition(":")
    arguments: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise SystemExit(f"error: '{part}' in '{spec}' is not argument=value")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key] = value
    return name, arguments


def cifar_resnet18() -> nn.Module:
    """timm's ResNet-18 in the form used on CIFAR: 3x3 stem of stride 1, no max-pool."""
    model = timm.create_model("resnet18", num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


def build(spec: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A model and the shape of its input, without the batch."""
    if spec == YARDSTICK:
        return cifar_resnet18(), (3, 32, 32)
    name, arguments = parse_spec(spec)
    name, _, stage = name.partition("@")
    model: Any = capszoo.create_model(name, **arguments)
    size = (model.in_chans, *model.img_size)
    if stage:
        model = cut_after(model, stage)
    return model, size


def cut_after(model: Any, stage: str) -> nn.Module:
    """The stages of a net up to and including ``stage``, followed by average pooling."""
    names = [name for name, _ in model.stages.named_children()]
    if stage not in names:
        raise SystemExit(f"error: no stage '{stage}'; the stages are {', '.join(names)}")
    kept = list(model.stages.children())[: names.index(stage) + 1]
    return nn.Sequential(*kept, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@functools.cache
def multiply_adds(spec: str) -> float:
    """Millions of multiply-adds of an image's forward pass, in matrix products and convolutions.

    Products with the zeros between capsule channels that are convolved together (capConv's coefficients) do not count.
    Routings are counted as their references.
    """
    model, size = build(spec)
    for module in model.modules():
        if isinstance(module, CoefficientConv2d):
            module.together = 1
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model.eval()(torch.rand(1, *size))
    return counter.get_total_flops() / 2e6


def batch_of(spec: str, batch: int) -> int:
    return min([batch, *(b for pattern, b in SMALL_BATCH.items() if fnmatch.fnmatch(spec, pattern))])


@dataclass(frozen=True)
class Form:
    """Settings for running a model."""

    device: torch.device
    channels_last: bool = False
    compiled: bool = False
    autocast: bool = False

    def scores(self, model: nn.Module, x: Tensor) -> Tensor:
        """A forward pass, under bfloat16 autocast if requested; the backward pass runs outside of it."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return model(x)

    def built(self, spec: str, batch: int) -> tuple[nn.Module, Tensor]:
        """A model, and images for it."""
        model, size = build(spec)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        model = model.to(self.device, memory_format=layout)  # type: ignore[call-overload]
        x = torch.rand(batch, *size, device=self.device).contiguous(memory_format=layout)
        if not self.compiled:
            return model, x
        options: Any = inductor_options(self.device.type, channels_last=self.channels_last)
        return torch.compile(model, options=options), x  # type: ignore[return-value]


def forward_of(spec: str, batch: int, form: Form) -> Callable[[], object]:
    model, x = form.built(spec, batch)
    model.eval()

    @torch.inference_mode()
    def forward() -> Tensor:
        return form.scores(model, x)

    return forward


def train_step_of(spec: str, batch: int, form: Form) -> Callable[[], object]:
    """Forward, cross-entropy, backward and an SGD step with momentum."""
    model, x = form.built(spec, batch)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    y = torch.zeros(batch, dtype=torch.long, device=form.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(form.scores(model, x).float(), y).backward()
        optimizer.step()

    return step


def timed(run: Callable[[], object], device: torch.device | str = "cpu") -> float:
    """Seconds of a run."""
    wait = torch.cuda.synchronize if str(device).startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def in_turns(
    runs: Sequence[Callable[[], object]], iters: int, warmup: int = 1, device: torch.device | str = "cpu"
) -> list[list[float]]:
    """Seconds of each run, measured in turns after some untimed ones."""
    for run in [*runs] * warmup:
        run()
    passes = [[timed(run, device) for run in runs] for _ in range(iters)]
    return [list(column) for column in zip(*passes, strict=True)]


def _peak_mib() -> float:
    """High-water mark of this process's resident memory.

    From ``VmHWM`` if there is a /proc: ``ru_maxrss`` of a child process also counts its parent.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024


def measure_memory(spec: str, batch: int, device: torch.device) -> tuple[float, float]:
    """In this process: peak of two training steps, in total and above the memory of the imports."""
    start = _peak_mib()
    step = train_step_of(spec, batch, Form(device))
    step()
    step()
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device) / 2**20
        return allocated, allocated
    peak = _peak_mib()
    return peak, peak - start


@functools.cache
def memory_in_subprocess(
    spec: str,
    batch: int,
    threads: int,
    device: str,
    keep: bool = False,
    checkout: Path = ROOT,
) -> tuple[float, float]:
    """:func:`measure_memory` in a fresh process, of this checkout or of another one with its own benchmark."""
    command = [sys.executable, "benchmarks/models.py", "--memory-of", spec, "--batch", str(batch)]
    command += ["--threads", str(threads), "--device", device, *(["--keep-memory"] if keep else [])]
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {checkout}: {spec}: {done.stderr.strip().splitlines()[-1:]}")
    peak, over = json.loads(done.stdout.splitlines()[-1])
    return peak, over


def chosen(patterns: list[str]) -> list[str]:
    """Model specs for the patterns; all models and ``VARIANTS`` if there are none.

    Raises:
        SystemExit: a pattern matches nothing.
    """
    names = capszoo.list_models()
    if not patterns:
        return sorted([*names, *VARIANTS])
    specs: list[str] = []
    for pattern in patterns:
        if ":" in pattern or "@" in pattern:
            found = [pattern]
        else:
            found = [name for name in names if fnmatch.fnmatch(name, pattern)]
        if not found:
            raise SystemExit(f"error: no model matches '{pattern}' (capszoo list shows all)")
        specs += [spec for spec in found if spec not in specs]
    return specs


def markdown(
    head: str | Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)
) -> list[str]:
    """A Markdown table, a line each; columns of ``words`` are aligned left, figures right."""
    names = head.split(" | ") if isinstance(head, str) else head
    rules = "|".join("---" if place in words else "---:" for place in range(len(names)))
    return [f"| {' | '.join(names)} |", f"|{rules}|", *(f"| {' | '.join(cells)} |" for cells in rows)]


def table(rows: list[Row]) -> str:
    """The rows as a markdown table, without columns that were not measured."""
    measured = (
        ("forward, ms", ".1f", lambda r: r.forward_ms),
        ("× ResNet-18", ".2f", lambda r: r.forward_ratio),
        ("÷ multiply-adds", ".2f", lambda r: r.forward_ratio and r.forward_ratio / r.macs_ratio),
        ("training step, ms", ".1f", lambda r: r.train_ms),
        ("× ResNet-18", ".2f", lambda r: r.train_ratio),
        ("÷ multiply-adds", ".2f", lambda r: r.train_ratio and r.train_ratio / r.macs_ratio),
        ("peak memory, MiB", ".0f", lambda r: r.peak_mib),
        ("above start-up, MiB", ".0f", lambda r: r.peak_over_start_mib),
        ("× ResNet-18", ".2f", lambda r: r.peak_ratio),
    )
    kept = [column for column in measured if column[2](rows[0]) is not None]
    names = ["model", "parameters", "input", "batch", "M multiply-adds", *(column[0] for column in kept)]
    lines = []
    for row in rows:
        size = "×".join(map(str, row.input_size))
        cells = [f"`{row.model}`", f"{row.params:,}", size, str(row.batch), f"{row.mega_macs:.0f}"]
        cells += [format(value(row), digits) for _, digits, value in kept]
        lines.append(cells)
    return "\n".join(markdown(names, lines))


def measure(spec: str, args: Namespace, form: Form) -> Row:
    torch._dynamo.reset()  # graphs of the previous models
    batch = batch_of(spec, args.batch)
    model, size = build(spec)
    macs = multiply_adds(spec)
    parameters = sum(p.numel() for p in model.parameters())
    row = Row(spec, parameters, size, batch, macs, macs / multiply_adds(YARDSTICK))
    del model

    def paired(make: Callable[[str, int, Form], Callable[[], object]]) -> tuple[float, float]:
        """Median milliseconds of the model, and the median of its ratios to the yardstick."""
        runs = (make(YARDSTICK, batch, form), make(spec, batch, form))
        reference, own = in_turns(runs, args.iters, args.warmup, form.device)
        ratios = [mine / other for mine, other in zip(own, reference, strict=True)]
        return statistics.median(own) * 1000, statistics.median(ratios)

    if not args.no_forward:
        row.forward_ms, row.forward_ratio = paired(forward_of)
    if args.train:
        row.train_ms, row.train_ratio = paired(train_step_of)
    if args.memory:
        where = (batch, args.threads, args.device, args.keep_memory)
        row.peak_mib, row.peak_over_start_mib = memory_in_subprocess(spec, *where)
        _, reference = memory_in_subprocess(YARDSTICK, *where)
        row.peak_ratio = row.peak_over_start_mib / max(reference, 1.0)
    return row


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", default=[], help="names, patterns or name:argument=value (default: all)"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--iters", type=int, default=10, help="paired measurements per model")
    parser.add_argument("--warmup", type=int, default=2, help="runs before the first measurement")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--channels-last", action="store_true", help="images and weights channels-last")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument(
        "--keep-memory", action="store_true", help="freed memory is kept, as training does on a CPU"
    )
    parser.add_argument("--train", action="store_true", help="time a training step too")
    parser.add_argument("--no-forward", action="store_true", help="leave the forward pass out")
    parser.add_argument(
        "--memory", action="store_true", help="peak memory of training, each in a fresh process"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write this JSON file")
    parser.add_argument("--memory-of", metavar="MODEL", help=SUPPRESS)
    args = parser.parse_args()

    if args.keep_memory and not capszoo.keep_freed_memory():
        parser.error("--keep-memory works with glibc alone (and not with CAPSZOO_KEEP_MEMORY=0)")
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # outputs of untrained deep EncapNets are denormal in eval mode
    torch.manual_seed(0)
    device = torch.device(args.device)
    if args.memory_of:
        print(json.dumps(measure_memory(args.memory_of, args.batch, device)))
        return

    from capszoo.recipes.weights import hardware  # needs pydantic, which the measurements do without

    settings = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": hardware(torch.device("cpu")),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": args.threads,
        "batch": args.batch,
        "iters": args.iters,
        "layout": "channels-last" if args.channels_last else "contiguous",
        "compiled": args.compile,
        "memory kept": args.keep_memory,
    }
    rows: list[Row] = []
    specs = chosen(args.models)
    for number, spec in enumerate(specs, 1):
        print(f"[{number}/{len(specs)}] {spec}", file=sys.stderr, flush=True)
        rows.append(measure(spec, args, Form(device, args.channels_last, args.compile)))
        if args.out:  # after each model, so that an interrupted run keeps its measurements
            content = {"settings": settings, "rows": [asdict(row) for row in rows]}
            write_atomically(args.out, json.dumps(content, indent=2) + "\n")
    print(table(rows))
    print(
        "\n" + ", ".join(f"{key} {value}" for key, value in settings.items()) + "; medians of paired ratios"
    )
    if args.out:
        print(f"written: {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
