"""``capszoo data``: the named data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column

from .._utils.devices import check_device
from ..errors import UsageError
from .common import DataFolderOption, JsonOption, print_json, print_table, refuse_unused, say
from .group import Command

data_app = typer.Typer(help="List, download and check data sets.", no_args_is_help=True)

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Data set, such as mnist, or a folder of images.", show_default=False
    ),
]


def list_sets_command(as_json: JsonOption = False) -> None:
    """List the data sets that have a name, and the prefixes of those that a path names."""
    from ..data.specs import list_sets

    rows = list_sets()
    if as_json:
        print_json(rows)
        return
    built = {"h_imagenet": "built by `capszoo data h-imagenet`"}
    print_table(
        (Column("data set", no_wrap=True), "input", "images", "what it is"),
        ((row["name"], row["input"], built.get(row["name"], row["splits"]), row["title"]) for row in rows),
    )


def fetch_command(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Data set, medmnist:NAME or hf:OWNER/NAME.", show_default=False),
    ],
    to: Annotated[
        Path, typer.Option(metavar="PATH", help="Folder that receives the files.", show_default=False)
    ],
) -> None:
    """Download a data set's files and check them against their checksums."""
    from ..data.commands import fetch_set

    say(fetch_set(name, to))


def check_set_command(
    name: NameArgument,
    data: DataFolderOption = None,
) -> None:
    """Read every image of a data set; print counts, sizes and a fingerprint for each split."""
    from ..data.commands import check_set

    for line in check_set(name, data):
        say(line)


def h_imagenet_command(
    context: typer.Context,
    ilsvrc: Annotated[
        Path,
        typer.Argument(
            metavar="ILSVRC", help="Folder with Data/CLS-LOC and Annotations/CLS-LOC.", show_default=False
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that receives it.", show_default=False)
    ],
    accuracies: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON file: top-1 accuracy by class (n01440764: 0.84, …)."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="torchvision's ResNet-18 weights: measure the accuracies first."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda|mps", callback=check_device, help="Device for measuring the accuracies."
        ),
    ] = "cpu",
) -> None:
    """Build h-ImageNet from a copy of ILSVRC 2012."""
    if (accuracies is None) == (weights is None):
        raise UsageError(
            "h-ImageNet needs accuracies by class", "give --accuracies or --weights, one of them"
        )
    if accuracies is not None:
        refuse_unused(context, ["device"], "with --accuracies", "leave it out")
    from ..data.commands import build_h_imagenet

    for line in build_h_imagenet(ilsvrc, out, accuracies, weights, device):
        say(line)


data_app.command("list", cls=Command)(list_sets_command)
data_app.command("fetch", cls=Command)(fetch_command)
data_app.command("check", cls=Command)(check_set_command)
data_app.command("h-imagenet", cls=Command)(h_imagenet_command)
