"""``capszoo recipes``: the package's training recipes, and recipes of users."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column

from .._utils.files import write_atomically
from ..errors import CapszooError, UsageError, require
from .common import JsonOption, print_json, print_table, say
from .group import Command
from .train import resolved_yaml
from .training import ProfileOption, RecipeArgument, SetOption, check_recipe_argument, recipe_names

recipes_app = typer.Typer(help="List, show, copy and validate recipes.", no_args_is_help=True)


def _require_yaml() -> None:
    require("reading recipes", ("pydantic", "yaml"), "train")


def list_recipes_command(
    filter: Annotated[
        str, typer.Argument(metavar="[FILTER]", help="Part of a name.", show_default=False)
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """List the recipes of the package: data set, epochs, profiles."""
    _require_yaml()
    from ..recipes.config import find_recipe
    from ..recipes.yaml_tree import read_yaml

    rows = []
    for name in recipe_names():
        if filter and filter not in name:
            continue
        tree: Any = read_yaml(find_recipe(name).read_text(encoding="utf-8"))
        rows.append(
            {
                "name": name,
                "dataset": tree["data"]["name"],
                "epochs": tree.get("epochs"),
                "profiles": sorted(tree.get("profiles") or {}),
            }
        )
    if as_json:
        print_json(rows)
        return
    if not rows:
        raise CapszooError(f"no recipe matching '{filter}'", "`capszoo recipes list` shows every recipe")
    print_table(
        (Column("recipe", no_wrap=True), "data set", "epochs", "profiles"),
        ((row["name"], row["dataset"], str(row["epochs"]), ", ".join(row["profiles"])) for row in rows),
    )


def show_command(recipe: RecipeArgument, profile: ProfileOption = None, overrides: SetOption = None) -> None:
    """Print a recipe's YAML; with --profile or --set the resolved settings."""
    check_recipe_argument(recipe)
    _require_yaml()
    from ..recipes.config import find_recipe, load_recipe, recipe_text

    if profile is None and not overrides:
        typer.echo(recipe_text(find_recipe(recipe)).rstrip())
        return
    typer.echo(resolved_yaml(load_recipe(recipe, overrides, profile)))


def copy_command(
    recipe: RecipeArgument,
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="File to write (default: RECIPE.yaml here).", show_default=False
        ),
    ] = None,
) -> None:
    """Copy a recipe to a file of your own, to change and train it."""
    check_recipe_argument(recipe)
    _require_yaml()
    from ..recipes.config import find_recipe, recipe_text

    source = find_recipe(recipe)
    named = source.with_suffix(".yaml").name  # a run of an early version has a JSON recipe, which is YAML too
    target = out or Path(named)
    if target.is_dir():
        target = target / named
    if target.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{target} is no .yaml file", f"name it {target}.yaml")
    if target.exists():
        raise CapszooError(f"{target} exists already", "name another file")
    write_atomically(target, recipe_text(source))
    say(f"written: {target}")
    say(f"edit it, with a new tag so that its run has its own folder; then: capszoo train {target}")


def validate_command(
    recipe: RecipeArgument, profile: ProfileOption = None, overrides: SetOption = None
) -> None:
    """Check a recipe's keys, and the types and ranges of its values, in every profile.

    The names of model, loss and optimiser are checked by `capszoo train --dry-run`.
    """
    check_recipe_argument(recipe)
    _require_yaml()
    from ..recipes.config import list_profiles, load_recipe

    loaded = load_recipe(recipe, overrides, profile)
    profiles = list_profiles(recipe)
    more = f"; profiles: {', '.join(profiles)}" if profiles else ""
    say(
        f"{recipe}: keys and values are valid; {loaded.arch} on {loaded.data.name}, {loaded.epochs} epochs, "
        f"batch {loaded.batch_size}{more}"
    )


recipes_app.command("list", cls=Command)(list_recipes_command)
recipes_app.command("show", cls=Command)(show_command)
recipes_app.command("copy", cls=Command)(copy_command)
recipes_app.command("validate", cls=Command)(validate_command)
