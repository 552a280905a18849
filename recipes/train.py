"""Train a recipe: `python -m capszoo.recipes.train RECIPE --data FOLDER`, or `capszoo train RECIPE`.

One loop, from top to bottom of `_train`: data in memory on the device, model, loss, optimiser, schedule, epochs with
validation on images held out of the training set, a checkpoint after each, and at the end, once, the test set. The
last epoch's weights are what is kept; nothing is selected. The same command resumes a run that was cut short, and
ends with the same weights bit for bit on the CPU: the order of the data, the augmentation and the random numbers of
the net are functions of (seed, epoch, step), everything else is in the checkpoint.

Several processes: `accelerate launch -m capszoo.recipes.train RECIPE …`. They share each batch; all of them need the
run's folder. `training/distributed.py` makes them fail and stop together, `training/log.py` says how it goes,
`training/anomaly.py` finds where a value that is not finite came from.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
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
from capszoo.losses import create_loss, reconstruction_loss
from capszoo.models._feedback import FeedbackAgreement
from capszoo.models._pretrained import WeightsError

from .config import Recipe, RecipeError, load_recipe
from .evaluate import evaluate
from .evaluation.metrics import all_right, count_correct
from .evaluation.target import score_threshold
from .training.anomaly import Watch
from .training.checkpoints import Checkpoint, latest_checkpoint, save_checkpoint
from .training.distributed import (
    PeerLost,
    Stopped,
    StopRequest,
    TrainingError,
    agree,
    one_fate,
)
from .training.early_stop import BestEpoch
from .training.log import RunLog
from .training.routing_probe import RoutingProbe
from .training.run_folder import (
    check_room,
    check_run,
    note_session,
    open_run,
    versions,
)
from .training.setup import (
    RunData,
    create_feedback,
    create_net,
    create_optimizer,
    create_scheduler,
    hold_frozen,
    load_data,
)
from .weights import hardware, source_commit, write_weights

try:
    import accelerate
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import gather_object

except ModuleNotFoundError as error:
    raise ModuleNotFoundError("training needs accelerate: pip install 'capszoo[train]'") from error

__all__ = ["TrainingError", "main", "train"]

LOOK_EVERY = 20
"""Largest number of updates between looks at the loss and for signals: looking makes a GPU, and processes, wait."""
LOOK_SECONDS = 2.0
"""Slow updates are looked at more often: about this often."""
GOLDEN_IMAGES = 4


class Task(nn.Module):
    """The net and its loss as one module, so that Accelerate's precision and processes wrap the whole of a step."""

    def __init__(self, net: Any, recipe: Recipe, feedback: FeedbackAgreement | None = None) -> None:
        super().__init__()
        self.net: Any = torch.compile(net) if recipe.compile else net
        self.reconstruct: Any = getattr(net, "reconstruct", None)
        self.forward_poses: Any = getattr(net, "forward_poses", None)
        if recipe.compile and recipe.loss.reconstruction:
            self.forward_poses = torch.compile(
                self.forward_poses
            )  # a compiled net compiles its `forward` alone
        self.feedback = feedback
        self.criterion: Any = create_loss(recipe.loss.name, **recipe.loss.options)
        self.reconstruction = recipe.loss.reconstruction

    def set_progress(self, progress: float) -> None:
        """Tell a loss that changes in the course of training which share of it is done."""
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
        """Returns the loss (mean over the batch, a scalar) and the scores [b, n]."""
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
        """The loss of the scores, and the feedback agreement of the forward that gave them."""
        loss: Tensor = self.criterion(scores.float(), labels)
        return loss if self.feedback is None else loss + self.feedback()

    def _rebuilding(self, poses: Tensor, labels: Tensor, pixels: Tensor) -> Tensor:
        """Reconstruction loss of images [b, c, h, w] from the capsules of `labels` [b]; -1 costs nothing."""
        rebuilt = self.reconstruct(poses, labels.clamp(min=0)).float()
        rebuilt = torch.where((labels >= 0)[:, None, None, None], rebuilt, 0.0)  # its pixels are black
        return reconstruction_loss(rebuilt, pixels.float() / 255, self.reconstruction)


