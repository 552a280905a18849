"""Resolve an evaluation: a model under any of its names, and the images to evaluate it on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capszoo._pretrained.facts import class_positions, own_facts
from capszoo._pretrained.info import WeightsInfo
from capszoo._utils.devices import resolve_device
from capszoo._utils.files import expanded
from capszoo._utils.process import keep_freed_memory
from capszoo.checkpoint import resolve
from capszoo.data import (
    PREFIXES,
    Batch,
    Batches,
    DataError,
    ImageSet,
    StreamedSet,
    dataset_spec,
    keyed_generator,
    load_dataset,
    normalize,
    split_validation,
)
from capszoo.data.folders import find_splits, holds_classes
from capszoo.data.folders.common import look_alike
from capszoo.data.readers import MODES
from capszoo.data.roots import environment_roots, given_root
from capszoo.data.specs import RESIZED, Side, both_sides, folder_name, same_place, table_name
from capszoo.errors import CapszooError, UsageError
from capszoo.metadata import DataRecord, RecipeRecord
from capszoo.models._factory import create_model, list_models
from capszoo.preprocess import model_framing, model_input_size, per_channel
from capszoo.scores import kind_for, score_kind

from .crops import Crops, default_side
from .memory import fitting_images

_logger = logging.getLogger("capszoo.evaluation")

#: Pixels per forward pass of an evaluation on a CPU; a network with routing takes some 5 GB for them.
MOST_PIXELS = 64 * 224 * 224


def evaluation_batch(size: Sequence[int], device: torch.device, trained: int | None = None) -> int:
    """Images per forward pass of an evaluation, unless a user states a number, and as far as they fit the memory.

    It is 500, and less for images above 80x80, but twice the batch of training, which keeps the layers' outputs. A GPU
    takes no more than that: the largest layer of ``capsnet_em`` takes 30 GB for 500 images. ``fitting_images`` bounds
    the number, because the memory of many networks grows with the number of classes.

    Args:
        size: height and width of the images.
        device: of the network.
        trained: images of a forward pass of its training; None if it is not known.
    """
    fits = 2 * (trained or 0)
    if fits > 0 and device.type == "cuda":
        return min(500, fits)
    return min(500, max(fits, MOST_PIXELS // (size[-2] * size[-1]), 1))


#: Decorator of a function during which convolutions on a GPU are computed in float32, as results state, not in TF32.
in_float32 = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


def score_threshold(loss: str) -> float:
    """The score from which a class counts as present, by the training loss: half a capsule length, or a logit of 0."""
    return _threshold_of(kind_for(loss))


def _threshold_of(kind: str) -> float:
    return 0.0 if "logits" in kind else 0.5


def create_for(
    architecture: str,
    num_classes: int,
    input_size: tuple[int, int, int],
    model_args: Mapping[str, Any],
    create: Callable[..., nn.Module] | None = None,
) -> nn.Module:
    """Create a net for a data set; also works for timm's architectures (without ``img_size`` where it is not accepted).

    ``create`` is called with only the arguments; None creates the architecture with random weights.
    """
    args: dict[str, Any] = {"num_classes": num_classes, "in_chans": input_size[0]}
    if architecture in list_models():
        args["img_size"] = input_size[1:]
    create = create or partial(create_model, architecture)
    return create(**{**args, **model_args})


def find_model(model: nn.Module | str | Path) -> tuple[nn.Module, WeightsInfo | None]:
    """A model on the CPU and its metadata, if it has any.

    Args:
        model: a module, or a MODEL argument of ``capszoo.checkpoint.resolve``.
    """
    if isinstance(model, nn.Module):
        return model, None
    checkpoint = resolve(model)
    return checkpoint.create(device="cpu"), checkpoint.same_in_zoo()


@dataclass(frozen=True)
class EvalTarget:
    """A model on its device, and the images for its evaluation.

    Attributes:
        name: of the model.
        images: the evaluated images; larger than the model's input if ``crops`` are taken from them.
        whole: number of images in the split, of which ``images`` may be a sample.
        mean, std: normalisation.
        threshold: score from which a class counts as present (``score_threshold``).
        info: the weights' metadata, if known.
        crops: None for one view of each image.
        skipped: a line about each image that was skipped because it cannot be read.
        notes: a line about each thing in which the data set's classes are not the model's.
        left_out: number of images that were left out of each class that the model lacks.
    """

    name: str
    net: nn.Module
    images: ImageSet | StreamedSet
    whole: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    threshold: float
    info: WeightsInfo | None
    crops: Crops | None = None
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(self.images)

    @property
    def part(self) -> str:
        """Description of the images: the split, and whether they selected the weights."""
        chose = self.images.split == "validation" and bool(self.recipe.early_stop)
        return f"{self.images.split}; chose the epoch" if chose else self.images.split

    @property
    def recipe(self) -> RecipeRecord:
        return self.info.metadata.trained if self.info else RecipeRecord()

    @cached_property
    def batch_size(self) -> int:
        """Images per forward pass, unless a user states a number."""
        trained = (self.recipe.batch_size or 0) // max(self.recipe.accumulate or 1, 1)
        most = evaluation_batch(self.images.size, self.images.device, trained)
        channels, *size = self.images.spec.input_size
        return min(most, fitting_images(self.net, (channels, *(self.crops.size if self.crops else size))))

    def batches(
        self, batch_size: int | None, progress: Callable[[int], None] | None = None
    ) -> Iterator[Batch]:
        """Every image once, in order; ``progress`` is called with the number of images after each batch.

        Without a ``batch_size`` it is the property of that name.
        """
        for batch in Batches(
            self.images, batch_size or self.batch_size, mean=self.mean, std=self.std
        ).epoch():
            yield batch
            if progress:
                progress(len(batch.labels))

    def normalised(self, pixels: Tensor) -> Tensor:
        """uint8 [b, c, h, w] to the model's input."""
        return normalize(pixels, self.mean, self.std).contiguous(memory_format=torch.channels_last)

    def require_one_view(self, measured: str) -> None:
        """Raise ``UsageError`` if several crops are evaluated.

        Args:
            measured: the message's first words, such as "calibration is measured".
        """
        if self.crops:
            raise UsageError(f"{measured} on one view of each image", "leave --crops multi out")

    def on(self, images: ImageSet | StreamedSet) -> EvalTarget:
        """The same model with other images, one view of each."""
        return replace(self, images=images.to(self.images.device), whole=len(images), crops=None)


