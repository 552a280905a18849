"""``capszoo train``, ``finetune`` and ``publish``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from .._catalogue import HEAD_ROUTINGS, check_model_argument
from .._suggest import unknown_name
from ..errors import UsageError, require
from .common import DeviceOption, JsonOption, print_json, refuse_unused, stderr, stdout

EpochsOption = Annotated[
    int | None,
    typer.Option("--epochs", min=1, help="Number of epochs.", metavar="N", rich_help_panel="Settings"),
]
RateOption = Annotated[
    float | None,
    typer.Option(
        "--lr",
        help="Learning rate, as --set optimizer.lr=.",
        show_default=False,
        metavar="X",
        rich_help_panel="Settings",
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        min=1,
        help="Images per update.",
        show_default=False,
        metavar="N",
        rich_help_panel="Settings",
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=0,
        help="Seed of weights, order and augmentation.",
        metavar="N",
        rich_help_panel="Settings",
    ),
]


def _settings(overrides: list[str] | None, **options: Any) -> list[str]:
    """The `--set` lines, followed by lines for the options that abbreviate one, so that these take precedence."""
    keys = {"lr": "optimizer.lr"}
    short = [f"{keys.get(name, name)}={value}" for name, value in options.items() if value is not None]
    return [*(overrides or ()), *short]


def _use_cpu(device: str | None, cpu: bool) -> bool:
    """True if training should not use an accelerator; raises `UsageError` if the requested device is missing."""
    if cpu and device not in (None, "auto", "cpu"):
        raise UsageError(f"--cpu and --device {device} exclude each other", "give one of them")
    if cpu or device in (None, "auto", "cpu"):
        return cpu or device == "cpu"
    from .._api import resolve_device

    return resolve_device(str(device)).type == "cpu"


def recipe_names() -> list[str]:
    """Names of the recipes in the package."""
    from .. import recipes

    folders = (Path(folder) / "configs" for folder in recipes.__path__)
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})


def check_recipe_argument(name: str) -> None:
    """Raise `UsageError` if a RECIPE argument is neither a file nor a recipe of the package."""
    if Path(name).suffix in (".yaml", ".yml", ".json"):
        if not Path(name).is_file():
            raise UsageError(f"no recipe at {name}", "check the path, or give a recipe's name")
    elif name not in recipe_names():
        raise UsageError(unknown_name("recipe", name, recipe_names()))


def complete_recipe(incomplete: str) -> list[str]:
    """Names of recipes for the shell's completion."""
    return [name for name in recipe_names() if name.startswith(incomplete)]


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
    typer.Option(
        "--profile",
        metavar="NAME",
        help="One of the recipe's profiles, such as short (default: the paper's settings).",
        rich_help_panel="Settings",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, such as optimizer.lr=0.001; repeatable.",
        rich_help_panel="Settings",
    ),
]


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
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Folder of the data set (default: $CAPSZOO_DATA).",
            show_default=False,
            metavar="PATH",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder of the run (default: runs/<recipe>); with --together the folder of all (runs).",
            show_default=False,
            metavar="PATH",
        ),
    ] = None,
    epochs: EpochsOption = None,
    lr: RateOption = None,
    batch_size: BatchOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="The same as --device cpu.")] = False,
    accept_data: Annotated[
        bool, typer.Option("--accept-data", help="Continue a run although its images have changed.")
    ] = False,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Train several recipes side by side, a process each.",
            rich_help_panel="Several runs",
        ),
    ] = False,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="Train once with each seed; print mean and standard deviation.",
            show_default=False,
            rich_help_panel="Several runs",
        ),
    ] = None,
    queue: Annotated[
        bool,
        typer.Option(
            "--queue",
            help="Train the next recipes of recipes/queue.yaml (RECIPE...: only these).",
            rich_help_panel="Several runs",
        ),
    ] = False,
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With --seeds or --queue: runs at the same time.",
            rich_help_panel="Several runs",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="N",
            help="With --queue: stop all runs with checkpoints after N minutes.",
            rich_help_panel="Several runs",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --queue: take runs from DIR, write them there at the end (files of at most 16 MB).",
            show_default=False,
            rich_help_panel="Several runs",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the resolved recipe and the estimated time; with --queue how far each run has come.",
        ),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="CPU threads (default: those that the run began with)."),
    ] = None,
) -> None:
    """Train a recipe; resumes an interrupted run.

    Ctrl-C and SIGTERM save first. Several processes: accelerate launch -m capszoo.recipes.train RECIPE.
    """
    recipes = recipes or []
    for recipe in recipes:
        check_recipe_argument(recipe)
    _check_training()
    kinds = (("--queue", queue), ("--seeds", seeds is not None), ("--together", together))
    _check_kind_of_run(context, [kind for kind, chosen in kinds if chosen])
    overrides = _settings(overrides, epochs=epochs, lr=lr, batch_size=batch_size, seed=seed)
    cpu = _use_cpu(device, cpu)
    if queue:
        _train_queue(recipes, overrides, out, data, cpu, parallel, minutes, state, dry_run)
        return
    if not recipes:
        raise UsageError("no recipe was given", "`capszoo train RECIPE`, or --queue for the next ones")
    if dry_run:
        _dry_run(recipes, overrides, profile, cpu)
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

    given: dict[str, Any] = dict(out=out, data=data, cpu=cpu, profile=profile, threads=threads)
    _print_run(train(recipes[0], overrides, **given, accept_data=accept_data))


