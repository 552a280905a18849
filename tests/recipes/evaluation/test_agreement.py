"""What two models agree on, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from capszoo.errors import CapszooError
from capszoo.recipes.evaluation.agreement import agreement
from tests.support.errors import refuses


def target(
    answers: list[list[float]], labels: torch.Tensor, known: int | None = 1, names: tuple[str, ...] = ()
) -> Any:
    """A model that gives these scores, on images with these labels."""
    batch = SimpleNamespace(images=torch.tensor(answers), labels=labels)
    spec = SimpleNamespace(labels_per_image=known, label_names=names)
    return SimpleNamespace(
        n=len(labels),
        batch_size=500,
        images=SimpleNamespace(spec=spec),
        batches=lambda *_: [batch],
        net=lambda images: images,
        threshold=0.5,
    )


def test_counts_by_hand() -> None:
    labels = torch.tensor([0, 1, 2, 3])
    first = target(torch.eye(4)[[0, 1, 2, 2]].tolist(), labels)  # wrong in the last
    second = target(torch.eye(4)[[0, 2, 1, 2]].tolist(), labels)  # right in the first alone
    found = agreement(first, second)
    assert found.accuracy == (75, 25) and found.n == 4
    assert (found.same, found.both_right, found.only_first) == (2, 1, 2)
    assert (found.only_second, found.both_wrong) == (0, 1)


def test_models_with_another_order_of_the_classes() -> None:
    first = target(torch.eye(3)[[0, 1, 1]].tolist(), torch.tensor([0, 1, 2]), names=("a", "b", "c"))
    second = target(torch.eye(3)[[1, 2, 2]].tolist(), torch.tensor([1, 2, 0]), names=("c", "a", "b"))
    found = agreement(first, second)
    assert (found.same, found.both_right, found.both_wrong) == (3, 2, 1)
    several = torch.tensor([[1, 1, 0]])
    first = target([[0.9, 0.8, 0.1]], several, None, names=("a", "b", "c"))
    second = target([[0.1, 0.9, 0.2]], several[:, [2, 0, 1]], None, names=("c", "a", "b"))
    assert agreement(first, second).only_first == 1


def test_several_labels_by_hand() -> None:
    labels = torch.tensor([[1, 1, 0], [0, 1, 1]])
    first = target([[0.9, 0.8, 0.1], [0.2, 0.9, 0.3]], labels, None)  # the second image misses a label
    second = target([[0.6, 0.7, 0.2], [0.1, 0.6, 0.4]], labels, None)
    found = agreement(first, second)
    assert (found.same, found.both_right, found.both_wrong) == (2, 1, 1), "the same wrong answer is one, too"


def test_other_images_are_refused() -> None:
    first = target([[1.0, 0.0]], torch.tensor([0]))
    with refuses(CapszooError, names=["images", "differ"]):
        agreement(first, target([[1.0, 0.0]], torch.tensor([1])))
    with refuses(CapszooError, names=["1", "2", "compared"]):
        agreement(first, target([[1.0, 0.0]] * 2, torch.tensor([0, 0])))
