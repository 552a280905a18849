"""Engines of IDPA besides the reference: in C++ or in blocks on a CPU, fused on a GPU, in chunks in a graph."""

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .._layout import block_diagonal
from .._modules import is_plain
from .._native.ops import in_lanes, not_routing_pass, routing_pass, weight_in_lanes
from .._precision import wide_type
from .._triton import not_fused
from .._triton.ops import fused_norm, fused_pass
from ..engine import Call, Engine, Routed, other_type
from ..tuning import TUNING
from .blocked import idpa_pass
from .routing import Procedure, couplings_of, iteration

#: unlike a single iteration with parents at zero, which is a sum of votes
_ONLY_SUM = "needs an iteration with couplings"


class Iterated(Procedure, Engine):
    """An engine with other steps than the layer; an instance has the state that a call's iterations share.

    ``layer`` is an :class:`.IDPALayer`: an engine uses attributes that :class:`.RoutingLayer` does not have.
    """

    activations = False

    def __init__(self, layer: Any, call: Call) -> None:
        self.layer = layer
        self.folds = layer.folds

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if layer.activations:
            return "needs capsules without activations (ablation C has them)"
        return super().refusal(layer, call, forced)

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        routed = cls(layer, call).all_iterations(inputs, call.num_iters, call.couplings)
        # under autocast, engines that iterate in float32 return what the reference does
        couplings = None if routed.couplings is None else routed.couplings.to(call.dtype)
        return Routed([pose.to(call.dtype) for pose in routed.poses], [], couplings)

    def first_poses(self, children: Tensor) -> Tensor:
        return self.layer.first_poses(children)  # type: ignore[no-any-return]

    def first_parents(self, inputs: List[Tensor], children: List[Tensor]) -> Tensor:
        return self.layer.start.expand(self.layer.routings(inputs[0]), -1, -1)  # type: ignore[no-any-return]


class Blocked(Iterated):
    """On a CPU: iterations by ``capszoo::idpa_pass``, which stores no votes."""

    name = "blocked"
    evidence = "IDPA: blocked"
    devices = ("cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if reason := super().refusal(layer, call, forced) or other_type(layer, call):
            return reason
        if forced:
            return ""
        iterations = call.num_iters - 1 if layer.folds else call.num_iters
        if iterations == 0:
            return _ONLY_SUM
        if iterations > 1 and call.child_iters == 1 and layer.inner > TUNING.idpa_blocked_max_inner:
            return "needs poses of at most TUNING.idpa_blocked_max_inner columns, to recompute votes in each iteration"
        if call.votes < TUNING.idpa_blocked_min_votes:
            return "needs votes of at least TUNING.idpa_blocked_min_votes elements"
        return ""

    def __init__(self, layer: Any, call: Call) -> None:
        super().__init__(layer, call)
        self.weight = layer._child_weight()

    def read_children(self, inputs: List[Tensor], read: int) -> List[Tensor]:
        return [self.layer._child_poses(inputs[read])]

    def iterate(
        self, children: List[Tensor], parents: Tensor, fresh: bool, need_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor], None]:
        sums, couplings = idpa_pass(
            children[0], self.weight, parents * self.layer.scale, fresh, need_couplings
        )
        return self.layer._normalise(sums), couplings.transpose(1, 2) if need_couplings else None, None


