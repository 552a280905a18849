"""Layers with EM routing: in windows, to classes, and with transforms shared over the grid.

Letters as in :mod:`capszoo.layers.em`.
"""

from typing import ClassVar, List, Optional, Tuple, Type

import torch
from torch import Tensor, nn

from .._forward_methods import forward_method
from .._layout import out_size, windows
from .._modules import at_least, finite
from .._precision import finite_cast, upcast_half
from ..engine import Engine, Reference, Routed
from .base import EMLayer, MatrixEM
from .engines import Blocked, Chunked, Frozen, Native, SharedBlocked
from .routing import em_routing, window_routing
from .shared import SharedSteps
from .steps import EPS, INIT_NOISE, LAM_START, LAM_STEP, VAR_FLOOR, Settings

torch.fx.wrap("upcast_half")
torch.fx.wrap("finite_cast")


class ConvEM(MatrixEM):
    """EM routing of matrix capsules in windows: ``k x k`` positions of every child type to every parent type.

    The children of an output position are the ``k * k * in_caps`` capsules of its window. Every window is normalised
    separately: the couplings of a child sum to 1 over the parent types in each window that contains it. No padding.

    Args:
        in_caps, out_caps: capsule types.
        pose_size: rows (and columns) of a pose.
        kernel_size, stride: of the window.
        num_iters: iterations.
        lam_start, lam_step, var_floor, eps, normalize_cost: see :func:`em_routing`.
        init_noise: standard deviation of the noise that is added to the transforms, initially identities.
        init_beta_v: first ``beta_v``; minus the expected log of sigma makes the first activations neither 0 nor 1.

    ``weight`` is ``[k*k*in_caps, out_caps, p, p]``, its first index ``(row * k + column) * in_caps + capsule``. A
    vote is ``pose @ weight``, so a transform has as many elements as a pose. ``beta_v`` and ``beta_a`` are
    ``[out_caps]``.

    Raises:
        ValueError: an argument is out of range.
        AssertionError: in ``forward``, the input has another number of channels or children.
    """

    engines: ClassVar[Tuple[Type[Engine], ...]] = (Chunked, Frozen, Native, Blocked, Reference)

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        pose_size: int = 4,
        kernel_size: int = 3,
        stride: int = 1,
        num_iters: int = 2,
        lam_start: float = LAM_START,
        lam_step: float = LAM_STEP,
        var_floor: float = VAR_FLOOR,
        eps: float = EPS,
        normalize_cost: bool = False,
        init_noise: float = INIT_NOISE,
        init_beta_v: float = 0.0,
    ) -> None:
        at_least(1, kernel_size=kernel_size, stride=stride)
        super().__init__(
            in_caps,
            out_caps,
            kernel_size * kernel_size,
            pose_size,
            Settings(num_iters, lam_start, lam_step, var_floor, eps, normalize_cost),
            init_noise,
            init_beta_v,
        )
        self.kernel_size = kernel_size
        self.stride = stride

    def grid_size(self, height: int, width: int) -> Tuple[int, int]:
        """Output rows and columns for an input of this size."""
        window = (self.kernel_size, self.stride)
        return out_size(height, *window), out_size(width, *window)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, in_caps * (p*p + 1), h, w]`` to ``[b, out_caps * (p*p + 1), h', w']``, activations in 0..1."""
        poses, logits, _ = self._route(x, False)
        return self.pack(poses, logits).to(x.dtype)

    def pack(self, poses: Tensor, logits: Tensor) -> Tensor:
        """Concatenate the results of :meth:`route` to a map, with the activations after the poses."""
        return torch.cat([poses.flatten(3), torch.sigmoid(logits)], dim=3).permute(0, 3, 1, 2)

    @forward_method
    def capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Map to poses ``[b, h', w', j, p*p]`` and activation logits ``[b, h', w', j]``, in float32 or wider."""
        poses, logits, _ = self._route(x, False)
        return poses, logits

    @forward_method
    def votes(self, x: Tensor) -> Tensor:
        """Map to votes ``[b, h', w', j, i, p*p]``, in float32 or wider; children as in :meth:`route`."""
        torch._assert(x.shape[1] == self.in_caps * (self.pose_dim + 1), self._channels_message)
        poses = upcast_half(x[:, : self.in_caps * self.pose_dim]).permute(0, 2, 3, 1)
        poses = windows(poses, self.kernel_size, self.stride).flatten(3)
        poses = poses.unflatten(3, (-1, self.pose_size, self.pose_size))  # [b, h', w', i, p, q]
        with torch.autocast(x.device.type, enabled=False):
            return torch.einsum("bhwipq,ijqr->bhwjipr", poses, upcast_half(self.weight)).flatten(5)

    @forward_method
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Map to poses ``[b, h', w', j, p*p]``, activation logits ``[b, h', w', j]``, couplings ``[b, h', w', j, i]``.

        All of them in float32 or wider; the children i of a window are ordered as the first index of ``weight``.
        """
        poses, logits, couplings = self._route(x, True)
        assert couplings is not None
        return poses, logits, couplings

    def _route(self, x: Tensor, need_couplings: bool) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """In float32 or float64."""
        torch._assert(x.shape[1] == self.in_caps * (self.pose_dim + 1), self._channels_message)
        channels = x.shape[1]
        x = windows(upcast_half(x).permute(0, 2, 3, 1), self.kernel_size, self.stride)
        b, h, w = x.shape[0], x.shape[1], x.shape[2]
        x = x.reshape(b, h, w, self.kernel_size * self.kernel_size, channels)
        children, parents = self.weight.shape[0], self.out_caps
        split = self.in_caps * self.pose_dim
        poses = x[..., :split].reshape(-1, h * w, children, self.pose_dim)  # [b, hw, i, d]
        activations = x[..., split:].reshape(-1, h * w, children)  # [b, hw, i]
        routed = self.compute([poses, activations], self.num_iters, need_couplings)
        couplings = routed.couplings
        if couplings is not None:
            couplings = couplings.reshape(b, h, w, parents, children)
        mu, logits = routed.poses[0], routed.activations[0]
        return mu.reshape(b, h, w, parents, self.pose_dim), logits.reshape(b, h, w, parents), couplings

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        return inputs[0].shape[1], inputs[0].shape[2], self.out_caps, self.pose_dim, self.pose_dim

    def route_through(
        self, inputs: List[Tensor], weight: Tensor, flat_weight: Tensor, num_iters: int, need_couplings: bool
    ) -> Routed:
        """Windows ``[b, hw, i, d]`` and ``[b, hw, i]`` to poses ``[bhw, j, e]``, logits and couplings."""
        mu, logits, couplings = window_routing(
            inputs[0].flatten(0, 1),
            inputs[1].flatten(0, 1),
            weight,
            flat_weight,
            upcast_half(self.beta_v),
            upcast_half(self.beta_a),
            self.settings(num_iters),
        )
        return Routed([mu], [logits], couplings if need_couplings else None)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", kernel_size={self.kernel_size}, stride={self.stride}"


class ClassEM(MatrixEM):
    """EM routing of all capsules of a map to one capsule per class.

    The transforms are shared by all positions of a capsule type, so the grid may have any size. Coordinate addition
    distinguishes the positions: a child's place, scaled to (0, 1), is added to its votes, the row to the first and the
    column to the second element of the pose's right-hand column.

    Args:
        in_caps, num_classes: capsule types, and classes.
        pose_size: rows (and columns) of a pose.
        num_iters: iterations.
        lam_start, lam_step, var_floor, eps, normalize_cost: see :func:`em_routing`.
        init_noise: standard deviation of the noise that is added to the transforms, initially identities.
        init_beta_v: first ``beta_v``; minus the expected log of sigma makes the first activations neither 0 nor 1.

    ``weight`` is ``[in_caps, num_classes, p, p]``; ``beta_v``, ``beta_a`` are ``[num_classes]``.

    Raises:
        ValueError: an argument is out of range.
        AssertionError: in ``forward``, the input has another number of channels or children.
    """

    engines: ClassVar[Tuple[Type[Engine], ...]] = (Frozen, Reference)

    def __init__(
        self,
        in_caps: int,
        num_classes: int,
        pose_size: int = 4,
        num_iters: int = 2,
        lam_start: float = LAM_START,
        lam_step: float = LAM_STEP,
        var_floor: float = VAR_FLOOR,
        eps: float = EPS,
        normalize_cost: bool = False,
        init_noise: float = INIT_NOISE,
        init_beta_v: float = 0.0,
    ) -> None:
        super().__init__(
            in_caps,
            num_classes,
            1,
            pose_size,
            Settings(num_iters, lam_start, lam_step, var_floor, eps, normalize_cost),
            init_noise,
            init_beta_v,
        )

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Map ``[b, in_caps * (p*p + 1), h, w]`` to poses ``[b, n, p*p]`` and activation logits ``[b, n]``."""
        routed = self._route(x, False)
        return routed.poses[0].to(x.dtype), finite_cast(routed.activations[0], x.dtype)

    @forward_method
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Map to poses ``[b, n, p*p]``, activation logits ``[b, n]`` and couplings ``[b, n, h, w, in_caps]``.

        All of them in float32 or wider.
        """
        routed = self._route(x, True)
        couplings = routed.couplings
        assert couplings is not None
        couplings = couplings.reshape(-1, self.out_caps, x.shape[2], x.shape[3], self.in_caps)
        return routed.poses[0], routed.activations[0], couplings

    def _route(self, x: Tensor, need_couplings: bool) -> Routed:
        torch._assert(x.shape[1] == self.in_caps * (self.pose_dim + 1), self._channels_message)
        return self.compute([upcast_half(x)], self.num_iters, need_couplings)

    @forward_method
    def votes(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Map to votes ``[b, n, h*w*in_caps, p*p]``, coordinates added, and activations ``[b, h*w*in_caps]``."""
        torch._assert(x.shape[1] == self.in_caps * (self.pose_dim + 1), self._channels_message)
        with torch.autocast(x.device.type, enabled=False):
            return self._votes_through(upcast_half(x), self.flat_weight())

    def _votes_through(self, x: Tensor, flat_weight: Tensor) -> Tuple[Tensor, Tensor]:
        h, w = x.shape[2], x.shape[3]
        x = x.flatten(2).transpose(1, 2)  # [b, hw, channels]
        split = self.in_caps * self.pose_dim
        poses = x[:, :, :split].reshape(-1, self.in_caps, self.pose_dim)  # [bhw, caps, d]
        activations = x[:, :, split:].flatten(1)  # [b, hw*caps]
        votes = torch.bmm(poses.transpose(0, 1), flat_weight)  # [caps, bhw, n*e]
        votes = votes.reshape(self.in_caps, -1, h * w, self.out_caps, self.pose_dim)
        places = grid_coordinates(x, h, w, self.pose_size)
        votes = votes.permute(1, 3, 2, 0, 4) + places  # [b, n, hw, caps, e]
        return votes.flatten(2, 3), activations

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        children = inputs[0].shape[2] * inputs[0].shape[3] * self.in_caps
        return 1, children, self.out_caps, self.pose_dim, self.pose_dim

    def route_through(
        self, inputs: List[Tensor], weight: Tensor, flat_weight: Tensor, num_iters: int, need_couplings: bool
    ) -> Routed:
        """A map ``[b, channels, h, w]`` to poses ``[b, n, p*p]``, logits and couplings ``[b, n, h*w*in_caps]``."""
        votes, activations = self._votes_through(inputs[0], flat_weight)
        mu, logits, couplings = em_routing(
            votes, activations, upcast_half(self.beta_v), upcast_half(self.beta_a), *self.settings(num_iters)
        )
        return Routed([mu], [logits], couplings if need_couplings else None)


