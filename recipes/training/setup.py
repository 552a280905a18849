"""Create the objects described by a recipe: data, net, optimiser, schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.step_lr import StepLRScheduler
from torch import nn

from capszoo.checkpoint import Checkpoint, resolve
from capszoo.data import (
    DATASETS,
    PREFIXES,
    DataError,
    DatasetSpec,
    ImageSet,
    StreamedSet,
    load_dataset,
    split_validation,
)
from capszoo.data.folders import find_splits
from capszoo.data.specs import Side
from capszoo.data.summary import SetSummary, summarise
from capszoo.errors import CapszooError, UnknownArgument, UnknownModel, unknown_name
from capszoo.images import MUCH_CROPPED, Framing
from capszoo.models import CapsuleNet
from capszoo.models._feedback import FeedbackAgreement, encapnet_feedback

from ..config import BACKBONE, DATA_ARGS, DataConfig, Recipe, RecipeError
from ..evaluation.target import create_for

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunData:
    """The images of a run; ``validation`` may be empty, ``test`` None.

    Attributes:
        fingerprints: sha256 of each split as read.
        skipped: a line about each image that was skipped because it cannot be read.
        counts: number of images of each split as read.
    """

    training: ImageSet | StreamedSet
    validation: ImageSet | StreamedSet
    test: ImageSet | StreamedSet | None
    fingerprints: dict[str, str]
    skipped: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def summary(self) -> SetSummary:
        """What was read, in the splits of the run."""
        parts = {"train": self.training, "val": self.validation, "test": self.test}
        return summarise(parts, len(self.skipped))

    @property
    def measured(self) -> ImageSet | StreamedSet:
        """The images to evaluate the finished net on: the test split, else validation, else training images."""
        return next(
            part for part in (self.test, self.validation, self.training) if part is not None and len(part)
        )


def read_split(
    name: str,
    split: str,
    root: str | Path | None,
    size: Side | None,
    resize: Side | None,
    skip_bad: bool,
    framing: Framing | None = None,
    channels: int | None = None,
) -> tuple[ImageSet | StreamedSet, tuple[str, ...]]:
    """A split of a data set, read by ``load_dataset``, and a line about each skipped image."""
    skipped: list[str] | None = [] if skip_bad else None
    options: dict[str, Any] = {"skipped": skipped, "framing": framing, "channels": channels}
    dataset = load_dataset(name, split, root, size=size, resize=resize, **options)
    return dataset, tuple(skipped or ())


def load_data(
    recipe: Recipe,
    data: str | Path | None,
    read: Callable[..., tuple[ImageSet | StreamedSet, tuple[str, ...]]] = read_split,
) -> RunData:
    """Read the splits that a recipe uses; raises ``DataError`` if they do not match.

    Args:
        recipe: the recipe.
        data: folder of the data set; None uses ``CAPSZOO_DATA``.
        read: how to read a split; pass a cached ``read_split`` to avoid reading twice.
    """
    settings = recipe.data
    skipped: list[str] = []
    framing = framing_of(settings.crop_mode, settings.mean, settings.value_range)

    def load(split: str) -> ImageSet | StreamedSet:
        dataset, left_out = read(
            settings.name,
            split,
            data,
            settings.size,
            settings.augment.resize,
            settings.skip_bad,
            framing,
            settings.channels,
        )
        skipped.extend(left_out)
        channels = dataset.spec.input_size[0]
        for key, values in (("mean", settings.mean), ("std", settings.std)):
            if values is None:
                continue
            if len(values) != channels:
                raise RecipeError(
                    f"{recipe.name}: data.{key} has {len(values)} values for {channels} channels"
                )
            dataset = replace(dataset, spec=replace(dataset.spec, **{key: values}))  # type: ignore[arg-type]
        return dataset

    whole = load("train")
    if (whole.spec.cropped or 0) > MUCH_CROPPED:
        _logger.warning(
            "%s: %.0f%% of the images' area is cropped away: data.crop_mode squash or border (finetune: --crop-mode) "
            "keeps it, or another shape (data.size, --img-size ROWSxCOLUMNS)",
            settings.name,
            100 * (whole.spec.cropped or 0),
        )
    if whole.spec.value_range:  # that of the training images, for all splits
        framing = replace(framing, value_range=whole.spec.value_range)
    test = load("test") if settings.test else None
    if settings.validation == "own":
        training, validation = whole, load("val")
    else:
        stratified = settings.validation == "stratified"
        training, validation = split_validation(whole, settings.val_size, settings.val_seed, stratified)
    splits = {"train": whole, "val": validation if settings.validation == "own" else None, "test": test}
    parts = {split: part for split, part in splits.items() if part is not None}
    check_classes(parts)
    if settings.limit:
        training = training.subset(_limited(len(training), settings))
    fingerprints = {split: part.fingerprint() for split, part in parts.items()}
    same = "val" in parts and fingerprints["val"] == fingerprints.get("test")
    # the fingerprint of a streamed set is that of its labels: both splits may have the same ones
    if same and not (
        settings.name.startswith(tuple(PREFIXES)) and "test" in find_splits(settings.name, data)
    ):
        raise DataError(
            f"{settings.name} has no test split besides val, which may choose the epoch: set data.test=false"
        )
    counts = {split: len(part) for split, part in parts.items()}
    return RunData(training, validation, test, fingerprints, tuple(skipped), counts)


def framing_of(
    crop_mode: str, mean: tuple[float, ...] | None, value_range: tuple[float, float] | None
) -> Framing:
    """How a run's images are framed; the range of their values is that of the training images, unless one is given."""
    border = crop_mode == "border" and mean is not None  # only its padding has a colour
    return Framing(crop_mode, tuple(mean or ()) if border else (), value_range or "set")


