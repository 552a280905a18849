"""Find, verify and adapt pretrained weights.

A checkpoint of the zoo is a pair of files, ``<architecture>.<tag>.safetensors`` and ``<architecture>.<tag>.json``.
The json makes a tag exist: it states the architecture and its arguments, the input that it was trained for, the
recipe, the measured accuracy and the sha256 of the weights. It is part of the package. Weights are searched beside it,
then in ``weights-large/`` of a checkout (for those too large for a wheel), and finally on the Hub (its client's cache,
then the network).

Only safetensors files are read, and only after a check of their sha256: against the json's, or for a
repository of the Hub against the one in its ``config.json``.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from capszoo._pretrained.info import WeightsInfo, stored_file, weights_folders
from capszoo._utils.hub import is_hub_error, limit_hub_waits, refusal

from ..errors import WeightsError
from .checks import ModelConfig

T = TypeVar("T")

_logger = logging.getLogger(__name__)

#: File name of the weights in a Hub repository, a convention of timm and huggingface_hub.
HUB_FILENAME = "model.safetensors"

#: File name of the metadata there.
METADATA_FILENAME = "metadata.json"


def load_weights(info: WeightsInfo, cache_dir: str | Path | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the keys of its architecture; raises the errors of :func:`locate_weights`."""
    return info.renamed(load_safetensors(locate_weights(info, cache_dir)))


def sha256_of(path: str | Path) -> str:
    """Hex sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):  # Python 3.10 has no hashlib.file_digest
            digest.update(block)
    return digest.hexdigest()


def locate_weights(info: WeightsInfo, cache_dir: str | Path | None = None) -> Path:
    """Path of a checkpoint's weights on this machine, checked against the sha256 of its metadata.

    Raises:
        WeightsError: the file is neither bundled nor available from the Hub, or its sha256 is wrong.
    """
    filename = f"{info.file_name}.safetensors"
    path = stored_file(filename)
    if path is None:
        return download_weights(info.hub_id, cache_dir, info.sha256, local_name=filename)
    actual = sha256_of(path)
    if actual != info.sha256:
        raise WeightsError(
            f"{path}: sha256 is {actual[:12]}…, but {info.name} has {info.sha256[:12]}…: "
            "the file is damaged or not the right one; delete it and try again"
        )
    return path


def checked_pair(path: str | Path) -> tuple[Path, WeightsInfo]:
    """A weights file and its metadata, which lie side by side under one name; ``path`` may be either of them.

    Raises:
        WeightsError: one is missing, or the sha256 of the weights differs from the metadata's.
    """
    weights, metadata = Path(path).with_suffix(".safetensors"), Path(path).with_suffix(".json")
    for file in (weights, metadata):
        if not file.is_file():
            raise WeightsError(f"{file}: no such file: weights and their metadata must lie side by side")
    info = WeightsInfo.from_json(metadata)
    if sha256_of(weights) != info.sha256:
        raise WeightsError(
            f"{weights}: sha256 differs from its metadata's: the file is damaged or another one"
        )
    return weights, info


def local_weights(folder: str | Path) -> tuple[Path, str | None]:
    """``model.safetensors`` of a folder in the Hub's layout, and the sha256 that its ``config.json`` states.

    Raises:
        WeightsError: one of the files is missing, or they do not belong together.
    """
    path = Path(folder) / HUB_FILENAME
    if not path.is_file():
        raise WeightsError(
            f"{folder}: no {HUB_FILENAME} in this folder, and nothing else is loaded: timm's "
            "save_for_hf(model, folder, safe_serialization=True) writes it"
        )
    sha256 = ModelConfig.read(path.parent / "config.json").sha256
    if sha256 and sha256_of(path) != sha256:
        raise WeightsError(
            f"{path}: sha256 differs from its config.json's: the file is damaged or another one"
        )
    return path, sha256


def hub_config(repo_id: str, cache_dir: str | Path | None = None) -> ModelConfig:
    """The ``config.json`` of a Hub repository; a damaged one in the client's cache is replaced by another download.

    Raises:
        WeightsError: there is no such file on this machine or the Hub, or it is no model configuration.
    """
    from huggingface_hub import hf_hub_download

    limit_hub_waits()
    name, _, revision = repo_id.partition("@")

    def fetch(anew: bool) -> Path:
        try:
            file = hf_hub_download(
                name, "config.json", revision=revision or None, cache_dir=cache_dir, force_download=anew
            )
        except Exception as error:
            if not is_hub_error(error):
                raise
            reason, remedy = refusal(error, repo_id)
            raise WeightsError(
                f"{repo_id}: the Hub gives no such model ({reason}): {remedy}, or use local-dir:FOLDER"
            ) from error
        return Path(file)

    return read_cached(fetch(False), lambda path: ModelConfig.read(path, f"{name}: config.json"), fetch)


def read_cached(path: Path, read: Callable[[Path], T], fetch: Callable[[bool], Path]) -> T:
    """Read a file of the Hub client's cache; a damaged one is replaced by another download, once.

    Args:
        path: the file.
        read: reads it, or raises a WeightsError.
        fetch: with True, downloads it anew.
    """
    try:
        return read(path)
    except WeightsError as refused:
        try:
            path = fetch(True)
        except Exception as error:
            if not isinstance(error, WeightsError) and not is_hub_error(error):
                raise
            raise refused from None  # offline: the file stays, and what is wrong with it is the reason
    return read(path)


def sha256_tag(sha256: str) -> str:
    """Name of the Hub's tag for the commit that published the weights with this checksum."""
    return f"sha256-{sha256[:12]}"


