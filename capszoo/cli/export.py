"""``capszoo export`` and ``check``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from .._pretrained.catalogue import check_model_argument
from .._utils.choices import EXPORT_FORMATS, names_onnx_file
from ..data.specs import is_data_set
from ..errors import CapszooError, UsageError, unknown_name
from .common import (
    MODEL_HELP,
    DataFolderOption,
    ItersOption,
    JsonOption,
    OriginalOption,
    SizeOption,
    SkipBadOption,
    given,
    note,
    parse_size,
    print_json,
    print_table,
    printable,
    refuse_unused,
    say,
    stderr,
)

if TYPE_CHECKING:
    from ..export.options import ExportOptions
    from ..export.to_onnx import ExportReport
    from ..export.verify.images import RealImages


_output, _precision, _tensorrt, _verification = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Output", "Precision", "TensorRT", "Verification")
)


def export_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)],
    out: Annotated[
        Path | None,
        _output("--out", "-o", help="Folder to write, or FILE.onnx alone (required).", metavar="PATH"),
    ] = None,
    formats: Annotated[
        str,
        _output(
            "--format",
            help="onnx, tensorrt, aoti, executorch; several with commas. ONNX is always written.",
            metavar="NAME",
        ),
    ] = "onnx",
    precision: Annotated[
        str,
        _precision(
            help="fp32, fp16, bf16, or int8 by Q/DQ (needs --calibrate and --verify-data).", metavar="NAME"
        ),
    ] = "fp32",
    calibrate: Annotated[
        str | None, _precision(metavar="FOLDER|DATA SET", help="Real images that give INT8 its ranges.")
    ] = None,
    opset: Annotated[int | None, _output(help="ONNX opset (default: 20; 22 for bf16).", metavar="N")] = None,
    batch: Annotated[
        str,
        _output(
            "--batch-profile",
            metavar="MIN,OPT,MAX",
            help="Smallest, typical and largest batch size (TensorRT's min, opt and max); one number fixes the batch.",
        ),
    ] = "1,8,32",
    routing_iters: ItersOption = None,
    img_size: SizeOption = None,
    outputs: Annotated[
        str, _output(help="scores, poses, activations, couplings; several with commas.", metavar="NAME")
    ] = "scores",
    uint8_input: Annotated[
        bool, _output("--uint8-input", help="Take uint8 images; normalise inside the graph.")
    ] = False,
    runtime: Annotated[
        str | None,
        _output(
            metavar="cpu|gpu",
            help="Target of the ONNX file (default: gpu for TensorRT or half precision, else cpu).",
        ),
    ] = None,
    triton: Annotated[bool, _output("--triton", help="Add a Triton model repository.")] = False,
    triton_backend: Annotated[
        str,
        _output(
            help="Backend of --triton: onnxruntime, tensorrt, python; several with commas, each in its repository "
            "(default: onnxruntime, and tensorrt with its format).",
            metavar="NAME",
            show_default=False,
        ),
    ] = "",
    timing_cache: Annotated[
        Path | None,
        _tensorrt(
            help="TensorRT's timing cache file: read, updated, created if it does not exist.", metavar="PATH"
        ),
    ] = None,
    workspace: Annotated[
        int, _tensorrt(min=1, help="TensorRT's workspace limit in MiB.", metavar="N")
    ] = 4096,
    optimization_level: Annotated[
        int, _tensorrt(min=0, max=5, help="0 builds quickly, 5 measures all tactics.", metavar="N")
    ] = 3,
    version_compatible: Annotated[
        bool, _tensorrt("--version-compatible", help="Run on later TensorRT versions.")
    ] = False,
    hardware_compatible: Annotated[
        bool, _tensorrt("--hardware-compatible", help="Run on other GPUs from Ampere on.")
    ] = False,
    refit: Annotated[
        bool, _tensorrt("--refit", help="Build an engine whose weights can be replaced.")
    ] = False,
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained/--no-pretrained", help="Load weights (default), or export untrained ones."
        ),
    ] = True,
    images: Annotated[
        str | None,
        _verification(
            "--verify-data",
            metavar="PATH|DATA SET",
            help="Real images. Top-1 must be equal in fp32, on 99.5% of the images in fp16 and bf16; INT8 may lose "
            "0.5 points of accuracy.",
        ),
    ] = None,
    data: DataFolderOption = None,
    skip_bad: SkipBadOption = False,
    tolerance: Annotated[
        float | None,
        _verification(
            help="Allowed difference as a share of the largest output (default: by precision).",
            metavar="SHARE",
        ),
    ] = None,
    quick: Annotated[
        bool, _verification("--quick", help="Fewer probes: random and zero input only.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model as ONNX, TensorRT, AOTInductor or ExecuTorch and verify it; routing is unrolled."""
    check_model_argument(model)
    if out is None:
        raise UsageError("Missing option '--out'", "give a folder, or FILE.onnx for the file alone")
    profile, kinds = _batch(batch), [word.strip() for word in formats.split(",")]
    alone = names_onnx_file(out)
    unknown = [kind for kind in kinds if kind not in EXPORT_FORMATS]
    if unknown:
        raise UsageError(unknown_name("format", unknown[0], EXPORT_FORMATS))
    if alone and (kinds != ["onnx"] or triton):
        raise UsageError(f"--out {out} is one file", "give a folder for other formats and for --triton")
    if "tensorrt" not in kinds:
        engine_options = (
            "timing_cache workspace optimization_level version_compatible hardware_compatible refit"
        )
        refuse_unused(context, engine_options.split(), "without TensorRT", "add --format tensorrt")
    if images is None and calibrate is None:
        refuse_unused(context, ["data", "skip_bad"], "without images", "add --verify-data")
    elif not any(place and is_data_set(place) for place in (images, calibrate)):
        refuse_unused(context, ["data"], "on a folder of images", "leave it out")
    if not triton:
        refuse_unused(context, ["triton_backend"], "without a model repository", "add --triton")
    from ..export.options import BuildOptions, BundleOptions, ExportOptions

    shared: dict[str, Any] = dict(
        name=Path(model).name,
        routing_iters=routing_iters,
        outputs=tuple(word.strip() for word in outputs.split(",")),
        opset=opset,
        batch=profile,
        precision=precision,
        uint8_input=uint8_input,
        gate="quick" if quick else "full",
        runtime=runtime,
        tolerance=tolerance,
    )
    engine = BuildOptions(
        workspace_mib=workspace,
        optimization_level=optimization_level,
        timing_cache=None if timing_cache is None else str(timing_cache),
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,
        refit=refit,
    )
    options: ExportOptions = (
        ExportOptions(**shared)
        if alone
        else BundleOptions(
            **shared,
            source=model,
            formats=kinds,
            triton=triton,
            triton_backends=[word.strip() for word in triton_backend.split(",") if word],
            engine=engine,
        )
    )
    _check_int8_options(options.precision, calibrate, images)
    load: dict[str, Any] = dict(pretrained=pretrained, **given(img_size=parse_size(img_size)))
    _export(model, load, out, options, images, calibrate, data, as_json, [] if skip_bad else None)


