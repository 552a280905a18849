"""Entry points for torch.hub: ``torch.hub.load(REPOSITORY, "idpa_resnet", pretrained=True)``.

One function per architecture of the registry. ``tag`` names the weights (``tag="cifar10"``) and implies ``pretrained``.
Without it ``pretrained=True`` loads the default weights. Further keyword arguments are those of
``capszoo.create_model``.
"""

# torch.hub lists every callable whose name has no underscore
from collections.abc import Callable as _Callable
from typing import Any as _Any

import torch
from timm.models import model_entrypoint as _model_entrypoint

import capszoo

dependencies = ["torch", "timm", "safetensors", "huggingface_hub"]


def _entry_point(name: str) -> _Callable[..., torch.nn.Module]:
    def entry(pretrained: bool = False, tag: str = "", **kwargs: _Any) -> torch.nn.Module:
        full_name = f"{name}.{tag}" if tag else name
        return capszoo.create_model(full_name, pretrained=pretrained or bool(tag), **kwargs)

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = (_model_entrypoint(name).__doc__ or "").split("\n")[0]
    return entry


globals().update({name: _entry_point(name) for name in capszoo.list_models()})
