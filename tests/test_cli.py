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
    assert len(lines) == 1 + len(capszoo.list_models())
    assert [line.split()[0] for line in lines[1:]] == capszoo.list_models()
    assert succeeds("list", "resnet20_*").count("resnet20_") >= 2
    rows = json.loads(succeeds("list", "routingcaps", "--json"))
    assert [row["name"] for row in rows] == capszoo.list_models("routingcaps")
    assert all(row["description"] for row in rows)


def test_list_pretrained() -> None:
    rows = json.loads(succeeds("list", "--pretrained", "--json"))
    assert [row["name"] for row in rows] == capszoo.list_pretrained()
    shown = succeeds("list", "--pretrained")
    assert all(row["name"] in shown and f"{row['top1']:.2f}" in shown for row in rows)


def test_list_without_a_match() -> None:
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


def test_info_of_a_run_and_of_weights(trained: Path) -> None:
    about = json.loads(succeeds("info", trained, "--json"))
    (weights,) = about["weights"]
    assert about["input_size"] == [1, 20, 20] and about["num_classes"] == 3
    assert weights["name"] == f"{MODEL}.test" and about["parameters"] > 279_024  # with its decoder
    assert json.loads(succeeds("info", next(trained.glob("*.safetensors")), "--json"))["weights"] == [weights]
    # a checkpoint is described as it was built, not as the architecture's default
    tagged = json.loads(succeeds("info", f"{MODEL}.affnist", "--json"))
    assert tagged["parameters"] == 2_526_768 and tagged["input_size"] == [1, 40, 40]


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


def test_wrong_model_name_suggests_the_right_one(pictures: Path) -> None:
    for arguments in (("info", "resnet20_routingcap"), ("predict", "resnet20_routingcap", pictures)):
        line = fails(2, *arguments)
        assert_names(line, [MODEL])


def test_names_that_end_without_a_tag_or_are_too_long_for_a_file(pictures: Path) -> None:
    for command in ("info", "predict"):
        files = [pictures] if command == "predict" else []
        line = fails(2, command, "idpa_cnn.", *files)
        assert_names(line, ["idpa_cnn", "idpa_cnn.cifar10"])
        fails(2, command, "a" * 300, *files, names=["unknown", "model"])
    for create in (capszoo.load, capszoo.create_model):
        with refuses(capszoo.UnknownModel, names=["idpa_cnn", "idpa_cnn.cifar10"]):
            create("idpa_cnn.")
        with refuses(capszoo.UnknownModel, names=["unknown", "model"]):
            create("a" * 300)


# -- predict ----------------------------------------------------------------------------------------------------------


def test_predict_prints_a_table(trained: Path, pictures: Path) -> None:
    result = run("predict", trained, pictures, "--device", "cpu")
    text = result.stdout
    assert result.exit_code == 0
    assert result.stderr.startswith(
        "note: 1 of 2 images resized and cropped to 20x20; 1 lose more than a third"
    )
    assert "--crop-mode" in result.stderr and result.stderr.count("\n") == 1
    lines = text.splitlines()
    assert len(lines) == 1 + 2 * 3
    assert "a.png" in lines[1] and any(f" {label} " in text for label in ("ant", "bee", "cat"))


def test_predict_json_is_pure_and_right(trained: Path, pictures: Path) -> None:
    found = json.loads(
        succeeds(
            "predict",
            trained,
            pictures / "a.png",
            pictures / "more",
            "--topk",
            2,
            "--json",
            "--device",
            "cpu",
        )
    )
    assert [Path(entry["image"]).name for entry in found["results"]] == ["a.png", "b.jpg"]
    assert found["score_kind"] == "lengths"
    from capszoo.inference import load_model
    from capszoo.preprocess import load_image, model_transform

    model = load_model(str(trained), device="cpu")
    for entry in found["results"]:
        with torch.no_grad():
            scores = model(model_transform(model)(load_image(entry["image"]))[None])[0]
        values, indices = scores.topk(2)
        shares = (scores / scores.sum())[indices]  # the run has no recipe; its network gives capsule lengths
        assert [p["probability"] for p in entry["predictions"]] == pytest.approx(shares.tolist(), abs=1e-6)
        assert [p["index"] for p in entry["predictions"]] == indices.tolist()
        assert [p["score"] for p in entry["predictions"]] == pytest.approx(values.tolist(), abs=1e-6)
        assert [p["label"] for p in entry["predictions"]] == [
            ("ant", "bee", "cat")[i] for i in indices.tolist()
        ]


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
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("capszoo.inference.load_model", load)
    (tmp_path / "file").touch()
    (tmp_path / "folder.csv").mkdir()
    for out in (tmp_path / "file" / "a.csv", tmp_path / "folder.csv", tmp_path / ("n" * 255 + ".csv")):
        fails(1, "predict", trained, pictures, "--out", out, names=["write"])
    (tmp_path / "labels.csv").write_text("image,label\n")
    line = fails(1, "predict", trained, pictures, "--out", tmp_path / "labels.csv")
    assert_names(line, ["labels.csv", "--out"])
    assert (tmp_path / "labels.csv").read_text() == "image,label\n"
    table = "image,rank,index,class,probability,score,error\n"
    (tmp_path / "old.csv").write_text(table)
    run("predict", trained, pictures, "--out", tmp_path / "old.csv")  # ends in the error above
    assert (tmp_path / "old.csv").read_text() == table
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.csv", "labels.csv", "old.csv"}


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