#: Options of `capszoo train` that some kinds of runs do not use, and the kinds that do ("": a single run).
_USED_BY = {
    "profile": ("", "--seeds", "--together"),
    "threads": ("",),
    "accept_data": ("",),
    "parallel": ("--seeds", "--queue"),
    "minutes": ("--queue",),
    "state": ("--queue",),
}


def _check_kind_of_run(context: typer.Context, kinds: list[str]) -> None:
    """Raise `UsageError` for two kinds of runs at once, or an option that this kind would ignore."""
    if len(kinds) > 1:
        raise UsageError(f"{kinds[0]} and {kinds[1]} exclude each other", "give one of them")
    kind = kinds[0] if kinds else ""
    for option, users in _USED_BY.items():
        if kind in users:
            continue
        if kind:
            refuse_unused(context, [option], f"with {kind}", "leave it out")
        refuse_unused(context, [option], "on a single run", f"it belongs to {' and '.join(users)}")


def resolved_yaml(recipe: Any) -> str:
    """Every setting of a recipe, as YAML."""
    import yaml

    tree = recipe.model_dump(mode="json", exclude_none=True)
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)).rstrip()


def _dry_run(recipes: list[str], overrides: list[str], profile: str | None, cpu: bool) -> None:
    """Print each resolved recipe, and the estimated training time on this machine."""
    from ..data import DataError
    from ..recipes.config import load_recipe
    from ..recipes.training.estimate import estimate

    for name in recipes:
        recipe = load_recipe(name, overrides, profile)
        typer.echo(resolved_yaml(recipe))
        try:
            found = estimate(recipe, cpu)
        except DataError as error:
            stderr().print(escape(f"note: no estimate: {error}"), soft_wrap=True)
            continue
        pace = recipe.batch_size / found.seconds_per_update
        line = (
            f"{found.parameters:,} parameters; {pace:,.0f} images/s on {found.device}, timed on random images"
        )
        if found.seconds is not None and found.updates is not None:
            took = f"{found.seconds:,.0f} s" if found.seconds < 600 else f"{found.seconds / 3600:,.1f} hours"
            line += f"; {found.images:,} images x {recipe.epochs} epochs = {found.updates:,} updates: about {took}"
        stderr().print(escape(f"estimate: {line}; evaluation and augmentation come on top"), soft_wrap=True)


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
            found = summary[split]
            each = ", ".join(f"{value:.2f}" for value in found["values"])
            spread = f" ± {found['sd']:.2f}" if "sd" in found else ""
            stdout().print(
                f"{split}: {found['mean']:.2f}{spread} % on {found['n']:,} images, "
                f"mean ± standard deviation of {len(found['values'])} seeds ({each})",
                soft_wrap=True,
            )


