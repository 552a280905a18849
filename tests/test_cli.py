"""The command line: what it prints, where, and how it fails."""

from __future__ import annotations

import csv
import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import capszoo
from capszoo._pretrained.catalogue import checkpoints
from capszoo.cli import app
from capszoo.cli.training import use_cpu
from capszoo.layers._native.build import compiler
from tests.support.command import fails, needs_training, run, succeeds, write_run
from tests.support.errors import assert_names, refuses

MODEL = "resnet20_routingcaps"


# -- list and info --------------------------------------------------------------------------------------------------


def test_list() -> None:
    lines = succeeds("list").splitlines()
    assert [line.split()[0] for line in lines[1:]] == capszoo.list_models()
    rows = json.loads(succeeds("list", "routingcaps", "--json"))
    assert [row["name"] for row in rows] == capszoo.list_models("routingcaps")
    assert all(row["description"] for row in rows)
    rows = json.loads(succeeds("list", "--pretrained", "--json"))
    assert [row["name"] for row in rows] == capszoo.list_pretrained()
    shown = succeeds("list", "--pretrained")
    assert all(row["name"] in shown and f"{row['top1']:.2f}" in shown for row in rows)
    fails(1, "list", "nosuchthing", names=["nosuchthing"])
    assert json.loads(succeeds("list", "nosuchthing", "--json")) == []


def test_case_does_not_matter_to_a_filter_or_a_suggestion() -> None:
    assert succeeds("list", "MNIST") == succeeds("list", "mnist")
    assert succeeds("list", "*Cnn.Mnist", "--pretrained") == succeeds("list", "*cnn.mnist", "--pretrained")
    fails(2, "info", "IDPA_CNN", names=["idpa_cnn"])
    fails(2, "data", "check", "MNIST", names=["MNIST", "mnist"])


def test_list_shows_size_data_and_accuracy_and_finds_tags() -> None:
    (line,) = (row for row in succeeds("list").splitlines() if row.startswith("resnet20_routingpool "))
    stated = checkpoints(aliases=False)["resnet20_routingpool.cifar10"].raw["metrics"]["test"]["top1"]
    assert "3x32x32" in line and f"cifar10 {stated:.2f}" in line and "doi:10.1109" in line
    found = {row["name"]: row for row in json.loads(succeeds("list", "mnist", "--json"))}
    assert "resnet20_routingcaps" in found  # by its tags
    assert "idpa_multimnist" in found  # by its own name
    assert "resnet32_routingpool" not in found
    (weights,) = json.loads(succeeds("list", "idpa_cnn.mnist", "--pretrained", "--json"))
    assert weights["dataset"] == "mnist" and weights["input_size"] == [1, 28, 28]
    assert weights["parameters"] == 510_609 and weights["top1"] > 99
    assert "``" not in succeeds("list")


def test_info() -> None:
    text = succeeds("info", MODEL)
    for expected in ("279,024", "multiply-adds", "affNIST", "5.12", "apache-2.0", "3 iterations"):
        assert expected in text, expected
    about = json.loads(succeeds("info", MODEL, "--json"))
    assert about["parameters"] == 279_024 and about["multiply_adds"] > 1e6
    assert about["paper_figures"][0]["value"] == 5.12
    smaller = json.loads(succeeds("info", MODEL, "--img-size", "20x20", "--num-classes", "3", "--json"))
    assert smaller["multiply_adds"] < about["multiply_adds"] and smaller["input_size"] == [1, 20, 20]
    assert smaller["num_classes"] == 3


def test_info_engines() -> None:
    assert "add --engines" in fails(2, "info", "idpa_resnet", "--training")
    fails(2, "info", "idpa_resnet", "--img-size", "²", names=["size"])
    command = ("info", "idpa_resnet", "--engines", "--batch-size", "32", "--training")
    rows = json.loads(succeeds(*command, "--json"))
    name = "native" if compiler() else "blocked"
    assert [row["engine"] for row in rows] == ["reference", "reference", name]
    absent = {} if compiler() else {"native": rows[2]["refused"]["native"]}
    expected = {"masked": "needs a graph for its target", "fused": "needs CUDA", **absent}
    assert rows[2]["refused"] == expected
    assert rows[2]["votes"] == 32 * 800 * 10 * 16
    text = succeeds(*command)
    assert name in text and "fused: " in text and rows[0]["layer"] in text
    (row,) = json.loads(succeeds("info", "idpa_cnn.mnist", "--engines", "--batch-size", "1", "--json"))[-1:]
    assert row["engine"] == "reference" and "TUNING.idpa_blocked_min_votes" in row["refused"]["blocked"]


