"""A model prepared for export to any format, with the original that every result is compared with."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from capszoo._pretrained.exported import OnnxModel
from capszoo._utils.process import is_verbose
from capszoo.errors import NoCapsules, UsageError, first_line
from capszoo.layers.engine_choice import record_engines, use_engines
from capszoo.models._factory import create_model
from capszoo.models._inspect import evaluating
from capszoo.preprocess import model_input_size, model_transform, per_channel

from . import compare, unroll
from .options import PRECISIONS, ExportOptions, collect
from .report import ExportError

#: Names under which wrappers hold their module: torch.compile, DataParallel and averaged weights, PEFT.
_WRAPPED = ("_orig_mod", "module", "base_model", "model")


@dataclass
class PreparedModel:
    """A model prepared for export, with the original that every result is compared with.

    Attributes:
        name: of the model.
        original: float32, unprepared, with the interface of the graph and its number of routing iterations.
        served: the model that is exported.
        size: channels, height, width.
        output_names: of the graph.
        batch: smallest, usual, largest.
        precision: of ``served``.
        tolerance: allowed difference as a share of the largest output.
        routing_iters: distinct iteration counts.
        options: settings of the preparation and of the export.
        engines: the engine of each routing layer in the last trace, by the layer's name.
    """

    name: str
    original: nn.Module
    served: nn.Module
    size: tuple[int, int, int]
    output_names: list[str]
    batch: tuple[int, int, int]
    precision: str
    tolerance: float
    routing_iters: list[int]
    options: ExportOptions
    engines: dict[str, str] = field(default_factory=dict)

    @property
    def input_dtype(self) -> str:
        """``float32`` or ``uint8``."""
        dtype = getattr(self.served, "input_dtype", torch.float32)
        return str(dtype).removeprefix("torch.")

    @property
    def scores_at(self) -> int | None:
        """Position of the scores among the outputs; None if they are not among them."""
        return self.output_names.index("scores") if "scores" in self.output_names else None

    @property
    def probes(self) -> tuple[str, ...]:
        """The inputs that the gate compares on, the two of the quick gate first."""
        return compare.HALF_PROBES if self.precision in ("fp16", "bf16") else compare.PROBES

    @property
    def span(self) -> tuple[list[float], list[float]]:
        """Lowest and highest value of a pixel of each channel, after the normalisation that the model states."""
        model = self.original.model if isinstance(self.original, unroll.Served) else self.original
        cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
        mean = per_channel(cfg.get("mean") or (0.0,), self.size[0])
        std = per_channel(cfg.get("std") or (1.0,), self.size[0])
        pairs = list(zip(mean, std, strict=True))
        return [(0 - m) / s for m, s in pairs], [(1 - m) / s for m, s in pairs]

    def example(self, count: int) -> torch.Tensor:
        """A batch of zeros."""
        dtype = torch.uint8 if self.input_dtype == "uint8" else torch.float32
        parameter = next(self.served.parameters(), None)
        return torch.zeros(
            count, *self.size, dtype=dtype, device=None if parameter is None else parameter.device
        )

    def trace(self, target: str = "gpu", count: int = 2) -> torch.export.ExportedProgram:
        """The ``torch.export`` program, with a symbolic batch unless the profile fixes it.

        Args:
            target: target of the graph, one of :data:`capszoo.layers.engine_choice.TARGETS`: ``"onnx_cpu"`` is a
                runtime that runs it node by node, ``"gpu"`` a compiler (for either device).
            count: images of the example, where the batch is symbolic; at least 2.

        Raises:
            ExportError: the model cannot be traced.
        """
        smallest, usual, largest = self.batch
        # torch.export treats a batch of 1 as a constant: trace with 2 for a symbolic batch
        count = usual if smallest == largest else max(2, count)
        inputs, shapes = (self.example(count),), self.dynamic_shapes()
        with quiet(), use_engines(target=target), record_engines() as choices:
            try:
                program = torch.export.export(self.served, inputs, dynamic_shapes=shapes, strict=False)
            except Exception as e:  # torch raises many kinds here, some without a common base
                if "Constraints violated" in str(e):
                    raise ExportError(
                        f"{self.name}: its forward turns the batch size into a number",
                        "keep x.shape[0] as it is (no int(), no len()), or fix the batch with a profile of one number",
                    ) from e
                depends = "data-dependent" in str(e).lower()
                raise ExportError(
                    f"{self.name}: torch.export cannot trace it: {first_line(e)}",
                    "keep Python branches on values of tensors out of its forward"
                    if depends
                    else "torch.export.export(model, (images,)) gives the whole error",
                ) from e
        returned = program.call_spec.out_spec
        if returned is not None and not returned.is_leaf() and returned.type not in (tuple, list):
            raise ExportError(
                f"{self.name}: its forward returns a {returned.type.__name__}, a graph has tensors only",
                "wrap it in a module that returns the scores",
            )
        names = {module: name for name, module in self.served.named_modules()}
        self.engines = {names[choice.layer]: choice.engine.name for choice in choices}
        return program

    def dynamic_shapes(self) -> Any:
        smallest, _, largest = self.batch
        return None if smallest == largest else ({0: torch.export.Dim("batch", min=1, max=max(largest, 2))},)


@contextmanager
def in_own_precision() -> Iterator[None]:
    """Compute in the dtypes of the tensors, also inside a caller's ``torch.autocast``."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@in_own_precision()
