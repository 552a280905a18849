"""A folder that is ready to serve: the model's files, what they were proved to do, and all that a client must know.

>>> from capszoo.export.bundle import check_bundle, export_bundle
>>> manifest = export_bundle(model, "digits", triton=True)
>>> check_bundle("digits").passed

The folder is written under a temporary name beside its own and renamed at the end: a failure or a kill leaves no
half-written bundle under that name, and an older one as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn

import capszoo
from capszoo.errors import CapszooError, UsageError
from capszoo.inference import label_names, load_model
from capszoo.models._pretrained import (
    WeightsError,
    WeightsInfo,
    bundled_tags,
    load_safetensors,
    locate_weights,
    sha256_of,
)
from capszoo.preprocess import ImageTransform, load_image, model_input_size, model_transform
from capszoo.summary import iteration_attributes

from . import compare, infer, to_aoti, to_onnx, to_tensorrt, unroll
from ._workplace import old_name, workplace
from .graph import inspect_graph, require_libraries, widened
from .images import RealImages
from .job import Job, prepare
from .report import ExportReport, GateStep, first_line

__all__ = [
    "FORMATS",
    "BundleCheck",
    "check_bundle",
    "compare_bundle",
    "export_bundle",
    "open_runner",
    "read_manifest",
]

FORMATS = ("onnx", "tensorrt", "aoti")

SCHEMA = 1

_MEANING = {
    "scores": "class scores; their argmax is the prediction (capsule lengths, activations or logits)",
    "poses": "class capsules",
    "activations": "how present each class is",
    "couplings": "shares that each child capsule gives its parents, last iteration",
}


def export_bundle(
    model: nn.Module,
    out: str | os.PathLike[str],
    *,
    name: str = "",
    source: str = "",
    formats: Sequence[str] = ("onnx",),
    routing_iters: int | None = None,
    outputs: Sequence[str] = ("scores",),
    opset: int | None = None,
    batch: tuple[int, int, int] | int = (1, 8, 32),
    precision: str = "fp32",
    uint8_input: bool = False,
    gate: str = "full",
    images: torch.Tensor | RealImages | None = None,
    calibration: torch.Tensor | RealImages | None = None,
    triton: bool = False,
    engine: to_tensorrt.BuildOptions | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Export a classifier and all that serving it needs.

    Args:
        model: the classifier, in float32; left as it is.
        out: folder to write. An older bundle there is replaced, another folder that holds files is refused.
        name: name of the model in the bundle; its class where empty.
        source: the name under which ``capszoo.inference.load_model`` finds the model again.
        formats: any of :data:`FORMATS`. The ONNX file is always written: the gate runs on it.
        routing_iters, outputs, opset, batch, precision, uint8_input, gate, images, calibration: see
            :func:`capszoo.export.to_onnx.export`. The outputs must include the scores.
        triton: add a model repository for Triton Inference Server.
        engine: how a TensorRT engine is built.
        progress: called with one line before each step.

    Returns:
        The manifest, as stored; ``notes`` says what could not be done here.

    Raises:
        ExportError: the model cannot be exported, or failed the gate; nothing was written.
        UsageError: arguments that make no sense.
    """
    unknown = [word for word in formats if word not in FORMATS]
    if unknown or not formats:
        raise UsageError(f"unknown format '{unknown[0] if unknown else ''}'", f"use {', '.join(FORMATS)}")
    if "scores" not in outputs:
        raise UsageError("a bundle needs the output scores", "add it to the outputs")
    if precision == "int8" and "aoti" in formats:
        raise UsageError("AOTInductor takes no int8", "leave the format aoti out")
    target = Path(out)
    _check_target(target)
    transform = model_transform(model)
    labels = label_names(model)
    if not labels:
        raise UsageError(f"{type(model).__name__} has no classes", "create it with num_classes above 0")
    job = prepare(
        model,
        name=name,
        routing_iters=routing_iters,
        outputs=outputs,
        batch=batch,
        precision=precision,
        uint8_input=uint8_input,
        progress=progress,
    )
    safe = re.sub(r"[^\w.-]+", "_", job.name)
    with workplace(target, folder=True) as work:
        report = to_onnx.write(
            job,
            work / "model.onnx",
            opset=opset,
            gate=gate,
            images=images,
            calibration=calibration,
            progress=progress,
        )
        report.gate.append(to_tensorrt.rtx_step(work / "model.onnx", report))
        notes: list[str] = []
        engines: dict[str, Any] = {}
        if "aoti" in formats:
            engines["aoti"] = to_aoti.write(job, work, progress=progress)
            report.gate.append(GateStep("AOTInductor against eager", True, engines["aoti"]["detail"]))
        options = engine or to_tensorrt.BuildOptions()
        if "tensorrt" in formats:
            engines["tensorrt"], steps = to_tensorrt.write(job, report, work, options, progress)
            report.gate.extend(steps)
            if engines["tensorrt"]["note"]:
                notes.append(engines["tensorrt"]["note"])
        else:
            why = "not run: the format tensorrt was not asked for"
            report.gate.append(GateStep("TensorRT builds the engine", None, why))
        report.path = "model.onnx"
        spec = _preprocessing(transform, report)
        _write_json(work / "preprocess.json", spec)
        (work / "labels.txt").write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
        shutil.copyfile(Path(__file__).with_name("infer.py"), work / "infer.py")
        _write_reference(job, work / "reference.npz")
        if triton:
            _write_triton(work, safe, report, len(labels), "tensorrt" in formats)
        manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "name": safe,
            "model": _describe_model(model, job, source),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "exported_with": {
                "capszoo": capszoo.__version__,
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
                {"name": key, "shape": list(shape), "dtype": "float32", "meaning": _meaning(key)}
                for key, shape in report.outputs.items()
            ],
            "labels": labels,
            "precision": {"model": precision, **report.precision_map},
            "batch": spec["batch"],
            "engines": engines,
            "comparison": _figures(report),
            "tolerance": report.tolerance,
            "gates": [asdict(step) for step in report.gate],
            "notes": notes,
            "graph": {"nodes": report.num_nodes, "operators": report.node_types, "max_rank": report.max_rank},
        }
        (work / "README.md").write_text(_readme(manifest, triton), encoding="utf-8")
        manifest["files"] = {
            file.relative_to(work).as_posix(): sha256_of(file)
            for file in sorted(work.rglob("*"))
            if file.is_file()
        }
        _write_json(work / "manifest.json", manifest)
        _put_in_place(work, target)
    return manifest


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a bundle.

    Raises:
        CapszooError: no bundle, or one that this version does not read.
    """
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CapszooError(f"{folder}: no bundle (no manifest.json)", "write one: capszoo export") from None
    except (OSError, ValueError) as e:
        raise CapszooError(f"{path}: cannot be read ({first_line(e)})", "export again") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise CapszooError(f"{path}: not a manifest of schema {SCHEMA}", "export again with this version")
    return manifest


# -- checking a bundle --------------------------------------------------------------------------------------------


@dataclass
class BundleCheck:
    """What a second look at a bundle found."""

    folder: str
    steps: list[GateStep] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return any(step.passed for step in self.steps) and all(s.passed is not False for s in self.steps)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def check_bundle(folder: str | os.PathLike[str]) -> BundleCheck:
    """Look at a bundle again: its files, its graph, its answers.

    The answers are held against those that the original gave at export (``reference.npz``), and, where the model can
    be created again from its name with the same weights, against the model itself.

    Raises:
        CapszooError: no bundle.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check = BundleCheck(str(folder))
    wrong = [
        f"{file} is {'missing' if not (folder / file).is_file() else 'not the one that was written'}"
        for file, digest in manifest["files"].items()
        if not (folder / file).is_file() or sha256_of(folder / file) != digest
    ]
    whole = f"{len(manifest['files'])} files"
    check.steps.append(GateStep("sha256 of the files", not wrong, "; ".join(wrong) or whole))
    if wrong:
        return check  # nothing more is to be said of files that are not those of the manifest
    require_libraries(True)
    import onnx

    proto = onnx.load(folder / "model.onnx")
    batch = tuple(manifest["batch"][key] for key in ("min", "usual", "max"))
    problems = inspect_graph(proto, batch)  # type: ignore[arg-type]
    opset = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    if opset != manifest["opset"]:
        problems.append(f"opset is {opset}, the manifest says {manifest['opset']}")
    detail = problems[0] if problems else f"{len(proto.graph.node)} nodes, opset {opset}"
    check.steps.append(GateStep("structure", not problems, detail))

    runner = open_runner("onnxruntime", folder, manifest)
    with np.load(folder / "reference.npz") as stored:
        images, expected = stored["images"], stored["scores"]
    index = [output["name"] for output in manifest["outputs"]].index("scores")
    got = runner(images)[index]
    check.steps.append(_held("parity with the stored answers", expected, got, manifest))
    check.steps.append(_against_original(runner, images, index, manifest))
    return check


