"""Each routing layer against its floor and its reference: developers run it when they make a layer faster.

    python benchmarks/routing.py                    # layers, as the papers' models have them
    python benchmarks/routing.py --scaling          # cost per vote as the work grows
    python benchmarks/routing.py --compile          # each model, compiled against eager
    python benchmarks/routing.py --autocast         # each model, bfloat16 autocast against float32

The floor of a layer is the larger of two times: its multiply-adds at the rate of a large matrix product, and the
bytes it cannot avoid (input, weights, result, once) at the speed of a large copy; both rates are measured first. A
training step counts three times the multiply-adds and three times the bytes. The reference engine (the paper's
procedure, line by line) is timed in turns with the engine that the layer chooses, after their values (not their
gradients) have been compared. The naive loops (``tests/reference``, in float64) run on a small layer, and their time is
given per vote.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import torch
from torch import Tensor, nn

import capszoo
from capszoo import layers
from capszoo.layers.engine_choice import record_engines, use_engines


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turns(runs: list[Callable[[], object]], iters: int) -> list[float]:
    """Median seconds of each, measured in turns after one untimed run of each."""
    for run in runs:
        run()
    times = [[seconds(run) for run in runs] for _ in range(iters)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


@dataclass(frozen=True)
class Machine:
    """Multiply-adds and bytes (read and written) per second, of a large matrix product and a large copy."""

    macs: float
    bytes: float

    def floor(self, macs: float, moved: float) -> float:
        return max(macs / self.macs, moved / self.bytes)


def measure_machine() -> Machine:
    n = 2048
    a, b, c = torch.rand(n, n), torch.rand(n, n), torch.empty(n, n)
    source = torch.rand(64 * 2**20)
    target = torch.empty_like(source)
    product, copy = in_turns([lambda: torch.mm(a, b, out=c), lambda: target.copy_(source)], 9)
    return Machine(n**3 / product, 2 * 4 * source.numel() / copy)


@dataclass
class Case:
    """A layer, and the minimum cost of an image."""

    name: str
    layer: nn.Module
    #: Of the input, without the batch.
    size: tuple[int, ...]
    run: Callable[[Tensor], Tensor]
    #: Of an image, forward.
    macs: float
    #: Of an image.
    votes: int
    #: Inputs lie in 0..1 (activations among them).
    positive: bool = False

    def reference(self, x: Tensor) -> Tensor:
        """Results of the layer's reference engine."""
        with use_engines("reference"):
            return self.run(x)

    def engine(self, batch: int, train: bool) -> str:
        """Name of the engine that the layer chooses; "-" if it has only one way to compute."""
        with record_engines() as choices:
            runs(self, self.run, batch, train)()
        return choices[-1].engine.name if choices else "-"

    def moved(self, batch: int, out: int) -> float:
        """Minimum bytes: input, weights, result, in float32."""
        weights = sum(p.numel() for p in self.layer.parameters())
        return 4 * (batch * int(torch.Size(self.size).numel()) + weights + out)


def dynamic_case(parents: int = 10, num_iters: int = 3, children: int = 1152) -> Case:
    layer = layers.DynamicRouting(children, 8, parents, 16, num_iters)
    votes = children * parents
    return Case(
        f"dynamic, {children}x8 to {parents}x16, {num_iters} it.",
        layer,
        (children, 8),
        layer,
        votes * 16 * (8 + 2 * num_iters - 1),
        votes,
    )


def shared_dynamic_case(parents: int = 512, num_iters: int = 3, places: int = 64) -> Case:
    groups = 32
    layer = layers.SharedDynamicRouting(groups, 8, parents, 16, num_iters)
    votes = groups * places * parents
    # the sums over places and the agreements are in the children's 9 dimensions, not in the votes' 16
    passes = (2 * num_iters - 2) * votes * 9 + (2 * num_iters - 1) * groups * parents * 9 * 16
    return Case(
        f"dynamic, transforms shared, {groups}x{places}x8 to {parents}x16, {num_iters} it.",
        layer,
        (groups, 8, places),
        layer,
        passes,
        votes,
    )


