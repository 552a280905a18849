"""Layers with self-routing: fully connected, and on a grid. Letters as in :mod:`capszoo.layers.self_routing`."""

from typing import ClassVar, List, Optional, Tuple, Type

import torch
from torch import Tensor, nn

from .._forward_methods import ForwardMethods, forward_method
from .._layout import out_size, windows
from .._modules import at_least
from ..engine import Engine, Reference, Routed, RoutingLayer
from .engines import VoteFree
from .routing import self_routing


class SelfRouting(RoutingLayer):
    """A fully connected capsule layer with self-routing: every child has separate weights.

    Args:
        in_caps, in_dim: number of children, and their pose dimension.
        out_caps: number of parents.
        out_dim: pose dimension of a parent; 0 for parents without poses (the paper's last layer).

    ``weight`` is ``[i, d, j]`` and ``bias`` ``[i, j]``; both start at zero (as in the release), so that all couplings
    start even. ``pose_weight`` is ``[i, d, j * e]``, Kaiming uniform with fan-in ``j * e * d`` (as in the release).

    Raises:
        ValueError: an argument is out of range.
        AssertionError: in ``forward``, the input has another number of channels or children.
    """

    engines: ClassVar[Tuple[Type[Engine], ...]] = (VoteFree, Reference)
    pose_weight: Optional[Tensor]

    def __init__(self, in_caps: int, in_dim: int, out_caps: int, out_dim: int = 0) -> None:
        super().__init__()
        at_least(1, in_caps=in_caps, in_dim=in_dim, out_caps=out_caps)
        at_least(0, out_dim=out_dim)
        self.in_caps, self.in_dim, self.out_caps, self.out_dim = in_caps, in_dim, out_caps, out_dim
        self.weight = nn.Parameter(torch.empty(in_caps, in_dim, out_caps))
        self.bias = nn.Parameter(torch.empty(in_caps, out_caps))
        if out_dim:
            self.pose_weight = nn.Parameter(torch.empty(in_caps, in_dim, out_caps * out_dim))
        else:
            self.register_parameter("pose_weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        if self.pose_weight is not None:
            bound = (6.0 / (self.in_dim * self.out_caps * self.out_dim)) ** 0.5
            nn.init.uniform_(self.pose_weight, -bound, bound)

    def forward(self, poses: Tensor, activations: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
        """Children ``[b, i, d]`` and ``[b, i]`` to activations ``[b, j]`` and poses ``[b, j, e]`` (or None)."""
        active, parent_poses, _ = self._route(poses, activations)
        return active, parent_poses

    @torch.jit.export
    @forward_method
    def route(self, poses: Tensor, activations: Tensor) -> Tuple[Tensor, Optional[Tensor], Tensor]:
        """Like :meth:`forward`, but also return the couplings ``[b, j, i]``."""
        return self._route(poses, activations)

    def _route(self, poses: Tensor, activations: Tensor) -> Tuple[Tensor, Optional[Tensor], Tensor]:
        torch._assert(poses.shape[1] == self.in_caps, "wrong number of child capsules for this routing layer")
        torch._assert(poses.shape[2] == self.in_dim, "wrong pose dimension for this routing layer")
        routed = self.compute([poses, activations], 1, True)
        parent_poses: Optional[Tensor] = None
        if self.pose_weight is not None:
            parent_poses = routed.poses[0]
        couplings = routed.couplings
        assert couplings is not None
        return routed.activations[0], parent_poses, couplings

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """:func:`self_routing` of poses ``[b, i, d]`` and activations ``[b, i]``; no poses if the parents have none."""
        active, poses, couplings = self_routing(
            inputs[0], inputs[1], self.weight, self.bias, self.pose_weight
        )
        if poses is None:
            none: List[Tensor] = []
            return Routed(none, [active], couplings)
        return Routed([poses], [active], couplings)

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        return 1, self.in_caps, self.out_caps, self.in_dim, max(1, self.out_dim)

    def extra_repr(self) -> str:
        return f"{self.in_caps}x{self.in_dim} -> {self.out_caps}x{self.out_dim}"


class ConvSelfRouting(ForwardMethods):
    """A convolutional capsule layer with self-routing: ``k x k`` positions of every child type to each parent type.

    The weights are shared over output positions, not over the positions of the window.

    Args:
        in_caps, in_dim: child types, and pose dimension of a child.
        out_caps, out_dim: parent types, and pose dimension of a parent, at least 1.
        kernel_size, stride, padding: of the window; the padding consists of children with activation zero.

    A map is ``[b, caps * (d + 1), h, w]``: the poses, channel = capsule * d + dimension, then the activations.
    ``window`` is the :class:`SelfRouting` of every window, its children ordered ``(row * k + column) * types + type``.

    Raises:
        ValueError: an argument is out of range.
        AssertionError: in ``forward``, the input has another number of channels or children.
    """

    def __init__(
        self,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        kernel_size: int = 3,
        stride: int = 1,
        padding: int = 0,
    ) -> None:
        super().__init__()
        if out_dim < 1:
            raise ValueError(f"parents on a grid need poses: out_dim must be at least 1, not {out_dim}")
        at_least(1, in_caps=in_caps, kernel_size=kernel_size, stride=stride)
        at_least(0, padding=padding)
        self.in_caps, self.in_dim, self.out_caps, self.out_dim = in_caps, in_dim, out_caps, out_dim
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.window = SelfRouting(kernel_size * kernel_size * in_caps, in_dim, out_caps, out_dim)

    def grid_size(self, height: int, width: int) -> Tuple[int, int]:
        """Output rows and columns for an input of this size."""
        window = (self.kernel_size, self.stride, self.padding)
        return out_size(height, *window), out_size(width, *window)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, in_caps * (d + 1), h, w]`` to ``[b, out_caps * (e + 1), h', w']``."""
        return self._route(x)[0]

    @torch.jit.export
    @forward_method
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Like :meth:`forward`, but also return the couplings ``[b, h', w', j, k*l*i]``."""
        return self._route(x)

    def _route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        torch._assert(
            x.shape[1] == self.in_caps * (self.in_dim + 1), "wrong number of channels for this routing layer"
        )
        channels = x.shape[1]
        x = windows(x.permute(0, 2, 3, 1), self.kernel_size, self.stride, self.padding)
        h, w = x.shape[1], x.shape[2]
        x = x.reshape(x.shape[0], h, w, self.kernel_size * self.kernel_size, channels)
        split = self.in_caps * self.in_dim
        poses = x[..., :split].reshape(-1, self.window.in_caps, self.in_dim)  # [b*h'*w', k*l*i, d]
        active, parents, couplings = self.window.route(poses, x[..., split:].reshape(-1, self.window.in_caps))
        assert parents is not None
        out = torch.cat([parents.flatten(1), active], dim=1)  # [b*h'*w', j*(e+1)]
        out = out.reshape(-1, h, w, self.out_caps * (self.out_dim + 1)).permute(0, 3, 1, 2)
        return out, couplings.reshape(-1, h, w, self.out_caps, self.window.in_caps)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