def _held(name: str, expected: np.ndarray, got: np.ndarray, manifest: dict[str, Any]) -> GateStep:
    difference = compare.compare_outputs([expected], [got])
    limit = float(manifest["tolerance"])
    detail = (
        f"{difference.relative:.1e} of the largest output on {len(expected)} inputs, the limit is {limit:.0e}"
    )
    return GateStep(name, difference.passed(limit), detail)


def _against_original(
    runner: compare.Runner, images: np.ndarray, index: int, manifest: dict[str, Any]
) -> GateStep:
    name = "parity with eager"
    try:
        job = _original(manifest)
    except (CapszooError, WeightsError, ValueError, OSError) as e:
        return GateStep(name, None, f"not run: the model is not at hand ({first_line(e)})")
    return _held(name, compare.EagerRunner(job.original)(images)[index], runner(images)[index], manifest)


def _original(manifest: dict[str, Any], model: str | None = None) -> Job:
    """The model of a bundle, created again and served as it was exported.

    Raises:
        CapszooError: it has no name, or what the name gives has other weights.
    """
    about = manifest["model"]
    source = model or about["source"]
    if not source:
        raise CapszooError("the bundle does not say where its model comes from", "name it: --model")
    net, size = load_model(source, device="cpu"), tuple(manifest["input"]["size"])
    if model_input_size(net)[1:] != size:
        net = load_model(source, device="cpu", img_size=size)
    if _state_digest(net) != about["state_sha256"]:
        raise CapszooError(f"{source} has other weights than the bundle", "name the model it was made from")
    batch = manifest["batch"]
    return prepare(
        net,
        name=manifest["name"],
        routing_iters=about["routing_iters_asked"],
        outputs=about["outputs"],
        batch=(batch["min"], batch["usual"], batch["max"]),
        uint8_input=manifest["input"]["dtype"] == "uint8",
    )


