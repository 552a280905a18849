"""When do capsules help? The runs behind docs/evidence.md: maintainers run it when a head or a claim changes.

    python benchmarks/evidence.py --missing              # what has not been run, and about how long it takes
    python benchmarks/evidence.py                        # run it, the cheapest claim first; the same command resumes
    python benchmarks/evidence.py pose few --minutes 20  # some claims, for about this long
    python benchmarks/evidence.py --scale full           # at a size for a GPU

``CAPSZOO_DATA`` names the folder of the data. Each run is kept when it ends, in benchmarks/results/evidence.

Two kinds of runs. ``pose``, ``ood``, ``deletion`` and ``attack`` measure checkpoints of the zoo, as ``capszoo eval``
does with the options of these names, and ``masking`` asks whether their gradients mislead an attack. ``rates``,
``few``, ``rotation``, ``affine`` and ``overlap`` train networks of their own:

Every head has one trunk (the CIFAR ResNet-20), one recipe, one number of updates, and in each seed the same images in
the same order. The best of three learning rates is chosen for each head on validation images, by the claim ``rates``.
A capsule head is trained twice, routed and with even couplings. ``routing_pool`` with even couplings is ``avg``, and
``self_routing`` has no such twin, since its couplings are its scores. The recipe is that of docs/comparison.md without
augmentation. Two digits of an image are two classes of equal probability for the loss, and the two highest scores are
the answer. The loop is here because runs of seconds would take longer to write the files of a training run.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn import functional as F

import capszoo
from benchmarks import robustness
from capszoo._pretrained.catalogue import checkpoints
from capszoo._utils.devices import resolve_device
from capszoo.data import (
    Batches,
    DataError,
    ImageSet,
    keyed_generator,
    load_dataset,
    split_validation,
)
from capszoo.data.augment import Augment
from capszoo.errors import CapszooError
from capszoo.recipes.evaluation.adversarial import adversarial
from capszoo.recipes.evaluation.calibration import calibrate
from capszoo.recipes.evaluation.corruptions import MNIST_C, corrupt
from capszoo.recipes.evaluation.deletions import deletions
from capszoo.recipes.evaluation.metrics import assess, count_correct
from capszoo.recipes.evaluation.outliers import other_images, outliers
from capszoo.recipes.evaluation.pose import pose_probe
from capszoo.recipes.evaluation.report import rounded
from capszoo.recipes.evaluation.robustness import STEP_SHARE, PixelScores, attack_loss, move, pgd
from capszoo.recipes.evaluation.target import EvalTarget, in_float32, prepare
from capszoo.recipes.weights import hardware, source_commit

KEPT = ROOT / "benchmarks" / "results" / "evidence"

#: Head -> its network on the CIFAR ResNet-20, and the arguments of it.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "avg": ("resnet20_avg", {}),
    "routing_pool": ("resnet20_routingpool", {}),
    "conv": ("resnet20_conv", {}),
    "dynamic": ("resnet20_dynamic", {}),
    "em": ("resnet20_em", {}),
    "idpa": ("resnet20_idpa", {}),
    "self_routing": ("resnet20_selfrouting", {}),
    "self_attention": ("resnet20_idpa", {"routing": "self_attention"}),
}
#: Heads whose twin with even couplings is another network.
EVEN = ("dynamic", "em", "idpa", "self_attention")
#: Head, and whether its couplings are held even.
VARIANTS = [(head, even) for head in HEADS for even in ((False, True) if head in EVEN else (False,))]

#: Heads of the claim ``overlap``.
OVERLAP = ("avg", "conv", "dynamic", "em", "idpa", "self_attention")

SEEDS = (0, 1, 2)
RATES = (0.1, 0.03, 0.01)


@dataclass(frozen=True)
class Scale:
    """Sizes of all runs.

    Attributes:
        size: side of MNIST's images, to which they are resized; larger canvases in proportion.
        updates: of ``few`` and ``rates``; the other claims take ``TIMES`` as many.
        validation: images held out of the training images.
        test: images of the test set, the first ones of a fixed random order.
        corrupted: how many of them are corrupted.
        few: images of each class.
        levels: claim -> the validation accuracy in per cent at which it compares heads besides the end, and the number
            of validations during a run.
        measured: images of each measurement of a checkpoint, by claim.
        steps: of APGD.
    """

    size: int
    batch: int
    updates: int
    validation: int
    test: int
    corrupted: int
    few: tuple[int, ...]
    levels: dict[str, tuple[float, int]]
    measured: dict[str, int]
    steps: int


SCALES = {
    "small": Scale(
        size=16,
        batch=32,
        updates=120,
        validation=500,
        test=2000,
        corrupted=500,
        few=(10, 100, 1),
        levels={"rotation": (85.0, 8), "affine": (80.0, 24)},
        measured=dict(pose=2000, ood=2000, deletion=200, attack=100, masking=100),
        steps=10,
    ),
    "full": Scale(
        size=28,
        batch=64,
        updates=2000,
        validation=5000,
        test=10000,
        corrupted=10000,
        few=(10, 100, 1, 1000),
        levels={"rotation": (99.0, 20), "affine": (99.0, 100)},
        measured=dict(pose=10000, ood=10000, deletion=1000, attack=1000, masking=1000),
        steps=50,
    ),
}
#: Trained claim -> updates, in those of ``few``; and the data set, if not MNIST's.
TIMES = {"rotation": 2, "affine": 2, "overlap": 3}
COMPOSED = {"affine": "affnist", "overlap": "multimnist"}
#: Images of each class of the runs of ``few`` that are tested on corrupted images and for calibration too.
CORRUPTED = 100

#: Checkpoints of the heads on the CIFAR ResNet-20, which share a recipe of 60 epochs, and their heads.
HEAD_CHECKPOINTS = {
    "avg": "resnet20_routingpool.cifar10_avg",
    "routing_pool": "resnet20_routingpool.cifar10",
    "conv": "resnet20_conv.cifar10",
    "dynamic": "resnet20_dynamic.cifar10",
    "em": "resnet20_em.cifar10",
    "idpa": "resnet20_idpa.cifar10",
    "self_routing": "resnet20_selfrouting.cifar10",
}
#: Checkpoints for MNIST of the papers' networks, whose recipes differ.
DIGIT_CHECKPOINTS = (
    "cnn6.mnist",
    "capsnet_dynamic.mnist",
    "capsnet_em_norb_small.mnist",
    "efficient_capsnet.mnist",
    "encapnet6_master.mnist",
    "idpa_cnn.mnist",
    "resnet20_routingcaps.mnist",
)
#: Data set of the checkpoints -> another one, whose images are to be told from it; and the radii of the attacks.
OTHERS = {"mnist": "fashion_mnist", "cifar10": "cifar100"}
RADII = {"mnist": (0.1, 0.3), "cifar10": (2 / 255, 8 / 255)}


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        claim: "rates", "few", "rotation", "affine" or "overlap".
        setting: images of each class; 0 stands for as many different ones as the updates take.
        rate: the learning rate; None is the best one of the trials.
    """

    scale: str
    claim: str
    setting: int
    head: str
    even: bool
    seed: int
    rate: float | None = None

    @property
    def key(self) -> str:
        rate = "" if self.rate is None else f"/{self.rate:g}"
        return f"{self.scale}/{self.setting}/{self.head}{'/even' if self.even else ''}/{self.seed}{rate}"

    @property
    def updates(self) -> int:
        return SCALES[self.scale].updates * TIMES.get(self.claim, 1)


