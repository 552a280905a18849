"""Exported models in ONNX Runtime on the CPU: maintainers run it when exports change (docs/benchmarks.md).

    python benchmarks/export.py --models 'idpa_*' capsnet_dynamic
    python benchmarks/export.py --compile --out benchmarks/results/export.json    # the table: make docs
    python benchmarks/export.py --layers            # routing layers against naive einsum graphs of the same function
    python benchmarks/export.py --profile idpa_resnet                             # where ONNX Runtime spends its time

All runtimes are measured in turns in one run, and the medians of the paired ratios are printed; inputs and outputs are
numpy arrays. Exported files are cached in ``bench/onnx``: remove them after a change. Models
are untrained (BatchNorm has seen noise), named as in ``benchmarks/models.py``, at their own size; the yardstick is that
script's CIFAR ResNet-18.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import platform
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import torch
from torch import nn

from benchmarks import models
from capszoo import layers
from capszoo._utils.files import write_atomically
from capszoo.errors import CapszooError
from capszoo.export import compare, to_onnx, unroll
from capszoo.export.benchmark import FixedInput
from capszoo.export.prepare import quiet
from capszoo.layers.engine_choice import use_engines
from capszoo.recipes.weights import hardware
from tests.support import warm

BATCHES = (1, 16)

#: Target speed-up of a layer over its einsum graph at batch 1.
LAYER_TARGETS = {"IDPA conv": 14.0, "dynamic": 3.5}

#: With the variances of the noise, an untrained EncapNet of a hundred layers is chaotic: its scores in float32 and
#: float64 are unrelated. With variances five times as large its scores are zero. This value lies between.
DAMPING = 2.5

FOLDER = ROOT / "bench" / "onnx"


@dataclass
class Row:
    """One exported model. Ratios are other runtimes' times over ONNX Runtime's: above 1 ONNX Runtime is faster.

    Attributes:
        max_rel_diff: largest difference from eager, as a share of the largest output (quick gate).
        times: batch → ``ms``, ``eager``, ``compiled`` (where measured) and ``resnet18``.
        processor: where the times were measured.
    """

    model: str
    nodes: int
    file_bytes: int
    max_rel_diff: float
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    processor: str = ""


def exported(spec: str) -> tuple[Path, dict[str, Any]]:
    """The ONNX file of a model, exported and verified if it does not exist, and its report."""
    file = FOLDER / f"{spec.replace(':', '.').replace(',', '.')}.onnx"
    described = file.with_suffix(".json")
    if not described.is_file():
        torch.manual_seed(0)
        model, size = models.build(spec)
        warm(model, torch.randn(4, *size), DAMPING)
        largest = min(16, models.batch_of(spec, 16))
        report = to_onnx.export(
            model.eval(),
            file,
            name=spec,
            input_size=(size[0], size[1], size[2]),
            gate="quick",
            batch=(1, min(8, largest), largest),
        )
        described.write_text(json.dumps(report.to_dict()))
    return file, json.loads(described.read_text())


def row_of(spec: str) -> Row:
    _, report = exported(spec)
    return Row(spec, report["num_nodes"], report["file_bytes"], report["max_rel_diff"])


def time_model(spec: str, batch: int, iters: int, compiled: bool) -> dict[str, float]:
    """Milliseconds in ONNX Runtime at a batch size, and the ratios of the other runtimes to it."""
    model, size = models.build(spec)
    model.eval()
    _, yard_size = models.build(models.YARDSTICK)
    images, yard = (compare.probe_input("random", (batch, *shape)) for shape in (size, yard_size))
    runners = [
        FixedInput(compare.OnnxRunner(str(exported(spec)[0])), images, "ms"),
        FixedInput(compare.EagerRunner(model), images, "eager"),
        FixedInput(compare.OnnxRunner(str(exported(models.YARDSTICK)[0])), yard, "resnet18"),
    ]
    if compiled:
        runners.append(FixedInput(compare.EagerRunner(compiled_of(model)), images, "compiled"))
    found = compare.time_runners(runners, runners[0].images, iters)
    return {"ms": found[0].milliseconds} | {t.runner: t.ratio for t in found[1:]}


def compiled_of(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    wrapped: Any = torch.compile(model)
    return wrapped


# -- layers against einsum graphs ---------------------------------------------------------------------------------


class EinsumDynamic(nn.Module):
    """:class:`layers.DynamicRouting` in einsums over its weights, a common form of export."""

    def __init__(self, layer: layers.DynamicRouting) -> None:
        super().__init__()
        shape = (layer.in_caps, layer.in_dim, layer.out_caps, layer.out_dim)
        self.weight = nn.Parameter(layer.weight.detach().reshape(shape).clone())
        self.num_iters = layer.num_iters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        votes = torch.einsum("bid,idje->bije", x, self.weight)
        logits = torch.zeros_like(votes[..., 0])
        for t in range(self.num_iters):
            couplings = logits.softmax(dim=2)
            s = torch.einsum("bij,bije->bje", couplings, votes)
            square = (s * s).sum(dim=-1, keepdim=True)
            poses = s * (square + 1e-7).sqrt() / (1 + square)
            if t < self.num_iters - 1:
                logits = logits + torch.einsum("bije,bje->bij", votes, poses)
        return poses


class EinsumConvIDPA(nn.Module):
    """:class:`layers.ConvIDPA` with matrix poses in einsums: votes of all positions at once, in nine dimensions."""

    def __init__(self, layer: layers.ConvIDPA) -> None:
        super().__init__()
        self.side = math.isqrt(layer.in_dim)
        weight = layer.weight.detach()  # [j, r, i, q, k, l]
        self.weight = nn.Parameter(weight.clone())
        self.layer_norm = layer.norm
        self.kernel_size, self.stride = layer.kernel_size, layer.stride
        self.scale, self.num_iters = float(layer.scale), layer.num_iters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, p = x.shape[0], self.side
        k, step = self.kernel_size, self.stride
        x = x.reshape(b, -1, p, p, x.shape[2], x.shape[3])  # [b, i, p, q, h, w]
        rows = (x.shape[4] - k) // step + 1
        cols = (x.shape[5] - k) // step + 1
        places = [
            x[..., u : u + step * (rows - 1) + 1 : step, v : v + step * (cols - 1) + 1 : step]
            for u in range(k)
            for v in range(k)
        ]
        windows = torch.stack(places, dim=4).unflatten(4, (k, k))  # [b, i, p, q, k, l, h, w]
        votes = torch.einsum("bipqklhw,jriqkl->bhwklijpr", windows, self.weight)
        parents = torch.zeros_like(votes[:, :, :, 0, 0, 0])  # [b, h, w, j, p, r]
        for _ in range(self.num_iters):
            agreement = torch.einsum("bhwklijpr,bhwjpr->bhwklij", votes, parents) * self.scale
            couplings = agreement.softmax(dim=-1)
            total = torch.einsum("bhwklij,bhwklijpr->bhwjpr", couplings, votes)
            parents = self.layer_norm(total.flatten(4))
            parents = parents.unflatten(4, (p, p))
        return parents.flatten(3).permute(0, 3, 1, 2)  # [b, j*e, h, w]


def layer_cases() -> dict[str, tuple[nn.Module, nn.Module, tuple[int, ...]]]:
    """Name → layer, the same function as a naive einsum graph on its weights, input without the batch."""
    dynamic = layers.DynamicRouting(1152, 8, 10, 16)
    idpa = layers.ConvIDPA(32, 32, 16, 16, kernel_size=3, stride=2, num_iters=2)
    return {
        "dynamic": (dynamic, EinsumDynamic(dynamic), (1152, 8)),
        "IDPA conv": (idpa, EinsumConvIDPA(idpa), (32 * 16, 16, 16)),
    }


def layer_graph(module: nn.Module, size: tuple[int, ...]) -> bytes:
    """A layer as ONNX at batch 1, prepared for export if it defines that."""
    prepared = unroll.prepare_for_export(module)
    with tempfile.TemporaryDirectory() as folder, quiet(), use_engines(target="onnx_cpu"):
        file = Path(folder) / "layer.onnx"
        # the older exporter for the naive graphs: it writes Einsum for torch.einsum
        dynamo = not isinstance(module, (EinsumDynamic, EinsumConvIDPA))
        torch.onnx.export(
            prepared, (torch.randn(1, *size),), str(file), dynamo=dynamo, external_data=False, verbose=False
        )
        return file.read_bytes()


def time_layers(iters: int) -> list[str]:
    import onnx

    lines = ["| layer | ms | einsum graph, ms | times faster | target |", "|---|---:|---:|---:|---:|"]
    for name, (layer, naive, size) in layer_cases().items():
        graphs = [layer_graph(module, size) for module in (layer, naive)]
        if not any(node.op_type == "Einsum" for node in onnx.load_from_string(graphs[1]).graph.node):
            raise CapszooError(f"the naive graph of {name} holds no Einsum")
        ours, theirs = (compare.OnnxRunner(graph) for graph in graphs)
        x = compare.probe_input("random", (1, *size))
        difference = compare.compare_runners(theirs, ours, x)
        if not difference.passed(1e-3):
            raise CapszooError(f"{name} and its naive graph differ by {difference.relative:.1e}")
        first, second = compare.time_runners([ours, theirs], x, iters)
        lines.append(
            f"| {name} | {first.milliseconds:.2f} | {second.milliseconds:.2f} | {second.ratio:.1f} "
            f"| {LAYER_TARGETS[name]:g} |"
        )
    return lines


# -- where the time goes ------------------------------------------------------------------------------------------


def profile(spec: str, batch: int, iters: int = 20) -> list[str]:
    """Share of ONNX Runtime's time by operator."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_profiling = torch.get_num_threads(), True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "ort")
        session = onnxruntime.InferenceSession(
            str(exported(spec)[0]), options, providers=["CPUExecutionProvider"]
        )
        size = models.build(spec)[1]
        x = compare.probe_input("random", (batch, *size))
        for _ in range(iters):
            session.run(None, {session.get_inputs()[0].name: x})
        events = json.loads(Path(session.end_profiling()).read_text())
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            spent[event["args"]["op_name"]] += event["dur"]
            count[event["args"]["op_name"]] += 1
    total = sum(spent.values())
    lines = ["| operator | nodes | µs a call | share |", "|---|---:|---:|---:|"]
    for op, micro in spent.most_common(15):
        lines.append(f"| {op} | {count[op] // iters} | {micro / iters:.0f} | {micro / total:.0%} |")
    return lines


