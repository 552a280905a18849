"""Pages of the command line, by typer's generator, and of the Python interface, from docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HEAD = """What `capszoo COMMAND --help` prints. Results go to stdout, notes and errors to stderr. Exit code 0 is
success, 1 failure, 2 wrong usage. `capszoo --install-completion` sets up completion of commands, options, models and
recipes for the current shell (bash, zsh, fish, PowerShell).
"""

#: Modules of the reference, each on a separate page.
API_MODULES = (
    "capszoo",
    "capszoo.explain",
    "capszoo.explain.convergence",
    "capszoo.explain.deletion",
    "capszoo.explain.heat_map",
    "capszoo.explain.reconstructions",
    "capszoo.explain.routing_stats",
    "capszoo.inference",
    "capszoo.images",
    "capszoo.preprocess",
    "capszoo.scores",
    "capszoo.losses",
    "capszoo.ray_predict",
    "capszoo.checkpoint",
    "capszoo.metadata",
    "capszoo.data",
    "capszoo.layers",
    "capszoo.models",
    "capszoo.export",
    "capszoo.export.to_onnx",
    "capszoo.export.bundle",
    "capszoo.export.compare",
    "capszoo.export.options",
    "capszoo.export.unroll",
    "capszoo.export.to_aoti",
    "capszoo.export.to_executorch",
    "capszoo.export.to_tensorrt",
    "capszoo.export.to_torch_tensorrt",
    "capszoo.export.benchmark",
    "capszoo.recipes.train",
    "capszoo.recipes.finetune",
    "capszoo.recipes.evaluate",
    "capszoo.recipes.publish",
    "capszoo.app.model",
    "capszoo.app.server",
    "capszoo.app.space",
    "capszoo.errors",
)


def command_page(page: Path) -> None:
    """Write the page of all commands, by typer's own generator."""
    command = [sys.executable, "-m", "typer", "capszoo.cli", "utils", "docs", "--name", "capszoo"]
    command += ["--title", "Command line"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    title, _, rest = text.partition("\n")
    page.write_text(f"{title}\n\n{HEAD}{rest}", encoding="utf-8")


def public_names(module: Any) -> list[str]:
    """The names in a module's ``__all__``; without one, its public definitions."""
    stated = getattr(module, "__all__", None)
    if stated is not None:
        return [name for name in stated if not name.startswith("_")]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def api_pages(folder: Path) -> None:
    """Write an index and a page for each of ``API_MODULES``."""
    folder.mkdir(parents=True)
    toc = "```{toctree}\n:maxdepth: 1\n\n" + "\n".join(API_MODULES) + "\n```\n"
    said = "Written from docstrings. Shape letters are those of the [glossary](../glossary.md).\n\n"
    (folder / "index.md").write_text(f"# Python reference\n\n{said}{toc}", encoding="utf-8")
    for name in API_MODULES:
        module = importlib.import_module(name)
        parts = [f"# {name}", docstring(module)]
        for public in public_names(module):
            parts += _entry(public, getattr(module, public))
        (folder / f"{name}.md").write_text(
            "\n\n".join(part for part in parts if part) + "\n", encoding="utf-8"
        )


def _entry(name: str, value: Any) -> list[str]:
    if inspect.ismodule(value):
        return [f"## {name}", (inspect.getdoc(value) or "A module.").splitlines()[0]]
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return [f"## {name}", f"```python\n{name} = {_short(value)}\n```"]
    parts = [f"## {name}", _signature(name, value), docstring(value)]
    if inspect.isclass(value) and not issubclass(value, BaseException):
        for inner, method in vars(value).items():
            function = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method
            if inspect.isfunction(function) and not inner.startswith("_") and function.__doc__:
                parts += [f"### {name}.{inner}", _signature(inner, function), docstring(function)]
            elif isinstance(method, property) and not inner.startswith("_") and method.__doc__:
                parts += [f"### {name}.{inner}", docstring(method)]
    return parts


def _short(value: Any) -> str:
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text if len(text) <= 200 else text[:200] + " …"


def _signature(name: str, value: Any) -> str:
    try:
        signature = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        signature = "(…)"
    one = f"{name}{signature}"
    if len(one) > 100:
        one = one.replace("(", "(\n    ", 1)
        one = re.sub(r", (?=\*{0,2}\w+(:|=|,|\)))", ",\n    ", one)
    return f"```python\n{one}\n```"


_SECTIONS = ("Args", "Arguments", "Returns", "Raises", "Attributes", "Yields", "Example", "Examples")


def docstring(value: Any) -> str:
    """A docstring in Google style as Markdown."""
    text = inspect.getdoc(value) or ""
    text = re.sub(r":(?:\w+:)?\w+:`~?([^`]+)`", r"`\1`", text)  # roles
    lines: list[str] = []
    section = ""
    code = False
    for line in text.splitlines():
        if line.strip().startswith(">>>") != code and (line.strip().startswith(">>>") or not line.strip()):
            code = not code
            lines += ["", "```python" if code else "```"]
        if code:
            lines.append(line.strip())
            continue
        heading = line.removesuffix(":")
        if line.endswith(":") and heading in _SECTIONS:
            section = heading
            lines += ["", f"**{heading}**", ""]
        elif section and line.startswith("    ") and not line.startswith("        "):
            name, colon, rest = line.strip().partition(":")
            item = re.fullmatch(r"[\w*., ]+", name) and colon
            lines.append(
                f"- `{name}`:{_safe(rest)}"
                if item
                else f"- {_safe(line.strip())}"
                if not lines[-1]
                else _safe(line)
            )
        elif section and line.startswith("        "):
            lines.append("  " + _safe(line.strip()))
        else:
            section = "" if line.strip() else section
            lines.append(_safe(line))
    return "\n".join(lines + (["```"] if code else []))


def _safe(line: str) -> str:
    """Escape brackets and comparison signs of Markdown in a line, outside of code."""
    parts = re.split(r"(``.*?``|`[^`]*`)", line)
    return "".join(
        part
        if i % 2
        else part.replace("[", "\\[").replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")
        for i, part in enumerate(parts)
    )
