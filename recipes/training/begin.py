"""How a run begins: from its checkpoint or from the recipe's initial weights; and each of its stages."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone

import torch
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import nn

from capszoo.data import Batches, ImageSet, StreamedSet
from capszoo.data.specs import both_sides
from capszoo.layers import engine_report

from ..config import RecipeError
from ..evaluation.memory import fitting_images
from ..evaluation.target import evaluation_batch
from .checkpoints import latest_checkpoint
from .distributed import TrainingError, gather_object, raise_on_all_ranks, set_seed
from .early_stop import BestEpoch
from .estimate import first_update
from .history import read_records
from .log import RunLog
from .routing_probe import RoutingProbe
from .run_folder import check_room, note_session, open_run, read_sessions, versions
from .setup import create_feedback, create_net, create_optimizer, create_scheduler, start_sha256
from .stages import Stage, stage_at, staged_data
from .state import Run, TrainState, restore, save_state
from .step import create_step, one_value_error


def begin_run(run: Run) -> tuple[TrainState, RunLog]:
    """The state that the run resumes from, and its log."""
    with raise_on_all_ranks(run.accelerator):
        checkpoint, skipped = latest_checkpoint(run.out)
        if checkpoint is None and read_records(run.out / "metrics.jsonl"):  # starting again would delete them
            raise TrainingError(
                f"no checkpoint of the run in {run.out} can be read: put checkpoints/ back, or choose another --out"
            )
        epoch = checkpoint.state["step"] // run.steps if checkpoint else 0
        state = _create_state(run, stage_at(run.recipe, epoch), initial=checkpoint is None)
        # Create the run's folder only now, after recipe, data and network are checked.
        engines = training_engines(run, state.net, state.batches.target) if run.main else None
        if run.main:
            open_run(run.recipe, run.out, run.lock)
            check_room(run.out, run.recipe, state.net)
    state.ddp_module, state.optimizer = run.accelerator.prepare(state.step_module, state.optimizer)
    with raise_on_all_ranks(run.accelerator):
        if checkpoint:
            restore(run, state, checkpoint)
            state.saved_step = state.step
        if run.world > 1 and len(set(gather_object([state.step]))) > 1:
            raise TrainingError(
                f"the processes see different checkpoints: {run.out} must be a folder they share"
            )
        settings = run.recipe.model_dump(mode="json", exclude_none=True)
        log = RunLog(run.out, run.main, run.total, state.step, run.accelerator, settings)
    with ExitStack() as failed:
        failed.callback(log.close)  # before its folder is removed
        with raise_on_all_ranks(run.accelerator):
            before = (read_sessions(run.out) or [{}])[-1].get("precision") or run.recipe.precision
            if run.main:
                _note_session(run, state, engines)
        _introduce(run, state, log, skipped, before)
        if not checkpoint:
            # Detects a folder that cannot be written, and makes a failure in the first updates traceable.
            save_state(run, state)
        _say_first_update(run, state, log)
        failed.pop_all()
    return state, log


def _introduce(run: Run, state: TrainState, log: RunLog, skipped: Sequence[str], before: str) -> None:
    """Say what is trained on what, and which settings have no effect.

    Args:
        run, state, log: of the run.
        skipped: lines about damaged checkpoints.
        before: precision of the session before this one.
    """
    for line in (*skipped, *(f"left out: {line}" for line in run.data.skipped)):
        log.say(line)
    log.say(f"{run.recipe.data.name}: {run.data.summary.sentence()}")
    parameters = sum(p.numel() for p in state.net.parameters())
    log.say(
        f"{run.recipe.name}: {parameters:,} parameters, {len(run.data.training):,} images, "
        f"{run.recipe.epochs} epochs of {run.steps} updates, {run.hardware}"
        + (f"; resumed at update {state.step:,}" if state.step else "")
        + (f" in {run.recipe.precision}, before in {before}" if before != run.recipe.precision else "")
    )
    if run.recipe.precision == "bf16" and run.device.type == "cpu" and not _has_bf16_units():
        log.say(
            "note: this CPU has no fast units for bf16 (AMX or AVX512-BF16): --set precision=fp32 is faster here"
        )
    if _normalises(state.net) and run.world > 1 and run.device.type != "cuda":
        log.say("note: on CPUs, BatchNorm uses the statistics of each process's own share of the batch")
    schedule = run.recipe.schedule
    if schedule.name != "none" and schedule.warmup_epochs >= run.recipe.epochs:
        log.say(
            f"note: the warm-up takes the whole run (schedule.warmup_epochs {schedule.warmup_epochs:g}): "
            "the learning rate does not reach optimizer.lr"
        )
    # other schedules of a profile keep the recipe's milestones, and use none
    drops = schedule.milestones if schedule.name == "multistep" else ()
    unreached = [f"{epoch:g}" for epoch in drops if epoch >= run.recipe.epochs]
    if unreached:
        log.say(
            f"note: the run ends before the drops of the learning rate at {', '.join(unreached)} "
            f"(schedule.milestones; epochs {run.recipe.epochs})"
        )
    augment = run.recipe.data.augment
    if augment.cutout and augment.cutout_off_epochs >= run.recipe.epochs:
        log.say(
            f"note: no epoch has cutout: data.augment.cutout_off_epochs is not below the {run.recipe.epochs} epochs"
        )


def _has_bf16_units() -> bool:
    """False for an x86 processor without fast units for bf16."""
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    x86 = platform.machine().lower() in ("x86_64", "amd64")  # elsewhere they are always False
    return not x86 or any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def _say_first_update(run: Run, state: TrainState, log: RunLog) -> None:
    """Say how long a slow network shows nothing. Not on a GPU, with several processes or a compiled network."""
    if run.device.type != "cpu" or run.world > 1 or run.recipe.compile or state.step >= run.total:
        return
    spec = run.data.training.spec
    spec = replace(spec, input_size=(spec.input_size[0], *both_sides(state.batches.target)))
    seconds = first_update(run.recipe, state.net, spec)
    if seconds is not None:
        hours = seconds * (run.total - state.step) / 3600
        log.say(
            f"the first update takes about {seconds:.0f} s, all of them {hours:.1f} hours: smaller images, a smaller "
            "batch or fewer epochs take less"
        )


def begin_stage(run: Run, before: TrainState, log: RunLog) -> TrainState:
    """The state of the next stage, from the checkpoint at the end of this one."""
    checkpoint, _ = latest_checkpoint(run.out)
    if checkpoint is None or checkpoint.state["step"] != before.step:
        raise TrainingError(f"the checkpoint of update {before.step} in {run.out} cannot be read")
    run.accelerator.free_memory()
    if run.recipe.compile:
        torch._dynamo.reset()  # else the next size would be compiled with dynamic shapes
    state = _create_state(run, stage_at(run.recipe, before.step // run.steps), initial=False)
    state.ddp_module, state.optimizer = run.accelerator.prepare(state.step_module, state.optimizer)
    restore(run, state, checkpoint)
    state.saved_step, state.next_sync = state.step, state.step + 1
    log.say(f"stage {state.stage.number + 1}: images of {'x'.join(map(str, state.batches.target))} pixels")
    return state


def _create_state(run: Run, stage: Stage, initial: bool) -> TrainState:
    """Create all objects that a stage trains with.

    Args:
        run: the run.
        stage: its stage.
        initial: load the recipe's initial weights, if it has some; False where a checkpoint replaces them.
    """
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
    if recipe.early_stop and not len(validation):
        raise RecipeError(
            f"{recipe.name}: early_stop needs validation images: set data.val_size, or early_stop=null"
        )
    set_seed(recipe.seed)
    net = create_net(recipe, training.spec, initial).to(device).to(memory_format=run.layout)
    held_out = None
    if len(validation):
        held_out = Batches(validation.to(device), _validation_batch(run, net, validation), **shares)
    if _normalises(net) and run.world > 1 and device.type == "cuda":
        net = convert_sync_batchnorm(net)  # statistics of the whole batch, as on one GPU
    feedback = create_feedback(recipe, net)
    optimizer = create_optimizer(recipe, net, feedback)
    measure = "val_recall" if recipe.data.balance else "val_top1"
    step_module = create_step(recipe, net, feedback, training.spec.multi_label)
    probed = recipe.routing_images and run.main
    return TrainState(
        stage=stage,
        batches=batches,
        held_out=held_out,
        net=net,
        ema=ModelEmaV3(net, decay=recipe.ema_decay, use_warmup=True) if recipe.ema_decay else None,
        feedback=feedback,
        best=BestEpoch(recipe.early_stop, measure) if recipe.early_stop else None,
        step_module=step_module,
        ddp_module=step_module,
        optimizer=optimizer,
        scheduler=create_scheduler(recipe, optimizer, run.steps),
        probe=RoutingProbe(recipe, net, validation.to(device)) if probed else None,
        sums=torch.zeros(3, dtype=torch.float64, device=device),
    )


def _validation_batch(run: Run, net: nn.Module, validation: ImageSet | StreamedSet) -> int:
    """Images of a forward pass of validation, the same on all processes."""
    if run.recipe.eval_batch_size:
        return run.recipe.eval_batch_size
    trained = run.recipe.batch_size // run.recipe.accumulate
    most = evaluation_batch(validation.size, run.device, trained)
    fits = fitting_images(net, validation.spec.input_size)
    # on a CPU the processes share the memory
    fits = max(1, fits // run.world) if run.device.type == "cpu" else fits
    return int(min(gather_object([min(most, fits)])))


def _normalises(net: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in net.modules())


def _note_session(run: Run, state: TrainState, engines: dict[str, str] | None) -> None:
    session = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "from_update": state.step,
        "seed": run.recipe.seed,
        "processes": run.world,
        "commit": run.commit,
        "hardware": run.hardware,
        "precision": run.recipe.precision,
        "compile": run.recipe.compile,
        "channels_last": run.recipe.channels_last,
        "versions": versions(),
        "data": run.data.fingerprints,
        "engines": engines,
        # only the first session reads them
        **({} if state.step else {"init_sha256": start_sha256(run.recipe)}),
    }
    note_session(run.out, session)


def training_engines(run: Run, net: nn.Module, size: Sequence[int]) -> dict[str, str] | None:
    """The engine with which each routing layer trains on images of ``size``, by the layer's name.

    It is the engine of the run's own precision and ``compile``. None for a network that cannot run without data (on the
    meta device), such as some backbones.

    Raises:
        RecipeError: a batch of which BatchNorm has one value.
    """
    batch = run.recipe.batch_size // run.world // run.recipe.accumulate
    images = (run.data.training.spec.input_size[0], *size)
    mode = "compiled" if run.recipe.compile else "eager"
    try:
        with run.accelerator.autocast():
            choices = engine_report(net, batch, True, run.device.type, input_size=images, mode=mode)
    except (RuntimeError, NotImplementedError):
        return None
    except ValueError as error:
        raise one_value_error(error) from error
    return {choice.name: choice.engine.name for choice in choices}
