"""The gate: a graph is written only if it satisfies the rules and its outputs agree with eager PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import compare
from ..passes import int8
from ..prepare import PreparedModel, check_dtype
from ..report import ExportError, ExportReport, GateStep, first_line
from .graph_rules import FLOAT32_OPS, HEAVY_OPS, inspect_graph, widened
from .images import RealImages

if TYPE_CHECKING:
    import onnx

__all__ = ["MIN_AGREEMENT", "Gate", "verify_against_eager"]


#: Minimum top-1 agreement of half precision on real images; float32 requires 1.
MIN_AGREEMENT = 0.995


class Gate:
    """Runs the steps in order, records each in the report and raises at the first failure."""

    def __init__(
        self,
        report: ExportReport,
        prepared: PreparedModel,
        proto: onnx.ModelProto,
        say: Callable[[str], None],
    ) -> None:
        self.report, self.prepared, self.proto, self.say = report, prepared, proto, say

    @contextmanager
    def _step(self, name: str) -> Iterator[list[str]]:
        """Collect the step's detail; an ExportError raised inside marks it as failed."""
        self.say(name)
        detail: list[str] = []
        start = time.perf_counter()
        try:
            yield detail
        except ExportError as e:
            self.report.gate.append(GateStep(name, False, e.message, time.perf_counter() - start))
            e.report = self.report
            raise
        self.report.gate.append(GateStep(name, True, "; ".join(detail), time.perf_counter() - start))

    def _fail(self, what: str, remedy: str = "") -> ExportError:
        return ExportError(f"{self.report.model}: {what}", remedy, self.report)

    def structure(self) -> None:
        """Step 1: the checker, strict shape inference, ranks, operators, dtypes."""
        with self._step("structure") as detail:
            problems = inspect_graph(self.proto, self.report.batch)
            if problems:
                raise self._fail(f"the graph breaks a rule: {problems[0]}")
            detail.append(
                f"{self.report.num_nodes} nodes, opset {self.report.opset}, rank ≤ {self.report.max_rank}"
            )
            smallest, _, largest = self.report.batch
            free = "only the batch is symbolic" if smallest < largest else "every size is fixed"
            detail.append(f"every shape inferred, {free}, operators supported by TensorRT")
            if self.prepared.precision != "fp32":
                wanted = {"fp16": "float16", "bf16": "bfloat16", "int8": "int8"}[self.prepared.precision]
                heavy = [self.report.precision_map["operators"].get(op, {}) for op in HEAVY_OPS]
                half, total = (
                    sum(kinds.get(wanted, 0) for kinds in heavy),
                    sum(sum(k.values()) for k in heavy),
                )
                if half == 0:
                    raise self._fail(f"no convolution or matrix product is {wanted}")
                narrow = [
                    op
                    for op, kinds in self.report.precision_map["operators"].items()
                    if op in FLOAT32_OPS and wanted in kinds
                ]
                if narrow:
                    raise self._fail(
                        f"{', '.join(narrow)} in {wanted}", "compute it in float32 (upcast_half)"
                    )
                detail.append(f"{half} of {total} convolutions and matrix products in {wanted}")

    def parity(self, full: bool) -> None:
        """Step 2: ONNX Runtime against eager PyTorch."""
        with self._step("parity with eager") as detail:
            eager, runtime = compare.EagerRunner(self.prepared.original), self._exported()
            probes = compare.PROBES if full else compare.PROBES[:2]
            for count in _probe_batches(self.report.batch, full):
                self.say(f"parity with eager: batch {count}")
                for difference in self._compare(eager, runtime, count, probes):
                    self.report.comparisons.append(difference)
                    self._check(difference, "differs from eager")
            detail.append(
                f"{len(self.report.comparisons)} inputs, worst {self.report.max_rel_diff:.1e} of the largest"
            )
            if not full:
                detail.append("quick gate: random and zero input only")
            if self.prepared.precision == "fp16":
                detail.append(
                    "ONNX Runtime's CPU provider computes in float32 where it has no float16 kernel"
                )
            if self.prepared.precision == "bf16":
                detail.append(
                    "run as float32 with the bfloat16 weights: ONNX Runtime's CPU provider has no bfloat16"
                )

    def finite(self) -> None:
        """Step 2 for int8: beyond the calibrated ranges values are clipped, but never NaN; every batch runs."""
        with self._step("finite on every probe") as detail:
            eager, runtime = compare.EagerRunner(self.prepared.original), self._exported()
            found = []
            for count in _probe_batches(self.report.batch, full=True):
                found += self._compare(eager, runtime, count)
            for difference in found:
                if not difference.finite:
                    where = f"{difference.probe} input at batch {difference.batch}"
                    raise self._fail(f"NaN or infinity in the output for {where}")
            detail.append(f"{len(found)} inputs")

    def accuracy(self, real: RealImages) -> None:
        """Step 2 for int8: loss of accuracy on real images; without their classes, number of changed answers."""
        with self._step("accuracy on real images") as detail:
            eager, runtime = compare.EagerRunner(self.prepared.original), self._exported()
            answers = self._on_images(eager, runtime, real.images, self.report.comparisons)
            at = self.prepared.output_names.index("scores") if "scores" in self.prepared.output_names else 0
            guesses = [side[at].argmax(1) for side in answers]
            turned = 100 * float((guesses[0] != guesses[1]).mean())
            if real.labels is None:
                lost = turned
                detail.append(f"{len(real)} images of unknown classes, {turned:.2f}% of the answers turned")
            else:
                right = [100 * float((guess == real.labels.numpy()).mean()) for guess in guesses]
                lost = right[0] - right[1]
                self.report.accuracy = dict(
                    eager=right[0], int8=right[1], lost=lost, images=len(real), turned=turned
                )
                detail.append(
                    f"{len(real)} images, {right[0]:.2f}% right in float32, {right[1]:.2f}% in int8"
                )
            if lost > int8.MAX_LOSS + 1e-9:
                raise self._fail(
                    f"int8 loses {lost:.2f} points on {len(real)} real images; the limit is {int8.MAX_LOSS}",
                    "calibrate with more images, or use fp16",
                )

    def half_in_pytorch(self, images: RealImages | None) -> None:
        """Step 2 for half precision: its loss, computed in PyTorch in the same precision."""
        if self.prepared.precision == "fp32":
            return
        with self._step(f"{self.prepared.precision} in PyTorch") as detail:
            eager, half = (
                compare.EagerRunner(self.prepared.original),
                compare.EagerRunner(self.prepared.served, "gpu"),
            )
            half.name = f"eager {self.prepared.precision}"
            count = _probe_batches(self.report.batch, full=False)[-1]
            differences = self._compare(eager, half, count)
            for difference in differences:
                self._check(difference, f"{self.prepared.precision} differs from float32")
            detail.append(f"worst {max(d.relative for d in differences):.1e} of the largest output")
            if images is not None:
                detail.append(self._same_answers(eager, half, images, differences))
            self.report.half_comparisons.extend(differences)

    def real_images(self, images: RealImages | None) -> None:
        """Step 2, last part: equal top-1 on real images."""
        name = "top-1 on real images"
        if images is None:
            self.report.gate.append(GateStep(name, None, "not run: no images given"))
            return
        with self._step(name) as detail:
            eager, runtime = compare.EagerRunner(self.prepared.original), self._exported()
            detail.append(self._same_answers(eager, runtime, images, self.report.comparisons))

    def _same_answers(
        self,
        reference: compare.Runner,
        candidate: compare.Runner,
        real: RealImages,
        into: list[compare.Difference],
    ) -> str:
        """Compare two runners on real images; half precision may change 0.5% of the answers."""
        first = len(into)
        self._on_images(reference, candidate, real.images, into)
        equal = sum(round(found.top1_agreement * found.batch) for found in into[first:])
        agreement, least = equal / len(real), 1.0 if self.prepared.precision == "fp32" else MIN_AGREEMENT
        if agreement < least:
            raise self._fail(f"real images: top-1 agrees on {agreement:.2%}; the limit is {least:.1%}")
        return f"{len(real)} images, top-1 equal on {'all' if equal == len(real) else f'{agreement:.2%}'}"

    def _on_images(
        self,
        reference: compare.Runner,
        candidate: compare.Runner,
        images: torch.Tensor,
        into: list[compare.Difference],
    ) -> list[list[np.ndarray]]:
        """Outputs of both on all images, compared batch by batch."""
        check_dtype(images, self.prepared)
        smallest, _, largest = self.report.batch
        gathered: list[list[list[np.ndarray]]] = []
        for chunk in images.cpu().split(largest):
            fill = max(0, smallest - len(chunk))
            padded = torch.cat([chunk, chunk[-1:].expand(fill, -1, -1, -1)]) if fill else chunk
            outputs = reference(padded.numpy()), candidate(padded.numpy())
            kept = [[output[: len(chunk)] for output in side] for side in outputs]
            difference = compare.compare_outputs(kept[0], kept[1], "images", (reference.name, candidate.name))
            into.append(difference)
            self._check(difference, "real images: differs")
            gathered.append(kept)
        sides = zip(*gathered, strict=True)
        return [[np.concatenate(parts) for parts in zip(*side, strict=True)] for side in sides]

    def both_graphs(self, plain: onnx.ModelProto, run: bool) -> None:
        """Step 3: the graph with and without the exporter's optimisation."""
        name = "plain and optimised graph agree"
        if not run:
            self.report.gate.append(GateStep(name, None, "not run: quick gate, or no optimisation"))
            return
        with self._step(name) as detail:
            batches = _probe_batches(self.report.batch, full=True)
            count = next((size for size in batches if size >= len(compare.PROBES)), batches[-1])
            before, after = self._runner(plain), self._exported()
            worst = 0.0
            for difference in self._compare(before, after, count):
                if not difference.passed(self.report.tolerance):
                    raise self._fail(
                        f"the exporter's optimisation changes the result for {difference.probe} input"
                    )
                worst = max(worst, difference.relative)
            detail.append(f"worst {worst:.1e} of the largest output")

    def _check(self, difference: compare.Difference, what: str) -> None:
        where = f"for {difference.probe} input at batch {difference.batch}"
        if not difference.finite:
            raise self._fail(f"NaN or infinity in the output {where}")
        if not difference.passed(self.report.tolerance):
            raise self._fail(
                f"{what} by {difference.relative:.1e} of the largest output {where}; "
                f"the limit is {self.report.tolerance:.0e}"
            )

    def _exported(self) -> compare.OnnxRunner:
        return self._runner(self.proto)

    def _runner(self, proto: onnx.ModelProto) -> compare.OnnxRunner:
        if self.prepared.precision == "bf16":
            proto = widened(proto)
        try:
            return compare.OnnxRunner(proto.SerializeToString())
        except Exception as e:  # onnxruntime's exceptions have no common base class
            raise self._fail(f"ONNX Runtime does not load the graph: {first_line(e)}") from e

    def _compare(
        self,
        reference: compare.Runner,
        candidate: compare.Runner,
        count: int,
        probes: Sequence[str] = compare.PROBES,
    ) -> list[compare.Difference]:
        try:
            return compare.compare_probes(
                reference, candidate, count, self.prepared.size, self.prepared.input_dtype, probes
            )
        except ValueError as e:
            raise self._fail(str(e)) from e
        except Exception as e:  # a graph with a hard-coded batch fails inside onnxruntime
            raise self._fail(f"the graph does not run at batch {count}: {first_line(e)}") from e


