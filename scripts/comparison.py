"""Nine heads on one backbone with one recipe: maintainers run it when a run of the comparison has ended.

    python scripts/comparison.py --commands           # what to run: trials, then every head, every seed
    python scripts/comparison.py --collect FOLDER     # keep the metadata of the finished runs below a folder
    python scripts/comparison.py                      # write docs/comparison.md (and its plot) from what is kept

Every figure of the page comes from the metadata of a run or from that benchmark; a head without runs is marked.
Metadata are stored in benchmarks/results/comparison, one file per run, times and memory in comparison_cost.json.

The heads of two layers take about 4 times a training step of average pooling, so only one of the three is trained in
full: the one with the best validation accuracy in a trial of four epochs, which has a schedule of its own length.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

import capszoo
from benchmarks import evidence, robustness
from benchmarks.models import markdown
from capszoo._pretrained.catalogue import checkpoints
from capszoo.recipes.config import load_recipe
from capszoo.recipes.training.run_folder import compared_settings
from capszoo.summary import count_multiply_adds

KEPT = ROOT / "benchmarks" / "results" / "comparison"
COST = ROOT / "benchmarks" / "results" / "comparison_cost.json"
PAGE, PLOT = ROOT / "docs" / "comparison.md", ROOT / "docs" / "comparison.svg"
PROFILE, SEEDS = "comparison", (0, 1, 2)

#: Head -> its recipe.
HEADS = {
    "avg": "resnet20_avg.cifar10",
    "routing_pool": "resnet20_routingpool.cifar10",
    "conv": "resnet20_conv.cifar10",
    "dynamic": "resnet20_dynamic.cifar10",
    "em": "resnet20_em.cifar10",
    "idpa": "resnet20_idpa.cifar10",
    "self_routing": "resnet20_selfrouting.cifar10",
    "heinsen": "resnet20_heinsen.cifar10",
}
#: Candidates for the last row: the best one by a trial's validation images.
DEPTH2 = {
    "dynamic, 2 layers": "resnet20_dynamic.cifar10_depth2",
    "em, 2 layers": "resnet20_em.cifar10_depth2",
    "self_routing, 2 layers": "resnet20_selfrouting.cifar10_depth2",
}

#: Heads whose learning rate is tried on CIFAR-10: one whose loss rises at the shared rate, and the least accurate one.
RATES_TRIED = ("conv", "self_routing")

#: What a trial changes in the profile. Self-routing starts with even couplings, which give everything below them no
#: gradient: it has hardly begun after one epoch. 5,000 validation images separate candidates that 1,000 do not.
TRIAL = ("epochs=4", "schedule.warmup_epochs=0.4", "data.val_size=5000")

HEADER = """# Nine classification heads compared

```sh
capszoo train resnet20_em.cifar10 --profile comparison --set seed=0     # one of the runs
python scripts/comparison.py --commands                                 # the commands of all runs
```

Nine heads on one backbone, the CIFAR ResNet-20 (16-32-64 channels). The heads with a capsule layer have 32 types of
primary capsules of 16 dimensions, as in the SR-CapsNet paper, except `heinsen`, which routes the pixels of the map. All
train on CIFAR-10 with one recipe, each head with three seeds. The last epoch's weights are measured once on the 10,000
test images. A trial of four epochs on 5,000 validation images selects the last row from three heads with two capsule
layers. `make docs` writes this page from the metadata of the runs in `benchmarks/results/comparison`.

± is the standard deviation over the seeds. Entropy is that of the class layer's couplings on validation images after
the last epoch, as a share of its maximum: 1 means even couplings, 0 one parent (or child) for each capsule. The credit
of `heinsen` is no share and has no entropy. Training accuracy is that of the last epoch, on augmented images. A low one
suggests underfitting within 20 epochs. The profile computes in bf16 (autocast), on processors without fast bf16 units
in float32, as the last column states. Precision and processor differ between heads and between seeds of a head, and
their effect was not measured. Accuracies are those of the runs' own files, in float32, of `dynamic` in float16."""


