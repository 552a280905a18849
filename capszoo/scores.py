"""The meaning of class scores, and their conversion to probabilities.

A model's scores depend on the loss that it was trained with: logits, capsule lengths, EM activations. Their argmax is
always the prediction; their values can be interpreted only together with their kind. The kind is part of the metadata
of the weights (``score_kind``), and :func:`probabilities` maps scores of any kind to values between 0 and 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._own_facts import own_facts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SCORE_KINDS", "kind_for", "probabilities", "score_kind"]

#: Kind of score -> how it is converted to a probability, in words.
SCORE_KINDS = {
    "logits": "softmax over the classes",
    "log_probabilities": "softmax over the classes",
    "lengths": "capsule length, divided by the sum over the classes",
    "activations": "capsule activation, divided by the sum over the classes",
    "label_logits": "sigmoid, each class on its own (an image may have several)",
    "label_lengths": "capsule length itself, each class on its own (an image may have several)",
}


def kind_for(loss: str, single_label: bool = True) -> str:
    """Kind of the scores of a network trained with a loss.

    Args:
        loss: name of a recipe's loss.
        single_label: whether each image has one class.
    """
    if loss == "margin":
        return "lengths" if single_label else "label_lengths"
    if loss == "spread":
        return "activations" if single_label else "label_lengths"
    return "logits" if single_label and loss != "bce" else "label_logits"


def score_kind(model: Any) -> str:
    """Kind of a model's scores: that in its weights' metadata, else that of its architecture.

    A network whose argument ``scores`` selects the kind has it as an attribute of its own, which counts first: the
    weights may have been trained with another one.
    """
    cfg = getattr(model, "pretrained_cfg", None) or {}
    stated = own_facts(cfg).get("score_kind")
    selected = getattr(model, "__dict__", {}).get("score_kind")
    if selected and not str(stated).startswith("label_"):
        stated = selected
    kind = stated or getattr(model, "score_kind", None)
    return str(kind) if kind in SCORE_KINDS else "logits"


_ALONE = {"logits": "label_logits", "lengths": "label_lengths", "activations": "label_lengths"}


def probabilities(scores: Tensor, kind: str) -> Tensor:
    """Map scores ``[..., n]`` of a kind to values in 0..1; they sum to 1 if an image has one class.

    Normalised capsule lengths order classes and compare images; they are not calibrated probabilities. A single class
    has the sigmoid of its logit, or its length or activation.

    Raises:
        KeyError: a kind that is not in `SCORE_KINDS`.

    Examples:
        >>> import torch
        >>> probabilities(torch.tensor([0.9, 0.3]), "lengths")
        tensor([0.7500, 0.2500])
    """
    if scores.shape[-1] == 1 and kind in _ALONE:  # a share of one class is 1, whatever its score
        kind = _ALONE[kind]
    if kind in ("logits", "log_probabilities"):
        return scores.softmax(dim=-1)
    if kind == "label_logits":
        return scores.sigmoid()
    if kind == "label_lengths":
        return scores.clamp(0, 1)
    if kind not in SCORE_KINDS:
        raise KeyError(kind)
    positive = scores.clamp_min(0)
    total = positive.sum(dim=-1, keepdim=True)
    return positive / total.masked_fill(total == 0, 1.0)
