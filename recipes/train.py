"""Train a recipe: `python -m capszoo.recipes.train RECIPE --data FOLDER`, or `capszoo train RECIPE`.

One loop, from top to bottom of `train`: data in memory on the device, model, loss, optimiser, schedule, epochs with
validation on images held out of the training set, a checkpoint after each, and at the end, once, the test set. The
last epoch's weights are what is kept; nothing is selected. The same command resumes a run that was cut short, and
ends with the same weights bit for bit on the CPU: the order of the data and the augmentation are functions of
(seed, epoch, step), everything else is in the checkpoint.

Several processes: `accelerate launch -m capszoo.recipes.train RECIPE …`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
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

from .checkpoints import latest_checkpoint, save_checkpoint, write_atomically
from .config import Recipe, RecipeError, load_recipe
from .evaluate import all_right, count_correct, create_for, evaluate, score_threshold
from .weights import hardware, source_commit, write_weights

try:
    import accelerate
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("training needs accelerate: pip install 'capszoo[train]'") from error

__all__ = ["TrainingError", "main", "train"]

CHECK_EVERY = 20
"""Updates between looks at the loss: looking makes a GPU wait."""
GOLDEN_IMAGES = 4


class TrainingError(CapszooError, RuntimeError):
    """Training cannot start or go on; the message is one line that says why and what to do."""


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
    before = out / "recipe.json"
    if not before.is_file():
        return
    if not resume:
        raise TrainingError(f"{out} already holds a run: choose another --out, or resume it")
    try:
        old = json.loads(before.read_text())
    except OSError as error:
        raise TrainingError(f"cannot read {before}: {error.strerror or error}") from error
    with suppress(ValueError):  # a run of an earlier version lacks the keys that are new
        old = Recipe.model_validate(old).model_dump(mode="json")
    resolved = recipe.model_dump(mode="json")
    for key in sorted(resolved.keys() | old.keys()):
        if old.get(key) != resolved.get(key):
            raise TrainingError(
                f"{out} holds a run with {key}={old.get(key)}, this recipe says {resolved.get(key)}: "
                "choose another --out"
            )


def _open_run(recipe: Recipe, out: Path) -> None:
    """Make the run's folder; the first thing that is written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "recipe.json", json.dumps(recipe.model_dump(mode="json"), indent=1) + "\n")
    except OSError as error:
        raise TrainingError(f"cannot write to {out}: {error.strerror or error}") from error


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


def _first_bad(net: nn.Module) -> str:
    """Where a non-finite value stands: the first parameter whose value or gradient has one."""
    for name, parameter in net.named_parameters():
        if not parameter.isfinite().all():
            return f"first in the weights of {name}"
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"first in the gradient of {name}"
    return "weights and gradients are finite, so it arose in the forward pass"


class _Log:
    """metrics.jsonl, the progress bar, and one line per epoch."""

    def __init__(self, out: Path, active: bool, total: int, done: int) -> None:
        self.path, self.active = out / "metrics.jsonl", active
        self.shown = time.monotonic()
        self.console = Console(quiet=not active, highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (active and self.console.is_terminal),
        )
        self.task = self.progress.add_task("training", total=total, completed=done, note="")

    def forget_after(self, step: int) -> None:
        """Drop the lines of updates that a resumed run will make again."""
        if self.active and self.path.is_file():
            lines = self.path.read_text().splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            write_atomically(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, record: dict[str, Any]) -> None:
        if self.active:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def show(self, step: int, note: str) -> None:
        """Move the bar; where the output is no terminal, a line a minute."""
        self.progress.update(self.task, completed=step, note=note)
        if not self.console.is_terminal and time.monotonic() - self.shown > 60:
            self.shown = time.monotonic()
            self.say(f"update {step}  {note}")

    def say(self, line: str) -> None:
        self.progress.console.print(line, soft_wrap=True)


