"""Capsule layers with IDPA routing, convolutional and fully connected, and the norm before them."""

from typing import Any, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._layout import out_size, split_axis, windows
from .._modules import at_least, positive
from ..engine import Reference
from .base import IDPALayer
from .engines import Blocked, Chunked, Fused, Masked, Native
from .routing import normalised

torch.fx.wrap("split_axis")


class CapsuleNorm(nn.Module):
    """LayerNorm over the pose of every capsule of a feature map: ``[b, i*d, h, w]`` to the same shape.

    Channel = capsule * d + dimension. The result is channels-last, the layout that the capsule layers read.

    Args:
        pose_dim: dimension d of a capsule.
        eps: of the LayerNorm.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, pose_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        at_least(1, pose_dim=pose_dim)
        positive(eps=eps)
        self.pose_dim = pose_dim
        self.norm = nn.LayerNorm(pose_dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = split_axis(
            x.permute(0, 2, 3, 1), 3, [x.shape[1] // self.pose_dim, self.pose_dim]
        )  # [b, h, w, i, d]
        return self.norm(x).flatten(3).permute(0, 3, 1, 2)


class ConvIDPA(IDPALayer):
    """Convolutional capsule layer with IDPA routing.

    Args:
        in_caps: capsule types of the children.
        out_caps: capsule types of the parents.
        in_dim: pose dimension of the children.
        out_dim: pose dimension of the parents; defaults to that of the children.
        kernel_size, stride, padding: of the window of child positions that each parent sees.
        num_iters: iterations of :meth:`forward`; :class:`IDPAStack` has a separate number.
        pose: ``"matrix"`` (vote = pose·W, O(d) weights a pair) or ``"vector"`` (a whole matrix a pair).
        scale_agreement: divide the agreement by sqrt(out_dim).
        parent_init: parents before the first iteration: ``"zero"``, ``"random"`` (drawn at construction, saved with the
            weights) or ``"learned"`` (a parameter that starts at zero), footnote 1 of the paper.
        layer_norm: False omits the LayerNorm (ablation A).
        activations: capsules have activations as in EM routing (ablation C). The paper only names this. Our choice:
            a child's activation multiplies its couplings, ``R = r * a``; the pose is
            ``LayerNorm(sum R v)``; and a parent's activation is ``sigmoid(beta_a - cost)`` with the cost
            ``(beta_v + mean log sigma) * sum R * parents / children``, where sigma is the votes' standard deviation
            under R. With this scale, the sigmoid does not start saturated, whatever the number of children.
        drop: dropout of the sum of votes, before the LayerNorm.
        eps: of the LayerNorm.

    Shapes: ``[b, in_caps*in_dim, h, w]`` to ``[b, out_caps*out_dim, h', w']``, channel = capsule * dim + dimension
    (matrix poses row by row). ``weight`` is ``[j, r, i, q, k, l]``, the first iteration's convolution unflattened.

    Raises:
        ValueError: an argument is out of range.
        AssertionError: in ``forward``, a layer with activations.
        RuntimeError: in ``forward``, another number of channels.
    """

    engines = (Chunked, Fused, Native, Blocked, Reference)

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int = 16,
        out_dim: Optional[int] = None,
        kernel_size: int = 3,
        stride: int = 1,
        padding: int = 0,
        **options: Any,
    ) -> None:
        at_least(1, in_caps=in_caps, kernel_size=kernel_size, stride=stride)
        at_least(0, padding=padding)
        super().__init__(in_caps * kernel_size * kernel_size, out_caps, in_dim, out_dim, **options)
        self.in_caps = in_caps
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding
        shape = (out_caps, self.cols, in_caps, self.inner, kernel_size, kernel_size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def out_size(self, size: int) -> int:
        """Number of parents along an axis of ``size`` children."""
        return out_size(size, self.kernel_size, self.stride, self.padding)

    def forward(self, x: Tensor) -> Tensor:
        """Child map ``[b, i*d, h, w]`` to parent map ``[b, j*e, h', w']``, after ``num_iters`` iterations.

        Computes the layer alone, without activations: its children do not change between iterations.
        """
        torch._assert(not self.activations, "activations go through route()")
        grid = split_axis(x.permute(0, 2, 3, 1), 3, [self.in_caps, self.in_dim])
        poses, _, _ = self._route([grid], [], self.num_iters, False)
        return poses[len(poses) - 1].flatten(3).permute(0, 3, 1, 2)

    def _route(
        self, children: List[Tensor], activations: List[Tensor], num_iters: int, need_couplings: bool
    ) -> Tuple[List[Tensor], List[Tensor], Optional[Tensor]]:
        height = self.out_size(children[0].shape[1])
        width = self.out_size(children[0].shape[2])
        rows, active_rows, c = self.compute(children + activations, num_iters, need_couplings)
        poses: List[Tensor] = []
        for row in rows:
            poses.append(row.reshape(-1, height, width, self.out_caps, self.out_dim))
        active: List[Tensor] = []
        for row in active_rows:
            active.append(row.reshape(-1, height, width, self.out_caps))
        couplings: Optional[Tensor] = None
        if c is not None:
            shape = [-1, height, width, self.out_caps, self.kernel_size * self.kernel_size, self.in_caps]
            couplings = c.reshape(shape)
        return poses, active, couplings

    def even_couplings(self, poses: Tensor) -> Tensor:
        """The couplings 1/j of an iteration that is a sum of votes: ``[b, h', w', j, k*l, i]``, sized by its poses."""
        b, h, w = poses.shape[0], poses.shape[1], poses.shape[2]
        even = poses.new_full([1], 1.0 / self.out_caps)
        return even.expand(b, h, w, self.out_caps, self.kernel_size * self.kernel_size, self.in_caps)

    def share_among_children(self, share: Tensor, couplings: Tensor, height: int, width: int) -> Tensor:
        """Divide each parent's share among its children, in proportion to their couplings with it.

        Args:
            share: ``[b, n, h'*w'*j]``, for n totals (the classes).
            couplings: ``[b, h', w', j, k*l, i]``.
            height, width: of the children's grid.

        Returns:
            ``[b, n, height*width*i]``; without padding, sums over the last axis are preserved.
        """
        b, h, w, j, window, i = couplings.shape
        n = share.shape[1]
        of_parent = normalised(couplings.reshape(b, h * w, j, window * i))
        share = torch.matmul(share.reshape(b, n, h * w, j).transpose(1, 2), of_parent)  # [b, h'*w', n, k*l*i]
        share = share.reshape(b, h * w, n, window, i).permute(0, 2, 4, 3, 1).reshape(b, n * i * window, h * w)
        # [b, n*i, h, w]
        share = F.fold(share, (height, width), self.kernel_size, 1, self.padding, self.stride)
        return share.reshape(b, n, i, height * width).transpose(2, 3).flatten(2)

    def _sum_of_votes(self, children: Tensor) -> Tensor:
        p, q, j, r = self.rows, self.inner, self.out_caps, self.cols
        x = split_axis(children, 4, [p, q]).permute(0, 4, 1, 2, 3, 5)  # [b, p, h, w, i, q]
        x = x.flatten(0, 1).flatten(3).permute(0, 3, 1, 2)  # [b*p, i*q, h, w], channels last
        # [b*p, j*r, ...]
        x = F.conv2d(x, self.weight.flatten(2, 3).flatten(0, 1), None, self.stride, self.padding)
        x = x.permute(0, 2, 3, 1).flatten(1, 2)  # [b*p, h'*w', j*r]
        return x.reshape(-1, p, x.shape[1], j, r).permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(2)

    def _sum_of_votes_in_planes(self, children: Tensor) -> Tensor:
        """Compute ``_sum_of_votes`` with channels-first maps, the layout of exported convolutions.

        It transposes a matrix, then copies long runs: this takes less time than moving one row of a pose at a time.
        """
        p, q, j, r = self.rows, self.inner, self.out_caps, self.cols
        height, width = children.shape[1], children.shape[2]
        x = children.flatten(3).flatten(1, 2).transpose(1, 2)  # [b, i*p*q, h*w]
        x = x.reshape(-1, self.in_caps, p, q * height * width).transpose(1, 2)  # [b, p, i, q*h*w]
        x = x.reshape(-1, self.in_caps * q, height, width)
        weight = self.weight.flatten(2, 3).flatten(0, 1)
        x = F.conv2d(x, weight, None, self.stride, self.padding).flatten(2)  # [b*p, j*r, h'*w']
        places = x.shape[2]
        x = x.reshape(-1, p, j, r * places).transpose(1, 2)  # [b, j, p, r*h'*w']
        return x.reshape(-1, j * p * r, places).transpose(1, 2).reshape(-1, j, p * r)

    def _windows(self, x: Tensor) -> Tensor:
        """``[b, h, w, c]`` to ``[b*h'*w', k*l*c]``."""
        return windows(x, self.kernel_size, self.stride, self.padding).flatten(0, 2)

    def _child_poses(self, children: Tensor) -> Tensor:
        x = self._windows(children.flatten(3))  # [n, k*l*i*d]
        return x.reshape(-1, self.num_children, self.rows, self.inner)

    def _child_weight(self) -> Tensor:
        return self.weight.permute(4, 5, 2, 3, 0, 1).flatten(0, 2)

    def _child_grid(self, children: Tensor) -> Tensor:
        edge = self.padding
        return F.pad(children, [0, 0, 0, 0, edge, edge, edge, edge]) if edge > 0 else children

    @torch.jit.unused
    def positions(self, children: Tensor) -> int:
        return self.out_size(children.shape[1]) * self.out_size(children.shape[2])

    def _of_each_parent(self, activation: Tensor) -> Tensor:
        return self._windows(activation)

    def extra_repr(self) -> str:
        text = f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
        return f"in_caps={self.in_caps}, {super().extra_repr()}, {text}"


class FCIDPA(IDPALayer):
    """Fully connected capsule layer with IDPA routing; every child has separate weights.

    Args:
        in_caps: number of children, over all grid positions.
        out_caps: number of parents.
        in_dim, out_dim: pose dimensions.
        num_iters, pose, scale_agreement, parent_init, layer_norm, activations, drop, eps: as in :class:`ConvIDPA`.

    Shapes: ``[b, in_caps, in_dim]`` to ``[b, out_caps, out_dim]``. A grid ``[b, h, w, i, d]`` is read position
    by position: child = (row * width + column) * types + type. ``weight`` is ``[i, q, j, r]``, which is the first
    iteration's matrix ``[i*q, j*r]`` and, without a copy, the later iterations' batch of matrices.

    Raises:
        ValueError: an argument is out of range.
        AssertionError: children of another number or pose; in ``forward``, a layer with activations.
    """

    engines = (Masked, Fused, Native, Blocked, Reference)

    def __init__(self, in_caps: int, out_caps: int, *args: Any, **options: Any) -> None:
        at_least(1, in_caps=in_caps)
        super().__init__(in_caps, out_caps, *args, **options)
        self.in_caps = in_caps
        self.kernel_size = self.stride = 1
        self.weight = nn.Parameter(torch.empty(in_caps, self.inner, out_caps, self.cols))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Children ``[b, i, d]`` to parents ``[b, j, e]``, after ``num_iters`` iterations (without activations)."""
        torch._assert(not self.activations, "activations go through route()")
        poses, _, _ = self._route([x], [], self.num_iters, False)
        return poses[len(poses) - 1]

    def _route(
        self, children: List[Tensor], activations: List[Tensor], num_iters: int, need_couplings: bool
    ) -> Tuple[List[Tensor], List[Tensor], Optional[Tensor]]:
        x = children[0]
        torch._assert(x.shape[-1] == self.in_dim, "wrong pose dimension for this routing layer")
        numbers = x.flatten(1).shape[1]
        torch._assert(
            numbers == self.in_caps * self.in_dim, "wrong number of child capsules for this routing layer"
        )
        poses, active, couplings = self.compute(children + activations, num_iters, need_couplings)
        return poses, active, couplings

    def even_couplings(self, poses: Tensor) -> Tensor:
        """The couplings 1/j of an iteration that is a sum of votes: ``[b, j, i]``, sized by its poses."""
        return poses.new_full([1], 1.0 / self.out_caps).expand(poses.shape[0], self.out_caps, self.in_caps)

    def share_among_children(self, share: Tensor, couplings: Tensor) -> Tensor:
        """``[b, n, j]`` and couplings ``[b, j, i]`` to ``[b, n, i]`` (see the method of :class:`ConvIDPA`)."""
        return torch.bmm(share, normalised(couplings))

    def _sum_of_votes(self, children: Tensor) -> Tensor:
        x = children.reshape(-1, self.in_caps, self.rows, self.inner).transpose(1, 2)
        x = x.reshape(-1, self.in_caps * self.inner)  # [b*p, i*q]
        x = torch.mm(x, self.weight.flatten(2).flatten(0, 1))  # [b*p, j*r]
        return x.reshape(-1, self.rows, self.out_caps, self.cols).transpose(1, 2).flatten(2)

    def _child_poses(self, children: Tensor) -> Tensor:
        return children.reshape(-1, self.in_caps, self.rows, self.inner)

    def _child_weight(self) -> Tensor:
        return self.weight

    def _child_grid(self, children: Tensor) -> Tensor:
        return children.reshape(-1, 1, 1, self.in_caps, self.in_dim)

    @torch.jit.unused
    def positions(self, children: Tensor) -> int:
        return 1

    def _of_each_parent(self, activation: Tensor) -> Tensor:
        return activation.reshape(-1, self.in_caps)
