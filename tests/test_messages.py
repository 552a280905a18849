"""Messages for plausible mistakes: one line that says what is wrong and what to do."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import capszoo
from capszoo import errors
from capszoo._utils.files import not_writable
from capszoo.cli.group import _one_line
from capszoo.cli.training import check_recipe_argument
from capszoo.data import DataError
from capszoo.data.specs import source_name
from capszoo.errors import CapszooError, UsageError
from capszoo.inference import load_model
from capszoo.layers import engine_choice
from capszoo.recipes.config import load_recipe
from tests.support.command import fails, run, succeeds
from tests.support.errors import assert_names, refuses

DIGIT = Path(capszoo.__file__).parent / "assets" / "digit_3.png"


def test_arguments_that_a_network_refuses() -> None:
    line = fails(2, "predict", "capsnet_dynamic.mnist", DIGIT, "--img-size", "8")
    assert_names(line, ["capsnet_dynamic.mnist", "img_size", "8"])
    fails(2, "predict", "cnn6.mnist", DIGIT, "--routing-iters", "3", names=["cnn6", "routing_iters"])
    fails(2, "info", "resnet20_dynamic", "--num-classes", "1", names=["num_classes"])
    with refuses(UsageError, names=["resnet18", "img_size"]):
        load_model("resnet18", pretrained=False, img_size=192)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [("WeightsError", RuntimeError), ("UnknownModel", ValueError), ("UnknownArgument", TypeError)],
)
def test_one_family_of_errors(kind: str, builtin: type[Exception]) -> None:
    error = getattr(errors, kind)("what", "remedy")
    assert isinstance(error, CapszooError) and isinstance(error, builtin)
    assert _one_line(error) == ("what: remedy", error.exit_code)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_memory(error: Exception) -> None:
    said = "there is not enough memory: lower the batch size or the size of the images"
    assert _one_line(error) == (said, 1)


def test_a_place_that_cannot_be_written() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    line = not_writable(Path("x"), full)
    assert line.endswith("No space left on device: make room and run the same command")
    forbidden = PermissionError(errno.EACCES, "Permission denied")
    assert_names(not_writable(Path("x"), forbidden), ["permissions", "choose"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("loss.name=margn", "loss.reconstruction=0", "model_args.decoder=false"), "did you mean 'margin'"),
        (
            ("loss.name=spread", "loss.reconstruction=0", "model_args.decoder=false"),
            "spread is for images with one label",
        ),
        (("model_args.decoder=false",), "loss.reconstruction needs a decoder"),
    ],
)
def test_a_dry_run_says_what_training_would(settings: tuple[str, ...], said: str) -> None:
    sets = [word for setting in settings for word in ("--set", setting)]
    done = run("train", "resnet20_routingcaps.multimnist", "--dry-run", *sets)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and said in done.stderr


def test_keys_below_one_that_is_null(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("arch: idpa_cnn\ntag: x\ndata: {name: mnist}\nepochs: 1\ninit: null\n")
    assert load_recipe(own, ["init.weights=runs/a"]).init.weights == "runs/a"  # type: ignore[union-attr]


def test_recipe_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("# geändert\narch: idpa_cnn\n".encode("latin-1"))
    for command in (("show",), ("copy",), ("validate",)):
        target = [tmp_path / "new.yaml"] if command == ("copy",) else []
        fails(2, "recipes", *command, latin, *target, names=["latin.yaml", "UTF-8"])
    fails(2, "recipes", "copy", "idpa_cnn.mnist", "my", names=["my.yaml"])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").touch()
    fails(2, "train", folder, names=["folder", "run"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "idpa_cnn.mnist").mkdir()
    (tmp_path / "idpa_cnn.mnist" / "recipe.yaml").touch()
    check_recipe_argument("idpa_cnn.mnist")  # the package's recipe, whose run has this name
    (tmp_path / "old.json").write_text('{"arch": "idpa_cnn"}')
    succeeds("recipes", "copy", "old.json", tmp_path / "run")
    assert (tmp_path / "run" / "old.yaml").is_file()


def test_an_engine_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSZOO_ENGINES", "refrence")
    with refuses(ValueError, names=["refrence", "reference", "CAPSZOO_ENGINES"]):
        engine_choice.read_environment()


@pytest.mark.parametrize("data", ["", " ", "imagefolder:", "hf:"])
def test_an_empty_data_option_is_no_folder(data: str) -> None:
    with refuses(DataError, names=["hf:OWNER/NAME"]):
        source_name(data)
