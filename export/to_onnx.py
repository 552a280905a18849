"""A model as an ONNX file, written only once it has been proved equal to the original.

>>> from capszoo.export.to_onnx import export
>>> report = export("resnet20_routingcaps", "digits.onnx")
>>> report.passed, report.opset, report.max_rel_diff

The model is prepared (:mod:`capszoo.export.unroll`), exported through ``torch.export`` with a symbolic batch, stripped
of the exporter's notes (they hold source paths) and put through the gate: structure, parity with eager PyTorch in
ONNX Runtime, agreement of the optimised graph with the plain one. A step that fails raises :class:`ExportError`; the
file appears under its name only after the last step.
"""

from __future__ import annotations

import copy
import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn as nn

from capszoo.errors import CapszooError, UsageError, require
from capszoo.models._base import NoCapsules
from capszoo.preprocess import model_input_size, model_transform

from . import compare, int8, unroll
from ._workplace import workplace
from .images import RealImages

if TYPE_CHECKING:
    import onnx

__all__ = [
    "ExportError",
    "ExportReport",
    "FORBIDDEN_OPS",
    "GateStep",
    "Job",
    "MAX_RANK",
    "MIN_AGREEMENT",
    "OUTPUTS",
    "PRECISIONS",
    "SUPPORTED_OPS",
    "TOLERANCES",
    "export",
    "inspect_graph",
    "prepare",
    "write",
]

#: Limit of ours; TensorRT's is 8 dimensions.
MAX_RANK = 6

#: Control flow, and operators that TensorRT refuses, runs slowly or imports naively.
FORBIDDEN_OPS = frozenset(
    ("Loop", "If", "Scan", "Einsum", "NonZero", "ReduceLogSumExp", "GatherND", "ScatterND", "SequenceMap")
)

#: Operators of the default ONNX domain that NVIDIA's ONNX parser supports according to its table for TensorRT 10.15,
#: opsets 9 to 24 (github.com/onnx/onnx-tensorrt, docs/operators.md), less the forbidden ones, those that came with
#: opset 23 or later (TensorRT 10.0 ends at 20), and what no classifier needs: recurrent layers, random numbers, signal
#: windows, box selection.
SUPPORTED_OPS = frozenset(
    """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast Ceil Celu Clip
    Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Div Dropout Elu
    Equal Erf Exp Expand EyeLike Flatten Floor Gather GatherElements Gelu Gemm GlobalAveragePool GlobalLpPool
    GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish Identity
    InstanceNormalization IsNaN LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpNormalization LpPool
    LRN MatMul Max MaxPool Mean MeanVarianceNormalization Min Mod Mul Neg Not OneHot Or Pad Pow PRelu QuantizeLinear
    Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign Round ScatterElements Selu Shape Shrink Sigmoid
    Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh
    ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Where Xor
    """.split()
)

GATES = ("full", "quick")

#: What the model computes in before the graph is made; int8 is put into the graph afterwards.
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32}

#: Allowed difference as a share of the largest output. Those of bf16, with its 8 bits, and of int8, on real images
#: only, are our choice; int8 is held to its accuracy besides.
TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2, "int8": 0.25}

#: Share of real images whose top-1 half precision must keep; float32 keeps all.
MIN_AGREEMENT = 0.995

#: From so many nodes on the exporter's optimisation is kept from quadratic time.
_MANY_NODES = 2000

#: Operators that do the arithmetic.
_HEAVY = ("Conv", "Gemm", "MatMul")

#: Operators of norms, softmax and variances, which stay float32: float16 overflows at a norm of 256.
_FLOAT32_OPS = frozenset(
    "Exp Log LogSoftmax Pow Reciprocal ReduceL2 ReduceSumSquare Softmax Softplus Sqrt".split()
)


class ExportError(CapszooError, RuntimeError):
    """A model could not be exported, or failed a step of the gate; no file was written.

    Attributes:
        report: what was found up to the failing step, or None where there was no graph yet.
    """

    def __init__(self, message: str, remedy: str = "", report: ExportReport | None = None) -> None:
        super().__init__(message, remedy)
        self.report = report


@dataclass(frozen=True)
class GateStep:
    """One step of the gate; ``passed`` is None where it was not run, with the reason in ``detail``."""

    name: str
    passed: bool | None
    detail: str
    seconds: float = 0.0


