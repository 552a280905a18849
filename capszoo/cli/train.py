"""``capszoo train``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from .common import DataFolderOption, note, refuse_unused, say
from .training import (
    AcceptDataOption,
    BatchOption,
    EpochsOption,
    LogWithOption,
    ProfileOption,
    RateOption,
    SeedOption,
    SetOption,
    TrainingDeviceOption,
    check_recipe_argument,
    check_training,
    complete_recipe,
    print_run,
    settings,
    use_cpu,
)

_several = partial(typer.Option, rich_help_panel="Several runs")


def train_command(
    context: typer.Context,
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE...",
            help="A recipe's name or a YAML file.",
            show_default=False,
            autocompletion=complete_recipe,
        ),
    ] = None,
    overrides: SetOption = None,
    profile: ProfileOption = None,
    data: DataFolderOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder of the run (default: runs/ARCH.TAG of the recipe); with --together or --seeds the folder "
            "that holds all runs (default: runs).",
            metavar="PATH",
        ),
    ] = None,
    epochs: EpochsOption = None,
    lr: RateOption = None,
    batch_size: BatchOption = None,
    seed: SeedOption = None,
    device: TrainingDeviceOption = None,
    accept_data: AcceptDataOption = False,
    log_with: LogWithOption = None,
    together: Annotated[
        bool, _several("--together", help="Train several recipes side by side, a process each.")
    ] = False,
    seeds: Annotated[
        str | None,
        _several(metavar="N,N,…", help="Train once with each seed; print mean and standard deviation."),
    ] = None,
    parallel: Annotated[
        int | None, _several(min=1, metavar="N", help="With --seeds: simultaneous runs (default: 1).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and the estimated time.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            metavar="N",
            help="CPU threads (default: PyTorch's number; a resumed run keeps its own).",
        ),
    ] = None,
) -> None:
    """Train a recipe; resumes an interrupted run.

    Ctrl-C and SIGTERM save first. Several GPUs: accelerate launch --num_processes N -m capszoo train RECIPE. Several
    CPU processes: torchrun --nproc_per_node N -m capszoo train RECIPE --device cpu.
    """
    recipes = recipes or []
    for recipe in recipes:
        check_recipe_argument(recipe)
    check_training()
    _check_kind_of_run(context, seeds, together)
    overrides = settings(overrides, epochs=epochs, lr=lr, batch_size=batch_size, seed=seed)
    cpu = use_cpu(device)
    if not recipes:
        raise UsageError("no recipe was given", "`capszoo train RECIPE`")
    if dry_run:
        refuse_unused(context, ("seeds", "parallel"), "with --dry-run", "leave it out")
        _dry_run(recipes, overrides, profile, cpu, threads)
        return
    if seeds is not None:
        _train_seeds(recipes, seeds, overrides, out, data, cpu, profile, parallel)
        return
    if together:
        from ..recipes.training.multi_run import train_together

        train_together(recipes, overrides, out, data, cpu, profile)
        return
    if len(recipes) > 1:
        raise UsageError(f"{len(recipes)} recipes were given", "--together trains them side by side")
    from ..recipes.config import load_recipe

    load_recipe(recipes[0], overrides, profile)  # reports errors before torch is loaded
    from ..recipes.train import train

    arguments: dict[str, Any] = dict(out=out, data=data, cpu=cpu, profile=profile, threads=threads)
    print_run(train(recipes[0], overrides, **arguments, accept_data=accept_data, log_with=log_with or ()))


def _check_kind_of_run(context: typer.Context, seeds: str | None, together: bool) -> None:
    """Raise ``UsageError`` for two kinds of runs at once, or an option that this kind would ignore."""
    if seeds is not None and together:
        raise UsageError("--seeds and --together exclude each other", "give one of them")
    if seeds is None:
        on = "with --together" if together else "on a single run"
        refuse_unused(context, ["parallel"], on, "it belongs to --seeds")
    if seeds is not None or together:
        of_one = ["threads", "accept_data", "log_with"]
        refuse_unused(context, of_one, f"with {'--together' if together else '--seeds'}", "leave it out")


def resolved_yaml(recipe: Any) -> str:
    """Every setting of a recipe, as YAML."""
    import yaml

    tree = recipe.model_dump(mode="json", exclude_none=True)
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)).rstrip()


def _dry_run(
    recipes: list[str], overrides: list[str], profile: str | None, cpu: bool, threads: int | None
) -> None:
    """Print each resolved recipe, and the estimated training time on this machine."""
    from ..data import DataError
    from ..recipes.config import load_recipe
    from ..recipes.training.estimate import estimate

    for name in recipes:
        recipe = load_recipe(name, overrides, profile)
        typer.echo(resolved_yaml(recipe))
        try:
            plan = estimate(recipe, cpu, threads)
        except DataError as error:
            note(f"no estimate: {error}")
            continue
        pace = recipe.batch_size / plan.seconds_per_update
        line = (
            f"{plan.parameters:,} parameters; {pace:,.0f} images/s on {plan.device}, timed on random images"
        )
        if plan.seconds is not None and plan.updates is not None:
            took = f"{plan.seconds:,.0f} s" if plan.seconds < 600 else f"{plan.seconds / 3600:,.1f} hours"
            line += (
                f"; {plan.images:,} images x {recipe.epochs} epochs = {plan.updates:,} updates: about {took}"
            )
        unlike = ["without torch.compile"] if recipe.compile else []
        unlike += ["all epochs at the full image size"] if recipe.stages else []
        how = f"; timed {' and '.join(unlike)}" if unlike else ""
        note(f"{line}{how}; evaluation and augmentation come on top", "estimate: ")


def _train_seeds(
    recipes: list[str],
    seeds: str,
    overrides: list[str] | None,
    out: Path | None,
    data: Path | None,
    cpu: bool,
    profile: str | None,
    parallel: int | None,
) -> None:
    try:
        numbers = [int(part) for part in seeds.split(",")]
    except ValueError:
        raise UsageError(f"--seeds takes whole numbers with commas, such as 0,1,2; got {seeds!r}") from None
    if len(recipes) > 1:
        raise UsageError(f"{len(recipes)} recipes were given", "--seeds takes one")
    from ..recipes.training.multi_run import train_seeds

    summary = train_seeds(recipes[0], numbers, overrides, out, data, cpu, profile, parallel or 1)
    for split in ("test", "validation"):
        if split in summary:
            accuracy = summary[split]
            spread, of = "", "one seed"
            if "sd" in accuracy:
                each = ", ".join(f"{value:.2f}" for value in accuracy["values"])
                spread = f" ± {accuracy['sd']:.2f}"
                of = f"mean ± standard deviation of {len(accuracy['values'])} seeds ({each})"
            say(f"{split}: {accuracy['mean']:.2f}{spread} % on {accuracy['n']:,} images, {of}")
