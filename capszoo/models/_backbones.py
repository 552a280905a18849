"""Use any timm model as a feature extractor: its last features as ``[b, c, h, w]``, whatever their layout."""

import inspect
import logging
import re
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

import timm
import torch
import torch.nn.functional as F
from timm.models import (
    PretrainedCfg,
    get_pretrained_cfg,
    is_model,
    parse_model_name,
    split_model_name_tag,
)
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from capszoo.errors import WeightsError, first_line, unknown_name
from capszoo.layers._layout import split_axis
from capszoo.models._inspect import evaluating

from .._pretrained.catalogue import checkpoints
from .._pretrained.checks import ModelConfig
from .._pretrained.demand import fitting
from .._pretrained.files import (
    HUB_FILENAME,
    download_weights,
    hub_config,
    load_safetensors,
    load_weights,
    local_weights,
)
from .._utils.files import read_json_object
from ._builder import untrusted_config

torch.fx.wrap("split_axis")

_logger = logging.getLogger(__name__)


#: What a classifier is called at the top of a network; timm's interface states more (:func:`_classifier_parts`).
_CLASSIFIER_NAMES = ("head", "fc", "classifier", "global_pool")


class Unused(nn.Module):
    """Stands where a backbone had a part of its classifier. A call is an error, never a silent identity."""

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        raise RuntimeError("this part of the backbone's classifier was removed: the capsule head replaces it")


class BackboneFeatures(nn.Module):
    """A model's ``forward_features`` as a map ``[b, chans, *grid]``.

    ``[b, c, h, w]`` and ``[b, h, w, c]`` (Swin) stay maps. Of tokens ``[b, t, c]`` (ViT) the class and register tokens
    are dropped and the others arranged on the grid that the model states. A forward pass over a blank image gives the
    shape. The model loses its classifier (:func:`_classifier_parts`) and nothing else; a log line names what it lost.

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
        called: Set[int] = set()
        watch = register_module_forward_pre_hook(lambda module, _: called.add(id(module)))
        try:
            out = _blank_features(model, in_chans, img_size)
        finally:
            watch.remove()
        self.prefix = 0
        if out.dim() == 4:
            last = str(getattr(model, "output_fmt", "NCHW")).split(".")[-1] == "NHWC"
            self.layout = "NHWC" if last else "NCHW"
            _, self.chans, *grid = (out.permute(0, 3, 1, 2) if last else out).shape
            self.grid: Tuple[int, int] = (grid[0], grid[1])
        elif out.dim() == 3:
            self.layout, self.chans = "tokens", int(out.shape[2])
            self.prefix = _prefix_tokens(model)
            self.grid = _token_grid(model, in_chans, img_size, int(out.shape[1]), self.prefix)
        else:
            raise ValueError(f"{name} gives features of shape {tuple(out.shape)}, which are no feature map")
        _remove_classifier(model, called)
        self.model: Any = model

    def forward(self, x: Tensor) -> Tensor:
        return self.to_map(self.model.forward_features(x))

    def to_map(self, x: Tensor) -> Tensor:
        """The model's layout to ``[b, chans, h, w]``."""
        if self.layout == "NHWC":
            return x.permute(0, 3, 1, 2)
        if self.layout == "tokens":
            return split_axis(x[:, self.prefix :].transpose(1, 2), 2, [self.grid[0], self.grid[1]])
        return x


