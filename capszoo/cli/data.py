"""``capszoo data``: the named data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from .._utils.devices import check_device
from ..errors import UsageError
from .common import DataFolderOption, JsonOption, print_json, refuse_unused, stdout
from .group import Command

__all__ = ["data_app"]

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
    table = Table(Column("data set", no_wrap=True), "input", "images", "what it is", box=None, pad_edge=False)
    for row in rows:
        built = "built by `capszoo data h-imagenet`" if row["name"] == "h_imagenet" else row["splits"]
        table.add_row(escape(row["name"]), row["input"], built, escape(row["title"]))
    stdout().print(table)


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

    stdout().print(escape(fetch_set(name, to)), soft_wrap=True)


def check_set_command(
    name: NameArgument,
    data: DataFolderOption = None,
) -> None:
    """Read every image of a data set; print counts, sizes and a fingerprint for each split."""
    from ..data.commands import check_set

    for line in check_set(name, data):
        stdout().print(escape(line), soft_wrap=True)


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
        stdout().print(escape(line), soft_wrap=True)


data_app.command("list", cls=Command)(list_sets_command)
data_app.command("fetch", cls=Command)(fetch_command)
data_app.command("check", cls=Command)(check_set_command)
data_app.command("h-imagenet", cls=Command)(h_imagenet_command)
