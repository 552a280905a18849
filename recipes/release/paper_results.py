"""A checkpoint's results: ours compared with the papers', the settings that differ, its twins.

This module writes the README's table, docs/models.md and the model cards, from the metadata beside the
weights: no number is typed twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from capszoo._pretrained.info import WeightsInfo
from capszoo.data import DATASETS
from capszoo.models._papers import PAPERS, PaperFigure

from ..config import BACKBONE, CONFIGS, MACHINE_KEYS, NEUTRAL_KEYS, list_recipes, load_recipe
from .public import PRIVATE, public, public_start

#: Keys of a recipe that describe it or how it is run, without effect on the result.
NO_SETTINGS = {"arch", "tag", "profile", "seed"} | NEUTRAL_KEYS | (MACHINE_KEYS - {"precision"})


def header_line(recipe: str, key: str) -> str:
    """The text after ``# <key>:`` in the header of a recipe file, with its continuation lines (``#   …``); or ""."""
    path = CONFIGS / f"{recipe}.yaml"
    header = re.match("(#.*\n)*", path.read_text(encoding="utf-8") if path.is_file() else "")
    found = header and re.search(f"^# {key}: (.*(\n#   .*)*)", header[0], re.MULTILINE)
    return found[1].replace("\n#   ", " ").strip() if found else ""


def as_accuracy(figure: PaperFigure) -> float:
    """A paper's result as accuracy in per cent."""
    return figure.value if figure.metric == "accuracy" else round(100 - figure.value, 4)


def paper_figures(info: WeightsInfo) -> list[PaperFigure]:
    """The papers' results for this network on this data set.

    If the header of its recipe lists some of them by their numbers (one of two pooling methods, say), only these;
    if it states "none", none.
    """
    line = header_line(info.name, "Paper")
    if line.startswith("none"):
        return []
    title = info.metadata.dataset.title
    same = [
        f
        for f in PAPERS.get(info.architecture, ())
        if title == f.dataset or title.startswith(f"{f.dataset} (")
    ]
    named = {float(number) for number in re.findall(r"\d+\.\d+|\d+", line)}
    return [f for f in same if f.value in named or as_accuracy(f) in named] or same


def sampling_error(top1: float, n: int) -> float:
    """Standard error in per cent of an accuracy on n images, from the sampling of the images alone."""
    p = top1 / 100
    return 100 * math.sqrt(p * (1 - p) / n)


def counted(info: WeightsInfo) -> str:
    """Kind of a checkpoint's accuracies: "top-1", or, for images with several labels, the "exact set"."""
    name = info.metadata.dataset.name
    return DATASETS[name].accuracy if name in DATASETS else "top-1"


def began_with(info: WeightsInfo) -> str | None:
    """The initial weights of a checkpoint's run; None if they were random."""
    init = info.metadata.trained.init
    return init.weights if init else None


def start_name(info: WeightsInfo) -> str | None:
    """The initial weights as a reader may know them: a backbone on the user's disk by its architecture."""
    start = began_with(info)
    name = public_start(start) if start else None
    return str(info.model_args.get("backbone", name)) if name == BACKBONE + PRIVATE else name


def trained_further(info: WeightsInfo) -> bool:
    """True if a run began with the checkpoint that had its name before, which the recipe's header describes."""
    return began_with(info) == info.name


def _own_validation(info: WeightsInfo) -> bool:
    """True if the validation images are a split of the data set, not images held out of its training split."""
    return info.metadata.trained.data.validation == "own"


def figures_table(info: WeightsInfo) -> list[str]:
    """Our and the papers' results as the lines of a markdown table."""
    lines = [f"| result | {counted(info)}, % | error, % | on |", "|---|---:|---:|---|"]
    for split, result in info.metadata.metrics.items():
        if result.top1 is None or result.n is None:
            continue
        top1, n = result.top1, result.n
        wrong = f", {result.errors:,} wrong" if result.errors is not None else ""
        held_out = split == "validation" and not _own_validation(info)
        which = "held out of the training set" if held_out else f"{split} set"
        lines.append(
            f"| {'**this file**' if split == 'test' else 'this run'} | {top1:.2f} ± {sampling_error(top1, n):.2f} "
            f"| {100 - top1:.2f} | {n:,} images ({which}){wrong} |"
        )
    for figure in paper_figures(info):
        accuracy, note = as_accuracy(figure), f" ({figure.note})" if figure.note else ""
        lines.append(
            f"| the paper: {figure.source}{note} | {accuracy:.2f} | {100 - accuracy:.2f} | {figure.dataset} |"
        )
    return lines


def seeds_note(info: WeightsInfo) -> str:
    """Mean and standard deviation over the seeds of a checkpoint's recipe, to append to its accuracy; else empty."""
    accuracy = info.metadata.seeds.test
    if accuracy.sd is None:
        return ""
    return f"; {accuracy.mean:.2f} ± {accuracy.sd:.2f}, n = {len(accuracy.values)} seeds"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if not prefix and key in NO_SETTINGS:
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            # an empty section is equivalent to none; but a model argument of 0 may not be its default
            yield f"{prefix}{key}", value if prefix == "model_args." else value or None