class BackboneLevels(BackboneFeatures):
    """The maps of a model's last levels as one map ``[b, chans, *grid]``: channels of the lower levels come first.

    The last map is that of :class:`BackboneFeatures`. Those of the levels below it are timm's intermediate features,
    average-pooled to its grid.

    Args:
        model: a model with ``forward_features`` and timm's ``forward_intermediates``.
        in_chans, img_size: of the images.
        levels: number of maps.
        last: levels that :func:`prune_stages` left, because timm counts dropped ones too; None: all.

    Raises:
        ValueError: as :class:`BackboneFeatures`; or the model has no intermediate features, or fewer levels; one line.
    """

    def __init__(
        self,
        model: nn.Module,
        in_chans: int,
        img_size: Tuple[int, int],
        levels: int,
        last: Optional[int] = None,
    ) -> None:
        name = type(model).__name__
        if not hasattr(model, "forward_intermediates"):
            raise ValueError(
                f"{name} has no forward_intermediates, so its last map is the only one: leave levels={levels} out, "
                "or choose another backbone"
            )
        if last is not None and levels > last:
            raise ValueError(f"{name} has {last} levels up to out_index={last - 1}, not levels={levels}")
        super().__init__(model, in_chans, img_size)
        self.levels = levels
        self.indices = levels if last is None else list(range(last - levels, last))
        try:
            with evaluating(model), torch.no_grad():
                maps = self._maps(_blank_image(model, in_chans, img_size))
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{name} has no {levels} levels of maps (levels={levels}): {first_line(error)}"
            ) from error
        if len(maps) != levels or any(part.dim() != 4 for part in maps):
            raise ValueError(f"{name} has no {levels} levels of maps (levels={levels}): use fewer")
        #: Channels of the maps below the last one.
        self.lower_chans = tuple(int(part.shape[1]) for part in maps[:-1])
        self.chans = sum(int(part.shape[1]) for part in maps)

    def _maps(self, x: Tensor) -> List[Tensor]:
        final, maps = self.model.forward_intermediates(x, indices=self.indices)
        return [*maps[:-1], self.to_map(final)]

    def forward(self, x: Tensor) -> Tensor:
        if self.levels == 1:  # pruned
            return self.to_map(self.model.forward_features(x))
        maps = self._maps(x)
        grid = (maps[-1].shape[2], maps[-1].shape[3])
        return torch.cat([*(F.adaptive_avg_pool2d(part, grid) for part in maps[:-1]), maps[-1]], dim=1)


def _blank_features(model: nn.Module, in_chans: int, img_size: Tuple[int, int]) -> Tensor:
    """Features of a blank image, for their shape."""
    try:
        with evaluating(model), torch.no_grad():
            out = model.forward_features(_blank_image(model, in_chans, img_size))  # type: ignore[operator]
    except (AssertionError, RuntimeError, ValueError) as error:
        size = f"{in_chans}x{img_size[0]}x{img_size[1]}"
        raise ValueError(
            f"{type(model).__name__} does not take {size} images: {first_line(error)}"
        ) from error
    if not isinstance(out, Tensor):
        raise ValueError(
            f"{type(model).__name__} gives {type(out).__name__} as features, which is no feature map"
        )
    return out


def _blank_image(model: nn.Module, in_chans: int, img_size: Tuple[int, int]) -> Tensor:
    like = next(model.parameters())
    return torch.zeros(1, in_chans, *img_size, device=like.device, dtype=like.dtype)


def _prefix_tokens(model: nn.Module) -> int:
    """Tokens before those of the grid: as the model states, else one if it has a class token."""
    count = getattr(model, "num_prefix_tokens", None)
    if count is not None:
        return int(count)
    return int(any(key.startswith("cls_token") for key, _ in model.named_parameters(recurse=False)))


def _token_grid(
    model: Any, in_chans: int, img_size: Tuple[int, int], tokens: int, prefix: int
) -> Tuple[int, int]:
    """Rows and columns of the tokens behind the prefix: the first statement of the model that has as many places.

    Raises:
        ValueError: none has; the message has the tokens and what the model states.
    """
    grids: List[str] = []
    for where, find in (
        ("patch_embed", _patch_grid),
        ("forward_intermediates", _last_level_grid),
        ("feature_info", _reduced_grid),
    ):
        grid = find(model, in_chans, img_size)
        if grid is not None and grid[0] * grid[1] == tokens - prefix:
            return grid
        if grid is not None:
            grids.append(f"{grid[0]}x{grid[1]} by its {where}")
    name = type(model).__name__
    if not grids:
        raise ValueError(
            f"{name} gives {tokens} tokens and states no grid for them: give it a patch_embed with a grid_size, "
            "or feature_info with a reduction"
        )
    raise ValueError(
        f"{name} gives {tokens} tokens, {prefix} of them before those of the image, and states another grid "
        f"({', '.join(grids)}), so there is no feature map"
    )


