"""h-ImageNet from a tiny folder laid out like ILSVRC 2012."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from capszoo.data import DataError, load_dataset
from capszoo.data.commands import _read_accuracies
from capszoo.data.imagenet import Ilsvrc, build, class_accuracies, hardest, load_judge
from tests.support.command import fails, succeeds
from tests.support.errors import refuses
from tests.support.formats import write_image

CLASSES = ["n00000001", "n00000002", "n00000003"]


def write_note(path: Path, wnid: str, boxes: list[tuple[int, int, int, int]]) -> None:
    things = "".join(
        f"<object><name>{wnid}</name><bndbox>"
        f"<xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
        for x0, y0, x1, y1 in boxes
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<annotation><folder>x</folder>{things}</annotation>")


@pytest.fixture
def ilsvrc(tmp_path: Path) -> Path:
    """Three classes of three training images (the first with a box) and two validation images (two boxes, one)."""
    root = tmp_path / "ILSVRC"
    images, notes = root / "Data" / "CLS-LOC", root / "Annotations" / "CLS-LOC"
    for number, wnid in enumerate(CLASSES):
        pixels = np.full((60, 80, 3), 10, np.uint8)
        pixels[20:40, 30:50, number] = 250
        for k in range(3):
            write_image(images / "train" / wnid / f"{wnid}_{k}.JPEG", pixels)
        write_note(notes / "train" / wnid / f"{wnid}_0.xml", wnid, [(30, 20, 50, 40)])
        for k, boxes in enumerate(([(30, 20, 50, 40), (0, 0, 79, 59)], [(30, 20, 50, 40)])):
            stem = f"ILSVRC2012_val_{2 * number + k:08d}"
            write_image(images / "val" / f"{stem}.JPEG", pixels)
            write_note(notes / "val" / f"{stem}.xml", wnid, boxes)
    (root / "LOC_synset_mapping.txt").write_text("".join(f"{w} thing {w[-1]}, other name\n" for w in CLASSES))
    return root


class Judge(nn.Module):
    """Knows the first class always, the second half of the time, the third never."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = iter([0, 0, 1, 0, 0, 0])

    def forward(self, images: Tensor) -> Tensor:
        assert images.shape[1:] == (3, 224, 224)
        return torch.eye(3)[[next(self.answers) for _ in images]]


@pytest.mark.parametrize("content", ["[0.5]", "x", "{}", '{"n01440764": 5}', None])
def test_accuracies_of_another_shape(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with refuses(DataError, names=["a.json", "n01440764"]):
        _read_accuracies(tmp_path / "a.json")


def test_accuracies_choose_the_classes(ilsvrc: Path) -> None:
    accuracies = class_accuracies(Ilsvrc(ilsvrc.parent), Judge(), batch_size=4)
    assert accuracies == dict(zip(CLASSES, (1.0, 0.5, 0.0), strict=True))
    assert hardest(accuracies, 2) == CLASSES[1:]
    assert hardest(dict.fromkeys(CLASSES, 0.5), 2) == CLASSES[:2]
    with refuses(DataError, names=["200", "3", "classes"]):
        hardest(accuracies)


def test_build_and_load(ilsvrc: Path, tmp_path: Path) -> None:
    out = tmp_path / "data" / "h_imagenet"
    accuracies = dict(zip(CLASSES, (0.9, 0.2, 0.1), strict=True))
    manifest = build(ilsvrc, out, accuracies, count=2)
    assert manifest["classes"] == CLASSES[1:] and manifest["counts"] == {"train": 6, "val": 6}
    with Image.open(out / "train" / CLASSES[1] / f"{CLASSES[1]}_0.jpg") as cropped:
        assert cropped.size == (24, 24), "the box and a tenth on each side"
    with Image.open(out / "train" / CLASSES[1] / f"{CLASSES[1]}_1.jpg") as whole:
        assert whole.size == (80, 60), "no box"
    made = (out / "train" / CLASSES[1] / f"{CLASSES[1]}_0.jpg").stat().st_mtime_ns
    assert build(ilsvrc, out, accuracies, count=2) == manifest
    assert (out / "train" / CLASSES[1] / f"{CLASSES[1]}_0.jpg").stat().st_mtime_ns == made, "goes on"
    train = load_dataset("h_imagenet", "train", tmp_path / "data")
    assert train.size == (156, 156) and train.spec.input_size == (3, 128, 128) and len(train) == 6
    assert train.spec.label_names == ("thing 2", "thing 3")
    test = load_dataset("h_imagenet", "test", tmp_path / "data", size=224, resize=256)
    assert test.size == (256, 256) and test.labels.tolist() == [0, 0, 0, 1, 1, 1]
    next((out / "val" / CLASSES[2]).glob("*.jpg")).unlink()
    with refuses(DataError, names=["5", "h-ImageNet", "6"]):
        load_dataset("h_imagenet", "test", tmp_path / "data")


@pytest.mark.parametrize("measured", [False, True])
def test_the_command_builds_it(
    ilsvrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    """By listed accuracies, or those of a judge from a file; here with two classes for two hundred."""
    made = build

    def of_two(*arguments: Any) -> dict[str, Any]:
        return made(*arguments, count=2)

    monkeypatch.setattr("capszoo.data.imagenet.build", of_two)
    out = tmp_path / "h_imagenet"
    if measured:
        torch.manual_seed(0)
        judge = timm.create_model("resnet18")
        save_file(judge.state_dict(), tmp_path / "judge.safetensors")
        loaded = load_judge(tmp_path / "judge.safetensors")
        assert not loaded.training and torch.equal(loaded.state_dict()["fc.weight"], judge.fc.weight)
        text = succeeds("data", "h-imagenet", ilsvrc, out, "--weights", tmp_path / "judge.safetensors")
    else:
        listed = tmp_path / "accuracies.json"
        listed.write_text(json.dumps(dict(zip(CLASSES, (0.1, 0.9, 0.2), strict=True))))
        text = succeeds("data", "h-imagenet", ilsvrc, out, "--accuracies", listed)
        assert sorted(path.name for path in (out / "train").iterdir()) == [CLASSES[0], CLASSES[2]]
        listed.write_text(json.dumps({CLASSES[0]: "high"}))
        line = fails(1, "data", "h-imagenet", ilsvrc, tmp_path / "other", "--accuracies", listed)
        assert "accuracies.json" in line and not (tmp_path / "other").exists()
    assert text.splitlines()[0].startswith("train: 6 images (the paper has ")
    with refuses(DataError, names=["ResNet-18"]):
        load_judge(tmp_path / "none.safetensors")


def test_mistakes_are_one_line(ilsvrc: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with refuses(DataError, names=["capszoo", "h-imagenet"]):
        load_dataset("h_imagenet", "train", tmp_path / "empty")
    with refuses(DataError, names=["ILSVRC", "2012"]):
        Ilsvrc(tmp_path / "empty")
    with refuses(DataError, names=["n9"]):
        build(ilsvrc, tmp_path / "out", {**dict.fromkeys(CLASSES, 0.5), "n9": 0.0}, count=2)
    note = ilsvrc / "Annotations" / "CLS-LOC" / "val" / "ILSVRC2012_val_00000000.xml"
    note.write_text("<annotation><object>")
    with refuses(DataError, names=["ILSVRC2012_val_00000000.xml"]):
        list(Ilsvrc(ilsvrc).validation())