def _seed_update(seed: int, step: int, rank: int) -> None:
    """Seed the net's random numbers (dropout) for one update, so that they need no place in the checkpoint."""
    digest = hashlib.sha256(f"update/{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@contextmanager
def _accelerator(recipe: Recipe, cpu: bool) -> Iterator[Accelerator]:
    """Accelerate keeps its settings in a process-wide singleton: give it back, so that the next run may differ."""
    precision = "no" if recipe.precision == "fp32" else recipe.precision
    unfit = f"precision {recipe.precision} does not work on this device"
    try:
        accelerator = Accelerator(mixed_precision=precision, cpu=cpu)
        if precision == "fp16" and accelerator.device.type == "cpu":
            raise TrainingError(f"{unfit}, a CPU: take bf16 or fp32")
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
) -> dict[str, Any]:
    """Train a recipe to its end, or go on where an earlier run of it stopped.

    Arguments:
        recipe: path of a YAML file, name of a recipe that comes with the package, or a `Recipe`.
        overrides: `key=value` lines with dotted keys, e.g. `optimizer.lr=0.001`.
        out: folder of the run; None: `runs/<arch>.<tag>`.
        data: folder of the data set; None asks `CAPSZOO_DATA`. Or what `load_data` has read of it for this recipe.
        resume: False refuses a folder that already holds a run.
        cpu: leave an accelerator unused.
        stop_after: checkpoint and stop after so many updates of this call (for trials and tests).
        profile: name of one of the recipe's profiles; None takes its own settings.

    Returns `{"out", "finished", "step", "epoch"}` and, once finished, `"weights"` (path) and the metrics of
    `"validation"` and `"test"`, as far as there are such images.

    Raises `RecipeError`, `DataError` or `TrainingError`, each one line with a remedy; of several processes the first
    one does, the others exit.
    """
    recipe = load_recipe(recipe, overrides, profile)
    run = Path(out) if out else Path("runs") / recipe.name
    with _accelerator(recipe, cpu) as accelerator:
        return _train(recipe, run, data, resume, stop_after, accelerator)


