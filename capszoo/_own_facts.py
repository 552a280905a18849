"""Facts about weights for which timm's configuration has no field: background, kind of scores, arguments, and others.

A model's ``pretrained_cfg`` has them as one of its ``notes``, a text that timm keeps and saves. timm's own scripts
refuse a configuration with a key that ``PretrainedCfg`` lacks. Older configurations have the key ``capszoo``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import WeightsError

__all__ = ["for_new_classes", "own_facts", "set_own_facts"]

_BEFORE = "capszoo: "
_OLD_KEY = "capszoo"


def own_facts(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The facts in a configuration; empty if there are none.

    Raises:
        WeightsError: the note is no JSON object.
    """
    stated = cfg.get(_OLD_KEY)
    for note in _notes(cfg):
        if _is_ours(note):
            try:
                stated = json.loads(note.removeprefix(_BEFORE))
            except (ValueError, RecursionError):
                raise WeightsError("the notes of the configuration hold no JSON after 'capszoo: '") from None
    if not isinstance(stated, (Mapping, type(None))):
        raise WeightsError("the notes of the configuration hold no JSON object after 'capszoo: '")
    return dict(stated or {})


def set_own_facts(cfg: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Replace the facts in a configuration; empty ones are removed. Other notes stay."""
    cfg.pop(_OLD_KEY, None)
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
