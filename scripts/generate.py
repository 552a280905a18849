"""Files that derive from the code: developers run it when help, recipes, weights or results change.

``make docs`` writes capszoo/catalogue.json, docs/results.csv, the tables of README.md, recipes/README.md and of
benchmarks.md, fine-tune.md, models.md and robustness.md in docs, the curves and pictures of docs, the example in
docs/publish.md.

The sources are timm's registry (names, docstrings, parameter counts), the recipe files with their header comments, the
metadata beside the weights, and the results of benchmarks/models.py, export.py, heads.py, photos.py, robustness.py and
``make test-trt-rtx`` in benchmarks/results. ``--check`` writes nothing and fails if a file is out of date; a test does
the same.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from functools import reduce
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout works too

from timm.models import model_entrypoint

import capszoo
from benchmarks import heads, photos, robustness
from benchmarks.models import markdown
from capszoo._pretrained.catalogue import CATALOGUE, checkpoints, stated
from capszoo._pretrained.info import WeightsInfo, default_weights
from capszoo.data import dataset_spec
from capszoo.models._papers import PAPERS, PaperFigure
from capszoo.recipes.config import BACKBONE, MACHINE_KEYS, list_profiles, list_recipes, load_recipe
from capszoo.recipes.release.model_card import card_data, paper_link
from capszoo.recipes.release.paper_results import (
    as_accuracy,
    began_with,
    counted,
    header_line,
    paper_figures,
    protocol_lines,
    recipe_differences,
    sampling_error,
    seeds_note,
    shown,
    trained_further,
    twin_groups,
)
from capszoo.summary import summarise
from scripts.comparison import rows
from scripts.pictures import stale_drawings, write_drawing


def first_line(name: str) -> str:
    """First line of a model function's docstring."""
    lines = (model_entrypoint(name).__doc__ or "").strip().splitlines()
    if not lines:
        raise SystemExit(f"error: {name} has no docstring")
    return lines[0].strip().replace("``", "`")


def replace_block(text: str, block: str, content: str) -> str:
    """Replace the part of ``text`` between ``<!-- block:start -->`` and ``<!-- block:end -->``.

    Raises:
        ValueError: the markers are missing.
    """
    start, end = f"<!-- {block}:start -->\n", f"<!-- {block}:end -->"
    before, found_start, rest = text.partition(start)
    _, found_end, after = rest.partition(end)
    if not found_start or not found_end:
        raise ValueError(f"the marks of the block '{block}' are missing")
    return f"{before}{start}{content.rstrip()}\n{end}{after}"


def model_table() -> str:
    """The registry as a markdown table."""
    lines = []
    for name in capszoo.list_models():
        info = capszoo.model_info(name)
        size, papers = "×".join(map(str, info.input_size)), ", ".join(map(paper_link, info.paper_ids))
        lines.append([f"`{name}`", f"{info.num_params:,}", size, first_line(name).rstrip("."), papers])
    head = "model | parameters | input | description, and the paper's results | paper"
    return "\n".join(markdown(head, lines, (0, 3, 4)))


#: The checkpoints in the README: a network of each kind, and what it is compared with; docs/models.md has all.
README_WEIGHTS = (
    "capsnet_dynamic.mnist",
    "capsnet_em_norb_small.mnist",
    "efficient_capsnet.mnist",
    "resnet20_routingcaps.mnist",
    "resnet20_routingcaps.multimnist",
    "capsnet_dynamic_cifar.cifar10",
    "idpa_resnet.cifar10",
    "encapnet6_master.cifar10",
    "cnn6.cifar10",
    "resnet20_selfrouting.cifar10",
    "resnet20_routingpool.cifar10",
    "resnet20_routingpool.cifar10_avg",
)


def weights_table() -> str:
    """The README's checkpoints: data set, accuracy, the paper's result."""
    lines = []
    for name in README_WEIGHTS:
        info = checkpoints(aliases=False)[name]
        accuracy = f"{info.raw['metrics']['test']['top1']:.2f}{_unless_top1(info)}{seeds_note(info)}"
        papers = "; ".join(map(_paper_accuracy, paper_figures(info))) or "–"
        lines.append([f"`{name}`", info.raw["dataset"]["name"], accuracy, papers])
    return "\n".join(markdown("weights | data set | top-1, % | paper's top-1, %", lines, (0, 1, 3)))