def open_runner(
    kind: str,
    folder: str | os.PathLike[str],
    manifest: dict[str, Any] | None = None,
    model: str | None = None,
) -> compare.Runner:
    """A bundle's model in one of :data:`capszoo.export.compare.RUNNERS`.

    Args:
        kind: which.
        folder: of the bundle.
        manifest: of the bundle, if read already.
        model: for ``eager``: the name or path of the original, if the manifest's does not lead there.

    Raises:
        CapszooError: the bundle has no such engine, or this machine cannot run it.
        UsageError: no such runner.
    """
    folder, manifest = Path(folder), manifest or read_manifest(folder)
    if kind not in compare.RUNNERS:
        raise UsageError(f"unknown runner '{kind}'", f"use {', '.join(compare.RUNNERS)}")
    if kind == "eager":
        return compare.EagerRunner(_original(manifest, model).original)
    if kind.startswith("onnxruntime"):
        require_libraries(True)
        path = folder / "model.onnx"
        if kind == "onnxruntime-cuda":
            return compare.OnnxRunner(str(path), provider="CUDAExecutionProvider")
        if manifest["precision"]["model"] == "bf16":  # the CPU provider has no bfloat16
            import onnx

            return compare.OnnxRunner(widened(onnx.load(path)).SerializeToString())
        return compare.OnnxRunner(str(path))
    described = manifest["engines"].get(kind)
    if described is None or not described.get("file"):
        raise CapszooError(
            f"{folder} has no engine for {kind}",
            f"export with --format onnx,{kind}" if described is None else described.get("note", ""),
        )
    path = folder / described["file"]
    if kind == "aoti":
        return to_aoti.AotiRunner(path, described["device"])
    return to_tensorrt.TensorRTRunner(path)


