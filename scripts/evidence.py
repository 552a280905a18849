"""The page docs/evidence.md: maintainers run it when a run of benchmarks/evidence.py has ended (`make docs` does).

    python scripts/evidence.py            # the page, and a plot for each claim that has been run
    python scripts/evidence.py --check    # write nothing; fail where the page is out of date

Every figure comes from a record in benchmarks/results/evidence; a claim without runs is marked.
"""

from __future__ import annotations

import math
import statistics
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

from benchmarks import evidence
from benchmarks.models import markdown
from capszoo._pretrained.catalogue import checkpoints
from capszoo.recipes.evaluation.adversarial import MASKED
from scripts.comparison import holm, welch_interval, write_page

PAGE, PICTURES = ROOT / "docs" / "evidence.md", ROOT / "docs" / "pictures"
SCALE = "small"
SIZE = evidence.SCALES[SCALE]

CLAIMS = {
    "pose": "The pose of a class capsule says how its object is turned or shifted",
    "deletion": "The couplings mark what a prediction depends on",
    "ood": "Capsule lengths and couplings tell images of another data set",
    "few": "Capsules need fewer images",
    "rotation": "Capsules generalise to unseen rotations",
    "affine": "Capsules generalise to other affine poses",
    "overlap": "Capsules tell overlapping digits apart",
    "corruption": "Capsules withstand corruptions",
    "calibration": "The probabilities of capsules are calibrated",
    "attack": "Capsules resist attacks",
    "masking": "The gradients of capsules mislead attacks",
}


@dataclass(frozen=True)
class Trained:
    """A claim that is measured on networks of this page's own.

    Attributes:
        runs: claim of the runs that have the figure.
        figure: key of their records, in per cent.
        about: what the networks learn and are tested on; may contain the setting.
        settings: of the runs.
        name: of the figure.
        sign: -1 for a figure that is better if it is smaller.
    """

    runs: str
    figure: str
    about: str
    settings: tuple[int, ...] = (0,)
    name: str = "accuracy"
    sign: int = 1


AFTER = f"After {evidence.CORRUPTED} images of each class"
TRAINED = {
    "few": Trained("few", "test", "With {} a class", tuple(sorted(SIZE.few))),
    "rotation": Trained("rotation", "unseen", "Within ±30°, tested at 30 to 60° in either sense"),
    "affine": Trained("affine", "affnist", "Shifted digits, tested on affine ones (affNIST, regenerated)"),
    "overlap": Trained("overlap", "test", "Two digits of one image, both to be named (MultiMNIST)"),
    "corruption": Trained("few", "corrupted", f"{AFTER}, mean of twelve corruptions", (evidence.CORRUPTED,)),
    "calibration": Trained(
        "few",
        "ece",
        f"{AFTER}, unchanged images: expected calibration error of the softmax of the scores, without a temperature",
        (evidence.CORRUPTED,),
        "calibration error",
        -1,
    ),
}


def records(claim: str, folder: Path = evidence.KEPT) -> dict[str, dict[str, Any]]:
    """Key without the scale -> record, of the page's scale."""
    prefix = f"{SCALE}/"
    return {
        key.removeprefix(prefix): row
        for key, row in evidence.kept(claim, folder).items()
        if key.startswith(prefix)
    }


def head_of(model: str) -> str:
    """The head of a checkpoint on the CIFAR ResNet-20, else its name."""
    return next((head for head, name in evidence.HEAD_CHECKPOINTS.items() if name == model), f"`{model}`")


#: Name and record of measured checkpoints.
Rows = list[tuple[str, dict[str, Any]]]
#: Name, value and interval of the figures of a checkpoint.
Figures = Iterable[tuple[str, float, tuple[float, float]]]


def measured(claim: str, folder: Path) -> Rows:
    """Name and record of every measured checkpoint, in the order of the runs; not of weights that were replaced."""
    rows, known = records(claim, folder), checkpoints(aliases=False)
    models = (*evidence.HEAD_CHECKPOINTS.values(), *evidence.DIGIT_CHECKPOINTS)
    current = (model for model in models if model in rows and rows[model]["sha256"] == known[model].sha256)
    return [(head_of(model), rows[model]) for model in current]


def counts_of(values: Iterable[int]) -> str:
    """A count that several records state, or those that they state."""
    return " or ".join(f"{value:,}" for value in sorted(set(values)))


