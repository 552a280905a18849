"""``capszoo benchmark`` and ``compare``: speed of a model on this machine, and two models side by side."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column

from .._pretrained.catalogue import check_model_argument, checkpoints, exported_file
from .._pretrained.info import default_weights
from ..errors import CapszooError, UsageError
from .common import (
    DatasetOption,
    DeviceOption,
    ImagesOption,
    ItersOption,
    JsonOption,
    ModelArgument,
    OriginalOption,
    SizeOption,
    complete_model,
    describe_model,
    given,
    note,
    parse_size,
    print_facts,
    print_json,
    print_table,
    progress_bar,
    refuse_unused,
    say,
    stderr,
    was_given,
)

if TYPE_CHECKING:
    from torch import nn

BatchOption = Annotated[str, typer.Option("--batch-size", metavar="N,N,…", help="Batch sizes to time.")]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="Timed calls of each.")]


def _sizes(text: str) -> list[int]:
    sizes = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if min(sizes) < 1:
        raise UsageError(f"--batch-size {text} is invalid", "give batch sizes, such as 1,8")
    return sizes


def _load(name: str, device: str | None, **options: Any) -> nn.Module:
    """A model to time, with or without its weights, on which its speed does not depend."""
    from ..inference import NoWeights, load_model

    try:
        return load_model(name, device=device, **options)
    except NoWeights:
        return load_model(name, pretrained=False, device=device, **options)


def benchmark_command(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="As for predict (name, hf-hub:USER/NAME, folder, .safetensors or .onnx file), or a bundle.",
            show_default=False,
            autocompletion=complete_model,
        ),
    ],
    images: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[IMAGE]...", help="Images to time a bundle on (default: random).", show_default=False
        ),
    ] = None,
    runtimes: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,…",
            help="What is timed, the reference first. Of a model: eager, compiled, onnxruntime; of a bundle: eager, "
            "onnxruntime, onnxruntime-cuda, tensorrt, aoti, executorch. Default: all of a model; eager,onnxruntime of "
            "a bundle. A .onnx file has onnxruntime alone.",
        ),
    ] = "",
    batch: BatchOption = "1,8,32",
    repeats: RepeatsOption = 20,
    img_size: SizeOption = None,
    routing_iters: ItersOption = None,
    original: OriginalOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time a model here: latency and images/s by batch, in PyTorch, compiled and in ONNX Runtime."""
    sizes = _sizes(batch)
    if (Path(model) / "manifest.json").is_file():
        unused = ("img_size", "routing_iters", "device")
        refuse_unused(context, unused, "on a bundle", "leave it out")
        compare_runtimes(Path(model), images or [], runtimes, original, sizes, repeats, as_json)
        return
    if images:
        raise UsageError(f"{model} is no bundle, so IMAGE has no meaning", "leave it out")
    refuse_unused(context, ["original"], f"on {model}, which is no bundle", "leave it out")
    check_model_argument(model, exported=True)
    exported = exported_file(model) is not None
    if exported:
        unused = ("img_size", "routing_iters", "device")
        refuse_unused(context, unused, "on an exported file", "leave it out")
        runtimes = runtimes or "onnxruntime"
    options: dict[str, Any] = given(img_size=parse_size(img_size), routing_iters=routing_iters)
    from ..export.benchmark import RUNTIMES, benchmark
    from ..export.cached import find_cached

    net = _load(model, "cpu" if exported else device, **options)
    kinds = [word.strip() for word in runtimes.split(",")] if runtimes else list(RUNTIMES)
    cached = find_cached(model, **options) if max(sizes) <= 32 else None
    with stderr().status("timing") as status:
        timings, notes = benchmark(
            net,
            sizes,
            kinds,
            repeats,
            None if cached is None else cached / "model.onnx",
            lambda line: status.update(escape(line)),
        )
    device_name = "cpu" if exported else str(next(net.parameters()).device)
    rows = [row.to_dict() for row in timings]
    if as_json:
        print_json({"model": model, "device": device_name, "timings": rows, "notes": notes})
    else:
        say(f"{model} on {device_name}, median of {repeats} calls")
        _print_timings(rows)
    for line in notes:
        note(line)


def compare_runtimes(
    bundle: Path,
    images: list[Path],
    runtimes: str,
    model: str | None,
    sizes: list[int],
    repeats: int,
    as_json: bool,
) -> None:
    """Compare a bundle's runtimes: differences, agreement, latency."""
    from ..export.bundle import compare_bundle
    from ..images import find_images

    files = find_images(images) if images else []
    kinds = [word.strip() for word in (runtimes or "eager,onnxruntime").split(",")]
    result = compare_bundle(bundle, kinds, files, model, sizes, repeats)
    if as_json:
        print_json(result)
        return
    what = f"{result['images']} images" if result["images"] else "random input"
    say(f"against {result['reference']}, {what}")
    figures = ("max_abs", "mean_abs", "relative")
    print_table(
        ("runtime", "max difference", "mean", "of the largest output", "top-1 equal"),
        (
            (row["runner"], *(f"{row[key]:.1e}" for key in figures), f"{row['top1_agreement']:.2%}")
            for row in result["differences"]
        ),
    )
    say()
    _print_timings(result["timings"])


