"""EM routing of matrix capsules: in windows, and to classes. Letters as in :mod:`capszoo.layers.em`."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._precision import upcast_half
from .base import MatrixEM
from .blocked import window_routing
from .chunked import route_in_parts
from .routing import em_routing
from .steps import EPS, INIT_NOISE, LAM_START, LAM_STEP, VAR_FLOOR, Settings

__all__ = ["ClassEM", "ConvEM"]

torch.fx.wrap("upcast_half")
torch.fx.wrap("window_routing")


class ConvEM(MatrixEM):
    """EM routing of matrix capsules in a window: ``k x k`` positions of every child type to every parent type.

    The children of an output position are the ``k * k * in_caps`` capsules of its window, which has a normalisation
    of its own: the couplings of a child sum to 1 over the parent types in each window that it lies in. No padding.

    Args:
        in_caps, out_caps: capsule types.
        pose_size: rows (and columns) of a pose.
        kernel_size, stride: of the window.
        num_iters: iterations.
        lam_start, lam_step, var_floor, eps, normalize_cost: see :func:`em_routing`.
        init_noise: standard deviation of the noise that the transforms, initially identities, are given.
        init_beta_v: first ``beta_v``; minus the expected log of sigma makes the first activations neither 0 nor 1.

    ``weight`` is ``[k*k*in_caps, out_caps, p, p]``, its first index ``(row * k + column) * in_caps + capsule``; a
    vote is ``pose @ weight``, so that a transform has as many numbers as a pose. ``beta_v`` and ``beta_a`` are
    ``[out_caps]``.
    """

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
        #: set by what writes a graph for a runtime that takes it node by node, as ONNX Runtime does
        self.in_parts = False

    def grid_size(self, height: int, width: int) -> Tuple[int, int]:
        """Output rows and columns for an input of this size."""
        k, s = self.kernel_size, self.stride
        return (height - k) // s + 1, (width - k) // s + 1

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, in_caps * (p*p + 1), h, w]`` to ``[b, out_caps * (p*p + 1), h', w']``, activations in 0..1."""
        poses, logits, _ = self._route(x, False)
        return self.pack(poses, logits).to(x.dtype)

    def pack(self, poses: Tensor, logits: Tensor) -> Tensor:
        """What :meth:`route` returns, as a map with the activations behind the poses."""
        return torch.cat([poses.flatten(3), torch.sigmoid(logits)], dim=3).permute(0, 3, 1, 2)

    def route(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Map to poses ``[b, h', w', j, p*p]``, activation logits ``[b, h', w', j]``, couplings ``[b, h', w', j, i]``.

        All of them at least in float32; the children i of a window as the first index of ``weight``.
        """
        poses, logits, couplings = self._route(x, True)
        assert couplings is not None
        return poses, logits, couplings

    def _route(self, x: Tensor, need_couplings: bool) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        if torch.jit.is_scripting():
            return self._route_full(x, need_couplings)
        else:  # noqa: RET505 (TorchScript compiles no more than the branch it needs of an if with else)
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                with torch.autocast(x.device.type, enabled=False):
                    return self._route_full(x, need_couplings)
            return self._route_full(x, need_couplings)

    def _route_full(self, x: Tensor, need_couplings: bool) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """In float32 or float64."""
        torch._assert(x.shape[1] == self.in_caps * (self.pose_dim + 1), self._channels_message)
        x = self._windows(upcast_half(x).permute(0, 2, 3, 1))  # [b, h', w', k, l, channels]
        b, h, w = x.shape[0], x.shape[1], x.shape[2]
        children, parents = self.weight.shape[0], self.out_caps
        split = self.in_caps * self.pose_dim
        mu, logits, couplings = self._route_windows(
            x[..., :split].reshape(-1, h * w, children, self.pose_dim),  # [b, hw, i, d]
            x[..., split:].reshape(-1, h * w, children),  # [b, hw, i]
            self._weight().contiguous(),  # [i, q, j, r]
            self._wide_weight(),  # [i, d, j*e]
            need_couplings,
        )
        if need_couplings:
            assert couplings is not None
            couplings = couplings.reshape(b, h, w, parents, children)
        return mu.reshape(b, h, w, parents, self.pose_dim), logits.reshape(b, h, w, parents), couplings

    def _route_windows(
        self, poses: Tensor, activations: Tensor, weight: Tensor, wide: Tensor, need_couplings: bool
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Windows ``[b, hw, i, d]``, ``[b, hw, i]``, for the rest as :func:`window_routing`, which it calls."""
        beta_v, beta_a = upcast_half(self.beta_v), upcast_half(self.beta_a)
        settings = self._settings()
        if not torch.jit.is_scripting():
            if self.in_parts:
                return route_in_parts(
                    poses, activations, weight, wide, beta_v, beta_a, settings, need_couplings
                )
        return window_routing(
            poses.flatten(0, 1),
            activations.flatten(0, 1),
            weight,
            wide,
            beta_v,
            beta_a,
            settings,
            need_couplings,
        )

    def _windows(self, x: Tensor) -> Tensor:
        """``[b, h, w, c]`` to ``[b, h', w', k, l, c]``, by slices."""
        last = self.kernel_size - 1
        columns = [x[:, :, k : k - last if k < last else None : self.stride] for k in range(self.kernel_size)]
        x = torch.stack(columns, dim=3)  # [b, h, w', l, c]
        rows = [x[:, k : k - last if k < last else None : self.stride] for k in range(self.kernel_size)]
        return torch.stack(rows, dim=3)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", kernel_size={self.kernel_size}, stride={self.stride}"


class ClassEM(MatrixEM):
    """EM routing of all capsules of a map to one capsule per class.

    The transforms are shared by all positions of a capsule type, so any grid will do. What tells positions apart is
    coordinate addition: a child's place, scaled to (0, 1), is added to its votes, the row to the top and the column to
    the second number of the pose's right-hand column.

    Args:
        in_caps, num_classes: capsule types, and classes.
        pose_size: rows (and columns) of a pose.
        num_iters: iterations.
        lam_start, lam_step, var_floor, eps, normalize_cost: see :func:`em_routing`.
        init_noise: standard deviation of the noise that the transforms, initially identities, are given.
        init_beta_v: first ``beta_v``; minus the expected log of sigma makes the first activations neither 0 nor 1.

    ``weight`` is ``[in_caps, num_classes, p, p]``; ``beta_v``, ``beta_a`` are ``[num_classes]``.
    """

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
        poses, logits, _ = self.route(x)
        return poses.to(x.dtype), logits.to(x.dtype)

    def route(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Map to poses ``[b, n, p*p]``, activation logits ``[b, n]`` and couplings ``[b, n, h, w, in_caps]``.

        All of them at least in float32.
        """
        if torch.jit.is_scripting():
            return self._route(x)
        else:  # noqa: RET505 (as in ConvEM)
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                with torch.autocast(x.device.type, enabled=False):
                    return self._route(x)
            return self._route(x)

    def votes(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Map to votes ``[b, n, h*w*in_caps, p*p]``, places added, and activations ``[b, h*w*in_caps]``."""
        torch._assert(x.shape[1] == self.in_caps * (self.pose_dim + 1), self._channels_message)
        h, w = x.shape[2], x.shape[3]
        x = upcast_half(x).flatten(2).transpose(1, 2)  # [b, hw, channels]
        split = self.in_caps * self.pose_dim
        poses = x[:, :, :split].reshape(-1, self.in_caps, self.pose_dim)  # [bhw, caps, d]
        activations = x[:, :, split:].flatten(1)  # [b, hw*caps]
        votes = torch.bmm(poses.transpose(0, 1), self._wide_weight())  # [caps, bhw, n*e]
        votes = votes.reshape(self.in_caps, -1, h * w, self.out_caps, self.pose_dim)
        votes = votes.permute(1, 3, 2, 0, 4) + grid_coordinates(
            x, h, w, self.pose_size
        )  # [b, n, hw, caps, e]
        return votes.flatten(2, 3), activations

    def _route(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        h, w = x.shape[2], x.shape[3]
        votes, activations = self.votes(x)
        mu, logits, couplings = em_routing(
            votes,
            activations,
            upcast_half(self.beta_v),
            upcast_half(self.beta_a),
            *self._settings(),
        )
        return mu, logits, couplings.reshape(-1, self.out_caps, h, w, self.in_caps)


def grid_coordinates(like: Tensor, height: int, width: int, pose_size: int) -> Tensor:
    """Places of a grid as additions to flattened matrix poses, ``[h*w, 1, p*p]``, in the type and place of ``like``."""
    rows = (torch.arange(height, dtype=like.dtype, device=like.device) + 0.5) / height
    columns = (torch.arange(width, dtype=like.dtype, device=like.device) + 0.5) / width
    places = torch.zeros(height, width, 1, pose_size * pose_size, dtype=like.dtype, device=like.device)
    places[:, :, 0, pose_size - 1] = rows[:, None]
    places[:, :, 0, 2 * pose_size - 1] = columns
    return places.flatten(0, 1)


torch.fx.wrap("grid_coordinates")  # a leaf for FX, which cannot make tensors of a traced size
