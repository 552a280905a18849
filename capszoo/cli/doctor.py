"""``capszoo doctor``: installed packages, hardware, and data folders of this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from typing import Any

from rich.text import Text

from .. import __version__
from .._utils.choices import EXTRAS
from .._utils.files import expanded
from ..errors import CapszooError
from .common import JsonOption, print_facts, print_json, print_table, say

LIBRARIES = ("torch", "torchvision", "timm", "huggingface-hub", "safetensors", "numpy", "pillow", "pydantic")


def doctor_command(as_json: JsonOption = False) -> None:
    """Show versions, devices, extras and data folders: what to state in a bug report."""
    missing = {
        name: [module for module in modules if importlib.util.find_spec(module) is None]
        for name, (modules, _) in EXTRAS.items()
    }
    about: dict[str, Any] = {
        "capszoo": __version__,
        "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "libraries": {name: _version(name) for name in LIBRARIES},
        "devices": _devices(),
        "extras": missing,
        "data": _data_folders(),
        "cache": _cache(),
    }
    if as_json:
        print_json(about)
        return
    absent = Text("not installed", "red")
    libraries = ((name, version or absent) for name, version in about["libraries"].items())
    first, last = ("capszoo", __version__), ("cache of predict --runtime onnx", about["cache"])
    print_facts((first, ("Python", about["python"]), *libraries, *about["devices"].items(), last))
    say()
    states = {
        name: Text(f"missing: {', '.join(without)}", "yellow") if without else Text("installed", "green")
        for name, without in missing.items()
    }
    rows = ((name, states[name], commands) for name, (_, commands) in EXTRAS.items())
    print_table(("extra", "state", "needed by"), rows)
    say()
    if not about["data"]:
        say("data: CAPSZOO_DATA names no folder; `capszoo data fetch NAME --to FOLDER` downloads a set")
    for folder, sets in about["data"].items():
        held = ", ".join(sets or ()) or "no known data set"
        say(f"data: {folder}: {held if sets is not None else 'no such folder'}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, str]:
    import torch

    threads = f"{torch.get_num_threads()} threads"
    devices = {"CPU": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {threads}"}
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        devices[f"cuda:{number}"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        devices["CUDA"] = "none" if torch.version.cuda else "none (this PyTorch is built without it)"
    if torch.backends.mps.is_available():
        devices["MPS"] = "available"
    return devices


def _data_folders() -> dict[str, Any]:
    """Folders of ``CAPSZOO_DATA`` and the named data sets whose sub-folders they contain; None for a missing folder."""
    from ..data import DATASETS

    folders: dict[str, Any] = {}
    for place in filter(None, os.environ.get("CAPSZOO_DATA", "").split(os.pathsep)):
        root = expanded(place)
        if not root.is_dir():
            folders[place] = None
            continue
        here = {
            spec.base or name
            for name, spec in DATASETS.items()
            if any((root / folder).is_dir() for folder in spec.folders if folder)
        }
        folders[place] = sorted(here)
    return folders


def _cache() -> str:
    from .._utils.files import cache_folder

    try:
        return str(cache_folder())
    except CapszooError as error:
        return f"none: {error}"
