"""What weights state of themselves and what follows from it: kind of scores, input size, labels, background.

A model's ``pretrained_cfg`` has them as one of its ``notes``, a text that timm keeps and saves. timm's own scripts
refuse a configuration with a key that ``PretrainedCfg`` lacks.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, WeightsError

if TYPE_CHECKING:
    from torch import nn

_BEFORE = "capszoo: "


def own_facts(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The facts in a configuration; empty if there are none.

    Raises:
        WeightsError: the note is no JSON object.
    """
    facts = None
    for note in _notes(cfg):
        if _is_ours(note):
            try:
                facts = json.loads(note.removeprefix(_BEFORE))
            except (ValueError, RecursionError):
                raise WeightsError("the notes of the configuration hold no JSON after 'capszoo: '") from None
    if not isinstance(facts, (Mapping, type(None))):
        raise WeightsError("the notes of the configuration hold no JSON object after 'capszoo: '")
    return dict(facts or {})


def set_own_facts(cfg: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Replace the facts in a configuration; empty ones are removed. Other notes stay."""
    notes = [note for note in _notes(cfg) if not _is_ours(note)]
    if facts:
        notes.append(f"{_BEFORE}{json.dumps(facts, sort_keys=True)}")
    if notes or "notes" in cfg:
        cfg["notes"] = tuple(notes) or None


def for_new_classes(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts without those about the images and labels of the former task: MultiMNIST's two digits on a canvas."""
    kept = {key: value for key, value in facts.items() if key != "object_size"}
    if str(kept.get("score_kind")).startswith("label_"):
        del kept["score_kind"]
    return kept


def _notes(cfg: Mapping[str, Any]) -> tuple[Any, ...]:
    notes = cfg.get("notes") or ()
    return (notes,) if isinstance(notes, str) else tuple(notes)


def _is_ours(note: Any) -> bool:
    return isinstance(note, str) and note.startswith(_BEFORE)


def label_names(model: nn.Module) -> list[str]:
    """Names of a model's classes; their indices if the weights have no names (or are for other classes)."""
    count = int(getattr(model, "num_classes", 0))
    names = (getattr(model, "pretrained_cfg", None) or {}).get("label_names") or ()
    return [str(name) for name in names] if len(names) == count else [str(i) for i in range(count)]


def label_lines(labels: Sequence[str]) -> list[str]:
    """The lines of ``labels.txt``, one per class; a name's own line breaks become spaces."""
    return [" ".join(label.splitlines()) for label in labels]


def class_positions(own: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Index in a model's classes ``own`` of each class of a data set; None for a class that the model lacks.

    Args:
        own: names of the model's classes.
        names: names of the data set's classes, such as its folders, in any form of Unicode. Only classes without
            names, which are the integers from 0 on and none of the model's names, go by their order.
    """
    own, names = ([unicodedata.normalize("NFC", name) for name in side] for side in (own, names))
    position = {name: index for index, name in reversed(list(enumerate(own)))}
    nameless = set(names) == {str(i) for i in range(len(names))} and len(names) <= len(own)
    if nameless and position.keys().isdisjoint(names):
        return [int(name) for name in names]
    return [position.get(name) for name in names]


def model_input_size(model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of a model's input: its ``img_size``, else its pretrained configuration's.

    The channels are the model's ``in_chans``, else those of its first convolution: timm's ``in_chans=1`` leaves the
    configuration as it is.

    Raises:
        UsageError: the model states no size.
    """
    from torch import nn

    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    configured = tuple(cfg.get("input_size") or ())
    channels = getattr(model, "in_chans", None)
    if channels is None and configured:
        first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
        channels = first.in_channels if first is not None and first.groups == 1 else configured[0]
    size = getattr(model, "img_size", configured[-2:])
    if channels is None or not size:
        raise UsageError(
            f"{type(model).__name__} does not say its input size",
            "set its in_chans and img_size, or give input_size=(c, h, w)",
        )
    height, width = (size, size) if isinstance(size, int) else size
    return int(channels), int(height), int(width)


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
    recorded = own_facts(cfg).get("score_kind")
    selected = getattr(model, "__dict__", {}).get("score_kind")
    if selected and not str(recorded).startswith("label_"):
        recorded = selected
    kind = recorded or getattr(model, "score_kind", None)
    return str(kind) if kind in SCORE_KINDS else "logits"
