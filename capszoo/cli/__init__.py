"""The ``capszoo`` command: each command parses its arguments, calls one function and prints the result.

Results go to stdout, errors, notes and progress to stderr. Exit codes: 0 success, 1 failure, 2 wrong usage. An error is
one line that states how to fix it; ``--debug`` shows the traceback instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from .. import __version__
from .app import app_command, serve_command
from .benchmark import benchmark_command, compare_command
from .curves import curves_command
from .data import data_app
from .doctor import doctor_command
from .eval import eval_command
from .examples import EXAMPLES
from .explain import explain_app
from .export import check_command, export_command
from .finetune import finetune_command
from .group import Command, OneLineErrors
from .predict import predict_command
from .publish import publish_command
from .recipes import recipes_app
from .train import train_command
from .zoo import info_command, list_command

__all__ = ["app", "main"]

app = typer.Typer(
    cls=OneLineErrors,
    help="Pretrained capsule networks: predict, explain, train, export.",
    epilog=EXAMPLES[""],
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
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print results and errors only: no notes, no progress.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the libraries' messages and the time taken, too.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks. This and the two above work anywhere on the line."),
    ] = False,
) -> None:
    pass


#: Commands by the panel of ``capszoo --help`` that lists them.
_PANELS: dict[str, dict[str, Callable[..., Any] | typer.Typer]] = {
    "Use a model": {
        "list": list_command,
        "info": info_command,
        "predict": predict_command,
        "explain": explain_app,
        "app": app_command,
        "eval": eval_command,
        "compare": compare_command,
    },
    "Deploy": {
        "export": export_command,
        "check": check_command,
        "benchmark": benchmark_command,
        "serve": serve_command,
    },
    "Train": {
        "finetune": finetune_command,
        "train": train_command,
        "recipes": recipes_app,
        "curves": curves_command,
        "publish": publish_command,
    },
    "Set up": {"data": data_app, "doctor": doctor_command},
}

for _panel, _commands in _PANELS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel, epilog=EXAMPLES[_name])
        else:
            _register = app.command(_name, cls=Command, rich_help_panel=_panel, epilog=EXAMPLES[_name])
            _register(_command)


def main() -> None:
    """Entry point of the ``capszoo`` script."""
    app(prog_name="capszoo")
