"""Pictures of an evaluation: what they show, and the numbers beside them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.errors import refuses

pytest.importorskip("matplotlib")

from capszoo.errors import CapszooError, UsageError
from capszoo.explain import plotting
from capszoo.explain.convergence import IterationChanges
from capszoo.explain.routing_stats import AgreementCurve, LayerStats, RoutingStats
from capszoo.recipes.evaluation import report_plots
from capszoo.recipes.evaluation.metrics import ClassFigures, EvalResult, share_interval
from capszoo.recipes.evaluation.report_plots import draw_confusion, draw_robustness
from tests.support.command import fails, succeeds


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved, as they are drawn."""
    figures: list[Any] = []
    save = plotting.save
    monkeypatch.setattr(plotting, "save", lambda f, path: (figures.append(f), save(f, path))[1])
    return figures


def _rows(path: Path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def _report(name: str, accuracy: float, n: int = 100) -> dict[str, Any]:
    sweep = {"name": "rotation", "unit": "degrees", "amounts": [-30.0, 30.0], "accuracy": [accuracy, 80.0]}
    pgd = [{"eps": 2 / 255, "steps": 7, "step_size": 0.1, "accuracy": 40.0}]
    robustness = {"sweeps": [sweep], "pgd": pgd, "affnist": None}
    return {
        "model": name,
        "dataset": "mnist",
        "split": "test",
        "n": n,
        "top1": 99.0,
        "robustness": robustness,
    }


def test_wilson_s_interval() -> None:
    assert share_interval(90.0, 100) == pytest.approx((82.56, 94.48), abs=0.01)
    assert share_interval(100.0, 100)[1] == pytest.approx(100.0) and share_interval(100.0, 100)[0] < 97
    assert share_interval(0.0, 10)[0] == pytest.approx(0.0, abs=1e-9)


def test_several_models_in_one_picture(tmp_path: Path, kept: list[Any]) -> None:
    path = draw_robustness({"a": _report("a", 90.0), "b": _report("b", 50.0, 400)}, tmp_path / "r.svg")
    rotation, pgd = (axes for axes in kept[0].axes if axes.get_title())
    assert (rotation.get_title(), pgd.get_title()) == ("rotation", "PGD, 7 steps")
    assert rotation.get_ylabel() == "accuracy (%)" and pgd.get_xlabel() == "radius, of 255"
    labels = rotation.get_legend_handles_labels()[1]
    assert sorted(labels) == ["a, n = 100", "b, n = 400", "unchanged images"]
    assert len(rotation.containers) == 2, "a line with error bars for each model"
    rows = _rows(path.with_suffix(".csv"))
    assert rows[0] == ["model", "change", "unit", "amount", "accuracy %", "low %", "high %", "n"]
    assert rows[1][:5] == ["a", "rotation", "degrees", "-30.0", "90.0"] and len(rows) == 1 + 2 * 3
    assert float(rows[1][5]) == pytest.approx(82.56, abs=0.01)
    # one model has no attack, and another number of steps is a panel of its own: colours stay those of the legend
    other, third = _report("b", 50.0), {**_report("c", 60.0), "dataset": "cifar10"}
    other["robustness"]["pgd"] = []
    third["robustness"]["pgd"][0]["steps"] = 40
    draw_robustness({"a": _report("a", 90.0), "b": other, "c": third}, tmp_path / "three.png")
    for axes in kept[1].axes:
        handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            if label != "unchanged images":
                assert handle[0].get_color() == f"C{'abc'.index(label[0])}"
    (legend,) = kept[1].legends
    assert len(legend.get_texts()) == 4
    assert "mnist (test), cifar10 (test)" in kept[1].get_suptitle()
    with refuses(CapszooError, names=["holds", "robustness"]):
        draw_robustness({"c": {**_report("c", 1.0), "robustness": None}}, tmp_path / "x.png")


def test_the_command_takes_reports(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.json").write_text(json.dumps(_report(name, 90.0)))
    out = tmp_path / "both.png"
    line = ("curves", "--what", "robustness", "--out", out)
    assert "both.png" in succeeds(*line, tmp_path / "a", tmp_path / "b" / "eval.json")
    assert out.is_file() and {row[0] for row in _rows(tmp_path / "both.csv")[1:]} == {"a", "b"}
    fails(1, *line, tmp_path, names=["report", "capszoo"])
    again = tmp_path / "again"
    again.mkdir()
    (again / "eval.json").write_text(json.dumps(_report("a", 70.0)))
    files = [again / "eval.json", again / "third.json"]
    files[1].write_text(json.dumps(_report("a", 60.0)))
    succeeds(*line, tmp_path / "a", *files)
    assert {row[0] for row in _rows(tmp_path / "both.csv")[1:]} == {
        "a",
        *(f"a ({file})" for file in files),
    }, "no report replaces another"
    fails(2, *line, tmp_path / "a", files[1], files[1], names=["third.json"])
    fails(2, *line, tmp_path / "a", "--log", names=["--log", "--what"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"robustness": {"sweeps": 5}}, "robustness.sweeps: Input should be a valid list"),
        ({"robustness": [1]}, "robustness: Input should be"),
        ({"robustness": {"sweeps": [{}], "pgd": []}}, "robustness.sweeps.0.name: Field required"),
        ({"robustness": {"sweeps": [], "pgd": []}}, "holds no robustness"),
        ({"n": 0}, "n: Input should be greater"),
        ({"top1": "x"}, "top1: Input should be a valid number"),
        ({"top1": "99.0"}, "top1: Input should be a valid number"),
        ({"dataset": None}, "dataset: Input should be a valid string"),
    ],
)
def test_a_damaged_report_is_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (tmp_path / "eval.json").write_text(json.dumps(_report("a", 90.0) | changes))
    line = fails(1, "curves", "--what", "robustness", "--out", tmp_path / "x.png", tmp_path)
    assert said in line and not (tmp_path / "x.png").exists()
    report = _report("a", 90.0)
    report["robustness"]["sweeps"][0]["accuracy"].pop()
    with refuses(CapszooError, names=["amounts", "accuracy"]):
        draw_robustness({"a": report}, tmp_path / "x.png")


