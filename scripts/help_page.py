"""docs/cli.md: the help of every command, as printed by ``capszoo COMMAND --help``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from capszoo.cli import app
from capszoo.cli.help import HelpCommand, help_text

__all__ = ["WIDTH", "every_context", "help_page"]

#: Width of the text on the page in columns.
WIDTH = 100

HEAD = """# Command line

What `capszoo COMMAND --help` prints. Written by `make docs` from the parser; a test compares the two.
`capszoo --install-completion` sets up completion of commands, options, models and recipes for the current shell
(bash, zsh, fish, PowerShell).
"""


def every_context() -> Iterator[Any]:
    """The parser's context of each command, groups before their commands, without hidden ones."""
    root = get_command(app)
    yield from _below(root, HelpCommand.context_class(root, info_name="capszoo", **root.context_settings))


def _below(command: Any, context: Any) -> Iterator[Any]:
    yield context
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        inner = command.get_command(context, name)
        if not inner.hidden:
            settings = {"help_option_names": context.help_option_names}
            yield from _below(inner, inner.context_class(inner, parent=context, info_name=name, **settings))


def help_page() -> str:
    """The whole page."""
    parts = [HEAD]
    for context in every_context():
        parts.append(f"\n## `{context.command_path}`\n\n```text\n{help_text(context, WIDTH)}\n```\n")
    return "".join(parts)
