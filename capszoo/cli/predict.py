"""``capszoo predict``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._pretrained.catalogue import check_model_argument, exported_file
from .._utils.files import check_writable, write_csv
from ..errors import CapszooError, UsageError, require, unknown_name
from ..scores import TABLE_COLUMNS
from .common import (
    BackgroundOption,
    BatchSizeOption,
    DeviceOption,
    ExportedArgument,
    FitOption,
    ImagesArgument,
    InvertOption,
    ItersOption,
    JsonOption,
    SizeOption,
    check_paths,
    given,
    note,
    parse_size,
    print_error,
    print_json,
    print_table,
    progress_bar,
    refuse_unused,
    say,
    stderr,
)

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..scores import ImagePrediction

RUNTIMES = ("auto", "torch", "onnx")


_cluster = partial(typer.Option, rich_help_panel="Cluster")

RayOption = Annotated[
    str | None,
    _cluster(
        "--ray",
        metavar="ADDRESS",
        help="Predict on a Ray cluster: local, auto, HOST:PORT or ray://HOST:PORT.",
    ),
]
WorkersOption = Annotated[
    int | None,
    _cluster(
        "--workers",
        min=1,
        metavar="N",
        help="Processes of the cluster (default: one per CPU, or per GPU with --device cuda).",
    ),
]
ShardSizeOption = Annotated[
    int,
    _cluster(
        "--shard-size",
        min=1,
        metavar="N",
        help="Images per parquet file; a rerun computes the missing files only.",
    ),
]


def predict_command(
    context: typer.Context,
    model: ExportedArgument,
    images: ImagesArgument,
    topk: Annotated[
        int, typer.Option("--topk", "-k", min=1, metavar="N", help="Classes to show per image.")
    ] = 3,
    device: DeviceOption = None,
    runtime: Annotated[
        str,
        typer.Option(
            metavar="|".join(RUNTIMES),
            help="auto: cached ONNX file if there is one (CPU), else PyTorch. onnx: export it first if needed.",
        ),
    ] = "auto",
    img_size: SizeOption = None,
    routing_iters: ItersOption = None,
    invert: InvertOption = False,
    fit: FitOption = False,
    background: BackgroundOption = None,
    batch_size: BatchSizeOption = 32,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write a table to a .csv file, a row per image and class; with --ray a folder of .parquet files.",
        ),
    ] = None,
    as_json: JsonOption = False,
    ray: RayOption = None,
    workers: WorkersOption = None,
    shard_size: ShardSizeOption = 10_000,
) -> None:
    """Classify images."""
    if ray is None:
        refuse_unused(context, ["workers", "shard_size"], "without --ray", "add --ray local")
    if runtime not in RUNTIMES:
        raise UsageError(unknown_name("runtime", runtime, RUNTIMES))
    _check_out(out, ray, as_json, runtime)
    check_model_argument(model, exported=True)
    check_paths(images)
    from ..images import find_images

    files = find_images(images)
    options: dict[str, Any] = given(img_size=parse_size(img_size), routing_iters=routing_iters)
    reading: dict[str, Any] = {"background": background, "invert": invert, "fit": fit}
    if ray is not None and out is not None:
        job = dict(topk=topk, batch_size=batch_size, device=device, options=options, reading=reading)
        return _by_ray(model, files, out, ray, workers, shard_size, job)
    if out is not None:
        _check_table(out)
    cached = _cached(model, runtime, device, options)
    if cached is None:
        results, kind, frame = _by_torch(model, files, topk, batch_size, device, options, reading)
    else:
        results, kind, frame = _by_onnx(cached, files, topk, batch_size, reading)
    if as_json:
        rows = [result.to_dict() for result in results]
        used = "torch" if cached is None else "onnx"
        print_json({"model": model, "runtime": used, "score_kind": kind, "results": rows})
    elif out is None:
        _print_table(results, kind)
    if out is not None:
        write_csv(out, TABLE_COLUMNS, map(_short, (row for one in results for row in one.table_rows())))
        if not as_json:
            say(f"written: {out}, {len(results)} images")
    _print_resizing(results, frame, fit)
    _print_notes(results)
    _print_errors(results)


def _check_out(out: Path | None, ray: str | None, as_json: bool, runtime: str) -> None:
    """Refuse incompatible options, before anything is loaded."""
    if ray is None:
        if out is not None and out.suffix == ".parquet":
            raise UsageError(
                f"--out {out}: parquet is written with --ray", "give --ray local, or a .csv file"
            )
        if out is not None and out.suffix.lower() != ".csv":
            raise UsageError(f"--out {out} is no .csv file", "for JSON use --json")
        return
    if out is None or out.suffix != ".parquet":
        raise UsageError("--ray writes a folder of parquet files", "give --out NAME.parquet")
    if as_json or runtime == "onnx":
        raise UsageError(f"--ray and {'--json' if as_json else '--runtime onnx'} exclude each other")
    require("--ray", ("ray", "pyarrow"), "ray")


def _check_table(out: Path) -> None:
    """Refuse a table that cannot be written or would replace another file, such as the labels of the images."""
    check_writable(out)
    if not out.is_file():
        return
    try:
        with open(out, "rb") as file:
            header = file.readline(1000)
    except OSError:
        raise CapszooError(f"{out} exists and cannot be read", "choose another --out") from None
    if header and header.strip() != ",".join(TABLE_COLUMNS).encode():
        raise CapszooError(f"{out} exists and is no table of predictions", "choose another --out")


def _short(row: Iterable[Any]) -> list[Any]:
    """A row with numbers of six digits."""
    return [f"{value:.6g}" if isinstance(value, float) else value for value in row]


def _by_ray(
    model: str,
    files: list[Path],
    out: Path,
    address: str,
    workers: int | None,
    shard_size: int,
    settings: dict[str, Any],
) -> None:
    """Predict on a Ray cluster and report the written files; exit code 1 if images could not be read."""
    from ..checkpoint import resolve
    from ..ray_predict import Job, predict_by_ray

    checkpoint = resolve(model)
    job = Job(
        model=model if checkpoint.path is None else str(checkpoint.path.absolute()),
        sha256=_sha256(checkpoint),
        root=str(Path.cwd()),
        out=str(out.absolute()),
        **settings,
    )
    names = [str(file) for file in files]
    with progress_bar("predicting", len(names)) as advance:
        done = predict_by_ray(job, names, address, workers=workers, shard_size=shard_size, advance=advance)
    kept = f", {done.kept} of them from an earlier call" if done.kept else ""
    say(f"written: {out}, {done.images} images in {done.shards} files{kept}")
    if done.errors:
        print_error(f"{done.errors} of {done.images} images could not be read: see the column error of {out}")
        raise typer.Exit(1)


def _sha256(checkpoint: Checkpoint) -> str:
    """The sha256 of a model's weights; empty for weights of timm, which state none."""
    from .._pretrained.files import sha256_of

    if checkpoint.exported and checkpoint.path is not None:
        return sha256_of(checkpoint.path)
    sha256 = checkpoint.stated_sha256()
    if sha256 is None and checkpoint.kind == "folder" and checkpoint.path is not None:
        weights = checkpoint.path / "model.safetensors"
        return sha256_of(weights) if weights.is_file() else ""
    return sha256 or ""