def test_predict_from_a_weights_file(trained: Path, pictures: Path) -> None:
    (weights,) = trained.glob("*.safetensors")
    by_file = succeeds("predict", weights, pictures / "a.png", "--json", "--device", "cpu")
    by_folder = succeeds("predict", trained, pictures / "a.png", "--json", "--device", "cpu")
    assert json.loads(by_file)["results"] == json.loads(by_folder)["results"]


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
    broken = tmp_path / "broken.png"
    broken.write_bytes((pictures / "a.png").read_bytes()[:60])
    assert "broken.png" in fails(1, "predict", trained, broken)
    assert "topk" in fails(2, "predict", trained, pictures, "--topk", "0")
    fails(2, "predict", trained, pictures, "--img-size", "big", names=["size"])


def test_model_errors(trained: Path, pictures: Path, tmp_path: Path) -> None:
    picture = pictures / "a.png"
    without = next(name for name in capszoo.list_models() if not capszoo.list_pretrained(f"{name}.*"))
    fails(1, "predict", without, picture, names=[without])
    fails(2, "predict", f"{MODEL}.nosuchtag", picture, names=["nosuchtag"])
    fails(1, "predict", tmp_path / "missing", picture, names=["folder"])
    fails(1, "predict", tmp_path, picture, names=["weights", "metadata"])
    misfit = write_run(tmp_path / "misfit", num_classes=3, model_args={"pose_dim": 12, "decoder": False})
    fails(1, "predict", misfit, picture, names=["fit"])
    damaged = write_run(tmp_path / "damaged", sha256="0" * 64)
    assert "sha256 differs" in fails(1, "predict", damaged, picture)
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(b"")
    assert "alone.json" in fails(1, "predict", alone, picture)


# -- explain ----------------------------------------------------------------------------------------------------------


