"""Build a registered model: check the arguments, find and verify the weights, then call timm's builder."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, get_pretrained_cfg
from timm.models._builder import resolve_pretrained_cfg
from timm.models._pretrained import DefaultCfg, PretrainedCfg
from torch import nn

from capszoo._pretrained.catalogue import without_weights
from capszoo._pretrained.facts import for_new_classes, own_facts, set_own_facts
from capszoo._pretrained.info import WeightsInfo, default_weights
from capszoo.errors import UnknownArgument, WeightsError, unknown_name

from .._pretrained.catalogue import checkpoints
from .._pretrained.checks import ModelConfig, described
from .._pretrained.demand import check_demand
from .._pretrained.files import download_weights, hub_config, load_safetensors, load_weights, local_weights
from ._adapt import adapt_state_dict
from ._base import to_2tuple

__all__ = [
    "CIFAR10",
    "MNIST",
    "NO_SOURCE",
    "UnknownArgument",
    "build_capsule_model",
    "is_registered",
    "model_cfg",
    "stranger_cfg",
    "trusted_tag",
    "zoo_cfgs",
]

ModelT = TypeVar("ModelT", bound=nn.Module)

#: Arguments of timm's builder, valid for every model besides the model's arguments.
_BUILDER_ARGS = frozenset(
    ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "features_only", "out_indices", "feature_cls")
    + ("pretrained_model_args", "device", "dtype")
)


#: Overlay that removes every source of weights from a configuration.
NO_SOURCE: dict[str, Any] = dict(
    dict.fromkeys(("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source")), custom_load=False
)

#: Sources of a third-party configuration, as timm names them.
_STRANGERS = ("hf-hub", "local-dir")

#: Arguments that do not describe the network.
_NOT_RECORDED = ("backbone_pretrained", "cache_dir")

#: Arguments that a saved configuration states by other keys, and that may change after the model has been created.
_FOUND_IN_CFG = ("num_classes", "in_chans", "global_pool")

#: Arguments that are integers in every model, with their minimum.
_COUNTS = {"num_classes": 0, "in_chans": 1, "routing_iters": 0}

#: Mean and standard deviation per channel of the training images, for pixel values in 0..1.
CIFAR10: dict[str, Any] = dict(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
MNIST: dict[str, Any] = dict(mean=(0.1307,), std=(0.3081,))


def model_cfg(**kwargs: Any) -> dict[str, Any]:
    """Default entry of ``default_cfgs``: ten classes of 32x32 colour images (CIFAR-10).

    Args:
        **kwargs: fields of timm's ``PretrainedCfg``. A model file fixes what its models have in common with
            ``_cfg = functools.partial(model_cfg, …)``.
    """
    cfg = dict(
        num_classes=10,
        input_size=(3, 32, 32),
        fixed_input_size=False,
        interpolation="bilinear",
        crop_pct=1.0,
        license="apache-2.0",
        **CIFAR10,
    )
    cfg.update(kwargs)
    return cfg


def zoo_cfgs(cfgs: dict[str, dict[str, Any]]) -> dict[str, DefaultCfg]:
    """timm's default configurations of a model file, plus one for each existing checkpoint.

    Args:
        cfgs: architecture name → keyword arguments of timm's ``PretrainedCfg``, without weights.
    """
    full: dict[str, dict[str, Any] | PretrainedCfg] = dict(cfgs)
    for name, info in checkpoints().items():
        base = cfgs.get(info.architecture)
        if base is None:
            continue
        full[name] = dict(
            base,
            hf_hub_id=info.hub_id,
            input_size=info.input_size,
            pool_size=info.raw.get("pool_size", base.get("pool_size")),
            num_classes=info.num_classes,
            mean=info.mean,
            std=info.std,
            interpolation=info.interpolation,
            crop_pct=info.crop_pct,
            crop_mode=info.crop_mode,
            label_names=info.label_names,
            license=info.license,
            description=info.description,
        )
    defaults = generate_default_cfgs(full)
    for default in defaults.values():
        # In timm the first weights determine what a bare name builds. Here the architecture's configuration does, so
        # that training a checkpoint for another data set never changes a model (see _default_tag)
        default.tags.remove("")
        default.tags.appendleft("")
    return defaults


def _default_tag(variant: str) -> str | None:
    """Tag that ``pretrained=True`` loads for a bare name: that of the canonical weights."""
    info = default_weights(checkpoints(), variant)
    return info.tag if info else None


def is_registered(given: Any, variant: str) -> bool:
    """Whether a configuration is none, or the architecture's own, which timm's scripts resolve and give."""
    if not given:
        return True
    if isinstance(given, str) or get_pretrained_cfg(variant) is None:
        return False
    return resolve_pretrained_cfg(variant, given, None) == resolve_pretrained_cfg(variant, None, None)


def _without_own_keys(
    given: Any, overlay: Mapping[str, Any] | None
) -> tuple[Any, dict[str, Any], dict[str, Any] | None]:
    """A configuration and its overlay for timm, without the zoo's keys, for which timm has no field; and those keys.

    A model's ``pretrained_cfg`` has them (`capszoo._pretrained.facts`), and so has the ``config.json`` that timm's
    ``save_for_hf`` writes.
    """
    overlay = dict(overlay or {})
    own_keys = own_facts(overlay) or None
    set_own_facts(overlay, {})
    if isinstance(given, PretrainedCfg):
        given = {one.name: getattr(given, one.name) for one in fields(given)}
    if isinstance(given, Mapping):
        given = dict(given)
        if own_keys is None and given.get("source") not in _STRANGERS:  # theirs are checked (`_own_keys`)
            own_keys = own_facts(given) or None
        set_own_facts(given, {})
    return given, overlay, own_keys


def _own_keys(cfg: PretrainedCfg, info: WeightsInfo | None, cache_dir: str | Path | None) -> dict[str, Any]:
    """Facts about the weights for which timm's configuration has no field (see `WeightsInfo.own_keys`)."""
    config = _stranger_config(cfg, cache_dir)
    return config.own_keys if config else info.own_keys if info else {}