def download_weights(
    repo_id: str,
    cache_dir: str | Path | None = None,
    sha256: str | None = None,
    *,
    local_name: str | None = None,
) -> Path:
    """Fetch the safetensors of a Hub repository (or take it from the client's cache), and verify it.

    If the newest file has another sha256, the one of the tag ``sha256_tag`` is taken: an older capszoo gets the weights
    that it knows. A damaged file is removed from the cache, so that the next call downloads it again.

    Args:
        repo_id: ``user/repository``, with ``@revision`` unless it is the newest.
        cache_dir: of the Hub's client; None uses its default.
        sha256: expected checksum; None uses the one in the repository's ``config.json``. If that is None, or with "",
            it is the one by which the client names large files.
        local_name: name that the file may also have in a folder of ``weights_folders``, for the error message.

    Raises:
        WeightsError: the file is not available, or not the expected one.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    name, _, revision = repo_id.partition("@")

    def fetch(revision: str) -> Path:
        return Path(hf_hub_download(name, HUB_FILENAME, revision=revision or None, cache_dir=cache_dir))

    try:
        path = fetch(revision)
    except Exception as e:
        if not is_hub_error(e):
            raise
        offline = isinstance(e, LocalEntryNotFoundError)
        if isinstance(e, EntryNotFoundError) and not offline:
            raise WeightsError(
                f"{name} has no {HUB_FILENAME}, and nothing else is loaded (a pickle such as pytorch_model.bin can run "
                "code): ask its owner to publish safetensors"
            ) from e
        reason, remedy = refusal(e, repo_id)
        by_hand = (
            f", or put {ENDPOINT}/{name}/resolve/main/{HUB_FILENAME} into {weights_folders()[0]} as {local_name}"
            if local_name
            else ""
        )
        raise WeightsError(
            f"no weights of {name} on this machine, and the Hub does not give {HUB_FILENAME} ({reason}): "
            f"{remedy}{by_hand}, or use weights of capszoo.list_pretrained()"
        ) from e
    expected = hub_config(repo_id, cache_dir).sha256 if sha256 is None else sha256
    actual = sha256_of(path)
    if not expected and re.fullmatch("[0-9a-f]{64}", path.resolve().name):
        expected = path.resolve().name
    if expected and actual != expected:
        try:  # newer weights have replaced them, but every publication has a tag
            tagged = fetch(sha256_tag(expected))
        except Exception as e:
            if not is_hub_error(e):
                raise
        else:
            if sha256_of(tagged) == expected:
                return tagged
        # the client names large files by their sha256; an intact one may be what another version of capszoo needs
        # (where it makes no symbolic links, as on Windows, that cannot be seen, and the file is fetched again)
        intact = path.resolve().name == actual
        for file in () if intact else (path.resolve(), path):  # the blob, and the link to it in the snapshot
            with suppress(OSError):
                file.unlink()
        why = (
            "they are not those that are expected: update capszoo, or ask the repository's owner"
            if intact
            else "damaged on its way, or another file; it has been removed from the cache, so try again"
        )
        raise WeightsError(
            f"{name}: the sha256 of {HUB_FILENAME} is {actual[:12]}…, not {expected[:12]}…: {why}"
        )
    return path


def load_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Read a safetensors file; half-precision tensors are returned as float32.

    Raises:
        WeightsError: the file is no safetensors file, is damaged, has no tensors, or has NaN or infinity in a tensor.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if Path(path).suffix != ".safetensors":
        raise WeightsError(f"{path}: weights must be a .safetensors file; nothing else is loaded")
    try:
        state = load_file(str(path))
    except (SafetensorError, OSError, ValueError) as e:
        raise WeightsError(f"{path}: not a readable safetensors file ({e})") from e
    if not state:  # timm treats an empty dictionary as missing, and would look for other weights
        raise WeightsError(f"{path}: holds no tensors: it is not the weights of a model")
    for name, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise WeightsError(f"{path}: the tensor {name} holds NaN or infinity: the weights are damaged")
    return {k: v.float() if v.dtype in (torch.float16, torch.bfloat16) else v for k, v in state.items()}
