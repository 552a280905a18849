"""Write a bundle: the model's files, the checks that they passed, and all information that a client needs.

The folder is written under a temporary name beside the target and renamed at the end: after a failure or a kill there
is no incomplete bundle under that name, and an older one is unchanged.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn as nn

from capszoo._pretrained.facts import label_lines, label_names
from capszoo._pretrained.files import sha256_of
from capszoo._utils import pixels
from capszoo._utils.files import replacing
from capszoo._version import __version__
from capszoo.errors import CapszooError, UsageError
from capszoo.preprocess import model_input_size, model_transform

from .. import compare, to_aoti, to_executorch, to_onnx, to_tensorrt
from ..options import BundleOptions, collect
from ..prepare import PreparedModel, in_own_precision, prepare
from ..report import ExportReport, GateStep
from .manifest import MEANING, describe_model, figures, preprocessing, read_manifest
from .manifest_model import SCHEMA
from .triton import write_triton


@in_own_precision()
def export_bundle(
    model: nn.Module, out: str | os.PathLike[str], options: BundleOptions | None = None, **changes: Any
) -> dict[str, Any]:
    """Export a classifier and everything needed to serve it.

    Args:
        model: the classifier, in float32; not modified.
        out: folder to write. An older bundle there is replaced; a folder with other files is refused.
        options: see :class:`capszoo.export.options.BundleOptions`; None uses the defaults.
        **changes: options by keyword, such as ``formats=("onnx", "aoti")``.

    Returns:
        The manifest, as stored; ``notes`` lists what could not be done on this machine.

    Raises:
        ExportError: the model cannot be exported, or failed the gate; nothing was written.
        UsageError: invalid options.
    """
    options = collect(BundleOptions, options, changes)
    options.check_images()
    if "executorch" in options.formats:
        to_executorch.require_executorch()
    target = _checked_target(Path(out))
    channels = model_input_size(model)[0]
    if channels not in (1, 3):
        raise UsageError(
            f"a folder has a script that reads images, and the model takes {channels} channels",
            "export the graph alone: --out FILE.onnx, or capszoo.export.to_onnx.export",
        )
    transform = model_transform(model)
    labels = label_names(model)
    if not labels:
        raise UsageError(f"{type(model).__name__} has no classes", "create it with num_classes above 0")
    prepared = prepare(model, options)
    safe = re.sub(r"[^\w.-]+", "_", prepared.name).strip(".") or "model"  # it is a folder's name for Triton
    with replacing(target, folder=True) as work:
        report = to_onnx.write(prepared, work / "model.onnx")
        engines, notes = _write_engines(prepared, report, work, options)
        report.path = "model.onnx"
        spec = preprocessing(model, transform, report)
        _write_json(work / "preprocess.json", spec)
        (work / "labels.txt").write_text(
            "".join(f"{line}\n" for line in label_lines(labels)), encoding="utf-8"
        )
        (work / "infer.py").write_text(stand_alone_script(), encoding="utf-8")
        _write_reference(prepared, work / "reference.npz")
        served = write_triton(work, safe, report, options.triton_repositories)
        manifest = {
            "schema": SCHEMA,
            "name": safe,
            "model": describe_model(model, prepared, options.source),
            **_describe_export(report, spec),
            "labels": labels,
            "engines": engines,
            "notes": notes,
        }
        (work / "README.md").write_text(_readme(manifest, served), encoding="utf-8")
        manifest["files"] = {
            file.relative_to(work).as_posix(): sha256_of(file)
            for file in sorted(work.rglob("*"))
            if file.is_file()
        }
        _write_json(work / "manifest.json", manifest)
        _checked_target(Path(out))  # again: the export took its time
    return manifest


def stand_alone_script() -> str:
    """``infer.py`` with the source of ``capszoo._utils.pixels`` in place of its import, so that it stands alone."""
    script = Path(__file__).with_name("infer.py").read_text(encoding="utf-8")
    before, after = re.split(r"^from capszoo\._utils\.pixels import .*\n", script, flags=re.MULTILINE)
    source = inspect.getsource(pixels).split("from __future__ import annotations\n", 1)[1]
    return (
        f"{before}# The module capszoo._utils.pixels of capszoo {__version__}.\n{source.strip()}\n\n{after}"
    )


def _write_engines(
    prepared: PreparedModel, report: ExportReport, work: Path, options: BundleOptions
) -> tuple[dict[str, Any], list[str]]:
    """Write the formats besides ONNX: the manifest's entry for each, and notes on what could not be done here."""
    engines: dict[str, Any] = {}
    if "aoti" in options.formats:
        engines["aoti"] = to_aoti.write(prepared, work)
        report.gate.append(GateStep("AOTInductor against eager", True, engines["aoti"]["detail"]))
    if "executorch" in options.formats:
        engines["executorch"] = to_executorch.write(prepared, work)
        report.gate.append(GateStep("ExecuTorch against eager", True, engines["executorch"]["detail"]))
    if "tensorrt" not in options.formats:
        why = "not run: the format tensorrt was not asked for"
        report.gate.append(GateStep("TensorRT builds the engine", None, why))
        return engines, []
    engines["tensorrt"], steps = to_tensorrt.write(prepared, report, work, options.engine)
    report.gate.extend(steps)
    note = engines["tensorrt"]["note"]
    return engines, [note] if note else []


