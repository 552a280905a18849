"""Files of the page that classifies in the browser, for ``make site``: model, preprocessing, ONNX Runtime.

The model is exported through the gate. ONNX Runtime's files come from its npm package and are placed beside the page;
none of them are in the repository.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import capszoo
from capszoo.explain import explain
from capszoo.export import to_onnx
from capszoo.inference import label_names, load_model
from capszoo.preprocess import model_transform
from capszoo.scores import score_kind

#: The model of the page: 279,024 parameters, couplings over a grid of 7x7.
MODEL = "resnet20_routingcaps.mnist"

#: npm's package and version.
RUNTIME = "onnxruntime-web@1.30.0"

RUNTIME_FILES = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


def place_demo(folder: Path, cache: Path) -> None:
    """Write the files into a folder.

    Args:
        folder: folder of the page's static files.
        cache: folder that stores npm's package between builds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    net = load_model(MODEL, device="cpu")
    report = to_onnx.export(net, folder / "model.onnx", name=MODEL, outputs=("scores", "couplings"), batch=1)
    assert report.passed
    transform, digits = model_transform(net), Path(capszoo.__file__).parent / "assets"
    centres = explain(net, digits / "digit_0.png").centres
    about = {
        "name": MODEL,
        "size": list(transform.size),
        "mean": transform.mean[0],
        "std": transform.std[0],
        "labels": label_names(net),
        "score_kind": score_kind(net),
        "centres": [[axis.first, axis.step] for axis in centres],
        "gate": [[step.name, step.passed] for step in report.gate],
        "digits": [_data_url(digits / f"digit_{k}.png") for k in range(10)],
    }
    (folder / "model.json").write_text(json.dumps(about), encoding="utf-8")
    source = Path(__file__).resolve().parents[2] / "capszoo" / "app" / "draw.js"
    shutil.copyfile(source, folder / "draw.js")
    _runtime(folder, cache)


def _data_url(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


def _runtime(folder: Path, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / f"{RUNTIME.replace('@', '-')}.tgz"
    if not archive.is_file():
        if shutil.which("npm") is None:
            raise SystemExit("error: the site needs npm for ONNX Runtime's files (Debian: apt install npm)")
        done = subprocess.run(["npm", "pack", RUNTIME, "--silent"], cwd=cache, capture_output=True, text=True)
        if done.returncode or not archive.is_file():
            raise SystemExit(f"error: npm could not fetch {RUNTIME}: {done.stderr.strip()[-300:]}")
    with tarfile.open(archive) as tar:
        for name in RUNTIME_FILES:
            member = tar.extractfile(f"package/dist/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