def _paper_accuracy(figure: PaperFigure) -> str:
    """A paper's result as an accuracy, like ours beside it: most papers print errors."""
    return f"{as_accuracy(figure):.2f}" + (f" ({figure.note})" if figure.note else "")


def defaults_table() -> str:
    """The checkpoint that a name without a tag loads."""
    lines = ["| name | default weights | data set | other weights |", "|---|---|---|---|"]
    known = checkpoints()
    for name in sorted({info.architecture for info in known.values()}):
        default = default_weights(known, name)
        assert default is not None
        others = [f"`{n}`" for n, info in known.items() if info.architecture == name and info != default]
        data = default.raw["dataset"]["name"]
        shared = f" (the file of `{default.stored_as}`)" if default.stored_as else ""
        lines.append(f"| `{name}` | `{default.name}`{shared} | {data} | {', '.join(others) or '–'} |")
    return "\n".join(lines)


def results_table() -> str:
    """The checkpoints and their measured results, from the metadata beside the weights."""
    lines = []
    for name, info in checkpoints(aliases=False).items():
        stated = info.metadata
        test = stated.metrics["test"]
        same = [_paper_accuracy(figure) for figure in paper_figures(info)]
        trained = f"seed {stated.seed}, {stated.trained.epochs} epochs"
        if start := began_with(info):
            on_backbone = start.startswith(BACKBONE)
            trained += " on a pretrained backbone" if on_backbone else " after those of an earlier run"
        accuracy = f"{test.top1:.2f}{_unless_top1(info)}{seeds_note(info)}"
        papers = "; ".join(same) or "none"
        lines.append([f"`{name}`", stated.dataset.name, accuracy, trained, papers, f"{stated.num_params:,}"])
    head = "weights | data set | top-1, % | trained | paper's top-1, % | parameters with decoder"
    return "\n".join(markdown(head, lines, (0, 1, 3, 4)))


def results_csv() -> str:
    """The checkpoints in the columns of timm's results files, then the data set, what is counted, and n."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = "model top1 top1_err top5 top5_err param_count img_size crop_pct interpolation dataset metric n"
    writer.writerow(columns.split())
    for name, info in checkpoints(aliases=False).items():
        stated = info.metadata
        test = stated.metrics["test"]
        assert test.top1 is not None and stated.num_params is not None
        writer.writerow(
            (name, f"{test.top1:.3f}", f"{100 - test.top1:.3f}", "", "", f"{stated.num_params / 1e6:.2f}")
            + (max(info.input_size[1:]), f"{info.crop_pct:g}", info.interpolation)
            + (stated.dataset.name, counted(info), test.n)
        )
    return out.getvalue()


def train_command(info: WeightsInfo) -> str:
    """The command that repeats the training of a checkpoint; precision and compiling are the machine's choice."""
    trained = info.raw["recipe"]
    profile = trained.get("profile")
    meant = load_recipe(info.name, (), profile).model_dump(mode="json")
    changed = recipe_differences(trained, meant)
    words = ["capszoo train", info.name, *([f"--profile {profile}"] if profile else [])]
    if trained_further(info):  # the name has other weights now: RUN is the earlier run
        words += [
            "--set init.weights=RUN",
            f"--set init.new_classes={str(trained['init']['new_classes']).lower()}",
        ]
    words += [f"--set {key}={was}" for key, (was, _) in changed.items() if key not in MACHINE_KEYS]
    return " ".join(words)


def _unless_top1(info: WeightsInfo) -> str:
    what = counted(info)
    return "" if what == "top-1" else f" ({what})"


TWINS = """Recipes that differ in one setting. A difference within about two sampling standard errors may be chance.
These errors are those of two independent samples of images, and leave out the variation over seeds. A difference
between single runs does not estimate the difference of the means. For several seeds, the table has mean ± standard
deviation, and the standard error of the difference of the means, of which chance reaches 2.8 to 4.3 with three seeds
each (95%).

| recipes | what differs | the papers' | ours | difference of ours |
|---|---|---|---|---|"""