def jobs(scale: str) -> Iterator[Job]:
    """All runs in the order in which they are run: a claim is complete before the next one begins."""
    for head, even in VARIANTS:
        for rate in RATES:
            yield Job(scale, "rates", 100, head, even, len(SEEDS), rate)
    settings = [("few", per_class) for per_class in SCALES[scale].few]
    settings.insert(1, ("rotation", 0))
    settings += [("affine", 0), ("overlap", 0)]
    for claim, setting in settings:
        for seed in SEEDS:
            for head, even in VARIANTS:
                if claim != "overlap" or head in OVERLAP:
                    yield Job(scale, claim, setting, head, even, seed)


@dataclass(frozen=True)
class Measurement:
    """One measurement of a checkpoint, by "pose", "ood", "deletion", "attack" or "masking"."""

    scale: str
    claim: str
    model: str

    @property
    def key(self) -> str:
        return f"{self.scale}/{self.model}"

    @property
    def images(self) -> int:
        return SCALES[self.scale].measured[self.claim]


def measurements(scale: str) -> Iterator[Measurement]:
    """All measurements, the cheapest claim first."""
    for claim in ("pose", "ood", "deletion", "attack"):
        for model in (*HEAD_CHECKPOINTS.values(), *DIGIT_CHECKPOINTS):
            yield Measurement(scale, claim, model)
    for model in HEAD_CHECKPOINTS.values():
        yield Measurement(scale, "masking", model)