@dataclass
class ExportReport:
    """What was exported and what has been proved about it.

    Attributes:
        path: the ONNX file.
        model: name or class of the model.
        opset: opset of the file, read back from it.
        ir_version: ONNX IR version.
        input_name, input_shape: the input; its first entry is ``"batch"`` or the fixed batch.
        outputs: output name → shape, in order.
        batch: profile (smallest, usual, largest batch).
        routing_iters: distinct iteration counts that the graph holds unrolled.
        node_types: operator → count.
        max_rank: dimensions of the largest tensor.
        file_bytes: size of the file.
        versions: library → version that made and checked the file.
        precision: ``fp32``, ``fp16``, ``bf16`` or ``int8``.
        input_dtype: ``float32`` or ``uint8``.
        precision_map: ``operators``: operator → type → count; ``weights``: type → numbers stored.
        comparisons: ONNX Runtime against eager PyTorch, one per probe and batch.
        half_comparisons: half precision against float32, both in eager PyTorch.
        float_comparisons: int8: the graph before quantisation against eager PyTorch.
        accuracy: int8, where the classes are known: ``eager``, ``int8`` and ``lost`` in points, ``images``.
        gate: the steps, run and not run.
    """

    path: str
    model: str
    opset: int
    ir_version: int
    input_name: str
    input_shape: tuple[int | str, ...]
    outputs: dict[str, tuple[int | str, ...]]
    batch: tuple[int, int, int]
    routing_iters: list[int]
    node_types: dict[str, int]
    max_rank: int
    file_bytes: int
    tolerance: float
    versions: dict[str, str]
    precision: str = "fp32"
    input_dtype: str = "float32"
    precision_map: dict[str, dict[str, Any]] = field(default_factory=dict)
    comparisons: list[compare.Difference] = field(default_factory=list)
    half_comparisons: list[compare.Difference] = field(default_factory=list)
    float_comparisons: list[compare.Difference] = field(default_factory=list)
    accuracy: dict[str, float] = field(default_factory=dict)
    gate: list[GateStep] = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        return sum(self.node_types.values())

    @property
    def max_abs_diff(self) -> float:
        """Largest absolute difference over all comparisons; NaN where a value was not finite or nothing was run."""
        return _worst([d.max_abs for d in self.comparisons])

    @property
    def max_rel_diff(self) -> float:
        """Largest difference as a share of the largest output, over all comparisons."""
        return _worst([d.relative for d in self.comparisons])

    @property
    def diffs(self) -> dict[str, float]:
        """Probe → largest relative difference over its batches."""
        probes = dict.fromkeys(d.probe for d in self.comparisons)
        return {p: _worst([d.relative for d in self.comparisons if d.probe == p]) for p in probes}

    @property
    def passed(self) -> bool:
        """Whether steps were run and none failed."""
        return any(step.passed for step in self.gate) and all(step.passed is not False for step in self.gate)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        figures = dict(
            num_nodes=self.num_nodes,
            max_abs_diff=self.max_abs_diff,
            max_rel_diff=self.max_rel_diff,
            passed=self.passed,
        )
        return {**asdict(self), **figures}


def export(
    model: nn.Module | str,
    path: str | os.PathLike[str],
    *,
    name: str = "",
    pretrained: bool = True,
    routing_iters: int | None = None,
    outputs: Sequence[str] = ("scores",),
    opset: int | None = None,
    batch: tuple[int, int, int] | int = (1, 8, 32),
    dynamic_batch: bool = True,
    input_size: tuple[int, int, int] | None = None,
    precision: str = "fp32",
    uint8_input: bool = False,
    optimize: bool = True,
    check: bool = True,
    gate: str = "full",
    tolerance: float | None = None,
    images: torch.Tensor | RealImages | None = None,
    calibration: torch.Tensor | RealImages | None = None,
    progress: Callable[[str], None] | None = None,
) -> ExportReport:
    """Export a classifier to ONNX and prove it equal to the original.

    Args:
        model: a module (left as it is), or a name that ``capszoo.create_model`` takes.
        path: file to write.
        name: what the report and the messages call a module; its class where empty.
        pretrained: for a model given by name: load its weights; False exports freshly initialised ones.
        routing_iters: iterations to unroll; None keeps the model's own.
        outputs: any of ``scores``, ``poses``, ``activations``, ``couplings``; all but the first need a capsule
            network of the zoo. Couplings become one output per routing layer.
        opset: ONNX opset; refused where the exporter would silently take another. None: 20, for bf16 22 (the first
            whose convolution takes bfloat16).
        batch: (smallest, usual, largest) batch the file must serve; one number fixes the batch.
        dynamic_batch: False fixes the batch at the usual one.
        input_size: channels, height and width; None takes the model's own.
        precision: ``fp32``, ``fp16``, ``bf16`` or ``int8``; inputs and outputs stay float32, as do norms, squash,
            softmax logits and EM variances. With ``int8`` convolutions and large linear layers outside of the routing
            compute in it (:mod:`capszoo.export.int8`).
        uint8_input: take images as uint8 and normalise them inside the graph.
        optimize: let the exporter fold constants and simplify.
        check: run the gate; without it the report says that nothing was proved.
        gate: ``full`` (all probes, batches 1, 2, odd, largest; both graphs) or ``quick`` (random and zero input at
            batch 1 and an odd one).
        tolerance: allowed difference as a share of the largest output; None takes :data:`TOLERANCES`.
        images: real images ``[b, c, h, w]`` as the graph takes them (normalised, or uint8); if given, their top-1
            must agree. For int8 they are needed: it may lose 0.5 points on them (where their classes are not known,
            turn as many answers).
        calibration: real images that give int8 its ranges; others than ``images``.
        progress: called with one line before each step.

    Returns:
        The report; ``passed`` is True.

    Raises:
        ExportError: the model cannot be exported or failed the gate; nothing was written.
        UsageError: arguments that make no sense.
    """
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{target} is a folder", "give the name of a file, such as model.onnx")
    job = prepare(
        model,
        name=name,
        pretrained=pretrained,
        routing_iters=routing_iters,
        outputs=outputs,
        batch=batch,
        dynamic_batch=dynamic_batch,
        input_size=input_size,
        precision=precision,
        uint8_input=uint8_input,
        tolerance=tolerance,
        progress=progress,
    )
    return write(
        job,
        target,
        opset=opset,
        optimize=optimize,
        check=check,
        gate=gate,
        images=images,
        calibration=calibration,
        progress=progress,
    )


