"""`eval RUN --split val` measures exactly the images that training held out, image by image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from capszoo.data import DataError, ImageSet
from capszoo.metadata import DataRecord
from capszoo.recipes.config import load_recipe
from capszoo.recipes.evaluation.target import _read_split, prepare
from capszoo.recipes.finetune import finetune
from capszoo.recipes.training import setup
from tests.support import packed
from tests.support.command import run
from tests.support.errors import assert_names, refuses
from tests.support.recipes import write_photos

MODEL = "resnet20_routingcaps.mnist"


def _spy(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What training itself read, as it read it."""
    from capszoo.recipes import finetune as module

    seen: list[Any] = []
    load = setup.load_data

    def kept(*arguments: Any, **options: Any) -> Any:
        seen.append(load(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(module, "load_data", kept)
    return seen


def _same_images(run_folder: Path, held_out: Any) -> None:
    subject = prepare(str(run_folder), split="val", device="cpu")
    assert subject.images.split == "validation" and subject.n == len(held_out)
    assert torch.equal(subject.images.labels, held_out.labels)
    for mine, theirs in zip(subject.images.images, held_out.images, strict=True):
        assert torch.equal(mine, theirs)


def test_a_stratified_part(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _spy(monkeypatch)
    out = tmp_path / "run"
    result = finetune(MODEL, photos, out, epochs=1, cpu=True, tag="mine")
    (data,) = seen
    assert len(data.validation) == result["validation"]["n"]
    _same_images(out, data.validation)
    # and not those that a split without strata would give
    recipe = load_recipe(out / "recipe.yaml")
    assert recipe.data.validation == "stratified"
    carved = prepare(str(out), split="train", device="cpu").images
    order = torch.randperm(len(carved), generator=torch.Generator().manual_seed(recipe.data.val_seed))
    plain = carved.images[order[: recipe.data.val_size].sort().values]
    assert plain.shape != data.validation.images.shape or not torch.equal(plain, data.validation.images)

    done = run("eval", out, "--split", "val", "--json", "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["stated"] == result["validation"]["top1"]
    assert report["top1"] == pytest.approx(report["stated"], abs=1e-3)
    # without imagefolder:
    said = run("eval", out, "--split", "val", "--data", f"{photos}/", "--device", "cpu").stdout
    assert "(validation; chose the epoch)" in said and "(test" not in said
    line = run("eval", out, "--device", "cpu").stderr
    assert_names(line, ["--split"])

    (photos / "one" / "zzz.png").write_bytes(next((photos / "one").iterdir()).read_bytes())  # a new image
    line = run("eval", out, "--split", "val", "--device", "cpu").stderr
    assert_names(line, ["training", "--split"])


def test_a_run_is_evaluated_from_another_folder(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _spy(monkeypatch)
    monkeypatch.chdir(tmp_path)
    finetune(MODEL, photos.name, tmp_path / "run", epochs=1, cpu=True, tag="mine")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with refuses(DataError, names=[photos.name, "--data"]):
        prepare("../run", split="val", device="cpu")
    found = prepare("../run", split="val", data=photos, device="cpu")
    assert found.part.startswith("validation") and torch.equal(found.images.images, seen[0].validation.images)
    moved = photos.rename(tmp_path / "moved")
    assert prepare("../run", split="val", data=moved, device="cpu").n == found.n
    next((moved / "one").iterdir()).unlink()
    with refuses(DataError, names=["training", "--split"]):
        prepare("../run", split="val", data=moved, device="cpu")
    with refuses(DataError, names=["run", "--data"]):  # weights that this folder did not train
        prepare(MODEL, split="val", data=moved, device="cpu")


def test_an_own_validation_split(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = packed(root, "mnist")
    write_photos(images, tmp_path / "own" / "train", {"one": 8, "three": 8, "eight": 8})
    write_photos(images, tmp_path / "own" / "val", {"one": 3, "three": 4, "eight": 5}, start=20)
    seen = _spy(monkeypatch)
    out = tmp_path / "run"
    finetune(MODEL, tmp_path / "own", out, epochs=1, cpu=True, tag="mine")
    _same_images(out, seen[0].validation)
    for split in ("val", "test"):  # there is no test split: what chose the epoch is not called a test
        said = run("eval", out, "--split", split, "--device", "cpu")
        assert said.exit_code == 0, said.stderr
        assert "(validation; chose the epoch), n = 12" in said.stdout and "(test" not in said.stdout


def test_unreadable_images_are_left_out_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "one" / "0000.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    seen = _spy(monkeypatch)
    out = tmp_path / "run"
    finetune(MODEL, photos, out, epochs=1, cpu=True, tag="mine", skip_bad=True)
    _same_images(out, seen[0].validation)


def test_weights_of_the_zoo(root: Path) -> None:
    with pytest.raises(DataError, match="MNIST"):  # the recipe says what to hold out; the data are not there
        prepare(MODEL, split="val", data=root / "docs", device="cpu")


def test_val_is_not_the_test_set_of_a_run_that_validates_on_it(digits: ImageSet, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    for number, split in enumerate(("train", "val")):
        write_photos(digits, folder / split, {"one": 4, "three": 4}, 4 * number)
    data = {"name": f"imagefolder:{folder}", "size": 16, "validation": "own"}
    tree = {"arch": "idpa_cnn", "tag": "own", "data": data, "epochs": 1}
    with refuses(DataError, names=["data.test=false"]):
        setup.load_data(load_recipe(tree), None)
    assert setup.load_data(load_recipe(tree, ["data.test=false"]), None).test is None
    write_photos(digits, folder / "test", {"one": 4, "three": 4}, 8)
    found = setup.load_data(load_recipe(tree), None)
    assert found.test is not None and found.fingerprints["test"] != found.fingerprints["val"]


def test_a_run_that_held_out_nothing_says_so() -> None:
    data, load = DataRecord(name="mnist", val_size=0), Mock()
    with refuses(DataError, names=["mnist", "--split test"]) as caught:
        _read_split("mnist", "val", None, data, load, None)
    assert "MODEL" not in str(caught.value) and not load.called
