"""The extras of the package: the modules that each installs, and the commands that need it."""

from __future__ import annotations

__all__ = ["EXTRAS"]

#: Extra of the package -> modules that it installs, and the commands that need it.
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "explain": (("matplotlib", "captum"), "explain, curves"),
    "train": (
        ("accelerate", "datasets", "yaml", "pyarrow", "scipy", "matplotlib", "tensorboard"),
        "train, finetune, eval, recipes, curves, publish, state",
    ),
    "export": (("onnx", "onnxscript", "onnxruntime"), "export, check, benchmark, predict --runtime onnx"),
    "app": (("gradio", "onnx", "onnxscript", "onnxruntime", "matplotlib"), "app, publish --space"),
    "serve": (("fastapi", "uvicorn", "onnx", "onnxscript", "onnxruntime"), "serve"),
    "ray": (("ray", "pyarrow"), "predict --ray"),
    "tensorrt": (("tensorrt",), "export --format tensorrt"),
    "torch-tensorrt": (("torch_tensorrt",), "capszoo.export.to_torch_tensorrt"),
}
