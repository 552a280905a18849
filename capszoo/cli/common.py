"""Shared by the commands: output streams, options and arguments, progress."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from .._pretrained.catalogue import architectures, check_model_argument, checkpoints, describe
from .._utils.choices import PICTURE_SUFFIXES, check_background
from .._utils.devices import DEVICES, check_device
from .._utils.files import check_numbers_file, check_writable
from .._utils.process import is_quiet
from ..errors import CapszooError, UsageError, unknown_name

#: Picture formats, and styles (``capszoo.explain.plotting.STYLES``, which needs torch).
PICTURES, STYLES = ("png", "pdf", "svg"), ("screen", "paper", "talk")

#: Length of the longest error message in characters.
MAX_MESSAGE = 500

#: Seconds after which progress is shown.
PROGRESS_AFTER = 2.0


def was_given(context: typer.Context, parameter: str) -> bool:
    """True if a parameter of a command was given on the command line, not left at its default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def refuse_unused(context: typer.Context, parameters: Iterable[str], why: str, remedy: str) -> None:
    """Refuse options that were given, but that this call would ignore.

    Args:
        context: of the command.
        parameters: names of the command's parameters.
        why: end of the sentence "--option has no effect …".
        remedy: what to do instead.

    Raises:
        UsageError: one of them was given.
    """
    for parameter in context.command.params:
        if parameter.name in parameters and was_given(context, parameter.name):
            raise UsageError(f"{parameter.opts[0]} has no effect {why}", remedy)


def complete_model(incomplete: str) -> list[str]:
    """Names of models and checkpoints for the shell's completion."""
    return sorted(name for name in (*architectures(), *checkpoints()) if name.startswith(incomplete))


#: An option in the panel "Images" of ``--help``.
image_option = partial(typer.Option, rich_help_panel="Images")

#: What MODEL may be, for help texts.
MODEL_HELP = (
    "Name, name.tag, hf-hub:USER/NAME or hf-hub:USER/NAME@REVISION, local-dir:FOLDER, folder of a run, "
    "or .safetensors file."
)

#: The same where an exported file will do, too.
EXPORTED_HELP = f"{MODEL_HELP[:-1]}; or a .onnx file or folder of `capszoo export`."

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False, autocompletion=complete_model)
]
ExportedArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=EXPORTED_HELP, show_default=False, autocompletion=complete_model),
]
ImagesArgument = Annotated[
    list[Path],
    typer.Argument(metavar="IMAGE...", help="Image files or folders of images.", show_default=False),
]
OriginalOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Model to compare with (default: the manifest's, if it is in the zoo or on this machine).",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="|".join(DEVICES),
        callback=check_device,
        help="Device (default: auto, which is CUDA if available, else CPU).",
    ),
]
BackgroundOption = Annotated[
    str | None,
    typer.Option(
        "--background",
        metavar="black|white",
        callback=check_background,
        help="Background of transparent pixels (default: as the weights' metadata say).",
    ),
]
InvertOption = Annotated[
    bool, typer.Option("--invert", help="Swap dark and bright: for dark digits on white paper.")
]
FitOption = Annotated[
    bool, typer.Option("--fit", help="Centre and scale a drawing as MNIST's digits were (white on black).")
]
DpiOption = Annotated[
    int | None,
    typer.Option(
        "--dpi",
        min=20,
        max=1200,
        metavar="N",
        help="Dots per inch of a .png (default: 150; 300 for --style paper).",
    ),
]
BatchSizeOption = Annotated[
    int, typer.Option("--batch-size", min=1, metavar="N", help="Images per forward pass.")
]
ImagesOption = Annotated[
    str | None,
    image_option(
        "--data",
        metavar="PATH",
        help="Folder of the data set (default: $CAPSZOO_DATA), or a folder of image folders.",
    ),
]
DataFolderOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="PATH", help="Folder of the data set (default: $CAPSZOO_DATA)."),
]
DatasetOption = Annotated[
    str | None,
    image_option("--dataset", metavar="NAME", help="Data set, if not the one the weights were trained on."),
]
SkipBadOption = Annotated[bool, image_option("--skip-bad", help="Leave out images that cannot be read.")]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="|".join(PICTURES),
        help="File format of pictures (default: the suffix of --out, else png).",
    ),
]
StyleOption = Annotated[
    str,
    typer.Option(
        "--style",
        metavar="|".join(STYLES),
        help="Size of text and lines: for a web page, a printed column, or slides.",
    ),
]
SizeOption = Annotated[
    str | None, typer.Option("--img-size", metavar="N or HxW", help="Input size, if not the model's own.")
]
ItersOption = Annotated[
    int | None,
    typer.Option("--routing-iters", min=1, help="Routing iterations, if not the model's own.", metavar="N"),
]


def check_paths(paths: Iterable[Path]) -> None:
    """Raise ``CapszooError`` for the first path that does not exist, before anything heavy is loaded."""
    for path in paths:
        if path.parts[:1] in (("http:",), ("https:",)):
            raise UsageError(f"{path.name} is on the web: images are read from files", "download it first")
        if not path.exists():
            raise CapszooError(f"{path}: no such file", "check the path")


def stdout() -> Console:
    """Console for results."""
    return Console(width=_width(sys.stdout), highlight=False, emoji=False)


def stderr() -> Console:
    """Console for notes and progress; prints nothing with ``--quiet``."""
    return Console(width=_width(sys.stderr), highlight=False, emoji=False, stderr=True, quiet=is_quiet())


def say(text: str | Text = "") -> None:
    """Print a line of the result as it is, however long."""
    stdout().print(_cell(text), soft_wrap=True)