def test_explain(trained: Path, pictures: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "heat.png"
    text = succeeds(
        "explain", "heatmap", trained, pictures / "more" / "b.jpg", "--out", out, "--device", "cpu"
    )
    assert "b.jpg: " in text and str(out) in text
    with Image.open(out) as figure:
        assert figure.width > 3 * figure.height  # four panels: with the decoder's reconstruction
    succeeds(
        "explain", "heatmap", trained, pictures / "a.png", "--out", out, "--class", "bee", "--device", "cpu"
    )


def test_names_that_are_repeated_to_start_fast() -> None:
    """The command line checks some names before torch is loaded."""
    from capszoo.cli.explain import METHODS
    from capszoo.explain import heat_map

    assert heat_map.METHODS == METHODS


def test_kinds_and_styles_of_pictures(
    trained: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capszoo.cli.common import STYLES
    from capszoo.explain import plotting

    assert tuple(plotting.STYLES) == STYLES
    monkeypatch.chdir(tmp_path)
    image = min(pictures.iterdir())
    succeeds("explain", "heatmap", trained, image, "--format", "pdf")
    assert Path("heatmap.pdf").read_bytes().startswith(b"%PDF") and Path("heatmap.csv").is_file()
    succeeds("explain", "heatmap", trained, image)  # the numbers are those of the .pdf
    assert Path("heatmap.png").is_file()
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


def test_explain_errors(trained: Path, pictures: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = pictures / "a.png"
    line = fails(2, "explain", "heatmap", trained, picture, "--class", "dog", "--out", tmp_path / "x.png")
    assert_names(line, ["dog"])
    fails(2, "explain", "heatmap", trained, picture, "--out", tmp_path / "x.xyz", names=["write", "kind"])
    fails(
        1, "explain", "heatmap", trained, pictures / "notes.txt", "--out", tmp_path / "x.png", names=["image"]
    )
    assert "occlusion" in fails(2, "explain", "heatmap", trained, picture, "--method", "occlusions")
    assert not list(tmp_path.iterdir())


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
    common = (
        "export",
        MODEL,
        "--no-pretrained",
        "--img-size",
        20,
        "--routing-iters",
        2,
        "--out",
        out,
        "--quick",
    )
    text = succeeds(*common, "--batch-profile", "1,2,4")
    for expected in (
        "structure",
        "passed",
        "parity with eager",
        "not run",
        "opset 20",
        "batch 1 to 4",
        "2 routing",
    ):
        assert expected in text, expected
    assert out.is_file()


@pytest.mark.slow
def test_export_of_a_run_checks_its_images(trained: Path, pictures: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "model.onnx"
    report = json.loads(
        succeeds(
            "export", trained, "--out", out, "--quick", "--verify-data", pictures, "--json", "--opset", 18
        )
    )
    assert report["passed"] and report["opset"] == 18
    assert {step["name"]: step["passed"] for step in report["gate"]}["top-1 on real images"] is True
    assert [d["batch"] for d in report["comparisons"] if d["probe"] == "images"] == [2]


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
    assert found.exit_code == 0
    assert [d["batch"] for d in json.loads(found.stdout)["comparisons"] if d["probe"] == "images"] == [1]
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
def test_train_passes_everything_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import capszoo.recipes.train as module

    calls: list[tuple[Any, ...]] = []

    def train(recipe: str, overrides: list[str], **options: Any) -> dict[str, Any]:
        calls.append((recipe, overrides, options))
        return {"finished": True, "labels": tmp_path / "labels.txt"}

    monkeypatch.setattr(module, "train", train)
    text = succeeds(
        "train",
        "encapnet6.mnist",
        "--set",
        "epochs=1",
        "--set",
        "seed=3",
        "--data",
        tmp_path,
        "--out",
        tmp_path / "r",
        "--device",
        "cpu",
        "--profile",
        "short",
    )
    assert calls == [
        (
            "encapnet6.mnist",
            ["epochs=1", "seed=3"],
            {
                "out": tmp_path / "r",
                "data": tmp_path,
                "cpu": True,
                "profile": "short",
                "threads": None,
                "accept_data": False,
                "log_with": (),
            },
        )
    ]
    assert text.strip() == f"labels: {tmp_path / 'labels.txt'}"


@needs_training
def test_train_errors() -> None:
    line = fails(2, "train", "resnet20_routingcaps.nosuch")
    assert_names(line, ["resnet20_routingcaps.nosuch", "resnet20_routingcaps.mnist"])


@needs_training
def test_short_options_of_training_and_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import capszoo.recipes.finetune as finetune_module
    import capszoo.recipes.train as module

    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "train", lambda *a, **options: calls.append({"set": a[1], **options}) or {})
    monkeypatch.setattr(finetune_module, "finetune", lambda *a, **options: calls.append(options) or {})
    short = ("--lr", 0.01, "--batch-size", 8, "--seed", 5, "--device", "cpu")
    succeeds("train", f"{MODEL}.mnist", "--set", "ema_decay=0.9", "--epochs", 1, *short)
    assert calls[0]["set"] == ["ema_decay=0.9", "epochs=1", "optimizer.lr=0.01", "batch_size=8", "seed=5"]
    assert calls[0]["cpu"] is True
    succeeds("finetune", f"{MODEL}.mnist", "--data", tmp_path, "--epochs", 1, *short)
    assert calls[1]["overrides"] == ["optimizer.lr=0.01", "batch_size=8", "seed=5"]
    assert calls[1]["cpu"] is True and calls[1]["epochs"] == 1


def test_devices_that_training_does_not_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    line = fails(2, "train", f"{MODEL}.mnist", "--device", "cuda:1")
    assert_names(line, ["GPU", "cuda:1", "CUDA_VISIBLE_DEVICES=1"])
    fails(2, "train", f"{MODEL}.mnist", "--device", "mps", names=["MPS", "--device"])
    assert not use_cpu("cuda") and not use_cpu("cuda:0")


def test_devices(pictures: Path, trained: Path) -> None:
    for command in (("predict", trained, pictures), ("explain", "heatmap", trained, pictures / "a.png")):
        fails(2, *command, "--device", "gpu", names=["gpu"])
        if not torch.cuda.is_available():
            fails(2, *command, "--device", "cuda", names=["cuda"])
    succeeds("predict", trained, pictures / "a.png", "--device", "auto")


# -- the frame --------------------------------------------------------------------------------------------------------


def test_wrong_usage() -> None:
    fails(2, "nosuch", names=["nosuch"])
    assert "--nosuch" in fails(2, "list", "--nosuch")
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
    environment = {**os.environ, "PYTHONPATH": str(root)}

    def process(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "capszoo", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )

    good = process("list", "routingcaps", "--json")
    assert good.returncode == 0 and MODEL in {row["name"] for row in json.loads(good.stdout)}
    bad = process("info", "nosuchmodel")
    assert (
        bad.returncode == 2
        and bad.stdout == ""
        and bad.stderr.startswith("error: unknown model 'nosuchmodel'")
    )


@needs_training
def test_seeds_that_are_no_numbers_or_of_two_recipes_are_refused() -> None:
    fails(2, "train", "cnn6.mnist", "--seeds", "0,x", names=["--seeds"])
    fails(2, "train", "cnn6.mnist", "encapnet6.cifar10", "--seeds", "0", names=["--seeds"])


@needs_training
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "train cnn6.mnist --parallel 2",
            "--parallel has no effect on a single run: it belongs to --seeds",
        ),
        ("train cnn6.mnist --seeds 0,1 --threads 1", "--threads has no effect with --seeds: leave it out"),
        ("train cnn6.mnist --seeds 0,1 --together", "--seeds and --together exclude each other"),
        (f"finetune {MODEL} --data x --head em", "--head has no effect without --backbone"),
        (
            f"finetune {MODEL} --data x --from-scratch --layer-decay 1",
            "--layer-decay has no effect",
        ),
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
