"""Heinsen's routing: parents assign each child a credit, for using its data or for ignoring it.

Paper: Heinsen, "An Algorithm for Routing Vectors in Sequences" (2022, arXiv:2211.11754), in its efficient form (section
3). The release was read for facts (``EfficientVectorRouting``).

============== ==================================================================
symbol         here
============== ==================================================================
x_i n^-½       ``scaled``
f(a_i)         ``activations``, the sigmoid of the child's score
W_F1, W_F2     ``vote_scale``, ``vote_weight`` (``weight`` of the module)
B_F2           ``vote_bias``
W_G1, W_G2     ``pred_weight``, ``pred_scale``
B_G2           ``pred_bias``
W_S, B_S       ``score_weight``, ``score_bias``
R_ij           ``shares``, softmax over the parents
β_use, β_ign   ``beta_use``, ``beta_ign``: benefit of a unit of used data, cost of an ignored one
D_use, D_ign   ``used``, ``ignored``
φ_ij           ``credit``
x_j            ``parents``
============== ==================================================================

Letters: ``b`` batch, ``i`` children, ``j`` parents, ``d`` child pose, ``e`` parent pose.

A vote is ``V_ij = (x_i n^-½ * W_F1_j) W_F2 + B_F2_j``, but no vote is formed: ``Σ_i φ_ij x_i n^-½`` comes first.

The credit takes the place of the couplings and is no share: it may be negative, and sums to no fixed number. Credit of
layers in a row is the product of their matrices (section 3.2, appendix A).

Deviations: scores, softmax and norms are float32 for half-precision children.
"""

from typing import List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._forward_methods import forward_method
from ._modules import at_least
from ._precision import upcast_half
from .engine import Routed, RoutingLayer

__all__ = ["HeinsenRouting", "heinsen_routing"]

torch.fx.wrap("upcast_half")


def heinsen_routing(
    x: Tensor,
    activations: Tensor,
    beta_use: Tensor,
    beta_ign: Tensor,
    vote_scale: Tensor,
    vote_weight: Tensor,
    vote_bias: Tensor,
    pred_weight: Tensor,
    pred_scale: Tensor,
    pred_bias: Tensor,
    score_weight: Tensor,
    score_bias: Tensor,
    num_iters: int = 2,
    normalize: bool = True,
) -> Tuple[Tensor, Tensor]:
    """Route children to parents (Algorithm 2).

    Args:
        x: children ``[b, i, d]``.
        activations: f(a), in 0..1, ``[b, i]``.
        beta_use, beta_ign: ``[i, j]``, or of each image ``[b, i, j]``.
        vote_scale, vote_weight, vote_bias: the network F, ``[j, d]``, ``[d, e]``, ``[j, e]``.
        pred_weight, pred_scale, pred_bias: the network G, which predicts children, ``[e, d]``, ``[j, d]``, ``[j, d]``.
        score_weight, score_bias: the network S, which scores predictions, ``[i, j]``, or ``[1, j]`` for all children.
        num_iters: iterations.
        normalize: LayerNorm of the parents, without weights. Parents of one dimension must have none.

    Returns:
        poses ``[b, j, e]`` and the credit ``[b, j, i]``, of any sign.
    """
    scaled = x * x.shape[1] ** -0.5
    active = upcast_half(activations).unsqueeze(2)  # [b, i, 1]
    used = active / vote_scale.shape[0]  # D_use of even shares
    credit = beta_use * used - beta_ign * (active - used)  # φ: [b, i, j]
    parents = _sum_of_votes(scaled, credit, vote_scale, vote_weight, vote_bias)
    for _ in range(num_iters - 1):
        # E-step: how well each parent predicts each child
        expected = _norm(parents).to(x.dtype) if normalize else parents.to(x.dtype)
        predicted = torch.matmul(expected, pred_weight) * pred_scale + pred_bias  # G: [b, j, d]
        likeness = upcast_half(torch.matmul(x, predicted.transpose(1, 2)))  # [b, i, j]; x is not scaled here
        # log σ(s) = -softplus(-s), which Core ML can read
        shares = torch.softmax(-F.softplus(-(likeness * score_weight + score_bias)), dim=2)
        # D-step
        used = active * shares
        ignored = active - used
        # M-step
        credit = beta_use * used - beta_ign * ignored
        parents = _sum_of_votes(scaled, credit, vote_scale, vote_weight, vote_bias)
    poses = _norm(parents) if normalize else parents
    return poses.to(x.dtype), credit.transpose(1, 2).to(x.dtype)


def _norm(parents: Tensor) -> Tensor:
    return F.layer_norm(upcast_half(parents), [parents.shape[2]])