def conv_em_case(
    in_caps: int = 32, out_caps: int = 32, grid: int = 16, stride: int = 2, num_iters: int = 2
) -> Case:
    # temperatures of the nets, relative to the children per parent
    share = out_caps / (9 * in_caps)
    layer = layers.ConvEM(
        in_caps,
        out_caps,
        4,
        3,
        stride,
        num_iters,
        lam_start=0.1 * share,
        lam_step=0.1 * share,
        init_beta_v=1.0,
    )
    places = layer.grid_size(grid, grid)[0] ** 2
    votes = places * 9 * in_caps * out_caps

    def poses(x: Tensor) -> Tensor:
        return layer.route(x)[0]

    # votes (4 for each of 16 elements), squares (1), means, variances and log-likelihoods (1 each, and per iteration)
    macs = votes * 16 * (4 + 1 + 2 * num_iters + (num_iters - 1))
    name = f"EM, 3x3 s{stride}, {in_caps} to {out_caps} types 4x4, {grid}x{grid}, {num_iters} it."
    channels = in_caps * 17
    return Case(name, layer, (channels, grid, grid), poses, macs, votes, True)


def conv_idpa_case(grid: int = 16, stride: int = 2, num_iters: int = 1, caps: int = 32) -> Case:
    layer = layers.ConvIDPA(caps, caps, 16, 16, 3, stride, num_iters=num_iters)
    places = layer.out_size(grid) ** 2
    votes = places * 9 * caps * caps

    return Case(
        f"IDPA, 3x3 s{stride}, {caps} to {caps} types 4x4, {grid}x{grid}, {num_iters} it.",
        layer,
        (caps * 16, grid, grid),
        layer,
        votes * 16 * (4 + 2 * (num_iters - 1)),
        votes,
    )


def fc_idpa_case(parents: int = 10, num_iters: int = 2, children: int = 800) -> Case:
    layer = layers.FCIDPA(children, parents, 16, 16, num_iters)
    votes = children * parents
    return Case(
        f"IDPA, {children} to {parents}, 4x4, {num_iters} it.",
        layer,
        (children, 16),
        layer,
        votes * 16 * (4 + 2 * (num_iters - 1)),
        votes,
    )


def routing_pool_case(grid: int = 8, num_iters: int = 3, channels: int = 64) -> Case:
    layer = layers.RoutingPool2d(16, 5.0, num_iters)
    numbers = channels * grid * grid
    return Case(
        f"routing pooling, {channels} channels, {grid}x{grid}, {num_iters} it.",
        layer,
        (channels, grid, grid),
        lambda x: layer(x).flatten(1),
        numbers * (1 + 1 + 2 * num_iters),  # lengths, first mean, then agreement and sum
        numbers // 16,
    )


