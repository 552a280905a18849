"""Squash: map the length of a capsule to [0, 1], as a probability, and keep its direction.

Paper: Sabour, Frosst, Hinton, "Dynamic Routing Between Capsules" (2017), Eq. 1:
``v = (|s|^2 / (1 + |s|^2)) * (s / |s|)``, which is ``s * |s| / (1 + |s|^2)``.

====== ===============================================
symbol here
====== ===============================================
s      ``s``, the weighted sum of votes, or a raw capsule
v      the returned tensor
====== ===============================================

Deviations: below ``|s| = 1e-6`` the factor ``|s| / (1 + |s|^2)`` is clamped at ``1e-6`` (a zero capsule gives
zero and a finite gradient; the gradient of the formula is zero there). Squared lengths are clamped at 1e38, so that
float32 stays finite: from ``|s| = 1e19`` on, the length of the result is above 1, ``|s| / 1e19``. Half precision is
computed in float32 and cast back. Capsules are divided by 16 before they are squared. That is exact, and keeps squares
finite where a converter makes a float32 graph float16, whose largest number is 65504.

:func:`exponential_squash` is the squash of Efficient-CapsNet (Mazzia, Salvetti, Chiaberge 2021, arXiv:2101.12491):
``v = (1 - exp(-|s|)) * (s / |s|)``. Its slope at zero is 1, so that short capsules keep their gradient.
"""

import torch
from torch import Tensor, nn

from ._layout import split_axis
from ._modules import at_least
from ._precision import upcast_half

__all__ = ["Squash", "capsule_lengths", "exponential_squash", "squash"]

torch.fx.wrap("split_axis")
torch.fx.wrap("upcast_half")


def squash(s: Tensor, dim: int = -1) -> Tensor:
    """Squash capsules along one axis (Sabour et al. 2017, Eq. 1).

    Args:
        s: capsules, any shape, floating point; the pose lies along ``dim``.
        dim: the pose axis.

    Returns:
        Tensor of the shape and dtype of ``s``; lengths lie in [0, 1] (of capsules up to a length of 1e19).

    Examples:
        >>> squash(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).norm(dim=-1)  # 25 / 26, and no NaN at zero
        tensor([0.9615, 0.0000])
    """
    x = upcast_half(s)
    square = _scaled_square(x, dim)
    # |s| / (1 + |s|^2), with |s| / 16 and |s|^2 / 256
    return (x * (square.sqrt() * 0.0625 / (0.00390625 + square))).to(s.dtype)


def _scaled_square(s: Tensor, dim: int) -> Tensor:
    """:func:`squared_lengths` divided by 256, without the squares of ``s``."""
    scaled = s * 0.0625
    return (scaled * scaled).sum(dim=dim, keepdim=True).clamp(3.90625e-15, 3.90625e35)


def squared_lengths(s: Tensor, dim: int) -> Tensor:
    """Squared lengths along ``dim``, which stays with size 1; clamped to [1e-12, 1e38].

    The lower bound keeps the square root differentiable (the ONNX exporter would delete so small a ``+ eps``, not a
    clamp); the upper one keeps float32 finite when the sum of squares overflows.
    """
    return (s * s).sum(dim=dim, keepdim=True).clamp(1e-12, 1e38)


def squash_factor(square: Tensor) -> Tensor:
    """What :func:`squash` multiplies a capsule by, ``|s| / (1 + |s|^2)``, from its squared length."""
    return square.sqrt() / (1.0 + square)


def squash_gradient(grad: Tensor, s: Tensor, dim: int, square: Tensor) -> Tensor:
    """Gradient of ``s`` from that of ``squash(s, dim)``; exact at any length in float32.

    Args:
        grad: of the shape of ``s``.
        s: capsules, float32 or float64.
        dim: the pose axis.
        square: :func:`squared_lengths` of ``s``.
    """
    root, total = square.sqrt(), 1.0 + square
    # derivative of the factor by half the square; the order of divisions avoids overflow in float32
    along = (grad * s).sum(dim=dim, keepdim=True) / root / total * ((1.0 - square) / total)
    along *= (square > 1e-12).to(s.dtype)  # zero where clamped (masked_fill_ takes far longer)
    return (grad * (root / total)).addcmul_(s, along)


def exponential_squash(s: Tensor, dim: int = -1) -> Tensor:
    """Squash capsules along one axis with ``1 - exp(-|s|)`` (Efficient-CapsNet).

    The length is clamped at 1e-6, so that a zero capsule gives zero and a finite gradient.

    Args:
        s: capsules, any shape, floating point; the pose lies along ``dim``.
        dim: the pose axis.

    Returns:
        Tensor of the shape and dtype of ``s``; lengths lie in [0, 1] (of capsules up to a length of 1e19).
    """
    x = upcast_half(s)
    length = _scaled_square(x, dim).sqrt() * 16.0
    # 1 - exp(-l) without cancellation; not every exporter knows expm1
    share = torch.tanh(length * 0.5) * (1.0 + torch.exp(-length))
    return (x * (share / length)).to(s.dtype)


def capsule_lengths(poses: Tensor, dim: int = -1) -> Tensor:
    """Lengths of capsules, with a finite gradient at zero.

    Args:
        poses: capsules, any shape; the pose lies along ``dim``.
        dim: the pose axis.

    Returns:
        The shape of ``poses`` without ``dim``, its dtype. Lengths below 1e-6 are returned as 1e-6.
    """
    x = upcast_half(poses)
    return (x * x).sum(dim=dim).clamp(1e-12, 1e38).sqrt().to(poses.dtype)


class Squash(nn.Module):
    """:func:`squash` or :func:`exponential_squash` as a module.

    Args:
        dim: the pose axis.
        pose_dim: if given, the axis ``dim`` contains several consecutive capsules (index = capsule *
            pose_dim + dimension, as in the feature maps of this package), each squashed separately.
        exponential: use :func:`exponential_squash`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, dim: int = -1, pose_dim: int = 0, exponential: bool = False) -> None:
        super().__init__()
        at_least(0, pose_dim=pose_dim)
        self.dim = dim
        self.pose_dim = pose_dim
        self.exponential = exponential

    def forward(self, x: Tensor) -> Tensor:
        if self.pose_dim == 0:
            return self._squash(x, self.dim)
        dim = self.dim if self.dim >= 0 else x.dim() + self.dim
        # [..., capsules, d, ...]
        grouped = split_axis(x, dim, [x.shape[dim] // self.pose_dim, self.pose_dim])
        return self._squash(grouped, dim + 1).flatten(dim, dim + 1)

    def _squash(self, x: Tensor, dim: int) -> Tensor:
        if self.exponential:
            return exponential_squash(x, dim)
        return squash(x, dim)

    def extra_repr(self) -> str:
        pose = f", pose_dim={self.pose_dim}" if self.pose_dim else ""
        return f"dim={self.dim}{pose}" + (", exponential=True" if self.exponential else "")