def _stranger_config(cfg: PretrainedCfg, cache_dir: str | Path | None) -> ModelConfig | None:
    """The `config.json` from which timm read a configuration; None for one of the zoo or the caller."""
    if cfg.source == "hf-hub":
        return hub_config(str(cfg.hf_hub_id), cache_dir)
    if cfg.source == "local-dir":
        return ModelConfig.read(Path(str(cfg.file)) / "config.json")
    return None


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):  # a module given as the backbone
        return False
    return True


def trusted_tag(architecture: str, tag: str | None, sha256: str | None) -> str | None:
    """The tag stated by a third-party configuration; None if the zoo has other weights under that name."""
    info = checkpoints().get(f"{architecture}.{tag}")
    return tag if info is None or info.sha256 == sha256 else None


def stranger_cfg(cfg: Mapping[str, Any], variant: str, where: str, zoo: bool = True) -> dict[str, Any]:
    """A third-party configuration for timm: the registered one, updated with its description, without sources.

    Args:
        cfg: keys of timm's ``PretrainedCfg``; those that name a source are dropped.
        variant: registered name.
        where: name of the configuration in error messages.
        zoo: whether the architecture belongs to the zoo, in which case no file may redefine its layers.

    Raises:
        WeightsError: an invalid value.
    """
    base = get_pretrained_cfg(variant)
    own = {**base.to_dict(), **NO_SOURCE} if base is not None else {}
    taken = described(cfg, where)
    if zoo:
        for key in ("first_conv", "classifier", "fixed_input_size"):
            taken.pop(key, None)
    return {**own, **taken, "architecture": variant}


def _without_foreign_sources(cfg: PretrainedCfg, variant: str) -> PretrainedCfg:
    """A configuration that timm read from a repository or a folder, with that as its only source."""
    where: dict[str, Any] = dict(source=cfg.source, file=cfg.file, hf_hub_id=cfg.hf_hub_id)
    taken = stranger_cfg(cfg.to_dict(), variant, str(cfg.file or cfg.hf_hub_id))
    return replace(PretrainedCfg(**taken), **where)


