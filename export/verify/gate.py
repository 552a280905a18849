"""The gate: a graph is written only if it satisfies the rules and its outputs agree with eager PyTorch."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from capszoo.errors import first_line

from .. import compare
from ..passes import int8
from ..prepare import PreparedModel
from ..report import ExportError, ExportReport, GateStep
from .graph_rules import FLOAT32_OPS, HEAVY_OPS, MAX_TENSORRT_OPSET, half_squares, inspect_graph, widened
from .images import RealImages

if TYPE_CHECKING:
    import onnx

#: Minimum top-1 agreement of half precision on real images; float32 requires 1.
MIN_AGREEMENT = 0.995

RULES = "docs/export.md lists the rules for a graph"
DETERMINISTIC = "its forward must not depend on random numbers, nor branch on values of its input"

#: Prints the shapes of the outputs for a batch of 0, or that ONNX Runtime refuses it. Arguments: size, dtype.
_EMPTY_BATCH = """
import sys
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.stdin.buffer.read(), options, providers=["CPUExecutionProvider"])
name = session.get_inputs()[0].name
images = numpy.zeros((0, *(int(n) for n in sys.argv[1].split(","))), sys.argv[2])
try:
    print([list(output.shape) for output in session.run(None, {name: images})])
except Exception as error:
    print("refused", str(error).splitlines()[0][:200])
