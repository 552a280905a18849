"""Compare runtimes: runners with numpy arrays as inputs and outputs, and the one comparator.

A runner is a callable with a ``name``: ``runner(images) -> list of outputs``. The comparator needs nothing else, so a
new runtime needs only a new runner.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn as nn

from capszoo.errors import CapszooError
from capszoo.layers.engine_choice import use_engines

__all__ = [
    "Difference",
    "EagerRunner",
    "HALF_PROBES",
    "OnnxRunner",
    "PROBES",
    "RUNNERS",
    "Runner",
    "Timing",
    "as_arrays",
    "compare_by_input",
    "compare_outputs",
    "compare_probes",
    "compare_runners",
    "probe_input",
    "time_runners",
]

#: All runners for a bundle: see :func:`capszoo.export.bundle.open_runner`.
RUNNERS = ("eager", "onnxruntime", "onnxruntime-cuda", "tensorrt", "aoti", "executorch")

PROBES = ("random", "zero", "constant", "x100")

#: In half precision, whose range is narrow, the largest probes are those that an image can be.
HALF_PROBES = ("random", "zero", "constant", "extremes", "brightest")

#: Lowest and highest value of a pixel, of each channel or of all.
Span = tuple[float | Sequence[float], float | Sequence[float]]

#: Seconds of rest before each measurement. A runtime's threads keep spinning for some milliseconds after a run, waiting
#: for more work, and would take a core from the next measurement.
SETTLE = 0.05

# Minimum scale of an output in comparisons: near zero a relative difference is meaningless.
_SCALE_FLOOR = 1e-3


def as_arrays(outputs: torch.Tensor | Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The outputs of a module, one tensor or several, as float32 arrays."""
    flat = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return [output.detach().float().cpu().numpy() for output in flat]


class Runner(Protocol):
    """A callable that runs a model on a batch of images."""

    name: str

    def __call__(self, images: np.ndarray) -> list[np.ndarray]: ...


class EagerRunner:
    """A PyTorch module, run eagerly without gradients on the device of its parameters.

    Floating-point images are cast to the module's ``input_dtype``, or without one to its parameters' dtype.

    Args:
        model: called in eval mode.
        target: route with the engines of graphs for this target (:data:`capszoo.layers.engine_choice.TARGETS`).
    """

    name = "eager"

    def __init__(self, model: nn.Module, target: str = "") -> None:
        self.model, self.target = model.eval(), target
        like = next(iter(model.parameters()), torch.empty(0))
        self.device, self.dtype = like.device, getattr(model, "input_dtype", like.dtype)

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        x = torch.from_numpy(images).to(self.device)
        with torch.inference_mode(), use_engines(target=self.target):
            outputs = self.model(x.to(self.dtype) if x.is_floating_point() else x)
        return as_arrays(outputs)


class OnnxRunner:
    """An ONNX file (or its bytes) in ONNX Runtime.

    Args:
        model: path of the file, or the serialised model.
        threads: threads within an operator; None uses PyTorch's number.
        provider: execution provider, such as ``CUDAExecutionProvider``, which computes float32 without TF32 here.

    Raises:
        CapszooError: ONNX Runtime has no such provider, or cannot start it.
    """

    name = "onnxruntime"

    def __init__(
        self, model: str | bytes, threads: int | None = None, provider: str = "CPUExecutionProvider"
    ) -> None:
        import onnxruntime

        if provider not in onnxruntime.get_available_providers():
            raise CapszooError(
                f"this ONNX Runtime has no {provider}",
                "pip install 'onnxruntime-gpu[cuda,cudnn]' instead of onnxruntime",
            )
        if provider != "CPUExecutionProvider":
            self.name = f"onnxruntime ({provider.removesuffix('ExecutionProvider')})"

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors; warnings go to stderr from C++ and cannot be caught
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.inter_op_num_threads = 1
        settings = {"use_tf32": "0"} if provider == "CUDAExecutionProvider" else {}
        self.session = onnxruntime.InferenceSession(model, options, providers=[(provider, settings)])
        if provider not in self.session.get_providers():  # ONNX Runtime only warns and takes the CPU
            raise CapszooError(f"ONNX Runtime cannot start {provider}", "check the driver, CUDA and cuDNN")
        self.input_name = self.session.get_inputs()[0].name

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(output) for output in self.session.run(None, {self.input_name: images})]


