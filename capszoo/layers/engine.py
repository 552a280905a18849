"""How a routing is computed: a readable reference and a declared list of engines.

A routing layer owns its parameters and :meth:`RoutingLayer.reference`, the paper's procedure line by line. Every other
way to compute the same result (in blocks, without votes, in one kernel, in chunks for a graph) is an :class:`Engine`
in the layer's ``engines``. :func:`choose` selects the first one that can compute the call and is profitable; the last
is :class:`Reference`, which refuses nothing. Choice, reasons, forcing (:func:`use_engines`), reports
(:func:`.engine_report`), tests (``tests/layers/test_engines.py``) and export read the same list. :data:`.TUNING` has
the measured thresholds.

Scripted code contains only the reference: :meth:`RoutingLayer.compute` has the one guard. Under FX and
``torch.jit.trace``, the reference is selected and no size is read. ``torch.export`` and ``torch.compile``
trace through the choice, which therefore compares plain values and formats no strings.
"""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Dict, List, NamedTuple, Optional, Tuple, Type

import torch
from torch import Tensor, nn

from ._precision import working_type
from ._tracing import is_tracing
from .tuning import TUNING

__all__ = [
    "TARGETS",
    "Call",
    "Choice",
    "Engine",
    "Reference",
    "Routed",
    "RoutingLayer",
    "choose",
    "record_engines",
    "use_engines",
]

#: Targets of an exported graph: ONNX Runtime on a CPU, which runs it node by node, or a compiler.
TARGETS = ("onnx_cpu", "gpu")


class Call(NamedTuple):
    """Everything that a choice may depend on, as plain values: torch.compile traces the choice and guards on them.

    In mode ``"graph"`` (torch.export) the sizes are those of one image, since a symbolic batch is never compared.
    """

    mode: str  # "eager", "compiled" or "graph"
    target: str  # "" or one of TARGETS: what a graph is exported for
    device: str
    dtype: torch.dtype  # of matrix products: autocast's where it is on
    grad: bool
    couplings: bool
    routings: int  # independent routings: images, or windows of all images
    children: int  # of one routing
    parents: int
    child_dim: int
    parent_dim: int
    num_iters: int
    child_iters: int  # iterations of the children in the inputs (concurrent routing), else 1

    @property
    def votes(self) -> int:
        """Number of elements in all votes."""
        return self.routings * self.children * self.parents * self.parent_dim


class Routed(NamedTuple):
    """Result of a routing. ``activations`` may be empty; the lists are short if only some iterations are kept."""

    poses: List[Tensor]  # after each iteration, or only after the last
    activations: List[Tensor]  # likewise
    couplings: Optional[Tensor]  # of the last iteration, where requested


class Engine:
    """One way to compute a routing. Subclasses are used as classes and never instantiated."""

    name: ClassVar[str]
    #: heading of its table in docs/dev/performance.md
    evidence: ClassVar[str] = ""
    #: whether all votes of a call exist at one time
    keeps_votes: ClassVar[bool] = True
    #: modes and devices in which it can run; no devices means all
    modes: ClassVar[Tuple[str, ...]] = ("eager", "compiled")
    devices: ClassVar[Tuple[str, ...]] = ()
    #: it exports graphs for these targets, and is profitable nowhere else
    targets: ClassVar[Tuple[str, ...]] = ()
    #: largest deviation from the reference, as a share of the largest value
    atol: ClassVar[Dict[torch.dtype, float]] = {
        torch.float64: 1e-11,
        torch.float32: 2e-6,
        torch.bfloat16: 1e-2,
        torch.float16: 2e-3,
    }

    @classmethod
    def unsupported(cls, layer: "RoutingLayer", call: Call) -> str:
        """Reason why it cannot compute this call: a sentence without numbers, empty if it can."""
        return ""

    @classmethod
    def unprofitable(cls, layer: "RoutingLayer", call: Call) -> str:
        """Reason why it does not pay here, naming the threshold as ``TUNING.<name>``; empty if it does."""
        return ""

    @classmethod
    def prepare(cls, layer: "RoutingLayer") -> Dict[str, Tensor]:
        """The layer's weights in the engine's layout: constants of an exported graph (:meth:`RoutingLayer.freeze`)."""
        return {}

    @classmethod
    def route(cls, layer: "RoutingLayer", inputs: List[Tensor], call: Call) -> Routed:
        """Compute the routing; ``inputs`` as in :meth:`RoutingLayer.reference`."""
        raise NotImplementedError

    @classmethod
    def cannot(cls, layer: "RoutingLayer", call: Call) -> str:
        """Reason why it cannot be used: mode, device, :meth:`unsupported`."""
        if call.mode not in cls.modes:
            return "does not run in this mode (eager, compiled, graph)"
        if cls.devices and call.device not in cls.devices:
            return "does not run on this device"
        return cls.unsupported(layer, call)

    @classmethod
    def does_not_pay(cls, layer: "RoutingLayer", call: Call) -> str:
        """Reason why it is not chosen: target, :meth:`unprofitable`."""
        if call.target not in cls.targets and (cls.targets or call.target):
            return "is for other graphs" if cls.targets else "writes no graph for this target"
        return cls.unprofitable(layer, call)


