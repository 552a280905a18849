"""Use any timm model as a feature extractor: its last features as ``[b, c, h, w]``, whatever their layout."""

import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple

import timm
import torch
from timm.models import (
    PretrainedCfg,
    get_pretrained_cfg,
    is_model,
    parse_model_name,
    split_model_name_tag,
)
from torch import Tensor, nn

from capszoo._modes import evaluating
from capszoo._suggest import unknown_name

from ._builder import stranger_cfg
from ._metadata import ModelConfig, fitting
from ._pretrained import (
    HUB_FILENAME,
    WeightsError,
    download_weights,
    hub_config,
    load_safetensors,
    load_weights,
    local_weights,
    named_weights,
)

__all__ = ["BackboneFeatures", "backbone_args", "create_backbone", "described_backbone", "first_convolution"]


class Unused(nn.Module):
    """Replaces a part of a backbone that does not contribute to its features, such as its head."""

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return x


class BackboneFeatures(nn.Module):
    """A model's ``forward_features`` as a map ``[b, chans, *grid]``.

    ``[b, c, h, w]`` and ``[b, h, w, c]`` (Swin) stay maps. Of tokens ``[b, t, c]`` (ViT) the class and register tokens
    are dropped and the others arranged on their grid. A forward pass over a blank image determines the layout, and
    which parts of the model are not used; these are removed.

    Args:
        model: a model with ``forward_features``.
        in_chans, img_size: of the images.

    Raises:
        ValueError: the model has no feature map, or does not accept images of this size; one line.
    """

    def __init__(self, model: nn.Module, in_chans: int, img_size: Tuple[int, int]) -> None:
        super().__init__()
        name = type(model).__name__
        if not hasattr(model, "forward_features"):
            raise ValueError(
                f"{name} has no forward_features, so there is no feature map to attach a head to"
            )
        out, ran = _probe(model, in_chans, img_size)
        self.prefix = 0
        if out.dim() == 4:
            last = str(getattr(model, "output_fmt", "NCHW")).split(".")[-1] == "NHWC"
            self.layout = "NHWC" if last else "NCHW"
            self.chans = int(out.shape[3 if last else 1])
            self.grid = (
                (int(out.shape[1]), int(out.shape[2])) if last else (int(out.shape[2]), int(out.shape[3]))
            )
        elif out.dim() == 3:
            self.layout, self.prefix, self.chans = (
                "tokens",
                int(getattr(model, "num_prefix_tokens", 0)),
                out.shape[2],
            )
            self.grid = _token_grid(model, img_size)
            if self.grid[0] * self.grid[1] != out.shape[1] - self.prefix:
                raise ValueError(
                    f"the {out.shape[1]} tokens of {name} stand on no grid, so there is no feature map"
                )
        else:
            raise ValueError(f"{name} gives features of shape {tuple(out.shape)}, which are no feature map")
        uncalled = {
            key: child
            for key, child in model.named_children()
            if not any(module in ran for module in child.modules())
        }
        for key in uncalled:
            setattr(model, key, Unused())
        if not _gives(model, in_chans, img_size, out):
            # `forward_features` uses an attribute or another method of one of them, such as ViT's `rope`
            for key, child in uncalled.items():
                setattr(model, key, child)
            for key, child in uncalled.items():
                setattr(model, key, Unused())
                if not _gives(model, in_chans, img_size, out):
                    setattr(model, key, child)
        self.model: Any = model

    def forward(self, x: Tensor) -> Tensor:
        return self.to_map(self.model.forward_features(x))

    def to_map(self, x: Tensor) -> Tensor:
        """The model's layout to ``[b, chans, h, w]``."""
        if self.layout == "NHWC":
            return x.permute(0, 3, 1, 2)
        if self.layout == "tokens":
            return x[:, self.prefix :].transpose(1, 2).unflatten(2, [self.grid[0], self.grid[1]])
        return x