# -- output -------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Rows as markdown, with dashes for missing measurements."""
    head = ["model", "nodes", "MB", "max difference"]
    for batch in BATCHES:
        head += [f"b={batch}: ms", "eager", "compiled", "÷ ResNet-18"]
    lines = []
    for row in rows:
        cells = [f"`{row.model}`", str(row.nodes), f"{row.file_bytes / 1e6:.1f}", f"{row.max_rel_diff:.0e}"]
        for batch in BATCHES:
            at = row.times.get(str(batch), {})
            for key, digits in (("ms", ".1f"), ("eager", ".2f"), ("compiled", ".2f")):
                cells.append(format(at[key], digits) if key in at else "–")
            cells.append(f"{1 / at['resnet18']:.2f}" if at else "–")
        lines.append(cells)
    return "\n".join(models.markdown(head, lines))


def read(path: Path, settings: dict[str, Any]) -> dict[str, Row]:
    """Rows of an earlier run, by model; a file with other settings is refused.

    Raises:
        SystemExit: the file has results of other versions or threads.
    """
    if not path.is_file():
        return {}
    stored = json.loads(path.read_text())
    if stored["settings"] != settings:
        raise SystemExit(f"error: {path} holds figures of other settings {stored['settings']}: name another")
    return {row["model"]: Row(**row) for row in stored["rows"]}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[], help="names or patterns (default: all)")
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--iters", type=int, default=15, help="measurements in turns")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true", help="torch.compile too (takes minutes)")
    parser.add_argument("--layers", action="store_true", help="routing layers against einsum graphs")
    parser.add_argument("--profile", metavar="MODEL", help="share of each operator, at the first batch")
    parser.add_argument("--out", type=Path, help="JSON to add the rows to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # outputs of untrained deep EncapNets are denormal in eval mode
    torch.manual_seed(0)
    if args.layers:
        print("\n".join(time_layers(args.iters)))
        return
    if args.profile:
        print("\n".join(profile(args.profile, args.batches[0])))
        return
    import onnxruntime

    settings = {
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "python": platform.python_version(),
        "threads": args.threads,
    }
    processor = hardware(torch.device("cpu"))
    rows = read(args.out, settings) if args.out else {}
    names = [spec for spec in models.chosen(args.models) if args.models or spec not in models.VARIANTS]
    for number, spec in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {spec}", file=sys.stderr, flush=True)
        known, row = rows.get(spec), row_of(spec)
        row.processor = processor
        if known and known.processor == processor:  # times of another one are dropped
            row.times = known.times
        rows[spec] = row
        heavy = any(fnmatch.fnmatch(spec, pattern) for pattern in models.SMALL_BATCH)
        for batch in [batch for batch in args.batches if batch == 1 or not heavy]:
            row.times[str(batch)] = time_model(spec, batch, args.iters, args.compile)
            if args.out:  # after each, so that an interrupted run keeps its measurements
                content = {"settings": settings, "rows": [asdict(rows[name]) for name in sorted(rows)]}
                write_atomically(args.out, json.dumps(content, indent=1) + "\n")
    shown = [rows[name] for name in names]
    print(table(shown))
    print("\n" + ", ".join(f"{key} {value}" for key, value in settings.items()))
    print("eager, compiled: their time over ONNX Runtime's; medians of ratios measured in turns")


if __name__ == "__main__":
    main()
