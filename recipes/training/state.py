"""The state of a run: ``Run`` is constant, ``TrainState`` changes and is stored in checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from capszoo._utils.files import not_writable
from capszoo.data import Batches
from capszoo.models._feedback import FeedbackAgreement

from ..config import Recipe
from ..weights import hardware
from .checkpoints import Checkpoint, save_checkpoint
from .distributed import TrainingError, raise_on_all_ranks
from .early_stop import BestEpoch
from .routing_probe import RoutingProbe
from .run_folder import RunLock
from .setup import RunData, create_net, memory_layout
from .stages import (
    Stage,
    all_stages,
    fit_weights,
    optimizer_state_without,
    reset_batch_norm,
    stage_at,
    stage_spec,
)

if TYPE_CHECKING:
    from accelerate import Accelerator


#: Largest share of the time for checkpoints at the ends of epochs, which may last a second on a GPU.
SAVING_SHARE = 0.05
#: A checkpoint that takes less is always written.
QUICK_SECONDS = 0.1
#: A checkpoint is due after this time, even if writing it takes long: a killed run repeats what came after the last.
LONGEST_SECONDS = 300.0


@dataclass(frozen=True)
class Run:
    """The constant parts of a run.

    Attributes:
        steps: updates of an epoch.
        stop_after: number of updates of this call after which it stops.
        commit: of the code, read at the start: the files may have changed by the end.
        lock: of the run's folder, held by the first process.
    """

    recipe: Recipe
    out: Path
    accelerator: Accelerator
    data: RunData
    steps: int
    stop_after: int | None
    commit: str | None
    lock: RunLock

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def world(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def hardware(self) -> str:
        """What each process computes on, and how many there are."""
        return hardware(self.device) + (f", {self.world} processes" if self.world > 1 else "")

    @property
    def total(self) -> int:
        """Updates of the whole run."""
        return self.steps * self.recipe.epochs

    @property
    def layout(self) -> torch.memory_format:
        return memory_layout(self.recipe)


@dataclass
class TrainState:
    """The changing parts of a run; a change of stage creates a new one.

    Attributes:
        stage: the current part of the run, on images of one size.
        step_module: net and loss; ``ddp_module`` is Accelerate's wrapper of it, as ``optimizer`` is of the optimiser.
        best: the best epoch on validation images, with ``early_stop``.
        step: number of updates made. ``saved_step``: number of updates at the last checkpoint, ``saved_at``: when it
            was written (monotonic clock), ``saving_seconds``: how long that took.
        seconds: training time so far, over all sessions.
        sums: loss, right answers and images of the epoch so far.
        losses: of the updates since the last check.
        next_sync: update after which they are checked.
    """

    stage: Stage
    batches: Batches
    held_out: Batches | None
    net: Any
    ema: ModelEmaV3 | None
    feedback: FeedbackAgreement | None
    best: BestEpoch | None
    step_module: Any
    ddp_module: nn.Module
    optimizer: Any
    scheduler: Scheduler | None
    probe: RoutingProbe | None
    sums: Tensor
    step: int = 0
    saved_step: int = 0
    saved_at: float = 0.0
    saving_seconds: float = 0.0
    seconds: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    next_sync: int = 1
    epoch_began: float = 0.0
    epoch_first: int = 0

    @property
    def evaluated(self) -> Any:
        """The net that is evaluated and stored: the moving average if there is one."""
        return self.ema.module if self.ema else self.net

    def first_step(self, run: Run) -> int:
        """First update of the stage, counted from 0."""
        return self.stage.first_epoch * run.steps


def check_stages(run: Run) -> None:
    """Refuse a network whose weights cannot be adapted from one size to the next, before hours of training."""
    if not run.recipe.stages:
        return
    weights: dict[str, Tensor] = {}
    size = (0, 0)
    for stage in all_stages(run.recipe):
        spec = stage_spec(run.data.training.spec, stage)
        with torch.device("meta"):
            net = create_net(run.recipe.model_copy(update={"init": None}), spec)
        if weights:
            fit_weights(run.recipe, net, weights, size)
        weights, size = net.state_dict(), spec.input_size[1:]


def restore(run: Run, state: TrainState, checkpoint: Checkpoint) -> None:
    """Restore the state of a checkpoint; the schedule and all random numbers follow from its step.

    A checkpoint at the first update of a later stage has the weights of the previous stage: they are adapted to the
    new size (see ``training/stages.py``).
    """
    position, weights, optimizer = checkpoint.state, checkpoint.weights, checkpoint.optimizer["optimizer"]
    state.step, state.seconds = position["step"], position["seconds"]
    enters = state.stage.number > 0 and state.step == state.first_step(run)
    if enters:
        before = stage_spec(run.data.training.spec, stage_at(run.recipe, state.stage.first_epoch - 1))
        fitted, resampled = fit_weights(run.recipe, state.net, weights["model"], before.input_size[1:])
        state.net.load_state_dict(fitted)
        reset_batch_norm(state.net)
        optimizer = optimizer_state_without(state.optimizer, state.net, optimizer, resampled)
    else:
        state.net.load_state_dict(weights["model"])
    if state.feedback:
        state.feedback.load_state_dict(weights["feedback"])
    if state.ema:
        state.ema.module.load_state_dict(state.net.state_dict() if enters else weights["ema"])
    if state.best:
        state.best.restore(position["best"], weights.get("best", {}))
    state.optimizer.load_state_dict(optimizer)
    # a run that goes on in fp16 after another precision has no scaler yet
    if run.accelerator.scaler is not None and (scaler := checkpoint.optimizer.get("scaler")):
        run.accelerator.scaler.load_state_dict(scaler)
    # those of all processes: the record of the epoch adds them up again
    state.sums.copy_(torch.tensor(position["sums"], dtype=torch.float64) * run.main)


def checkpoint_due(run: Run, state: TrainState) -> bool:
    """True if the end of an epoch needs a checkpoint, and the last one is old enough that saving takes a small share.

    The last epoch of a stage needs one, and each epoch with several processes, which must agree.
    """
    if run.world > 1 or state.saving_seconds < QUICK_SECONDS:
        return True
    if state.step == state.stage.end_epoch * run.steps:
        return True
    wait = min(state.saving_seconds / SAVING_SHARE, LONGEST_SECONDS)
    return time.monotonic() - state.saved_at >= wait


def save_state(run: Run, state: TrainState) -> None:
    """Write a checkpoint of the current state."""
    began = time.monotonic()
    sums = run.accelerator.reduce(state.sums.clone()).tolist()  # those of all processes
    position: dict[str, Any] = {
        "seconds": state.seconds,
        "sums": sums,
        # on a CPU, sums depend on their number
        **({"threads": torch.get_num_threads()} if run.device.type == "cpu" else {}),
        "updates_per_epoch": run.steps,
        "images": run.data.counts,
    }
    tensors: dict[str, Any] = {"optimizer": state.optimizer.state_dict()}
    if run.accelerator.scaler is not None:
        tensors["scaler"] = run.accelerator.scaler.state_dict()
    modules = {
        "model": state.net,
        "ema": state.ema.module if state.ema else None,
        "feedback": state.feedback,
    }
    weights = {name: module.state_dict() for name, module in modules.items() if module is not None}
    if state.best:
        position["best"] = state.best.state()
        weights |= {"best": state.best.weights} if state.best.weights else {}
    with raise_on_all_ranks(run.accelerator):
        try:
            if run.main:
                save_checkpoint(run.out, state.step, weights, tensors, position)
        except OSError as error:
            raise TrainingError(
                (f"the state of update {state.saved_step} is kept, but no newer one: " if state.step else "")
                + not_writable(run.out, error)
            ) from error
    state.saved_step = state.step
    state.saved_at = time.monotonic()
    state.saving_seconds = state.saved_at - began
