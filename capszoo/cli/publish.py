"""``capszoo publish``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError, require
from .common import JsonOption, note, print_json, print_table, say


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
        typer.Option("--out", "-o", help="Keep what was written in this new folder.", metavar="PATH"),
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

    Authenticate with `hf auth login` or HF_TOKEN. The same command resumes after a failure.
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
        names = [name.strip() for name in run.split(",")]
        if "" in names:
            raise UsageError("RUN has an empty name", "give names, with commas between them")
        _publish_space(names, repo_id, private, dry_run, out, as_json)
        return
    require("publishing", ("pydantic", "yaml", "matplotlib"), "train")
    from ..recipes.publish import publish, publish_all

    if everything is not None:
        results = publish_all(everything, private, dry_run, out, _say)
    else:
        results = [publish(str(run), str(repo_id), private, dry_run, out, _say)]
    if as_json:
        print_json(results)
        return
    rows = (
        (f"{result['repo_id']}/{file['name']}", f"{file['bytes']:,}", file["sha256"][:12])
        for result in results
        for file in result["files"]
    )
    print_table(("file", "bytes", "sha256"), rows)
    for result in results:
        if dry_run:
            message = f"{result['repo_id']}: checked; nothing was sent"
        else:
            state = "published" if result["changed"] else "nothing had changed"
            message = f"{result['url']}: {state}, commit {result['commit'][:12]}"
        say(message)


_say = partial(note, label="")


def _publish_space(
    names: list[str], repo_id: str, private: bool, dry_run: bool, out: Path | None, as_json: bool
) -> None:
    """Write a Space and, without ``dry_run``, upload it."""
    import tempfile

    from .._utils.files import workplace
    from .._utils.hub import check_repo_id
    from ..app.space import upload_space, write_space

    check_repo_id(repo_id)
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already", "name another folder, or remove it")
    out = out and out.absolute()  # a temporary folder is made beside it, and it may be "."
    with (
        tempfile.TemporaryDirectory() as temporary,
        workplace(out or Path(temporary) / "space", folder=True) as folder,
    ):
        files = write_space(names, folder, repo_id.rpartition("/")[2])
        result: dict[str, Any] = {
            "repo_id": repo_id,
            "files": [file.as_posix() for file in files],
            "url": None,
        }
        if not dry_run:
            result |= upload_space(folder, repo_id, private, _say)
        if out is not None:  # after the upload: the same command can be given again after a failure
            out.mkdir(exist_ok=True)
            for child in folder.iterdir():
                child.rename(out / child.name)
    if as_json:
        print_json(result)
        return
    message = f"{result['url']}: published" if result["url"] else f"{repo_id}: written; nothing was sent"
    kept = f"; kept in {out}" if out else ""
    say(f"{message}, {len(files)} files{kept}")
