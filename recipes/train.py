"""Train a recipe: `python -m capszoo.recipes.train RECIPE --data FOLDER`, or `capszoo train RECIPE`.

One loop, from top to bottom of `_train`: data in memory on the device, model, loss, optimiser, schedule, epochs with
validation on images held out of the training set, a checkpoint after each, and at the end, once, the test set. The
last epoch's weights are what is kept; nothing is selected. The same command resumes a run that was cut short, and
ends with the same weights bit for bit on the CPU: the order of the data, the augmentation and the random numbers of
the net are functions of (seed, epoch, step), everything else is in the checkpoint.

Several processes: `accelerate launch -m capszoo.recipes.train RECIPE …`. They share each batch; all of them need the
run's folder. `processes.py` makes them fail and stop together, `runlog.py` says how it goes, `watch.py` finds where a
value that is not finite came from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from timm.layers import convert_sync_batchnorm
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

import capszoo
from capszoo.data import Batch, Batches, DatasetSpec, ImageSet, StreamedSet, load_dataset, split_validation
from capszoo.errors import CapszooError, UsageError
from capszoo.losses import create_loss, reconstruction_loss
from capszoo.models._feedback import FeedbackAgreement, encapnet_feedback
from capszoo.models._pretrained import WeightsError

from .checkpoints import (
    Checkpoint,
    clear_leftovers,
    latest_checkpoint,
    room_missing,
    save_checkpoint,
    write_atomically,
)
from .config import Recipe, RecipeError, load_recipe
from .evaluate import all_right, count_correct, create_for, evaluate, score_threshold
from .processes import PeerLost, Stopped, StopRequest, TrainingError, agree, one_fate
from .runlog import RunLog
from .watch import Watch
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
        self.net: Any = net
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
            capsules = self.net.forward_capsules(images)
            loss = self._criterion(capsules.scores, labels)
            if parts is None or part_labels is None:
                return loss + self._rebuilding(capsules.poses, labels, pixels), capsules.scores
            # Several objects: the decoder runs once for each, with that object alone as its target.
            for part, label in zip(parts.unbind(1), part_labels.unbind(1), strict=True):
                loss = loss + self._rebuilding(capsules.poses, label, part)
            return loss, capsules.scores
        scores = self.net(images)
        return self._criterion(scores, labels), scores

    def _criterion(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The loss of the scores, and the feedback agreement of the forward that gave them."""
        loss: Tensor = self.criterion(scores.float(), labels)
        return loss if self.feedback is None else loss + self.feedback()

    def _rebuilding(self, poses: Tensor, labels: Tensor, pixels: Tensor) -> Tensor:
        """Reconstruction loss of images [b, c, h, w] from the capsules of `labels` [b]; -1 costs nothing."""
        rebuilt = self.net.reconstruct(poses, labels.clamp(min=0)).float()
        rebuilt = torch.where((labels >= 0)[:, None, None, None], rebuilt, 0.0)  # its pixels are black
        return reconstruction_loss(rebuilt, pixels.float() / 255, self.reconstruction)


