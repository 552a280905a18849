"""``capszoo app``: a page in the browser to play with a model."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import require
from .common import complete_model, stderr

__all__ = ["app_command"]


def app_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Models to choose from, as `capszoo predict` takes them (default: every checkpoint).",
            show_default=False,
            autocompletion=complete_model,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.", metavar="NAME")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port (default: the first free one from 7860 on).",
            show_default=False,
            metavar="N",
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser.")] = False,
) -> None:
    """Open a page to draw digits and see couplings, capsules and reconstructions."""
    require("the app", ["gradio", "onnx", "onnxscript", "onnxruntime", "matplotlib"], "app")
    from ..app.page import run

    if host not in ("127.0.0.1", "localhost", "::1"):
        stderr().print(f"note: every machine that reaches {host} can use the page")
    run(models or (), host, port, browser)
