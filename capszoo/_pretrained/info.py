"""The metadata files beside the weights (``<architecture>.<tag>.json``), read without torch.

A checkpoint exists if its metadata file does. The file states the architecture and its arguments, the input that
the weights were trained for, the recipe, the measured accuracy and the sha256 of the weights.

An architecture whose network is that of another has the other's checkpoints (:data:`ALIASES`): the same file and
metadata under a second name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .._utils.files import PACKAGE_FOLDER, read_json_object
from ..errors import CapszooError, WeightsError
from .facts import SCORE_KINDS, kind_for

if TYPE_CHECKING:
    from ..metadata import Metadata
    from .checks import ModelConfig

T = TypeVar("T")

_logger = logging.getLogger(__name__)

#: Keys that every metadata file has.
_REQUIRED = ("architecture", "tag", "sha256", "num_classes", "input_size", "mean", "std")
#: Keys of metadata whose values are objects.
_SECTIONS = ("recipe", "dataset", "metrics", "history", "versions", "per_class")

#: Namespace on the Hugging Face Hub under which every checkpoint is to be published, as ``<HUB_ORG>/<name>.<tag>``.
HUB_ORG = "capszoo"


@dataclass(frozen=True)
class Alias:
    """The architecture that an architecture shares its network with, and how to load the other's checkpoints.

    Attributes:
        architecture: the one that has the checkpoints.
        default: tag of the checkpoint that the bare name refers to.
        model_args: arguments that make the other architecture this network; checkpoints with others are not shared.
            None: the two take the same arguments.
        keys: first part of a state-dict key of the other → that of this one; the rest have equal keys.
    """

    architecture: str
    default: str
    model_args: Mapping[str, Any] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


#: Architectures without checkpoints of their own → those that they share them with.
ALIASES = {
    "resnet_routingpool": Alias("resnet20_routingpool", "cifar10"),
    "resnet20_avg": Alias("resnet20_routingpool", "cifar10_avg", {"pool": "avg"}, {"fc.": "head.classes."}),
}


@dataclass(frozen=True)
class WeightsInfo:
    """A checkpoint's metadata file.

    Attributes:
        sha256: of the weights file.
        input_size: channels, height and width in pixels.
        mean, std: per channel, for pixels in 0..1.
        model_args: arguments of ``create_model`` besides classes, channels and size.
        crop_pct: share of the resized image that the crop keeps.
        crop_mode: how an image of another shape is framed: ``center``, ``squash`` or ``border``.
        license: of the weights.
        raw: the whole content of the file (recipe, metrics, seeds, …).
        stored_as: for a checkpoint that the architecture shares with another (``ALIASES``), its name there.
    """

    architecture: str
    tag: str
    sha256: str
    num_classes: int
    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    model_args: dict[str, Any] = field(default_factory=dict)
    label_names: tuple[str, ...] | None = None
    interpolation: str = "bilinear"
    crop_pct: float = 1.0
    crop_mode: str = "center"
    license: str = "apache-2.0"
    description: str | None = None
    raw: dict[str, Any] = field(default_factory=dict)
    stored_as: str | None = None

    @property
    def name(self) -> str:
        return f"{self.architecture}.{self.tag}"

    @property
    def file_name(self) -> str:
        """Name of the files, without a suffix."""
        return self.stored_as or self.name

    @property
    def hub_id(self) -> str:
        return f"{HUB_ORG}/{self.file_name}"

    def renamed(self, state_dict: Mapping[str, T]) -> dict[str, T]:
        """The tensors of the weights file under the keys of this architecture."""
        if not self.stored_as:
            return dict(state_dict)
        keys = ALIASES[self.architecture].keys
        prefixes = {key: next((old for old in keys if key.startswith(old)), "") for key in state_dict}
        return {
            (keys[old] + key.removeprefix(old) if (old := prefixes[key]) else key): value
            for key, value in state_dict.items()
        }

    @property
    def canonical(self) -> bool:
        """Whether a bare architecture name refers to these weights."""
        return bool(self.raw.get("canonical"))

    @property
    def score_kind(self) -> str:
        """Kind of the scores, see ``capszoo.scores``; empty if neither the key nor the recipe determines it."""
        loss = self.raw.get("recipe", {}).get("loss", {}).get("name")
        kind = self.raw.get("score_kind") or (kind_for(loss) if loss else "")
        return str(kind) if kind in SCORE_KINDS else ""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for which timm's configuration has no field (see ``capszoo._pretrained.facts``)."""
        facts = {
            key: self.raw[key] for key in ("background", "object_size", "value_range") if self.raw.get(key)
        }
        if self.score_kind:
            facts["score_kind"] = self.score_kind
        # a mean that a recipe states is that of the weights that it starts from, or its paper's choice
        data = self.raw.get("recipe", {}).get("data")
        if isinstance(data, dict) and data.get("mean"):
            facts["inherited_mean"] = True
        return facts

    @property
    def config(self) -> ModelConfig:
        """The description of the model, as a ``config.json`` gives it."""
        from .checks import ModelConfig

        keys = (
            "num_classes",
            "input_size",
            "mean",
            "std",
            "interpolation",
            "crop_pct",
            "crop_mode",
            "label_names",
        )
        cfg = {key: getattr(self, key) for key in (*keys, "license", "description")}
        args = {"num_classes": self.num_classes, "in_chans": self.input_size[0], **self.model_args}
        return ModelConfig(self.architecture, cfg, args, self.sha256, self.facts)

    @property
    def metadata(self) -> Metadata:
        """``raw`` as a typed record."""
        from ..metadata import Metadata

        return Metadata.read(self.raw, self.name)

    @classmethod
    def from_json(cls, path: Path, trusted: str | None = None) -> WeightsInfo:
        """Read a checkpoint's metadata.

        Args:
            path: the file.
            trusted: sha256 of the weights if the generated catalogue has this checkpoint: its values are not checked
                again, for which pydantic would be loaded.

        Raises:
            WeightsError: not readable, or an invalid value; the message names the file and the key.
        """
        source = str(path)
        raw = _without_null_sections(read_json_object(path))
        for key in _REQUIRED:
            if raw.get(key) is None:
                raise WeightsError(f"{source}: the metadata lacks the key '{key}'")
        keys = [field.name for field in fields(cls) if raw.get(field.name) is not None]
        if raw["sha256"] == trusted:
            values: dict[str, Any] = {
                key: tuple(raw[key]) if isinstance(raw[key], list) else raw[key] for key in keys
            }
        else:
            from ..metadata import Metadata
            from .checks import check_facts, check_model_args

            record = Metadata.read(raw, source)
            check_facts(raw, source, record.input_size or ())
            values = {key: getattr(record, key) for key in keys}
            values["model_args"] = check_model_args(raw.get("model_args"), source)
        values.setdefault("license", "unknown")
        return cls(**{**values, "raw": raw})


