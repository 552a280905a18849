"""Fine-tune a model to new classes: ``capszoo finetune MODEL --data FOLDER``.

A model with weights and a folder of images determine a recipe, and ``train`` does the rest: one loop, the same run
folder, exact resume by the same command. This file selects the settings that the model and the data leave open; all
of them are in the run's ``recipe.yaml``, and ``overrides`` changes any. At the end the folder also contains the names
of the classes, a confusion matrix and a model card.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from capszoo._pretrained.facts import label_lines
from capszoo._utils.devices import default_device
from capszoo._utils.files import write_atomically
from capszoo.checkpoint import resolve
from capszoo.data import DATASETS, DataError, ImageSet, split_validation
from capszoo.data.folders import find_splits
from capszoo.data.sets import stratified_folds
from capszoo.data.specs import Side, both_sides, check_channels, source_name
from capszoo.errors import UsageError
from capszoo.images import CROP_MODES
from capszoo.metadata import Metadata
from capszoo.models._backbones import backbone_args, create_backbone_cfg, described_backbone
from capszoo.models._heads import HEADS, unknown_routing
from capszoo.preprocess import model_input_size, per_channel
from capszoo.scores import score_kind

from .config import BACKBONE, DATA_ARGS, Recipe, list_recipes, load_recipe
from .evaluation.metrics import EvalResult, assess, mean_recall, pooled
from .evaluation.report import rounded
from .evaluation.report_plots import draw_confusion
from .evaluation.target import in_float32, prepare
from .release.model_card import CONFUSION, CURVES, LABELS, model_card
from .release.public import default_tag, public_start
from .train import train
from .training.setup import RunData, check_classes, framing_of, load_data, read_split
from .weights import amend_metadata

__all__ = ["Source", "find_source", "finetune", "finetune_recipe"]

# Settings for small sets, by common practice; docs/fine-tune.md has results of `make photos`.
LEARNING_RATE = 0.003
LAYER_DECAY = 0.8
#: Keys that others of fine-tuning follow from, and the options that set them all.
DERIVING = {
    "data.size": "--img-size (img_size)",
    "data.channels": "--colour or --grey (channels)",
    "epochs": "--epochs (epochs)",
}
#: Updates in all, as far as ``EPOCHS`` allows: a small set is shown more often than a large one.
UPDATES = 240
EPOCHS = (5, 60)
BATCH = 32
FEW_BATCHES = 8
#: With fewer updates than these there is no warm-up: it would take the whole run.
FEW_UPDATES = 20
#: Share of the epochs that may pass without a better validation accuracy.
PATIENCE = 0.34
VALIDATION_SHARE, VALIDATION_MOST = 0.2, 5000


#: What is written beside the runs of folds.
FOLDS = "folds.json"


@dataclass(frozen=True)
class Source:
    """What fine-tuning uses from a model.

    Attributes:
        model_args: arguments with which ``create_model`` recreates the net, besides classes, channels and size.
        input_size: channels, height and width.
        mean, std: per channel, for images in 0..1.
        loss: as in a recipe.
        label_names: of the weights; empty if they have none.
        crop_mode: how the weights' images were framed, see ``capszoo.images.CROP_MODES``.
    """

    architecture: str
    model_args: dict[str, Any]
    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    loss: dict[str, Any]
    label_names: tuple[str, ...]
    crop_mode: str = "center"


def find_source(model: str, weights: bool = True) -> Source:
    """Look up a model under any name that ``capszoo predict`` accepts.

    Args:
        model: the name.
        weights: False for an architecture that starts from random weights, and may have no others.

    Raises:
        UnknownModel: no model has this name.
        CapszooError: no such folder or file, or a folder without a finished run.
        WeightsError: weights are missing or do not fit.
    """
    checkpoint = resolve(model)
    net = checkpoint.create(pretrained=weights, device="cpu")
    cfg: dict[str, Any] = net.pretrained_cfg  # type: ignore[assignment]
    architecture = str(cfg["architecture"])
    # for an architecture that starts from random weights, its existing weights are irrelevant
    bare = checkpoint.kind == "name" and "." not in checkpoint.argument
    metadata = Metadata() if bare and not weights else checkpoint.metadata()
    args = {key: value for key, value in metadata.model_args.items() if key not in DATA_ARGS}
    trained = metadata.trained.loss
    loss = trained.model_dump(mode="json") if trained else _usual_loss(architecture)
    # its recipes may give the network other scores, by their model_args
    if not trained and score_kind(net) == "logits":
        loss = {"name": "cross_entropy"}
    if not args.get("decoder"):
        loss = {**loss, "reconstruction": 0.0}
    size = model_input_size(net)  # a saved network may take another one than its weights' images had
    names = tuple(cfg.get("label_names") or ())
    return Source(architecture, args, size, tuple(cfg["mean"]), tuple(cfg["std"]), loss, names, _framed(cfg))


def _framed(cfg: Mapping[str, Any]) -> str:
    """The crop mode of a configuration; timm may have others, for training."""
    mode = str(cfg.get("crop_mode"))
    return mode if mode in CROP_MODES else "center"


def backbone_source(backbone: str, head: str) -> Source:
    """A timm backbone with a capsule head (``caps_head``) as a start, without reading the backbone's weights.

    Args:
        backbone: timm name, hf-hub:USER/NAME or local-dir:folder.
        head: a routing of ``capszoo.models._heads.HEADS``.

    Raises:
        UsageError: an unknown name; one line.
        WeightsError: a repository that cannot be reached.
    """
    if head not in HEADS:
        raise UsageError(str(unknown_routing(head)))
    try:
        config = described_backbone(backbone)
        cfg = create_backbone_cfg(backbone, config)
    except ValueError as error:
        raise UsageError(str(error)) from error
    # a finished run is rebuilt from its weights: it must not need the source of its initial ones
    args: dict[str, Any] = {"backbone": backbone, "routing": head}
    if config is not None:
        args["backbone"] = config.architecture
        args |= {"backbone_args": arguments} if (arguments := backbone_args(config)) else {}
    channels, rows, columns = cfg.get("input_size") or (3, 224, 224)
    return Source(
        "caps_head",
        args,
        (int(channels), int(rows), int(columns)),
        tuple(cfg.get("mean") or (0.5,)),
        tuple(cfg.get("std") or (0.5,)),
        {"name": "cross_entropy"},
        (),
        _framed(cfg),
    )


def _usual_loss(architecture: str) -> dict[str, Any]:
    """The loss of the architecture's recipes for images with one label; cross-entropy for other nets."""
    for name in list_recipes():
        if name.startswith(f"{architecture}."):
            loss = load_recipe(name).loss
            if loss.name != "bce":
                return loss.model_dump(mode="json")
    return {"name": "cross_entropy"}


