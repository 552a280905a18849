"""Check metadata of weights and configurations of repositories, which strangers write and which are not trusted.

A ``config.json`` or a checkpoint's ``.json`` describes a model. It never determines where something is read from: keys
that name a file, an address, a repository or a device are dropped (:data:`_DESCRIBED` lists the accepted keys) or
refused (:data:`_NOT_FOR_STRANGERS`), and the name of an architecture must be a registered name, never ``hf-hub:`` or
``local-dir:``. Sizes have limits, and ``capszoo._pretrained.demand.check_demand`` compares them with the tensors of the
file before a model is built. This module imports neither torch nor pydantic, whose import alone takes as long as the
whole of ``capszoo list``. Files that are read less often have pydantic models: manifests of bundles, recipes, the typed
record of a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import WeightsError, first_line
from .facts import SCORE_KINDS, own_facts, set_own_facts

__all__ = [
    "ModelConfig",
    "architecture_name",
    "check_model_args",
    "checked_value",
    "described",
    "own_keys",
    "read_json_object",
    "without_null_sections",
]

#: Largest JSON file that is read, in bytes: a thousand times the size of the zoo's files.
MAX_JSON_BYTES = 32 * 2**20
MAX_CLASSES = 1_000_000
MAX_CHANNELS = 4_096
#: Largest input of a model, in pixels.
MAX_INPUT_PIXELS = 4_096**2
#: Largest integer among a model's arguments.
MAX_ARGUMENT = 1_000_000

#: Keys of a configuration that describe a model: all of timm's ``PretrainedCfg`` except its sources (``url``, ``file``,
#: ``state_dict``, ``hf_hub_id``, ``hf_hub_filename``, ``source``, ``custom_load``).
_DESCRIBED = frozenset(
    ("input_size", "test_input_size", "min_input_size", "fixed_input_size", "interpolation", "crop_pct")
    + ("test_crop_pct", "crop_mode", "mean", "std", "num_classes", "label_offset", "label_names")
    + (
        "label_descriptions",
        "pool_size",
        "test_pool_size",
        "first_conv",
        "classifier",
        "license",
        "description",
    )
    + ("paper_name", "paper_ids", "notes", "tag", "architecture")
)

#: Arguments of ``create_model`` and of timm's builder that determine where something is read from, how it is loaded or
#: where it is put. No model has an argument of these names.
_NOT_FOR_STRANGERS = frozenset(
    (
        "cache_dir",
        "checkpoint_path",
        "checkpoint",
        "device",
        "dtype",
        "exportable",
        "feature_cfg",
        "feature_cls",
    )
    + ("features_only", "file", "filter_fn", "hf_hub_filename", "hf_hub_id", "kwargs_filter", "model_cfg")
    + ("model_cls", "model_name", "name", "no_jit", "out_indices", "pretrained", "pretrained_cfg")
    + ("pretrained_cfg_overlay", "pretrained_custom_load", "pretrained_filter_fn", "pretrained_model_args")
    + ("pretrained_strict", "pruned", "scriptable", "source", "state_dict", "url", "variant", "weights")
)


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
        WeightsError: the file is missing, not readable, too large, not JSON, or no object.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise WeightsError(f"{path}: larger than {MAX_JSON_BYTES // 2**20} MiB, which no metadata are")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise WeightsError(f"{path}: cannot be read ({e.strerror or e})") from e
    except (ValueError, RecursionError) as e:  # JSONDecodeError, UnicodeDecodeError, a number of 5,000 digits
        raise WeightsError(f"{path}: not readable as JSON ({first_line(e)}): the file is damaged") from e
    if not isinstance(raw, dict):
        raise WeightsError(f"{path}: holds {_kind(raw)} where a JSON object is needed: the file is damaged")
    return raw


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


# -- one value each: returned in its final type, or refused with file and key ---------------------------------------


def architecture_name(value: Any, where: str, key: str = "architecture") -> str:
    """A registered model's name: letters, digits and underscores, so that no source (``hf-hub:…``, a path) passes."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_]{1,200}", value):
        raise WeightsError(
            f"{where}: {key} must be a registered model's name (letters, digits, _), not {_short(value)}"
        )
    return value


