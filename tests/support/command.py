"""The command line as tests call it: in this process, with what it printed and how it ended."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.main import get_command
from typer.testing import CliRunner, Result

import capszoo
from capszoo.cli import app
from tests.support.errors import assert_names

needs_training = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs capszoo[train]"
)


ROOT_COMMAND: Any = get_command(app)


def root_context() -> Any:
    """The parser's context of ``capszoo`` itself."""
    return ROOT_COMMAND.context_class(ROOT_COMMAND, info_name="capszoo")


def parse(line: str) -> str:
    """Parse a command line without running it; the name of its command."""
    name, *words = shlex.split(line, comments=True)
    command, context = ROOT_COMMAND, root_context()
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, line
        command, *words = command.commands[words[0]], *words[1:]
    try:
        command.make_context(command.name, words, parent=context)
    except Exception as error:
        raise AssertionError(f"{line}: {error}") from error
    assert name == "capszoo"
    return str(command.name)


def run(*arguments: object) -> Result:
    # some test runners set COLUMNS for their workers, which would wrap the tables
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": None})


def succeeds(*arguments: object) -> str:
    """stdout of a command that must end with 0."""
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def fails(code: int, *arguments: object, names: Iterable[object] = ()) -> str:
    """The one line of error of a command that must end with ``code``, print nothing else, and name ``names``."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    line = result.stderr.strip()
    assert_names(line, names)
    return line


def write_run(folder: Path, **changes: Any) -> Path:
    """What a finished training run leaves: weights and metadata side by side."""
    torch.manual_seed(0)
    name = "resnet20_routingcaps"
    model = capszoo.create_model(name, num_classes=3, img_size=20, decoder=True)
    weights = folder / f"{name}.test.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), str(weights))
    metadata = {
        "architecture": name,
        "tag": "test",
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "num_classes": 3,
        "input_size": [1, 20, 20],
        "mean": [0.1],
        "std": [0.3],
        "label_names": ["ant", "bee", "cat"],
        "model_args": {"decoder": True},
        **changes,
    }
    weights.with_suffix(".json").write_text(json.dumps(metadata))
    return folder