@dataclass(frozen=True)
class Row:
    """One head: the metadata of its runs, and values derived from its architecture."""

    head: str
    recipe: str
    runs: tuple[dict[str, Any], ...]

    def figures(self, split: str) -> list[float]:
        return [float(run["metrics"][split]["top1"]) for run in self.runs if split in run["metrics"]]

    @property
    def mean(self) -> float:
        return statistics.mean(self.figures("test"))

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; NaN for a single one."""
        found = self.figures("test")
        return statistics.stdev(found) if len(found) > 1 else math.nan


def recipe_settings(name: str, trial: bool = False, rate: float | None = None) -> dict[str, Any]:
    """Settings that a run must have been trained with to count; a ``rate`` replaces that of the profile."""
    changes = [*(TRIAL if trial else ()), *([f"optimizer.lr={rate:g}"] if rate else [])]
    return compared_settings(load_recipe(name, changes, PROFILE).model_dump(mode="json"))


def rate_trials(head: str, kept: Path = KEPT) -> dict[float, float]:
    """Rate -> validation accuracy of its trial on CIFAR-10, for those that have been run."""
    files = {rate: kept / "trials" / f"{HEADS[head]}.{rate:g}.json" for rate in evidence.RATES}
    return {rate: _validation(file) for rate, file in files.items() if file.is_file()}


def fitted(recipe: str, kept: Path = KEPT) -> float | None:
    """The rate of the best trial on CIFAR-10, once all rates have one; else None, which is the profile's."""
    head = next((head for head in RATES_TRIED if HEADS[head] == recipe), None)
    found = rate_trials(head, kept) if head else {}
    return max(found, key=lambda rate: (found[rate], rate)) if len(found) == len(evidence.RATES) else None


def commands(seeds: tuple[int, ...] = SEEDS, kept: Path = KEPT) -> list[str]:
    """Commands: trials of two layers and of rates, then all runs seed by seed: each head has one before any has two.

    Before the trials have been run, the last head of each seed is left out, and rates are those of the profile.
    """
    best = chosen(kept)
    changes = " ".join(f"--set {change}" for change in TRIAL)
    trials = [
        f"capszoo train {recipe} --profile {PROFILE} {changes} --out runs/comparison/trials/{recipe}"
        for recipe in DEPTH2.values()
    ]
    trials += [
        f"capszoo train {HEADS[head]} --profile {PROFILE} {changes} --set optimizer.lr={rate:g} "
        f"--out runs/comparison/trials/{HEADS[head]}.{rate:g}"
        for head in RATES_TRIED
        for rate in evidence.RATES
    ]
    recipes = {
        recipe: fitted(recipe, kept) for recipe in (*HEADS.values(), *([DEPTH2[best]] if best else []))
    }
    return trials + [
        f"capszoo train {recipe} --profile {PROFILE} --set seed={seed}"
        f"{f' --set optimizer.lr={rate:g}' if rate else ''} --out runs/comparison/{recipe}.{seed}"
        for seed in seeds
        for recipe, rate in recipes.items()
    ]


def collect(folder: Path, kept: Path = KEPT) -> list[str]:
    """Copy the metadata of finished runs below a folder; return a line about each, including skipped ones.

    A run counts if its recipe's settings are those of the profile with the head's rate, or, below ``trials``, those of
    a trial. Of a trial, the figures on test images are dropped.
    """
    lines = []
    known = (HEADS | DEPTH2).values()
    for path in sorted([*folder.glob("trials/*/*.json"), *folder.glob("*/*.json")]):
        name, raw, trial = path.stem, {}, path.parents[1].name == "trials"
        if name in known:
            raw = json.loads(path.read_text(encoding="utf-8"))
        if "test" not in raw.get("metrics", {}):
            continue
        of_rate = trial and name in HEADS.values()
        rate = raw["recipe"]["optimizer"]["lr"] if of_rate else fitted(name, kept)
        stated, wanted = compared_settings(raw["recipe"]), recipe_settings(name, trial, rate)
        different = [key for key, value in wanted.items() if stated[key] != value]
        if different:
            lines.append(f"left out: {path.parent}: {', '.join(different)} not as in --profile {PROFILE}")
            continue
        log = path.parent / "metrics.jsonl"
        last = json.loads(log.read_text(encoding="utf-8").splitlines()[-1]) if log.is_file() else {}
        raw["routing"] = last.get("routing")
        if trial:
            del raw["metrics"]["test"]
        split = "validation" if trial else "test"
        suffix = f".{rate:g}" if of_rate else "" if trial else f".{raw['seed']}"
        target = (kept / "trials" if trial else kept) / f"{name}{suffix}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        lines.append(f"kept: {target.relative_to(kept)}: {raw['metrics'][split]['top1']:.2f} ({split})")
    return lines


