"""Models in two checkouts, measured in turns: developers run it when a change may make one slower or larger.

    git worktree add ../before 23ec906
    python benchmarks/versions.py ../before --models idpa_resnet capsnet_dynamic --batch 8 32 --train --memory
    python benchmarks/versions.py ../before --models idpa_resnet capsnet_em --batch 1 16 --onnx

Each checkout has a process of its own. Both build the model, and then take turns: one call here, one there, of which
the ratio is taken. A ratio below 1 says that this checkout is faster than the other one. The interval is that of the
median (a sign test's, at 95%; with five pairs the extremes, 94%). Memory is the peak above start-up of two training
steps in a fresh process of each checkout, as ``benchmarks/models.py --memory`` measures it.

``--onnx`` compares the exported files instead: whether both checkouts write the same graph with the same weights, and
where they do not, the times of the two in ONNX Runtime. Files are written to each checkout's ``bench/versions``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def serve(checkout: Path, threads: int) -> None:
    """Build and time models of a checkout as the orders on stdin say; an answer is a line of JSON on stdout."""
    sys.path.insert(0, str(checkout))
    import torch

    import capszoo
    from benchmarks import models

    assert capszoo.__file__ is not None and Path(capszoo.__file__).is_relative_to(checkout)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    form = models.Form(torch.device("cpu"))
    run: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("export"):
            from benchmarks import export

            export.FOLDER = Path(order["export"])
            export.FOLDER.mkdir(parents=True, exist_ok=True)
            with contextlib.redirect_stdout(sys.stderr):
                file, _ = export.exported(order["spec"])
            print(json.dumps(str(file)), flush=True)
        elif order["build"]:
            build = models.train_step_of if order["train"] else models.forward_of
            run = build(order["spec"], order["batch"], form)
            run()
            print("0", flush=True)
        else:
            print(models.timed(run, form.device), flush=True)


class Checkout:
    """A process that measures models of one checkout."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder, self.threads = folder, threads
        command = [sys.executable, __file__, "--serve", str(folder), "--threads", str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )

    def ask(self, **order: Any) -> Any:
        """Send an order and wait for its answer, a number or a path."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"build": False, **order}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"error: {self.folder}: the measurement failed (its message is above)")
        return json.loads(answer)

    def memory(self, spec: str, batch: int) -> float:
        """MiB above start-up, by the checkout's own benchmarks/models.py."""
        from benchmarks.models import memory_in_subprocess

        return memory_in_subprocess(spec, batch, self.threads, "cpu", checkout=self.folder)[1]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(before: Checkout, after: Checkout, spec: str, batch: int, train: bool, iters: int) -> str:
    """A row: medians of both, and of their paired ratios."""
    from benchmarks.engines import median_interval

    for checkout in (before, after):
        checkout.ask(build=True, spec=spec, batch=batch, train=train)
    old, new = [], []
    for turn in range(iters + 1):
        pair = [checkout.ask() for checkout in (before, after)]
        if turn:  # the first turn warms up
            old.append(pair[0])
            new.append(pair[1])
    middle, low, high = median_interval([n / o for n, o in zip(new, old, strict=True)])
    ms = [statistics.median(times) * 1000 for times in (old, new)]
    what = "training step" if train else "forward"
    return f"| `{spec}` | {batch} | {what}, ms | {ms[0]:.1f} | {ms[1]:.1f} | {middle:.2f} ({low:.2f} to {high:.2f}) |"


def graph_digest(file: Path) -> tuple[int, list[str]]:
    """Number of nodes, and for each output of an ONNX file a hash of all that computes it.

    Names and the order of the nodes make no difference; operators, attributes, weights and connections do.
    """
    import onnx
    from onnx import numpy_helper

    def digest(*parts: Any) -> str:
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    graph = onnx.load(file).graph
    found = {"": ""}
    for tensor in graph.initializer:
        values = numpy_helper.to_array(tensor)
        found[tensor.name] = digest(values.dtype, values.shape, hashlib.sha256(values.tobytes()).hexdigest())
    for position, value in enumerate(graph.input):
        found.setdefault(value.name, digest("input", position))
    for node in graph.node:  # in topological order, as ONNX demands
        attributes = sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)
        inputs = [found[name] for name in node.input]
        for position, name in enumerate(node.output):
            found[name] = digest(node.op_type, attributes, inputs, position)
    return len(graph.node), [found[value.name] for value in graph.output]


def compare_exported(
    before: Checkout, after: Checkout, spec: str, batches: list[int], iters: int
) -> list[str]:
    """Rows: "the same graph", or the times of both files at each batch size."""
    from benchmarks import models
    from capszoo.export.compare import OnnxRunner, probe_input, time_runners

    files = []
    for side, checkout in (("before", before), ("after", after)):
        folder = checkout.folder / "bench" / "versions" / side
        shutil.rmtree(folder, ignore_errors=True)  # an earlier call's file may be of other code
        files.append(Path(checkout.ask(export=str(folder), spec=spec)))
    (nodes, content), (nodes_now, content_now) = map(graph_digest, files)
    if content == content_now:
        return [f"| `{spec}` | | ONNX graph, nodes | {nodes} | the same graph | |"]
    rows = [f"| `{spec}` | | ONNX graph, nodes | {nodes} | {nodes_now} | |"]
    _, size = models.build(spec)
    runners = [OnnxRunner(str(file), before.threads) for file in files]
    for batch in batches:
        images = probe_input("random", (models.batch_of(spec, batch), *size))
        old, new = time_runners(runners, images, iters)
        rows.append(
            f"| `{spec}` | {len(images)} | ONNX Runtime, ms | {old.milliseconds:.1f} | {new.milliseconds:.1f} "
            f"| {new.ratio:.2f} |"
        )
    return rows


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="folder of the other checkout")
    parser.add_argument("--models", nargs="+", default=[], help="names or name:argument=value")
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--iters", type=int, default=9, help="paired measurements")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--train", action="store_true", help="training steps too")
    parser.add_argument("--memory", action="store_true", help="peak memory of training too")
    parser.add_argument("--onnx", action="store_true", help="compare the exported ONNX files instead")
    parser.add_argument("--serve", type=Path, help=SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.threads)
        return
    if args.before is None or not (args.before / "capszoo").is_dir():
        parser.error("name the folder of another checkout of capszoo")
    sys.path.insert(0, str(ROOT))
    before, after = (Checkout(folder.resolve(), args.threads) for folder in (args.before, ROOT))
    print("| model | batch | | before | after | after / before |\n|---|---:|---|---:|---:|---:|", flush=True)
    for spec in args.models:
        if args.onnx:
            print(*compare_exported(before, after, spec, args.batch, args.iters), sep="\n", flush=True)
            continue
        for batch in args.batch:
            for train in (False, True) if args.train else (False,):
                print(compare(before, after, spec, batch, train, args.iters), flush=True)
            if args.memory:
                old, new = (checkout.memory(spec, batch) for checkout in (before, after))
                print(
                    f"| `{spec}` | {batch} | training, MiB | {old:.0f} | {new:.0f} | {new / old:.2f} |",
                    flush=True,
                )
    before.close()
    after.close()


if __name__ == "__main__":
    main()