"""


class Gate:
    """Runs the steps in order, records each in the report and raises at the first failure."""

    def __init__(self, report: ExportReport, prepared: PreparedModel, proto: onnx.ModelProto) -> None:
        self.report, self.prepared, self.proto = report, prepared, proto
        self.say, self.real = prepared.options.say, prepared.options.real_images
        self.full = prepared.options.gate == "full"
        self.eager = compare.EagerRunner(prepared.original)

    @cached_property
    def exported(self) -> compare.OnnxRunner:
        return self._runner(self.proto)

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
                raise self._fail(f"the graph breaks a rule: {problems[0]}", RULES)
            detail.append(
                f"{self.report.num_nodes} nodes, opset {self.report.opset}, rank ≤ {self.report.max_rank}"
            )
            smallest, _, largest = self.report.batch
            free = "only the batch is symbolic" if smallest < largest else "every size is fixed"
            listed = self.report.opset <= MAX_TENSORRT_OPSET
            supported = "operators supported by TensorRT" if listed else "operators not checked for TensorRT"
            detail.append(f"every shape inferred, {free}, {supported}")
            if self.prepared.precision != "fp32":
                wanted = {"fp16": "float16", "bf16": "bfloat16", "int8": "int8"}[self.prepared.precision]
                heavy = [self.report.precision_map["operators"].get(op, {}) for op in HEAVY_OPS]
                half, total = (
                    sum(kinds.get(wanted, 0) for kinds in heavy),
                    sum(sum(k.values()) for k in heavy),
                )
                if half == 0:
                    raise self._fail(f"no convolution or matrix product is {wanted}", "use precision fp32")
                narrow = [
                    op
                    for op, kinds in self.report.precision_map["operators"].items()
                    if op in FLOAT32_OPS and (wanted in kinds or "unknown" in kinds)
                ]
                narrow += half_squares(self.proto)
                if narrow:
                    raise self._fail(
                        f"{', '.join(narrow)} in {wanted}", "compute it in float32 (upcast_half)"
                    )
                detail.append(f"{half} of {total} convolutions and matrix products in {wanted}")

    def parity(self) -> None:
        """Step 2: ONNX Runtime against eager PyTorch."""
        with self._step("parity with eager") as detail:
            for count in _probe_batches(self.report.batch, self.full):
                self.say(f"parity with eager: batch {count}")
                for difference in self._compare(self.eager, self.exported, count, self.full):
                    self.report.comparisons.append(difference)
                    _check(self.prepared, difference, "differs from eager")
            detail.append(
                f"{len(self.report.comparisons)} inputs, worst {self.report.max_rel_diff:.1e} of the largest"
            )
            if not self.full:
                detail.append("quick gate: random and zero input only")
            if self.prepared.precision == "fp16":
                detail.append(
                    "ONNX Runtime's CPU provider computes in float32 where it has no float16 kernel"
                )
            if self.prepared.precision == "bf16":
                detail.append(
                    "run as float32 with the bfloat16 weights: ONNX Runtime's CPU provider has no bfloat16"
                )

    def empty_batch(self) -> None:
        """Step 1, last part: ONNX Runtime gives no rows for no images, in a process of its own, as it may crash."""
        name = "an empty batch gives an empty result"
        smallest, _, largest = self.report.batch
        if not self.full or smallest == largest:
            self.report.gate.append(GateStep(name, None, "not run: quick gate, or a fixed batch"))
            return
        with self._step(name) as detail:
            proto = widened(self.proto) if self.prepared.precision == "bf16" else self.proto
            size = ",".join(map(str, self.prepared.size))
            command = [sys.executable, "-c", _EMPTY_BATCH, size, self.prepared.input_dtype]
            process = subprocess.run(
                command, input=proto.SerializeToString(), capture_output=True, check=False
            )
            answer = process.stdout.decode().strip()
            if process.returncode or not answer:
                remedy = "fix the batch with a profile of one number"
                raise self._fail("ONNX Runtime crashes on an empty batch", remedy)
            if answer.startswith("refused"):
                detail.append(f"ONNX Runtime raises an error: {answer.removeprefix('refused ')}")
                return
            wanted = [[0, *shape[1:]] for shape in self.report.outputs.values()]
            if answer != str(wanted):
                raise self._fail(f"an empty batch gives {answer} in ONNX Runtime, not {wanted}")
            detail.append(answer)

    def finite(self) -> None:
        """Step 2 for int8: beyond the calibrated ranges values are clipped, but never NaN; every batch runs."""
        with self._step("finite on every probe") as detail:
            differences = []
            for count in _probe_batches(self.report.batch, full=True):
                differences += self._compare(self.eager, self.exported, count)
            for difference in differences:
                _check_finite(self.prepared, difference)
            detail.append(f"{len(differences)} inputs")

    def half_in_pytorch(self) -> None:
        """Step 2 for half precision: its loss, computed in PyTorch in the same precision."""
        if self.prepared.precision == "fp32":
            return
        with self._step(f"{self.prepared.precision} in PyTorch") as detail:
            half = compare.EagerRunner(self.prepared.served, "gpu")
            half.name = f"eager {self.prepared.precision}"
            count = _probe_batches(self.report.batch, full=False)[-1]
            differences = self._compare(self.eager, half, count, self.full)
            for difference in differences:
                _check(self.prepared, difference, f"{self.prepared.precision} differs from float32")
            detail.append(f"worst {max(d.relative for d in differences):.1e} of the largest output")
            if self.real is not None:
                detail.append(_on_images(self.prepared, self.eager, half, self.real, differences, {}))
            self.report.half_comparisons.extend(differences)

    def real_images(self) -> None:
        """Step 2, last part: equal top-1 on real images; of int8 its loss of accuracy."""
        name = f"{'accuracy' if self.prepared.precision == 'int8' else 'top-1'} on real images"
        if self.real is None:
            self.report.gate.append(GateStep(name, None, "not run: no images given"))
            return
        with self._step(name) as detail:
            into, figures = self.report.comparisons, self.report.accuracy
            detail.append(_on_images(self.prepared, self.eager, self.exported, self.real, into, figures))

    def both_graphs(self, plain: onnx.ModelProto) -> None:
        """Step 3: the graph with and without the exporter's optimisation."""
        name = "plain and optimised graph agree"
        if not self.full or plain is self.proto:
            self.report.gate.append(GateStep(name, None, "not run: quick gate, or no optimisation"))
            return
        with self._step(name) as detail:
            batches = _probe_batches(self.report.batch, full=True)
            count = next((size for size in batches if size >= len(self.prepared.probes)), batches[-1])
            worst = 0.0
            for difference in self._compare(self._runner(plain), self.exported, count):
                if not difference.passed(self.report.tolerance):
                    raise self._fail(
                        f"the exporter's optimisation changes the result for {difference.probe} input",
                        "install another version of onnxscript, whose optimisation it is",
                    )
                worst = max(worst, difference.relative)
            detail.append(f"worst {worst:.1e} of the largest output")

    def _runner(self, proto: onnx.ModelProto) -> compare.OnnxRunner:
        if self.prepared.precision == "bf16":
            proto = widened(proto)
        try:
            return compare.OnnxRunner(proto.SerializeToString())
        except Exception as e:  # onnxruntime's exceptions have no common base class
            raise self._fail(f"ONNX Runtime does not load the graph: {first_line(e)}", RULES) from e

    def _compare(
        self, reference: compare.Runner, candidate: compare.Runner, count: int, full: bool = True
    ) -> list[compare.Difference]:
        try:
            return _on_probes(self.prepared, reference, candidate, count, full)
        except ValueError as e:
            raise self._fail(str(e)) from e
        except Exception as e:  # a graph with a hard-coded batch fails inside onnxruntime
            remedy = "write its forward for any batch size, or fix the batch with a profile of one number"
            raise self._fail(f"the graph does not run at batch {count}: {first_line(e)}", remedy) from e


