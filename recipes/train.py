"""Train a recipe: `python -m capszoo.recipes.train RECIPE --data FOLDER`, or `capszoo train RECIPE`.

One loop, `_train`: epochs with validation on images held out of the training set, a checkpoint after each, and the
test set once, at the end. The last epoch's weights are kept, without selection. `Run` has the constant parts,
`TrainState` the changing ones (`training/state.py`); a recipe with `stages` creates a new state for each image size
(`training/stages.py`).

The same command resumes an interrupted run, and ends with the same weights bit for bit on the CPU: the order of
the data, the augmentation and the random numbers of the net are functions of (seed, epoch, step), everything else is
in the checkpoint.

Several processes: `accelerate launch -m capszoo.recipes.train RECIPE …`. They share each batch; all of them need the
run's folder. `training/distributed.py` makes them fail and stop together, `training/log.py` reports progress,
`training/anomaly.py` finds the origin of a value that is not finite.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from capszoo._memory import keep_freed_memory
from capszoo.data import Batch, Batches, ImageSet
from capszoo.errors import CapszooError, UsageError
from capszoo.layers import engine_report
from capszoo.losses import create_loss, reconstruction_loss
from capszoo.models._feedback import FeedbackAgreement
from capszoo.models._pretrained import WeightsError, sha256_of

from .config import Recipe, RecipeError, load_recipe
from .evaluate import evaluate
from .evaluation.metrics import all_right, count_correct
from .evaluation.target import score_threshold
from .training.anomaly import NonFiniteDetector
from .training.checkpoints import latest_checkpoint, threads_of_run
from .training.distributed import (
    PeerLost,
    Stopped,
    StopRequest,
    TrainingError,
    destroy_group_at_exit,
    raise_on_all_ranks,
    sync_error,
)
from .training.early_stop import BestEpoch
from .training.log import RunLog, accuracy_line, epoch_line, weights_line
from .training.routing_probe import RoutingProbe
from .training.run_folder import (
    RunLock,
    check_data,
    check_room,
    check_run,
    closing_lock,
    note_session,
    open_run,
    read_sessions,
    versions,
)
from .training.setup import (
    RunData,
    create_feedback,
    create_net,
    create_optimizer,
    create_scheduler,
    freeze_batch_statistics,
    load_data,
)
from .training.sharding import gathered
from .training.stages import (
    Stage,
    stage_at,
    staged_data,
)
from .training.state import Run, TrainState, check_stages, distribute, kept_net, restore, save_state
from .weights import finished_metadata, hardware, source_commit, write_weights

try:
    import accelerate
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, gather_object

except ModuleNotFoundError as error:
    raise ModuleNotFoundError("training needs accelerate: pip install 'capszoo[train]'") from error

__all__ = ["TrainingError", "main", "train"]

SYNC_EVERY = 20
"""Largest number of updates between looks at the loss and for signals: looking makes a GPU, and processes, wait."""
SYNC_SECONDS = 2.0
"""Slow updates are looked at more often: about this often."""
GOLDEN_IMAGES = 4


class TrainStep(nn.Module):
    """The net and its loss as one module, so that Accelerate's precision and processes wrap the whole step."""

    def __init__(self, net: Any, recipe: Recipe, feedback: FeedbackAgreement | None = None) -> None:
        super().__init__()
        self.net: Any = torch.compile(net) if recipe.compile else net
        self.reconstruct: Any = getattr(net, "reconstruct", None)
        self.forward_poses: Any = getattr(net, "forward_poses", None)
        if recipe.compile and recipe.loss.reconstruction:
            self.forward_poses = torch.compile(
                self.forward_poses
            )  # a compiled net compiles only its `forward`
        self.feedback = feedback
        self.criterion: Any = create_loss(recipe.loss.name, **recipe.loss.options)
        self.reconstruction = recipe.loss.reconstruction

    def set_progress(self, progress: float) -> None:
        """Set the completed share of the training, for a loss that depends on it."""
        if hasattr(self.criterion, "set_progress"):
            self.criterion.set_progress(progress)

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        pixels: Tensor,
        parts: Tensor | None = None,
        part_labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss (mean over the batch, a scalar) and the scores [b, n]."""
        if self.reconstruction:
            scores, poses = self.forward_poses(images)
            loss = self._criterion(scores, labels)
            if parts is None or part_labels is None:
                return loss + self._rebuilding(poses, labels, pixels), scores
            # Several objects: the decoder runs once for each, with that object alone as its target.
            for part, label in zip(parts.unbind(1), part_labels.unbind(1), strict=True):
                loss = loss + self._rebuilding(poses, label, part)
            return loss, scores
        scores = self.net(images)
        return self._criterion(scores, labels), scores

    def _criterion(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The loss of the scores, plus the feedback agreement of the forward pass that computed them."""
        loss: Tensor = self.criterion(scores.float(), labels)
        return loss if self.feedback is None else loss + self.feedback()

    def _rebuilding(self, poses: Tensor, labels: Tensor, pixels: Tensor) -> Tensor:
        """Reconstruction loss of images [b, c, h, w] from the capsules of `labels` [b]; -1 contributes nothing."""
        rebuilt = self.reconstruct(poses, labels.clamp(min=0)).float()
        rebuilt = torch.where((labels >= 0)[:, None, None, None], rebuilt, 0.0)  # -1: black pixels
        return reconstruction_loss(rebuilt, pixels.float() / 255, self.reconstruction)


