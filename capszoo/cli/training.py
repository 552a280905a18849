"""Shared by the commands that train: options, and what they mean for a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .._utils.choices import TRACKERS
from .._utils.devices import check_device
from ..errors import UsageError, require, unknown_name
from .common import say


def recipe_names() -> list[str]:
    """Names of the recipes in the package."""
    from .. import recipes

    folders = (Path(folder) / "configs" for folder in recipes.__path__)
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})


def check_recipe_argument(name: str) -> None:
    """Raise ``UsageError`` if a RECIPE argument is neither a file nor a recipe of the package."""
    if Path(name).suffix in (".yaml", ".yml", ".json"):
        if not Path(name).is_file():
            raise UsageError(f"no recipe at {name}", "check the path, or give a recipe's name")
    elif name not in recipe_names():
        if (Path(name) / "recipe.yaml").is_file():
            raise UsageError(
                f"{name} is the folder of a run",
                f"give {name}/recipe.yaml (`capszoo train {name}/recipe.yaml --out {name}` resumes it)",
            )
        raise UsageError(unknown_name("recipe", name, recipe_names()))


def complete_recipe(incomplete: str) -> list[str]:
    """Names of recipes for the shell's completion."""
    return [name for name in recipe_names() if name.startswith(incomplete)]


#: An option in the panel "Settings" of ``--help``.
setting = partial(typer.Option, rich_help_panel="Settings")

EpochsOption = Annotated[
    int | None,
    setting(
        "--epochs",
        min=1,
        help="Number of epochs (default: the recipe's; finetune: a maximum by the number of images).",
        metavar="N",
    ),
]
RateOption = Annotated[
    float | None,
    setting(
        "--lr", help="Learning rate, optimizer.lr (default: the recipe's; finetune: 0.003).", metavar="X"
    ),
]
BatchOption = Annotated[
    int | None,
    setting(
        "--batch-size",
        min=1,
        help="Images per update, over all processes and accumulated parts (default: the recipe's; finetune: 32, fewer "
        "for small sets). timm's is per process.",
        metavar="N",
    ),
]
SeedOption = Annotated[
    int | None,
    setting(
        "--seed",
        min=0,
        help="Seed of weights, order and augmentation (default: the recipe's; finetune: 0).",
        metavar="N",
    ),
]
RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe's name or a YAML file.",
        show_default=False,
        autocompletion=complete_recipe,
    ),
]
ProfileOption = Annotated[
    str | None,
    setting(
        "--profile",
        metavar="NAME",
        help="One of the recipe's profiles, such as short (default: the recipe without a profile).",
    ),
]
SetOption = Annotated[
    list[str] | None,
    setting("--set", metavar="KEY=VALUE", help="Change a setting, such as optimizer.lr=0.001; repeatable."),
]
TrainingDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda",
        callback=check_device,
        help="Where to train (auto: CUDA if there is one, else CPU).",
    ),
]
AcceptDataOption = Annotated[
    bool,
    typer.Option("--accept-data", help="Resume even if the images changed; their number must be the same."),
]


LogWithOption = Annotated[
    list[str] | None,
    typer.Option(
        "--log-with",
        metavar="NAME",
        help=f"Also log to a tracker, by Accelerate: {', '.join(TRACKERS)}; repeatable (TensorBoard's events are "
        "always written).",
    ),
]


def refuse_set_twice(overrides: list[str] | None, settings: Mapping[str, Any]) -> None:
    """Refuse a ``--set`` line whose key an option sets, too: ``settings`` has the options' values by key.

    Raises:
        UsageError: there is one.
    """
    named = {
        "data.size": "img-size",
        "data.name": "data",
        "data.channels": "colour or --grey",
        "model_args.routing": "head",
    }
    for line in overrides or ():
        key = line.partition("=")[0].strip()
        if settings.get(key) is not None:
            option = named.get(key, key.rpartition(".")[2].replace("_", "-"))
            raise UsageError(f"--set {line} and --{option} exclude each other", "give one of them")


def settings(overrides: list[str] | None, **options: Any) -> list[str]:
    """The ``--set`` lines, and lines for the options that abbreviate one.

    Raises:
        UsageError: an option and a ``--set`` line set the same key.
    """
    keys = {"lr": "optimizer.lr"}
    refuse_set_twice(overrides, {keys.get(name, name): value for name, value in options.items()})
    short = [f"{keys.get(name, name)}={value}" for name, value in options.items() if value is not None]
    return [*(overrides or ()), *short]


def use_cpu(device: str | None) -> bool:
    """True if training should not use an accelerator.

    Raises:
        UsageError: the requested device is missing, or is none that training uses: it uses the first visible GPU.
    """
    if device in (None, "auto", "cpu"):
        return device == "cpu"
    from .._utils.devices import resolve_device

    resolved = resolve_device(str(device))
    if resolved.type == "mps":
        raise UsageError("training uses CPUs and CUDA GPUs, not MPS", "use --device cpu")
    if resolved.index:
        raise UsageError(
            f"training uses the first visible GPU, not {device}",
            f"set CUDA_VISIBLE_DEVICES={resolved.index} and give --device cuda",
        )
    return resolved.type == "cpu"


def check_training() -> None:
    """Report missing dependencies of training."""
    require("training", ("accelerate", "pydantic", "yaml", "tensorboard", "matplotlib"), "train")


def print_run(result: dict[str, Any]) -> None:
    """Print the files that fine-tuning writes besides the weights; the run's log has printed weights and accuracy."""
    if "folds" in result:
        for name, score in (("top-1", result["top1"]), ("mean recall", result["recall"])):
            each = ", ".join(f"{value:.2f}" for value in score["values"])
            say(f"{result['folds']} folds: {name} {score['mean']:.2f} ± {score['sd']:.2f}% ({each})")
    for file in ("labels", "folds_file", "confusion", "card"):
        if file in result:
            say(f"{file.partition('_')[0]}: {result[file]}")
