"""``capszoo list``, ``info`` and ``predict``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ..errors import CapszooError
from .common import (
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
    from ..summary import list_summaries

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


def info_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name or name.tag.", show_default=False)],
    img_size: SizeOption = None,
    routing_iters: ItersOption = None,
    num_classes: Annotated[
        int | None, typer.Option("--num-classes", min=0, help="Classes, if not the default.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's size, arithmetic, the papers' figures, its weights and licence."""
    from ..summary import summarise

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


def predict_command(
    model: ModelArgument,
    images: ImagesArgument,
    topk: Annotated[int, typer.Option("--topk", "--top", "-k", min=1, help="Classes to show per image.")] = 3,
    device: DeviceOption = None,
    img_size: SizeOption = None,
    routing_iters: ItersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Classify images."""
    from ..inference import load_model, predict
    from ..preprocess import find_images, model_input_size

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
