"""``capszoo curves``: runs of training, drawn side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CapszooError, UsageError, unknown_name
from .common import DpiOption, FormatOption, StyleOption, picture, refuse_unused, say

KINDS, AXES = ("training", "routing", "robustness"), ("epoch", "images")


def curves_command(
    context: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs (unfinished too), or name.tag; with --what robustness: eval.json files.",
            show_default=False,
        ),
    ],
    what: Annotated[
        str,
        typer.Option(
            help="training: loss and accuracy, a line each; routing: votes by their cosine with the parent at "
            "some epochs, a row each (of runs with routing_images); robustness: of several evaluations.",
            metavar="NAME",
        ),
    ] = "training",
    x: Annotated[str, typer.Option(help="training: epoch, or images seen.", metavar="NAME")] = "epoch",
    log: Annotated[bool, typer.Option("--log", help="training: the loss on a logarithmic axis.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Picture to write, .png, .pdf or .svg (default: WHAT.png).", metavar="PATH"
        ),
    ] = None,
    format: FormatOption = None,
    style: StyleOption = "screen",
    dpi: DpiOption = None,
) -> None:
    """Draw several training runs, or the robustness of several models, in one picture."""
    from ..explain.plotting import require_matplotlib

    file = picture(out, format, style, dpi, what, numbers="model" if what == "robustness" else "run")
    for kind, value, choices in (("picture", what, KINDS), ("axis", x, AXES)):
        if value not in choices:
            raise UsageError(unknown_name(kind, value, choices))
    if (suffix := file.path.suffix.lower()) in (".svg", ".pdf", ".eps"):
        refuse_unused(context, ["dpi"], f"on the lines of a {suffix} file", "leave it out")
    if what != "training":
        refuse_unused(context, ["x", "log"], f"with --what {what}", "leave it out")
    require_matplotlib("curves")
    from ..recipes.evaluation.plots import NAMES, draw_routing_probe, draw_runs
    from ..recipes.evaluation.report_plots import draw_robustness
    from ..recipes.training.history import find_runs

    if what == "robustness":
        with file.drawn():
            written = draw_robustness(_reports(runs), file.path)
        say(f"written: {written}")
        return
    records_of = find_runs(runs)
    with file.drawn():
        written = (
            draw_routing_probe(records_of, file.path)
            if what == "routing"
            else draw_runs(records_of, file.path, x, log)
        )
    for name, records in records_of.items():
        last = records[-1]
        keys = ("train_loss", "train_top1", "val_top1")
        told = (f"{NAMES[key]} {last[key]:g}" for key in keys if last.get(key))
        say(f"{name}, epoch {last['epoch']}: {', '.join(told)}")
    say(f"written: {written}")


def _reports(files: list[str]) -> dict[str, dict[str, Any]]:
    """Map names to contents of ``eval.json`` files, or of the folders that contain them."""
    reports: dict[str, dict[str, Any]] = {}
    for name in files:
        path = Path(name) / "eval.json" if Path(name).is_dir() else Path(name)
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            model = str(report["model"])
        except (OSError, ValueError, KeyError, TypeError):
            raise CapszooError(
                f"{path}: no report of capszoo eval --robustness --out", "name an eval.json"
            ) from None
        shown = f"{model} ({path})" if model in reports else model
        if shown in reports:
            raise UsageError(f"{path} is given twice", "name each report once")
        reports[shown] = report
    return reports