@contextmanager
def _accelerator(recipe: Recipe, cpu: bool) -> Iterator[Accelerator]:
    """Accelerate keeps its settings in a process-wide singleton: give it back, so that the next run may differ."""
    precision = "no" if recipe.precision == "fp32" else recipe.precision
    try:
        yield Accelerator(mixed_precision=precision, cpu=cpu)
    except ValueError as error:
        if "mixed precision" in str(error):
            raise TrainingError(
                f"precision {recipe.precision} does not work on this device: {error}"
            ) from error
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

    Returns `{"out", "finished", "step", "epoch"}` and, once finished, `"weights"` (path) and `"test"` (metrics).

    Raises `RecipeError`, `DataError` or `TrainingError`, each one line with a remedy.
    """
    recipe = load_recipe(recipe, overrides)
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
    if main_process:
        _check_run(recipe, out, resume)
    commit = source_commit()  # now, not at the end: the files may have moved on by then

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
    ema = ModelEmaV3(net, decay=recipe.ema_decay, use_warmup=True) if recipe.ema_decay else None
    feedback = _create_feedback(recipe, net)
    optimizer = _create_optimizer(recipe, _Trained(net, feedback) if feedback else net)
    try:
        goal = Task(torch.compile(net) if recipe.compile else net, recipe, feedback)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{recipe.name}: loss {recipe.loss.name}: {error}") from error
    schedule = _create_scheduler(recipe, optimizer, steps)

    if main_process:
        _open_run(recipe, out)
    accelerator.wait_for_everyone()

    # Where an earlier run stopped.
    step, seconds, sums = 0, 0.0, torch.zeros(3, dtype=torch.float64)
    checkpoint, skipped = latest_checkpoint(out)
    if checkpoint:
        net.load_state_dict(checkpoint.weights["model"])
        if feedback:
            feedback.load_state_dict(checkpoint.weights["feedback"])
        if ema:
            ema.module.load_state_dict(checkpoint.weights["ema"])
        optimizer.load_state_dict(checkpoint.optimizer["optimizer"])
        step, seconds = checkpoint.state["step"], checkpoint.state["seconds"]
        sums = torch.tensor(checkpoint.state["sums"], dtype=torch.float64)
    task, wrapped = accelerator.prepare(goal, optimizer)
    if checkpoint:
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(checkpoint.optimizer["scaler"])
        torch.set_rng_state(checkpoint.optimizer["cpu_random"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(checkpoint.optimizer["device_random"], device)
    sums = sums.to(device)  # loss, right, images, since the epoch began
    kept_step = step

    log = _Log(out, main_process, total, step)
    log.forget_after(step)
    for line in skipped:
        log.say(line)
    parameters = sum(p.numel() for p in net.parameters())
    log.say(
        f"{recipe.name}: {parameters:,} parameters, {len(training)} images, {recipe.epochs} epochs of {steps} updates, "
        f"{hardware(device)}" + (f"; going on from update {step}" if step else "")
    )

    def keep() -> None:
        """Write a checkpoint of the present state."""
        nonlocal kept_step
        kept_step = step
        if not main_process:
            return
        state = {"epoch": step // steps, "seconds": seconds, "sums": sums.tolist(), "recipe": recipe.name}
        random: dict[str, Any] = {"optimizer": optimizer.state_dict(), "cpu_random": torch.get_rng_state()}
        if accelerator.scaler is not None:
            random["scaler"] = accelerator.scaler.state_dict()
        if device.type == "cuda":
            random["device_random"] = torch.cuda.get_rng_state(device)
        kept = {"model": net, "ema": ema.module if ema else None, "feedback": feedback}
        weights = {name: module.state_dict() for name, module in kept.items() if module is not None}
        try:
            save_checkpoint(out, step, weights, random, state)
        except OSError as error:
            raise TrainingError(
                f"cannot write a checkpoint to {out}: {error.strerror or error}; make room and run the same command"
            ) from error

    def check(losses: list[Tensor]) -> None:
        """Stop where a loss of the last updates is not finite."""
        finite = torch.stack(losses).isfinite().tolist()
        if not all(finite):
            bad = step - len(finite) + finite.index(False) + 1
            raise TrainingError(
                f"the loss is not finite at update {bad} (epoch {(bad - 1) // steps + 1}), {_first_bad(net)}; "
                f"the state of update {kept_step} is kept: lower optimizer.lr or set clip_grad"
            )

    evaluated = ema.module if ema else net
    began, first = time.monotonic(), step
    earlier = seconds
    try:
        log.progress.start()
        while step < total:
            epoch, start = divmod(step, steps)
            task.train()
            losses: list[Tensor] = []
            epoch_began, epoch_first = time.monotonic(), step
            for batch in batches.epoch(epoch, start):
                if schedule:
                    schedule.step_update(step)
                goal.set_progress(step / total)
                loss = _update(accelerator, task, wrapped, batch, recipe, layout, sums, spec.labels_per_image)
                if ema:
                    ema.update(net, step=step)
                losses.append(loss)
                step += 1
                seconds = earlier + time.monotonic() - began
                if len(losses) >= CHECK_EVERY:
                    check(losses)
                    rate = (step - epoch_first) * recipe.batch_size / (time.monotonic() - epoch_began)
                    note = f"epoch {epoch + 1}/{recipe.epochs}  loss {losses[-1].item():.4f}  {rate:.0f} images/s"
                    log.show(step, note)
                    losses.clear()
                at_limit = stop_after is not None and step - first >= stop_after
                periodic = recipe.checkpoint_every is not None and step % recipe.checkpoint_every == 0
                if (at_limit or periodic) and step % steps:
                    if losses:
                        check(losses)
                        losses.clear()
                    keep()
                if at_limit and step % steps:
                    return {"out": out, "finished": False, "step": step, "epoch": step // steps}
            if losses:
                check(losses)
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
            keep()
            log.write(record)
            log.progress.update(log.task, completed=step)
            log.say("  ".join(f"{key} {value}" for key, value in record.items() if key != "step"))
            if stop_after is not None and step - first >= stop_after and step < total:
                return {"out": out, "finished": False, "step": step, "epoch": step // steps}
    except KeyboardInterrupt:
        keep()
        raise TrainingError(
            f"stopped at update {step} of {total}; the same command goes on from there"
        ) from None
    finally:
        log.progress.stop()

    # The test set, once, from the file that is kept.
    result: dict[str, Any] = {"out": out, "finished": True, "step": step, "epoch": recipe.epochs}
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
            "versions": {
                "torch": torch.__version__,
                "timm": timm.__version__,
                "capszoo": capszoo.__version__,
            },
            "metrics": {},
        }
        if held_out:
            details["metrics"]["validation"] = {"top1": _last_validation(out), "n": len(validation)}

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
        details["metrics"]["test"] = {"top1": figures["top1"], "errors": figures["errors"], "n": figures["n"]}
        result["weights"], result["test"] = write(), details["metrics"]["test"]
        log.say(
            f"test: top-1 {figures['top1']:.2f}% of {figures['n']} images; weights in {result['weights']}"
        )
    accelerator.wait_for_everyone()
    return result


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


def _last_validation(out: Path) -> float | None:
    """Validation top-1 of the last epoch in metrics.jsonl."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1]).get("val_top1") if lines else None


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
    parser.add_argument("--no-resume", action="store_true", help="refuse a folder that already holds a run")
    parser.add_argument("--cpu", action="store_true", help="leave an accelerator unused")
    args = parser.parse_args(argv)
    try:
        train(args.recipe, args.set, args.out, args.data, not args.no_resume, args.cpu)
    except (CapszooError, WeightsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
