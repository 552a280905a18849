"""Tiny data sets on disk, tiny recipes, and runs in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from capszoo.data import ImageSet
from capszoo.recipes.config import Recipe
from tests.support import PACKED
from tests.support.formats import write_idx

COUNTS = {"train": 120, "test": 40}


def write_digits(root: Path, folder: Path) -> Path:
    """Real digits as idx files below `folder`, as many as `COUNTS` says."""
    digits = np.load(root / "tests" / "fixtures" / PACKED["mnist"])
    (folder / "mnist").mkdir(parents=True)
    for stem, part in (("train", slice(0, 120)), ("t10k", slice(120, 160))):
        write_idx(folder / "mnist" / f"{stem}-images-idx3-ubyte", digits["images"][part])
        write_idx(folder / "mnist" / f"{stem}-labels-idx1-ubyte", digits["labels"][part])
    return folder


def write_photos(images: ImageSet, folder: Path, counts: dict[str, int], start: int = 0) -> Path:
    """Real digits as PNG files, a folder per class; `counts` images of each from number `start` on."""
    digits = {"one": 1, "three": 3, "eight": 8}
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        digit = digits[name] if name in digits else int(name[-1])
        mine = (images.labels == digit).nonzero().flatten()[start : start + count].tolist()
        for index in mine:
            Image.fromarray(images.images[index, 0].numpy()).save(folder / name / f"{index:04d}.png")
    return folder


def tiny_recipe(**changes: Any) -> Recipe:
    tree: dict[str, Any] = {
        "arch": "resnet20_routingcaps",
        "tag": "mnist",
        "model_args": {"depth": 8},  # the smallest body of its kind: the tests are about the loop
        "data": {"name": "mnist", "val_size": 20, "augment": {"shift": 2}},
        "epochs": 2,
        "batch_size": 32,
        "optimizer": {"name": "adamw", "lr": 0.003},
        "loss": {"name": "margin"},
        "clip_grad": 1.0,
    }
    return Recipe.model_validate({**tree, **changes})


MEASURES: dict[str, Any] = {
    "model_args": {"backbone_chans": 8, "num_caps": 4},
    "data": {
        "name": "mnist",
        "val_size": 20,
        "augment": {
            "shift": 2,
            "flip": "alternating",
            "pad_mode": "reflect",
            "cutout": 8,
            "cutout_off_epochs": 1,
        },
    },
    "epochs": 4,
    "stages": [{"size": 20, "epochs": 1, "cutout": 5}, {"size": 24, "epochs": 1}],
    "optimizer": {"name": "sgd", "lr": 0.05, "weight_decay": 5e-4},
    "schedule": {"name": "poly", "warmup_epochs": 1},
    "loss": {"name": "cross_entropy", "options": {"label_smoothing": 0.1}},
    "ema_decay": 0.9,
}


def staged_recipe(**changes: Any) -> Recipe:
    tree = {"arch": "idpa_cnn", "tag": "mnist", "batch_size": 32, **MEASURES, **changes}
    return Recipe.model_validate(tree)


TINY: dict[str, Any] = {
    "arch": "idpa_cnn",
    "tag": "mnist",
    "model_args": {"num_caps": 4, "pose_dim": 4, "backbone_chans": 8},
    "data": {"name": "mnist", "val_size": 20, "augment": {"shift": 2}},
    "epochs": 4,
    "batch_size": 20,
    "optimizer": {"name": "adamw", "lr": 0.002, "weight_decay": 0.01},
    "schedule": {"warmup_epochs": 1},
    "clip_grad": 1.0,
}


#: Trained by two processes as by one, up to rounding.
PAIR: dict[str, Any] = {
    **TINY,
    "model_args": {"num_caps": 4, "pose_dim": 16, "backbone_chans": 8},
    "optimizer": {"name": "adamw", "lr": 0.001},
    "accumulate": 2,
}


def command(out: Path, data: Path, recipe: dict[str, Any], mode: str = "", processes: int = 1) -> list[str]:
    return launched("tests.support.run_tiny", [str(out), str(data), json.dumps(recipe), mode], processes)


def launched(module: str, arguments: list[str], processes: int = 1) -> list[str]:
    """The command that runs a module of the tests in so many processes side by side."""
    if processes == 1:
        return [sys.executable, "-m", module, *arguments]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(port)]
    return [sys.executable, *launcher, "-m", module, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run(root: Path, argv: list[str], timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=root, env=environment(), capture_output=True, text=True, timeout=timeout)


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


def records(out: Path, timed: bool = False) -> list[dict[str, Any]]:
    """The records of a run's epochs, without what a clock measures unless `timed`."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    left_out = () if timed else ("seconds", "images_per_s")
    return [{k: v for k, v in json.loads(line).items() if k not in left_out} for line in lines]


def metadata(result: dict[str, Any]) -> dict[str, Any]:
    """The metadata beside the weights of a finished run."""
    return json.loads(Path(result["weights"]).with_suffix(".json").read_text())


def assert_same_weights(one: Path, two: Path) -> None:
    """Two safetensors files agree bit for bit."""
    expected, found = load_file(one), load_file(two)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(value, found[key]), f"{one.name}: {key}"


def newest(out: Path) -> Path:
    return sorted((out / "checkpoints").glob("step-*"))[-1]


def weight_differences(one: Path, two: Path) -> dict[str, float]:
    """The largest difference of each tensor between the newest checkpoints of two runs."""
    a, b = (load_file(newest(out) / "model.safetensors") for out in (one, two))
    return {key: float((a[key] - b[key]).abs().max()) for key in a}


HISTORY = [
    {"epoch": 1, "step": 3, "lr": 0.1, "train_loss": 1.1, "train_top1": 40.0, "val_top1": 50.0},
    {"epoch": 2, "step": 6, "lr": 0.0, "train_loss": 0.9, "train_top1": 60.0, "val_top1": 55.0},
]