@dataclass(frozen=True)
class Difference:
    """Difference between a candidate's and a reference's outputs, on one input.

    Attributes:
        probe: name of the input.
        batch: images in the batch.
        max_abs, mean_abs: largest and mean absolute difference over all outputs.
        relative: the largest difference of an output divided by that output's largest reference value (at least
            1e-3), worst over the outputs.
        finite: whether every value of both is finite.
        top1_agreement: share of the images whose scores have the same argmax; 0.0 if a value is not finite, None
            without scores ``[b, n]``.
        reference, candidate: names of the runners.
    """

    probe: str
    batch: int
    max_abs: float
    mean_abs: float
    relative: float
    finite: bool
    top1_agreement: float | None
    reference: str = ""
    candidate: str = ""

    def passed(self, tolerance: float) -> bool:
        """True if both are finite and the difference is within ``tolerance`` of the largest output."""
        return self.finite and self.relative <= tolerance

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe_input(
    probe: str, shape: Sequence[int], seed: int = 0, dtype: str = "float32", span: Span = (0.0, 1.0)
) -> np.ndarray:
    """An input ``[b, c, h, w]`` for comparisons.

    Args:
        probe: ``random`` (standard normal), ``zero``, ``constant`` (0.5), ``x100`` (100 x random), ``extremes`` (each
            value the lowest or the highest of ``span``) or ``brightest`` (all the highest). As ``uint8``: any values,
            zero, 128, 0 and 255 (``x100`` and ``extremes``), 255.
        shape: of the input.
        seed: of the random values.
        dtype: ``float32`` or ``uint8``.
        span: lowest and highest value of a pixel after normalisation.

    Raises:
        ValueError: an unknown probe.
    """
    if probe not in PROBES and probe not in HALF_PROBES:
        names = dict.fromkeys((*PROBES, *HALF_PROBES))
        raise ValueError(f"unknown probe {probe!r}: use one of {', '.join(names)}")
    if probe == "zero":
        return np.zeros(shape, dtype=dtype)
    generator = np.random.default_rng(seed)
    if dtype == "uint8":
        if probe == "constant":
            return np.full(shape, 128, dtype=np.uint8)
        if probe == "brightest":
            return np.full(shape, 255, dtype=np.uint8)
        noise = generator.integers(0, 256, shape, dtype=np.uint8)
        return noise if probe == "random" else np.where(noise < 128, 0, 255).astype(np.uint8)
    if probe == "constant":
        return np.full(shape, 0.5, dtype=np.float32)
    if probe in ("extremes", "brightest"):
        low, high = (np.asarray(value, dtype=np.float32).reshape(-1, 1, 1) for value in span)
        bright = generator.random(shape) < 0.5 if probe == "extremes" else np.ones(shape, dtype=bool)
        return np.where(bright, high, low)
    normal = generator.standard_normal(shape, dtype=np.float32)
    return normal * np.float32(100) if probe == "x100" else normal


def compare_outputs(
    reference: Sequence[np.ndarray],
    candidate: Sequence[np.ndarray],
    probe: str = "",
    names: tuple[str, str] = ("", ""),
    scores: int | None = 0,
) -> Difference:
    """Compare two lists of outputs of the same input.

    Args:
        reference, candidate: the outputs.
        probe: name of the input.
        names: names of the two runners.
        scores: position of the scores among the outputs, for the top-1; None if they are not among them.

    Raises:
        ValueError: different numbers or shapes of outputs.
    """
    if len(reference) != len(candidate) or any(
        r.shape != c.shape for r, c in zip(reference, candidate, strict=False)
    ):
        shapes = [str([tuple(output.shape) for output in outputs]) for outputs in (reference, candidate)]
        raise ValueError(
            f"outputs differ in shape: {names[0] or 'reference'} {shapes[0]}, {names[1]} {shapes[1]}"
        )
    finite = all(bool(np.isfinite(output).all()) for output in (*reference, *candidate))
    max_abs, relative, total, count = 0.0, 0.0, 0.0, 0
    for r, c in zip(reference, candidate, strict=True):
        r64, c64 = r.astype(np.float64), c.astype(np.float64)
        with np.errstate(invalid="ignore"):
            delta = np.abs(r64 - c64)
        worst = float(delta.max(initial=0.0))
        max_abs = max(max_abs, worst)
        relative = max(relative, worst / max(float(np.abs(r64).max(initial=0.0)), _SCALE_FLOOR))
        total, count = total + float(delta.sum()), count + delta.size
    agreement: float | None = None
    if not finite:
        max_abs = relative = total = float("nan")
        agreement = 0.0
    elif scores is not None and reference[scores].ndim == 2:
        agreement = float((reference[scores].argmax(1) == candidate[scores].argmax(1)).mean())
    return Difference(
        probe=probe,
        batch=int(reference[0].shape[0]),
        max_abs=max_abs,
        mean_abs=total / max(count, 1),
        relative=relative,
        finite=finite,
        top1_agreement=agreement,
        reference=names[0],
        candidate=names[1],
    )