@dataclass
class Job:
    """A model prepared for export, with the original that every result is held against.

    Attributes:
        name: of the model.
        original: float32, unprepared, with the interface of the graph; routes as often as the graph does.
        served: what is exported.
        size: channels, height, width.
        output_names: of the graph.
        batch: smallest, usual, largest.
        precision: of ``served``.
        tolerance: allowed difference as a share of the largest output.
        routing_iters: distinct iteration counts.
        samples: some of the real images that the gate was given.
    """

    name: str
    original: nn.Module
    served: nn.Module
    size: tuple[int, int, int]
    output_names: list[str]
    batch: tuple[int, int, int]
    precision: str
    tolerance: float
    routing_iters: list[int]
    samples: np.ndarray | None = None

    @property
    def input_dtype(self) -> str:
        """``float32`` or ``uint8``."""
        dtype = getattr(self.served, "input_dtype", torch.float32)
        return str(dtype).removeprefix("torch.")

    def trace(self) -> torch.export.ExportedProgram:
        """The ``torch.export`` program, with a symbolic batch unless the profile fixes it.

        Raises:
            ExportError: the model cannot be traced.
        """
        smallest, usual, largest = self.batch
        # torch.export takes a batch of 1 for a constant: trace with 2 where the batch is to stay free
        count = usual if smallest == largest else 2
        dtype = torch.uint8 if self.input_dtype == "uint8" else torch.float32
        example = torch.zeros(count, *self.size, dtype=dtype, device=next(self.served.parameters()).device)
        with _quiet():
            try:
                return torch.export.export(
                    self.served, (example,), dynamic_shapes=self.dynamic_shapes(), strict=False
                )
            except Exception as e:  # torch raises many kinds here, several without a common base
                if "Constraints violated" in str(e):
                    raise ExportError(
                        f"{self.name}: its forward turns the batch size into a number",
                        "keep x.shape[0] as it is (no int(), no len())",
                    ) from e
                raise ExportError(f"{self.name}: torch.export cannot trace it: {_first_line(e)}") from e

    def dynamic_shapes(self) -> Any:
        smallest, _, largest = self.batch
        return None if smallest == largest else ({0: torch.export.Dim("batch", min=1, max=max(largest, 2))},)