def _verified_source(cfg: PretrainedCfg, variant: str, cache_dir: str | Path | None) -> PretrainedCfg:
    """The same configuration with its weights as a state dict, read from a verified safetensors file.

    The state dict is then its only source. Otherwise, if timm finds no weights there, it uses the next source that a
    configuration names, which may be a pickle.
    """
    if cfg.source is None and cfg.state_dict is not None:
        if not cfg.state_dict:
            raise WeightsError(f"the state dict for {variant} holds no tensors")
        return replace(cfg, **{**NO_SOURCE, "state_dict": cfg.state_dict})
    info = checkpoints().get(f"{variant}.{cfg.tag}") if cfg.tag else None
    tag = cfg.tag
    named = cfg.source is None and not cfg.file and bool(cfg.hf_hub_id)  # by the caller or by the tag
    if cfg.source == "hf-hub" or (named and (info is None or cfg.hf_hub_id != info.hub_id)):
        stated = hub_config(str(cfg.hf_hub_id), cache_dir).sha256
        path = download_weights(str(cfg.hf_hub_id), cache_dir, stated or "")
        tag = trusted_tag(variant, tag, stated)
    elif cfg.source == "local-dir":
        path, stated = local_weights(str(cfg.file))
        tag = trusted_tag(variant, tag, stated)
    elif cfg.file:
        path = Path(cfg.file)
        if not path.is_file():
            raise WeightsError(f"{path}: no such file")
    elif info is not None:
        state = load_weights(info, cache_dir)
        return replace(cfg, **{**NO_SOURCE, "tag": tag, "state_dict": state})
    else:
        tags = [name for name in checkpoints() if name.startswith(f"{variant}.")]
        if tags:
            raise WeightsError(f"no pretrained weights exist for {variant}: use {' or '.join(tags)}")
        raise WeightsError(": ".join(without_weights(variant)))
    return replace(cfg, **{**NO_SOURCE, "tag": tag, "state_dict": load_safetensors(path)})


