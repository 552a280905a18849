"""How a layer's passes are made where the plain form is not: blocked on a CPU, fused on a GPU, in parts in a graph."""

from typing import TYPE_CHECKING, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .._tracing import is_tracing
from .._triton import fused, working_type
from .._triton.ops import fused_norm, fused_pass
from .blocked import idpa_pass
from .routing import couplings_of

if TYPE_CHECKING:
    from .base import IDPALayer

__all__ = ["Blocked", "Engine", "Fused", "Parts", "engine_of"]

#: Numbers in a part of the votes of an image in an exported graph, which has no loop over images or windows.
_PART = 2**20

#: From so many votes on (numbers in them) a layer works in blocks; fewer fit the caches as they are.
_MANY = 2**20


class Engine:
    """How a layer makes its passes where it does not keep all votes in blocks; see :meth:`.IDPALayer._passes_by`."""

    def __init__(self, layer: "IDPALayer") -> None:
        self.layer = layer

    def first(self, children: Tensor) -> Tensor:
        """Poses ``[n, j, e]`` after a pass in which all parents are zero: no vote is formed."""
        return self.layer._normalise(self.layer._sum_of_votes(children) / self.layer.out_caps)

    def hold(self, children: Tensor) -> List[Tensor]:
        """What passes over the same children share."""
        raise NotImplementedError

    def route(
        self, held: List[Tensor], parents: Tensor, want_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """One pass of Procedure 1.

        Args:
            held: from :meth:`hold`.
            parents: poses of the iteration before, ``[n, j, e]``.
            want_couplings: give the couplings too.

        Returns:
            Poses ``[n, j, e]`` and couplings ``[n, i, j]``, which say nothing where they are not wanted.
        """
        raise NotImplementedError


class Blocked(Engine):
    """Passes through :func:`idpa_pass`, no votes being kept."""

    def __init__(self, layer: "IDPALayer") -> None:
        super().__init__(layer)
        self.weight = layer._child_weight()

    def hold(self, children: Tensor) -> List[Tensor]:
        return [self.layer._child_poses(children)]

    def route(
        self, held: List[Tensor], parents: Tensor, want_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor]]:
        sums, couplings = idpa_pass(held[0], self.weight, parents * self.layer.scale, want_couplings)
        return self.layer._normalise(sums), couplings


class Parts(Engine):
    """Passes of an exported graph, plain products through the weights of :meth:`ConvIDPA.prepare_for_export`."""

    def __init__(self, layer: "IDPALayer", wide: Tensor) -> None:
        super().__init__(layer)
        self.wide = wide

    def hold(self, children: Tensor) -> List[Tensor]:
        """All votes, ``[n, j, i, e]`` for some children at a time: made and moved while they are in the cache."""
        layer = self.layer
        poses = layer._child_poses(children).flatten(2).transpose(0, 1)  # [i, n, d]
        shape = (layer.out_caps, layer.out_dim)
        votes = layer._positions(children) * layer.num_children * layer.out_caps * layer.out_dim
        count = -(-votes // _PART)
        parts = zip(poses.chunk(count), self.wide.chunk(count), strict=True)
        return [torch.bmm(x, w).unflatten(2, shape).permute(1, 2, 0, 3) for x, w in parts]

    def route(
        self, held: List[Tensor], parents: Tensor, want_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Couplings sum to 1 over the parents, so parts of the children are independent."""
        parents = (parents * self.layer.scale).unsqueeze(3)  # [n, j, e, 1]
        sums: List[Tensor] = []
        couplings: List[Tensor] = []
        for part in held:
            agreement = torch.matmul(part, parents).squeeze(3).transpose(1, 2)  # line 3: [n, i, j]
            c = couplings_of(agreement, part.dtype)  # line 4
            sums.append(torch.matmul(c.transpose(1, 2).unsqueeze(2), part).squeeze(2))  # line 5: [n, j, e]
            couplings.append(c)
        total = sums[0]
        for some in sums[1:]:
            total = total + some
        return self.layer._normalise(total), torch.cat(couplings, dim=1) if want_couplings else None


class Fused(Engine):
    """Passes on a GPU, no vote leaving the registers; poses in the type the kernels compute with."""

    def __init__(self, layer: "IDPALayer", like: Tensor) -> None:
        super().__init__(layer)
        self.dtype = working_type(like)
        self.weight = layer._child_weight().to(self.dtype).contiguous()  # here, and not again in each pass
        self.norm: Tuple[str, Optional[Tensor], Optional[Tensor], float] = ("none", None, None, 0.0)
        dropped = layer.training and layer.drop.p > 0  # between sums and norm
        if isinstance(layer.norm, nn.LayerNorm) and not dropped:
            self.norm = ("layer", layer.norm.weight, layer.norm.bias, layer.norm.eps)
        self.keep = torch.is_grad_enabled()

    def first(self, children: Tensor) -> Tensor:
        layer = self.layer
        return self._finished(fused_norm(layer._sum_of_votes(children), 1.0 / layer.out_caps, *self.norm))

    def hold(self, children: Tensor) -> List[Tensor]:
        return [self.layer._child_grid(children).to(self.dtype).contiguous()]

    def route(
        self, held: List[Tensor], parents: Tensor, want_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor]]:
        layer = self.layer
        options = (want_couplings, self.keep, layer.scale, layer.kernel_size, layer.stride, False)
        poses, couplings, _ = fused_pass(held[0], self.weight, parents.to(self.dtype), *options, *self.norm)
        return self._finished(poses), couplings

    def _finished(self, poses: Tensor) -> Tensor:
        return self.layer._normalise(poses) if self.norm[0] == "none" else poses


def engine_of(layer: "IDPALayer", children: List[Tensor], num_iters: int) -> Optional[Engine]:
    """What makes a layer's passes; None for the plain form.

    Args:
        layer: with its weights, prepared for export or not.
        children: poses, one entry per iteration.
        num_iters: passes.
    """
    if layer.graph_weight is not None:
        return Parts(layer, layer.graph_weight)
    if _is_fused(layer, children, num_iters):
        return Fused(layer, children[0])
    return Blocked(layer) if _many_votes(layer, children, num_iters) else None


def _is_fused(layer: "IDPALayer", children: List[Tensor], num_iters: int) -> bool:
    """Whether the passes go through :func:`.fused_pass`: on CUDA, in eager mode or compiled."""
    if layer.activations or num_iters == int(layer.folds):
        return False
    return fused(children[0], layer.weight, layer.out_caps, layer.rows, layer.inner, layer.cols)


def _many_votes(layer: "IDPALayer", children: List[Tensor], num_iters: int) -> bool:
    """Whether the passes go through :func:`.idpa_pass`: on a CPU, in eager mode or compiled, with many votes."""
    first = children[0]
    if is_tracing(first) or layer.activations or first.device.type != "cpu":
        return False
    if first.dtype != layer.weight.dtype and not torch.is_autocast_enabled("cpu"):
        return False  # the plain form says what is wrong
    passes = num_iters - 1 if layer.folds else num_iters
    if passes == 0 or (passes > 1 and len(children) == 1 and layer.inner > 16):
        return False  # no votes; or votes that cost more to compute for each pass than to keep
    return layer._routings(first) * layer.num_children * layer.out_caps * layer.out_dim >= _MANY