def prepare(
    model: nn.Module | str | Path,
    dataset: str | ImageSet | StreamedSet | None = None,
    split: str = "test",
    data: str | Path | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    crops: str = "single",
    device: str | torch.device | None = None,
    skip_bad: bool = False,
    skip_unknown: bool = False,
) -> EvalTarget:
    """Resolve a model and its images.

    Args:
        model: as for ``find_model``.
        dataset: a name, or images; None uses the data set that the weights were trained on.
        split: "test", "train" or another of the data set's; "val" is the part that the recipe held out of "train".
        data: folder of the data set (None uses ``CAPSZOO_DATA``), or a data set such as ``imagefolder:PATH``.
        limit: number of images to evaluate, sampled with ``seed``.
        seed: of the sample.
        crops: "single", or "multi" (see ``evaluation.crops``).
        device: None selects CUDA if available.
        skip_bad: skip images that cannot be read, as training with ``data.skip_bad`` does; the target lists them.
        skip_unknown: leave out images of classes that the model lacks; the target counts them.

    Raises:
        UsageError: an argument is invalid.
        DataError: the data set is missing, or does not fit the model.
        WeightsError: the weights are missing or do not fit.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"a limit of {limit} images is invalid", "give 1 or more")
    if crops not in ("single", "multi"):
        raise UsageError(f"unknown crops '{crops}'", "use single or multi")
    dataset, data = _named_by(data, dataset)
    net, info = find_model(model)
    if dataset is None:
        if info is None or not info.metadata.dataset.name:
            raise DataError(
                "it is not known here which images the model was trained for: give --dataset NAME, or --data FOLDER of "
                "image folders"
            )
        dataset = info.metadata.dataset.name
        _check_root(dataset, data)
    recipe = info.metadata.trained if info else RecipeRecord()
    views: Crops | None = None
    # skip the images that training skipped: a validation split is drawn by the images' indices
    skipped: list[str] | None = (
        [] if skip_bad or recipe.data.skip_bad and recipe.data.name == dataset else None
    )
    if isinstance(dataset, str):
        images, views = _load(dataset, split, data, net, info, crops == "multi", skipped)
    elif crops == "multi":
        raise UsageError("several crops need a data set's name", "give it, so that its images can be resized")
    else:
        images = dataset
    images = _in_channels_of(net, images)
    _check_fit(net, images, views)
    images, notes, left_out = _in_classes_of(net, images, skip_unknown)
    for note in notes:
        _logger.warning("%s", note)
    whole = len(images)
    images = drawn(images, limit, seed)
    resolved = resolve_device(device)
    if resolved.type == "cpu":
        keep_freed_memory()
    mean, std = _normalisation(model, net, images)
    return EvalTarget(
        name=info.name if info else type(net).__name__ if isinstance(model, nn.Module) else str(model),
        net=net.to(resolved).to(memory_format=torch.channels_last).eval(),
        images=images.to(resolved),
        whole=whole,
        mean=mean,
        std=std,
        threshold=score_threshold(recipe.loss.name) if recipe.loss else _threshold_of(score_kind(net)),
        info=info,
        crops=views,
        skipped=tuple(skipped or ()),
        notes=tuple(notes),
        left_out=left_out,
    )


def _normalisation(
    model: nn.Module | str | Path, net: nn.Module, images: ImageSet | StreamedSet
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel: the weights' own if they state some, else the data set's."""
    cfg: Any = getattr(net, "pretrained_cfg", None) or {}
    channels = images.spec.input_size[0]
    # a module without a tag may be untrained, or trained in the caller's own loop
    loaded = not isinstance(model, nn.Module) or cfg.get("tag")
    own = loaded and cfg.get("mean") and cfg.get("std")
    mean, std = (cfg["mean"], cfg["std"]) if own else (images.spec.mean, images.spec.std)
    return per_channel(mean, channels), per_channel(std, channels)


