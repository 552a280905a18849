"""The runs behind docs/evidence.md: fair to every head, resumable, and no claim beyond what was run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capszoo.data import DATASETS, ImageSet
from capszoo.data.sources import compose
from capszoo.recipes.evaluation.target import EvalTarget
from tests.support import load_script


@pytest.fixture(scope="module")
def evidence(root: Path) -> Any:
    return load_script(root / "benchmarks" / "evidence.py")


@pytest.fixture
def tiny(evidence: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs of a few updates on random images whose label is their brightest row."""

    def load(name: str, split: str, data: Any) -> ImageSet:
        count = {"train": 400, "test": 60, "expanded": 60}[split]
        generator = torch.Generator().manual_seed(len(split))
        labels = torch.arange(count) % 10
        images = torch.randint(0, 40, (count, 1, 28, 28), generator=generator, dtype=torch.uint8)
        images[torch.arange(count), 0, 2 * labels] = 255
        digits = ImageSet(DATASETS["mnist"], split, images, labels)
        return digits if name == "mnist" else compose(DATASETS[name], split, digits)

    monkeypatch.setattr(evidence, "loaded", load)
    levels = {"rotation": (0.0, 4), "affine": (0.0, 8)}
    scale = evidence.Scale(12, 8, 4, 40, 30, 20, (2, 5), levels, {}, 1)
    monkeypatch.setitem(evidence.SCALES, "small", scale)
    monkeypatch.setattr(evidence, "VARIANTS", [("avg", False), ("em", False), ("em", True)])
    return evidence


def test_every_head_has_its_twin_and_the_same_images(tiny: Any) -> None:
    found = list(tiny.jobs("small"))
    assert len({(job.claim, job.key) for job in found}) == len(found) == 3 * 3 + 5 * 3 * 3
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


def test_a_run_is_kept_and_not_repeated(tiny: Any, tmp_path: Path) -> None:
    assert tiny.best_rate(tiny.Job("small", "few", 2, "em", True, 0), tmp_path) is None
    for job in [job for job in tiny.jobs("small") if job.claim == "rates" and job.even]:
        record = tiny.run(job, None, torch.device("cpu"), tmp_path)
        assert "test" not in record and record["even"] and record["n"] == {"validation": 40, "test": 30}
    trials = tiny.kept("rates", tmp_path)
    rates = [trials[f"small/100/em/even/3/{rate:g}"]["validation"] for rate in tiny.RATES]
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
    assert all(again[key] == record[key] for key in ("validation", "test", "unseen", "matched"))


@pytest.mark.parametrize(
    ("claim", "side", "sets"), [("affine", 16, {"test", "affnist"}), ("overlap", 12, {"test"})]
)
def test_composed_digits_keep_their_proportions(tiny: Any, claim: str, side: int, sets: set[str]) -> None:
    job = tiny.Job("small", claim, 0, "avg", False, 0)
    images = tiny.digits(job)
    again, other = tiny.digits(job), tiny.digits(tiny.Job("small", claim, 0, "em", False, 1))
    assert torch.equal(images.training.images, again.training.images)
    assert not torch.equal(images.training.images, other.training.images)
    assert torch.equal(images.validation.images, other.validation.images)
    assert images.tests.keys() == sets and {len(some) for some in images.tests.values()} == {30}
    for some in (images.training, images.validation, *images.tests.values()):
        assert some.images.shape[1:] == (1, side, side) == some.spec.input_size
    # 40 and 36 pixels at 12/28 of their size, in steps of the trunk's stride
    labels = images.tests["test"].labels
    assert (claim == "affine") == (labels.dim() == 1)
    assert claim == "affine" or labels.sum(1).tolist() == [2.0] * 30, "two digits of different classes"
    record = tiny.train(job, 0.1, images)
    assert record["updates"] == tiny.TIMES[claim] * 4 and 0 <= record["test"] <= 100
    if claim == "affine":
        # a level of 0 at the first look
        assert record["matched"]["update"] == 1 and "affnist" in record["matched"]