def _probe_batches(batch: tuple[int, int, int], full: bool) -> list[int]:
    """Batches to test: 1, 2, an odd one and the largest if the profile contains them; quick: 1 and an odd one."""
    smallest, _, largest = batch
    wanted = (smallest, 1, 2, 5, largest) if full else (smallest, 3)
    return sorted({count for count in wanted if smallest <= count <= largest})


def verify_against_eager(prepared: PreparedModel, runner: compare.Runner) -> tuple[str, float]:
    """Compare an engine with eager PyTorch; return the result in words, and the largest relative difference.

    Raises:
        ExportError: the results differ.
    """
    eager = compare.EagerRunner(prepared.original)
    if prepared.precision == "int8" and prepared.samples is not None:  # calibrated for values of real images
        smallest, _, largest = prepared.batch
        chosen = prepared.samples[
            np.arange(max(smallest, min(largest, len(prepared.samples)))) % len(prepared.samples)
        ]
        differences = [compare.compare_runners(eager, runner, chosen, "images")]
    else:
        differences = compare.compare_on_probes(
            eager, runner, prepared.batch, prepared.size, prepared.input_dtype
        )
    for found in differences:
        if not found.passed(prepared.tolerance):
            raise ExportError(
                f"{prepared.name}: {runner.name} differs from eager by {found.relative:.1e} of the largest output for "
                f"{found.probe} input at batch {found.batch}; the limit is {prepared.tolerance:.0e}"
            )
    worst = max(found.relative for found in differences)
    return f"{len(differences)} inputs, worst {worst:.1e} of the largest output", worst