def _validation(file: Path) -> float:
    return float(json.loads(file.read_text(encoding="utf-8"))["metrics"]["validation"]["top1"])


def trials(kept: Path = KEPT) -> dict[str, float]:
    """Head of two layers -> validation accuracy of its trial, for those that have been run."""
    files = {head: kept / "trials" / f"{recipe}.json" for head, recipe in DEPTH2.items()}
    return {head: _validation(file) for head, file in files.items() if file.is_file()}


def chosen(kept: Path = KEPT) -> str | None:
    """The head of two layers to train: the best by its trial, once all three have one."""
    found = trials(kept)
    return max(found, key=lambda head: found[head]) if len(found) == len(DEPTH2) else None


def rows(kept: Path = KEPT) -> list[Row]:
    """A row for each head; the last one is the chosen head of two layers, or states that there is none yet."""

    def row(head: str, recipe: str) -> Row:
        files = sorted(kept.glob(f"{recipe}.[0-9]*.json"))
        return Row(head, recipe, tuple(json.loads(file.read_text(encoding="utf-8")) for file in files))

    best = chosen(kept)
    last = row(best, DEPTH2[best]) if best else Row("2 layers, the best of three", "", ())
    return [*(row(*item) for item in HEADS.items()), last]


@cache
def cost(recipe: str) -> tuple[int, float]:
    """Parameters, and millions of multiply-adds of an image."""
    loaded = load_recipe(recipe, profile=PROFILE)
    model = capszoo.create_model(loaded.arch, **loaded.model_args)
    return sum(p.numel() for p in model.parameters()), count_multiply_adds(model) / 1e6


def benchmark() -> str:
    """The command that measures forward time, training time and memory of every head."""
    models = " ".join(_spec(recipe) for recipe in (HEADS | DEPTH2).values())
    return (
        "python benchmarks/models.py --batch 32 --iters 9 --warmup 3 --train --memory --keep-memory "
        f"--models {models} --out {COST.relative_to(ROOT)}"
    )


def _spec(recipe: str) -> str:
    """The recipe's model as benchmarks/models.py names it."""
    loaded = load_recipe(recipe, profile=PROFILE)
    arguments = ",".join(f"{key}={value}" for key, value in loaded.model_args.items())
    return f"{loaded.arch}:{arguments}" if arguments else loaded.arch


def cost_table(measured: Path = COST) -> list[str]:
    """Ratios of every head's times to a CIFAR ResNet-18's, over those of ``avg``; memory."""
    content = json.loads(measured.read_text(encoding="utf-8"))
    by_model = {row["model"]: row for row in content["rows"]}
    twin, settings = by_model[_spec(HEADS["avg"])], content["settings"]
    lines = []
    for head, recipe in (HEADS | DEPTH2).items():
        if row := by_model.get(_spec(recipe)):
            times = (f"{row[key] / twin[key]:.2f}" for key in ("forward_ratio", "train_ratio"))
            lines.append([head, *times, f"{row['peak_over_start_mib']:,.0f}"])
        else:
            lines.append([head, "not measured yet", "–", "–"])
    return [
        "",
        f"What a head costs: batch {settings['batch']}, float32, not compiled, {settings['processor']}. "
        f"Each time is the median of {settings['iters']} ratios to a CIFAR ResNet-18 timed in the same turn, divided "
        "by that of `avg`; memory is the peak of two training steps above that of the imports.",
        "",
        *markdown("head | forward | training step | training memory, MiB", lines),
        "",
        "```sh",
        benchmark(),
        "```",
    ]


def _entropies(row: Row) -> list[float]:
    """Entropy of the class layer's couplings in each run that has any."""
    found = [run["routing"]["entropy"][-1] for run in row.runs if (run.get("routing") or {}).get("entropy")]
    return [value for value in found if value is not None]