def compare_by_input(reference: np.ndarray, candidate: np.ndarray) -> Difference:
    """Compare an output of several inputs ``[b, …]``, each with its own largest value; the worst of them.

    For inputs whose outputs have very different sizes: the largest would hide differences of the others.

    Raises:
        ValueError: different shapes.
    """
    whole = compare_outputs([reference], [candidate])
    if not whole.finite:
        return whole
    single = [compare_outputs([r[None]], [c[None]]) for r, c in zip(reference, candidate, strict=True)]
    return replace(whole, relative=max(difference.relative for difference in single))


def compare_runners(
    reference: Runner, candidate: Runner, images: np.ndarray, probe: str = "", scores: int | None = 0
) -> Difference:
    """Run both on the same images and compare their outputs; ``scores`` as for :func:`compare_outputs`."""
    names = (reference.name, candidate.name)
    return compare_outputs(reference(images), candidate(images), probe, names, scores)


def compare_probes(
    reference: Runner,
    candidate: Runner,
    count: int,
    size: Sequence[int],
    dtype: str = "float32",
    probes: Sequence[str] = PROBES,
    scores: int | None = 0,
    span: Span = (0.0, 1.0),
) -> list[Difference]:
    """One comparison per probe, at a batch of ``count`` images of ``size`` (channels, height, width).

    ``scores`` as for :func:`compare_outputs`, ``span`` as for :func:`probe_input`.

    If the batch has room for all probes, it is run once, with alternating probes: the output for an image must not
    depend on its neighbours, and a large batch of a large network takes long.
    """
    inputs = {probe: probe_input(probe, (count, *size), count, dtype, span) for probe in probes}
    if count < len(probes):
        return [
            compare_runners(reference, candidate, images, probe, scores) for probe, images in inputs.items()
        ]
    mixed = np.stack([inputs[probes[i % len(probes)]][i] for i in range(count)])
    outputs = reference(mixed), candidate(mixed)
    names, differences = (reference.name, candidate.name), []
    compare_outputs(*outputs, names=names, scores=scores)  # checks shapes, before they are cut
    for i, probe in enumerate(probes):
        by_probe = [[output[i :: len(probes)] for output in side] for side in outputs]
        differences.append(
            replace(compare_outputs(by_probe[0], by_probe[1], probe, names, scores), batch=count)
        )
    return differences


def run_in_batches(
    runners: Sequence[Runner], images: np.ndarray, batch: tuple[int, int, int]
) -> Iterator[list[list[np.ndarray]]]:
    """Outputs of each runner, batch by batch: as large as ``batch`` allows, the last one filled to its smallest."""
    smallest, _, largest = batch
    for start in range(0, len(images), largest):
        chunk = images[start : start + largest]
        filled = chunk[np.arange(max(len(chunk), smallest)) % len(chunk)]
        yield [[output[: len(chunk)] for output in runner(filled)] for runner in runners]


def joined(batches: Iterable[list[list[np.ndarray]]]) -> list[list[np.ndarray]]:
    """Outputs of each runner on all images, from those of :func:`run_in_batches`."""
    sides = zip(*batches, strict=True)
    return [[np.concatenate(parts) for parts in zip(*side, strict=True)] for side in sides]


@dataclass(frozen=True)
class Timing:
    """Time of a runner for a batch.

    Attributes:
        runner: name of the runner.
        batch: images in the batch.
        milliseconds: median time of a call, including input and output as numpy arrays.
        images_per_second: at that time.
        ratio: median ratio of this time to the first runner's, each measured directly after the other.
        speed_up: its inverse, over the first runner.
    """

    runner: str
    batch: int
    milliseconds: float
    images_per_second: float
    ratio: float

    @property
    def speed_up(self) -> float:
        return 1 / self.ratio

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"speed_up": self.speed_up}


def time_runners(runners: Sequence[Runner], images: np.ndarray, repeats: int = 20) -> list[Timing]:
    """Time runners on one batch, in turns, so that a slow moment of the machine affects all of them.

    Before each measurement there is a pause for the previous runner's threads to stop (``SETTLE`` seconds), and one
    untimed run, which wakes the runner's threads and fills the caches as in consecutive runs.

    Raises:
        ValueError: ``repeats`` below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    rows = []
    for _ in range(repeats):
        row = []
        for runner in runners:
            time.sleep(SETTLE)
            runner(images)
            start = time.perf_counter()
            runner(images)
            row.append(time.perf_counter() - start)
        rows.append(row)
    seconds = np.array(rows)  # [repeat, runner]
    medians, ratios = np.median(seconds, 0), np.median(seconds / seconds[:, :1], 0)
    return [
        Timing(runner.name, len(images), 1e3 * float(s), len(images) / float(s), float(ratio))
        for runner, s, ratio in zip(runners, medians, ratios, strict=True)
    ]
