"""Runtimes that are not ours: a model of each routing in other readers, a bundle in Triton, a folder in transformers.

Values are compared; Core ML, which runs on a Mac, only converts.
"""

from __future__ import annotations

import ctypes.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import capszoo
from capszoo.export import to_executorch
from capszoo.export.bundle import compare_bundle, export_bundle
from capszoo.export.compare import EagerRunner, OnnxRunner, compare_outputs
from capszoo.export.prepare import prepare
from capszoo.export.to_onnx import export
from capszoo.inference import load_model
from capszoo.preprocess import load_image, model_transform
from capszoo.recipes.publish import publish
from tests.support import zoo
from tests.support.toys import ToyCaps

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.slow

Run = Callable[[np.ndarray], np.ndarray]


def of_environment(name: str) -> object:
    return pytest.importorskip(name, reason=f"needs {name}: make test-runtimes runs this in its environment")


def openvino(path: Path) -> Run:
    ov = of_environment("openvino")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = ov.Core().compile_model(ov.convert_model(path), "CPU", settings)  # type: ignore[attr-defined]
    return lambda images: compiled(images)[0]


def onnxsim(path: Path) -> Run:
    simplified, same = of_environment("onnxsim").simplify(onnx.load(path))  # type: ignore[attr-defined]
    assert same
    runner = OnnxRunner(simplified.SerializeToString(), threads=1)
    return lambda images: runner(images)[0]


def check(model: torch.nn.Module, run: Run, tolerance: float) -> None:
    """Equal to eager PyTorch at batches that no exporter saw."""
    eager = EagerRunner(model)
    for batch in (1, 2, 5):
        images = zoo.images(model, batch).numpy()
        found = compare_outputs(eager(images), [run(images)])
        print(f"batch {batch}: {found.relative:.1e} of the largest output")  # pytest -rP shows it
        assert found.passed(tolerance), f"batch {batch}: {found.relative:.1e} of the largest output"


@pytest.fixture(scope="module", params=zoo.PER_ROUTING)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.nn.Module]:
    torch.manual_seed(0)
    model = zoo.small(request.param)
    zoo.calibrate(model)
    path = tmp_path_factory.mktemp(request.param) / "model.onnx"
    export(model.eval(), path, batch=(1, 2, 5), gate="quick")
    return path, model


@pytest.mark.parametrize("reader", [openvino, onnxsim])
def test_a_reader_gives_the_same_scores(
    reader: Callable[[Path], Run], exported: tuple[Path, torch.nn.Module]
) -> None:
    path, model = exported
    check(model, reader(path), 1e-4)


@pytest.mark.parametrize("name", ["resnet20_routingcaps.mnist", "idpa_cnn.mnist"])
def test_dynamic_quantisation_reads_the_digits(name: str, tmp_path: Path) -> None:
    """Trained weights and pictures: with random ones of IDPA, its rounding moves a score by half of the largest."""
    from onnxruntime.quantization import quantize_dynamic

    model = load_model(name, device="cpu")
    export(model, tmp_path / "model.onnx", batch=(1, 2, 5), gate="quick")
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "int8.onnx")
    digits = sorted(Path(capszoo.__file__).with_name("assets").glob("digit_*.png"))
    images = torch.stack([model_transform(model)(load_image(file)) for file in digits]).numpy()
    found = OnnxRunner(str(tmp_path / "int8.onnx"), threads=1)(images)[0]
    assert [f"digit_{best}.png" for best in found.argmax(1)] == [file.name for file in digits]


@pytest.mark.parametrize("name", zoo.PER_ROUTING)
def test_core_ml_converts(name: str) -> None:
    ct = of_environment("coremltools")
    program = prepare(zoo.small(name).eval(), batch=1).trace().run_decompositions({})
    for node in program.graph.nodes:  # an operator that coremltools 9 lacks, in the program of IDPA
        if node.target is torch.ops.aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    converted = ct.convert(program, convert_to="mlprogram", skip_model_load=True)  # type: ignore[attr-defined]
    assert len(converted.get_spec().description.output) == 1


# -- ExecuTorch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.PER_ROUTING)
def test_executorch_runs_each_routing(name: str, tmp_path: Path) -> None:
    of_environment("executorch")
    torch.manual_seed(0)
    model = zoo.small(name).eval()
    zoo.calibrate(model)
    # the gate compares its values; while it lowers, torch may bind the batch to less than 16
    entry = to_executorch.write(prepare(model, batch=(1, 2, 17)), tmp_path)
    assert entry["share_of_largest_output"] <= 1e-4
    weights = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    assert entry["bytes"] == (tmp_path / "model.pte").stat().st_size < 1.1 * weights + 200_000, (
        "no weights twice"
    )


def test_executorch_in_a_bundle(tmp_path: Path) -> None:
    of_environment("executorch")
    torch.manual_seed(0)
    model = ToyCaps().eval()
    manifest = export_bundle(
        model, tmp_path / "toy", formats=("onnx", "executorch"), gate="quick", batch=(1, 2, 4)
    )
    assert "model.pte" in manifest["files"] and manifest["engines"]["executorch"]["file"] == "model.pte"
    assert ["ExecuTorch against eager", True] in [
        [step["name"], step["passed"]] for step in manifest["gates"]
    ]
    found = compare_bundle(tmp_path / "toy", ("onnxruntime", "executorch"), batches=(1, 4), repeats=2)
    assert found["differences"][0]["relative"] < 1e-5 and len(found["timings"]) == 4


# -- Triton Inference Server --------------------------------------------------------------------------------------

#: Where scripts/setup_beside.sh puts Triton's server, and a numpy of the version that its Python backend knows.
TRITON = Path(sys.prefix) / "triton"