def _probe(model: nn.Module, in_chans: int, img_size: Tuple[int, int]) -> Tuple[Tensor, Set[nn.Module]]:
    """Features of a blank image, and the modules that were called to compute them."""
    ran: Set[nn.Module] = set()
    hooks = [
        m.register_forward_hook(lambda module, *_: ran.add(module)) for m in model.modules() if m is not model
    ]
    like = next(model.parameters())
    try:
        with evaluating(model), torch.no_grad():
            out = model.forward_features(  # type: ignore[operator]
                torch.zeros(1, in_chans, *img_size, device=like.device, dtype=like.dtype)
            )
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        size = f"{in_chans}x{img_size[0]}x{img_size[1]}"
        raise ValueError(f"{type(model).__name__} does not take {size} images: {reason}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(out, Tensor):
        raise ValueError(
            f"{type(model).__name__} gives {type(out).__name__} as features, which is no feature map"
        )
    return out, ran


def _gives(model: nn.Module, in_chans: int, img_size: Tuple[int, int], features: Tensor) -> bool:
    """Whether the features of a blank image are still those of the whole model."""
    try:
        found = _probe(model, in_chans, img_size)[0]
    except (AttributeError, TypeError, ValueError):
        return False
    return found.shape == features.shape and (found.is_meta or torch.equal(found, features))


def _token_grid(model: Any, img_size: Tuple[int, int]) -> Tuple[int, int]:
    for holder in ("patch_embed", "stem"):
        patches = getattr(model, holder, None)
        size = getattr(patches, "patch_size", None)
        if size is not None:
            rows, columns = (size, size) if isinstance(size, int) else size
            return img_size[0] // rows, img_size[1] // columns
    return 0, 0


def _registered_cfg(name: str) -> Any:
    """timm's configuration of a name with or without a tag; None if it has none.

    Raises:
        ValueError: an unknown name or tag; the message suggests the nearest.
    """
    architecture, _ = split_model_name_tag(name)
    if not is_model(architecture):
        raise ValueError(unknown_name("backbone", architecture, timm.list_models()))
    try:
        return get_pretrained_cfg(name, allow_unregistered=True)
    except RuntimeError as error:  # a tag that timm does not know
        known = timm.list_pretrained(f"{architecture}.*")
        raise ValueError(unknown_name("backbone", name, known or [architecture])) from error


#: Arguments of a backbone that the network around it sets.
_SET_BY_NETWORK = ("num_classes", "in_chans", "img_size", "global_pool")


def described_backbone(name: str, cache_dir: Optional[str] = None) -> Optional[ModelConfig]:
    """The ``config.json`` of a repository or a folder that is used as a backbone; None for a timm name.

    Raises:
        WeightsError: there is no such file, it is no model configuration, or it names an unknown model; one line.
    """
    source, target = parse_model_name(name)
    if not source:
        return None
    if source == "hf-hub":
        config = hub_config(target, cache_dir)
    else:
        config = ModelConfig.read(_saved_file(target, "config.json"))
    if not is_model(config.architecture):
        raise WeightsError(
            f"{target}: config.json: {unknown_name('architecture', config.architecture, timm.list_models())}"
        )
    return config


def backbone_args(config: ModelConfig) -> Dict[str, Any]:
    """Arguments that make the backbone's network, without those that :func:`create_backbone` sets."""
    return {key: value for key, value in config.model_args.items() if key not in _SET_BY_NETWORK}


def _saved_file(folder: str, name: str) -> Path:
    path = Path(folder) / name
    if not path.is_file():
        raise WeightsError(
            f"{folder} has no {name}: save the backbone with timm's save_for_hf(model, folder, "
            "safe_serialization=True), which writes config.json and model.safetensors; nothing else is loaded"
        )
    return path


def create_backbone(
    name: str,
    pretrained: bool = False,
    in_chans: int = 3,
    img_size: Optional[Tuple[int, int]] = None,
    cache_dir: Optional[str] = None,
    extra: Optional[Dict[str, Any]] = None,
) -> nn.Module:
    """A timm model without its classifier.

    Args:
        name: timm name (``"resnet18.a1_in1k"``), ``"hf-hub:USER/NAME"`` or ``"local-dir:folder"``.
        pretrained: load its weights, only from safetensors; without it, nothing is downloaded for a timm name.
        in_chans: input channels.
        img_size: (rows, columns), for models with a fixed input size; None keeps the model's default.
        cache_dir: folder for downloads.
        extra: further arguments of the model, beside those in its ``config.json``.

    Raises:
        ValueError: an unknown name; the message suggests the nearest. Also a model that timm does not create without
            its classifier, or for this image size.
        WeightsError: there are no weights, they do not fit, or there is no network; one line.
    """
    source, target = parse_model_name(name)
    config = described_backbone(name, cache_dir)
    architecture = target if config is None else config.architecture
    arguments: Dict[str, Any] = dict(extra or {}, num_classes=0, global_pool="", in_chans=in_chans)
    if config is None:
        cfg = _registered_cfg(target)
    else:  # timm would read the file itself, with every source that it names and no check of the sha256
        described = stranger_cfg(config.cfg, architecture, target)
        cfg = PretrainedCfg(**described)
        arguments = {**backbone_args(config), **arguments, "pretrained_cfg": described}
    state: Dict[str, Tensor] = {}
    if pretrained and config is None and target in named_weights():
        state = load_weights(named_weights()[target], cache_dir)
    elif pretrained and config is None:
        if cfg is None or not cfg.hf_hub_id:
            raise WeightsError(
                f"timm has no weights of {target} on the Hub: leave pretrained out, or use local-dir:"
            )
        state = load_safetensors(download_weights(str(cfg.hf_hub_id), cache_dir))
    elif pretrained and config is not None:
        if source == "hf-hub":
            state = load_safetensors(download_weights(target, cache_dir, config.sha256 or ""))
        else:
            _saved_file(target, HUB_FILENAME)
            state = load_safetensors(local_weights(target)[0])
    sized = {**arguments, "img_size": img_size} if img_size else arguments
    try:
        try:
            return _create(architecture, cfg, state, target, sized)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            # a convolutional network takes any size
            return _create(architecture, cfg, state, target, arguments)
    except AssertionError as error:
        raise ValueError(
            f"{target} cannot be a backbone: timm does not create it with {_stated(sized)}"
        ) from error


def _create(
    architecture: str, cfg: Any, state: Dict[str, Tensor], where: str, arguments: Dict[str, Any]
) -> nn.Module:
    """The model, with the tensors of ``state`` unless it is empty.

    timm loads them non-strictly if it removes the classifier, so that missing layers would stay random. Here they are
    loaded strictly first. A checkpoint may have more tensors than the backbone, and may lack norms that timm creates
    only without a pooling.

    Raises:
        WeightsError: they do not fit.
    """
    if not state:
        return timm.create_model(architecture, **arguments)
    classifiers = getattr(cfg, "classifier", None) or ()
    names = (classifiers,) if isinstance(classifiers, str) else classifiers
    dropped = {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
    kept = {key: value for key, value in state.items() if key not in dropped}
    overlay: Dict[str, Any] = dict(source=None, custom_load=False)
    if getattr(cfg, "first_conv", None):  # timm uses it to adapt the weights to other channels
        overlay["first_conv"] = cfg.first_conv

    def load(**more: Any) -> nn.Module:
        # a copy, because timm adapts the tensors in place
        whole = {**overlay, **more, "state_dict": dict(kept)}
        return timm.create_model(architecture, pretrained=True, pretrained_cfg_overlay=whole, **arguments)

    with fitting(where):
        try:
            return load(num_classes=0, label_offset=0)
        except RuntimeError as error:
            lines = [line for line in str(error).splitlines() if "Missing key(s)" in line]
            missing = [key for line in lines for key in re.findall(r'"([^"]+)"', line)]
            if any("norm" not in key for key in missing):
                raise
        return load(num_classes=1)  # another number than the backbone's: timm loads non-strictly


def _stated(arguments: Dict[str, Any]) -> str:
    shown = ("num_classes", "global_pool", "in_chans", "img_size")
    return ", ".join(f"{key}={arguments[key]!r}" for key in shown if key in arguments)


def create_backbone_cfg(name: str, config: Optional[ModelConfig]) -> Dict[str, Any]:
    """Configuration of a backbone before it is created: timm's, with the description of a repository or a folder.

    Args:
        name: of the backbone.
        config: its ``config.json`` (:func:`described_backbone`); None for a timm name.

    Raises:
        ValueError: an unknown name; the message suggests the nearest.
    """
    _, target = parse_model_name(name)
    if config is not None:
        return stranger_cfg(config.cfg, config.architecture, target)
    cfg = _registered_cfg(target)
    return cfg.to_dict() if cfg is not None else {}


def first_convolution(model: nn.Module) -> Optional[str]:
    """Name of the first convolution, from the model's configuration or else the first in module order."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    named = cfg.get("first_conv")
    if isinstance(named, (tuple, list)):
        named = named[0] if named else None
    if named:
        return str(named)
    return next((key for key, module in model.named_modules() if isinstance(module, nn.Conv2d)), None)


def feature_levels_of(
    model: Any, prefix: str, chans: int, img_size: Tuple[int, int], grid: Tuple[int, int]
) -> List[dict]:
    """timm's ``feature_info`` of a model, with its modules under ``prefix``; one level, its parent, if it has none."""
    info = getattr(model, "feature_info", None)
    if info is not None and hasattr(model, "forward_intermediates"):
        levels = info.get_dicts() if hasattr(info, "get_dicts") else list(info)
        return [dict(level, module=f"{prefix}.{level['module']}") for level in levels]
    return [dict(num_chs=chans, reduction=max(1, img_size[0] // grid[0]), module=prefix.rpartition(".")[0])]
