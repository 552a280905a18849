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

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from capszoo.errors import UsageError

from .atomic import workplace
from .passes import int8
from .passes.conv_to_matmul import convolutions_as_products
from .prepare import (
    OUTPUTS,
    PRECISIONS,
    TOLERANCES,
    Job,
    check_dtype,
    prepare,
    quiet,
)
from .report import ExportError, ExportReport, GateStep, first_line
from .verify.gate import GATES, MIN_AGREEMENT, Gate
from .verify.graph_rules import (
    FORBIDDEN_OPS,
    MAX_RANK,
    SUPPORTED_OPS,
    inspect_graph,
    node_types,
    precision_map,
    require_libraries,
    shape_of,
    stripped,
)
from .verify.images import RealImages

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

#: What a file is written for.
RUNTIMES = ("cpu", "gpu")

#: From so many nodes on the exporter's optimisation is kept from quadratic time.
MANY_NODES = 2000


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
    runtime: str | None = None,
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
            compute in it (:mod:`capszoo.export.passes.int8`).
        uint8_input: take images as uint8 and normalise them inside the graph.
        optimize: let the exporter fold constants and simplify.
        check: run the gate; without it the report says that nothing was proved.
        gate: ``full`` (all probes, batches 1, 2, odd, largest; both graphs) or ``quick`` (random and zero input at
            batch 1 and an odd one).
        runtime: what the file is written for. ``cpu``: EM layers of windows a few positions at a time and, in fp32,
            some convolutions as products (:mod:`capszoo.export.passes.conv_to_matmul`), which ONNX Runtime's CPU
            provider is faster with; ``gpu``: whole maps, in few nodes, all convolutions. None: ``gpu`` for half
            precision, else ``cpu``.
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
        runtime=runtime,
        images=images,
        calibration=calibration,
        progress=progress,
    )


def write(
    job: Job,
    path: str | os.PathLike[str],
    *,
    opset: int | None = None,
    optimize: bool = True,
    check: bool = True,
    gate: str = "full",
    runtime: str | None = None,
    images: torch.Tensor | RealImages | None = None,
    calibration: torch.Tensor | RealImages | None = None,
    progress: Callable[[str], None] | None = None,
) -> ExportReport:
    """Write a prepared model as ONNX, through the gate; arguments as for :func:`export`."""
    if gate not in GATES:
        raise UsageError(f"unknown gate '{gate}'", f"use {' or '.join(GATES)}")
    runtime = runtime or ("gpu" if job.precision in ("fp16", "bf16") else "cpu")
    if runtime not in RUNTIMES:
        raise UsageError(f"unknown runtime '{runtime}'", f"use {' or '.join(RUNTIMES)}")
    real, ranges = _real(images), _real(calibration)
    if job.precision == "int8":
        _check_int8(real, ranges, check)
    elif ranges is not None:
        raise UsageError(
            f"{job.precision} is not calibrated", "ask for int8, or leave the calibration images out"
        )
    opset = opset or (22 if job.precision == "bf16" else 20)
    require_libraries(check or job.precision == "int8")
    target, name = Path(path), job.name
    job.samples = None if real is None else real.images[:32].cpu().numpy()
    say = progress or (lambda line: None)
    say("tracing")
    program = _to_onnx_program(job, opset, runtime == "cpu")
    proto = stripped(program.model_proto)  # plain: before the exporter's optimisation
    plain = proto
    if optimize:
        say("optimising")
        with linear_rewriting(len(plain.graph.node)):
            program.optimize()
        proto = stripped(program.model_proto)
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
            session = Gate(report, job, proto, say)
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
        session = Gate(proved, before, proto, say)
        session.structure()
        session.parity(full=gate == "full")
        session.real_images(images)
        session.both_graphs(plain, run=gate == "full" and plain is not proto)
    say("quantising")
    check_dtype(calibration.images, job)
    weights = int8.plain_layers(job.served)
    if not int8.quantisable(proto, weights):
        raise ExportError(f"{job.name}: no convolution or large linear layer to compute in int8", "use fp16")
    try:
        quantised = int8.quantise(proto, weights, calibration.images, job.batch)
    except Exception as e:  # onnxruntime's exceptions have no common base class of their own
        raise ExportError(f"{job.name}: ONNX Runtime cannot quantise it: {first_line(e)}") from e
    report = _describe(stripped(quantised), target, job)
    report.float_comparisons = proved.comparisons
    report.gate = [replace(step, name=f"before quantisation: {step.name}") for step in proved.gate]
    detail = f"{len(calibration)} images, {calibration.source}"
    report.gate.append(GateStep("calibration", True, detail))
    return quantised, report


def _to_onnx_program(job: Job, opset: int, for_cpu: bool) -> Any:
    """torch.export, then torch.onnx without its optimisation (an ``ONNXProgram``)."""
    with ExitStack() as stack:
        if for_cpu and job.precision == "fp32":
            stack.enter_context(convolutions_as_products(job.served, job.example(1)))
        exported = job.trace(in_parts=for_cpu)
    with quiet():
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
            raise ExportError(f"{job.name}: torch.onnx cannot translate it: {first_line(e)}") from e
    if program is None:
        raise ExportError(f"{job.name}: torch.onnx gave no program")
    return program


@contextmanager
def linear_rewriting(nodes: int) -> Iterator[None]:
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
    if nodes <= MANY_NODES or not quick:
        yield
        return
    rewriter._DEFAULT_REWRITE_RULES = quick
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = before


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
        input_shape=shape_of(proto.graph.input[0]),
        input_dtype=job.input_dtype,
        outputs={value.name: shape_of(value) for value in proto.graph.output},
        batch=job.batch,
        routing_iters=job.routing_iters,
        node_types=dict(node_types(proto).most_common()),
        max_rank=max(ranks),
        file_bytes=0,
        tolerance=job.tolerance,
        versions=versions,
        precision=job.precision,
        precision_map=precision_map(proto),
    )