def _train_queue(
    recipes: list[str],
    overrides: list[str],
    out: Path | None,
    data: Path | None,
    cpu: bool,
    parallel: int | None,
    minutes: float | None,
    state: Path | None,
    dry_run: bool,
) -> None:
    from ..recipes.training.queue import queue_state, read_queue, train_queue

    if not dry_run:
        train_queue(out, data, cpu, parallel, minutes, recipes, overrides, state=state)
    items = [item for item in read_queue() if not recipes or item.tag in recipes]
    table = Table("run", "epochs", "test, %", "aim, %", "in the zoo, %", "paper, %", box=None, pad_edge=False)
    for run in queue_state(items, out):

        def shown(value: float | None) -> str:
            return "–" if value is None else f"{value:.2f}"

        name = run.item.tag if run.item.seeds == (0,) else f"{run.item.tag}, seed {run.seed}"
        table.add_row(
            name,
            f"{run.epoch}/{run.epochs}",
            shown(run.top1),
            shown(run.item.at_least),
            shown(run.bundled),
            shown(run.item.reference),
        )
    stdout().print(table)


def finetune_command(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Folder with a sub-folder of images per class, or hf:OWNER/NAME.",
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
            help="A timm backbone with a new capsule head: resnet18.a1_in1k, hf-hub:ORG/REPO, local-dir:FOLDER.",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        str,
        typer.Option(
            metavar="ROUTING",
            help=f"Routing of the head of --backbone: {', '.join(HEAD_ROUTINGS)}.",
        ),
    ] = "idpa",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder of the run (default: runs/<model>.<data>).",
            show_default=False,
            metavar="PATH",
        ),
    ] = None,
    img_size: Annotated[
        int | None,
        typer.Option(
            "--img-size",
            min=1,
            metavar="N",
            help="Side of the images, if not the weights'.",
            rich_help_panel="Settings",
        ),
    ] = None,
    freeze: Annotated[
        str,
        typer.Option(
            help="body, all (but the class capsules), or modules by name, with commas.",
            metavar="NAME",
            rich_help_panel="Settings",
        ),
    ] = "",
    layer_decay: Annotated[
        float | None,
        typer.Option(
            "--layer-decay",
            help="Learning rate's factor from layer to layer below (1: none).",
            show_default=False,
            metavar="X",
            rich_help_panel="Settings",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of epochs (default: chosen from the number of images).",
            metavar="N",
            rich_help_panel="Settings",
        ),
    ] = None,
    lr: RateOption = None,
    batch_size: BatchOption = None,
    seed: SeedOption = None,
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch", help="Start from random weights, to compare.", rich_help_panel="Settings"
        ),
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out images that cannot be read.")
    ] = False,
    tag: Annotated[
        str | None,
        typer.Option(
            help="Name of the new weights (default: the folder's).", show_default=False, metavar="NAME"
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change any setting of the recipe; repeatable.",
            rich_help_panel="Settings",
        ),
    ] = None,
    device: DeviceOption = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="The same as --device cpu.")] = False,
    accept_data: Annotated[
        bool, typer.Option("--accept-data", help="Continue a run although its images have changed.")
    ] = False,
) -> None:
    """Fine-tune a model, or a timm backbone with a capsule head, for classes of your own; resumes an interrupted run.

    A fifth of each class is held out for early stopping, unless the folder has train/ and val/; test/ is measured once.
    """
    if backbone is None:
        refuse_unused(context, ["head"], "without --backbone", "give --backbone NAME in place of MODEL")
    if from_scratch:
        refuse_unused(context, ["layer_decay"], "with --from-scratch", "leave one of them out")
    _check_training()
    from ..data.specs import source_name

    source_name(data)  # reports errors before torch is loaded
    if model is not None:
        check_model_argument(model)
    from ..recipes.finetune import finetune

    result = finetune(
        model,
        data,
        out,
        backbone=backbone,
        head=head,
        tag=tag,
        img_size=img_size,
        freeze=[part.strip() for part in freeze.split(",") if part.strip()],
        layer_decay=layer_decay,
        epochs=epochs,
        from_scratch=from_scratch,
        skip_bad=skip_bad,
        overrides=_settings(overrides, lr=lr, batch_size=batch_size, seed=seed),
        cpu=_use_cpu(device, cpu),
        accept_data=accept_data,
    )
    _print_run(result)


