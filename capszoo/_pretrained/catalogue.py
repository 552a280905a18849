"""The zoo's models and checkpoints as plain data, for listings, completion and name checks without torch.

``catalogue.json`` describes each architecture; ``make docs`` writes it from timm's registry, and a test
compares the two. Checkpoints are read from their metadata files.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import re
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

from .._utils.files import PACKAGE_FOLDER
from ..errors import CapszooError, UnknownModel, unknown_name
from .info import WeightsInfo, default_weights, read_metadata, stored_file, with_aliases

#: Checkpoints of related networks that a message names.
MOST_RELATED = 2

#: The generated file.
CATALOGUE = PACKAGE_FOLDER / "catalogue.json"

#: Suffixes of files that torch.save writes, or other libraries of its kind.
PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".pkl")

#: Commands that take an exported file or bundle where they take a model.
EXPORTED_IN = ("predict", "eval", "benchmark", "check", "serve")


@lru_cache(maxsize=1)
def _entries() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(CATALOGUE.read_text(encoding="utf-8"))["models"]}


def architectures() -> dict[str, dict[str, Any]]:
    """Every architecture by its name: the output of ``capszoo info --json``, except for its weights."""
    return {name: entry for name, entry in _entries().items() if "." not in name}


@lru_cache(maxsize=2)
def checkpoints(aliases: bool = True) -> dict[str, WeightsInfo]:
    """Every checkpoint of the zoo by its name ``<architecture>.<tag>``, in alphabetical order.

    Args:
        aliases: by each of its names, those of ``capszoo._pretrained.info.ALIASES`` included; else by the name of its
            file alone.
    """
    if aliases:
        return with_aliases(checkpoints(aliases=False))
    stored = {
        name: entry["checkpoint"]["sha256"] for name, entry in _entries().items() if "checkpoint" in entry
    }
    return read_metadata(stored)


@lru_cache(maxsize=1)
def recipes() -> dict[str, str]:
    """Data set of each recipe, by the recipe's name ``<architecture>.<tag>``."""
    return dict(json.loads(CATALOGUE.read_text(encoding="utf-8"))["recipes"])


