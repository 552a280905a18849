"""Losses against loops, their fixed points, and the factory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from capszoo.losses import (
    LOSSES,
    bce_loss,
    create_loss,
    cross_entropy_loss,
    margin_loss,
    reconstruction_loss,
    spread_loss,
    spread_margin,
)
from tests.reference import losses as reference
from tests.support.errors import refuses


def scores_and_target(batch: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(batch, classes, dtype=torch.float64, requires_grad=True)
    return scores, torch.randint(classes, (batch,))


def compare(got: torch.Tensor, want: torch.Tensor, x: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(got, x)[0], torch.autograd.grad(want, x)[0], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("batch, classes", [(1, 2), (5, 10)])
@pytest.mark.parametrize("numbers", [(0.9, 0.1, 0.5), (0.6, 0.3, 0.25)])
def test_margin(batch, classes, numbers) -> None:
    scores, target = scores_and_target(batch, classes)
    present = torch.nn.functional.one_hot(target, classes)
    want = reference.margin(scores, present, *numbers)
    compare(margin_loss(scores, target, *numbers), want, scores)
    assert torch.equal(margin_loss(scores, present, *numbers), margin_loss(scores, target, *numbers))


def test_margin_with_several_labels() -> None:
    scores, _ = scores_and_target(4, 6)
    present = torch.rand(4, 6) < 0.4
    compare(margin_loss(scores, present), reference.margin(scores, present, 0.9, 0.1, 0.5), scores)


def test_margin_is_zero_where_lengths_are_right() -> None:
    scores = torch.tensor([[0.95, 0.05, 0.1], [0.0, 0.9, 0.1]])
    assert float(margin_loss(scores, torch.tensor([0, 1]))) == 0.0
    # both wrong: (0.9 - 0.05)^2 + 0.5 * (0.95 - 0.1)^2
    assert float(margin_loss(scores[:1], torch.tensor([1]))) == pytest.approx(1.5 * 0.85**2)


@pytest.mark.parametrize("margin", [0.2, 0.5, 0.9])
def test_spread(margin) -> None:
    scores, target = scores_and_target(5, 4)
    compare(spread_loss(scores, target, margin), reference.spread(scores, target, margin), scores)


def test_spread_margin_rises_unless_fixed() -> None:
    assert [round(spread_margin(p), 6) for p in (-1.0, 0.0, 0.5, 1.0, 2.0)] == [0.2, 0.2, 0.55, 0.9, 0.9]
    scores, target = scores_and_target(3, 4)
    loss, fixed = create_loss("spread"), create_loss("spread", margin_low=None)
    assert torch.equal(loss(scores, target), spread_loss(scores, target, 0.2))
    assert torch.equal(fixed(scores, target), spread_loss(scores, target, 0.9))
    for module, margin in ((loss, 0.55), (fixed, 0.9)):
        module.set_progress(0.5)
        torch.testing.assert_close(module(scores, target), spread_loss(scores, target, margin))


def test_cross_entropy_and_bce() -> None:
    scores, target = scores_and_target(5, 4)
    compare(cross_entropy_loss(scores, target), reference.cross_entropy(scores, target), scores)
    soft = torch.nn.functional.one_hot(target, 4).double()
    torch.testing.assert_close(cross_entropy_loss(scores, soft), cross_entropy_loss(scores, target))
    assert not torch.equal(cross_entropy_loss(scores, target, 0.5), cross_entropy_loss(scores, target))
    present = torch.rand(5, 4) < 0.5
    compare(bce_loss(scores, present), reference.bce(scores, present), scores)
    torch.testing.assert_close(bce_loss(scores, target), bce_loss(scores, soft))


def test_reconstruction() -> None:
    made = torch.rand(3, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    image = torch.rand(3, 2, 4, 5, dtype=torch.float64)
    compare(reconstruction_loss(made, image), reference.reconstruction(made, image, 0.0005), made)
    # the sum over pixels, not their mean; the mean over the batch, not its sum
    ones, zeros = torch.ones(4, 1, 28, 28), torch.zeros(4, 1, 28, 28)
    assert float(reconstruction_loss(ones, zeros)) == pytest.approx(784 * 0.0005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fill", [0.0, 1.0, 6e4])
def test_finite_and_in_full_precision(dtype, fill) -> None:
    target = torch.tensor([0, 2])
    for name in sorted(set(LOSSES) - {"reconstruction"}):
        scores = torch.full((2, 3), fill, dtype=dtype, requires_grad=True)
        loss = create_loss(name)(scores, target)
        assert loss.dtype == torch.float32 and torch.isfinite(loss), name
        (grad,) = torch.autograd.grad(loss, scores)
        assert torch.isfinite(grad.float()).all() or (dtype == torch.float16 and fill == 6e4), name


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_modules_are_the_functions(name) -> None:
    scores, target = scores_and_target(3, 4)
    if name == "reconstruction":
        image = torch.rand(2, 1, 3, 3)
        assert torch.equal(
            create_loss(name, weight=0.5)(image, 0 * image), reconstruction_loss(image, 0 * image, 0.5)
        )
        return
    function, chosen = {
        "margin": (margin_loss, {"m_plus": 0.7}),
        "spread": (spread_loss, {"margin": 0.7}),
        "bce": (bce_loss, {}),
        "cross_entropy": (cross_entropy_loss, {"label_smoothing": 0.2}),
    }[name]
    module = create_loss(name, **chosen, **({"margin_low": None} if name == "spread" else {}))
    assert torch.equal(module(scores, target), function(scores, target, **chosen))  # type: ignore[operator]
    assert all(str(value) in repr(module) for value in chosen.values())


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("margn", {}, ValueError, "'margin'"),
        ("margin", {"m_pls": 0.9}, TypeError, "'m_plus'"),
        ("bce", {"args": 1}, TypeError, "args"),
        ("spread", {"margin": 0.1}, ValueError, "exceed"),
        ("cross_entropy", {"label_smoothing": 2.0}, ValueError, "between 0 and 1"),
        *(("spread", {"margin": value}, TypeError, "spread") for value in ("abc", True, float("nan"), None)),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        create_loss(name, **options)


def test_a_fixed_margin() -> None:
    assert create_loss("spread", margin=1, margin_low=None).current == 1


CLASSIFYING = sorted(set(LOSSES) - {"reconstruction"})


@pytest.mark.parametrize("name", CLASSIFYING)
@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.tensor([0.9, 0.9, 0.1]), "float32"),
        (torch.tensor([True, False, True]), ("integers", "bool")),
        (torch.tensor([0, -100, 1]), ("0", "3", "-100", "1", "between")),
        (torch.tensor([0, 4, 1]), ("0", "3", "4", "between")),
        (torch.tensor([0, -1, 1], dtype=torch.int8), ("-1", "1", "between")),
        (torch.tensor([0]), ("3", "4", "1", "int64")),
        (torch.tensor([0, 1]), ("3", "4", "2", "int64")),
        (torch.zeros(3, 5), ("3", "4", "5", "float32")),
        (torch.zeros(3, 1, dtype=torch.long), ("3", "1", "int64")),
        (torch.tensor(1), "int64"),
    ],
)
def test_targets_that_do_not_fit_are_refused(name: str, target: torch.Tensor, words: str) -> None:
    with refuses(ValueError, names=words) as caught:
        create_loss(name)(torch.rand(3, 4), target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CLASSIFYING)
def test_presences_are_refused_where_they_are_none(name: str) -> None:
    loss, scores = create_loss(name), torch.rand(3, 4)
    for target in (torch.full((3, 4), -1.0), torch.full((3, 4), 2), torch.full((3, 4), float("nan"))):
        with pytest.raises(ValueError):
            loss(scores, target)
    if name == "spread":
        with refuses(ValueError, names=["class", "indices"]):
            loss(scores, torch.zeros(3, 4))


@pytest.mark.parametrize("name", CLASSIFYING)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_indices_of_any_integers_are_the_same_classes(name: str, dtype: torch.dtype) -> None:
    scores, target = torch.rand(3, 4), torch.tensor([3, 0, 1])
    assert torch.equal(create_loss(name)(scores, target.to(dtype)), create_loss(name)(scores, target))


def test_targets_whose_values_python_cannot_see() -> None:
    """On the meta device, and in a transform, where PyTorch has no rule for the presences of the other losses."""
    scores, target = torch.rand(3, 4), torch.tensor([3, 0, 1])
    assert all(create_loss(name)(scores.to("meta"), target.to("meta")).is_meta for name in CLASSIFYING)
    found = torch.func.vmap(torch.func.grad(lambda s, t: cross_entropy_loss(s[None], t[None])))(
        scores, target
    )
    leaf = scores.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(3 * cross_entropy_loss(leaf, target), leaf)[0])


def test_pictures_of_other_shapes_are_refused() -> None:
    with refuses(ValueError, names=["differ", "shape"]):
        reconstruction_loss(torch.rand(2, 1, 3, 3), torch.rand(2, 1, 4, 4))


def test_label_smoothing_by_hand() -> None:
    scores, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    logp = scores.log_softmax(1)
    expected = -(0.9 * logp[range(5), target] + 0.1 * logp.mean(1)).mean().item()
    for labels in (target, F.one_hot(target, 4).float()):
        assert cross_entropy_loss(scores, labels, 0.1).item() == pytest.approx(expected, rel=1e-5)


def test_presences_of_one_class_are_no_indices() -> None:
    """Read as indices, 0 would mean present."""
    for name in CLASSIFYING:
        with refuses(ValueError, names=["two", "classes"]):
            create_loss(name)(torch.zeros(2, 1), torch.tensor([0, 1]))
    assert float(bce_loss(torch.full((2, 1), 2.0), torch.zeros(2, 1))) > 2