def _limited(count: int, settings: DataConfig) -> torch.Tensor:
    """Indices of the images that ``data.limit`` keeps: the first ones of a named data set in files, whose order is
    mixed.

    Folders are in the order of their classes, also h-ImageNet's: a random choice, which depends on ``val_seed`` alone.
    """
    limit = min(settings.limit or count, count)
    if settings.name in DATASETS and DATASETS[settings.name].counts["train"]:
        return torch.arange(limit)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(settings.val_seed))
    return order[:limit].sort().values


def check_classes(parts: dict[str, ImageSet | StreamedSet]) -> None:
    """Refuse splits with other classes than the training split, a single class, or a class without images."""
    spec = parts["train"].spec
    if spec.num_classes < 2:
        raise DataError(
            f"{spec.name}: only one class ({spec.label_names[0]}): give the folder that has a sub-folder for each class"
        )
    for split, part in parts.items():
        if part.spec.label_names != spec.label_names:
            other = sorted(set(part.spec.label_names) ^ set(spec.label_names))
            raise DataError(
                f"{spec.name}: the classes of {split} are not those of train "
                f"({f'they differ in {other[0]}' if other else 'another order'})"
            )
        if split == "test" or spec.multi_label:  # a test split without a class still measures the others
            continue
        counts = torch.bincount(part.labels.cpu(), minlength=spec.num_classes)
        empty = [spec.label_names[k] for k in (counts == 0).nonzero().flatten().tolist()]
        if empty:
            raise DataError(
                f"{spec.name}: {split} has no images of {', '.join(empty[:5])}{', …' if len(empty) > 5 else ''}: "
                "add some, or take the class out"
            )


def create_net(recipe: Recipe, spec: DatasetSpec, initial: bool = True) -> nn.Module:
    """The recipe's net for a data set: with random weights, or those of ``recipe.init``, adapted and frozen by it.

    ``initial=False`` does not load the weights of ``recipe.init``: a resumed run does not need them.
    """
    init, source, create = recipe.init, None, None
    args = dict(recipe.model_args)
    try:
        if init is not None and initial and init.weights.startswith(BACKBONE):
            # without it, the trained weights would be read as the default backbone's
            if "backbone" not in args:
                raise RecipeError(
                    f"{recipe.name}: set model_args.backbone: the architecture of {init.weights}"
                )
            args |= {"backbone": init.weights.removeprefix(BACKBONE), "backbone_pretrained": True}
        elif init is not None and initial:
            source = resolve(init.weights)
            create = partial(source.create, device="cpu")
        net = create_for(recipe.arch, spec.num_classes, spec.input_size, args, create)
    except (UnknownArgument, UnknownModel) as error:  # of the recipe's arch or model_args
        raise RecipeError(f"{recipe.name}: {error}") from error
    except CapszooError:
        raise
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{recipe.name}: {error}") from error
    if init is None:
        return net
    if source is not None:
        _check_source(recipe, net, source)
        if init.new_classes:
            net.reset_classifier(spec.num_classes)  # type: ignore[operator]
    _freeze(recipe, net, init.freeze)
    for name, parameter in net.named_parameters():
        if name in getattr(net, "untrained", ()) and not parameter.requires_grad:
            raise RecipeError(
                f"{recipe.name}: init.freeze keeps {name}, which starts with random weights at this image size: "
                "leave data.size (--img-size) as the weights have it, or freeze other parts"
            )
    return net.train()


def _check_source(recipe: Recipe, net: nn.Module, source: Checkpoint) -> None:
    """Refuse initial weights of another network than the recipe's."""
    cfg: Any = getattr(net, "pretrained_cfg", None) or {}
    if cfg.get("architecture") != recipe.arch:
        raise RecipeError(f"{recipe.name}: {source.argument} are weights of {cfg.get('architecture')}")
    for key, value in source.metadata().model_args.items():
        # The net has it, but the metadata of the trained weights would not: they would be read as another net's.
        if key not in DATA_ARGS and key not in recipe.model_args:
            raise RecipeError(
                f"{recipe.name}: {source.argument} was trained with {key}={value}: set model_args.{key}"
            )


def start_sha256(recipe: Recipe) -> str | None:
    """The sha256 of the initial weights' file; None for random weights, and where no sha256 is stated."""
    if recipe.init is None or recipe.init.weights.startswith(BACKBONE):
        return None
    with suppress(CapszooError):  # a run that goes on does not need them
        return resolve(recipe.init.weights).stated_sha256()
    return None


