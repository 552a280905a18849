"""The meaning of class scores, and their conversion to probabilities.

A model's scores depend on the loss that it was trained with: logits, capsule lengths, EM activations. Their argmax is
always the prediction; their values can be interpreted only together with their kind. The kind is part of the metadata
of the weights (``score_kind``), and :func:`probabilities` maps scores of any kind to values between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ._pretrained.facts import SCORE_KINDS, kind_for, score_kind
from .errors import CapszooError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ImagePrediction", "SCORE_KINDS", "ScoredClass", "kind_for", "probabilities", "score_kind"]


_ALONE = {"logits": "label_logits", "lengths": "label_lengths", "activations": "label_lengths"}


def probabilities(scores: Tensor, kind: str) -> Tensor:
    """Map scores ``[..., n]`` of a kind to values in 0..1; they sum to 1 if an image has one class.

    Normalised capsule lengths order classes and compare images; they are not calibrated probabilities. A single class
    has the sigmoid of its logit, or its length or activation.

    Raises:
        KeyError: a kind that is not in ``SCORE_KINDS``.

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


#: Columns of a table of predictions.
TABLE_COLUMNS = ("image", "rank", "index", "class", "probability", "score", "error")


@dataclass(frozen=True)
class ScoredClass:
    """A class, its name if the weights have names, its score, and the score as a probability.

    Attributes:
        index: index of the class.
        label: name of the class.
        score: output of the network (capsule length, activation or logit).
        probability: the score mapped to 0..1, see ``capszoo.scores``.
    """

    index: int
    label: str
    score: float
    probability: float


@dataclass(frozen=True)
class ImagePrediction:
    """The highest-scored classes of an image, best first; or the reason why it could not be read.

    Attributes:
        image: path as given; ``"image"`` and a number for a picture or an array.
        top: the classes.
        size: original width and height of the image.
        error: empty without an error.
        score_kind: kind of the scores, a key of ``capszoo.scores.SCORE_KINDS``.
        notes: notes for the user on how the image was read.
    """

    image: str
    top: tuple[ScoredClass, ...] = ()
    size: tuple[int, int] = (0, 0)
    error: str = ""
    score_kind: str = "logits"
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name of the best class."""
        return self._best.label

    @property
    def probability(self) -> float:
        """The probability of the best class."""
        return self._best.probability

    @property
    def _best(self) -> ScoredClass:
        if not self.top:
            raise CapszooError(self.error or f"{self.image}: no classes")
        return self.top[0]

    def to_dict(self, key: str = "image") -> dict[str, Any]:
        """As JSON; ``key`` is that of ``image``."""
        if self.error:
            return {key: self.image, "error": self.error}
        answer = {key: self.image, "predictions": [asdict(scored) for scored in self.top]}
        return answer | ({"notes": list(self.notes)} if self.notes else {})

    def table_rows(self) -> Iterator[tuple[Any, ...]]:
        """Rows of ``TABLE_COLUMNS``, one per class; an image that could not be read has one, with its error."""
        for rank, one in enumerate(self.top, start=1):
            yield self.image, rank, one.index, one.label, one.probability, one.score, None
        if self.error:
            yield self.image, None, None, None, None, None, self.error