def _named_by(
    data: str | Path | None, dataset: str | ImageSet | StreamedSet | None
) -> tuple[str | ImageSet | StreamedSet | None, str | Path | None]:
    """The data set and its folder, where ``data`` of ``prepare`` may be a data set itself."""
    named = data_set_of(data)
    if named is not None and dataset is None:
        return named, None
    if named is not None and named == str(data):
        raise UsageError(f"--data {data} names a data set already", "leave --dataset out")
    return dataset, data


def data_set_of(data: str | Path | None) -> str | None:
    """The data set that ``data`` of ``prepare`` is itself (``parquet:PATH``, image folders), or None."""
    if data is None:
        return None
    if str(data).startswith(tuple(PREFIXES)):
        return str(data)
    return table_name(data) or (folder_name(data) if holds_classes(expanded(data)) else None)


def drawn(images: ImageSet | StreamedSet, limit: int | None, seed: int) -> ImageSet | StreamedSet:
    """A random sample of ``limit`` images, drawn with a seed; all of them if there are no more, or no limit."""
    if limit is None or limit >= len(images):
        return images
    order = torch.randperm(len(images), generator=keyed_generator(seed))
    return images.fixed().subset(order[:limit].sort().values)


def _check_root(dataset: str, data: str | Path | None) -> None:
    """Refuse a ``--data`` that holds neither images by class nor the folder that the model was trained on.

    Otherwise the accuracy would be that of the recorded folder.
    """
    prefix, _, folder = dataset.partition(":")
    places = expanded(folder), *(root / folder for root in environment_roots())
    if data is None and prefix == "imagefolder" and not any(place.is_dir() for place in places):
        raise DataError(f"{folder}, on which the model was trained, is not here: give its path as --data")
    if data is None or not folder:
        return
    root = given_root(data)
    # an absolute path is not below the root: Path(root) / "/photos" is /photos
    if prefix == "imagefolder" and (Path(folder).is_absolute() or not (root / folder).is_dir()):
        raise DataError(
            f"{data} has no sub-folders of images per class, and no {folder}, on which the model was trained",
            f"name the images: --data imagefolder:{data}",
        )


