"""The paper's procedures: one iteration, line by line (Procedure 1), and all iterations of one layer (Procedure 2)."""

import math
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._precision import upcast_half
from ..engine import Routed

torch.fx.wrap("upcast_half")


def agreement_of(votes: Tensor, parents: Tensor) -> Tensor:
    """Dot product of every vote ``[n, j, i, e]`` with its parent ``[n, j, e]``: ``[n, j, i]`` (line 3)."""
    return torch.matmul(votes, parents.unsqueeze(3)).squeeze(3)


def couplings_of(agreement: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax of ``[n, j, i]`` over the parents, in float32 for half precision (line 4)."""
    return upcast_half(agreement).softmax(dim=1).to(dtype)


def weighted_sum(votes: Tensor, weights: Tensor) -> Tensor:
    """Votes ``[n, j, i, e]`` weighted by ``[n, j, i]`` and summed over the children: ``[n, j, e]`` (line 5)."""
    return torch.matmul(weights.unsqueeze(2), votes).squeeze(2)


def iteration(votes: Tensor, parents: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    """One iteration of Procedure 1, without the LayerNorm.

    Args:
        votes: ``[n, j, i, e]``.
        parents: poses of the previous iteration, ``[n, j, e]``.
        scale: of the agreement.

    Returns:
        Sums of votes ``[n, j, e]`` and couplings ``[n, j, i]``, which sum to 1 over ``j``.
    """
    couplings = couplings_of(agreement_of(votes, parents * scale), votes.dtype)
    return weighted_sum(votes, couplings), couplings


def normalised(couplings: Tensor) -> Tensor:
    """Couplings ``[..., j, i]``, normalised for each parent to sum to 1 over the children ``i``."""
    return couplings / couplings.sum(dim=-1, keepdim=True).clamp(min=1e-30)


class Procedure:
    """All iterations of one layer, in steps that a layer (the reference) or an engine has as methods.

    Iteration s reads its children's iteration s-1 (Procedure 2, line 8), the first reads iteration 1 (line 6).
    """

    #: whether the first iteration is a sum of votes: the parents start at zero, and there are no activations
    folds: bool
    #: whether capsules have activations (ablation C)
    activations: bool

    def first_poses(self, children: Tensor) -> Tensor:
        """Poses ``[n, j, e]`` after an iteration in which all parents are zero: no vote is formed."""
        raise NotImplementedError

    def read_children(self, inputs: List[Tensor], read: int) -> List[Tensor]:
        """Tensors shared by all iterations over the children's iteration ``read`` (from 0), such as the votes."""
        raise NotImplementedError

    def first_parents(self, inputs: List[Tensor], children: List[Tensor]) -> Tensor:
        """The parents before the first iteration, ``[n, j, e]``, where it is no sum of votes."""
        raise NotImplementedError

    def iterate(
        self, children: List[Tensor], parents: Tensor, fresh: bool, need_couplings: bool
    ) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """Procedure 1.

        Args:
            children: from :meth:`read_children`.
            parents: poses of the previous iteration, ``[n, j, e]``.
            fresh: whether the iteration before had other children.
            need_couplings: return the couplings too.

        Returns:
            Poses ``[n, j, e]``; couplings ``[n, j, i]``, undefined unless requested; activations ``[n, j]`` or None.
        """
        raise NotImplementedError

    def all_iterations(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """Poses, activations and the last couplings of n independent routings.

        Args:
            inputs: the children's poses after each of their iterations, then (ablation C) their activations.
            num_iters: iterations.
            need_couplings: whether to return the last couplings.
        """
        layers = len(inputs) // 2 if self.activations else len(inputs)
        poses: List[Tensor] = []
        active: List[Tensor] = []
        couplings: Optional[Tensor] = None
        children: List[Tensor] = []
        last = -1
        for s in range(num_iters):  # from 0
            if s == 0 and self.folds:
                poses.append(self.first_poses(inputs[0]))
            else:
                read = min(max(s - 1, 0), layers - 1)
                fresh = read != last
                if fresh:
                    last, children = read, self.read_children(inputs, read)
                parents = poses[s - 1] if s > 0 else self.first_parents(inputs, children)
                new, couplings, activation = self.iterate(
                    children, parents, fresh, need_couplings and s == num_iters - 1
                )
                poses.append(new)
                if activation is not None:
                    active.append(activation)
        return Routed(poses, active, couplings if need_couplings else None)


def idpa_routing(
    votes: Tensor,
    num_iters: int = 2,
    parents: Optional[Tensor] = None,
    scale_agreement: bool = True,
    norm_weight: Optional[Tensor] = None,
    norm_bias: Optional[Tensor] = None,
    layer_norm: bool = True,
    eps: float = 1e-5,
) -> Tuple[Tensor, Tensor]:
    """Route the votes of one layer with fixed children (Procedure 1, ``num_iters`` times).

    The layers route across layers (:class:`Procedure`).

    Args:
        votes: ``[b, j, i, e]``.
        num_iters: iterations, at least 1.
        parents: initial poses, ``[b, j, e]``; zero if None.
        scale_agreement: divide the agreement by sqrt(e).
        norm_weight, norm_bias: affine part of the LayerNorm, ``[e]``.
        layer_norm: False omits the LayerNorm (ablation A).
        eps: of the LayerNorm.

    Returns:
        Poses ``[b, j, e]``, and the couplings of the last iteration ``[b, j, i]``, which sum to 1 over ``j``.

    Raises:
        ValueError: ``num_iters`` is below 1.
    """
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1, not {num_iters}")
    num_parents, e = votes.shape[1], votes.shape[3]
    scale = 1.0 / math.sqrt(e) if scale_agreement else 1.0
    couplings = torch.full_like(votes[..., 0], 1.0 / num_parents)
    poses = parents
    for _ in range(num_iters):
        if poses is None:
            sums = votes.sum(dim=2) / num_parents  # parents at zero: uniform couplings
        else:
            sums, couplings = iteration(votes, poses, scale)  # lines 3 to 5
        poses = F.layer_norm(sums, (e,), norm_weight, norm_bias, eps) if layer_norm else sums  # line 6
    assert poses is not None
    return poses, couplings