def test_info_of_a_run_and_of_weights(trained: Path, tmp_path: Path) -> None:
    about = json.loads(succeeds("info", trained, "--json"))
    (weights,) = about["weights"]
    assert about["input_size"] == [1, 20, 20] and about["num_classes"] == 3
    assert weights["name"] == f"{MODEL}.test" and about["parameters"] > 279_024  # with its decoder
    assert json.loads(succeeds("info", next(trained.glob("*.safetensors")), "--json"))["weights"] == [weights]
    # a checkpoint is described as it was built, not as the architecture's default
    tagged = json.loads(succeeds("info", f"{MODEL}.affnist", "--json"))
    assert tagged["parameters"] == 2_526_768 and tagged["input_size"] == [1, 40, 40]
    validated = write_run(tmp_path / "run", metrics={"validation": {"top1": 87.5, "n": 8}})
    assert "87.50 (validation)" in succeeds("info", validated)


def test_info_without_torch_says_what_the_model_says() -> None:
    from capszoo._pretrained.catalogue import describe
    from capszoo.summary import summarise

    for name in (MODEL, f"{MODEL}.mnist"):
        about = describe(name)
        how = {key: about.pop(key) for key in ("command", "protocol") if key in about}
        assert about == json.loads(json.dumps(summarise(name).to_dict()))
        assert bool(how) == ("." in name), "how a checkpoint was trained"


def test_info_of_a_checkpoint_prints_its_command_and_protocol() -> None:
    shown = succeeds("info", f"{MODEL}.mnist")
    assert f"capszoo train {MODEL}.mnist" in shown and "No epoch was selected by it" in shown


def test_names_that_end_without_a_tag_or_are_too_long_for_a_file(pictures: Path) -> None:
    fails(2, "predict", "idpa_cnn.", pictures, names=["idpa_cnn", "idpa_cnn.cifar10"])
    fails(2, "info", "a" * 300, names=["unknown", "model"])
    for create in (capszoo.load, capszoo.create_model):
        for name, named in (
            ("idpa_cnn.", ["idpa_cnn", "idpa_cnn.cifar10"]),
            ("a" * 300, ["unknown", "model"]),
        ):
            with refuses(capszoo.UnknownModel, names=named):
                create(name)


# -- predict ----------------------------------------------------------------------------------------------------------


def test_predict_prints_a_table(trained: Path, pictures: Path) -> None:
    result = run("predict", trained, pictures, "--device", "cpu")
    assert result.exit_code == 0 and result.stderr.count("\n") == 1
    assert_names(
        result.stderr, ["note: 1 of 2 images resized and cropped to 20x20; 1 lose more", "--crop-mode"]
    )
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + 2 * 3 and "a.png" in lines[1]
    assert any(f" {label} " in result.stdout for label in ("ant", "bee", "cat"))


def test_predict_json_is_pure_and_right(trained: Path, pictures: Path) -> None:
    from capszoo.inference import load_model
    from capszoo.preprocess import load_image, model_transform

    images = (pictures / "a.png", pictures / "more")
    found = json.loads(succeeds("predict", trained, *images, "--topk", 2, "--json", "--device", "cpu"))
    assert [Path(entry["image"]).name for entry in found["results"]] == ["a.png", "b.jpg"]
    assert found["score_kind"] == "lengths"
    model = load_model(str(trained), device="cpu")
    for entry in found["results"]:
        with torch.no_grad():
            scores = model(model_transform(model)(load_image(entry["image"]))[None])[0]
        values, indices = scores.topk(2)
        shares = (scores / scores.sum())[indices]  # the run has no recipe; its network gives capsule lengths
        for key, expected in (("probability", shares), ("score", values), ("index", indices)):
            assert [p[key] for p in entry["predictions"]] == pytest.approx(expected.tolist(), abs=1e-6)
        labels = [("ant", "bee", "cat")[i] for i in indices.tolist()]
        assert [p["label"] for p in entry["predictions"]] == labels


