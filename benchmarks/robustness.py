"""Corrupted images and calibration of the bundled weights: maintainers run it when they add weights.

    python benchmarks/robustness.py             # those whose weights have changed since (all: some hours of one core)
    python benchmarks/robustness.py NAME...     # these, again
    python benchmarks/robustness.py --draw      # the corruptions, in docs/pictures

A row has what ``capszoo eval NAME --corruptions --limit 1000`` and ``capszoo eval NAME --calibration`` print. The
results are in benchmarks/results/robustness.json, of which scripts/generate.py makes the tables of docs/robustness.md.
"""

from __future__ import annotations

import hashlib
import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import torch
from torch import Tensor

from benchmarks.models import markdown
from capszoo._pretrained.catalogue import checkpoints
from capszoo._utils.files import write_atomically
from capszoo.data import keyed_generator, load_dataset
from capszoo.errors import CapszooError
from capszoo.explain.plotting import save_columns
from capszoo.recipes.evaluation.calibration import calibrate, held_out_images
from capszoo.recipes.evaluation.corruptions import (
    CORRUPTIONS,
    CorruptionResult,
    corrupt,
    corruption_set,
    corruptions,
    mean_accuracy,
)
from capszoo.recipes.evaluation.metrics import assess
from capszoo.recipes.evaluation.report import rounded
from capszoo.recipes.evaluation.target import in_float32, prepare
from capszoo.recipes.weights import hardware

RESULTS = ROOT / "benchmarks" / "results" / "robustness.json"
#: Number of the test image in the pictures.
IMAGE = 1

#: Images of each corruption and severity, drawn by seed 0.
LIMIT = 1000


@in_float32
def measure(name: str) -> dict[str, Any]:
    """The row of one checkpoint."""
    row: dict[str, Any] = {
        "sha256": checkpoints(aliases=False)[name].sha256,
        "hardware": hardware(torch.device("cpu")),
    }
    some = prepare(name, limit=LIMIT, device="cpu")
    row["dataset"] = some.images.spec.name
    try:
        corruption_set(some)
    except CapszooError:
        row["corruptions"] = None
    else:
        results = corruptions(some)
        row["corruptions"] = {
            "n": some.n,
            "clean": assess(some).accuracy,
            "mean": mean_accuracy(results),
            "each": [asdict(one) for one in results],
        }
    whole = prepare(name, device="cpu")
    row["calibration"] = None
    if not whole.images.spec.multi_label:
        found = asdict(calibrate(whole, held_out_images(whole, name, None, None))) | {"n": whole.n}
        for one in (found["raw"], found["scaled"] or {}):
            one.pop("bins", None)
        row["calibration"] = found
    return dict(rounded(row))


def picture(channels: int) -> Path:
    """The picture of the corruptions of colour (3) or grey (1) images."""
    return ROOT / "docs" / "pictures" / f"corruptions_{'colour' if channels == 3 else 'grey'}.png"


def corrupted_columns(image: Tensor) -> list[tuple[str, list[Tensor]]]:
    """An image, uint8 [c, h, w], and each of its corruptions, in 0..1: name, and an image for each severity."""
    chosen = CORRUPTIONS[tuple(image.shape)]
    columns = [("unchanged", [image / 255] * len(next(iter(chosen.values())).severities))]
    for name, one in chosen.items():
        severities = range(1, len(one.severities) + 1)
        made = [corrupt(image[None], one, k, keyed_generator(0, name, k, 0))[0] / 255 for k in severities]
        columns.append((name.replace(" ", "\n"), made))
    return columns


def drawn_from(image: Tensor) -> str:
    """What a picture states of its source: the image and the corruptions' parameters."""
    chosen = CORRUPTIONS[tuple(image.shape)]
    parameters = {name: one.severities for name, one in chosen.items()}
    return f"source {hashlib.sha256(image.numpy().tobytes() + repr(parameters).encode()).hexdigest()[:16]}"


def draw(image: Tensor, path: Path) -> Path:
    """Draw the corruptions of an image, uint8 [c, h, w]."""
    columns = corrupted_columns(image)
    count = len(columns[0][1])
    rows = [f"severity {k}" for k in range(1, count + 1)] if count > 1 else [""]
    return save_columns(columns, rows, path, drawn_from(image), gap=1)


def stored(file: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Name of the weights (or key of another benchmark's runs) to their row."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def keep(file: Path, new: dict[str, dict[str, Any]]) -> None:
    """Add rows to the stored ones, a line each."""
    rows = stored(file) | new
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows))
    write_atomically(file, f"{{\n{lines}\n}}\n")


def current() -> dict[str, dict[str, Any]]:
    """The rows of the bundled files, in the order of the names."""
    rows = stored()
    return {
        name: rows[name]
        for name, info in checkpoints(aliases=False).items()
        if name in rows and rows[name]["sha256"] == info.sha256
    }


def corruption_table(channels: int) -> str:
    """Accuracy by group of corruptions, of the checkpoints for colour (3) or grey (1) images."""
    rows = {
        name: row["corruptions"]
        for name, row in current().items()
        if row["corruptions"] and checkpoints(aliases=False)[name].input_size[0] == channels
    }
    groups = list(dict.fromkeys(one["group"] for row in rows.values() for one in row["each"]))
    lines = []
    for name, row in rows.items():
        means = [(one["group"], CorruptionResult(**one).mean) for one in row["each"]]
        grouped = ([mean for of, mean in means if of == group] for group in groups)
        values = [row["clean"], *(sum(some) / len(some) for some in grouped), row["mean"]]
        lines.append([f"`{name}`", *(f"{value:.1f}" for value in values)])
    return "\n".join(markdown(["weights", "unchanged", *groups, "mean of the 12"], lines))


def calibration_table() -> str:
    """Calibration error and log-likelihood of every checkpoint with one label an image, raw and at its temperature."""
    lines = []
    for name, row in current().items():
        found = row["calibration"]
        if not found:
            continue
        raw, scaled = found["raw"], found["scaled"]
        cells = [f"{raw['confidence']:.1f}", f"{raw['ece']:.2f}"]
        cells += [f"{scaled['ece']:.2f}", f"{found['temperature']:.2f}"] if scaled else ["–", "–"]
        cells += [f"{raw['nll']:.3f}", f"{scaled['nll']:.3f}" if scaled else "–"]
        lines.append([f"`{name}`", found["kind"], *cells])
    head = "weights | scores | mean confidence, % | ECE, % | ECE at T, % | T | NLL | NLL at T"
    return "\n".join(markdown(head, lines, (0, 1)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="weights to measure again")
    parser.add_argument("--draw", action="store_true", help="draw the corruptions, and measure nothing")
    args = parser.parse_args(argv)
    if args.draw:
        for data in ("cifar10", "mnist"):
            image = load_dataset(data, "test").subset(torch.tensor([IMAGE])).images[0]  # type: ignore[union-attr]
            print(f"written: {draw(image, picture(image.shape[0]))}")
        return 0
    for name in args.names or [name for name in checkpoints(aliases=False) if name not in current()]:
        row = measure(name)
        keep(RESULTS, {name: row})
        print(name, row["corruptions"] and f"{row['corruptions']['mean']:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