def _check_training() -> None:
    """Report missing dependencies of training."""
    require("training", ("accelerate", "pydantic", "yaml", "tensorboard", "matplotlib"), "train")


def publish_command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Folder of a finished run, a .safetensors file, or name.tag. Not with --all.",
            show_default=False,
        ),
    ] = None,
    repo_id: Annotated[
        str | None, typer.Argument(metavar="USER/NAME", help="The repository.", show_default=False)
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write and check everything, make no call.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Keep what was written in this new folder.",
            show_default=False,
            metavar="PATH",
        ),
    ] = None,
    everything: Annotated[
        str | None,
        typer.Option("--all", metavar="ORG", help="Publish every checkpoint of the zoo as ORG/name.tag."),
    ] = None,
    space: Annotated[
        bool,
        typer.Option(
            "--space", help="Publish a Space with `capszoo app`; RUN is one name.tag, or several with commas."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Publish a checkpoint on the Hugging Face Hub: weights, config, model card.

    `hf auth login` or HF_TOKEN says who you are. The same command resumes after a failure.
    """
    if everything is None and (run is None or repo_id is None):
        raise UsageError(
            "publish takes a RUN and a USER/NAME", "or --all ORG for every checkpoint of the zoo"
        )
    if everything is not None and run is not None:
        raise UsageError(f"--all takes every checkpoint, and {run} was given", "leave one of them out")
    if space:
        if run is None or repo_id is None:
            raise UsageError("--space takes no --all", "give the names of models, and USER/NAME")
        _publish_space(run.split(","), repo_id, private, dry_run, out, as_json)
        return
    require("publishing", ("pydantic", "yaml", "matplotlib"), "train")
    from ..recipes.publish import publish, publish_all

    def say(line: str) -> None:
        stderr().print(escape(line), soft_wrap=True)

    if everything is not None:
        results = publish_all(everything, private, dry_run, out, say)
    else:
        results = [publish(str(run), str(repo_id), private, dry_run, out, say)]
    if as_json:
        print_json(results)
        return
    table = Table("file", "bytes", "sha256", box=None, pad_edge=False)
    console = stdout()
    for result in results:
        for file in result["files"]:
            table.add_row(f"{result['repo_id']}/{file['name']}", f"{file['bytes']:,}", file["sha256"][:12])
    console.print(table)
    for result in results:
        if dry_run:
            said = f"{result['repo_id']}: checked; nothing was sent"
        else:
            state = "published" if result["changed"] else "nothing had changed"
            said = f"{result['url']}: {state}, commit {result['commit'][:12]}"
        console.print(escape(said), soft_wrap=True)


def _publish_space(
    names: list[str], repo_id: str, private: bool, dry_run: bool, out: Path | None, as_json: bool
) -> None:
    """Write a Space and, without `dry_run`, upload it."""
    import tempfile

    from ..app.space import upload_space, write_space

    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary) / "space"
        files = write_space(names, folder, repo_id.rpartition("/")[2])
        result: dict[str, Any] = {"repo_id": repo_id, "files": [file.as_posix() for file in files]}
        if not dry_run:
            result |= upload_space(folder, repo_id, private)
    if as_json:
        print_json(result)
        return
    said = f"{result['url']}: published" if "url" in result else f"{repo_id}: written; nothing was sent"
    kept = f"; kept in {out}" if out else ""
    stdout().print(escape(f"{said}, {len(files)} files{kept}"), soft_wrap=True)


def _print_run(result: dict[str, Any]) -> None:
    """Print the files that fine-tuning writes besides the weights; the run's log has printed weights and accuracy."""
    console = stdout()
    for file in ("labels", "confusion", "card"):
        if file in result:
            console.print(f"{file}: {escape(str(result[file]))}", soft_wrap=True)
