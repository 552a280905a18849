"""Report which engine each layer of a model selects and why it refuses the others, without computing anything."""

from dataclasses import replace
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .engine_choice import Choice, record_engines, use_engines

__all__ = ["engine_report"]


def engine_report(
    model: nn.Module,
    batch: int = 32,
    training: bool = False,
    device: str = "cpu",
    target: str = "",
    input_size: Optional[Tuple[int, ...]] = None,
    mode: str = "eager",
) -> List[Choice]:
    """Report the engine of each routing layer and why the others were refused, without computing anything.

    Autocast of ``device`` is honoured: call it within the context in which the model would run.

    Nothing else may run capsule layers meanwhile, in any thread of the process.

    Args:
        model: an image model; its mode is switched meanwhile and restored.
        batch: batch size.
        training: report the choice for training mode with gradients.
        device: ``"cpu"`` or ``"cuda"``, where the model would run.
        target: report the choice for a graph exported for one of TARGETS.
        input_size: shape of an image without the batch; defaults to the model's own.
        mode: ``"eager"``, or ``"compiled"`` for a model under ``torch.compile``.

    Raises:
        ValueError: ``mode`` is neither word.
    """
    if mode not in ("eager", "compiled"):
        raise ValueError(f"mode must be 'eager' or 'compiled', not {mode!r}")
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    size = input_size or config.get("input_size", (3, 32, 32))
    if input_size is None:  # a model of another size or other channels states them itself
        own = getattr(model, "img_size", None)
        size = (getattr(model, "in_chans", size[0]), *(own if isinstance(own, tuple) else size[1:]))
    state = {k: torch.empty_like(v, device="meta") for k, v in _tensors(model).items()}
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    x = torch.empty(batch, *size, dtype=like.dtype, device="meta")
    training_modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        with (
            torch.set_grad_enabled(training),
            use_engines(target=target),
            record_engines(device, mode) as choices,
        ):
            torch.func.functional_call(model, state, (x,))
    finally:
        for module, was_training in training_modes:
            module.training = was_training
    names = {module: name for name, module in model.named_modules()}
    return [replace(choice, name=names.get(choice.layer, "")) for choice in choices]


def _tensors(model: nn.Module) -> Dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