def note(text: str, label: str = "note: ") -> None:
    """Print a note to stderr, in one line."""
    stderr().print(_cell(f"{label}{text}"), soft_wrap=True)


def print_error(line: str) -> None:
    """Print an error, in one line, to stderr; also with ``--quiet``."""
    console = Console(width=_width(sys.stderr), highlight=False, emoji=False, stderr=True)
    console.print(Text.assemble(("error:", "bold red"), f" {printable(line, MAX_MESSAGE)}"), soft_wrap=True)


def print_table(columns: Iterable[str | Column], rows: Iterable[Iterable[str | Text]]) -> None:
    """Print a table; a cell is one line as it is, unless it is a ``Text``."""
    heads = (one if isinstance(one, Column) else Column(_cell(one)) for one in columns)
    _print_rows(Table(*heads, box=None, pad_edge=False), rows)


def print_facts(rows: Iterable[Iterable[str | Text]]) -> None:
    """Print names and values, a row each."""
    _print_rows(Table.grid(padding=(0, 2)), rows)


def _print_rows(table: Table, rows: Iterable[Iterable[str | Text]]) -> None:
    for row in rows:
        table.add_row(*map(_cell, row))
    stdout().print(table)


def _cell(text: str | Text) -> Text:
    """Text without markup and control characters: names of files and of classes could steer the terminal."""
    return text if isinstance(text, Text) else Text(printable(text))


def printable(text: str, longest: int = sys.maxsize) -> str:
    """Replace control characters, which names of files, keys and tensors may contain, and shorten the middle.

    Surrogates stay. They stand for bytes of a file's name that are no text, and the output streams escape them.
    """
    text = "".join(
        c if c.isprintable() or "\ud800" <= c <= "\udfff" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    if len(text) <= longest:
        return text
    half = (longest - 3) // 2  # a message begins with the problem and ends with the remedy
    return f"{text[:half]} … {text[-half:]}"


def check_picture_options(format: str | None, style: str) -> None:
    """Raise ``UsageError`` for an invalid ``--format`` or ``--style``, before anything is loaded."""
    if format is not None and format not in PICTURES:
        raise UsageError(unknown_name("format", format, PICTURES))
    if style not in STYLES:
        raise UsageError(unknown_name("style", style, STYLES))


@dataclass(frozen=True)
class Picture:
    """A picture file and its style."""

    path: Path
    dpi: int | None = None
    style: str = "screen"

    def drawn(self) -> AbstractContextManager[None]:
        """Apply the style to pictures saved within this context."""
        from ..explain.plotting import style

        return style(self.dpi, self.style)


def picture(
    out: Path | None, format: str | None, style: str, dpi: int | None, name: str, *, numbers: str = ""
) -> Picture:
    """The picture described by ``--out``, ``--format``, ``--style`` and ``--dpi``.

    Args:
        out, format, style, dpi: the options.
        name: of the file, without a suffix, if ``--out`` is not given.
        numbers: name of the first column of the picture's .csv file of values; empty if it has no such file.

    Raises:
        UsageError: an unknown format or style, or a format that differs from that of ``out``.
        CapszooError: the file cannot be written, or its numbers would replace a table that is not theirs.
    """
    check_picture_options(format, style)
    if out is not None:
        suffix = out.suffix.lower()
        if format is not None and suffix != f".{format}":
            raise UsageError(f"--out {out} is no .{format} file", "leave --format out, or change the suffix")
        if suffix not in PICTURE_SUFFIXES:
            raise UsageError(
                f"--out {out}: cannot write this kind of file", f"use one of {', '.join(PICTURE_SUFFIXES)}"
            )
    path = out or Path(f"{name}.{format or 'png'}")
    if numbers:
        check_numbers_file(path, numbers)
    check_writable(path)
    return Picture(path, dpi, style)


def _width(stream: Any) -> int | None:
    """None on a terminal, for its width; in a pipe a width at which a row of a table stays one line."""
    return None if stream.isatty() or "COLUMNS" in os.environ else 10_000


def print_json(value: Any) -> None:
    """Print a JSON document, as the only output on stdout, in UTF-8; in ASCII if stdout has another encoding."""
    plain = _plain(value)
    other = (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"  # JSON files are UTF-8
    text = json.dumps(plain, indent=1, allow_nan=False, ensure_ascii=other)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # names of files may also hold bytes that are no text
        text = json.dumps(plain, indent=1, allow_nan=False)
    typer.echo(text)


def _plain(value: Any) -> Any:
    """Replace NaN, which JSON does not have, by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar with the remaining time, on a terminal and after two seconds; yields a function to advance it."""
    console = stderr()
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(what, total=total)
    start = time.monotonic()

    def advance(count: int) -> None:
        bar.advance(task, count)
        if not bar.live.is_started and time.monotonic() - start > PROGRESS_AFTER and not bar.finished:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


def describe_model(name: str, **options: Any) -> dict[str, Any]:
    """The output of ``capszoo info --json``, from the generated file if that has it, else computed from the model.

    Raises:
        CapszooError: the name or an option cannot refer to a model.
    """
    about = None if options else describe(name)
    if about is None:
        check_model_argument(name)
        from ..summary import summarise

        about = summarise(name, **options).to_dict()
    return about


def given(**options: Any) -> dict[str, Any]:
    """The options that were given, without those that are None."""
    return {name: value for name, value in options.items() if value is not None}


def parse_size(text: str | None) -> tuple[int, int] | None:
    """``32`` or ``32x48`` to (height, width)."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--img-size {text} is no size", "give 32 or 32x48 (height x width)")
    return int(parts[0]), int(parts[-1])
