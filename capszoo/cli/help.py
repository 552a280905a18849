"""``--help``: usage, description of the command, arguments and options in panels, examples.

The layout does not depend on the installed version of typer; ``docs/cli.md`` has the same text.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from ..errors import UsageError

__all__ = ["HelpCommand", "HelpGroup", "help_text"]

#: Maximum width of the help in columns, also on wider terminals.
MAX_WIDTH = 100


def help_text(context: Any, width: int = MAX_WIDTH, colour: bool = False) -> str:
    """Format the help of a command.

    Args:
        context: of the command.
        width: width in columns.
        colour: use the escape sequences of a terminal.
    """
    command = context.command
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, no_color=not colour, highlight=False
    )
    console.print(Text.assemble(("Usage: ", "bold"), " ".join([context.command_path, *_usage(command)])))
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        console.print()
        console.print(Text(" ".join(paragraph.split())))
    console.print()
    for title, rows in _panels(command, context).items():
        console.print(_panel(title, _table(rows)))
    if command.epilog:
        console.print(_panel("Examples", Text(inspect.cleandoc(command.epilog))))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def _usage(command: Any) -> list[str]:
    arguments = [_argument(p) for p in command.params if p.param_type_name == "argument" and not p.hidden]
    more = ["COMMAND", "[ARGS]..."] if isinstance(command, TyperGroup) else []
    return ["[OPTIONS]", *arguments, *more]


def _argument(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    return name if param.required or name.startswith("[") else f"[{name}]"


def _panels(command: Any, context: Any) -> dict[str, list[tuple[str, str, str]]]:
    """Rows (name, value, text) of each panel, most relevant first."""
    arguments: list[tuple[str, str, str]] = []
    options: dict[str, list[tuple[str, str, str]]] = {"Options": []}
    for param in command.get_params(context):
        if getattr(param, "hidden", False):
            continue
        if param.param_type_name == "argument":
            arguments.append((_argument(param).strip("[]").replace("]...", "..."), "", param.help or ""))
            continue
        names = _names(param)
        panel = getattr(param, "rich_help_panel", None) or "Options"
        options.setdefault(panel, []).append((", ".join(names), _value(param), _described(param)))
    if not isinstance(command, TyperGroup):
        return {"Arguments": arguments, **options} if arguments else options
    found: dict[str, list[tuple[str, str, str]]] = {}
    for name in command.list_commands(context):
        inner: Any = command.get_command(context, name)
        if inner is not None and not inner.hidden:
            panel = getattr(inner, "rich_help_panel", None) or "Commands"
            first = inspect.cleandoc(inner.help or "").partition("\n\n")[0]
            found.setdefault(panel, []).append((name, "", " ".join(first.split())))
    return {**found, **options}


def _names(param: Any) -> list[str]:
    """Short spellings, then the long one; further long ones, old spellings that still work, are omitted."""
    short = [name for name in param.opts if not name.startswith("--")]
    return [*short, *[name for name in param.opts if name.startswith("--")][:1], *param.secondary_opts]


def _value(param: Any) -> str:
    if getattr(param, "is_flag", False):
        return ""
    return str(param.metavar or "VALUE")


def _described(param: Any) -> str:
    default = param.default
    shown = param.show_default and isinstance(default, (str, int, float)) and not isinstance(default, bool)
    required = " [required]" if param.required and param.param_type_name == "option" else ""
    return f"{param.help or ''}{required}{f' [default: {default}]' if shown and default != '' else ''}"


def _table(rows: list[tuple[str, str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold cyan")
    valued = any(value for _, value, _ in rows)
    if valued:
        table.add_column(no_wrap=True, style="yellow")
    table.add_column(ratio=1)
    for name, value, text in rows:
        table.add_row(*([name, value] if valued else [name]), Text(" ".join(text.split())))
    return table


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(Group(content), title=title, title_align="left", border_style="dim")


def _write(command: Any, context: Any, formatter: Any) -> None:
    stream = sys.stdout
    terminal = stream.isatty() and "NO_COLOR" not in os.environ
    width = min(Console(file=stream).width, MAX_WIDTH)
    formatter.write(help_text(context, width, terminal) + "\n")


class HelpCommand(TyperCommand):
    """A command whose help has the layout of this module, and which refuses empty values."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _write(self, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an empty path or name, as of an unset variable of the shell: a path would be the current folder."""
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        for parameter in self.params:
            values = given.get(parameter.name or "")
            if "" in (values if isinstance(values, (list, tuple)) else [values]) and parameter.default != "":
                named = parameter.param_type_name == "option"
                name = parameter.opts[0] if named else (parameter.metavar or str(parameter.name))
                raise UsageError(f"{name} is empty", "give a value, or leave it out")
        return super().parse_args(ctx, args)


class HelpGroup(TyperGroup):
    """A group of commands whose help has the layout of this module."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _write(self, ctx, formatter)
