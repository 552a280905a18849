"""Check an existing bundle: verify it again, run it, and compare its runtimes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from capszoo._pretrained.catalogue import architectures, checkpoints, exported_file, is_path
from capszoo._pretrained.exported import OnnxModel
from capszoo._pretrained.facts import label_lines
from capszoo._pretrained.files import sha256_of
from capszoo._utils.files import read_npz
from capszoo.checkpoint import load_model
from capszoo.errors import CapszooError, UsageError, first_line
from capszoo.preprocess import load_image, model_input_size

from .. import compare, to_aoti, to_executorch, to_tensorrt
from ..options import TOLERANCES
from ..prepare import PreparedModel, prepare
from ..report import GateStep
from ..verify.graph_rules import inspect_graph, require_libraries, tensors_of, widened
from . import infer
from .manifest import read_manifest, state_digest

#: Most inputs that an export stores in reference.npz, unless its smallest batch has more.
MOST_INPUTS = 16


@dataclass
class BundleCheck:
    """Result of checking an existing bundle."""

    folder: str
    steps: list[GateStep] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return any(step.passed for step in self.steps) and all(s.passed is not False for s in self.steps)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def check_bundle(folder: str | os.PathLike[str], model: str | None = None) -> BundleCheck:
    """Check an existing bundle: its files, its graph, its outputs.

    The outputs are compared with the original's at export (``reference.npz``), and, if the model can be created
    from its name with the same weights, with the model itself. A ``.onnx`` file alone has its graph and the model.

    Args:
        folder: the bundle, or the file.
        model: name of the model that it was made from; None uses the name in the manifest.

    Raises:
        CapszooError: no bundle, or ``model`` is not the one that it was made from.
        UnknownModel, WeightsError: ``model`` does not exist, or its weights are damaged.
    """
    folder = Path(folder)
    if folder.is_file() and exported_file(str(folder)):
        return _check_file(folder, model)
    manifest = read_manifest(folder)
    check = BundleCheck(str(folder))
    check.steps.append(_same_files(folder, manifest))
    if not check.steps[-1].passed:
        return check  # files that differ from the manifest are not checked further
    check.steps.append(_client_files(folder, manifest))
    require_libraries(True)
    check.steps.append(_structure(folder / "model.onnx", manifest))
    if not check.steps[-1].passed:
        return check  # a graph that violates the rules is not run

    runner = open_runner("onnxruntime", folder, manifest)
    stored = read_npz(folder / "reference.npz", ("images", "scores"), max_bytes=2**30)
    images, expected = stored["images"], stored["scores"]
    most = max(int(manifest["batch"]["min"]), MOST_INPUTS)
    if not 1 <= len(images) <= most:
        what = f"holds {len(images)} inputs, not 1 to {most}"
        raise CapszooError(f"{folder / 'reference.npz'}: {what}", "export again")
    index = [output["name"] for output in manifest["outputs"]].index("scores")
    name = "parity with the stored answers"
    try:
        got = runner(images)[index]
    except Exception as error:  # ONNX Runtime raises many kinds of errors
        check.steps.append(GateStep(name, False, f"does not run: {first_line(error)}"))
        return check
    check.steps.append(_verified(name, expected, got, manifest))
    check.steps.append(_against_original(got, images, index, manifest, model))
    if "tensorrt" in manifest["engines"]:
        check.steps.append(_engine(folder, images, expected, index, manifest))
    return check


def _check_file(path: Path, model: str | None) -> BundleCheck:
    """Check a ``.onnx`` file by what it states of itself."""
    require_libraries(True)
    net = OnnxModel(path)
    properties, spec = net.stated, net.stated["preprocess"]
    precision, iterations = str(properties.get("precision", "fp32")), properties.get("routing_iters", ())
    tolerance = TOLERANCES.get(precision, TOLERANCES["fp32"])
    with suppress(KeyError, ValueError):
        stated = float(str(properties["tolerance"]))
        tolerance = stated if 0 < stated <= 1 else tolerance
    manifest: dict[str, Any] = {
        "name": str(properties.get("model", path.stem)),
        "model": {
            "source": str(properties.get("weights", "")),
            "state_sha256": properties.get("state_sha256"),
            "routing_iters_asked": iterations[0] if len(iterations) == 1 else None,
            "outputs": ["scores"],
        },
        "input": {"size": spec["size"], "dtype": "float32"},
        "batch": spec["batch"],
        "precision": {"model": precision},
        "tolerance": tolerance,
    }
    check = BundleCheck(str(path), [_structure(path, manifest)])
    if not check.passed:
        return check
    shape, runner = (1, net.in_chans, *net.img_size), compare.EagerRunner(net)
    # normalised pixels: a graph that normalises takes nothing else
    pixels = np.concatenate(
        [compare.probe_input(probe, shape, dtype="uint8") for probe in compare.PROBES[:3]]
    )
    mean, std = (np.asarray(spec[key], np.float32)[:, None, None] for key in ("mean", "std"))
    images = (pixels.astype(np.float32) / 255 - mean) / std
    got = runner(images)[0]
    check.steps.append(GateStep("finite scores", bool(np.isfinite(got).all()), f"{len(images)} inputs"))
    if precision == "int8":
        why = "not run: int8 is compared on real images: capszoo eval"
        check.steps.append(GateStep("parity with eager", None, why))
    else:
        check.steps.append(_against_original(got, images, 0, manifest, model))
    return check


def _engine(
    folder: Path, images: np.ndarray, expected: np.ndarray, index: int, manifest: dict[str, Any]
) -> GateStep:
    """Compare the TensorRT engine, which may have been built after the export, with the stored answers.

    AOTInductor's package is not run: unlike an engine, it is native code, and its sha256 lies in the same folder.
    """
    name = "TensorRT engine against the stored answers"
    try:
        runner = open_runner("tensorrt", folder, manifest)
    except CapszooError as error:
        return GateStep(name, None, f"not run: {error.message}")
    try:
        got = runner(images)[index]
    except CapszooError as error:
        return GateStep(name, False, f"does not run: {error.message}")
    return _verified(name, expected, got, manifest)


def _same_files(folder: Path, manifest: dict[str, Any]) -> GateStep:
    """Compare the files with the sha256 in the manifest."""
    wrong: list[str] = []
    rebuilt: list[str] = []
    replaceable = to_tensorrt.built_later(folder, manifest["name"])
    for file, digest in manifest["files"].items():
        if not (folder / file).is_file():
            wrong.append(f"{file} is missing")
        elif sha256_of(folder / file) != digest:  # an engine may have been built again, on the target's GPU
            (rebuilt if file in replaceable else wrong).append(f"{file} is not the one that was written")
    whole = f"{len(manifest['files'])} files" + "".join(f"; {note}" for note in rebuilt)
    return GateStep("sha256 of the files", not wrong, "; ".join(wrong) or whole)


def _client_files(folder: Path, manifest: dict[str, Any]) -> GateStep:
    """Check that the files for clients agree with the manifest."""
    name = "preprocess.json and labels.txt"
    try:
        spec = json.loads((folder / "preprocess.json").read_text(encoding="utf-8"))
        labels = (folder / "labels.txt").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, RecursionError) as e:
        return GateStep(name, False, f"cannot be read ({first_line(e)})")
    if not isinstance(spec, dict):
        return GateStep(name, False, "preprocess.json is no object")
    other = [key for key, value in spec.items() if manifest["input"].get(key, value) != value]
    other += [key for key in ("channels", "size", "mean", "std", "dtype", "batch") if key not in spec]
    if other:
        return GateStep(name, False, f"preprocess.json differs from the manifest in {other[0]}")
    if labels != label_lines(manifest["labels"]):
        return GateStep(name, False, "labels.txt differs from the manifest")
    return GateStep(name, True, f"{len(labels)} classes")


def _structure(path: Path, manifest: dict[str, Any]) -> GateStep:
    """Check that the graph satisfies our rules; reads only its own file."""
    import onnx

    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's errors
        return GateStep("structure", False, f"model.onnx holds no graph ({first_line(error)})")
    outside = onnx.TensorProto.EXTERNAL
    if any(tensor.data_location == outside for tensor in tensors_of(proto)):
        return GateStep("structure", False, "model.onnx refers to data in another file")
    batch = tuple(manifest["batch"][key] for key in ("min", "usual", "max"))
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), None)
    try:
        problems = inspect_graph(proto, batch)  # type: ignore[arg-type]
    except Exception as error:  # a graph that no exporter wrote raises many kinds
        problems = [f"cannot be inspected ({first_line(error)})"]
    if opset != manifest.get("opset", opset):
        problems.append(f"opset is {opset}, the manifest says {manifest['opset']}")
    detail = problems[0] if problems else f"{len(proto.graph.node)} nodes, opset {opset}"
    return GateStep("structure", not problems, detail)


def _verified(name: str, expected: np.ndarray, got: np.ndarray, manifest: dict[str, Any]) -> GateStep:
    if expected.shape != got.shape:
        return GateStep(name, False, f"scores of shape {got.shape}, not {expected.shape}")
    # int8's gate compares batches of real images
    int8 = manifest["precision"]["model"] == "int8"
    difference = (
        compare.compare_outputs([expected], [got]) if int8 else compare.compare_by_input(expected, got)
    )
    limit = float(manifest["tolerance"])
    detail = (
        f"{difference.relative:.1e} of the largest output on {len(expected)} inputs, the limit is {limit:g}"
    )
    if difference.top1_agreement is not None:
        detail += f"; top-1 equal on {difference.top1_agreement:.0%}"
    return GateStep(name, difference.passed(limit), detail)


def _against_original(
    got: np.ndarray, images: np.ndarray, index: int, manifest: dict[str, Any], model: str | None
) -> GateStep:
    name = "parity with eager"
    try:
        prepared = _original(manifest, model)
    except (CapszooError, ValueError, OSError) as e:
        if model is not None:
            raise
        return GateStep(name, None, f"not run: the model cannot be created here ({first_line(e)})")
    return _verified(name, compare.EagerRunner(prepared.original)(images)[index], got, manifest)


def _original(manifest: dict[str, Any], model: str | None = None) -> PreparedModel:
    """The model of a bundle, recreated and prepared as for its export.

    Raises:
        CapszooError: it has no name, or the model of that name has other weights.
    """
    about = manifest["model"]
    source = model or about["source"]
    if not source:
        raise CapszooError("the bundle does not say where its model comes from", "name it: --model")
    if model is None and not _is_at_hand(source):
        raise CapszooError(
            f"{source} is neither in the zoo nor in this folder, and is not fetched on a bundle's word",
            "name it: --model",
        )
    try:
        net, size = load_model(source, device="cpu"), tuple(manifest["input"]["size"])
    except (CapszooError, ValueError, OSError) as e:
        if model is not None:
            raise
        raise CapszooError(
            f"{source}, which the bundle was made from: {first_line(e)}", "name it: --model"
        ) from e
    if model_input_size(net)[1:] != size:
        try:
            net = load_model(source, device="cpu", img_size=size)
        except UsageError as e:
            raise CapszooError(
                f"the bundle's images have another size: {e.message}", "name it: --model"
            ) from e
    if state_digest(net) != about["state_sha256"]:
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


def _is_at_hand(source: str) -> bool:
    """Whether a model is the zoo's or lies on this machine, so that no repository of a stranger is fetched."""
    if source in checkpoints() or source in architectures():
        return True
    here = Path(source)  # also a name without a separator of folders
    there = here.is_dir() or (here.is_file() and here.suffix in (".safetensors", ".json"))
    return (is_path(source) or there) and not source.replace("_", "-").startswith("hf-hub:")


