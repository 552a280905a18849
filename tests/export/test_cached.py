"""``capszoo predict --runtime``: a cached ONNX file gives PyTorch's answers, for its own weights alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.support.errors import refuses

pytest.importorskip("onnxruntime")

from capszoo._pretrained.catalogue import checkpoints
from capszoo.cli import app
from capszoo.errors import CapszooError, UsageError
from capszoo.export import cached
from capszoo.export.cached import export_to_cache, find_cached, weights_file
from tests.support import no_home

MODEL = "resnet20_routingcaps.mnist"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds one exported model."""
    folder = tmp_path_factory.mktemp("onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAPSZOO_CACHE", str(folder))
        export_to_cache(MODEL)
    return folder


@pytest.fixture(scope="module")
def images(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Digits as they come: plain, transparent, large, 16 bits; and one that is no image."""
    folder = tmp_path_factory.mktemp("images")
    with Image.open(root / "capszoo" / "assets" / "digit_3.png") as opened:
        digit = opened.convert("L")
    digit.save(folder / "a.png")
    ink = Image.new("RGBA", digit.size, (0, 0, 0, 0))
    ink.putalpha(digit)
    ink.save(folder / "b.png")
    digit.resize((57, 81)).convert("RGB").save(folder / "c.png")
    Image.fromarray(np.asarray(digit, np.uint16) * 257).save(folder / "d.png")
    (folder / "e.png").write_text("no image")
    return sorted(folder.iterdir())


def _predict(cache: Path, *arguments: object, code: int = 0) -> Any:
    found = CliRunner().invoke(
        app, ["predict", *map(str, arguments), "--json"], env={"CAPSZOO_CACHE": str(cache)}
    )
    assert found.exit_code == code, found.output
    return json.loads(found.stdout)


@pytest.mark.parametrize("options", [(), ("--invert", "--background", "white"), ("--fit", "--topk", "1")])
def test_both_runtimes_answer_the_same(cache: Path, images: list[Path], options: tuple[str, ...]) -> None:
    torch_said = _predict(cache, MODEL, *images, "--runtime", "torch", *options, code=1)
    onnx_said = _predict(cache, MODEL, *images, "--runtime", "auto", *options, code=1)
    assert (torch_said["runtime"], onnx_said["runtime"]) == ("torch", "onnx")
    assert torch_said["score_kind"] == onnx_said["score_kind"] == "lengths"
    assert len(onnx_said["results"]) == len(images)
    for one, other in zip(torch_said["results"], onnx_said["results"], strict=True):
        assert one.get("notes") == other.get("notes") and one.get("error") == other.get("error")
        for a, b in zip(one.get("predictions", ()), other.get("predictions", ()), strict=True):
            assert (a["index"], a["label"]) == (b["index"], b["label"])
            assert a["score"] == pytest.approx(b["score"], abs=1e-5)
            assert a["probability"] == pytest.approx(b["probability"], abs=1e-5)


def test_changed_code_exports_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSZOO_CACHE", str(cache))
    entry = find_cached(MODEL)
    assert entry is not None
    monkeypatch.setattr("capszoo.export.bundle.export_bundle", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export_to_cache(MODEL)
    assert find_cached(MODEL) == entry, "another process may have exported it meanwhile"
    monkeypatch.setattr(cached, "_source_digest", lambda: "changed")
    assert find_cached(MODEL) is None


def test_without_a_home_folder_torch_answers(images: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    no_home(monkeypatch)
    found = CliRunner().invoke(app, ["predict", MODEL, str(images[0]), "--json"])
    assert found.exit_code == 0 and json.loads(found.stdout)["runtime"] == "torch"
    assert "none: this user has no home folder" in CliRunner().invoke(app, ["doctor", "--json"]).stdout
    with refuses(CapszooError, names=["CAPSZOO_CACHE"]):
        export_to_cache(MODEL)


def test_a_cache_that_cannot_be_written_is_named_with_its_variable(
    tmp_path: Path, cache: Path, images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CAPSZOO_CACHE", str(tmp_path / "file"))
    found = CliRunner().invoke(app, ["predict", MODEL, str(images[0]), "--runtime", "onnx"])
    assert found.exit_code == 1 and "file" in found.stderr
    (variable,) = re.findall(r"set (\w+)", found.stderr)
    monkeypatch.setenv(variable, str(cache))
    assert CliRunner().invoke(app, ["predict", MODEL, str(images[0]), "--runtime", "onnx"]).exit_code == 0


def test_auto_exports_nothing(tmp_path: Path, images: list[Path]) -> None:
    assert _predict(tmp_path, MODEL, images[0])["runtime"] == "torch"
    assert not list(tmp_path.iterdir())


def test_a_cached_file_answers_without_torch(cache: Path, root: Path, images: list[Path]) -> None:
    code = (
        "import sys\nfrom capszoo.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "predict", MODEL, str(images[0])],
        env={"PYTHONPATH": str(root), "CAPSZOO_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert " 3 " in done.stdout and done.stderr.splitlines()[-1] == "False", done.stderr


def test_metadata_may_be_in_another_folder_than_the_weights(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPSZOO_CACHE", str(cache))
    entry = find_cached(MODEL)
    monkeypatch.setenv("CAPSZOO_CACHE", str(tmp_path))
    apart = [
        name
        for name in checkpoints()
        if (file := weights_file(name)) is not None and not file.with_suffix(".json").is_file()
    ]
    assert apart  # weights-large/ of a checkout
    assert entry is not None
    for name in apart[:2]:
        place = cached._place(name, None, None)
        assert place is not None and find_cached(name) is None
        shutil.copytree(entry, place)
        assert find_cached(name) == place


def test_other_weights_metadata_or_bytes_are_not_answered_for(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPSZOO_CACHE", str(cache))
    found, weights = find_cached(MODEL), weights_file(MODEL)
    assert found is not None and weights is not None
    assert find_cached("idpa_cnn.mnist") is None
    assert find_cached(MODEL, img_size=(32, 32)) is None and find_cached(MODEL, routing_iters=1) is None
    copy = tmp_path / weights.name
    shutil.copyfile(weights, copy)
    metadata = json.loads(weights.with_suffix(".json").read_text(encoding="utf-8"))
    copy.with_suffix(".json").write_text(json.dumps({**metadata, "label_names": list("abcdefghij")}))
    assert find_cached(str(copy)) is None  # other labels
    shutil.copyfile(weights.with_suffix(".json"), copy.with_suffix(".json"))
    assert find_cached(str(copy)) == found  # the same weights under another path
    copy.write_bytes(weights.read_bytes() + b"\0")
    assert find_cached(str(copy)) is None
    damaged = tmp_path / "damaged"
    shutil.copytree(cache, damaged)
    monkeypatch.setenv("CAPSZOO_CACHE", str(damaged))
    file = damaged / found.relative_to(cache) / "model.onnx"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert find_cached(MODEL) is None
    (file.parent / "manifest.json").write_text("{")
    assert find_cached(MODEL) is None
    assert export_to_cache(MODEL) == find_cached(MODEL) == file.parent  # replaced, though it is no bundle now


def test_an_architecture_without_weights_is_not_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "resnet20_routingcaps_mini"
    run.mkdir()
    file = weights_file(MODEL)
    assert file is not None
    for suffix in (".safetensors", ".json"):
        shutil.copy(file.with_suffix(suffix), run / f"{run.name}.mnist{suffix}")
    monkeypatch.chdir(tmp_path)
    assert weights_file(f"./{run.name}") == Path(run.name, f"{run.name}.mnist.safetensors")
    monkeypatch.setattr(cached, "architectures", lambda: {run.name: {}})
    assert weights_file(run.name) is None


def test_wrong_runtimes_are_refused(cache: Path, images: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSZOO_CACHE", str(cache))
    for arguments, said in (
        (("--runtime", "onx"), "unknown runtime 'onx': did you mean 'onnx'"),
        (("--runtime", "onnx", "--device", "cuda"), "computes on the CPU, not on cuda"),
        (("--background", "pink"), "no background 'pink'"),
    ):
        found = CliRunner().invoke(app, ["predict", MODEL, str(images[0]), *arguments])
        assert found.exit_code == 2 and said in found.stderr, found.output
    with refuses(UsageError, names=["zoo", "weights"]):
        export_to_cache("hf-hub:nobody/nothing")
