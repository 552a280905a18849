"""The runs behind docs/evidence.md: fair to every head, resumable, and no claim beyond what was run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capszoo.data import DATASETS, ImageSet
from capszoo.recipes.evaluation.target import EvalTarget, prepare
from tests.support import load_script, packed


@pytest.fixture(scope="module")
def evidence(root: Path) -> Any:
    return load_script(root / "benchmarks" / "evidence.py")


@pytest.fixture
def tiny(evidence: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs of a few updates on random images whose label is their brightest row."""

    def load(name: str, split: str, data: Any, size: int) -> ImageSet:
        count = {"train": 400, "test": 60}[split]
        generator = torch.Generator().manual_seed(len(split))
        labels = torch.arange(count) % 10
        images = torch.randint(0, 40, (count, 1, size, size), generator=generator, dtype=torch.uint8)
        images[torch.arange(count), 0, labels] = 255
        return ImageSet(replace(DATASETS["mnist"], input_size=(1, size, size)), split, images, labels)

    monkeypatch.setattr(evidence, "load_dataset", load)
    monkeypatch.setitem(evidence.SCALES, "small", evidence.Scale(12, 8, 4, 40, 30, (2, 5), 0.0, 4, {}, 1))
    monkeypatch.setattr(evidence, "VARIANTS", [("avg", False), ("em", False), ("em", True)])
    return evidence


def test_every_head_has_its_twin_and_the_same_images(tiny: Any) -> None:
    found = list(tiny.jobs("small"))
    assert len({(job.claim, job.key) for job in found}) == len(found) == 3 * 3 + 3 * 3 * 3
    assert {job.setting for job in found if job.claim == "few"} == {2, 5}
    for claim, setting, each in (("few", 2, 2), ("rotation", 0, None)):
        drawn = [
            tiny.digits(tiny.Job("small", claim, setting, head, even, seed)).training
            for head, even, seed in (("avg", False, 0), ("em", True, 0), ("em", True, 1))
        ]
        assert torch.equal(drawn[0].images, drawn[1].images) and not torch.equal(
            drawn[1].images, drawn[2].images
        )
        assert len(drawn[0]) == 8 * tiny.Job("small", claim, setting, "em", False, 0).updates
        different = [len(drawn[0].images[drawn[0].labels == label].unique(dim=0)) for label in range(10)]
        assert each is None or max(different) == each


def test_angles_are_those_of_the_claim(evidence: Any) -> None:
    pixels = torch.zeros(400, 1, 21, 21, dtype=torch.uint8)
    pixels[:, :, 10, 18] = 255  # on the horizontal, 8 pixels right of the middle
    images = ImageSet(DATASETS["mnist"], "test", pixels, torch.zeros(400, dtype=torch.int64))
    found = evidence.rotated(images, 30, 60, 3).images[:, 0].float()
    place = torch.arange(21) - 10.0
    down, right = ((found * grid).sum((1, 2)) / found.sum((1, 2)) for grid in (place[:, None], place[None]))
    angles = torch.rad2deg(torch.atan2(-down, right))
    assert bool(((angles.abs() > 29) & (angles.abs() < 61)).all())
    assert 0.4 < (angles > 0).float().mean() < 0.6


def test_a_run_is_kept_and_not_repeated(tiny: Any, tmp_path: Path) -> None:
    assert tiny.best_rate(tiny.Job("small", "few", 2, "em", True, 0), tmp_path) is None
    for job in [job for job in tiny.jobs("small") if job.claim == "rates" and job.even]:
        record = tiny.run(job, None, torch.device("cpu"), tmp_path)
        assert "test" not in record and record["even"] and record["n"] == {"validation": 40, "test": 30}
    rates = [
        tiny.kept("rates", tmp_path)[f"small/100/em/even/3/{rate:g}"]["validation"] for rate in tiny.RATES
    ]
    job = tiny.Job("small", "rotation", 0, "em", True, 0)
    chosen = tiny.best_rate(job, tmp_path)
    assert rates[tiny.RATES.index(chosen)] == max(rates)
    before = tiny.missing("small", tmp_path)
    record = tiny.run(job, None, torch.device("cpu"), tmp_path)
    assert record["rate"] == chosen and record["updates"] == 8 and record["matched"]["update"] == 2
    assert 0 <= record["unseen"] <= 100
    after = tiny.missing("small", tmp_path)
    assert len(after) == len(before) - 1 and all(seconds > 0 for _, seconds in after)
    again = tiny.train(job, chosen, tiny.digits(job))
    assert {key: again[key] for key in ("validation", "test", "unseen", "matched")} == {
        key: record[key] for key in ("validation", "test", "unseen", "matched")
    }


def test_the_rate_warms_up_and_ends_at_zero(evidence: Any) -> None:
    rates = [evidence.learning_rate(step, 100, 0.3) for step in range(100)]
    assert (
        rates[0] == pytest.approx(0.03) and max(rates) == rates[10] == pytest.approx(0.3) and rates[-1] < 1e-3
    )


