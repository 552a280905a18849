"""Early stopping: keep the best epoch on the validation images, and stop after some epochs without a better one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class BestEpoch:
    """The weights of the epoch that is best on the validation images; of equally good ones, the latest.

    (The latest, because the learning rate falls and accuracies on a small validation set often tie. Of equal mean
    recalls the one with the higher top-1 is better. Patience counts from the last epoch whose measure was higher.)

    Args:
        patience: number of epochs without a better one after which training stops.
        measure: the key of an epoch's record that is compared: "val_top1", or "val_recall", the mean of the recalls of
            the classes, where training shows each class equally often.
    """

    def __init__(self, patience: int, measure: str = "val_top1") -> None:
        self.patience = patience
        self.measure = measure
        #: The measure of the epoch that is kept, in per cent.
        self.score = float("-inf")
        self.top1 = float("-inf")
        #: The epoch that is kept, counted from 1.
        self.epoch = 0
        #: The last epoch that was better than all before.
        self.risen = 0
        self.weights: dict[str, Tensor] = {}

    def see(self, epoch: int, record: Mapping[str, Any], net: nn.Module) -> None:
        """See an epoch's record, and keep the net's weights if it is the best so far."""
        score = record[self.measure]
        if score > self.score:
            self.risen = epoch
        if (score, record["val_top1"]) >= (self.score, self.top1):
            self.score, self.top1, self.epoch = score, record["val_top1"], epoch
            self.weights = {name: value.detach().clone() for name, value in net.state_dict().items()}

    def over(self, epoch: int) -> bool:
        """True if training should stop after this epoch."""
        return self.risen > 0 and epoch - self.risen >= self.patience

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, besides the weights."""
        if not self.risen:
            return {}
        return {"top1": self.top1, "score": self.score, "epoch": self.epoch, "risen": self.risen}

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Restore the state from a checkpoint; an empty state is the initial one."""
        vars(self).update(state)
        self.weights = dict(weights)
