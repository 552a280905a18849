"""Cost of a capsule head, and heads on six backbones: developers run it when they add a routing.

    python benchmarks/heads.py --cost                # time and training memory of every routing on ResNet-50
    python benchmarks/heads.py --cost --no-time      # memory alone, which a busy machine does not disturb
    python benchmarks/heads.py --backbones           # six backbones: layout, shape, parameters, largest ONNX difference

Cost: images of 224 pixels, ResNet-50's features 2048x7x7, batch 8, 37 classes. A head's share of the forward time is
its time over that of the backbone just before it, on the same images; the median over the turns. Training memory is
the high-water mark above start-up of a new process that runs two SGD steps with momentum, with the head against the
backbone alone. Nothing is downloaded: all weights are random.

Results are written to benchmarks/results/heads.json, from which scripts/generate.py creates the tables of
docs/fine-tune.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import timm
import torch
import torch.nn.functional as F
from torch import nn

import capszoo
from benchmarks.models import _peak_mib, timed
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
    backbone = timm.create_model(BACKBONE, num_classes=0, global_pool="").eval()
    heads: dict[str, Any] = {
        routing: capszoo.attach_head(BACKBONE, routing, CLASSES).head.eval() for routing in routings
    }
    images = torch.rand(BATCH, 3, 224, 224)
    cpu = torch.device("cpu")
    seconds: dict[str, list[float]] = {routing: [] for routing in heads}
    shares: dict[str, list[float]] = {routing: [] for routing in heads}
    with torch.inference_mode():
        features = backbone.forward_features(images)  # type: ignore[operator]
        for head in heads.values():
            head(features)
        for _ in range(iters):
            for routing, head in heads.items():
                whole = timed(lambda: backbone.forward_features(images), cpu)  # type: ignore[operator]
                own = timed(lambda head=head: head(features), cpu)  # type: ignore[misc]
                seconds[routing].append(own)
                shares[routing].append(own / whole)
    return {
        routing: {
            "ms": statistics.median(seconds[routing]) * 1000,
            "time_share": statistics.median(shares[routing]),
        }
        for routing in heads
    }


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
    return statistics.median(_peak_in_subprocess(routing, threads) for _ in range(repeats))


def _peak_in_subprocess(routing: str, threads: int) -> float:
    command = [sys.executable, __file__, "--memory-of", routing, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {routing}: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout.split()[-1])


def measure_cost(
    routings: list[str], time: bool, memory: bool, iters: int, threads: int, repeats: int
) -> list[dict[str, Any]]:
    """A row for each routing, without the values that are not measured."""
    rows: list[dict[str, Any]] = []
    for routing in routings:
        with torch.device("meta"):
            net = capszoo.attach_head(BACKBONE, routing, CLASSES)
        rows.append({"routing": routing, "parameters": sum(p.numel() for p in net.head.parameters())})
    if time:
        found = time_heads(routings, iters)
        for row in rows:
            row |= found[row["routing"]]
    if memory:
        alone = memory_in_subprocess("none", threads, repeats)
        for row in rows:
            peak = memory_in_subprocess(row["routing"], threads, repeats)
            row |= {"mib": peak - alone, "memory_share": peak / alone - 1, "backbone_mib": alone}
            print(f"{row['routing']}: {peak:.0f} MiB, backbone {alone:.0f}", file=sys.stderr, flush=True)
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


def keep(file: Path, part: str, rows: list[dict[str, Any]], key: str, order: Iterable[str] = ()) -> None:
    """Merge new rows into the stored ones: in existing rows, only the newly measured values change.

    Rows named in ``order`` stay although they were not measured; the others are deleted. A row that is measured on
    another machine or with other versions than before loses its earlier values.
    """
    results = stored(file)
    old = {row[key]: row for row in results.get(part, {}).get("rows", [])}
    about = {"hardware": hardware(torch.device("cpu")), "torch": torch.__version__, "timm": timm.__version__}
    new = {}
    for row in rows:
        before = old.get(row[key], {})
        same = about.items() <= before.items()
        new[row[key]] = {**(before if same else {}), **row, **about}
    names = [name for name in order if name in old or name in new] or list(new)
    kept = [new.get(name) or old[name] for name in names]
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**results, part: {"rows": kept}}, indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def _percent(share: float | None, aim: float) -> str:
    if share is None:
        return "not measured"
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
    found = results.get("cost", {})
    lines = [
        "| head | parameters | forward, % of the backbone's | training memory, % of the backbone's | MiB |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in found.get("rows", []):
        mib = f"{row['mib']:.0f}" if "mib" in row else "–"
        time = _percent(row.get("time_share"), TIME_AIM)
        memory = _percent(row.get("memory_share"), MEMORY_AIM)
        lines.append(f"| `{row['routing']}` | {row['parameters']:,} | {time} | {memory} | {mib} |")
    if len(lines) == 2:
        return "No figures yet: `python benchmarks/heads.py --cost` makes them."
    aims = f"Aims: at most {100 * TIME_AIM:.0f}% and {100 * MEMORY_AIM:.0f}%."
    return "\n".join([*lines, "", f"{aims} Measured with {_told(found['rows'], 'hardware', 'torch')}."])


def backbones_table(results: dict[str, Any]) -> str:
    """Six backbones: features, parameters, the exported file."""
    found = results.get("backbones", {})
    lines = [
        "| backbone | head | input | layout | features | head's grid | parameters | head parameters | ONNX nodes "
        "| largest difference |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found.get("rows", []):
        sizes = ("×".join(map(str, row[key])) for key in ("input", "features", "grid"))
        size, features, grid = sizes
        lines.append(
            f"| `{row['backbone']}` | `{row['routing']}` | {size} | {row['layout']} | {features} | {grid} "
            f"| {row['parameters']:,} | {row['head_parameters']:,} | {row['nodes']} | {row['max_rel_diff']:.0e} |"
        )
    if len(lines) == 2:
        return "No figures yet: `python benchmarks/heads.py --backbones` makes them."
    return "\n".join([*lines, "", f"Measured with {_told(found['rows'], 'timm', 'torch')}."])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cost", action="store_true", help="time and memory of every routing on ResNet-50")
    parser.add_argument(
        "--routings", nargs="+", choices=list(HEADS), default=list(HEADS), help="with --cost (default: all)"
    )
    parser.add_argument("--backbones", action="store_true", help="six backbones and their ONNX files")
    parser.add_argument("--no-time", action="store_true", help="with --cost: memory alone")
    parser.add_argument("--no-memory", action="store_true", help="with --cost: time alone")
    parser.add_argument("--iters", type=int, default=7, help="turns of a time measurement")
    parser.add_argument("--repeats", type=int, default=3, help="processes of a memory measurement")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--memory-of", metavar="ROUTING", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.memory_of:
        print(peak_of(args.memory_of))
        return 0
    if not (args.cost or args.backbones):
        parser.error("say what to measure: --cost, --backbones or both")
    if args.cost:
        rows = measure_cost(
            args.routings, not args.no_time, not args.no_memory, args.iters, args.threads, args.repeats
        )
        keep(args.json, "cost", rows, "routing", HEADS)
        print(cost_table(stored(args.json)))
    if args.backbones:
        keep(args.json, "backbones", [measure_backbone(*pair) for pair in BACKBONES.items()], "backbone")
        print(backbones_table(stored(args.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