def finetune_recipe(
    model: str | None,
    data: str | Path,
    *,
    backbone: str | None = None,
    head: str = "idpa",
    tag: str | None = None,
    img_size: Side | None = None,
    crop_mode: str | None = None,
    freeze: Sequence[str] = (),
    layer_decay: float | None = None,
    epochs: int | None = None,
    from_scratch: bool = False,
    skip_bad: bool = False,
    channels: int | None = None,
    folds: int | None = None,
    overrides: Sequence[str] = (),
    read: Callable[..., Any] = read_split,
) -> Recipe:
    """The recipe of a fine-tuning run; the arguments are those of ``finetune``, and ``read`` is that of ``load_data``.

    It reads the training images, because the recipe depends on their number.
    """
    if (model is None) == (backbone is None):
        raise UsageError("fine-tuning starts from a MODEL or from a --backbone", "give one of them")
    _check_options(overrides, from_scratch, freeze, layer_decay)
    name = source_name(data)
    check_channels(name, channels)
    if backbone is None:
        model = str(model)
        source = find_source(model, weights=not from_scratch)
    else:
        source, model = backbone_source(backbone, head), f"{BACKBONE}{backbone}"
    rows, columns = both_sides(img_size or source.input_size[1:])
    size: Side = rows if rows == columns else (rows, columns)
    crop_mode = crop_mode or source.crop_mode
    framing = framing_of(crop_mode, source.mean, None)
    # Loaded as in training: problems with the folder are reported before anything is written.
    images, _ = read(name, "train", None, size, size, skip_bad, framing, channels)
    splits = {"train", "test"} if name in DATASETS else find_splits(name)
    if images.spec.multi_label:
        raise UsageError(
            f"{name} has several labels an image", "write a recipe with an init section, and train it"
        )
    check_classes({"train": images})
    depth, count, validation = images.spec.input_size[0], len(images), 0
    if folds is not None:
        _check_folds(folds, name, splits)
        count -= -(-count // folds)
    if "val" not in splits:
        if images.labels.bincount().max() < 2:
            raise DataError(
                f"{name}: no class has two images: each class needs two images, one to train and one to validate on"
            )
        wanted = max(images.spec.num_classes, round(VALIDATION_SHARE * count))
        validation = min(wanted, VALIDATION_MOST, count - 1)
        if folds is None:
            count = len(split_validation(images, validation, stratified=True)[0])
        else:
            count -= validation
    world = int(os.environ.get("WORLD_SIZE", 1))  # number of processes, which share a batch evenly
    batch = batch_size(count, world)
    steps = count // batch
    if not steps:
        raise DataError(f"{name}: {count} training images are too few for {world} processes: start fewer")
    if epochs is None:
        epochs = min(max(round(UPDATES / steps), EPOCHS[0]), EPOCHS[1])
    warmup = round(0.1 * epochs, 2) if epochs * steps >= FEW_UPDATES else 0.0
    tree: dict[str, Any] = {
        "arch": source.architecture,
        "tag": tag or default_tag(name),
        "description": "trained from random weights"
        if from_scratch
        else f"fine-tuned from {public_start(model)}",
        "model_args": source.model_args,
        "data": {
            "name": name,
            "size": size,
            "crop_mode": crop_mode,
            "channels": channels,
            "validation": "own" if "val" in splits else "stratified",
            "val_size": validation,
            "test": "test" in splits,
            "balance": not (isinstance(images, ImageSet) and images.composer),
            "skip_bad": skip_bad,
            # The weights were trained on images with this normalisation.
            "mean": per_channel(source.mean, depth),
            "std": per_channel(source.std, depth),
            "augment": {
                "resize": size,
                "shift": max(1, min(rows, columns) // 14),
                "rotation": 10,
                "scale": [0.9, 1.1],
            },
        },
        "epochs": epochs,
        "batch_size": batch,
        "optimizer": {"name": "adamw", "lr": LEARNING_RATE, "weight_decay": 0.02},
        "schedule": {"name": "cosine", "warmup_epochs": warmup},
        "loss": source.loss,
        "clip_grad": 1.0,
        "early_stop": max(5, round(PATIENCE * epochs)),
    }
    if not from_scratch:
        tree["optimizer"]["layer_decay"] = LAYER_DECAY if layer_decay is None else layer_decay
        same = images.spec.label_names == source.label_names
        tree["init"] = {"weights": model, "new_classes": not same, "freeze": tuple(freeze)}
    return load_recipe(tree, overrides)


def _check_options(
    overrides: Sequence[str], from_scratch: bool, freeze: Sequence[str], layer_decay: float | None
) -> None:
    """Refuse options that would have no effect, or only half of it."""
    for key, option in DERIVING.items():
        if any(line.partition("=")[0].strip() == key for line in overrides):
            raise UsageError(
                f"other settings of fine-tuning follow from {key}", f"give {option} in place of --set"
            )
    if from_scratch and freeze:
        raise UsageError("random weights are not worth freezing", "leave out --freeze or --from-scratch")
    if from_scratch and layer_decay is not None:
        raise UsageError("random weights all need the same rate", "leave out --layer-decay or --from-scratch")


def _check_folds(folds: int, name: str, splits: set[str]) -> None:
    """Refuse a number of folds that is none, and folds of a set that has its own splits."""
    if folds < 2:
        raise UsageError(f"{folds} folds leave nothing to train on or to test", "give --folds 2 or more")
    if own := splits - {"train"}:
        raise UsageError(
            f"--folds splits the training images, and {name} has its own {' and '.join(sorted(own))} split",
            "leave --folds out, or give the folder of its training images",
        )


def batch_size(count: int, world: int = 1) -> int:
    """Images per update: ``BATCH``, or fewer where the last incomplete batch, left out, would be much of an epoch.

    Args:
        count: training images.
        world: number of processes, which share a batch evenly.
    """
    batch = max(min(BATCH, count) // world, 1) * world
    if count < FEW_BATCHES * batch:
        batch = max(count // -(-count // batch) // world, 1) * world
    return batch


def finetune(
    model: str | None,
    data: str | Path,
    out: str | Path | None = None,
    *,
    backbone: str | None = None,
    head: str = "idpa",
    tag: str | None = None,
    img_size: Side | None = None,
    crop_mode: str | None = None,
    freeze: Sequence[str] = (),
    layer_decay: float | None = None,
    epochs: int | None = None,
    from_scratch: bool = False,
    skip_bad: bool = False,
    channels: int | None = None,
    folds: int | None = None,
    overrides: Sequence[str] = (),
    cpu: bool = False,
    stop_after: int | None = None,
    accept_data: bool = False,
    log_with: Sequence[str] = (),
) -> dict[str, Any]:
    """Fine-tune a model, or resume an interrupted call with the same arguments.

    Args:
        model: name.tag, hf-hub:USER/NAME, the folder of a run, or a .safetensors file; with ``from_scratch`` also an
            architecture without weights. None with ``backbone``.
        backbone: instead of a model, a timm name, hf-hub:USER/NAME or local-dir:folder: its features, with its weights
            unless ``from_scratch``, and a new capsule head.
        head: routing of that head, a name of ``capszoo.models._heads.HEADS``.
        data: a folder of images by class, a table (FILE.csv), ``hf:OWNER/NAME`` or another of
            ``capszoo.data.PREFIXES``.
        out: folder of the run; None: ``runs/<arch>.<tag>``.
        tag: name of the new weights after the architecture's; None uses the data's.
        img_size: side, or rows and columns, of the images; None uses those of the weights.
        crop_mode: how images of another shape are framed: ``center``, ``squash`` or ``border``; None as for the
            weights.
        freeze: "body", "all" (except the class capsules), or modules by name.
        layer_decay: factor of the learning rate from each layer to the one before it; None uses the default, 1 none.
        epochs: maximum number; None uses as many as give about ``UPDATES`` updates.
        from_scratch: start from random weights, for comparison.
        skip_bad: skip images that cannot be read.
        channels: read images in grey (1) or in colour (3); None: in colour if any has some.
        folds: train this many runs, each tested on another fold of the images; None: one run on all of them.
        overrides: ``key=value`` lines that change keys of the recipe, as in ``capszoo train --set``.
        cpu, stop_after, accept_data, log_with: as for ``train``.

    Returns:
        The result of ``train`` and, once finished, paths: ``"labels"``, ``"confusion"``, ``"card"``. With ``folds``,
        once all are finished, the content of folds.json, and the paths ``"folds_file"`` and ``"confusion"``.

    Raises:
        UnknownModel: no model or backbone has this name.
        UsageError: an argument is invalid, or two do not go together.
        DataError, WeightsError: images or weights are missing, unreadable or do not fit.
        TrainingError: the run cannot start, continue or be saved.
    """
    read = functools.cache(read_split)  # read each split once: for the recipe, for training, for evaluation
    recipe = finetune_recipe(
        model,
        data,
        backbone=backbone,
        head=head,
        tag=tag,
        img_size=img_size,
        crop_mode=crop_mode,
        freeze=freeze,
        layer_decay=layer_decay,
        epochs=epochs,
        from_scratch=from_scratch,
        skip_bad=skip_bad,
        channels=channels,
        folds=folds,
        overrides=overrides,
        read=read,
    )
    options: dict[str, Any] = dict(cpu=cpu, stop_after=stop_after, accept_data=accept_data, log_with=log_with)
    undivided = recipe.model_copy(update={"data": recipe.data.model_copy(update={"val_size": 0})})
    images = load_data(recipe if folds is None else undivided, None, read)
    read.cache_clear()
    if folds is not None:
        return _train_folds(recipe, images, folds, Path(out or f"runs/{recipe.name}"), options)
    result = train(recipe, out=out, data=images, **options)
    if result["finished"] and os.environ.get("RANK", "0") == "0":
        result |= _finish(images, Path(result["weights"]), "cpu" if cpu else default_device())[0]
    return result


def _train_folds(
    recipe: Recipe, images: RunData, folds: int, out: Path, options: dict[str, Any]
) -> dict[str, Any]:
    """Train a run for each fold, which tests it, in folders of ``out``; write what they have found.

    The training images of a run give up a share for early stopping, as in a single run, so that the fold selects
    nothing.
    """
    results: list[EvalResult] = []
    device = "cpu" if options["cpu"] else default_device()
    main = os.environ.get("RANK", "0") == "0"
    for number, (rest, fold) in enumerate(stratified_folds(images.training, folds), start=1):
        training, validation = split_validation(rest, recipe.data.val_size, recipe.data.val_seed, True)
        parts = {"train": rest, "test": fold}
        data = RunData(
            training,
            validation,
            fold,
            {split: part.fingerprint() for split, part in parts.items()},
            images.skipped,
            {split: len(part) for split, part in parts.items()},
        )
        text = f"{recipe.description}, fold {number} of {folds}"
        numbered = recipe.model_copy(update={"description": text})
        result = train(numbered, out=out / f"fold-{number}", data=data, **options)
        if not result["finished"]:
            return result
        if main:
            results.append(_finish(data, Path(result["weights"]), device)[1])
    return {"out": out, "finished": True, **(_write_folds(recipe, images, results, out) if main else {})}


def _write_folds(recipe: Recipe, images: RunData, results: list[EvalResult], out: Path) -> dict[str, Any]:
    """Write folds.json and the confusion matrix over all folds."""
    whole = pooled(results)
    assert whole.confusion is not None
    summary: dict[str, Any] = {"folds": len(results), "n": whole.n}
    recalls = [
        mean_recall(*zip(*((row.right, row.n) for row in result.per_class), strict=True))
        for result in results
    ]
    for name, values in (("top1", [result.accuracy for result in results]), ("recall", recalls)):
        spread = statistics.stdev(values)
        summary[name] = {"mean": statistics.mean(values), "sd": spread, "values": values}
    summary = rounded(summary) | {
        "label_names": [row.label for row in whole.per_class],
        "confusion": whole.confusion.tolist(),
        "sha256": images.fingerprints["train"],
    }
    write_atomically(out / FOLDS, f"{json.dumps(summary, indent=1)}\n")
    title = f"{recipe.name}, {whole.n:,} images, each by the run that was not trained on it"
    draw_confusion(whole, title, out / CONFUSION)
    return summary | {"folds_file": out / FOLDS, "confusion": out / CONFUSION}


def _finish(images: RunData, weights: Path, device: str | torch.device) -> tuple[dict[str, Path], EvalResult]:
    """Write files for users: names of the classes, confusion matrix, model card; return their paths, and the result."""
    target = prepare(weights, images.measured, device=device)
    result, split = in_float32(assess)(target), target.images.split
    assert result.confusion is not None  # one label per image
    counts = {"images": result.confusion.sum(1).tolist(), "right": result.confusion.diagonal().tolist()}
    info = amend_metadata(weights, per_class={"split": split, **counts})
    names = {"labels": LABELS, "confusion": CONFUSION, "card": "README.md"}
    paths = {kind: weights.with_name(name) for kind, name in names.items()}
    write_atomically(paths["labels"], "".join(f"{line}\n" for line in label_lines(info.label_names or ())))
    # no name of the user's folder: the picture is published
    draw_confusion(result, f"{info.architecture}, {result.n:,} images of {split}", paths["confusion"])
    pictures = [file for file in (CURVES, CONFUSION) if weights.with_name(file).is_file()]
    card = model_card(info, weights.parent.resolve().name, pictures=pictures, local=True)
    write_atomically(paths["card"], card.content)
    return paths, result