def _check_int8_options(precision: str, calibrate: str | None, images: str | None) -> None:
    if precision != "int8":
        if calibrate is not None:
            raise UsageError(
                f"--calibrate does nothing for {precision}", "give --precision int8, or leave --calibrate out"
            )
    elif calibrate is None:
        raise UsageError("int8 needs --calibrate", "give a folder of real images, or the name of a data set")
    elif images is None:
        raise UsageError("int8 needs --verify-data", "give labelled images that measure what it costs")


def _export(
    model: str,
    load: dict[str, Any],
    out: Path,
    options: ExportOptions,
    images: str | None,
    calibrate: str | None,
    data: Path | None,
    as_json: bool,
    skipped: list[str] | None = None,
) -> None:
    """Load the model and its images, write the requested formats, and print the verification.

    Args:
        model: MODEL argument of the user.
        load: arguments for loading it.
        out: folder, or file for the ONNX graph alone.
        options: export options.
        images: location of the images whose outputs are compared.
        calibrate: location of the images that determine INT8's ranges.
        data: folder of the data sets.
        as_json: print the report as JSON.
        skipped: receives a line for each image that cannot be read; None refuses such images.
    """
    from ..export import bundle, to_onnx
    from ..export.options import BundleOptions
    from ..export.verify.images import CALIBRATION_IMAGES, VERIFY_IMAGES, open_images
    from ..inference import NoWeights, load_model

    try:
        net = load_model(model, device="cpu", **load)
    except NoWeights as error:
        raise CapszooError(error.message, "--no-pretrained exports the untrained architecture") from None

    def opened(where: str | None, split: str, limit: int) -> RealImages | None:
        if where is None:
            return None
        return open_images(net, where, split, limit, options.uint8_input, data, skipped)

    options = replace(
        options,
        images=opened(images, "test", VERIFY_IMAGES),
        calibration=opened(calibrate, "train", CALIBRATION_IMAGES),
    )
    for line in skipped or ():
        note(f"left out: {line}")
    with stderr().status("exporting") as status:
        options = replace(options, progress=lambda line: status.update(escape(line)))
        if isinstance(options, BundleOptions):
            manifest, report = bundle.export_bundle(net, out, options), None
        else:
            manifest, report = {}, to_onnx.export(net, out, options)
    if as_json:
        print_json(report.to_dict() if report else manifest)
    elif report:
        _print_report(report)
    else:
        _print_manifest(out, manifest)
    for line in manifest.get("notes", ()):
        note(line)