def number(value: float, digits: int = 2) -> str:
    """A number without the sign of a rounded zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def between(interval: tuple[float, float], digits: int = 2) -> str:
    """An interval as text."""
    return f"{number(interval[0], digits)} to {number(interval[1], digits)}"


def dots(
    panel: Any, rows: Rows, names: Sequence[str], gap: float, found: Callable[[dict[str, Any]], Figures]
) -> None:
    """A row for each network, with a dot and its interval for each name that has a figure."""
    for place, (_, row) in enumerate(rows):
        for name, figure, (low, high) in found(row["result"]):
            at, colour = place + gap * (names.index(name) - (len(names) - 1) / 2), _colour(names, name)
            panel.plot([low, high], [at, at], color=colour, lw=1)
            panel.plot([figure], [at], "o", color=colour, ms=3)
    _names(panel, rows)


def _colour(names: Sequence[str], name: str) -> str:
    return "0.7" if name == "pixels" else f"C{names.index(name)}"


def legend(panel: Any, names: Sequence[str], **where: Any) -> None:
    for name in names:
        panel.plot([], [], "o", color=_colour(names, name), label=name)
    panel.legend(fontsize=7, **where)


def _names(panel: Any, rows: Rows) -> None:
    panel.set_yticks(range(len(rows)), [name.strip("`") for name, _ in rows], fontsize=7)
    panel.invert_yaxis()


# -- poses ----------------------------------------------------------------------------------------------------------

OF_NETWORK = ("class poses", "class activations", "pooled features")
SOURCES = (*OF_NETWORK, "pixels")
CHANGES = ("rotation", "shift")


def pose_scores(row: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """(change, source) -> score."""
    return {(one["change"], one["source"]): one for one in row["result"]["scores"]}


def _r2(score: dict[str, Any] | None) -> str:
    return f"{number(score['r2'])} ({between(score['interval'])})" if score else "–"


def pose_lines(rows: Rows) -> list[str]:
    """Verdict and table of the pose probe."""
    cases, above_activations, above_pooled, cells, pixels = 0, 0, 0, [], {}
    for name, row in rows:
        scores = pose_scores(row)
        pixels[row["dataset"]] = ", ".join(_r2(scores[change, "pixels"]) for change in CHANGES)
        cells.append(
            [name, *(_r2(scores.get((change, source))) for change in CHANGES for source in OF_NETWORK)]
        )
        if name in ("avg", "routing_pool") or ("shift", "class poses") not in scores:
            continue
        for change in CHANGES:
            pose, activation, pooled = (scores[change, source]["interval"] for source in OF_NETWORK)
            cases += 1
            above_activations += pose[0] > activation[1]
            above_pooled += pose[0] > pooled[1]
    n, fitted = (counts_of(row["result"][key] for _, row in rows) for key in ("n", "fitted"))
    from_pixels = "; ".join(f"of `{dataset}`: {found}" for dataset, found in pixels.items())
    return [
        "A linear map reads more of a rotation or a shift from the class poses than from the class activations in "
        f"{_of(above_activations, cases)} cases (networks with class capsules, times the two changes) "
        f"and more than from the pooled features of the same network in {_of(above_pooled, cases)}. A "
        "case counts where the 95% intervals do not overlap.",
        "",
        f"R² of a ridge regression and its 95% interval, fitted on {fitted} moved test images, measured on {n} others "
        "(±60°, and ±15% of the side: [definition](robustness.md#poses)). The head checkpoints share a trunk and a "
        "recipe, those for MNIST do not. The vectors have different widths. What `avg` and `routing_pool` have as "
        "poses are contributions of groups of channels to each class: they are not counted. Pixels, which need no "
        f"network, give for rotation and shift {from_pixels}.",
        "",
        *markdown(
            ["network", *(f"{change}: {source}" for change in CHANGES for source in OF_NETWORK)], cells
        ),
    ]


def draw_pose(axes: Any, rows: Rows) -> None:
    """R² of the shift by source, and of the rotation."""

    def found(result: dict[str, Any]) -> Figures:
        return [
            (one["source"], one["r2"], one["interval"]) for one in result["scores"] if one["change"] == change
        ]

    for panel, change in zip(axes, CHANGES, strict=True):
        dots(panel, rows, SOURCES, 0.18, found)
        panel.set_xlabel(f"R² of the {change}, 95% interval")
        panel.axvline(0, color="0.8", zorder=0)
    legend(axes[0], SOURCES, loc="upper right")


# -- deletion -------------------------------------------------------------------------------------------------------

METHODS = ("couplings", "gradient", "occlusion")


def deletion_lines(rows: Rows) -> list[str]:
    """Verdict and table of the deletion test."""
    cells, with_map, better, worse = [], [], [], []
    for name, row in rows:
        by = {one["method"]: one for one in row["result"]["methods"]}
        gains = [
            "–"
            if by[method]["gain"] is None
            else f"{by[method]['gain']:+.3f} ({between(by[method]['interval'], 3)})"
            for method in METHODS
        ]
        cells.append([name, f"{by['gradient']['random']:.3f}", *gains])
        if by["couplings"]["gain"] is not None:
            with_map.append(name)
            low, high = by["couplings"]["interval"]
            better += [name] if low > 0 else []
            worse += [name] if high < 0 else []
    which = f" ({', '.join(better)})" if better else ""
    return [
        "Blackening the tiles that the routing's map marks most lowers the probability more than random order does in "
        f"{_of(len(better), len(with_map))} networks{which}, and less in {_of(len(worse), len(with_map))} "
        f"(n = {counts_of(row['images'] for _, row in rows)} images each, by 95% intervals).",
        "",
        "The area over the curve in random order, and by how much that of each map's order exceeds it, with the 95% "
        "interval over the images: the mean fall of the predicted class's probability while the visible tiles of an "
        "image are blackened one after the other, first those with the largest values "
        "([definition](robustness.md#deletion)). Maps of gradient × pixel and of occlusion need no couplings. The map "
        "of the routing is not the couplings alone in every head: `dynamic` multiplies them with the length of the "
        "vote, `em` and `self_routing` with the activation of the child. The couplings of `dynamic` and `idpa` "
        "are nearly even ([entropy](comparison.md)), so that what the map of `dynamic` marks are the lengths.",
        "",
        *markdown(["network", "random order", *METHODS], cells),
    ]


def draw_deletion(axes: Any, rows: Rows) -> None:
    """Gain over random order by map."""

    def found(result: dict[str, Any]) -> Figures:
        known = (one for one in result["methods"] if one["gain"] is not None)
        return [(one["method"], one["gain"], one["interval"]) for one in known]

    dots(axes[0], rows, METHODS, 0.2, found)
    axes[0].axvline(0, color="0.5", zorder=0)
    axes[0].set_xlabel("area over the curve, less that of random order")
    legend(axes[0], METHODS)


# -- outliers -------------------------------------------------------------------------------------------------------

SCORES = ("max probability", "energy", "max activation", "reconstruction", "coupling entropy")
OF_CAPSULES = SCORES[2:]


def ood_lines(rows: Rows) -> list[str]:
    """Verdict and table of outliers."""
    cells, better, compared, heads = [], [], 0, {}
    for name, row in rows:
        by = {one["score"]: one for one in row["result"]["scores"]}
        shown = (
            f"{by[s]['auroc']:.3f} ({between(by[s]['interval'], 3)})" if s in by else "–" for s in SCORES
        )
        cells.append([name, *shown])
        if name in evidence.HEAD_CHECKPOINTS:
            heads[name] = by
        if name not in ("avg", "routing_pool", "conv"):
            own = [score for score in OF_CAPSULES if score in by]
            compared += len(own)
            least = by["max probability"]["interval"][1]
            better += [f"{score} of {name}" for score in own if by[score]["interval"][0] > least]
    which = f" ({', '.join(better)})" if better else ""
    verdict = (
        "A score that only capsules have (length, reconstruction, coupling entropy) tells images of another data set "
        f"better than the largest probability of the same network in {_of(len(better), compared)} cases{which}."
    )
    if twin := heads.pop("avg", None):
        best = max(twin.values(), key=lambda one: one["auroc"])
        above = [
            name
            for name, by in heads.items()
            if max(one["interval"][0] for one in by.values()) > best["interval"][1]
        ]
        verdict += (
            f" {_of(len(above), len(heads)).capitalize()} heads on the trunk of `avg` have a score better than its "
            f"{best['score']} ({best['auroc']:.3f})."
        )
    sets = {
        f"{result['n']:,} of `{row['dataset']}` and {result['others']:,} of `{result['dataset']}`"
        for _, row in rows
        if (result := row["result"])
    }
    return [
        verdict,
        "",
        f"AUROC and its 95% interval for {'; for '.join(sorted(sets))}. 0.5 is chance. Scores as "
        "[defined](robustness.md#outliers). The energy needs logits that are not normalised, the reconstruction a "
        "decoder. Below 0.5 a score has the other sense: there, couplings are more even for the network's own images.",
        "",
        *markdown(["network", *SCORES], cells),
    ]


def draw_ood(axes: Any, rows: Rows) -> None:
    """AUROC by score."""

    def found(result: dict[str, Any]) -> Figures:
        return [(one["score"], one["auroc"], one["interval"]) for one in result["scores"]]

    dots(axes[0], rows, SCORES, 0.15, found)
    axes[0].axvline(0.5, color="0.5", zorder=0)
    axes[0].set_xlabel("AUROC, 95% interval")
    legend(axes[0], SCORES)


# -- attacks --------------------------------------------------------------------------------------------------------


def attack_verdict(rows: Rows, n: str) -> str:
    """What the attacks say of the heads, against average pooling at each radius."""
    heads = {name: row["result"]["radii"] for name, row in rows if name in evidence.HEAD_CHECKPOINTS}
    others = {name: radii for name, radii in heads.items() if name not in ("avg", "conv")}
    if "avg" not in heads or not others:
        return f"There are too few runs for a comparison with `avg` (n = {n})."
    parts = []
    for place, twin in enumerate(heads["avg"]):
        above = [name for name, radii in others.items() if radii[place]["interval"][0] > twin["interval"][1]]
        best = max(radii[place]["accuracy"] for radii in others.values())
        which = f" ({', '.join(above)})" if above else ""
        parts.append(
            f"at eps {255 * twin['eps']:.0f}/255, {_of(len(above), len(others))} routed heads{which} stand above `avg` "
            f"({twin['accuracy']:.0f}%; the best has {best:.0f}%)"
        )
    return (
        f"Under APGD and Square (CIFAR-10, n = {n}), " + ", and ".join(parts) + ", beyond the 95% intervals."
    )


def attack_lines(rows: Rows) -> list[str]:
    """Table of the attacks."""
    lines = []
    for name, row in rows:
        radii = row["result"]["radii"]
        failed = radii[0]["accuracy"] > 0 and radii[-1]["accuracy"] >= radii[0]["interval"][0]
        cells = [f"{radii[0]['after']['clean']}"]
        for one in radii:
            stand = ", ".join(f"{count}" for key, count in one["after"].items() if key != "clean")
            cells.append(f"{one['accuracy']:.1f} ({between(one['interval'], 1)}), {stand}")
        cells.append("the attack failed" if failed else "yes" if row["result"]["masked"] else "no")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    steps, n = (counts_of(row["result"][key] for _, row in rows) for key in ("steps", "n"))
    return [
        attack_verdict(rows, n),
        "",
        f"Accuracy in per cent of {n} images at a small and a large radius (2/255 and 8/255 for CIFAR-10, 0.1 and 0.3 "
        f"for MNIST), its 95% interval, and how many images stand after APGD on the cross-entropy ({steps} steps), on "
        f"the margin ({steps} more) and Square ([definition](robustness.md#attacks)). There is one checkpoint of each "
        "head: the variation over seeds was not measured. The networks for MNIST differ in trunk and recipe, so that "
        "their differences say nothing of capsules. Where the accuracy at the larger radius is within the "
        "interval of the small one, the attack failed, and neither is a robustness.",
        "",
        "| network | recognised | small radius | large radius | masked gradients |",
        "|---|---:|---:|---:|---|",
        *lines,
    ]


def draw_attack(axes: Any, rows: Rows) -> None:
    """Accuracy at the smaller radius."""
    dots(
        axes[0],
        rows,
        [""],
        0,
        lambda found: [("", found["radii"][0]["accuracy"], found["radii"][0]["interval"])],
    )
    axes[0].set_xlabel("accuracy, %, at eps 2/255 (CIFAR-10) or 0.1")


# -- masked gradients ------------------------------------------------------------------------------------------------


#: Lengths of a step in the table, in 255ths; the plot has all.
STEPS_SHOWN = (0, 0.5, 2, 8)
STANDS = {"own": "its own gradients", "transfer": "those of avg"}


def masking_lines(rows: Rows) -> list[str]:
    """Verdict and tables of the gradients' test."""
    sizes, n = rows[0][1]["result"]["sizes"], counts_of(row["result"]["n"] for _, row in rows)
    steps, radii = rows[0][1]["result"]["steps"], [one["eps"] for one in rows[0][1]["result"]["radii"]]
    flat, fooled, lines, stand = [], [], [], []
    for name, row in rows:
        found = row["result"]
        rises = [value > last for last, value in zip(found["loss"], found["loss"][1:], strict=False)]
        above = [a > b for a, b in zip(found["loss"][1:], found["random"][1:], strict=True)]
        flat += [] if all(rises[: sizes.index(2)]) and all(above) else [name]
        losses = {size: pair for size, *pair in zip(sizes, found["loss"], found["random"], strict=True)}
        lines.append([name, *(" / ".join(map(number, losses[size])) for size in STEPS_SHOWN)])
        counts = (f"{one['own']} / {one['transfer']} / {one['only_transfer']}" for one in found["radii"])
        stand.append([name, *counts])
        if name != "avg" and max(one["only_transfer"] for one in found["radii"]) > MASKED * found["n"]:
            fooled.append(name)
    which = f" ({', '.join(fooled)})" if fooled else ""
    return [
        f"In {_of(len(rows) - len(flat), len(rows))} heads the loss rises along its gradient, with the length of a "
        "step up to 2/255, and more than along random signs up to 8/255. An attack by the gradients of `avg` changes "
        f"images that stand after an attack by the head's own gradients, more than {100 * MASKED:.0f}% of all, in "
        f"{_of(len(fooled), len(rows) - 1)} heads{which}.",
        "",
        f"The mean loss (the largest log-probability of another class less that of the image's own, in nats) of {n} "
        "images of CIFAR-10 after one step along the sign of its gradient / along random signs, by the length of the "
        "step in 255ths. A loss that does not rise along its gradient, and a foreign gradient that does more than the "
        "head's own, are the signs of masked gradients.",
        "",
        *markdown(["head", *(f"{size:g}" for size in STEPS_SHOWN)], lines),
        "",
        f"Images of {n} that stand after {steps} steps of [PGD](robustness.md#attacks) by the head's own gradients / "
        f"after {steps} steps by those of `avg` / that stand after the former and fall to the latter.",
        "",
        *markdown(["head", *(f"eps {255 * eps:.0f}/255" for eps in radii)], stand),
    ]


