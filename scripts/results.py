"""The page of results, `docs/results.md`, with a picture of each checkpoint's training (written by `make docs`).

Everything on it comes from the metadata beside the weights, the recipes and the papers' results. The pictures state
their sources; other versions of matplotlib may draw them differently, which needs no update.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from capszoo.data import dataset_spec
from capszoo.models._pretrained import WeightsInfo, bundled_tags
from capszoo.recipes.config import load_recipe
from capszoo.recipes.evaluation.plots import draw_curves
from capszoo.recipes.release.paper_results import (
    as_accuracy,
    figures_table,
    header_line,
    paper_figures,
    protocol_lines,
    recipe_differences,
    sampling_error,
    shown,
    twin_groups,
)
from capszoo.recipes.release.time_to_accuracy import time_table, times_source
from capszoo.recipes.training.history import records_of
from capszoo.recipes.training.queue import QueueItem, read_queue
from scripts.pictures import caption, kinds_of, stale_files

HEAD = """# Results

Every checkpoint of the zoo: the papers' results, ours, and how ours were obtained. Written by `make docs` from the
metadata beside the weights (`capszoo/weights/*.json`), the recipes and the papers' results; a test compares the page
with them.

Accuracies are those of the stored file, in one pass over the whole test set in float32; `make eval-weights` repeats it.
± is the sampling standard error for the number of test images. An accuracy is that of one run; where several seeds
were trained, a line states their mean and standard deviation. The papers' errors are given as accuracies, too.
Where a file replaced one of an earlier run, the
[changelog](../CHANGELOG.md#weights-that-replaced-earlier-ones) states that run's test accuracy. It was known when the
new run was started, so the new accuracy may be slightly optimistic.
Runs on the H200 shared the GPU with up to four other runs: their times are not those of the GPU alone. H200 runs
with dynamic routing used a kernel that has since been removed.
[reproduce.md](reproduce.md) says how to train one again, [publish.md](publish.md) how a model card is made of the same
metadata."""

TWINS = """## Twins

Recipes that differ in one setting. A difference within about two sampling standard errors may be chance; these errors
are those of two independent samples of images, and leave out the variation over seeds. A difference between single
runs does not estimate the difference of the means. For several seeds: mean ± standard deviation, and the standard
error of the difference of the means, of which chance reaches 2.8 to 4.3 with three seeds each (95%).

| recipes | what differs | the papers' | ours | difference of ours |
|---|---|---|---|---|"""


TIMES = """## Time to accuracy

When each run reached 90, 95 and 99% of its final validation accuracy. An image counts each time it is used. ~ marks
minutes that are estimated from the run's total time. Runs that began with trained weights are left out.

![Time to accuracy](curves/time_to_accuracy.svg)
"""


def times_file(docs: Path) -> Path:
    """Path of the picture of all runs' time to accuracy."""
    return docs / "curves" / "time_to_accuracy.svg"


def stale_times(docs: Path) -> list[Path]:
    """The picture of time to accuracy, if it is missing or has another source."""
    infos, path = list(bundled_tags().values()), times_file(docs)
    drawn = path.is_file() and times_source(infos) in path.read_text(encoding="utf-8")
    return [] if drawn else [path]


def curve_file(docs: Path, name: str) -> Path:
    """Path of the picture of a checkpoint's training."""
    return docs / "curves" / f"{name}.svg"


def _source(info: WeightsInfo) -> str:
    """Source of a picture's data, as stated in the picture."""
    history = json.dumps(info.metadata.history)
    return f"training of {info.name}, history {hashlib.sha256(history.encode()).hexdigest()[:16]}, style 2"


def stale_curves(docs: Path) -> list[Path]:
    """Pictures that are missing, or drawn from another history, or of a checkpoint that no longer exists."""
    sources = {
        curve_file(docs, name): _source(info)
        for name, info in bundled_tags().items()
        if info.metadata.history
    }
    there = sorted(path for path in (docs / "curves").glob("*.svg") if path != times_file(docs))
    return stale_files(sources, there, lambda path, source: source in path.read_text(encoding="utf-8"))


TARGETS = """## Targets

Planned runs, in the order of [recipes/queue.yaml](../recipes/queue.yaml) (`capszoo train --queue`): the paper's
accuracy, our target, and the accuracy of the bundled file. A target with several seeds is one for their mean. The
last column has the epochs and the profile of the bundled file, and a note.

| weights | priority | paper, % | target, % | ours, % | reached | trained so far |
|---|---:|---:|---:|---:|---|---|"""


def write_curves(path: Path) -> None:
    """Draw the picture again, or remove it if its checkpoint no longer exists."""
    info = bundled_tags().get(path.stem)
    if info is None:
        path.unlink()
        return
    path.parent.mkdir(exist_ok=True)
    draw_curves(path, info.name, records_of(info.metadata.history), Description=_source(info))


def _section(info: WeightsInfo) -> str:
    stated = info.metadata
    about = stated.description or info.architecture
    curves = f"![Training of {info.name}](curves/{info.name}.svg)"
    papers = paper_figures(info)
    none = header_line(info.name, "Paper")
    said = f"\n\nNo paper reports this network on {stated.dataset.title}." if not papers else ""
    said += f" Its recipe notes: {none}" if none and not papers else ""
    return "\n\n".join(
        (
            f"## {info.name}",
            f"{about[0].upper()}{about[1:].rstrip('.')}; {stated.num_params:,} parameters, "
            f"[recipe](../recipes/configs/{info.name}.yaml), commit `{str(stated.commit)[:12]}`.{said}",
            curves if stated.history else "The run kept no history: there is no curve.",
            *(
                f"{caption(info, kind)}:\n\n![{kind}](pictures/{info.name}.{kind}.png)"
                for kind in kinds_of(info)
            ),
            "\n".join(figures_table(info)),
            "\n".join(protocol_lines(info)),
        )
    )


def _accuracy(name: str) -> tuple[str, tuple[float, float] | None]:
    """A checkpoint's accuracy as text, and with its standard error: over the seeds if there are several, else from
    the number of test images alone."""
    info = bundled_tags().get(name)
    test = info.metadata.metrics.get("test") if info else None
    if not test:
        return "not trained yet", None
    assert info is not None and test.top1 is not None and test.n is not None
    seeds = info.metadata.seeds.test
    if seeds.mean is not None and seeds.sd is not None:
        runs = len(seeds.values)
        return f"{seeds.mean:.2f} ± {seeds.sd:.2f} ({runs} seeds)", (seeds.mean, seeds.sd / math.sqrt(runs))
    error = sampling_error(test.top1, test.n)
    return f"{test.top1:.2f} ± {error:.2f}", (test.top1, error)


def _twin_lines(group: list[str]) -> list[str]:
    base, *others = group
    lines = []
    base_text, base_found = _accuracy(base)
    for name in others:
        text, found = _accuracy(name)
        trained = [bundled_tags()[twin].raw["recipe"] for twin in (base, name) if twin in bundled_tags()]
        changed = recipe_differences(*(load_recipe(twin).model_dump(mode="json") for twin in (base, name)))
        what = "; ".join(
            f"`{key}`: {' / '.join('default' if v is None else shown(v) for v in pair)}"
            for key, pair in changed.items()
        )
        # If both were trained, their actual settings must be equal, not only their recipes.
        if len(trained) == 2 and recipe_differences(*trained).keys() - changed.keys():
            profiles = " / ".join(f"`{one.get('profile') or 'none'}`" for one in trained)
            what += f"; not comparable: profiles {profiles}"
            found = None
        papers = " / ".join(_papers(recipe) for recipe in (base, name))
        difference = "–"
        if base_found and found:
            error = math.hypot(base_found[1], found[1])
            difference = f"{base_found[0] - found[0]:+.2f} ± {error:.2f}"
        lines.append(f"| `{base}` / `{name}` | {what} | {papers} | {base_text} / {text} | {difference} |")
    return lines


def _target_line(item: QueueItem) -> str:
    """The row of one item of the queue."""

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    info = bundled_tags().get(item.tag)
    test = info.metadata.metrics.get("test") if info else None
    ours, reached, trained = "–", "no run yet", ""
    if info is not None and test is not None and test.top1 is not None:
        seeds, wanted = info.metadata.seeds.test, len(item.seeds)
        runs = max(1, len(seeds.values))
        mean = test.top1 if wanted == 1 or seeds.mean is None else seeds.mean
        ours = f"{mean:.2f}" + (f" ± {seeds.sd:.2f}" if wanted > 1 and seeds.sd is not None else "")
        reached = "no" if item.at_least is not None and mean < item.at_least else "yes"
        if runs < wanted:
            reached += f", {runs} of {wanted} seeds"
        recipe = info.raw["recipe"]
        trained = f"{recipe['epochs']} epochs, " + (
            f"`{recipe['profile']}`" if recipe.get("profile") else "other settings"
        )
    trained = "; ".join(part for part in (trained, item.tried) if part) or "–"
    row = (
        f"`{item.tag}`",
        f"{item.tier}",
        percent(item.reference),
        percent(item.at_least),
        ours,
        reached,
        trained,
    )
    return f"| {' | '.join(row)} |"


def _papers(name: str) -> str:
    recipe = load_recipe(name)
    spec = dataset_spec(recipe.data.name)
    raw = {"dataset": {"title": spec.title}}
    info = WeightsInfo(recipe.arch, recipe.tag, "", 0, spec.input_size, (), (), raw=raw)
    return ", ".join(f"{as_accuracy(figure):.2f}" for figure in paper_figures(info)) or "none"


def results_page() -> str:
    """The complete `docs/results.md`."""
    sections = [_section(info) for info in bundled_tags().values()]
    groups = [group for group in twin_groups() if any(name in bundled_tags() for name in group)]
    if groups:
        sections.append("\n".join([TWINS, *(line for group in groups for line in _twin_lines(group))]))
    sections.append("\n".join([TARGETS, *map(_target_line, read_queue())]))
    sections.append("\n".join([TIMES, *time_table(bundled_tags().values())]))
    return "\n\n".join([HEAD, *sections]) + "\n"