def test_predict_writes_a_table(trained: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "answers.csv"
    few = succeeds("predict", trained, pictures, "-k", 2, "--out", out, "--batch-size", 1)
    assert few.strip() == f"written: {out}, 2 images"
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    answers = json.loads(succeeds("predict", trained, pictures, "-k", 2, "--json"))["results"]
    assert [row["image"] for row in rows] == [one["image"] for one in answers for _ in range(2)]
    assert [row["rank"] for row in rows] == ["1", "2", "1", "2"]
    best = [one["predictions"][0] for one in answers]
    assert [row["class"] for row in rows[::2]] == [one["label"] for one in best]
    shares = [float(row["probability"]) for row in rows[::2]]
    assert shares == pytest.approx([one["probability"] for one in best], abs=1e-5)

    (pictures / "bad.png").write_bytes(b"no picture")
    try:
        result = run("predict", trained, pictures, "--out", out)
    finally:
        (pictures / "bad.png").unlink()
    assert result.exit_code == 1 and "bad.png" in out.read_text(encoding="utf-8")
    succeeds("predict", trained, pictures, "--out", out)  # an older table is replaced
    assert "bad.png" not in out.read_text(encoding="utf-8")
    fails(2, "predict", trained, pictures, "--out", tmp_path / "a.txt", names=["csv", "file"])


def test_a_table_that_cannot_be_written_is_refused_before_the_work(
    trained: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capszoo.inference.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "file").touch()
    (tmp_path / "folder.csv").mkdir()
    for out in (tmp_path / "file" / "a.csv", tmp_path / "folder.csv", tmp_path / ("n" * 255 + ".csv")):
        fails(1, "predict", trained, pictures, "--out", out, names=["write"])
    (labels := tmp_path / "labels.csv").write_text("image,label\n")
    fails(1, "predict", trained, pictures, "--out", labels, names=["labels.csv", "--out"])
    assert labels.read_text() == "image,label\n"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.csv", "labels.csv"}


@pytest.mark.parametrize("charset", ["utf-8", "latin-1"])
def test_names_that_stdout_cannot_hold_do_not_lose_the_results(
    trained: Path, pictures: Path, tmp_path: Path, charset: str
) -> None:
    names = [os.fsdecode(b"caf\xe9.png"), "\N{CAT FACE} 日本.png"]
    for name in names:
        (tmp_path / name).write_bytes((pictures / "a.png").read_bytes())
    runner = CliRunner(charset=charset)
    arguments = ["predict", str(trained), *(str(tmp_path / name) for name in names)]
    table = runner.invoke(app, arguments, env={"COLUMNS": None})
    assert table.exit_code == 0 and r"caf\udce9.png" in table.stdout, table.output
    done = runner.invoke(app, [*arguments, "--json"])
    assert [Path(one["image"]).name for one in json.loads(done.stdout)["results"]] == names


def test_quiet_and_verbose(trained: Path, pictures: Path, tmp_path: Path) -> None:
    """Taken anywhere on the line; results and errors stay."""
    plain = run("predict", trained, pictures)
    quiet = run("predict", "--quiet", trained, pictures)
    assert plain.stderr.startswith("note: ") and quiet.stderr == ""
    assert quiet.stdout == plain.stdout
    assert not logging.getLogger("capszoo").isEnabledFor(logging.WARNING), "libraries' notes are notes"
    fails(1, "predict", trained, tmp_path / "absent.png", "-q", names=["file"])
    assert "done in " in run("predict", trained, pictures, "--verbose").stderr
    assert run("predict", trained, pictures).stderr == plain.stderr, "of one call only"
    assert logging.getLogger("capszoo").isEnabledFor(logging.WARNING)


def test_one_bad_image_does_not_lose_the_others(trained: Path, pictures: Path) -> None:
    result = run("predict", trained, pictures / "notes.txt", pictures / "a.png", "--device", "cpu", "--json")
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["results"]
    assert "not an image" in first["error"] and second["predictions"]
    assert result.stderr.count("error:") == 1 and "notes.txt" in result.stderr


def test_predict_errors(trained: Path, pictures: Path, tmp_path: Path) -> None:
    fails(1, "predict", trained, pictures / "missing.png", names=["missing.png"])
    fails(1, "predict", trained, tmp_path, names=["images", "folder"])
    fails(1, "predict", trained, pictures / "notes.txt", names=["image"])
    (broken := tmp_path / "broken.png").write_bytes((pictures / "a.png").read_bytes()[:60])
    fails(1, "predict", trained, broken, names=["broken.png"])
    fails(2, "predict", trained, pictures, "--topk", "0", names=["--topk"])
    fails(2, "predict", trained, pictures, "--img-size", "big", names=["size"])


def test_model_errors(pictures: Path, tmp_path: Path) -> None:
    picture = pictures / "a.png"
    without = next(name for name in capszoo.list_models() if not capszoo.list_pretrained(f"{name}.*"))
    fails(1, "predict", without, picture, names=[without])
    fails(2, "predict", f"{MODEL}.nosuchtag", picture, names=["nosuchtag"])
    misfit = write_run(tmp_path / "misfit", num_classes=3, model_args={"pose_dim": 12, "decoder": False})
    fails(1, "predict", misfit, picture, names=["fit"])
    damaged = write_run(tmp_path / "damaged", sha256="0" * 64)
    fails(1, "predict", damaged, picture, names=["sha256 differs"])
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(b"")
    fails(1, "predict", alone, picture, names=["alone.json"])


# -- explain ----------------------------------------------------------------------------------------------------------


def test_kinds_and_styles_of_pictures(
    trained: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of styles and methods are repeated, so that the command line checks them before torch is loaded."""
    from capszoo.cli.common import STYLES
    from capszoo.cli.explain import METHODS
    from capszoo.explain import heat_map, plotting

    assert (heat_map.METHODS, tuple(plotting.STYLES)) == (METHODS, STYLES)
    monkeypatch.chdir(tmp_path)
    image = min(pictures.iterdir())
    succeeds("explain", "heatmap", trained, image, "--format", "pdf")
    assert Path("heatmap.pdf").read_bytes().startswith(b"%PDF") and Path("heatmap.csv").is_file()
    succeeds("explain", "heatmap", trained, image)  # the numbers are those of the .pdf
    with Image.open("heatmap.png") as figure:
        assert figure.width > 3 * figure.height  # four panels: with the decoder's reconstruction
    Path("mine.csv").write_text("my predictions")
    fails(1, "explain", "heatmap", trained, image, "--out", "mine.png", names=["mine.csv"])
    assert Path("mine.csv").read_text() == "my predictions" and not Path("mine.png").exists()
    for suffix in ("pgf", "raw"):
        wrong = fails(2, "explain", "heatmap", trained, image, "--out", f"a.{suffix}")
        assert "cannot write this kind of file" in wrong
    sizes = {}
    for style in STYLES:
        succeeds("explain", "heatmap", trained, image, "--style", style, "--out", f"{style}.png")
        sizes[style] = Image.open(f"{style}.png").size
    assert sizes["paper"] == tuple(2 * side for side in sizes["screen"]), "300 dots per inch instead of 150"
    assert sizes["talk"] == sizes["screen"]
    assert Path("talk.png").read_bytes() != Path("screen.png").read_bytes(), "larger text"
    fails(2, "explain", "heatmap", trained, image, "--style", "poster", names=["poster"])
    fails(2, "explain", "heatmap", trained, image, "--format", "gif", names=["gif"])
    wrong = fails(2, "explain", "heatmap", trained, image, "--format", "svg", "--out", "a.png")
    assert "a.png is no .svg file" in wrong


def test_explain_errors(trained: Path, pictures: Path, tmp_path: Path, tiny_mnist: Path) -> None:
    pytest.importorskip("matplotlib")
    out, heatmap = ("--out", tmp_path / "x.png"), ("explain", "heatmap", trained)
    fails(2, *heatmap, pictures / "a.png", "--class", "dog", *out, names=["dog"])
    fails(2, *heatmap, pictures / "a.png", "--out", tmp_path / "x.xyz", names=["write", "kind"])
    fails(1, *heatmap, pictures / "notes.txt", *out, names=["image"])
    fails(2, *heatmap, pictures / "a.png", "--method", "occlusions", names=["occlusion"])
    fails(1, "explain", "reconstruct", f"{MODEL}.mnist", "--data", tiny_mnist, *out, names=["decoder"])
    assert list(tmp_path.iterdir()) == [tiny_mnist]


@pytest.mark.parametrize("method", ["couplings", "gradient", "occlusion"])
def test_each_kind_of_heat_map_says_what_it_shows(pictures: Path, tmp_path: Path, method: str) -> None:
    from capszoo.explain.heat_map import MEANINGS

    out, image = tmp_path / "heat.png", next(pictures.glob("*.png"))
    found = run("explain", "heatmap", "resnet20_routingcaps.mnist", image, "--method", method, "--out", out)
    assert found.exit_code == 0 and MEANINGS[method] in found.stderr and out.is_file()


def test_explain_without_matplotlib_names_the_extra(
    trained: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    line = fails(1, "explain", "heatmap", trained, pictures / "a.png", "--out", tmp_path / "x.png")
    assert_names(line, ["matplotlib", ".[explain]"])
    assert not list(tmp_path.iterdir())


# -- export -----------------------------------------------------------------------------------------------------------


def test_export(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "model.onnx"
    options = (
        "--no-pretrained",
        "--img-size",
        20,
        "--routing-iters",
        2,
        "--batch-profile",
        "1,2,4",
        "--quick",
    )
    text = succeeds("export", MODEL, *options, "--out", out)
    said = ("structure", "passed", "parity with eager", "not run", "opset 20", "batch 1 to 4", "2 routing")
    assert [words for words in said if words not in text] == [] and out.is_file()


def test_export_leaves_out_what_cannot_be_read(trained: Path, pictures: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.png").write_bytes((pictures / "a.png").read_bytes())
    (images / "b.png").write_bytes((pictures / "a.png").read_bytes()[:60])
    line = ("export", trained, "--out", tmp_path / "m.onnx", "--quick", "--verify-data", images)
    fails(1, *line, names=["b.png"])
    found = run(*line, "--skip-bad", "--json")
    assert_names(found.stderr, ["note", "left", "b.png"])
    report = json.loads(found.stdout)
    assert found.exit_code == 0 and report["passed"]
    assert {step["name"]: step["passed"] for step in report["gate"]}["top-1 on real images"] is True
    assert [d["batch"] for d in report["comparisons"] if d["probe"] == "images"] == [1]
    (images / "a.png").write_text("no image")
    fails(1, *line, "--skip-bad", names=["2", "images"])


def test_export_errors(trained: Path, tmp_path: Path) -> None:
    fails(2, "export", MODEL, "--out", tmp_path / "model.pt", names=["model.onnx"])
    fails(2, "export", trained, "--out", tmp_path / "m.onnx", "--batch-profile", "many", names=["invalid"])
    without = next(name for name in capszoo.list_models() if not capszoo.list_pretrained(f"{name}.*"))
    assert "--no-pretrained" in fails(1, "export", without, "--out", tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


# -- train ------------------------------------------------------------------------------------------------------------


@needs_training
def test_options_of_training_arrive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def called(*arguments: Any, **options: Any) -> dict[str, Any]:
        calls.append((arguments, options))
        return {"labels": tmp_path / "labels.txt"}

    monkeypatch.setattr("capszoo.recipes.finetune.finetune", called)  # its import takes the true `train`
    monkeypatch.setattr("capszoo.recipes.train.train", called)
    short = ("--lr", 0.01, "--batch-size", 8, "--seed", 5, "--device", "cpu", "--epochs", 1)
    places = ("--data", tmp_path, "--out", tmp_path / "r")
    more = ("--set", "ema_decay=0.9", "--set", "compile=false", "--profile", "short")
    text = succeeds("train", "encapnet6.mnist", *more, *short, *places)
    assert text.strip() == f"labels: {tmp_path / 'labels.txt'}"
    arguments, options = calls.pop()
    sets = ["ema_decay=0.9", "compile=false", "epochs=1", "optimizer.lr=0.01", "batch_size=8", "seed=5"]
    assert arguments == ("encapnet6.mnist", sets)
    shared = {"cpu": True, "accept_data": False, "log_with": ()}
    assert options == {"out": tmp_path / "r", "data": tmp_path, "profile": "short", "threads": None, **shared}
    succeeds("finetune", f"{MODEL}.mnist", *short, *places, "--accept-data")
    arguments, options = calls.pop()
    assert arguments == (f"{MODEL}.mnist", str(tmp_path), tmp_path / "r")
    assert options["overrides"] == ["optimizer.lr=0.01", "batch_size=8", "seed=5"]
    assert (options["cpu"], options["epochs"], options["accept_data"]) == (True, 1, True)
    succeeds("train", f"{MODEL}.mnist", "--accept-data")
    assert calls.pop()[1]["accept_data"]


def test_devices_that_training_does_not_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    line = ("train", f"{MODEL}.mnist", "--device")
    fails(2, *line, "cuda:1", names=["GPU", "cuda:1", "CUDA_VISIBLE_DEVICES=1"])
    fails(2, *line, "mps", names=["MPS", "--device"])
    assert not use_cpu("cuda") and not use_cpu("cuda:0")


def test_devices(pictures: Path, trained: Path) -> None:
    for command in (("predict", trained, pictures), ("explain", "heatmap", trained, pictures / "a.png")):
        fails(2, *command, "--device", "gpu", names=["gpu"])
        if not torch.cuda.is_available():
            fails(2, *command, "--device", "cuda", names=["cuda"])
    succeeds("predict", trained, pictures / "a.png", "--device", "auto")


# -- the frame --------------------------------------------------------------------------------------------------------


def test_wrong_usage() -> None:
    fails(2, "predict", names=["Missing", "argument"])
    assert run().exit_code == 2


def test_an_unexpected_error_is_one_line_unless_debugged(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise KeyError("something\nunforeseen")

    monkeypatch.setattr("capszoo.cli.zoo.list_rows", broken)
    line = fails(1, "list")
    assert_names(line, ["KeyError", "--debug"])
    for arguments in (("--debug", "list"), ("list", "--debug")):
        result = run(*arguments)
        assert isinstance(result.exception, KeyError) and result.exit_code != 0


def test_as_a_process(root: Path, tmp_path: Path) -> None:
    def process(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "capszoo", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )

    good = process("list", "routingcaps", "--json")
    assert good.returncode == 0 and MODEL in {row["name"] for row in json.loads(good.stdout)}
    bad = process("info", "nosuchmodel")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: unknown model 'nosuchmodel'")


@needs_training
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train cnn6.mnist --parallel 2", "--parallel has no effect on a single run: it belongs to --seeds"),
        ("train cnn6.mnist --seeds 0,1 --threads 1", "--threads has no effect with --seeds: leave it out"),
        ("train cnn6.mnist --seeds 0,1 --together", "--seeds and --together exclude each other"),
        (f"finetune {MODEL} --data x --head em", "--head has no effect without --backbone"),
        (f"finetune {MODEL} --data x --from-scratch --layer-decay 1", "--layer-decay has no effect"),
        ("train cnn6.mnist --seeds 0,1 --dry-run", "--seeds has no effect with --dry-run"),
        ("train cnn6.mnist --seeds 0,x", "--seeds takes whole numbers"),
        ("train cnn6.mnist encapnet6.cifar10 --seeds 0", "2 recipes were given: --seeds takes one"),
        ("curves idpa_cnn.mnist --out c.svg --dpi 50", "--dpi has no effect on the lines of a .svg file"),
        (f"predict {MODEL} x.png --workers 2", "--workers has no effect without --ray"),
        (f"eval {MODEL} --pgd-steps 2", "--pgd-steps has no effect without --robustness"),
        (f"eval {MODEL} --dpi 300", "--dpi has no effect without --out"),
        (f"eval {MODEL} --seed 5", "--seed has no effect on all images: add --limit"),
        (f"export {MODEL} --out x --refit", "--refit has no effect without TensorRT"),
        (f"export {MODEL} --out x --skip-bad", "--skip-bad has no effect without images"),
        (f"compare {MODEL} encapnet6_master --limit 5", "--limit has no effect without images"),
        (f"benchmark {MODEL} --model x", f"--model has no effect on {MODEL}, which is no bundle"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAPSZOO_DATA", raising=False)
    assert said in fails(2, *arguments.split())
