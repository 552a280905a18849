"""Help of every command, and the commands around a model: check, compare, benchmark, recipes, data, doctor, explain."""

from __future__ import annotations

import inspect
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import capszoo
from capszoo.cli import app
from capszoo.cli.examples import EXAMPLES
from capszoo.data import DATASETS
from capszoo.errors import CapszooError
from tests.support import packed
from tests.support.command import (
    ROOT_COMMAND,
    fails,
    needs_training,
    parse,
    root_context,
    run,
    succeeds,
    write_run,
)
from tests.support.errors import assert_names
from tests.support.recipes import COUNTS, write_digits, write_photos

MODEL = "resnet20_routingcaps"


def _every_context(command: Any, context: Any) -> Iterator[Any]:
    """The parser's context of each command, groups before their commands, without hidden ones."""
    yield context
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        inner = command.get_command(context, name)
        if not inner.hidden:
            yield from _every_context(inner, inner.context_class(inner, parent=context, info_name=name))


CONTEXTS = list(_every_context(ROOT_COMMAND, root_context()))


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda context: context.command_path)
def test_help_shows_every_text_and_example(context: Any) -> None:
    """Also those with brackets, which a terminal's markup would swallow."""
    from typer.testing import CliRunner

    found = CliRunner().invoke(app, [*context.command_path.split()[1:], "--help"], env={"COLUMNS": "80"})
    assert found.exit_code == 0 and max(map(len, found.stdout.splitlines())) <= 80
    shown = " ".join(found.stdout.replace("│", " ").split())
    assert context.command.help, "what the command does is not said"
    examples = inspect.cleandoc(context.command.epilog or "").splitlines()
    assert all(" ".join(line.split()) in shown for line in examples)
    for param in context.command.get_params(context):
        if not getattr(param, "hidden", False):
            assert param.help and " ".join(param.help.split()) in shown, f"{param.name} has no help"
            if param.param_type_name == "option" and not param.is_flag:
                assert param.metavar, f"{param.name} has no metavar"


def test_every_command_has_examples_that_parse() -> None:
    lines = [line for text in EXAMPLES.values() for line in inspect.cleandoc(text).splitlines()]
    assert {line.split()[1] for line in lines} == set(EXAMPLES) - {""} == set(ROOT_COMMAND.commands)
    for line in lines:
        parse(line)


def test_wide_tables_fold_to_the_terminal() -> None:
    from typer.testing import CliRunner

    found = CliRunner().invoke(app, ["list"], env={"COLUMNS": "80"})
    assert found.exit_code == 0 and max(map(len, found.stdout.splitlines())) <= 80
    assert len(succeeds("list").splitlines()) < len(found.stdout.splitlines())


