"""The format of a prediction, for every runtime; imports none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .errors import CapszooError

__all__ = ["ImagePrediction", "ScoredClass"]


@dataclass(frozen=True)
class ScoredClass:
    """A class, its name if the weights have names, its score, and the score as a probability.

    Attributes:
        index: index of the class.
        label: name of the class.
        score: output of the network (capsule length, activation or logit).
        probability: the score mapped to 0..1, see `capszoo.scores`.
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
        score_kind: kind of the scores, a key of `capszoo.scores.SCORE_KINDS`.
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

    def to_dict(self) -> dict[str, Any]:
        if self.error:
            return {"image": self.image, "error": self.error}
        found = {"image": self.image, "predictions": [asdict(scored) for scored in self.top]}
        return found | ({"notes": list(self.notes)} if self.notes else {})
