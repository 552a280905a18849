"""The bundle: everything in it is true, serves without torch, can be checked again, and is never half-written."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import capszoo
from capszoo._pretrained.catalogue import checkpoints
from capszoo._pretrained.facts import label_lines
from capszoo._pretrained.files import sha256_of
from capszoo.cli import app
from capszoo.errors import CapszooError, UsageError
from capszoo.export import bundle, compare, to_onnx, to_tensorrt
from capszoo.export.bundle import check_bundle, compare_bundle, export_bundle, read_manifest, write
from capszoo.export.bundle.check import _verified, open_runner
from capszoo.export.verify.images import transformed
from capszoo.inference import load_model, predict
from capszoo.preprocess import load_image
from tests.support import load_script
from tests.support.errors import assert_names, refuses
from tests.support.toys import ToyCaps

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

NAME = "resnet20_routingcaps.mnist"
ASSETS = Path(capszoo.__file__).parent / "assets"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three digits as they are, one large and coloured, one of 16 bits."""
    folder = tmp_path_factory.mktemp("pictures")
    files = sorted(ASSETS.glob("digit_[135].png"))
    with Image.open(ASSETS / "digit_7.png") as image:
        image.convert("RGB").resize((70, 90), Image.Resampling.BICUBIC).save(folder / "large.png")
        deep = np.asarray(image.convert("L"), dtype=np.uint16) * 257
        Image.fromarray(deep).save(folder / "deep.png")
    return [*files, folder / "large.png", folder / "deep.png"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, pictures: list[Path]) -> tuple[Path, dict[str, Any]]:
    """One bundle by the full gate, shared by the tests that only look at it."""
    out = tmp_path_factory.mktemp("served") / "digits"
    net = load_model(NAME, device="cpu")
    manifest = export_bundle(
        net,
        out,
        name=NAME,
        source=NAME,
        formats=("onnx", "tensorrt"),
        batch=(1, 4, 8),
        images=transformed(net, map(load_image, pictures)),
        triton=True,
    )
    return out, manifest


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a fixed batch, uint8 input and couplings, of a toy that no name leads to."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("fixed") / "toy"
    model = ToyCaps().eval()
    options: dict[str, Any] = dict(batch=3, uint8_input=True, gate="quick", triton=True)
    backends = ("onnxruntime", "python")
    export_bundle(model, out, outputs=("couplings", "scores"), triton_backends=backends, **options)
    return out


def test_manifest(served: tuple[Path, dict[str, Any]]) -> None:
    out, manifest = served
    assert read_manifest(out) == manifest
    info = checkpoints(aliases=False)[NAME]
    assert manifest["model"]["weights"]["id"] == NAME
    assert manifest["model"]["weights"]["sha256"] == info.sha256
    assert manifest["model"]["weights"]["metrics"] == info.raw["metrics"]
    assert manifest["model"]["routing"] == [{"layer": "class_caps", "type": "RoutingCaps", "iterations": 3}]
    spec = manifest["input"]
    assert (spec["name"], spec["dtype"], spec["shape"]) == ("input", "float32", ["batch", 1, 28, 28])
    assert (spec["mean"], spec["std"], spec["color_order"]) == ([0.1307], [0.3081], "grey")
    assert manifest["outputs"][0]["name"] == "scores" and "prediction" in manifest["outputs"][0]["meaning"]
    assert manifest["opset"] == 20 and manifest["precision"]["model"] == "fp32"
    assert {"capszoo", "torch", "onnx", "onnxscript", "onnxruntime"} <= manifest["exported_with"].keys()
    figures = manifest["comparison"]["onnxruntime against eager"]
    assert figures["images"] == 5 and figures["top1_agreement"] == 1.0
    assert 0 <= figures["share_of_largest_output"] <= 1e-4
    assert manifest["labels"] == (out / "labels.txt").read_text().split() == [str(i) for i in range(10)]
    on_disk = {f.relative_to(out).as_posix() for f in out.rglob("*") if f.is_file()}
    assert set(manifest["files"]) == on_disk - {"manifest.json"}
    assert all(sha256_of(out / name) == digest for name, digest in manifest["files"].items())
    gates = {step["name"]: step["passed"] for step in manifest["gates"]}
    steps = "structure", "parity with eager", "top-1 on real images", "plain and optimised graph agree"
    assert all(gates[name] is True for name in steps)
    readme = (out / "README.md").read_text()
    checked, unchecked = readme.split("## What was not checked")
    for step in manifest["gates"]:
        assert step["name"] in (checked if step["passed"] else unchecked)
    assert "Triton Inference Server was not run" in unchecked
    assert manifest["notes"] == [note for note in [manifest["engines"]["tensorrt"]["note"]] if note]
    assert "batch of 0" in manifest["batch"]["empty"] and manifest["batch"]["empty"] in checked