def test_progress_appears_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    from capszoo.cli import common

    now = [0.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    shown = []
    for seconds in (1.0, 3.0):
        stream = io.StringIO()
        terminal = Console(file=stream, force_terminal=True, width=80)
        monkeypatch.setattr(common, "stderr", lambda terminal=terminal: terminal)
        with common.progress_bar("predicting", 100) as advance:
            now[0] += seconds
            advance(10)
        shown.append(stream.getvalue())
    assert shown[0] == "" and "predicting" in shown[1] and "10/100" in shown[1]


# -- explain ----------------------------------------------------------------------------------------------------------


def test_perturb_takes_dimensions_and_a_range(trained: Path, pictures: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, common = tmp_path / "p.png", (trained, pictures / "a.png", "--out", tmp_path / "p.png")
    text = succeeds("explain", "perturb", *common, "--dims", "0,3", "--range", 0.5, "--dpi", 60)
    assert "2 dimensions" in text
    with Image.open(out) as small:
        width = small.width
    succeeds("explain", "perturb", *common, "--dims", "0,3", "--dpi", 120)
    with Image.open(out) as large:
        assert large.width == pytest.approx(2 * width, abs=4)
    fails(2, "explain", "perturb", *common, "--dims", "99", names=["99", "dimension"])
    fails(2, "explain", "perturb", *common, "--dims", "a", names=["dimensions"])
    fails(2, "explain", "perturb", *common, "--range", "inf", names=["--range"])


def test_explain_takes_a_class_and_how_to_read_an_image(
    trained: Path, pictures: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    made: list[bytes] = []
    image, out = pictures / "a.png", ("--out", tmp_path / "p.png", "--dpi", 30)
    for options in ((), ("--class", "bee"), ("--class", "cat"), ("--invert",)):
        succeeds("explain", "heatmap", trained, image, *options, *out)
        made.append((tmp_path / "p.csv").read_bytes())
    assert made[1] != made[2] and made[3] != made[0]
    for label in ("ant", "cat"):
        text = succeeds("explain", "perturb", trained, image, "--class", label, *out)
        assert f"capsule of {label}, " in text


def test_explain_the_images_of_a_data_set(tiny_mnist: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--data", tiny_mnist, "--device", "cpu")
    name = "resnet20_routingcaps.multimnist"
    text = succeeds("explain", "multi", name, *options, "--num-images", 2, "--out", tmp_path / "m.png")
    assert "m.png" in text and (tmp_path / "m.png").is_file()
    with Image.open(tmp_path / "m.png") as two:
        size = two.size
    succeeds("explain", "multi", name, *options, "--num-images", 4, "--out", tmp_path / "m.png")
    with Image.open(tmp_path / "m.png") as four:
        assert four.size != size, "more images"
    name = "capsnet_dynamic.mnist"
    text = succeeds("explain", "reconstruct", name, *options, "--num-images", 1, "--out", tmp_path / "r.pdf")
    assert "1 correct, " in text and (tmp_path / "r.pdf").read_bytes().startswith(b"%PDF")


def test_format_and_axes_of_pictures(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from capszoo.recipes.evaluation import plots

    out = tmp_path / "report"
    options = ("--data", tiny_mnist, "--limit", 10, "--device", "cpu", "--out", out)
    succeeds("eval", "idpa_cnn.mnist", *options, "--format", "svg", "--style", "paper")
    assert (out / "confusion.svg").read_text().startswith("<?xml") and not list(out.glob("*.png"))
    draw, seen = plots.draw_runs, []
    monkeypatch.setattr(plots, "draw_runs", lambda *a: seen.append(a[2:]) or draw(*a))
    for more in ((), ("--log",)):
        succeeds("curves", "idpa_cnn.mnist", "--out", tmp_path / "c.png", *more)
    assert seen == [("epoch", False), ("epoch", True)]


def test_every_option_of_an_export_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("capszoo.cli.export._export", lambda *arguments: calls.append(arguments))
    given = {"routing_iters": 1, "opset": 21, "tolerance": 0.125, "runtime": "gpu", "precision": "fp16"}
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    words += ["--outputs", "scores,poses", "--batch-profile", "1,2,4", "--quick", "--uint8-input", "--triton"]
    engine = ("--workspace", 512, "--optimization-level", 5, "--timing-cache", "t.cache", "--refit")
    built = {"workspace_mib": 512, "optimization_level": 5, "refit": True, "timing_cache": "t.cache"}
    given |= {"outputs": ("scores", "poses"), "batch": (1, 2, 4), "gate": "quick", "uint8_input": True}
    given |= {"formats": ["onnx", "tensorrt"], "triton": True, "source": MODEL}
    for kind, other in (("version", "hardware"), ("hardware", "version")):
        line = ("--out", tmp_path / "b", "--format", "onnx,tensorrt", *words, *engine, f"--{kind}-compatible")
        succeeds("export", MODEL, *line)
        options = calls[-1][3]
        assert given.items() <= vars(options).items()
        expected = {**built, f"{kind}_compatible": True, f"{other}_compatible": False}
        assert expected.items() <= vars(options.engine).items()


# -- check, compare, benchmark ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("bundle") / "b"
    succeeds("export", trained, "--out", folder, "--quick", "--batch-profile", "1,2,4")
    return folder


def test_check(bundle: Path, tmp_path: Path) -> None:
    text = succeeds("check", bundle)
    assert "sha256 of the files" in text and "failed" not in text
    assert json.loads(succeeds("check", bundle, "--json"))["passed"] is True
    fails(1, "check", tmp_path, names=["bundle"])


def test_a_bundle_s_runtimes(bundle: Path, trained: Path, pictures: Path) -> None:
    line = ("--batch-size", "1", "--repeats", 1, "--model", trained, "--json")
    found = json.loads(succeeds("benchmark", bundle, pictures, *line))
    assert found["images"] == 2 and found["differences"][0]["top1_agreement"] == 1.0
    assert "speed-up" in succeeds("benchmark", bundle, *line[:-1])


def test_benchmark_a_model(trained: Path, pictures: Path) -> None:
    options = ("--runtimes", "eager", "--batch-size", "1,3", "--repeats", 2, "--device", "cpu")
    found = json.loads(succeeds("benchmark", trained, *options, "--json"))
    assert [row["batch"] for row in found["timings"]] == [1, 3] and found["device"] == "cpu"
    for row in found["timings"]:
        assert row["images_per_second"] == pytest.approx(1e3 * row["batch"] / row["milliseconds"])
    assert "images/s" in succeeds("benchmark", trained, *options)
    fails(2, "benchmark", trained, "--runtimes", "eagr", names=["unknown", "runtime"])
    fails(2, "benchmark", trained, "--batch-size", "0", names=["invalid"])
    fails(2, "benchmark", trained, pictures, names=["bundle"])


def test_a_runtime_that_does_not_work_here_is_said(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", broken)
    options = ("--runtimes", "eager,compiled", "--batch-size", "1", "--repeats", 1, "--device", "cpu")
    found = run("benchmark", trained, *options)
    assert_names(found.stderr, ["compiled", "compiler"])
    assert found.exit_code == 0


def _write_digits(root: Path, folder: Path) -> Path:
    """Four test digits of each class, as a folder of image folders."""
    for split in ("train", "test"):
        write_photos(packed(root, "mnist"), folder / split, {str(kind): 4 for kind in range(10)})
    return folder


#: Options of a short comparison.
QUICK = ("--batch-size", "1", "--repeats", 1, "--device", "cpu")


@needs_training
def test_compare_two_models(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAPSZOO_DATA", raising=False)
    data = _write_digits(root, tmp_path / "digits")
    names = ("resnet20_routingcaps.mnist", "capsnet_em_norb_small.mnist")
    options = QUICK
    found = json.loads(succeeds("compare", *names, *options, "--data", data, "--json"))
    assert [row["name"] for row in found["models"]] == list(names)
    assert [row["runner"] for row in found["timings"]] == list(names)
    said, n = found["agreement"], found["agreement"]["n"]
    assert n == 40
    assert said["both_right"] + said["only_first"] + said["only_second"] + said["both_wrong"] == n
    for name, accuracy in zip(names, said["accuracy"], strict=True):
        alone = json.loads(succeeds("eval", name, "--data", data, "--json", "--device", "cpu"))
        assert accuracy == pytest.approx(alone["top1"])
    text = succeeds("compare", *names, *options)
    assert "not measured; --data" in text and "99.61" in text and "parameters" in text
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], counts=COUNTS))
    monkeypatch.setenv("CAPSZOO_DATA", str(write_digits(root, tmp_path / "idx")))
    found = json.loads(succeeds("compare", *names, *options, "--limit", 5, "--json"))["agreement"]
    assert (found["dataset"], found["n"]) == ("mnist", 5)
    line = ("--split", "train", "--limit", COUNTS["train"], "--json")
    found = json.loads(succeeds("compare", *names, *options, *line))["agreement"]
    assert found["n"] == COUNTS["train"] != COUNTS["test"]
    monkeypatch.setenv("CAPSZOO_DATA", str(tmp_path))
    text = run("compare", *names, *options, "--json")
    assert_names(json.loads(text.stdout)["agreement_missing"], ["MNIST"])
    assert json.loads(text.stdout)["agreement"] is None
    text = succeeds("compare", *names, *options)
    assert "not measured; MNIST (test) not found" in text
    fails(1, "compare", *names, *options, "--dataset", "mnist", names=["MNIST"])


@needs_training
def test_compare_takes_the_size_of_the_weights_and_any_source(root: Path, tmp_path: Path) -> None:
    source = f"imagefolder:{_write_digits(root, tmp_path / 'digits')}"
    bare = ("capsnet_em_norb_small", "resnet20_routingcaps")
    for option in ("--data", "--dataset"):
        found = json.loads(succeeds("compare", *bare, *QUICK, "--json", option, source))
        assert found["agreement"]["n"] == 40
        for row in found["models"]:
            about = json.loads(succeeds("info", row["name"], "--json"))
            assert "." in row["name"]
            assert (row["parameters"], row["multiply_adds"]) == (about["parameters"], about["multiply_adds"])


def test_compare_takes_a_run_beside_the_weights_of_its_name(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAPSZOO_DATA", raising=False)
    name = "capsnet_em_norb_small.mnist"
    for suffix in (".safetensors", ".json"):
        shutil.copy(root / "capszoo" / "weights" / f"{name}{suffix}", tmp_path)
    own = tmp_path / f"{name}.safetensors"
    found = json.loads(succeeds("compare", own, name, *QUICK, "--json"))
    assert [row["runner"] for row in found["timings"]] == [str(own), name]


def test_compare_needs_two_models() -> None:
    assert "OTHER" in fails(2, "compare", "idpa_resnet")
    fails(2, "compare", "idpa_resnet", "idpa_resnet", names=["weights"])
    fails(2, "compare", "idpa_cnn.mnist", "idpa_cnn", names=["weights"])


# -- recipes, data, doctor --------------------------------------------------------------------------------------------


@needs_training
def test_recipes(tmp_path: Path) -> None:
    rows = json.loads(succeeds("recipes", "list", "idpa_cnn", "--json"))
    assert {"idpa_cnn.mnist"} <= {row["name"] for row in rows} and all(row["epochs"] for row in rows)
    fails(1, "recipes", "list", "nosuch", names=["nosuch"])
    assert "# capszoo train idpa_cnn.mnist" in succeeds("recipes", "show", "idpa_cnn.mnist")
    assert "epochs: 9\n" in succeeds("recipes", "show", "idpa_cnn.mnist", "--set", "epochs=9")
    own = tmp_path / "my.yaml"
    succeeds("recipes", "copy", "idpa_cnn.mnist", own)
    fails(1, "recipes", "copy", "idpa_cnn.mnist", own, names=["exists"])
    assert "keys and values are valid; idpa_cnn on mnist, 5 epochs" in succeeds("recipes", "validate", own)
    own.write_text(own.read_text(encoding="utf-8").replace("epochs: 5", "epochs: five"))
    assert "epochs" in fails(2, "recipes", "validate", own)
    fails(2, "recipes", "show", "idpa_cnn.mnis", names=["idpa_cnn.mnist"])


@needs_training
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, pictures: Path) -> None:
    for option, line in (
        ("--epochs", "epochs=9"),
        ("--img-size", "data.size=9"),
        ("--tag", "tag=x"),
        ("--lr", "optimizer.lr=9"),
        ("--freeze", "init.freeze=[body]"),
        ("--data", "data.name=imagefolder:x"),
    ):
        found = fails(2, "finetune", MODEL, "--data", pictures, option, 3, "--set", line)
        assert_names(found, ["--set", line, option])
    head = ("--backbone", "resnet18", "--head", "idpa", "--set", "model_args.routing=em")
    fails(2, "finetune", "--data", pictures, *head, names=["routing=em", "--head"])
    found = fails(2, "train", "idpa_cnn.mnist", "--batch-size", 3, "--set", "batch_size=9")
    assert "--set batch_size=9 and --batch-size exclude each other" in found
    files = tmp_path, tmp_path / "out", "--accuracies", tmp_path / "nosuch.json"
    fails(2, "data", "h-imagenet", *files, "--device", "cuda", names=["--device"])
    fails(2, "data", "h-imagenet", *files, "--device", "gpu", names=["gpu"])
    fails(1, "data", "h-imagenet", *files, names=["nosuch.json"])
    for levels in (("-q", "-v"), ("-qv",), ("--quiet", "--verbose")):
        fails(2, "list", *levels, names=["--quiet", "--verbose"])
    fails(2, "list", "-vv", names=["-vv", "-v"])


def test_a_space_can_be_published_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CapszooError("the Hub did not take me/space", "give the command again")

    call = ("publish", MODEL, "me/space", "--space", "--out", tmp_path / "space")
    with monkeypatch.context() as patch:
        patch.setattr("capszoo.app.space.upload_space", refuse)
        for _ in range(2):
            fails(1, *call, names=["command"])
            assert not list(tmp_path.iterdir())
    succeeds(*call, "--dry-run")
    assert (tmp_path / "space" / "app.py").is_file()
    fails(2, *call, "--dry-run", names=["space", "exists"])
    fails(2, "publish", MODEL, "no-slash", "--space", "--dry-run", names=["no-slash"])


@pytest.mark.parametrize("closed", ["<&- >&-", "2>&-"])
def test_a_closed_stream_is_no_failure(pictures: Path, tmp_path: Path, closed: str) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m capszoo list --pretrained {closed}"
    assert subprocess.run(command, shell=True, timeout=120).returncode == 0


@needs_training
def test_a_dry_run_prints_settings_and_time() -> None:
    settings = (
        "--set",
        "batch_size=8",
        "--epochs",
        2,
        "--set",
        "data.limit=80",
        "--device",
        "cpu",
        "--dry-run",
    )
    found = run("train", "capsnet_em_norb_small.mnist", *settings)
    assert found.exit_code == 0, found.output
    assert "epochs: 2\n" in found.stdout and "batch_size: 8\n" in found.stdout
    assert_names(found.stderr, ["80", "2", "20", "updates", "images/s"])
    assert "without torch.compile" not in found.stderr
    staged = ("--set", "compile=true", "--set", "stages=[{size: 20, epochs: 1}]")
    unlike = run("train", "capsnet_em_norb_small.mnist", *settings, *staged).stderr
    assert "; timed without torch.compile and all epochs at the full image size; evaluation" in unlike
    unbuilt = run("train", "encapnet_v1.h_imagenet", "--device", "cpu", "--dry-run")
    assert_names(unbuilt.stderr, ["h_imagenet"])
    assert unbuilt.exit_code == 0


def test_data(tmp_path: Path) -> None:
    rows = json.loads(succeeds("data", "list", "--json"))
    assert {"mnist", "cifar10", "imagefolder:…"} <= {row["name"] for row in rows}
    assert "60,000" in succeeds("data", "list")
    fails(2, "data", "check", "mnst", names=["mnst", "mnist"])
    fails(1, "data", "fetch", "h_imagenet", "--to", tmp_path, names=["fetched"])
    fails(2, "data", "h-imagenet", tmp_path, tmp_path / "out", names=["--accuracies", "--weights"])


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnist").mkdir()
    monkeypatch.setenv("CAPSZOO_DATA", f"{tmp_path}:{tmp_path / 'nosuch'}")
    about = json.loads(succeeds("doctor", "--json"))
    assert about["data"][str(tmp_path)] == ["mnist"] and about["data"][str(tmp_path / "nosuch")] is None
    assert about["libraries"]["torch"] and about["extras"]["explain"] == []
    text = succeeds("doctor")
    assert "no such folder" in text and "threads" in text


def test_messages_hold_names_as_they_are(tmp_path: Path) -> None:
    """Rich would print `:cat:` as a picture of a cat."""
    folder = tmp_path / "a:cat:b"
    fails(1, "predict", MODEL, folder, names=[folder])


def test_a_picture_without_out_does_not_replace_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heatmap.csv").write_text("mine")
    digit = Path(capszoo.__file__).parent / "assets" / "digit_3.png"
    fails(1, "explain", "heatmap", MODEL, digit, names=["heatmap.csv"])
    assert (tmp_path / "heatmap.csv").read_text() == "mine" and not (tmp_path / "heatmap.png").exists()
    (tmp_path / "heatmap.csv").unlink()
    own = tmp_path / "heatmap.png"  # the name that the picture would have
    own.write_bytes(digit.read_bytes())
    for options in ((), ("--out", tmp_path / "." / "heatmap.png")):
        fails(2, "explain", "heatmap", MODEL, own, *options, names=["picture", "replace"])
    assert own.read_bytes() == digit.read_bytes()


HOSTILE = "[/]\x1b]0;T\x1b\\\x9b\nred"


@pytest.mark.parametrize("command", [("info",), ("explain", "heatmap"), ("predict",)])
def test_metadata_cannot_steer_the_terminal(command: tuple[str, ...], tmp_path: Path, pictures: Path) -> None:
    """Neither by control characters nor by markup."""
    stated = {"license": HOSTILE, "dataset": {"name": HOSTILE}, "label_names": [HOSTILE] * 3}
    image = tmp_path / "\x1b[2J[b].png"
    image.write_bytes((pictures / "a.png").read_bytes())
    files = () if command == ("info",) else (image,)
    out = ("--out", tmp_path / "h.png") if "heatmap" in command else ()
    text = succeeds(*command, write_run(tmp_path / "run", **stated), *files, *out)
    assert "[/]" in text and text.replace("\n", "").isprintable() and "\nred" not in text
