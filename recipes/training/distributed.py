"""Accelerate, and the coordination of a run's processes: they fail together, and stop together on request."""

from __future__ import annotations

import atexit
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch

from capszoo._utils.choices import TRACKERS
from capszoo.errors import CapszooError, UsageError, install_hint, unknown_name

from ..config import Recipe

try:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import DistributedType, GradientAccumulationPlugin, gather_object
    from accelerate.utils import set_seed as set_seed
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"training needs accelerate: {install_hint('train')}") from error


class TrainingError(CapszooError, RuntimeError):
    """Training cannot start or continue; the message is one line with the reason and the remedy."""


def is_lost_peer(error: RuntimeError) -> bool:
    """True for the errors with which PyTorch reports that another process is gone."""
    return isinstance(error, torch.distributed.DistError) or any(
        word in str(error) for word in ("gloo", "onnection closed", "onnection reset", "NCCL")
    )


class Stopped(TrainingError):
    """A signal stopped the run, and its state was saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number  # the convention of shells and schedulers


def _trackers(names: Sequence[str]) -> list[str]:
    """The trackers that Accelerate starts; TensorBoard's events are written without it.

    Raises:
        UsageError: an unknown one, or one that is not installed, which Accelerate would leave out without a word.
    """
    for name in names:
        if name not in TRACKERS:
            raise UsageError(unknown_name("tracker", name, TRACKERS))
        if name not in map(str, get_available_trackers()):
            raise UsageError(f"--log-with {name}: {name} is not installed", f"pip install {name}")
    return [name for name in dict.fromkeys(names) if name != "tensorboard"]


@contextmanager
def accelerator_for(recipe: Recipe, cpu: bool, log_with: Sequence[str] = ()) -> Iterator[Accelerator]:
    """Accelerate keeps its settings in process-wide singletons: reset them afterwards, for runs with other settings.

    The device too, but for the process group of several processes, which outlives a run.
    """
    precision = "no" if recipe.precision == "fp32" else recipe.precision
    # losses are summed in float64, which MPS does not have; Accelerate would select it
    cpu = cpu or torch.backends.mps.is_available()
    try:
        # the recipe accumulates by itself: a number in Accelerate's environment would divide the loss
        once = GradientAccumulationPlugin(num_steps=1)
        accelerator = Accelerator(
            mixed_precision=precision,
            cpu=cpu,
            gradient_accumulation_plugin=once,
            log_with=_trackers(log_with) or None,
            project_dir="." if log_with else None,
        )
        if precision == "fp16" and accelerator.device.type == "cpu":
            raise TrainingError("precision fp16 does not work on a CPU: use bf16 or fp32")
        if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise TrainingError(
                f"Accelerate is set to {accelerator.distributed_type.value}, which recipes do not use: "
                "launch plain processes, with `accelerate launch --multi_gpu` or torchrun"
            )
        if accelerator.num_processes > 1:
            # Otherwise the group's threads are still running during the clean-up of the process, which occasionally
            # aborts it (SIGABRT, "terminate called without an active exception"), and the launcher reports a finished
            # run as failed. The group outlives a run: later runs of the process reuse it.
            atexit.register(accelerator.state.destroy_process_group)  # no effect if called twice
        yield accelerator
    except ValueError as error:
        if "mixed precision" in str(error):
            raise TrainingError(
                f"precision {recipe.precision} does not work on this device ({error}): use bf16 or fp32"
            ) from error
        raise
    finally:
        alone = PartialState._shared_state.get("num_processes", 1) == 1
        AcceleratorState._reset_state(reset_partial_state=alone)


def sync_error(accelerator: Accelerator, failure: Exception | None) -> None:
    """Raise a failure of one process on all of them; every process calls this at the same point.

    The first process raises the error, the others exit silently: one run, one line.
    """
    if accelerator.num_processes == 1:
        if failure is not None:
            raise failure
        return
    code = getattr(failure, "exit_code", 1)
    gathered: list[Any] = gather_object([None if failure is None else (str(failure), code)])
    failures = [(rank, *reason) for rank, reason in enumerate(gathered) if reason is not None]
    if not failures:
        return
    rank, message, code = failures[0]
    if not accelerator.is_main_process:
        raise SystemExit(code)
    if failure is not None:
        raise failure
    raise TrainingError(f"process {rank}: {message}")


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator) -> Iterator[None]:
    """Context for work that may fail on only one process, such as writing a file on the first."""
    failure: Exception | None = None
    try:
        yield
    except (CapszooError, OSError, RuntimeError, ValueError) as error:
        failure = error
    sync_error(accelerator, failure)


#: SIGHUP; None on Windows.
_HANGUP = getattr(signal, "SIGHUP", None)


def _leave_terminal() -> None:
    """Send what is printed from now on nowhere, where it went to the terminal that is closed: writing there fails."""
    with open(os.devnull, "wb") as nowhere:
        for stream in (1, 2):
            with suppress(OSError):  # closed
                if stat.S_ISCHR(os.fstat(stream).st_mode):
                    os.dup2(nowhere.fileno(), stream)


class StopRequest:
    """Record Ctrl-C (SIGINT), SIGTERM and SIGHUP (a closed terminal) within the ``with`` block, so that the loop can
    stop between two updates. A SIGHUP that is ignored, as under nohup, stays ignored.

    A second Ctrl-C some seconds later stops at once, without saving. The delay is needed because launchers forward a
    signal that has already reached every process.
    """

    PATIENCE = 2.0

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # other threads allow no handlers
            hangup = [] if _HANGUP is None or signal.getsignal(_HANGUP) == signal.SIG_IGN else [_HANGUP]
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == _HANGUP:
            _leave_terminal()
        if self.number and number == signal.SIGINT and time.monotonic() - self._since > self.PATIENCE:
            raise KeyboardInterrupt
        if not self.number:
            self.number, self._since = number, time.monotonic()
