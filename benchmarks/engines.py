"""Speed-up of each engine in a model: developers run it when they add an engine or move a threshold.

    python benchmarks/engines.py idpa_resnet:routing_iters=2 --engine blocked --batch 1 8 32 --train

"Without" is the model's choice if the engine is refused everywhere; ``--without NAME`` forces another. ``--tuning``
compares two values of a threshold instead: the present one with the one that it gives.

    python benchmarks/engines.py capsnet_dynamic --tuning strided_conv_min_kernel=99 --batch 128 --train --autocast

``--contiguous`` compares the layouts of the images and weights: contiguous with channels-last.

    python benchmarks/engines.py encapnet_v1:mode=master --contiguous --batch 128 --train --autocast --compile

A ratio below 1 is a speed-up. The interval is that of the median (sign test, 95%). ``--memory`` adds the peak
memory above start-up of a training step, each in a separate process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import torch

from benchmarks.models import Form, _peak_mib, forward_of, in_turns, train_step_of
from capszoo._utils.process import keep_freed_memory
from capszoo.errors import CapszooError
from capszoo.layers.engine import Engine
from capszoo.layers.engine_choice import record_engines, use_engines
from capszoo.layers.tuning import TUNING, tuned


def engines_called(name: str) -> list[type[Engine]]:
    """Engine classes of this name."""
    found, classes = [], [Engine]
    while classes:
        engine = classes.pop()
        classes += engine.__subclasses__()
        if vars(engine).get("name") == name:
            found.append(engine)
    if not found:
        raise CapszooError(f"there is no engine {name!r}")
    return found


def _refuse(layer: Any, call: Any, forced: bool = False) -> str:
    return "refused by the benchmark"


@contextmanager
def refused(name: str) -> Iterator[None]:
    """Within this context, engines of this name are never chosen."""
    engines = engines_called(name)
    before = [vars(engine).get("refusal") for engine in engines]
    try:
        for engine in engines:
            setattr(engine, "refusal", staticmethod(_refuse))  # noqa: B010
        yield
    finally:
        for engine, method in zip(engines, before, strict=True):
            if method is None:
                delattr(engine, "refusal")
            else:
                setattr(engine, "refusal", method)  # noqa: B010


def median_interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median, and the order statistics that contain it in 95% of samples (with five, the extremes: 94%)."""
    ordered = sorted(ratios)
    n = len(ordered)
    inside, k, term = 0.0, 0, 0.5**n
    while inside + 2 * term <= 0.05 and k < n // 2:  # cut k+1 values at each end
        inside += 2 * term
        k += 1
        term *= (n - k + 1) / k
    return statistics.median(ordered), ordered[max(k - 1, 0)], ordered[min(n - k, n - 1)]


def without_it(args: Namespace) -> AbstractContextManager[None]:
    """The context of "without": another threshold, another engine, or none of this name."""
    if args.contiguous:
        return nullcontext()
    if args.tuning:
        return tuned(**args.tuning)
    return use_engines(args.without) if args.without else refused(args.engine)


def threshold(text: str) -> dict[str, int]:
    """``NAME=VALUE`` of a threshold."""
    name, _, value = text.partition("=")
    if name not in vars(TUNING) or not value.isdecimal():
        raise ArgumentTypeError(f"expected NAME=NUMBER, NAME one of {', '.join(vars(TUNING))}")
    return {name: int(value)}


def runner(spec: str, batch: int, train: bool, args: Namespace, with_it: bool = True) -> Callable[[], object]:
    """A forward pass or training step, under bfloat16 autocast if requested."""
    channels_last = not with_it if args.contiguous else args.channels_last or args.autocast
    form = Form(torch.device(args.device), channels_last, args.compile, args.autocast)
    return (train_step_of if train else forward_of)(spec, batch, form)


def measure(spec: str, batch: int, train: bool, args: Namespace) -> str:
    run = runner(spec, batch, train, args)
    same = runner(spec, batch, train, args, False) if args.contiguous else run

    def without() -> None:
        with without_it(args):
            same()

    with record_engines() as choices:
        run()
    used = [c for c in choices if c.engine.name == args.engine]
    what = "training step" if train else "forward"
    if args.engine and not used:
        return f"| {spec} | {batch} | {what} | not chosen | | |"
    slow, fast = in_turns((without, run), args.iters, args.warmup, args.device)
    middle, low, high = median_interval([own / other for own, other in zip(fast, slow, strict=True)])
    ms = statistics.median(fast) * 1000
    layers = f"{len(used)} of {len(choices)}" if args.engine else ""
    return f"| {spec} | {batch} | {what} | {layers} | {ms:.1f} | {middle:.2f} ({low:.2f} to {high:.2f}) |"


def peak_mib(spec: str, batch: int, args: Namespace, with_engine: bool) -> int:
    """Peak memory above start-up, for two training steps in a new process."""
    command = [sys.executable, __file__, spec, "--batch", str(batch), "--peak"]
    command += ["with" if with_engine else "without", "--without", args.without]
    command += ["--engine", args.engine] if args.engine else []
    command += (
        ["--tuning", *(f"{name}={value}" for name, value in args.tuning.items())] if args.tuning else []
    )
    flags = ("contiguous", "autocast", "channels_last", "compile")
    command += [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak(spec: str, batch: int, args: Namespace) -> None:
    before = _peak_mib()
    with_it = args.peak == "with"
    step = runner(spec, batch, True, args, with_it)
    for _ in range(2):
        with nullcontext() if with_it else without_it(args):
            step()
    print(round(_peak_mib() - before))


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="specifications as benchmarks/models.py takes them")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--engine", default="")
    which.add_argument("--tuning", type=threshold, metavar="NAME=VALUE")
    which.add_argument("--contiguous", action="store_true", help="against channels-last")
    parser.add_argument(
        "--without",
        default="",
        help="engine that is forced instead, in every layer, also in those without --engine",
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--train", action="store_true", help="training steps too")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--iters", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--autocast", action="store_true", help="bfloat16, channels-last")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--peak", choices=("with", "without"), help=SUPPRESS)
    args = parser.parse_args()
    torch.set_flush_denormal(True)  # as benchmarks/models.py
    torch.manual_seed(0)
    if args.memory and torch.device(args.device).type != "cpu":
        parser.error("--memory measures the memory of the CPU: leave it out, or --device")
    if args.without and not args.engine:
        parser.error("--without names another engine than --engine: leave it out")
    if args.peak:
        print_peak(args.models[0], args.batch[0], args)
        return
    if torch.device(args.device).type == "cpu":
        keep_freed_memory()  # as `capszoo train` does
    print(
        "| model | batch | | layers with it | ms with it | with / without |\n|---|---:|---|---:|---:|---:|",
        flush=True,
    )
    for spec in args.models:
        for batch in args.batch:
            for train in (False, True) if args.train else (False,):
                print(measure(spec, batch, train, args), flush=True)
            if args.memory:
                with_it, without_it = (peak_mib(spec, batch, args, flag) for flag in (True, False))
                print(
                    f"| {spec} | {batch} | training, MiB above start-up | | | {with_it} / {without_it} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
