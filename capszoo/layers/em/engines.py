"""Engines of EM routing besides the reference: in C++ or in blocks on a CPU; frozen or in chunks in an exported graph.

Letters as in :mod:`capszoo.layers.em`. ``layer`` is a layer of that package: an engine uses attributes of these
layers that :class:`.RoutingLayer` does not have.
"""

from typing import Any, Dict, List

from torch import Tensor

from .._native.ops import not_routing_pass
from .._precision import upcast_half
from ..engine import Call, Engine, Routed
from ..tuning import TUNING
from .blocked import em_windows
from .chunked import chunked_routing
from .native import native_routing
from .shared import StepsInBlocks


class Frozen(Engine):
    """In a graph: the reference, with block-diagonal transforms stored as constants."""

    name = "frozen"
    evidence = "EM: frozen"
    modes = ("eager", "compiled", "graph")
    targets = ("gpu", "onnx_cpu")

    @classmethod
    def prepare(cls, layer: Any) -> Dict[str, Tensor]:
        return {"graph_weight": layer.flat_weight()}

    @classmethod
    def transforms(cls, layer: Any) -> List[Tensor]:
        """``[i, q, j, r]`` and ``[i, d, j * e]``, both derived from the constant alone."""
        flat_weight, p = upcast_half(layer.weights(Frozen)["graph_weight"]), layer.pose_size
        weight = flat_weight.reshape(-1, p, p, layer.out_caps, p, p)[:, 0, :, :, 0]  # of [i, p, q, j, p, r]
        return [weight.contiguous(), flat_weight]

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        weight, flat_weight = cls.transforms(layer)
        return layer.route_through(inputs, weight, flat_weight, call.num_iters, call.couplings)


class Chunked(Engine):
    """In a graph that a CPU runs node by node: a few output positions at a time, see :mod:`.chunked`."""

    name = "chunked"
    evidence = "EM: chunked"
    modes = ("eager", "compiled", "graph")
    targets = ("onnx_cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        # a difference of moments about 0, which are those of large poses, where it should be 0
        if call.children == 1:
            return "needs more than one child, whose votes have a variance"
        return super().refusal(layer, call, forced)

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        weight, flat_weight = Frozen.transforms(layer)
        betas = (upcast_half(layer.beta_v), upcast_half(layer.beta_a))
        settings = layer.settings(call.num_iters)
        mu, logits, couplings = chunked_routing(
            inputs[0], inputs[1], weight, flat_weight, *betas, settings, call.couplings
        )
        return Routed([mu], [logits], couplings)


class Blocked(Engine):
    """On a CPU: ``capszoo::em_windows``, a block of windows at a time; the backward pass recomputes their votes."""

    name = "blocked"
    evidence = "EM: blocked"
    devices = ("cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        reason = super().refusal(layer, call, forced)
        if not reason and not forced and call.votes <= TUNING.em_blocked_min_votes:
            return "needs votes of more than TUNING.em_blocked_min_votes elements"
        return reason

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        mu, logits, couplings = em_windows(
            inputs[0].flatten(0, 1),
            inputs[1].flatten(0, 1),
            upcast_half(layer.weight).transpose(1, 2).contiguous(),
            upcast_half(layer.beta_v),
            upcast_half(layer.beta_a),
            *layer.settings(call.num_iters),
            call.couplings,
        )
        return Routed([mu], [logits], couplings if call.couplings else None)


class Native(Engine):
    """On a CPU: one ``capszoo::routing_pass`` per iteration, in C++; votes of one vector of children at a time."""

    name = "native"
    evidence = "EM: native"
    devices = ("cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if reason := super().refusal(layer, call, forced):
            return reason
        return not_routing_pass(call, layer.pose_size, layer.pose_size, layer.pose_size, True, forced)

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        mu, logits, couplings = native_routing(
            inputs[0].flatten(0, 1),
            inputs[1].flatten(0, 1),
            upcast_half(layer.weight).transpose(1, 2),
            upcast_half(layer.beta_v),
            upcast_half(layer.beta_a),
            layer.settings(call.num_iters),
            call.couplings,
        )
        return Routed([mu], [logits], couplings)


class SharedBlocked(Engine):
    """On a CPU, with transforms shared over the grid: each step in blocks of parents or of groups of children."""

    name = "blocked"
    evidence = "EM: blocked"
    modes = ("eager",)
    devices = ("cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        reason = super().refusal(layer, call, forced)
        if reason or forced:
            return reason
        products = layer.groups * call.child_dim * (call.child_dim + 1) // 2 * call.parent_dim * call.parents
        couplings = call.routings * call.children * call.parents
        if max(products, couplings) <= TUNING.em_shared_block_elements:
            return "needs a temporary of more than TUNING.em_shared_block_elements elements"
        return ""

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        settings = layer.settings(call.num_iters)
        return StepsInBlocks().route_shared(inputs, layer.shared_tensors(), settings, call.couplings)