def _load(
    dataset: str,
    split: str,
    data: str | Path | None,
    net: nn.Module,
    info: WeightsInfo | None,
    multi: bool,
    skipped: list[str] | None,
) -> tuple[ImageSet | StreamedSet, Crops | None]:
    """Images at the model's input size, or at the size that crops are taken from."""
    recipe = info.metadata.trained if info else RecipeRecord()
    elsewhere = _elsewhere(info, dataset, split, data)
    same_set = elsewhere or same_place(recipe.data.name, dataset)
    trained = recipe.data if same_set else DataRecord()
    objects = None if same_set or multi else _object_size(net)
    augment = trained.augment
    depth, *sides = model_input_size(net)
    model_size = (sides[0], sides[1])
    channels = depth if depth in MODES else None
    folder = dataset.startswith(RESIZED)
    composed = False
    if dataset.startswith(tuple(PREFIXES)):
        native, stored = None, None
    else:
        spec = dataset_spec(dataset)
        native, stored = spec.input_size[1:], spec.side
        composed = bool(spec.base)
        if composed and multi:
            raise DataError(f"{spec.title} is composed at its own size: evaluate it with --crops single")
    size: Side | None = trained.size
    shared: dict[str, Any] = {"skipped": skipped, "channels": channels, "framing": model_framing(net)}
    read: Callable[..., ImageSet | StreamedSet] = partial(load_dataset, dataset, data=data, **shared)
    if objects and not composed:
        loaded = read(split, size=objects, resize=objects if folder else None)
        return _on_canvas(loaded, model_size), None
    if model_size != native and size is None and not composed:
        size = model_size
    # As in training: the middle of images resized in the same way.
    resize = _stored_size(net) if folder and not same_set else augment.resize
    side = resize
    seen, across = both_sides(size or (native[0] if native else model_size))
    if multi and seen != across:
        raise DataError(f"the model takes {seen}x{across} images: evaluate them with --crops single")
    # training that shifted images of the input's own size padded them; `default_side` is for all other training
    stored_rows = both_sides(side)[0] if side else 0
    shift = (augment.shift or 0) if stored_rows <= seen else 0
    if multi and not shift and stored_rows <= seen:
        side = round(seen * stored / native[0]) if stored and native else default_side(seen)
        size = size or seen
    drawn_from = "" if elsewhere else None
    if info and same_set and side == resize and size:
        if both_sides(size) == both_sides(trained.size or info.input_size[1:]):
            drawn_from = info.metadata.dataset.sha256.get("train")
    load = partial(read, size=size, resize=side)
    images = _read_split(dataset, split, data, trained, load, drawn_from)
    if not multi:
        return images, None
    rows, cols = images.spec.input_size[1:]
    if shift:
        return images, Crops(rows + 2 * shift, (rows, cols), bool(augment.flip), shift)
    views = Crops(images.size[0], (rows, cols), bool(augment.flip))
    if images.size[0] == rows:
        raise DataError(f"images of {rows} pixels leave nothing to crop: evaluate them with --crops single")
    whole = replace(images.spec, input_size=(images.spec.input_size[0], *images.size))
    return replace(images, spec=whole), views


def _elsewhere(info: WeightsInfo | None, dataset: str, split: str, data: str | Path | None) -> bool:
    """Whether these may be the images of the training under another path, as ``_read_split`` tells by their sha256."""
    if info is None or split not in ("val", "validation") or not dataset.startswith(tuple(PREFIXES)):
        return False
    name = info.metadata.trained.data.name
    moved = name.partition(":")[0] == dataset.partition(":")[0] and not same_place(name, dataset)
    return moved and "train" in info.metadata.dataset.sha256 and "val" not in find_splits(dataset, data)


def _stored_size(net: nn.Module) -> tuple[int, int]:
    """Rows and columns of images of which the model sees the middle."""
    cfg: Any = getattr(net, "pretrained_cfg", None) or {}
    _, rows, columns = model_input_size(net)
    kept = float(cfg.get("crop_pct") or 1.0)
    return round(rows / kept), round(columns / kept)


