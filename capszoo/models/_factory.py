"""Create, list and describe models: ``create_model``, ``list_models`` and ``model_info``, as timm names them."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from timm.models import (
    get_pretrained_cfg,
    is_model,
    model_entrypoint,
    parse_model_name,
    split_model_name_tag,
)
from torch import nn

from .._pretrained.catalogue import check_name, checkpoints, shell_pattern
from .._pretrained.facts import model_input_size
from .._pretrained.info import WeightsInfo
from ..errors import UnknownModel, unknown_name
from ._builder import MODULES, create_registered, create_saved, plain


def list_models(
    filter: str | Sequence[str] = "", pretrained: bool = False, *, exclude_filters: str | Sequence[str] = ""
) -> list[str]:
    """Names of the zoo's architectures, sorted; with ``pretrained`` those with weights, including their tags.

    Args:
        filter: shell pattern, or several, one of which must match; a word without wildcards matches anywhere in a name.
        pretrained: list ``name.tag`` of every checkpoint instead.
        exclude_filters: shell patterns of names to leave out; a word without wildcards is a whole name.

    Examples:
        >>> list_models("encapnet_v?")
        ['encapnet_v1', 'encapnet_v2', 'encapnet_v3']
        >>> "capsnet_dynamic.mnist" in list_models(pretrained=True)
        True
    """
    names = (
        list(checkpoints())
        if pretrained
        else sorted({name for module in MODULES for name in timm.list_models(module=module)})
    )
    wanted = [shell_pattern(one) for one in _several(filter)]
    unwanted = _several(exclude_filters)  # as in timm: a word is the whole name
    if pretrained:  # as in timm: a pattern without a tag is of the architecture
        wanted += [f"{one}.*" for one in wanted if "." not in one]
        unwanted += [f"{one}.*" for one in unwanted if "." not in one]
    return [
        name
        for name in names
        if (not wanted or any(fnmatch.fnmatch(name, pattern) for pattern in wanted))
        and not any(fnmatch.fnmatch(name, pattern) for pattern in unwanted)
    ]


def _several(filters: str | Sequence[str]) -> list[str]:
    return [one for one in ([filters] if isinstance(filters, str) else filters) if one]


def list_pretrained(filter: str | Sequence[str] = "") -> list[str]:
    """``name.tag`` of every checkpoint that exists, sorted."""
    return list_models(filter, pretrained=True)


def _check_name(name: str) -> None:
    """Raise UnknownModel unless ``name`` (with or without a tag) can be created: a model of the zoo or of timm."""
    architecture, tag = split_model_name_tag(name)
    ours = list_models()
    if architecture in ours or not is_model(architecture):
        check_name(name, ours)
    elif tag:
        try:
            get_pretrained_cfg(name, allow_unregistered=True)
        except RuntimeError as error:  # a tag that timm does not know
            tags = timm.list_pretrained(f"{architecture}.*")
            raise UnknownModel(unknown_name("model", name, tags or [architecture])) from error


def create_model(
    name: str,
    pretrained: bool = False,
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    routing_iters: int | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Create a model by name, as ``timm.create_model`` does.

    Args:
        name: registered name (``"idpa_resnet"``), name and tag (``"idpa_resnet.cifar10"``), ``"hf-hub:USER/NAME"``
            or ``"local-dir:folder"``.
        pretrained: load weights: bundled ones offline, others through the Hub.
        num_classes: classes; if it differs from the weights', the class capsules are new. 0: pooled features.
        in_chans: input channels; the first convolution is adapted to them.
        img_size: input size, one number or (height, width), in pixels.
        routing_iters: routing iterations, if the architecture has any.
        **kwargs: arguments of the architecture; see its docstring.

    Raises:
        UnknownModel: no such name, or no such weights.
        UnknownArgument: a keyword that the architecture does not accept.
        WeightsError: the weights are missing, damaged or do not fit.
        ValueError: an invalid value, such as a negative ``num_classes``.

    Examples:
        >>> import torch
        >>> net = create_model("resnet20_routingcaps", num_classes=4, in_chans=3, img_size=36).eval()
        >>> tuple(net(torch.zeros(2, 3, 36, 36)).shape)
        (2, 4)
        >>> create_model("resnet20_routingcap")
        Traceback (most recent call last):
        capszoo.errors.UnknownModel: ...
    """
    try:
        source, target = parse_model_name(name)
    except ValueError as error:  # a path, or an unknown prefix
        if not os.path.exists(name):
            raise UnknownModel(str(error)) from None
        saved = (Path(name) / "config.json").is_file()
        remedy = f"local-dir:{name}" if saved else f"capszoo.load({name!r}).net"
        raise UnknownModel(f"{name} is a path: use {remedy}") from None
    if not source:
        _check_name(target)
    elif source == "local-dir" and not Path(target).is_dir():
        raise UnknownModel(f"{target}: no such folder")
    settings = dict(
        num_classes=num_classes, in_chans=in_chans, img_size=img_size, routing_iters=routing_iters
    )
    kwargs.update({k: v for k, v in settings.items() if v is not None})
    # here too: timm records the caller's, for `save_for_hf`
    kwargs = {k: plain(v) for k, v in kwargs.items()}
    if source:
        return create_saved(source, target, pretrained, **kwargs)
    return create_registered(name, pretrained, **kwargs)


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model that need no forward pass.

    Attributes:
        description: first line of the architecture's docstring.
        num_params: number of parameters.
        num_classes: classes; 0 without a class layer.
        input_size: channels, height and width in pixels.
        weights: the architecture's checkpoints, or the one of the tag.
        paper_ids: such as ``"arXiv:2002.04764"``.
        license: of the code; weights state their own.
    """

    name: str
    description: str
    num_params: int
    num_classes: int
    input_size: tuple[int, int, int]
    weights: tuple[WeightsInfo, ...]
    paper_ids: tuple[str, ...]
    license: str


def model_info(name: str, **kwargs: Any) -> ModelInfo:
    """Describe a model: parameters (counted on the meta device), input, weights, paper.

    Args:
        name: registered name, with or without a tag.
        **kwargs: as for :func:`create_model`.

    Raises:
        UnknownModel: no such name, or no such weights.

    Examples:
        >>> info = model_info("capsnet_dynamic")
        >>> info.num_params, info.input_size
        (6804224, (1, 28, 28))
    """
    _check_name(name)
    bundled = checkpoints().get(name)  # a checkpoint has the arguments that it was built with
    trained = bundled.model_args if bundled else {}
    return describe(name, create_model(name, device="meta", **{**trained, **kwargs}))


def describe(name: str, model: nn.Module, weights: tuple[WeightsInfo, ...] | None = None) -> ModelInfo:
    """:func:`model_info` of a model that exists already.

    Args:
        name: a registered name, with or without a tag; with ``weights`` any other name of a model.
        model: the model.
        weights: metadata of the weights of a folder, a file or a repository; None for those of a registered name.
    """
    registered = weights is None
    cfg: Any = getattr(model, "pretrained_cfg", None) or {}
    architecture = split_model_name_tag(name)[0] if registered else str(cfg.get("architecture"))
    if weights is None:
        weights = tuple(info for full, info in checkpoints().items() if name in (full, info.architecture))
    ours = registered or architecture in list_models()
    entry = get_pretrained_cfg(name if registered else architecture) if ours else None
    papers = entry.paper_ids or () if entry and not _other_head(architecture, model) else ()
    docstring = (model_entrypoint(architecture).__doc__ or "") if ours else type(model).__name__
    return ModelInfo(
        name=name,
        description=docstring.strip().split("\n")[0].replace("``", "`"),  # text of pages and terminals
        num_params=sum(p.numel() for p in model.parameters()),
        num_classes=int(getattr(model, "num_classes", 0)),
        input_size=model_input_size(model),
        weights=weights,
        paper_ids=(papers,) if isinstance(papers, str) else tuple(papers),
        license="apache-2.0" if registered else weights[0].license if weights else "",
    )


def _other_head(architecture: str, model: nn.Module) -> bool:
    """Whether a ``caps_head`` has another routing than its default, whose paper the registry names."""
    routing = getattr(getattr(model, "head", None), "routing", "idpa")
    return architecture == "caps_head" and routing != "idpa"