def _describe_export(report: ExportReport, spec: dict[str, Any]) -> dict[str, Any]:
    """The manifest's description of the graph, its inputs and outputs, and the checks that it passed."""
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "exported_with": {
            "capszoo": __version__,
            "python": platform.python_version(),
            **report.versions,
        },
        "opset": report.opset,
        "ir_version": report.ir_version,
        "input": {
            **spec,
            "name": spec["input"],
            "shape": list(report.input_shape),
            "range": "0..255" if spec["dtype"] == "uint8" else "0..1 before normalisation",
        },
        "outputs": [
            {"name": key, "shape": list(shape), "dtype": "float32", "meaning": MEANING[key.split("_")[0]]}
            for key, shape in report.outputs.items()
        ],
        "precision": {"model": report.precision, **report.precision_map},
        "batch": spec["batch"],
        "comparison": figures(report),
        "tolerance": report.tolerance,
        "gates": [asdict(step) for step in report.gate],
        "graph": {"nodes": report.num_nodes, "operators": report.node_types, "max_rank": report.max_rank},
    }


def _checked_target(out: Path) -> Path:
    """The folder that a bundle may replace: a new or empty one, or a bundle without files of the user's.

    Links are followed, so that the folder is replaced and not the link.
    """
    target = out.resolve()
    if target.exists() and not target.is_dir():
        raise UsageError(f"{out} is a file", "give the name of a folder, or FILE.onnx for the file alone")
    if os.path.ismount(target):  # Path.is_mount raises on Windows before Python 3.12
        raise UsageError(f"{out} is a mount point, which cannot be replaced", f"give {out / 'model'}")
    if target == Path.cwd():
        raise UsageError(
            f"{out} is the current folder, which cannot be replaced", "give the name of a folder"
        )
    if not target.is_dir() or not any(target.iterdir()):
        return target
    try:
        manifest = read_manifest(target)
        bundle_files = {
            *manifest["files"],
            "manifest.json",
            *to_tensorrt.built_later(target, manifest["name"]),
        }
    except CapszooError:
        raise UsageError(f"{out} holds files and is no bundle", "give a new folder") from None
    files = (file for file in sorted(target.rglob("*")) if not file.is_dir() or file.is_symlink())
    strangers = [name for file in files if (name := file.relative_to(target).as_posix()) not in bundle_files]
    if strangers:
        raise UsageError(
            f"{out} holds files that are not the bundle's: {', '.join(strangers[:3])}"
            + (", …" if len(strangers) > 3 else ""),
            "move them, or give a new folder",
        )
    return target


def _write_reference(prepared: PreparedModel, path: Path) -> None:
    """Write inputs, and the original's scores for them: the probes, and up to four real images.

    int8 is calibrated for values of real images: only those, up to eight.
    """
    shape, dtype = (1, *prepared.size), prepared.input_dtype
    inputs = [compare.probe_input(probe, shape, 0, dtype, prepared.span) for probe in prepared.probes]
    int8 = prepared.precision == "int8"
    if (real := prepared.options.real_images) is not None:
        images = real.images[: 8 if int8 else 4].cpu().numpy()
        inputs = [images] if int8 else [*inputs, images]
    stacked = np.concatenate(inputs)
    smallest, _, largest = prepared.batch
    # a fixed or large batch uses as many as it must, a small one no more than it can
    stacked = stacked[np.arange(max(smallest, min(len(stacked), largest))) % len(stacked)]
    scores = compare.EagerRunner(prepared.original)(stacked)[prepared.scores_at or 0]
    np.savez_compressed(path, images=stacked, scores=scores)


