"""What a published file may say about the machine of a run: no path, and no name of a user's folder."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from timm.models import is_model

from capszoo._pretrained.catalogue import architectures, checkpoints
from capszoo.data.specs import DATASETS, PREFIXES

from ..config import BACKBONE

#: Stands for a user's folder or file.
PRIVATE = "private"

#: Title of a user's data set.
PRIVATE_SET = "a private set of images"

_BEGAN = "fine-tuned from "
_PATH = re.compile(r"/.*|~.*|\.\.?[/\\].*|[A-Za-z]:[\\/].*|\\.*", re.DOTALL)


def default_tag(name: str) -> str:
    """``imagefolder:/home/me/My Pets`` → ``my_pets``; at most 100 characters, as many as a tag may have."""
    separators, end = (r"[:/\\]", "/\\") if os.name == "nt" else ("[:/]", "/")
    last = re.split(separators, name.rstrip(end))[-1]
    return re.sub(r"[^a-z0-9]+", "_", last.lower()).strip("_")[:100].rstrip("_") or "own"


def is_private_set(name: str) -> bool:
    """True for a data set in a user's folder; False for a named one, MedMNIST, and a repository of the Hub."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    source = name.removeprefix(prefix)
    repository = (
        prefix == "hf:" and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and not Path(source).is_dir()
    )
    return bool(prefix) and not repository and prefix != "medmnist:"


def public_start(weights: str) -> str:
    """The weights that a run began with: a name of the zoo, of timm or of the Hub, else ``PRIVATE``."""
    if weights.startswith(BACKBONE):
        return BACKBONE + public_start(weights.removeprefix(BACKBONE))
    folder, _, last = weights.rpartition("/")
    # folders of the zoo's own recipes, which name no one
    ours = folder in ("", "runs") and last.removesuffix(".safetensors") in checkpoints()
    public_name = ours or weights in architectures() or is_model(weights)
    return weights if public_name or weights.startswith(("hf-hub:", "hf_hub:")) else PRIVATE


def public(value: Any, key: str = "") -> Any:
    """The same value of metadata without what names a user's folders and files.

    Args:
        value: a tree of metadata, or a part of it.
        key: its dotted key, as far as it is known.
    """
    last = key.rpartition(".")[2]
    if isinstance(value, dict):
        items = {name: public(item, str(name)) for name, item in value.items()}
        if "title" in value and is_private_set(str(value.get("name"))):
            items["title"] = PRIVATE_SET
            items |= {"source": ""} if "source" in value else {}
        return items
    if isinstance(value, (list, tuple)):
        # lines about images that cannot be read begin with their paths
        return [f"{len(value)} images"] if last == "left_out" else [public(item) for item in value]
    if not isinstance(value, str) or value in DATASETS:
        return value
    if last == "weights":
        return public_start(value)
    if last == "description" and value.startswith(_BEGAN):
        start, *fold = value.removeprefix(_BEGAN).partition(", fold ")
        return "".join((_BEGAN, public_start(start), *fold))
    if is_private_set(value):
        return f"{value.partition(':')[0]}:{PRIVATE}"
    return PRIVATE if _PATH.fullmatch(value) else value
