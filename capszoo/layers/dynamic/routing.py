"""Dynamic routing of votes, and of children whose transforms are shared over the grid: the reference.

Symbols and letters as in :mod:`capszoo.layers.dynamic`; line numbers are those of Procedure 1 of Sabour et al. (2017).

What differs from the paper without changing the result:

* The logits are never accumulated: after t iterations b_ij is ``<û_ij, v_j^1> + … + <û_ij, v_j^t>``, which is
  ``<û_ij, v_j^1 + … + v_j^t>``. The poses are summed instead, which have ``i / e`` times fewer elements.
* With zero logits the first iteration is the sum of the votes, divided by the number of parents (of children, where
  the softmax runs over children).
* The logits are not updated after the last iteration (Procedure 1 does, and drops the result).
"""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._precision import upcast_half
from ..squash import squash

torch.fx.wrap("upcast_half")
torch.fx.wrap("_divided_in_float16")


def check_arguments(num_iters: int, softmax_over: str) -> None:
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1, not {num_iters}")
    if softmax_over != "parents" and softmax_over != "children":
        raise ValueError(f"softmax_over must be 'parents' or 'children', not {softmax_over}")


def dynamic_routing(
    votes: Tensor,
    num_iters: int,
    softmax_over: str = "parents",
    start: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Route votes to parents (Procedure 1).

    Args:
        votes: ``[b, j, i, e]``, the vote of child ``i`` for parent ``j``. Any strides; a contiguous pose (last axis)
            is fastest.
        num_iters: iterations, at least 1.
        softmax_over: the axis over which the couplings sum to 1: ``"parents"`` (Sabour et al., Eq. 3) or
            ``"children"`` (Li et al., appendix A.i).
        start: ``[j, i]``, the logits of the first iteration; zero where absent.
        bias: ``[j, e]``, added to the sums of votes before the squash (Rajasegaran et al. 2019, release); none where
            absent.

    Returns:
        poses ``[b, j, e]``, squashed, and the couplings ``[b, j, i]`` of the last iteration.

    Raises:
        ValueError: ``num_iters`` is below 1 or ``softmax_over`` is neither word.
    """
    check_arguments(num_iters, softmax_over)
    axis = 1 if softmax_over == "parents" else 2
    # line 4 with b = 0: uniform, over the parents or over the children
    couplings = votes.new_ones((1, 1, 1)) / votes.shape[axis]  # [1, 1, 1]
    if start is None:
        # line 5: [b, j, e]; via the mean, because a sum of many float16 votes could overflow
        total = votes.mean(dim=2) * (votes.shape[2] / votes.shape[axis])
    else:
        couplings = torch.softmax(upcast_half(start), dim=axis - 1).to(votes.dtype).unsqueeze(0)  # [1, j, i]
        total = torch.matmul(couplings.unsqueeze(2), votes).squeeze(2)
    if bias is not None:
        total = total + bias
    poses = squash(total)  # line 6: [b, j, e]
    pose_sum = poses
    for t in range(1, num_iters):
        # line 7, all iterations so far at once: b_ij = <û_ij, v^1 + … + v^t>
        logits = upcast_half(torch.matmul(votes, pose_sum.unsqueeze(3)).squeeze(3))  # [b, j, i]
        if start is not None:
            logits = logits + start
        couplings = torch.softmax(logits, dim=axis).to(votes.dtype)  # line 4: [b, j, i]
        total = torch.matmul(couplings.unsqueeze(2), votes).squeeze(2)  # line 5: [b, j, e]
        if bias is not None:
            total = total + bias
        poses = squash(total)  # line 6
        if t < num_iters - 1:
            pose_sum = pose_sum + poses
    return poses, couplings.expand(votes.shape[0], votes.shape[1], votes.shape[2])


def shared_dynamic_routing(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    num_iters: int,
    softmax_over: str = "children",
    start: Optional[Tensor] = None,
    need_couplings: bool = False,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Dynamic routing from capsules whose transforms are shared over the grid, without forming votes.

    The vote of the child of type ``g`` at position ``p`` for parent ``j`` is ``W_gj u_gp + B_gj``. Two identities
    replace every operation on votes (``u'`` is ``u`` with a 1 appended, for the bias):

    * ``<W_gj u_gp + B_gj, v> = <u'_gp, [W_gjᵀ v, <B_gj, v>]>``: agreement is measured in the children's space;
    * ``sum_p c_gpj (W_gj u_gp + B_gj) = W_gj sum_p c_gpj u_gp + B_gj sum_p c_gpj``: children are summed before they
      are transformed.

    Args:
        x: ``[b, g, d, p]``.
        weight: ``[j, e, g * d]``.
        bias: ``[j, e, g]``.
        num_iters: iterations, at least 1.
        softmax_over: ``"children"`` (all ``g * p`` of them, Li et al., appendix A.i) or ``"parents"``.
        start: ``[j, g * p]``, the logits of the first iteration; zero where absent.
        need_couplings: whether to return the couplings.

    Returns:
        poses ``[b, j, e]``, squashed, and the couplings ``[b, j, g * p]`` of the last iteration, or None.

    Raises:
        ValueError: ``num_iters`` is below 1 or ``softmax_over`` is neither word.
    """
    check_arguments(num_iters, softmax_over)
    b, g, d, p = x.shape[0], x.shape[1], x.shape[2], x.shape[3]
    j, e = weight.shape[0], weight.shape[1]
    over_children = softmax_over == "children"
    children = F.pad(x, [0, 0, 0, 1], value=1.0)  # u': [b, g, d+1, p]
    # [j, e, g*(d+1)]
    transforms = torch.cat([weight.reshape(j, e, g, d), bias.unsqueeze(3)], dim=3).flatten(2)
    couplings: Optional[Tensor] = None
    poses = x.new_zeros((1, 1, 1))
    pose_sum = poses
    first = 0
    if start is None:
        # line 4 with b = 0, line 5: sum over the grid, then one product [b, g*(d+1)] @ [g*(d+1), j*e]
        first = 1
        count = g * p if over_children else j
        total = F.linear(children.mean(dim=3).flatten(1), transforms.flatten(0, 1))
        poses = squash(total.reshape(-1, j, e) * (p / count))  # line 6: [b, j, e]
        pose_sum = poses
        if need_couplings:
            couplings = (poses.new_ones((1, 1, 1)) / count).expand(b, j, g * p)
    for t in range(first, num_iters):
        if t == 0:
            assert start is not None
            # line 4: [1, g*p, j], the same for the whole batch
            share = torch.softmax(upcast_half(start), dim=1 if over_children else 0).t().unsqueeze(0)
        else:
            share = _shared_share(children, transforms, pose_sum, start, over_children)  # lines 7 and 4
        # line 5: sum_p c u', then transformed
        sums = torch.matmul(children, share.to(x.dtype).reshape(-1, g, p, j))  # [b, g, d+1, j]
        rows = sums.permute(3, 0, 1, 2).flatten(2).contiguous()
        total = torch.bmm(rows, transforms.transpose(1, 2))  # [j, b, e]
        if over_children:
            mass = sums[:, :, d].sum(dim=1)  # sum_gp c: [b, j]
            total = total / mass.t().unsqueeze(2)
        poses = squash(total.transpose(0, 1))  # line 6: [b, j, e]
        if need_couplings and t == num_iters - 1:
            if over_children:
                share = share / share.sum(dim=1, keepdim=True)
            couplings = share.transpose(1, 2).to(poses.dtype).expand(b, j, g * p)
        pose_sum = poses if t == 0 else pose_sum + poses
    return poses, couplings


def _shared_share(
    children: Tensor, transforms: Tensor, pose_sum: Tensor, start: Optional[Tensor], over_children: bool
) -> Tensor:
    """Couplings ``[b, g*p, j]``; for ``over_children`` not yet divided by their sum over the children.

    In float16 they are divided, because sums over many children overflow.

    Args:
        children: ``[b, g, d+1, p]``.
        transforms: ``[j, e, g*(d+1)]``.
        pose_sum: ``[b, j, e]``, the poses of all iterations so far, added up.
        start: as in :func:`shared_dynamic_routing`.
        over_children: whether the softmax runs over the children.
    """
    g, size, p, j = children.shape[1], children.shape[2], children.shape[3], transforms.shape[0]
    keys = torch.bmm(pose_sum.transpose(0, 1), transforms)  # [Wᵀ v, <B, v>]: [j, b, g*(d+1)]
    keys = keys.reshape(j, -1, g, size).permute(1, 2, 3, 0)  # [b, g, d+1, j]
    agreement = torch.matmul(children.transpose(2, 3), keys).reshape(-1, g * p, j)
    logits = upcast_half(agreement)
    if start is not None:
        logits = logits + start.t()
    if over_children:
        # in place; the division is left to the sums, whose row of ones has the denominator
        # (maximum in two steps: ONNX Runtime is slow at long reductions over a middle axis)
        peak = logits.detach().reshape(-1, g, p, j).amax(dim=2).amax(dim=1)
        return _divided_in_float16(logits.sub_(peak.unsqueeze(1)).exp_(), agreement)
    return torch.softmax(logits, dim=2)


def _divided_in_float16(share: Tensor, product: Tensor) -> Tensor:
    """``share``, ``[b, i, j]``; if ``product`` is float16, divided by its sum over the children.

    A leaf for FX, whose tracer cannot branch on a dtype. ``product`` is a matrix product: it has the dtype of autocast.
    """
    if product.dtype == torch.float16:
        return share / share.sum(dim=1, keepdim=True)
    return share
