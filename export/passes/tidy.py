"""Rewrite an ONNX graph, with equal results, where readers other than the exporter's own would trip over it.

- An output has the name that was asked for. The exporter gives one tensor that is returned twice a name of its own.
- What is computed from weights alone is computed once, here: some converters stop at such nodes. It stays where a
  weight would be stored twice, since other nodes use it in another layout.
- An empty batch gives an empty result in ONNX Runtime. Its fusion of transposes into products divides by zero there,
  which ends the process, and its sums over negative axes keep the shape of their input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

#: Elements of the largest weight, and of the largest result that takes the place of the nodes that compute it.
MAX_FOLDED = 2**26

#: Share of all weights by which folding may enlarge a file: a result is stored beside a weight that is used elsewhere.
MAX_GROWTH = 0.02

#: Bytes up to which a constant is a setting, such as a shape that unrelated weights share.
SETTING = 1024


def fold_weights(program: Any) -> None:
    """Compute what depends on weights alone, in place, for an ``ONNXProgram``, unless the file grows much by it.

    Casts stay: they make float32 of weights that are stored in half precision.
    """
    from onnxscript import optimizer

    kept = _enlarging_nodes(program.model.graph)
    optimizer.fold_constants(
        program.model,
        input_size_limit=MAX_FOLDED,
        output_size_limit=MAX_FOLDED,
        should_fold=lambda node: False if node.op_type == "Cast" or node in kept else None,
    )
    optimizer.remove_unused_nodes(program.model)


def _enlarging_nodes(graph: Any) -> set[Any]:
    """The nodes on weights alone whose results take more room than the weights that nothing else uses.

    Nodes that share a weight are folded together or not at all, those that add the least first.
    """
    weights = [value for value in graph.initializers.values() if not value.is_graph_input()]
    constants = set(weights)
    nodes = []
    for node in graph:
        if node.op_type != "Cast" and node.inputs and all(v is None or v in constants for v in node.inputs):
            constants.update(node.outputs)
            nodes.append(node)
    constant = set(nodes)
    groups: dict[
        Any, tuple[set[Any], set[Any]]
    ] = {}  # by a value: the nodes and values that are joined with it
    for node in nodes:
        values = {v for v in node.inputs if v is not None and _bytes(v) > SETTING} | set(node.outputs)
        joined = {id(groups[v]): groups[v] for v in values if v in groups}.values()
        group = ({node}.union(*(g[0] for g in joined)), values.union(*(g[1] for g in joined)))
        groups |= dict.fromkeys(group[1], group)

    def used_outside(value: Any) -> bool:
        return value.is_graph_output() or not constant.issuperset(value.consumers())

    def growth(values: set[Any]) -> int:
        made = sum(_bytes(v) for v in values if v.producer() is not None and used_outside(v))
        return made - sum(_bytes(v) for v in values if v.producer() is None and not used_outside(v))

    room = MAX_GROWTH * sum(map(_bytes, weights))
    kept: set[Any] = set()
    for added, members in sorted(
        ((growth(values), members) for members, values in {id(g): g for g in groups.values()}.values()),
        key=lambda pair: pair[0],
    ):
        if added > 0:
            room -= added
            kept |= members if room < 0 else set()
    return kept


def _bytes(value: Any) -> int:
    """Bytes of a constant; 0 where its shape is not known, as of a setting."""
    if value.const_value is not None:
        return int(value.const_value.nbytes)
    if value.shape is None or value.dtype is None or not value.shape.is_static():
        return 0
    return int(math.prod(value.shape.numpy()) * value.dtype.itemsize)


def name_outputs(proto: onnx.ModelProto, names: Sequence[str]) -> None:
    """Give the outputs of a graph their names, in place; a tensor under two names becomes two."""
    import onnx

    graph = proto.graph
    fixed = {value.name for value in (*graph.input, *graph.initializer)}
    renamed: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    for value, name in zip(graph.output, names, strict=True):
        if value.name in fixed or value.name in renamed:
            copies.append((value.name, name))
        else:
            renamed[value.name] = name
        value.name = name
    taken = {output for node in graph.node for output in node.output} - renamed.keys()
    renamed.update({name: f"{name}_inner" for name in taken.intersection(names)})
    if all(old == new for old, new in renamed.items()) and not copies:
        return
    for node in graph.node:
        for fields in (node.input, node.output):
            fields[:] = [renamed.get(field, field) for field in fields]
    for value in graph.value_info:
        value.name = renamed.get(value.name, value.name)
    for source, name in copies:
        graph.node.append(onnx.helper.make_node("Identity", [renamed.get(source, source)], [name]))


def allow_empty_batches(proto: onnx.ModelProto) -> None:
    """Rewrite, in place, what ONNX Runtime 1.31 gets wrong for a batch of 0."""
    _count_axes_from_the_front(proto)
    _keep_transposes(proto)


def _count_axes_from_the_front(proto: onnx.ModelProto) -> None:
    """Positive axes for every reduction whose rank is known."""
    import onnx

    graph = proto.graph
    values = (*graph.input, *graph.value_info)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in values}
    axes = {tensor.name: tensor for tensor in graph.initializer}
    counted: dict[tuple[int, ...], str] = {}
    former: set[str] = set()
    for node in graph.node:
        if not node.op_type.startswith("Reduce") or len(node.input) < 2 or node.input[1] not in axes:
            continue
        former.add(node.input[1])
        negative = onnx.numpy_helper.to_array(axes[node.input[1]]).tolist()
        if node.input[0] not in ranks or min(negative, default=0) >= 0:
            continue
        positive = tuple(sorted(axis % ranks[node.input[0]] for axis in negative))
        if positive not in counted:
            counted[positive] = f"axes_{'_'.join(map(str, positive))}"
            graph.initializer.append(
                onnx.helper.make_tensor(counted[positive], onnx.TensorProto.INT64, [len(positive)], positive)
            )
        node.input[1] = counted[positive]
    unused = former - {name for node in graph.node for name in node.input}
    for name in unused:  # ONNX Runtime warns of constants that nothing uses
        graph.initializer.remove(axes[name])


def _keep_transposes(proto: onnx.ModelProto) -> None:
    """Put a Reshape that changes nothing between a product and the transpose of its images, in place.

    ONNX Runtime fuses a transpose that moves the first axis behind the others into the product. Where that axis is
    the batch, an empty one crashes it. The Reshape copies every size, so that it holds for any batch.
    """
    import onnx

    graph = proto.graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *graph.value_info)}
    made = {name: node for node in graph.node for name in node.output}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    kept: dict[str, str] = {}
    for product in products:
        for k, name in enumerate(product.input):
            source = made.get(name)
            if source is not None and source.op_type == "Cast":  # also fused
                source = made.get(source.input[0])
            if source is None or source.op_type != "Transpose":
                continue
            perm = next((list(a.ints) for a in source.attribute if a.name == "perm"), [])
            sizes = shapes.get(source.input[0])
            moved = len(perm) > 2 and 0 in perm[-2:] and not (sizes and sizes[0].HasField("dim_value"))
            if moved and name not in kept:
                kept[name] = f"{name}_kept"
                sizes_of = f"same_{len(perm)}"
                if all(tensor.name != sizes_of for tensor in graph.initializer):
                    zeros = [0] * len(perm)
                    graph.initializer.append(
                        onnx.helper.make_tensor(sizes_of, onnx.TensorProto.INT64, [len(perm)], zeros)
                    )
                node = onnx.helper.make_node("Reshape", [name, sizes_of], [kept[name]])
                graph.node.insert(list(graph.node).index(product), node)
            if moved:
                product.input[k] = kept[name]
