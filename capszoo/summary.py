"""A summary of a model, for ``capszoo info``: size, arithmetic, the papers' results, our weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ._pretrained.catalogue import checkpoints, weights_entry
from ._pretrained.info import WeightsInfo
from ._utils.devices import default_device
from .checkpoint import refused_arguments, resolve
from .layers import engine_report
from .models._factory import ModelInfo, create_model, describe
from .models._inspect import evaluating, routing_iterations
from .models._papers import PAPERS, PaperFigure
from .preprocess import model_input_size


@dataclass(frozen=True)
class ModelSummary:
    """The contents of ``capszoo info``.

    Attributes:
        info: the model in the registry.
        multiply_adds: of one image, in convolutions and matrix products.
        routing_iters: the distinct iteration counts of its routings; empty without routing.
        figures: the papers' results for this architecture.
    """

    info: ModelInfo
    multiply_adds: int
    routing_iters: tuple[int, ...]
    figures: tuple[PaperFigure, ...]

    def to_dict(self) -> dict[str, Any]:
        """Only plain types, for JSON."""
        info = self.info
        return {
            "name": info.name,
            "description": info.description,
            "parameters": info.num_params,
            "multiply_adds": self.multiply_adds,
            "num_classes": info.num_classes,
            "input_size": list(info.input_size),
            "routing_iters": list(self.routing_iters),
            "license": info.license,
            "paper_ids": list(info.paper_ids),
            "paper_figures": [figure._asdict() for figure in self.figures],
            "weights": [weights_entry(weights) for weights in info.weights],
        }


def count_multiply_adds(model: nn.Module) -> int:
    """Multiply-adds of one image in convolutions and matrix products, as PyTorch's counter counts them.

    Elementwise work (squash, softmax, norms) is not counted, and routings are counted as their references. For a model
    on the meta device nothing is computed.

    Args:
        model: any model; run once in eval mode.
    """
    like = next(model.parameters())
    counter = FlopCounterMode(display=False)
    with evaluating(model), torch.no_grad(), counter:
        model(torch.zeros(1, *model_input_size(model), device=like.device, dtype=like.dtype))
    return counter.get_total_flops() // 2


def summarise(name: str, **kwargs: Any) -> ModelSummary:
    """Describe a model without computing anything.

    Args:
        name: registered name, with or without a tag, or any other name for :func:`capszoo.inference.load_model`.
        **kwargs: as for :func:`capszoo.create_model`.

    Raises:
        UnknownModel: no such name.
    """
    model, weights = _untrained(name, kwargs)
    architecture = str((getattr(model, "pretrained_cfg", None) or {}).get("architecture"))
    return ModelSummary(
        info=describe(name, model, weights),
        multiply_adds=count_multiply_adds(model),
        routing_iters=tuple(routing_iterations(model)),
        figures=PAPERS.get(architecture, ()),
    )


def engine_rows(name: str, batch: int = 32, training: bool = False, **kwargs: Any) -> list[dict[str, Any]]:
    """The engine of each routing layer of a model, and why the engines before it were refused; nothing is computed.

    Args:
        name: as for :func:`summarise`.
        batch: batch size.
        training: report the choice for training mode with gradients.
        **kwargs: as for :func:`capszoo.create_model`.

    Returns:
        One row per call of a routing layer: ``layer``, ``engine``, ``routings``, ``children``, ``parents``, ``votes``
        (their number of elements) and ``refused``, engine to reason.
    """
    model, _ = _untrained(name, kwargs)
    choices = engine_report(model, batch, training, default_device().type, input_size=model_input_size(model))
    return [
        {
            "layer": choice.name,
            "engine": choice.engine.name,
            "routings": choice.call.routings,
            "children": choice.call.children,
            "parents": choice.call.parents,
            "votes": choice.call.votes,
            "refused": choice.refused(),
        }
        for choice in choices
    ]


def _untrained(name: str, kwargs: dict[str, Any]) -> tuple[nn.Module, tuple[WeightsInfo, ...] | None]:
    """The model with random weights, and the metadata of a folder's or file's weights; None for a registered name."""
    checkpoint = resolve(name)
    if checkpoint.kind != "name":
        model = checkpoint.create(pretrained=False, device=torch.device("meta"), **kwargs)
        return model, (checkpoint.info,) if checkpoint.info else ()
    trained = checkpoints()[name].model_args if name in checkpoints() else {}
    with refused_arguments(name, kwargs):
        return create_model(name, device="meta", **{**trained, **kwargs}), None
