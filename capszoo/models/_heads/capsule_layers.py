"""Base of the heads with primary capsules and one or two capsule layers."""

from typing import Any, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from capszoo.layers import capsules_from_map
from capszoo.layers._modules import at_least

from .._base import CouplingLayout
from .base import CapsuleHead, ConvNorm, HeadArgs, HeadOutput


class ActivePrimary(nn.Module):
    """Poses (3x3 convolution, BatchNorm) and activations (the same and a sigmoid) as one map.

    ``[b, in_chans, h, w]`` to ``[b, types * (d + 1), h, w]``: the poses, then the activations.
    """

    def __init__(self, in_chans: int, types: int, dim: int) -> None:
        super().__init__()
        self.activation = ConvNorm(in_chans, types)
        self.pose = ConvNorm(in_chans, types * dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.pose(x), torch.sigmoid(self.activation(x))], dim=1)


class CapsuleLayersHead(CapsuleHead):
    """Base of the heads with primary capsules; ``depth`` is the routing depth.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension.
    """

    #: whether a child has an activation besides its pose
    active = False

    def __init__(self, common: HeadArgs, caps_types: int, caps_dim: int, depth: int = 1) -> None:
        super().__init__(common)
        if depth not in (1, 2):
            raise ValueError(f"depth must be 1 or 2 capsule layers, not {depth}")
        at_least(1, caps_types=caps_types, caps_dim=caps_dim)
        self.caps_types, self.caps_dim, self.depth = caps_types, caps_dim, depth
        self.width = caps_types * caps_dim
        self.primary: nn.Module = nn.Identity()
        self.hidden: Any = nn.Identity()
        self.norm: nn.Module = nn.BatchNorm2d(self.width) if depth == 2 else nn.Identity()
        rows, columns = self.grid
        self.top = ((rows - 1) // 2 + 1, (columns - 1) // 2 + 1) if depth == 2 else (rows, columns)

    @property
    def num_children(self) -> int:
        """Number of children of the class layer."""
        return self.top[0] * self.top[1] * self.caps_types

    @property
    def hidden_size(self) -> int:
        return self.width

    def _hidden(self, x: Tensor) -> Tensor:
        """Primary capsules to the class layer's children, both as maps."""
        return self.norm(self.hidden(x))

    def _children(self, x: Tensor) -> Tensor:
        """Feature map to the class layer's children as a map: the poses, then any activations."""
        x = self.primary(self._map(x))
        if self.depth == 2:
            x = self._hidden(x)
        return x

    def _pooled(self, x: Tensor) -> Tensor:
        return self._children(x)[:, : self.width].mean(dim=(2, 3))

    def _poses(self, x: Tensor) -> Tensor:
        """Map of children to ``[b, h' * w' * types, d]``."""
        return self.head_drop(capsules_from_map(x[:, : self.width], self.caps_dim))

    def _activations(self, x: Tensor) -> Tensor:
        """Map of children to ``[b, h' * w' * types]``."""
        return x[:, self.width :].permute(0, 2, 3, 1).flatten(1)

    @torch.jit.ignore
    def _route_hidden(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Primary capsules to the hidden layer's capsules, both as maps, and its couplings."""
        return self.hidden.route(x)

    @torch.jit.ignore
    def _routed_children(self, x: Tensor) -> Tuple[Tensor, Tuple[Tensor, ...]]:
        """Like :meth:`_children`, but also return couplings ``[b, h', w', j, k*l*i]`` of a hidden layer, if any."""
        x = self.primary(self._map(x))
        if self.depth == 1:
            return x, ()
        x, couplings = self._route_hidden(x)
        if self.active:
            return torch.cat([self.norm(x[:, : self.width]), x[:, self.width :]], dim=1), (couplings,)
        return self.norm(x), (couplings,)

    @torch.jit.ignore
    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        below = (CouplingLayout(3, "parents"),) if self.depth == 2 else ()
        return (*below, CouplingLayout(1, "parents"))

    def _hand_down(self, share: Tensor, out: HeadOutput) -> Tensor:
        """Through the hidden layer: divide a parent's share among its window's children by their couplings."""
        if self.depth == 1:
            return share
        couplings = out.couplings[0].float()  # [b, h', w', j, 9*types]
        b, h, w, j, window = couplings.shape
        down = couplings / couplings.sum(dim=4, keepdim=True).clamp_min(1e-7)
        share = share.unflatten(2, (h * w, j)).transpose(1, 2)  # [b, h'w', n, j]
        share = torch.matmul(share, down.reshape(b, h * w, j, window))  # [b, h'w', n, 9*types]
        n, types = share.shape[2], self.caps_types
        # [b, n*types*9, h'w']; explicit sizes, because -1 is ambiguous for an empty batch
        share = share.unflatten(3, (9, types)).permute(0, 2, 4, 3, 1).reshape(b, n * types * 9, h * w)
        share = F.fold(share, self.grid, 3, padding=1, stride=2)  # [b, n*types, h, w]
        return share.unflatten(1, (n, types)).flatten(3).transpose(2, 3).flatten(2)