def run_infer(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """infer.py in a process in which neither torch nor this package can be imported."""
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'torchvision', 'timm', 'capszoo', 'onnx'): sys.modules[name] = None\n"
        f"sys.argv = ['infer.py', *{[str(a) for a in arguments]!r}]\n"
        f"runpy.run_path({str(folder / 'infer.py')!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-I", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)


def test_infer_without_torch_answers_as_predict(
    served: tuple[Path, dict[str, Any]], pictures: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "no.png").write_text("no image")
    done = run_infer(served[0], *pictures, tmp_path / "no.png", "--topk", 3, "--json")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert_names(done.stderr, ["no.png"])
    document = json.loads(done.stdout)
    got = document["results"]
    expected = [r.to_dict() for r in predict(load_model(NAME, device="cpu"), list(pictures), 3)]
    assert len(got) - 1 == len(expected) == 5 and document["score_kind"] == "lengths"
    for mine, theirs in zip(got[:5], expected, strict=True):
        assert mine["image"] == theirs["image"]
        for a, b in zip(mine["predictions"], theirs["predictions"], strict=True):
            assert (a["index"], a["label"]) == (b["index"], b["label"])
            assert a["score"] == pytest.approx(b["score"], abs=2e-5)
            assert a["probability"] == pytest.approx(b["probability"], abs=2e-5)
    plain = run_infer(served[0], pictures[0], "--topk", 1)
    assert plain.stdout.split()[1] == "1"


def test_infer_finds_the_cuda_libraries_that_pip_installed(
    root: Path, served: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    loaded: list[str] = []
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: loaded.append("CUDA"), raising=False)
    infer = load_script(root / "export" / "bundle" / "infer.py")
    infer.Classifier(served[0])
    assert loaded == []
    with refuses(ValueError, names=["CUDAExecutionProvider"]):
        infer.Classifier(served[0], "CUDAExecutionProvider")
    assert loaded == ["CUDA"]


def test_infer_with_a_fixed_batch_and_uint8(fixed: Path) -> None:
    done = run_infer(fixed, *sorted(ASSETS.glob("digit_*.png"))[:4], "--topk", 5, "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert len(results) == 4 and {p["label"] for p in results[0]["predictions"]} == set("abcde")


class _Zeros:
    """In place of infer.py's classifier: notes the batches, and answers zeros."""

    largest, labels = 2, ("a\udce9", "b")
    spec = dict(channels=1, size=[8, 8], crop_pct=1.0, interpolation="bilinear", dtype="uint8", mean=[0.5])

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, inputs: list[np.ndarray]) -> np.ndarray:
        self.batches.append(len(inputs))
        return np.zeros((len(inputs), 2), np.float32)


@pytest.fixture
def zeros(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, _Zeros]:
    infer, classifier = load_script(root / "export" / "bundle" / "infer.py"), _Zeros()
    monkeypatch.setattr(infer, "Classifier", lambda **_: classifier)
    return infer, classifier