def test_corruptions_and_calibration_are_those_of_the_runs_with_many_images(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "CORRUPTED", 5)
    few, many = (tiny.digits(tiny.Job("small", "few", count, "avg", False, 0)) for count in (2, 5))
    assert few.tests.keys() == {"test"} and many.tests.keys() == {"test", *tiny.MNIST_C}
    plain, bright = many.tests["test"].images[:20].float(), many.tests["brightness"].images.float()
    assert bright.shape == plain.shape == (20, 1, 12, 12)
    assert ((bright - plain).mean() - 127).abs() < 15, "half of the range is added"

    class Sure(torch.nn.Module):
        """Always class 0, with a probability of nearly 1: a tenth of the digits."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 50.0 * torch.eye(10)[torch.zeros(len(x), dtype=torch.int64)]

    found = tiny._tested(Sure(), many)
    share = 100 * float((many.tests["test"].labels == 0).float().mean())
    assert found["test"] == pytest.approx(share, abs=1e-3)
    assert found["ece"] == pytest.approx(100 - share, abs=1e-3)
    assert found["corrupted"] == pytest.approx(
        100 * float((many.tests["fog"].labels == 0).float().mean()), abs=1e-3
    )
    assert found["corruptions"].keys() == tiny.MNIST_C.keys() and "fog" not in found


class Bright(torch.nn.Module):
    """Two classes, dark and bright, by the mean of the pixels; ``hidden`` gives it steps without a gradient."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden = hidden
        self.gain = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean((1, 2, 3))
        if self.hidden:
            # the value, with a gradient of the wrong sign
            mean = mean.detach() - 1e-3 * mean + 1e-3 * mean.detach()
        return 20 * self.gain * torch.stack([0.5 - mean, mean - 0.5], 1)


def test_masked_gradients_are_seen(evidence: Any) -> None:
    pixels = torch.full((20, 3, 8, 8), 127, dtype=torch.uint8)
    pixels[::2] = 128
    labels = (torch.arange(20) + 1) % 2
    spec = replace(DATASETS["cifar10"], input_size=(3, 8, 8))
    images = ImageSet(spec, "test", pixels, labels)

    def target(hidden: bool) -> EvalTarget:
        return EvalTarget("", Bright(hidden), images, 20, (0.0,) * 3, (1.0,) * 3, 0.0, None)

    honest, masked = (
        evidence.masking(target(hidden), target(False), (2 / 255, 8 / 255), 5) for hidden in (False, True)
    )
    assert honest["n"] == 20 and len(honest["loss"]) == len(honest["sizes"]) == len(evidence.STEP_SIZES)
    assert honest["loss"] == sorted(honest["loss"]) and honest["loss"][-1] > honest["random"][-1] + 0.3
    # the logits differ by 40 (mean - 0.5), so that a step of 8/255 adds 40 * 8 / 255 to the loss
    assert honest["loss"][-1] - honest["loss"][0] == pytest.approx(40 * 8 / 255, rel=1e-3)
    assert masked["loss"] == sorted(masked["loss"], reverse=True), "its gradient lowers the loss"
    assert [(one["own"], one["transfer"], one["only_transfer"]) for one in honest["radii"]] == [(0, 0, 0)] * 2
    assert all(one["transfer"] == 0 and one["only_transfer"] == one["own"] for one in masked["radii"])
    assert masked["radii"][0]["own"] > 10


@pytest.fixture(scope="module")
def script(root: Path) -> Any:
    return load_script(root / "scripts" / "evidence.py")