def prepare(
    model: nn.Module | str,
    *,
    name: str = "",
    pretrained: bool = True,
    routing_iters: int | None = None,
    outputs: Sequence[str] = ("scores",),
    batch: tuple[int, int, int] | int = (1, 8, 32),
    dynamic_batch: bool = True,
    input_size: tuple[int, int, int] | None = None,
    precision: str = "fp32",
    uint8_input: bool = False,
    tolerance: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Job:
    """Prepare a model for export, whatever the format; arguments as for :func:`export`.

    Raises:
        ExportError: a model that cannot be exported.
        UsageError: arguments that make no sense.
    """
    profile = _batch_profile(batch, dynamic_batch)
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision '{precision}'", f"use {', '.join(PRECISIONS)}")
    if isinstance(model, str):
        import capszoo

        name, model = name or model, capszoo.create_model(model, pretrained=pretrained)
    name = name or type(model).__name__
    bad = unroll.non_finite_weights(model)
    if bad:
        raise ExportError(f"{name}: weights hold NaN or infinity ({', '.join(bad[:3])})", "train it again")
    if any(p.dtype != torch.float32 for p in model.parameters()):
        raise ExportError(f"{name}: only float32 models are exported", "call model.float() first")
    size = input_size or model_input_size(model)
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    if uint8_input:
        transform = model_transform(model)
        mean, std = transform.mean, transform.std
    dtype = PRECISIONS[precision]
    if progress:
        progress("preparing")
    _check_outputs(model, outputs)
    with _evaluating(model):
        # the reference must route as often as the graph does, but stay as unprepared as the user's model
        original = copy.deepcopy(model)
        if routing_iters is not None:
            unroll.set_routing_iterations(original, routing_iters)
        served = unroll.prepare_for_export(model, routing_iters).cpu()
        output_names = _output_names(model, outputs, size)
    plain = tuple(outputs) == ("scores",) and not mean
    return Job(
        name=name,
        original=original if plain else unroll.Served(original, outputs, mean, std).eval(),
        served=served
        if plain and dtype == torch.float32
        else unroll.Served(served, outputs, mean, std, dtype).eval(),
        size=size,
        output_names=output_names,
        batch=profile,
        precision=precision,
        tolerance=TOLERANCES[precision] if tolerance is None else tolerance,
        routing_iters=unroll.routing_iterations(served),
    )


def write(
    job: Job,
    path: str | os.PathLike[str],
    *,
    opset: int | None = None,
    optimize: bool = True,
    check: bool = True,
    gate: str = "full",
    images: torch.Tensor | RealImages | None = None,
    calibration: torch.Tensor | RealImages | None = None,
    progress: Callable[[str], None] | None = None,
) -> ExportReport:
    """Write a prepared model as ONNX, through the gate; arguments as for :func:`export`."""
    if gate not in GATES:
        raise UsageError(f"unknown gate '{gate}'", f"use {' or '.join(GATES)}")
    real, ranges = _real(images), _real(calibration)
    if job.precision == "int8":
        _check_int8(real, ranges, check)
    elif ranges is not None:
        raise UsageError(
            f"{job.precision} is not calibrated", "ask for int8, or leave the calibration images out"
        )
    opset = opset or (22 if job.precision == "bf16" else 20)
    _require_libraries(check or job.precision == "int8")
    target, name = Path(path), job.name
    job.samples = None if real is None else real.images[:32].cpu().numpy()
    say = progress or (lambda line: None)
    say("tracing")
    program = _to_onnx_program(job, opset)
    proto = _stripped(program.model_proto)  # plain: before the exporter's optimisation
    plain = proto
    if optimize:
        say("optimising")
        with _linear_rewriting(len(plain.graph.node)):
            program.optimize()
        proto = _stripped(program.model_proto)
    report = _describe(proto, target, job)
    if report.opset != opset:
        raise ExportError(
            f"{name}: asked for opset {opset}, the exporter wrote {report.opset}",
            "ask for an opset from 18 on that torch.onnx knows",
            report,
        )
    if job.precision == "int8":
        assert ranges is not None
        proto, report = _quantised(job, proto, plain if check else None, target, gate, real, ranges, say)
    with workplace(target, folder=False) as temporary:
        data = proto.SerializeToString()
        temporary.write_bytes(data)
        report.file_bytes = len(data)
        if check:
            session = _Gate(report, job, proto, say)
            session.structure()
            if job.precision == "int8":
                assert real is not None
                session.finite()
                session.accuracy(real)
            else:
                session.parity(full=gate == "full")
                session.half_in_pytorch(real)
                session.real_images(real)
                session.both_graphs(plain, run=gate == "full" and optimize)
        else:
            report.gate.append(GateStep("gate", None, "not run: check=False"))
        os.replace(temporary, target)
    return report


def _real(images: torch.Tensor | RealImages | None) -> RealImages | None:
    return RealImages(images, None, "given") if isinstance(images, torch.Tensor) else images


def _check_int8(images: RealImages | None, calibration: RealImages | None, check: bool) -> None:
    if calibration is None or len(calibration) < int8.MIN_CALIBRATION:
        have = "none" if calibration is None else str(len(calibration))
        raise UsageError(
            f"int8 needs at least {int8.MIN_CALIBRATION} real images to calibrate it, there are {have}",
            "--calibrate names a folder of them, or a data set",
        )
    if images is None and check:
        raise UsageError(
            "int8 needs real images that measure what it costs", "--verify-data names a folder, or a data set"
        )


def _quantised(
    job: Job,
    proto: onnx.ModelProto,
    plain: onnx.ModelProto | None,
    target: Path,
    gate: str,
    images: RealImages | None,
    calibration: RealImages,
    say: Callable[[str], None],
) -> tuple[onnx.ModelProto, ExportReport]:
    """Quantise a float32 graph; with ``plain`` (unoptimised) given, prove that graph equal to eager first."""
    before = replace(job, precision="fp32", tolerance=TOLERANCES["fp32"])
    proved = _describe(proto, target, before)
    if plain is not None:
        session = _Gate(proved, before, proto, say)
        session.structure()
        session.parity(full=gate == "full")
        session.real_images(images)
        session.both_graphs(plain, run=gate == "full" and plain is not proto)
    say("quantising")
    _check_dtype(calibration.images, job)
    weights = int8.plain_layers(job.served)
    if not int8.quantisable(proto, weights):
        raise ExportError(f"{job.name}: no convolution or large linear layer to compute in int8", "use fp16")
    try:
        quantised = int8.quantise(proto, weights, calibration.images, job.batch)
    except Exception as e:  # onnxruntime's exceptions have no common base class of their own
        raise ExportError(f"{job.name}: ONNX Runtime cannot quantise it: {_first_line(e)}") from e
    report = _describe(_stripped(quantised), target, job)
    report.float_comparisons = proved.comparisons
    report.gate = [replace(step, name=f"before quantisation: {step.name}") for step in proved.gate]
    detail = f"{len(calibration)} images, {calibration.source}"
    report.gate.append(GateStep("calibration", True, detail))
    return quantised, report


# -- the gate ---------------------------------------------------------------------------------------------------


class _Gate:
    """Runs the steps in order, notes each in the report and raises at the first that fails."""

    def __init__(
        self, report: ExportReport, job: Job, proto: onnx.ModelProto, say: Callable[[str], None]
    ) -> None:
        self.report, self.job, self.proto, self.say = report, job, proto, say

    @contextmanager
    def _step(self, name: str) -> Iterator[list[str]]:
        """Collects the step's detail; an ExportError raised inside marks it as failed."""
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
        """Step 1: the checker, strict shape inference, ranks, operators, types."""
        with self._step("structure") as detail:
            problems = inspect_graph(self.proto, self.report.batch)
            if problems:
                raise self._fail(f"the graph breaks a rule: {problems[0]}")
            detail.append(
                f"{self.report.num_nodes} nodes, opset {self.report.opset}, rank ≤ {self.report.max_rank}"
            )
            detail.append("every shape inferred, only the batch is symbolic, operators supported by TensorRT")
            if self.job.precision != "fp32":
                wanted = {"fp16": "float16", "bf16": "bfloat16", "int8": "int8"}[self.job.precision]
                heavy = [self.report.precision_map["operators"].get(op, {}) for op in _HEAVY]
                half, total = (
                    sum(kinds.get(wanted, 0) for kinds in heavy),
                    sum(sum(k.values()) for k in heavy),
                )
                if half == 0:
                    raise self._fail(f"no convolution or matrix product is {wanted}")
                narrow = [
                    op
                    for op, kinds in self.report.precision_map["operators"].items()
                    if op in _FLOAT32_OPS and wanted in kinds
                ]
                if narrow:
                    raise self._fail(
                        f"{', '.join(narrow)} in {wanted}", "compute it in float32 (upcast_half)"
                    )
                detail.append(f"{half} of {total} convolutions and matrix products in {wanted}")

    def parity(self, full: bool) -> None:
        """Step 2: ONNX Runtime against eager PyTorch."""
        with self._step("parity with eager") as detail:
            eager, runtime = compare.EagerRunner(self.job.original), self._exported()
            probes = compare.PROBES if full else compare.PROBES[:2]
            for count in _probe_batches(self.report.batch, full):
                self.say(f"parity with eager: batch {count}")
                for difference in self._compare(eager, runtime, count, probes):
                    self.report.comparisons.append(difference)
                    self._hold(difference, "differs from eager")
            detail.append(
                f"{len(self.report.comparisons)} inputs, worst {self.report.max_rel_diff:.1e} of the largest"
            )
            if not full:
                detail.append("quick gate: random and zero input only")
            if self.job.precision == "fp16":
                detail.append(
                    "ONNX Runtime's CPU provider computes in float32 where it has no float16 kernel"
                )
            if self.job.precision == "bf16":
                detail.append(
                    "run as float32 with the bfloat16 weights: ONNX Runtime's CPU provider has no bfloat16"
                )

    def finite(self) -> None:
        """Step 2 for int8: far from the calibrated ranges values are cut off, but never NaN; every batch runs."""
        with self._step("finite on every probe") as detail:
            eager, runtime = compare.EagerRunner(self.job.original), self._exported()
            found = []
            for count in _probe_batches(self.report.batch, full=True):
                found += self._compare(eager, runtime, count)
            for difference in found:
                if not difference.finite:
                    where = f"{difference.probe} input at batch {difference.batch}"
                    raise self._fail(f"NaN or infinity in the output for {where}")
            detail.append(f"{len(found)} inputs")

    def accuracy(self, real: RealImages) -> None:
        """Step 2 for int8: what it costs on real images; without their classes, how many answers it turns."""
        with self._step("accuracy on real images") as detail:
            eager, runtime = compare.EagerRunner(self.job.original), self._exported()
            answers = self._on_images(eager, runtime, real.images, self.report.comparisons)
            at = self.job.output_names.index("scores") if "scores" in self.job.output_names else 0
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
        """Step 2 for half precision: what is lost to it, computed in PyTorch in that very precision."""
        if self.job.precision == "fp32":
            return
        with self._step(f"{self.job.precision} in PyTorch") as detail:
            eager, half = compare.EagerRunner(self.job.original), compare.EagerRunner(self.job.served)
            half.name = f"eager {self.job.precision}"
            count = _probe_batches(self.report.batch, full=False)[-1]
            differences = self._compare(eager, half, count)
            for difference in differences:
                self._hold(difference, f"{self.job.precision} differs from float32")
            detail.append(f"worst {max(d.relative for d in differences):.1e} of the largest output")
            if images is not None:
                detail.append(self._same_answers(eager, half, images, differences))
            self.report.half_comparisons.extend(differences)

    def real_images(self, images: RealImages | None) -> None:
        """Step 2, last part: the same top-1 on real images."""
        name = "top-1 on real images"
        if images is None:
            self.report.gate.append(GateStep(name, None, "not run: no images given"))
            return
        with self._step(name) as detail:
            eager, runtime = compare.EagerRunner(self.job.original), self._exported()
            detail.append(self._same_answers(eager, runtime, images, self.report.comparisons))

    def _same_answers(
        self,
        reference: compare.Runner,
        candidate: compare.Runner,
        real: RealImages,
        into: list[compare.Difference],
    ) -> str:
        """Hold two runners together on real images; half precision may turn 0.5% of the answers."""
        first = len(into)
        self._on_images(reference, candidate, real.images, into)
        equal = sum(round(found.top1_agreement * found.batch) for found in into[first:])
        agreement, least = equal / len(real), 1.0 if self.job.precision == "fp32" else MIN_AGREEMENT
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
        _check_dtype(images, self.job)
        smallest, _, largest = self.report.batch
        gathered: list[list[list[np.ndarray]]] = []
        for chunk in images.cpu().split(largest):
            fill = max(0, smallest - len(chunk))
            padded = torch.cat([chunk, chunk[-1:].expand(fill, -1, -1, -1)]) if fill else chunk
            outputs = reference(padded.numpy()), candidate(padded.numpy())
            kept = [[output[: len(chunk)] for output in side] for side in outputs]
            difference = compare.compare_outputs(kept[0], kept[1], "images", (reference.name, candidate.name))
            into.append(difference)
            self._hold(difference, "real images: differs")
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

    def _hold(self, difference: compare.Difference, what: str) -> None:
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
        if self.job.precision == "bf16":
            proto = _widened(proto)
        try:
            return compare.OnnxRunner(proto.SerializeToString())
        except Exception as e:  # onnxruntime's exceptions have no common base class of their own
            raise self._fail(f"ONNX Runtime does not load the graph: {_first_line(e)}") from e

    def _compare(
        self,
        reference: compare.Runner,
        candidate: compare.Runner,
        count: int,
        probes: Sequence[str] = compare.PROBES,
    ) -> list[compare.Difference]:
        try:
            return compare.compare_probes(
                reference, candidate, count, self.job.size, self.job.input_dtype, probes
            )
        except ValueError as e:
            raise self._fail(str(e)) from e
        except Exception as e:  # a graph that froze its batch fails inside onnxruntime
            raise self._fail(f"the graph does not run at batch {count}: {_first_line(e)}") from e


def inspect_graph(proto: onnx.ModelProto, batch: tuple[int, int, int] = (1, 8, 32)) -> list[str]:
    """What the graph does that our rules forbid, one line each; empty if nothing.

    Shapes are inferred from nothing but the input at a fixed odd batch, so that the exporter's own annotations prove
    nothing: every tensor must then have a number in every place, and as many as :data:`MAX_RANK` places.
    """
    import onnx

    problems: list[str] = []
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as e:
        return [f"onnx.checker: {_first_line(e)}"]

    used = _node_types(proto)
    for node_type in sorted(used):
        if node_type in FORBIDDEN_OPS:
            problems.append(f"operator {node_type} ({used[node_type]}x) is not allowed")
        elif node_type not in SUPPORTED_OPS:
            problems.append(f"operator {node_type} is not on the list of operators that TensorRT supports")
    if proto.functions:
        problems.append(f"{len(proto.functions)} local functions")
    if any(node.metadata_props for node in proto.graph.node):
        problems.append("nodes carry the exporter's metadata")

    for value in [*proto.graph.input, *proto.graph.output]:
        shape = _shape(value)
        fixed = shape[0] == batch[1] if batch[0] == batch[2] else isinstance(shape[0], str)
        if not fixed and value in proto.graph.input:
            problems.append(f"the batch of {value.name} is {shape[0]}")
        if any(not isinstance(size, int) for size in shape[1:]):
            problems.append(f"{value.name} {list(shape)} is symbolic beyond its batch")

    count = min(3, batch[2]) if batch[0] < batch[2] else batch[1]
    try:
        inferred = _infer_shapes(proto, count)
    except onnx.shape_inference.InferenceError as e:
        return [*problems, f"shape inference: {_first_line(e)}"]
    known = {value.name: value for value in [*inferred.graph.value_info, *inferred.graph.output]}
    for node in inferred.graph.node:
        for output in filter(None, node.output):
            value = known.get(output)
            sizes = _shape(value) if value is not None else ("?",)
            if any(not isinstance(size, int) for size in sizes):
                problems.append(f"{output} ({node.op_type}) has no inferable shape")
            elif len(sizes) > MAX_RANK:
                what = f"{output} ({node.op_type})"
                problems.append(f"{what} has {len(sizes)} dimensions, the limit is {MAX_RANK}")
            if value is not None and value.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE:
                problems.append(f"{output} ({node.op_type}) is float64")
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.DOUBLE:
            problems.append(f"weight {tensor.name} is float64")
        if len(tensor.dims) > MAX_RANK:
            problems.append(
                f"weight {tensor.name} has {len(tensor.dims)} dimensions, the limit is {MAX_RANK}"
            )
    return problems


def _infer_shapes(proto: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """Strict inference, with data propagation, of a copy whose batch is a number and whose annotations are gone."""
    import onnx

    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.graph.value_info[:]
    for value in bare.graph.input:
        for dim in value.type.tensor_type.shape.dim[:1]:
            if dim.HasField("dim_param"):
                dim.dim_value = batch
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True, data_prop=True)


def _check_dtype(images: torch.Tensor, job: Job) -> None:
    if str(images.dtype) != f"torch.{job.input_dtype}":
        raise UsageError(f"the images are {images.dtype}", f"the graph takes {job.input_dtype} images")


# -- steps of the export ----------------------------------------------------------------------------------------


OUTPUTS = ("scores", "poses", "activations", "couplings")


def _check_outputs(model: nn.Module, outputs: Sequence[str]) -> None:
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown or not outputs:
        raise UsageError(f"unknown output '{unknown[0] if unknown else ''}'", f"use {', '.join(OUTPUTS)}")
    if len(set(outputs)) < len(outputs):
        raise UsageError(f"outputs {', '.join(outputs)} name one twice", "name each once")
    if tuple(outputs) != ("scores",) and not hasattr(model, "forward_capsules"):
        raise UsageError(f"{type(model).__name__} has no capsules", "ask for the output scores only")


def _output_names(model: nn.Module, outputs: Sequence[str], size: tuple[int, int, int]) -> list[str]:
    """Names of the graph's outputs; several couplings are numbered by routing layer."""
    if tuple(outputs) == ("scores",):
        return ["scores"]
    like = next(model.parameters())
    with torch.no_grad():
        try:
            capsules = model.forward_capsules(torch.zeros(1, *size, device=like.device))  # type: ignore[operator]
        except (NotImplementedError, NoCapsules):
            raise UsageError(f"{type(model).__name__} has no capsules", "ask for scores only") from None
    names: list[str] = []
    for name in outputs:
        value = getattr(capsules, name)
        if isinstance(value, torch.Tensor):
            names.append(name)
        elif len(value) == 0:
            raise UsageError(f"{type(model).__name__} has no {name}", "leave that output out")
        else:
            names.extend([name] if len(value) == 1 else [f"{name}_{i}" for i in range(len(value))])
    return names


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; each module gets its own mode back (a frozen BatchNorm may differ from the rest)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _to_onnx_program(job: Job, opset: int) -> Any:
    """torch.export, then torch.onnx without its optimisation (an ``ONNXProgram``)."""
    exported = job.trace()
    with _quiet():
        try:
            program = torch.onnx.export(
                exported,
                exported.example_inputs[0],
                input_names=["input"],
                output_names=job.output_names,
                opset_version=opset,
                dynamo=True,
                external_data=False,
                dynamic_shapes=job.dynamic_shapes(),
                optimize=False,
                verbose=False,
            )
        except Exception as e:  # torch raises many kinds here, several without a common base
            raise ExportError(f"{job.name}: torch.onnx cannot translate it: {_first_line(e)}") from e
    if program is None:
        raise ExportError(f"{job.name}: torch.onnx gave no program")
    return program


@contextmanager
def _linear_rewriting(nodes: int) -> Iterator[None]:
    """onnxscript's optimisation without what takes quadratic time, for large graphs.

    For a rule whose pattern ends in several nodes it lists the whole graph anew at every node: minutes for the 7,000
    nodes of a network of a hundred layers. There is one such rule (two slices become a Split), and nothing needs it.
    """
    from onnxscript import rewriter

    before: Any = getattr(rewriter, "_DEFAULT_REWRITE_RULES", None)
    try:
        quick = tuple(rule for rule in before or () if rule._target_pattern.has_single_output_node)
    except AttributeError:  # another version: it takes what it takes
        quick = ()
    if nodes <= _MANY_NODES or not quick:
        yield
        return
    rewriter._DEFAULT_REWRITE_RULES = quick
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = before


def _widened(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with float32 wherever there was bfloat16; the weights keep their rounded values."""
    import onnx

    wide = onnx.ModelProto()
    wide.CopyFrom(proto)
    narrow, float32 = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT

    def widen(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == narrow:
            values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))

    del wide.graph.value_info[:]
    for tensor in wide.graph.initializer:
        widen(tensor)
    for node in wide.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                widen(attribute.t)
            elif attribute.name in ("to", "dtype") and attribute.i == narrow:
                attribute.i = float32
    return wide


def _stripped(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model without the exporter's notes: stack traces, module hierarchy, original names."""
    del proto.metadata_props[:]
    del proto.graph.metadata_props[:]
    proto.graph.doc_string = ""
    for item in (
        *proto.graph.node,
        *proto.graph.input,
        *proto.graph.output,
        *proto.graph.value_info,
        *proto.graph.initializer,
    ):
        del item.metadata_props[:]
        item.doc_string = ""
    return proto


def _describe(proto: onnx.ModelProto, path: Path, job: Job) -> ExportReport:
    import onnx
    import onnxscript

    versions = {"torch": torch.__version__, "onnx": onnx.__version__, "onnxscript": onnxscript.__version__}
    try:
        import onnxruntime

        versions["onnxruntime"] = onnxruntime.__version__
    except ImportError:  # only the gate needs it
        pass
    values = [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]
    ranks = [len(value.type.tensor_type.shape.dim) for value in values]
    ranks += [len(tensor.dims) for tensor in proto.graph.initializer]
    opsets = [entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")]
    return ExportReport(
        path=str(path),
        model=job.name,
        opset=opsets[0] if opsets else 0,
        ir_version=proto.ir_version,
        input_name=proto.graph.input[0].name,
        input_shape=_shape(proto.graph.input[0]),
        input_dtype=job.input_dtype,
        outputs={value.name: _shape(value) for value in proto.graph.output},
        batch=job.batch,
        routing_iters=job.routing_iters,
        node_types=dict(_node_types(proto).most_common()),
        max_rank=max(ranks),
        file_bytes=0,
        tolerance=job.tolerance,
        versions=versions,
        precision=job.precision,
        precision_map=_precision_map(proto),
    )


def _precision_map(proto: onnx.ModelProto) -> dict[str, dict[str, Any]]:
    """What is computed and stored in which type: operator → type of its results → count; type → numbers stored."""
    import onnx

    types = {
        value.name: value.type.tensor_type.elem_type
        for value in [*proto.graph.value_info, *proto.graph.output]
    }
    operators: dict[str, Counter[str]] = {}
    widened = {o for node in proto.graph.node if node.op_type == "DequantizeLinear" for o in node.output}
    for node in proto.graph.node:
        kind = types.get(node.output[0]) if node.output else None
        word = onnx.TensorProto.DataType.Name(kind).lower() if kind else "unknown"
        if node.op_type in _HEAVY and widened.issuperset(node.input[:2]):
            word = "int8"  # a runtime computes it from the quantised values
        operators.setdefault(node.op_type, Counter())[{"float": "float32"}.get(word, word)] += 1
    stored: Counter[str] = Counter()
    for tensor in proto.graph.initializer:
        word = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        stored[{"float": "float32"}.get(word, word)] += int(np.prod(tensor.dims))
    return {
        "operators": {name: dict(kinds) for name, kinds in sorted(operators.items())},
        "weights": dict(stored),
    }


def hold_to_eager(job: Job, runner: compare.Runner) -> tuple[str, float]:
    """Hold an engine against eager PyTorch; what was found, in words, and the worst share.

    Raises:
        ExportError: the results differ.
    """
    eager = compare.EagerRunner(job.original)
    if job.precision == "int8" and job.samples is not None:  # made for values such as real images have
        smallest, _, largest = job.batch
        chosen = job.samples[np.arange(max(smallest, min(largest, len(job.samples)))) % len(job.samples)]
        differences = [compare.compare_runners(eager, runner, chosen, "images")]
    else:
        differences = compare.compare_on_probes(eager, runner, job.batch, job.size, job.input_dtype)
    for found in differences:
        if not found.passed(job.tolerance):
            raise ExportError(
                f"{job.name}: {runner.name} differs from eager by {found.relative:.1e} of the largest output for "
                f"{found.probe} input at batch {found.batch}; the limit is {job.tolerance:.0e}"
            )
    worst = max(found.relative for found in differences)
    return f"{len(differences)} inputs, worst {worst:.1e} of the largest output", worst


# -- small things -----------------------------------------------------------------------------------------------


def _batch_profile(batch: tuple[int, int, int] | int, dynamic: bool) -> tuple[int, int, int]:
    values = (batch, batch, batch) if isinstance(batch, int) else tuple(batch)
    if len(values) != 3 or not 1 <= values[0] <= values[1] <= values[2]:
        raise UsageError(f"batch {batch} makes no sense", "give smallest, usual and largest, such as 1,8,32")
    smallest, usual, largest = values
    return (smallest, usual, largest) if dynamic else (usual, usual, usual)


def _probe_batches(batch: tuple[int, int, int], full: bool) -> list[int]:
    """Batches to try: 1, 2, an odd one and the largest where the profile holds them; quick: 1 and an odd one."""
    smallest, _, largest = batch
    wanted = (smallest, 1, 2, 5, largest) if full else (smallest, 3)
    return sorted({count for count in wanted if smallest <= count <= largest})


def _require_libraries(check: bool) -> None:
    runs = ["onnxruntime"] if check else []
    require("ONNX export", ["onnx", "onnxscript", *runs], "export", ExportError)


def _node_types(proto: onnx.ModelProto) -> Counter[str]:
    """Operators by count, subgraphs of control flow included."""
    import onnx

    counts: Counter[str] = Counter()
    graphs = [proto.graph]
    while graphs:
        graph = graphs.pop()
        for node in graph.node:
            domain = f"{node.domain}::" if node.domain not in ("", "ai.onnx") else ""
            counts[f"{domain}{node.op_type}"] += 1
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    graphs.append(attribute.g)
    return counts


def _shape(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    """Shape of a value; a symbolic place is its name, an unknown one is ``"?"``."""
    if not value.type.tensor_type.HasField("shape"):
        return ("?",)
    dims = value.type.tensor_type.shape.dim
    return tuple(int(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims)


def _worst(values: Sequence[float]) -> float:
    return float(np.max(values)) if values else float("nan")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].strip() if text else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's chatter (deprecations, one log line per step) is of no use to whoever exports a model."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
