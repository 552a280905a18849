"""Gain of fine-tuning over training from scratch: maintainers run it when the defaults of finetune change.

    CAPSZOO_DATA=FOLDER python benchmarks/finetune.py --out DIR               # the rows of docs/fine-tune.md
    CAPSZOO_DATA=FOLDER python benchmarks/finetune.py --out DIR --only Fashion --seeds 1 --set optimizer.lr=0.001

Every run is a ``capszoo finetune`` command, which is printed and run in DIR; the same command resumes. Each row has a
folder of training images, drawn with the run's seed, and of all test images of its classes. Both sides see the same
images, a fifth of which is held out for early stopping, and have the same recipe. Only the initial weights differ, and
the layers' rates, which are scaled for pretrained weights. Test accuracy is measured once, at the end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import torch
from PIL import Image

from capszoo.data import ImageSet, load_dataset
from capszoo.recipes.weights import finished_metadata


@dataclass(frozen=True)
class Row:
    """A row of the table: what is tuned (arguments of ``capszoo finetune``), on how many images of which classes."""

    title: str
    start: tuple[str, ...]
    data: str
    per_class: int = 50
    classes: tuple[int, ...] = tuple(range(10))
    settings: tuple[str, ...] = ("precision=bf16",)


def _head(name: str, *settings: str) -> Row:
    start = ("--backbone", "local-dir:backbone", "--head", name, "--epochs", "10")
    return Row("CIFAR-100 → CIFAR-10", start, "cifar10", 500, settings=("data.augment.flip=true", *settings))


ROWS = (
    Row("MNIST → Fashion-MNIST", ("resnet20_routingcaps.mnist",), "fashion_mnist"),
    Row("MNIST → Fashion-MNIST", ("idpa_cnn.mnist",), "fashion_mnist"),
    Row("CIFAR-10 → 5 of its classes", ("resnet20_routingpool.cifar10",), "cifar10", classes=(1, 3, 5, 7, 9)),
    _head("idpa", "model_args.max_grid=4"),  # this grid trains about as fast as average pooling
    _head("avg"),
)

#: The backbone of ``_head``: ResNet-20 on CIFAR-100 by the recipe that compares heads on CIFAR-10; this head needs no
#: clipping. Then the run as a folder for ``local-dir:``.
BACKBONE = (
    "train resnet20_avg.cifar10 --profile comparison --epochs 8 --set data.name=cifar100 --set tag=cifar100 "
    "--set clip_grad=null --out runs/cifar100",
    "publish runs/cifar100 me/backbone --dry-run --out backbone",
)


def write_photos(folder: Path, row: Row, seed: int) -> None:
    """Write images as files, a sub-folder per class: ``train``, which the seed samples, and ``test``, all of them."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for split in ("train", "test"):
        images = load_dataset(row.data, split)
        assert isinstance(images, ImageSet)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        for kind in row.classes:
            place = unfinished / split / images.spec.label_names[kind].replace("/", "_")
            place.mkdir(parents=True, exist_ok=True)
            chosen = order[images.labels[order] == kind]
            for index in chosen[: row.per_class if split == "train" else None].tolist():
                pixels = images.images[index].permute(1, 2, 0).squeeze(2).numpy()
                Image.fromarray(pixels).save(place / f"{index:05d}.png")
    unfinished.rename(folder)


def capszoo(command: Sequence[str], out: Path) -> None:
    """Run a ``capszoo`` command in ``out``; raises ``SystemExit`` if it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    print(f"$ capszoo {shlex.join(command)}", flush=True)
    whole = [sys.executable, "-m", "capszoo", *command]
    if subprocess.run(whole, cwd=out, env={**os.environ, "PYTHONPATH": path}).returncode:
        sys.exit(f"error: capszoo {command[0]} failed; the same command resumes")


def measure(row: Row, seed: int, scratch: bool, changes: Sequence[str], out: Path) -> dict[str, Any]:
    """The metadata of one run, which is trained unless it is finished."""
    photos = f"photos-{row.data}-{len(row.classes)}-{row.per_class}.{seed}"
    settings = [*row.settings, *changes]
    digest = zlib.crc32(repr((row, changes)).encode())
    run = f"runs/{digest:08x}.{seed}{'.scratch' if scratch else ''}"
    if not (out / photos).is_dir():
        write_photos(out / photos, row, seed)
    if finished_metadata(out / run) is None:
        command = [
            "finetune",
            *row.start,
            "--data",
            photos,
            "--tag",
            "small",
            "--seed",
            str(seed),
            "--out",
            run,
        ]
        command += [word for setting in settings for word in ("--set", setting)]
        capszoo([*command, *(["--from-scratch"] if scratch else [])], out)
    metadata = finished_metadata(out / run)
    assert metadata is not None
    return metadata


def shown(values: Sequence[float]) -> str:
    """Mean ± (sample) standard deviation, if there are several values."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def line(row: Row, tuned: Sequence[dict[str, Any]], scratch: Sequence[dict[str, Any]]) -> str:
    """A line of the table, of the runs' metadata."""

    def accuracies(runs: Sequence[dict[str, Any]], split: str) -> list[float]:
        return [run["metrics"][split]["top1"] for run in runs]

    sides = [accuracies(side, "test") for side in (tuned, scratch)]
    gains = [a - b for a, b in zip(*sides, strict=True)]
    cells = (
        row.title,
        f"`{' '.join(row.start)}`",
        f"{tuned[0]['num_params']:,}",
        *map(shown, (*sides, gains, accuracies(tuned, "validation"))),
        f"{statistics.mean(run['train_seconds'] for run in (*tuned, *scratch)):.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; the same folder resumes")
    parser.add_argument("--only", default="", help="rows whose title or command contains this")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all runs")
    args = parser.parse_args(argv)
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows = [row for row in ROWS if args.only.lower() in f"{row.title} {' '.join(row.start)}".lower()]
    lines = [
        "| task | fine-tuned | parameters | test, % | from scratch, % | difference | validation, % | s a run |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if "local-dir:backbone" in row.start and not (out / "backbone").is_dir():
            for command in BACKBONE:
                capszoo(command.split(), out)
        tuned, scratch = (
            [measure(row, seed, side, args.set, out) for seed in range(args.seeds)] for side in (False, True)
        )
        lines.append(line(row, tuned, scratch))
    print("\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