def test_a_measurement_is_repeated_for_another_file(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "resnet20_routingcaps.mnist"
    scale = replace(tiny.SCALES["small"], measured={"pose": 24, "ood": 24, "deletion": 2, "attack": 2})
    monkeypatch.setitem(tiny.SCALES, "small", scale)
    digits = packed(tiny.ROOT, "mnist")

    def prepared(name: str, **options: Any) -> EvalTarget:
        return prepare(name, digits, limit=options["limit"], device="cpu")

    monkeypatch.setattr(tiny, "prepare", prepared)
    before = {one.key for one, _ in tiny.missing_measurements("small", tmp_path) if one.claim == "pose"}
    record = tiny.measure(tiny.Measurement("small", "pose", model), None, torch.device("cpu"), tmp_path)
    assert record["images"] == 24 and record["result"]["n"] == 12 and record["dataset"] == "mnist"
    after = {one.key for one, _ in tiny.missing_measurements("small", tmp_path) if one.claim == "pose"}
    assert before - after == {f"small/{model}"}
    tiny.keep("pose", f"small/{model}", record | {"sha256": "of an earlier file"}, tmp_path)
    again = {one.key for one, _ in tiny.missing_measurements("small", tmp_path) if one.claim == "pose"}
    assert again == before
    other = tiny._outliers_of(prepared(model, limit=4), tmp_path, 5)
    assert other.spec.name == "fashion_mnist" and other.images.shape == (5, 1, 28, 28)


@pytest.fixture(scope="module")
def script(root: Path) -> Any:
    return load_script(root / "scripts" / "evidence.py")


def test_the_page_is_up_to_date(script: Any) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run `make docs`"
    drawn = {f"evidence_{claim}" for claim, (done, _) in script.progress(script.KEPT).items() if done} - {
        "evidence_rates"
    }
    assert {path.stem for path in script.PICTURES.glob("evidence_*.svg")} == drawn


def test_a_page_without_runs_claims_nothing(script: Any, tmp_path: Path) -> None:
    text = script.page(tmp_path)
    assert text.count("Not run yet.") == len(script.CLAIMS) and ".svg" not in text
    assert script.plots(tmp_path, tmp_path) == [] and "Not tested yet" in script.summary(tmp_path)


def few(folder: Path, evidence: Any, means: dict[str, float], seeds: int = 3) -> None:
    for name, mean in means.items():
        head, _, twin = name.partition(", ")
        for seed in range(seeds):
            run = evidence.Job("small", "few", 10, head, bool(twin), seed)
            row = {"test": mean + 0.1 * seed, "validation": mean, "rate": 0.1, "seed": seed}
            evidence.keep("few", run.key, row, folder)


def test_a_difference_needs_three_seeds_and_its_interval(script: Any, evidence: Any, tmp_path: Path) -> None:
    few(tmp_path, evidence, {"avg": 90.0, "em": 91.0, "em, even": 90.0}, seeds=2)
    text = script.page(tmp_path)
    assert "Fewer than three seeds of each side" in text and "108" in text
    few(tmp_path, evidence, {"avg": 90.0, "em": 91.0, "em, even": 90.0, "conv": 90.05})
    text = script.page(tmp_path)
    # Welch: 2.776 * 0.1 * sqrt(2 / 3)
    assert text.count("| em | +1.00 ± 0.23 | differs |") == 2, "against the even twin and against avg"
    assert "| conv | +0.05 ± 0.23 | – |" in text
    assert (
        "| em, even | 0.1 | 3 | 90.10 ± 0.10 | 90.0 |" in text
        and "| dynamic | – | 0 | not run yet | – |" in text
    )
    (path,) = script.plots(tmp_path, tmp_path)
    assert path.name == "evidence_few.svg" and path.stat().st_size > 1000


def test_verdicts_count_what_the_intervals_show(script: Any, evidence: Any, tmp_path: Path) -> None:
    def score(source: str, low: float) -> dict[str, Any]:
        return {
            "change": "shift",
            "source": source,
            "width": 9,
            "r2": low + 0.05,
            "interval": [low, low + 0.1],
        }

    lows = {"class poses": 0.5, "class activations": 0.0, "pooled features": 0.55, "pixels": 0.9}
    scores = [score(source, low) for source, low in lows.items()]
    scores += [one | {"change": "rotation"} for one in scores]
    row = {"dataset": "cifar10", "result": {"n": 300, "fitted": 300, "scores": scores}}
    evidence.keep("pose", f"small/{evidence.HEAD_CHECKPOINTS['em']}", row, tmp_path)
    said = script.pose_lines(tmp_path)[0]
    assert "activations in 2 of 2 cases" in said and "same network in none of 2" in said
    methods = [
        {"method": name, "n": 20, "random": 0.3, "area": 0.4, "gain": gain, "interval": interval}
        for name, gain, interval in (
            ("couplings", -0.1, [-0.2, -0.05]),
            ("gradient", 0.1, [0.05, 0.2]),
            ("occlusion", 0.2, [0.1, 0.3]),
        )
    ]
    row = {"dataset": "cifar10", "images": 20, "result": {"methods": methods}}
    evidence.keep("deletion", f"small/{evidence.HEAD_CHECKPOINTS['em']}", row, tmp_path)
    said = script.deletion_lines(tmp_path)[0]
    assert "none of 1 networks" in said and "less in 1 of 1" in said