def _own_args(model_cls: type[nn.Module], variant: str, given: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that the network accepts.

    Raises:
        UnknownArgument: a given one is neither an argument of the network nor of timm's builder.
        ValueError: an invalid number of classes, channels or iterations.
    """
    own_args = [name for name in inspect.signature(model_cls.__init__).parameters if name != "self"]
    for name in given:
        if name not in _BUILDER_ARGS and name not in own_args:
            if name == "routing_iters":
                raise UnknownArgument(f"{variant} has no routing iterations: leave routing_iters out")
            raise UnknownArgument(unknown_name(f"argument of {variant}", name, [*own_args, "pretrained"]))
    for name, least in _COUNTS.items():
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(f"{variant}: {name} must be a whole number of at least {least}, not {value!r}")
    return own_args


def _created(
    model_cls: type[ModelT],
    own_args: list[str],
    *,
    device: Any = None,
    dtype: torch.dtype | None = None,
    **args: Any,
) -> ModelT:
    """The network on ``device`` and in ``dtype``, without the defaults of timm's that it does not accept."""
    with torch.device(device) if device is not None else contextlib.nullcontext():
        net = model_cls(**{name: value for name, value in args.items() if name in own_args})
    # not PyTorch's default type, which other threads share
    return net if dtype is None else net.to(dtype)


def build_capsule_model(
    model_cls: type[ModelT],
    variant: str,
    pretrained: bool = False,
    defaults: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Build ``variant``, a ``model_cls`` (or timm's wrapper of one, with ``features_only``).

    Every model file defines its builder as ``_create_… = functools.partial(build_capsule_model, …)``.

    Args:
        model_cls: the network; its ``__init__`` lists every argument by name.
        variant: registered name.
        pretrained: load the weights of the configuration's tag, and build the model that they were trained for.
        defaults: arguments that make ``model_cls`` this variant; the arguments stored with a tag's weights override
            them.
        **kwargs: arguments of ``model_cls`` and of timm's ``build_model_with_cfg``, which override both.

    Raises:
        UnknownArgument: a keyword that neither accepts.
        WeightsError: weights are requested but missing or damaged, or do not fit.
    """
    own_args = _own_args(model_cls, variant, kwargs)
    kwargs = {name: plain(value) for name, value in kwargs.items()}
    given, overlay, own_keys = _without_own_keys(
        kwargs.pop("pretrained_cfg", None), kwargs.pop("pretrained_cfg_overlay", None)
    )
    cfg = resolve_pretrained_cfg(variant, given, overlay)
    if pretrained and not cfg.has_weights and cfg.state_dict is None and is_registered(given, variant):
        cfg = resolve_pretrained_cfg(variant, _default_tag(variant), overlay)
    cache_dir = kwargs.pop("cache_dir", None)
    # timm read it from a repository or a folder; capszoo.create_model accepts less from there, and passes a state dict
    stranger = cfg.source in _STRANGERS
    cfg = _without_foreign_sources(cfg, variant) if stranger else cfg
    weights_id = cfg.hf_hub_id
    info = checkpoints().get(f"{variant}.{cfg.tag}") if cfg.tag and not stranger else None
    own_keys = _own_keys(cfg, info, cache_dir) if own_keys is None else own_keys
    if stranger and (config := _stranger_config(cfg, cache_dir)):
        kwargs = {**{k: v for k, v in config.model_args.items() if k in own_args}, **kwargs}
    if stranger:
        kwargs.pop("backbone_pretrained", None)  # its weights are those of the whole network
    # a name with a tag is one network, with its weights or without; timm's scripts give its configuration instead
    if info and (pretrained or given):
        kwargs = {**info.model_args, **kwargs}
    if pretrained:
        cfg = _verified_source(cfg, variant, cache_dir)
        kwargs = {**_stem_of(cfg.state_dict or {}, own_args, kwargs), **kwargs}
    recorded = {k: v for k, v in kwargs.items() if k in own_args and k not in _NOT_RECORDED}
    kwargs = {**(defaults or {}), **kwargs}
    kwargs.setdefault("img_size", tuple(cfg.input_size[-2:]))
    if stranger and pretrained:
        args = {"num_classes": cfg.num_classes, "in_chans": cfg.input_size[0], **kwargs}
        args = {name: value for name, value in args.items() if name in own_args}
        check_demand(partial(model_cls, **args), cfg.state_dict or {}, str(weights_id or variant))

    for name in ("out_indices", "feature_cls"):
        if kwargs.get(name) is not None and not kwargs.get("features_only"):
            raise UnknownArgument(f"{variant}: {name} has no effect without features_only=True")
    if kwargs.get("features_only"):
        _check_extractor(kwargs.get("feature_cls"), kwargs.get("out_indices"))
        kwargs.setdefault("out_indices", None)
    model = build_model_with_cfg(
        # timm keeps cache_dir for itself; a backbone is downloaded to it, too
        partial(_created, model_cls, own_args, cache_dir=cache_dir),  # type: ignore[arg-type]
        variant,
        pretrained,
        # without first_conv: older timm would adapt it as well, and only from three channels
        pretrained_cfg=dict(cfg.to_dict(), first_conv=None),
        feature_cfg={"feature_cls": "getter"},
        pretrained_filter_fn=partial(adapt_state_dict, first_conv=cfg.first_conv),
        **kwargs,
    )
    about: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    about["first_conv"] = cfg.first_conv
    about.pop("state_dict", None)  # the weights are in the model now, not in its configuration
    if weights_id:
        about["hf_hub_id"] = weights_id
    _record(model, recorded, own_keys)
    return model


def _stem_of(
    state: Mapping[str, Any], own_args: Collection[str], kwargs: Mapping[str, Any]
) -> dict[str, str]:
    """The argument ``stem`` of an EncapNet's weights, if the size of the images would choose another one."""
    weight, size = state.get("stages.stem.conv.weight"), kwargs.get("img_size")
    if "stem" not in own_args or weight is None or size is None:
        return {}
    large = weight.shape[-1:] == (7,)  # a damaged file may hold a number
    return {} if large == (max(to_2tuple(size)) > 64) else {"stem": "resnet" if large else "conv"}


def plain(value: Any) -> Any:
    """The same value with numpy's numbers, such as labels.max() + 1, as Python's: they are no JSON."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value


def _check_extractor(feature_cls: Any, out_indices: Any) -> None:
    """Refuse an extractor of timm's for which the feature maps are no direct children of the network."""
    if feature_cls in (None, "getter") or not isinstance(feature_cls, str):
        return
    if feature_cls not in ("hook", "fx"):
        raise ValueError(
            f"feature_cls={feature_cls!r} does not go with these networks: use 'getter', 'hook' or 'fx'"
        )
    if out_indices is None:
        raise ValueError(f"feature_cls={feature_cls!r} needs out_indices, such as (0, 1)")


def _record(model: Any, args: dict[str, Any], own_keys: Mapping[str, Any]) -> None:
    """Note the arguments of a model for timm's `save_for_hf`, and the facts for which it has no field.

    timm's factory records the caller's arguments alone, and before 1.0.31 none: the configuration has them, too.
    """
    model._model_args = args
    described = {name: value for name, value in args.items() if name not in _FOUND_IN_CFG}
    kept = {"model_args": described} if described and _is_json(described) else {}
    # the arguments among them may be those of another network
    own = {key: value for key, value in own_keys.items() if key != "model_args"}
    if getattr(model, "num_classes", 0) not in (0, model.pretrained_cfg.get("num_classes")):
        own = for_new_classes(own)
    set_own_facts(model.pretrained_cfg, {**own, **kept})
