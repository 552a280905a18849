"""The report of an export, with the steps of its gate, and the error of a failed step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from capszoo.errors import CapszooError

from . import compare


class ExportError(CapszooError, RuntimeError):
    """A model could not be exported, or failed a step of the gate; no file was written.

    Attributes:
        report: the report up to the failing step, or None if there was no graph yet.
    """

    def __init__(self, message: str, remedy: str = "", report: ExportReport | None = None) -> None:
        super().__init__(message, remedy)
        self.report = report


@dataclass(frozen=True)
class GateStep:
    """One step of the gate; ``passed`` is None if it was not run, with the reason in ``detail``."""

    name: str
    passed: bool | None
    detail: str
    seconds: float = 0.0


@dataclass
class ExportReport:
    """Description of an export, and the checks that it passed.

    Attributes:
        path: the ONNX file.
        model: name or class of the model.
        opset: opset of the file, read back from it.
        ir_version: ONNX IR version.
        input_name, input_shape: the input; its first entry is ``"batch"`` or the fixed batch.
        outputs: output name → shape, in order.
        batch: profile (smallest, usual, largest batch).
        routing_iters: distinct iteration counts unrolled in the graph.
        node_types: operator → count.
        max_rank: largest number of dimensions of a tensor.
        file_bytes: size of the file.
        versions: library → version that created and checked the file.
        precision: ``fp32``, ``fp16``, ``bf16`` or ``int8``.
        input_dtype: ``float32`` or ``uint8``.
        precision_map: ``operators``: operator → dtype → count; ``weights``: dtype → number of stored elements.
        comparisons: ONNX Runtime against eager PyTorch, one per probe and batch.
        half_comparisons: half precision against float32, both in eager PyTorch.
        float_comparisons: int8: the graph before quantisation against eager PyTorch.
        accuracy: int8 with known classes: ``eager``, ``int8`` and ``lost`` in points, ``images``.
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
        """Largest absolute difference over all comparisons; NaN if a value was not finite or nothing was run."""
        return _worst([d.max_abs for d in self.comparisons])

    @property
    def max_rel_diff(self) -> float:
        """Largest difference as a share of the largest output, over all comparisons."""
        return _worst([d.relative for d in self.comparisons])

    @property
    def passed(self) -> bool:
        """True if steps were run and none failed."""
        return any(step.passed for step in self.gate) and all(step.passed is not False for step in self.gate)

    def to_dict(self) -> dict[str, Any]:
        """Only plain types, for JSON."""
        figures = dict(
            num_nodes=self.num_nodes,
            max_abs_diff=self.max_abs_diff,
            max_rel_diff=self.max_rel_diff,
            passed=self.passed,
        )
        return {**asdict(self), **figures}


def _worst(values: Sequence[float]) -> float:
    return float(np.max(values)) if values else float("nan")