def compare_bundle(
    folder: str | os.PathLike[str],
    kinds: Sequence[str],
    files: Sequence[str | Path] = (),
    model: str | None = None,
    batches: Sequence[int] = (1, 8),
    repeats: int = 20,
) -> dict[str, Any]:
    """Hold the runtimes of a bundle against the first of them.

    Args:
        folder: of the bundle.
        kinds: at least two of :data:`capszoo.export.compare.RUNNERS`, the reference first.
        files: images; random input where there are none.
        model: see :func:`open_runner`.
        batches: sizes to time, cut to the bundle's profile.
        repeats: timed calls of each.

    Returns:
        ``reference``, ``images`` (how many), ``differences`` (one per other runner) and ``timings``.

    Raises:
        CapszooError: no bundle, or a runtime that is not at hand.
        UsageError: fewer than two runners, or an unknown one.
    """
    if len(kinds) < 2:
        raise UsageError("one runner alone cannot be compared", f"name two of {', '.join(compare.RUNNERS)}")
    manifest = read_manifest(folder)
    spec = manifest["input"]
    smallest, largest = manifest["batch"]["min"], manifest["batch"]["max"]
    runners = [open_runner(kind, folder, manifest, model) for kind in kinds]
    if files:
        for file in files:
            load_image(file)  # says in one line what is wrong with a file
        inputs = np.stack([infer.preprocess(file, spec) for file in files])
    else:
        inputs = compare.probe_input("random", (largest, spec["channels"], *spec["size"]), 0, spec["dtype"])
    gathered: list[list[list[np.ndarray]]] = [[] for _ in runners]
    for start in range(0, len(inputs), largest):
        chunk = inputs[start : start + largest]
        filled = chunk[np.arange(max(len(chunk), smallest)) % len(chunk)]
        for results, runner in zip(gathered, runners, strict=True):
            results.append([output[: len(chunk)] for output in runner(filled)])
    whole = [[np.concatenate(parts) for parts in zip(*results, strict=True)] for results in gathered]
    differences = []
    for kind, outputs in zip(kinds[1:], whole[1:], strict=True):
        found = compare.compare_outputs(whole[0], outputs, "images" if files else "random", (kinds[0], kind))
        differences.append({"runner": kind, **found.to_dict()})
    timings = []
    for count in sorted({min(max(count, smallest), largest) for count in batches}):
        for kind, timing in zip(
            kinds,
            compare.time_runners(runners, inputs[np.arange(count) % len(inputs)], repeats),
            strict=True,
        ):
            timings.append({**timing.to_dict(), "runner": kind})
    return {
        "reference": kinds[0],
        "images": len(files),
        "differences": differences,
        "timings": timings,
    }


# -- parts of the bundle ------------------------------------------------------------------------------------------


def _check_target(target: Path) -> None:
    if target.is_file():
        raise UsageError(f"{target} is a file", "give the name of a folder, or FILE.onnx for the file alone")
    if target.is_dir() and any(target.iterdir()) and not (target / "manifest.json").is_file():
        raise UsageError(f"{target} holds files and is no bundle", "give a new folder")


