"""What is counted from scores, against counts made by hand; several crops."""

from __future__ import annotations

import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import capszoo
from capszoo.data import Batches, DataError
from capszoo.data.augment import resize
from capszoo.errors import CapszooError, UsageError
from capszoo.recipes.evaluation.crops import Crops, default_side
from capszoo.recipes.evaluation.metrics import Tally, assess, pooled, reproduced, scored, stated_top1
from capszoo.recipes.evaluation.target import _grey, evaluation_batch, prepare
from tests.support import packed
from tests.support.errors import refuses

MODEL = "resnet20_routingcaps.mnist"


def test_classes_and_confusion_by_hand() -> None:
    tally = Tally(3, 1, 0.5)
    answers = torch.tensor([0, 0, 1, 1, 2, 0])
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    scores = nn.functional.one_hot(answers, 3).float()
    tally.add(scores[:4], labels[:4])
    tally.add(scores[4:], labels[4:])
    result = tally.result(["a", "b", "c"])
    assert (result.n, result.errors, result.top1) == (6, 3, 50.0)
    assert result.top5 is None and result.exact_set is None, "three classes, one label"
    assert result.confusion is not None and result.confusion.tolist() == [[2, 1, 0], [1, 1, 1], [0, 0, 0]]
    a, b, c = result.per_class
    assert (a.label, a.n) == ("a", 3)
    assert (a.recall, a.precision, a.f1) == pytest.approx((200 / 3, 200 / 3, 200 / 3))
    assert (b.recall, b.precision, b.f1) == pytest.approx((100 / 3, 50.0, 40.0))
    assert (c.n, c.recall, c.precision, c.f1) == (0, None, 0.0, 0.0)


def test_top_five_and_results_of_folds_are_pooled() -> None:
    tally = Tally(7, 1, 0.5)
    tally.add(torch.arange(7.0).expand(7, 7), torch.arange(7))  # the highest five are 2 to 6
    assert tally.result("abcdefg").top1 == pytest.approx(100 / 7)
    assert tally.result("abcdefg").top5 == pytest.approx(500 / 7)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    scores = nn.functional.one_hot(torch.tensor([0, 1, 1, 1, 2, 0]), 7).float()
    parts = []
    for part in (slice(0, 4), slice(4, 6), slice(0, 6)):
        tally = Tally(7, 1, 0.5)
        tally.add(scores[part], labels[part])
        parts.append(tally.result("abcdefg"))
    found, whole = pooled(parts[:2]), parts[2]
    assert (found.n, found.errors, found.top1, found.top5) == (6, 2, whole.top1, None)
    assert found.per_class == whole.per_class and found.confusion is not None
    assert torch.equal(found.confusion, whole.confusion)


def test_several_labels_by_hand() -> None:
    labels = torch.tensor([[1.0, 1, 0], [0, 1, 1], [1, 0, 1]])
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.6, 0.9, 0.2], [0.9, 0.8, 0.7]])
    known, free = Tally(3, 2, 0.5), Tally(3, None, 0.5)
    for tally in (known, free):
        tally.add(scores, labels)
    by_two, by_threshold = known.result("abc"), free.result("abc")
    assert by_two.exact_set == by_threshold.exact_set == pytest.approx(100 / 3)
    assert by_two.top1 is None and by_two.confusion is None
    a, b, c = by_threshold.per_class  # found: ab, ab, abc
    assert (a.n, b.n, c.n) == (2, 2, 2)
    assert (a.recall, a.precision) == pytest.approx((100.0, 200 / 3))
    assert (b.recall, b.precision) == pytest.approx((100.0, 200 / 3))
    assert (c.recall, c.precision, c.f1) == pytest.approx((50.0, 100.0, 200 / 3))


def test_scores_that_are_no_numbers_are_an_error() -> None:
    tally = Tally(3, 1, 0.5)
    with refuses(CapszooError, names=["images"]):
        tally.result("abc")
    tally.add(torch.tensor([[0.0, float("nan"), 1.0], [1.0, 0.0, 0.0]]), torch.tensor([0, 0]))
    with refuses(CapszooError, names=["1", "2", "NaN"]):
        tally.result("abc")


def test_crops_are_corners_and_middle() -> None:
    pixels = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6)
    views = list(Crops(6, (4, 4), False).views(pixels))
    assert [int(view[0, 0, 0, 0]) for view in views] == [0, 2, 12, 14, 7]
    both = list(Crops(6, (4, 4), True).views(pixels))
    assert len(both) == 10 and torch.equal(both[1], views[0].flip(3)) and torch.equal(both[8], views[4])
    assert default_side(32) == 34 and default_side(28) == 30
    assert str(Crops(40, (32, 32), False, 4)) == "5 of 32x32 out of 40x40 (padded by 4): corners, middle"
    assert str(Crops(34, (32, 32), True)) == "10 of 32x32 out of 34x34: corners, middle, each mirrored too"


