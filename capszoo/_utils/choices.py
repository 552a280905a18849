"""Words that an option takes, in one place: extras, backgrounds, formats of pictures and exports, head routings."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError

#: Extra of the package -> modules that it installs, and the commands that need it.
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "explain": (("matplotlib", "captum", "scipy"), "explain, curves, eval --deletion"),
    "train": (
        ("accelerate", "datasets", "yaml", "pyarrow", "scipy", "matplotlib", "tensorboard", "torchmetrics"),
        "train, finetune, eval, recipes, curves, publish",
    ),
    "export": (("onnx", "onnxscript", "onnxruntime"), "export, check, benchmark, predict --runtime onnx"),
    "app": (("gradio", "onnx", "onnxscript", "onnxruntime", "matplotlib"), "app"),
    "serve": (("fastapi", "uvicorn", "onnx", "onnxscript", "onnxruntime"), "serve"),
    "attack": (("art",), "eval --attack"),
    "ray": (("ray", "pyarrow"), "predict --ray"),
    "tensorrt": (("tensorrt",), "export --format tensorrt"),
    "executorch": (("executorch",), "export --format executorch"),
    "torch-tensorrt": (("torch_tensorrt",), "capszoo.export.to_torch_tensorrt"),
}


#: Experiment trackers, by Accelerate's names.
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")

#: Backgrounds; ``capszoo._utils.pixels`` has their values (a test compares the two).
BACKGROUNDS = ("black", "white")


def check_background(name: str | None) -> str | None:
    """Return the name; raise ``UsageError`` for an unknown one. None stands for the background of the weights."""
    if name is not None and name not in BACKGROUNDS:
        raise UsageError(f"no background '{name}'", f"use {' or '.join(BACKGROUNDS)}")
    return name


#: How an image of another shape than the model's input is framed, in timm's words: its centre is cropped, its sides are
#: scaled separately, or it is shrunk until all of it fits and padded.
CROP_MODES = ("center", "squash", "border")


#: Routings of ``attach_head``, as in ``capszoo.models._heads.HEADS`` (a test compares the two).
HEAD_ROUTINGS = (
    "avg",
    "max",
    "conv",
    "routing_pool",
    "dynamic",
    "em",
    "idpa",
    "self_routing",
    "self_attention",
    "heinsen",
)


#: Formats of pictures that are written; matplotlib's others need LaTeX (.pgf) or are no pictures (.raw).
PICTURE_SUFFIXES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps")


#: Formats in a bundle.
EXPORT_FORMATS = ("onnx", "tensorrt", "aoti", "executorch")


#: Suffixes of files of models in formats that are not written under a name of the user's.
OTHER_MODELS = frozenset(
    ".bin .ckpt .engine .gguf .h5 .keras .mlmodel .mlpackage .ncnn .nnef .npz .ort .param .pb .pkl .plan .pt .pt2 .pth "
    ".safetensors .tar .tflite .torchscript .trt .xml .zip".split()
)


def names_onnx_file(path: Path) -> bool:
    """True if an export to ``path`` is one ONNX file, False if it is a folder.

    Raises:
        UsageError: the name is that of another format's file.
    """
    suffix = path.suffix.lower()
    if suffix in OTHER_MODELS:
        raise UsageError(f"{path} is no .onnx file", "give a name such as model.onnx, or a folder")
    return suffix == ".onnx"
