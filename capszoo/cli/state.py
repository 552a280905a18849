"""``capszoo state``: move an unfinished run to another machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .common import stdout
from .group import Command
from .training import check_training

__all__ = ["state_app"]

state_app = typer.Typer(
    help="Move an unfinished run to another machine: weights, optimiser state, moving average, position.",
    no_args_is_help=True,
)


@state_app.command("export", cls=Command)
def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="New folder for the files.", show_default=False)
    ],
) -> None:
    """Write the newest training state of a run as safetensors files of at most 16 MB, with a manifest."""
    check_training()
    from ..recipes.training.transfer import export_state

    stdout().print(escape(f"manifest: {export_state(run, folder)}"), soft_wrap=True)


@state_app.command("import", cls=Command)
def import_command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="What `capszoo state export` wrote.", show_default=False)
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the new run.", show_default=False)],
) -> None:
    """Recreate a run from exported files; `capszoo train RUN/recipe.yaml --out RUN` resumes it."""
    check_training()
    from ..recipes.training.transfer import import_state

    out = import_state(folder, run)
    command = ["capszoo", "train", str(out / "recipe.yaml"), "--out", str(out)]
    stdout().print(escape(f"run: {out}\nresume: {shlex.join(command)}"), soft_wrap=True)