def _without_null_sections(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata without the sections that are null, which count as absent."""

    def without_nulls(values: Any, keys: Iterable[str]) -> Any:
        if not isinstance(values, dict):
            return values  # of a wrong type
        return {key: value for key, value in values.items() if value is not None or key not in keys}

    kept: dict[str, Any] = without_nulls(raw, _SECTIONS)
    if "recipe" in kept:
        kept["recipe"] = without_nulls(kept["recipe"], ("loss",))
    if isinstance(metrics := kept.get("metrics"), dict):
        kept["metrics"] = without_nulls(metrics, metrics)
    return kept


def weights_folders() -> tuple[Path, ...]:
    """Folders searched for weight files: inside the package, then ``weights-large/`` of a checkout."""
    return PACKAGE_FOLDER / "weights", PACKAGE_FOLDER.parent / "weights-large"


def stored_file(name: str, folders: Iterable[Path] | None = None) -> Path | None:
    """A file of a checkpoint of the zoo; None if no folder (by default of ``weights_folders``) has it.

    A checkpoint's weights may be in another folder than its metadata and golden outputs.
    """
    files = (folder / name for folder in folders or weights_folders())
    return next((file for file in files if file.is_file()), None)


def read_metadata(trusted: Mapping[str, str]) -> dict[str, WeightsInfo]:
    """Every checkpoint with metadata in ``weights_folders``, by its full name, in alphabetical order.

    Args:
        trusted: name to sha256 of the checkpoints whose sections need no check, see ``WeightsInfo.from_json``.

    A checkpoint with damaged metadata is skipped with a warning, since the others do not depend on it.
    """
    checkpoints: dict[str, WeightsInfo] = {}
    for folder in weights_folders():
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            try:
                info = WeightsInfo.from_json(path, trusted.get(path.stem))
                if path.stem != info.name:
                    raise WeightsError(
                        f"{path}: the metadata inside is that of '{info.name}'; rename the file"
                    )
            except WeightsError as e:
                _logger.warning("left out: %s", e)
            else:
                checkpoints.setdefault(info.name, info)
    return dict(sorted(checkpoints.items()))


def with_aliases(infos: Mapping[str, WeightsInfo]) -> dict[str, WeightsInfo]:
    """Checkpoints by every name that they have, in alphabetical order.

    Args:
        infos: checkpoints by the name of their file.
    """
    checkpoints = dict(infos)
    for architecture, alias in ALIASES.items():
        for info in infos.values():
            if info.architecture != alias.architecture:
                continue
            if alias.model_args is not None and info.model_args != alias.model_args:
                continue
            shared = replace(
                info,
                architecture=architecture,
                model_args={} if alias.model_args is not None else info.model_args,
                raw={**info.raw, "canonical": info.tag == alias.default},
                stored_as=info.name,
            )
            checkpoints.setdefault(shared.name, shared)
    return dict(sorted(checkpoints.items()))


def other_names(infos: Mapping[str, WeightsInfo], name: str) -> list[str]:
    """The further names of a checkpoint, by ``ALIASES``."""
    return [other for other, info in with_aliases(infos).items() if info.stored_as == name]


def default_weights(infos: Mapping[str, WeightsInfo], architecture: str) -> WeightsInfo | None:
    """The checkpoint that a bare architecture name refers to: the canonical one, else the only one, else the first.

    A test checks that an architecture with several checkpoints has exactly one canonical one.

    Args:
        infos: checkpoints by their full name.
        architecture: registered name without a tag.
    """
    weights = [info for info in infos.values() if info.architecture == architecture]
    return next((info for info in weights if info.canonical), weights[0] if weights else None)


def run_weights(folder: Path) -> Path:
    """The weights that a finished run wrote to its folder, as ``<architecture>.<tag>.safetensors``.

    Raises:
        CapszooError: there are none, or several.
    """
    files = [
        file
        for file in sorted(folder.glob("*.*.safetensors"))
        # macOS writes `._` beside each file on foreign file systems
        if not file.name.startswith(".") and file.with_suffix(".json").is_file()
    ]
    if len(files) != 1:
        what = "several checkpoints" if files else "no weights with their metadata, and no config.json"
        raise CapszooError(f"{folder}: {what} in this folder", "name a .safetensors file, or finish the run")
    return files[0]