def _read_split(
    dataset: str,
    split: str,
    data: str | Path | None,
    trained: DataRecord,
    load: Callable[[str], ImageSet | StreamedSet],
    drawn_from: str | None,
) -> ImageSet | StreamedSet:
    """The images of a split; for "val" exactly those that training held out, or the data set's validation split.

    If a folder has no test split, "test" means its validation split, and the ``split`` of the result states that.

    Args:
        trained: ``data`` of the recipe that the model was trained with, if it was trained on this data set.
        load: reads a split by its name.
        drawn_from: sha256 of the images that training held some out of; None if it does not matter, "" if it is not
            known at this size.
    """
    named = dataset.startswith(tuple(PREFIXES))
    wanted = "val" if split == "validation" else split
    splits = find_splits(dataset, data) if named and wanted != "train" else set()
    if wanted == "test" and named and "test" not in splits:
        if "val" not in splits and trained.val_size:
            raise DataError(f"{dataset} has no test images: --split val takes those that training held out")
        if splits == {"train"}:
            raise DataError(f"{dataset} has no test split: --split train evaluates all of its images")
        wanted = "val" if "val" in splits else wanted
    if wanted != "val":
        return load(wanted)
    if (trained.validation or ("own" if "val" in splits else "carved")) == "own":
        return replace(load("val"), split="validation")
    held_out = trained.val_size
    if held_out == 0:
        raise DataError(f"training held out no images of {dataset}: use --split test or train")
    if not held_out:
        raise DataError(
            f"it is not known which images of {dataset} training held out: give the folder of the run as MODEL and the "
            "images of its training as --data, or use --split test or train"
        )
    stratified = trained.validation == "stratified"
    whole = load("train")
    if named and drawn_from is not None and whole.fingerprint() != drawn_from:
        raise DataError(
            f"the images of {dataset} are not those of the training, and the held-out ones would be others: "
            f"put those back, or use --split {'test' if 'test' in splits else 'train'}"
        )
    return split_validation(whole, held_out, trained.val_seed or 0, stratified)[1]


def _in_classes_of(
    net: nn.Module, images: ImageSet | StreamedSet, skip_unknown: bool
) -> tuple[ImageSet | StreamedSet, list[str], dict[str, int]]:
    """Images with the labels of the model's classes of the same names.

    Returns:
        The images; a note about each thing in which the classes differ; with ``skip_unknown``, the number of images
        that were left out of each class that the model lacks.

    Raises:
        CapszooError: the model lacks classes, or one side has no names and the numbers of classes differ.
    """
    spec = images.spec
    cfg: Any = getattr(net, "pretrained_cfg", None) or {}
    trained_names, names = tuple(cfg.get("label_names") or ()), tuple(spec.label_names)
    classes = getattr(net, "num_classes", spec.num_classes)
    if len(trained_names) != classes or spec.multi_label:
        if classes != spec.num_classes:
            raise CapszooError(
                f"the model has {classes} classes, {spec.name} has {spec.num_classes}",
                "give the data set it was trained for",
            )
        by_order = spec.name.startswith(tuple(PREFIXES)) and not spec.multi_label
        note = f"the model has no names of classes: those of {spec.name} are compared by their order"
        return images, [note] if by_order else [], {}
    if trained_names == names:
        return images, [], {}
    places = torch.tensor([-1 if place is None else place for place in class_positions(trained_names, names)])
    counts = torch.bincount(images.labels, minlength=len(names)).tolist()
    unknown = {name: n for name, n, k in zip(names, counts, places.tolist(), strict=True) if k < 0 and n}
    if unknown and not skip_unknown:
        raise _lacking(spec.name, list(unknown), trained_names)
    notes = []
    if unknown:
        notes.append(
            f"{spec.name}: left out {sum(unknown.values()):,} images of classes that the model lacks: "
            f"{_listed(map(repr, unknown))}"
        )
        kept = (places[images.labels] >= 0).nonzero().flatten()
        if not len(kept):
            raise CapszooError(
                f"{spec.name} has no images of the model's classes", "check the names of its folders"
            )
        images = images.fixed().subset(kept)
    labels = places[images.labels]
    if set(trained_names).isdisjoint(names):
        notes.append(
            f"{spec.name} has numbers in place of names of classes: they are compared by their order"
        )
    if absent := [name for k, name in enumerate(trained_names) if not bool((labels == k).any())]:
        notes.append(f"{spec.name} has no images of the model's {_listed(map(repr, absent))}")
    return replace(images, spec=replace(spec, label_names=trained_names), labels=labels), notes, unknown


