"""Models of the zoo, at test size, through the gate: one per routing, and all of them in the slow sweep."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest

from capszoo.errors import UsageError
from capszoo.export.compare import EagerRunner, OnnxRunner, compare_outputs
from capszoo.export.prepare import prepare
from capszoo.export.to_onnx import ExportError, ExportReport, export
from tests.support import warm, zoo
from tests.support.errors import refuses

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

#: The model of each routing that is exported in the least time.
PER_ROUTING = (
    "capsnet_dynamic",
    "capsnet_em_norb_small",
    "efficient_capsnet",
    "encapnet6",  # without couplings
    "resnet20_heinsen",
    "resnet20_idpa",
    "resnet20_routingpool",
)

#: Smallest, usual and largest batch: fixed at 1, or free.
BATCHES = {"batch1": (1, 1, 1), "dynamic": (1, 2, 3)}

#: Their untrained couplings in half precision are up to 0.09 of the largest from those in single, on one of the gate's
#: images: the features that they are routed from are half already. By the processor's roundings they are above or
#: below the gate's limit of 0.02 (scores pass).
HALF_COUPLINGS_UNSURE = ("capsnet6_dynamic", "capsnet6_em", "capsnet_em_resnet")

#: Twenty residual blocks and more.
DEEP = ("resnet44_routingpool", "resnet56_routingpool")


def through_the_gate(
    name: str, precision: str, folder: Path, batch: str = "dynamic", couplings: bool = False
) -> ExportReport | None:
    """Export, gate and compare; None where couplings are refused, as some must be and some may be."""
    model = zoo.small(name)
    if precision == "fp16" and name in DEEP:
        warm(model, zoo.images(model, 8))
    else:
        zoo.calibrate(model)
    outputs = ("scores", "couplings") if couplings else ("scores",)
    refused = couplings and not zoo.has_couplings(model)
    path = folder / "model.onnx"
    options = dict(precision=precision, gate="quick", batch=BATCHES[batch], outputs=outputs)
    if refused:
        with pytest.raises(UsageError, match="has no (capsules|couplings)"):
            export(model.eval(), path, **options)  # type: ignore[arg-type]
        assert list(folder.iterdir()) == []
        return None
    may_fail = couplings and precision == "fp16" and name in HALF_COUPLINGS_UNSURE
    try:
        report = export(model.eval(), path, **options)  # type: ignore[arg-type]
    except ExportError as error:
        if not may_fail:
            raise
        assert re.search("of the largest output .* the limit is 0.02", str(error))
        assert list(folder.iterdir()) == []
        return None
    assert report.passed and report.max_rel_diff <= report.tolerance
    assert report.input_shape[0] == (1 if batch == "batch1" else "batch")
    assert any(output.startswith("couplings") for output in report.outputs) is couplings
    if precision == "fp16":
        assert report.precision_map["weights"]["float16"] > report.precision_map["weights"].get("float32", 0)
    return report


@pytest.mark.parametrize(
    ("precision", "batch", "couplings"),
    [
        pytest.param("fp32", "dynamic", True, id="fp32-dynamic-couplings"),
        pytest.param("fp16", "batch1", False, id="fp16-batch1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", PER_ROUTING)
def test_one_per_routing(name: str, precision: str, batch: str, couplings: bool, tmp_path: Path) -> None:
    report = through_the_gate(name, precision, tmp_path, batch, couplings)
    assert (report is None) == (couplings and name == "encapnet6")  # the one without couplings


@pytest.mark.slow
def test_engines_of_a_graph() -> None:
    """IDPA's windows are written in chunks, for either target; few classes are masked for a CPU."""
    for num_classes, masked in ((16, "masked"), (17, "reference")):
        prepared = prepare(zoo.small("idpa_cnn", num_classes=num_classes))
        for target, classes in (("onnx_cpu", masked), ("gpu", "reference")):
            prepared.trace(target)
            engines = {name.rpartition(".")[2]: engine for name, engine in prepared.engines.items()}
            assert engines == {"conv1": "chunked", "conv2": "chunked", "classes": classes}
    prepared = prepare(zoo.small("capsnet_em_norb_small"))
    for target, windows in (("onnx_cpu", "chunked"), ("gpu", "frozen")):  # EM's, for a CPU alone
        prepared.trace(target)
        engines = {name.rpartition(".")[2]: engine for name, engine in prepared.engines.items()}
        assert engines == {"caps1": windows, "caps2": windows, "class_caps": "frozen"}


@pytest.mark.slow
def test_runtime(tmp_path: Path) -> None:
    model, file = zoo.small("capsnet_em_norb_small").eval(), tmp_path / "x.onnx"
    parts = export(model, file, check=False).num_nodes
    whole = export(model, file, check=False, runtime="gpu").num_nodes
    half = export(model, file, check=False, precision="fp16").num_nodes
    assert parts > 1.5 * max(whole, half), "half precision is for GPUs too"
    job = prepare(model)
    assert len(job.trace("onnx_cpu").graph.nodes) > 1.5 * len(job.trace().graph.nodes)
    with refuses(UsageError, names=["tpu"]):
        export(model, tmp_path / "y.onnx", runtime="tpu")
    assert not (tmp_path / "y.onnx").exists()


def test_a_plain_network_has_no_couplings(tmp_path: Path) -> None:
    assert through_the_gate("cnn6", "fp32", tmp_path, couplings=True) is None


@pytest.mark.slow
@pytest.mark.parametrize("couplings", [False, True], ids=["scores", "couplings"])
@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", zoo.names())
def test_every_model(name: str, precision: str, batch: str, couplings: bool, tmp_path: Path) -> None:
    through_the_gate(name, precision, tmp_path, batch, couplings)


@pytest.mark.parametrize(
    "name", zoo.slow_unless(("capsnet_dynamic", "capsnet_em_norb_small", "resnet20_idpa"), PER_ROUTING)
)
def test_timms_exporter_writes_a_file_for_every_batch(name: str, tmp_path: Path) -> None:
    """timm's check runs the batch of its example alone, which TorchScript's exporter may have written as constants."""
    from timm.utils.onnx import onnx_export

    model, path = zoo.small(name).eval(), tmp_path / "timm.onnx"
    size = tuple(zoo.images(model, 1).shape[1:])
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        onnx_export(model, str(path), batch_size=2, input_size=size)
    for batch in (1, 5):
        images = zoo.images(model, batch).numpy()
        found = compare_outputs(EagerRunner(model)(images), OnnxRunner(str(path))(images))
        assert found.passed(1e-4), found