class Native(Iterated):
    """On a CPU: one ``capszoo::routing_pass`` per iteration, in C++ and in float32 or wider; no vote is stored."""

    name = "native"
    evidence = "IDPA: native"
    devices = ("cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if reason := super().refusal(layer, call, forced) or other_type(layer, call):
            return reason
        if not forced and call.num_iters == int(layer.folds):
            return _ONLY_SUM
        return not_routing_pass(call, layer.rows, layer.inner, layer.cols, False, forced)

    def __init__(self, layer: Any, call: Call) -> None:
        super().__init__(layer, call)
        self.dtype = wide_type(call.dtype)
        self.weight = weight_in_lanes(layer._child_weight().to(self.dtype))

    def read_children(self, inputs: List[Tensor], read: int) -> List[Tensor]:
        self.child_type = inputs[read].dtype
        poses = self.layer._child_poses(inputs[read]).to(self.dtype)
        return [in_lanes(poses), in_lanes(torch.ones_like(poses[:, :, 0, 0]))]

    def iterate(
        self, children: List[Tensor], parents: Tensor, fresh: bool, need_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor], None]:
        layer = self.layer
        toward = (parents * layer.scale).to(self.dtype)
        mean, height = torch.zeros_like(toward), torch.zeros_like(toward[:, :, 0])
        _, sums, _, couplings = routing_pass(
            *children, self.weight, mean, None, toward, height, 0.0, layer.num_children, False, fresh,
            need_couplings,
        )  # fmt: skip
        return layer._normalise(sums.to(self.child_type)), couplings if need_couplings else None, None


class Chunked(Iterated):
    """In a graph, which has no loop over blocks: votes of some children at a time, with block-diagonal weights.

    For matrix poses such weights take ``rows`` times the multiply-adds (and ``rows**2`` times the memory) of products
    as narrow as a pose, but far less time. Votes come out with the pose last, and only couplings are transposed.
    """

    name = "chunked"
    evidence = "IDPA: chunked"
    modes = ("eager", "compiled", "graph")
    targets = ("onnx_cpu", "gpu")

    @classmethod
    def prepare(cls, layer: Any) -> Dict[str, Tensor]:
        if layer.activations:
            return {}
        weight = layer._child_weight().transpose(1, 2)  # [i, j, q, r]
        return {"weight": block_diagonal(weight, layer.rows)}

    def __init__(self, layer: Any, call: Call) -> None:
        super().__init__(layer, call)
        self.weight = layer.weights(Chunked)["weight"]

    def first_poses(self, children: Tensor) -> Tensor:
        return self.layer._normalise(self.layer._sum_of_votes_in_planes(children) / self.layer.out_caps)

    def read_children(self, inputs: List[Tensor], read: int) -> List[Tensor]:
        """All votes, as chunks ``[n, j, i, e]`` of the children, each computed and moved while it is in the cache."""
        layer = self.layer
        poses = layer._child_poses(inputs[read]).flatten(2).transpose(0, 1)  # [i, n, d]
        shape = (layer.out_caps, layer.out_dim)
        votes = layer.positions(inputs[read]) * layer.num_children * layer.out_caps * layer.out_dim
        count = -(-votes // TUNING.idpa_chunk_votes)
        chunks = zip(poses.chunk(count), self.weight.chunk(count), strict=True)
        return [torch.bmm(x, w).unflatten(2, shape).permute(1, 2, 0, 3) for x, w in chunks]

    def iterate(
        self, children: List[Tensor], parents: Tensor, fresh: bool, need_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor], None]:
        """Couplings sum to 1 over the parents, so chunks of the children are independent."""
        sums: List[Tensor] = []
        couplings: List[Tensor] = []
        for votes in children:
            some, c = iteration(votes, parents, self.layer.scale)
            sums.append(some)
            couplings.append(c)
        total = sums[0]
        for some in sums[1:]:
            total = total + some
        return self.layer._normalise(total), torch.cat(couplings, dim=2) if need_couplings else None, None