def _lacking(name: str, unknown: Sequence[str], classes: Sequence[str]) -> CapszooError:
    """The error about a data set's classes that the model lacks; names that only look alike are told apart."""
    shown = [f"{kind!r}{look_alike(kind, classes)}" for kind in unknown]
    shown.sort(key=lambda text: "differs" not in text)  # those have the simplest remedy
    return CapszooError(
        f"{name} has classes that the model lacks: {_listed(shown)}; the model has {_listed(map(repr, classes))}",
        "rename the folders, or leave those images out (eval: --skip-unknown)",
    )


def _listed(names: Iterable[str]) -> str:
    first, rest = (names := list(names))[:5], len(names) - 5
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def _in_channels_of(net: nn.Module, images: ImageSet | StreamedSet) -> ImageSet | StreamedSet:
    """A user's images in the model's channels, as ``capszoo predict`` reads them: grey from colour, or the reverse."""
    spec = images.spec
    wanted, channels = getattr(net, "in_chans", spec.input_size[0]), spec.input_size[0]
    if not isinstance(images, ImageSet) or not spec.name.startswith(tuple(PREFIXES)):
        return images
    if {wanted, channels} != {1, 3}:
        return images
    pixels = images.images.expand(-1, 3, -1, -1) if wanted == 3 else _grey(images.images)
    average = [(sum(value) / len(value),) * wanted for value in (spec.mean, spec.std)]
    spec = replace(spec, input_size=(wanted, *spec.input_size[1:]), mean=average[0], std=average[1])
    return replace(images, spec=spec, images=pixels.contiguous())


def _grey(pixels: Tensor) -> Tensor:
    """uint8 [n, 3, h, w] to [n, 1, h, w] by the luma of ITU-R 601-2, in the fixed-point numbers of Pillow."""
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32).reshape(3, 1, 1)
    parts = (((part.int() * weights).sum(1, keepdim=True) + 0x8000) >> 16 for part in pixels.split(1000))
    return torch.cat([part.to(torch.uint8) for part in parts])


def _object_size(net: nn.Module) -> int | None:
    """Side of the objects on a larger canvas that a network was trained with; None if images fill the frame."""
    cfg: Any = getattr(net, "pretrained_cfg", None) or {}
    object_size = own_facts(cfg).get("object_size")
    if not object_size or tuple(cfg["input_size"][1:]) != model_input_size(net)[1:]:
        return None
    return int(object_size[0])


def _on_canvas(images: ImageSet | StreamedSet, size: Sequence[int]) -> ImageSet:
    """Images in the middle of a black canvas of ``size`` (height, width), padded like in ``ImageTransform``."""
    if not isinstance(images, ImageSet):
        raise DataError(f"{images.spec.name} is too large to be padded in memory: evaluate a smaller set")
    rows, cols = images.spec.input_size[1:]
    above, before = (images.size[0] - rows) // 2, (images.size[1] - cols) // 2
    middle = images.images[:, :, above : above + rows, before : before + cols]
    top, left = (size[0] - rows) // 2, (size[1] - cols) // 2
    padded = F.pad(middle, (left, size[1] - cols - left, top, size[0] - rows - top))
    spec = replace(images.spec, input_size=(images.spec.input_size[0], size[0], size[1]))
    return replace(images, spec=spec, images=padded)


def _check_fit(net: nn.Module, images: ImageSet | StreamedSet, crops: Crops | None) -> None:
    """Raise ``CapszooError`` if the images do not fit the model."""
    spec = images.spec
    channels = getattr(net, "in_chans", spec.input_size[0])
    if channels != spec.input_size[0]:
        raise CapszooError(
            f"the model takes {channels} channels, {spec.name} has {spec.input_size[0]}",
            "give the data set it was trained for",
        )
    size = tuple(crops.size if crops else spec.input_size[1:])
    if getattr(net, "fixed_input_size", False) and tuple(getattr(net, "img_size", size)) != size:
        rows, cols = net.img_size  # type: ignore[misc]
        raise CapszooError(
            f"the model was built for {rows}x{cols} images, {spec.name} has {size[0]}x{size[1]}",
            "give the data set it was trained for",
        )
