"""An exported file or bundle where a MODEL is taken: its answers are the network's, and the rest refuse it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops
from typer.testing import CliRunner

from tests.support.errors import refuses

pytest.importorskip("onnxruntime")
import onnx

import capszoo
from capszoo._pretrained.catalogue import EXPORTED_IN
from capszoo._pretrained.exported import OnnxModel
from capszoo.app.model import AppModel
from capszoo.checkpoint import resolve
from capszoo.cli import app
from capszoo.errors import CapszooError, UsageError, WeightsError
from capszoo.export.bundle import check_bundle, export_bundle
from capszoo.export.to_onnx import ExportError, export
from capszoo.inference import load_model, predict
from capszoo.scores import score_kind
from tests.support.toys import ToyCaps

MODEL = "resnet20_routingcaps.mnist"


# of the session: workers that take tests from each other would leave the module, and export again
@pytest.fixture(scope="session")
def net() -> torch.nn.Module:
    return load_model(MODEL, device="cpu")


@pytest.fixture(scope="session")
def files(net: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model as a file, as one that normalises itself and serves batches of 2 to 3, and as a bundle."""
    folder = tmp_path_factory.mktemp("exported")
    shared: dict[str, Any] = {"gate": "quick", "name": MODEL}
    export(net, folder / "m.onnx", **shared)
    export(net, folder / "u.onnx", uint8_input=True, batch=(2, 2, 3), **shared)
    export_bundle(net, folder / "bundle", source=MODEL, **shared)
    return {"file": folder / "m.onnx", "uint8": folder / "u.onnx", "bundle": folder / "bundle"}


