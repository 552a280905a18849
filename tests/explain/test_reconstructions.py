"""Pictures of a decoder: each shows the capsule that it says it shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from capszoo.errors import CapszooError, UsageError
from capszoo.explain import explain
from capszoo.explain.reconstructions import (
    OFFSETS,
    answers,
    offsets_to,
    orange_and_blue,
    overlaps,
    perturb,
    save_answers,
    save_overlaps,
    save_perturbation,
)
from capszoo.preprocess import model_transform
from tests.support.errors import refuses
from tests.support.toys import ToyCaps


@pytest.fixture
def model() -> ToyCaps:
    return ToyCaps(decoder=True).eval()


def batch(count: int = 12) -> Tensor:
    return torch.randn(count, 1, 10, 10, generator=torch.Generator().manual_seed(3))


def drawn(path: Path) -> int:
    with Image.open(path) as figure:
        colours = figure.convert("RGB").getcolors(maxcolors=figure.width * figure.height)
        assert colours is not None
        return len(colours)


def test_one_dimension_is_changed_at_a_time(model: ToyCaps, tmp_path: Path) -> None:
    assert OFFSETS[0] == -0.25 and OFFSETS[5] == 0 and len(OFFSETS) == 11
    picture = Image.effect_noise((10, 10), 90)
    found = perturb(model, picture, "b")
    assert found.images.shape == (3, 11, 1, 10, 10) and found.label == "b"
    with torch.no_grad():
        poses = model.forward_capsules(model_transform(model)(picture)[None]).poses
        for dimension, place in ((0, 0), (2, 10), (1, 5)):
            changed = poses.clone()
            changed[0, 1, dimension] += OFFSETS[place]
            expected = model.reconstruct(changed, torch.tensor([1]))[0]
            torch.testing.assert_close(found.images[dimension, place], expected)
    assert drawn(save_perturbation(found, tmp_path / "perturb.png")) > 50
    some = perturb(model, picture, "b", offsets_to(0.25), dims=[2, 0])
    torch.testing.assert_close(some.images, found.images[[2, 0]])
    with refuses(UsageError, names=["3", "0", "2", "dimension"]):
        perturb(model, picture, dims=[3])
    predicted = perturb(model, picture)
    assert predicted.label == explain(model, picture).labels[explain(model, picture).predicted]


def test_perturb_takes_what_explain_takes(model: ToyCaps, tmp_path: Path) -> None:
    """A path, a picture, an array or a tensor; the model is in eval mode meanwhile."""
    picture = Image.effect_noise((10, 10), 90)
    picture.save(tmp_path / "a.png")
    expected = perturb(model, picture, "b", (0.0,), [0]).images
    modes: list[bool] = []
    model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    model.decoder.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    for image in (str(tmp_path / "a.png"), np.asarray(picture), model_transform(model)(picture)):
        torch.testing.assert_close(perturb(model.train(), image, "b", (0.0,), [0]).images, expected)
    assert modes and not any(modes) and model.training
    with refuses(UsageError, names=["1", "9", "10", "image"]):
        perturb(model, torch.zeros(1, 9, 10))


def test_right_and_wrong_answers(model: ToyCaps, tmp_path: Path) -> None:
    images = batch()
    with torch.no_grad():
        output = model.forward_capsules(images)
    predicted = output.scores.argmax(1)
    labels = predicted.clone()
    labels[[1, 4, 7]] = (predicted[[1, 4, 7]] + 1) % 5
    found = answers(model, [(images[:6], labels[:6]), (images[6:], labels[6:])], right=2, wrong=3)
    assert [one.right for one in found] == [True, True, False, False, False]
    assert [one.label for one in found] == ["abcde"[int(labels[k])] for k in (0, 2, 1, 4, 7)]
    with torch.no_grad():
        by_label = model.reconstruct(output.poses[[4]], labels[[4]])[0]
        by_predicted = model.reconstruct(output.poses[[4]], predicted[[4]])[0]
    torch.testing.assert_close(found[3].by_label, by_label)
    torch.testing.assert_close(found[3].by_predicted, by_predicted)
    assert drawn(save_answers(found, tmp_path / "answers.png")) > 50
    few = answers(model, [(images[:2], predicted[:2])], right=4, wrong=4)
    assert len(few) == 2, "there are no more"


def test_overlapping_digits(model: ToyCaps, tmp_path: Path) -> None:
    images = batch()
    with torch.no_grad():
        output = model.forward_capsules(images)
    top = output.scores.topk(2, dim=1).indices
    present = torch.zeros(12, 5).scatter_(1, top, 1.0)
    present[3] = present[3].roll(1)
    present[5] = torch.eye(5)[0]  # one digit alone: passed over
    found = overlaps(model, [(images, present)], right=2, wrong=1)
    assert [one.right for one in found] == [True, True, False]
    wrong = found[2]
    assert wrong.stranger not in (*wrong.labels, *wrong.predicted)
    with torch.no_grad():
        stranger = model.reconstruct(output.poses[[3]], torch.tensor(["abcde".index(wrong.stranger)]))[0]
    torch.testing.assert_close(wrong.by_stranger, stranger)
    assert drawn(save_overlaps(found, tmp_path / "multi.png")) > 50
    both = orange_and_blue(torch.ones(1, 2, 2), torch.zeros(1, 2, 2))
    assert both[:, 0, 0].tolist() == pytest.approx([1.0, 0.55, 0.0])  # orange


def test_errors(model: ToyCaps, tmp_path: Path) -> None:
    images = batch(2)
    with refuses(CapszooError, names=["decoder"]):
        perturb(ToyCaps().eval(), images[0])
    with refuses(CapszooError, names=["several", "labels"]):
        answers(model, [(images, torch.zeros(2, 5))])
    with refuses(CapszooError, names=["--dataset"]):
        overlaps(model, [(images, torch.zeros(2, dtype=torch.long))])
    with refuses(UsageError, names=["nothing", "draw"]):
        save_answers([], tmp_path / "x.png")
