"""``capszoo app``: a page in the browser to play with a model."""

from __future__ import annotations

from typing import Annotated

import typer

from .._pretrained.catalogue import check_model_argument
from .._utils.choices import EXTRAS
from ..errors import require
from .common import ExportedArgument, complete_model, note


def app_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Models to choose from, but no exported files (default: every checkpoint).",
            show_default=False,
            autocompletion=complete_model,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=65535, help="Port (default: the first free one from 7860 on)."),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page to draw digits and see couplings, capsules and reconstructions."""
    require("the app", EXTRAS["app"][0], "app")
    from ..app.page import run

    if host not in ("127.0.0.1", "localhost", "::1"):
        note(f"every machine that reaches {host} can use the page")
    run(models or (), host, port, browser)


def serve_command(
    model: ExportedArgument,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port.")] = 8000,
    queue: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Requests at a time, the active one included; further ones get 503."
        ),
    ] = 64,
) -> None:
    """Serve a model's exported file over HTTP, to try it out. For production use Triton: `capszoo export --triton`."""
    check_model_argument(model, exported=True)
    require("serving", EXTRAS["serve"][0], "serve")
    from ..app.server import serve

    note("one process, to try a model out; for load use Triton (`capszoo export --triton`)")
    serve(model, host, port, queue)