def open_runner(
    kind: str,
    folder: str | os.PathLike[str],
    manifest: dict[str, Any] | None = None,
    model: str | None = None,
) -> compare.Runner:
    """A bundle's model in one of :data:`capszoo.export.compare.RUNNERS`.

    Args:
        kind: the runner.
        folder: of the bundle.
        manifest: of the bundle, if already read.
        model: for ``eager``: the name or path of the original, if the manifest's is not valid.

    Raises:
        CapszooError: the bundle has no such engine, or this machine cannot run it.
        UsageError: no such runner.
        UnknownModel, WeightsError: ``model`` does not exist, or its weights are damaged.
    """
    folder, manifest = Path(folder), manifest or read_manifest(folder)
    if kind not in compare.RUNNERS:
        raise UsageError(f"unknown runtime '{kind}'", f"use {', '.join(compare.RUNNERS)}")
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
    file = described and described.get("file")
    if described and not file and kind == "tensorrt" and (folder / to_tensorrt.PLAN).is_file():
        file = to_tensorrt.PLAN  # built later, by the bundle's own script
    if not described or not file:
        raise CapszooError(
            f"{folder} has no engine for {kind}",
            f"export with --format onnx,{kind}" if described is None else described.get("note", ""),
        )
    path = folder / file
    if kind == "aoti":
        spec = manifest["input"]
        return to_aoti.AotiRunner(path, described["device"], (spec["channels"], *spec["size"]), spec["dtype"])
    if kind == "executorch":
        return to_executorch.ExecuTorchRunner(path)
    if to_tensorrt.stated_option(folder, "version_compatible"):
        raise CapszooError(
            f"{path} is version-compatible: it contains native code, which is not run",
            "export without --version-compatible to check and time an engine",
        )
    return to_tensorrt.TensorRTRunner(path)


