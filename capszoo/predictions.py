"""What a prediction is, whichever runtime computed it; imports no runtime."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .errors import CapszooError

__all__ = ["ImagePrediction", "ScoredClass"]


@dataclass(frozen=True)
class ScoredClass:
    """A class, its name where the weights have names, its score, and what the score means as a probability.

    Attributes:
        index: number of the class.
        label: its name.
        score: what the network gives (capsule length, activation or logit).
        probability: the score between 0 and 1, see `capszoo.scores`.
    """

    index: int
    label: str
    score: float
    probability: float


@dataclass(frozen=True)
class ImagePrediction:
    """The highest-scored classes of an image, best first; or why it could not be read.

    Attributes:
        image: path as given; ``"image"`` and a number for a picture or an array.
        top: the classes.
        size: width and height of the image as it was given.
        error: empty where all went well.
        score_kind: what the scores are, a key of `capszoo.scores.SCORE_KINDS`.
        notes: what a person should know of how the image was read.
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
            raise CapszooError(self.error or f"{self.image}: no classes", "look at `error` first")
        return self.top[0]

    def to_dict(self) -> dict[str, Any]:
        if self.error:
            return {"image": self.image, "error": self.error}
        found = {"image": self.image, "predictions": [asdict(scored) for scored in self.top]}
        return found | ({"notes": list(self.notes)} if self.notes else {})
