"""Model repositories for Triton Inference Server."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ..report import ExportReport
from ..to_tensorrt import PLAN


def write_triton(folder: Path, name: str, report: ExportReport, backends: Sequence[str]) -> list[str]:
    """Write a model repository for each of :data:`capszoo.export.options.TRITON_BACKENDS` that is asked for.

    Returns:
        The repositories' folders: ``triton`` for ONNX Runtime, ``triton-NAME`` for another backend.
    """
    repositories = []
    for backend in backends:
        repository = "triton" if backend == "onnxruntime" else f"triton-{backend}"
        model_folder = folder / repository / name
        (model_folder / "1").mkdir(parents=True)
        (model_folder / "config.pbtxt").write_text(_triton_config(name, backend, report), encoding="utf-8")
        shutil.copyfile(folder / "labels.txt", model_folder / "labels.txt")
        model = folder / ("model.onnx" if backend != "tensorrt" else PLAN)
        if model.is_file():
            shutil.copyfile(model, model_folder / "1" / model.name)
        else:
            (model_folder / "1" / "README").write_text("tensorrt/build_engine.sh puts model.plan here\n")
        if backend == "python":
            shutil.copyfile(Path(__file__).with_name("triton_model.py"), model_folder / "1" / "model.py")
        repositories.append(repository)
    return repositories


#: How a configuration names a backend, and the file that it loads.
_BACKENDS = {
    "onnxruntime": ('backend: "onnxruntime"', "model.onnx"),
    "tensorrt": ('platform: "tensorrt_plan"', "model.plan"),
    # on a machine with GPUs, Triton would else start one instance for each, which compute on the CPU all the same
    "python": ('backend: "python"\ninstance_group [ { kind: KIND_CPU } ]', "model.py"),
}

#: Else ONNX Runtime rounds the inputs of float32 products to 10 bits on a GPU, unlike ``infer.py``.
_NO_TF32 = """\
# float32 products without TF32; a Triton whose ONNX Runtime backend has no accelerator "cuda" needs this block removed
optimization {
  execution_accelerators {
    gpu_execution_accelerator: [ { name: "cuda" parameters { key: "use_tf32" value: "0" } } ]
  }
}"""


def _triton_config(name: str, backend: str, report: ExportReport) -> str:
    """Triton's model configuration; dims are those of one image, unless the graph fixes the batch."""
    smallest, usual, largest = report.batch
    fixed = smallest == largest
    words, file = _BACKENDS[backend]
    lines = [f'name: "{name}"', words, f'default_model_filename: "{file}"']
    lines.append(f"max_batch_size: {0 if fixed else largest}")

    def tensor(kind: str, key: str, dtype: str, shape: tuple[int | str, ...], extra: str = "") -> str:
        sizes = ", ".join(str(s) for s in (shape if fixed else shape[1:]))
        return f'{kind} [\n  {{\n    name: "{key}"\n    data_type: {dtype}\n    dims: [ {sizes} ]{extra}\n  }}\n]'

    dtype = "TYPE_UINT8" if report.input_dtype == "uint8" else "TYPE_FP32"
    lines.append(tensor("input", report.input_name, dtype, report.input_shape))
    for key, shape in report.outputs.items():
        extra = '\n    label_filename: "labels.txt"' if key == "scores" else ""
        lines.append(tensor("output", key, "TYPE_FP32", shape, extra))
    if not fixed:
        preferred = sorted({usual, largest})
        sizes = ", ".join(map(str, preferred))
        lines.append(
            f"dynamic_batching {{\n  preferred_batch_size: [ {sizes} ]\n  max_queue_delay_microseconds: 500\n}}"
        )
    dims = ", ".join(str(s) for s in (report.input_shape if fixed else report.input_shape[1:]))
    lines.append(
        f'model_warmup [\n  {{\n    name: "zero"\n    batch_size: {1 if fixed else usual}\n    inputs {{\n'
        f'      key: "{report.input_name}"\n      value {{ data_type: {dtype} dims: [ {dims} ] zero_data: true }}\n'
        "    }\n  }\n]"
    )
    if backend == "onnxruntime":
        lines.append(_NO_TF32)
    return "\n".join(lines) + "\n"