class Reference(Engine):
    """The paper's procedure as the layer states it; refuses nothing."""

    name = "reference"
    evidence = "Reference"
    modes = ("eager", "compiled", "graph")

    @classmethod
    def does_not_pay(cls, layer: "RoutingLayer", call: Call) -> str:
        return ""

    @classmethod
    def route(cls, layer: "RoutingLayer", inputs: List[Tensor], call: Call) -> Routed:
        return layer.reference(inputs, call.num_iters, call.couplings)


class _State:
    """State set by :func:`use_engines` and :func:`record_engines`, for the whole process."""

    def __init__(self) -> None:
        self.names: Tuple[str, ...] = ()
        self.target = ""
        self.records: Optional[List["Choice"]] = None
        self.device = ""  # assumed by choices where tensors are on the meta device


_STATE = _State()


class RoutingLayer(nn.Module):
    """A layer whose routing has engines.

    A subclass sets ``engines``, writes :meth:`reference` and :meth:`sizes`, and calls :meth:`compute`. The reference
    must be TorchScript; the rest of the protocol is Python.
    """

    #: in order of preference; Reference is the last
    engines: ClassVar[Tuple[Type[Engine], ...]] = (Reference,)
    #: whether autocast reaches inside :meth:`compute`
    autocasts: ClassVar[bool] = True

    def compute(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """:meth:`reference`, computed by the chosen engine; the reference itself in TorchScript."""
        if not torch.jit.is_scripting():
            return self._by_engine(inputs, num_iters, need_couplings)
        return self.reference(inputs, num_iters, need_couplings)

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """The procedure, step by step, in plain operations.

        Args:
            inputs: a list specific to the layer, such as poses, then activations; the first axis of the first is the
                batch.
            num_iters: iterations.
            need_couplings: whether to return the couplings of the last iteration.
        """
        raise NotImplementedError

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        """Routings per image, children, parents, child and parent pose dimension."""
        raise NotImplementedError

    @torch.jit.unused
    def describe(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Call:
        """The call for which an engine is chosen."""
        x = inputs[0]
        mode = "graph" if is_tracing(x) else "compiled" if torch.compiler.is_compiling() else "eager"
        routings, children, parents, child_dim, parent_dim = self.sizes(inputs)
        return Call(
            mode,
            _STATE.target,
            _STATE.device or x.device.type,
            working_type(x),
            torch.is_grad_enabled(),
            need_couplings,
            routings if mode == "graph" else routings * x.shape[0],
            children,
            parents,
            child_dim,
            parent_dim,
            num_iters,
            self.child_iterations(inputs),
        )

    @torch.jit.unused
    def child_iterations(self, inputs: List[Tensor]) -> int:
        """Number of iterations of the children in ``inputs``."""
        return 1

    @torch.jit.unused
    def weights(self, engine: Type[Engine]) -> Dict[str, Tensor]:
        """The layer's weights in the engine's layout, from the frozen constants or computed here."""
        prefix = f"_{engine.name}_"
        frozen = {
            k[len(prefix) :]: v for k, v in self._buffers.items() if k.startswith(prefix) and v is not None
        }
        return frozen or engine.prepare(self)

    @torch.jit.unused
    def freeze(self, target: str = "") -> None:
        """Store the weights of engines that export graphs (for one target, or for all) as constants: for inference."""
        for engine in self.engines:
            if target in engine.targets or (engine.targets and not target):
                for key, value in engine.prepare(self).items():
                    self.register_buffer(f"_{engine.name}_{key}", value.detach(), persistent=False)

    @torch.jit.unused
    def _by_engine(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        if isinstance(inputs[0], torch.fx.Proxy):
            return self.reference(inputs, num_iters, need_couplings)
        if not self.autocasts and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            with torch.autocast(inputs[0].device.type, enabled=False):
                return self._by_engine(inputs, num_iters, need_couplings)
        if torch.jit.is_tracing():
            return self.reference(inputs, num_iters, need_couplings)
        call = self.describe(inputs, num_iters, need_couplings)
        engine = choose(self, call)
        if _STATE.records is not None:
            _STATE.records.append(Choice("", self, call, engine))
            if _STATE.device:  # on the meta device every engine works
                engine = Reference
        return engine.route(self, inputs, call)


def choose(layer: RoutingLayer, call: Call) -> Type[Engine]:
    """The first engine that is forced and can compute the call, else the first that can and pays."""
    for name in _STATE.names:
        for engine in layer.engines:
            if engine.name == name and not engine.cannot(layer, call):
                return engine
    for engine in layer.engines:
        if not engine.cannot(layer, call) and not engine.does_not_pay(layer, call):
            return engine
    return Reference


@dataclass(frozen=True)
class Choice:
    """One choice: the layer (by its name in the model, if known), the call, and the engine selected."""

    name: str
    layer: RoutingLayer
    call: Call
    engine: Type[Engine]

    def refused(self) -> Dict[str, str]:
        """Each engine that precedes the chosen one, with the reason for its refusal; thresholds with their values."""
        reasons: Dict[str, str] = {}
        for engine in self.layer.engines:
            if engine is self.engine:
                break
            reason = engine.cannot(self.layer, self.call) or engine.does_not_pay(self.layer, self.call)
            for field, value in vars(TUNING).items():
                reason = reason.replace(f"TUNING.{field}", f"TUNING.{field} ({value:,})")
            reasons[engine.name] = reason or "another was forced"
        return reasons


@contextmanager
def record_engines(meta_as: str = "") -> Iterator[List[Choice]]:
    """Within this context, append every choice to the list that it yields.

    Args:
        meta_as: the device that choices assume for tensors on the meta device, where nothing is computed.
    """
    before = _STATE.records, _STATE.device
    records: List[Choice] = []
    _STATE.records, _STATE.device = records, meta_as
    try:
        yield records
    finally:
        _STATE.records, _STATE.device = before


@contextmanager
def use_engines(*names: str, target: str = "") -> Iterator[None]:
    """Within this context, select engines of these names wherever they can run, whether they pay or not; process-wide.

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
    before = _STATE.names, _STATE.target
    _STATE.names, _STATE.target = names or _STATE.names, target or _STATE.target
    try:
        yield
    finally:
        _STATE.names, _STATE.target = before


def _known() -> List[str]:
    names: List[str] = []
    classes: List[Type[Engine]] = [Engine]
    while classes:
        engine = classes.pop()
        classes += engine.__subclasses__()
        if "name" in vars(engine):
            names.append(engine.name)
    return sorted(set(names))


def _check_names(names: Tuple[str, ...]) -> None:
    known = _known()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the engines are {', '.join(known)}"
            raise ValueError(f"there is no engine {name!r}: {hint}")


def read_environment() -> None:
    """Apply ``CAPSZOO_ENGINES``; called once all engines are known."""
    names = tuple(name.strip() for name in os.environ.get("CAPSZOO_ENGINES", "").split(",") if name.strip())
    _check_names(names)
    _STATE.names = names