def _patch_grid(model: Any, in_chans: int, img_size: Tuple[int, int]) -> Optional[Tuple[int, int]]:
    for holder in ("patch_embed", "stem"):
        patches: Any = getattr(model, holder, None)
        grid, size = getattr(patches, "grid_size", None), getattr(patches, "patch_size", None)
        if hasattr(patches, "dynamic_feat_size"):  # one for any size has the grid of its own in grid_size
            grid = patches.dynamic_feat_size(img_size)
        elif grid is None and size is not None:
            rows, columns = (size, size) if isinstance(size, int) else size
            grid = (img_size[0] // rows, img_size[1] // columns)
        if isinstance(grid, (tuple, list)) and len(grid) == 2:
            return int(grid[0]), int(grid[1])
    return None


def _last_level_grid(model: Any, in_chans: int, img_size: Tuple[int, int]) -> Optional[Tuple[int, int]]:
    if not hasattr(model, "forward_intermediates"):
        return None
    try:
        with evaluating(model), torch.no_grad():
            levels = model.forward_intermediates(
                _blank_image(model, in_chans, img_size),
                indices=1,
                output_fmt="NCHW",
                intermediates_only=True,
            )
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError):
        return None  # a model of another interface, or one without maps
    last = levels[-1] if isinstance(levels, (tuple, list)) and levels else None
    return (int(last.shape[2]), int(last.shape[3])) if isinstance(last, Tensor) and last.dim() == 4 else None


