"""Inspect and rewrite an ONNX graph without running it: allowed content, shapes and dtypes."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from capszoo.errors import first_line, require

from ..report import ExportError

if TYPE_CHECKING:
    import onnx

#: Our limit; TensorRT's is 8 dimensions.
MAX_RANK = 6

#: Elements of a tensor for each image of the batch: half a GiB in float32.
MAX_IMAGE_ELEMENTS = 2**27

#: Control flow, and operators that TensorRT refuses, runs slowly or imports naively.
FORBIDDEN_OPS = frozenset(
    ("Loop", "If", "Scan", "Einsum", "NonZero", "ReduceLogSumExp", "GatherND", "ScatterND", "SequenceMap")
)

#: Last opset of the table below.
MAX_TENSORRT_OPSET = 24

#: Operators of the default ONNX domain that NVIDIA's ONNX parser supports according to its table for TensorRT 10.15,
#: opsets 9 to 24 (github.com/onnx/onnx-tensorrt, docs/operators.md), without the forbidden ones, those introduced in
#: opset 23 or later (TensorRT 10.0 ends at 20), and those that no classifier needs: recurrent layers, random numbers,
#: signal windows, box selection.
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

#: Operators with most of the arithmetic.
HEAVY_OPS = ("Conv", "Gemm", "MatMul")

#: Operators of norms, softmax and variances, which stay float32: float16 overflows at a norm of 256.
FLOAT32_OPS = frozenset(
    "Exp Log LogSoftmax Pow Reciprocal ReduceL1 ReduceL2 ReduceSumSquare Softmax Softplus Sqrt".split()
)


def require_libraries(check: bool) -> None:
    """Raise ExportError if a library is missing that writes a graph or, for a check, runs it."""
    runs = ["onnxruntime"] if check else []
    require("ONNX export", ["onnx", "onnxscript", *runs], "export", ExportError)


def inspect_graph(proto: onnx.ModelProto, batch: tuple[int, int, int] = (1, 8, 32)) -> list[str]:  # noqa: C901, PLR0912 - a list of rules
    """Violations of our rules in a graph, one line each; empty if there are none.

    Shapes are inferred only from the input at a fixed odd batch, ignoring the exporter's annotations:
    every tensor must then have a known size in every dimension, and at most :data:`MAX_RANK` dimensions.
    """
    import onnx

    problems: list[str] = []
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as e:
        return [f"onnx.checker: {first_line(e)}"]

    used = node_types(proto)
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
        shape = shape_of(value)
        if not shape:
            problems.append(f"{value.name} is a scalar, without a batch")
            continue
        fixed = shape[0] == batch[1] if batch[0] == batch[2] else isinstance(shape[0], str)
        if not fixed and value in proto.graph.input:
            problems.append(f"the batch of {value.name} is {shape[0]}")
        if any(not isinstance(size, int) for size in shape[1:]):
            problems.append(f"{value.name} {list(shape)} is symbolic beyond its batch")

    count = min(3, batch[2]) if batch[0] < batch[2] else batch[1]
    try:
        inferred = _infer_shapes(proto, count)
    except onnx.shape_inference.InferenceError as e:
        return [*problems, f"shape inference: {first_line(e)}"]
    values = {value.name: value for value in [*inferred.graph.value_info, *inferred.graph.output]}
    for node in inferred.graph.node:
        for output in filter(None, node.output):
            value = values.get(output)
            sizes = shape_of(value) if value is not None else ("?",)
            if any(not isinstance(size, int) for size in sizes):
                problems.append(f"{output} ({node.op_type}) has no inferable shape")
            elif math.prod(int(size) for size in sizes) > MAX_IMAGE_ELEMENTS * count:
                problems.append(
                    f"{output} ({node.op_type}) has {list(sizes)} elements for {count} images, too many"
                )
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
    """Strict inference, with data propagation, on a copy with a fixed batch and without annotations."""
    import onnx

    bare = copy.deepcopy(proto)
    del bare.graph.value_info[:]
    for value in bare.graph.input:
        for dim in value.type.tensor_type.shape.dim[:1]:
            if dim.HasField("dim_param"):
                dim.dim_value = batch
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True, data_prop=True)


def node_types(proto: onnx.ModelProto) -> Counter[str]:
    """Operators by count, including subgraphs of control flow."""
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


def shape_of(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    """Shape of a value; a symbolic dimension is its name, an unknown one is ``"?"``."""
    if not value.type.tensor_type.HasField("shape"):
        return ("?",)
    dims = value.type.tensor_type.shape.dim
    return tuple(int(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims)


def precision_map(proto: onnx.ModelProto) -> dict[str, dict[str, Any]]:
    """Dtypes of computation and storage: operator → dtype of its results → count; dtype → elements stored."""
    import onnx

    types = _result_types(proto)
    operators: dict[str, Counter[str]] = {}
    dequantised = {o for node in proto.graph.node if node.op_type == "DequantizeLinear" for o in node.output}
    for node in proto.graph.node:
        kind = types.get(node.output[0]) if node.output else None
        word = onnx.TensorProto.DataType.Name(kind).lower() if kind else "unknown"
        if node.op_type in HEAVY_OPS and dequantised.issuperset(node.input[:2]):
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


def _result_types(proto: onnx.ModelProto) -> dict[str, int]:
    """Dtype of each result, inferred if the graph does not state all of them, as after quantisation."""
    import onnx

    results = {name for node in proto.graph.node for name in node.output if name}
    values = [*proto.graph.value_info, *proto.graph.output]
    if not results.issubset(value.name for value in values):
        with suppress(onnx.shape_inference.InferenceError):  # the structure step reports it
            inferred = _infer_shapes(proto, 1).graph
            values = [*inferred.value_info, *inferred.output]
    return {value.name: value.type.tensor_type.elem_type for value in values}


def half_squares(proto: onnx.ModelProto) -> list[str]:
    """Sums and means of squares in half precision that are written as products, such as ``(x * x).sum()``."""
    import onnx

    half = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    types = _result_types(proto)
    squares: set[str] = set()
    for node in proto.graph.node:  # in the order of computation
        square = (
            node.op_type == "Mul" and node.input[0] == node.input[1] and types.get(node.output[0]) in half
        )
        # the exporter casts before it sums, when the square has overflowed already
        if square or (node.op_type == "Cast" and node.input[0] in squares):
            squares.add(node.output[0])
    return [
        f"{node.op_type} of squares"
        for node in proto.graph.node
        if node.op_type in ("ReduceSum", "ReduceMean") and node.input[0] in squares
    ]


def widened(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with float32 instead of bfloat16; the weights keep their rounded values."""
    import onnx

    wide = copy.deepcopy(proto)
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


def tensors_of(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every constant of a model: initialisers and attributes, those of nested graphs and functions too."""
    graphs, nodes = [proto.graph], [node for function in proto.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
            nodes += graph.node
            continue
        for attribute in nodes.pop().attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            graphs += [attribute.g, *attribute.graphs] if attribute.HasField("g") else [*attribute.graphs]


def stripped(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model without the exporter's metadata: stack traces, module hierarchy, original names, weights' shapes.

    A tool that rewrites a weight would meet the old shape again, as ONNX Runtime's quantisation does.
    """
    weights = {tensor.name for tensor in proto.graph.initializer}
    shapes = [value for value in proto.graph.value_info if value.name not in weights]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(shapes)
    del proto.metadata_props[:]
    del proto.graph.metadata_props[:]
    proto.graph.doc_string = ""
    graph = proto.graph
    for item in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del item.metadata_props[:]
        item.doc_string = ""
    return proto