def prepare(model: nn.Module | str, options: ExportOptions | None = None, **changes: Any) -> PreparedModel:
    """Prepare a model for export to any format.

    Args:
        model: a module (not modified), or a name for ``capszoo.create_model``.
        options: see :class:`ExportOptions`; None uses the defaults.
        **changes: options by keyword.

    Raises:
        ExportError: a model that cannot be exported.
        UsageError: invalid options, or real images that are not the graph's input.
    """
    options = collect(ExportOptions, options, changes)
    name = options.name
    if isinstance(model, str):
        name, model = name or model, create_model(model, pretrained=options.pretrained)
    name = name or type(model).__name__
    _check_module(model, name)
    if any(p.is_meta for p in model.parameters()):
        raise ExportError(
            f"{name}: its weights are on the meta device, without values", "load weights into it"
        )
    bad = unroll.non_finite_weights(model)
    if bad:
        raise ExportError(f"{name}: weights hold NaN or infinity ({', '.join(bad[:3])})", "train it again")
    if any(p.dtype != torch.float32 for p in model.parameters()):
        raise ExportError(f"{name}: only float32 models are exported", "call model.float() first")
    channels, height, width = map(int, options.input_size or model_input_size(model))
    size = (channels, height, width)
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    if options.uint8_input:
        transform = model_transform(model)
        mean, std = transform.mean, transform.std
    dtype = PRECISIONS[options.precision]
    options.say("preparing")
    outputs = tuple(options.outputs)
    if outputs != ("scores",) and not hasattr(model, "forward_capsules"):
        raise UsageError(f"{type(model).__name__} has no capsules", "ask for the output scores only")
    with evaluating(model):
        # the reference must have the graph's number of iterations, but stay as unprepared as the user's model
        original = _copy(model, name).cpu()  # on a GPU, cuDNN's TF32 would round the reference
        if options.routing_iters is not None:
            unroll.set_routing_iterations(original, options.routing_iters)
        served = unroll.prepare_for_export(original)
        output_names = _output_names(model, outputs, size)
    plain = outputs == ("scores",) and not mean
    prepared = PreparedModel(
        name=name,
        original=original if plain else unroll.Served(original, outputs, mean, std).eval(),
        served=served
        if plain and dtype == torch.float32
        else unroll.Served(served, outputs, mean, std, dtype).eval(),
        size=size,
        output_names=output_names,
        batch=options.profile,
        precision=options.precision,
        tolerance=options.allowed,
        routing_iters=unroll.routing_iterations(served),
        options=options,
    )
    _check_images(prepared)
    return prepared


