"""Cost of a capsule head, and heads on six backbones: developers run it when they add a routing.

    python benchmarks/heads.py --cost                # time and training memory of every routing on ResNet-50
    python benchmarks/heads.py --backbones           # six backbones: layout, shape, parameters, largest ONNX difference

Cost: images of 224 pixels, ResNet-50's features 2048x7x7, batch 8, 37 classes. A head's share of the forward time is
its time over that of the backbone just before it, on the same images; the median over the turns. Training memory is
the high-water mark above start-up of a new process that runs two SGD steps with momentum, with the head against the
backbone alone. Nothing is downloaded: all weights are random.

Results are written to benchmarks/results/heads.json, from which scripts/generate.py creates the tables of
docs/fine-tune.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import timm
import torch
import torch.nn.functional as F
from torch import nn

import capszoo
from benchmarks.models import _peak_mib, in_turns, markdown
from capszoo._utils.files import write_atomically
from capszoo.models._heads import HEADS
from capszoo.recipes.weights import hardware

RESULTS = ROOT / "benchmarks" / "results" / "heads.json"
BACKBONE, CLASSES, BATCH = "resnet50", 37, 8
#: Target maximum shares of the backbone's forward time and training memory for a head.
TIME_AIM, MEMORY_AIM = 0.25, 0.30
#: Backbone -> the routing of its exported head.
BACKBONES = {
    "resnet18": "idpa",
    "convnext_atto": "dynamic",
    "efficientnet_b0": "em",
    "mobilenetv3_small_050": "self_routing",
    "swin_tiny_patch4_window7_224": "self_attention",
    "vit_tiny_patch16_224": "routing_pool",
}


def time_heads(routings: list[str], iters: int) -> dict[str, dict[str, float]]:
    """Routing -> milliseconds of its head, and the median share of the backbone's time, measured in turns."""
    backbone: Any = timm.create_model(BACKBONE, num_classes=0, global_pool="").eval()
    heads: list[Any] = [capszoo.attach_head(BACKBONE, routing, CLASSES).head.eval() for routing in routings]
    images = torch.rand(BATCH, 3, 224, 224)
    with torch.inference_mode():
        whole = partial(backbone.forward_features, images)
        features = whole()
        seconds = in_turns([run for head in heads for run in (whole, partial(head, features))], iters)
    found = {}
    for routing, of_backbone, own in zip(routings, seconds[::2], seconds[1::2], strict=True):
        share = statistics.median(mine / other for mine, other in zip(own, of_backbone, strict=True))
        found[routing] = {"ms": statistics.median(own) * 1000, "time_share": share}
    return found


def peak_of(routing: str) -> float:
    """In this process: MiB above start-up of two training steps; ``none`` is the backbone alone."""
    start = _peak_mib()
    net: nn.Module
    if routing == "none":
        net = timm.create_model(BACKBONE, num_classes=0, global_pool="")
    else:
        net = capszoo.attach_head(BACKBONE, routing, CLASSES)
    net.train()
    images, labels = torch.rand(BATCH, 3, 224, 224), torch.arange(BATCH)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        out = net(images)
        (out.mean() if routing == "none" else F.cross_entropy(out, labels)).backward()
        optimizer.step()
    return _peak_mib() - start


def memory_in_subprocess(routing: str, threads: int, repeats: int) -> float:
    """Median over ``repeats`` processes: peaks of identical processes differ by a few percent."""
    command = [sys.executable, __file__, "--memory-of", routing, "--threads", str(threads)]
    peaks = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"error: {routing}: {done.stderr.strip().splitlines()[-1:]}")
        peaks.append(float(done.stdout.split()[-1]))
    return statistics.median(peaks)


