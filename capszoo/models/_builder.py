"""Build a registered model: check the arguments, find and verify the weights, then call timm's builder.

A model that metadata from elsewhere describe (a repository's or a folder's ``config.json``, a run's ``.json``) is made
by :func:`create_described` alone, whoever asks for it: capszoo.create_model, timm's, or capszoo.load.
"""

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
import timm
import torch
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    get_pretrained_cfg,
    is_model,
    is_model_in_modules,
)
from timm.models._builder import resolve_pretrained_cfg
from timm.models._pretrained import DefaultCfg, PretrainedCfg
from torch import nn

from capszoo._pretrained.catalogue import without_weights
from capszoo._pretrained.facts import for_new_classes, own_facts, set_own_facts
from capszoo._pretrained.info import default_weights
from capszoo.errors import UnknownArgument, WeightsError, unknown_name

from .._pretrained.catalogue import architectures, checkpoints
from .._pretrained.checks import ModelConfig, described
from .._pretrained.demand import check_demand, fitting
from .._pretrained.files import download_weights, hub_config, load_safetensors, load_weights, local_weights
from ._adapt import adapt_state_dict
from ._base import to_2tuple

#: Model files of the zoo, by their names in timm's registry.
MODULES = (
    "caps_head",
    "capsnet_dynamic",
    "capsnet_em",
    "cnn_baselines",
    "deepcaps",
    "efficient_capsnet",
    "encapnet",
    "hvc",
    "idpa",
    "routing_pool",
)

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
        pool_size = info.raw.get("pool_size", base.get("pool_size"))
        full[name] = {**base, **info.config.cfg, "hf_hub_id": info.hub_id, "pool_size": pool_size}
    defaults = generate_default_cfgs(full)
    for default in defaults.values():
        # In timm the first weights determine what a bare name builds. Here the architecture's configuration does, so
        # that training a checkpoint for another data set never changes a model (see _default_tag)
        default.tags.remove("")
        default.tags.appendleft("")
    return defaults


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
    init_args = _init_args(model_cls, variant, kwargs)
    kwargs = {name: plain(value) for name, value in kwargs.items()}
    cfg_argument, overlay, zoo_facts = _without_zoo_facts(
        kwargs.pop("pretrained_cfg", None), kwargs.pop("pretrained_cfg_overlay", None)
    )
    cfg = resolve_pretrained_cfg(variant, cfg_argument, overlay)
    if pretrained or cfg.source in ("hf-hub", "local-dir"):
        kwargs.pop("backbone_pretrained", None)  # the weights are those of the whole network
    if cfg.source in ("hf-hub", "local-dir"):  # timm's create_model has read it there
        target = str(cfg.hf_hub_id if cfg.source == "hf-hub" else cfg.file)
        return create_saved(cfg.source, target, pretrained, pretrained_cfg_overlay=overlay or None, **kwargs)
    if pretrained and not cfg.has_weights and cfg.state_dict is None and is_registered(cfg_argument, variant):
        cfg = resolve_pretrained_cfg(variant, _default_tag(variant), overlay)
    cache_dir = kwargs.pop("cache_dir", None)
    weights_id = cfg.hf_hub_id
    info = checkpoints().get(f"{variant}.{cfg.tag}") if cfg.tag else None
    if zoo_facts is None:
        zoo_facts = info.facts if info else {}
    # a name with a tag is one network, with its weights or without; timm's scripts give its configuration instead
    if info and (pretrained or cfg_argument):
        kwargs = {**info.model_args, **kwargs}
    if pretrained:
        cfg = _with_verified_weights(cfg, variant, cache_dir)
        kwargs = {**_stem_of(cfg.state_dict or {}, init_args, kwargs), **kwargs}
    recorded = {k: v for k, v in kwargs.items() if k in init_args and k not in _NOT_RECORDED}
    kwargs = {**(defaults or {}), **kwargs}
    kwargs.setdefault("img_size", tuple(cfg.input_size[-2:]))
    _check_extractor(variant, kwargs)
    model = build_model_with_cfg(
        # timm keeps cache_dir for itself; a backbone is downloaded to it, too
        partial(_created, model_cls, init_args, cache_dir=cache_dir),  # type: ignore[arg-type]
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
    _record(model, recorded, zoo_facts)
    return model


def _init_args(model_cls: type[nn.Module], variant: str, arguments: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that the network accepts.

    Raises:
        UnknownArgument: a given one is neither an argument of the network nor of timm's builder.
        ValueError: an invalid number of classes, channels or iterations.
    """
    init_args = [name for name in inspect.signature(model_cls.__init__).parameters if name != "self"]
    for name in arguments:
        if name not in _BUILDER_ARGS and name not in init_args:
            if name == "routing_iters":
                raise UnknownArgument(f"{variant} has no routing iterations: leave routing_iters out")
            raise UnknownArgument(unknown_name(f"argument of {variant}", name, [*init_args, "pretrained"]))
    for name, least in _COUNTS.items():
        value = arguments.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(f"{variant}: {name} must be a whole number of at least {least}, not {value!r}")
    return init_args


def plain(value: Any) -> Any:
    """The same value with numpy's numbers, such as labels.max() + 1, as Python's: they are no JSON."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value


def _without_zoo_facts(
    cfg: Any, overlay: Mapping[str, Any] | None
) -> tuple[Any, dict[str, Any], dict[str, Any] | None]:
    """A configuration and its overlay for timm, without the zoo's facts, for which timm has no field; and those facts.

    A model's ``pretrained_cfg`` has them (``capszoo._pretrained.facts``), and so has the ``config.json`` that timm's
    ``save_for_hf`` writes.
    """
    overlay = dict(overlay or {})
    zoo_facts = own_facts(overlay) or None
    set_own_facts(overlay, {})
    if isinstance(cfg, PretrainedCfg):
        cfg = {one.name: getattr(cfg, one.name) for one in fields(cfg)}
    if isinstance(cfg, Mapping):
        cfg = dict(cfg)
        if cfg.get("source") is None and zoo_facts is None:  # else they are not trusted yet
            zoo_facts = own_facts(cfg) or None
        set_own_facts(cfg, {})
    return cfg, overlay, zoo_facts


def is_registered(cfg: Any, variant: str) -> bool:
    """Whether a configuration is none, or the architecture's own, which timm's scripts resolve and give."""
    if not cfg:
        return True
    if isinstance(cfg, str) or get_pretrained_cfg(variant) is None:
        return False
    return resolve_pretrained_cfg(variant, cfg, None) == resolve_pretrained_cfg(variant, None, None)


def _default_tag(variant: str) -> str | None:
    """Tag that ``pretrained=True`` loads for a bare name: that of the canonical weights."""
    info = default_weights(checkpoints(), variant)
    return info.tag if info else None


def _with_verified_weights(cfg: PretrainedCfg, variant: str, cache_dir: str | Path | None) -> PretrainedCfg:
    """The same configuration with its weights as a state dict, read from a verified safetensors file.

    The state dict is then its only source. Otherwise, if timm finds no weights there, it uses the next source that a
    configuration names, which may be a pickle.
    """
    info = checkpoints().get(f"{variant}.{cfg.tag}") if cfg.tag else None
    tag = cfg.tag
    if cfg.state_dict is not None:
        if not cfg.state_dict:
            raise WeightsError(f"the state dict for {variant} holds no tensors")
        state = cfg.state_dict
    elif cfg.file:
        if not Path(cfg.file).is_file():
            raise WeightsError(f"{cfg.file}: no such file")
        state = load_safetensors(cfg.file)
    elif cfg.hf_hub_id and (info is None or cfg.hf_hub_id != info.hub_id):  # named by the caller
        sha256 = hub_config(str(cfg.hf_hub_id), cache_dir).sha256
        state = load_safetensors(download_weights(str(cfg.hf_hub_id), cache_dir, sha256 or ""))
        tag = _trusted_tag(variant, tag, sha256)
    elif info is not None:
        state = load_weights(info, cache_dir)
    elif cfg.url:
        raise WeightsError(
            f"weights are not loaded from a url ({cfg.url}): download them, and give file=PATH"
        )
    else:
        tags = [name for name in checkpoints() if name.startswith(f"{variant}.")]
        if tags:
            raise WeightsError(f"no pretrained weights exist for {variant}: use {' or '.join(tags)}")
        raise WeightsError(": ".join(without_weights(variant)))
    return replace(cfg, **{**NO_SOURCE, "tag": tag, "state_dict": state})


def _stem_of(
    state: Mapping[str, Any], init_args: Collection[str], kwargs: Mapping[str, Any]
) -> dict[str, str]:
    """The argument ``stem`` of an EncapNet's weights, if the size of the images would choose another one."""
    weight, size = state.get("stages.stem.conv.weight"), kwargs.get("img_size")
    if "stem" not in init_args or weight is None or size is None:
        return {}
    large = weight.shape[-1:] == (7,)  # a damaged file may hold a number
    return {} if large == (max(to_2tuple(size)) > 64) else {"stem": "resnet" if large else "conv"}


def _check_extractor(variant: str, kwargs: dict[str, Any]) -> None:
    """Refuse arguments of timm's extractor of feature maps that have no effect, or that need more; set its default."""
    for name in ("out_indices", "feature_cls"):
        if kwargs.get(name) is not None and not kwargs.get("features_only"):
            raise UnknownArgument(f"{variant}: {name} has no effect without features_only=True")
    if not kwargs.get("features_only"):
        return
    kwargs.setdefault("out_indices", None)
    feature_cls = kwargs.get("feature_cls")
    if feature_cls in (None, "getter") or not isinstance(feature_cls, str):
        return
    if feature_cls not in ("hook", "fx"):  # the feature maps are no direct children of the network
        raise ValueError(
            f"feature_cls={feature_cls!r} does not go with these networks: use 'getter', 'hook' or 'fx'"
        )
    if kwargs["out_indices"] is None:
        raise ValueError(f"feature_cls={feature_cls!r} needs out_indices, such as (0, 1)")


def _created(
    model_cls: type[ModelT],
    init_args: list[str],
    *,
    device: Any = None,
    dtype: torch.dtype | None = None,
    **args: Any,
) -> ModelT:
    """The network on ``device`` and in ``dtype``, without the defaults of timm's that it does not accept."""
    with torch.device(device) if device is not None else contextlib.nullcontext():
        net = model_cls(**{name: value for name, value in args.items() if name in init_args})
    # not PyTorch's default type, which other threads share
    return net if dtype is None else net.to(dtype)


def _record(model: Any, args: dict[str, Any], zoo_facts: Mapping[str, Any]) -> None:
    """Note the arguments of a model for timm's ``save_for_hf``, and the facts for which it has no field.

    timm's factory records the caller's arguments alone, and before 1.0.31 none: the configuration has them, too.
    """
    model._model_args = args
    described = {name: value for name, value in args.items() if name not in _FOUND_IN_CFG}
    kept = {"model_args": described} if described and _is_json(described) else {}
    # the arguments among them may be those of another network
    facts = {key: value for key, value in zoo_facts.items() if key != "model_args"}
    if getattr(model, "num_classes", 0) not in (0, model.pretrained_cfg.get("num_classes")):
        facts = for_new_classes(facts)
    set_own_facts(model.pretrained_cfg, {**facts, **kept})


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):  # a module given as the backbone
        return False
    return True


def create_saved(source: str, target: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Create the model that the ``config.json`` of a repository or a folder describes.

    timm reads such files too, but would load from any source of weights that they name. Here weights come only from
    ``model.safetensors`` beside them.

    Args:
        source: ``hf-hub`` or ``local-dir``.
        target: the repository or the folder.
        pretrained: load its weights.
        **kwargs: the caller's arguments, see :func:`create_described`.

    Raises:
        WeightsError: a file is missing or damaged, or they do not belong together.
    """
    cache_dir = kwargs.get("cache_dir")
    if source == "hf-hub":
        config = hub_config(target, cache_dir)
        path = download_weights(target, cache_dir, config.sha256 or "") if pretrained else None
    else:
        file = Path(target) / "config.json"
        if not file.is_file():
            raise WeightsError(
                f"{target}: no config.json in this folder: name one that has it; capszoo.load reads runs of training"
            )
        config = ModelConfig.read(file)
        path = local_weights(target)[0] if pretrained else None
    model = create_described(config, target, path, **kwargs)
    if source == "hf-hub":
        about: Any = model.pretrained_cfg
        about["hf_hub_id"] = target
    return model


def create_described(
    config: ModelConfig, where: str, weights: Path | None = None, **kwargs: Any
) -> nn.Module:
    """Create the model that metadata from elsewhere describe; see :mod:`capszoo._pretrained.demand`.

    Args:
        config: the checked metadata.
        where: name of the repository, folder or file in error messages.
        weights: its verified safetensors file; None for random weights.
        **kwargs: the caller's arguments, which override the described ones.

    Raises:
        WeightsError: the metadata describe no model, or not one of these weights.
    """
    architecture = config.architecture
    if not is_model(architecture):
        raise WeightsError(f"{where}: {unknown_name('architecture', architecture, architectures())}")
    cfg = untrusted_config(config.cfg, architecture, where)
    cfg["tag"] = _trusted_tag(architecture, config.cfg.get("tag"), config.sha256)
    set_own_facts(cfg, {**own_facts(cfg), **config.facts})
    state = load_safetensors(weights) if weights else None
    check_demand(
        partial(timm.create_model, architecture, pretrained_cfg=dict(cfg), **config.model_args), state, where
    )
    arguments = {**config.model_args, **{k: plain(v) for k, v in kwargs.items() if v is not None}}
    defaults = {"num_classes": cfg.get("num_classes"), "in_chans": cfg.get("input_size", (3,))[0]}
    with fitting(where):
        # older timm adapts the first convolution of its architectures from three channels, and knows no other number
        if state and not is_model_in_modules(architecture, MODULES) and defaults["in_chans"] != 3:
            if all(arguments.get(name, value) == value for name, value in defaults.items()):
                model = create_registered(architecture, pretrained_cfg=cfg, **{**defaults, **arguments})
                model.load_state_dict(state)
                return model
        if state:
            cfg["state_dict"] = state
        model = create_registered(architecture, bool(state), pretrained_cfg=cfg, **arguments)
    about: Any = model.pretrained_cfg
    about.pop("state_dict", None)
    return model


def create_registered(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """timm's ``create_model`` of a registered name, for a model that timm's ``save_for_hf`` describes whole."""
    model = timm.create_model(name, pretrained=pretrained, **kwargs)
    recorded: Any = getattr(model, "_model_args", None)
    args = own_facts(getattr(model, "pretrained_cfg", None) or {}).get("model_args", {})
    if recorded is not None and "backbone" in args:  # the caller's, which may name a folder and weights
        recorded.pop("backbone_pretrained", None)
        recorded.update(args)
    return model


def untrusted_config(cfg: Mapping[str, Any], architecture: str, where: str) -> dict[str, Any]:
    """A third-party configuration for timm: the registered one, updated with its description, without sources.

    Args:
        cfg: keys of timm's ``PretrainedCfg``; those that name a source are dropped.
        architecture: registered name. No file may redefine the layers of one of the zoo.
        where: name of the configuration in error messages.

    Raises:
        WeightsError: an invalid value.
    """
    base = get_pretrained_cfg(architecture)
    taken = described(cfg, where)
    if is_model_in_modules(architecture, MODULES):
        for key in ("first_conv", "classifier", "fixed_input_size"):
            taken.pop(key, None)
    return {**(base.to_dict() if base else {}), **NO_SOURCE, **taken, "architecture": architecture}


def _trusted_tag(architecture: str, tag: str | None, sha256: str | None) -> str | None:
    """The tag stated by a third-party configuration; None if the zoo has other weights under that name."""
    info = checkpoints().get(f"{architecture}.{tag}")
    return tag if info is None or info.sha256 == sha256 else None