def even_heads(found: list[Row]) -> list[str]:
    """Heads whose couplings stayed even in every run: to two decimals, their entropy is the maximum."""
    return [row.head for row in found if min(_entropies(row), default=0) >= 0.995]


def plus_minus(row: Row) -> str:
    """Mean of the test accuracies ± standard deviation over the seeds."""
    return f"{row.mean:.2f}" + ("" if math.isnan(row.deviation) else f" ± {row.deviation:.2f}")


def table(found: list[Row]) -> list[str]:
    """The page's table."""
    lines = []
    for row in found:
        size = ["–", "–"]
        if row.recipe:
            parameters, adds = cost(row.recipe)
            size = [f"{parameters:,}", f"{adds:.1f}"]
        if not row.runs:
            lines.append([row.head, *size, "no run yet", "0", *["–"] * 4])
            continue
        validation = statistics.mean(row.figures("validation"))
        training = statistics.mean(run["history"]["train_top1"][-1] for run in row.runs)
        entropies = _entropies(row)
        figures = [plus_minus(row), str(len(row.runs)), f"{validation:.2f}", f"{training:.2f}"]
        figures.append(f"{statistics.mean(entropies):.2f}" if entropies else "–")
        precisions = ", ".join(sorted({run["recipe"]["precision"] for run in row.runs}))
        lines.append([row.head, *size, *figures, precisions])
    head = (
        "head | parameters | multiply-adds, M | test top-1, % | runs | validation, % | training, % | entropy"
    )
    return markdown(f"{head} | precision", lines, (0, 8))