def _put_in_place(work: Path, target: Path) -> None:
    """Rename; an older bundle stays until the new one is complete."""
    old = old_name(work)
    if target.exists():
        os.replace(target, old)
    try:
        os.replace(work, target)
    except OSError:
        with suppress(OSError):
            os.replace(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _preprocessing(transform: ImageTransform, report: ExportReport) -> dict[str, Any]:
    smallest, usual, largest = report.batch
    return {
        "input": report.input_name,
        "scores": "scores",
        "dtype": report.input_dtype,
        "layout": "NCHW",
        "channels": transform.channels,
        "color_order": "grey" if transform.channels == 1 else "RGB",
        "size": list(transform.size),
        "resize": "the shorter side to size / crop_pct, the centre cropped to size; none if it has the size",
        "interpolation": transform.interpolation,
        "crop_pct": transform.crop_pct,
        "scale": "value / 255",
        "mean": list(transform.mean),
        "std": list(transform.std),
        "normalisation_in_graph": report.input_dtype == "uint8",
        "batch": {"min": smallest, "usual": usual, "max": largest},
    }


def _describe_model(model: nn.Module, job: Job, source: str) -> dict[str, Any]:
    cfg = getattr(model, "pretrained_cfg", None) or {}
    weights: dict[str, Any] = {}
    info = _weights_of(model, cfg)
    if info is not None:
        weights = {
            "id": info.name,
            "sha256": info.sha256,
            "license": info.license,
            "metrics": info.raw.get("metrics", {}),
            "dataset": info.raw.get("dataset", {}).get("name"),
        }
    routing = [
        {"layer": name, "type": type(module).__name__, "iterations": getattr(module, attribute)}
        for name, module in job.original.named_modules()
        if type(module).__module__.startswith("capszoo.layers")
        for attribute in iteration_attributes(module)
    ]
    served = job.original if isinstance(job.original, unroll.Served) else None
    return {
        "architecture": cfg.get("architecture") or type(model).__name__,
        "class": type(model).__name__,
        "source": Path(source).name if Path(source).is_absolute() else source,
        "weights": weights,
        "state_sha256": _state_digest(model),
        "num_params": sum(p.numel() for p in model.parameters()),
        "outputs": list(served.outputs) if served else ["scores"],
        "routing": routing,
        "routing_iters": job.routing_iters,
        "routing_iters_asked": job.routing_iters[0] if len(job.routing_iters) == 1 else None,
    }


def _weights_of(model: nn.Module, cfg: dict[str, Any]) -> WeightsInfo | None:
    """The checkpoint that a model holds, if it holds one unchanged: beside its file, or bundled."""
    beside = Path(cfg["file"]).with_suffix(".json") if cfg.get("file") else None
    if beside is not None and beside.is_file():
        info, file = WeightsInfo.from_json(beside), Path(cfg["file"])
    else:
        found = bundled_tags().get(f"{cfg.get('architecture')}.{cfg.get('tag')}")
        if found is None:
            return None
        try:
            info, file = found, locate_weights(found)
        except WeightsError:
            return None
    state, own = load_safetensors(file), model.state_dict()
    equal = all(k in state and torch.equal(v.cpu(), state[k]) for k, v in own.items())
    return info if equal else None


def _state_digest(model: nn.Module) -> str:
    """One sha256 over all parameters and buffers, in the order of their names."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _write_reference(job: Job, path: Path) -> None:
    """Inputs, and the scores that the original gives for them: the probes, and up to four real images.

    int8 is made for values such as real images have: those alone, up to eight.
    """
    shape, dtype = (1, *job.size), job.input_dtype
    inputs = [compare.probe_input(probe, shape, 0, dtype) for probe in compare.PROBES]
    if job.samples is not None:
        inputs = [job.samples[:8]] if job.precision == "int8" else [*inputs, job.samples[:4]]
    stacked = np.concatenate(inputs)
    smallest, _, largest = job.batch
    # a fixed or large batch takes as many as it must, a small one no more than it can
    stacked = stacked[np.arange(max(smallest, min(len(stacked), largest))) % len(stacked)]
    scores = compare.EagerRunner(job.original)(stacked)[job.output_names.index("scores")]
    np.savez_compressed(path, images=stacked, scores=scores)


def _figures(report: ExportReport) -> dict[str, Any]:
    """Exported against eager; and, in half precision, half against float32 in PyTorch."""

    def summary(differences: list[compare.Difference]) -> dict[str, Any]:
        real = [d for d in differences if d.probe == "images"]
        count = sum(d.batch for d in real)
        return {
            "max_difference": max((d.max_abs for d in differences), default=None),
            "share_of_largest_output": max((d.relative for d in differences), default=None),
            "inputs": len(differences),
            "images": count,
            "top1_agreement": sum(d.top1_agreement * d.batch for d in real) / count if count else None,
        }

    figures: dict[str, Any] = {"onnxruntime against eager": summary(report.comparisons)}
    if report.float_comparisons:
        figures["onnxruntime before quantisation against eager"] = summary(report.float_comparisons)
    if report.accuracy:
        figures["accuracy on real images, points"] = report.accuracy
    if report.half_comparisons:
        figures[f"eager {report.precision} against eager fp32"] = summary(report.half_comparisons)
    return figures


def _meaning(output: str) -> str:
    return next((text for key, text in _MEANING.items() if output.split("_")[0] == key), "")


def _write_triton(folder: Path, name: str, report: ExportReport, classes: int, tensorrt: bool) -> None:
    """Model repositories: ``triton`` for ONNX Runtime, ``triton-tensorrt`` for the engine."""
    repositories = [("triton", 'backend: "onnxruntime"', "model.onnx")]
    if tensorrt:
        repositories.append(("triton-tensorrt", 'platform: "tensorrt_plan"', "model.plan"))
    for repository, backend, file in repositories:
        place = folder / repository / name
        (place / "1").mkdir(parents=True)
        (place / "config.pbtxt").write_text(_triton_config(name, backend, file, report), encoding="utf-8")
        shutil.copyfile(folder / "labels.txt", place / "labels.txt")
        model = folder / ("model.onnx" if file == "model.onnx" else "tensorrt/model.plan")
        if model.is_file():
            shutil.copyfile(model, place / "1" / file)
        else:
            (place / "1" / "README").write_text("put model.plan here: tensorrt/build_engine.sh makes it\n")


def _triton_config(name: str, backend: str, file: str, report: ExportReport) -> str:
    """Triton's model configuration; dims are those of one image, unless the batch is fixed in the graph."""
    smallest, usual, largest = report.batch
    fixed = smallest == largest
    lines = [f'name: "{name}"', backend, f'default_model_filename: "{file}"']
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
        f'model_warmup [\n  {{\n    name: "zero"\n    batch_size: {0 if fixed else usual}\n    inputs {{\n'
        f'      key: "{report.input_name}"\n      value {{ data_type: {dtype} dims: [ {dims} ] zero_data: true }}\n'
        "    }\n  }\n]"
    )
    return "\n".join(lines) + "\n"


