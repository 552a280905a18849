"""Which engine is chosen: what is in force, the choices recorded, and why an engine was refused.

:mod:`.engine` has the engines and chooses; layers, calls and engines are its :class:`.RoutingLayer`, :class:`.Call` and
subclasses of :class:`.Engine`.
"""

import difflib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from torch import nn

from .tuning import TUNING

#: Targets of an exported graph: ONNX Runtime on a CPU, which runs it node by node, or a compiler.
TARGETS = ("onnx_cpu", "gpu")

#: Names of all engines; each class adds its own.
NAMES: Set[str] = set()


class State:
    """State set by :func:`use_engines` and :func:`record_engines`, for the whole process."""

    names: Tuple[str, ...] = ()
    target = ""
    records: Optional[List["Choice"]] = None
    device = ""  # assumed by choices where tensors are on the meta device
    mode = ""  # likewise


STATE = State()


@dataclass(frozen=True)
class Choice:
    """One choice: the layer (by its name in the model, if known), the call, and the engine selected."""

    name: str
    layer: Any
    call: Any
    engine: Any

    def refused(self) -> Dict[str, str]:
        """Each engine that precedes the chosen one, with the reason for its refusal; thresholds with their values."""
        reasons: Dict[str, str] = {}
        for engine in self.layer.engines:
            if engine is self.engine:
                break
            reason = engine.refusal(self.layer, self.call)
            reason = re.sub(
                r"TUNING\.(\w+)", lambda found: f"{found[0]} ({getattr(TUNING, found[1]):,})", reason
            )
            reasons[engine.name] = reason or "another was forced"
        return reasons


@contextmanager
def record_engines(meta_as: str = "", mode: str = "") -> Iterator[List[Choice]]:
    """Within this context, append every choice to the list that it yields.

    Args:
        meta_as: the device that choices assume for tensors on the meta device, where nothing is computed.
        mode: the mode that choices assume, ``"eager"`` or ``"compiled"``; by default that of the call.
    """
    before = STATE.records, STATE.device, STATE.mode
    records: List[Choice] = []
    STATE.records, STATE.device, STATE.mode = records, meta_as, mode
    try:
        yield records
    finally:
        STATE.records, STATE.device, STATE.mode = before


@contextmanager
def use_engines(*names: str, target: str = "") -> Iterator[None]:
    """Within this context, select engines of these names wherever they can run, whether they pay or not.

    This holds for all threads of the process; do not enter it from several threads at a time.

    Layers that have none of them, or where none can run, choose as usual. The environment variable ``CAPSZOO_ENGINES``
    (comma-separated names) does the same from the start. Code that is already compiled is compiled again.

    Args:
        names: such as ``"reference"``, in order of preference; without names, those in force remain.
        target: target of an exported graph, one of TARGETS.

    Raises:
        ValueError: an engine or a target that does not exist.
    """
    _check_names(names)
    if target and target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, not {target!r}")
    before = STATE.names, STATE.target
    STATE.names, STATE.target = names or STATE.names, target or STATE.target
    try:
        yield
    finally:
        STATE.names, STATE.target = before


def _check_names(names: Tuple[str, ...]) -> None:
    engines = sorted(NAMES)
    for name in names:
        if name not in engines:
            near = difflib.get_close_matches(name, engines, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the engines are {', '.join(engines)}"
            raise ValueError(f"there is no engine {name!r}: {hint}")


def read_environment() -> None:
    """Apply ``CAPSZOO_ENGINES``; called once all engines are known."""
    names = tuple(name.strip() for name in os.environ.get("CAPSZOO_ENGINES", "").split(",") if name.strip())
    try:
        _check_names(names)
    except ValueError as error:
        raise ValueError(f"CAPSZOO_ENGINES: {error}") from None
    STATE.names = names


def engine_report(
    model: nn.Module,
    batch: int = 32,
    training: bool = False,
    device: str = "cpu",
    target: str = "",
    input_size: Optional[Tuple[int, ...]] = None,
    mode: str = "eager",
) -> List[Choice]:
    """Report the engine of each routing layer and why the others were refused, without computing anything.

    Autocast of ``device`` is honoured: call it within the context in which the model would run.

    Nothing else may run capsule layers meanwhile, in any thread of the process.

    Args:
        model: an image model; its mode is switched meanwhile and restored.
        batch: batch size.
        training: report the choice for training mode with gradients.
        device: ``"cpu"`` or ``"cuda"``, where the model would run.
        target: report the choice for a graph exported for one of TARGETS.
        input_size: shape of an image without the batch; defaults to the model's own.
        mode: ``"eager"``, or ``"compiled"`` for a model under ``torch.compile``.

    Raises:
        ValueError: ``mode`` is neither word.
    """
    if mode not in ("eager", "compiled"):
        raise ValueError(f"mode must be 'eager' or 'compiled', not {mode!r}")
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    size = input_size or config.get("input_size", (3, 32, 32))
    if input_size is None:  # a model of another size or other channels states them itself
        own = getattr(model, "img_size", None)
        size = (getattr(model, "in_chans", size[0]), *(own if isinstance(own, tuple) else size[1:]))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    x = torch.empty(batch, *size, dtype=like.dtype, device="meta")
    training_modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        with (
            torch.set_grad_enabled(training),
            use_engines(target=target),
            record_engines(device, mode) as choices,
        ):
            torch.func.functional_call(model, state, (x,))
    finally:
        for module, was_training in training_modes:
            module.training = was_training
    names = {module: name for name, module in model.named_modules()}
    return [replace(choice, name=names.get(choice.layer, "")) for choice in choices]