class Brightness(nn.Module):
    """Scores that depend on where the ink lies."""

    num_classes, in_chans, img_size = 10, 1, (28, 28)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, ::80][:, :10].contiguous()


def by_hand(large: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """Mean scores over the corners and the middle of 28x28, at rows and columns `offsets` (first, last, middle)."""
    first, last, middle = offsets
    total = torch.zeros(len(large), 10)
    for top, left in ((first, first), (first, last), (last, first), (last, last), (middle, middle)):
        cut = large[:, :, top : top + 28, left : left + 28].float() / 255
        total += Brightness()((cut - 0.1307) / 0.3081)
    return total / 5


def test_several_crops_are_the_mean_of_crops_made_by_hand(
    tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capszoo._pretrained.catalogue import checkpoints

    single = prepare(MODEL, data=tiny_mnist, device="cpu").images
    target = prepare(MODEL, data=tiny_mnist, crops="multi", device="cpu")
    assert target.crops == Crops(32, (28, 28), False, 2), "trained on shifts of 2, without mirroring"
    ((scores, labels),) = scored(replace(target, net=Brightness()), 100)
    padded = nn.functional.pad(single.images, (2, 2, 2, 2))  # type: ignore[union-attr]
    torch.testing.assert_close(scores, by_hand(padded, (0, 4, 2)), rtol=1e-4, atol=1e-4)
    assert torch.equal(labels, single.labels)

    augment = checkpoints(aliases=False)[MODEL].raw["recipe"]["data"]["augment"]
    monkeypatch.setitem(augment, "shift", 0)
    target = prepare(MODEL, data=tiny_mnist, crops="multi", device="cpu")
    assert target.crops == Crops(30, (28, 28), False), "34/32 of the input"
    ((scores, labels),) = scored(replace(target, net=Brightness()), 100)
    large = resize(single.images, (30, 30))  # type: ignore[union-attr]
    torch.testing.assert_close(scores, by_hand(large, (0, 2, 1)), rtol=1e-4, atol=1e-4)
    monkeypatch.setitem(augment, "resize", 32)
    monkeypatch.setitem(augment, "flip", True)
    assert prepare(MODEL, data=tiny_mnist, crops="multi").crops == Crops(32, (28, 28), True)
    # resized to the input's own size, as fine-tuning does, and shifted: padded as it was trained
    monkeypatch.setitem(augment, "resize", 28)
    monkeypatch.setitem(augment, "shift", 2)
    assert prepare(MODEL, data=tiny_mnist, crops="multi").crops == Crops(32, (28, 28), True, 2)


def test_the_threshold_of_several_labels_is_that_of_the_scores(tiny_mnist: Path) -> None:
    assert prepare(MODEL, data=tiny_mnist, device="cpu").threshold == 0.5  # trained with the margin loss
    for kind, threshold in (("label_logits", 0.0), ("label_lengths", 0.5), ("activations", 0.5)):
        net: Any = Brightness()  # without a recipe, whose loss would tell
        net.score_kind = kind
        assert prepare(net, "mnist", data=tiny_mnist, device="cpu").threshold == threshold


@pytest.mark.parametrize("name", [MODEL, "resnet20_routingcaps.affnist"])
def test_shards_are_read_at_the_scale_of_folders(name: str, tmp_path: Path, root: Path) -> None:
    digits = packed(root, "mnist").images[:10, 0].numpy()
    with tarfile.open(tmp_path / "test-000000.tar", "w") as shard:
        for i, digit in enumerate(digits):
            (tmp_path / "folder" / "test" / f"{i % 10}").mkdir(parents=True, exist_ok=True)
            file = tmp_path / "folder" / "test" / f"{i % 10}" / f"{i}.png"
            Image.fromarray(digit).save(file)
            shard.add(file, f"{i}.png")
            (tmp_path / "label").write_text(str(i % 10))
            shard.add(tmp_path / "label", f"{i}.cls")
    shutil.copy(tmp_path / "test-000000.tar", tmp_path / "train-000000.tar")
    shutil.copytree(tmp_path / "folder" / "test", tmp_path / "folder" / "train")
    (tmp_path / "classes.txt").write_text("\n".join(map(str, range(10))) + "\n")
    ways = (f"wds:{tmp_path}", f"imagefolder:{tmp_path / 'folder'}")
    shards, folder = (prepare(name, way, device="cpu") for way in ways)
    (one,), (two,) = (Batches(target.images, 10).epoch() for target in (shards, folder))
    assert torch.equal(one.images, two.images) and torch.equal(one.labels, two.labels)


def test_a_limit_draws_images_by_its_seed(tiny_mnist: Path) -> None:
    whole = prepare(MODEL, data=tiny_mnist, device="cpu")
    one, again, other = (
        prepare(MODEL, data=tiny_mnist, device="cpu", limit=10, seed=seed) for seed in (0, 0, 1)
    )
    assert whole.n == one.whole == 40 and one.n == 10
    assert torch.equal(one.images.images, again.images.images)  # type: ignore[union-attr]
    assert not torch.equal(one.images.images, other.images.images)  # type: ignore[union-attr]
    assert stated_top1(whole) is None, "the metadata state it for 10,000 images"


def test_the_batch_follows_size_and_training(tiny_mnist: Path) -> None:
    target = prepare(MODEL, data=tiny_mnist, device="cpu")
    assert target.batch_size == 500 and [len(b.labels) for b in target.batches(None)] == [40]
    large = replace(
        target, images=replace(target.images, images=torch.zeros(2, 1, 896, 896, dtype=torch.uint8))
    )
    info = target.info
    assert info is not None
    for batch, parts, expected in ((None, None, 4), (128, None, 256), (128, 16, 16)):
        recipe = {**info.raw["recipe"], "batch_size": batch, "accumulate": parts}
        assert replace(large, info=replace(info, raw={**info.raw, "recipe": recipe})).batch_size == expected
    assert evaluation_batch((896, 896), torch.device("cuda"), -3) == 4, "a stranger's number"


def test_held_out_images_are_those_of_the_recipe(tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from capszoo._pretrained.catalogue import checkpoints

    recipe = checkpoints(aliases=False)[MODEL].raw["recipe"]["data"]
    monkeypatch.setitem(recipe, "val_size", 20)
    held_out = prepare(MODEL, split="val", data=tiny_mnist, device="cpu")
    assert held_out.images.split == "validation" and held_out.n == 20
    monkeypatch.setitem(recipe, "val_size", 0)
    with refuses(DataError, names=["--split"]):
        prepare(MODEL, split="val", data=tiny_mnist, device="cpu")


def test_what_does_not_fit_is_said(root: Path, tiny_mnist: Path, tmp_path: Path) -> None:
    cifar = packed(root, "cifar10")
    with refuses(CapszooError, names=["1", "cifar10", "3"]):
        prepare(MODEL, cifar)
    eleven = replace(cifar.spec, label_names=("gnu", *cifar.spec.label_names))
    with pytest.raises(CapszooError, match="'gnu'"):
        prepare("resnet20_routingpool.cifar10", replace(cifar, spec=eleven))
    unnamed = capszoo.create_model("resnet20_routingpool", num_classes=3)
    with pytest.raises(CapszooError, match="3 classes, cifar10 has 10"):
        prepare(unnamed, cifar)
    with refuses(UsageError, names=["many"]):
        prepare(MODEL, data=tiny_mnist, crops="many")
    with refuses(UsageError, names=["0", "limit"]):
        prepare(MODEL, data=tiny_mnist, limit=0)
    with refuses(CapszooError, names=["28x28", "40x40"]):
        prepare("idpa_cnn.mnist", "affnist", data=tiny_mnist)


def test_a_folder_is_a_data_set_in_any_channels(root: Path, tmp_path: Path) -> None:
    digits = packed(root, "mnist").subset(torch.arange(100))
    grey, colour, ink = tmp_path / "grey", tmp_path / "colour", tmp_path / "ink"
    for n, (image, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
        picture = Image.fromarray(image[0].numpy())
        black = Image.new("RGBA", picture.size, (0, 0, 0, 0))
        black.putalpha(picture)
        for folder, drawn in ((grey, picture), (colour, picture.convert("RGB")), (ink, black)):
            place = folder / "test" / str(int(label))
            place.mkdir(parents=True, exist_ok=True)
            drawn.save(place / f"{n}.png")
    same = assess(prepare(MODEL, digits, device="cpu"))
    assert (
        same.n == 100 and same.confusion is not None and int(same.confusion.diag().sum()) == 100 - same.errors
    )
    for way in (
        f"imagefolder:{grey}",
        grey,
        colour,
        ink,
    ):  # black on transparent is white on black, as for predict
        found = assess(prepare(MODEL, data=way, device="cpu"))
        assert found.confusion is not None
        assert torch.equal(found.confusion, same.confusion), "the same digits, neither scaled nor cropped"
    with refuses(UsageError, names=["names", "data"]):
        prepare(MODEL, "mnist", data=f"imagefolder:{grey}")
    net = capszoo.create_model("resnet20_routingpool.cifar10", pretrained=True, img_size=28)
    target = prepare(net, data=grey, device="cpu")
    assert target.images.spec.input_size == (3, 28, 28) and assess(target).n == 100
    pixels = torch.randint(256, (3, 5, 7), dtype=torch.uint8)
    by_pillow = Image.fromarray(pixels.permute(1, 2, 0).numpy()).convert("L")
    assert _grey(pixels[None])[0, 0].tolist() == np.asarray(by_pillow).tolist()
    (grey / "test").rename(tmp_path / "flat")
    with refuses(DataError, names=["--split"]):
        prepare(MODEL, data=tmp_path / "flat", device="cpu")


def test_two_images_may_differ() -> None:
    assert reproduced(99.0, 98.98, 10_000) and not reproduced(99.0, 98.97, 10_000)