def _readme(manifest: dict[str, Any], triton: bool) -> str:
    """How to use the bundle, and what is known about it."""
    spec, batch = manifest["input"], manifest["batch"]
    channels, (height, width) = spec["channels"], spec["size"]
    normal = (
        "uint8 values 0..255; the graph normalises"
        if spec["normalisation_in_graph"]
        else f"float32, value / 255, minus {spec['mean']}, divided by {spec['std']}"
    )
    run = [step for step in manifest["gates"] if step["passed"]]
    not_run = [step for step in manifest["gates"] if step["passed"] is None]
    lines = [
        f"# {manifest['name']}",
        "",
        f"Exported by capszoo {manifest['exported_with']['capszoo']}; `manifest.json` has every detail.",
        "",
        "```sh",
        "pip install numpy pillow onnxruntime",
        "python infer.py IMAGE...",
        "```",
        "",
        f"- Input `{spec['name']}`: [batch, {channels}, {height}, {width}], {spec['color_order']}, {normal}.",
        f"- Batch: {batch['min']} to {batch['max']}.",
        f"- Precision: {manifest['precision']['model']}; inputs and outputs "
        f"{'are uint8 and float32' if spec['dtype'] == 'uint8' else 'are float32'}.",
        *(f"- Output `{o['name']}` {o['shape']}: {o['meaning']}." for o in manifest["outputs"]),
    ]
    if triton:
        lines += [
            "",
            f"Triton Inference Server: `tritonserver --model-repository=triton` ({manifest['name']}).",
        ]
    for engine in manifest["engines"].values():
        lines += ["", *engine["readme"]]
    lines += ["", "## What was checked", ""]
    lines += [f"- {step['name']}: {step['detail']}" for step in run] or ["- nothing"]
    lines += ["", "## What was not checked", ""]
    lines += [f"- {s['name']}: {s['detail'].removeprefix('not run: ')}" for s in not_run]
    lines += ["- Triton Inference Server was not run on this folder."] if triton else []
    lines += ["", "`capszoo export --check .` checks the files, the graph and the answers again.", ""]
    return "\n".join(lines)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
