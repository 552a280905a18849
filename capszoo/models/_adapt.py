"""Adapt the weights of a checkpoint to a model with other input channels, classes or image size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import WeightsError

_logger = logging.getLogger(__name__)


def _fit_input_channels(weight: Tensor, in_chans: int) -> Tensor:
    """First convolution ``[o, c, k, l]`` for another number of input channels.

    The response to images whose channels are equal is kept, except for several channels that are fewer than the
    checkpoint's: then only the scale is.
    """
    source = weight.shape[1]
    if in_chans == source:
        return weight
    if in_chans == 1:
        return weight.sum(dim=1, keepdim=True)
    index = torch.arange(in_chans) % source
    if in_chans < source:
        return weight[:, index] * (source / in_chans)
    return weight[:, index] / torch.bincount(index)[index].reshape(1, -1, 1, 1)


def _below(modules: Iterable[str]) -> Callable[[str], bool]:
    """Whether a key belongs to one of these modules."""
    prefixes = tuple(f"{name}." for name in modules)
    return lambda key: key.startswith(prefixes)


def _refuse_another_grid(source: Sequence[int], size: Sequence[int]) -> None:
    """Refuse weights whose shapes fit a grid of as many positions with other numbers of rows and columns.

    Raises:
        WeightsError: of the image's two sides one is longer and one is shorter, so that the grid is another one.
    """
    if (source[0] - size[0]) * (source[1] - size[1]) < 0:
        raise WeightsError(
            f"weights of {source[0]}x{source[1]} images do not fit images of {size[0]}x{size[1]}, "
            "whose grid has other rows and columns: resize the images"
        )


def adapt_state_dict(
    state_dict: dict[str, Tensor], model: nn.Module, first_conv: str | None = None
) -> dict[str, Tensor]:
    """Adapt a checkpoint to a model that differs in input channels, classes, image size or decoder.

    Tensors that do not depend on the difference are copied. For another image size, a network may resample others
    (``CapsuleNet.resampled``). The rest keep the model's initial values; one log line lists them, and the
    model's attribute ``untrained``, without the decoder's. The result always has exactly the model's keys, so
    that it loads strictly. (timm calls this as ``pretrained_filter_fn``.)

    Args:
        state_dict: the checkpoint.
        model: the model to adapt it to; its ``pretrained_cfg`` describes the checkpoint.
        first_conv: name of the first convolution, unless the model has one of its own; None uses the configuration's.

    Raises:
        WeightsError: a tensor is missing, unknown or of another shape, and no such difference explains it.
    """
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    own = model.state_dict()
    classifier = cfg.get("classifier") or ()
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    first_conv = getattr(model, "first_conv", None) or first_conv or cfg.get("first_conv")
    other_classes = cfg.get("num_classes") != getattr(model, "num_classes", None)
    source_size = tuple(cfg.get("input_size") or ())[-2:]
    other_size = bool(source_size) and source_size != tuple(getattr(model, "img_size", source_size))
    # the shapes of a backbone's weights may depend on the size although its head's do not
    depends = getattr(model, "fixed_input_size", True) or hasattr(model, "backbone_cfg")
    size_matters = other_size and depends
    without_head = getattr(model, "num_classes", None) == 0
    in_head, in_readout = _below(heads), _below(getattr(model, "readout", ()))
    resampled: dict[str, Tensor] = {}
    if other_size and (rule := getattr(model, "resampled", None)):
        kept = {key: value for key, value in state_dict.items() if not (other_classes and in_head(key))}
        resampled = rule(kept, source_size)
        if resampled:
            _logger.warning("resampled for another img_size: %s", ", ".join(resampled))
        state_dict = {**state_dict, **resampled}
    fitted: dict[str, Tensor] = {}
    fresh: list[str] = []
    wrong: list[str] = []
    for key, value in own.items():
        tensor = state_dict.get(key)
        if (
            tensor is not None
            and key == f"{first_conv}.weight"
            and tensor.ndim == value.ndim
            and tensor.numel()
        ):
            tensor = _fit_input_channels(tensor, value.shape[1])
        if tensor is not None and tensor.shape == value.shape and not (other_classes and in_head(key)):
            fitted[key] = tensor
        elif (
            key.startswith("decoder.")
            or (other_classes and (in_head(key) or (tensor is None and in_readout(key))))
            or (size_matters and tensor is not None)
        ):
            fitted[key] = value
            fresh.append(key)
        else:
            wrong.append(
                f"{key} {'missing' if tensor is None else f'{tuple(tensor.shape)} for {tuple(value.shape)}'}"
            )
    unknown = [
        k
        for k in state_dict
        if k not in own
        and not k.startswith("decoder.")
        and not (without_head and (in_head(k) or in_readout(k)))
    ]
    if wrong or unknown:
        what = "; ".join(wrong[:3] + [f"{k} unknown" for k in unknown[:3]])
        remedy = "create it with the arguments they were trained with"
        if "stages.backbone." in what:
            remedy += ", or use pretrained=False with backbone_pretrained=True for the backbone's own weights"
        raise WeightsError(f"the weights do not fit this model ({what}): {remedy}")
    untrained = tuple(key for key in fresh if not key.startswith("decoder."))
    if other_size and cfg.get("fixed_input_size") and not resampled and not untrained:
        _refuse_another_grid(source_size, model.img_size)  # type: ignore[arg-type]
    if untrained:
        model.untrained = untrained  # type: ignore[assignment]
    if fresh:
        outside = other_size and not (other_classes and all(map(in_head, fresh)))
        why = [w for w, on in (("num_classes", other_classes), ("img_size", outside)) if on] or ["decoder"]
        _logger.warning("re-initialised for another %s: %s", " and ".join(why), ", ".join(fresh))
    return fitted