def _seed_update(seed: int, step: int, rank: int) -> None:
    """Seed the net's random numbers (dropout) for one update, so that they are not part of the checkpoint."""
    digest = hashlib.sha256(f"update/{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@contextmanager
def _accelerator(recipe: Recipe, cpu: bool) -> Iterator[Accelerator]:
    """Accelerate keeps its settings in a process-wide singleton: reset it afterwards, for runs with other settings."""
    precision = "no" if recipe.precision == "fp32" else recipe.precision
    unfit = f"precision {recipe.precision} does not work on this device"
    try:
        accelerator = Accelerator(mixed_precision=precision, cpu=cpu)
        if precision == "fp16" and accelerator.device.type == "cpu":
            raise TrainingError(f"{unfit}, a CPU: take bf16 or fp32")
        if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise TrainingError(
                f"Accelerate is set to {accelerator.distributed_type.value}, which recipes do not use: "
                "launch plain processes and set parallel: fsdp in the recipe"
            )
        destroy_group_at_exit(accelerator)
        yield accelerator
    except ValueError as error:
        if "mixed precision" in str(error):
            raise TrainingError(f"{unfit} ({error}): take bf16 or fp32") from error
        raise
    finally:
        AcceleratorState._reset_state()


def train(
    recipe: str | Path | Recipe,
    overrides: list[str] | None = None,
    out: str | Path | None = None,
    data: str | Path | RunData | None = None,
    resume: bool = True,
    cpu: bool = False,
    stop_after: int | None = None,
    profile: str | None = None,
    threads: int | None = None,
    accept_data: bool = False,
) -> dict[str, Any]:
    """Train a recipe to its end, or resume an interrupted run.

    Args:
        recipe: path of a YAML file, name of a recipe in the package, or a `Recipe`.
        overrides: `key=value` lines with dotted keys, e.g. `optimizer.lr=0.001`.
        out: folder of the run; None: `runs/<arch>.<tag>`.
        data: folder of the data set; None uses `CAPSZOO_DATA`. Or the result of `load_data` for this recipe.
        resume: False refuses a folder that already contains a run.
        cpu: do not use an accelerator.
        stop_after: number of updates of this call after which it saves and stops (for trials and tests).
        profile: name of one of the recipe's profiles; None uses the recipe's settings.
        threads: CPU threads; None: as many as at the start of the run, else PyTorch's.
        accept_data: continue with other images than those of the run so far.

    Returns:
        `{"out", "finished", "step", "epoch"}` and, once finished, `"weights"` (path) and the metrics of
        `"validation"` and `"test"`, if there are such images.

    Raises `RecipeError`, `DataError` or `TrainingError`, each one line with a remedy; with several processes the first
    one raises it, the others exit.
    """
    recipe = load_recipe(recipe, overrides, profile)
    run = Path(out) if out else Path("runs") / recipe.name
    with _accelerator(recipe, cpu) as accelerator, closing_lock(run) as lock:
        return _train(
            _prepare(recipe, run, data, resume, stop_after, accelerator, threads, lock, accept_data)
        )


def _prepare(
    recipe: Recipe,
    out: Path,
    data: str | Path | RunData | None,
    resume: bool,
    stop_after: int | None,
    accelerator: Accelerator,
    threads: int | None,
    lock: RunLock,
    accept_data: bool,
) -> Run:
    """Run all checks that are possible before anything is built, and read the data."""
    world = accelerator.num_processes
    if accelerator.device.type == "cpu":
        keep_freed_memory()
        if threads or (threads := threads_of_run(out)):
            torch.set_num_threads(threads)
    if not accelerator.is_main_process:  # warnings are the same on all processes: one prints them
        logging.getLogger("capszoo").setLevel(logging.ERROR)
    if recipe.batch_size % (world * recipe.accumulate):
        raise RecipeError(
            f"{recipe.name}: batch_size {recipe.batch_size} cannot be shared by {world} processes "
            f"in {recipe.accumulate} parts each"
        )
    commit = source_commit()
    with raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            check_run(recipe, out, resume)
            if out.is_dir():  # else it is created and locked after recipe and data are checked
                lock.acquire()
        found = data if isinstance(data, RunData) else load_data(recipe, data)
        steps = len(found.training) // recipe.batch_size
        if accelerator.is_main_process:
            check_data(out, found.fingerprints, accept_data)
        run = Run(recipe, out, accelerator, found, steps, stop_after, commit, lock)
        check_stages(run)
    return run


def _create_state(run: Run, stage: Stage) -> TrainState:
    """Create all objects that a stage trains with, from random (or the recipe's initial) weights."""
    recipe, device = run.recipe, run.device
    training, validation = staged_data(recipe, run.data, stage)
    augment = recipe.data.augment
    if stage.cutout is not None:
        augment = augment.model_copy(update={"cutout": stage.cutout})
    shares = {"rank": run.accelerator.process_index, "world": run.world}
    batches = Batches(
        training.to(device),
        recipe.batch_size,
        train=True,
        augment=augment.build(),
        seed=recipe.seed,
        balance=recipe.data.balance,
        cutout_epochs=recipe.epochs - augment.cutout_off_epochs,
        **shares,
    )
    held_out = Batches(validation.to(device), 500, **shares) if len(validation) else None
    if recipe.early_stop and not held_out:
        raise RecipeError(f"{recipe.name}: early_stop needs validation images: set data.val_size")

    accelerate.utils.set_seed(recipe.seed)
    net = create_net(recipe, training.spec).to(device).to(memory_format=run.layout)
    if _normalises(net) and run.world > 1 and device.type == "cuda":
        net = convert_sync_batchnorm(net)  # statistics of the whole batch, as on one GPU
    ema = ModelEmaV3(net, decay=recipe.ema_decay, use_warmup=True) if recipe.ema_decay else None
    feedback = create_feedback(recipe, net)
    optimizer = create_optimizer(recipe, net, feedback)
    best = BestEpoch(recipe.early_stop) if recipe.early_stop else None
    try:
        step_module = TrainStep(net, recipe, feedback)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{recipe.name}: loss {recipe.loss.name}: {error}") from error
    scheduler = create_scheduler(recipe, optimizer, run.steps)
    probe = None
    if recipe.routing_images and run.main:
        probe = RoutingProbe(recipe, net, validation.to(device))
    return TrainState(
        stage=stage,
        batches=batches,
        held_out=held_out,
        net=net,
        ema=ema,
        feedback=feedback,
        best=best,
        step_module=step_module,
        ddp_module=step_module,
        optimizer=optimizer,
        scheduler=scheduler,
        probe=probe,
        sums=torch.zeros(3, dtype=torch.float64, device=device),
    )


def _normalises(net: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in net.modules())


def _start(run: Run) -> tuple[TrainState, RunLog]:
    """The state that the run resumes from, and its log."""
    with raise_on_all_ranks(run.accelerator):
        checkpoint, skipped = latest_checkpoint(run.out)
        epoch = checkpoint.state["step"] // run.steps if checkpoint else 0
        state = _create_state(run, stage_at(run.recipe, epoch))
        # Create the run's folder only now, after recipe and data are checked.
        if run.main:
            open_run(run.recipe, run.out, run.lock)
            check_room(run.out, run.recipe, state.net)
    distribute(run, state)
    with raise_on_all_ranks(run.accelerator):
        if checkpoint:
            restore(run, state, checkpoint)
            state.saved_step = state.step
        if run.world > 1 and len(set(gather_object([state.step]))) > 1:
            raise TrainingError(
                f"the processes see different checkpoints: {run.out} must be a folder they share"
            )
        log = RunLog(run.out, run.main, run.total, state.step)
        before = (read_sessions(run.out) or [{}])[-1].get("precision") or run.recipe.precision
        if run.main:
            _note_session(run, state)
    for line in (*skipped, *(f"left out: {line}" for line in run.data.skipped)):
        log.say(line)
    parameters = sum(p.numel() for p in state.net.parameters())
    log.say(
        f"{run.recipe.name}: {parameters:,} parameters, {len(run.data.training):,} images, "
        f"{run.recipe.epochs} epochs of {run.steps} updates, {hardware(run.device)}"
        + (f"; resumed at update {state.step:,}" if state.step else "")
        + (f" in {run.recipe.precision}, before in {before}" if before != run.recipe.precision else "")
    )
    if _normalises(state.net) and run.world > 1 and run.device.type != "cuda":
        log.say("note: on CPUs, BatchNorm takes the statistics of each process's share of a batch alone")
    if not checkpoint:
        # Detects a folder that cannot be written, and makes a failure in the first updates traceable.
        save_state(run, state)
    return state, log


def _note_session(run: Run, state: TrainState) -> None:
    session = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "from_update": state.step,
        "seed": run.recipe.seed,
        "processes": run.world,
        "commit": run.commit,
        "hardware": hardware(run.device),
        "precision": run.recipe.precision,
        "compile": run.recipe.compile,
        "versions": versions(),
        "data": run.data.fingerprints,
        "engines": training_engines(run, state.net, state.batches.target),
    }
    note_session(run.out, session)


