"""Every option of an export: its name, default, meaning, and validation.

:func:`capszoo.export.to_onnx.export`, :func:`capszoo.export.bundle.export_bundle` and
:func:`capszoo.export.to_torch_tensorrt.compile_module` take these as keywords, or an object of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, TypeVar

import torch

from capszoo._utils.choices import EXPORT_FORMATS as FORMATS
from capszoo.errors import UsageError, unknown_name

from .passes.int8 import MIN_CALIBRATION
from .verify.graph_rules import MAX_TENSORRT_OPSET
from .verify.images import RealImages

__all__ = [
    "FORMATS",
    "GATES",
    "MIN_OPSET",
    "OUTPUTS",
    "PRECISIONS",
    "RUNTIMES",
    "TOLERANCES",
    "TRITON_BACKENDS",
    "BuildOptions",
    "BundleOptions",
    "ExportOptions",
    "collect",
]

#: Possible outputs of a graph.
OUTPUTS = ("scores", "poses", "activations", "couplings")

#: Dtype of the model when the graph is traced; int8 is added to the graph afterwards.
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32}

#: Allowed difference as a share of the largest output. Those of bf16, with its 8 bits, and of int8, on real images
#: only, are our choice; int8 must also preserve its accuracy.
TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2, "int8": 0.25}

#: All probes, batches and graphs, or a selection.
GATES = ("full", "quick")

#: Targets of an ONNX file.
RUNTIMES = ("cpu", "gpu")

#: Backends of Triton Inference Server.
TRITON_BACKENDS = ("onnxruntime", "tensorrt", "python")

#: Share of the images that measure int8 which may be calibration images, too: data sets have duplicates.
MAX_SHARED = 0.01

#: First ONNX opset that torch.onnx writes.
MIN_OPSET = 18


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Settings for building a TensorRT engine.

    Attributes:
        workspace_mib: memory that a layer's tactic may use, MiB.
        optimization_level: 0 (quick build) to 5 (all tactics).
        timing_cache: file that stores measured tactics between builds; created if it does not exist.
        version_compatible: run on later TensorRT versions too.
        hardware_compatible: run on other GPUs of Ampere and later too.
        refit: allow new weights without a new build.
        detailed: keep layer names, for inspection.
        compute_capability: build for that GPU (such as ``"SM89"``) without having it; TensorRT-RTX only.
    """

    workspace_mib: int = 4096
    optimization_level: int = 3
    timing_cache: str | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    refit: bool = False
    detailed: bool = True
    compute_capability: str | None = None

    def __post_init__(self) -> None:
        if self.workspace_mib < 1:
            raise UsageError(f"invalid workspace of {self.workspace_mib} MiB", "give 1 or more")
        if not 0 <= self.optimization_level <= 5:
            raise UsageError(f"there is no optimisation level {self.optimization_level}", "give 0 to 5")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Settings for exporting a model; an invalid value raises UsageError when the object is created.

    Attributes:
        name: name of the model in the report and the messages; its class if empty.
        pretrained: for a model given by name: load its weights; False exports freshly initialised ones.
        routing_iters: iterations to unroll; None keeps the model's number.
        outputs: any of :data:`OUTPUTS`; all but the scores need a capsule network of the zoo. Couplings become one
            output per routing layer.
        opset: ONNX opset; refused if the exporter would silently use another. None: 20, for bf16 22 (the first
            with bfloat16 convolutions).
        batch: (smallest, usual, largest) batch the file must serve; one number fixes the batch.
        input_size: channels, height and width; None uses the model's.
        precision: ``fp32``, ``fp16``, ``bf16`` or ``int8``; inputs and outputs stay float32, as do norms, squash,
            softmax logits and EM variances. With ``int8``, convolutions and large linear layers outside of the routing
            are computed in it (:mod:`capszoo.export.passes.int8`).
        uint8_input: accept uint8 images and normalise them inside the graph.
        optimize: let the exporter fold constants and simplify. False goes with ``check=False``: the gate's rules refuse
            the graph as the exporter writes it.
        check: run the gate; otherwise the report states that nothing was checked.
        gate: ``full`` (all probes, batches 1, 2, odd, largest; both graphs) or ``quick`` (random and zero input at
            two batch sizes).
        runtime: target of the ONNX file. ``cpu``: EM layers of windows a few positions at a time and, in
            fp32, some convolutions as matrix products (:mod:`capszoo.export.passes.conv_to_matmul`), which are faster
            in ONNX Runtime's CPU provider; ``gpu``: whole maps, in few nodes, all convolutions. None: ``gpu``
            for half precision or a TensorRT engine, else ``cpu``.
        tolerance: allowed difference as a share of the largest output; None uses :data:`TOLERANCES`.
        images: real images ``[b, c, h, w]`` in the format of the graph's input (normalised, or uint8); if given, their
            outputs must be within ``tolerance``, and their top-1 must agree (in half precision on 99.5% of them). int8
            requires them: it may lose 0.5 points on them (without known classes, change as
            many answers).
        calibration: real images that determine int8's ranges, distinct from ``images``.
        progress: called with one line before each step.
    """

    name: str = ""
    pretrained: bool = True
    routing_iters: int | None = None
    outputs: Sequence[str] = ("scores",)
    opset: int | None = None
    batch: tuple[int, int, int] | int = (1, 8, 32)
    input_size: tuple[int, int, int] | None = None
    precision: str = "fp32"
    uint8_input: bool = False
    optimize: bool = True
    check: bool = True
    gate: str = "full"
    runtime: str | None = None
    tolerance: float | None = None
    images: torch.Tensor | RealImages | None = None
    calibration: torch.Tensor | RealImages | None = None
    progress: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("gate", self.gate, GATES)
        _one_of("runtime", RUNTIMES[0] if self.runtime is None else self.runtime, RUNTIMES)
        if isinstance(self.outputs, str):
            raise UsageError(f"outputs are a sequence, not {self.outputs!r}", f"give ({self.outputs!r},)")
        _each_of("output", self.outputs, OUTPUTS)
        if self.opset is not None and self.precision == "bf16" and self.opset < 22:
            raise UsageError(
                f"opset {self.opset} has no bfloat16 convolutions", "leave --opset out, or give 22"
            )
        if self.opset is not None and self.opset < MIN_OPSET:
            raise UsageError(
                f"opset {self.opset} cannot be written",
                f"torch.onnx writes opset {MIN_OPSET} and later; for an older runtime use PyTorch's former exporter, "
                "timm.utils.onnx.onnx_export(model, FILE, opset=N, batch_size=B)",
            )
        if len(set(self.outputs)) < len(self.outputs):
            raise UsageError(f"outputs {', '.join(self.outputs)} name one twice", "name each once")
        if self.input_size is not None and not _are_counts(self.input_size, 3):
            raise UsageError(f"invalid input_size {self.input_size!r}", "give (channels, height, width)")
        values = self._batch()
        if not _are_counts(values, 3) or not 1 <= values[0] <= values[1] <= values[2]:
            raise UsageError(
                f"invalid batch {self.batch}", "give smallest, usual and largest, such as 1,8,32"
            )
        if self.precision == "int8" and "scores" not in self.outputs:
            raise UsageError("int8 is measured by its scores", "add scores to the outputs")
        if self.tolerance is not None and not 0 < self.tolerance <= 1:  # NaN too
            raise UsageError(
                f"invalid tolerance {self.tolerance}", "give a share of the largest output, 0 to 1"
            )

    def _batch(self) -> tuple[int, ...]:
        batch: Any = self.batch
        return tuple(batch) if isinstance(batch, Sequence) else (batch,) * 3

    def check_images(self) -> None:
        """Refuse int8 without its required images, and images that are not needed.

        Separate from the other checks, so that the command line can create options before it reads images.
        """
        have = 0 if self.calibration is None else len(self.calibration)
        if self.precision != "int8":
            if self.calibration is not None:
                raise UsageError(
                    f"{self.precision} is not calibrated", "ask for int8, or leave the calibration images out"
                )
        elif have < MIN_CALIBRATION:
            raise UsageError(
                f"int8 needs at least {MIN_CALIBRATION} real images to calibrate it, there are {have or 'none'}",
                "--calibrate names a folder of them, or a data set",
            )
        ranges, real = self.ranges, self.real_images
        if self.precision != "int8" or not self.check:
            return
        if real is None or len(real) < MIN_CALIBRATION:
            raise UsageError(
                f"int8 needs at least {MIN_CALIBRATION} real images that measure what it costs, there are "
                f"{len(real) if real else 'none'}",
                "--verify-data names a folder, or a data set",
            )
        hashes = set(_hashes(ranges.images)) if ranges else set()
        shared = sum(one in hashes for one in _hashes(real.images))
        if shared > MAX_SHARED * len(real):
            raise UsageError(
                f"{shared} of the {len(real)} images that measure what int8 costs are calibration images",
                "give others for one of them",
            )

    @property
    def profile(self) -> tuple[int, int, int]:
        """Smallest, usual and largest batch."""
        smallest, usual, largest = map(int, self._batch())  # numpy's are no JSON
        return smallest, usual, largest

    @property
    def target(self) -> str:
        """The runtime, with the default resolved."""
        return self.runtime or ("gpu" if self.precision in ("fp16", "bf16") else "cpu")

    @property
    def onnx_opset(self) -> int:
        return self.opset or (22 if self.precision == "bf16" else 20)

    @property
    def allowed(self) -> float:
        """The tolerance, by default that of the precision."""
        return TOLERANCES[self.precision] if self.tolerance is None else self.tolerance

    @property
    def real_images(self) -> RealImages | None:
        return _real(self.images)

    @property
    def ranges(self) -> RealImages | None:
        """The calibration images."""
        return _real(self.calibration)

    def say(self, line: str) -> None:
        """Report progress to the ``progress`` callback, if any."""
        if self.progress:
            self.progress(line)


@dataclass(frozen=True, kw_only=True)
class BundleOptions(ExportOptions):
    """Settings for creating a bundle: its formats, and the options of :class:`ExportOptions`.

    Attributes:
        source: the name with which ``capszoo.inference.load_model`` finds the model again.
        formats: any of :data:`FORMATS`. The ONNX file is always written, because the gate runs on it.
        triton: add model repositories for Triton Inference Server.
        triton_backends: their backends, any of :data:`TRITON_BACKENDS`; empty: ``onnxruntime``, and ``tensorrt`` with
            that format. ``python`` is a file of ours that runs the ONNX file on the CPU, for a Triton without the
            backend ``onnxruntime``.
        engine: settings for building a TensorRT engine.
    """

    source: str = ""
    formats: Sequence[str] = ("onnx",)
    triton: bool = False
    triton_backends: Sequence[str] = ()
    engine: BuildOptions = field(default_factory=BuildOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        _each_of("format", self.formats, FORMATS)
        if "scores" not in self.outputs:
            raise UsageError("a bundle needs the output scores", "add it to the outputs")
        if not self.check:
            raise UsageError("a bundle requires the gate", "remove check=False")
        if self.input_size is not None:
            raise UsageError(
                "a bundle's images have the size of its model",
                "create the model with another img_size; in a module of your own, set in_chans and img_size",
            )
        if self.precision == "int8" and "aoti" in self.formats:
            raise UsageError("AOTInductor takes no int8", "leave the format aoti out")
        if self.precision != "fp32" and "executorch" in self.formats:
            raise UsageError(
                f"ExecuTorch's program is written in fp32, not {self.precision}",
                "leave the format executorch out, or --precision",
            )
        if "tensorrt" in self.formats and self.onnx_opset > MAX_TENSORRT_OPSET:
            raise UsageError(
                f"TensorRT's parser is not known to support opset {self.onnx_opset}",
                f"ask for {MAX_TENSORRT_OPSET} or less",
            )
        if self.triton_backends:
            self._check_triton()
        smallest, _, largest = self.profile
        if self.triton and 1 < smallest < largest:
            raise UsageError(
                f"Triton may send fewer than {smallest} images",
                "give 1 as the smallest batch, or fix the batch",
            )

    def _check_triton(self) -> None:
        _each_of("Triton backend", self.triton_backends, TRITON_BACKENDS)
        if not self.triton:
            raise UsageError("Triton backends do nothing without a model repository", "add triton=True")
        if "tensorrt" in self.triton_backends and "tensorrt" not in self.formats:
            raise UsageError("Triton's backend tensorrt serves an engine", "add the format tensorrt")
        if "python" in self.triton_backends and self.precision == "bf16":
            raise UsageError(
                "Triton's backend python runs on the CPU, where ONNX Runtime has no bf16",
                "export fp16 or fp32, or take another backend",
            )

    @property
    def triton_repositories(self) -> tuple[str, ...]:
        """The backends that a model repository is written for."""
        if not self.triton:
            return ()
        usual = ("onnxruntime", *(["tensorrt"] if "tensorrt" in self.formats else []))
        return tuple(dict.fromkeys(self.triton_backends)) or usual

    @property
    def target(self) -> str:
        return self.runtime or ("gpu" if "tensorrt" in self.formats else super().target)


Options = TypeVar("Options", bound=ExportOptions)


def collect(kind: type[Options], options: Options | None, changes: Mapping[str, Any]) -> Options:
    """Options of a kind: the given ones, or the defaults, with changes by keyword.

    Raises:
        TypeError: options of another class, or an unknown keyword; the message suggests the nearest one.
        UsageError: an invalid value.
    """
    if options is not None and not isinstance(options, kind):
        raise TypeError(f"options must be {kind.__name__}, not {type(options).__name__}")
    names = [option.name for option in fields(kind)]
    for name in changes:
        if name not in names:
            raise TypeError(unknown_name("option of the export", name, names))
    return kind(**changes) if options is None else replace(options, **changes)


def _are_counts(values: Any, length: int) -> bool:
    """Whether these are so many whole numbers above 0, of numpy's too."""
    if not isinstance(values, Sequence) or len(values) != length:
        return False
    return all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) > 0 for n in values)


def _one_of(what: str, word: str, choices: Sequence[str] | Mapping[str, Any]) -> None:
    if word not in choices:
        words = list(choices)
        listed = " or ".join(words) if len(words) == 2 else ", ".join(words)
        raise UsageError(f"unknown {what} '{word}'", f"use {listed}")


def _each_of(what: str, words: Sequence[str], choices: Sequence[str]) -> None:
    """Refuse an unknown word, and an empty sequence."""
    for word in words or ("",):
        _one_of(what, word, choices)


def _hashes(images: torch.Tensor) -> Iterator[bytes]:
    return (hashlib.sha256(image.contiguous().numpy()).digest() for image in images.cpu())


def _real(images: torch.Tensor | RealImages | None) -> RealImages | None:
    return RealImages(images, None, "given") if isinstance(images, torch.Tensor) else images