def _check_module(model: nn.Module, name: str) -> None:
    """Refuse modules that cannot be traced or copied, with what to export in their place.

    Raises:
        ExportError: an exported file, TorchScript, a wrapper whose ``forward`` names no input, or quantised weights.
    """
    kind = type(model).__name__
    if isinstance(model, OnnxModel):
        raise ExportError(f"{name} is an exported file already", "export the model that it was made from")
    if isinstance(model, torch.jit.ScriptModule):
        raise ExportError(f"{name} is TorchScript", "export the module that it was made from")
    parameters = inspect.signature(model.forward).parameters.values()
    unnamed = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    if unnamed or hasattr(
        model, "_orig_mod"
    ):  # torch.compile's wrapper shows the names of the module's forward
        inner = next((key for key in _WRAPPED if isinstance(getattr(model, key, None), nn.Module)), None)
        remedy = f"export model.{inner}" if inner else "name its input: forward(self, x)"
        raise ExportError(f"{name}: the forward of {kind} names no input, as wrappers do", remedy)
    odd = [
        key
        for key, value in model.state_dict().items()
        if not isinstance(value, torch.Tensor) or value.is_quantized or is_traceable_wrapper_subclass(value)
    ]
    if odd:
        raise ExportError(
            f"{name}: {odd[0]} is no plain tensor, as of quantised or distributed weights",
            "export the float32 model, with precision int8 for a quantised file",
        )


def _copy(model: nn.Module, name: str) -> nn.Module:
    """A copy of a module.

    Raises:
        ExportError: a tensor that it holds was computed, as the weight of a pruned layer.
    """
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        computed = [
            f"{path}.{key}".removeprefix(".")
            for path, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor) and not value.is_leaf
        ]
        if not computed:
            raise
        raise ExportError(
            f"{name}: {computed[0]} is computed from other tensors, as a pruned weight is",
            "make it a parameter: torch.nn.utils.prune.remove(layer, 'weight')",
        ) from error


def _output_names(model: nn.Module, outputs: Sequence[str], size: tuple[int, int, int]) -> list[str]:
    """Names of the graph's outputs; several couplings are numbered by routing layer."""
    if tuple(outputs) == ("scores",):
        return ["scores"]
    like = next(model.parameters())
    with torch.no_grad():
        try:
            capsules = model.forward_capsules(torch.zeros(1, *size, device=like.device))  # type: ignore[operator]
        except (NotImplementedError, NoCapsules):
            raise UsageError(f"{type(model).__name__} has no capsules", "ask for scores only") from None
    names: list[str] = []
    for name in outputs:
        value = getattr(capsules, name)
        if isinstance(value, torch.Tensor):
            names.append(name)
        elif len(value) == 0:
            raise UsageError(f"{type(model).__name__} has no {name}", "leave that output out")
        else:
            names.extend([name] if len(value) == 1 else [f"{name}_{i}" for i in range(len(value))])
    return names


def _check_images(prepared: PreparedModel) -> None:
    """Refuse real images (UsageError) that are not the graph's input."""
    options = prepared.options
    for real in (options.real_images, options.ranges):
        if real is None:
            continue
        images = real.images
        if str(images.dtype) != f"torch.{prepared.input_dtype}":
            raise UsageError(
                f"the images are {images.dtype}", f"the graph takes {prepared.input_dtype} images"
            )
        if tuple(images.shape[1:]) != tuple(prepared.size) or not len(images):
            raise UsageError(
                f"the images are {list(images.shape)}",
                f"the graph takes [b, {', '.join(map(str, prepared.size))}], at least one image",
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' messages (deprecations, advice, a line per step), except with ``--verbose``."""
    if is_verbose():
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