def _sum_of_votes(
    scaled: Tensor, credit: Tensor, vote_scale: Tensor, vote_weight: Tensor, vote_bias: Tensor
) -> Tensor:
    """``Σ_i φ_ij V_ij``: children ``[b, i, d]`` and credit ``[b, i, j]`` to parents ``[b, j, e]``."""
    credited = torch.matmul(credit.to(scaled.dtype).transpose(1, 2), scaled)  # [b, j, d]
    return torch.matmul(credited * vote_scale, vote_weight) + credit.sum(dim=1).unsqueeze(2) * vote_bias


class _OfEachChild(nn.Module):
    """A learned number for each pair of child and parent, whatever the child is."""

    def __init__(self, in_caps: int, out_caps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_caps, out_caps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


class HeinsenRouting(RoutingLayer):
    """A capsule layer with Heinsen's routing.

    With a fixed number of children, each has its own weights of scores and benefits. With any number, all children
    share them, and benefits are linear functions of the child.

    Args:
        in_caps: number of children; 0 allows any number.
        in_dim: pose dimension of the children.
        out_caps, out_dim: number of parents, and their pose dimension.
        num_iters: routing iterations.

    The parents have a LayerNorm without weights, unless they are of one dimension.

    Raises:
        ValueError: an argument is out of range.
        AssertionError: in ``forward``, the input has another number of channels or children.
    """

    def __init__(self, in_caps: int, in_dim: int, out_caps: int, out_dim: int, num_iters: int = 2) -> None:
        super().__init__()
        at_least(0, in_caps=in_caps)
        at_least(1, in_dim=in_dim, out_caps=out_caps, out_dim=out_dim, num_iters=num_iters)
        self.in_caps, self.in_dim, self.out_caps, self.out_dim = in_caps, in_dim, out_caps, out_dim
        self.num_iters = num_iters
        rows = max(1, in_caps)
        self.act_weight = nn.Parameter(torch.empty(rows, in_dim))
        self.act_bias = nn.Parameter(torch.empty(rows))
        self.vote_scale = nn.Parameter(torch.empty(out_caps, in_dim))
        self.weight = nn.Parameter(torch.empty(in_dim, out_dim))
        self.vote_bias = nn.Parameter(torch.empty(out_caps, out_dim))
        self.pred_weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.pred_scale = nn.Parameter(torch.empty(out_caps, in_dim))
        self.pred_bias = nn.Parameter(torch.empty(out_caps, in_dim))
        self.score_weight = nn.Parameter(torch.empty(rows, out_caps))
        self.score_bias = nn.Parameter(torch.empty(rows, out_caps))
        self.beta_use: nn.Module = _OfEachChild(in_caps, out_caps) if in_caps else nn.Linear(in_dim, out_caps)
        self.beta_ign: nn.Module = _OfEachChild(in_caps, out_caps) if in_caps else nn.Linear(in_dim, out_caps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in the release."""
        for weight in (self.vote_scale, self.pred_scale):
            nn.init.normal_(weight)
        for weight in (self.act_weight, self.weight):
            nn.init.normal_(weight, std=2.0 * self.in_dim**-0.5)
        nn.init.normal_(self.pred_weight, std=self.out_dim**-0.5)
        nn.init.normal_(self.score_weight, std=self.in_dim**-0.5)
        for bias in (self.act_bias, self.vote_bias, self.pred_bias, self.score_bias):
            nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Children ``[b, i, d]`` to parents ``[b, j, e]``."""
        return self._route(x)[0]

    @torch.jit.export
    @forward_method
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Children ``[b, i, d]`` to parents ``[b, j, e]`` and the credit ``[b, j, i]``, which is no share."""
        return self._route(x)

    def _route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        if self.in_caps > 0:
            torch._assert(x.shape[1] == self.in_caps, "wrong number of child capsules for this routing layer")
        torch._assert(x.shape[2] == self.in_dim, "wrong pose dimension for this routing layer")
        return self.with_couplings([x], self.num_iters)

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """:func:`heinsen_routing` of children ``[b, i, d]``; the credit is always there."""
        x = inputs[0]
        score = (x * self.act_weight).sum(dim=2) * x.shape[1] ** -0.5 + self.act_bias  # a: [b, i]
        poses, credit = heinsen_routing(
            x,
            torch.sigmoid(upcast_half(score)),
            self.beta_use(x),
            self.beta_ign(x),
            self.vote_scale,
            self.weight,
            self.vote_bias,
            self.pred_weight,
            self.pred_scale,
            self.pred_bias,
            self.score_weight,
            self.score_bias,
            num_iters,
            self.out_dim > 1,
        )
        return Routed([poses], [], credit)

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        return 1, inputs[0].shape[1], self.out_caps, self.in_dim, self.out_dim

    def extra_repr(self) -> str:
        children = self.in_caps or "any"
        return f"{children}x{self.in_dim} -> {self.out_caps}x{self.out_dim}, num_iters={self.num_iters}"