def _check_run(recipe: Recipe, out: Path, resume: bool) -> None:
    """Refuse a folder that holds another recipe's run; nothing is written."""
    for before in (out / "recipe.yaml", out / "recipe.json"):  # older runs have the latter
        if before.is_file():
            break
    else:
        return
    if not resume:
        raise TrainingError(f"{out} already holds a run: choose another --out, or resume it")
    try:
        old = yaml.safe_load(before.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise TrainingError(
            f"cannot read {before}: {getattr(error, 'strerror', None) or 'damaged'}"
        ) from error
    with suppress(ValueError):  # a run of an earlier version lacks the keys that are new
        old = Recipe.model_validate(old).model_dump(mode="json")
    key, was, wanted = _first_difference(old, recipe.model_dump(mode="json"))
    if key:
        raise TrainingError(
            f"{out} holds a run with {key}={was}, this recipe says {wanted}: choose another --out, "
            f"or go on with the run's own: {before}"
        )


def _open_run(recipe: Recipe, out: Path) -> None:
    """Make the run's folder; the first thing that is written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_atomically(out / "recipe.yaml", f"# The recipe of this run, every key resolved.\n{text}")
        clear_leftovers(out)
    except OSError as error:
        raise TrainingError(f"cannot write to {out}: {error.strerror or error}") from error


def _first_difference(old: Any, new: Any, prefix: str = "") -> tuple[str, Any, Any]:
    """The first dotted key in which two trees differ, and both values; an empty key where they are equal."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return ("", None, None) if old == new else (prefix, old, new)
    for key in sorted(old.keys() | new.keys()):
        found = _first_difference(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
        if found[0]:
            return found
    return "", None, None


def _note_session(out: Path, session: dict[str, Any]) -> None:
    """Add what this start of the run works with to the run's `sessions.json`."""
    path = out / "sessions.json"
    before: list[Any] = []
    with suppress(OSError, ValueError):
        before = json.loads(path.read_text(encoding="utf-8"))
    write_atomically(path, json.dumps([*before, session], indent=1) + "\n")


def _check_room(out: Path, recipe: Recipe, net: nn.Module) -> None:
    """Raise `TrainingError` where the disk has no room for the run's checkpoints."""
    weights = sum(t.numel() * t.element_size() for t in net.state_dict().values())
    moments = 2 * sum(p.numel() * p.element_size() for p in net.parameters())  # the most that optimisers keep
    needed = weights * (2 if recipe.ema_decay else 1) + moments
    if missing := room_missing(out, needed):
        raise TrainingError(
            f"no room for checkpoints of about {needed / 1e6:,.2f} MB in {out}: "
            f"{missing / 1e6:,.2f} MB more must be free; make room or choose another --out"
        )


def _load_data(
    recipe: Recipe, data: str | Path | None
) -> tuple[ImageSet | StreamedSet, ImageSet | StreamedSet, ImageSet | StreamedSet, dict[str, str]]:
    settings = recipe.data
    whole, test = (
        load_dataset(settings.name, split, data, size=settings.size, resize=settings.augment.resize)
        for split in ("train", "test")
    )
    fingerprints = {"train": whole.fingerprint(), "test": test.fingerprint()}
    training, validation = split_validation(whole, settings.val_size, settings.val_seed)
    if settings.limit:
        training = training.subset(torch.arange(min(settings.limit, len(training))))
    return training, validation, test, fingerprints


def _create_net(recipe: Recipe, spec: DatasetSpec) -> nn.Module:
    try:
        return create_for(recipe.arch, spec.num_classes, spec.input_size, recipe.model_args)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{recipe.name}: {error}") from error


class _Trained(nn.Module):
    """All that the optimiser updates, the net's own wishes about weight decay kept."""

    def __init__(self, net: nn.Module, feedback: nn.Module) -> None:
        super().__init__()
        self.net: Any = net
        self.feedback = feedback

    def no_weight_decay(self) -> set[str]:
        return {f"net.{name}" for name in getattr(self.net, "no_weight_decay", set)()}


def _create_feedback(recipe: Recipe, net: nn.Module) -> FeedbackAgreement | None:
    settings = recipe.feedback
    if settings is None:
        return None
    if recipe.compile:
        raise RecipeError(f"{recipe.name}: feedback listens inside the net, so compile must be false")
    options = {"weight": settings.weight, **settings.options}
    try:
        if settings.pairs == "encapnet":
            return encapnet_feedback(net, settings.units, **options)
        return FeedbackAgreement(net, settings.pairs, **options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{recipe.name}: feedback: {error}") from error


def _create_optimizer(recipe: Recipe, net: nn.Module) -> torch.optim.Optimizer:
    settings = recipe.optimizer
    try:
        return create_optimizer_v2(
            net,
            opt=settings.name,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            **settings.options,
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise RecipeError(f"{recipe.name}: optimizer {settings.name}: {error}") from error


def _create_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> Scheduler | None:
    settings = recipe.schedule
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=settings.name,
        num_epochs=recipe.epochs,
        warmup_epochs=settings.warmup_epochs,  # type: ignore[arg-type]  # timm multiplies it by the updates
        warmup_lr=settings.warmup_lr,
        min_lr=settings.min_lr,
        decay_milestones=list(settings.milestones),  # type: ignore[arg-type]
        decay_epochs=settings.decay_epochs,
        decay_rate=settings.decay_rate,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    return scheduler


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
    data: str | Path | None = None,
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
        data: folder of the data set; None asks `CAPSZOO_DATA`.
        resume: False refuses a folder that already holds a run.
        cpu: leave an accelerator unused.
        stop_after: checkpoint and stop after so many updates of this call (for trials and tests).
        profile: name of one of the recipe's profiles; None takes its own settings.

    Returns `{"out", "finished", "step", "epoch"}` and, once finished, `"weights"` (path) and `"test"` (metrics).

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
    data: str | Path | None,
    resume: bool,
    stop_after: int | None,
    accelerator: Accelerator,
) -> dict[str, Any]:
    device, main_process = accelerator.device, accelerator.is_main_process
    rank, world = accelerator.process_index, accelerator.num_processes
    if recipe.batch_size % (world * recipe.accumulate):
        raise RecipeError(
            f"{recipe.name}: batch_size {recipe.batch_size} cannot be shared by {world} processes "
            f"in {recipe.accumulate} parts each"
        )
    commit = source_commit()  # now, not at the end: the files may have moved on by then
    with one_fate(accelerator):
        if main_process:
            _check_run(recipe, out, resume)

        # Data: uint8 tensors on the device.
        training, validation, test, fingerprints = _load_data(recipe, data)
        spec = training.spec
        batches = Batches(
            training.to(device),
            recipe.batch_size,
            train=True,
            augment=recipe.data.augment.build(),
            seed=recipe.seed,
            rank=rank,
            world=world,
        )
        held_out = Batches(validation.to(device), 500, rank=rank, world=world) if len(validation) else None
        steps = len(batches)
        total = steps * recipe.epochs

        # Model, optimiser, schedule.
        accelerate.utils.set_seed(recipe.seed)
        layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        net = _create_net(recipe, spec).to(device).to(memory_format=layout)
        normalises = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in net.modules())
        if normalises and world > 1 and device.type == "cuda":
            net = convert_sync_batchnorm(net)  # the statistics of the whole batch, as on one GPU
        ema = ModelEmaV3(net, decay=recipe.ema_decay, use_warmup=True) if recipe.ema_decay else None
        feedback = _create_feedback(recipe, net)
        optimizer = _create_optimizer(recipe, _Trained(net, feedback) if feedback else net)
        try:
            goal = Task(torch.compile(net) if recipe.compile else net, recipe, feedback)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{recipe.name}: loss {recipe.loss.name}: {error}") from error
        schedule = _create_scheduler(recipe, optimizer, steps)

        # Only now, when nothing is wrong with the recipe or the data, the run's folder.
        if main_process:
            _open_run(recipe, out)
            _check_room(out, recipe, net)
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
        optimizer.load_state_dict(checkpoint.optimizer["optimizer"])
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(checkpoint.optimizer["scaler"])
        step, seconds = checkpoint.state["step"], checkpoint.state["seconds"]
        sums.copy_(torch.tensor(checkpoint.state["sums"], dtype=torch.float64))

    def keep() -> None:
        """Write a checkpoint of the present state."""
        nonlocal kept_step
        state = {"epoch": step // steps, "seconds": seconds, "sums": sums.tolist(), "recipe": recipe.name}
        tensors: dict[str, Any] = {"optimizer": optimizer.state_dict()}
        if accelerator.scaler is not None:
            tensors["scaler"] = accelerator.scaler.state_dict()
        kept = {"model": net, "ema": ema.module if ema else None, "feedback": feedback}
        weights = {name: module.state_dict() for name, module in kept.items() if module is not None}
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
            _note_session(
                out, {"started": started, **session, "hardware": hardware(device), "versions": _versions()}
            )
    for line in skipped:
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
            lr = optimizer.param_groups[0]["lr"]
            log.look(step, mean.item(), lr, recipe.batch_size / pace, f"epoch {epoch + 1}/{recipe.epochs}")
        losses.clear()
        return int(number)

    def explain(bad: int) -> None:
        """Go back to the last checkpoint, make the updates up to `bad` anew and watch the last two; raises."""
        log.say(
            f"the loss is not finite at update {bad}: making updates {kept_step + 1} to {bad} anew to see where"
        )
        checkpoint, _ = latest_checkpoint(out)
        found = ""
        if checkpoint:
            restore(checkpoint)
            goal.net = net  # hooks see nothing inside a compiled net
            found = replay(bad)
        found = next((text for text in gather_object([found]) if text), "which did not happen again there")
        agree(
            accelerator,
            TrainingError(
                f"the loss is not finite at update {bad} (epoch {(bad - 1) // steps + 1}), {found}; "
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
            try:
                log.epoch(record)
            except OSError as error:
                raise TrainingError(f"cannot write to {out}: {error.strerror or error}") from error

    evaluated = ema.module if ema else net
    began, first, earlier = time.monotonic(), step, seconds
    try:
        log.progress.start()
        with StopRequest() as stop:
            while step < total:
                epoch, start = divmod(step, steps)
                task.train()
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
                    threshold = score_threshold(recipe.loss.name)
                    right, n = accelerator.reduce(
                        count_correct(evaluated, held_out, accelerator.autocast(), threshold)
                    ).tolist()
                    record["val_top1"] = round(100 * right / n, 4)
                seconds = earlier + time.monotonic() - began
                record["seconds"] = round(seconds, 1)
                sums.zero_()
                # The record first: a run that is killed between the two makes its epoch's end again.
                write_epoch(record)
                keep()
                log.progress.update(log.task, completed=step)
                log.say("  ".join(f"{key} {value}" for key, value in record.items() if key != "step"))
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
    result: dict[str, Any] = {"out": out, "finished": True, "step": step, "epoch": recipe.epochs}
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
                    "sha256": fingerprints,
                },
                "hardware": hardware(device),
                "train_seconds": round(seconds),
                "versions": _versions(),
                "metrics": {},
            }
            if held_out:
                top1 = log.records()[-1]["val_top1"]
                details["metrics"]["validation"] = {"top1": top1, "n": len(validation)}

            def write() -> Path:
                return write_weights(
                    out,
                    evaluated,
                    architecture=recipe.arch,
                    tag=recipe.tag,
                    model_args=recipe.model_args,
                    spec=spec,
                    golden_pixels=next(Batches(test, GOLDEN_IMAGES).epoch()).pixels,
                    details=details,
                )

            figures = evaluate(write(), test, device=device)
            details["metrics"]["test"] = {key: figures[key] for key in ("top1", "errors", "n")}
            result["weights"], result["test"] = write(), details["metrics"]["test"]
            log.say(
                f"test: top-1 {figures['top1']:.2f}% of {figures['n']} images; weights in {result['weights']}"
            )
    return result


def _versions() -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:3]))
    modules = {"torch": torch, "timm": timm, "accelerate": accelerate, "capszoo": capszoo}
    return {"python": python, **{name: module.__version__ for name, module in modules.items()}}


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
        "lr": float(f"{optimizer.param_groups[0]['lr']:.4g}"),
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
