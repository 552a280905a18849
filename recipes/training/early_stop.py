"""Early stopping: keep the best epoch on the validation images, and stop after some epochs without a better one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["BestEpoch"]


class BestEpoch:
    """The weights of the epoch with the best validation accuracy; for equal accuracies, the latest.

    (The latest, because the learning rate falls and accuracies on a small validation set often tie. Patience counts
    from the last epoch that was strictly better.)

    Args:
        patience: number of epochs without a better one after which training stops.
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
        """Record an epoch's accuracy, and the net's weights if it is the best so far."""
        if top1 > self.top1:
            self.risen = epoch
        if top1 >= self.top1:
            self.top1, self.epoch = top1, epoch
            self.weights = {name: value.detach().clone() for name, value in net.state_dict().items()}

    def over(self, epoch: int) -> bool:
        """True if training should stop after this epoch."""
        return self.risen > 0 and epoch - self.risen >= self.patience

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, besides the weights."""
        return {"top1": self.top1, "epoch": self.epoch, "risen": self.risen} if self.risen else {}

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Restore the state from a checkpoint; an empty state is the initial one."""
        self.top1 = state.get("top1", float("-inf"))
        self.epoch, self.risen = state.get("epoch", 0), state.get("risen", 0)
        self.weights = dict(weights)