def draw_masking(axes: Any, rows: Rows) -> None:
    """Loss by the length of a step; images that stand after each attack."""
    curves, bars = axes
    for place, (name, row) in enumerate(rows):
        found, colour = row["result"], f"C{place}"
        sizes = [str(size) for size in found["sizes"]]
        curves.plot(sizes, found["loss"], color=colour, label=name)
        curves.plot(sizes, found["random"], color=colour, ls=":")
        for offset, (key, shade) in enumerate((("own", "C0"), ("transfer", "C1"))):
            share = 100 * found["radii"][0][key] / found["n"]
            bars.barh(place + 0.35 * (offset - 0.5), share, 0.35, color=shade, label=key)
    curves.set_xlabel("length of the step, 255ths")
    curves.set_ylabel("mean loss, nats (dotted: random signs)")
    curves.legend(fontsize=7)
    bars.set_xlabel("images that stand at eps 2/255, %")
    _names(bars, rows)
    handles = bars.get_legend_handles_labels()[0][:2]
    bars.legend(handles=handles, labels=[f"by {text}" for text in STANDS.values()], fontsize=7)


# -- trained claims -------------------------------------------------------------------------------------------------


def variant(head: str, even: bool) -> str:
    """Name of a head, or of its twin with even couplings."""
    return f"{head}, even" if even else head


