"""Replace the global average pooling of any timm model by routing pooling.

Paper: Zhao, Huang, "Exploring Dynamic Routing As A Pooling Layer" (ICCV workshop, 2019), section 3.4::

    model = timm.create_model("resnet50", num_classes=10)
    capszoo.replace_global_pool(model, lam=5.0)

No parameter is added and no shape changes, so the model's weights and training code stay valid.
"""

from __future__ import annotations

from typing import Any, TypeVar

from timm.layers import SelectAdaptivePool2d
from torch import Tensor, nn

from capszoo.layers.routing_pool import RoutingPool2d

ModelT = TypeVar("ModelT", bound=nn.Module)

_AVERAGE = ("avg", "fast", "fastavg")


class ChannelsLastRoutingPool2d(nn.Module):
    """:class:`RoutingPool2d` for channels-last maps ``[b, h, w, C]`` (some transformers, such as Swin)."""

    def __init__(self, pool: RoutingPool2d) -> None:
        super().__init__()
        self.pool = pool
        self.flatten = pool.flatten
        self.pool_type = pool.pool_type

    def is_identity(self) -> bool:
        return False

    def feat_mult(self) -> int:
        return 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(x.permute(0, 3, 1, 2))
        return x if self.flatten else x.permute(0, 2, 3, 1)

    def couplings(self, x: Tensor) -> Tensor:
        """``[b, h, w, C] -> [b, groups, h, w]``."""
        return self.pool.couplings(x.permute(0, 3, 1, 2))


def _find_pool(model: nn.Module) -> str:
    """Name of the model's global average pool; raise ValueError if there is none."""
    kind = type(model).__name__
    pools = {name: m for name, m in model.named_modules() if isinstance(m, SelectAdaptivePool2d)}
    if not pools:
        if any(isinstance(m, (RoutingPool2d, ChannelsLastRoutingPool2d)) for m in model.modules()):
            raise ValueError(f"{kind} has routing pooling already")
        raise ValueError(f"{kind} has no global average pooling to replace (timm's SelectAdaptivePool2d)")
    name = next((n for n in ("global_pool", "head.global_pool") if n in pools), next(iter(pools)))
    if pools[name].pool_type.lower() not in _AVERAGE:
        now = pools[name].pool_type or "off"
        raise ValueError(
            f"the global pooling of {kind} is {now!r}: create the model with global_pool='avg' first"
        )
    return name


def _put_routing(model: nn.Module, name: str, lam: float, caps_dim: int, num_iters: int) -> None:
    """Replace timm's pool at ``name``, keeping its layout and whether it flattens."""
    old = model.get_submodule(name)
    parent_name, _, attribute = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    width = int(getattr(parent, "in_features", 0) or getattr(model, "num_features", 0))
    if width % caps_dim:
        fits = max(d for d in range(1, caps_dim) if width % d == 0)
        raise ValueError(
            f"caps_dim={caps_dim} does not divide the {width} channels of {type(model).__name__}: "
            f"use {fits}, or another divisor"
        )
    reduce = old.pool
    channels_last = tuple(getattr(reduce, "dim", (2, 3))) == (1, 2)
    flatten = bool(getattr(reduce, "flatten", False)) or isinstance(old.flatten, nn.Flatten)
    pool: nn.Module = RoutingPool2d(caps_dim, lam, num_iters, flatten=flatten)
    if channels_last:
        pool = ChannelsLastRoutingPool2d(pool)  # type: ignore[arg-type]
    setattr(parent, attribute, pool.train(parent.training))


class _RoutingPooled:
    """Mixin for a model whose pool is replaced: timm's ``reset_classifier`` rebuilds the pool too."""

    def reset_classifier(self, num_classes: int, global_pool: str | None = None, **kwargs: Any) -> None:
        """As timm's; routing pooling stays unless another ``global_pool`` is given (``"routing"`` restores it)."""
        model: Any = self
        name = model._routing_pool["name"]
        routes = isinstance(model.get_submodule(name), (RoutingPool2d, ChannelsLastRoutingPool2d))
        keep = routes if global_pool is None else global_pool == "routing"
        if keep:
            global_pool = "avg"  # timm rebuilds its pool with the classifier; then ours replaces it again
        elif global_pool is None:
            global_pool = model.get_submodule(name).pool_type
        model._timm_class.reset_classifier(model, num_classes, global_pool, **kwargs)
        if keep:
            _put_routing(model, **model._routing_pool)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the class is created at run time: copies and pickles recreate it
        model: Any = self
        return _new_pooled, (model._timm_class,), model.__dict__


def _pooled_class(cls: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_RoutingPooled, cls), {**names, "_timm_class": cls})


def _new_pooled(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(_pooled_class(cls))


def replace_global_pool(model: ModelT, lam: float = 5.0, caps_dim: int = 16, num_iters: int = 3) -> ModelT:
    """Replace a timm model's global average pooling by routing pooling.

    The model is changed in place. ``reset_classifier`` keeps the routing pooling, replaces it with
    ``global_pool="avg"``, and restores it with ``global_pool="routing"``. ``pool.couplings(features)`` of the new
    module shows the positions from which each group of channels routes.

    timm saves such a model (``save_for_hf``) but does not rebuild its pooling: load it with ``global_pool="avg"``, then
    call this function again.

    Args:
        model: any timm model with a global average pool: ResNet, ConvNeXt, EfficientNet, MobileNetV3, Swin, ….
        lam: λ, sparsity of the couplings; 0 is average pooling exactly (the paper uses 5 for ResNets).
        caps_dim: channels of a capsule; divides the pooled channels.
        num_iters: routing iterations.

    Returns:
        The same model.

    Raises:
        ValueError: there is no global average pool, or an argument does not fit; the model is then unchanged.
    """
    name = _find_pool(model)
    RoutingPool2d(caps_dim, lam, num_iters)  # refuses invalid arguments before anything changes
    _put_routing(model, name, lam, caps_dim, num_iters)
    if hasattr(model, "reset_classifier"):
        model._routing_pool = dict(name=name, lam=lam, caps_dim=caps_dim, num_iters=num_iters)  # type: ignore
        if not isinstance(model, _RoutingPooled):
            model.__class__ = _pooled_class(type(model))  # type: ignore[assignment]
    return model