def training_engines(run: Run, net: nn.Module, size: Sequence[int]) -> dict[str, str] | None:
    """The engine with which each routing layer trains on images of ``size``, by the layer's name.

    None for a network that cannot run without data (on the meta device), such as some backbones.
    """
    batch = run.recipe.batch_size // run.world // run.recipe.accumulate
    images = (run.data.training.spec.input_size[0], *size)
    if run.sharded:  # the report needs a net on the meta device, which shards are not
        with torch.device("meta"):
            net = create_net(run.recipe.model_copy(update={"init": None}), run.data.training.spec)
    try:
        choices = engine_report(net, batch, True, run.device.type, input_size=images)
    except (RuntimeError, NotImplementedError):
        return None
    return {choice.name: choice.engine.name for choice in choices}


def _next_stage(run: Run, before: TrainState, log: RunLog) -> TrainState:
    """The state of the next stage, from the checkpoint at the end of this one."""
    checkpoint, _ = latest_checkpoint(run.out)
    if checkpoint is None or checkpoint.state["step"] != before.step:
        raise TrainingError(f"the checkpoint of update {before.step} in {run.out} cannot be read")
    run.accelerator.free_memory()
    if run.recipe.compile:
        torch._dynamo.reset()  # else the next size would be compiled with dynamic shapes
    state = _create_state(run, stage_at(run.recipe, before.step // run.steps))
    distribute(run, state)
    restore(run, state, checkpoint)
    state.saved_step, state.next_sync = state.step, state.step + 1
    log.say(f"stage {state.stage.number + 1}: images of {'x'.join(map(str, state.batches.target))} pixels")
    return state


def _train_step(run: Run, state: TrainState, batch: Batch) -> Tensor:
    """Perform update number `state.step`, counted from 0, and return its loss."""
    recipe = run.recipe
    _seed_update(recipe.seed, state.step, run.accelerator.process_index)
    if state.scheduler:
        state.scheduler.step_update(state.step)
    state.step_module.set_progress(state.step / run.total)
    known = run.data.training.spec.labels_per_image
    loss = _update(
        run.accelerator, state.ddp_module, state.optimizer, batch, recipe, run.layout, state.sums, known
    )
    if state.ema:
        state.ema.update(state.net, step=state.step - state.first_step(run))
    return loss


def _sync_and_log(run: Run, state: TrainState, log: RunLog, stop: StopRequest) -> int:
    """Check on all processes that the new losses are finite; return the number of a received signal, else 0."""
    bad, mean = 0, torch.zeros((), device=run.device)
    if state.losses:
        values = torch.stack(state.losses)
        finite, mean = values.isfinite().tolist(), values.mean()
        bad = 0 if all(finite) else state.step - len(finite) + finite.index(False) + 1
    pace = (time.monotonic() - state.epoch_began) / max(state.step - state.epoch_first, 1)
    news = torch.tensor([-bad or -math.inf, stop.number, pace], dtype=torch.float64, device=run.device)
    if run.world > 1:
        torch.distributed.all_reduce(news, torch.distributed.ReduceOp.MAX)
        mean = run.accelerator.reduce(mean, "mean")
    bad, number, pace = (0 if value == -math.inf else value for value in news.tolist())
    state.next_sync = state.step + min(SYNC_EVERY, max(1, int(SYNC_SECONDS / max(pace, 1e-6))))
    if bad:
        _locate_nonfinite(run, state, log, int(-bad))
    if state.losses:
        epoch = (state.step - 1) // run.steps + 1
        rate = run.recipe.batch_size / pace
        log.update(
            state.step, mean.item(), _rate(state.optimizer), rate, f"epoch {epoch}/{run.recipe.epochs}"
        )
    state.losses.clear()
    return int(number)


def _locate_nonfinite(run: Run, state: TrainState, log: RunLog, bad: int) -> None:
    """Go back to the last checkpoint, repeat the updates up to `bad` and inspect the last two; always raises."""
    log.say(
        f"the loss is not finite at update {bad}: repeating updates {state.saved_step + 1} to {bad} to find the layer"
    )
    checkpoint, _ = latest_checkpoint(run.out)
    place = ""
    if checkpoint:
        restore(run, state, checkpoint)
        state.step_module.net = state.net  # hooks do not run inside a compiled net
        place = _replay(run, state, bad)
    place = next((text for text in gather_object([place]) if text), "which did not happen again there")
    sync_error(
        run.accelerator,
        TrainingError(
            f"the loss is not finite at update {bad} (epoch {(bad - 1) // run.steps + 1}), {place}; "
            f"the state of update {state.saved_step} is kept: lower optimizer.lr or set clip_grad"
        ),
    )


def _replay(run: Run, state: TrainState, bad: int) -> str:
    """Repeat the updates up to `bad`; return where a value that is not finite arose, or an empty string."""
    while state.step < bad:
        for batch in state.batches.epoch(*divmod(state.step, run.steps)):
            scaled = run.accelerator.scaler is not None
            watch = (
                NonFiniteDetector(state.step_module, gradients=not scaled) if state.step >= bad - 2 else None
            )
            _train_step(run, state, batch)
            state.step += 1
            if watch:
                watch.close()
                if watch.found:
                    return watch.found + (f" at update {state.step}" if state.step != bad else "")
            if state.step == bad:
                break
    return ""


class _Pause(Exception):
    """This call has performed its requested number of updates."""


def _train_epoch(run: Run, state: TrainState, log: RunLog, stop: StopRequest, clock: _Clock) -> None:
    """The updates of one epoch, or the remaining ones.

    Raises:
        Stopped: a signal came. _Pause: `stop_after` updates are done. Both after a checkpoint.
    """
    epoch, start = divmod(state.step, run.steps)
    every = run.recipe.checkpoint_every
    state.ddp_module.train()
    freeze_batch_statistics(state.net)
    state.epoch_began, state.epoch_first = time.monotonic(), state.step
    for batch in state.batches.epoch(epoch, start):
        state.losses.append(_train_step(run, state, batch))
        state.step += 1
        state.seconds = clock.seconds()
        last = state.step % run.steps == 0
        at_limit = clock.at_limit(run, state)
        periodic = every is not None and state.step % every == 0
        number = 0
        due = last or at_limit or periodic or state.step >= state.next_sync
        if due or (run.world == 1 and stop.number):
            number = _sync_and_log(run, state, log, stop)
        if last:
            continue
        if at_limit or periodic or number:
            save_state(run, state)
        if number:
            raise Stopped(
                f"stopped at update {state.step} of {run.total}; the same command resumes there", number
            )
        if at_limit:
            raise _Pause


def _end_epoch(run: Run, state: TrainState, log: RunLog, clock: _Clock) -> None:
    """Validation, record and checkpoint of a completed epoch."""
    recipe, epoch = run.recipe, state.step // run.steps - 1
    rate = (state.step - state.epoch_first) * recipe.batch_size / (time.monotonic() - state.epoch_began)
    record = _epoch_record(run.accelerator, state.sums, state.optimizer, state.step, epoch, rate)
    if recipe.stages:
        record["size"] = state.batches.target[0]
    if state.held_out:
        if run.world > 1:  # on CPUs norms have statistics per process: use the first one's
            for buffer in state.evaluated.buffers():
                torch.distributed.broadcast(buffer, 0)
        threshold = score_threshold(recipe.loss.name)
        with gathered(state.step_module):
            counts = count_correct(state.evaluated, state.held_out, run.accelerator.autocast(), threshold)
        right, n = run.accelerator.reduce(counts).tolist()
        record["val_top1"] = round(100 * right / n, 4)
        if state.best:
            state.best.see(epoch + 1, record["val_top1"], state.evaluated)
    state.seconds = clock.seconds()
    record["seconds"] = round(state.seconds, 1)
    state.sums.zero_()
    # The record first: a run that is killed between the two repeats its epoch's end.
    with raise_on_all_ranks(run.accelerator):
        if state.probe:
            record["routing"] = state.probe.measure(state.evaluated)
        try:
            log.epoch(record, last=_over(run, state))
        except OSError as error:
            raise TrainingError(f"cannot write to {run.out}: {error.strerror or error}") from error
    save_state(run, state)
    log.progress.update(log.task, completed=state.step)
    log.say(epoch_line(record, recipe.epochs))
    state.next_sync = state.step + 1


class _Clock:
    """Seconds trained, over all sessions, and the remaining updates of this call."""

    def __init__(self, state: TrainState) -> None:
        self.first, self.earlier, self.began = state.step, state.seconds, time.monotonic()

    def seconds(self) -> float:
        return self.earlier + time.monotonic() - self.began

    def at_limit(self, run: Run, state: TrainState) -> bool:
        return run.stop_after is not None and state.step - self.first >= run.stop_after


def _over(run: Run, state: TrainState) -> bool:
    """True if the run is complete."""
    at_epoch = state.step % run.steps == 0
    return state.step >= run.total or bool(
        state.best and at_epoch and state.best.over(state.step // run.steps)
    )


def _train(run: Run) -> dict[str, Any]:
    if run.world == 1 and (done := _finished(run)):
        return done
    state, log = _start(run)
    clock = _Clock(state)
    try:
        log.progress.start()
        with StopRequest() as stop:
            while not _over(run, state):
                if state.step == state.stage.end_epoch * run.steps:
                    state = _next_stage(run, state, log)
                _train_epoch(run, state, log, stop, clock)
                _end_epoch(run, state, log, clock)
                if clock.at_limit(run, state) and state.step < run.total:
                    raise _Pause
    except _Pause:
        return {"out": run.out, "finished": False, "step": state.step, "epoch": state.step // run.steps}
    except Stopped as stopped:
        sync_error(run.accelerator, stopped)
    except KeyboardInterrupt:
        raise TrainingError(
            f"stopped at once; the same command resumes at update {state.saved_step} of {run.total}"
        ) from None
    except RuntimeError as error:
        if run.world > 1 and not isinstance(error, CapszooError) and _lost_peer(error):
            raise PeerLost from error
        raise
    finally:
        log.close()
    return _finish(run, state, log)


def _finished(run: Run) -> dict[str, Any] | None:
    """The result of a run that finished earlier, from its metadata; None if it is not complete."""
    metadata = finished_metadata(run.out)
    checkpoint, _ = latest_checkpoint(run.out) if metadata else (None, [])
    measured = (metadata or {}).get("metrics", {})
    if metadata is None or checkpoint is None or (run.data.test is not None) != ("test" in measured):
        return None
    step = int(checkpoint.state["step"])
    if step < run.total and not run.recipe.early_stop:
        return None
    weights = run.out / f"{metadata['architecture']}.{metadata['tag']}.safetensors"
    if sha256_of(weights) != metadata["sha256"]:
        return None
    print(f"{run.recipe.name}: already finished; choose another --out to train again", file=sys.stderr)
    print(weights_line(weights))
    for split in ("validation", "test"):
        if split in measured:
            print(accuracy_line(split, run.data.training.spec.accuracy, measured[split]))
    epoch = step // run.steps
    return {"out": run.out, "finished": True, "step": step, "epoch": epoch, "weights": weights, **measured}


def _finish(run: Run, state: TrainState, log: RunLog) -> dict[str, Any]:
    """Write the weights, and evaluate the stored file once on the test set."""
    recipe, spec = run.recipe, run.data.training.spec
    result: dict[str, Any] = {
        "out": run.out,
        "finished": True,
        "step": state.step,
        "epoch": state.step // run.steps,
    }
    if state.best:
        state.evaluated.load_state_dict(state.best.weights)
        ended = "the last" if state.step == run.total else f"none was better in {recipe.early_stop} more"
        log.say(
            f"kept: epoch {state.best.epoch}, validation {spec.accuracy} {state.best.top1:.2f}% ({ended})"
        )
    net = kept_net(run, state)
    with raise_on_all_ranks(run.accelerator):
        if run.main:
            details = _details(run, state, log)

            def write() -> Path:
                return write_weights(
                    run.out,
                    net,
                    architecture=recipe.arch,
                    tag=recipe.tag,
                    model_args=recipe.model_args,
                    spec=spec,
                    golden_pixels=next(Batches(run.data.measured, GOLDEN_IMAGES).epoch()).pixels,
                    details=details,
                )

            result["weights"] = write()
            log.result(weights_line(result["weights"]))
            if run.data.test is not None:
                figures = evaluate(result["weights"], run.data.test, device=run.device)
                details["metrics"]["test"] = {key: figures[key] for key in ("top1", "errors", "n")}
                write()
                log.result(accuracy_line("test", spec.accuracy, figures))
            elif "validation" in details["metrics"]:
                log.result(accuracy_line("validation", spec.accuracy, details["metrics"]["validation"]))
            result |= details["metrics"]
    return result


def _details(run: Run, state: TrainState, log: RunLog) -> dict[str, Any]:
    """Metadata of the weights that describe the run."""
    recipe, data, spec = run.recipe, run.data, run.data.training.spec
    details: dict[str, Any] = {
        "description": recipe.description or None,
        "recipe": recipe.model_dump(mode="json"),
        "seed": recipe.seed,
        "commit": run.commit,
        "dataset": {
            "name": spec.name,
            "title": spec.title,
            "source": spec.source,
            "sha256": data.fingerprints,
            **({"left_out": list(data.skipped)} if data.skipped else {}),
        },
        "chosen": "best validation epoch" if state.best else "last epoch",
        "hardware": hardware(run.device),
        "train_seconds": round(state.seconds),
        "versions": versions(),
        "metrics": {},
    }
    if state.best:
        details["epoch"] = state.best.epoch
    composed = isinstance(data.training, ImageSet) and data.training.composer
    if not composed and state.batches.margin[0]:
        # predict crops in the same way as evaluation
        details["crop_pct"] = spec.input_size[1] / data.training.size[0]
    if state.held_out:
        top1 = state.best.top1 if state.best else log.records()[-1]["val_top1"]
        details["metrics"]["validation"] = {"top1": top1, "n": len(data.validation)}
    return details | _machines(run.out)


def _machines(out: Path) -> dict[str, Any]:
    """The metadata of a run that moved to another processor or precision: each of its parts, and all the hardware."""
    keys = ("from_update", "commit", "hardware", "precision", "compile")
    parts: list[dict[str, Any]] = []
    for session in read_sessions(out):
        part = {key: session.get(key) for key in keys}
        if parts and all(part[key] == parts[-1][key] for key in keys[2:]):
            continue  # a resume on the same machine
        if parts and part["from_update"] == parts[-1]["from_update"]:
            parts.pop()  # the session before made no update
        parts.append(part)
    if len(parts) < 2:
        return {}
    return {"hardware": "; ".join(dict.fromkeys(str(part["hardware"]) for part in parts)), "sessions": parts}


def _rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate; the highest one if layers have different rates."""
    return max(group["lr"] for group in optimizer.param_groups)


def _lost_peer(error: RuntimeError) -> bool:
    return isinstance(error, torch.distributed.DistError) or any(
        word in str(error) for word in ("gloo", "onnection closed", "onnection reset", "NCCL")
    )


def _update(
    accelerator: Accelerator,
    ddp_module: nn.Module,
    optimizer: Any,
    batch: Batch,
    recipe: Recipe,
    layout: torch.memory_format,
    sums: Tensor,
    known: int | None,
) -> Tensor:
    """Update the weights once from one batch, in parts; add to `sums` and return the mean loss (a scalar)."""
    mean_loss = torch.zeros((), device=sums.device)
    threshold = score_threshold(recipe.loss.name)
    for number, part in enumerate(batch.chunk(recipe.accumulate), start=1):
        images, labels, pixels, parts, part_labels = part
        share = len(labels) / len(batch.labels)
        # Gradients are synchronised between processes only with the last part.
        with _unsynced(accelerator, ddp_module, number < recipe.accumulate):
            images = images.contiguous(memory_format=layout)
            loss, scores = ddp_module(images, labels, pixels, parts, part_labels)
            accelerator.backward(loss * share)
        mean_loss += loss.detach() * share
        sums[1] += all_right(scores.detach(), labels, known, threshold).sum()
    if recipe.clip_grad:
        accelerator.clip_grad_norm_(ddp_module.parameters(), recipe.clip_grad)
    optimizer.step()
    optimizer.zero_grad()
    sums[0] += mean_loss * len(batch.labels)
    sums[2] += len(batch.labels)
    return mean_loss


@contextmanager
def _unsynced(accelerator: Accelerator, module: nn.Module, active: bool) -> Iterator[None]:
    if active:
        with accelerator.no_sync(module):
            yield
    else:
        yield


def _epoch_record(
    accelerator: Accelerator,
    sums: Tensor,
    optimizer: torch.optim.Optimizer,
    step: int,
    epoch: int,
    rate: float,
) -> dict[str, Any]:
    loss, right, n = accelerator.reduce(sums.clone()).tolist()
    return {
        "epoch": epoch + 1,
        "step": step,
        "lr": float(f"{_rate(optimizer):.4g}"),
        "train_loss": float(f"{loss / n:.5g}") if math.isfinite(loss) else None,
        "train_top1": round(100 * right / n, 3),
        "images_per_s": round(rate),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m capszoo.recipes.train",
        description="Train a recipe. The same command resumes where an earlier run stopped.",
    )
    parser.add_argument("recipe", help="name of a recipe that comes with the package, or a YAML file")
    parser.add_argument("--data", help="folder of the data set; default: CAPSZOO_DATA")
    parser.add_argument("--out", help="folder of the run; default: runs/<arch>.<tag>")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe"
    )
    parser.add_argument("--profile", help="one of the recipe's profiles, such as short")
    parser.add_argument("--no-resume", action="store_true", help="refuse a folder that already holds a run")
    parser.add_argument("--accept-data", action="store_true", help="continue although images have changed")
    parser.add_argument("--threads", type=int, help="CPU threads; default: those that the run began with")
    parser.add_argument("--cpu", action="store_true", help="leave an accelerator unused")
    args = parser.parse_args(argv)
    try:
        train(
            args.recipe,
            args.set,
            args.out,
            args.data,
            not args.no_resume,
            args.cpu,
            profile=args.profile,
            threads=args.threads,
            accept_data=args.accept_data,
        )
    except (CapszooError, WeightsError, OSError) as error:
        # An invalid call fails on every process: only one prints it.
        if not isinstance(error, UsageError) or os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:  # before the first update or after the last: nothing to save
        print("error: stopped; the same command resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
