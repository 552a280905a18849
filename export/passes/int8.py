"""INT8 by explicit QuantizeLinear and DequantizeLinear around convolutions and large matrix products.

ONNX Runtime's static quantisation is used, with the settings that TensorRT requires: symmetric, zero point 0,
weights stored as int8 with a scale per output channel, biases and results in float32. Only plain layers are
quantised, that is convolutions and linear layers outside of the routing modules; votes, agreement, softmax, norms and
squash stay in float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn as nn

from capszoo.models._inspect import iteration_attributes

if TYPE_CHECKING:
    import onnx

#: Largest loss of accuracy by int8, in points.
MAX_LOSS = 0.5

#: Minimum number of images to determine the ranges of activations.
MIN_CALIBRATION = 16

#: Minimum number of weights of a linear layer for which quantisation pays.
MIN_WEIGHTS = 2**14

_OPERATORS = ("Conv", "Gemm", "MatMul")


def plain_layers(model: nn.Module) -> set[str]:
    """Names of the weights of convolutions and large linear layers outside of routings."""
    routings = [
        name
        for name, module in model.named_modules()
        if type(module).__module__.startswith("capszoo.layers") and iteration_attributes(module)
    ]
    inside = tuple(f"{name}." for name in routings)
    names = set()
    for name, module in model.named_modules():
        if f"{name}.".startswith(inside):
            continue
        large = isinstance(module, nn.Linear) and module.weight.numel() >= MIN_WEIGHTS
        if isinstance(module, (nn.Conv1d, nn.Conv2d)) or large:
            names.add(f"{name}.weight")
    return names


def quantisable(proto: onnx.ModelProto, weights: set[str]) -> list[str]:
    """Names of the nodes whose second input is one of the weights."""
    return [
        node.name
        for node in proto.graph.node
        if node.op_type in _OPERATORS and len(node.input) > 1 and node.input[1] in weights
    ]


def quantise(
    proto: onnx.ModelProto, weights: set[str], images: torch.Tensor, batch: tuple[int, int, int]
) -> onnx.ModelProto:
    """The same graph with Q/DQ pairs around the nodes that use these weights.

    Args:
        proto: float32 graph; not modified.
        weights: names of initialisers, see :func:`plain_layers`.
        images: calibration images ``[b, c, h, w]``, in the format of the graph's input.
        batch: smallest, usual and largest batch of the graph.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    batches = _batches(proto.graph.input[0].name, images, batch)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(proto, source)
        quantize_static(
            source,
            target,
            SimpleNamespace(get_next=lambda: next(batches, None)),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(_OPERATORS),
            nodes_to_quantize=quantisable(proto, weights),
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            extra_options=dict(
                ActivationSymmetric=True,
                WeightSymmetric=True,
                QuantizeBias=False,  # TensorRT supports only float biases
                OpTypesToExcludeOutputQuantization=list(_OPERATORS),  # the next layer's input is quantised
            ),
        )
        quantised = onnx.load(target)
    quantised.producer_name, quantised.producer_version = proto.producer_name, proto.producer_version
    return quantised


def _batches(name: str, images: torch.Tensor, batch: tuple[int, int, int]) -> Iterator[dict[str, np.ndarray]]:
    """Calibration images in batches, by the name of the input."""
    smallest, usual, _ = batch
    for chunk in images.cpu().split(usual):
        repeats = -(-smallest // len(chunk))  # a graph with a fixed batch accepts no smaller last one
        yield {name: torch.cat([chunk] * repeats)[: max(len(chunk), smallest)].numpy()}
