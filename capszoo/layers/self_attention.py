"""Self-attention routing: each child's coupling follows from the agreement of its vote with all votes for a parent.

Paper: Mazzia, Salvetti, Chiaberge, "Efficient-CapsNet: capsule network with self-attention routing" (2021,
arXiv:2101.12491), section 3.2. There are no iterations.

============ ============================================================
symbol       here
============ ============================================================
u_i          ``x``, the children
û_ij = W u_i ``votes``
A_j          ``û_j û_jᵀ / √e``, never formed: only its row sums are needed
c_ij         ``couplings``, softmax of the row sums over the parents
b_ij         ``bias``, a learned prior that is added to the couplings
s_j          ``total``, the weighted sum of votes
============ ============================================================

Letters: ``b`` batch, ``i`` children, ``j`` parents, ``d`` child pose, ``e`` parent pose.

A row sum of A_j is ``Σ_k <û_ij, û_kj> / √e = <û_ij, Σ_k û_kj> / √e``: one sum and one matrix-vector product.

Deviations: logits and softmax are float32 for half-precision votes; under autocast, sums of votes have its type. The
transforms start He normal with all ``i * d`` dimensions of the children as fan-in (our choice).
"""

from typing import List, Optional, Tuple

import torch
from torch import Tensor, nn

from ._forward_methods import forward_method
from ._modules import at_least
from ._precision import upcast_half
from .engine import Routed, RoutingLayer
from .squash import exponential_squash

__all__ = ["SelfAttentionRouting", "self_attention_routing"]

torch.fx.wrap("upcast_half")


def self_attention_routing(
    votes: Tensor, bias: Optional[Tensor] = None, attention: bool = True
) -> Tuple[Tensor, Tensor]:
    """Route votes to parents by self-attention.

    Args:
        votes: ``[b, j, i, e]``, the vote of child ``i`` for parent ``j``.
        bias: ``[j, i]``, added to the couplings; zero where absent.
        attention: False gives every parent the same coupling, 1 over their number.

    Returns:
        poses ``[b, j, e]``, squashed by :func:`exponential_squash`, and the couplings ``[b, j, i]``, without the bias.
    """
    votes_up = upcast_half(votes)
    if attention:
        vote_sum = votes_up.sum(dim=2)  # Σ_k û_kj: [b, j, e]
        agreement = torch.matmul(votes_up, vote_sum.unsqueeze(3)).squeeze(3)  # rows of û_j û_jᵀ: [b, j, i]
        couplings = torch.softmax(agreement * votes.shape[3] ** -0.5, dim=1)  # over the parents
    else:
        couplings = torch.ones_like(votes_up[:, :, :, 0]) / votes.shape[1]
    weights = couplings if bias is None else couplings + bias
    total = torch.matmul(weights.to(votes_up.dtype).unsqueeze(2), votes_up).squeeze(2)  # s_j: [b, j, e]
    return exponential_squash(total).to(votes.dtype), couplings.to(votes.dtype)


class SelfAttentionRouting(RoutingLayer):
    """A fully connected capsule layer with self-attention routing: each child has its own transform to every parent.

    Args:
        in_caps, in_dim: number of children, and their pose dimension.
        out_caps, out_dim: number of parents, and their pose dimension.
        attention: False holds the couplings even (see :func:`self_attention_routing`); ``bias`` still adds to them.

    ``weight`` is ``[i, d, j * e]``, as in :class:`DynamicRouting`; ``bias`` is ``[j, i]`` and starts at zero.

    Raises:
        ValueError: an argument is out of range.
        AssertionError: in ``forward``, the input has another number of channels or children.
    """

    def __init__(
        self, in_caps: int, in_dim: int, out_caps: int, out_dim: int, attention: bool = True
    ) -> None:
        super().__init__()
        at_least(1, in_caps=in_caps, in_dim=in_dim, out_caps=out_caps, out_dim=out_dim)
        self.in_caps, self.in_dim, self.out_caps, self.out_dim = in_caps, in_dim, out_caps, out_dim
        self.attention = attention
        self.weight = nn.Parameter(torch.empty(in_caps, in_dim, out_caps * out_dim))
        self.bias = nn.Parameter(torch.empty(out_caps, in_caps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=(2.0 / (self.in_caps * self.in_dim)) ** 0.5)
        nn.init.zeros_(self.bias)

    @torch.jit.export
    @forward_method
    def votes(self, x: Tensor) -> Tensor:
        """Children ``[b, i, d]`` to votes ``[b, j, i, e]``, a view of ``[i, b, j, e]``."""
        return self._votes(x)

    def _votes(self, x: Tensor) -> Tensor:
        votes = torch.bmm(x.transpose(0, 1), self.weight)  # [i, b, d] @ [i, d, j*e] -> [i, b, j*e]
        return votes.reshape(self.in_caps, -1, self.out_caps, self.out_dim).permute(1, 2, 0, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Children ``[b, i, d]`` to parents ``[b, j, e]``; their lengths lie in [0, 1]."""
        return self._route(x)[0]

    @torch.jit.export
    @forward_method
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Children ``[b, i, d]`` to parents ``[b, j, e]`` and the couplings ``[b, j, i]`` (sum 1 over ``j``)."""
        return self._route(x)

    def _route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        torch._assert(x.shape[1] == self.in_caps, "wrong number of child capsules for this routing layer")
        torch._assert(x.shape[2] == self.in_dim, "wrong pose dimension for this routing layer")
        return self.with_couplings([x], 1)

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """:func:`self_attention_routing` of children ``[b, i, d]``."""
        poses, couplings = self_attention_routing(self._votes(inputs[0]), self.bias, self.attention)
        return Routed([poses], [], couplings)

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        return 1, self.in_caps, self.out_caps, self.in_dim, self.out_dim

    def extra_repr(self) -> str:
        text = f"{self.in_caps}x{self.in_dim} -> {self.out_caps}x{self.out_dim}"
        return text if self.attention else f"{text}, attention=False"
