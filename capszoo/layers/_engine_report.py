"""Which engine each layer of a model takes, and why not another: nothing is computed."""

from dataclasses import replace
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .engine import Choice, record_engines, use_engines

__all__ = ["engine_report"]


def engine_report(
    model: nn.Module,
    batch: int = 32,
    training: bool = False,
    device: str = "cpu",
    target: str = "",
    input_size: Optional[Tuple[int, ...]] = None,
) -> List[Choice]:
    """The engine of each routing layer of a model and why the others were refused; nothing is computed.

    Args:
        model: of images; left as it is.
        batch: images.
        training: with gradients, in training mode.
        device: ``"cpu"`` or ``"cuda"``, the one that the model would run on.
        target: as a graph for one of TARGETS.
        input_size: of an image, without the batch; that of the model's ``pretrained_cfg`` where absent.
    """
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    size = input_size or config.get("input_size", (3, 32, 32))
    state = {k: torch.empty_like(v, device="meta") for k, v in _tensors(model).items()}
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    x = torch.empty(batch, *size, dtype=like.dtype, device="meta")
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        with torch.set_grad_enabled(training), use_engines(target=target), record_engines(device) as choices:
            torch.func.functional_call(model, state, (x,))
    finally:
        for module, mode in modes:
            module.training = mode
    names = {module: name for name, module in model.named_modules()}
    return [replace(choice, name=names.get(choice.layer, "")) for choice in choices]


def _tensors(model: nn.Module) -> Dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
