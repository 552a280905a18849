"""Layers with dynamic routing: fully connected, convolutional, and with transforms shared over the grid.

Symbols and letters as in :mod:`capszoo.layers.dynamic`.
"""

from typing import ClassVar, List, Optional, Tuple, Type

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._forward_methods import ForwardMethods, forward_method
from .._layout import out_size, split_axis, windows
from .._modules import at_least, positive, reset_start
from .._precision import upcast_half
from ..engine import Engine, Reference, Routed, RoutingLayer
from ..squash import squash
from .engines import Blocked, Native, SharedFloat32
from .routing import check_arguments, dynamic_routing, shared_dynamic_routing

torch.fx.wrap("split_axis")
torch.fx.wrap("upcast_half")


class _DynamicLayer(RoutingLayer):
    """Shared by the routing layers: settings, and the logits of the first iteration.

    ``start`` is None (zero), a buffer drawn once from U(0, 1) at construction (random; a fixed draw, so that
    evaluation is deterministic), or a parameter that starts at zero (learned). See Li et al. 2018, Table 5; the
    distributions are those of the authors' public release.
    """

    start: Optional[Tensor]

    def __init__(
        self, num_iters: int, softmax_over: str, init: str, num_parents: int, num_children: int
    ) -> None:
        super().__init__()
        check_arguments(num_iters, softmax_over)
        if init not in ("zero", "random", "learned"):
            raise ValueError(f"init must be 'zero', 'random' or 'learned', not {init!r}")
        self.num_iters = num_iters
        self.softmax_over = softmax_over
        self.init = init
        if init == "zero":
            self.start = None
        elif init == "random":
            self.register_buffer("start", torch.empty(num_parents, num_children))
        else:
            self.start = nn.Parameter(torch.empty(num_parents, num_children))