def _train(
    recipe: Recipe,
    out: Path,
    data: str | Path | RunData | None,
    resume: bool,
    stop_after: int | None,
    accelerator: Accelerator,
) -> dict[str, Any]:
    device, main_process = accelerator.device, accelerator.is_main_process
    rank, world = accelerator.process_index, accelerator.num_processes
    if device.type == "cpu":
        keep_freed_memory()
    if not main_process:  # what is worth a warning is so on all of them: one says it
        logging.getLogger("capszoo").setLevel(logging.ERROR)
    if recipe.batch_size % (world * recipe.accumulate):
        raise RecipeError(
            f"{recipe.name}: batch_size {recipe.batch_size} cannot be shared by {world} processes "
            f"in {recipe.accumulate} parts each"
        )
    commit = source_commit()  # now, not at the end: the files may have moved on by then
    with one_fate(accelerator):
        if main_process:
            check_run(recipe, out, resume)

        # Data: uint8 tensors on the device.
        found = data if isinstance(data, RunData) else load_data(recipe, data)
        training, validation = found.training, found.validation
        spec = training.spec
        batches = Batches(
            training.to(device),
            recipe.batch_size,
            train=True,
            augment=recipe.data.augment.build(),
            seed=recipe.seed,
            rank=rank,
            world=world,
            balance=recipe.data.balance,
        )
        held_out = Batches(validation.to(device), 500, rank=rank, world=world) if len(validation) else None
        if recipe.early_stop and not held_out:
            raise RecipeError(f"{recipe.name}: early_stop needs validation images: set data.val_size")
        steps = len(batches)
        total = steps * recipe.epochs

        # Model, optimiser, schedule.
        accelerate.utils.set_seed(recipe.seed)
        layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        net = create_net(recipe, spec).to(device).to(memory_format=layout)
        normalises = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in net.modules())
        if normalises and world > 1 and device.type == "cuda":
            net = convert_sync_batchnorm(net)  # the statistics of the whole batch, as on one GPU
        ema = ModelEmaV3(net, decay=recipe.ema_decay, use_warmup=True) if recipe.ema_decay else None
        feedback = create_feedback(recipe, net)
        optimizer = create_optimizer(recipe, net, feedback)
        best = BestEpoch(recipe.early_stop) if recipe.early_stop else None
        try:
            goal = Task(net, recipe, feedback)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{recipe.name}: loss {recipe.loss.name}: {error}") from error
        schedule = create_scheduler(recipe, optimizer, steps)
        probe = None
        if recipe.routing_images and main_process:
            probe = RoutingProbe(recipe, net, validation.to(device))

        # Only now, when nothing is wrong with the recipe or the data, the run's folder.
        if main_process:
            open_run(recipe, out)
            check_room(out, recipe, net)
    task, wrapped = accelerator.prepare(goal, optimizer)

    # Where an earlier run stopped.
    step, kept_step, seconds, sums = 0, 0, 0.0, torch.zeros(3, dtype=torch.float64, device=device)

    def restore(checkpoint: Checkpoint) -> None:
        """Take the state of a checkpoint; the schedule and all random numbers follow from its step."""
        nonlocal step, seconds
        net.load_state_dict(checkpoint.weights["model"])
        if feedback:
            feedback.load_state_dict(checkpoint.weights["feedback"])
        if ema:
            ema.module.load_state_dict(checkpoint.weights["ema"])
        if best:
            best.restore(checkpoint.state["best"], checkpoint.weights.get("best", {}))
        optimizer.load_state_dict(checkpoint.optimizer["optimizer"])
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(checkpoint.optimizer["scaler"])
        step, seconds = checkpoint.state["step"], checkpoint.state["seconds"]
        sums.copy_(torch.tensor(checkpoint.state["sums"], dtype=torch.float64))

    def keep() -> None:
        """Write a checkpoint of the present state."""
        nonlocal kept_step
        state: dict[str, Any] = {"epoch": step // steps, "seconds": seconds, "sums": sums.tolist()}
        state["recipe"] = recipe.name
        tensors: dict[str, Any] = {"optimizer": optimizer.state_dict()}
        if accelerator.scaler is not None:
            tensors["scaler"] = accelerator.scaler.state_dict()
        kept = {"model": net, "ema": ema.module if ema else None, "feedback": feedback}
        weights = {name: module.state_dict() for name, module in kept.items() if module is not None}
        if best:
            state["best"] = best.state()
            weights |= {"best": best.weights} if best.weights else {}
        with one_fate(accelerator):
            try:
                if main_process:
                    save_checkpoint(out, step, weights, tensors, state)
            except OSError as error:
                raise TrainingError(
                    f"cannot write a checkpoint to {out}: {error.strerror or error}; "
                    + (f"the state of update {kept_step} is kept: " if step else "")
                    + "make room and run the same command"
                ) from error
        kept_step = step

    with one_fate(accelerator):
        checkpoint, skipped = latest_checkpoint(out)
        if checkpoint:
            restore(checkpoint)
            kept_step = step
        if world > 1 and len(set(gather_object([step]))) > 1:
            raise TrainingError(f"the processes see different checkpoints: {out} must be a folder they share")
        log = RunLog(out, main_process, total, step)
        if main_process:
            session = {"from_update": step, "seed": recipe.seed, "processes": world, "commit": commit}
            started = datetime.now(timezone.utc).isoformat(timespec="seconds")
            note_session(
                out, {"started": started, **session, "hardware": hardware(device), "versions": versions()}
            )
    for line in (*skipped, *(f"left out: {line}" for line in found.skipped)):
        log.say(line)
    parameters = sum(p.numel() for p in net.parameters())
    log.say(
        f"{recipe.name}: {parameters:,} parameters, {len(training)} images, {recipe.epochs} epochs of {steps} updates, "
        f"{hardware(device)}" + (f"; going on from update {step}" if step else "")
    )
    if normalises and world > 1 and device.type != "cuda":
        log.say("note: on CPUs, BatchNorm takes the statistics of each process's share of a batch alone")
    if not checkpoint:
        keep()  # a folder that cannot be written is found now, and a failure in the first updates can be traced

    losses: list[Tensor] = []  # of the updates since the last look
    next_look = step + 1

    def advance(batch: Any) -> Tensor:
        """Make update number `step`, counted from 0, and return its loss."""
        _seed_update(recipe.seed, step, rank)
        if schedule:
            schedule.step_update(step)
        goal.set_progress(step / total)
        loss = _update(accelerator, task, wrapped, batch, recipe, layout, sums, spec.labels_per_image)
        if ema:
            ema.update(net, step=step)
        return loss

    def look() -> int:
        """Are the losses since the last look finite? Has a signal come (its number, else 0)? All processes agree."""
        nonlocal next_look
        bad, mean = 0, torch.zeros((), device=device)
        if losses:
            values = torch.stack(losses)
            finite, mean = values.isfinite().tolist(), values.mean()
            bad = 0 if all(finite) else step - len(finite) + finite.index(False) + 1
        pace = (time.monotonic() - epoch_began) / max(step - epoch_first, 1)
        news = torch.tensor([-bad or -math.inf, stop.number, pace], dtype=torch.float64, device=device)
        if world > 1:
            torch.distributed.all_reduce(news, torch.distributed.ReduceOp.MAX)
            mean = accelerator.reduce(mean, "mean")
        bad, number, pace = (0 if value == -math.inf else value for value in news.tolist())
        next_look = step + min(LOOK_EVERY, max(1, int(LOOK_SECONDS / max(pace, 1e-6))))
        if bad:
            explain(int(-bad))
        if losses:
            lr = _rate(optimizer)
            log.look(step, mean.item(), lr, recipe.batch_size / pace, f"epoch {epoch + 1}/{recipe.epochs}")
        losses.clear()
        return int(number)

    def explain(bad: int) -> None:
        """Go back to the last checkpoint, make the updates up to `bad` anew and watch the last two; raises."""
        log.say(
            f"the loss is not finite at update {bad}: making updates {kept_step + 1} to {bad} anew to see where"
        )
        checkpoint, _ = latest_checkpoint(out)
        place = ""
        if checkpoint:
            restore(checkpoint)
            goal.net = net  # hooks see nothing inside a compiled net
            place = replay(bad)
        place = next((text for text in gather_object([place]) if text), "which did not happen again there")
        agree(
            accelerator,
            TrainingError(
                f"the loss is not finite at update {bad} (epoch {(bad - 1) // steps + 1}), {place}; "
                f"the state of update {kept_step} is kept: lower optimizer.lr or set clip_grad"
            ),
        )

    def replay(bad: int) -> str:
        nonlocal step
        while step < bad:
            for batch in batches.epoch(*divmod(step, steps)):
                watch = Watch(goal, gradients=accelerator.scaler is None) if step >= bad - 2 else None
                advance(batch)
                step += 1
                if watch:
                    watch.close()
                    if watch.found:
                        return watch.found + (f" at update {step}" if step != bad else "")
                if step == bad:
                    break
        return ""

    def write_epoch(record: dict[str, Any]) -> None:
        with one_fate(accelerator):
            if probe:
                record["routing"] = probe.measure(evaluated)
            try:
                log.epoch(record)
            except OSError as error:
                raise TrainingError(f"cannot write to {out}: {error.strerror or error}") from error

    evaluated = ema.module if ema else net
    began, first, earlier = time.monotonic(), step, seconds
    try:
        log.progress.start()
        with StopRequest() as stop:
            while step < total and not (best and step % steps == 0 and best.over(step // steps)):
                epoch, start = divmod(step, steps)
                task.train()
                hold_frozen(net)
                epoch_began, epoch_first = time.monotonic(), step
                for batch in batches.epoch(epoch, start):
                    losses.append(advance(batch))
                    step += 1
                    seconds = earlier + time.monotonic() - began
                    last = step % steps == 0
                    at_limit = stop_after is not None and step - first >= stop_after
                    periodic = recipe.checkpoint_every is not None and step % recipe.checkpoint_every == 0
                    number = 0
                    if last or at_limit or periodic or step >= next_look or (world == 1 and stop.number):
                        number = look()
                    if (at_limit or periodic or number) and not last:
                        keep()
                    if number and not last:
                        raise Stopped(
                            f"stopped at update {step} of {total}; the same command goes on from there",
                            number,
                        )
                    if at_limit and not last:
                        return {"out": out, "finished": False, "step": step, "epoch": step // steps}
                rate = (step - epoch_first) * recipe.batch_size / (time.monotonic() - epoch_began)
                record = _epoch_record(accelerator, sums, optimizer, step, epoch, rate)
                if held_out:
                    if (
                        world > 1
                    ):  # on CPUs norms have the statistics of each process's share: the first one's count
                        for buffer in evaluated.buffers():
                            torch.distributed.broadcast(buffer, 0)
                    threshold = score_threshold(recipe.loss.name)
                    right, n = accelerator.reduce(
                        count_correct(evaluated, held_out, accelerator.autocast(), threshold)
                    ).tolist()
                    record["val_top1"] = round(100 * right / n, 4)
                    if best:
                        best.see(epoch + 1, record["val_top1"], evaluated)
                seconds = earlier + time.monotonic() - began
                record["seconds"] = round(seconds, 1)
                sums.zero_()
                # The record first: a run that is killed between the two makes its epoch's end again.
                write_epoch(record)
                keep()
                log.progress.update(log.task, completed=step)
                told = (f"{key} {value}" for key, value in record.items() if key not in ("step", "routing"))
                log.say("  ".join(told))
                next_look = step + 1
                if stop_after is not None and step - first >= stop_after and step < total:
                    return {"out": out, "finished": False, "step": step, "epoch": step // steps}
    except Stopped as stopped:
        agree(accelerator, stopped)
    except KeyboardInterrupt:
        raise TrainingError(
            f"stopped at once; the same command goes on from update {kept_step} of {total}"
        ) from None
    except RuntimeError as error:
        if world > 1 and not isinstance(error, CapszooError) and _lost_peer(error):
            raise PeerLost from error
        raise
    finally:
        log.close()

    # The test set, once, from the file that is kept.
    result: dict[str, Any] = {"out": out, "finished": True, "step": step, "epoch": step // steps}
    if best:
        evaluated.load_state_dict(best.weights)
        ended = "the last" if step == total else f"none was better in {recipe.early_stop} more"
        log.say(f"kept: epoch {best.epoch}, validation {spec.accuracy} {best.top1:.2f}% ({ended})")
    with one_fate(accelerator):
        if main_process:
            details: dict[str, Any] = {
                "description": recipe.description or None,
                "recipe": recipe.model_dump(mode="json"),
                "seed": recipe.seed,
                "commit": commit,
                "dataset": {
                    "name": spec.name,
                    "title": spec.title,
                    "source": spec.source,
                    "sha256": found.fingerprints,
                    **({"left_out": list(found.skipped)} if found.skipped else {}),
                },
                "hardware": hardware(device),
                "train_seconds": round(seconds),
                "versions": versions(),
                "metrics": {},
            }
            if best:
                details["epoch"] = best.epoch
            if not (isinstance(training, ImageSet) and training.composer) and batches.margin[0]:
                details["crop_pct"] = (
                    spec.input_size[1] / training.size[0]
                )  # as evaluation crops, so does predict
            if held_out:
                top1 = best.top1 if best else log.records()[-1]["val_top1"]
                details["metrics"]["validation"] = {"top1": top1, "n": len(validation)}

            def write() -> Path:
                return write_weights(
                    out,
                    evaluated,
                    architecture=recipe.arch,
                    tag=recipe.tag,
                    model_args=recipe.model_args,
                    spec=spec,
                    golden_pixels=next(Batches(found.measured, GOLDEN_IMAGES).epoch()).pixels,
                    details=details,
                )

            result["weights"] = write()
            log.say(f"weights in {result['weights']}")
            if found.test is not None:
                figures = evaluate(result["weights"], found.test, device=device)
                details["metrics"]["test"] = {key: figures[key] for key in ("top1", "errors", "n")}
                write()
                log.say(f"test: {spec.accuracy} {figures['top1']:.2f}% of {figures['n']} images")
            result |= details["metrics"]
    return result


def _rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate; where layers have their own, the highest."""
    return max(group["lr"] for group in optimizer.param_groups)


def _lost_peer(error: RuntimeError) -> bool:
    return isinstance(error, torch.distributed.DistError) or any(
        word in str(error) for word in ("gloo", "onnection closed", "onnection reset", "NCCL")
    )


def _update(
    accelerator: Accelerator,
    task: nn.Module,
    optimizer: Any,
    batch: Batch,
    recipe: Recipe,
    layout: torch.memory_format,
    sums: Tensor,
    known: int | None,
) -> Tensor:
    """One update of the weights from one batch, in parts; adds to `sums` and returns the mean loss (a scalar)."""
    mean_loss = torch.zeros((), device=sums.device)
    threshold = score_threshold(recipe.loss.name)
    for number, part in enumerate(batch.chunk(recipe.accumulate), start=1):
        images, labels, pixels, parts, part_labels = part
        share = len(labels) / len(batch.labels)
        # Gradients travel between processes with the last part only.
        with _unsynced(accelerator, task, number < recipe.accumulate):
            images = images.contiguous(memory_format=layout)
            loss, scores = task(images, labels, pixels, parts, part_labels)
            accelerator.backward(loss * share)
        mean_loss += loss.detach() * share
        sums[1] += all_right(scores.detach(), labels, known, threshold).sum()
    if recipe.clip_grad:
        accelerator.clip_grad_norm_(task.parameters(), recipe.clip_grad)
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
        description="Train a recipe. The same command goes on where an earlier run stopped.",
    )
    parser.add_argument("recipe", help="name of a recipe that comes with the package, or a YAML file")
    parser.add_argument("--data", help="folder of the data set; default: CAPSZOO_DATA")
    parser.add_argument("--out", help="folder of the run; default: runs/<arch>.<tag>")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe"
    )
    parser.add_argument("--profile", help="one of the recipe's profiles, such as short")
    parser.add_argument("--no-resume", action="store_true", help="refuse a folder that already holds a run")
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
        )
    except (CapszooError, WeightsError, OSError) as error:
        # What is wrong with the call is wrong on every process: one says so.
        if not isinstance(error, UsageError) or os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:  # before the first update or after the last: there is nothing to save
        print("error: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