def compare_bundle(
    folder: str | os.PathLike[str],
    kinds: Sequence[str],
    files: Sequence[str | Path] = (),
    model: str | None = None,
    batches: Sequence[int] = (1, 8),
    repeats: int = 20,
) -> dict[str, Any]:
    """Compare the runtimes of a bundle with the first of them.

    Args:
        folder: of the bundle.
        kinds: at least two of :data:`capszoo.export.compare.RUNNERS`, the reference first.
        files: images; random input if empty.
        model: see :func:`open_runner`.
        batches: batch sizes to time, limited to the bundle's profile.
        repeats: timed calls of each.

    Returns:
        ``reference``, ``images`` (their number), ``differences`` (one per other runner) and ``timings``.

    Raises:
        CapszooError: no bundle, or a runtime that is not installed.
        UsageError: fewer than two runners, or an unknown one.
    """
    if len(kinds) < 2:
        raise UsageError("a bundle is timed against a reference", f"name two of {', '.join(compare.RUNNERS)}")
    path, manifest = Path(folder), read_manifest(folder)
    steps = [_same_files(path, manifest)]
    if any(kind.startswith("onnxruntime") for kind in kinds):
        require_libraries(True)
        steps.append(_structure(path / "model.onnx", manifest))
    for step in steps:
        if not step.passed:
            raise CapszooError(
                f"{path}: {step.name}: {step.detail}", "export again; capszoo check shows the rest"
            )
    spec = manifest["input"]
    batch = manifest["batch"]
    smallest, largest = batch["min"], batch["max"]
    runners = [open_runner(kind, path, manifest, model) for kind in kinds]
    if files:
        inputs = np.stack([infer.read_picture(load_image(file), spec)[0] for file in files])
    else:
        count = max(min(max(batches), largest), smallest)
        inputs = compare.probe_input("random", (count, spec["channels"], *spec["size"]), 0, spec["dtype"])
    whole = compare.joined(compare.run_in_batches(runners, inputs, (smallest, batch["usual"], largest)))
    scores = [output["name"] for output in manifest["outputs"]].index("scores")
    differences = []
    for kind, outputs in zip(kinds[1:], whole[1:], strict=True):
        probe = "images" if files else "random"
        difference = compare.compare_outputs(whole[0], outputs, probe, (kinds[0], kind), scores)
        differences.append({"runner": kind, **difference.to_dict()})
    timings = []
    for count in sorted({min(max(count, smallest), largest) for count in batches}):
        rows = compare.time_runners(runners, inputs[np.arange(count) % len(inputs)], repeats)
        timings += [{**row.to_dict(), "runner": kind} for kind, row in zip(kinds, rows, strict=True)]
    return {"reference": kinds[0], "images": len(files), "differences": differences, "timings": timings}
