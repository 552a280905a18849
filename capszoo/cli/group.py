"""Error handling for every command: one line on stderr, and an exit code."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from .._utils.process import Verbosity, is_quiet, is_verbose, set_verbosity
from ..errors import CapszooError, UsageError
from .common import print_error, stderr
from .examples import EXAMPLES

_LEVELS = {
    "--quiet": Verbosity.QUIET,
    "-q": Verbosity.QUIET,
    "--verbose": Verbosity.VERBOSE,
    "-v": Verbosity.VERBOSE,
}
#: Options of the whole command line.
_FLAGS = ("--debug", *_LEVELS)


class Command(TyperCommand):
    """A command that refuses empty values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an empty path or name, as of an unset variable of the shell: a path would be the current folder."""
        parsed, _, _ = self.make_parser(ctx).parse_args(list(args))
        for parameter in self.params:
            values = parsed.get(parameter.name or "")
            if "" in (values if isinstance(values, (list, tuple)) else [values]) and parameter.default != "":
                named = parameter.param_type_name == "option"
                name = parameter.opts[0] if named else (parameter.metavar or str(parameter.name))
                raise UsageError(f"{name} is empty", "give a value, or leave it out")
        return super().parse_args(ctx, args)


class OneLineErrors(TyperGroup):
    """Print every error, of the parser and of the commands, as one line on stderr, with the right exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of the panels of ``capszoo --help``, because typer lists groups after commands."""
        order = list(EXAMPLES)
        return sorted(super().list_commands(ctx), key=order.index)

    def main(self, args: Sequence[str] | None = None, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        arguments = list(sys.argv[1:] if args is None else args)
        end = arguments.index("--") if "--" in arguments else len(arguments)
        # accepted anywhere on the line, because users put them last
        debug = "--debug" in arguments[:end]
        levels = {_LEVELS[arg] for arg in arguments[:end] if arg in _LEVELS}
        set_verbosity(min(levels, default=Verbosity.NORMAL))
        arguments = [arg for i, arg in enumerate(arguments) if arg not in _FLAGS or i > end]
        logging.disable(logging.WARNING if is_quiet() else logging.NOTSET)
        if is_quiet():
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        if is_verbose():
            logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
        else:  # without a network it prints two lines for each of its retries before the error
            os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the caller (`2>&-`)
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
            # a name that the terminal's encoding lacks must not lose the results
            sys.stdout.reconfigure(errors="backslashreplace")
        began = time.monotonic()
        try:
            together = next((arg for arg in arguments[:end] if re.fullmatch("-[qv]{2,}", arg)), "")
            if together and len(set(together)) == 2:
                raise UsageError(f"{together} has no more effect than {together[:2]}", f"give {together[:2]}")
            if len(levels) > 1 or together:
                raise UsageError("--quiet and --verbose exclude each other", "give one of them")
            code = super().main(args=arguments, standalone_mode=False, **extra)
            if is_verbose():
                stderr().print(f"done in {time.monotonic() - began:.1f} s")
        except Exception as error:
            if debug:
                raise
            line, code = _one_line(error)
            # a wrong call fails in every process of a training: the first one says so
            if line and not (code == UsageError.exit_code and os.environ.get("RANK", "0") != "0"):
                print_error(line)
        except KeyboardInterrupt:
            code = 130
        sys.exit(code if isinstance(code, int) else 0)


_OTHER_PLACE = "choose another place, then give the same command again"

#: What to do about an error of the system, by its number.
_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file in this folder",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.ENOSPC: f"make room or {_OTHER_PLACE}",
    errno.EDQUOT: f"make room or {_OTHER_PLACE}",
}


def _one_line(error: Exception) -> tuple[str, int]:
    """The message of an error and its exit code."""
    if isinstance(error, CapszooError):
        return " ".join(str(error).split()), error.exit_code
    if hasattr(error, "format_message"):  # parser errors: unknown command, option or value, missing argument
        message = " ".join(error.format_message().split()).rstrip(".")
        if not message:  # called without a command: the help has been printed
            return "", 2
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "capszoo"
        return f"{message}: see `{path} --help`", int(getattr(error, "exit_code", 2))
    if type(error).__name__ == "Abort":
        return "stopped", 1
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return f"{error.object[:100]!r} holds bytes that are not UTF-8: rename the file or the folder", 1
    no_memory = (
        any(words in message for words in ("can't allocate memory", "not enough memory: you tried"))
        or getattr(error, "errno", None) == errno.ENOMEM
    )
    if no_memory or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "there is not enough memory: lower the batch size or the size of the images", 1
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if error.filename else ""
        return f"{named}{error.strerror}: {_REMEDIES.get(error.errno or 0, _OTHER_PLACE)}", 1
    return f"{type(error).__name__}: {message} (--debug shows the traceback)", 1
