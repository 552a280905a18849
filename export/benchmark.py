"""Throughput and latency of a model on this machine, by batch and runtime: the output of ``capszoo benchmark``."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from capszoo._pretrained.exported import OnnxModel
from capszoo.errors import CapszooError, UsageError, first_line, require
from capszoo.preprocess import model_input_size

from . import to_onnx
from .compare import EagerRunner, OnnxRunner, Runner, Timing, probe_input, time_runners

__all__ = ["RUNTIMES", "FixedInput", "benchmark", "time_models"]

#: Runtimes in which a model can be timed.
RUNTIMES = ("eager", "compiled", "onnxruntime")


class FixedInput:
    """A runner with fixed images, to time models of several input sizes in turns."""

    def __init__(self, runner: Runner, images: np.ndarray, name: str) -> None:
        self.runner, self.images, self.name = runner, images, name

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        return self.runner(self.images)


def benchmark(
    model: nn.Module,
    batches: Sequence[int] = (1, 8, 32),
    runtimes: Iterable[str] = RUNTIMES,
    repeats: int = 20,
    onnx_file: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[list[Timing], list[str]]:
    """Time a model in several runtimes, in turns.

    Args:
        model: in eval mode, on its device.
        batches: images per call.
        runtimes: of :data:`RUNTIMES`; the first is the reference for the others' ratios.
        repeats: timed calls of each.
        onnx_file: an exported file that serves these batches; None exports one to a temporary folder.
        progress: called with one line before each step.

    Returns:
        The timings, batch by batch, and a note for each runtime that could not be timed.

    Raises:
        UsageError: no such runtime, or batches below 1.
        CapszooError: none of the runtimes works here.
    """
    runtimes = list(runtimes)
    if isinstance(model, OnnxModel) and set(runtimes) != {"onnxruntime"}:
        raise UsageError(f"{model.path} runs in onnxruntime alone", "leave the other runtimes out")
    if not runtimes or not set(runtimes) <= set(RUNTIMES):
        raise UsageError(f"unknown runtime in {','.join(runtimes)}", f"use {', '.join(RUNTIMES)}")
    if not batches or min(batches) < 1:
        raise UsageError("a batch holds at least one image", "give batch sizes, such as 1,8")
    size = model_input_size(model)
    runners: list[Runner] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in runtimes:
            progress(f"preparing {kind}")
            try:
                runner = _open(kind, model, batches, onnx_file, Path(folder), progress)
                for count in batches:  # compiles, and detects what does not run here
                    runner(probe_input("random", (count, *size)))
            except Exception as error:  # a missing library or compiler raises many kinds
                notes.append(f"{kind} was not timed: {first_line(error)}")
            else:
                runners.append(runner)
        if not runners:
            raise CapszooError("nothing could be timed", "; ".join(notes))
        timings = []
        for count in sorted(set(batches)):
            progress(f"timing batches of {count}")
            timings.extend(time_runners(runners, probe_input("random", (count, *size)), repeats))
    return timings, notes


def _open(
    kind: str,
    model: nn.Module,
    batches: Sequence[int],
    onnx_file: Path | None,
    folder: Path,
    progress: Callable[[str], None],
) -> Runner:
    runner: Runner
    if kind in ("eager", "compiled") or isinstance(model, OnnxModel):
        runner = EagerRunner(torch.compile(model) if kind == "compiled" else model)  # type: ignore[arg-type]
        runner.name = kind
        return runner
    require("onnxruntime", ("onnx", "onnxscript", "onnxruntime"), "export")
    if onnx_file is None:
        onnx_file = folder / "model.onnx"
        profile = (min(batches), max(batches), max(batches))
        on_cpu = copy.deepcopy(model).cpu()
        to_onnx.export(on_cpu, onnx_file, batch=profile, gate="quick", progress=progress)
    on_gpu = next(model.parameters()).device.type == "cuda"
    if on_gpu:
        with suppress(CapszooError):  # onnxruntime without CUDA
            return OnnxRunner(str(onnx_file), provider="CUDAExecutionProvider")
    runner = OnnxRunner(str(onnx_file))
    if on_gpu:  # the other runtimes' times are the GPU's
        runner.name = "onnxruntime (CPU)"
    return runner


def time_models(
    models: dict[str, nn.Module], batches: Sequence[int] = (1, 8), repeats: int = 20
) -> list[dict[str, Any]]:
    """Time several models in PyTorch, in turns, each with its own input size.

    Args:
        models: name to model, in eval mode, on its device; the first is the reference for ratios.
        batches: images per call.
        repeats: timed calls of each.

    Returns:
        Rows in the format of ``capszoo.export.compare.Timing.to_dict``.
    """
    rows: list[dict[str, Any]] = []
    for count in sorted(set(batches)):
        runners = [
            FixedInput(EagerRunner(model), probe_input("random", (count, *model_input_size(model))), name)
            for name, model in models.items()
        ]
        rows.extend(timing.to_dict() for timing in time_runners(runners, runners[0].images, repeats))
    return rows