def _tag(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{0,200}", value):
        raise WeightsError(f"{where}: {key} must be letters, digits, '_', '-' and '.', not {_short(value)}")
    return value


def _text(value: Any, where: str, key: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise WeightsError(f"{where}: {key} must be a string, not {_kind(value)}")
    return value


def _sha256(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise WeightsError(f"{where}: {key} must be 64 hexadecimal digits, not {_short(value)}")
    return value.lower()


def _flag(value: Any, where: str, key: str) -> bool:
    if not isinstance(value, bool):
        raise WeightsError(f"{where}: {key} must be true or false, not {_short(value)}")
    return value


def _whole(value: Any, where: str, key: str, least: int, most: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise WeightsError(
            f"{where}: {key} must be a whole number from {least} to {most}, not {_short(value)}"
        )
    return value


def _real(value: Any, where: str, key: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise WeightsError(f"{where}: {key} must be a number from {least:g} to {most:g}, not {_short(value)}")
    return float(value)


def _classes(value: Any, where: str, key: str) -> int:
    return _whole(value, where, key, 0, MAX_CLASSES)


def _input_size(value: Any, where: str, key: str) -> tuple[int, int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise WeightsError(
            f"{where}: {key} must be three numbers, [channels, height, width], not {_short(value)}"
        )
    channels = _whole(value[0], where, f"{key}'s channels", 1, MAX_CHANNELS)
    height, width = (_whole(side, where, f"{key}'s side", 1, MAX_INPUT_PIXELS) for side in value[1:])
    if height * width > MAX_INPUT_PIXELS:
        raise WeightsError(
            f"{where}: {key} asks for images of {height}x{width}, more than {MAX_INPUT_PIXELS} pixels"
        )
    return channels, height, width


def _per_channel(least: float) -> Callable[[Any, str, str], tuple[float, ...]]:
    def check(value: Any, where: str, key: str) -> tuple[float, ...]:
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_CHANNELS:
            raise WeightsError(f"{where}: {key} must be a list of a number per channel, not {_short(value)}")
        return tuple(_real(v, where, key, least, 1e6) for v in value)

    return check


def _labels(value: Any, where: str, key: str) -> tuple[str, ...] | None:
    if not value and not isinstance(value, (bool, int, float)):
        return None
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(v, (str, int)) and not isinstance(v, bool) for v in value
    ):
        raise WeightsError(f"{where}: {key} must be a list of strings, one for each class")
    return tuple(str(v) for v in value)


def _names(value: Any, where: str, key: str) -> str | tuple[str, ...] | None:
    """A module's name, or several."""
    given = value if isinstance(value, (list, tuple)) else (value,)
    if value is not None and not all(isinstance(v, str) for v in given):
        raise WeightsError(f"{where}: {key} must be a string or a list of strings")
    return tuple(value) if isinstance(value, list) else value


def _pool(value: Any, where: str, key: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    given = value if isinstance(value, (list, tuple)) else [value]
    if len(given) not in (1, 2):
        raise WeightsError(f"{where}: {key} must be two numbers, not {_short(value)}")
    return tuple(_whole(v, where, key, 0, MAX_INPUT_PIXELS) for v in given)


def _crop(value: Any, where: str, key: str) -> float:
    # above 1, timm pads the image (VOLO's 1.15); here it fills the frame
    return min(_real(value, where, key, 0.01, 2.0), 1.0)


def _descriptions(value: Any, where: str, key: str) -> dict[str, str] | None:
    if value is not None and not isinstance(value, dict):
        raise WeightsError(f"{where}: {key} must be an object, not {_kind(value)}")
    return value


_CHECKS: dict[str, Callable[[Any, str, str], Any]] = {
    "architecture": architecture_name,
    "tag": _tag,
    "sha256": _sha256,
    "num_classes": _classes,
    "input_size": _input_size,
    "test_input_size": _input_size,
    "min_input_size": _input_size,
    "fixed_input_size": _flag,
    "interpolation": _text,
    "crop_mode": _text,
    "crop_pct": _crop,
    "test_crop_pct": _crop,
    "mean": _per_channel(-1e6),
    "std": _per_channel(1e-6),
    "label_offset": lambda value, where, key: _whole(value, where, key, 0, 1),
    "label_names": _labels,
    "label_descriptions": _descriptions,
    "pool_size": _pool,
    "test_pool_size": _pool,
    "first_conv": _names,
    "classifier": _names,
    "license": _text,
    "description": _text,
    "paper_name": _text,
    "paper_ids": _names,
    "notes": _names,
}


def checked_value(raw: Mapping[str, Any], key: str, where: str, default: Any = ...) -> Any:
    """The value of a metadata key, in the type that the package uses; ``default`` if it is absent or null.

    Raises:
        WeightsError: it is missing and has no default, or its type or size is invalid for the key.
    """
    value = raw.get(key)
    if value is None:
        if default is ...:
            raise WeightsError(f"{where}: the metadata lacks the key '{key}'")
        return default
    return _CHECKS[key](value, where, key)


def check_model_args(args: Any, where: str) -> dict[str, Any]:
    """A model's arguments from metadata: plain values under names that determine no file, device or source.

    Raises:
        WeightsError: a name that does, or a value that is not a plain JSON value, or is too large.
    """
    if args is None:
        return {}
    if not isinstance(args, dict):
        raise WeightsError(f"{where}: model_args must be an object, not {_kind(args)}")
    _check_argument(args, where, "model_args", depth=4)
    if "num_classes" in args:
        _classes(args["num_classes"], where, "model_args.num_classes")
    if "in_chans" in args:
        _whole(args["in_chans"], where, "model_args.in_chans", 1, MAX_CHANNELS)
    if args.get("img_size") is not None:
        size = args["img_size"]
        _input_size([1, *(size if isinstance(size, list) else (size, size))], where, "model_args.img_size")
    # the weights of a backbone are in the file itself: nothing is downloaded to initialise it
    return {name: value for name, value in args.items() if name != "backbone_pretrained"}


def _check_argument(value: Any, where: str, key: str, depth: int) -> None:
    if isinstance(value, (dict, list)) and (depth == 0 or len(value) > 1000):
        raise WeightsError(f"{where}: {key} is nested too deep or too long for an argument of a model")
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in _NOT_FOR_STRANGERS:
                raise WeightsError(
                    f"{where}: {key} names '{name}', which is for the caller to choose and never for a file: "
                    "remove the key if you trust the rest"
                )
            _check_argument(inner, where, f"{key}.{_short(name)[1:-1]}", depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check_argument(inner, where, key, depth - 1)
    elif isinstance(value, str):
        if len(value) > 200 or re.search(r"[:/\\\x00-\x1f]", value):
            raise WeightsError(
                f"{where}: {key} is {_short(value)}: an argument of a model is no path and no source"
            )
    elif isinstance(value, (int, float)) and not abs(value) <= MAX_ARGUMENT:  # NaN, too
        raise WeightsError(f"{where}: {key} is {_short(value)}, beyond {MAX_ARGUMENT}")


def described(cfg: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The description of a model in a stranger's ``pretrained_cfg``, checked; drops sources and unknown keys."""
    taken = {key: _CHECKS[key](cfg[key], where, key) for key in _DESCRIBED if cfg.get(key) is not None}
    set_own_facts(taken, {})  # they are checked by themselves (`own_keys`)
    for key in ("pool_size", "first_conv", "classifier"):  # timm distinguishes null from absent for these
        if key in cfg:
            taken.setdefault(key, None)
    return taken


def _one_of(*allowed: str) -> Callable[[Any, str, str], str]:
    def check(value: Any, where: str, key: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise WeightsError(f"{where}: {key} must be one of {', '.join(allowed)}, not {_short(value)}")
        return value

    return check


def _object_size(value: Any, where: str, key: str) -> list[int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise WeightsError(f"{where}: {key} must be two numbers, [height, width], not {_short(value)}")
    return [_whole(side, where, key, 1, MAX_INPUT_PIXELS) for side in value]


def check_object_size(own: Mapping[str, Any], input_size: Sequence[int], where: str) -> None:
    """Refuse objects that are larger than the canvas that they are placed on.

    Raises:
        WeightsError: a side of ``object_size`` is larger than that of ``input_size``.
    """
    sides: Sequence[int] = own.get("object_size") or ()
    if any(side > frame for side, frame in zip(sides, input_size[-2:], strict=False)):
        raise WeightsError(
            f"{where}: object_size is {sides[0]}x{sides[1]}, larger than the input, {input_size[-2]}x{input_size[-1]}"
        )


#: Keys of metadata whose values are objects.
_SECTIONS = ("recipe", "dataset", "metrics", "history", "versions", "per_class")


def _value_range(value: Any, where: str, key: str) -> list[float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise WeightsError(f"{where}: {key} must be two numbers, [black, white], not {_short(value)}")
    black, white = (_real(one, where, key, -1e30, 1e30) for one in value)
    if not black < white:
        raise WeightsError(f"{where}: {key} must ascend, not {_short(value)}")
    return [black, white]


#: The zoo's keys: facts about weights for which timm's ``PretrainedCfg`` has no field.
_OWN_CHECKS: dict[str, Callable[[Any, str, str], Any]] = {
    "background": _one_of("black", "white"),  # those of `capszoo.images`, which imports Pillow
    "object_size": _object_size,
    "score_kind": _one_of(*SCORE_KINDS),
    "inherited_mean": _flag,
    "value_range": _value_range,
}


def without_null_sections(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata without the sections that are null, which count as absent; their values are for ``capszoo.metadata``."""

    def without_nulls(values: Any, keys: Iterable[str]) -> Any:
        if not isinstance(values, dict):
            return values  # of a wrong type
        return {key: value for key, value in values.items() if value is not None or key not in keys}

    found: dict[str, Any] = without_nulls(raw, _SECTIONS)
    if "recipe" in found:
        found["recipe"] = without_nulls(found["recipe"], ("loss",))
    if isinstance(metrics := found.get("metrics"), dict):
        found["metrics"] = without_nulls(metrics, metrics)
    return found


def _object(value: Any, where: str, key: str) -> None:
    if not isinstance(value, dict):
        raise WeightsError(f"{where}: {key} must be an object, not {_kind(value)}")


def own_keys(value: Any, where: str, prefix: str = "capszoo.") -> dict[str, Any]:
    """The zoo's keys of a configuration or of metadata, checked; drops unknown ones.

    Args:
        value: an object with these keys, or None.
        where: name of the file in error messages.
        prefix: precedes a key in error messages.

    Raises:
        WeightsError: no object, or an invalid value.
    """
    if value is None:
        return {}
    _object(value, where, "capszoo")
    stated = {key: value[key] for key in _OWN_CHECKS if value.get(key)}
    return {key: _OWN_CHECKS[key](found, where, f"{prefix}{key}") for key, found in stated.items()}


def _stated_args(raw: Mapping[str, Any], stated: Mapping[str, Any]) -> Any:
    """The arguments of the model: timm's, over those that the model itself records (timm before 1.0.31 has none)."""
    given, recorded = raw.get("model_args"), own_facts(stated).get("model_args")
    if not isinstance(recorded, dict):
        return given
    if not isinstance(given, dict):
        return given or recorded
    # of a backbone from elsewhere, timm has the caller's name, and the model the architecture and its arguments
    own_backbone = {key: recorded[key] for key in ("backbone", "backbone_args") if key in recorded}
    return {**recorded, **given, **own_backbone}


@dataclass(frozen=True)
class ModelConfig:
    """A ``config.json`` in the format of timm and the Hub, reduced to the keys accepted from a stranger.

    Attributes:
        architecture: a name without source or tag; the caller checks whether it is registered.
        cfg: keys of timm's ``PretrainedCfg`` that describe the model, without sources of weights.
        model_args: arguments of the architecture.
        sha256: of ``model.safetensors``, if stated.
        own_keys: the zoo's keys, see ``own_keys``.
    """

    architecture: str
    cfg: dict[str, Any] = field(default_factory=dict)
    model_args: dict[str, Any] = field(default_factory=dict)
    sha256: str | None = None
    own_keys: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path, name: str | None = None) -> ModelConfig:
        """Read ``config.json``; ``name`` replaces the path in error messages.

        Raises:
            WeightsError: not readable, or an invalid value; the message names the file and the key.
        """
        where = name or str(path)
        raw = read_json_object(path)
        stated = raw.get("pretrained_cfg", raw)  # older files are one flat object
        if not isinstance(stated, dict):
            raise WeightsError(f"{where}: pretrained_cfg must be an object, not {_kind(stated)}")
        stated = {**stated, **({"label_names": stated["labels"]} if "labels" in stated else {})}
        over = ("num_classes", "label_names", "label_descriptions")
        cfg = described({**stated, **{key: raw[key] for key in over if raw.get(key) is not None}}, where)
        args = check_model_args(_stated_args(raw, stated), where)
        size, chans, side = cfg.get("input_size", (3, 224, 224)), args.get("in_chans"), args.get("img_size")
        # without a stated size, that of the architecture holds
        if chans is not None and ("input_size" in cfg or side is not None):
            cfg["input_size"] = size = (int(chans), *size[1:])
        if side is not None and (
            cfg.get("fixed_input_size") or "input_size" not in stated and chans is not None
        ):
            cfg["input_size"] = (size[0], *(side if isinstance(side, list) else (side, side)))
        architecture = checked_value(raw, "architecture", where)
        cfg["architecture"] = architecture
        sha256 = checked_value(raw, "sha256", where, default=None)
        # timm's `save_for_hf` writes the whole of a model's `pretrained_cfg`
        own = own_keys(raw.get("capszoo") or own_facts(stated), where)
        check_object_size(own, cfg.get("input_size", (3, 224, 224)), where)
        return cls(architecture, cfg, args, sha256, own)
