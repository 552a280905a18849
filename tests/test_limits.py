"""Arguments and recipes that make no sense get a sentence; messages bring no control characters to the terminal."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import capszoo
from capszoo._utils import process as _memory
from capszoo.cli import app
from capszoo.cli.common import MAX_MESSAGE, printable
from capszoo.cli.group import _one_line
from capszoo.recipes.config import RecipeError, load_recipe
from tests.support.errors import refuses


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        *(("epochs=true", "epochs"), ("batch_size=false", "batch_size"), ("epochs=" + "9" * 40, "epochs")),
        *((f"seed={10**30}", "seed"), ("seed=true", "seed"), ("data.val_seed=1" + "0" * 30, "data.val_seed")),
        *(('tag="a\\0b"', "tag"), ('tag="\\e[31m"', "tag"), ("tag=" + "x" * 300, "tag"), ("tag=a.b", "tag")),
        *(
            ("model_args={checkpoint_path: x}", "model_args"),
            ("model_args={backbone: 'hf-hub:a/b'}", "model_args"),
        ),
    ],
)
def test_a_recipe_that_could_not_be_finished_is_refused_at_once(setting: str, key: str) -> None:
    with pytest.raises(RecipeError) as e:
        load_recipe("idpa_cnn.mnist", [setting])
    assert key in str(e.value) and "\n" not in str(e.value)
    done = CliRunner().invoke(app, ["recipes", "validate", "idpa_cnn.mnist", "--set", setting])
    assert done.exit_code == 2 and done.stderr.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "architecture", ["capsnet_dynamic", "cnn_routingpool", "resnet20_routingcaps", "idpa_cnn"]
)
@pytest.mark.parametrize(
    "wrong", [{"in_chans": -1}, {"in_chans": 1.5}, {"num_classes": -2}, {"num_classes": True}]
)
def test_counts_are_whole_numbers(architecture: str, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with refuses(ValueError, names=[architecture, name]):
        capszoo.create_model(architecture, **wrong)


@pytest.mark.parametrize("architecture", ["capsnet6_dynamic", "capsnet_dynamic", "cnn_routingpool"])
def test_iterations_are_a_whole_number(architecture: str) -> None:
    with refuses(ValueError, names=["routing_iters", "0", "2.5"]):
        capszoo.create_model(architecture, routing_iters=2.5)


def test_messages_are_short_and_printable(tmp_path: Path) -> None:
    line = printable("\x1b]0;title\x07" + "x" * 5000 + " do this", MAX_MESSAGE)
    assert line.isprintable() and len(line) <= MAX_MESSAGE and line.endswith("do this")
    done = CliRunner().invoke(app, ["predict", "idpa_cnn.mnist", str(tmp_path / "\x1b[31mred.png")])
    assert done.exit_code != 0 and "\x1b[31mred" not in done.output + done.stderr


def test_a_full_disk_and_a_long_name_are_sentences() -> None:
    remedies = {errno.ENOSPC: "make room or choose another place", errno.ENAMETOOLONG: "choose another place"}
    for number, remedy in remedies.items():
        line, code = _one_line(OSError(number, "as the system says", "/some/where"))
        assert line.startswith(f"/some/where: as the system says: {remedy}") and code == 1


def test_memory_is_not_kept_where_libc_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: Any) -> Any:
        raise OSError("no dynamic loading")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert _memory.keep_freed_memory() is False

    class Other:
        gnu_get_libc_version = 1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Other())
    assert _memory.keep_freed_memory() is False
