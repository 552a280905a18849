"""Engines of dynamic routing besides the reference, all for a CPU: in C++, in blocks, in float32.

Letters as in :mod:`capszoo.layers.dynamic`. ``layer`` is a layer of that package: an engine uses attributes of these
layers that :class:`.RoutingLayer` does not have.
"""

from typing import Any, List, Optional

import torch
from torch import Tensor

from .._native import not_native
from .._native.dynamic_ops import MAX_DIM, dynamic_in_lanes, dynamic_sizes
from .._native.ops import grouped, ungrouped
from .._precision import upcast_half, wide_type
from ..engine import Call, Engine, Routed, other_type
from ..tuning import TUNING
from .blocked import Blocks, route_votes
from .routing import dynamic_routing, shared_dynamic_routing

_HALF = (torch.float16, torch.bfloat16)
_NO_VOTES = "needs more than one iteration: the first forms no votes"


def _routed(poses: Tensor, couplings: Optional[Tensor], call: Call) -> Routed:
    """Poses and couplings in the dtype of the call; couplings only where requested."""
    if couplings is None or not call.couplings:
        return Routed([poses.to(call.dtype)], [], None)
    return Routed([poses.to(call.dtype)], [], couplings.to(call.dtype))


def _not_plain(layer: Any) -> str:
    """What an engine of the paper's couplings alone (even at first, over the parents) needs that a layer lacks."""
    if layer.softmax_over != "parents":
        return "needs a softmax over the parents"
    return "" if layer.start is None else "needs first logits of zero"


def _vote_type(call: Call) -> torch.dtype:
    """Type in which a CPU forms votes: float32 for short poses in half precision."""
    short = call.child_dim < TUNING.dynamic_half_min_child_dim and call.dtype in _HALF
    return torch.float32 if short else call.dtype


class Blocked(Engine):
    """On a CPU: votes are routed one block of images at a time; in training by ``capszoo::route_votes``.

    With gradients, layers with more weights than ``TUNING.dynamic_block_votes`` store their votes; others form them
    again.
    """

    name = "blocked"
    evidence = "Dynamic routing: blocked"
    devices = ("cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if reason := super().refusal(layer, call, forced):
            return reason
        if call.mode == "compiled" and not call.grad:
            return "needs gradients: without them, a compiled graph would unroll its blocks"
        if reason := _NO_VOTES if call.num_iters == 1 else other_type(layer, call):
            return reason
        if forced:
            return ""
        if call.votes < TUNING.dynamic_blocked_min_votes:
            return "needs votes of at least TUNING.dynamic_blocked_min_votes elements"
        if call.votes > call.routings * TUNING.dynamic_blocked_max_image_votes:
            return "needs votes of at most TUNING.dynamic_blocked_max_image_votes elements per image"
        return ""

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        with torch.autocast("cpu", enabled=False):
            x, weight = inputs[0].to(_vote_type(call)), layer.weight.to(_vote_type(call))
            if call.grad:
                axis = 1 if layer.softmax_over == "parents" else 2
                routed = route_votes(x, weight, layer.start, call.parents, call.num_iters, axis)
                return _routed(routed[0], routed[1][-1], call)
            poses, couplings, room = [], [], Blocks(x, weight, call.parents)
            for block in room.slices:
                pose, coupling = dynamic_routing(
                    room.votes(block), call.num_iters, layer.softmax_over, layer.start
                )
                poses.append(pose)
                if call.couplings:
                    couplings.append(coupling)
        return _routed(torch.cat(poses), torch.cat(couplings) if couplings else None, call)


class Native(Engine):
    """On a CPU: the iterations after the first by ``capszoo::dynamic_in_lanes``, in C++ and in float32 or wider."""

    name = "native"
    evidence = "Dynamic routing: native"
    devices = ("cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if reason := super().refusal(layer, call, forced) or _not_plain(layer) or other_type(layer, call):
            return reason
        if call.num_iters == 1:
            return _NO_VOTES
        if call.child_dim > MAX_DIM or call.parent_dim > MAX_DIM:
            return "needs poses of no more dimensions than the C++ code is tested for"
        if not forced and call.routings < TUNING.dynamic_native_min_routings:
            return "needs at least TUNING.dynamic_native_min_routings images or windows"
        return not_native(call, "dynamic_pass", forced, **dynamic_sizes(call.child_dim, call.parent_dim))

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        dtype, count = wide_type(call.dtype), len(inputs[0])
        with torch.autocast("cpu", enabled=False):
            x, weight = inputs[0].to(dtype), layer.weight.to(dtype)  # [n, i, d], [i, d, j * e]
            with torch.no_grad():
                first = torch.matmul(x.flatten(1) / call.parents, weight.flatten(0, 1))
                first = grouped(first.unflatten(1, (call.parents, call.parent_dim)))  # [g, j, e, l]
            poses, couplings, _ = dynamic_in_lanes(x, weight, first, call.num_iters)
        some = ungrouped(couplings[-1], count).transpose(1, 2) if call.couplings else None
        return _routed(ungrouped(poses, count), some, call)


class SharedFloat32(Engine):
    """On a CPU without gradients, for half precision: in float32, since half-precision matmuls first repack inputs."""

    name = "float32"
    evidence = "Dynamic routing: float32"
    devices = ("cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if reason := super().refusal(layer, call, forced) or other_type(layer, call):
            return reason
        if not forced and call.dtype not in _HALF:
            return "needs children in half precision"
        if not forced and call.grad:
            return "needs a call without gradients: in training, half the memory is worth more"
        return ""

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        with torch.autocast("cpu", enabled=False):
            tensors = [upcast_half(t) for t in (inputs[0], layer.weight, layer.bias)]
            options = (call.num_iters, layer.softmax_over, layer.start, call.couplings)
            poses, couplings = shared_dynamic_routing(tensors[0], tensors[1], tensors[2], *options)
        return _routed(poses, couplings, call)
