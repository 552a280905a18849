"""Early stopping: the best epoch on the validation images is kept, and training ends when none is better for long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["BestEpoch"]


class BestEpoch:
    """The weights of the epoch with the best validation accuracy; of equally good ones, the latest.

    (The latest, because the learning rate falls and a small validation set has few steps. Patience counts from the
    last epoch that was truly better.)

    Args:
        patience: epochs without a better one after which training is over.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.top1 = float("-inf")
        self.epoch = 0
        """The epoch that is kept, counted from 1."""
        self.risen = 0
        """The last epoch that was better than all before."""
        self.weights: dict[str, Tensor] = {}

    def see(self, epoch: int, top1: float, net: nn.Module) -> None:
        """Take note of an epoch's accuracy, and of the net's weights where it is the best so far."""
        if top1 > self.top1:
            self.risen = epoch
        if top1 >= self.top1:
            self.top1, self.epoch = top1, epoch
            self.weights = {name: value.detach().clone() for name, value in net.state_dict().items()}

    def over(self, epoch: int) -> bool:
        """Whether training is to end after this epoch."""
        return self.risen > 0 and epoch - self.risen >= self.patience

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights."""
        return {"top1": self.top1, "epoch": self.epoch, "risen": self.risen} if self.risen else {}

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Take back what a checkpoint kept; an empty state is that of the start."""
        self.top1 = state.get("top1", float("-inf"))
        self.epoch, self.risen = state.get("epoch", 0), state.get("risen", 0)
        self.weights = dict(weights)
