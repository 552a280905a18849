"""``capszoo finetune``."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from .._pretrained.catalogue import architectures, check_model_argument
from .._utils.choices import CROP_MODES, HEAD_ROUTINGS
from ..errors import UnknownModel, UsageError, unknown_name
from .common import SkipBadOption, image_option, parse_size, refuse_unused, was_given
from .training import (
    AcceptDataOption,
    BatchOption,
    EpochsOption,
    LogWithOption,
    RateOption,
    SeedOption,
    SetOption,
    TrainingDeviceOption,
    check_training,
    print_run,
    refuse_set_twice,
    setting,
    settings,
    use_cpu,
)


def finetune_command(
    context: typer.Context,
    data: Annotated[
        str,
        image_option(
            help="Folder with a sub-folder of images per class, FILE.csv of names and labels, or hf:OWNER/NAME.",
            show_default=False,
            metavar="PATH",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="As `capszoo predict` takes it. Not with --backbone.", show_default=False
        ),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A timm backbone with a new capsule head: resnet18.a1_in1k, hf-hub:USER/NAME, local-dir:FOLDER.",
        ),
    ] = None,
    head: Annotated[
        str,
        typer.Option(
            metavar="ROUTING", help=f"Routing of the head of --backbone: {', '.join(HEAD_ROUTINGS)}."
        ),
    ] = "idpa",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder of the run (default: runs/ARCHITECTURE.TAG; with --backbone runs/caps_head.TAG).",
            metavar="PATH",
        ),
    ] = None,
    img_size: Annotated[
        str | None, setting(metavar="N or HxW", help="Size of the images, if not the weights'.")
    ] = None,
    crop_mode: Annotated[
        str | None,
        setting(
            metavar="center|squash|border",
            help="Of images of another shape: crop, scale each side, or shrink and pad (default: the weights').",
        ),
    ] = None,
    freeze: Annotated[
        list[str] | None,
        setting(
            help="body, all (but the class capsules), or modules by name, with commas; repeatable.",
            metavar="NAME",
        ),
    ] = None,
    layer_decay: Annotated[
        float | None,
        setting(
            help="Layer-wise rate decay: X times the rate of the layer above (default: 0.8; 1: no decay).",
            metavar="X",
        ),
    ] = None,
    epochs: EpochsOption = None,
    lr: RateOption = None,
    batch_size: BatchOption = None,
    seed: SeedOption = None,
    from_scratch: Annotated[
        bool, setting("--from-scratch", help="Start from random weights, to compare.")
    ] = False,
    skip_bad: SkipBadOption = False,
    colour: Annotated[
        bool | None,
        setting(
            "--colour/--grey",
            help="Read all images in colour, or in grey (default: in colour if any image has some).",
        ),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Train K runs, each tested on another fold of the images: mean ± sd, confusion over all images.",
        ),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(
            help="Tag of the new weights, ARCHITECTURE.TAG (default: from the last part of --data).",
            metavar="NAME",
        ),
    ] = None,
    overrides: SetOption = None,
    device: TrainingDeviceOption = None,
    accept_data: AcceptDataOption = False,
    log_with: LogWithOption = None,
) -> None:
    """Fine-tune a model, or a timm backbone with a capsule head, for classes of your own; resumes an interrupted run.

    A fifth of each class is held out for early stopping, unless the folder has train/ and val/; test/ is measured once.
    """
    if backbone is None:
        refuse_unused(context, ["head"], "without --backbone", "give --backbone NAME in place of MODEL")
    if from_scratch:
        refuse_unused(context, ["layer_decay"], "with --from-scratch", "leave one of them out")
    refuse_set_twice(
        overrides,
        {
            "epochs": epochs,
            "tag": tag,
            "data.name": data,
            "data.size": img_size,
            "data.crop_mode": crop_mode,
            "data.skip_bad": skip_bad or None,
            "data.channels": colour,
            "init.freeze": freeze,
            "model_args.routing": head if was_given(context, "head") else None,
            "optimizer.layer_decay": layer_decay,
        },
    )
    size = parse_size(img_size)
    if crop_mode not in (None, *CROP_MODES):
        raise UsageError(unknown_name("crop mode", str(crop_mode), CROP_MODES))
    check_training()
    from ..data.specs import source_name

    source_name(data)  # reports errors before torch is loaded
    if model is not None:
        _check_model(model)
    from ..recipes.finetune import finetune

    result = finetune(
        model,
        data,
        out,
        backbone=backbone,
        head=head,
        tag=tag,
        img_size=size,
        crop_mode=crop_mode,
        freeze=[part.strip() for words in freeze or () for part in words.split(",") if part.strip()],
        layer_decay=layer_decay,
        epochs=epochs,
        from_scratch=from_scratch,
        skip_bad=skip_bad,
        channels=None if colour is None else 3 if colour else 1,
        overrides=settings(overrides, lr=lr, batch_size=batch_size, seed=seed),
        folds=folds,
        cpu=use_cpu(device),
        accept_data=accept_data,
        log_with=log_with or (),
    )
    print_run(result)


def _check_model(name: str) -> None:
    """Refuse what is no MODEL; a network of timm is a backbone."""
    try:
        check_model_argument(name)
    except UnknownModel as error:
        known = architectures()  # timm need not be loaded for a typo or a tag that does not exist
        if name.partition(".")[0] in known or get_close_matches(name, known, cutoff=0.9):
            raise
        from timm.models import is_model

        if not is_model(name):
            raise
        raise UsageError(
            f"{name} is a network of timm, which has no capsules", f"give it a head: --backbone {name}"
        ) from error