def _accuracy_with_error(name: str) -> tuple[str, tuple[float, float] | None]:
    """A checkpoint's accuracy as text, and with its standard error: over the seeds, else from the number of images."""
    info = checkpoints(aliases=False).get(name)
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
    base_text, base_found = _accuracy_with_error(base)
    for name in others:
        text, found = _accuracy_with_error(name)
        known = checkpoints(aliases=False)
        trained = [known[twin].raw["recipe"] for twin in (base, name) if twin in known]
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
        papers = " / ".join(_paper_accuracies(recipe) for recipe in (base, name))
        difference = "–"
        if base_found and found:
            error = math.hypot(base_found[1], found[1])
            difference = f"{base_found[0] - found[0]:+.2f} ± {error:.2f}"
        lines.append(f"| `{base}` / `{name}` | {what} | {papers} | {base_text} / {text} | {difference} |")
    return lines


def _paper_accuracies(name: str) -> str:
    recipe = load_recipe(name)
    spec = dataset_spec(recipe.data.name)
    raw = {"dataset": {"title": spec.title}}
    info = WeightsInfo(recipe.arch, recipe.tag, "", 0, spec.input_size, (), (), raw=raw)
    return ", ".join(f"{as_accuracy(figure):.2f}" for figure in paper_figures(info)) or "none"


def twins_table() -> str:
    """Recipes that differ in one setting, side by side."""
    groups = [group for group in twin_groups() if any(name in checkpoints(aliases=False) for name in group)]
    return "\n".join([TWINS, *(line for group in groups for line in _twin_lines(group))])


def aims_table() -> str:
    """The recipes whose headers name an aim: what was reached, and of a missed one what was tried."""
    lines = ["| recipe | aim, % | ours, % | if missed: what was tried |", "|---|---:|---:|---|"]
    for name in list_recipes():
        if not (aim := header_line(name, "Aim")):
            continue
        info = checkpoints(aliases=False).get(name)
        reached = info.metadata.metrics["test"].top1 if info else None
        missed = reached is None or reached < float(aim)
        tried = header_line(name, "Missed")
        assert bool(tried) == missed, f"{name}: {reached} of {aim}, but its header has Missed: {tried!r}"
        lines.append(f"| `{name}` | {aim} | {'–' if reached is None else f'{reached:.2f}'} | {tried} |")
    return "\n".join(lines)