def kept(claim: str, folder: Path = KEPT) -> dict[str, dict[str, Any]]:
    """Key of a run to its record, of the finished runs of a claim."""
    return robustness.stored(folder / f"{claim}.json")


def keep(claim: str, key: str, record: dict[str, Any], folder: Path = KEPT) -> None:
    """Add a run's record to those of its claim, a line each."""
    robustness.keep(folder / f"{claim}.json", {key: record})


def best_rate(job: Job, folder: Path = KEPT) -> float | None:
    """The rate of the trials with the best validation accuracy, the higher one of equals; None before all are run."""
    trials = kept("rates", folder)
    found = {}
    for rate in RATES:
        trial = Job(job.scale, "rates", 100, job.head, job.even, len(SEEDS), rate)
        if trial.key not in trials:
            return None
        found[rate] = trials[trial.key]["validation"]
    return max(found, key=lambda rate: (found[rate], rate))


#: Seconds of a core for each image of a measurement, where none was kept yet: seen on an AMD EPYC.
PER_IMAGE = {"pose": 0.02, "ood": 0.01, "deletion": 0.7, "attack": 3.0, "masking": 1.0}


def missing_measurements(scale: str, folder: Path = KEPT) -> list[tuple[Measurement, float]]:
    """Measurements not kept for the checkpoint's current file and this many images, and about how long each takes."""
    found = []
    known = checkpoints(aliases=False)
    for one in measurements(scale):
        rows = kept(one.claim, folder)
        paces = [row["seconds"] / row["images"] for key, row in rows.items() if key.startswith(f"{scale}/")]
        row = rows.get(one.key, {})
        if (row.get("sha256"), row.get("images")) != (known[one.model].sha256, one.images):
            pace = statistics.median(paces) if paces else PER_IMAGE[one.claim]
            found.append((one, pace * one.images))
    return found


def missing(scale: str, folder: Path = KEPT) -> list[tuple[Job, float]]:
    """Runs that are not kept, and an estimate of the seconds that each takes, from those that are."""
    rows = {claim: kept(claim, folder) for claim in ("rates", "few", *TIMES)}
    paces = {
        claim: [row["seconds"] / row["updates"] for key, row in found.items() if key.startswith(f"{scale}/")]
        for claim, found in rows.items()
    }
    size = SCALES[scale]
    guess = [0.08 * (size.size / 16) ** 2 * size.batch / 32]
    anyhow = [pace for found in paces.values() for pace in found] or guess
    pace = {claim: statistics.median(found or anyhow) for claim, found in paces.items()}
    return [(job, job.updates * pace[job.claim]) for job in jobs(scale) if job.key not in rows[job.claim]]


@dataclass(frozen=True)
class Digits:
    """Images for one run: training images in an order of their own, validation images, and test sets by figure."""

    training: ImageSet
    validation: ImageSet
    tests: dict[str, ImageSet]


@lru_cache(maxsize=4)
def loaded(name: str, split: str, data: str | Path | None) -> Any:
    """A split of a data set, read once for the runs that follow each other."""
    return load_dataset(name, split, data)


def shrunk(images: ImageSet, size: int, seed: int = 0) -> ImageSet:
    """Images whose sides have the ratio to MNIST's that the scale's ``size`` has, rounded down to the stride of
    the trunk; composed ones are composed with a seed.
    """
    images = images.fixed(seed)
    side = images.size[0] * size // 28 // 4 * 4
    spec = replace(images.spec, input_size=(1, side, side))
    return replace(images, spec=spec, parts=None, part_labels=None).resized(side)


