"""``capszoo curves``: runs of training, drawn side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..errors import UsageError
from .common import stdout

KINDS, AXES = ("training", "routing"), ("epoch", "images")


def curves_command(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Folders of runs (unfinished too), or name.tag.", show_default=False
        ),
    ],
    what: Annotated[
        str,
        typer.Option(
            help="training: loss and accuracy, a line each; routing: votes by their cosine with the parent at "
            "some epochs, a row each (of runs with routing_images).",
            metavar="NAME",
        ),
    ] = "training",
    x: Annotated[str, typer.Option("--x", help="training: epoch, or images seen.", metavar="NAME")] = "epoch",
    log: Annotated[bool, typer.Option("--log", help="training: the loss on a logarithmic axis.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Figure to write, .png, .pdf or .svg (default: WHAT.png).",
            show_default=False,
            metavar="PATH",
        ),
    ] = None,
) -> None:
    """Draw runs of training in one figure: with one and with three iterations, with and without feedback."""
    from .._suggest import unknown_name
    from ..explain.plotting import require_matplotlib

    for kind, value, known in (("picture", what, KINDS), ("axis", x, AXES)):
        if value not in known:
            raise UsageError(unknown_name(kind, value, known))
    require_matplotlib("curves")
    from ..recipes.evaluation.plots import draw_dynamics, draw_runs
    from ..recipes.training.history import find_runs

    path = out or Path(f"{what}.png")
    found = find_runs(runs)
    written = draw_dynamics(found, path) if what == "routing" else draw_runs(found, path, x, log)
    for name, records in found.items():
        last = records[-1]
        told = (f"{key} {last[key]:g}" for key in ("train_loss", "train_top1", "val_top1") if last.get(key))
        stdout().print(escape(f"{name}, epoch {last['epoch']}: {', '.join(told)}"), soft_wrap=True)
    stdout().print(escape(f"written: {written}"), soft_wrap=True)