def recipe_table() -> str:
    """The recipes: data set, the paper's result, ours, and the profiles."""
    lines = ["| recipe | data set | paper | ours, top-1 % | profiles |", "|---|---|---|---:|---|"]
    compared = {row.recipe for row in rows() if row.runs}
    for name in list_recipes():
        recipe = load_recipe(name)
        title = dataset_spec(recipe.data.name).title
        same = [figure for figure in PAPERS.get(recipe.arch, ()) if figure.dataset == title]
        paper = header_line(name, "Paper") or (f"{same[0].metric} {same[0].value:g}" if same else "none")
        ours = "–"
        if name in checkpoints(aliases=False):
            info = checkpoints(aliases=False)[name]
            ours = f"{info.metadata.metrics['test'].top1:.2f}{_unless_top1(info)}"
        elif name in compared:
            ours = "[comparison](../docs/comparison.md)"
        cells = (
            f"[`{name}`](configs/{name}.yaml)",
            recipe.data.name,
            re.split(r" \(|[:;,]|\.$", paper)[0],
            ours,
            ", ".join(list_profiles(name)) or "–",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def card_header() -> str:
    """Header of a model card, as an example: of a checkpoint with a paper's result."""
    infos = list(checkpoints(aliases=False).values())
    info = next((info for info in infos if paper_figures(info)), infos[0])
    return f"```yaml\n{card_data(info).to_yaml()}\n```"


def catalogue() -> str:
    """capszoo/catalogue.json: every architecture and checkpoint, for listings that do not load torch."""
    entries = []
    for name in (*capszoo.list_models(), *capszoo.list_pretrained()):
        entry = summarise(name).to_dict()
        del entry["weights"]  # of an architecture, those of its checkpoints
        if shared := checkpoints().get(name):
            entry["checkpoint"] = stated(shared)
        if info := checkpoints(aliases=False).get(name):
            entry["command"] = train_command(info)
            entry["protocol"] = [line.removeprefix("- ") for line in protocol_lines(info)]
        entries.append("  " + json.dumps(entry, ensure_ascii=False))
    data = {name: load_recipe(name).data.name for name in list_recipes()}
    trained = json.dumps(data, indent=1).replace("\n", "\n ")
    return '{\n "models": [\n' + ",\n".join(entries) + f'\n ],\n "recipes": {trained}\n}}\n'


RESULTS = ROOT / "benchmarks" / "results"


def stored(name: str) -> dict[str, Any]:
    """A file of results; empty without measurements."""
    file = RESULTS / name
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def rtx_cell(built: dict[str, Any]) -> str:
    """Results of TensorRT-RTX for a model in each precision."""
    words = {True: "built", False: "refused", None: "not run"}
    found = {key: words[built.get(key, {}).get("passed")] for key in ("fp32", "fp16")}
    if len(set(found.values())) == 1:
        return found["fp32"]
    return ", ".join(f"{key} {word}" for key, word in found.items())


def export_table() -> str:
    """Every model as ONNX: size, difference, ONNX Runtime against eager PyTorch, TensorRT-RTX."""
    measured, rtx = stored("export.json"), stored("trt_rtx.json")
    rows = {row["model"]: row for row in measured["rows"]}
    lines = []
    for name in capszoo.list_models():
        cells = [f"`{name}`"]
        if row := rows.get(name):
            cells += [str(row["nodes"]), f"{row['file_bytes'] / 1e6:.1f}", f"{row['max_rel_diff']:.0e}"]
        else:
            cells += ["–"] * 3
        for batch in ("1", "16"):
            if at := row and row["times"].get(batch):
                cells += [f"{at['ms']:.1f}", f"{at['eager']:.2f}", f"{1 / at['resnet18']:.2f}"]
            else:
                cells += ["–"] * 3
        lines.append([*cells, rtx_cell(rtx.get(name, {}))])
    settings = ", ".join(f"{key} {value}" for key, value in measured["settings"].items())
    head = "model | nodes | file, MB | largest difference" + "".join(
        f" | batch {batch}: ms | eager / ORT | ORT / ResNet-18" for batch in (1, 16)
    )
    table = markdown(f"{head} | TensorRT-RTX", lines, (0, 10))
    return "\n".join([*table, "", f"Measured with {settings}."])


def benchmark_table() -> str:
    """Time and memory of every model in PyTorch."""
    keys = (
        "batch",
        "mega_macs",
        "forward_ms",
        "forward_ratio",
        "train_ms",
        "train_ratio",
        "peak_over_start_mib",
    )
    digits = ("d", ".0f", ".1f", ".2f", ".1f", ".2f", ",.0f", ".2f")
    lines = []
    for row in stored("models.json")["rows"]:
        figures = (format(row[key], form) for key, form in zip((*keys, "peak_ratio"), digits, strict=True))
        lines.append([f"`{row['model']}`", *figures])
    head = "model | batch | M multiply-adds | forward, ms | × ResNet-18 | training step, ms | × ResNet-18"
    return "\n".join(markdown(f"{head} | memory, MiB | × ResNet-18", lines))


def outputs() -> dict[Path, str]:
    """Every generated file and its expected content."""
    blocks = {
        ROOT / "README.md": {"weights": weights_table()},
        ROOT / "docs" / "models.md": {
            "models": model_table(),
            "defaults": defaults_table(),
            "results": results_table(),
            "aims": aims_table(),
            "twins": twins_table(),
        },
        ROOT / "recipes" / "README.md": {"recipes": recipe_table()},
        ROOT / "docs" / "benchmarks.md": {"models": benchmark_table(), "exported": export_table()},
        ROOT / "docs" / "fine-tune.md": {
            "photos": photos.table(),
            "head-cost": heads.cost_table(heads.stored()),
            "backbones": heads.backbones_table(heads.stored()),
        },
        ROOT / "docs" / "robustness.md": {
            "corruptions-colour": robustness.corruption_table(3),
            "corruptions-grey": robustness.corruption_table(1),
            "calibration": robustness.calibration_table(),
        },
        ROOT / "docs" / "publish.md": {"card": card_header()},
    }
    return {
        CATALOGUE: catalogue(),
        ROOT / "docs" / "results.csv": results_csv(),
        **{
            page: reduce(
                lambda text, block: replace_block(text, *block), content.items(), page.read_text("utf-8")
            )
            for page, content in blocks.items()
        },
    }


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a file is out of date"
    )
    check = parser.parse_args().check
    stale = []
    for path, content in outputs().items():
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(content, encoding="utf-8")
    for path, drawing in stale_drawings(ROOT / "docs").items():
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            write_drawing(path, drawing)
    if stale:
        print(
            f"{'out of date' if check else 'written'}: {', '.join(stale)}"
            + (" (run make docs)" if check else "")
        )
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