def _on_probes(
    prepared: PreparedModel,
    reference: compare.Runner,
    candidate: compare.Runner,
    count: int,
    full: bool = True,
) -> list[compare.Difference]:
    """Compare two runners at a batch size; without ``full`` on the two probes of the quick gate."""
    probes = prepared.probes if full else prepared.probes[:2]
    size, dtype, scores, span = prepared.size, prepared.input_dtype, prepared.scores_at, prepared.span
    return compare.compare_probes(reference, candidate, count, size, dtype, probes, scores, span)


def _probe_batches(batch: tuple[int, int, int], full: bool) -> list[int]:
    """Batches to test: 1, 2, an odd one and the largest if the profile contains them; quick: two of them."""
    smallest, _, largest = batch
    wanted = (smallest, 1, 2, 5, largest) if full else (smallest, max(3, smallest + 1), largest)
    batches = sorted({count for count in wanted if smallest <= count <= largest})
    return batches if full else batches[:2]


def _check_finite(prepared: PreparedModel, difference: compare.Difference) -> None:
    if not difference.finite:
        remedy = _remedy(prepared, "check the module's own output for such an input")
        if prepared.precision == "fp16":
            remedy = "use precision bf16, which has the range of float32, or fp32"
        raise ExportError(
            f"{prepared.name}: NaN or infinity in the output for {difference.probe} input at batch {difference.batch}",
            remedy,
        )


def _check(prepared: PreparedModel, difference: compare.Difference, what: str) -> None:
    _check_finite(prepared, difference)
    if not difference.passed(prepared.tolerance):
        raise ExportError(
            f"{prepared.name}: {what} by {difference.relative:.1e} of the largest output for {difference.probe} input "
            f"at batch {difference.batch}; the limit is {prepared.tolerance:g}",
            _remedy(prepared, DETERMINISTIC),
        )


def _remedy(prepared: PreparedModel, for_float32: str) -> str:
    return for_float32 if prepared.precision == "fp32" else "use precision fp32"


