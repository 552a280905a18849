"""The model benchmark: names, table, and one real comparison of a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support import load_script
from tests.support.errors import refuses


@pytest.fixture(scope="module")
def bench(root: Path) -> ModuleType:
    return load_script(root / "benchmarks" / "models.py")


def test_yardstick_is_the_cifar_resnet18(bench: ModuleType) -> None:
    model, size = bench.build(bench.YARDSTICK)
    assert size == (3, 32, 32)
    # torchvision's 11,689,512 with this stem and head
    assert sum(p.numel() for p in model.parameters()) == 11_173_962

    features = model.eval().forward_features(torch.zeros(1, *size))
    assert features.shape == (1, 512, 4, 4)  # 32 / 8: neither the stem nor a max-pool halves


def test_multiply_adds(bench: ModuleType) -> None:
    assert bench.multiply_adds(bench.YARDSTICK) == pytest.approx(555.4, abs=0.1)
    assert bench.multiply_adds("encapnet_v1") == pytest.approx(1767.4, abs=0.1)
    # stem 3x3, 3 to 16; first stage: 6 convolutions 3x3 of 16 channels; on 32x32 positions
    stem, stage = 9 * 3 * 16 * 1024, 6 * 9 * 16 * 16 * 1024
    model, size = bench.build("resnet20_routingpool@layer1")
    assert bench.multiply_adds("resnet20_routingpool@layer1") == pytest.approx((stem + stage) / 1e6)
    assert model(bench.torch.zeros(2, *size)).shape == (2, 16)
    with refuses(SystemExit, names=["layer9", "layer1"]):
        bench.build("resnet20_routingpool@layer9")


@pytest.mark.slow
def test_one_run(bench: ModuleType, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, str(root / "benchmarks" / "models.py"), "--models", "resnet20_routingcaps"]
    command += ["--iters", "1", "--warmup", "0", "--batch", "1", "--threads", "1", "--train", "--memory"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "| `resnet20_routingcaps` | 279,024 |" in done.stdout
    (row,) = json.loads(out.read_text())["rows"]
    assert row["forward_ratio"] > 0 and row["train_ratio"] > 0
    assert row["peak_mib"] > row["peak_over_start_mib"] > 0


@pytest.mark.slow
def test_two_checkouts_in_turns(root: Path) -> None:
    """A checkout against itself: both processes answer, and write the same graph."""
    command = [sys.executable, "benchmarks/versions.py", str(root), "--models", "resnet20_routingcaps"]
    command += ["--batch", "2", "--iters", "2", "--threads", "1", "--train", "--memory"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if "`" in line]
    assert [row[2] for row in rows] == ["forward, ms", "training step, ms", "training, MiB"]
    assert all(float(row[3]) > 0 and float(row[4]) > 0 for row in rows)
    done = subprocess.run([*command, "--onnx"], cwd=root, capture_output=True, text=True)
    assert "the same graph" in done.stdout, done.stderr


def test_graphs_are_compared_by_content(root: Path, tmp_path: Path) -> None:
    """Names and the order of nodes do not matter; weights, attributes and wiring do."""
    onnx = pytest.importorskip("onnx")
    versions = load_script(root / "benchmarks" / "versions.py")
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[b, 3] x) => (float[b, 3] y) <float[1] w = {1.0}>
        { s = Sub (x, w) n = Neg (w) t = Add (s, n) y = Softmax <axis = 1> (t) }"""

    def digest(old: str = "", new: str = "") -> Any:
        assert old in text
        onnx.save(onnx.parser.parse_model(text.replace(old, new)), tmp_path / "net.onnx")
        return versions.graph_digest(tmp_path / "net.onnx")

    plain = digest()
    assert plain[0] == 4 and plain == digest("w", "v")
    assert plain == digest("s = Sub (x, w) n = Neg (w)", "n = Neg (w) s = Sub (x, w)")
    for change in (("1.0", "2.0"), ("axis = 1", "axis = 0"), ("(x, w)", "(w, x)")):
        assert plain != digest(*change), change


@pytest.fixture(scope="module")
def routing(root: Path) -> ModuleType:
    return load_script(root / "benchmarks" / "routing.py")


def test_layers_equal_their_references(routing: ModuleType) -> None:
    """What is timed is the same function: values in float64, of every layer of the table."""
    for case in routing.cases():
        for names in (("native",), ("blocked", "recompute", "one_convolution")):
            with routing.use_engines(*names):
                assert routing.difference(case, batch=1) < 1e-9, (case.name, names)


def test_stated_multiply_adds(routing: ModuleType) -> None:
    """Multiply-adds of an image against their derivation by hand."""
    # 1,152 x 10 votes of 16 numbers: 8 each to make, then 3 sums and 2 agreements
    assert routing.dynamic_case().macs == 1152 * 10 * 16 * (8 + 5)
    # IDPA's three layers at one pass and at two (7 x 7 and 5 x 5 windows, 800 children of 10 classes)
    one, two = (
        routing.conv_idpa_case(num_iters=t).macs
        + routing.conv_idpa_case(7, 1, t).macs
        + routing.fc_idpa_case(num_iters=t).macs
        for t in (1, 2)
    )
    assert (round(one / 1e6), round(two / 1e6)) == (44, 66)


@pytest.mark.slow
def test_one_exported_model_is_timed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exports = load_script(root / "benchmarks" / "export.py")
    monkeypatch.setattr(exports, "FOLDER", tmp_path)
    assert exports.row_of("resnet20_routingpool").max_rel_diff <= 1e-4
    times = exports.time_model("resnet20_routingpool", 1, 1, False)
    assert set(times) == {"ms", "eager", "resnet18"} and min(times.values()) > 0
    assert "Conv" in "\n".join(exports.profile("resnet20_routingpool", 1, 1))
    assert len(exports.time_layers(1)) == 4, "einsum graphs of the same functions"


def test_the_picture_of_the_iterations_is_of_the_stored_results(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawing = load_script(root / "benchmarks" / "iterations.py")
    results = json.loads(drawing.RESULTS.read_text(encoding="utf-8"))
    specs = [drawing.spec(model, count) for model in drawing.MODELS.values() for count in drawing.ITERATIONS]
    assert [row["model"] for row in results["rows"]] == specs
    assert drawing.source(results) in drawing.PICTURE.read_text(encoding="utf-8")
    text = drawing.draw(results, tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert drawing.source(results) in text