def measure_cost(routings: list[str], iters: int, threads: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each routing."""
    rows, times = [], time_heads(routings, iters)
    alone = memory_in_subprocess("none", threads, repeats)
    for routing in routings:
        with torch.device("meta"):
            head: Any = capszoo.attach_head(BACKBONE, routing, CLASSES).head
        peak = memory_in_subprocess(routing, threads, repeats)
        print(f"{routing}: {peak:.0f} MiB, backbone {alone:.0f}", file=sys.stderr, flush=True)
        memory = {"mib": peak - alone, "memory_share": peak / alone - 1, "backbone_mib": alone}
        parameters = sum(p.numel() for p in head.parameters())
        rows.append({"routing": routing, "parameters": parameters, **times[routing], **memory})
    return rows


def measure_backbone(backbone: str, routing: str) -> dict[str, Any]:
    """A backbone's features and a head's results for them, in PyTorch and as an ONNX file."""
    from benchmarks.export import DAMPING, warm
    from capszoo.export.to_onnx import export

    torch.manual_seed(0)
    net = capszoo.attach_head(backbone, routing, CLASSES)
    features: Any = net.stages.backbone
    warm(net, torch.randn(4, net.in_chans, *net.img_size), DAMPING)
    with tempfile.TemporaryDirectory() as folder:
        report = export(net.eval(), Path(folder) / "model.onnx", gate="quick", batch=(1, 2, 3))
    return {
        "backbone": backbone,
        "routing": routing,
        "input": [net.in_chans, *net.img_size],
        "layout": features.layout,
        "features": [features.chans, *features.grid],
        "grid": list(net.head.grid),
        "parameters": sum(p.numel() for p in net.parameters()),
        "head_parameters": sum(p.numel() for p in net.head.parameters()),
        "max_rel_diff": report.max_rel_diff,
        "nodes": report.num_nodes,
        "file_bytes": report.file_bytes,
        "passed": report.passed,
    }


def stored(file: Path = RESULTS) -> dict[str, Any]:
    """The stored results; empty without measurements."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def keep(file: Path, part: str, rows: list[dict[str, Any]], key: str, order: Iterable[str]) -> None:
    """Put new rows in place of the stored ones of the same names; the others named in ``order`` stay."""
    results = stored(file)
    about = {"hardware": hardware(torch.device("cpu")), "torch": torch.__version__, "timm": timm.__version__}
    known = {row[key]: row for row in results.get(part, {}).get("rows", [])}
    known |= {row[key]: row | about for row in rows}
    content = {**results, part: {"rows": [known[name] for name in order if name in known]}}
    write_atomically(file, json.dumps(content, indent=1) + "\n")


def _percent(share: float, aim: float) -> str:
    return f"{100 * share:.1f}" + (" (over the aim)" if share > aim else "")


def _told(rows: list[dict[str, Any]], *keys: str) -> str:
    """What the rows were measured with: once if it is the same for all, else with the rows' names."""
    found: dict[str, list[str]] = {}
    for row in rows:
        about = ", ".join(row[key] if key == "hardware" else f"{key} {row[key]}" for key in keys)
        found.setdefault(about, []).append(f"`{row.get('backbone') or row['routing']}`")
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{about} ({', '.join(names)})" for about, names in found.items())


def cost_table(results: dict[str, Any]) -> str:
    """Each routing's share of the backbone's forward time and training memory, and the targets."""
    lines = []
    for row in results["cost"]["rows"]:
        time, memory = _percent(row["time_share"], TIME_AIM), _percent(row["memory_share"], MEMORY_AIM)
        lines.append([f"`{row['routing']}`", f"{row['parameters']:,}", time, memory, f"{row['mib']:.0f}"])
    aims = f"Aims: at most {100 * TIME_AIM:.0f}% and {100 * MEMORY_AIM:.0f}%."
    told = _told(results["cost"]["rows"], "hardware", "torch")
    head = "head | parameters | forward, % of the backbone's | training memory, % of the backbone's | MiB"
    return "\n".join([*markdown(head, lines), "", f"{aims} Measured with {told}."])


def backbones_table(results: dict[str, Any]) -> str:
    """Six backbones: features, parameters, the exported file."""
    rows = results["backbones"]["rows"]
    lines = [
        "| backbone | head | input | layout | features | head's grid | parameters | head parameters | ONNX nodes "
        "| largest difference |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        size, features, grid = ("×".join(map(str, row[key])) for key in ("input", "features", "grid"))
        lines.append(
            f"| `{row['backbone']}` | `{row['routing']}` | {size} | {row['layout']} | {features} | {grid} "
            f"| {row['parameters']:,} | {row['head_parameters']:,} | {row['nodes']} | {row['max_rel_diff']:.0e} |"
        )
    return "\n".join([*lines, "", f"Measured with {_told(rows, 'timm', 'torch')}."])


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true", help="time and memory of every routing on ResNet-50")
    parser.add_argument(
        "--routings", nargs="+", choices=list(HEADS), default=list(HEADS), help="with --cost (default: all)"
    )
    parser.add_argument("--backbones", action="store_true", help="six backbones and their ONNX files")
    parser.add_argument("--iters", type=int, default=7, help="turns of a time measurement")
    parser.add_argument("--repeats", type=int, default=3, help="processes of a memory measurement")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--memory-of", metavar="ROUTING", help=SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.memory_of:
        print(peak_of(args.memory_of))
        return 0
    if not (args.cost or args.backbones):
        parser.error("say what to measure: --cost, --backbones or both")
    if args.cost:
        rows = measure_cost(args.routings, args.iters, args.threads, args.repeats)
        keep(args.json, "cost", rows, "routing", HEADS)
        print(cost_table(stored(args.json)))
    if args.backbones:
        rows = [measure_backbone(*pair) for pair in BACKBONES.items()]
        keep(args.json, "backbones", rows, "backbone", BACKBONES)
        print(backbones_table(stored(args.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
