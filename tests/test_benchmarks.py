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
from torch import nn

from tests.support import load_script
from tests.support.errors import assert_names, refuses


@pytest.fixture(scope="module")
def bench(root: Path) -> ModuleType:
    return load_script(root / "benchmarks" / "models.py")


def test_specs(bench: ModuleType) -> None:
    assert bench.parse_spec("idpa_resnet") == ("idpa_resnet", {})
    expected = {"routing_iters": 1, "pool": "avg", "img_size": 28}
    assert bench.parse_spec("net:routing_iters=1,pool=avg,img_size=28") == ("net", expected)
    with pytest.raises(SystemExit, match="argument=value"):
        bench.parse_spec("net:routing_iters")


def test_choice(bench: ModuleType) -> None:
    everything = bench.chosen([])
    assert set(bench.VARIANTS) < set(everything)
    assert bench.chosen(["idpa_cnn*", "idpa_cnn"]) == ["idpa_cnn", "idpa_cnn_cifar100"]
    with refuses(SystemExit, names=["matches", "nothing"]):
        bench.chosen(["nothing*"])


def test_yardstick_is_the_cifar_resnet18(bench: ModuleType) -> None:
    model, size = bench.build(bench.YARDSTICK)
    assert size == (3, 32, 32)
    # torchvision's 11,689,512 with this stem and head
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    import torch

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