def grid_coordinates(like: Tensor, height: int, width: int, pose_size: int) -> Tensor:
    """Coordinates of a grid, to be added to flattened matrix poses: ``[h*w, 1, p*p]``, dtype and device of ``like``."""
    rows = (torch.arange(height, dtype=like.dtype, device=like.device) + 0.5) / height
    columns = (torch.arange(width, dtype=like.dtype, device=like.device) + 0.5) / width
    places = torch.zeros(height, width, 1, pose_size * pose_size, dtype=like.dtype, device=like.device)
    places[:, :, 0, pose_size - 1] = rows[:, None]
    places[:, :, 0, 2 * pose_size - 1] = columns
    return places.flatten(0, 1)


torch.fx.wrap("grid_coordinates")  # a leaf for FX, which cannot create tensors of a traced size


class SharedEM(SharedSteps, EMLayer):
    """EM routing of vector capsules whose transforms are shared over the grid (Li et al. 2018, Fig. 1b, appendix A.i).

    Every capsule type ("group") has one biased transform to each parent, the same at all its places: the votes are a
    biased 1x1 convolution with as many groups as capsule types. :func:`shared_em_routing` explains how forming them is
    avoided.

    Args:
        groups, in_dim: child types, and their pose dimension.
        out_caps, out_dim: parents, and their pose dimension.
        num_iters: iterations.
        lam_start, lam_step, var_floor, eps, normalize_cost: see :func:`em_routing`.
        init_beta_v: first ``beta_v``. Well below minus the log of sigma, the parents that take more votes start as the
            more active ones; above it, as the less active ones: such a network hardly learns. Use the default only with
            ``normalize_cost``; otherwise the sigmoid saturates.

    ``weight`` is ``[j, g, d, e]``, normal of standard deviation 1 (our choice: a parent is the mean of many votes, and
    smaller ones would put the next layer's variances near their floor); ``bias`` is ``[j, g, e]``, initially 0;
    ``beta_v`` and ``beta_a`` are ``[j]``.

    Raises:
        ValueError: an argument is out of range.
    """

    engines: ClassVar[Tuple[Type[Engine], ...]] = (SharedBlocked, Reference)

    def __init__(
        self,
        groups: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        num_iters: int = 3,
        lam_start: float = LAM_START,
        lam_step: float = LAM_STEP,
        var_floor: float = VAR_FLOOR,
        eps: float = EPS,
        normalize_cost: bool = True,
        init_beta_v: float = -5.0,
    ) -> None:
        super().__init__(Settings(num_iters, lam_start, lam_step, var_floor, eps, normalize_cost))
        at_least(1, groups=groups, in_dim=in_dim, out_caps=out_caps, out_dim=out_dim)
        finite(init_beta_v=init_beta_v)
        self.groups, self.in_dim, self.out_caps, self.out_dim = groups, in_dim, out_caps, out_dim
        self.init_beta_v = init_beta_v
        self.weight = nn.Parameter(torch.empty(out_caps, groups, in_dim, out_dim))
        self.bias = nn.Parameter(torch.empty(out_caps, groups, out_dim))
        self.beta_v = nn.Parameter(torch.empty(out_caps))
        self.beta_a = nn.Parameter(torch.empty(out_caps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.constant_(self.beta_v, self.init_beta_v)
        nn.init.zeros_(self.beta_a)

    @forward_method
    def votes(self, x: Tensor) -> Tensor:
        """Children ``[b, g, d, s]`` to votes ``[b, j, g * s, e]``, which the routing itself never forms."""
        with torch.autocast(x.device.type, enabled=False):
            votes = torch.einsum("bgds,jgde->bjgse", upcast_half(x), upcast_half(self.weight))
        return (votes + upcast_half(self.bias).unsqueeze(2)).flatten(2, 3)

    def shared_tensors(self) -> List[Tensor]:
        """Parameters in float32 or wider, in the order of :meth:`route_shared`."""
        return [upcast_half(t) for t in (self.weight, self.bias, self.beta_v, self.beta_a)]

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        return 1, self.groups * inputs[0].shape[3], self.out_caps, self.in_dim, self.out_dim

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """:func:`shared_em_routing`."""
        return self.route_shared(inputs, self.shared_tensors(), self.settings(num_iters), need_couplings)

    def _bounded(self, x: Tensor, activations: Tensor) -> List[Tensor]:
        """Children in float32 or wider, at most 1e11: products of two poses and an activation must not overflow."""
        return [upcast_half(x).clamp(-1e11, 1e11), upcast_half(activations).clamp(max=1e11)]

    def forward(self, x: Tensor, activations: Tensor) -> Tuple[Tensor, Tensor]:
        """Children ``[b, g, d, s]``, activations ``[b, g, s]`` to poses ``[b, j, e]``, activation logits ``[b, j]``."""
        routed = self.compute(self._bounded(x, activations), self.num_iters, False)
        return routed.poses[0].to(x.dtype), finite_cast(routed.activations[0], x.dtype)

    @forward_method
    def route(self, x: Tensor, activations: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Results of :func:`shared_em_routing`, in float32 or wider: couplings are ``[b, j, g, s]``."""
        routed = self.compute(self._bounded(x, activations), self.num_iters, True)
        couplings = routed.couplings
        assert couplings is not None
        return routed.poses[0], routed.activations[0], couplings

    def extra_repr(self) -> str:
        sizes = f"{self.groups} groups of {self.in_dim} -> {self.out_caps}x{self.out_dim}, "
        return sizes + super().extra_repr()
