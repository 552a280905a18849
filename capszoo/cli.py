"""The ``capszoo`` command: it parses, calls one function, prints.

Results go to stdout, errors, notes and progress to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage. An error is one
line that says what to do; ``--debug`` shows the traceback instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from . import __version__
from ._cli_common import (
    DeviceOption,
    ImagesArgument,
    ItersOption,
    JsonOption,
    ModelArgument,
    SizeOption,
    given,
    parse_size,
    print_json,
    progress_bar,
    stderr,
    stdout,
)
from ._cli_curves import curves_command
from ._cli_eval import eval_command
from ._cli_explain import explain_command
from .errors import CapszooError, UsageError, require

if TYPE_CHECKING:
    from .export.to_onnx import ExportReport

__all__ = ["app", "main"]


class _OneLineErrors(TyperGroup):
    """Every error, of the parser and of the commands, as one line on stderr with the right exit code."""

    def main(self, args: Sequence[str] | None = None, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        debug = "--debug" in given[:end]  # taken anywhere on the line, as users put it last
        given = [arg for i, arg in enumerate(given) if arg != "--debug" or i > end]
        try:
            code = super().main(args=given, standalone_mode=False, **extra)
        except Exception as error:
            if debug:
                raise
            line, code = _one_line(error)
            if line:
                stderr().print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)
        except KeyboardInterrupt:
            code = 130
        sys.exit(code if isinstance(code, int) else 0)


def _one_line(error: Exception) -> tuple[str, int]:
    """The message of an error and its exit code."""
    from ._api import UnknownModel
    from .data import DataError
    from .models._builder import UnknownArgument
    from .models._pretrained import WeightsError

    if isinstance(error, CapszooError):
        return " ".join(str(error).split()), error.exit_code
    if hasattr(
        error, "format_message"
    ):  # the parser's own: unknown command, option or value, missing argument
        message = " ".join(error.format_message().split()).rstrip(".")
        if not message:  # called without a command: the help has been printed
            return "", 2
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "capszoo"
        return f"{message}: see `{path} --help`", int(getattr(error, "exit_code", 2))
    if type(error).__name__ == "Abort":
        return "stopped", 1
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (UnknownModel, UnknownArgument)):
        return message, 2
    if isinstance(error, (WeightsError, DataError)):
        return message, 1
    return f"{type(error).__name__}: {message} (--debug shows the traceback)", 1


app = typer.Typer(
    cls=_OneLineErrors,
    help="Capsule networks as ready models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"capszoo {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (works anywhere on the line).")
    ] = False,
) -> None:
    pass


@app.command("list")
def list_command(
    filter: Annotated[
        str,
        typer.Argument(
            metavar="[FILTER]", help="Part of a name, or a pattern such as 'idpa*'.", show_default=False
        ),
    ] = "",
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Only checkpoints, as name.tag.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the models, or the checkpoints that exist."""
    from .summary import list_summaries

    rows = list_summaries(filter, pretrained)
    if as_json:
        print_json(rows)
        return
    if not rows:
        kind = "checkpoint" if pretrained else "model"
        matching = f" matching '{filter}'" if filter else ""
        raise CapszooError(f"no {kind}{matching}", "`capszoo list` shows every model")
    table = Table("model", "weights" if not pretrained else "top-1 %", "what it is", box=None, pad_edge=False)
    for row in rows:
        second = f"{row['top1']:.2f}" if row.get("top1") is not None else ", ".join(row.get("tags", ()))
        table.add_row(row["name"], second, escape(row["description"]))
    stdout().print(table)


