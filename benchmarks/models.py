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
``--plain-capconv`` measures EncapNets without their capsules: nothing is squashed, the branches of a layer are added
unweighted, and only convolutions (all of them), BatchNorm and ReLU remain.
``--less STAGE`` adds a model's extra time over its default's first stages, up to that one, all three in turns.
"""

from __future__ import annotations

import argparse
import ast
import csv
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
from collections.abc import Callable
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
from capszoo.layers.capconv import CapConv, CoefficientConv2d, MasterAide, SquashGroups
from capszoo.layers.engine import Reference

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
    forward_less: float | None = None
    train_less: float | None = None
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


def leave_capsules_out() -> None:
    """Make capConv layers squash nothing and add their branches unweighted (their coefficients are still computed)."""

    def same(self: SquashGroups, x: Tensor) -> Tensor:
        return x

    def added(self: MasterAide, x: Tensor) -> Tensor:
        master, aide = self.branches(x)
        self.route(master, aide)
        return master + aide

    SquashGroups.forward = same  # type: ignore[method-assign]
    MasterAide.forward = added  # type: ignore[method-assign]
    CapConv.engines = (Reference,)  # type: ignore[assignment]


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


def timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def compare(
    model: Callable[[], object],
    yardstick: Callable[[], object],
    iters: int,
    warmup: int,
    device: torch.device,
    part: Callable[[], object] | None = None,
) -> tuple[float, float, float | None]:
    """Median milliseconds of ``model`` and median ratio to ``yardstick``, measured in turns.

    With a part of the model, measured in the same turns, also the median ratio of the model without that part.
    """
    for _ in range(warmup):
        yardstick()
        model()
        if part is not None:
            part()
    seconds, ratios, rest = [], [], []
    for _ in range(iters):
        reference = timed(yardstick, device)
        own = timed(model, device)
        seconds.append(own)
        ratios.append(own / reference)
        if part is not None:
            rest.append((own - timed(part, device)) / reference)
    left = statistics.median(rest) if rest else None
    return statistics.median(seconds) * 1000, statistics.median(ratios), left


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
    plain: bool = False,
    checkout: Path = ROOT,
) -> tuple[float, float]:
    """:func:`measure_memory` in a fresh process, of this checkout or of another one with its own benchmark."""
    command = [sys.executable, "benchmarks/models.py", "--memory-of", spec, "--batch", str(batch)]
    command += ["--threads", str(threads), "--device", device, *(["--keep-memory"] if keep else [])]
    command += ["--plain-capconv"] if plain else []
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


def table(rows: list[Row]) -> str:
    """The rows as a markdown table, without columns that were not measured."""

    def per_work(ratio: float | None, row: Row) -> str | None:
        return None if ratio is None else f"{ratio / row.macs_ratio:.2f}"

    columns: list[tuple[str, Callable[[Row], str | None]]] = [
        ("model", lambda r: f"`{r.model}`"),
        ("parameters", lambda r: f"{r.params:,}"),
        ("input", lambda r: "×".join(map(str, r.input_size))),
        ("batch", lambda r: str(r.batch)),
        ("M multiply-adds", lambda r: f"{r.mega_macs:.0f}"),
        ("forward, ms", lambda r: None if r.forward_ms is None else f"{r.forward_ms:.1f}"),
        ("× ResNet-18", lambda r: None if r.forward_ratio is None else f"{r.forward_ratio:.2f}"),
        ("÷ multiply-adds", lambda r: per_work(r.forward_ratio, r)),
        ("× less the part", lambda r: None if r.forward_less is None else f"{r.forward_less:.2f}"),
        ("training step, ms", lambda r: None if r.train_ms is None else f"{r.train_ms:.1f}"),
        ("× ResNet-18", lambda r: None if r.train_ratio is None else f"{r.train_ratio:.2f}"),
        ("÷ multiply-adds", lambda r: per_work(r.train_ratio, r)),
        ("× less the part", lambda r: None if r.train_less is None else f"{r.train_less:.2f}"),
        ("peak memory, MiB", lambda r: None if r.peak_mib is None else f"{r.peak_mib:.0f}"),
        (
            "above start-up, MiB",
            lambda r: None if r.peak_over_start_mib is None else f"{r.peak_over_start_mib:.0f}",
        ),
        ("× ResNet-18", lambda r: None if r.peak_ratio is None else f"{r.peak_ratio:.2f}"),
    ]
    cells = [[show(row) for row in rows] for _, show in columns]
    kept = [i for i, column in enumerate(cells) if any(value is not None for value in column)]
    lines = ["| " + " | ".join(columns[i][0] for i in kept) + " |"]
    lines.append("|" + "|".join("---" if i == 0 else "---:" for i in kept) + "|")
    lines += ["| " + " | ".join(cells[i][r] or "" for i in kept) + " |" for r in range(len(rows))]
    return "\n".join(lines)


def measure(spec: str, args: argparse.Namespace, form: Form) -> Row:
    device = form.device
    torch._dynamo.reset()  # graphs of the previous models
    batch = batch_of(spec, args.batch)
    model, size = build(spec)
    macs = multiply_adds(spec)
    parameters = sum(p.numel() for p in model.parameters())
    row = Row(spec, parameters, size, batch, macs, macs / multiply_adds(YARDSTICK))
    del model
    part = f"{spec.partition(':')[0]}@{args.less}" if args.less else None
    if not args.no_forward:
        row.forward_ms, row.forward_ratio, row.forward_less = compare(
            forward_of(spec, batch, form),
            forward_of(YARDSTICK, batch, form),
            args.iters,
            args.warmup,
            device,
            forward_of(part, batch, form) if part else None,
        )
    if args.train:
        row.train_ms, row.train_ratio, row.train_less = compare(
            train_step_of(spec, batch, form),
            train_step_of(YARDSTICK, batch, form),
            args.iters,
            args.warmup,
            device,
            train_step_of(part, batch, form) if part else None,
        )
    if args.memory:
        where = (batch, args.threads, args.device, args.keep_memory)
        row.peak_mib, row.peak_over_start_mib = memory_in_subprocess(spec, *where, plain=args.plain_capconv)
        _, reference = memory_in_subprocess(YARDSTICK, *where)
        row.peak_ratio = row.peak_over_start_mib / max(reference, 1.0)
    return row


def write(rows: list[Row], path: Path, settings: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])))
            writer.writeheader()
            for row in rows:
                writer.writerow(asdict(row) | {"input_size": "x".join(map(str, row.input_size))})
    else:
        content = {"settings": settings, "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--plain-capconv", action="store_true", help="EncapNets without their capsules")
    parser.add_argument("--train", action="store_true", help="time a training step too")
    parser.add_argument(
        "--less", metavar="STAGE", help="also what a model takes beyond its stages up to this one, in turns"
    )
    parser.add_argument("--no-forward", action="store_true", help="leave the forward pass out")
    parser.add_argument(
        "--memory", action="store_true", help="peak memory of training, each in a fresh process"
    )
    parser.add_argument(
        "--out", type=Path, action="append", default=[], help="also write FILE.json or FILE.csv"
    )
    parser.add_argument("--memory-of", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for path in args.out:
        if path.suffix not in (".json", ".csv"):
            parser.error(f"--out {path}: only .json and .csv files are written")

    if args.keep_memory and not capszoo.keep_freed_memory():
        parser.error("--keep-memory works with glibc alone (and not with CAPSZOO_KEEP_MEMORY=0)")
    if args.plain_capconv:
        leave_capsules_out()
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
        "plain capConv": args.plain_capconv,
    }
    rows: list[Row] = []
    specs = chosen(args.models)
    for number, spec in enumerate(specs, 1):
        print(f"[{number}/{len(specs)}] {spec}", file=sys.stderr, flush=True)
        rows.append(measure(spec, args, Form(device, args.channels_last, args.compile)))
        for path in args.out:  # after each model, so that an interrupted run keeps its measurements
            write(rows, path, settings)
    print(table(rows))
    print(
        "\n" + ", ".join(f"{key} {value}" for key, value in settings.items()) + "; medians of paired ratios"
    )
    for path in args.out:
        print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
