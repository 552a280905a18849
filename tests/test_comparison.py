"""The comparison of heads: one recipe for all, and a page that says no more than the metadata of the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import robustness
from capszoo.recipes.config import load_recipe
from tests.support import load_script


@pytest.fixture(scope="module")
def comparison(root: Path) -> Any:
    return load_script(root / "scripts" / "comparison.py")


def test_all_heads_share_one_recipe(comparison: Any) -> None:
    recipes = [
        load_recipe(name, profile="comparison") for name in (comparison.HEADS | comparison.DEPTH2).values()
    ]
    free = {"arch", "tag", "description", "model_args", "routing_images", "checkpoint_every", "compile"}
    settings = [{k: v for k, v in recipe.model_dump().items() if k not in free} for recipe in recipes]
    assert len(recipes) == 11 and all(tree == settings[0] for tree in settings)
    assert settings[0]["clip_grad"] == 1.0, "the conv head diverges without"


def run(
    comparison: Any, folder: Path, name: str, seed: int, top1: float, trial: bool = False, **changes: Any
) -> None:
    settings = [f"seed={seed}", *(comparison.TRIAL if trial else ())]
    tree = load_recipe(name, settings, "comparison").model_dump(mode="json") | changes
    meta = {
        "recipe": tree,
        "seed": seed,
        "train_seconds": 100,
        "hardware": "a machine",
        "metrics": {"validation": {"top1": top1 + 1, "n": 1000}, "test": {"top1": top1, "n": 10000}},
        "history": {"train_loss": [2.4, 5.1, 1.0 + seed], "train_top1": [40.0, top1 - 5]},
    }
    out = folder / "trials" / name if trial else folder / f"{name}.{seed}"
    out.mkdir(parents=True)
    (out / f"{name}.json").write_text(json.dumps(meta))
    (out / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "routing": {"entropy": [0.5]}}) + "\n")


def test_a_trial_chooses_the_head_of_two_layers(comparison: Any, tmp_path: Path) -> None:
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    names = list(comparison.DEPTH2.values())
    for name, top1 in zip(names[:2], (60.0, 50.0), strict=True):
        run(comparison, runs, name, 0, top1, trial=True)
    comparison.collect(runs, kept)
    assert comparison.chosen(kept) is None, "two of three have a trial"
    run(comparison, runs, names[2], 0, 55.0, trial=True)
    lines = comparison.collect(runs, kept)
    assert lines[0].endswith("61.00 (validation)") and comparison.chosen(kept) == "dynamic, 2 layers"
    kept_trial = json.loads((kept / "trials" / f"{names[0]}.json").read_text())
    assert "test" not in kept_trial["metrics"], "nothing is chosen by test images, and nothing tempts to"
    assert f"{names[0]}.2" in comparison.commands(kept=kept)[-1] and len(comparison.commands(kept=kept)) == 36
    page = comparison.page(kept)
    assert "dynamic 61.0%, em 51.0%, self_routing 56.0%" in page
    # a run of full length below trials, or a trial beside the runs, is no trial
    run(comparison, runs / "other", names[1], 0, 99.0, trial=True, epochs=20)
    assert "left out" in comparison.collect(runs / "other", kept)[0]
    assert comparison.chosen(kept) == "dynamic, 2 layers"


def test_trials_on_validation_images_choose_the_rate(comparison: Any, tmp_path: Path) -> None:
    runs, kept, name = tmp_path / "runs", tmp_path / "kept", comparison.HEADS["conv"]
    for rate, top1 in ((0.1, 60.0), (0.03, 70.0), (0.01, 65.0)):
        assert comparison.fitted(name, kept) is None
        changed = load_recipe(name, [f"optimizer.lr={rate}"], "comparison")
        optimizer = changed.model_dump(mode="json")["optimizer"]
        run(comparison, runs / f"{rate}", name, 0, top1, trial=True, optimizer=optimizer)
        comparison.collect(runs / f"{rate}", kept)
    assert comparison.fitted(name, kept) == 0.03 and comparison.fitted(comparison.HEADS["avg"], kept) is None
    of_conv = [line for line in comparison.commands(kept=kept) if f"{name} " in line and "seed=" in line]
    assert len(of_conv) == 3 and all("--set optimizer.lr=0.03 " in command for command in of_conv)
    # runs with the shared rate no longer count, those with the best one do
    run(comparison, tmp_path / "shared", name, 0, 80.0)
    assert "optimizer not as in" in comparison.collect(tmp_path / "shared", kept)[0]
    optimizer["lr"] = 0.03
    run(comparison, tmp_path / "best", name, 0, 85.0, optimizer=optimizer)
    assert comparison.collect(tmp_path / "best", kept) == [f"kept: {name}.0.json: 85.00 (test)"]
    tried = [row for row in comparison.rows(kept) if row.head in comparison.RATES_TRIED]
    said = comparison.rates_to_try(tried, kept)
    assert "`conv` is 0.1: 61.0%, 0.03: 71.0%, 0.01: 66.0%." in said, "validation accuracies"
    assert "have not been run (`self_routing`)" in said


def test_the_page_follows_from_the_runs(comparison: Any, tmp_path: Path) -> None:
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    for seed, (avg, em) in enumerate([(91.0, 92.0), (91.2, 92.2), (91.4, 92.4)]):
        run(comparison, runs, "resnet20_avg.cifar10", seed, avg)
        run(comparison, runs, "resnet20_em.cifar10", seed, em)
    run(comparison, runs, "resnet20_dynamic.cifar10_depth2", 0, 91.0)
    for name, top1 in zip(comparison.DEPTH2.values(), (60.0, 50.0, 55.0), strict=True):
        run(comparison, runs, name, 0, top1, trial=True)
    run(comparison, runs, "resnet20_conv.cifar10", 0, 99.0, epochs=3)  # another recipe: it does not count
    lines = comparison.collect(runs, kept)
    assert sum(line.startswith("kept") for line in lines) == 10
    (left_out,) = [line for line in lines if line.startswith("left out")]
    assert "conv" in left_out and "epochs" in left_out
    page = comparison.page(kept)
    results, _, after = page.partition("Against average pooling")  # later tables have rows of the same names
    rows = {line[2:].partition(" | ")[0]: line for line in results.splitlines() if line.startswith("| ")}
    assert "91.20 ± 0.20 | 3 | 92.20 | 86.20 | 0.50 | " in rows["avg"] and "269,722" in rows["avg"]
    assert "no run yet" in rows["conv"] and "99.00" not in page
    after, _, corrupted = after.partition("twelve corruptions")
    row = robustness.current()["resnet20_dynamic.cifar10"]
    assert f"| dynamic | {row['corruptions']['clean']:.1f} | {row['corruptions']['mean']:.1f} |" in corrupted
    assert "dynamic, 2 layers" in rows and "91.00 | 1" in rows["dynamic, 2 layers"]
    # two heads of three seeds, deviation 0.2 each, so Welch's degrees of freedom are 4: 2.776 * 0.2 * sqrt(2 / 3)
    assert "| em | +1.00 ± 0.45 | more accurate | differs |" in after
    heads = ("routing_pool", "conv", "dynamic", "idpa", "self_routing", "heinsen", "dynamic, 2 layers")
    assert f"Seeds are missing for {', '.join(f'`{head}`' for head in heads)}." in page


def test_a_conclusion_needs_three_seeds_and_more_than_their_spread(comparison: Any, tmp_path: Path) -> None:
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    of_seeds = [(89.0, 88.6, 86.0, 88.6), (89.1, 88.7, 83.0, 88.7), (89.2, 88.8, 86.0, 88.9)]
    names = [comparison.HEADS[head] for head in ("avg", "routing_pool", "conv", "em")]
    for seed, accuracies in enumerate(of_seeds):
        for name, top1 in zip(names, accuracies, strict=True):
            run(comparison, runs, name, seed, top1)
        comparison.collect(runs, kept)
        assert ("too few runs" in comparison.page(kept)) == (seed < 2)
    page = comparison.page(kept)
    # a head whose seeds differ much widens its own interval alone.
    # routing_pool: 2.776 * 0.1 * sqrt(2 / 3); conv: degrees of freedom 2.01, so 4.27 * sqrt((3 + 0.01) / 3)
    assert "| routing_pool | -0.40 ± 0.23 | less accurate | differs |" in page  # p = 0.008
    assert "| conv | -4.10 ± 4.28 | no difference shown | – |" in page  # p = 0.054
    assert "| em | -0.37 ± 0.31 | less accurate | – |" in page  # p = 0.032, of three heads
    assert "No head is shown to be more accurate. The largest gain that its interval does not exclude" in page
    assert "rises, to 5.1 in epoch 2 (seed 0), 5.1 in epoch 2 (seed 1), 5.1 in epoch 2 (seed 2)" in page


def test_the_page_is_up_to_date(comparison: Any) -> None:
    assert comparison.PAGE.read_text(encoding="utf-8") == comparison.page(), "run `make docs`"