def _print_timings(rows: list[dict[str, Any]], first: str = "runtime") -> None:
    def cells(row: dict[str, Any]) -> Iterable[str]:
        yield from (row["runner"], str(row["batch"]), f"{row['milliseconds']:.2f}")
        yield from (f"{row['images_per_second']:.0f}", f"{row['speed_up']:.2f}")

    reference = rows[0]["runner"] if rows else "the first"
    columns = ("batch size", "ms/batch", "images/s", f"speed-up over {reference}")
    print_table((Column(first, no_wrap=True), *columns), map(cells, rows))


def compare_command(
    context: typer.Context,
    model: ModelArgument,
    other: Annotated[
        str,
        typer.Argument(
            metavar="OTHER", help="A second model.", show_default=False, autocompletion=complete_model
        ),
    ],
    dataset: DatasetOption = None,
    data: ImagesOption = None,
    split: Annotated[
        str,
        typer.Option(
            metavar="test|val|train", help="Split of the data set; val: the images that training held out."
        ),
    ] = "test",
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Compare on a random sample of N images.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the sample.")] = 0,
    batch: BatchOption = "1,8",
    repeats: RepeatsOption = 20,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two models: size, latency, and on images accuracy and how often they agree."""
    sizes = _sizes(batch)
    has_images = data is not None or dataset is not None or bool(os.environ.get("CAPSZOO_DATA"))
    if not has_images:
        refuse_unused(context, ["split", "limit", "seed"], "without images", "add --data")
    for name in (model, other):
        check_model_argument(name)
    names = [_with_tag(model), _with_tag(other)]
    if names[0] == names[1]:
        raise UsageError(f"{model} and {other} are the same weights", "give two models")
    about = [_about(name) for name in names]
    asked = any(was_given(context, name) for name in ("data", "dataset", "split", "limit", "seed"))
    measured, why = None, ""
    if has_images:
        try:
            measured = _agreement(names, dataset, data, split=split, limit=limit, seed=seed, device=device)
        except CapszooError as error:  # the folder of CAPSZOO_DATA may lack the images
            if asked:
                raise
            why = str(error)
    from ..export.benchmark import time_models

    nets = {name: _load(name, device) for name in names}
    with stderr().status("timing"):
        timings = time_models(nets, sizes, repeats)
    if as_json:
        print_json(
            {"models": about, "agreement": measured, "agreement_missing": why or None, "timings": timings}
        )
        return
    _print_models(about)
    say()
    if measured is None:
        say(f"agreement: not measured; {why or '--data FOLDER measures it'}")
    else:
        _print_agreement(names, measured)
    say()
    _print_timings(timings, "model")


def _print_models(about: list[dict[str, Any]]) -> None:
    def cells(row: dict[str, Any]) -> Iterable[str]:
        yield from (row["name"], f"{row['parameters']:,}", f"{row['multiply_adds']:,}")
        yield from ("" if row["top1"] is None else f"{row['top1']:.2f}", row["dataset"] or "")

    columns = ("parameters", "multiply-adds", "stated top-1 %", "data set")
    print_table((Column("model", no_wrap=True), *columns), map(cells, about))


def _with_tag(name: str) -> str:
    """The name of an architecture's default weights, whose size may be another; other names as they are."""
    info = default_weights(checkpoints(), name)
    return info.name if info else name


def _about(name: str) -> dict[str, Any]:
    """Size and stated accuracy of a model."""
    about = describe_model(name)
    chosen = next((entry for entry in about["weights"] if entry["default"]), None)
    chosen = chosen or next(iter(about["weights"]), None)
    test = chosen["metrics"].get("test", {}) if chosen else {}
    return {
        "name": name,
        "parameters": about["parameters"],
        "multiply_adds": about["multiply_adds"],
        "top1": test.get("top1"),
        "n": test.get("n"),
        "dataset": chosen["dataset"] if chosen else None,
    }


def _agreement(names: list[str], dataset: str | None, data: str | None, **options: Any) -> dict[str, Any]:
    """Accuracy and agreement on the same images; the options are those of ``prepare``."""
    from ..recipes.evaluation.agreement import agreement
    from ..recipes.evaluation.target import data_set_of, prepare

    first = prepare(names[0], dataset, data=data, **options)
    if dataset is None and data_set_of(data) is None:
        dataset = first.images.spec.name
    second = prepare(names[1], dataset, data=data, **options)
    with progress_bar("comparing", first.n) as advance:
        result = agreement(first, second, progress=advance)
    return {"dataset": first.images.spec.name, "of": first.whole, **vars(result)}


def _print_agreement(names: list[str], agreement: dict[str, Any]) -> None:
    n = agreement["n"]
    say(f"{agreement['dataset']}, n = {n:,} of {agreement['of']:,}")
    of_each = zip(names, agreement["accuracy"], strict=True)
    print_facts(
        [
            *((f"accuracy of {name}", f"{accuracy:.2f}%") for name, accuracy in of_each),
            ("same prediction", f"{100 * agreement['same'] / n:.2f}%"),
            ("both right", f"{agreement['both_right']:,}"),
            (f"only {names[0]} right", f"{agreement['only_first']:,}"),
            (f"only {names[1]} right", f"{agreement['only_second']:,}"),
            ("both wrong", f"{agreement['both_wrong']:,}"),
        ]
    )