def trained(claim: str, setting: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Variant -> records of its seeds."""
    one, found = TRAINED[claim], {}
    rows = {key: row for key, row in records(one.runs, folder).items() if one.figure in row}
    for head, even in dict.fromkeys(
        (job.head, job.even) for job in evidence.jobs(SCALE) if job.claim == one.runs
    ):
        keys = (f"{setting}/{head}{'/even' if even else ''}/{seed}" for seed in evidence.SEEDS)
        found[variant(head, even)] = [rows[key] for key in keys if key in rows]
    return found


@dataclass(frozen=True)
class Compared:
    """A claim's heads against one kind of twin.

    Attributes:
        twin: "avg" or "even".
        by: head -> difference of the means, half its 95% interval, and the p value, of the heads with all seeds.
        differ: heads whose difference stays significant at 5% with Holm's correction for all of ``by``.
        untrained, short: heads that are not compared, since no rate trained a side, or a side did not reach the level
            in every seed.
    """

    twin: str
    by: dict[str, tuple[float, float, float]]
    differ: set[str]
    untrained: list[str]
    short: list[str]


#: Validation accuracy in per cent of ten classes, below which no rate of the trials trained a head.
UNTRAINED = 20.0


def trainable(name: str, folder: Path) -> bool:
    """Whether a rate of the trials trained a head; also before there are any. A claim's own figures do not matter."""
    rows = records("rates", folder).values()
    found = [row["validation"] for row in rows if variant(row["head"], row["even"]) == name]
    return not found or max(found) >= UNTRAINED


def compared(claim: str, setting: int, folder: Path, matched: bool = False) -> list[Compared]:
    """The comparisons of a claim at the end of training, or where validation reached its level."""
    rows, key, found = trained(claim, setting, folder), TRAINED[claim].figure, []

    def figures(name: str) -> list[float]:
        runs = [(run.get("matched") or {}) if matched else run for run in rows[name]]
        return [run[key] for run in runs if key in run]

    for kind in ("even", "avg"):
        by, untrained, short = {}, [], []
        for head in rows:
            twin = "avg" if kind == "avg" else variant(head, True)
            if head == twin or twin not in rows or head.endswith(", even"):
                continue
            sides = [figures(head), figures(twin)]
            if not (trainable(head, folder) and trainable(twin, folder)):
                untrained.append(head)
            elif min(map(len, sides)) < len(evidence.SEEDS):
                short += [head] if len(rows[head]) == len(rows[twin]) == len(evidence.SEEDS) else []
            else:
                by[head] = welch_interval(*sides)
        differ = holm({head: p for head, (_, _, p) in by.items()})
        found.append(Compared(kind, by, differ, untrained, short))
    return found


def trained_lines(claim: str, folder: Path) -> list[str]:
    """Verdict and tables of a trained claim, for each of its settings."""
    one, lines, tables = TRAINED[claim], [], []
    level = SIZE.levels.get(claim, (None, 0))[0]
    for setting in one.settings:
        if not any(trained(claim, setting, folder).values()):
            continue
        about = one.about.format(f"{setting} image{'s' if setting > 1 else ''}")
        for early in (False, True)[: 1 + bool(level)]:
            when = f"at the first validation accuracy of {level:g}%" if early else ""
            lines += ["", f"**{about}{f', {when}' if when else ''}**", ""]
            pair = compared(claim, setting, folder, early)
            lines += _table(claim, setting, folder, early, pair)
            said = ", ".join(part for part in (about if len(one.settings) > 1 else "", when) if part)
            tables.append((said, pair))
    verdicts = [_verdict([(said, pair[side]) for said, pair in tables]) for side in (0, 1)]
    verdict = " ".join(part for part in verdicts if part)
    return [verdict, *lines] if verdict else lines[1:] or ["Not run yet."]


def _table(claim: str, setting: int, folder: Path, early: bool, pair: list[Compared]) -> list[str]:
    """A row for each head, beside its twin with even couplings; ``pair`` has the differences."""
    one, (even, avg) = TRAINED[claim], pair
    rows = {
        name: [state for run in runs if (state := run["matched"] if early else run)]
        for name, runs in trained(claim, setting, folder).items()
    }
    lines = []
    for head, states in rows.items():
        if head.endswith(", even"):
            continue
        validation = f"{statistics.mean(state['validation'] for state in states):.1f}" if states else "–"
        twin = _plus_minus([state[one.figure] for state in rows.get(variant(head, True), [])])
        cells = [_plus_minus([state[one.figure] for state in states]), validation, _difference(avg, head)]
        lines.append([head, *cells, twin, _difference(even, head)])
    about = (
        f"head | {one.name}, % | validation, % | less `avg` | {one.name} with even couplings, % | less even"
    )
    return markdown(about, lines)


def _verdict(tables: list[tuple[str, Compared]]) -> str:
    """How many differences to one kind of twin hold, and which; a pair is a setting and its comparison."""
    count = sum(len(part.by) for _, part in tables)
    if not count:
        return ""
    which = [
        f"{head}{f', {said[0].lower()}{said[1:]}' if said else ''}: {part.by[head][0]:+.2f} ± {part.by[head][1]:.2f}"
        for said, part in tables
        for head in part.by
        if head in part.differ
    ]
    verb = "holds" if len(which) < 2 else "hold"
    listed = f" ({'; '.join(which)} points)" if which else ""
    twin = "its even twin" if tables[0][1].twin == "even" else "`avg`"
    return f"Of {count} differences to {twin}, {len(which) or 'none'} {verb}{listed}."


def _difference(found: Compared, head: str) -> str:
    """The difference to a twin, bold if it holds, or why there is none."""
    if head not in found.by:
        return "not trained" if head in found.untrained else "not reached" if head in found.short else "–"
    by, half, _ = found.by[head]
    text = f"{by:+.2f} ± {half:.2f}"
    return f"**{text}**" if head in found.differ else text


def _plus_minus(values: list[float]) -> str:
    if not values:
        return "–"
    if len(values) < len(evidence.SEEDS):
        return f"{statistics.mean(values):.2f} (n = {len(values)})"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def draw_trained(axes: Any, claim: str, folder: Path) -> None:
    """Means over the seeds at the end of training, and where validation reached the claim's level."""
    (panel,) = axes
    one, level = TRAINED[claim], SIZE.levels.get(claim, (0, 0))[0]
    for place, setting in enumerate(one.settings):
        rows = {name: runs for name, runs in trained(claim, setting, folder).items() if runs}
        label = f"{setting} a class" if len(one.settings) > 1 else "end of training"
        _over_seeds(panel, rows, one.figure, color=f"C{place}", fmt="o", label=label)
        if level:
            states = {name: [run["matched"] or {} for run in runs] for name, runs in rows.items()}
            label = f"at {level:g}% of validation"
            _over_seeds(panel, states, one.figure, color="0.6", fmt="s", label=label)
    panel.set_xlabel(f"{one.name}, %, ± standard deviation over the seeds")
    panel.invert_yaxis()
    if level or len(one.settings) > 1:
        panel.legend(fontsize=7)


def _over_seeds(panel: Any, rows: dict[str, list[dict[str, Any]]], figure: str, **style: Any) -> None:
    """Mean and standard deviation of a figure, of the runs that have it; a row of the plot for each name."""
    values = [[run[figure] for run in runs if figure in run] for runs in rows.values()]
    means = [statistics.mean(part) if part else math.nan for part in values]
    bars = [statistics.stdev(part) if len(part) > 1 else math.nan for part in values]
    if values:
        panel.errorbar(means, list(rows), xerr=bars, capsize=3, **style)


# -- the page -------------------------------------------------------------------------------------------------------

#: Of a claim that is measured on checkpoints: its lines, its drawing, and the number of panels.
MEASURED: dict[str, tuple[Callable[[Rows], list[str]], Callable[[Any, Rows], None], int]] = {
    "pose": (pose_lines, draw_pose, 2),
    "deletion": (deletion_lines, draw_deletion, 1),
    "ood": (ood_lines, draw_ood, 1),
    "attack": (attack_lines, draw_attack, 1),
    "masking": (masking_lines, draw_masking, 2),
}


def lines_of(claim: str, folder: Path) -> list[str]:
    """Verdict and tables of a claim."""
    if claim in TRAINED:
        return trained_lines(claim, folder)
    rows = measured(claim, folder)
    return MEASURED[claim][0](rows) if rows else ["Not run yet."]


def _of(count: int, all_of: int) -> str:
    return f"{count} of {all_of}" if count else f"none of {all_of}"


def progress(folder: Path) -> dict[str, tuple[int, int]]:
    """Claim -> runs that are kept, and all of them."""
    everything = [(one.claim, one.key) for one in evidence.measurements(SCALE)]
    everything += [(job.claim, job.key) for job in evidence.jobs(SCALE)]
    found = {}
    for claim in (*CLAIMS, "rates"):
        if claim in TRAINED:
            runs = [trained(claim, setting, folder) for setting in TRAINED[claim].settings]
            counts = [len(some) for rows in runs for some in rows.values()]
            found[claim] = (sum(counts), len(evidence.SEEDS) * len(counts))
            continue
        keys = [key for own, key in everything if own == claim]
        rows = evidence.kept(claim, folder)
        found[claim] = (sum(key in rows for key in keys), len(keys))
    return found


#: Share of the validation accuracy of ``avg`` below which a head is said to need more updates.
UNFINISHED = 2 / 3


def overall(folder: Path) -> list[str]:
    """Sentences about all comparisons of heads with capsules, at the end of training."""
    lines, widths = [], []
    unfinished: dict[str, list[str]] = {}
    for kind in ("avg", "even"):
        better: dict[str, list[str]] = {}
        worse: dict[str, list[str]] = {}
        count = 0
        for claim, one in TRAINED.items():
            for setting in one.settings:
                (part,) = (some for some in compared(claim, setting, folder) if some.twin == kind)
                where = f"{claim}, {setting} a class" if len(one.settings) > 1 else claim
                reached = {
                    name: statistics.mean(run["validation"] for run in runs)
                    for name, runs in trained(claim, setting, folder).items()
                    if runs
                }
                for head in (head for head in part.by if head != "conv"):
                    count += 1
                    widths.append(part.by[head][1])
                    if kind == "avg" and reached[head] < UNFINISHED * reached["avg"]:
                        unfinished.setdefault(head, []).append(where)
                    if head in part.differ:
                        side = better if one.sign * part.by[head][0] > 0 else worse
                        side.setdefault(where, []).append(head)
        if count:
            which = [
                f" ({'; '.join(f'{where}: ' + ', '.join(heads) for where, heads in some.items())})"
                if some
                else ""
                for some in (better, worse)
            ]
            counts = [sum(map(len, some.values())) for some in (better, worse)]
            twin = "average pooling" if kind == "avg" else "the same head with even couplings"
            lines += [
                f"Trained beside {twin}, a routed head is better in {_of(counts[0], count)} comparisons{which[0]}, and "
                f"worse in {_of(counts[1], count)}{which[1]}.",
            ]
    if lines:
        lines.append(
            f"Such a comparison has {len(evidence.SEEDS)} seeds and {SIZE.test:,} test images, and counts where "
            "Welch's t is significant at 5% with Holm's correction over the heads of a claim. Half the width of its "
            f"95% interval is {statistics.median(widths):.1f} points (median), so that smaller differences are open."
        )
    if unfinished:
        where = " and ".join(f"`{head}` ({'; '.join(places)})" for head, places in unfinished.items())
        lines.append(
            f"With less than two thirds of the validation accuracy of `avg`, {where} may need more updates."
        )
    return lines


def summary(folder: Path) -> list[str]:
    """The verdicts at the top, for a reader to quote."""
    done = progress(folder)
    of_trained = overall(folder)
    partly = [f"{claim} ({runs} of {most} runs)" for claim, (runs, most) in done.items() if 0 < runs < most]
    waiting = [CLAIMS[claim].lower() for claim in CLAIMS if not done[claim][0]]
    if partly:
        of_trained.append(f"Partly run: {', '.join(partly)}.")
    if waiting:
        of_trained.append(f"Not tested yet: {'; '.join(waiting)}.")
    verdicts = [f"- {lines_of(claim, folder)[0]}" for claim in MEASURED if done[claim][0]]
    return [
        "Of networks that are trained for this page:",
        "",
        *(f"- {line}" for line in of_trained),
        "",
        "Of checkpoints of the zoo:",
        "",
        *verdicts,
    ]


def left(folder: Path) -> list[str]:
    """What has not been run: its command, and about what it costs."""
    waiting: dict[str, list[float]] = {}
    for one, seconds in evidence.missing_measurements(SCALE, folder):
        waiting.setdefault(one.claim, []).append(seconds)
    for job, seconds in evidence.missing(SCALE, folder):
        waiting.setdefault(job.claim, []).append(seconds)
    return [
        f"- {len(seconds)} run{'s' if len(seconds) > 1 else ''}: `python benchmarks/evidence.py {claim}`, about "
        f"{math.ceil(sum(seconds) / 60)} min of one core."
        for claim, seconds in waiting.items()
    ]


def page(folder: Path = evidence.KEPT) -> str:
    """docs/evidence.md."""
    done = progress(folder)
    rates = ", ".join(f"{rate:g}" for rate in evidence.RATES)
    longer = ", ".join(f"{times * SIZE.updates} for `{claim}`" for claim, times in evidence.TIMES.items())
    lines = [
        "# When do capsules help?",
        "",
        *summary(folder),
        "",
        "```sh",
        "capszoo eval resnet20_em.cifar10 --pose --deletion --ood cifar100 --limit 1000   # any checkpoint or run",
        "python benchmarks/evidence.py --missing    # runs of this page that are missing",
        "python benchmarks/evidence.py              # run them",
        "```",
        "",
        "Each claim has its own protocol, and no figure of a paper stands here as a baseline. The measurements are "
        "those of `capszoo eval`, on test images drawn by seed 0. The runs of this page are small, for a slow core: a "
        "result that an interval leaves open stays open.",
        "",
        "Networks that are trained for this page: the CIFAR ResNet-20 with eight heads on MNIST at "
        f"{SIZE.size}×{SIZE.size} pixels, {SIZE.updates} updates of {SIZE.batch} images ({longer}), SGD, cosine, "
        f"the best of the rates {rates} for each head by {SIZE.validation} validation images, "
        f"{len(evidence.SEEDS)} seeds, the last weights, {SIZE.test:,} test images. Even is the same head with "
        "`even_couplings`: the same parameters, no routing. `routing_pool` without routing is `avg`. `self_routing` "
        "has no such twin, since its couplings are its scores. A difference is that of the means of three seeds in "
        "points, with half its 95% interval (Welch). It holds, and is bold, where it is significant at 5% with Holm's "
        "correction over the heads of a column. Not trained: no rate trained one of the two. Not reached: not every "
        "seed of both reached that validation accuracy.",
    ]
    for claim, text in CLAIMS.items():
        lines += ["", f"## {text}", "", *lines_of(claim, folder)]
        if done[claim][0]:
            lines += ["", f"![{text}](pictures/evidence_{claim}.svg)"]
    lines += [
        "",
        "## What has not been run",
        "",
        *(left(folder) or ["Nothing of this size."]),
        "- The same with more images and updates, on a GPU: `python benchmarks/evidence.py --scale full`.",
        "- The protocol's 99.2% of validation accuracy for affNIST, at which the paper compares its networks: the runs "
        "here are too short for it.",
    ]
    return "\n".join([*lines, ""])


def plots(folder: Path = evidence.KEPT, out: Path = PICTURES) -> list[Path]:
    """Draw every claim that has runs."""
    import matplotlib

    from capszoo.explain.plotting import new_figure

    written = []
    done = progress(folder)
    for claim in CLAIMS:
        if not done[claim][0]:
            continue
        _, draw, panels = MEASURED.get(claim, (None, None, 1))
        rows = measured(claim, folder)
        figure = new_figure(4.6 * panels + 1.2, 1.4 + 0.32 * (len(rows) or len(evidence.VARIANTS)))
        axes = figure.subplots(1, panels, squeeze=False)[0]
        if draw:
            draw(axes, rows)
        else:
            draw_trained(axes, claim, folder)
        path = out / f"evidence_{claim}.svg"
        with matplotlib.rc_context({"svg.hashsalt": "evidence"}):  # the same records, the same file
            figure.savefig(path, metadata={"Date": None})
        written.append(path)
    return written


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the page is out of date"
    )
    args = parser.parse_args()
    outdated = write_page(PAGE, page(), args.check)
    if not args.check:
        plots()
    return outdated


if __name__ == "__main__":
    sys.exit(main())
