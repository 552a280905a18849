"""The manifest of a bundle: description of the model, its input and its export; and reading it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from capszoo._pretrained.files import load_safetensors
from capszoo._pretrained.info import WeightsInfo
from capszoo.checkpoint import checkpoint_of
from capszoo.errors import CapszooError, WeightsError, first_line
from capszoo.models._inspect import iteration_attributes
from capszoo.preprocess import ImageTransform
from capszoo.scores import score_kind

from .. import compare, unroll
from ..prepare import PreparedModel
from ..report import ExportReport
from .manifest_model import check_manifest

#: What an output of the graph is; several couplings are numbered.
MEANING = {
    "scores": "class scores; their argmax is the prediction",
    "poses": "class capsules",
    "activations": "how present each class is",
    "couplings": "shares that each child capsule gives its parents, last iteration; of Heinsen's routing the credit",
}

_RESIZE = {
    "center": "the shorter side to size / crop_pct, the centre cropped to size; none if it has the size",
    "squash": "both sides to size / crop_pct, the centre cropped to size",
    "border": "the longer side to size / crop_pct, the centre cropped to size or padded with the mean",
}


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a bundle.

    Raises:
        CapszooError: no bundle, or one that this version cannot read.
    """
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except NotADirectoryError:
        raise CapszooError(f"{folder} is a file", "give the bundle's folder") from None
    except FileNotFoundError:
        raise CapszooError(f"{folder}: no bundle (no manifest.json)", "write one: capszoo export") from None
    except (OSError, ValueError, RecursionError) as e:
        raise CapszooError(f"{path}: cannot be read ({first_line(e)})", "export again") from None
    return check_manifest(manifest, path)


#: Why no client may send a batch of 0; the gate tries it in ONNX Runtime, other runtimes are not tried.
EMPTY_BATCH = "Send no batch of 0: runtimes answer it with an empty result, an error or a crash"


def preprocessing(model: nn.Module, transform: ImageTransform, report: ExportReport) -> dict[str, Any]:
    """How a client prepares an image for the graph, and the kind of the scores."""
    smallest, usual, largest = report.batch
    return {
        "input": report.input_name,
        "scores": "scores" if "scores" in report.outputs else None,
        "dtype": report.input_dtype,
        "layout": "NCHW",
        "channels": transform.channels,
        "color_order": "grey" if transform.channels == 1 else "RGB",
        "size": list(transform.size),
        "resize": _RESIZE[transform.crop_mode],
        "crop_mode": transform.crop_mode,
        "interpolation": transform.interpolation,
        "crop_pct": transform.crop_pct,
        "background": transform.background,
        "object_size": list(transform.object_size) if transform.object_size else None,
        "scale": "value / 255",
        "value_range": list(transform.value_range) if transform.value_range else None,
        "mean": list(transform.mean),
        "std": list(transform.std),
        "inherited_mean": transform.inherited_mean,
        "normalisation_in_graph": report.input_dtype == "uint8",
        "batch": {"min": smallest, "usual": usual, "max": largest, "empty": EMPTY_BATCH},
        "score_kind": score_kind(model),
    }


def describe_model(model: nn.Module, prepared: PreparedModel, source: str) -> dict[str, Any]:
    """Source of the model, its weights, and its routing."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    weights: dict[str, Any] = {}
    info = weights_of(model)
    if info is not None:
        weights = {
            "id": info.name,
            "sha256": info.sha256,
            "license": info.license,
            "metrics": info.raw.get("metrics", {}),  # as stated
            "dataset": info.metadata.dataset.name or None,
        }
    routing = [
        {"layer": name, "type": type(module).__name__, "iterations": getattr(module, attribute)}
        for name, module in prepared.original.named_modules()
        if type(module).__module__.startswith("capszoo.layers")
        for attribute in iteration_attributes(module)
    ]
    served = prepared.original if isinstance(prepared.original, unroll.Served) else None
    return {
        "architecture": cfg.get("architecture") or type(model).__name__,
        "class": type(model).__name__,
        "source": Path(source).name if Path(source).is_absolute() else source,
        "weights": weights,
        "state_sha256": state_digest(model),
        "num_params": sum(p.numel() for p in model.parameters()),
        "outputs": list(served.outputs) if served else ["scores"],
        "routing": routing,
        "routing_iters": prepared.routing_iters,
        "routing_iters_asked": prepared.routing_iters[0] if len(prepared.routing_iters) == 1 else None,
    }


def weights_of(model: nn.Module) -> WeightsInfo | None:
    """The checkpoint whose weights a model has unchanged, if any."""
    try:
        checkpoint = checkpoint_of(model)
        file = checkpoint.weights() if checkpoint else None
    except WeightsError:
        return None
    if checkpoint is None or file is None:
        return None
    info = checkpoint.info
    state, model_state = load_safetensors(file), model.state_dict()
    state = info.renamed(state) if info else state
    equal = all(k in state and torch.equal(v.cpu(), state[k]) for k, v in model_state.items())
    return info if equal else None


def state_digest(model: nn.Module) -> str:
    """One sha256 over all parameters and buffers, ordered by name."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def figures(report: ExportReport) -> dict[str, Any]:
    """Differences: exported against eager; and, in half precision, half against float32 in PyTorch."""

    def summary(differences: list[compare.Difference]) -> dict[str, Any]:
        real = [d for d in differences if d.probe == "images"]
        count = sum(d.batch for d in real)
        compared = [(d.top1_agreement, d.batch) for d in real if d.top1_agreement is not None]
        return {
            "max_difference": max((d.max_abs for d in differences), default=None),
            "share_of_largest_output": max((d.relative for d in differences), default=None),
            "inputs": len(differences),
            "images": count,
            "top1_agreement": sum(share * n for share, n in compared) / count if compared else None,
        }

    by_name: dict[str, Any] = {"onnxruntime against eager": summary(report.comparisons)}
    if report.float_comparisons:
        by_name["onnxruntime before quantisation against eager"] = summary(report.float_comparisons)
    if report.accuracy:
        by_name["accuracy on real images, points"] = report.accuracy
    if report.half_comparisons:
        by_name[f"eager {report.precision} against eager fp32"] = summary(report.half_comparisons)
    return by_name