def _cached(model: str, runtime: str, device: str | None, options: dict[str, Any]) -> Path | None:
    """The exported file used for prediction; None for PyTorch. With ``onnx`` it is exported if it does not exist.

    A MODEL that is an exported file or a bundle is used as it is.
    """
    on_cpu = device in (None, "auto", "cpu")
    file = exported_file(model)
    if file is not None:
        if runtime == "torch" or not on_cpu:
            option = "--runtime torch" if runtime == "torch" else f"--device {device}"
            raise UsageError(f"{model} runs in ONNX Runtime on the CPU", f"leave {option} out")
        if options:
            raise UsageError(
                f"{model} is an exported file, whose settings are fixed",
                "leave --img-size and --routing-iters out",
            )
        require("an exported file", ("onnxruntime",), "export")
        return file if Path(model.removeprefix("local-dir:")).is_file() else file.parent
    if runtime == "onnx" and not on_cpu:
        raise UsageError(f"--runtime onnx computes on the CPU, not on {device}", "leave one of them out")
    if runtime == "torch" or not on_cpu or (runtime, device) == ("auto", "auto"):  # CUDA, if there is one
        return None
    from ..export.cached import export_to_cache, find_cached

    cached = find_cached(model, **options)
    if cached is not None or runtime == "auto":
        return cached
    require("--runtime onnx", ("onnx", "onnxscript", "onnxruntime"), "export")
    with stderr().status("exporting once; later calls use the file"):
        return export_to_cache(model, **options)


