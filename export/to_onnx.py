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

import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn as nn

from capszoo.errors import CapszooError, UsageError
from capszoo.preprocess import model_input_size

from . import compare, unroll

if TYPE_CHECKING:
    import onnx

__all__ = [
    "ExportError",
    "ExportReport",
    "FORBIDDEN_OPS",
    "GateStep",
    "MAX_RANK",
    "SUPPORTED_OPS",
    "export",
    "inspect_graph",
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
        comparisons: ONNX Runtime against eager PyTorch, one per probe and batch.
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
    comparisons: list[compare.Difference] = field(default_factory=list)
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
    opset: int = 20,
    batch: tuple[int, int, int] | int = (1, 8, 32),
    dynamic_batch: bool = True,
    input_size: tuple[int, int, int] | None = None,
    optimize: bool = True,
    check: bool = True,
    gate: str = "full",
    tolerance: float = 1e-4,
    images: torch.Tensor | None = None,
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
        opset: ONNX opset; refused where the exporter would silently take another.
        batch: (smallest, usual, largest) batch the file must serve; one number fixes the batch.
        dynamic_batch: False fixes the batch at the usual one.
        input_size: channels, height and width; None takes the model's own.
        optimize: let the exporter fold constants and simplify.
        check: run the gate; without it the report says that nothing was proved.
        gate: ``full`` (all probes, batches 1, 2, odd, largest; both graphs) or ``quick`` (random and zero input at
            batch 1 and an odd one).
        tolerance: allowed difference as a share of the largest output.
        images: real, normalised images ``[b, c, h, w]``; if given, their top-1 must agree.
        progress: called with one line before each step.

    Returns:
        The report; ``passed`` is True.

    Raises:
        ExportError: the model cannot be exported or failed the gate; nothing was written.
        UsageError: arguments that make no sense.
    """
    profile = _batch_profile(batch, dynamic_batch)
    if gate not in GATES:
        raise UsageError(f"unknown gate '{gate}'", f"use {' or '.join(GATES)}")
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{target} is a folder", "give the name of a file, such as model.onnx")
    _require_libraries(check)
    say = progress or (lambda line: None)
    if isinstance(model, str):
        import capszoo

        name, model = name or model, capszoo.create_model(model, pretrained=pretrained)
    name = name or type(model).__name__

    with _evaluating(model):
        bad = unroll.non_finite_weights(model)
        if bad:
            raise ExportError(
                f"{name}: weights hold NaN or infinity ({', '.join(bad[:3])})", "train it again"
            )
        if any(p.dtype != torch.float32 for p in model.parameters()):
            raise ExportError(f"{name}: only float32 models are exported", "call model.float() first")
        size = input_size or model_input_size(model)
        original = _with_outputs(model, outputs)
        output_names = _output_names(original, outputs, size)
        say("preparing and tracing")
        prepared = _with_outputs(unroll.prepare_for_export(model, routing_iters).cpu(), outputs)
        if routing_iters is not None:
            # the reference must route as often as the graph does, but stay as unprepared as the user's model
            original = _with_outputs(_with_iterations(model, routing_iters), outputs)
        program = _to_onnx_program(prepared, size, profile, opset, output_names, name)
        proto = _stripped(program.model_proto)  # plain: before the exporter's optimisation
        plain = proto
        if optimize:
            program.optimize()
            proto = _stripped(program.model_proto)
        report = _describe(proto, target, name, profile, unroll.routing_iterations(prepared), tolerance)
        if report.opset != opset:
            raise ExportError(
                f"{name}: asked for opset {opset}, the exporter wrote {report.opset}",
                "ask for an opset from 18 on that torch.onnx knows",
                report,
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            data = proto.SerializeToString()
            temporary.write_bytes(data)
            report.file_bytes = len(data)
            if check:
                session = _Gate(report, say)
                session.structure(proto)
                session.parity(original, str(temporary), size, full=gate == "full")
                session.real_images(original, str(temporary), images)
                session.both_graphs(plain, str(temporary), size, run=gate == "full" and optimize)
            else:
                report.gate.append(GateStep("gate", None, "not run: check=False"))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    return report


# -- the gate ---------------------------------------------------------------------------------------------------


class _Gate:
    """Runs the steps in order, notes each in the report and raises at the first that fails."""

    def __init__(self, report: ExportReport, say: Callable[[str], None]) -> None:
        self.report, self.say = report, say

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

    def structure(self, proto: onnx.ModelProto) -> None:
        """Step 1: the checker, strict shape inference, ranks, operators, types."""
        with self._step("structure") as detail:
            problems = inspect_graph(proto, self.report.batch)
            if problems:
                raise self._fail(f"the graph breaks a rule: {problems[0]}")
            detail.append(
                f"{self.report.num_nodes} nodes, opset {self.report.opset}, rank ≤ {self.report.max_rank}"
            )
            detail.append("every shape inferred, only the batch is symbolic, operators supported by TensorRT")

    def parity(self, model: nn.Module, path: str, size: tuple[int, int, int], full: bool) -> None:
        """Step 2: ONNX Runtime against eager PyTorch."""
        with self._step("parity with eager") as detail:
            eager, runtime = compare.EagerRunner(model), self._runner(path)
            probes = compare.PROBES if full else compare.PROBES[:2]
            for count in _probe_batches(self.report.batch, full):
                for probe in probes:
                    self.say(f"parity with eager: {probe}, batch {count}")
                    difference = self._compare(eager, runtime, (count, *size), probe)
                    self.report.comparisons.append(difference)
                    if not difference.finite:
                        raise self._fail(f"NaN or infinity in the output for {probe} input at batch {count}")
                    if not difference.passed(self.report.tolerance):
                        raise self._fail(
                            f"differs from eager by {difference.relative:.1e} of the largest output for {probe} input "
                            f"at batch {count}; the limit is {self.report.tolerance:.0e}"
                        )
            detail.append(
                f"{len(self.report.comparisons)} inputs, worst {self.report.max_rel_diff:.1e} of the largest"
            )
            if not full:
                detail.append("quick gate: random and zero input only")

    def real_images(self, model: nn.Module, path: str, images: torch.Tensor | None) -> None:
        """Step 2, last part: the same top-1 on real images."""
        name = "top-1 on real images"
        if images is None:
            self.report.gate.append(GateStep(name, None, "not run: no images given"))
            return
        with self._step(name) as detail:
            eager, runtime = compare.EagerRunner(model), self._runner(path)
            largest = self.report.batch[2]
            for chunk in images.float().cpu().split(largest):
                fill = 0 if self.report.batch[0] < largest else largest - len(chunk)
                padded = torch.cat([chunk, chunk[-1:].expand(fill, -1, -1, -1)]) if fill else chunk
                difference = compare.compare_runners(eager, runtime, padded.numpy(), "images")
                self.report.comparisons.append(difference)
                if not difference.passed(self.report.tolerance) or difference.top1_agreement < 1:
                    raise self._fail(
                        f"real images: differs by {difference.relative:.1e} of the largest output, top-1 agrees on "
                        f"{difference.top1_agreement:.1%}"
                    )
            detail.append(f"{len(images)} images, top-1 equal on all")

    def both_graphs(self, plain: onnx.ModelProto, path: str, size: tuple[int, int, int], run: bool) -> None:
        """Step 3: the graph with and without the exporter's optimisation."""
        name = "plain and optimised graph agree"
        if not run:
            self.report.gate.append(GateStep(name, None, "not run: quick gate, or no optimisation"))
            return
        with self._step(name) as detail:
            count = _probe_batches(self.report.batch, full=False)[-1]
            before, after = self._runner(plain.SerializeToString()), self._runner(path)
            worst = 0.0
            for probe in compare.PROBES:
                difference = self._compare(before, after, (count, *size), probe)
                if not difference.passed(self.report.tolerance):
                    raise self._fail(f"the exporter's optimisation changes the result for {probe} input")
                worst = max(worst, difference.relative)
            detail.append(f"worst {worst:.1e} of the largest output")

    def _runner(self, model: str | bytes) -> compare.OnnxRunner:
        try:
            return compare.OnnxRunner(model)
        except Exception as e:  # onnxruntime's exceptions have no common base class of their own
            raise self._fail(f"ONNX Runtime does not load the graph: {_first_line(e)}") from e

    def _compare(
        self, reference: compare.Runner, candidate: compare.Runner, shape: tuple[int, ...], probe: str
    ) -> compare.Difference:
        images = compare.probe_input(probe, shape, seed=shape[0])
        try:
            return compare.compare_runners(reference, candidate, images, probe)
        except ValueError as e:
            raise self._fail(str(e)) from e
        except Exception as e:  # a graph that froze its batch fails inside onnxruntime
            raise self._fail(f"the graph does not run at batch {shape[0]}: {_first_line(e)}") from e


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

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    del copy.graph.value_info[:]
    for value in copy.graph.input:
        for dim in value.type.tensor_type.shape.dim[:1]:
            if dim.HasField("dim_param"):
                dim.dim_value = batch
    for value in copy.graph.output:
        value.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(copy, check_type=True, strict_mode=True, data_prop=True)


# -- steps of the export ----------------------------------------------------------------------------------------


class _CapsuleOutputs(nn.Module):
    """A capsule network whose forward returns the asked fields of ``forward_capsules``, flat."""

    def __init__(self, model: nn.Module, outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.outputs = tuple(outputs)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        capsules = self.model.forward_capsules(x)  # type: ignore[operator]
        flat: list[torch.Tensor] = []
        for name in self.outputs:
            value = getattr(capsules, name)
            flat.extend([value] if isinstance(value, torch.Tensor) else value)
        return tuple(flat)


_OUTPUTS = ("scores", "poses", "activations", "couplings")


def _with_outputs(model: nn.Module, outputs: Sequence[str]) -> nn.Module:
    unknown = [name for name in outputs if name not in _OUTPUTS]
    if unknown or not outputs:
        raise UsageError(f"unknown output '{unknown[0] if unknown else ''}'", f"use {', '.join(_OUTPUTS)}")
    if tuple(outputs) == ("scores",):
        return model
    if not hasattr(model, "forward_capsules"):
        raise UsageError(f"{type(model).__name__} has no capsules", "ask for the output scores only")
    return _CapsuleOutputs(model, outputs).eval()


def _output_names(model: nn.Module, outputs: Sequence[str], size: tuple[int, int, int]) -> list[str]:
    """Names of the graph's outputs; several couplings are numbered by routing layer."""
    if not isinstance(model, _CapsuleOutputs):
        return list(outputs)
    like = next(model.parameters())
    with torch.no_grad():
        capsules = model.model.forward_capsules(torch.zeros(1, *size, dtype=like.dtype, device=like.device))  # type: ignore[operator]
    names: list[str] = []
    for name in outputs:
        value = getattr(capsules, name)
        if isinstance(value, torch.Tensor):
            names.append(name)
        elif len(value) == 0:
            raise UsageError(f"{type(model.model).__name__} has no {name}", "leave that output out")
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


def _with_iterations(model: nn.Module, routing_iters: int) -> nn.Module:
    import copy

    changed = copy.deepcopy(model)
    unroll.set_routing_iterations(changed, routing_iters)
    return changed


def _to_onnx_program(
    model: nn.Module,
    size: tuple[int, int, int],
    batch: tuple[int, int, int],
    opset: int,
    output_names: list[str],
    name: str,
) -> Any:
    """torch.export, then torch.onnx without its optimisation (an ``ONNXProgram``)."""
    like = next(model.parameters())
    smallest, usual, largest = batch
    fixed = smallest == largest
    # torch.export takes a batch of 1 for a constant: trace with 2 where the batch is to stay free
    example = torch.zeros(usual if fixed else 2, *size, dtype=like.dtype, device=like.device)
    shapes = None if fixed else ({0: torch.export.Dim("batch", min=1, max=largest)},)
    with _quiet():
        try:
            exported = torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)
            program = torch.onnx.export(
                exported,
                (example,),
                input_names=["input"],
                output_names=output_names,
                opset_version=opset,
                dynamo=True,
                external_data=False,
                dynamic_shapes=shapes,
                optimize=False,
                verbose=False,
            )
        except Exception as e:  # torch raises many kinds here, several without a common base
            if "Constraints violated" in str(e):
                raise ExportError(
                    f"{name}: its forward turns the batch size into a number",
                    "keep x.shape[0] as it is (no int(), no len())",
                ) from e
            raise ExportError(f"{name}: torch.export cannot trace it: {_first_line(e)}") from e
    if program is None:
        raise ExportError(f"{name}: torch.onnx gave no program")
    return program


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


def _describe(
    proto: onnx.ModelProto,
    path: Path,
    name: str,
    batch: tuple[int, int, int],
    routing_iters: list[int],
    tolerance: float,
) -> ExportReport:
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
        model=name,
        opset=opsets[0] if opsets else 0,
        ir_version=proto.ir_version,
        input_name=proto.graph.input[0].name,
        input_shape=_shape(proto.graph.input[0]),
        outputs={value.name: _shape(value) for value in proto.graph.output},
        batch=batch,
        routing_iters=routing_iters,
        node_types=dict(_node_types(proto).most_common()),
        max_rank=max(ranks),
        file_bytes=0,
        tolerance=tolerance,
        versions=versions,
    )


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
    import importlib.util

    needed = ("onnx", "onnxscript", "onnxruntime") if check else ("onnx", "onnxscript")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(f"ONNX export needs {', '.join(missing)}", "pip install 'capszoo[export]'")


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
