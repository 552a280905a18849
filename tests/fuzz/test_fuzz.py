"""Seeded fuzzers: damaged and odd inputs of every kind end in one of our errors, or are taken; never in another error.

Each case is a function of its number. The quick tests run a few of each kind, `make test-slow` 13,500 in all; a line
of counts is printed with `-s`.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import random
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save

import capszoo
from capszoo._pretrained.catalogue import weights_entry
from capszoo._pretrained.info import WeightsInfo
from capszoo._utils.files import read_npz
from capszoo.cli import zoo
from capszoo.cli.common import MAX_MESSAGE, printable
from capszoo.cli.group import _one_line
from capszoo.data import load_dataset
from capszoo.data.readers import decode_image, read_cifar_binary, read_idx, read_norb_matrix, read_svhn_mat
from capszoo.errors import CapszooError
from capszoo.export.bundle.manifest import read_manifest
from capszoo.images import open_image
from capszoo.inference import load_model
from capszoo.preprocess import ImageTransform
from capszoo.recipes.config import load_recipe
from capszoo.recipes.training.checkpoints import latest_checkpoint, save_checkpoint
from capszoo.summary import summarise
from tests.support.formats import write_idx, write_norb_matrix, write_parquet, write_svhn

pq = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")

#: What stands in for a value somewhere in a tree.
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2.5, 1e308, -1e-308, 10**30, float("nan"), float("inf")),
    *("", "x", "\x00", "\x1b[31m", "[/]", "../..", "hf-hub:a/b", "local-dir:/", "/etc/passwd", "x" * 5000),
    *([], {}, [[]], [None], {"a": 1}, ["a"] * 2000, [10**9] * 3),
    *({"url": "file:///etc/passwd"}, {"checkpoint_path": "x"}),
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
]


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [place for key in keys for place in ((node, key), *_places(node[key]))]


def _mutate_tree(tree: Any, rng: random.Random) -> Any:
    """A copy of a tree with one to three values replaced, removed, added or wrapped."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.randint(1, 3)):
        places = _places(tree)
        if not places:
            return copy.deepcopy(rng.choice(ODD))
        node, key = rng.choice(places)
        what = rng.random()
        if what < 0.6:
            node[key] = copy.deepcopy(rng.choice(ODD))
        elif what < 0.75:
            del node[key]
        elif what < 0.85 and isinstance(node, dict):
            node[rng.choice(["url", "file", "source", "tag", "x\n", "profile", "model_args"])] = rng.choice(
                ODD
            )
        else:
            node[key] = [node[key]]
    return tree


def _mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bits turned, parts cut out, doubled or filled."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        if not data:
            break
        at, what = rng.randrange(len(data)), rng.random()
        if what < 0.5:
            data[at] ^= 1 << rng.randrange(8)
        elif what < 0.65:
            del data[at:]
        elif what < 0.8:
            del data[at : at + rng.randint(1, 64)]
        elif what < 0.9:
            data[at:at] = data[at : at + rng.randint(1, 64)]
        else:
            data[at : at + 8] = bytes([rng.choice((0, 255))]) * 8
    return bytes(data)


def _text(tree: Any, rng: random.Random) -> bytes:
    content = json.dumps(tree).encode()
    return _mutate_bytes(content, rng) if rng.random() < 0.3 else content