def capconv_case(
    in_dim: int = 8, out_dim: int = 16, kernel_size: int = 3, stride: int = 2, grid: int = 8
) -> Case:
    groups = 32
    layer = layers.CapConv(groups * in_dim, groups * out_dim, kernel_size, stride, groups)
    places = (grid // stride) ** 2
    out = groups * out_dim
    master = places * kernel_size**2 * in_dim * out
    aide = places * (kernel_size + 4) ** 2 * groups * in_dim * out
    coefficients = 2 * places * 9 * out_dim * 2 * groups
    return Case(
        f"capConv, d {in_dim} to {out_dim}, {kernel_size}x{kernel_size} s{stride}, {grid}x{grid}",
        layer,
        (groups * in_dim, grid, grid),
        layer,
        master + aide + coefficients,
        places * groups * groups,
        True,
    )


def cases() -> list[Case]:
    """The layers of the papers' models."""
    return [
        dynamic_case(),
        shared_dynamic_case(),
        conv_em_case(8, 16, 11),
        conv_em_case(),
        conv_idpa_case(),
        conv_idpa_case(num_iters=2),
        fc_idpa_case(num_iters=1),
        fc_idpa_case(),
        routing_pool_case(),
        capconv_case(),
        capconv_case(16, 16, 1, 1, 4),
    ]


def runs(case: Case, run: Callable[[Tensor], Tensor], batch: int, train: bool) -> Callable[[], object]:
    torch.manual_seed(0)
    x = torch.rand(batch, *case.size) if case.positive else torch.randn(batch, *case.size)
    if not train:

        def forward() -> Tensor:
            with torch.inference_mode():
                return run(x)

        return forward
    x.requires_grad_()
    weights = [x, *case.layer.parameters()]
    up = torch.randn_like(run(x))

    def step() -> None:
        torch.autograd.grad(run(x), weights, up, allow_unused=True)

    return step


def difference(case: Case, batch: int = 2) -> float:
    """Largest difference between a layer and its reference engine, relative to the largest value, in float64."""
    layer_type = next((p.dtype for p in case.layer.parameters()), torch.float32)
    case.layer.double()
    x = torch.rand(batch, *case.size, dtype=torch.float64)
    if not case.positive:
        x = 2 * x - 1
    with torch.inference_mode():
        own, other = case.run(x), case.reference(x)
    case.layer.to(layer_type)
    return ((own - other).abs().max() / other.abs().max()).item()


def naive_per_vote() -> dict[str, float]:
    """Microseconds per vote of the references, on layers of a few votes: dynamic, EM, IDPA."""
    from tests.reference import dynamic as dynamic_reference
    from tests.reference import em as em_reference
    from tests.reference import idpa as idpa_reference

    torch.manual_seed(0)
    i, j = 12, 4

    def warm(run: Callable[[], object]) -> float:
        return in_turns([run], 3)[0]

    dynamic_votes = torch.randn(1, j, i, 16, dtype=torch.float64)
    em_votes = torch.randn(1, i, j, 16, dtype=torch.float64)
    active, betas = torch.rand(1, i, dtype=torch.float64), torch.zeros(j, dtype=torch.float64)
    pose = [torch.randn(16, dtype=torch.float64) for _ in range(i)]
    weight = torch.randn(4, 4, dtype=torch.float64)
    times = {
        "dynamic": warm(lambda: dynamic_reference.route(dynamic_votes, 3, "parents")),
        "EM": warm(lambda: em_reference.route(em_votes, active, betas, betas, 2)),
        "IDPA, a vote alone": warm(
            lambda: [idpa_reference.vote(p, weight, 4) for p in pose for _ in range(j)]
        ),
    }
    return {name: 1e6 * took / (i * j) for name, took in times.items()}


def layer_table(args: argparse.Namespace) -> None:
    machine = measure_machine()
    print(
        f"{torch.get_num_threads()} threads: matrix product {2 * machine.macs / 1e9:.0f} GFLOP/s, "
        f"copy {machine.bytes / 1e9:.0f} GB/s; batch {args.batch}; torch {torch.__version__}, "
        f"{platform.machine()}\n"
    )
    print(
        "| layer | M multiply-adds an image | least MiB a batch | floor, ms | engine | forward, × floor "
        "| reference, × floor | training floor, ms | engine | training, × floor | reference, × floor |"
    )
    print("|---|---:|---:|---:|---|---:|---:|---:|---|---:|---:|")
    for case in cases():
        if args.only and args.only not in case.name:
            continue
        with use_engines(*({case.engine(args.batch, train) for train in (False, True)} - {"-", "reference"})):
            error = difference(case)
        if not error < 1e-9:
            raise SystemExit(f"error: {case.name}: the layer and its reference differ by {error:.1e}")
        row: list[str] = []
        moved = case.moved(args.batch, runs(case, case.run, args.batch, False)().numel())  # type: ignore[attr-defined]
        for train in (False, True):
            factor = 3 if train else 1
            floor = machine.floor(factor * case.macs * args.batch, factor * moved)
            own, other = in_turns(
                [runs(case, case.run, args.batch, train), runs(case, case.reference, args.batch, train)],
                args.iters,
            )
            engine = case.engine(args.batch, train)
            row += [f"{1e3 * floor:.2f}", engine, f"{own / floor:.1f}", f"{other / floor:.1f}"]
        print(
            f"| {case.name} | {case.macs / 1e6:.2f} | {moved / 2**20:.1f} | " + " | ".join(row) + " |",
            flush=True,
        )
    if not args.only:
        naive = ", ".join(f"{name} {value:.0f}" for name, value in naive_per_vote().items())
        print(f"\nThe naive loops, microseconds a vote (of an image): {naive}.")


def peak_of_step(step: Callable[[], object]) -> int:
    """Peak bytes of the tensors of a training step, above those alive before it."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    held = peak = 0
    for event in record.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def scaling_table(args: argparse.Namespace) -> None:
    """Training cost per vote and iteration over them, as multiples of the first line of each family."""
    families: dict[str, list[tuple[Case, int]]] = {
        "IDPA conv, input": [(conv_idpa_case(g, num_iters=3), 3) for g in (16, 32, 64)],
        "IDPA conv, iterations": [(conv_idpa_case(num_iters=t), t) for t in (2, 3, 5)],
        "IDPA, classes": [(fc_idpa_case(n), 2) for n in (10, 100, 1000)],
        "EM conv, input": [(conv_em_case(grid=g), 2) for g in (16, 32, 64)],
        "EM conv, iterations": [(conv_em_case(num_iters=t), t) for t in (2, 3, 5)],
        "dynamic, classes": [(dynamic_case(n), 3) for n in (10, 100, 1000)],
        "dynamic, iterations": [(dynamic_case(num_iters=t), t) for t in (2, 3, 5)],
        "routing pooling, input": [(routing_pool_case(g), 3) for g in (8, 16, 32)],
    }
    batch = args.batch or 4
    print(f"Batch {batch}.\n\n| growing | layer | time per vote and iteration | memory per vote |")
    print("|---|---|---:|---:|")
    for family, members in families.items():
        if args.only and args.only not in family:
            continue
        steps = [runs(case, case.run, batch, True) for case, _ in members]
        times = in_turns(steps, max(3, args.iters // 2))
        first: tuple[float, float] | None = None
        for (case, passes), step, took in zip(members, steps, times, strict=True):
            cost = (took / (case.votes * passes), peak_of_step(step) / case.votes)
            first = first or cost
            print(
                f"| {family} | {case.name} | {cost[0] / first[0]:.2f} | {cost[1] / first[1]:.2f} |",
                flush=True,
            )


def over_eager(name: str, args: argparse.Namespace, train: bool) -> float:
    """Time of a model, compiled or under bfloat16 autocast, relative to the eager float32 model.

    Raises an error if the routing breaks a compiled graph.
    """
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model: Any = capszoo.create_model(name).train(train).to(memory_format=layout)
    x = torch.rand(args.batch, model.in_chans, *model.img_size).to(memory_format=layout)
    torch._dynamo.reset()
    other = torch.compile(model, fullgraph=True) if args.compile else model

    def run(net: Callable[[Tensor], Tensor], autocast: bool) -> None:
        with torch.set_grad_enabled(train):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                scores = net(x)
            if train:
                scores.float().square().mean().backward()

    eager, changed = in_turns([lambda: run(model, False), lambda: run(other, args.autocast)], args.iters)
    return changed / eager


def models_table(args: argparse.Namespace, how: str) -> None:
    """Every model, changed in one way, against eager float32: forward pass and training step."""
    print(f"| model | forward, {how} / eager | training step, {how} / eager |")
    print("|---|---:|---:|")
    for name in args.models or capszoo.list_models():
        ratios = [over_eager(name, args, train) for train in (False, True)]
        print(f"| `{name}` | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, help="default: 32; 4 with --scaling")
    parser.add_argument("--iters", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", help="rows whose name contains this")
    parser.add_argument("--scaling", action="store_true", help="cost per vote as the work grows")
    parser.add_argument("--compile", action="store_true", help="torch.compile against eager")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 autocast against float32, eager")
    parser.add_argument("--models", nargs="*", help="models for --compile and --autocast (default: all)")
    parser.add_argument("--channels-last", action="store_true", help="images and weights so, for these two")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    if args.scaling:
        scaling_table(args)
        return
    args.batch = args.batch or 32
    if args.compile or args.autocast:
        changes = {"compiled": args.compile, "bfloat16": args.autocast}
        models_table(args, ", ".join(word for word, made in changes.items() if made))
    else:
        layer_table(args)


if __name__ == "__main__":
    main()
