"""Each routing layer against its floor and its reference: developers run it when they make a layer faster.

    python benchmarks/routing.py                    # layers, as the papers' models have them
    python benchmarks/routing.py --compile          # each model, compiled against eager

The floor of a layer is the larger of two times: its multiply-adds at the rate of a large matrix product, and the
bytes it cannot avoid (input, weights, result, once) at the speed of a large copy; both rates are measured first. A
training step counts three times the multiply-adds and three times the bytes. The reference engine (the paper's
procedure, line by line) is timed in turns with the engine that the layer chooses, after their values (not their
gradients) have been compared.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import torch
from torch import Tensor, nn

import capszoo
from benchmarks.models import Form, forward_of, in_turns, train_step_of
from capszoo import layers
from capszoo.layers.engine_choice import record_engines, use_engines


def medians(runs: list[Callable[[], object]], iters: int) -> list[float]:
    """Median seconds of each, measured in turns."""
    return [statistics.median(seconds) for seconds in in_turns(runs, iters)]


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
    product, copy = medians([lambda: torch.mm(a, b, out=c), lambda: target.copy_(source)], 9)
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


def dynamic_case() -> Case:
    children, parents, num_iters = 1152, 10, 3
    layer = layers.DynamicRouting(children, 8, parents, 16, num_iters)
    name = f"dynamic, {children}x8 to {parents}x16, {num_iters} it."
    return Case(name, layer, (children, 8), layer, children * parents * 16 * (8 + 2 * num_iters - 1))


def shared_dynamic_case() -> Case:
    groups, places, parents, num_iters = 32, 64, 512, 3
    layer = layers.SharedDynamicRouting(groups, 8, parents, 16, num_iters)
    votes = groups * places * parents
    # the sums over places and the agreements are in the children's 9 dimensions, not in the votes' 16
    macs = (2 * num_iters - 2) * votes * 9 + (2 * num_iters - 1) * groups * parents * 9 * 16
    name = f"dynamic, transforms shared, {groups}x{places}x8 to {parents}x16, {num_iters} it."
    return Case(name, layer, (groups, 8, places), layer, macs)


def conv_em_case(in_caps: int = 32, out_caps: int = 32, grid: int = 16) -> Case:
    lam = 0.1 * out_caps / (9 * in_caps)  # temperatures of the nets, relative to the children per parent
    num_iters = 2
    layer = layers.ConvEM(in_caps, out_caps, 4, 3, 2, num_iters, lam_start=lam, lam_step=lam, init_beta_v=1.0)
    votes = layer.grid_size(grid, grid)[0] ** 2 * 9 * in_caps * out_caps
    # votes (4 for each of 16 elements), squares (1), means, variances and log-likelihoods (1 each, and per iteration)
    macs = votes * 16 * (4 + 1 + 2 * num_iters + (num_iters - 1))
    name = f"EM, 3x3 s2, {in_caps} to {out_caps} types 4x4, {grid}x{grid}, {num_iters} it."
    return Case(name, layer, (in_caps * 17, grid, grid), lambda x: layer.route(x)[0], macs, True)


def conv_idpa_case(grid: int = 16, stride: int = 2, num_iters: int = 1) -> Case:
    caps = 32
    layer = layers.ConvIDPA(caps, caps, 16, 16, 3, stride, num_iters=num_iters)
    votes = layer.out_size(grid) ** 2 * 9 * caps * caps
    name = f"IDPA, 3x3 s{stride}, {caps} to {caps} types 4x4, {grid}x{grid}, {num_iters} it."
    return Case(name, layer, (caps * 16, grid, grid), layer, votes * 16 * (4 + 2 * (num_iters - 1)))


def fc_idpa_case(num_iters: int = 2) -> Case:
    children, parents = 800, 10
    layer = layers.FCIDPA(children, parents, 16, 16, num_iters)
    name = f"IDPA, {children} to {parents}, 4x4, {num_iters} it."
    return Case(name, layer, (children, 16), layer, children * parents * 16 * (4 + 2 * (num_iters - 1)))


def routing_pool_case() -> Case:
    channels, grid, num_iters = 64, 8, 3
    layer = layers.RoutingPool2d(16, 5.0, num_iters)
    macs = channels * grid * grid * (1 + 1 + 2 * num_iters)  # lengths, first mean, then agreement and sum
    name = f"routing pooling, {channels} channels, {grid}x{grid}, {num_iters} it."
    return Case(name, layer, (channels, grid, grid), lambda x: layer(x).flatten(1), macs)


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
    name = f"capConv, d {in_dim} to {out_dim}, {kernel_size}x{kernel_size} s{stride}, {grid}x{grid}"
    return Case(name, layer, (groups * in_dim, grid, grid), layer, master + aide + coefficients, True)


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


def layer_table(args: Namespace) -> None:
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
        if args.only not in case.name:
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
            own, other = medians(
                [runs(case, case.run, args.batch, train), runs(case, case.reference, args.batch, train)],
                args.iters,
            )
            engine = case.engine(args.batch, train)
            row += [f"{1e3 * floor:.2f}", engine, f"{own / floor:.1f}", f"{other / floor:.1f}"]
        print(
            f"| {case.name} | {case.macs / 1e6:.2f} | {moved / 2**20:.1f} | " + " | ".join(row) + " |",
            flush=True,
        )


def models_table(args: Namespace) -> None:
    """Every model, compiled against eager: forward pass and training step."""
    forms = [Form(torch.device("cpu"), args.channels_last, compiled) for compiled in (False, True)]
    print("| model | forward, compiled / eager | training step, compiled / eager |\n|---|---:|---:|")
    for name in args.models or capszoo.list_models():
        ratios = []
        for make in (forward_of, train_step_of):
            torch._dynamo.reset()
            eager, compiled = medians([make(name, args.batch, form) for form in forms], args.iters)
            ratios.append(compiled / eager)
        print(f"| `{name}` | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--iters", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--compile", action="store_true", help="models: torch.compile against eager")
    parser.add_argument("--models", nargs="*", help="models for --compile (default: all)")
    parser.add_argument("--channels-last", action="store_true", help="images and weights so, for --compile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    (models_table if args.compile else layer_table)(args)


if __name__ == "__main__":
    main()