def test_infer_holds_a_batch_of_images_at_a_time(
    zeros: tuple[Any, _Zeros], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    infer, classifier = zeros
    good, bad = str(ASSETS / "digit_3.png"), str(tmp_path)
    assert infer.main([good, bad, bad, bad, good, good, good, "--json"]) == 1
    assert classifier.batches == [1, 2, 1]
    results = json.loads(capsys.readouterr().out)["results"]
    assert ["error" in one for one in results] == [False, True, True, True, False, False, False]


@pytest.mark.parametrize(("as_json", "encoding"), [(True, "ascii"), (True, "cp1252"), (False, "ascii")])
def test_infer_prints_names_that_stdout_cannot_hold(
    zeros: tuple[Any, _Zeros], monkeypatch: pytest.MonkeyPatch, as_json: bool, encoding: str
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding, errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    if encoding == "cp1252":
        zeros[1].labels = ("\xfc", "b")
    assert zeros[0].main([str(ASSETS / "digit_3.png"), *(["--json"] if as_json else [])]) == 0
    said = out.buffer.getvalue().decode()
    if as_json:
        assert json.loads(said)["results"][0]["predictions"][0]["label"] == zeros[1].labels[0]
    else:
        assert r"a\udce9" in said


def test_infer_shows_no_control_characters(
    zeros: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    infer, classifier = zeros
    classifier.labels, classifier.spec = ("\x1b[31mred", "b"), classifier.spec | {"mean": [0.1]}
    bright, bad = tmp_path / "\x1b[2Jbright.png", tmp_path / "\x9bbad.png"
    Image.new("L", (28, 28), 240).save(bright)
    bad.write_bytes(b"no picture")
    infer.main([str(bright), str(bad)])
    out, err = capsys.readouterr()
    assert "bright.png: " in err and "bad.png: " in err
    assert "red" in out
    assert (out + err).replace("\n", "").isprintable()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_infer_says_that_the_results_cannot_be_written(
    zeros: tuple[Any, _Zeros], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    assert zeros[0].main([str(ASSETS / "digit_3.png")]) == 1
    assert_names(capsys.readouterr().err, ["results", "written"])
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writing, "w"))
    assert zeros[0].main([str(ASSETS / "digit_3.png")]) == 1
    assert capsys.readouterr().err == ""


def test_a_label_is_one_line() -> None:
    lines = label_lines(["a\u2028b", "", "c\r\n", "d e"])
    assert lines == ["a b", "", "c", "d e"]
    assert "".join(f"{line}\n" for line in lines).splitlines() == lines


# -- Triton -------------------------------------------------------------------------------------------------------


def triton_schema() -> Any:
    """tritonclient's generated module for model configurations; it needs protobuf alone, the package grpc."""
    found = importlib.util.find_spec("tritonclient")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs tritonclient: pip install tritonclient")
    file = Path(found.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(path: Path) -> Any:
    from google.protobuf import text_format

    return text_format.Parse(path.read_text(), triton_schema().ModelConfig())


def test_triton_repository(served: tuple[Path, dict[str, Any]], fixed: Path) -> None:
    out, _ = served
    place = out / "triton" / NAME
    assert sha256_of(place / "1" / "model.onnx") == sha256_of(out / "model.onnx")
    assert (place / "labels.txt").read_text() == (out / "labels.txt").read_text()
    text = (place / "config.pbtxt").read_text()
    assert 'backend: "onnxruntime"' in text and "max_batch_size: 8" in text
    assert (out / "triton-tensorrt" / NAME / "config.pbtxt").is_file()
    assert "max_batch_size: 0" in (fixed / "triton" / "ToyCaps" / "config.pbtxt").read_text()
    assert not (out / "triton-python").exists()
    ours = {file.name for file in (fixed / "triton-python" / "ToyCaps" / "1").iterdir()}
    assert ours == {"model.py", "model.onnx"}  # tests/export/test_runtimes.py runs it in Triton


def test_triton_configuration_parses(served: tuple[Path, dict[str, Any]], fixed: Path) -> None:
    out, _ = served
    config = parsed(out / "triton" / NAME / "config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == (NAME, "onnxruntime", 8)
    assert list(config.input[0].dims) == [1, 28, 28] and list(config.output[0].dims) == [10]
    assert config.output[0].label_filename == "labels.txt"
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 8]
    assert config.model_warmup[0].inputs["input"].zero_data
    (cuda,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert cuda.name == "cuda" and dict(cuda.parameters) == {"use_tf32": "0"}
    engine = parsed(out / "triton-tensorrt" / NAME / "config.pbtxt")
    assert not engine.HasField("optimization")
    assert (engine.platform, engine.default_model_filename) == ("tensorrt_plan", "model.plan")
    whole = parsed(fixed / "triton" / "ToyCaps" / "config.pbtxt")  # the batch is part of the shape
    assert whole.max_batch_size == 0 and list(whole.input[0].dims) == [3, 1, 10, 10]
    assert whole.model_warmup[0].batch_size == 1 and config.model_warmup[0].batch_size == 4
    kinds = {value.name: value.number for value in triton_schema().DataType.DESCRIPTOR.values}
    assert whole.input[0].data_type == kinds["TYPE_UINT8"]
    assert [o.name for o in whole.output] == ["couplings", "scores"]
    python = parsed(fixed / "triton-python" / "ToyCaps" / "config.pbtxt")
    assert (python.backend, python.default_model_filename) == ("python", "model.py")
    assert not python.HasField("optimization")


# -- a second look ------------------------------------------------------------------------------------------------


def test_check(served: tuple[Path, dict[str, Any]], fixed: Path) -> None:
    found = check_bundle(served[0])
    assert found.passed and [step.passed for step in found.steps] == [True] * 5 + [None]
    assert "no engine for tensorrt" in found.steps[5].detail
    other = check_bundle(fixed)
    assert other.passed and [step.passed for step in other.steps] == [True, True, True, True, None]
    assert "cannot be created here" in other.steps[4].detail


def test_check_compares_each_input_with_its_own_scores() -> None:
    """The scores of an input are not hidden by the larger ones of another."""
    expected = np.array([[1.0, 0.9], [100.0, 90.0]], np.float32)
    got = expected.copy()
    got[0, 0] *= 1.005
    manifest = {"tolerance": 1e-4, "precision": {"model": "fp32"}}
    step = _verified("parity", expected, got, manifest)
    assert step.passed is False and step.detail.startswith("5.0e-03")
    assert _verified("parity", expected, expected, manifest).passed
    assert _verified("parity", expected, got, {**manifest, "precision": {"model": "int8"}}).passed


def test_an_engine_that_was_built_again_is_compared_and_not_refused(
    served: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(served[0], tmp_path)
    plan = folder / "tensorrt" / "model.plan"
    plan.write_text("first")
    with manifest_of(folder) as manifest:
        manifest["engines"]["tensorrt"]["file"] = "tensorrt/model.plan"
    resigned(folder, "tensorrt/model.plan")
    plan.write_text("second")
    monkeypatch.setattr(to_tensorrt, "TensorRTRunner", lambda path: open_runner("onnxruntime", folder))
    found = check_bundle(folder)
    assert found.passed and "tensorrt/model.plan is not the one that was written" in found.steps[0].detail
    assert found.steps[-1].name.startswith("TensorRT engine") and found.steps[-1].passed is True
    wrong = compare.EagerRunner(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)))
    monkeypatch.setattr(to_tensorrt, "TensorRTRunner", lambda path: wrong)
    assert not check_bundle(folder).passed
    profile = folder / "tensorrt" / "profile.json"
    stated = json.loads(profile.read_text())
    stated["options"]["version_compatible"] = True
    profile.write_text(json.dumps(stated))
    resigned(folder, "tensorrt/profile.json")
    found = check_bundle(folder)
    assert found.passed and "is version-compatible: it contains native code" in found.steps[-1].detail


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


@contextmanager
def manifest_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The manifest, to change it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    yield manifest
    (folder / "manifest.json").write_text(json.dumps(manifest))


def resigned(folder: Path, name: str) -> None:
    """Write a file's new digest into the manifest, as one who means harm would."""
    with manifest_of(folder) as manifest:
        manifest["files"][name] = sha256_of(folder / name)


def _wrong(folder: Path) -> str:
    """What `check_bundle` says of a bundle that it must not pass: the failed step's detail, or the error."""
    try:
        found = check_bundle(folder)
    except CapszooError as error:
        return str(error)
    failed = [step for step in found.steps if step.passed is False]
    assert failed and not found.passed, [step.name for step in found.steps]
    return f"{failed[0].name}: {failed[0].detail}"


def test_every_file_that_is_changed_swapped_or_missing_is_named(fixed: Path, tmp_path: Path) -> None:
    folder = copied(fixed, tmp_path)
    names = list(json.loads((folder / "manifest.json").read_text())["files"])
    assert {"model.onnx", "labels.txt", "README.md"} < set(names) and len(names) >= 8
    contents = {name: (folder / name).read_bytes() for name in names}
    for name in names:
        content = bytearray(contents[name])
        content[len(content) // 2] ^= 1
        other = contents[next(n for n in names if contents[n] != contents[name])]
        for changed in (bytes(content), content[:-1], contents[name] + b"\n", b"", other):
            (folder / name).write_bytes(changed)
            assert_names(_wrong(folder), [name])
        (folder / name).unlink()
        assert_names(_wrong(folder), [name])
        (folder / name).write_bytes(contents[name])
    assert check_bundle(folder).passed
    (folder / "labels.txt").write_text("x\n")
    line = CliRunner().invoke(app, ["check", str(folder)])
    assert_names(line.stderr, ["sha256"])
    assert line.exit_code == 1 and len(check_bundle(folder).steps) == 1


#: Key of the manifest -> values that no export writes.
EDITS: dict[str, tuple[Any, ...]] = {
    "schema": (None, 2, "1", []),
    "name": (None, 5, []),
    "model": (None, [], {}, "x"),
    "model.source": (None, 5),
    "model.state_sha256": (None, "x", 5),
    "model.outputs": (None, "scores", [5]),
    "model.routing_iters_asked": ("3", 2.5),
    "opset": (None, "20", 13, True),
    "input": (None, [], {}),
    "input.channels": (None, 0, -1, 10**9, "1"),
    "input.size": (None, [], [28], [28, -1], [10**9, 10**9], "28"),
    "input.dtype": (None, "float64", 5),
    "outputs": (None, [], {}, [{}], [{"name": "poses"}]),
    "precision": (None, {}, {"model": "fp8"}),
    "batch": (None, {}, {"min": 3, "usual": 2, "max": 1}, {"min": 0, "usual": 1, "max": 1}),
    "labels": (None, "x", [5], ["a"]),
    "engines": (None, [], {"tensorrt": []}, {"aoti": {"file": "../../x"}}),
    "tolerance": (None, "x", -1, 0, 1e9, float("nan"), float("inf")),
    "files": (None, [], {}),
}


@pytest.mark.parametrize("key", EDITS)
def test_an_edited_manifest_is_refused_by_the_key(key: str, fixed: Path, tmp_path: Path) -> None:
    folder = copied(fixed, tmp_path)
    whole = (folder / "manifest.json").read_text()
    *parents, last = key.split(".")
    for value in (*EDITS[key], KeyError):
        (folder / "manifest.json").write_text(whole)
        with manifest_of(folder) as node:
            for parent in parents:
                node = node[parent]
            if value is KeyError:
                del node[last]
            else:
                node[last] = value
        said = _wrong(folder)
        assert last in said or (key, value) == ("labels", ["a"]) and "labels.txt differs" in said, said
        assert "\n" not in said and len(said) < 600


@pytest.mark.parametrize(
    ("name", "digest", "said"),
    [("../x", "0" * 64, "inside"), ("/etc/passwd", "0" * 64, "inside"), ("model.onnx", "x", "pattern")],
)
def test_a_manifest_names_only_files_of_the_bundle(
    name: str, digest: str, said: str, fixed: Path, tmp_path: Path
) -> None:
    folder = copied(fixed, tmp_path)
    with manifest_of(folder) as manifest:
        manifest["files"][name] = digest  # beside all the others: nothing else is missing
    with refuses(CapszooError, names=[said]):
        check_bundle(folder)


def test_files_that_were_changed_and_signed_again_fail(fixed: Path, tmp_path: Path) -> None:
    import onnx

    folder = copied(fixed, tmp_path)
    whole = (folder / "manifest.json").read_text()
    changed = onnx.load(folder / "model.onnx")
    weight = next(t for t in changed.graph.initializer if t.name.endswith("class_caps.weight"))
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 1.1, weight.name))
    outside = onnx.load(folder / "model.onnx")
    tensor = next(t for t in outside.graph.initializer if t.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    attribute = onnx.load(folder / "model.onnx")
    attribute.graph.node.add(op_type="Constant", output=["k"]).attribute.add(name="value").t.CopyFrom(tensor)
    nested = onnx.load(folder / "model.onnx")
    branch = nested.graph.node.add(op_type="If").attribute.add(name="then_branch").g
    branch.initializer.add().CopyFrom(tensor)
    looped = onnx.load(folder / "model.onnx")
    looped.graph.node.add(op_type="Loop")
    headless = onnx.load(folder / "model.onnx")
    del headless.opset_import[:]
    spec = json.loads((folder / "preprocess.json").read_text())
    cases: list[tuple[str, bytes, str]] = [
        ("model.onnx", b"", "structure: "),
        ("model.onnx", b"\xff" * 40, "structure: model.onnx holds no graph"),
        ("model.onnx", changed.SerializeToString(), "parity with the stored answers: "),
        ("model.onnx", outside.SerializeToString(), "refers to data in another file"),
        ("model.onnx", attribute.SerializeToString(), "refers to data in another file"),
        ("model.onnx", nested.SerializeToString(), "refers to data in another file"),
        ("model.onnx", looped.SerializeToString(), "structure: "),
        ("model.onnx", headless.SerializeToString(), "structure: "),
        ("preprocess.json", b"[]", "preprocess.json is no object"),
        ("preprocess.json", b"{", "cannot be read"),
        ("preprocess.json", b"{}", "differs from the manifest in channels"),
        ("preprocess.json", json.dumps({**spec, "mean": [0.9]}).encode(), "from the manifest in mean"),
        ("labels.txt", b"a\n", "labels.txt differs from the manifest"),
        ("labels.txt", b"\xff", "cannot be read"),
        ("reference.npz", b"", "reference.npz"),
        ("reference.npz", b"PK\x03\x04", "reference.npz"),
    ]
    for name, content, said in cases:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        resigned(folder, name)
        assert said in _wrong(folder), (name, content[:20])
        (folder / name).write_bytes(before)
        (folder / "manifest.json").write_text(whole)
    assert check_bundle(folder).passed


def test_no_bundle(tmp_path: Path) -> None:
    with refuses(CapszooError, names=["bundle"]):
        check_bundle(tmp_path)
    (tmp_path / "model.onnx").write_text("x")
    with refuses(CapszooError, names=["model.onnx", "ONNX"]):
        check_bundle(tmp_path / "model.onnx")
    (tmp_path / "manifest.json").write_text("{")
    with refuses(CapszooError, names=["read"]):
        check_bundle(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema": 99}')
    with pytest.raises(CapszooError, match="schema"):
        check_bundle(tmp_path)


# -- comparing ----------------------------------------------------------------------------------------------------


def test_compare(served: tuple[Path, dict[str, Any]], pictures: list[Path]) -> None:
    result = compare_bundle(served[0], ("eager", "onnxruntime"), pictures, batches=(1, 100), repeats=2)
    (row,) = result["differences"]
    assert row["runner"] == "onnxruntime" and row["top1_agreement"] == 1.0 and row["relative"] <= 1e-4
    assert row["batch"] == 5 and result["images"] == 5
    assert [(t["runner"], t["batch"]) for t in result["timings"]] == [
        (kind, count) for count in (1, 8) for kind in ("eager", "onnxruntime")
    ]
    assert all(t["milliseconds"] > 0 for t in result["timings"]) and result["timings"][0]["ratio"] == 1.0
    assert all(t["speed_up"] * t["ratio"] == pytest.approx(1) for t in result["timings"])


def test_benchmark_of_a_bundle(served: tuple[Path, dict[str, Any]]) -> None:
    arguments = ["--repeats", "1", "--batch-size", "2", "--runtimes", "onnxruntime,eager"]
    done = CliRunner().invoke(app, ["benchmark", str(served[0]), *arguments])
    assert done.exit_code == 0, done.output
    assert "against onnxruntime, random input" in done.stdout and "images/s" in done.stdout
    for extra, message in (
        (["--runtimes", "eager"], "is timed against a reference"),
        (["--runtimes", "eager,java"], "unknown runtime 'java'"),
        (["--batch-size", "0"], "is invalid"),
    ):
        failed = CliRunner().invoke(app, ["benchmark", str(served[0]), *extra])
        assert failed.exit_code == 2 and message in failed.stderr
    missing = CliRunner().invoke(app, ["benchmark", str(served[0]), "--runtimes", "eager,aoti"])
    assert_names(missing.stderr, ["--format"])
    assert missing.exit_code == 1


def test_eager_needs_the_same_weights(served: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with refuses(CapszooError, names=["weights", "bundle"]):
        bundle.open_runner("eager", served[0], model="idpa_cnn.mnist")
    with refuses(CapszooError, names=["weights", "bundle"]):
        check_bundle(served[0], model="idpa_cnn.mnist")
    moved = {**served[1], "model": {**served[1]["model"], "source": str(tmp_path / "moved")}}
    with refuses(CapszooError, names=["--model"]):
        bundle.open_runner("eager", served[0], moved)
    for stranger in ("hf-hub:someone/huge", "hf_hub:someone/huge", "vit_huge_patch14_224.mae"):
        named = {**served[1], "model": {**served[1]["model"], "source": stranger}}
        with refuses(CapszooError, names=["--model"]):
            bundle.open_runner("eager", served[0], named)


def test_the_model_of_a_bundle_is_found_by_its_bare_name(
    served: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {**served[1], "model": {**served[1]["model"], "source": "photos"}}
    monkeypatch.chdir(tmp_path)
    with refuses(CapszooError, names=["photos", "folder"]):
        bundle.open_runner("eager", served[0], named)
    (tmp_path / "photos").mkdir()
    with refuses(CapszooError, names=["photos", "bundle"]):
        bundle.open_runner("eager", served[0], named)


def test_a_bundle_of_links_answers(served: tuple[Path, dict[str, Any]], tmp_path: Path, root: Path) -> None:
    """As `snapshot_download` leaves one: each file is a link to another name elsewhere."""
    digit = root / "capszoo" / "assets" / "digit_3.png"
    (tmp_path / "bundle").mkdir()
    for number, file in enumerate(sorted(path for path in served[0].iterdir() if path.is_file())):
        Path(tmp_path / "bundle" / file.name).symlink_to(shutil.copyfile(file, tmp_path / str(number)))
    alone = tmp_path / "answer.py"
    alone.symlink_to(served[0] / "infer.py")
    for script in (tmp_path / "bundle" / "infer.py", alone):
        done = subprocess.run(
            [sys.executable, script, digit, "--json"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_a_bundle_asks_for_no_more_work_than_an_export_writes(
    served: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(served[0], tmp_path)
    images, scores = np.zeros((17, 1, 28, 28), np.float32), np.zeros((17, 10), np.float32)
    np.savez_compressed(folder / "reference.npz", images=images, scores=scores)
    with refuses(CapszooError, names=["sha256", "reference.npz"]):
        compare_bundle(folder, ("eager", "onnxruntime"))
    resigned(folder, "reference.npz")
    with refuses(CapszooError, names=["reference.npz", "17"]):
        check_bundle(folder)
    seen = []

    def run(self: Any, images: np.ndarray) -> list[np.ndarray]:
        seen.append(len(images))
        return [np.zeros((len(images), 10))]

    monkeypatch.setattr(compare.OnnxRunner, "__call__", run)
    compare_bundle(folder, ("onnxruntime", "onnxruntime"), batches=(2,), repeats=1)
    assert max(seen) == 2, "not the 8 of the bundle's profile"


def test_runners_are_timed_in_turns_each_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker threads of ONNX Runtime and OpenMP spin for some milliseconds after a run."""
    calls: list[Any] = []

    class Runner:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, images: np.ndarray) -> list[np.ndarray]:
            calls.append(self.name)
            return []

    monkeypatch.setattr(compare.time, "sleep", calls.append)
    timings = compare.time_runners([Runner("a"), Runner("b")], np.zeros((3, 1)), repeats=2)
    rest = compare.SETTLE
    assert calls == [rest, "a", "a", rest, "b", "b"] * 2 and [t.batch for t in timings] == [3, 3]
    assert rest >= 0.03
    with pytest.raises(ValueError, match="repeats"):
        compare.time_runners([Runner("a")], np.zeros((1, 1)), repeats=0)


# -- what must fail, and leave nothing ----------------------------------------------------------------------------


def test_nothing_is_left_of_a_failure(fixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(fixed, tmp_path)
    before = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    spoilt = ToyCaps()
    with torch.no_grad():
        spoilt.class_caps.weight[0, 0, 0] = float("nan")
    with pytest.raises(to_onnx.ExportError, match="NaN"):
        export_bundle(spoilt, folder)

    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "_readme", stopped)  # the last thing before the manifest
    with pytest.raises(KeyboardInterrupt):
        export_bundle(ToyCaps(1), folder, gate="quick")
    assert {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_files_that_come_while_it_works_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()

    def progress(_: str) -> None:
        (folder / "thesis.tex").write_text("x")

    with refuses(UsageError, names=["files", "bundle"]):
        export_bundle(ToyCaps(1), folder, gate="quick", progress=progress)
    assert list(tmp_path.rglob("*")) == [folder, folder / "thesis.tex"]


def test_a_bundle_that_another_process_has_just_written_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, replace = tmp_path / "new", os.replace

    def just_before(source: Any, target: Any) -> None:
        if target == folder:
            folder.mkdir()
            (folder / "manifest.json").write_text("theirs")
        replace(source, target)

    monkeypatch.setattr(os, "replace", just_before)
    with pytest.raises(OSError, match="not empty"):
        export_bundle(ToyCaps(1), folder, gate="quick")
    assert [f.name for f in tmp_path.rglob("*")] == ["new", "manifest.json"]


def test_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    with refuses(UsageError, names=["files", "bundle"]):
        export_bundle(ToyCaps(), tmp_path / "mine")
    with refuses(UsageError, names=["file"]):
        export_bundle(ToyCaps(), tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with refuses(UsageError, names=["folder"]):
        export_bundle(ToyCaps(), tmp_path / "pipe")
    with refuses(UsageError, names=["/proc", "/proc/model"]):
        export_bundle(ToyCaps(), "/proc")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["file", "mine", "pipe"]


def test_only_a_bundle_is_replaced(
    served: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page"
    page.mkdir()
    (page / "manifest.json").write_text('{"name": "a web application"}')
    (page / "index.html").write_text("x")
    with refuses(UsageError, names=["files", "bundle"]):
        export_bundle(ToyCaps(), page)
    bundle = tmp_path / "bundle"
    shutil.copytree(served[0], bundle)
    (bundle / "notes").mkdir()
    (bundle / "notes" / "mine.txt").write_text("x")
    with refuses(UsageError, names=["notes/mine.txt"]):
        export_bundle(ToyCaps(), bundle)
    assert (bundle / "notes" / "mine.txt").is_file() and (page / "index.html").is_file()
    shutil.rmtree(bundle / "notes")
    (bundle / "tensorrt").mkdir(exist_ok=True)
    (bundle / "tensorrt" / "model.plan").write_text("an engine of the old graph")
    # as the bundle's README says: the engine for Triton, too; and trtexec keeps its timings
    (bundle / "triton-tensorrt" / served[1]["name"] / "1").mkdir(parents=True, exist_ok=True)
    (bundle / "triton-tensorrt" / served[1]["name"] / "1" / "model.plan").write_text("the same")
    profile = json.loads((bundle / "tensorrt" / "profile.json").read_text())
    profile["options"]["timing_cache"] = "../tensorrt/timings"  # as a user may write it
    (bundle / "tensorrt" / "profile.json").write_text(json.dumps(profile))
    (bundle / "tensorrt" / "timings").write_text("x")
    link = tmp_path / "link"
    link.symlink_to(bundle)
    written = export_bundle(ToyCaps(1).eval(), link, gate="quick", batch=1)
    assert link.is_symlink() and read_manifest(bundle) == written and not (bundle / "triton").exists()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["bundle", "link", "page"]
    monkeypatch.chdir(bundle)
    with refuses(UsageError, names=["current", "folder"]):
        export_bundle(ToyCaps(), ".")


def test_an_engine_that_was_built_later_is_found(
    served: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = {**served[1], "engines": {"tensorrt": {"file": None, "note": "no engine was built"}}}
    with refuses(CapszooError, names=["engine", "built"]):
        open_runner("tensorrt", tmp_path, manifest)
    (tmp_path / "tensorrt").mkdir()
    (tmp_path / "tensorrt" / "model.plan").write_text("x")
    monkeypatch.setattr(to_tensorrt, "TensorRTRunner", lambda path: path)
    assert open_runner("tensorrt", tmp_path, manifest) == tmp_path / "tensorrt" / "model.plan"


def test_command_line(tmp_path: Path) -> None:
    out = tmp_path / "digits"
    common = ["export", NAME, "--quick", "--batch-profile", "1,2,4"]
    done = CliRunner().invoke(
        app, [*common, "--out", str(out), "--uint8-input", "--outputs", "scores,couplings"]
    )
    assert done.exit_code == 0, done.output
    assert "parity with eager" in done.stdout and re.search(r"fp32, opset 20, batch 1 to 4", done.stdout)
    manifest = read_manifest(out)
    assert manifest["input"]["dtype"] == "uint8" and len(manifest["outputs"]) > 1
    again = CliRunner().invoke(app, ["check", str(out), "--json"])
    assert again.exit_code == 0 and json.loads(again.stdout)["passed"] is True


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--out", "x.onnx", "--format", "aoti"], "is one file"),
        (["--out", "x.onnx", "--triton"], "is one file"),
        (["--out", "x", "--triton-backend", "python"], "add --triton"),
        (["--out", "x", "--optimization-level", "1"], "without TensorRT"),
        ([], "Missing option '--out'"),
    ],
)
def test_command_line_refuses(
    extra: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["export", NAME, *extra])
    assert done.exit_code == 2 and message in done.stderr
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_executorch_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "executorch", None)
    with refuses(to_onnx.ExportError, names=["executorch", "pip install"]):
        export_bundle(ToyCaps().eval(), tmp_path / "toy", formats=("executorch",))
    assert not list(tmp_path.iterdir())


def test_a_network_that_takes_no_single_image_is_exported_as_a_graph_alone(tmp_path: Path) -> None:
    net = capszoo.create_model("capsnet_em_norb_small", in_chans=2)
    with refuses(UsageError, names=["2", "--out", "FILE.onnx"]):
        export_bundle(net, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())