def _freeze(recipe: Recipe, net: Any, parts: tuple[str, ...]) -> None:
    """Freeze parts of a net: "body", "all", or modules by name.

    The class layer is always trained, and parts with random weights are frozen only by name: the head of a backbone,
    and a decoder for new classes.
    """
    modules = dict(net.named_modules())
    body = getattr(net, "stages", None) if isinstance(net, CapsuleNet) else net
    on_backbone = recipe.init is not None and recipe.init.weights.startswith(BACKBONE)
    modules |= {"body": body, "all": body if on_backbone else net}
    modules.pop("", None)  # the net itself
    for name in parts:
        if name not in modules:
            raise RecipeError(f"{recipe.name}: init.freeze: {unknown_name('module', name, modules)}")
        modules[name].requires_grad_(False)
    net.get_classifier().requires_grad_(True)
    decoder = getattr(net, "decoder", None)
    named = any(name.split(".")[0] == "decoder" for name in parts)
    if isinstance(decoder, nn.Module) and recipe.init is not None and recipe.init.new_classes and not named:
        decoder.requires_grad_(True)
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise RecipeError(f"{recipe.name}: init.freeze leaves nothing to train")


class _Trained(nn.Module):
    """All parameters that the optimiser updates, with the net's exclusions from weight decay."""

    def __init__(self, net: nn.Module, feedback: nn.Module) -> None:
        super().__init__()
        self.net: Any = net
        self.feedback = feedback

    def no_weight_decay(self) -> set[str]:
        return {f"net.{name}" for name in getattr(self.net, "no_weight_decay", set)()}


def create_feedback(recipe: Recipe, net: nn.Module) -> FeedbackAgreement | None:
    """The recipe's feedback agreement, if any."""
    settings = recipe.feedback
    if settings is None:
        return None
    if recipe.compile:
        raise RecipeError(f"{recipe.name}: feedback listens inside the net, so compile must be false")
    if recipe.loss.reconstruction:  # its step calls the net's parts, which feedback does not see
        raise RecipeError(f"{recipe.name}: feedback and loss.reconstruction exclude each other: remove one")
    options = {"weight": settings.weight, **settings.options}
    try:
        if settings.pairs == "encapnet":
            return encapnet_feedback(net, settings.units, **options)
        return FeedbackAgreement(net, settings.pairs, **options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{recipe.name}: feedback: {error}") from error


def memory_layout(recipe: Recipe) -> torch.memory_format:
    """Of the network's weights and its images."""
    return torch.channels_last if recipe.channels_last else torch.contiguous_format


def create_optimizer(
    recipe: Recipe, net: nn.Module, feedback: nn.Module | None = None
) -> torch.optim.Optimizer:
    """The recipe's optimiser for all trained parameters."""
    settings = recipe.optimizer
    if settings.layer_decay and recipe.feedback:
        raise RecipeError(f"{recipe.name}: optimizer.layer_decay and feedback do not go together")
    try:
        optimizer = create_optimizer_v2(
            _Trained(net, feedback) if feedback else net,
            opt=settings.name,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            layer_decay=settings.layer_decay,
            **settings.options,
        )
    except (AssertionError, TypeError, ValueError) as error:
        names = [str(name) for name in list_optimizers()]
        if settings.name.lower().rpartition("_")[2] not in names and settings.name.lower() not in names:
            raise RecipeError(f"{recipe.name}: {unknown_name('optimizer', settings.name, names)}") from error
        raise RecipeError(f"{recipe.name}: optimizer {settings.name}: {error}") from error
    if getattr(optimizer, "is_second_order", False):
        raise RecipeError(
            f"{recipe.name}: optimizer {settings.name} needs second derivatives, which training does not compute: "
            "choose another"
        )
    return optimizer


def create_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> Scheduler | None:
    """The recipe's schedule for ``steps`` updates per epoch; None keeps the rate constant."""
    settings = recipe.schedule
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=settings.name,
        num_epochs=recipe.epochs,
        warmup_epochs=settings.warmup_epochs,  # type: ignore[arg-type]  # timm multiplies it by the updates
        warmup_lr=settings.warmup_lr,
        min_lr=settings.min_lr,
        decay_milestones=list(settings.milestones),  # type: ignore[arg-type]
        # timm's own default; its release 1.0.29 refuses None
        decay_epochs=settings.decay_epochs or 90,
        decay_rate=settings.decay_rate,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    if isinstance(scheduler, StepLRScheduler) and settings.min_lr:
        _set_floor(scheduler, settings.min_lr)
    if scheduler is None:  # it would apply the layers' rate factors
        for group in optimizer.param_groups:
            group["lr"] *= group.get("lr_scale", 1.0)
    return scheduler


def _set_floor(scheduler: StepLRScheduler, floor: float) -> None:
    """Set a minimum rate after the warm-up for timm's "step" schedule, which has no argument for it."""
    rates: Callable[[int], list[float]] = scheduler._get_lr

    def floored(t: int) -> list[float]:
        return rates(t) if t < scheduler.warmup_t else [max(rate, floor) for rate in rates(t)]

    scheduler._get_lr = floored  # type: ignore[method-assign]