class Masked(Iterated):
    """In a graph for a CPU, fully connected layers: one product for all parents, in which other parents' are zeros.

    Votes of matrix poses leave their product row by row, all parents side by side. The reference gathers each parent's
    rows, a copy of runs as short as a row. Here votes stay so: parents of few poses cost less arithmetic than the copy.
    """

    name = "masked"
    evidence = "IDPA: masked"
    modes = ("eager", "compiled", "graph")
    targets = ("onnx_cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if not forced and call.parents > TUNING.idpa_masked_max_parents:
            return "needs at most TUNING.idpa_masked_max_parents parents"
        return super().refusal(layer, call, forced)

    @classmethod
    def prepare(cls, layer: Any) -> Dict[str, Tensor]:
        own = torch.eye(layer.out_caps, dtype=layer.weight.dtype, device=layer.weight.device)
        return {"mask": own.repeat_interleave(layer.cols, 0).repeat(layer.rows, 1)}  # [p*j*r, j]

    def __init__(self, layer: Any, call: Call) -> None:
        super().__init__(layer, call)
        self.mask = layer.weights(Masked)["mask"].to(call.dtype)

    def read_children(self, inputs: List[Tensor], read: int) -> List[Tensor]:
        """All votes, ``[n, i, p*j*r]``."""
        rows = self.layer._rows_of_votes(inputs[read])
        return [rows.reshape(self.layer.num_children, -1, len(self.mask)).transpose(0, 1)]

    def iterate(
        self, children: List[Tensor], parents: Tensor, fresh: bool, need_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor], None]:
        layer, votes = self.layer, children[0]
        p, j, r = layer.rows, layer.out_caps, layer.cols
        rows = (parents * layer.scale).reshape(-1, j, p, r).transpose(1, 2).reshape(-1, len(self.mask), 1)
        agreement = torch.bmm(votes, (rows * self.mask).to(votes.dtype))  # [n, i, j]
        couplings = couplings_of(agreement.transpose(1, 2), votes.dtype)
        sums = (torch.bmm(couplings, votes) * self.mask.t()).sum(dim=1)  # [n, p*j*r]
        sums = sums.reshape(-1, p, j, r).transpose(1, 2).reshape(-1, j, p * r)
        return layer._normalise(sums), couplings if need_couplings else None, None


class Fused(Iterated):
    """On a GPU: one ``capszoo::fused_pass`` per iteration; no vote leaves the registers."""

    name = "fused"
    evidence = "IDPA: fused"

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if reason := super().refusal(layer, call, forced) or other_type(layer, call):
            return reason
        sizes = (layer.out_caps, layer.rows, layer.inner, layer.cols)
        if reason := not_fused(call.device, call.dtype, call.grad, layer.weight, *sizes):
            return reason
        return _ONLY_SUM if not forced and call.num_iters == int(layer.folds) else ""

    def __init__(self, layer: Any, call: Call) -> None:
        super().__init__(layer, call)
        self.dtype = call.dtype
        self.weight = layer._child_weight().to(self.dtype).contiguous()  # cast once, not in each iteration
        self.norm: Tuple[str, Optional[Tensor], Optional[Tensor], float] = ("none", None, None, 0.0)
        norm = layer.norm
        if _is_known(norm) and _is_idle(layer.drop):  # dropout is between sums and norm
            self.norm = ("layer", norm.weight, norm.bias, norm.eps)
        self.keep = call.grad

    def first_poses(self, children: Tensor) -> Tensor:
        layer = self.layer
        return self._finished(fused_norm(layer._sum_of_votes(children), 1.0 / layer.out_caps, *self.norm))

    def read_children(self, inputs: List[Tensor], read: int) -> List[Tensor]:
        return [self.layer._child_grid(inputs[read]).to(self.dtype).contiguous()]

    def iterate(
        self, children: List[Tensor], parents: Tensor, fresh: bool, need_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor], None]:
        layer = self.layer
        options = (need_couplings, self.keep, layer.scale, layer.kernel_size, layer.stride)
        poses, couplings, _ = fused_pass(
            children[0], self.weight, parents.to(self.dtype), *options, *self.norm, fresh
        )
        return self._finished(poses), couplings.transpose(1, 2) if need_couplings else None, None

    def _finished(self, poses: Tensor) -> Tensor:
        return self.layer._normalise(poses) if self.norm[0] == "none" else poses


def _is_known(norm: nn.Module) -> bool:
    """True for a plain LayerNorm with its weight and bias, which the kernels compute."""
    plain = type(norm) is nn.LayerNorm and is_plain(norm)
    return plain and norm.weight is not None and norm.bias is not None


def _is_idle(drop: nn.Module) -> bool:
    """True for a dropout that drops nothing now."""
    return type(drop) is nn.Dropout and is_plain(drop) and not (drop.training and drop.p > 0)