def _reduced_grid(model: Any, in_chans: int, img_size: Tuple[int, int]) -> Optional[Tuple[int, int]]:
    info: Any = getattr(model, "feature_info", None)
    levels = info.get_dicts() if hasattr(info, "get_dicts") else info
    reduction = levels[-1].get("reduction") if levels else None
    return (-(-img_size[0] // reduction), -(-img_size[1] // reduction)) if reduction else None


def _remove_classifier(model: nn.Module, called: Set[int]) -> None:
    """Replace the parts of the classifier by :class:`Unused` and log their names."""
    removed = []
    for key in _classifier_parts(model, called):
        parent, _, attribute = key.rpartition(".")
        weights = sum(p.numel() for p in model.get_submodule(key).parameters())
        setattr(model.get_submodule(parent), attribute, Unused())
        removed.append(f"{key} ({weights:,} weights)" if weights else key)
    if removed:
        _logger.info("removed the classifier of %s: %s", type(model).__name__, ", ".join(removed))


def _classifier_parts(model: Any, called: Set[int]) -> List[str]:
    """Names of the modules of a model's classifier, none of which its features use.

    These are what timm's ``get_classifier`` returns, what ``forward_head`` names, which timm defines as the way from
    features to scores, and the parts with a classifier's usual names. A part stays that the features called, or that
    their code names in any branch, such as one for training.

    Args:
        model: the model.
        called: ids of the modules that a forward pass of its features called.
    """
    by_features = _names_in_code(model, "forward_features", "forward_intermediates") | {
        key.split(".")[0] for key, m in model.named_modules(remove_duplicate=False) if id(m) in called
    }
    by_head = {*_names_in_code(model, "forward_head"), *_CLASSIFIER_NAMES}
    top = {key for key, _ in model.named_children() if key in by_head}
    try:
        classifier = model.get_classifier()
    except (AttributeError, TypeError):  # there is none, or timm's method looks into a head that is not there
        classifier = ()
    classifiers = classifier if isinstance(classifier, (tuple, list)) else (classifier,)
    inner = [
        key for key, module in model.named_modules() if key and any(module is one for one in classifiers)
    ]
    parts = sorted(top) + [key for key in inner if key.split(".")[0] not in top]
    return [key for key in parts if key.split(".")[0] not in by_features]


def _names_in_code(model: Any, *methods: str) -> Set[str]:
    """Names in the code of a model's methods, and of the methods that this code names, in any branch."""
    names: Set[str] = set()
    waiting = list(methods)
    while waiting:
        member = getattr(type(model), waiting.pop(), None)
        code = getattr(inspect.unwrap(getattr(member, "fget", member)), "__code__", None)  # type: ignore[arg-type]
        fresh = set(code.co_names) - names if code else set()
        names |= fresh
        waiting += fresh
    return names


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
        tags = timm.list_pretrained(f"{architecture}.*")
        raise ValueError(unknown_name("backbone", name, tags or [architecture])) from error


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
        path = _saved_file(target, "config.json")
        described = read_json_object(path)
        if "architectures" in described and not {"architecture", "pretrained_cfg"} & described.keys():
            raise WeightsError(
                f"{target}: config.json names no model of timm (architecture) but one of the library transformers "
                "(architectures): save a timm model with its save_for_hf, and name that folder"
            )
        config = ModelConfig.read(path)
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
        described = untrusted_config(config.cfg, architecture, target)
        cfg = PretrainedCfg(**described)
        arguments = {**backbone_args(config), **arguments, "pretrained_cfg": described}
    state: Dict[str, Tensor] = {}
    if pretrained and config is None and target in checkpoints():
        state = load_weights(checkpoints()[target], cache_dir)
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
    if img_size:
        arguments["img_size"] = img_size
    while True:
        try:
            return _create(architecture, cfg, state, target, arguments)
        except TypeError as error:
            if "img_size" not in arguments or "img_size" not in str(error):
                raise
            del arguments["img_size"]  # a convolutional network takes any size
        except AssertionError as error:
            if "global_pool" not in arguments:
                raise ValueError(
                    f"{target} cannot be a backbone: timm does not create it with {_stated(arguments)}: {error}"
                ) from error
            del arguments["global_pool"]  # some heads cannot do without, and the head is removed in any case


def _create(
    architecture: str, cfg: Any, state: Dict[str, Tensor], where: str, arguments: Dict[str, Any]
) -> nn.Module:
    """The model, with the tensors of ``state`` unless it is empty.

    timm loads them non-strictly if it removes the classifier, so that missing layers would stay random. Here they are
    loaded strictly first. A checkpoint may have more tensors than the backbone, but no further blocks, and may lack
    norms that timm creates only without a pooling.

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
            lines = str(error).splitlines()
            missing, unexpected = (
                [key for line in lines if what in line for key in re.findall(r'"([^"]+)"', line)]
                for what in ("Missing key(s)", "Unexpected key(s)")
            )
            if any("norm" not in key for key in missing) or _has_further_blocks(kept, unexpected):
                raise
        return load(num_classes=1)  # another number than the backbone's: timm loads non-strictly


def _has_further_blocks(state: Dict[str, Tensor], unexpected: List[str]) -> bool:
    """Whether tensors without a place belong to a block that follows those of the network, as in a deeper one."""

    def blocks(keys: Iterable[str]) -> Set[Tuple[str, str]]:
        return {(key[: m.start()], m[1]) for key in keys for m in re.finditer(r"\.(\d+)\.", key)}

    present = blocks(state.keys() - set(unexpected))
    lists = {name for name, _ in present}
    return any(name in lists and (name, number) not in present for name, number in blocks(unexpected))


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
        return untrusted_config(config.cfg, config.architecture, target)
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


def prune_stages(model: Any, out_index: int) -> int:
    """Drop the stages of a backbone after a feature level; return the number of levels that remain.

    Raises:
        ValueError: the model has no such level, or no method of timm that drops stages; one line.
    """
    name = type(model).__name__
    if not hasattr(model, "prune_intermediate_layers"):
        raise ValueError(
            f"{name} has no prune_intermediate_layers, so the head takes its last map: leave out_index={out_index} "
            "out, or choose another backbone"
        )
    try:
        # its head goes with the classifier
        return int(model.prune_intermediate_layers([out_index], prune_head=False)[-1]) + 1
    except (AssertionError, TypeError) as error:
        reason = error if isinstance(out_index, int) else "it must be an integer"
        raise ValueError(f"{name} has no feature level out_index={out_index!r}: {reason}") from error


def feature_levels_of(
    model: Any, prefix: str, chans: int, img_size: Tuple[int, int], grid: Tuple[int, int]
) -> List[dict]:
    """timm's ``feature_info`` of a model, with its modules under ``prefix``; one level, its parent, if it has none."""
    info = getattr(model, "feature_info", None)
    if info is not None and hasattr(model, "forward_intermediates"):
        levels = info.get_dicts() if hasattr(info, "get_dicts") else list(info)
        return [dict(level, module=f"{prefix}.{level['module']}") for level in levels]
    return [dict(num_chs=chans, reduction=max(1, img_size[0] // grid[0]), module=prefix.rpartition(".")[0])]