def test_confusion(tmp_path: Path, kept: list[Any]) -> None:
    classes = tuple(ClassFigures(label, 10, 5, 50.0, 50.0, 50.0) for label in ("cat", "dog"))
    table = torch.tensor([[9, 1], [4, 6]])
    result = EvalResult(
        n=20, errors=5, top1=75.0, top5=None, exact_set=None, per_class=classes, confusion=table
    )
    path = draw_confusion(result, "a model, n = 20", tmp_path / "c.png")
    matrix, bar = kept[0].axes
    assert (matrix.get_xlabel(), matrix.get_ylabel()) == ("predicted class", "true class")
    assert "square-root scale" in bar.get_ylabel() and matrix.get_title() == ""
    assert {text.get_text() for text in matrix.texts} == {"9", "1", "4", "6"}
    assert _rows(path.with_suffix(".csv"))[1:] == [["cat", "9", "1"], ["dog", "4", "6"]]
    draw_confusion(result, "a model", tmp_path / "p.png", percent=True)
    assert {text.get_text() for text in kept[1].axes[0].texts} == {"90%", "10%", "40%", "60%"}
    dollars = tuple(ClassFigures(label, 10, 5, 50.0, 50.0, 50.0) for label in ("$1_$5", "$5_{$20"))
    draw_confusion(replace(result, per_class=dollars), "prices", tmp_path / "d.png")  # no formulas
    with refuses(UsageError, names=["d.txt"]):
        draw_confusion(result, "a model", tmp_path / "d.txt")


def test_routing_has_titles_labels_and_axes_from_zero(tmp_path: Path, kept: list[Any]) -> None:
    layer = LayerStats(positions=1, parents=10, children=32, over="parents", entropy=0.93, peak=0.3, dead=1)
    curve = AgreementCurve(cosine=(-0.5, 0.5), share=(40.0, 60.0), length=(1.0, None), classes=True)
    stats = RoutingStats(n=5, layers=(layer,), never_predicted=(), curve=curve)
    changes = (IterationChanges(own=2, logits=(0.23, 0.24, 0.27), couplings=(0.1, 0.1, 0.1)),)
    path = report_plots._draw_routing(stats, changes, "a model, n = 5", tmp_path / "routing.png")
    titled = [axes for axes in kept[0].axes if axes.get_title()]
    assert [axes.get_title() for axes in titled] == [
        "Couplings",
        "Agreement of votes with the class's capsule",
        "Change by iteration",
    ]
    assert all(axes.get_xlabel() and axes.get_ylabel() and axes.get_ylim()[0] == 0 for axes in titled)
    assert titled[2].get_ylim()[1] > 0.27
    rows = _rows(path.with_suffix(".csv"))
    assert ["entropy (1: even)", "1", "0.93"] in rows and ["share of dead capsules", "1", "0.1"] in rows
    layer = LayerStats(1, 10, 32, over=None, entropy=None, peak=None, dead=1, negative=0.25)
    stats = RoutingStats(n=5, layers=(layer,), never_predicted=(), curve=None)
    changes = (IterationChanges(own=2, logits=(), couplings=(1.0, 0.1)),)  # of credit
    path = report_plots._draw_routing(stats, changes, "a model, n = 5", tmp_path / "routing.png")
    assert [axes.get_title() for axes in kept[1].axes] == ["Couplings"]
    rows = _rows(path.with_suffix(".csv"))
    assert ["share of negative credit", "1", "0.25"] in rows and ["entropy (1: even)", "1", ""] in rows