def check_bundle_folder(folder: str, as_json: bool, model: str | None = None) -> None:
    """Verify a bundle and print each step; raises ``CapszooError`` if one fails."""
    from ..export.bundle import check_bundle

    report = check_bundle(folder, model)
    if as_json:
        print_json(report.to_dict())
    else:
        _print_gate([(step.name, step.passed, step.detail) for step in report.steps])
    if not report.passed:
        failed = next((step for step in report.steps if step.passed is False), None)
        raise CapszooError(f"{folder}: {failed.name if failed else 'nothing'} failed", "export it again")


def check_command(
    bundle: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A bundle or a .onnx file, as capszoo export wrote it.", show_default=False
        ),
    ],
    original: OriginalOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify an exported bundle or file: checksums, graph structure, outputs against the original."""
    check_bundle_folder(str(bundle), as_json, original)


def _print_report(report: ExportReport) -> None:
    print_table(
        ("input", "batch", "max difference", "of the largest output", "top-1 equal"),
        (
            (
                one.probe,
                str(one.batch),
                f"{one.max_abs:.1e}",
                f"{one.relative:.1e}",
                "" if one.top1_agreement is None else f"{one.top1_agreement:.0%}",
            )
            for one in report.comparisons
        ),
    )
    say()
    _print_gate([(step.name, step.passed, step.detail) for step in report.gate])
    say()
    counts = "/".join(map(str, report.routing_iters))
    say(
        f"{report.path}: {report.file_bytes:,} bytes, opset {report.opset}, {report.num_nodes} nodes, "
        f"batch {_range(report.batch[0], report.batch[2])}{f', {counts} routing iterations' if counts else ''}"
    )


def _print_gate(steps: Sequence[tuple[str, bool | None, str]]) -> None:
    states = {True: Text("passed", "green"), False: Text("failed", "red")}
    run = ((name, states[passed], detail) for name, passed, detail in steps if passed is not None)
    print_table(("gate", "", ""), run)
    left = [
        f"{name} ({detail.removeprefix('not run: ')})" for name, passed, detail in steps if passed is None
    ]
    if left:
        say(Text.assemble(("not run:", "yellow"), f" {printable('; '.join(left))}"))


def _print_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    _print_gate([(step["name"], step["passed"], step["detail"]) for step in manifest["gates"]])
    say()
    files = ", ".join(sorted({name.partition("/")[0] for name in [*manifest["files"], "manifest.json"]}))
    batch = manifest["batch"]
    say(
        f"{folder}: {manifest['precision']['model']}, opset {manifest['opset']}, "
        f"batch {_range(batch['min'], batch['max'])}; {files}"
    )


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _batch(text: str) -> tuple[int, int, int] | int:
    """``8`` or ``1,8,32``."""
    parts = text.split(",")
    if len(parts) not in (1, 3) or not all(part.strip().isdecimal() for part in parts):
        raise UsageError(
            f"invalid --batch-profile {text}",
            "give one number, or smallest, usual and largest, such as 1,8,32",
        )
    numbers = [int(part) for part in parts]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1], numbers[2])