def test_ratio_is_the_median_of_pairs(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    # yardstick and model in turns; the second pair was disturbed, as a whole
    times = iter([1.0, 2.0, 10.0, 20.0, 1.0, 2.2])
    monkeypatch.setattr(bench, "timed", lambda run, device: next(times))
    milliseconds, ratio, left = bench.compare(lambda: None, lambda: None, 3, 0, torch.device("cpu"))
    assert ratio == 2.0 and milliseconds == 2200.0 and left is None
    # and the part, whose turn is the third
    times = iter([1.0, 2.0, 1.5, 10.0, 20.0, 15.0, 1.0, 2.0, 0.5])
    assert bench.compare(lambda: None, lambda: None, 3, 0, torch.device("cpu"), lambda: None)[1:] == (
        2.0,
        0.5,
    )


@pytest.mark.slow
def test_one_run(bench: ModuleType, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, str(root / "benchmarks" / "models.py"), "--models", "resnet20_routingcaps"]
    command += ["--iters", "1", "--warmup", "0", "--batch", "1", "--threads", "1", "--train", "--memory"]
    command += ["--less", "layer3"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "| `resnet20_routingcaps` | 279,024 |" in done.stdout
    (row,) = json.loads(out.read_text())["rows"]
    assert row["forward_ratio"] > 0 and row["train_ratio"] > 0
    assert row["forward_less"] < row["forward_ratio"] and row["train_less"] < row["train_ratio"]
    assert row["peak_mib"] > row["peak_over_start_mib"] > 0


@pytest.mark.slow
def test_two_checkouts_in_turns(root: Path) -> None:
    """A checkout against itself: both processes answer."""
    command = [sys.executable, "benchmarks/versions.py", str(root), "--models", "resnet20_routingcaps"]
    command += ["--batch", "2", "--iters", "2", "--threads", "1", "--train", "--memory"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if "`" in line]
    assert [row[2] for row in rows] == ["forward, ms", "training step, ms", "training, MiB"]
    assert all(float(row[3]) > 0 and float(row[4]) > 0 for row in rows)


def test_graphs_are_compared_by_content(root: Path, tmp_path: Path) -> None:
    """Names and the order of nodes do not matter; weights, attributes and wiring do."""
    import onnx
    from onnx import TensorProto, helper

    versions = load_script(root / "benchmarks" / "versions.py")

    def write(
        name: str,
        prefix: str = "",
        weight: float = 1.0,
        axis: int = 1,
        swapped: bool = False,
        bias_first: bool = False,
    ) -> Any:
        tensor = helper.make_tensor(prefix + "w", TensorProto.FLOAT, [1], [weight])
        ends = [
            helper.make_tensor_value_info(prefix + end, TensorProto.FLOAT, ["b", 3]) for end in ("x", "y")
        ]
        inputs = [prefix + "x", prefix + "w"]
        parts = [
            helper.make_node("Sub", inputs[::-1] if swapped else inputs, [prefix + "s"]),
            helper.make_node("Neg", inputs[1:], [prefix + "n"]),
        ]
        nodes = [
            *(parts[::-1] if bias_first else parts),
            helper.make_node("Add", [prefix + "s", prefix + "n"], [prefix + "t"]),
            helper.make_node("Softmax", [prefix + "t"], [prefix + "y"], axis=axis),
        ]
        file = tmp_path / f"{name}.onnx"
        onnx.save(helper.make_model(helper.make_graph(nodes, "g", [ends[0]], [ends[1]], [tensor])), file)
        return versions.graph_digest(file)

    plain = write("a")
    assert plain[0] == 4 and plain == write("b", prefix="other/") == write("b", bias_first=True)
    for change in ({"weight": 2.0}, {"axis": 0}, {"swapped": True}):
        assert plain != write("c", **change), change


def test_times_of_another_processor_are_measured_again(root: Path) -> None:
    export = load_script(root / "benchmarks" / "export.py")
    at = {"ms": 1.0, "eager": 1.0, "resnet18": 1.0}
    row = export.Row("m", 1, 1, 0.0, {"1": at}, "here")
    assert row.missing([1, 16], "here", False) == [16] and row.missing([1], "here", False) == []
    assert row.missing([1], "here", True) == [1], "torch.compile was not measured"
    assert row.missing([1], "there", False) == [] and row.missing([1, 16], "there", False) == [1, 16]
    row.on("here")
    assert row.times
    row.on("there")
    assert not row.times and row.processor == "there"


@pytest.mark.slow
def test_two_checkouts_exported(root: Path) -> None:
    """A checkout against itself writes the same graph."""
    command = [sys.executable, "benchmarks/versions.py", str(root), "--models", "resnet20_routingcaps"]
    done = subprocess.run([*command, "--onnx", "--threads", "1"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the same graph" in done.stdout


def test_a_folder_without_a_checkout_is_refused(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/versions.py", str(tmp_path), "--models", "resnet20_routingcaps"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert_names(done.stderr, ["folder", "checkout"])
    assert done.returncode == 2


def test_capconv_without_capsules(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from capszoo.layers.capconv import CapConv, MasterAide, SquashGroups

    monkeypatch.setattr(SquashGroups, "forward", SquashGroups.forward)  # put back at the end
    monkeypatch.setattr(MasterAide, "forward", MasterAide.forward)
    monkeypatch.setattr(CapConv, "engines", CapConv.engines)
    layer, x = MasterAide(8, 8, 3, 1, 4, "both").eval(), torch.randn(2, 8, 5, 5)
    with torch.no_grad():
        whole = layer(x)
        bench.leave_capsules_out()
        plain = layer(x)
        expected = layer.master_bn(layer.master(x)).relu() + layer.aide_bn(layer.aide(x)).relu()
    torch.testing.assert_close(plain, expected)
    assert not torch.allclose(plain, whole)


@pytest.fixture(scope="module")
def routing(root: Path) -> ModuleType:
    return load_script(root / "benchmarks" / "routing.py")


def test_layers_equal_their_references(routing: ModuleType) -> None:
    """What is timed is the same function: values in float64, of every layer of the table."""
    taken: dict[str, set[str]] = {}
    for case in routing.cases():
        for names in (("native",), ("blocked", "recompute", "one_convolution")):
            with routing.record_engines() as choices, routing.use_engines(*names):
                assert routing.difference(case, batch=1) < 1e-9, (case.name, names)
            taken.setdefault(case.name, set()).update(choice.engine.name for choice in choices)
    # transforms shared over the grid, and routing pooling, are computed in one way in float64
    assert sum(engines <= {"reference"} for engines in taken.values()) <= 2, taken


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


def test_floor_is_the_larger_limit(routing: ModuleType) -> None:
    machine = routing.Machine(macs=1e9, bytes=1e8)
    assert machine.floor(2e9, 1e8) == 2.0 and machine.floor(1e9, 3e8) == 3.0


def test_peak_of_step_counts_what_is_alive_at_once(routing: ModuleType) -> None:
    torch = routing.torch

    def step() -> None:
        for _ in range(4):  # one at a time
            torch.empty(2**20)

    def hoard() -> None:
        _ = [torch.empty(2**20) for _ in range(4)]

    assert routing.peak_of_step(step) == 4 * 2**20
    assert routing.peak_of_step(hoard) == 16 * 2**20


@pytest.fixture(scope="module")
def exports(root: Path) -> ModuleType:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    return load_script(root / "benchmarks" / "export.py")


def test_einsum_graphs_are_the_same_function(exports: ModuleType) -> None:
    torch = exports.torch
    for name, (layer, naive, size) in exports.layer_cases().items():
        x = torch.randn(2, *size)
        with torch.no_grad():
            ours, theirs = layer.eval()(x), naive(x)
        assert torch.allclose(ours, theirs, atol=1e-4), name


def test_export_targets_are_told_reached_or_missed(exports: ModuleType) -> None:
    def row(model: str, eager: float, resnet18: float) -> object:
        return exports.Row(model, 1, 1, 0.0, {"1": {"ms": 1.0, "eager": eager, "resnet18": resnet18}})

    rows = [row("idpa_resnet", 1.2, 0.4), row("capsnet_dynamic", 0.9, 2.0), row("idpa_cnn", 2.0, 1.0)]
    assert exports.verdicts(rows) == [
        "missed: idpa_resnet at 2.50 × ResNet-18, target 2",
        "missed: capsnet_dynamic at batch 1 is slower than eager (0.90)",
        "reached: capsnet_dynamic at 0.50 × ResNet-18, target 0.6",
    ]
    assert "| `idpa_cnn` | 1 | 0.0 | 0e+00 | 1.0 | 2.00 | – | 1.00 |" in exports.table(rows)


def test_export_results_of_other_settings_are_not_mixed(exports: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    row = exports.Row("idpa_cnn", 1, 2, 0.0, {"1": {"ms": 1.0, "eager": 2.0, "resnet18": 3.0}})
    exports.write(file, {"idpa_cnn": row}, {"threads": 2})
    assert exports.read(file, {"threads": 2}) == {"idpa_cnn": row}
    with refuses(SystemExit, names=["figures", "settings"]):
        exports.read(file, {"threads": 1})
    assert exports.read(tmp_path / "none.json", {}) == {}


@pytest.mark.slow
def test_one_exported_model_is_timed(
    exports: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "FOLDER", tmp_path)
    assert exports.row_of("resnet20_routingpool").max_rel_diff <= 1e-4
    times = exports.time_model("resnet20_routingpool", 1, 1, False)
    assert set(times) == {"ms", "eager", "resnet18"} and min(times.values()) > 0
    assert "Conv" in "\n".join(exports.profile("resnet20_routingpool", 1, 1))


def test_two_values_of_a_threshold_are_compared(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from capszoo.layers._strided_conv import StridedConv2d

    script = load_script(root / "benchmarks" / "engines.py")
    chosen, by_products = [], StridedConv2d._by_products
    monkeypatch.setattr(
        StridedConv2d, "_by_products", lambda self, x: chosen.append(by_products(self, x)) or chosen[-1]
    )
    options = ["--batch", "2", "--train", "--autocast", "--iters", "1"]
    model = "capsnet_dynamic:stem_chans=8,caps_types=2"
    monkeypatch.setattr(sys, "argv", ["x", model, "--tuning", "strided_conv_min_kernel=99", *options])
    script.main()
    forward, step = capsys.readouterr().out.splitlines()[2:]
    assert "| forward |" in forward and "| training step |" in step
    assert chosen[-5:] == [True, False, True, False, True], "with, then without and with in turns"
    assert not any(chosen[:-5]), "without gradients"
    monkeypatch.setattr(sys, "argv", ["x", model, "--tuning", "no_such=1"])
    with pytest.raises(SystemExit):
        script.main()
    assert_names(capsys.readouterr().err, ["NAME=NUMBER", "NAME", "native_min_votes"])


def test_two_layouts_are_compared(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script(root / "benchmarks" / "engines.py")
    options = ["--batch", "2", "--train", "--autocast", "--compile", "--iters", "1", "--memory"]
    compiled: list[Any] = []

    def compile_(model: nn.Module, options: Any) -> nn.Module:
        layouts = {p.is_contiguous() for p in model.parameters() if p.dim() == 4 and min(p.shape[1:]) > 1}
        compiled.append((layouts, options))
        return model

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(script.subprocess, "run", lambda command, **_: compiled.append(command) or Printed())
    monkeypatch.setattr(sys, "argv", ["x", "resnet20_routingpool:depth=8", "--contiguous", *options])
    script.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert ["| forward |" in rows[0], "| training step |" in rows[1], "| 7 / 7 |" in rows[2]] == [True] * 3
    assert compiled[:4] == [({True}, {"layout_optimization": False}), ({False}, None)] * 2
    for command, which in zip(compiled[4:], ("with", "without"), strict=True):
        assert command[command.index("--peak") + 1] == which
        assert {"--contiguous", "--autocast", "--compile"} < set(command)


class Printed:
    """Of a process that ends with this line."""

    stdout = "7\n"


def test_the_picture_of_the_iterations_is_of_the_stored_results(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawing = load_script(root / "benchmarks" / "iterations.py")
    results = json.loads(drawing.RESULTS.read_text(encoding="utf-8"))
    specs = [drawing.spec(model, count) for model in drawing.MODELS.values() for count in drawing.ITERATIONS]
    assert [row["model"] for row in results["rows"]] == specs
    assert drawing.source(results) in drawing.PICTURE.read_text(encoding="utf-8")
    text = drawing.draw(results, tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert drawing.source(results) in text
