"""Train a recipe, as ``capszoo train RECIPE`` does.

One loop, ``_train``: epochs with validation on images held out of the training set, a checkpoint after each (less often
where an epoch lasts seconds), and the test set once, at the end. The last epoch's weights are kept, without selection.
``Run`` has the constant parts, ``TrainState`` the changing ones (``training/state.py``); a recipe with ``stages``
creates a new state for each image size (``training/stages.py``). ``training/begin.py``, ``step.py`` and ``finish.py``
are its parts.

The same command resumes an interrupted run, and ends with the same weights bit for bit on the CPU: the order of
the data, the augmentation and the random numbers of the net are functions of (seed, epoch, step), everything else is
in the checkpoint.

Several processes: ``accelerate launch -m capszoo train RECIPE …``. They share each batch; all of them need the
run's folder. ``training/distributed.py`` makes them fail and stop together, ``training/log.py`` reports progress,
``training/anomaly.py`` finds the origin of a value that is not finite.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from capszoo._utils.files import not_writable
from capszoo._utils.process import keep_freed_memory
from capszoo.errors import CapszooError, UsageError
from capszoo.models._inspect import freeze_batch_statistics

from .config import Recipe, RecipeError, load_recipe
from .evaluation.metrics import count_correct, mean_recall
from .evaluation.target import score_threshold
from .training.anomaly import NonFiniteDetector
from .training.begin import begin_run, begin_stage
from .training.checkpoints import latest_checkpoint, newest_position
from .training.distributed import (
    Stopped,
    StopRequest,
    TrainingError,
    accelerator_for,
    gather_object,
    is_lost_peer,
    raise_on_all_ranks,
    sync_error,
)
from .training.finish import finish_run, result_of_finished
from .training.log import RunLog, epoch_line, setback_line
from .training.run_folder import FolderBefore, RunLock, check_counts, check_data, check_run
from .training.setup import RunData, load_data
from .training.state import (
    LONGEST_SECONDS,
    Run,
    TrainState,
    check_stages,
    checkpoint_due,
    restore,
    save_state,
)
from .training.step import learning_rate, train_step
from .weights import source_commit

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["TrainingError", "train"]

#: Largest number of updates between looks at the loss and for signals: looking makes a GPU, and processes, wait.
SYNC_EVERY = 20
#: Slow updates are looked at more often: about this often.
SYNC_SECONDS = 2.0


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
    log_with: Sequence[str] = (),
) -> dict[str, Any]:
    """Train a recipe to its end, or resume an interrupted run.

    Args:
        recipe: path of a YAML file, name of a recipe in the package, or a ``Recipe``.
        overrides: ``key=value`` lines with dotted keys, e.g. ``optimizer.lr=0.001``.
        out: folder of the run; None: ``runs/<arch>.<tag>``.
        data: folder of the data set; None uses ``CAPSZOO_DATA``. Or the result of ``load_data`` for this recipe.
        resume: False refuses a folder that already contains a run.
        cpu: do not use an accelerator.
        stop_after: number of updates of this call after which it saves and stops (for trials and tests).
        profile: name of one of the recipe's profiles; None uses the recipe's settings.
        threads: CPU threads; None: as many as at the start of the run, else PyTorch's.
        accept_data: continue with other images than those of the run so far.
        log_with: trackers of Accelerate that log as well: wandb, mlflow, trackio; a resumed run is a new run there.

    Returns:
        ``{"out", "finished", "step", "epoch"}`` and, once finished, ``"weights"`` (path) and the metrics of
        ``"validation"`` and ``"test"``, if there are such images.

    Raises:
        UsageError: an argument is invalid; a ``RecipeError`` if it is the recipe.
        DataError: the data set is missing or unreadable.
        WeightsError: initial weights are missing or do not fit.
        TrainingError: the run cannot start, continue or be saved. With several processes the first one raises an error,
            the others exit.
    """
    recipe = load_recipe(recipe, overrides, profile)
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads}: training needs at least one CPU thread")
    folder = Path(out) if out else Path("runs") / recipe.name
    threads_before = torch.get_num_threads()
    try:
        with accelerator_for(recipe, cpu, log_with) as accelerator, closing(RunLock(folder)) as lock:
            _prepare_process(recipe, folder, accelerator, threads)
            commit = source_commit()
            # all checks that are possible before anything is built
            with raise_on_all_ranks(accelerator):
                if accelerator.is_main_process:
                    if folder.is_dir():  # else it is created and locked after recipe and data are checked
                        lock.acquire()
                    if isinstance(data, RunData):  # settings that follow from their number would differ, too
                        check_counts(folder, data.counts)
                    check_run(recipe, folder, resume)
                images = data if isinstance(data, RunData) else load_data(recipe, data)
                if accelerator.is_main_process:
                    check_counts(folder, images.counts)
                    check_data(folder, images.fingerprints, accept_data)
                steps = len(images.training) // recipe.batch_size
                run = Run(recipe, folder, accelerator, images, steps, stop_after, commit, lock)
                check_stages(run)
            return _train(run)
    finally:
        if torch.get_num_threads() != threads_before:
            torch.set_num_threads(threads_before)


def _prepare_process(recipe: Recipe, out: Path, accelerator: Accelerator, threads: int | None) -> None:
    """Set what the computations of this process depend on, and check its share of a batch."""
    if accelerator.device.type == "cpu":
        keep_freed_memory()
        # floating-point sums depend on their number
        if threads or (threads := newest_position(out).get("threads")):
            torch.set_num_threads(threads)
    if not accelerator.is_main_process:  # warnings are the same on all processes: one prints them
        logging.getLogger("capszoo").setLevel(logging.ERROR)
    parts = accelerator.num_processes * recipe.accumulate
    if recipe.batch_size % parts:
        raise RecipeError(
            f"{recipe.name}: batch_size {recipe.batch_size} cannot be shared by {accelerator.num_processes} processes "
            f"in {recipe.accumulate} parts each: set it to a multiple of {parts}"
        )


def _sync_and_log(run: Run, state: TrainState, log: RunLog, stop: StopRequest, saving: bool) -> int:
    """Check on all processes that the new losses are finite; return the number of a received signal, else 0.

    ``saving``: check the weights, too: a checkpoint follows, from which a run with other values could not go on.
    """
    values = torch.stack(state.losses)
    state.losses.clear()
    finite, mean = values.isfinite().tolist(), values.mean()
    bad = 0 if all(finite) else state.step - len(finite) + finite.index(False) + 1
    if saving and not bad:
        weights_finite = all(bool(weight.isfinite().all()) for weight in state.net.parameters())
        bad = 0 if weights_finite else state.step
    pace = max(time.monotonic() - state.epoch_began, 1e-6) / max(state.step - state.epoch_first, 1)
    news = torch.tensor([-bad or -math.inf, stop.number, pace], dtype=torch.float64, device=run.device)
    if run.world > 1:
        torch.distributed.all_reduce(news, torch.distributed.ReduceOp.MAX)
        mean = run.accelerator.reduce(mean, "mean")
    bad, number, pace = (0 if value == -math.inf else value for value in news.tolist())
    state.next_sync = state.step + min(SYNC_EVERY, max(1, int(SYNC_SECONDS / pace)))
    if bad:
        _locate_nonfinite(run, state, log, int(-bad))
    rate, epoch = run.recipe.batch_size / pace, (state.step - 1) // run.steps + 1
    note = f"epoch {epoch}/{run.recipe.epochs}"
    log.update(state.step, mean.item(), learning_rate(state.optimizer), rate, note)
    return int(number)


def _locate_nonfinite(run: Run, state: TrainState, log: RunLog, bad: int) -> None:
    """Go back to the last checkpoint, repeat the updates up to ``bad`` and inspect the last two; always raises."""
    log.say(
        f"the loss is not finite at update {bad}: repeating updates {state.saved_step + 1} to {bad} to find the layer"
    )
    checkpoint, _ = latest_checkpoint(run.out)
    origin = ""
    if checkpoint:
        restore(run, state, checkpoint)
        state.step_module.use(state.net)  # hooks do not run inside a compiled net
        origin = _replay(run, state, bad)
    origin = next((text for text in gather_object([origin]) if text), "")
    remedy = "a lower optimizer.lr or with clip_grad"
    if origin:
        origin = f", {origin}"
    elif run.recipe.compile:
        origin, remedy = "; the same updates are finite without compilation", "--set compile=false"
    else:
        origin = "; repeating those updates did not reproduce it"
    sync_error(
        run.accelerator,
        TrainingError(
            f"the loss is not finite at update {bad} (epoch {(bad - 1) // run.steps + 1}){origin}; "
            f"the state of update {state.saved_step} is kept: start again in another --out with {remedy}"
        ),
    )


def _replay(run: Run, state: TrainState, bad: int) -> str:
    """Repeat the updates up to ``bad``; return where a value that is not finite arose first, or an empty string.

    Every process repeats all of them, whatever it found: they wait for each other in each update.
    """
    origin = ""
    while state.step < bad:
        for batch in state.batches.epoch(*divmod(state.step, run.steps)):
            scaled = run.accelerator.scaler is not None
            watch = (
                NonFiniteDetector(state.step_module, gradients=not scaled) if state.step >= bad - 2 else None
            )
            train_step(run, state, batch)
            state.step += 1
            if watch:
                watch.close()
                if watch.found and not origin:
                    origin = watch.found + (f" at update {state.step}" if state.step != bad else "")
            if state.step == bad:
                break
    return origin


class _Pause(Exception):
    """This call has performed its requested number of updates."""


def _periodic(run: Run, state: TrainState) -> bool:
    """True if a checkpoint is due within an epoch: by ``checkpoint_every``, or ``LONGEST_SECONDS`` after the last one.

    The time counts in a single process only: several ones would have to agree on it in each update.
    """
    every = run.recipe.checkpoint_every
    if every is not None and state.step % every == 0:
        return True
    return run.world == 1 and time.monotonic() - state.saved_at >= LONGEST_SECONDS


def _stopped(run: Run, state: TrainState, number: int) -> Stopped:
    return Stopped(f"stopped at update {state.step} of {run.total}; the same command resumes there", number)


def _train_epoch(run: Run, state: TrainState, log: RunLog, stop: StopRequest, clock: _Clock) -> int:
    """The updates of one epoch, or the remaining ones; returns the number of a signal that came with the last, else 0.

    Raises:
        Stopped: a signal came before. _Pause: ``stop_after`` updates are done. Both after a checkpoint.
    """
    epoch, start = divmod(state.step, run.steps)
    state.ddp_module.train()
    freeze_batch_statistics(state.net)
    state.epoch_began, state.epoch_first = time.monotonic(), state.step
    for batch in state.batches.epoch(epoch, start):
        state.losses.append(train_step(run, state, batch))
        state.step += 1
        state.seconds = clock.seconds()
        last, at_limit = state.step % run.steps == 0, clock.at_limit(run, state)
        saving = last or at_limit or _periodic(run, state)
        number = 0
        if saving or state.step >= state.next_sync or (run.world == 1 and stop.number):
            number = _sync_and_log(run, state, log, stop, saving or bool(stop.number))
        if last:
            return number
        if saving or number:
            save_state(run, state)
        if number:
            raise _stopped(run, state, number)
        if at_limit:
            raise _Pause
    return 0


def _end_epoch(run: Run, state: TrainState, log: RunLog, clock: _Clock, stopping: bool) -> None:
    """Validation, record and checkpoint of a completed epoch."""
    recipe = run.recipe
    record = _epoch_record(run, state)
    if recipe.stages:
        record["size"] = state.batches.target[0]
    if state.held_out:
        if run.world > 1:  # on CPUs norms have statistics per process: use the first one's
            for buffer in state.evaluated.buffers():
                torch.distributed.broadcast(buffer, 0)
        threshold = score_threshold(recipe.loss.name)
        counts = count_correct(state.evaluated, state.held_out, run.accelerator.autocast(), threshold)
        right, images = run.accelerator.reduce(counts).tolist()
        record["val_top1"] = round(100 * sum(right) / sum(images), 4)
        if not run.data.training.spec.multi_label:
            record |= {"val_recall": round(mean_recall(right, images), 4), "val_right": right}
        if state.best:
            state.best.see(record["epoch"], record, state.evaluated)
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
            raise TrainingError(not_writable(run.out, error)) from error
    needed = stopping or _periodic(run, state) or _over(run, state) or clock.at_limit(run, state)
    if needed or checkpoint_due(run, state):
        save_state(run, state)
    log.progress.update(log.task, completed=state.step)
    log.say(epoch_line(record, recipe.epochs))
    if setback := setback_line(record, log.before(record)):
        log.say(setback)
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
    done = None
    with raise_on_all_ranks(run.accelerator):
        if run.main:
            done = result_of_finished(run)
    done = gather_object([done])[0]
    if done is not None:
        return done
    state, before = None, FolderBefore(run.out)
    try:
        state, log = begin_run(run)
        return _run_to_end(run, state, log)
    except Exception as error:
        if run.main and not isinstance(error, Stopped) and (state is None or not state.step):
            before.restore()
        raise


def _run_to_end(run: Run, state: TrainState, log: RunLog) -> dict[str, Any]:
    """Make the updates that are left; returns the result of ``train``."""
    clock = _Clock(state)
    state.saved_at = time.monotonic()
    try:
        log.progress.start()
        with StopRequest() as stop:
            while not _over(run, state):
                if state.step == state.stage.end_epoch * run.steps:
                    state = begin_stage(run, state, log)
                number = _train_epoch(run, state, log, stop, clock)
                _end_epoch(run, state, log, clock, bool(number))
                if number and not _over(run, state):
                    raise _stopped(run, state, number)
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
        if run.world > 1 and not isinstance(error, CapszooError) and is_lost_peer(error):
            raise TrainingError(
                "another process of this run has ended: its own message says why; the same command resumes "
                "from the last checkpoint"
            ) from error
        raise
    finally:
        log.close()
    # The evaluation ends in spite of a first signal: it cannot be resumed, only repeated.
    with StopRequest():
        return finish_run(run, state, log)


def _epoch_record(run: Run, state: TrainState) -> dict[str, Any]:
    """The record of a completed epoch, without validation."""
    spent = max(time.monotonic() - state.epoch_began, 1e-6)  # a clock may advance every 16 ms
    rate = (state.step - state.epoch_first) * run.recipe.batch_size / spent
    loss, right, n = run.accelerator.reduce(state.sums.clone()).tolist()
    return {
        "epoch": state.step // run.steps,
        "step": state.step,
        "lr": float(f"{learning_rate(state.optimizer):.4g}"),
        "train_loss": float(f"{loss / n:.5g}") if math.isfinite(loss) else None,
        "train_top1": round(100 * right / n, 3),
        "images_per_s": round(rate),
    }
