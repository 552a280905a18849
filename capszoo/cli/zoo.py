"""``capszoo list`` and ``info``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from .._pretrained.catalogue import (
    architectures,
    check_model_argument,
    list_rows,
    paper_address,
    paper_label,
    plain,
    without_weights,
)
from ..errors import CapszooError
from .common import (
    ItersOption,
    JsonOption,
    ModelArgument,
    SizeOption,
    describe_model,
    given,
    parse_size,
    print_json,
    refuse_unused,
    stdout,
)


def list_command(
    filter: Annotated[
        str,
        typer.Argument(
            metavar="[FILTER]",
            help="Part of a name or tag, or a pattern such as 'idpa*'.",
            show_default=False,
        ),
    ] = "",
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Only checkpoints, as name.tag.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the models, or the checkpoints that exist."""
    rows = list_rows(filter, pretrained)
    if as_json:
        print_json(rows)
        return
    if not rows:
        kind = "checkpoint" if pretrained else "model"
        matching = f" matching '{filter}'" if filter else ""
        raise CapszooError(f"no {kind}{matching}", "`capszoo list` shows every model")
    stdout().print(_checkpoint_table(rows) if pretrained else _model_table(rows))


def _model_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("input", no_wrap=True)
    for title in ("weights, the default first (test top-1 %)", "what it is", "paper"):
        table.add_column(title)
    for row in rows:
        weights = (
            f"{entry['name'].partition('.')[2]} {_accuracy(entry)}".rstrip() for entry in row["weights"]
        )
        table.add_row(
            row["name"],
            f"{row['parameters']:,}",
            _size(row["input_size"]),
            escape(", ".join(weights)),
            escape(row["description"]),
            ", ".join(map(paper_label, row["paper_ids"])),
        )
    return table


def _checkpoint_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("weights", no_wrap=True)
    table.add_column("data set", no_wrap=True)
    table.add_column("top-1 %", justify="right", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("input", no_wrap=True)
    table.add_column("what it is")
    for row in rows:
        count = row["parameters"]
        table.add_row(
            row["name"],
            escape(row["dataset"] or ""),
            _accuracy(row),
            "" if count is None else f"{count:,}",
            _size(row["input_size"]),
            escape(row["description"]) + ("" if row["installed"] else " (not installed)"),
        )
    return table


def _accuracy(row: dict[str, Any]) -> str:
    """The test accuracy of a checkpoint's row; with several labels per image, that of the exact set."""
    if row["top1"] is None:
        return ""
    several = row["score_kind"].startswith("label_")
    return f"{row['top1']:.2f}" + (" (exact set)" if several else "")


def _size(input_size: Sequence[int]) -> str:
    return "x".join(map(str, input_size))


def info_command(
    context: typer.Context,
    model: ModelArgument,
    img_size: SizeOption = None,
    routing_iters: ItersOption = None,
    num_classes: Annotated[
        int | None, typer.Option(min=0, help="Number of classes, if not the default.", metavar="N")
    ] = None,
    engines: Annotated[
        bool, typer.Option("--engines", help="How each routing layer is computed on this machine, and why.")
    ] = False,
    batch: Annotated[
        int, typer.Option("--batch-size", min=1, help="Images per forward pass, with --engines.", metavar="N")
    ] = 32,
    training: Annotated[
        bool, typer.Option("--training", help="With --engines: the choice for training.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a model's size, multiply-adds, the papers' results, its weights and licence, or its engines."""
    if not engines:
        refuse_unused(context, ["batch", "training"], "without --engines", "add --engines")
    options = given(img_size=parse_size(img_size), routing_iters=routing_iters, num_classes=num_classes)
    if engines:
        check_model_argument(model)
        _print_engines(model, batch, training, as_json, options)
        return
    about = describe_model(model, **options)
    if as_json:
        print_json(about)
        return
    _print_facts(about)
    if about["paper_figures"]:
        papers = Table("papers report", "metric", "%", "setting", "source", box=None, pad_edge=False)
        for figure in about["paper_figures"]:
            value = f"{figure['value']:g}"
            papers.add_row(figure["dataset"], figure["metric"], value, figure["note"], figure["source"])
        stdout().print()
        stdout().print(papers)
    stdout().print()
    if about["weights"]:
        stdout().print(_weights_table(about["weights"]))
        if "command" in about:  # of a checkpoint: an architecture may have several
            stdout().print(f"\ntrained by: {escape(about['command'])}", soft_wrap=True)
            for line in about["protocol"]:
                stdout().print(escape(f"- {line.replace('`', '')}"), soft_wrap=True)
    elif model in architectures():
        stdout().print(": ".join(without_weights(model)))


def _print_facts(about: dict[str, Any]) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_row("model", escape(f"{about['name']}: {plain(about['description'])}"))
    facts.add_row("parameters", f"{about['parameters']:,}")
    facts.add_row("multiply-adds", f"{about['multiply_adds']:,} per image (convolutions and matrix products)")
    facts.add_row("input", f"{_size(about['input_size'])} (channels, height, width)")
    facts.add_row("classes", str(about["num_classes"]))
    if about["routing_iters"]:
        facts.add_row("routing", f"{'/'.join(map(str, about['routing_iters']))} iterations")
    if about["license"]:
        facts.add_row("licence", escape(about["license"]))
    if about["paper_ids"]:
        facts.add_row("paper", escape(", ".join(map(paper_address, about["paper_ids"]))))
    stdout().print(facts)


def _weights_table(entries: list[dict[str, Any]]) -> Table:
    weights = Table(
        Column("weights", no_wrap=True),
        "data set",
        "top-1 %",
        "input",
        "scores",
        "licence",
        "sha256",
        box=None,
        pad_edge=False,
    )
    for entry in entries:
        stored = "" if entry["stored_as"] == entry["name"] else f" = {entry['stored_as']}"
        weights.add_row(
            entry["name"] + stored + (" (default)" if entry["default"] and len(entries) > 1 else ""),
            escape(entry["dataset"] or ""),
            "" if entry["top1"] is None else f"{entry['top1']:.2f}",
            _size(entry["input_size"]),
            entry["score_kind"],
            escape(entry["license"]),
            entry["sha256"][:12],
        )
    return weights


def _print_engines(model: str, batch: int, training: bool, as_json: bool, options: dict[str, Any]) -> None:
    from ..summary import engine_rows

    rows = engine_rows(model, batch, training, **options)
    if as_json:
        print_json(rows)
        return
    if not rows:
        stdout().print("no routing layer with engines")
        return
    table = Table("layer", "engine", "routings", "children", "parents", "refused", box=None, pad_edge=False)
    for row in rows:
        reasons = "\n".join(f"{name}: {reason}" for name, reason in row["refused"].items())
        sizes = [f"{row[size]:,}" for size in ("routings", "children", "parents")]
        table.add_row(row["layer"], row["engine"], *sizes, escape(reasons))
    stdout().print(table)
