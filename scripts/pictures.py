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
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import capszoo
from capszoo._pretrained.catalogue import checkpoints
from capszoo._pretrained.info import WeightsInfo
from capszoo.data import ImageSet
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


def stale_files(
    sources: Mapping[Path, str], there: Iterable[Path], states: Callable[[Path, str], bool]
) -> list[Path]:
    """Stale drawn files: those that are missing or have another source, then those to remove.

    Args:
        sources: source of each file.
        there: the existing files.
        states: whether a file states that it was drawn from this source.
    """
    stale = [path for path, source in sources.items() if not path.is_file() or not states(path, source)]
    return stale + [path for path in there if path not in sources]


def picture_file(docs: Path, name: str, kind: str) -> Path:
    """Path of a picture of a checkpoint."""
    return docs / "pictures" / f"{name}.{kind}.png"


def kinds_of(info: WeightsInfo) -> list[str]:
    """The pictures of a checkpoint: none without stored images of its data set."""
    if not is_packed(_data_name(info)):
        return []
    heat = ["heat"] if _has_heat_map(info.name) and not _is_misleading(info.name) else []
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
    """Whether the network of a checkpoint routes; the twins without capsules or with even couplings do not."""
    if _without_weights(name).coupling_layouts():
        return True
    info = checkpoints(aliases=False)[name]
    net = create_for(*_described(info))  # EncapNets have heat maps without couplings
    try:
        explain(net, torch.zeros(info.input_size), name=name)
    except CapszooError:
        return False
    return True


def _is_misleading(name: str) -> bool:
    """Whether the network of a checkpoint has a routing of ``NOT_SHOWN``."""
    return any(type(module).__module__.startswith(NOT_SHOWN) for module in _without_weights(name).modules())


def _data_name(info: WeightsInfo) -> str:
    return info.metadata.trained.data.name


def _source(info: WeightsInfo, kind: str) -> str:
    """Source of a picture's data, as stated in the picture."""
    return f"{kind} of {info.name}, weights {info.sha256[:16]}, style {STYLES[kind]}"


def stale_pictures(docs: Path) -> list[Path]:
    """Pictures that are missing or drawn from other weights, or of a checkpoint that no longer exists."""
    sources = {
        picture_file(docs, info.name, kind): _source(info, kind)
        for info in checkpoints(aliases=False).values()
        for kind in kinds_of(info)
    }
    sources[docs / "pictures" / FIRST] = _source(checkpoints(aliases=False)[FIRST_OF], "explain")
    there = [path for kind in KINDS for path in sorted((docs / "pictures").glob(f"*.{kind}.png"))]
    return stale_files(sources, there, _states)


def _states(path: Path, source: str) -> bool:
    with Image.open(path) as picture:
        return picture.info.get("Description") == source


def write_picture(path: Path) -> None:
    """Draw one of :func:`stale_pictures`, or remove it if it is obsolete or its checkpoint no longer exists."""
    if path.name == FIRST:
        found = capszoo.load(FIRST_OF, device="cpu").explain(ROOT / "capszoo" / "assets" / "digit_3.png")
        save_figure(found, path, _source(checkpoints(aliases=False)[FIRST_OF], "explain"))
        return
    name, _, kind = path.stem.rpartition(".")
    info = checkpoints(aliases=False).get(name)
    if info is None or kind not in kinds_of(info):
        path.unlink()
        return
    images = packed(ROOT, _data_name(info))
    (_draw_heat if kind == "heat" else _draw_decoded)(info, images, path, _source(info, kind))


def _batches(images: ImageSet, name: str) -> tuple[torch.nn.Module, Iterator[tuple[Tensor, Tensor]]]:
    target = prepare(name, images, device="cpu")
    return target.net, ((batch.images, batch.labels) for batch in target.batches(100))


def _draw_heat(info: WeightsInfo, images: ImageSet, path: Path, about: str) -> None:
    net, batches = _batches(images, info.name)
    found = [explain(net, image, name=info.name) for image in next(batches)[0][:COUNT]]
    title = f"{info.name}: the first {COUNT} test images, with predicted class and probability"
    save_heat_grid(found, path, title, about)


def _draw_decoded(info: WeightsInfo, images: ImageSet, path: Path, about: str) -> None:
    net, batches = _batches(images, info.name)
    if images.spec.multi_label:
        save_overlaps(overlaps(net, batches, RIGHT, WRONG), path, about, f"{info.name}: {DECODED}")
        return
    found = answers(net, batches, RIGHT, WRONG)
    if not found:
        raise CapszooError(f"{info.name} answered nothing", "its weights or the packed images are damaged")
    save_answers(found, path, about, f"{info.name}: {DECODED}")


def curve_file(docs: Path, name: str) -> Path:
    """Path of the picture of a checkpoint's training."""
    return docs / "curves" / f"{name}.svg"


def _curve_source(info: WeightsInfo) -> str:
    """Source of a picture's data, as stated in the picture."""
    history = json.dumps(info.metadata.history)
    return f"training of {info.name}, history {hashlib.sha256(history.encode()).hexdigest()[:16]}, style 2"


def stale_curves(docs: Path) -> list[Path]:
    """Pictures that are missing, or drawn from another history, or of a checkpoint that no longer exists."""
    sources = {
        curve_file(docs, name): _curve_source(info)
        for name, info in checkpoints(aliases=False).items()
        if info.metadata.history
    }
    there = sorted((docs / "curves").glob("*.svg"))
    return stale_files(sources, there, lambda path, source: source in path.read_text(encoding="utf-8"))


def write_curves(path: Path) -> None:
    """Draw the picture again, or remove it if its checkpoint no longer exists."""
    info = checkpoints(aliases=False).get(path.stem)
    if info is None:
        path.unlink()
        return
    path.parent.mkdir(exist_ok=True)
    draw_curves(path, info.name, records_of(info.metadata.history), Description=_curve_source(info))
