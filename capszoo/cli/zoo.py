"""``capszoo list`` and ``info``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Column
from rich.text import Text

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
    print_facts,
    print_json,
    print_table,
    refuse_unused,
    say,
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
    (_print_checkpoints if pretrained else _print_models)(rows)


_whole = partial(Column, no_wrap=True)


def _print_models(rows: list[dict[str, Any]]) -> None:
    def cells(row: dict[str, Any]) -> Iterable[str]:
        weights = (f"{one['name'].partition('.')[2]} {_accuracy(one)}".rstrip() for one in row["weights"])
        yield from (row["name"], f"{row['parameters']:,}", _size(row["input_size"]))
        yield from (", ".join(weights), row["description"], ", ".join(map(paper_label, row["paper_ids"])))

    columns = (_whole("model"), _whole("parameters", justify="right"), _whole("input"))
    texts = ("weights, the default first (test top-1 %)", "what it is", "paper")
    print_table((*columns, *texts), map(cells, rows))


def _print_checkpoints(rows: list[dict[str, Any]]) -> None:
    def cells(row: dict[str, Any]) -> Iterable[str]:
        yield from (row["name"], row["dataset"] or "", _accuracy(row))
        yield "" if row["parameters"] is None else f"{row['parameters']:,}"
        yield from (
            _size(row["input_size"]),
            row["description"] + ("" if row["installed"] else " (not installed)"),
        )

    numbers = (_whole("top-1 %", justify="right"), _whole("parameters", justify="right"), _whole("input"))
    print_table((_whole("weights"), _whole("data set"), *numbers, "what it is"), map(cells, rows))


def _accuracy(row: dict[str, Any]) -> str:
    """The test accuracy of a checkpoint's row, else that of validation; with several labels, of the exact set."""
    if row["top1"] is None:
        held_out = row.get("metrics", {}).get("validation", {}).get("top1")
        return "" if held_out is None else f"{held_out:.2f} (validation)"
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
        say()
        figures = (one | {"value": f"{one['value']:g}"} for one in about["paper_figures"])
        keys = ("dataset", "metric", "value", "note", "source")
        columns = ("papers report", "metric", "%", "setting", "source")
        print_table(columns, ([one[key] for key in keys] for one in figures))
    say()
    if about["weights"]:
        _print_weights(about["weights"])
        if "command" in about:  # of a checkpoint: an architecture may have several
            say()
            say(f"trained by: {about['command']}")
            for line in about["protocol"]:
                say(f"- {line.replace('`', '')}")
    elif model in architectures():
        say(": ".join(without_weights(model)))


def _print_facts(about: dict[str, Any]) -> None:
    facts = {
        "model": f"{about['name']}: {plain(about['description'])}",
        "parameters": f"{about['parameters']:,}",
        "multiply-adds": f"{about['multiply_adds']:,} per image (convolutions and matrix products)",
        "input": f"{_size(about['input_size'])} (channels, height, width)",
        "classes": str(about["num_classes"]),
    }
    if about["routing_iters"]:
        facts["routing"] = f"{'/'.join(map(str, about['routing_iters']))} iterations"
    if about["license"]:
        facts["licence"] = about["license"]
    if about["paper_ids"]:
        facts["paper"] = ", ".join(map(paper_address, about["paper_ids"]))
    print_facts(facts.items())


def _print_weights(entries: list[dict[str, Any]]) -> None:
    def cells(entry: dict[str, Any]) -> Iterable[str]:
        stored = "" if entry["stored_as"] == entry["name"] else f" = {entry['stored_as']}"
        yield entry["name"] + stored + (" (default)" if entry["default"] and len(entries) > 1 else "")
        yield from (entry["dataset"] or "", _accuracy(entry), _size(entry["input_size"]))
        yield from (entry["score_kind"], entry["license"], entry["sha256"][:12])

    columns = ("data set", "top-1 %", "input", "scores", "licence", "sha256")
    print_table((_whole("weights"), *columns), map(cells, entries))


def _print_engines(model: str, batch: int, training: bool, as_json: bool, options: dict[str, Any]) -> None:
    from ..summary import engine_rows

    sizes = ("routings", "children", "parents")

    def cells(row: dict[str, Any]) -> Iterable[str | Text]:
        yield from (row["layer"], row["engine"], *(f"{row[size]:,}" for size in sizes))
        yield Text("\n".join(f"{name}: {reason}" for name, reason in row["refused"].items()))

    rows = engine_rows(model, batch, training, **options)
    if as_json:
        print_json(rows)
    elif not rows:
        say("no routing layer with engines")
    else:
        print_table(("layer", "engine", *sizes, "refused"), map(cells, rows))
