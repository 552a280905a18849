"""How a routing is computed: a readable reference and a declared list of engines.

A routing layer owns its parameters and :meth:`RoutingLayer.reference`, the paper's procedure line by line. Every other
way to compute the same result (in blocks, without votes, in one kernel, in chunks for a graph) is an :class:`Engine`
in the layer's ``engines``. :func:`choose` selects the first one that can compute the call and is profitable; the last
is :class:`Reference`, which refuses nothing. Reasons and forcing (:mod:`.engine_choice`), reports
(:func:`.engine_report`), tests (``tests/layers/test_engines.py``) and export read the same list. :data:`.TUNING` has
the measured thresholds.

Scripted code contains only the reference: :meth:`RoutingLayer.compute` has the one guard. Under FX and
``torch.jit.trace``, the reference is selected and no size is read. ``torch.export`` and ``torch.compile``
trace through the choice, which therefore compares plain values and formats no strings.
"""

from typing import Any, ClassVar, Dict, List, NamedTuple, Optional, Tuple, Type

import torch
from torch import Tensor

from ._forward_methods import ForwardMethods
from ._precision import is_tracing, is_transformed, working_type
from .engine_choice import NAMES, STATE, Choice


class Call(NamedTuple):
    """Everything that a choice may depend on, as plain values: torch.compile traces the choice and guards on them.

    In mode ``"graph"`` (torch.export) the sizes are those of one image, since a symbolic batch is never compared.
    """

    mode: str  # "eager", "compiled" or "graph"
    target: str  # "" or one of :data:`.TARGETS`: what a graph is exported for
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
    #: heading of its table in docs/dev/engines.md
    evidence: ClassVar[str] = ""
    #: modes and devices in which it can run; no devices means all
    modes: ClassVar[Tuple[str, ...]] = ("eager", "compiled")
    devices: ClassVar[Tuple[str, ...]] = ()
    #: it exports graphs for these targets, and is profitable nowhere else
    targets: ClassVar[Tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in vars(cls):
            NAMES.add(cls.name)

    @classmethod
    def refusal(cls, layer: "RoutingLayer", call: Call, forced: bool = False) -> str:
        """Why it is not chosen for this call: "needs ..." without numbers; empty if it is.

        A subclass adds, in this order: what it needs to compute the call; unless it is ``forced`` by its name, what it
        needs to pay, naming the threshold as ``TUNING.<name>``; code that is compiled on first use, which it tries.
        """
        if call.mode not in cls.modes:
            return "needs another mode (of eager, compiled, graph)"
        if cls.devices and call.device not in cls.devices:
            return "needs another device"
        if call.routings == 0:
            return "needs at least one image"
        if forced or call.target in cls.targets or not (cls.targets or call.target):
            return ""
        return "needs a graph for its target" if cls.targets else "needs a call outside of exported graphs"

    @classmethod
    def prepare(cls, layer: "RoutingLayer") -> Dict[str, Tensor]:
        """The layer's weights in the engine's layout: constants of an exported graph (:meth:`RoutingLayer.freeze`)."""
        return {}

    @classmethod
    def route(cls, layer: "RoutingLayer", inputs: List[Tensor], call: Call) -> Routed:
        """Compute the routing; ``inputs`` as in :meth:`RoutingLayer.reference`."""
        raise NotImplementedError


class Reference(Engine):
    """The paper's procedure as the layer states it; refuses nothing."""

    name = "reference"
    evidence = "Reference"
    modes = ("eager", "compiled", "graph")

    @classmethod
    def refusal(cls, layer: "RoutingLayer", call: Call, forced: bool = False) -> str:
        return ""

    @classmethod
    def route(cls, layer: "RoutingLayer", inputs: List[Tensor], call: Call) -> Routed:
        return layer.reference(inputs, call.num_iters, call.couplings)


class RoutingLayer(ForwardMethods):
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

    def with_couplings(self, inputs: List[Tensor], num_iters: int) -> Tuple[Tensor, Tensor]:
        """The last poses and couplings of :meth:`compute`."""
        routed = self.compute(inputs, num_iters, True)
        couplings = routed.couplings
        assert couplings is not None
        return routed.poses[0], couplings

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """The procedure, step by step, in plain operations.

        Args:
            inputs: a list specific to the layer, such as poses, then activations; the first axis of the first is the
                batch.
            num_iters: iterations.
            need_couplings: whether to return the couplings of the last iteration.
        """
        raise NotImplementedError

    def may_read_children(self) -> bool:
        """Whether weights of child modules may be read without a call: :meth:`children_are_plain`, or TorchScript."""
        if not torch.jit.is_scripting():
            return self.children_are_plain()
        return True

    @torch.jit.unused
    def children_are_plain(self) -> bool:
        """Whether the child modules whose weights a reference reads are those that the layer made, without hooks."""
        return True

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        """Routings per image, children, parents, child and parent pose dimension."""
        raise NotImplementedError

    @torch.jit.unused
    def describe(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Call:
        """The call for which an engine is chosen."""
        x = inputs[0]
        mode = STATE.mode or ("compiled" if torch.compiler.is_compiling() else "eager")
        mode = "graph" if is_tracing(x) else mode
        routings, children, parents, child_dim, parent_dim = self.sizes(inputs)
        return Call(
            mode=mode,
            target=STATE.target,
            device=STATE.device or x.device.type,
            dtype=working_type(x),
            grad=torch.is_grad_enabled(),
            couplings=need_couplings,
            routings=routings if mode == "graph" else routings * x.shape[0],
            children=children,
            parents=parents,
            child_dim=child_dim,
            parent_dim=parent_dim,
            num_iters=num_iters,
            child_iters=self.child_iterations(inputs),
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
        """Store the weights of engines that export graphs (for one target, or for all) as constants: for inference.

        The constants do not follow later changes of the weights: copy the model first, and freeze the copy.
        """
        for engine in self.engines:
            if target in engine.targets or (engine.targets and not target):
                for key, value in engine.prepare(self).items():
                    self.register_buffer(f"_{engine.name}_{key}", value.detach(), persistent=False)

    @torch.jit.unused
    def thaw(self) -> None:
        """Remove the constants that :meth:`freeze` stored."""
        prefixes = tuple(f"_{engine.name}_" for engine in self.engines)
        for name in [name for name in self._buffers if name.startswith(prefixes)]:
            delattr(self, name)

    @torch.jit.unused
    def _by_engine(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        if isinstance(inputs[0], torch.fx.Proxy):
            return self.reference(inputs, num_iters, need_couplings)
        device = STATE.device or inputs[0].device.type
        if not self.autocasts and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._by_engine(inputs, num_iters, need_couplings)
        # the engines' operators and autograd functions have no rule for vmap and forward mode
        if torch.jit.is_tracing() or is_transformed():
            return self.reference(inputs, num_iters, need_couplings)
        call = self.describe(inputs, num_iters, need_couplings)
        engine = choose(self, call)
        if STATE.records is not None:
            STATE.records.append(Choice("", self, call, engine))
            if STATE.device:  # on the meta device every engine works
                engine = Reference
        return engine.route(self, inputs, call)


def choose(layer: RoutingLayer, call: Call) -> Type[Engine]:
    """The first engine that is forced and can compute the call, else the first that can and pays."""
    for name in STATE.names:
        for engine in layer.engines:
            if engine.name == name and not engine.refusal(layer, call, True):
                return engine
    for engine in layer.engines:
        if not engine.refusal(layer, call):
            return engine
    return Reference


def other_type(layer: Any, call: Call) -> str:
    """Reason for a reference that refuses children and weights of different types, after autocast's casts."""
    same = call.dtype == working_type(layer.weight)
    return "" if same else "needs children and weights of one type"