def recipe_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ between two recipes, by dotted key.

    A key that only one of them has counts if it is an argument of the model, or an option of the optimiser or the loss.
    Other such keys are later ones, which recipes of earlier versions lack. A feedback that only one has counts as one.
    """
    first, second = (
        dict(_flat(recipe)) | ({"feedback": "with"} if recipe.get("feedback") else {})
        for recipe in (one, other)
    )
    return {
        key: (first.get(key), second.get(key))
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key)
        and (key in first) + (key in second) + (key.startswith("model_args") or ".options." in key) > 1
    }


def settings_unlike_the_recipe(info: WeightsInfo) -> dict[str, tuple[Any, Any]]:
    """Settings of the run that differ from its recipe without a profile: key to (the run's, the recipe's).

    Empty if there is no recipe in the package.
    """
    if info.name not in list_recipes() or "recipe" not in info.raw:
        return {}
    return recipe_differences(info.raw["recipe"], load_recipe(info.name).model_dump(mode="json"))


def shown(value: Any) -> str:
    """A setting's value in readable form."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def protocol_lines(info: WeightsInfo) -> list[str]:  # noqa: C901, PLR0912 - a list of independent lines
    """How the results were obtained, and differences from the papers' protocol, as a markdown list."""
    metadata = info.metadata
    lines = []
    if metadata.recipe:
        kept = f"epoch {metadata.epoch} of" if metadata.epoch else "the last of"
        seed = metadata.recipe.seed if metadata.seed is None else metadata.seed
        lines.append(f"- One run, seed {seed}; {kept} {metadata.recipe.epochs} epochs.")
        if note := seeds_note(info):
            lines[-1] += f" All seeds of this recipe, test {counted(info)} in %: {note.removeprefix('; ')}."
        if metadata.epoch:
            lines[-1] += " It was chosen by the validation images, whose accuracy is therefore optimistic."
        if any(word in figure.note for figure in paper_figures(info) for word in ("mean", "best")):
            lines[-1] += (
                " The note beside the paper's result states whether it is a mean of runs or the best test epoch."
            )
    start = began_with(info)
    if trained_further(info):
        lines.append(
            "- It began with the weights of an earlier run of this recipe. That run's epochs are additional to those "
            "stated here: the recipe's header has both commands."
        )
    elif start:
        lines.append(
            f"- It began with the weights of `{start_name(info)}`. The epochs of that training are additional."
        )
    if counted(info) == "exact set":
        lines.append("- An image counts as correct if exactly its labels are predicted.")
    if "test" in metadata.metrics:
        again = start and Path(start).name.startswith(info.name)  # the same checkpoint, trained further
        looks = "at the end of both runs" if again else "once, at the end"
        lines.append(f"- The test set was evaluated {looks}. No epoch was selected by it.")
        if again:
            lines[-1] += (
                " The first run's accuracy on it was known when the second was started, and the better of the two is "
                "here: this accuracy is slightly optimistic."
            )
    validation, data = metadata.metrics.get("validation"), metadata.trained.data
    # a file of another precision than its run has no validation accuracy
    held_out = validation.n if validation else data.val_size if data.validation == "carved" else None
    if validation and _own_validation(info):
        lines.append(f"- The data set's validation split has {validation.n:,} images.")
    elif held_out:
        lines.append(f"- {held_out:,} training images were held out for validation, and not trained on.")
    unlike = settings_unlike_the_recipe(info)
    if unlike:
        listed = "; ".join(
            f"`{key}` {shown(public(ours, key))} (recipe: {shown(theirs)})"
            for key, (ours, theirs) in unlike.items()
        )
        lines.append(
            f"- Settings that differ from the recipe without a profile: {listed}. The recipe's header states what is "
            "the paper's and what is our choice."
        )
    elif info.name in list_recipes():
        lines.append("- Settings: the recipe's, without a profile.")
    if metadata.hardware:
        seconds = metadata.train_seconds
        took = f" in {seconds:,} s" if seconds else ""
        lines.append(f"- Trained on {metadata.hardware}{took}.")
    if metadata.storage != "float32":
        which = "; the test accuracy is that of the stored file" if "test" in metadata.metrics else ""
        lines.append(f"- Stored in {metadata.storage}{which}.")
    return lines


def twin_groups(names: list[str] | None = None) -> list[list[str]]:
    """Recipes that differ in one setting and should be compared: ``…cifar10``, ``…cifar10_avg``, ``…cifar10_max``.

    A recipe with ``# Twin: none`` in its header has no twin, because it has other settings.

    Args:
        names: candidate recipes; None uses all of the package.
    """
    recipes = list_recipes() if names is None else sorted(names)
    paired = [name for name in recipes if header_line(name, "Twin") != "none"]
    bases = [name for name in recipes if Path(name).suffix]
    groups = ([base, *(name for name in paired if name.startswith(f"{base}_"))] for base in bases)
    return [group for group in groups if len(group) > 1]