class DynamicRouting(_DynamicLayer):
    """A fully connected capsule layer: every child has its own transform to every parent.

    Args:
        in_caps, in_dim: number of children, and their pose dimension.
        out_caps, out_dim: number of parents, and their pose dimension.
        num_iters: iterations.
        softmax_over: ``"parents"`` or ``"children"``, see :func:`dynamic_routing`.
        init: logits of the first iteration: ``"zero"``, ``"random"`` or ``"learned"`` (``start``, ``[j, i]``).
        weight_std: standard deviation of the transforms' initial values, from a normal distribution truncated at two
            standard deviations (0.1 in the public release of Sabour et al.).

    ``weight`` is ``[i, d, j * e]``: in this layout votes are one batched product over the children and a
    single iteration is one plain product.

    Raises:
        ValueError: an argument is out of range.
        AssertionError: in ``forward``, the input has another number of channels or children.
    """

    engines: ClassVar[Tuple[Type[Engine], ...]] = (Native, Blocked, Reference)

    def __init__(
        self,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        num_iters: int = 3,
        softmax_over: str = "parents",
        init: str = "zero",
        weight_std: float = 0.1,
    ) -> None:
        at_least(1, in_caps=in_caps, in_dim=in_dim, out_caps=out_caps, out_dim=out_dim)
        positive(weight_std=weight_std)
        super().__init__(num_iters, softmax_over, init, out_caps, in_caps)
        self.in_caps, self.in_dim, self.out_caps, self.out_dim = in_caps, in_dim, out_caps, out_dim
        self.weight_std = weight_std
        self.weight = nn.Parameter(torch.empty(in_caps, in_dim, out_caps * out_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_start(self.start, nn.init.uniform_)
        nn.init.trunc_normal_(self.weight, std=self.weight_std, a=-2 * self.weight_std, b=2 * self.weight_std)

    @torch.jit.export
    @forward_method
    def votes(self, x: Tensor) -> Tensor:
        """Children ``[b, i, d]`` to votes ``[b, j, i, e]``, a view of ``[i, b, j, e]``.

        A contiguous copy of all votes would cost as much time as it saves (measured), and double the memory.
        """
        return self._votes(x)

    def _votes(self, x: Tensor) -> Tensor:
        votes = torch.bmm(x.transpose(0, 1), self.weight)  # [i, b, d] @ [i, d, j*e] -> [i, b, j*e]
        votes = votes.reshape(self.in_caps, -1, self.out_caps, self.out_dim)
        return votes.permute(1, 2, 0, 3)

    def sum_of_votes(self, x: Tensor) -> Tensor:
        """Children ``[b, i, d]`` to the weighted sum of votes ``[b, j, e]`` of the first iteration, one product."""
        weight: Tensor = self.weight
        start = self.start
        scale = 1.0 / (self.out_caps if self.softmax_over == "parents" else self.in_caps)
        if start is not None:
            couplings = torch.softmax(upcast_half(start), dim=0 if self.softmax_over == "parents" else 1)
            couplings = couplings.to(weight.dtype).t()[:, None, :, None]  # [i, 1, j, 1]
            weight = weight.reshape(self.in_caps, self.in_dim, self.out_caps, self.out_dim) * couplings
            scale = 1.0
        # [b, i*d] @ [i*d, j*e]
        total = torch.matmul(x.flatten(1) * scale, weight.reshape(self.in_caps * self.in_dim, -1))
        return total.reshape(-1, self.out_caps, self.out_dim)

    def first_couplings(self, like: Tensor) -> Tensor:
        """The couplings ``[b, j, i]`` of the first iteration, equal for every image, in batch and type of ``like``."""
        start = self.start
        if start is not None:
            couplings = torch.softmax(upcast_half(start), dim=0 if self.softmax_over == "parents" else 1)
            couplings = couplings.to(like.dtype).unsqueeze(0)
        else:
            couplings = like.new_ones((1, 1, 1)) / (
                self.out_caps if self.softmax_over == "parents" else self.in_caps
            )
        return couplings.expand(like.shape[0], self.out_caps, self.in_caps)

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        return 1, self.in_caps, self.out_caps, self.in_dim, self.out_dim

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """Procedure 1: votes, then :func:`dynamic_routing`; a single iteration is :meth:`sum_of_votes`."""
        x = inputs[0]
        if num_iters == 1:
            poses = squash(self.sum_of_votes(x))
            couplings = self.first_couplings(poses)
        else:
            poses, couplings = dynamic_routing(self._votes(x), num_iters, self.softmax_over, self.start)
        return Routed([poses], [], couplings if need_couplings else None)

    def forward(self, x: Tensor) -> Tensor:
        """Children ``[b, i, d]`` to parents ``[b, j, e]``; their lengths lie in [0, 1]."""
        torch._assert(x.shape[1] == self.in_caps, "wrong number of child capsules for this routing layer")
        torch._assert(x.shape[2] == self.in_dim, "wrong pose dimension for this routing layer")
        return self.compute([x], self.num_iters, False).poses[0]

    @forward_method
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Children ``[b, i, d]`` to parents ``[b, j, e]`` and the couplings ``[b, j, i]`` of the last iteration."""
        torch._assert(x.shape[1] == self.in_caps, "wrong number of child capsules for this routing layer")
        torch._assert(x.shape[2] == self.in_dim, "wrong pose dimension for this routing layer")
        return self.with_couplings([x], self.num_iters)

    def extra_repr(self) -> str:
        return (
            f"{self.in_caps}x{self.in_dim} -> {self.out_caps}x{self.out_dim}, num_iters={self.num_iters}, "
            f"softmax_over={self.softmax_over}, init={self.init}"
        )


class ConvDynamicRouting(ForwardMethods):
    """A convolutional capsule layer: at each output position the children of a window vote for the parents there.

    The children of a window are its ``k * l * in_caps`` capsules, with one transform for each place in the window and
    each type, shared over the output positions. In each window, the softmax runs over the parent types at the
    output position (or over the window's children).

    Args:
        in_caps, in_dim: child types, and their pose dimension.
        out_caps, out_dim: parent types, and their pose dimension.
        kernel_size, stride, padding: of the window; the padding consists of zero capsules.
        num_iters, softmax_over, init, weight_std: as in :class:`DynamicRouting`.

    ``window`` is the :class:`DynamicRouting` that every window goes through; its children are ordered
    ``(row * l + column) * in_caps + type``.

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
        num_iters: int = 3,
        softmax_over: str = "parents",
        init: str = "zero",
        weight_std: float = 0.1,
    ) -> None:
        super().__init__()
        at_least(1, in_caps=in_caps, kernel_size=kernel_size, stride=stride)
        at_least(0, padding=padding)
        self.in_caps, self.in_dim, self.out_caps, self.out_dim = in_caps, in_dim, out_caps, out_dim
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        children = kernel_size * kernel_size * in_caps
        self.window = DynamicRouting(
            children, in_dim, out_caps, out_dim, num_iters, softmax_over, init, weight_std
        )

    def _windows(self, x: Tensor) -> Tensor:
        """``[b, i*d, h, w]`` to the windows ``[b, h', w', k*l*i, d]``."""
        torch._assert(
            x.shape[1] == self.in_caps * self.in_dim, "wrong number of channels for this routing layer"
        )
        x = windows(x.permute(0, 2, 3, 1), self.kernel_size, self.stride, self.padding)
        return x.reshape(x.shape[0], x.shape[1], x.shape[2], self.window.in_caps, self.in_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, in_caps * d, h, w]`` to ``[b, out_caps * e, h', w']``; channel = capsule * pose dimension + index."""
        x = self._windows(x)
        poses = self.window(x.flatten(0, 2))  # [b*h'*w', j, e]
        channels = poses.shape[1] * poses.shape[2]
        return poses.reshape(x.shape[0], x.shape[1], x.shape[2], channels).permute(0, 3, 1, 2)

    @forward_method
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Like ``forward``, but also return the couplings ``[b, h', w', j, k*l*i]`` of the last iteration."""
        x = self._windows(x)
        poses, couplings = self.window.route(x.flatten(0, 2))
        channels = poses.shape[1] * poses.shape[2]  # explicit, because -1 is ambiguous for an empty batch
        poses = poses.reshape(x.shape[0], x.shape[1], x.shape[2], channels).permute(0, 3, 1, 2)
        couplings = couplings.reshape(x.shape[0], x.shape[1], x.shape[2], self.out_caps, x.shape[3])
        return poses, couplings

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class Conv3dDynamicRouting(RoutingLayer):
    """A convolutional capsule layer with one kernel for all children, routed over types and positions together.

    Source: Rajasegaran et al., "DeepCaps" (2019, arXiv:1904.09546), section 3.2: a 3-D convolution whose depth and
    stride along it are a child's pose. Each child type votes by the same kernel for every parent type at every output
    position. Its couplings sum to 1 over both, so that it chooses a type and a place. Otherwise the procedure is
    :func:`dynamic_routing`, whose parents are the ``out_caps * h' * w'`` pairs of type and position.

    Args:
        in_caps, in_dim: child types, and their pose dimension.
        out_caps, out_dim: parent types, and their pose dimension.
        kernel_size, stride, padding: of the kernel.
        num_iters: iterations.

    ``weight`` is ``[j * e, d, k, l]``, He normal, and ``bias`` ``[j, e]``, 0.1 as in the release.

    Raises:
        ValueError: an argument is out of range.
        AssertionError: in ``forward``, the input has another number of channels.
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
        num_iters: int = 3,
    ) -> None:
        super().__init__()
        at_least(1, in_caps=in_caps, in_dim=in_dim, out_caps=out_caps, out_dim=out_dim)
        at_least(1, kernel_size=kernel_size, stride=stride, num_iters=num_iters)
        at_least(0, padding=padding)
        self.in_caps, self.in_dim, self.out_caps, self.out_dim = in_caps, in_dim, out_caps, out_dim
        self.kernel_size, self.stride, self.padding, self.num_iters = kernel_size, stride, padding, num_iters
        self.weight = nn.Parameter(torch.empty(out_caps * out_dim, in_dim, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.empty(out_caps, out_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight)
        nn.init.constant_(self.bias, 0.1)

    def _votes(self, x: Tensor) -> Tensor:
        """``[b, i * d, h, w]`` to ``[b, j, h', w', i, e]``."""
        x = split_axis(x, 1, [self.in_caps, self.in_dim]).flatten(0, 1)  # [b*i, d, h, w]
        votes = F.conv2d(x, self.weight, None, self.stride, self.padding)  # [b*i, j*e, h', w']
        votes = split_axis(split_axis(votes, 1, [self.out_caps, self.out_dim]), 0, [-1, self.in_caps])
        return votes.permute(0, 2, 4, 5, 1, 3)

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """Votes by the shared kernel, then :func:`dynamic_routing`; the poses are ``[b, j * e, h', w']``."""
        votes = self._votes(inputs[0])
        h, w = votes.shape[2], votes.shape[3]
        bias = self.bias.unsqueeze(1).expand(self.out_caps, h * w, self.out_dim).flatten(0, 1)
        poses, couplings = dynamic_routing(votes.flatten(1, 3), num_iters, bias=bias)
        grid = split_axis(poses, 1, [self.out_caps, h, w]).permute(0, 1, 4, 2, 3)
        return Routed([grid.flatten(1, 2)], [], couplings if need_couplings else None)

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        h, w = (out_size(size, self.kernel_size, self.stride, self.padding) for size in inputs[0].shape[2:])
        return 1, self.in_caps, self.out_caps * h * w, self.in_dim, self.out_dim

    def forward(self, x: Tensor) -> Tensor:
        """``[b, i * d, h, w]`` to ``[b, j * e, h', w']``; channel = capsule * pose dimension + index."""
        torch._assert(
            x.shape[1] == self.in_caps * self.in_dim, "wrong number of channels for this routing layer"
        )
        return self.compute([x], self.num_iters, False).poses[0]

    @forward_method
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Like ``forward``, and the last iteration's couplings ``[b, j * h' * w', i]``, which sum to 1 over axis 1."""
        return self.with_couplings([x], self.num_iters)

    def extra_repr(self) -> str:
        return (
            f"{self.in_caps}x{self.in_dim} -> {self.out_caps}x{self.out_dim}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, num_iters={self.num_iters}"
        )


class SharedDynamicRouting(_DynamicLayer):
    """Dynamic routing whose transforms are shared over the grid (Li et al. 2018, Fig. 1b and appendix A.i).

    Every capsule type ("group") has one biased transform to each parent, the same at all its positions: the votes are a
    biased 1x1 convolution with as many groups as capsule types. :func:`shared_dynamic_routing` explains how forming
    them is avoided.

    Args:
        groups, in_dim: child types, and their pose dimension.
        out_caps, out_dim: parents, and their pose dimension.
        num_iters: iterations.
        softmax_over: ``"children"`` or ``"parents"``.
        init: logits of the first iteration, ``"zero"``, ``"random"`` or ``"learned"``.
        positions: number of grid positions; required only if the first logits are not zero, since they are per child.

    ``weight`` is ``[j, e, g * d]``, normal of variance ``1 / d`` (our choice); ``bias`` is ``[j, e, g]``, standard
    normal as in the public release: with the softmax over children a parent is an average of its votes, and without
    biases of that size its squashed length starts too near zero to learn.

    Raises:
        ValueError: an argument is out of range.
    """

    engines: ClassVar[Tuple[Type[Engine], ...]] = (SharedFloat32, Reference)

    def __init__(
        self,
        groups: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        num_iters: int = 3,
        softmax_over: str = "children",
        init: str = "zero",
        positions: int = 0,
    ) -> None:
        at_least(1, groups=groups, in_dim=in_dim, out_caps=out_caps, out_dim=out_dim)
        super().__init__(num_iters, softmax_over, init, out_caps, groups * positions)
        if init != "zero" and positions < 1:
            raise ValueError(f"init={init!r} has one logit per child: positions (of the grid) must be given")
        self.groups, self.in_dim, self.out_caps, self.out_dim = groups, in_dim, out_caps, out_dim
        self.weight = nn.Parameter(torch.empty(out_caps, out_dim, groups * in_dim))
        self.bias = nn.Parameter(torch.empty(out_caps, out_dim, groups))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_start(self.start, nn.init.uniform_)
        nn.init.normal_(self.weight, std=self.in_dim**-0.5)
        nn.init.normal_(self.bias)

    @forward_method
    def votes(self, x: Tensor) -> Tensor:
        """Children ``[b, g, d, p]`` to votes ``[b, j, g * p, e]``, which the routing itself never forms."""
        weight = self.weight.unflatten(2, (self.groups, self.in_dim))  # [j, e, g, d]
        votes = torch.einsum("bgdp,jegd->bjgpe", x, weight)
        votes = votes + self.bias.permute(0, 2, 1).unsqueeze(2)  # [j, g, 1, e]
        return votes.flatten(2, 3)

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        return 1, self.groups * inputs[0].shape[3], self.out_caps, self.in_dim, self.out_dim

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """:func:`shared_dynamic_routing`."""
        poses, couplings = shared_dynamic_routing(
            inputs[0], self.weight, self.bias, num_iters, self.softmax_over, self.start, need_couplings
        )
        return Routed([poses], [], couplings)

    def forward(self, x: Tensor) -> Tensor:
        """Children ``[b, g, d, p]`` to parents ``[b, j, e]``."""
        return self.compute([x], self.num_iters, False).poses[0]

    @forward_method
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Children ``[b, g, d, p]`` to parents ``[b, j, e]``, and the last iteration's couplings ``[b, j, g * p]``."""
        return self.with_couplings([x], self.num_iters)

    def extra_repr(self) -> str:
        return (
            f"{self.groups} groups of {self.in_dim} -> {self.out_caps}x{self.out_dim}, "
            f"num_iters={self.num_iters}, softmax_over={self.softmax_over}, init={self.init}"
        )