def _on_images(
    prepared: PreparedModel,
    reference: compare.Runner,
    candidate: compare.Runner,
    real: RealImages,
    into: list[compare.Difference],
    figures: dict[str, float],
) -> str:
    """Compare two runners on real images, batch by batch; half precision may change 0.5% of the predictions.

    Args:
        prepared: the model.
        reference, candidate: the runners.
        real: the images.
        into: receives the differences.
        figures: receives int8's accuracy, if the classes are known.
    """
    names, gathered = (reference.name, candidate.name), []
    for outputs in compare.run_in_batches((reference, candidate), real.images.cpu().numpy(), prepared.batch):
        difference = compare.compare_outputs(outputs[0], outputs[1], "images", names, prepared.scores_at)
        into.append(difference)
        _check(prepared, difference, "real images: differs")
        gathered.append(outputs)
    at = prepared.scores_at
    if at is None:
        return f"{len(real)} images, top-1 not compared: the scores are not among the outputs"
    before, after = (side[at] for side in compare.joined(gathered))
    guesses = before.argmax(1), after.argmax(1)
    if prepared.precision == "int8":
        return _int8_loss(prepared, guesses, before.shape[1], real, figures)
    equal = guesses[0] == guesses[1]
    agreement, least = float(equal.mean()), 1.0 if prepared.precision == "fp32" else MIN_AGREEMENT
    if agreement < least:
        raise ExportError(
            f"{prepared.name}: real images: top-1 agrees on {agreement:.2%}; the limit is {least:.1%}",
            _remedy(prepared, DETERMINISTIC),
        )
    return f"{len(real)} images, top-1 equal on {'all' if equal.all() else f'{agreement:.2%}'}"


def _int8_loss(
    prepared: PreparedModel,
    guesses: tuple[np.ndarray, np.ndarray],
    classes: int,
    real: RealImages,
    figures: dict[str, float],
) -> str:
    """Loss of accuracy by int8, in words and, with known classes, in figures.

    The share of changed predictions takes its place without classes, and where float32 is no better than chance:
    such labels do not fit the model, and no loss could be seen with them.
    """
    turned = 100 * float((guesses[0] != guesses[1]).mean())
    changed = f"{turned:.2f}% of the predictions changed"
    if real.labels is None:
        lost, counts = turned, f"{len(real)} images of unknown classes, {changed}"
    else:
        right = [100 * float((guess == real.labels.numpy()).mean()) for guess in guesses]
        lost = right[0] - right[1]
        figures.update(eager=right[0], int8=right[1], lost=lost, images=len(real), turned=turned)
        counts = f"{len(real)} images, {right[0]:.2f}% right in float32, {right[1]:.2f}% in int8, {changed}"
        chance = 1 / classes
        if right[0] / 100 <= chance + 3 * math.sqrt(chance * (1 - chance) / len(real)):
            lost, counts = turned, f"{counts}; float32 is no better than chance"
    if lost > int8.MAX_LOSS + 1e-9:
        raise ExportError(
            f"{prepared.name}: int8 loses {lost:.2f} points on {len(real)} real images; the limit is "
            f"{int8.MAX_LOSS} ({counts})",
            "calibrate with more images, or use fp16",
        )
    return counts


def verify_against_eager(prepared: PreparedModel, runner: compare.Runner) -> tuple[str, float]:
    """Compare an engine with eager PyTorch, on the probes and on the real images of the options.

    int8 is calibrated for values of real images: on probes its output must only be finite.

    Returns:
        The result in words, and the largest relative difference.

    Raises:
        ExportError: the results differ.
    """
    eager, real = compare.EagerRunner(prepared.original), prepared.options.real_images
    batches = sorted(set(prepared.batch))
    probes = [found for count in batches for found in _on_probes(prepared, eager, runner, count)]
    for difference in probes:
        if prepared.precision == "int8":
            _check_finite(prepared, difference)
        else:
            _check(prepared, difference, f"{runner.name} differs from eager")
    counted = [] if prepared.precision == "int8" else probes
    details = [f"{len(probes)} inputs" + ("" if counted else " finite")]
    if real is not None:
        on_images: list[compare.Difference] = []
        details.append(_on_images(prepared, eager, runner, real, on_images, {}))
        counted = [*counted, *on_images]
    worst = max((difference.relative for difference in counted), default=float("nan"))
    details.append(f"worst {worst:.1e} of the largest output")
    return ", ".join(details), worst
