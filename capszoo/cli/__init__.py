"""The ``capszoo`` command: it parses, calls one function, prints.

Results go to stdout, errors, notes and progress to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage. An error is one
line that says what to do; ``--debug`` shows the traceback instead.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .app import app_command
from .curves import curves_command
from .eval import eval_command
from .explain import explain_command
from .export import compare_command, export_command
from .group import OneLineErrors
from .state import state_app
from .train import finetune_command, publish_command, train_command
from .zoo import info_command, list_command, predict_command

__all__ = ["app", "main"]

app = typer.Typer(
    cls=OneLineErrors,
    help="Capsule networks as ready models.",
    no_args_is_help=True,
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


# in the order of `capszoo --help`
app.command("list")(list_command)
app.command("info")(info_command)
app.command("predict")(predict_command)
app.command("explain")(explain_command)
app.command("eval")(eval_command)
app.command("export")(export_command)
app.command("compare")(compare_command)
app.command("train")(train_command)
app.add_typer(state_app, name="state")
app.command("curves")(curves_command)
app.command("finetune")(finetune_command)
app.command("publish")(publish_command)
app.command("app")(app_command)


def main() -> None:
    """Entry point of the ``capszoo`` script."""
    app(prog_name="capszoo")
