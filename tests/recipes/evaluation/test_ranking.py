"""AUROC, average precision and sensitivity, against figures made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from capszoo.errors import UsageError
from tests.support.command import fails, succeeds
from tests.support.errors import refuses

pytest.importorskip("torchmetrics", reason="of the extra train, which older environments have without it")

from capszoo.recipes.evaluation.ranking import check_specificity, rank

MODEL = "resnet20_routingcaps.mnist"


def test_two_classes_by_hand() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    second = torch.tensor([0.1, 0.2, 0.3, 0.8, 0.7, 0.9])
    found = rank(torch.stack([1 - second, second], 1), labels, "ab", "lengths", 0.75)
    assert (found.kind, [row.label for row in found.per_class]) == ("binary", ["b"])
    assert found.auroc == pytest.approx(7 / 8), "of eight pairs one is in the wrong order"
    assert found.average_precision == pytest.approx((1 + 2 / 3) / 2)
    assert found.sensitivity == 1, "the threshold 0.7 keeps three of four below"
    strict = rank(torch.stack([1 - second, second], 1), labels, "ab", "lengths", 1.0)
    assert strict.sensitivity == 0.5


def test_classes_are_compared_by_probability() -> None:
    """The logit of class 0 alone would rank the images the other way round."""
    scores = torch.tensor([[5.0, 9.0, 0.0], [4.0, 0.0, 0.0], [1.0, 9.0, 0.0], [0.0, 0.0, 9.0]])
    labels = torch.tensor([1, 0, 1, 2])
    found = rank(scores, labels, "abc")
    assert found.kind == "one-vs-rest" and found.auroc == 1
    assert [row.auroc for row in found.per_class] == [1, 1, 1]


def test_large_logits_are_no_ties_and_equal_scores_count_half() -> None:
    labels = torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]])
    scores = torch.tensor([[900.0, 3.0], [600.0, 3.0], [800.0, 3.0], [700.0, 3.0]])
    found = rank(scores, labels, "ab", "label_logits")
    assert found.kind == "multi-label"
    assert [row.auroc for row in found.per_class] == [1, 0.5]


def test_a_class_without_images_or_without_others_has_no_figures() -> None:
    labels = torch.tensor([[1.0, 0, 1], [1, 0, 0]])
    found = rank(torch.rand(2, 3), labels, "abc", "label_lengths")
    assert [row.auroc is None for row in found.per_class] == [True, True, False]
    assert found.auroc == found.per_class[2].auroc
    assert rank(torch.rand(2, 2), torch.tensor([0, 0]), "ab").auroc is None


def test_eval_prints_and_records_them(tiny_mnist: Path) -> None:
    options = ("eval", MODEL, "--data", tiny_mnist, "--device", "cpu")
    found = json.loads(succeeds(*options, "--specificity", "0.9", "--json"))["ranking"]
    assert (found["kind"], found["specificity"], len(found["per_class"])) == ("one-vs-rest", 0.9, 10)
    assert 0.5 < found["auroc"] <= 1 and found["per_class"][0]["label"] == "0"
    assert f"AUROC {found['auroc']:.4f}" in succeeds(*options)


def test_an_impossible_specificity_is_refused() -> None:
    with refuses(UsageError, names=["1.5"]):
        check_specificity(1.5)
    fails(2, "eval", MODEL, "--specificity", "95", names=["95"])