@contextmanager
def triton_server(repository: Path, folder: Path) -> Iterator[str]:
    """Triton's server with its Python backend on a port of this machine, until it is ready; its address.

    The backend's Python is the system's, which sees no variables: numpy and ONNX Runtime are put where it looks.
    """
    server, version = TRITON / "pytriton" / "tritonserver", ".".join(map(str, sys.version_info[:2]))
    if not server.is_dir():
        pytest.skip("needs Triton's server: make test-runtimes runs this in its environment")
    if not ctypes.util.find_library(f"python{version}"):
        pytest.skip(f"needs libpython{version} of the system, which Triton's Python backend loads")
    import onnxruntime

    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    parts = [
        *(server / "backends" / "python").iterdir(),
        *(server / "python_backend_stubs" / version).iterdir(),
    ]
    for part in (*parts, TRITON / "numpy", TRITON / "numpy.libs", Path(onnxruntime.__file__).parent):
        (backend / part.name).symlink_to(part)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        server / "bin" / "tritonserver",
        f"--model-repository={repository}",
        f"--backend-directory={backend.parent}",
        "--http-address=127.0.0.1",
        f"--http-port={port}",
        "--allow-grpc=false",
        "--allow-metrics=false",
    ]
    log = folder / "log"
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready")
                    break
                except OSError:
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.1)
            else:
                pytest.fail(log.read_text())
            yield f"http://127.0.0.1:{port}/v2/models"
        finally:
            process.terminate()


def asked(address: str, question: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if question is None else json.dumps(question).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data=data)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        pytest.fail(f"{error}: {error.read().decode()}")


def test_triton_serves_a_bundle(tmp_path: Path) -> None:
    model = load_model("resnet20_routingcaps.mnist", device="cpu")
    options: dict[str, Any] = dict(batch=(1, 4, 8), outputs=("scores", "couplings"), gate="quick")
    manifest = export_bundle(
        model, tmp_path / "digits", triton=True, triton_backends=("python", "onnxruntime"), **options
    )
    name, onnx_file = manifest["name"], tmp_path / "digits" / "model.onnx"
    config = tmp_path / "digits" / "triton-python" / name / "config.pbtxt"
    text = config.read_text()  # four single images that arrive within ten seconds become one batch
    waiting = text.replace("max_queue_delay_microseconds: 500", "max_queue_delay_microseconds: 10000000")
    assert waiting != text
    config.write_text(waiting)
    local = OnnxRunner(str(onnx_file), threads=1)
    images = zoo.images(model, 8).numpy()

    with triton_server(config.parent.parent, tmp_path) as address:

        def infer(part: np.ndarray, outputs: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
            tensor = {"name": "input", "shape": part.shape, "datatype": "FP32", "data": part.ravel().tolist()}
            question = {"inputs": [tensor], **({"outputs": outputs} if outputs else {})}
            return asked(f"{address}/{name}/infer", question)["outputs"]

        for count in (4, 8):  # the sizes that the configuration prefers are not held back
            for found, expected in zip(infer(images[:count]), local(images[:count]), strict=True):
                values = np.array(found["data"], np.float32).reshape(found["shape"])
                assert np.array_equal(values, expected), f"batch {count}: {found['name']}"
        with ThreadPoolExecutor(4) as pool:
            single = list(pool.map(infer, np.split(images[:4], 4)))
        scores = np.array([found[0]["data"] for found in single], np.float32)
        assert np.allclose(scores, local(images[:4])[0], atol=1e-6), "each request has its own answer"
        (statistics,) = asked(f"{address}/{name}/stats")["model_stats"]
        counts = (statistics["inference_count"], statistics["execution_count"])
        assert counts == (4 + 4 + 8 + 4, 4), "the warm-up, two batches, and one of the single images"
        (named,) = infer(images[:4], [{"name": "scores", "parameters": {"classification": 1}}])
        labels = [entry.split(":")[1:] for entry in named["data"]]
        best = local(images[:4])[0].argmax(1)
        assert labels == [[str(i), manifest["labels"][i]] for i in best], "labels.txt is found"


def test_triton_takes_the_configuration_of_its_onnxruntime_backend(tmp_path: Path) -> None:
    """The server at hand has no such backend: it stops there, after it has read the configuration."""
    torch.manual_seed(0)
    export_bundle(ToyCaps().eval(), tmp_path / "toy", triton=True, gate="quick")
    with pytest.raises(AssertionError, match="unable to find backend library for backend 'onnxruntime'"):
        with triton_server(tmp_path / "toy" / "triton", tmp_path):
            pass


# -- transformers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["resnet20_routingpool.cifar10", "resnet20_idpa.cifar10", "efficient_capsnet.mnist"]
)
def test_transformers_loads_a_published_folder(name: str, tmp_path: Path) -> None:
    transformers: Any = of_environment("transformers")
    publish(name, "user/repository", dry_run=True, out=tmp_path / "folder")  # files in half precision
    net = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "folder").eval()
    ours = load_model(name, device="cpu")
    images = zoo.images(ours, 2)
    with torch.inference_mode():
        assert torch.equal(net(pixel_values=images).logits, ours(images))
    if ours.in_chans != 3:  # the card says that the pipeline makes images RGB
        return
    picture = Image.effect_noise((64, 64), 64).convert("RGB")
    picture.save(tmp_path / "noise.png")
    found = transformers.pipeline("image-classification", model=str(tmp_path / "folder"))(picture, top_k=3)
    assert [entry["label"] for entry in found] == [
        entry.label for entry in capszoo.load(name).predict(tmp_path / "noise.png", topk=3).top
    ]
