"""Resolve a MODEL argument, for all of ``capszoo predict``, ``eval``, ``finetune``, ``publish``, ``export``.

>>> from capszoo.checkpoint import resolve
>>> checkpoint = resolve("resnet20_routingcaps.mnist")
>>> checkpoint.metadata().metrics["test"].top1 > 99
True
>>> model = checkpoint.create()

A MODEL is, in this order:

1. a name of the zoo, ``idpa_resnet`` or with a tag ``idpa_resnet.cifar10`` (a folder of the same name is ``./NAME``),
2. ``hf-hub:USER/NAME``,
3. a folder with a ``config.json`` (the layout of timm and the Hub), with or without ``local-dir:``,
4. the folder of a finished training run,
5. a ``.safetensors`` file, or the ``.json`` file of its metadata, which lie side by side,
6. a ``.onnx`` file or the folder of a bundle, as ``capszoo export`` wrote it (to predict, evaluate, time and serve),
7. any other name that timm knows (in Python; the command line refuses it).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ._pretrained.catalogue import check_path, checkpoints, exported_file, pickled_remedy, without_weights
from ._pretrained.checks import ModelConfig
from ._pretrained.exported import OnnxModel
from ._pretrained.files import (
    METADATA_FILENAME,
    checked_pair,
    hub_config,
    locate_weights,
    read_cached,
)
from ._pretrained.info import WeightsInfo, default_weights, run_weights
from ._utils.devices import resolve_device
from ._utils.hub import is_hub_error, refusal
from .errors import CapszooError, UsageError, WeightsError
from .models._builder import create_described
from .models._factory import create_model, list_models, list_pretrained

if TYPE_CHECKING:
    from .metadata import Metadata

__all__ = [
    "Checkpoint",
    "NoWeights",
    "checkpoint_of",
    "model_from_file",
    "resolve",
    "run_weights",
    "load_model",
]


class NoWeights(CapszooError):
    """An architecture of the zoo without pretrained weights, or without trained ones for the requested image size."""


@contextmanager
def refused_arguments(name: str, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Raise a network's complaint about the arguments that a user gave as a ``UsageError``."""
    try:
        yield
    except CapszooError:
        raise
    except (TypeError, ValueError) as error:
        if not kwargs:
            raise
        reason = " ".join(str(error).split())[:300].removeprefix(f"{name}: ")
        remedy = "" if "leave " in reason else f"change or leave out {', '.join(kwargs)}"
        raise UsageError(f"{name}: {reason}", remedy) from error


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that a MODEL argument names.

    Attributes:
        argument: the MODEL argument.
        kind: ``name`` (of the zoo or of timm), ``hub``, ``folder`` (with a ``config.json``), ``file`` or ``exported``.
        path: the folder, or the file of the weights, or the exported ``.onnx`` file.
        info: the metadata file of a checkpoint of the zoo or of a file; None for the other kinds, and for a name
            without weights.
    """

    argument: str
    kind: Literal["name", "hub", "folder", "file", "exported"]
    path: Path | None = None
    info: WeightsInfo | None = None

    def create(
        self, pretrained: bool = True, device: str | torch.device | None = None, **kwargs: Any
    ) -> nn.Module:
        """Create the model, in eval mode.

        Args:
            pretrained: load the weights; False gives freshly initialised ones.
            device: None selects CUDA if available.
            **kwargs: as for :func:`capszoo.create_model`.

        Raises:
            UnknownModel: no such name.
            UsageError: arguments that the model refuses.
            NoWeights: an architecture without weights.
            CapszooError: the Hub has no such model.
            WeightsError: weights that are damaged or do not fit.
        """
        create = {
            "name": self._named,
            "hub": self._from_hub,
            "folder": self._from_folder,
            "file": self._from_file,
            "exported": self._exported,
        }
        with refused_arguments(self.argument, kwargs):
            net = create[self.kind](pretrained, kwargs)
        return net.eval().to(resolve_device(device))

    @property
    def exported(self) -> bool:
        """Whether it is a graph in a file, without parameters."""
        return self.kind == "exported"

    def metadata(self) -> Metadata:
        """The checkpoint's metadata; sparse if it has no metadata file.

        Raises:
            CapszooError: a value of the wrong type.
        """
        from .metadata import Metadata

        if self.info is not None:
            return self.info.metadata
        if self.exported:
            same = self.same_in_zoo()
            return same.metadata if same else Metadata()
        if self.kind == "name":
            return Metadata()
        if self.path is None:
            return Metadata.read(_hub_metadata(self.argument.removeprefix("hf-hub:")), self.argument)
        return Metadata.read(_folder_metadata(self.path), self.argument)

    def weights(self) -> Path:
        """The weights file on this machine, downloaded if necessary; its sha256 equals that of the metadata.

        Raises:
            WeightsError: the file is not available, or damaged.
        """
        if self.info is None:
            raise WeightsError(f"{self.argument}: no checkpoint of the zoo and no weights file")
        return locate_weights(self.info) if self.path is None else checked_pair(self.path)[0]

    def same_in_zoo(self) -> WeightsInfo | None:
        """The zoo's checkpoint with the same weights as a folder or repository, by the sha256 that it states.

        For a repository, available once its ``config.json`` has been downloaded.
        """
        if self.kind not in ("hub", "folder", "exported"):
            return self.info
        sha256 = self.stated_sha256()
        return next((info for info in checkpoints(aliases=False).values() if info.sha256 == sha256), None)

    def stated_sha256(self) -> str | None:
        """The sha256 of the weights that the metadata or the ``config.json`` states; None if it states none."""
        if self.exported and self.path is not None:
            return OnnxModel(self.path).stated.get("weights_sha256") or None
        if self.kind == "hub":
            return hub_config(self.argument.removeprefix("hf-hub:")).sha256
        if self.kind == "folder" and self.path is not None:
            return ModelConfig.read(self.path / "config.json").sha256
        return self.info.sha256 if self.info is not None else None

    def _named(self, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
        name = self.argument
        ours = name in list_models()
        if pretrained and ours and not list_pretrained(f"{name}.*"):
            raise NoWeights(*without_weights(name))
        if ours or self.info is not None:
            return create_model(name, pretrained=pretrained, **kwargs)
        return self._from_hub(pretrained, kwargs)  # timm downloads its weights from there

    def _from_hub(self, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
        name = self.argument
        try:
            return create_model(name, pretrained=pretrained, **kwargs)
        except Exception as e:
            if isinstance(e, CapszooError) or not is_hub_error(e):
                raise
            reason, remedy = refusal(e, name)
            raise CapszooError(f"{name}: the Hub gives no such model ({reason})", remedy) from e

    def _from_folder(self, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
        return create_model(f"local-dir:{self.path}", pretrained=pretrained, **kwargs)

    def _exported(self, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
        assert self.path is not None
        if not pretrained:
            raise CapszooError(
                f"{self.argument} is an exported file, which has no weights to load",
                "give the model that it was made from",
            )
        if kwargs:
            raise UsageError(
                f"{self.argument} is an exported file, whose settings are fixed",
                f"leave {', '.join(kwargs)} out",
            )
        return OnnxModel(self.path)

    def _from_file(self, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
        assert self.path is not None
        weights, info = checked_pair(self.path)
        model = create_described(info.config, str(weights), weights if pretrained else None, **kwargs)
        cfg: Any = model.pretrained_cfg
        cfg["file"] = str(weights)  # the source; set only now, because timm would read it
        return model


def resolve(model: str | Path) -> Checkpoint:
    """Resolve a MODEL argument; loads only metadata.

    Args:
        model: see the list in the module docstring.

    Raises:
        CapszooError: no such folder or file, or a folder without a finished run.
        WeightsError: a weights file without its metadata, or metadata that lack a key.
    """
    argument = str(model)
    if argument in checkpoints():
        return Checkpoint(argument, "name", info=checkpoints()[argument])
    if argument in list_models():
        return Checkpoint(argument, "name", info=default_weights(checkpoints(), argument))
    if argument.startswith("hf_hub:"):  # timm takes both
        argument = argument.replace("hf_hub:", "hf-hub:", 1)
    if argument.startswith("hf-hub:"):
        return Checkpoint(argument, "hub")
    exported = exported_file(argument)
    if exported is not None:
        return Checkpoint(argument, "exported", exported)
    path = Path(argument.removeprefix("local-dir:"))
    check_path(argument)
    if os.path.isdir(path):  # False for a name that is too long for a file
        if (path / "config.json").is_file():
            return Checkpoint(argument, "folder", path)
        path = run_weights(path)
    if path.suffix in (".safetensors", ".json"):
        weights, metadata = path.with_suffix(".safetensors"), path.with_suffix(".json")
        if not weights.is_file():
            raise WeightsError(f"{weights}: no such file: weights and their metadata must lie side by side")
        if not metadata.is_file():
            raise WeightsError(f"{metadata}: no such metadata beside the weights: {pickled_remedy(weights)}")
        return Checkpoint(argument, "file", weights, WeightsInfo.from_json(metadata))
    return Checkpoint(argument, "name")


def checkpoint_of(model: nn.Module) -> Checkpoint | None:
    """The checkpoint that a model was created from, by its ``pretrained_cfg``; None if that names none.

    The weights in memory may have changed since.
    """
    cfg: Any = getattr(model, "pretrained_cfg", None) or {}
    file = Path(cfg["file"]) if cfg.get("file") else None
    if file is not None and file.with_suffix(".json").is_file():
        return resolve(file)
    name = f"{cfg.get('architecture')}.{cfg.get('tag')}"
    return resolve(name) if name in checkpoints() else None


def _folder_metadata(folder: Path) -> dict[str, Any]:
    """The metadata file of a folder in the Hub's layout, else the model's arguments of its ``config.json``."""
    if (folder / METADATA_FILENAME).is_file():
        return WeightsInfo.from_json(folder / METADATA_FILENAME).raw
    return {"model_args": ModelConfig.read(folder / "config.json").model_args}


def _hub_metadata(repo_id: str) -> dict[str, Any]:
    """Metadata of a repository whose model has been loaded; only ``model_args`` if it has no such file.

    A damaged file in the client's cache is replaced by another download.

    Raises:
        WeightsError: the file is not on this machine, and the Hub cannot be asked for it.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    name, _, revision = repo_id.partition("@")

    def fetch(anew: bool) -> Path:
        return Path(hf_hub_download(name, METADATA_FILENAME, revision=revision or None, force_download=anew))

    try:
        path = fetch(False)
    except Exception as error:
        if not is_hub_error(error):
            raise
        absent = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        cached = try_to_load_from_cache(name, METADATA_FILENAME, revision=revision or None)
        if absent or cached is not None:  # it is not there, now or at the last call with a connection
            return {"model_args": hub_config(repo_id).model_args}
        raise WeightsError(
            f"{name}: {METADATA_FILENAME}, which states how the weights were trained, is not on this machine: "
            "run the command once with a connection"
        ) from error
    return read_cached(path, lambda file: WeightsInfo.from_json(file).raw, fetch)


