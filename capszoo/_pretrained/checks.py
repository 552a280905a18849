"""Check metadata of weights and configurations of repositories, which strangers write and which are not trusted.

A ``config.json`` or a checkpoint's ``.json`` describes a model. It never determines where something is read from: keys
that name a file, an address, a repository or a device are dropped (``Description`` of :mod:`.records` lists the
accepted keys) or refused (:data:`_NOT_FOR_STRANGERS`), and the name of an architecture must be a registered name, never
``hf-hub:`` or ``local-dir:``. Sizes have limits, and ``capszoo._pretrained.demand.check_demand`` compares them with the
tensors of the file before a model is built. This module imports no pydantic, which ``torch.hub`` does without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._utils.files import read_json_object
from ..errors import WeightsError
from .facts import own_facts, set_own_facts

#: Largest integer among a model's arguments.
MAX_ARGUMENT = 1_000_000

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


def described(cfg: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The description of a model in a stranger's ``pretrained_cfg``, checked; drops sources and unknown keys.

    Raises:
        WeightsError: an invalid value.
    """
    from .records import Description

    taken = Description.read(cfg, source)
    set_own_facts(taken, {})  # they are checked by themselves (`check_facts`)
    for key in ("pool_size", "first_conv", "classifier"):  # timm distinguishes null from absent for these
        if key in cfg:
            taken.setdefault(key, None)
    return taken


def check_facts(value: Any, source: str, input_size: Sequence[int]) -> dict[str, Any]:
    """The zoo's keys of a configuration or of metadata, checked; drops unknown ones, and those without a value.

    Args:
        value: an object with these keys, or None.
        source: name of the file in error messages.
        input_size: channels, height and width in pixels: no object may be larger.

    Raises:
        WeightsError: no object, or an invalid value.
    """
    if not isinstance(value, Mapping | None):
        raise WeightsError(f"{source}: capszoo must be an object, not a {type(value).__name__}")
    from .records import Facts

    facts = Facts.read({key: fact for key, fact in (value or {}).items() if fact}, source)
    sides: Sequence[int] = facts.get("object_size") or ()
    if any(side > frame for side, frame in zip(sides, input_size[-2:], strict=False)):
        raise WeightsError(
            f"{source}: object_size is {sides[0]}x{sides[1]}, larger than the input, {input_size[-2]}x{input_size[-1]}"
        )
    return facts


def check_model_args(args: Any, source: str) -> dict[str, Any]:
    """A model's arguments from metadata: plain values under names that determine no file, device or source.

    Raises:
        WeightsError: a name that does, or a value that is not a plain JSON value, or is too large.
    """
    if args is None:
        return {}
    if not isinstance(args, dict):
        raise WeightsError(f"{source}: model_args must be an object, not a {type(args).__name__}")
    _check_argument(args, source, "model_args", depth=4)
    from .records import Sizes

    Sizes.read(args, f"{source}: model_args")
    # the weights of a backbone are in the file itself: nothing is downloaded to initialise it
    return {name: value for name, value in args.items() if name != "backbone_pretrained"}


def _check_argument(value: Any, source: str, key: str, depth: int) -> None:
    if isinstance(value, (dict, list)) and (depth == 0 or len(value) > 1000):
        raise WeightsError(f"{source}: {key} is nested too deep or too long for an argument of a model")
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in _NOT_FOR_STRANGERS:
                raise WeightsError(
                    f"{source}: {key} names '{name}', which is for the caller to choose and never for a file: "
                    "remove the key if you trust the rest"
                )
            _check_argument(inner, source, f"{key}.{str(name)[:60]}", depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check_argument(inner, source, key, depth - 1)
    elif isinstance(value, str):
        if len(value) > 200 or re.search(r"[:/\\\x00-\x1f]", value):
            raise WeightsError(
                f"{source}: {key} is {repr(value)[:60]}: an argument of a model is no path and no source"
            )
    elif isinstance(value, (int, float)) and not abs(value) <= MAX_ARGUMENT:  # NaN, too
        raise WeightsError(f"{source}: {key} is {repr(value)[:60]}, beyond {MAX_ARGUMENT}")


def _stated_args(raw: Mapping[str, Any], cfg: Mapping[str, Any]) -> Any:
    """The arguments of the model: timm's, over those that the model itself records (timm before 1.0.31 has none)."""
    arguments, recorded = raw.get("model_args"), own_facts(cfg).get("model_args")
    if not isinstance(recorded, dict):
        return arguments
    if not isinstance(arguments, dict):
        return arguments or recorded
    # of a backbone from elsewhere, timm has the caller's name, and the model the architecture and its arguments
    own_backbone = {key: recorded[key] for key in ("backbone", "backbone_args") if key in recorded}
    return {**recorded, **arguments, **own_backbone}


@dataclass(frozen=True)
class ModelConfig:
    """A ``config.json`` in the format of timm and the Hub, reduced to the keys accepted from a stranger.

    Attributes:
        architecture: a name without source or tag; the caller checks whether it is registered.
        cfg: keys of timm's ``PretrainedCfg`` that describe the model, without sources of weights.
        model_args: arguments of the architecture.
        sha256: of ``model.safetensors``, if stated.
        facts: the zoo's keys, see ``check_facts``.
    """

    architecture: str
    cfg: dict[str, Any] = field(default_factory=dict)
    model_args: dict[str, Any] = field(default_factory=dict)
    sha256: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path, name: str | None = None) -> ModelConfig:
        """Read ``config.json``; ``name`` replaces the path in error messages.

        Raises:
            WeightsError: not readable, or an invalid value; the message names the file and the key.
        """
        label = name or str(path)
        raw = read_json_object(path)
        config = raw.get("pretrained_cfg", raw)  # older files are one flat object
        if not isinstance(config, dict):
            raise WeightsError(f"{label}: pretrained_cfg must be an object, not a {type(config).__name__}")
        config = {**config, **({"label_names": config["labels"]} if "labels" in config else {})}
        over = ("num_classes", "label_names", "label_descriptions")
        cfg = described({**config, **{key: raw[key] for key in over if raw.get(key) is not None}}, label)
        args = check_model_args(_stated_args(raw, config), label)
        size, chans, side = cfg.get("input_size", (3, 224, 224)), args.get("in_chans"), args.get("img_size")
        # without a stated size, that of the architecture holds
        if chans is not None and ("input_size" in cfg or side is not None):
            cfg["input_size"] = size = (int(chans), *size[1:])
        if side is not None and (
            cfg.get("fixed_input_size") or "input_size" not in config and chans is not None
        ):
            cfg["input_size"] = (size[0], *(side if isinstance(side, list) else (side, side)))
        from .records import Source

        source = Source.read(raw, label)
        cfg["architecture"] = source["architecture"]
        # timm's `save_for_hf` writes the whole of a model's `pretrained_cfg`
        facts = raw.get("capszoo") or own_facts(config)
        recorded = check_facts(facts, label, cfg.get("input_size", (3, 224, 224)))
        return cls(source["architecture"], cfg, args, source.get("sha256"), recorded)
