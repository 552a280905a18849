"""A model as an ONNX file, written only if its outputs equal the original's.

>>> from capszoo.export.to_onnx import export
>>> report = export("resnet20_routingcaps", "digits.onnx", gate="quick")
>>> report.passed, report.max_rel_diff < 1e-4
(True, True)

The model is prepared (:mod:`capszoo.export.unroll`), exported through ``torch.export`` with a symbolic batch, stripped
of the exporter's metadata (which contain source paths) and verified by the gate: structure, parity with eager PyTorch
in ONNX Runtime, agreement of the optimised graph with the unoptimised one. A step that fails raises
:class:`ExportError`; the file appears under its name only after the last step.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from capszoo._utils.files import check_writable, replacing
from capszoo._version import __version__
from capszoo.errors import CapszooError, UsageError, first_line

from .options import TOLERANCES, ExportOptions, collect
from .passes import int8
from .passes.conv_to_matmul import convs_to_matmul
from .passes.tidy import allow_empty_batches, fold_weights, name_outputs
from .prepare import PreparedModel, in_own_precision, prepare, quiet
from .report import ExportError, ExportReport, GateStep
from .to_tensorrt import rtx_step
from .unroll import Served
from .verify.gate import Gate
from .verify.graph_rules import node_types, precision_map, require_libraries, shape_of, stripped

if TYPE_CHECKING:
    import onnx

__all__ = [
    "ExportError",
    "ExportReport",
    "GateStep",
    "PreparedModel",
    "export",
    "prepare",
    "write",
]


#: Limit of protobuf for the size of a file. External data, which has none, would be a second file to keep beside it.
MAX_BYTES = 2**31 - 2**20

#: Number of nodes from which the quadratic part of the exporter's optimisation is disabled.
MANY_NODES = 2000


def export(
    model: nn.Module | str,
    path: str | os.PathLike[str],
    options: ExportOptions | None = None,
    **changes: Any,
) -> ExportReport:
    """Export a classifier to ONNX and verify that it equals the original.

    Args:
        model: a module (not modified), or a name for ``capszoo.create_model``.
        path: file to write.
        options: see :class:`capszoo.export.options.ExportOptions`; None uses the defaults.
        **changes: options by keyword, such as ``precision="fp16"``.

    Returns:
        The report; ``passed`` is True.

    Raises:
        ExportError: the model cannot be exported or failed the gate; nothing was written.
        UsageError: invalid options.
    """
    options = collect(ExportOptions, options, changes)
    target = Path(path)
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is a folder, or no regular file", "give a name such as model.onnx")
    options.check_images()
    return write(prepare(model, options), target)


@in_own_precision()
def write(prepared: PreparedModel, path: str | os.PathLike[str]) -> ExportReport:
    """Write a prepared model as ONNX, through the gate, with the options of its preparation.

    Args:
        prepared: the model.
        path: file to write.

    Raises:
        ExportError: the model cannot be exported or failed the gate; nothing was written.
        UsageError: int8 without its images.
    """
    options = prepared.options
    options.check_images()
    opset, say = options.onnx_opset, options.say
    require_libraries(options.check or prepared.precision == "int8")
    target, name = Path(path), prepared.name
    check_writable(target)  # now rather than after tracing
    stored = sum(t.numel() * t.element_size() for t in prepared.served.state_dict().values())
    if stored >= MAX_BYTES:
        raise ExportError(
            f"{name}: {stored / 2**30:.1f} GiB of weights do not fit in one ONNX file, whose limit is 2 GiB",
            "use precision fp16, which halves them",
        )
    say("tracing")
    program = _to_onnx_program(prepared)
    proto = _graph(program, prepared)  # unoptimised: before the exporter's optimisation
    plain = proto
    if options.optimize:
        say("optimising")
        with quiet(), linear_rewriting(len(plain.graph.node)):
            program.optimize()
            fold_weights(program)
        proto = _graph(program, prepared)
    report = _describe(proto, target, prepared)
    if report.opset != opset:
        raise ExportError(
            f"{name}: asked for opset {opset}, the exporter wrote {report.opset}",
            "ask for an opset from 18 on that torch.onnx knows",
            report,
        )
    if prepared.precision == "int8":
        proto, report = _quantised(prepared, proto, plain, target)
    _describe_in_file(proto, prepared, report)
    with replacing(target) as temporary:
        data = proto.SerializeToString()
        temporary.write_bytes(data)
        report.file_bytes = len(data)
        if options.check:
            session = Gate(report, prepared, proto)
            session.structure()
            session.empty_batch()
            if prepared.precision == "int8":
                session.finite()
            else:
                session.parity()
                session.half_in_pytorch()
            session.real_images()
            if prepared.precision != "int8":
                session.both_graphs(plain)
            report.gate.append(rtx_step(temporary, report))
        else:
            report.gate.append(GateStep("gate", None, "not run: check=False"))
    return report


def _quantised(
    prepared: PreparedModel, proto: onnx.ModelProto, plain: onnx.ModelProto, target: Path
) -> tuple[onnx.ModelProto, ExportReport]:
    """Quantise a float32 graph; first verify it against eager and the unoptimised one, ``plain``."""
    calibration = prepared.options.ranges
    assert calibration is not None, "the options refuse int8 without them"
    before = replace(prepared, precision="fp32", tolerance=TOLERANCES["fp32"])
    proved = _describe(proto, target, before)
    if prepared.options.check:
        session = Gate(proved, before, proto)
        session.structure()
        session.parity()
        session.real_images()
        session.both_graphs(plain)
    prepared.options.say("quantising")
    weights = int8.plain_layers(prepared.served)
    nodes = set(int8.quantisable(proto, weights))
    if not nodes:
        raise ExportError(
            f"{prepared.name}: no convolution or large linear layer to compute in int8", "use fp16"
        )
    try:
        with quiet():
            quantised = int8.quantise(proto, weights, calibration.images, prepared.batch)
    except Exception as e:  # onnxruntime's exceptions have no common base class
        raise ExportError(f"{prepared.name}: ONNX Runtime cannot quantise it: {first_line(e)}") from e
    report = _describe(stripped(quantised), target, prepared)
    report.float_comparisons = proved.comparisons
    report.gate = [replace(step, name=f"before quantisation: {step.name}") for step in proved.gate]
    left = sorted(weights.difference(node.input[1] for node in proto.graph.node if node.name in nodes))
    detail = f"{len(calibration)} images, {calibration.source}; {len(weights) - len(left)} of {len(weights)} layers"
    detail += " in int8" + (
        f", not {', '.join(name.removesuffix('.weight') for name in left)}" if left else ""
    )
    report.gate.append(GateStep("calibration", True, detail))
    return quantised, report


def _to_onnx_program(prepared: PreparedModel) -> Any:
    """torch.export, then torch.onnx without its optimisation (an ``ONNXProgram``)."""
    for_cpu = prepared.options.target == "cpu"
    with ExitStack() as stack:
        if for_cpu and prepared.precision == "fp32":
            stack.enter_context(convs_to_matmul(prepared.served, prepared.example(1)))
        exported = prepared.trace("onnx_cpu" if for_cpu else "gpu")
    with quiet():
        try:
            return torch.onnx.export(
                exported,
                exported.example_inputs[0],
                input_names=["input"],
                output_names=prepared.output_names,
                opset_version=prepared.options.onnx_opset,
                dynamo=True,
                external_data=False,
                dynamic_shapes=prepared.dynamic_shapes(),
                optimize=False,
                verbose=False,
            )
        except Exception as e:  # torch raises many kinds here, some without a common base
            operator = re.search(r"\b(aten|prims?|torchvision|capszoo)(::|\.)\w+", str(e))
            remedy = (
                f"replace the operator {operator[0]}"
                if operator
                else "torch.onnx.export(model, (images,), dynamo=True) gives the whole error"
            )
            raise ExportError(
                f"{prepared.name}: torch.onnx cannot translate it: {first_line(e)}", remedy
            ) from e


def _graph(program: Any, prepared: PreparedModel) -> onnx.ModelProto:
    """The graph of an ``ONNXProgram`` as other readers take it."""
    proto = program.model_proto
    name_outputs(proto, prepared.output_names)
    allow_empty_batches(proto)
    return stripped(proto)


@contextmanager
def linear_rewriting(nodes: int) -> Iterator[None]:
    """onnxscript's optimisation for large graphs, without its quadratic part.

    For a rule whose pattern ends in several nodes it lists the whole graph at every node: minutes for the 7,000
    nodes of a network of a hundred layers. There is one such rule (two slices become a Split), which is not needed.
    """
    from onnxscript import rewriter

    before: Any = getattr(rewriter, "_DEFAULT_REWRITE_RULES", None)
    try:
        quick = tuple(rule for rule in before or () if rule._target_pattern.has_single_output_node)
    except AttributeError:  # another version: accept its running time
        quick = ()
    if nodes <= MANY_NODES or not quick:
        yield
        return
    rewriter._DEFAULT_REWRITE_RULES = quick
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = before


def _describe_in_file(proto: onnx.ModelProto, prepared: PreparedModel, report: ExportReport) -> None:
    """Describe the model in the file's metadata, as the files of a bundle do: it may be the only file."""
    import onnx

    from capszoo._pretrained.facts import label_names
    from capszoo.preprocess import model_transform

    from .bundle.manifest import preprocessing, state_digest, weights_of  # which import this module

    original = prepared.original
    model = original.model if isinstance(original, Served) else original
    spec: dict[str, Any] = {}
    with suppress(CapszooError):  # no single image is its input, or it does not state its size
        spec = {**preprocessing(model, model_transform(model), report), "size": list(prepared.size[1:])}
    cfg, info = getattr(model, "pretrained_cfg", None) or {}, weights_of(model)
    described = {
        "capszoo_version": __version__,
        "model": prepared.name,
        "architecture": cfg.get("architecture") or type(model).__name__,
        "weights": info.name if info else "",
        "weights_sha256": info.sha256 if info else "",
        "state_sha256": state_digest(model),
        "precision": report.precision,
        "tolerance": report.tolerance,
        "routing_iters": report.routing_iters,
        "preprocess": spec,
        "labels": label_names(model),
    }
    onnx.helper.set_model_props(
        proto,
        {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in described.items()
        },
    )


def _describe(proto: onnx.ModelProto, path: Path, prepared: PreparedModel) -> ExportReport:
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
        model=prepared.name,
        opset=opsets[0] if opsets else 0,
        ir_version=proto.ir_version,
        input_name=proto.graph.input[0].name,
        input_shape=shape_of(proto.graph.input[0]),
        input_dtype=prepared.input_dtype,
        outputs={value.name: shape_of(value) for value in proto.graph.output},
        batch=prepared.batch,
        routing_iters=prepared.routing_iters,
        node_types=dict(node_types(proto).most_common()),
        max_rank=max(ranks),
        file_bytes=0,
        tolerance=prepared.tolerance,
        versions=versions,
        precision=prepared.precision,
        precision_map=precision_map(proto),
    )