def related_weights(architecture: str) -> list[str]:
    """Checkpoints of the networks whose names share the most words with an architecture's from the start."""

    def words(name: str) -> list[str]:
        return [word.rstrip("0123456789") for word in name.partition(".")[0].split("_")]

    def shared(name: str) -> int:
        pairs = zip(words(architecture), words(name), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    ranks = {name: shared(name) for name in checkpoints()}
    most = max(ranks.values(), default=0)
    return [name for name, rank in ranks.items() if rank == most and most]


def without_weights(architecture: str) -> tuple[str, str]:
    """What is wrong with asking for the weights of an architecture that has none, and what to do.

    Names the recipes that train it, their data sets, and the checkpoints of related networks.
    """
    trained_by = [(name, data) for name, data in recipes().items() if name.startswith(f"{architecture}.")]
    remedies = []
    if trained_by:
        others = "".join(f" or {name.removeprefix(architecture)} on {data}" for name, data in trained_by[1:])
        remedies.append(f"`capszoo train {trained_by[0][0]}` on the data {trained_by[0][1]}{others}")
    if related := related_weights(architecture):
        remedies.append(f"related weights such as {', '.join(related[:MOST_RELATED])}")
    remedies.append("pretrained=False")
    message = f"no pretrained weights exist for {architecture}, as nobody has trained it yet"
    return message, f"use {', or '.join(remedies)}"


def unknown_tag(architecture: str, tag: str) -> str:
    """The message for a tag that an architecture does not have."""
    tags = [name_of_tag for name_of_tag in checkpoints() if name_of_tag.startswith(f"{architecture}.")]
    if tags:
        return f"no weights '{tag}' for {architecture}: it has {', '.join(tags)}"
    return f"no weights '{tag}' for {architecture}: it has none yet, {without_weights(architecture)[1]}"


def shell_pattern(word: str) -> str:
    """A filter as a shell pattern: a word without wildcards matches anywhere in a name."""
    return word if any(c in word for c in "*?[") else f"*{word}*"


def is_path(name: str) -> bool:
    """Whether a MODEL argument can only be a path: it has a separator of folders, or begins with ``local-dir:``."""
    return "/" in name or os.sep in name or name.startswith("local-dir:")


def path_remedy(name: str) -> str:
    """What to do about a path that does not exist: it may be meant as a repository of the Hub."""
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return f"check the path, or write hf-hub:{name} for a repository of the Hub"
    return "check the path"


def exported_file(name: str) -> Path | None:
    """The ONNX file that a MODEL argument names: a ``.onnx`` file, or that of a bundle's folder; None for others."""
    path = Path(name.removeprefix("local-dir:"))
    # os.path's functions take a name that is too long for a file as one that does not exist
    if path.suffix.lower() == ".onnx" and os.path.isfile(path):
        return path
    inside = path / "model.onnx"
    return inside if os.path.isfile(inside) and os.path.isfile(path / "manifest.json") else None


def check_not_exported(name: str) -> None:
    """Raise ``CapszooError`` for an exported file, where only the network itself will do."""
    if exported_file(name) is not None:
        raise CapszooError(
            f"{name} is an exported file, which only {', '.join(EXPORTED_IN)} take",
            "give the model that it was made from",
        )


def pickled_remedy(path: Path) -> str:
    """How a user turns weights of their own, without metadata, into a folder that is a MODEL.

    Lines of Python that a test runs.
    """
    return (
        f"in Python `net = capszoo.create_model(NAME, checkpoint_path={str(path)!r})`, with num_classes and img_size "
        "as in its training, and `timm.models.save_for_hf(net, FOLDER, safe_serialization=True)`; FOLDER is a MODEL"
    )


def check_path(name: str) -> None:
    """Raise ``CapszooError`` if a MODEL argument is a path or an address at which there is no model.

    A file of pickled weights is refused, because unpickling can run code.
    """
    if re.match(r"https?:/", name):
        hub = re.fullmatch(r"https?://?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/?", name)
        raise CapszooError(
            f"{name} is an address",
            f"write hf-hub:{hub[1]}" if hub else "download the file, and name its path",
        )
    path = Path(name.removeprefix("local-dir:"))
    if path.suffix in PICKLES and os.path.isfile(path):
        raise CapszooError(f"{path} is a pickle, and loading one can run code", pickled_remedy(path))
    if os.path.isdir(path) or path.suffix in (".safetensors", ".json") or exported_file(name) is not None:
        return
    if os.path.isfile(path):
        raise CapszooError(f"{path} is no model", "give a folder, a .safetensors or a .onnx file, or a name")
    if is_path(name) or path.suffix in (*PICKLES, ".onnx"):
        raise CapszooError(f"{path}: no such folder or file", path_remedy(name))


def check_model_argument(name: str, exported: bool = False) -> None:
    """Raise an error if a MODEL argument cannot refer to a model, before anything is loaded.

    Args:
        name: a name, ``name.tag``, ``hf-hub:…``, ``local-dir:…``, a folder or a file.
        exported: whether an exported file or bundle is taken, too.

    Raises:
        UnknownModel: neither a model of the zoo nor something on disk.
        CapszooError: a path that does not exist, or a file that is not taken.
    """
    path = Path(name.removeprefix("local-dir:"))
    if not exported:
        check_not_exported(name)
    if name.startswith(("hf-hub:", "hf_hub:")):
        return
    if name not in checkpoints() and name not in architectures():
        check_path(name)
    if os.path.isdir(path) or path.suffix in (".safetensors", ".json") or exported_file(name) is not None:
        return
    check_name(name)


def check_name(name: str, names: Collection[str] | None = None) -> None:
    """Raise ``UnknownModel`` unless a name, with or without a tag, is a model of the zoo.

    Args:
        name: the name.
        names: names of the architectures; None for those of the generated file.
    """
    names = architectures() if names is None else names
    architecture, dot, tag = name.partition(".")
    if name in checkpoints():  # also of an architecture that is timm's own
        return
    if architecture not in names:
        raise UnknownModel(unknown_name("model", name, [*names, *checkpoints()]))
    if dot:
        raise UnknownModel(unknown_tag(architecture, tag))


def list_rows(filter: str = "", pretrained: bool = False) -> list[dict[str, Any]]:
    """One row for each architecture, or for each checkpoint, sorted by name.

    Args:
        filter: part of a name or of a tag, or a shell pattern, in any case.
        pretrained: list checkpoints instead of architectures.
    """
    pattern = re.compile(fnmatch.translate(shell_pattern(filter)), re.IGNORECASE)
    if pretrained:
        return [weights_entry(info) for name, info in checkpoints().items() if pattern.match(name)]
    rows = []
    for name, entry in architectures().items():
        weights = [weights_entry(info) for info in checkpoints().values() if info.architecture == name]
        weights.sort(key=lambda row: not row["default"])  # the default first
        if not any(map(pattern.match, (name, *(row["name"] for row in weights)))):
            continue
        rows.append(
            {
                "name": name,
                "description": plain(entry["description"]),
                "parameters": entry["parameters"],
                "input_size": entry["input_size"],
                "paper_ids": entry["paper_ids"],
                "default_tag": weights[0]["name"].partition(".")[2] if weights else None,
                "tags": [row["name"].partition(".")[2] for row in weights],
                "weights": [
                    {key: row[key] for key in ("name", "dataset", "top1", "score_kind")} for row in weights
                ],
            }
        )
    return rows


def describe(name: str) -> dict[str, Any] | None:
    """The output of ``capszoo info --json`` for an architecture in its default configuration, or for a checkpoint.

    None for anything missing from the generated file: folders, files, repositories, checkpoints added since.

    Raises:
        UnknownModel: no such name.
    """
    check_model_argument(name)
    entry = _entries().get(name)
    if entry is None:
        return None
    architecture, _, tag = name.partition(".")
    weights = [
        info for info in checkpoints().values() if info.architecture == architecture and tag in ("", info.tag)
    ]
    entry = {key: value for key, value in entry.items() if key != "checkpoint"}
    return {**entry, "weights": [weights_entry(info) for info in weights]}


def weights_entry(info: WeightsInfo) -> dict[str, Any]:
    """A checkpoint in the output of ``capszoo list`` and ``info``, in plain types for JSON.

    That of the generated file, if it has the checkpoint, else from the metadata, for which pydantic is loaded.
    """
    stored = _entries().get(info.name, {}).get("checkpoint", {})
    return {
        **(stored if stored.get("sha256") == info.sha256 else stated(info)),
        "installed": stored_file(f"{info.file_name}.safetensors") is not None,
        "default": default_weights(checkpoints(), info.architecture) == info,
    }


def stated(info: WeightsInfo) -> dict[str, Any]:
    """What a checkpoint's metadata state, for :func:`weights_entry` and for the generated file."""
    record = info.metadata
    metrics = {
        split: result.model_dump(mode="json", exclude_unset=True) for split, result in record.metrics.items()
    }
    text = info.description or architectures().get(info.architecture, {}).get("description", "")
    return {
        "name": info.name,
        "stored_as": info.file_name,
        "description": plain(text),
        "license": info.license,
        "parameters": record.num_params,
        "input_size": list(info.input_size),
        "num_classes": info.num_classes,
        "dataset": record.dataset.name or None,
        "metrics": metrics,
        "top1": metrics.get("test", {}).get("top1"),
        "sha256": info.sha256,
        "score_kind": info.score_kind,
    }


def plain(text: str) -> str:
    """A line of a docstring without its markup."""
    return text.replace("``", "")


#: Address of a paper by the kind of its identifier.
PAPER_LINKS = {
    "arXiv": "https://arxiv.org/abs/{}",
    "doi": "https://doi.org/{}",
    "neurips": "https://proceedings.neurips.cc/paper/{}-Abstract.html",
    "openreview": "https://openreview.net/forum?id={}",
}


def paper_address(paper_id: str) -> str:
    """The paper's address on the web; the identifier itself if its kind is unknown.

    >>> paper_address("arXiv:1710.09829")
    'https://arxiv.org/abs/1710.09829'
    """
    kind, _, identifier = paper_id.partition(":")
    return PAPER_LINKS[kind].format(identifier) if kind in PAPER_LINKS else paper_id


def paper_label(paper_id: str) -> str:
    """A short name for tables: venue and year of NeurIPS's papers, else the identifier.

    >>> paper_label("neurips:2019/hash/e46bc064f8e92ac2c404b9871b2a4ef2")
    'NeurIPS 2019'
    """
    kind, _, identifier = paper_id.partition(":")
    return f"NeurIPS {identifier.partition('/')[0]}" if kind == "neurips" else paper_id