@dataclass(frozen=True)
class _Frame:
    """Height and width to which images are scaled, and of the network's input; and how they are framed."""

    size: tuple[int, int]
    canvas: tuple[int, int]
    crop_pct: float
    crop_mode: str


#: Predictions, kind of the scores, and how images were framed.
_Answer = tuple[list["ImagePrediction"], str, _Frame]


def _by_torch(
    model: str,
    files: list[Path],
    topk: int,
    batch_size: int,
    device: str | None,
    options: dict[str, Any],
    reading: dict[str, Any],
) -> _Answer:
    from ..inference import load_model, predict
    from ..preprocess import model_transform
    from ..scores import score_kind

    net = load_model(model, device=device, **options)
    transform = model_transform(net, **reading)
    with progress_bar("predicting", len(files)) as advance:
        results = predict(net, files, topk, batch_size, advance, transform)
    size = transform.object_size or transform.size
    return results, score_kind(net), _Frame(size, transform.size, transform.crop_pct, transform.crop_mode)


def _by_onnx(folder: Path, files: list[Path], topk: int, batch_size: int, reading: dict[str, Any]) -> _Answer:
    from ..export.cached import CachedModel

    is_file = folder.suffix.lower() == ".onnx"
    model = CachedModel(folder, *(["export it again"] if is_file else []))
    with progress_bar("predicting", len(files)) as advance:
        results = model.predict(files, topk, batch_size, advance, **reading)
    canvas = model.spec["size"][0], model.spec["size"][1]
    size = model.spec.get("object_size") or canvas
    how = float(model.spec["crop_pct"]), str(model.spec.get("crop_mode", "center"))
    return results, model.score_kind, _Frame((size[0], size[1]), canvas, *how)


def _print_table(results: Sequence[ImagePrediction], kind: str) -> None:
    rows = [
        (result.image if rank == 0 else "", one.label, f"{one.probability:.4f}", f"{one.score:.4f}")
        for result in results
        for rank, one in enumerate(result.top)
    ]
    if rows:
        print_table(("image", "class", "probability", f"score ({kind})"), rows)


def _print_resizing(results: Sequence[ImagePrediction], frame: _Frame, fit: bool) -> None:
    from ..images import MUCH_CROPPED, cropped_share

    height, width = frame.size
    others = [
        one for one in results if not one.error and one.size not in ((width, height), frame.canvas[::-1])
    ]
    if fit:
        note(f"drawings centred and scaled to {height}x{width}")
    elif others:
        lost = [cropped_share(one.size, frame.size, frame.crop_pct, frame.crop_mode) for one in others]
        much = sum(share > MUCH_CROPPED for share in lost)
        what = {"squash": "resized", "border": "resized and padded"}.get(
            frame.crop_mode, "resized and cropped"
        )
        of = f"{len(others)} of {len(results)} images {what} to {height}x{width}"
        losing = (
            f"; {much} lose more than a third of their area (finetune --crop-mode keeps it)" if much else ""
        )
        note(f"{of}{losing}")


def _print_notes(results: Sequence[ImagePrediction]) -> None:
    """Print each note once, with the first image that it applies to and the number of others."""
    about: dict[str, list[str]] = {}
    for result in results:
        for remark in result.notes:
            about.setdefault(remark, []).append(result.image)
    for remark, images in about.items():
        others = f" and {len(images) - 1} more" if len(images) > 1 else ""
        note(f"{images[0]}{others}: {remark}")


def _print_errors(results: Sequence[ImagePrediction]) -> None:
    """Print the errors of images that could not be read; with any, the exit code is 1."""
    failed = [result for result in results if result.error]
    for result in failed:
        print_error(result.error)
    if failed:
        raise typer.Exit(1)