@pytest.fixture(scope="module")
def digits(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three digits a class, in folders."""
    folder = tmp_path_factory.mktemp("digits")
    stored = np.load(root / "tests" / "fixtures" / "mnist_test_1000.npz")
    images, labels = stored["images"], stored["labels"]
    for k in range(10):
        (folder / "test" / str(k)).mkdir(parents=True)
        for i in np.flatnonzero(labels == k)[:3]:
            Image.fromarray(images[i].reshape(28, 28)).save(folder / "test" / str(k) / f"{i}.png")
    return folder


def _run(*arguments: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["file", "uint8", "bundle"])
@pytest.mark.parametrize("count", [0, 1, 5, 33])
def test_scores_are_the_network_s(
    net: torch.nn.Module, files: dict[str, Path], kind: str, count: int
) -> None:
    pixels = torch.randint(0, 256, (count, 1, 28, 28), generator=torch.Generator().manual_seed(0))
    mean, std = net.pretrained_cfg["mean"][0], net.pretrained_cfg["std"][0]
    x = (pixels / 255 - mean) / std
    found = load_model(str(files[kind]), device="cpu")
    with torch.inference_mode():
        torch.testing.assert_close(found(x), net(x).reshape(count, 10), atol=1e-4, rtol=1e-4)
    assert score_kind(found) == score_kind(net)
    assert found.pretrained_cfg["label_names"] == tuple(net.pretrained_cfg["label_names"])


@pytest.mark.parametrize("kind", ["file", "bundle"])
def test_predict_gives_the_network_s_answers(files: dict[str, Path], digits: Path, kind: str) -> None:
    said = _run("predict", MODEL, digits, "--runtime", "torch")
    own = _run("predict", files[kind], digits)
    assert own["runtime"] == "onnx" and own["score_kind"] == said["score_kind"]
    for one, other in zip(own["results"], said["results"], strict=True):
        assert one["predictions"][0]["label"] == other["predictions"][0]["label"]
    (top,) = predict(load_model(str(files[kind])), [own["results"][0]["image"]])
    assert top.label == own["results"][0]["predictions"][0]["label"]


@pytest.mark.parametrize("kind", ["file", "uint8", "bundle"])
def test_eval_gives_the_network_s_accuracy(files: dict[str, Path], digits: Path, kind: str) -> None:
    said = _run("eval", MODEL, "--data", digits)
    own = _run("eval", files[kind], "--data", digits)
    assert own["n"] == 30 and own["confusion"] == said["confusion"]


def test_eval_measures_a_file_in_int8(digits: Path, tmp_path: Path) -> None:
    """What quantisation costs on a whole test set: the file answers otherwise than the network, and that is counted."""
    net = ToyCaps(1).eval()
    noise = torch.randn(32, 1, 10, 10, generator=torch.Generator().manual_seed(16))
    tolerant: dict[str, Any] = {"gate": "quick", "check": False}
    export(net, tmp_path / "i.onnx", precision="int8", calibration=noise, images=noise[:16] * 2, **tolerant)
    for k, name in enumerate("abcde"):
        shutil.copytree(digits / "test" / str(k), tmp_path / "data" / "test" / name)
    found = _run("eval", tmp_path / "i.onnx", "--data", tmp_path / "data")
    file = OnnxModel(tmp_path / "i.onnx")
    assert found["n"] == 15 and file.stated["precision"] == "int8"
    pictures = sorted((tmp_path / "data").rglob("*.png"))
    answers = zip(predict(file, pictures), pictures, strict=True)
    right = sum(top.label == picture.parent.name for top, picture in answers)
    assert sum(row[k] for k, row in enumerate(found["confusion"])) == right


def test_eval_refuses_what_needs_the_network(files: dict[str, Path], digits: Path) -> None:
    for option in (["--robustness"], ["--routing"], ["--routing-iters", "1,2"]):
        done = CliRunner().invoke(app, ["eval", str(files["file"]), "--data", str(digits), *option])
        assert done.exit_code == 2 and option[0] in done.output and "m.onnx" in done.output


def test_a_file_knows_the_zoo_s_checkpoint(files: dict[str, Path]) -> None:
    """Its data set and the images that training held out."""
    found = resolve(files["file"])
    assert found.exported and found.metadata().dataset.name == "mnist"
    assert (info := found.same_in_zoo()) is not None and info.name == MODEL


def test_benchmark_times_a_file(files: dict[str, Path]) -> None:
    found = _run("benchmark", files["uint8"], "--batch-size", "1,5", "--repeats", "1")
    assert [row["runner"] for row in found["timings"]] == ["onnxruntime"] * 2
    done = CliRunner().invoke(app, ["benchmark", str(files["file"]), "--runtimes", "eager"])
    assert done.exit_code == 2 and "onnxruntime" in done.output


@pytest.mark.parametrize("kind", ["file", "uint8"])
def test_check_compares_a_file_with_its_model(files: dict[str, Path], kind: str) -> None:
    steps = {step.name: step.passed for step in check_bundle(files[kind]).steps}
    assert steps == {"structure": True, "finite scores": True, "parity with eager": True}


def test_check_takes_the_tolerance_of_the_export(files: dict[str, Path], tmp_path: Path) -> None:
    proto = onnx.load(files["file"])
    (stated,) = (one for one in proto.metadata_props if one.key == "tolerance")
    stated.value = "1e-12"
    onnx.save(proto, tmp_path / "strict.onnx")
    found = {step.name: step for step in check_bundle(tmp_path / "strict.onnx").steps}["parity with eager"]
    assert not found.passed and "1e-12" in found.detail


def test_check_refuses_a_changed_file_and_another_model(files: dict[str, Path], tmp_path: Path) -> None:
    with refuses(CapszooError, names=["weights"]):
        check_bundle(files["file"], "resnet20_routingcaps.mnist_uniform")
    proto = onnx.load(files["file"])
    weight = max(proto.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weight.raw_data = bytes(len(weight.raw_data))
    onnx.save(proto, tmp_path / "changed.onnx")
    assert not check_bundle(tmp_path / "changed.onnx").passed


def test_the_service_answers_from_a_file(files: dict[str, Path], digits: Path, tmp_path: Path) -> None:
    served = AppModel(str(files["file"]), tmp_path)
    with Image.open(next((digits / "test" / "7").iterdir())) as image:
        assert served.answer(image, explained=False).label == "7"
        dark = served.answer(ImageChops.invert(image), explained=False, swap=False)
        assert any("inverted" in note for note in dark.notes)
    assert not served.routes and not list(tmp_path.iterdir())


COMMANDS = [
    ["explain", "heatmap", "{0}", "x.png"],
    ["export", "{0}", "--out", "y.onnx"],
    ["finetune", "{0}", "--data", "{1}"],
    ["info", "{0}"],
    ["compare", "{0}", MODEL],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("kind", ["file", "bundle"])
def test_other_commands_name_those_that_take_it(
    files: dict[str, Path],
    digits: Path,
    command: list[str],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("L", (28, 28)).save("x.png")
    done = CliRunner().invoke(app, [word.format(files[kind], digits) for word in command])
    assert done.exit_code in (1, 2) and all(name in done.output for name in EXPORTED_IN), done.output
    assert not Path("y.onnx").exists()


def test_settings_of_a_file_are_fixed(files: dict[str, Path]) -> None:
    found = resolve(files["file"])
    with pytest.raises(UsageError, match="img_size"):
        found.create(img_size=32)
    with refuses(CapszooError, names=["weights"]):
        found.create(pretrained=False)
    with refuses(CapszooError, names=["weights"]):
        found.weights()
    with pytest.raises(ExportError, match="exported"):
        export(found.create(device="cpu"), "again.onnx")
    loaded, image = capszoo.load(str(files["file"])), Image.new("L", (28, 28), 9)
    for method in ("couplings", "gradient"):
        with pytest.raises(CapszooError):
            loaded.explain(image, method=method)
    assert loaded.explain(image, method="occlusion").heat.shape == (7, 7)
    with pytest.raises(CapszooError, match="exported"):
        loaded.export("again.onnx")


def test_a_file_of_another_exporter_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    proto = onnx.load(files["file"])
    stated = {entry.key: entry.value for entry in proto.metadata_props}
    for name, values in {
        "foreign": {},
        "scoreless": {
            **stated,
            "preprocess": json.dumps({**json.loads(stated["preprocess"]), "scores": None}),
        },
    }.items():
        del proto.metadata_props[:]
        onnx.helper.set_model_props(proto, values)
        onnx.save(proto, tmp_path / f"{name}.onnx")
        with refuses(CapszooError, names=[f"{name}.onnx"]):
            OnnxModel(tmp_path / f"{name}.onnx")
    for key, value in {"mean": ["x"], "size": [0, 28], "batch": {"min": 0, "usual": 1, "max": 0}}.items():
        spec = {**json.loads(stated["preprocess"]), key: value}
        onnx.helper.set_model_props(proto, {**stated, "preprocess": json.dumps(spec)})
        onnx.save(proto, tmp_path / "damaged.onnx")
        with pytest.raises((CapszooError, WeightsError), match="damaged.onnx"):
            OnnxModel(tmp_path / "damaged.onnx")


@pytest.mark.parametrize("command", ["predict", "eval", "benchmark", "check"])
def test_a_damaged_file_is_one_line(
    command: str, files: dict[str, Path], digits: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(files["file"].read_bytes()[:1000])
    more = {"predict": [digits], "eval": ["--data", digits]}.get(command, [])
    done = CliRunner().invoke(app, [command, str(broken), *map(str, more)])
    assert done.exit_code == 1 and not isinstance(done.exception, OSError), done.output
    assert "broken.onnx" in done.output and "export it again" in done.output


def test_names_that_are_not_utf_8_are_taken(files: dict[str, Path], digits: Path, tmp_path: Path) -> None:
    try:
        odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xe9j\xe0.onnx"))
        shutil.copy(files["file"], odd)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    (found,) = _run("predict", odd, next((digits / "test" / "3").iterdir()))["results"]
    assert found["predictions"][0]["label"] == "3" and check_bundle(odd).passed
    assert export(ToyCaps(1).eval(), odd, gate="quick").passed


def test_weights_beside_a_file_are_not_taken_for_it(
    files: dict[str, Path], root: Path, digits: Path, tmp_path: Path
) -> None:
    shutil.copy(files["file"], tmp_path / f"{MODEL}.onnx")
    for suffix in (".json", ".safetensors"):
        shutil.copy(root / "capszoo" / "weights" / f"{MODEL}{suffix}", tmp_path)
    assert _run("predict", tmp_path / f"{MODEL}.onnx", digits / "test" / "3")["runtime"] == "onnx"
