"""Pictures of the checkpoints on real test images: generate.py runs it when weights change.

``make docs`` writes them to ``docs/pictures``, and the curves of the training to ``docs/curves``. The images are
stored with the tests.

For each checkpoint with routing, the heat maps of a few images; for each with a decoder, reconstructions of images
that it classifies correctly and of some that it does not. A picture states its weights, and is drawn again when
they change; other versions of PyTorch or matplotlib may change a pixel, which needs no update.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import capszoo
from capszoo._pretrained.catalogue import checkpoints
from capszoo._pretrained.info import WeightsInfo
from capszoo.data import dataset_spec
from capszoo.errors import CapszooError
from capszoo.explain import explain, save_figure, save_heat_grid
from capszoo.explain.heat_map import MEANINGS
from capszoo.explain.reconstructions import answers, overlaps, save_answers, save_overlaps
from capszoo.recipes.evaluation.plots import draw_curves
from capszoo.recipes.evaluation.target import create_for, prepare
from capszoo.recipes.training.history import records_of
from tests.support import is_packed, packed

ROOT = Path(__file__).resolve().parents[1]

#: Number of images in a picture of heat maps, and of right and wrong ones in one of reconstructions.
COUNT, RIGHT, WRONG = 8, 5, 3

#: Version of the drawing code for each kind of picture: a picture of another version is stale.
STYLES = {"heat": 5, "decoded": 2, "explain": 3}

#: The first picture of the README: the heat map of one digit, by weights whose map passes the deletion test
#: (docs/use.md).
FIRST, FIRST_OF = "explain.png", "encapnet6_master.mnist"

#: Routings whose heat map is not shown: in the deletion test it is no better than random order, or worse.
NOT_SHOWN = ("capszoo.layers.dynamic", "capszoo.layers.em")

#: Data sets whose reconstructions are not shown: affNIST's decoders give uniform blurs.
NOT_DECODED = ("affnist",)

DECODED = "the first test images that are recognised, and the first that are not"

#: The picture's kind → text of its caption; ``{quantity}`` is what the network's heat map draws.
KINDS = {
    "heat": "Test images, the share of each position in the predicted class ({quantity}, 1 is even) and both overlaid. "
    + MEANINGS["couplings"],
    "decoded": "Test images and their reconstructions, correctly classified ones first, then wrongly classified ones",
}


def picture_file(docs: Path, name: str, kind: str) -> Path:
    """Path of a picture of a checkpoint."""
    return docs / "pictures" / f"{name}.{kind}.png"


def kinds_of(info: WeightsInfo) -> list[str]:
    """The pictures of a checkpoint: none without stored images of its data set."""
    if not is_packed(_data_name(info)):
        return []
    heat = ["heat"] if _has_heat_map(info.name) else []
    decoded = info.model_args.get("decoder") and _data_name(info) not in NOT_DECODED
    return heat + (["decoded"] if decoded else [])


def caption(info: WeightsInfo, kind: str) -> str:
    """Caption of a checkpoint's picture."""
    return KINDS[kind].format(quantity=_without_weights(info.name).map_quantity)


@cache
def _without_weights(name: str) -> Any:
    with torch.device("meta"):
        return create_for(*_described(checkpoints(aliases=False)[name]))


def _described(info: WeightsInfo) -> tuple[Any, ...]:
    return info.architecture, info.num_classes, info.input_size, info.model_args


@cache
def _has_heat_map(name: str) -> bool:
    """Whether the network routes, by none of ``NOT_SHOWN``; twins without capsules or with even couplings do not."""
    net = _without_weights(name)
    if any(type(module).__module__.startswith(NOT_SHOWN) for module in net.modules()):
        return False
    if net.coupling_layouts():
        return True
    info = checkpoints(aliases=False)[name]
    net = create_for(*_described(info))  # EncapNets have heat maps without couplings
    try:
        explain(net, torch.zeros(info.input_size), name=name)
    except CapszooError:
        return False
    return True


def _data_name(info: WeightsInfo) -> str:
    return info.metadata.trained.data.name


#: What a file was drawn from, as it states it, and what draws it.
Drawing = tuple[str, Callable[[Path, str], object]]


def drawings(docs: Path) -> dict[Path, Drawing]:
    """The pictures and curves that the docs show."""
    found: dict[Path, Drawing] = {docs / "pictures" / FIRST: (_source(FIRST_OF, "explain"), _draw_first)}
    for name, info in checkpoints(aliases=False).items():
        for kind in kinds_of(info):
            draw = partial(_draw_heat if kind == "heat" else _draw_decoded, info)
            found[picture_file(docs, name, kind)] = (_source(name, kind), draw)
        if info.metadata.history:
            history = hashlib.sha256(json.dumps(info.metadata.history).encode()).hexdigest()[:16]
            about = f"training of {name}, history {history}, style 2"
            found[docs / "curves" / f"{name}.svg"] = (about, partial(_draw_curves, info))
    return found


def _source(name: str, kind: str) -> str:
    """Source of a picture's data, as stated in the picture."""
    return f"{kind} of {name}, weights {checkpoints(aliases=False)[name].sha256[:16]}, style {STYLES[kind]}"


def stale_drawings(docs: Path) -> dict[Path, Drawing | None]:
    """What is missing or drawn from another source; without a drawing, what is to be removed."""
    wanted = drawings(docs)
    there = [path for kind in KINDS for path in sorted((docs / "pictures").glob(f"*.{kind}.png"))]
    there += sorted((docs / "curves").glob("*.svg"))
    stale: dict[Path, Drawing | None] = {
        path: drawing
        for path, drawing in wanted.items()
        if not path.is_file() or not _states(path, drawing[0])
    }
    return stale | {path: None for path in there if path not in wanted}


def _states(path: Path, source: str) -> bool:
    if path.suffix == ".svg":
        return source in path.read_text(encoding="utf-8")
    with Image.open(path) as picture:
        return picture.info.get("Description") == source


def write_drawing(path: Path, drawing: Drawing | None) -> None:
    """Draw one of :func:`stale_drawings`, or remove it."""
    if drawing is None:
        path.unlink()
        return
    about, draw = drawing
    path.parent.mkdir(exist_ok=True)
    draw(path, about)


def _draw_first(path: Path, about: str) -> None:
    found = capszoo.load(FIRST_OF, device="cpu").explain(ROOT / "capszoo" / "assets" / "digit_3.png")
    save_figure(found, path, about)


def _draw_curves(info: WeightsInfo, path: Path, about: str) -> None:
    draw_curves(path, info.name, records_of(info.metadata.history), Description=about)


def _batches(info: WeightsInfo) -> tuple[torch.nn.Module, Iterator[tuple[Tensor, Tensor]]]:
    target = prepare(info.name, packed(ROOT, _data_name(info)), device="cpu")
    return target.net, ((batch.images, batch.labels) for batch in target.batches(100))


def _draw_heat(info: WeightsInfo, path: Path, about: str) -> None:
    net, batches = _batches(info)
    found = [explain(net, image, name=info.name) for image in next(batches)[0][:COUNT]]
    title = f"{info.name}: the first {COUNT} test images, with predicted class and probability"
    save_heat_grid(found, path, title, about)


def _draw_decoded(info: WeightsInfo, path: Path, about: str) -> None:
    net, batches = _batches(info)
    both = dataset_spec(_data_name(info)).multi_label
    found: Any
    save: Any
    found, save = (overlaps, save_overlaps) if both else (answers, save_answers)
    save(found(net, batches, RIGHT, WRONG), path, about, f"{info.name}: {DECODED}")
