"""Triton's Python backend with ONNX Runtime on the CPU: ``capszoo export --triton-backend python`` copies this file.

It runs where Triton does, with the Python that Triton's backend starts, and needs numpy and onnxruntime there.
"""

from pathlib import Path
from typing import Any

import numpy as np


class TritonPythonModel:
    """The class that the backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        import onnxruntime

        model = Path(__file__).with_name("model.onnx")
        self.session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response a request; what the dynamic batching has gathered is computed at once."""
        import triton_python_backend_utils as triton

        name = self.session.get_inputs()[0].name
        images = [triton.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
        ends = np.cumsum([len(part) for part in images])[:-1]
        outputs = self.session.run(None, {name: np.concatenate(images)})
        tensors = [
            [triton.Tensor(output.name, part) for part in np.split(values, ends)]
            for output, values in zip(self.session.get_outputs(), outputs, strict=True)
        ]
        return [triton.InferenceResponse(list(parts)) for parts in zip(*tensors, strict=True)]