def _readme(manifest: dict[str, Any], triton: Sequence[str]) -> str:
    """Instructions for the bundle, and its known properties."""
    spec, batch = manifest["input"], manifest["batch"]
    channels, (height, width) = spec["channels"], spec["size"]
    normal = (
        "uint8 values 0..255; the graph normalises"
        if spec["normalisation_in_graph"]
        else f"float32, value / 255, minus {spec['mean']}, divided by {spec['std']}"
    )
    # ONNX Runtime's CPU provider has no bfloat16 kernels
    bf16 = manifest["precision"]["model"] == "bf16"
    runtime, provider = (
        ("'onnxruntime-gpu[cuda,cudnn]'", "--provider CUDAExecutionProvider ")
        if bf16
        else ("onnxruntime", "")
    )
    run = [step for step in manifest["gates"] if step["passed"]]
    not_run = [step for step in manifest["gates"] if step["passed"] is None]
    lines = [
        f"# {manifest['name']}",
        "",
        f"Exported by capszoo {manifest['exported_with']['capszoo']}; `manifest.json` has every detail.",
        "",
        "```sh",
        f"pip install numpy pillow {runtime}",
        f"python infer.py {provider}IMAGE...",
        "```",
        "",
        f"- Input `{spec['name']}`: [batch, {channels}, {height}, {width}], {spec['color_order']}, {normal}.",
        f"- An image: {spec['resize']}; {spec['interpolation']}, antialiased as by Pillow (all in `preprocess.json`).",
        f"- `labels.txt` names the classes in the order of the scores ({spec['score_kind'].replace('_', ' ')}).",
        f"- Batch: {batch['min']}, fixed."
        if batch["min"] == batch["max"]
        else f"- Batch: {batch['min']} to {batch['max']}. {batch['empty']}.",
        f"- Precision: {manifest['precision']['model']}; inputs and outputs "
        f"{'are uint8 and float32' if spec['dtype'] == 'uint8' else 'are float32'}.",
        *([_BF16] if bf16 else []),
        *(f"- Output `{o['name']}` {o['shape']}: {o['meaning']}." for o in manifest["outputs"]),
    ]
    lines += [_served(repository, manifest) for repository in triton]
    for engine in manifest["engines"].values():
        lines += ["", *engine["readme"]]
    lines += ["", "## What was checked", ""]
    lines += [f"- {step['name']}: {step['detail']}" for step in run] or ["- nothing"]
    lines += ["", "## What was not checked", ""]
    lines += [f"- {s['name']}: {s['detail'].removeprefix('not run: ')}" for s in not_run]
    lines += ["- Triton Inference Server was not run on this folder."] if triton else []
    lines += ["", "`capszoo check .` checks the files, the graph and the answers again.", ""]
    return "\n".join(lines)


#: What bfloat16 is for; the kernels by ONNX Runtime's list, docs/OperatorKernels.md.
_BF16 = (
    "- bf16 is meant for TensorRT. ONNX Runtime's CPU provider cannot run this graph, its CUDA provider only where "
    "it has the operators in bfloat16: it has no MaxPool, ReduceMean and Clip. Export with `--precision fp16` for it."
)


def _served(repository: str, manifest: dict[str, Any]) -> str:
    """How Triton serves a model repository."""
    line = f"`tritonserver --model-repository={repository}`"
    if repository == "triton-python":
        return f"\nTriton with its Python backend, whose Python needs numpy and onnxruntime: {line}."
    if repository == "triton":
        return f"\nTriton Inference Server: {line} ({manifest['name']})."
    # Triton executes the host code of version-compatible plans only if it is told so
    if "--versionCompatible" in manifest["engines"]["tensorrt"]["trtexec"]:
        line = f"{line[:-1]} --backend-config=tensorrt,version-compatible=true`"
    return f"\nTriton with the TensorRT engine, which `build_engine.sh` copies there: {line}."


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