class Inputs:
    """Sound inputs of each kind, made once, and one function a kind that tries a mutated one."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        args = {"backbone_chans": 8}
        net = capszoo.create_model("idpa_cnn", num_classes=3, in_chans=1, img_size=28, **args)
        self.weights = save(net.state_dict())
        normal = {"input_size": [1, 28, 28], "mean": [0.5], "std": [0.5], "tag": "x", "crop_pct": 0.9}
        self.config = {
            **{"architecture": "idpa_cnn", "num_classes": 3, "model_args": args, "label_names": list("abc")},
            "pretrained_cfg": normal,
        }
        metrics = {"test": {"top1": 99.5, "errors": 5, "n": 1000}}
        sha256 = hashlib.sha256(self.weights).hexdigest()
        stated = {"recipe": {}, "metrics": metrics, "license": "apache-2.0", "num_params": 1000}
        self.info = {**self.config, **normal, **stated, "dataset": {"name": "mnist"}, "sha256": sha256}
        del self.info["pretrained_cfg"]
        path = root / "recipes" / "configs" / "idpa_cnn.mnist.yaml"
        self.recipe = yaml.safe_load(path.read_text())
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8))
        self.images: list[bytes] = []
        for kind in ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "PCX", "TGA", "SGI"):
            picture.save(folder / "picture", kind)
            self.images.append((folder / "picture").read_bytes())
        self.idx = write_idx(folder / "data.bin", np.zeros((4, 5, 5))).read_bytes()
        self.norb = write_norb_matrix(folder / "data.bin", np.zeros((2, 5, 5), np.uint8)).read_bytes()
        self.mat = write_svhn(folder / "data.mat", np.zeros((2, 32, 32, 3), np.uint8), [1, 0]).read_bytes()
        np.savez_compressed(
            folder / "golden.npz", pixels=np.zeros((2, 1, 28, 28), np.uint8), scores=np.zeros((2, 3))
        )
        self.npz = (folder / "golden.npz").read_bytes()
        needed = ("model.onnx", "reference.npz", "preprocess.json", "labels.txt", "infer.py")
        model = {"source": "", "state_sha256": "0" * 64, "outputs": ["scores"], "routing_iters_asked": None}
        self.manifest = {
            **{"schema": 1, "name": "toy", "model": model, "opset": 20, "labels": ["a", "b"], "engines": {}},
            "input": {"channels": 1, "size": [28, 28], "dtype": "float32"},
            "outputs": [{"name": "scores"}],
            "precision": {"model": "fp32"},
            "files": dict.fromkeys(needed, "0" * 64),
            "tolerance": 1e-4,
            "batch": {"min": 1, "usual": 8, "max": 32},
        }
        named = json.dumps({"info": {"features": {"label": {"names": ["a", "b", "c"]}}}})
        path = write_parquet(folder / "table.parquet", [np.asarray(picture)] * 3, [0, 1, 2])
        pq.write_table(pq.read_table(path).replace_schema_metadata({"huggingface": named}), path)
        self.parquet = path.read_bytes()
        run = folder / "run"
        state = {"threads": 1, "seconds": 1.0, "sums": [0.0, 0.0, 0.0], "updates_per_epoch": 3, "images": {}}
        for step in (1, 2):
            save_checkpoint(run, step, {"model": {"w": torch.ones(3)}}, {"lr": torch.ones(2)}, state)

    def _write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def metadata(self, rng: random.Random) -> None:
        path = self._write("net.safetensors", self.weights)
        self._write("net.json", _text(_mutate_tree(self.info, rng), rng))
        load_model(str(path), device="cpu")

    def shown(self, rng: random.Random) -> None:
        """What `capszoo info` and `capszoo list --pretrained` print of metadata."""
        path = self._write("net.safetensors", self.weights)
        self._write("net.json", _text(_mutate_tree(self.info, rng), rng))
        info = WeightsInfo.from_json(path.with_suffix(".json"))
        about = summarise(str(path)).to_dict()
        with redirect_stdout(io.StringIO()) as printed:
            zoo._print_facts(about)
            zoo._print_weights(about["weights"])
            zoo._print_checkpoints([weights_entry(info)])
        assert printed.getvalue().replace("\n", "").isprintable()

    def weights_file(self, rng: random.Random) -> None:
        head = rng.random() < 0.7  # the header says the most
        cut = 8 + int.from_bytes(self.weights[:8], "little")
        first = _mutate_bytes(self.weights[:cut], rng) if head else self.weights[:cut]
        content = first + (self.weights[cut:] if head else _mutate_bytes(self.weights[cut:], rng))
        path = self._write("net.safetensors", content)
        info = {**self.info, "sha256": hashlib.sha256(content).hexdigest()}
        self._write("net.json", json.dumps(info).encode())
        load_model(str(path), device="cpu")

    def configuration(self, rng: random.Random) -> None:
        (self.folder / "hub").mkdir(exist_ok=True)
        self._write("hub/model.safetensors", self.weights)
        self._write("hub/config.json", _text(_mutate_tree(self.config, rng), rng))
        load_model(f"local-dir:{self.folder / 'hub'}", device="cpu")

    def recipe_file(self, rng: random.Random) -> None:
        tree = _mutate_tree(self.recipe, rng)
        text = yaml.safe_dump(tree) if rng.random() < 0.6 else json.dumps(tree)
        content = text.encode()
        if rng.random() < 0.5:
            content = _mutate_bytes(content, rng)
        load_recipe(self._write("recipe.yaml", content))

    def setting(self, rng: random.Random) -> None:
        key = rng.choice(
            ["seed", "tag", "epochs", "optimizer.lr", "model_args", "data.name", "stages", "loss"]
        )
        value = rng.choice(
            [*map(str, ODD), "!!int x", "&a [*a]", "[" * 300, "2020-99-99", "{a: b}", "\x85", "? "]
        )
        load_recipe("idpa_cnn.mnist", [f"{key}={value}"])

    def image(self, rng: random.Random) -> None:
        content = _mutate_bytes(rng.choice(self.images), rng)
        channels = rng.choice((1, 3))
        if rng.random() < 0.5:
            decode_image(content, "L" if channels == 1 else "RGB", "a table", side=28)
        else:
            ImageTransform(channels, (28, 28), (0.5,) * channels, (0.5,) * channels)(open_image(content))

    def table(self, rng: random.Random) -> None:
        (self.folder / "table").mkdir(exist_ok=True)
        self._write("table/train-00000-of-00001.parquet", _mutate_bytes(self.parquet, rng))
        load_dataset(f"parquet:{self.folder / 'table'}", "train")

    def binary(self, rng: random.Random) -> None:
        read: Callable[[Path], Any]
        content, read = rng.choice(
            [(self.idx, read_idx), (self.norb, read_norb_matrix), (self.mat, read_svhn_mat)]
            + [(bytes(3073 * 2), lambda path: read_cifar_binary([path]))]
        )
        content = _mutate_bytes(content, rng)
        read(self._write("data.bin", gzip.compress(content, 1) if rng.random() < 0.3 else content))

    def golden(self, rng: random.Random) -> None:
        read_npz(self._write("golden.npz", _mutate_bytes(self.npz, rng)), ("pixels", "scores"))

    def manifest_file(self, rng: random.Random) -> None:
        self._write("manifest.json", _text(_mutate_tree(self.manifest, rng), rng))
        read_manifest(self.folder)

    def state(self, rng: random.Random) -> None:
        newest = sorted((self.folder / "run" / "checkpoints").iterdir())[-1]
        whole = (newest / "state.json").read_bytes()
        (newest / "state.json").write_bytes(_text(_mutate_tree(json.loads(whole), rng), rng))
        checkpoint, _ = latest_checkpoint(self.folder / "run")
        (newest / "state.json").write_bytes(whole)
        assert checkpoint is not None and checkpoint.state["step"] >= 0


#: Cases of each kind: of the quick tests, and of all (13,500 in sum; no fewer than 10,000).
KINDS = {
    **{"metadata": (20, 1500), "shown": (60, 1000), "weights_file": (10, 1000), "configuration": (20, 1500)},
    **{"recipe_file": (40, 1500), "setting": (30, 500), "image": (100, 2500), "table": (30, 1000)},
    **{"binary": (60, 1500), "golden": (40, 600), "manifest_file": (40, 600), "state": (20, 300)},
}


def _run(kind: str, cases: range, folder: Path, root: Path) -> None:
    inputs = Inputs(folder, root)
    refused, raw = 0, []
    for case in cases:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                getattr(inputs, kind)(random.Random(f"{kind} {case}"))
        except Exception as error:
            line, _ = _one_line(error)
            ours = isinstance(error, CapszooError) or "(--debug shows" not in line
            refused += ours
            if not ours:
                raw.append((case, line[:200]))
            assert (
                re.sub("[\ud800-\udfff]", "", printable(line)).isprintable()
                and len(printable(line, MAX_MESSAGE)) <= MAX_MESSAGE
            )
    print(
        f"\n{kind}: {len(cases)} tried, {len(cases) - refused - len(raw)} taken, {refused} refused, {len(raw)} raw"
    )
    assert raw == [], f"{len(raw)} of {len(cases)}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_few(kind: str, tmp_path: Path, root: Path) -> None:
    _run(kind, range(KINDS[kind][0]), tmp_path, root)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sound_is_taken(
    kind: str, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the fuzzers would all fail at one first check, and see nothing of what is behind it."""
    if kind == "setting":
        return load_recipe("idpa_cnn.mnist", ["seed=1"]) and None
    monkeypatch.setitem(globals(), "_mutate_tree", lambda tree, rng: tree)
    monkeypatch.setitem(globals(), "_mutate_bytes", lambda content, rng: content)
    inputs = Inputs(tmp_path, root)
    for case in range(3):
        getattr(inputs, kind)(random.Random(case))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all(kind: str, tmp_path: Path, root: Path) -> None:
    _run(kind, range(KINDS[kind][1]), tmp_path, root)
