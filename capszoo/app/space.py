"""A Hub Space with the app: ``capszoo publish --space``.

A Space is a folder: ``app.py``, a README with a header for the Hub, ``requirements.txt``, the package itself (it is
published on no index) and the weights of the chosen models. It needs only its contents and its requirements.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capszoo._utils.files import PACKAGE_FOLDER

from .._pretrained.info import stored_file
from .._utils.hub import upload
from ..checkpoint import resolve
from ..errors import CapszooError, UsageError

#: Requirements of the Space: the dependencies of the package and of the extra ``app``, as in pyproject.toml.
REQUIREMENTS = (
    "torch>=2.11",
    "torchvision",
    "timm>=1.0.26",
    "huggingface-hub>=0.30",
    "safetensors>=0.4.3",
    "numpy>=1.26",
    "pillow>=10.1",
    "pydantic>=2.7",
    "typer>=0.15.4",
    "rich>=13",
    "matplotlib>=3.8",
    "captum>=0.7",
    "scipy>=1.13",
    "onnx>=1.18",
    "onnxscript>=0.7.2",
    "onnxruntime>=1.21",
    "gradio>=6.0",
)

#: Version of Gradio installed by the Hub, with which the app was tested.
GRADIO = "6.31.0"

APP = '''"""The app of this Space: a capsule network to draw for."""

from capszoo.app.page import run

run({names!r}, host="0.0.0.0", port=7860)
'''

README = """---
title: {title}
emoji: ✏️
colorFrom: blue
colorTo: red
sdk: gradio
sdk_version: {gradio}
app_file: app.py
pinned: false
license: apache-2.0
---

# {title}

Draw a digit and see what a capsule network makes of it: classes, the share of each position in the predicted class, and
what its decoder draws from the winning capsule. Models: {models}.

To run it elsewhere: `pip install -r requirements.txt && python app.py`.
"""

#: Parts of the package that the app does not use.
LEFT_OUT = ("recipes", "cli", "weights")


def write_space(names: Sequence[str], folder: str | Path, title: str = "Capsule networks") -> list[Path]:
    """Write a Space into a folder.

    Args:
        names: checkpoints of the zoo, as ``name`` or ``name.tag``; the first one is shown first.
        folder: a new or empty folder.
        title: title of the Space.

    Returns:
        The files, relative to the folder.

    Raises:
        UsageError: no models, or a folder that is not empty.
        CapszooError: a model that is no checkpoint of the zoo.
    """
    folder = Path(folder)
    if not names:
        raise UsageError("a Space needs a model", "name a checkpoint: `capszoo list --pretrained`")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", "name another folder")
    weights = {name: file for model in names for name, file in _weights_of(model).items()}
    tags = [name.removesuffix(".safetensors") for name in weights if name.endswith(".safetensors")]
    package = folder / "capszoo"
    _copy_package(package)
    (package / "weights").mkdir()
    for name, file in weights.items():
        shutil.copyfile(file, package / "weights" / name)
    (folder / "app.py").write_text(APP.format(names=tuple(tags)), encoding="utf-8")
    (folder / "requirements.txt").write_text("\n".join(REQUIREMENTS) + "\n", encoding="utf-8")
    listed = ", ".join(f"`{tag}`" for tag in tags)
    readme = README.format(title=title, gradio=GRADIO, models=listed)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def upload_space(
    folder: str | Path, repo_id: str, private: bool = False, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Upload a folder from :func:`write_space` to the Hub, as one commit.

    Args:
        folder: folder of the Space.
        repo_id: ``USER/NAME``; created if it does not exist.
        private: a new Space is private; one that exists and is public is refused.
        say: called with a line before each pause that the Hub asks for.

    Returns:
        ``url``, ``commit`` and ``changed``.

    Raises:
        CapszooError: the Hub refused it; the same command can be repeated.
    """
    options: dict[str, Any] = dict(repo_type="space", owned=("capszoo/*",), space_sdk="gradio")
    return upload(folder, repo_id, "capszoo app", private, say, **options)


def _weights_of(name: str) -> dict[str, Path]:
    """The files of a checkpoint of the zoo, by their names in the Space; weights may come from the Hub's cache."""
    checkpoint = resolve(name)
    if checkpoint.kind != "name" or checkpoint.info is None:
        raise CapszooError(f"{name} is no checkpoint of the zoo", "choose one of `capszoo list --pretrained`")
    stem = checkpoint.info.file_name
    files = {f"{stem}.safetensors": checkpoint.weights()}
    for suffix in ("json", "golden.npz"):
        stored = stored_file(f"{stem}.{suffix}")
        if stored is not None:
            files[stored.name] = stored
    return files


def _copy_package(package: Path) -> None:
    """Copy the installed package ``capszoo``, from an installation or a checkout, without ``LEFT_OUT``."""
    from .. import export

    junk = shutil.ignore_patterns("__pycache__", "*.pyc")
    here = PACKAGE_FOLDER
    skip = {here / part for part in LEFT_OUT}

    def ignored(folder: str, entries: list[str]) -> set[str]:
        left_out = {entry for entry in entries if Path(folder, entry) in skip}
        return left_out | set(junk(folder, entries))

    shutil.copytree(here, package, ignore=ignored)
    if not (package / "export").is_dir():  # a checkout has it beside the package
        shutil.copytree(Path(str(export.__file__)).parent, package / "export", ignore=junk)