def model_from_file(path: str | Path) -> tuple[nn.Module, WeightsInfo]:
    """A trained model on the CPU, from ``<arch>.<tag>.safetensors`` or its ``.json``; and its metadata.

    Raises:
        WeightsError: one of the two is missing, or the sha256 differs from the metadata's.
    """
    checkpoint = resolve(Path(path).with_suffix(".safetensors"))
    assert checkpoint.info is not None
    return checkpoint.create(device="cpu"), checkpoint.info


def load_model(
    name: str, pretrained: bool = True, device: str | torch.device | None = None, **kwargs: Any
) -> nn.Module:
    """A model in eval mode, from any MODEL that :mod:`capszoo.checkpoint` accepts.

    Args:
        name: registered name, ``name.tag``, ``hf-hub:USER/NAME``, the folder of a finished training run, a folder with
            a ``config.json`` (timm's and the Hub's layout), or a ``.safetensors`` file beside its metadata.
        pretrained: load weights; False gives freshly initialised ones.
        device: device of the model: ``cpu``, ``cuda``, ``mps``; None or ``auto`` selects CUDA if available, else the
            CPU.
        **kwargs: as for :func:`capszoo.create_model`.

    Raises:
        UnknownModel: no such name.
        NoWeights: an architecture without weights, or without trained ones for this ``img_size``.
        CapszooError: there is nothing that can be loaded.
        WeightsError: the weights are damaged or do not fit.

    Examples:
        >>> net = load_model("resnet20_routingcaps.mnist", device="cpu")
        >>> net.training, net.num_classes
        (False, 10)
    """
    net = resolve(name).create(pretrained, device, **kwargs)
    untrained = getattr(net, "untrained", ())
    num_classes = (getattr(net, "pretrained_cfg", None) or {}).get("num_classes")
    # for other classes it is to be trained anyway
    if untrained and kwargs.get("num_classes", num_classes) == num_classes:
        rows, columns = net.img_size  # type: ignore[misc]
        raise NoWeights(
            f"{name} has no trained weights for {rows}x{columns} images: {untrained[0]} depends on the size",
            "leave the size out, or fine-tune the model at this size",
        )
    return net
