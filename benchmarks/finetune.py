"""Fine-tuning on small sets against training from scratch with the same budget, as a markdown table.

    python benchmarks/finetune.py --data FOLDER                 # the table of docs/fine-tune.md: 3 seeds each
    python benchmarks/finetune.py --data FOLDER --only "Fashion" --seeds 1 --set optimizer.lr=0.001
    python benchmarks/finetune.py --data FOLDER --search        # the runs that the defaults come from

Each task is a folder of PNG files, 50 per class, sampled from the training images with the run's seed. Both sides
see the same images, of which a fifth of each class is held out for early stopping, and have the same recipe: the same
maximum number of updates, rates, augmentation. Only the initial weights differ, and the layers' rates, which are scaled
for pretrained weights. Results are on all test images of the classes, which select nothing; the search
uses only validation images.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a plain checkout works too

import torch
from PIL import Image

from capszoo.data import ImageSet, load_dataset
from capszoo.errors import CapszooError
from capszoo.recipes.evaluate import evaluate
from capszoo.recipes.finetune import finetune

PER_CLASS = 50
BASE = ("precision=bf16",)
"""Settings of all runs: bfloat16 is quicker on the processors that these figures come from."""


@dataclass(frozen=True)
class Task:
    """A row: weights, and the images that they are fine-tuned on."""

    title: str
    model: str
    data: str
    classes: tuple[int, ...]


TASKS = (
    Task(
        "MNIST → Fashion-MNIST, 10 classes", "resnet20_routingcaps.mnist", "fashion_mnist", tuple(range(10))
    ),
    Task("MNIST → Fashion-MNIST, 10 classes", "idpa_cnn.mnist", "fashion_mnist", tuple(range(10))),
    Task("CIFAR-10 → 5 of its classes*", "resnet20_routingpool.cifar10", "cifar10", (1, 3, 5, 7, 9)),
)

SEARCH = (
    ["optimizer.lr=0.001"],
    ["optimizer.lr=0.003"],
    ["optimizer.lr=0.01"],
    ["optimizer.lr=0.003", "optimizer.layer_decay=1.0"],
    ["optimizer.lr=0.003", "optimizer.layer_decay=0.65"],
    ["optimizer.lr=0.003", "init.freeze=[body]"],
    ["optimizer.lr=0.003", "init.freeze=[all]"],
)


def folder_name(label: str) -> str:
    return label.replace("/", "_")


def write_folder(folder: Path, task: Task, data: Path, seed: int) -> Path:
    """Write the task's training images as files, a sub-folder per class."""
    images = load_dataset(task.data, "train", data)
    assert isinstance(images, ImageSet)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an interrupted call
    for kind in task.classes:
        place = unfinished / folder_name(images.spec.label_names[kind])
        place.mkdir(parents=True)
        for index in order[images.labels[order] == kind][:PER_CLASS].tolist():
            pixels = images.images[index].permute(1, 2, 0).squeeze(2).numpy()
            Image.fromarray(pixels).save(place / f"{index:05d}.png")
    unfinished.rename(folder)
    return folder


def test_images(task: Task, data: Path) -> ImageSet:
    """All test images of the task's classes, with the folder's labels: in alphabetical order."""
    images = load_dataset(task.data, "test", data)
    assert isinstance(images, ImageSet)
    names = sorted(folder_name(images.spec.label_names[kind]) for kind in task.classes)
    label = torch.full((images.spec.num_classes,), -1)
    for kind in task.classes:
        label[kind] = names.index(folder_name(images.spec.label_names[kind]))
    wanted = (label[images.labels] >= 0).nonzero().flatten()
    chosen = images.subset(wanted)
    return replace(chosen, labels=label[chosen.labels], spec=replace(images.spec, label_names=tuple(names)))


def measure(
    task: Task, data: Path, seed: int, scratch: bool, overrides: list[str], work: Path, test: bool = True
) -> dict[str, float]:
    """Accuracy on the validation images, and with ``test`` on the test images; the run's updates and seconds."""
    folder = work / f"{task.data}-{len(task.classes)}-{seed}"
    if not folder.is_dir():
        write_folder(folder, task, data, seed)
    out = (
        work
        / f"run-{task.model}-{seed}-{'scratch' if scratch else 'tuned'}-{zlib.crc32(repr(overrides).encode())}"
    )
    sets = [f"seed={seed}", *BASE, *overrides]
    result = finetune(task.model, folder, out, tag="small", from_scratch=scratch, overrides=sets, cpu=True)
    raw = json.loads(Path(result["weights"]).with_suffix(".json").read_text())
    found = {
        "seconds": raw["train_seconds"],
        "updates": result["step"],
        "validation": result["validation"]["top1"],
    }
    return found | ({"test": evaluate(result["weights"], test_images(task, data))["top1"]} if test else {})


def shown(values: list[float]) -> str:
    """Mean ± (sample) standard deviation, if there are several values."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--only", default="", help="rows whose title or weights contain this")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as for capszoo finetune"
    )
    parser.add_argument("--search", action="store_true", help="try settings; validation images only")
    parser.add_argument("--work", type=Path, help="folder to keep; finished runs in it are not made again")
    args = parser.parse_args(argv)
    tasks = [task for task in TASKS if args.only.lower() in f"{task.title} {task.model}".lower()]
    with tempfile.TemporaryDirectory() as name:
        work = args.work or Path(name)
        if args.search:
            print("| settings | " + " | ".join(task.model for task in tasks) + " |")
            print("|---|" + "---:|" * len(tasks))
            for settings in SEARCH:
                cells = []
                for task in tasks:
                    runs = [
                        measure(task, args.data, k, False, [*settings, *args.set], work)
                        for k in range(args.seeds)
                    ]
                    cells.append(shown([run["validation"] for run in runs]))
                print(f"| {', '.join(settings)} | {' | '.join(cells)} |", flush=True)
            return 0
        print("| task | weights | fine-tuned, % | from scratch, % | updates | seconds a run |")
        print("|---|---|---:|---:|---:|---:|")
        for task in tasks:
            sides = {
                scratch: [measure(task, args.data, k, scratch, args.set, work) for k in range(args.seeds)]
                for scratch in (False, True)
            }
            tuned, scratch = ([run["test"] for run in sides[side]] for side in (False, True))
            updates = " / ".join(shown([run["updates"] for run in sides[side]]) for side in (False, True))
            seconds = " / ".join(shown([run["seconds"] for run in sides[side]]) for side in (False, True))
            print(
                f"| {task.title} | `{task.model}` | {shown(tuned)} | {shown(scratch)} | {updates} | {seconds} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CapszooError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