def digits(job: Job, data: str | Path | None = None, device: torch.device | str = "cpu") -> Digits:
    """The images of a run; the seed picks the training images, which are the same for all heads."""
    scale, name = SCALES[job.scale], COMPOSED.get(job.claim, "mnist")
    training: Any
    validation: Any
    training, validation = split_validation(loaded(name, "train", data), scale.validation, 0, False)
    generator = keyed_generator(job.seed, "images")
    order = torch.randperm(len(training), generator=generator)
    if job.setting:
        labels = training.labels[order]
        order = torch.cat([order[labels == label][: job.setting] for label in labels.unique()])
    needed = job.updates * scale.batch
    rounds = [order[torch.randperm(len(order), generator=generator)] for _ in range(-(-needed // len(order)))]

    def tested(split: str, count: int = scale.test) -> Any:
        whole = loaded(name, split, data)
        return whole.subset(torch.randperm(len(whole), generator=keyed_generator(0, "test"))[:count])

    tests = {"test": tested("expanded" if job.claim == "affine" else "test")}
    if job.claim == "affine":
        tests["affnist"] = tested("test")
    if job.claim == "few" and job.setting == CORRUPTED:
        tests |= corrupted(tested("test", scale.corrupted))
    tests = {name: shrunk(images, scale.size) for name, images in tests.items()}
    validation = shrunk(validation, scale.size)
    if job.claim == "rotation":
        validation = rotated(validation, 0, 30, 1)
        tests = {"test": rotated(tests["test"], 0, 30, 2), "unseen": rotated(tests["test"], 30, 60, 3)}
    return Digits(
        shrunk(training.subset(torch.cat(rounds)[:needed]), scale.size, job.seed).to(device),
        validation.to(device),
        {name: images.to(device) for name, images in tests.items()},
    )


def corrupted(images: ImageSet) -> dict[str, ImageSet]:
    """Digits under each corruption of MNIST-C, regenerated."""
    return {
        name: replace(images, images=corrupt(images.images, one, 1, keyed_generator(0, name, 1, 0)))
        for name, one in MNIST_C.items()
    }


def rotated(images: ImageSet, low: float, high: float, seed: int) -> ImageSet:
    """Each image turned by its own angle of low to high degrees in either sense, bilinearly."""
    generator = keyed_generator(seed, "angles")
    count = len(images)
    angles = low + (high - low) * torch.rand(count, generator=generator)
    angles *= torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    pixels = move(images.images.cpu(), "rotation", angles).to(images.device)
    return ImageSet(images.spec, images.split, pixels, images.labels)


def accuracy(net: nn.Module, images: ImageSet) -> float:
    """In per cent."""
    right, count = count_correct(net, Batches(images, 500)).sum(1).tolist()
    return round(100 * right / count, 4)


def network(job: Job, size: tuple[int, int]) -> nn.Module:
    """The run's network, for images of a size, with initial weights of its seed."""
    arch, args = HEADS[job.head]
    if job.even:
        args = args | {"even_couplings": True}
    torch.manual_seed(job.seed)
    return capszoo.create_model(arch, in_chans=1, img_size=size, num_classes=10, **args)


def learning_rate(step: int, updates: int, peak: float) -> float:
    """A tenth of the updates as warm-up, then cosine to zero."""
    warm = max(1, updates // 10)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, updates - warm)))


def _clock(device: torch.device) -> float:
    """Seconds: of this process on a CPU, which others share."""
    return time.process_time() if device.type == "cpu" else time.monotonic()


def _about(device: torch.device, seconds: float) -> dict[str, Any]:
    """What every record states of its run."""
    about = {"hardware": hardware(device), "torch": torch.__version__, "commit": source_commit()}
    return {"seconds": round(seconds, 1), **about}


def train(job: Job, rate: float, images: Digits) -> dict[str, Any]:
    """One run, to its end: accuracies in per cent, also where validation first reaches the claim's level."""
    scale, device = SCALES[job.scale], images.training.device
    began = _clock(device)
    level, looks = scale.levels.get(job.claim, (None, 1))
    net = network(job, images.training.size).to(device).to(memory_format=torch.channels_last).train()
    optimizer = create_optimizer_v2(net, opt="sgd", lr=rate, weight_decay=5e-4, momentum=0.9)
    augment = Augment(rotation=30) if job.claim == "rotation" else None
    matched: dict[str, Any] | None = None
    batches = Batches(images.training, scale.batch, train=True, seed=job.seed, augment=augment)
    for step, batch in enumerate(batches.epoch()):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, job.updates, rate)
        scores = net(batch.images.contiguous(memory_format=torch.channels_last))
        labels = batch.labels
        if images.training.spec.multi_label:
            labels = labels / labels.sum(1, keepdim=True)
        F.cross_entropy(scores, labels, label_smoothing=0.1).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if level is not None and matched is None and (step + 1) % (job.updates // looks) == 0:
            found = accuracy(net, images.validation)
            if found >= level:
                matched = {"update": step + 1, "validation": found, **_tested(net, images)}
            net.train()
    record: dict[str, Any] = {"validation": accuracy(net, images.validation)}
    if job.claim != "rates":  # a trial never sees the test images
        record |= _tested(net, images)
    if level is not None:
        record |= {"level": level, "matched": matched}
    seconds = _clock(device) - began
    return {
        "claim": job.claim,
        "head": job.head,
        "even": job.even,
        "seed": job.seed,
        "setting": job.setting,
        "rate": rate,
        **record,
        "n": {"validation": len(images.validation), "test": len(images.tests["test"])},
        "updates": job.updates,
        "parameters": sum(p.numel() for p in net.parameters()),
        **_about(device, seconds),
    }


def _tested(net: nn.Module, images: Digits) -> dict[str, Any]:
    found = {name: accuracy(net, some) for name, some in images.tests.items()}
    changed = {name: found.pop(name) for name in MNIST_C if name in found}
    if not changed:
        return dict(found)
    test, spec = images.tests["test"], images.training.spec
    target = EvalTarget("", net.eval(), test, len(test), spec.mean, spec.std, 0.0, None)
    return found | {
        "corrupted": round(statistics.mean(changed.values()), 4),
        "corruptions": changed,
        "ece": round(calibrate(target, "").raw.ece, 4),
    }


def run(job: Job, data: str | Path | None, device: torch.device, folder: Path = KEPT) -> dict[str, Any]:
    """Train a run and keep its record."""
    rate = best_rate(job, folder) if job.rate is None else job.rate
    if rate is None:
        raise CapszooError(f"{job.key} has no learning rate yet", "run the claim rates first")
    record = train(job, rate, digits(job, data, device))
    keep(job.claim, job.key, record, folder)
    return record


def _outliers_of(target: EvalTarget, data: str | Path | None, images: int) -> ImageSet:
    """Images of the other data set: from its folder, else the 1,000 of tests/fixtures."""
    name = OTHERS[target.images.spec.name]
    try:
        return other_images(target, name, data, images, 0)
    except DataError:
        from tests.support import packed

        return packed(ROOT, name).subset(torch.arange(min(images, 1000)))


#: Lengths of one step along the sign of the gradient, in 255ths of the pixels' range; 0 is no step.
STEP_SIZES = (0, 0.125, 0.25, 0.5, 1, 2, 4, 8)


def masking(target: EvalTarget, twin: EvalTarget, radii: Sequence[float], steps: int) -> dict[str, Any]:
    """Whether a network's gradients mislead an attack that follows them.

    ``loss``: the mean of the largest log-probability of another class less that of the image's, after one step of each
    of ``STEP_SIZES`` along the sign of the gradient, and ``random``, along random signs. ``radii``:
    images that stand after ``pgd`` by the network's own gradients, after the same steps by those of ``twin``, which are
    not stopped by a wrong answer, and images that only the latter change: gradients that serve stand for most of them.
    """
    own, others = (PixelScores(one) for one in (target, twin))

    def loss(forward: Callable[[Tensor], Tensor], pixels: Tensor, labels: Tensor) -> Tensor:
        return attack_loss(forward(pixels).log_softmax(1), labels)

    def gradient(forward: Callable[[Tensor], Tensor], pixels: Tensor, labels: Tensor) -> Tensor:
        pixels = pixels.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(loss(forward, pixels, labels).sum(), pixels)[0].sign()

    sums = {name: torch.zeros(len(STEP_SIZES)) for name in ("loss", "random")}
    counts = [dict(eps=eps, own=0, transfer=0, only_transfer=0) for eps in radii]
    for number, batch in enumerate(target.batches(100)):
        images, labels = batch.pixels.float() / 255, batch.labels
        generator = keyed_generator(0, number)
        noise = torch.randn(images.shape, generator=generator).sign().to(images)
        with torch.no_grad():
            for name, sign in (("loss", gradient(own, images, labels)), ("random", noise)):
                moved = [(images + size / 255 * sign).clamp(0, 1) for size in STEP_SIZES]
                sums[name] += torch.stack([loss(own, some, labels).sum().cpu() for some in moved])
        for count in counts:
            eps = count["eps"]
            _, standing = pgd(own, images, labels, eps, steps, keyed_generator(0, number))
            tried = images
            for _ in range(steps):
                tried = tried + STEP_SHARE * eps / steps * gradient(others, tried, labels)
                tried = torch.minimum(torch.maximum(tried, images - eps), images + eps).clamp(0, 1)
            with torch.no_grad():
                by_twin = own(tried).argmax(1) == labels
            count["own"] += int(standing.sum())
            count["transfer"] += int(by_twin.sum())
            count["only_transfer"] += int((standing & ~by_twin).sum())
    curves = {name: (total / target.n).tolist() for name, total in sums.items()}
    return {"n": target.n, "steps": steps, "sizes": STEP_SIZES, **curves, "radii": counts}


@in_float32
def measure(
    one: Measurement, data: str | Path | None, device: torch.device, folder: Path = KEPT
) -> dict[str, Any]:
    """Measure a checkpoint and keep the record, which has what ``capszoo eval --json`` has."""
    began = _clock(device)
    target = prepare(one.model, data=data, limit=one.images, device=device)
    result: Any
    if one.claim == "pose":
        result = asdict(pose_probe(target))
    elif one.claim == "ood":
        result = asdict(outliers(target, _outliers_of(target, data, one.images)))
    elif one.claim == "deletion":
        result = {"methods": [asdict(row) for row in deletions(target, most=one.images)]}
    else:
        steps, radii = SCALES[one.scale].steps, RADII[target.images.spec.name]
        if one.claim == "attack":
            result = asdict(adversarial(target, radii, steps=steps))
        else:
            twin = prepare(HEAD_CHECKPOINTS["avg"], data=data, limit=one.images, device=device)
            result = masking(target, twin, radii, steps)
    seconds = _clock(device) - began
    record = {
        "claim": one.claim,
        "model": one.model,
        "sha256": checkpoints(aliases=False)[one.model].sha256,
        "dataset": target.images.spec.name,
        "images": target.n,
        "clean": assess(target).accuracy,
        "seed": 0,
        "result": rounded(result),
        **_about(device, seconds),
    }
    keep(one.claim, one.key, record, folder)
    return record


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="default: all")
    parser.add_argument("--scale", choices=sorted(SCALES), default="small", help="size of the runs")
    parser.add_argument("--missing", action="store_true", help="print what is missing, and run nothing")
    parser.add_argument("--minutes", type=float, metavar="N", help="start no run after this many minutes")
    parser.add_argument("--data", metavar="FOLDER", help="folder of MNIST (default: CAPSZOO_DATA)")
    parser.add_argument("--device", metavar="NAME", help="default: a GPU if there is one")
    args = parser.parse_args(argv)
    everything: list[tuple[Measurement | Job, float]] = [
        *missing_measurements(args.scale),
        *missing(args.scale),
    ]
    claims = {one.claim for one in measurements(args.scale)} | {one.claim for one in jobs(args.scale)}
    if unknown := sorted(set(args.claims) - claims):
        parser.error(f"unknown claim {', '.join(unknown)}: it is one of {', '.join(sorted(claims))}")
    wanted = [(one, seconds) for one, seconds in everything if not args.claims or one.claim in args.claims]
    if args.missing:
        for claim in dict.fromkeys(one.claim for one, _ in wanted):
            left = [seconds for one, seconds in wanted if one.claim == claim]
            print(f"{claim}: {len(left)} runs of {args.scale} scale, about {sum(left) / 60:.0f} min")
        total = sum(seconds for _, seconds in wanted) / 60
        print(f"together about {total:.0f} min of one core" if wanted else "nothing")
        return 0
    device, began = resolve_device(args.device), time.monotonic()
    data = args.data or os.environ.get("CAPSZOO_DATA")
    for one, _ in wanted:
        if args.minutes is not None and time.monotonic() - began > 60 * args.minutes:
            break
        try:
            record = run(one, data, device) if isinstance(one, Job) else measure(one, data, device)
        except CapszooError as error:  # such as a library that is missing: the others are run all the same
            print(f"left out: {one.claim} {one.key}: {error}", file=sys.stderr, flush=True)
            continue
        print(one.claim, one.key, f"{record['seconds']} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