def welch_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Difference of two means, half the width of its 95% confidence interval (Welch's t), and the p value."""
    from scipy.stats import ttest_ind

    test = ttest_ind(first, second, equal_var=False)
    low, high = test.confidence_interval(0.95)
    return statistics.mean(first) - statistics.mean(second), float(high - low) / 2, float(test.pvalue)


def holm(p: dict[str, float]) -> set[str]:
    """Names whose p value remains significant at 5% with Holm's correction for their number."""
    ascending = sorted(p, key=lambda name: (math.isnan(p[name]), p[name]))
    count = len(ascending)
    first_kept = next((k for k, name in enumerate(ascending) if not p[name] <= 0.05 / (count - k)), count)
    return set(ascending[:first_kept])


def conclusion(found: list[Row]) -> list[str]:
    """Each head of three seeds against average pooling: the difference with its 95% interval."""
    enough = {row.head: row for row in found if len(row.runs) >= len(SEEDS)}
    twin = enough.pop("avg", None)
    if twin is None or not enough:
        return ["There are too few runs for a conclusion: it needs three seeds of `avg` and of another head."]
    by = {head: welch_interval(row.figures("test"), twin.figures("test")) for head, row in enough.items()}
    remain = holm({head: p for head, (_, _, p) in by.items()})
    words, cells = [], []
    for head, (mean, half, _) in by.items():
        words.append(
            "no difference shown" if abs(mean) <= half else f"{'more' if mean > 0 else 'less'} accurate"
        )
        cells.append([head, f"{mean:+.2f} ± {half:.2f}", words[-1], "differs" if head in remain else "–"])
    columns = f"difference, points | by its own interval | with Holm's correction for {len(enough)}, 5%"
    lines = [
        f"Against average pooling ({plus_minus(twin)}), the difference of the means and half the width of its 95%",
        "confidence interval (Welch's t, since every head has its own variance):",
        "",
        *markdown(f"head | {columns}", cells, (0, 2, 3)),
        "",
    ]
    if "more accurate" not in words:
        gains = {head: mean + half for head, (mean, half, _) in by.items()}
        head = max(gains, key=lambda head: gains[head])
        lines += [
            "No head is shown to be more accurate. The largest gain that its interval does not exclude is "
            f"{gains[head]:.2f} points ({head}).",
        ]
    lines += [
        "With three seeds an interval is wide for a head whose seeds differ much. It covers the variation over seeds",
        "only: all runs share the 10,000 test images, whose sampling error is 0.3 points for one accuracy.",
    ]
    missing = [f"`{row.head}`" for row in found if row.head != "avg" and row.head not in enough]
    return [*lines, *([f"Seeds are missing for {', '.join(missing)}."] if missing else [])]


def shared_rate(found: dict[str, Row]) -> str:
    """How far the training loss of ``conv`` rises at the shared learning rate, and what is known of other rates."""
    conv = found["conv"]
    peaks = []
    for run in conv.runs:
        losses = run["history"]["train_loss"]
        peaks.append(f"{max(losses):.1f} in epoch {losses.index(max(losses)) + 1} (seed {run['seed']})")
    rises = f" With clipping, its training loss still rises, to {', '.join(peaks)}." if peaks else ""
    return (
        "Without gradient clipping, the `conv` head, whose classes have 32,768 inputs each, diverged at this learning "
        f"rate in a trial (300 updates of 64 images, loss above 1e9).{rises} {rates_of_short_runs()} "
        + rates_to_try([found[head] for head in RATES_TRIED])
    )


def rates_of_short_runs() -> str:
    """What the trials of docs/evidence.md say of the shared rate."""
    shared = load_recipe(HEADS["avg"], profile=PROFILE).optimizer.lr
    kept, gains = evidence.kept("rates"), {}
    for head in evidence.HEADS:
        job = evidence.Job("small", "rates", 100, head, False, len(evidence.SEEDS))
        found = {rate: kept[replace(job, rate=rate).key]["validation"] for rate in evidence.RATES}
        gains[head] = max(found[rate] for rate in evidence.RATES if rate != shared) - found[shared]
    others = " and ".join(f"{rate:g}" for rate in evidence.RATES if rate != shared)
    if worse := ", ".join(f"`{head}` by {by:.1f} points" for head, by in gains.items() if by > 0):
        said = f"not the best for {worse}"
    else:
        (most, loss), *_, (least, gain) = sorted(gains.items(), key=lambda item: item[1])
        said = (
            f"the best for each of {len(gains)} heads: the better of {others} loses {-gain:.1f} (`{least}`) "
            f"to {-loss:.1f} points (`{most}`)"
        )
    size = evidence.SCALES["small"]
    return (
        f"By short runs on MNIST ({size.updates} updates, {size.validation} validation images, one seed: "
        f"[evidence](evidence.md)), the shared rate of {shared:g} is {said}."
    )


def rates_to_try(rows: list[Row], kept: Path = KEPT) -> str:
    """What trials on CIFAR-10 say of the rates of some heads, and what those that are missing would cost."""
    lines, waiting = [], []
    for row in rows:
        if fitted(row.recipe, kept):
            tried = ", ".join(f"{rate:g}: {top1:.1f}%" for rate, top1 in rate_trials(row.head, kept).items())
            lines.append(
                f"By trials of four epochs on CIFAR-10, the validation accuracy of `{row.head}` is {tried}."
            )
            continue
        waiting.append(f"`{row.head}`")
        if row.runs:
            minutes = (
                statistics.median(run["train_seconds"] for run in row.runs) / 5 / 60
            )  # four of twenty epochs
            waiting[-1] += f", {len(evidence.RATES)} x {minutes:.0f} min of one core"
    if waiting:
        lines.append(
            f"Trials of the rate on CIFAR-10 have not been run ({'; '.join(waiting)}): `scripts/comparison.py "
            "--commands` lists them, and afterwards runs with the best rate."
        )
    return " ".join(lines)


def page(kept: Path = KEPT) -> str:
    """docs/comparison.md."""
    found = rows(kept)
    recipe = load_recipe(HEADS["avg"], profile=PROFILE)
    settings = (
        f"The recipe: {recipe.epochs} epochs, batch {recipe.batch_size}, SGD with Nesterov momentum, rate "
        f"{recipe.optimizer.lr:g} with {recipe.schedule.warmup_epochs:g} epochs of warm-up and cosine, weight decay "
        f"{recipe.optimizer.weight_decay:g}, label smoothing {recipe.loss.options['label_smoothing']:g}, gradients "
        f"clipped to norm {recipe.clip_grad:g}, pad 4, crop, flip; "
        f"{recipe.data.val_size:,} training images for validation. "
        + shared_rate({row.head: row for row in found})
    )
    tried = [f"{head.removesuffix(', 2 layers')} {top1:.1f}%" for head, top1 in trials(kept).items()]
    trial = [
        "",
        f"Trials with two capsule layers, validation accuracy: {', '.join(tried) or 'none yet'}. A trial of four "
        "epochs favours heads that learn quickly.",
    ]
    heads = ", ".join(f"`{head}`" for head in even_heads(found))
    more = "[Robustness](robustness.md#accuracy-for-other-iteration-counts) has other iteration counts."
    even = ["", f"Heads whose couplings stayed even (entropy 1.00): {heads}. {more}"] if heads else []
    lines = [
        HEADER,
        "",
        settings,
        "",
        *table(found),
        *trial,
        "",
        "![accuracy against multiply-adds](comparison.svg)",
        "",
        *conclusion(found),
        *corrupted_heads(),
        *even,
        *cost_table(),
        "",
    ]
    return "\n".join(lines)


#: Checkpoints of the heads whose recipes have another name than in :data:`HEADS`.
LONGER = {"routing_pool": "resnet20_routingpool.cifar10", "avg": "resnet20_routingpool.cifar10_avg"}


def corrupted_heads() -> list[str]:
    """Corrupted images and calibration of the longer runs of every head: a paragraph and a table."""
    known, measured = checkpoints(aliases=False), robustness.current()
    found = {
        head: measured[name]
        for head, name in (HEADS | LONGER).items()
        if name in measured and known[name].raw["recipe"].get("profile") == "regularised"
    }
    if len(found) < 2:
        return []
    lines = []
    for head, row in found.items():
        images, ece = row["corruptions"], row["calibration"]
        cells = [images["clean"], images["mean"], ece["raw"]["ece"], ece["scaled"]["ece"]]
        lines.append([head, *(f"{value:.1f}" for value in cells)])
    return [
        "",
        "The heads were trained longer too, for 60 epochs with the profile `regularised`",
        "([accuracies](models.md#checkpoints)). These checkpoints (seed 0) on 1,000 test images, unchanged and under",
        "twelve corruptions, and their calibration error (ECE), before and after temperature scaling, in per cent.",
        "[Robustness](robustness.md) has every checkpoint. There is one run of each: how much these figures vary with",
        "the seed was not measured.",
        "",
        *markdown("head | unchanged | corrupted, mean | ECE | ECE at T", lines),
    ]


def draw(found: list[Row], path: Path = PLOT) -> None:
    """Plot accuracy against multiply-adds, with error bars over the seeds."""
    import matplotlib

    from capszoo.explain.plotting import new_figure

    figure = new_figure(6.4, 4.2)
    axes = figure.subplots()
    for row in found:
        if row.runs:
            bar = 0.0 if math.isnan(row.deviation) else row.deviation
            axes.errorbar(cost(row.recipe)[1], row.mean, yerr=bar, marker="o", capsize=3, label=row.head)
    axes.set(xlabel="multiply-adds of an image, millions", ylabel="CIFAR-10 test top-1, %")
    axes.set_xlim(left=0)  # differences of a thousandth look like none
    axes.legend(fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "comparison"}):  # the same runs, the same file
        figure.savefig(path, metadata={"Date": None})


def write_page(path: Path, text: str, check: bool) -> int:
    """Write a generated page and return 0; to check it, write nothing and return 1 if it is out of date."""
    if not check:
        path.write_text(text, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        print(f"error: {path.relative_to(ROOT)} is out of date: run `make docs`", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--commands", action="store_true", help="print the commands of all runs")
    parser.add_argument(
        "--collect", type=Path, metavar="FOLDER", help="keep the metadata of the runs below FOLDER"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the page is out of date"
    )
    args = parser.parse_args()
    if args.commands:
        print("\n".join(commands()))
        return 0
    if args.collect:
        print("\n".join(collect(args.collect)) or f"no finished run of the comparison below {args.collect}")
    outdated = write_page(PAGE, page(), args.check)
    if not args.check:
        draw(rows())
    return outdated


if __name__ == "__main__":
    sys.exit(main())