def test_replaced_weights_and_unknown_claims(
    script: Any, evidence: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, row in evidence.kept("deletion").items():
        evidence.keep("deletion", key, row | {"sha256": "0" * 64}, tmp_path)
    assert not script.measured("deletion", tmp_path) and script.measured("deletion", evidence.KEPT)
    with pytest.raises(SystemExit):
        evidence.main(["poze", "--missing"])
    assert "poze" in capsys.readouterr().err


def test_the_page_is_up_to_date(script: Any) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run `make docs`"
    drawn = {claim for claim, (done, _) in script.progress(script.evidence.KEPT).items() if done} - {"rates"}
    found = {path.stem for path in script.PICTURES.glob("evidence_*.svg")}
    assert found == {f"evidence_{claim}" for claim in drawn}


def few(
    folder: Path,
    evidence: Any,
    means: dict[str, float],
    seeds: int = 3,
    claim: str = "few",
    setting: int = 10,
    figure: str = "test",
    **more: Any,
) -> None:
    for name, mean in means.items():
        head, _, twin = name.partition(", ")
        for seed in range(seeds):
            run = evidence.Job("small", claim, setting, head, bool(twin), seed)
            row = {figure: mean + 0.1 * seed, "validation": mean, "seconds": 9, "updates": run.updates} | more
            if row.get("matched"):
                row["matched"] = {figure: row["matched"] + 0.1 * seed, "validation": 80.0}
            evidence.keep(claim, run.key, row, folder)


def test_a_difference_needs_three_seeds_and_its_interval(script: Any, evidence: Any, tmp_path: Path) -> None:
    few(tmp_path, evidence, {"avg": 90.0, "em": 91.0, "em, even": 90.0}, seeds=2)
    text = script.page(tmp_path)
    assert "| em | 91.05 (n = 2) | 91.0 | – | 90.05 (n = 2) | – |" in text and "few (6 of 108 runs)" in text
    few(tmp_path, evidence, {"avg": 90.0, "em": 91.0, "em, even": 90.0, "conv": 90.05})
    text = script.page(tmp_path)
    # Welch: 2.776 * 0.1 * sqrt(2 / 3)
    assert "| em | 91.10 ± 0.10 | 91.0 | **+1.00 ± 0.23** | 90.10 ± 0.10 | **+1.00 ± 0.23** |" in text
    assert "| conv | 90.15 ± 0.10 | 90.0 | +0.05 ± 0.23 | – | – |" in text
    assert "| dynamic | – | – | – | – | – |" in text
    (path,) = script.plots(tmp_path, tmp_path)
    assert path.name == "evidence_few.svg" and path.stat().st_size > 1000


def test_the_paragraph_counts_every_comparison(script: Any, evidence: Any, tmp_path: Path) -> None:
    few(tmp_path, evidence, {"avg": 90.0, "conv": 95.0, "em": 91.0, "em, even": 90.0})
    said = script.overall(tmp_path)
    assert "1 of 1" in said[0] and "(few, 10 a class: em)" in said[0], "conv has no capsules"
    assert "worse in none of 1" in said[0]
    few(tmp_path, evidence, {"avg": 5.0, "em": 6.0}, setting=100, figure="ece", validation=90.0)
    assert "worse in 1 of 2 (calibration: em)" in script.overall(tmp_path)[0], "a smaller error is better"
    few(tmp_path, evidence, {"avg": 40.0, "idpa": 30.0, "em": 5.0}, claim="overlap", setting=0)
    for head, validation in (("idpa", 19.0), ("em", 50.0)):
        trial = {"head": head, "even": False, "validation": validation, "updates": 4, "seconds": 9}
        evidence.keep("rates", f"small/100/{head}/3/0.1", trial, tmp_path)
    (_, part) = script.compared("overlap", 0, tmp_path)
    assert part.untrained == ["idpa"] and part.by.keys() == {"em"}, "by the trials, not by a bad figure"
    (tmp_path / "rates.json").unlink()
    few(tmp_path, evidence, {"avg": 40.0, "idpa": 30.0, "em": 30.0}, claim="overlap", setting=0)
    assert not any("more updates" in line for line in script.overall(tmp_path))
    rotation: Any = {"claim": "rotation", "setting": 0, "figure": "unseen", "matched": None}
    few(tmp_path, evidence, {"avg": 90.0, "idpa": 30.0}, **rotation)
    assert "`idpa` (rotation)" in script.overall(tmp_path)[-1]
    means = {"avg": 80.0, "em": 80.05}
    few(tmp_path, evidence, means, claim="affine", setting=0, figure="affnist", matched=50.0)
    lines = script.trained_lines("affine", tmp_path)
    assert lines[0] == "Of 2 differences to `avg`, none holds."
    assert sum("at the first validation accuracy of" in line for line in lines) == 1
    assert "| em | 80.15 ± 0.10 | 80.0 | +0.05 ± 0.23 | – | – |" in lines
    assert "| em | 50.10 ± 0.10 | 80.0 | +0.00 ± 0.23 | – | – |" in lines
    few(tmp_path, evidence, {"em": 80.05}, claim="affine", setting=0, figure="affnist", matched=None)
    (_, part) = script.compared("affine", 0, tmp_path, matched=True)
    assert part.short == ["em"] and not part.by
    assert "| em | – | – | not reached | – | – |" in script.trained_lines("affine", tmp_path)
    assert any(line.startswith("- ") and "evidence.py masking" in line for line in script.left(tmp_path))
