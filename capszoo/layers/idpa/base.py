"""Base class of the two kinds of IDPA layer."""

import math
from typing import ClassVar, List, Optional, Tuple, Type

import torch
from torch import Tensor, nn

from .._forward_methods import forward_method
from .._modules import at_least, positive, reset_start
from .._precision import upcast_half
from ..engine import Engine, Reference, Routed, RoutingLayer
from .engines import Blocked, Fused, Native
from .routing import Procedure, agreement_of, couplings_of, weighted_sum

torch.fx.wrap("upcast_half")


class IDPALayer(Procedure, RoutingLayer):
    """Shared by convolutional and fully connected layers: options, norm, iterations over votes."""

    engines: ClassVar[Tuple[Type[Engine], ...]] = (Fused, Native, Blocked, Reference)

    weight: nn.Parameter
    start: Optional[Tensor]
    kernel_size: int
    stride: int

    def __init__(
        self,
        num_children: int,
        out_caps: int,
        in_dim: int = 16,
        out_dim: Optional[int] = None,
        num_iters: int = 2,
        pose: str = "matrix",
        scale_agreement: bool = True,
        parent_init: str = "zero",
        layer_norm: bool = True,
        activations: bool = False,
        drop: float = 0.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if pose not in ("matrix", "vector"):
            raise ValueError(f"pose must be 'matrix' or 'vector', not {pose!r}")
        if parent_init not in ("zero", "random", "learned"):
            raise ValueError(f"parent_init must be 'zero', 'random' or 'learned', not {parent_init!r}")
        out_dim = in_dim if out_dim is None else out_dim
        at_least(1, out_caps=out_caps, in_dim=in_dim, out_dim=out_dim, num_iters=num_iters)
        positive(eps=eps)
        side = math.isqrt(in_dim)
        if pose == "matrix" and (side * side != in_dim or in_dim != out_dim):
            raise ValueError(
                f"matrix poses are square and alike in both layers, not of dimension {in_dim} and {out_dim}: "
                "use pose='vector'"
            )
        self.num_children = num_children  # per parent
        self.in_dim = in_dim
        self.out_caps = out_caps
        self.out_dim = out_dim
        self.num_iters = num_iters
        self.pose = pose
        self.rows, self.inner, self.cols = (side, side, side) if pose == "matrix" else (1, in_dim, out_dim)
        self.scale = 1.0 / math.sqrt(out_dim) if scale_agreement else 1.0
        self.parent_init = parent_init
        self.layer_norm = layer_norm
        self.activations = activations
        # with parents at zero and no activations, the first iteration is a sum of votes: no vote is formed
        self.folds = parent_init == "zero" and not activations

        if parent_init == "learned":
            self.start = nn.Parameter(torch.empty(out_caps, out_dim))
        elif parent_init == "random":
            self.register_buffer("start", torch.empty(out_caps, out_dim))
        else:
            self.start = None  # zero
        if activations:
            self.beta_v = nn.Parameter(torch.empty(out_caps))
            self.beta_a = nn.Parameter(torch.empty(out_caps))
        else:
            self.register_parameter("beta_v", None)
            self.register_parameter("beta_a", None)
        self.drop = nn.Dropout(drop)
        self.norm = nn.LayerNorm(out_dim, eps=eps) if layer_norm else nn.Identity()

    def reset_parameters(self) -> None:
        """Weights normal with variance parents / (children * inner), as in the release."""
        reset_start(self.start, nn.init.normal_)
        for beta in (self.beta_v, self.beta_a):
            if beta is not None:
                nn.init.zeros_(beta)
        nn.init.normal_(self.weight, std=math.sqrt(self.out_caps / (self.num_children * self.inner)))

    @torch.jit.export
    @forward_method
    def route(
        self, children: List[Tensor], activations: List[Tensor], num_iters: int, need_couplings: bool = True
    ) -> Tuple[List[Tensor], List[Tensor], Optional[Tensor]]:
        """All iterations of this layer, given those of its children.

        Args:
            children: poses after each of their iterations: ``[b, h, w, i, d]``, of a fully connected layer also
                ``[b, i, d]``. Iteration s reads entry s-1 (1-based); the first reads entry 1, and iterations past the
                end of the list read the last entry.
            activations: likewise, without ``d``; empty unless the layer has activations.
            num_iters: iterations.
            need_couplings: False if the couplings are not used, which saves their memory.

        Returns:
            Poses ``[b, h', w', j, e]``, of a fully connected layer ``[b, j, e]``, after each iteration; activations
            likewise without ``e``, or an empty list; and the last iteration's couplings ``[b, h', w', j, k*l, i]`` or
            ``[b, j, i]`` (they sum to 1 over ``j``), or None if they are not requested, or if the only iteration was a
            sum of votes: all couplings are then 1/j.
        """
        return self._route(children, activations, num_iters, need_couplings)

    def _route(
        self, children: List[Tensor], activations: List[Tensor], num_iters: int, need_couplings: bool
    ) -> Tuple[List[Tensor], List[Tensor], Optional[Tensor]]:
        raise NotImplementedError

    @torch.jit.export
    @forward_method
    def votes(self, children: Tensor) -> Tensor:
        """Votes of the children of every routing (Procedure 1, line 2), ``[n, j, i, e]``."""
        return self._votes(children)

    def _votes(self, children: Tensor) -> Tensor:
        votes = self._rows_of_votes(children)
        votes = votes.reshape(self.num_children, -1, self.rows, self.out_caps, self.cols)
        return votes.permute(1, 3, 0, 2, 4).flatten(3)

    def _rows_of_votes(self, children: Tensor) -> Tensor:
        """The rows of all votes, the parents side by side: ``[i, n*p, j*r]``."""
        poses = self._child_poses(children).transpose(0, 1).reshape(self.num_children, -1, self.inner)
        return torch.bmm(poses, self._child_weight().flatten(2))

    def first_poses(self, children: Tensor) -> Tensor:
        return self._normalise(self._sum_of_votes(children) / self.out_caps)

    def read_children(self, inputs: List[Tensor], read: int) -> List[Tensor]:
        """Votes ``[n, j, i, e]`` (line 2), then (ablation C) activations ``[n, i]``."""
        votes = self._votes(inputs[read])
        if not self.activations:
            return [votes]
        return [votes, self._of_each_parent(inputs[len(inputs) // 2 + read])]

    def first_parents(self, inputs: List[Tensor], children: List[Tensor]) -> Tensor:
        parents = torch.zeros_like(children[0][:, :, 0])  # as many as there are routings
        start = self.start
        if start is not None:
            parents = start + parents
        return parents

    def iterate(
        self, children: List[Tensor], parents: Tensor, fresh: bool, need_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        votes = children[0]
        couplings = couplings_of(agreement_of(votes, parents * self.scale), votes.dtype)  # lines 3 and 4
        active: Optional[Tensor] = None
        beta_v, beta_a = self.beta_v, self.beta_a
        if beta_v is None or beta_a is None:
            sums = weighted_sum(votes, couplings)  # line 5
        else:
            sums, active = self._maximise(votes, couplings, children[1], beta_v, beta_a)
        return self._normalise(sums), couplings, active  # line 6

    def _maximise(
        self, votes: Tensor, couplings: Tensor, activation: Tensor, beta_v: Tensor, beta_a: Tensor
    ) -> Tuple[Tensor, Tensor]:
        """Ablation C: the M-step of EM routing, with the couplings in place of its assignments.

        Returns:
            Sums of votes ``[n, j, e]`` in place of those of line 5, and activations of the parents ``[n, j]``.
        """
        exact = upcast_half(votes)
        assigned = upcast_half(couplings * activation.unsqueeze(1))  # R_ij, [n, j, i]
        # no matmul, which autocast would round: the variance is a difference of these
        sums = (exact * assigned.unsqueeze(3)).sum(dim=2)
        squares = (exact * exact * assigned.unsqueeze(3)).sum(dim=2)
        mass = assigned.sum(dim=2)  # [n, j]
        total = mass.clamp(min=1e-6).unsqueeze(2)
        mean = sums / total
        variance = (squares / total - mean * mean).clamp(min=1e-4)
        cost = (beta_v + 0.5 * variance.log().mean(dim=2)) * (mass * (self.out_caps / self.num_children))
        return sums.to(votes.dtype), torch.sigmoid(beta_a - cost).to(votes.dtype)

    def _normalise(self, sums: Tensor) -> Tensor:
        """Dropout, at its place in the release, then line 6: ``[..., e]``."""
        return self.norm(self.drop(sums))

    def _sum_of_votes(self, children: Tensor) -> Tensor:
        """Sum of the votes for each parent, ``[n, j, e]``, in one product."""
        raise NotImplementedError

    def _of_each_parent(self, activation: Tensor) -> Tensor:
        """Activations of each routing's children, ``[n, i]``."""
        raise NotImplementedError

    def _child_poses(self, children: Tensor) -> Tensor:
        """Poses of each routing's children, ``[n, i, p, q]``."""
        raise NotImplementedError

    def _child_weight(self) -> Tensor:
        """Transforms of each routing's children, ``[i, q, j, r]``."""
        raise NotImplementedError

    def _child_grid(self, children: Tensor) -> Tensor:
        """Children in the layout of :func:`.fused_pass`, ``[b, h, w, i, d]``, padded."""
        raise NotImplementedError

    @torch.jit.unused
    def positions(self, children: Tensor) -> int:
        """Number of routings per image, a plain integer even if the batch is symbolic."""
        raise NotImplementedError

    @torch.jit.unused
    def routings(self, children: Tensor) -> int:
        """Number of independent routings n."""
        return children.shape[0] * self.positions(children)

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        return self.positions(inputs[0]), self.num_children, self.out_caps, self.in_dim, self.out_dim

    @torch.jit.unused
    def child_iterations(self, inputs: List[Tensor]) -> int:
        return len(inputs) // 2 if self.activations else len(inputs)

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """:meth:`.Procedure.all_iterations`, which ``route()`` returns."""
        return self.all_iterations(inputs, num_iters, need_couplings)

    def extra_repr(self) -> str:
        text = f"children={self.num_children}x{self.in_dim}, out_caps={self.out_caps}, out_dim={self.out_dim}"
        text += f", pose={self.pose}, num_iters={self.num_iters}"
        if self.parent_init != "zero":
            text += f", parent_init={self.parent_init}"
        return text + (", activations=True" if self.activations else "")
