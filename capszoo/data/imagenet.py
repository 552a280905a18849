"""Build h-ImageNet from an ILSVRC 2012 folder: the 200 classes with a ResNet-18's lowest accuracy, cropped to objects.

Li et al. 2018 (EncapNet), section 5, state the number of classes, ResNet-18 as the judge, the counts (255,725 for
training, 17,101 for validation) and that objects are cropped with some padding. The rest is **our choice**:

- a class's accuracy is measured on the 50,000 validation images (256 pixels, middle 224);
- padding is a tenth of the box on each side;
- training has one crop per image, of its first box, or the whole image without a box: 200 classes have at most
  260,000 training images; validation has one crop per box: 200 classes have 10,000 images, fewer than stated;
- crops are kept at most 256 pixels on their shorter side.

The resulting counts are compared with the paper's and written to the manifest, with the list of classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, nn

from capszoo._utils.files import expanded, write_atomically
from capszoo.errors import CapszooError, first_line

from .batches import Batches
from .errors import DataError
from .folders import Decoded, Files, available_workers, folder_spec
from .sets import StreamedSet

PAPER_COUNTS = {"train": 255_725, "val": 17_101}
PADDING = 0.1
KEPT_SIDE = 256
_SUFFIXES = (".JPEG", ".jpeg", ".jpg")

Box = tuple[int, int, int, int]


class Ilsvrc:
    """Paths in a copy of ILSVRC 2012 with its original layout (``Data/CLS-LOC``, ``Annotations/CLS-LOC``)."""

    def __init__(self, folder: str | Path) -> None:
        root = expanded(folder)
        root = next((r for r in (root, root / "ILSVRC") if (r / "Data" / "CLS-LOC").is_dir()), root)
        self.images, self.notes = root / "Data" / "CLS-LOC", root / "Annotations" / "CLS-LOC"
        for part in (self.images / "train", self.images / "val", self.notes / "val"):
            if not part.is_dir():
                raise DataError(f"{folder} is no copy of ILSVRC 2012: {part} is missing")
        self.classes = sorted(path.name for path in (self.images / "train").iterdir() if path.is_dir())
        self.titles: dict[str, str] = {}
        for mapping in (root / "LOC_synset_mapping.txt", root.parent / "LOC_synset_mapping.txt"):
            if mapping.is_file():
                lines = mapping.read_text(encoding="utf-8").splitlines()
                self.titles = {line[:9]: line[10:].split(",")[0] for line in lines if line}

    def boxes(self, part: str) -> tuple[str | None, list[Box]]:
        """The class and the boxes of an image from its annotation, ``train/<class>/<stem>`` or ``val/<stem>``."""
        path = self.notes / f"{part}.xml"
        if not path.is_file():
            return None, []
        try:
            objects = ElementTree.parse(path).getroot().findall("object")
            boxes = []
            for thing in objects:
                corners = [
                    int(float(thing.findtext(f"bndbox/{key}", "")))
                    for key in ("xmin", "ymin", "xmax", "ymax")
                ]
                boxes.append((corners[0], corners[1], corners[2], corners[3]))
            return (objects[0].findtext("name") if objects else None), boxes
        except (ElementTree.ParseError, ValueError) as error:
            raise DataError(f"{path} is damaged: {error}") from error

    def validation(self) -> Iterator[tuple[Path, str, list[Box]]]:
        """Validation images with their class and boxes, ordered by name."""
        for path in sorted((self.images / "val").iterdir()):
            if path.suffix in _SUFFIXES:
                wnid, boxes = self.boxes(f"val/{path.stem}")
                if wnid is None:
                    raise DataError(
                        f"{self.notes / 'val' / path.stem}.xml is missing: it states the image's class"
                    )
                yield path, wnid, boxes

    def training(self, wnid: str) -> Iterator[tuple[Path, list[Box]]]:
        """Training images of a class with their boxes, ordered by name."""
        for path in sorted((self.images / "train" / wnid).iterdir()):
            if path.suffix in _SUFFIXES:
                yield path, self.boxes(f"train/{wnid}/{path.stem}")[1]


def load_judge(weights: str | Path | None = None) -> nn.Module:
    """timm's ResNet-18 with torchvision's ImageNet weights, from a local file if given."""
    import timm

    overlay = {"file": str(weights)} if weights else None
    try:
        return timm.create_model("resnet18.tv_in1k", pretrained=True, pretrained_cfg_overlay=overlay).eval()
    except (OSError, RuntimeError) as error:
        reason = first_line(error) if str(error) else f"{weights}: no such file"  # timm's has no text
        raise DataError(f"cannot load ResNet-18's weights: {reason}; give a file") from error


@torch.no_grad()
def class_accuracies(
    ilsvrc: Ilsvrc, judge: nn.Module, device: str | torch.device = "cpu", batch_size: int = 100
) -> dict[str, float]:
    """Top-1 accuracy of each class on the validation images."""
    number = {wnid: index for index, wnid in enumerate(ilsvrc.classes)}
    samples = []
    for path, wnid, _ in ilsvrc.validation():
        if wnid not in number:
            raise DataError(f"{path} is of class {wnid}, which has no folder in {ilsvrc.images / 'train'}")
        samples.append((path, number[wnid]))
    spec = folder_spec("ilsvrc", ilsvrc.classes, (3, 224, 224), len(samples), "val")
    files = Files(ilsvrc.images / "val", tuple(path.name for path, _ in samples))
    decoder = Decoded(files, "RGB", (256, 256))
    labels = torch.tensor([label for _, label in samples])
    data = StreamedSet(
        spec, "val", decoder, torch.arange(len(samples)), labels, 256, available_workers() - 1
    ).to(device)
    judge = judge.to(device).eval()
    right: Tensor = torch.zeros(len(number))
    for batch in Batches(data, batch_size).epoch():
        hit = judge(batch.images).argmax(1) == batch.labels
        right += torch.bincount(batch.labels[hit].cpu(), minlength=len(number))
    total = torch.bincount(labels, minlength=len(number)).clamp(min=1)
    return dict(zip(ilsvrc.classes, (right / total).tolist(), strict=True))


def hardest(accuracies: Mapping[str, float], count: int = 200) -> list[str]:
    """The classes of lowest accuracy, ordered by name; names break ties too."""
    if len(accuracies) < count:
        raise DataError(f"{count} classes cannot be chosen out of {len(accuracies)}")
    return sorted(sorted(accuracies, key=lambda wnid: (accuracies[wnid], wnid))[:count])


def _cut(source: Path, box: Box | None, target: Path) -> None:
    """Write one crop, unless it already exists."""
    from PIL import Image

    from capszoo.images import open_image

    if target.is_file():
        return
    try:
        whole = open_image(source, channels=3)
    except CapszooError as error:
        raise DataError(str(error)) from error
    if box:
        x, y = PADDING * (box[2] - box[0]), PADDING * (box[3] - box[1])
        left, top = max(0, round(box[0] - x)), max(0, round(box[1] - y))
        right, bottom = min(whole.width, round(box[2] + x)), min(whole.height, round(box[3] + y))
        if right - left >= 1 and bottom - top >= 1:
            whole = whole.crop((left, top, right, bottom))
    shorter = min(whole.size)
    if shorter > KEPT_SIDE:
        width, height = (round(side * KEPT_SIDE / shorter) for side in whole.size)
        whole = whole.resize((width, height), Image.Resampling.BILINEAR)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".part")
    whole.save(partial, "JPEG", quality=95)
    partial.replace(target)


def build(
    folder: str | Path,
    out: str | Path,
    accuracies: Mapping[str, float],
    count: int = 200,
) -> dict[str, Any]:
    """Write h-ImageNet: ``train/<class>/*.jpg``, ``val/<class>/*.jpg`` and the manifest ``h_imagenet.json``.

    Args:
        folder: a copy of ILSVRC 2012 with its annotations.
        out: target folder; an interrupted call resumes.
        accuracies: top-1 accuracy of each class, from ``class_accuracies`` or another source.
        count: number of classes.

    Returns:
        The manifest: ``classes``, ``accuracies``, ``titles``, ``counts`` and the ``paper``'s counts.
    """
    ilsvrc = Ilsvrc(folder)
    if unknown := sorted(set(accuracies) - set(ilsvrc.classes)):
        raise DataError(f"{folder} has no class {unknown[0]}, which the accuracies name")
    chosen = hardest(accuracies, count)
    target = expanded(out)

    def jobs() -> Iterable[tuple[Path, Box | None, Path]]:
        for wnid in chosen:
            for path, boxes in ilsvrc.training(wnid):
                yield path, (boxes[0] if boxes else None), target / "train" / wnid / f"{path.stem}.jpg"
        for path, wnid, boxes in ilsvrc.validation():
            if wnid in chosen:
                for number, box in enumerate(boxes):
                    yield path, box, target / "val" / wnid / f"{path.stem}_{number}.jpg"

    def work(job: tuple[Path, Box | None, Path]) -> str:
        _cut(*job)
        return job[2].parent.parent.name

    counts = {"train": 0, "val": 0}
    waiting = iter(jobs())
    with ThreadPoolExecutor(available_workers()) as pool:
        while some := list(islice(waiting, 4096)):  # `map` would submit all of a million images at once
            for part in pool.map(work, some):
                counts[part] += 1
    manifest = {
        "classes": chosen,
        "accuracies": {wnid: accuracies[wnid] for wnid in chosen},
        "titles": {wnid: ilsvrc.titles.get(wnid, wnid) for wnid in chosen},
        "counts": counts,
        "paper": PAPER_COUNTS,
    }
    write_atomically(target / "h_imagenet.json", json.dumps(manifest, indent=1) + "\n")
    return manifest