@app.command()
def info(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name or name.tag.", show_default=False)],
    img_size: SizeOption = None,
    routing_iters: ItersOption = None,
    num_classes: Annotated[
        int | None, typer.Option("--num-classes", min=0, help="Classes, if not the default.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's size, arithmetic, the papers' figures, its weights and licence."""
    from .summary import summarise

    summary = summarise(
        model, **given(img_size=parse_size(img_size), routing_iters=routing_iters, num_classes=num_classes)
    )
    if as_json:
        print_json(summary.to_dict())
        return
    about = summary.info
    facts = Table.grid(padding=(0, 2))
    facts.add_row("model", f"{about.name}: {escape(about.description)}")
    facts.add_row("parameters", f"{about.num_params:,}")
    facts.add_row("multiply-adds", f"{summary.multiply_adds:,} per image (convolutions and matrix products)")
    facts.add_row("input", "{}x{}x{} (channels, height, width)".format(*about.input_size))
    facts.add_row("classes", str(about.num_classes))
    if summary.routing_iters:
        facts.add_row("routing", f"{'/'.join(map(str, summary.routing_iters))} iterations")
    facts.add_row("licence", about.license)
    out = stdout()
    out.print(facts)
    if summary.figures:
        papers = Table("papers report", "metric", "%", "setting", "source", box=None, pad_edge=False)
        for figure in summary.figures:
            papers.add_row(figure.dataset, figure.metric, f"{figure.value:g}", figure.note, figure.source)
        out.print()
        out.print(papers)
    out.print()
    if not about.weights:
        out.print("no weights yet: `capszoo train` makes them")
        return
    weights = Table("weights", "top-1 %", "input", "licence", "sha256", box=None, pad_edge=False)
    for entry in summary.to_dict()["weights"]:
        top1 = entry["metrics"].get("test", {}).get("top1")
        shape = "x".join(map(str, entry["input_size"]))
        weights.add_row(
            entry["name"],
            "" if top1 is None else f"{top1:.2f}",
            shape,
            entry["license"],
            entry["sha256"][:12],
        )
    out.print(weights)


@app.command()
def predict(
    model: ModelArgument,
    images: ImagesArgument,
    topk: Annotated[int, typer.Option("--topk", "--top", "-k", min=1, help="Classes to show per image.")] = 3,
    device: DeviceOption = None,
    img_size: SizeOption = None,
    routing_iters: ItersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Classify images."""
    from .inference import load_model, predict
    from .preprocess import find_images, model_input_size

    files = find_images(images)
    net = load_model(
        model, device=device, **given(img_size=parse_size(img_size), routing_iters=routing_iters)
    )
    with progress_bar("predicting", len(files)) as advance:
        results = predict(net, files, topk, advance=advance)
    failed = [result for result in results if result.error]
    if as_json:
        print_json({"model": model, "results": [result.to_dict() for result in results]})
    else:
        table = Table("image", "class", "score", box=None, pad_edge=False)
        for result in results:
            for rank, scored in enumerate(result.top):
                table.add_row(
                    escape(result.image) if rank == 0 else "", escape(scored.label), f"{scored.score:.4f}"
                )
        if table.row_count:
            stdout().print(table)
    _, height, width = model_input_size(net)
    resized = sum(not result.error and result.size != (width, height) for result in results)
    if resized:
        stderr().print(f"note: {resized} of {len(results)} images resized and cropped to {height}x{width}")
    for result in failed:
        stderr().print(f"[bold red]error:[/] {escape(result.error)}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


app.command("explain")(explain_command)
app.command("eval")(eval_command)


@app.command("export")
def export_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="As for predict: name, name.tag, hf-hub:…, run folder, file. With --check a bundle.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write, or FILE.onnx alone.", show_default=False),
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", help="onnx, tensorrt, aoti; several with commas. ONNX always comes.")
    ] = "onnx",
    precision: Annotated[str, typer.Option(help="fp32, fp16, bf16 or int8.")] = "fp32",
    int8: Annotated[
        bool, typer.Option("--int8", help="INT8 by Q/DQ (needs --calibrate and --verify-data).")
    ] = False,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            metavar="FOLDER|DATA SET",
            help="Real images that give INT8 its ranges.",
            show_default=False,
        ),
    ] = None,
    opset: Annotated[
        int | None, typer.Option(help="ONNX opset (20; for bf16 22).", show_default=False)
    ] = None,
    batch: Annotated[
        str, typer.Option(metavar="MIN,USUAL,MAX", help="Batch sizes to serve; one number fixes the batch.")
    ] = "1,8,32",
    routing_iters: ItersOption = None,
    img_size: SizeOption = None,
    outputs: Annotated[str, typer.Option(help="scores, poses, activations, couplings.")] = "scores",
    uint8_input: Annotated[
        bool, typer.Option("--uint8-input", help="Take uint8 images; normalise inside the graph.")
    ] = False,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|gpu",
            help="What the ONNX file is written for (gpu with tensorrt or half precision, else cpu).",
            show_default=False,
        ),
    ] = None,
    triton: Annotated[bool, typer.Option("--triton", help="Add a Triton model repository.")] = False,
    timing_cache: Annotated[
        Path | None, typer.Option("--timing-cache", help="TensorRT: file of measured tactics.")
    ] = None,
    workspace: Annotated[int, typer.Option("--workspace", min=1, help="TensorRT: workspace, MiB.")] = 4096,
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="TensorRT: run on later versions.")
    ] = False,
    hardware_compatible: Annotated[
        bool, typer.Option("--hardware-compatible", help="TensorRT: run on other GPUs from Ampere on.")
    ] = False,
    refit: Annotated[bool, typer.Option("--refit", help="TensorRT: allow new weights later.")] = False,
    pretrained: Annotated[
        bool, typer.Option("--pretrained/--no-pretrained", help="Load weights, or export untrained ones.")
    ] = True,
    images: Annotated[
        str | None,
        typer.Option(
            "--verify-data",
            metavar="PATH|DATA SET",
            help="Images whose top-1 must agree, too; INT8: whose accuracy must last.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder of the data sets (default: $CAPSZOO_DATA).", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer probes: random and zero input only.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Look at the bundle MODEL again; writes nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model as ONNX, TensorRT or AOTInductor, routing unrolled, and prove it equal to the original."""
    if check:
        _check_bundle(model, as_json)
        return
    if out is None:
        raise UsageError("Missing option '--out'", "give a folder, or FILE.onnx for the file alone")
    profile, kinds = _batch(batch), [word.strip() for word in formats.split(",")]
    alone = out.suffix == ".onnx"
    if alone and (kinds != ["onnx"] or triton):
        raise UsageError(f"--out {out} is one file", "give a folder for other formats and for --triton")
    if out.suffix and not alone and out.suffix in (".pt", ".pt2", ".plan", ".engine", ".pth"):
        raise UsageError(f"--out {out} is no .onnx file", "give a name such as model.onnx, or a folder")
    from .export import bundle, to_onnx, to_tensorrt
    from .export.images import CALIBRATION_IMAGES, VERIFY_IMAGES, open_images
    from .inference import NoWeights, load_model

    if int8 and precision not in ("fp32", "int8"):
        raise UsageError(f"--int8 and --precision {precision} exclude each other", "give one of them")
    precision = "int8" if int8 else precision
    if precision not in to_onnx.PRECISIONS:
        raise UsageError(f"unknown precision '{precision}'", f"use {', '.join(to_onnx.PRECISIONS)}")
    if precision == "int8" and calibrate is None:
        raise UsageError("int8 needs --calibrate", "give a folder of real images, or the name of a data set")
    if precision == "int8" and images is None:
        raise UsageError("int8 needs --verify-data", "give labelled images that measure what it costs")
    if precision != "int8" and calibrate is not None:
        raise UsageError(f"--calibrate does nothing for {precision}", "add --int8")
    engine = to_tensorrt.BuildOptions(
        workspace_mib=workspace,
        timing_cache=None if timing_cache is None else str(timing_cache),
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,
        refit=refit,
    )
    try:
        net = load_model(model, pretrained, "cpu", **given(img_size=parse_size(img_size)))
    except NoWeights as error:
        raise CapszooError(error.message, "--no-pretrained exports the untrained architecture") from None
    real = None if images is None else open_images(net, images, "test", VERIFY_IMAGES, uint8_input, data)
    ranges = (
        None
        if calibrate is None
        else open_images(net, calibrate, "train", CALIBRATION_IMAGES, uint8_input, data)
    )
    options: dict[str, Any] = dict(
        name=Path(model).name,
        routing_iters=routing_iters,
        outputs=tuple(word.strip() for word in outputs.split(",")),
        opset=opset,
        batch=profile,
        precision=precision,
        uint8_input=uint8_input,
        gate="quick" if quick else "full",
        runtime=runtime,
        images=real,
        calibration=ranges,
    )
    console = stderr()
    with console.status("exporting") as status:
        options["progress"] = lambda line: status.update(escape(line))
        if alone:
            report = to_onnx.export(net, out, **options)
        else:
            manifest = bundle.export_bundle(
                net, out, source=model, formats=kinds, triton=triton, engine=engine, **options
            )
    if alone and as_json:
        print_json(report.to_dict())
    elif alone:
        _print_report(report)
    elif as_json:
        print_json(manifest)
    else:
        _print_manifest(out, manifest)
    if not alone:
        for note in manifest["notes"]:
            console.print(f"note: {escape(note)}", soft_wrap=True)


def _check_bundle(folder: str, as_json: bool) -> None:
    from .export.bundle import check_bundle

    found = check_bundle(folder)
    if as_json:
        print_json(found.to_dict())
    else:
        _print_gate([(step.name, step.passed, step.detail) for step in found.steps])
    if not found.passed:
        failed = next((step for step in found.steps if not step.passed), None)
        raise CapszooError(f"{folder}: {failed.name if failed else 'nothing'} failed", "export it again")


@app.command()
def compare(
    bundle: Annotated[Path, typer.Argument(metavar="DIR", help="A bundle.", show_default=False)],
    images: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[IMAGE]...", help="Image files or folders (else random input).", show_default=False
        ),
    ] = None,
    runners: Annotated[
        str, typer.Option(help="Who is compared, the reference first: eager, onnxruntime, tensorrt, aoti, …")
    ] = "eager,onnxruntime",
    model: Annotated[
        str | None, typer.Option("--model", help="The original, if its name does not lead to it.")
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N,…", help="Batch sizes to time.")] = "1,8",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Hold the runtimes of a bundle against each other: differences, agreement, latency."""
    sizes = [int(word) if word.strip().isdigit() else 0 for word in batch.split(",")]
    if min(sizes) < 1:
        raise UsageError(f"--batch {batch} makes no sense", "give batch sizes, such as 1,8")
    from .export.bundle import compare_bundle
    from .preprocess import find_images

    files = find_images(images) if images else []
    kinds = [word.strip() for word in runners.split(",")]
    result = compare_bundle(bundle, kinds, files, model, sizes, repeats)
    if as_json:
        print_json(result)
        return
    columns = ("runner", "max difference", "mean", "of the largest output", "top-1 equal")
    table = Table(*columns, box=None, pad_edge=False)
    for row in result["differences"]:
        shown = f"{row['max_abs']:.1e}", f"{row['mean_abs']:.1e}", f"{row['relative']:.1e}"
        table.add_row(row["runner"], *shown, f"{row['top1_agreement']:.2%}")
    what = f"{result['images']} images" if result["images"] else "random input"
    stdout().print(f"against {result['reference']}, {what}")
    stdout().print(table)
    times = Table("runner", "batch", "ms", "images/s", "times the first", box=None, pad_edge=False)
    for row in result["timings"]:
        shown = f"{row['milliseconds']:.2f}", f"{row['images_per_second']:.0f}", f"{row['ratio']:.2f}"
        times.add_row(row["runner"], str(row["batch"]), *shown)
    stdout().print()
    stdout().print(times)


@app.command()
def train(
    recipes: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE...", help="A recipe's name or a YAML file.", show_default=False),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting, such as optimizer.lr=0.001; repeatable."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="One of the recipe's profiles, such as short (default: the paper's settings)."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder of the data set (default: $CAPSZOO_DATA).", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder of the run (default: runs/<recipe>); with --together the folder of all (runs).",
            show_default=False,
        ),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave an accelerator unused.")] = False,
    together: Annotated[
        bool, typer.Option("--together", help="Train several recipes side by side, a process each.")
    ] = False,
) -> None:
    """Train a recipe to its end, or go on where an earlier run of it stopped.

    Ctrl-C and SIGTERM save first. Several processes: accelerate launch -m capszoo.recipes.train RECIPE.
    """
    _check_training()
    if together:
        from .recipes.together import train_together

        train_together(recipes, overrides, out, data, cpu, profile)
        return
    if len(recipes) > 1:
        raise UsageError(f"{len(recipes)} recipes were given", "--together trains them side by side")
    from .recipes.train import train

    _print_run(train(recipes[0], overrides or [], out=out, data=data, cpu=cpu, profile=profile))


app.command("curves")(curves_command)


@app.command()
def finetune(
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Folder with a sub-folder of images per class, or hf:OWNER/NAME.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder of the run (default: runs/<model>.<data>).", show_default=False
        ),
    ] = None,
    img_size: Annotated[
        int | None,
        typer.Option("--img-size", min=1, metavar="N", help="Side of the images, if not the weights'."),
    ] = None,
    freeze: Annotated[
        str, typer.Option(help="body, all (but the class capsules), or modules by name, with commas.")
    ] = "",
    layer_decay: Annotated[
        float | None,
        typer.Option(
            "--layer-decay",
            help="Learning rate's factor from layer to layer below (1: none).",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="At most so many (default: by the images).")
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Start from random weights, to compare.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out images that cannot be read.")
    ] = False,
    tag: Annotated[
        str | None, typer.Option(help="Name of the new weights (default: the folder's).", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change any setting of the recipe; repeatable."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave an accelerator unused.")] = False,
) -> None:
    """Fine-tune a model to classes of your own, or go on where an earlier run of it stopped.

    A fifth of each class is held out for early stopping, unless the folder has train/ and val/; test/ is measured once.
    """
    _check_training()
    from .recipes.finetune import finetune

    result = finetune(
        model,
        data,
        out,
        tag=tag,
        img_size=img_size,
        freeze=[part.strip() for part in freeze.split(",") if part.strip()],
        layer_decay=layer_decay,
        epochs=epochs,
        from_scratch=from_scratch,
        skip_bad=skip_bad,
        overrides=overrides or (),
        cpu=cpu,
    )
    _print_run(result)


def _check_training() -> None:
    """Say what is not installed that training needs."""
    require("training", ("accelerate", "pydantic", "yaml", "tensorboard", "matplotlib"), "train")


@app.command()
def publish(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Folder of a finished run, a .safetensors file, or name.tag. Not with --all.",
            show_default=False,
        ),
    ] = None,
    repo_id: Annotated[
        str | None, typer.Argument(metavar="USER/NAME", help="The repository.", show_default=False)
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write and check everything, make no call.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Keep what was written in this new folder.", show_default=False),
    ] = None,
    everything: Annotated[
        str | None,
        typer.Option("--all", metavar="ORG", help="Publish every checkpoint of the zoo as ORG/name.tag."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Publish a checkpoint on the Hugging Face Hub: weights, config, model card.

    `hf auth login` or HF_TOKEN says who you are. The same command goes on after a failure.
    """
    if everything is None and (run is None or repo_id is None):
        raise UsageError("publish takes a RUN and a USER/NAME", "or --all ORG for the whole zoo")
    if everything is not None and run is not None:
        raise UsageError(f"--all takes the whole zoo, and {run} was given", "leave one of them out")
    require("publishing", ("pydantic", "yaml", "matplotlib"), "train")
    from .recipes.publish import publish, publish_all

    def say(line: str) -> None:
        stderr().print(escape(line), soft_wrap=True)

    if everything is not None:
        results = publish_all(everything, private, dry_run, out, say)
    else:
        results = [publish(str(run), str(repo_id), private, dry_run, out, say)]
    if as_json:
        print_json(results)
        return
    table = Table("file", "bytes", "sha256", box=None, pad_edge=False)
    console = stdout()
    for result in results:
        for file in result["files"]:
            table.add_row(f"{result['repo_id']}/{file['name']}", f"{file['bytes']:,}", file["sha256"][:12])
    console.print(table)
    for result in results:
        if dry_run:
            said = f"{result['repo_id']}: checked; nothing was sent"
        else:
            state = "published" if result["changed"] else "nothing had changed"
            said = f"{result['url']}: {state}, commit {result['commit'][:12]}"
        console.print(escape(said), soft_wrap=True)


# -- printing and parsing ---------------------------------------------------------------------------------------


def _print_report(report: ExportReport) -> None:
    out = stdout()
    parity = Table(
        "input", "batch", "max difference", "of the largest output", "top-1 equal", box=None, pad_edge=False
    )
    for difference in report.comparisons:
        parity.add_row(
            difference.probe,
            str(difference.batch),
            f"{difference.max_abs:.1e}",
            f"{difference.relative:.1e}",
            f"{difference.top1_agreement:.0%}",
        )
    out.print(parity)
    out.print()
    _print_gate([(step.name, step.passed, step.detail) for step in report.gate])
    out.print()
    iterations = (
        "" if not report.routing_iters else f", {'/'.join(map(str, report.routing_iters))} routing iterations"
    )
    out.print(
        f"{escape(report.path)}: {report.file_bytes:,} bytes, opset {report.opset}, {report.num_nodes} nodes, "
        f"batch {report.batch[0]} to {report.batch[2]}{iterations}",
        soft_wrap=True,
    )


def _print_run(result: dict[str, Any]) -> None:
    """Figures and files of a finished run."""
    console = stdout()
    for split in ("test",) if "test" in result else ("validation",):
        if split in result:
            figures = ", ".join(f"{key} {value}" for key, value in result[split].items())
            console.print(f"{split}: {escape(figures)}", soft_wrap=True)
    for file in ("weights", "labels", "confusion", "card"):
        if file in result:
            console.print(f"{file}: {escape(str(result[file]))}", soft_wrap=True)


def _print_gate(steps: Sequence[tuple[str, bool | None, str]]) -> None:
    gate = Table("gate", "", "", box=None, pad_edge=False)
    words = {True: "[green]passed[/]", False: "[red]failed[/]", None: "[yellow]not run[/]"}
    for name, passed, detail in steps:
        gate.add_row(name, words[passed], escape(detail.removeprefix("not run: ")))
    stdout().print(gate)


def _print_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    _print_gate([(step["name"], step["passed"], step["detail"]) for step in manifest["gates"]])
    out = stdout()
    out.print()
    files = ", ".join(sorted({name.partition("/")[0] for name in [*manifest["files"], "manifest.json"]}))
    batch = manifest["batch"]
    out.print(
        f"{escape(str(folder))}: {manifest['precision']['model']}, opset {manifest['opset']}, batch {batch['min']} to "
        f"{batch['max']}; {files}",
        soft_wrap=True,
    )


def _batch(text: str) -> tuple[int, int, int] | int:
    """``8`` or ``1,8,32``."""
    parts = text.split(",")
    if len(parts) not in (1, 3) or not all(part.strip().isdigit() for part in parts):
        raise UsageError(f"--batch {text} makes no sense", "give smallest, usual and largest, such as 1,8,32")
    numbers = [int(part) for part in parts]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1], numbers[2])


def main() -> None:
    """Entry point of the ``capszoo`` script."""
    app(prog_name="capszoo")


if __name__ == "__main__":
    main()
