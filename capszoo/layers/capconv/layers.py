"""Layers of EncapNet; letters as in :mod:`capszoo.layers.capconv`."""

import math
from typing import List, Optional, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .._forward_methods import ForwardMethods, forward_method
from .._layout import split_axis
from .._modules import at_least, is_plain
from ..engine import Reference, Routed, RoutingLayer
from .convolutions import CapGroupConv2d, CoefficientConv2d, XavierConv2d
from .engines import OneConvolution, Recompute, RecomputeBranches
from .routing import SquashGroups, cap_fc, capconv_combine, merge_groups

torch.fx.wrap("split_axis")

#: Source of a branch's coefficients: the branch itself, the other one, or both (Table 3, rows 2 to 4).
COEFFICIENTS = ("own", "cross", "both")


class _GroupedLayer(RoutingLayer):
    """A layer whose routing takes maps ``[b, g*d, h, w]`` of ``g`` capsule channels."""

    groups: int

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        x = inputs[0]
        dim = x.shape[1] // self.groups
        return x.shape[2] * x.shape[3], self.groups, self.groups, dim, dim


def _check(in_chans: int, out_chans: int, groups: int, coefficients: str, mode: str) -> None:
    at_least(1, in_chans=in_chans, out_chans=out_chans, groups=groups)
    if in_chans % groups or out_chans % groups:
        raise ValueError(f"channels ({in_chans} to {out_chans}) must be multiples of groups ({groups})")
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"coefficients must be one of {', '.join(COEFFICIENTS)}, not {coefficients!r}")
    if mode not in ("master", "master_aide"):
        raise ValueError(f"mode must be 'master' or 'master_aide', not {mode!r}")


class MasterAide(_GroupedLayer):
    """Both branches and their coefficients: ``[b, in, h, w] -> [b, out, h', w']``, before any skip connection.

    Args:
        in_chans, out_chans: channels, multiples of ``groups``.
        kernel_size: of the master; the aide's is 4 larger.
        stride: of both.
        groups: capsule channels.
        coefficients: ``"own"``, ``"cross"`` or ``"both"``.

    Raises:
        ValueError: an argument is out of range.
    """

    engines = (RecomputeBranches, Reference)
    graph_weight: Optional[Tensor]

    def __init__(
        self, in_chans: int, out_chans: int, kernel_size: int, stride: int, groups: int, coefficients: str
    ) -> None:
        super().__init__()
        _check(in_chans, out_chans, groups, coefficients, "master_aide")
        at_least(1, kernel_size=kernel_size, stride=stride)
        self.groups = groups
        self.coefficients = coefficients
        self.master = CapGroupConv2d(in_chans, out_chans, kernel_size, stride, groups)
        self.master_bn = nn.BatchNorm2d(out_chans)
        wide = kernel_size + 4
        self.aide = XavierConv2d(in_chans, out_chans, wide, stride, wide // 2)
        self.aide_bn = nn.BatchNorm2d(out_chans)
        self.squash = SquashGroups(groups)
        # "both": (alpha, beta) for every capsule channel come from one convolution, whose weights for each branch are
        # stored in one of these two modules; else one map per capsule channel and branch
        both = coefficients == "both"
        maps = 2 * groups if both else groups
        self.coef_master = CoefficientConv2d(out_chans, maps, groups, bias=not both)
        self.coef_aide = CoefficientConv2d(out_chans, maps, groups, bias=True)
        self.register_buffer("graph_weight", None, persistent=False)

    def branches(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Master and aide activations, each ``[b, out, h', w']``, after their BN-ReLU-squash."""
        return self._activate(self.master(x), self.aide(x))

    def _activate(self, master: Tensor, aide: Tensor) -> Tuple[Tensor, Tensor]:
        master = self.squash(F.relu(self.master_bn(master), inplace=True))
        aide = self.squash(F.relu(self.aide_bn(aide), inplace=True))
        return master, aide

    def route(self, master: Tensor, aide: Tensor) -> Tuple[Tensor, Tensor]:
        """The coefficients ``(alpha, beta)`` of the two activations, each ``[b, g, h', w']``."""
        if self.coefficients == "both":
            if not self.may_read_children():
                maps = (self.coef_master(master) + self.coef_aide(aide)).unflatten(1, (self.groups, 2))
                return maps[:, :, 0], maps[:, :, 1]
            # one convolution of both branches, side by side in each group, instead of two and their sum
            grid = [split_axis(x, 1, [self.groups, x.shape[1] // self.groups]) for x in (master, aide)]
            pair = torch.cat(grid, dim=2).flatten(1, 2)  # [b, g*2d, h, w]
            weight = self.graph_weight
            if weight is None:
                weight = self.coefficient_weight()
            maps = F.conv2d(
                pair, weight, self.coef_aide.bias, 1, 1, 1, self.groups // self.coef_aide.together
            )
            maps = split_axis(maps, 1, [self.groups, 2])
            return maps[:, :, 0], maps[:, :, 1]
        first = self.coef_master(master)
        second = self.coef_aide(aide)
        if self.coefficients == "own":
            return first, second
        return second, first

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """Combine the convolved maps ``[master, aide]``; there are no couplings."""
        master, aide = self._activate(inputs[0], inputs[1])
        alpha, beta = self.route(master, aide)
        return Routed([capconv_combine(master, aide, alpha, beta)], [], None)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute([self.master(x), self.aide(x)], 1, False).poses[0]

    @torch.jit.unused
    def children_are_plain(self) -> bool:
        coefs = (self.coef_master, self.coef_aide)
        return all(type(coef) is CoefficientConv2d and is_plain(coef) for coef in coefs)

    def coefficient_weight(self) -> Tensor:
        """Weights of the one convolution that gives both coefficients (see :func:`merge_groups`)."""
        weight = torch.cat((self.coef_master.weight, self.coef_aide.weight), dim=1)
        return merge_groups(weight, self.groups, self.coef_aide.together)

    @torch.jit.unused
    def prepare_for_export(self) -> None:
        """Store the merged weights as a constant."""
        if self.coefficients == "both" and self.children_are_plain():
            self.graph_weight = self.coefficient_weight().detach()
            self.coef_master.graph_weight = self.coef_aide.graph_weight = None

    def extra_repr(self) -> str:
        return f"groups={self.groups}, coefficients={self.coefficients}"


class CapConv(_GroupedLayer):
    """One capConv layer: master (and aide), an optional skip, BN-ReLU-squash.

    Type I raises the pose size and strides (``kernel_size=3``); Type II keeps both (``kernel_size=1``).

    Args:
        in_chans, out_chans: channels, multiples of ``groups``; the pose sizes are ``chans / groups``.
        kernel_size: of the master branch, odd.
        stride: of both branches.
        groups: capsule channels.
        mode: ``"master_aide"``, or ``"master"`` for the master alone, without coefficients (Table 3, row 1).
        coefficients: ``"own"``, ``"cross"`` or ``"both"`` (Table 3, rows 2, 3, 4).

    Raises:
        ValueError: an argument is out of range.
    """

    engines = (Recompute, Reference)

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        kernel_size: int = 3,
        stride: int = 1,
        groups: int = 32,
        mode: str = "master_aide",
        coefficients: str = "both",
    ) -> None:
        super().__init__()
        _check(in_chans, out_chans, groups, coefficients, mode)
        at_least(1, kernel_size=kernel_size, stride=stride)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, not {kernel_size}")
        self.groups = groups
        self.conv: nn.Module
        if mode == "master":
            self.conv = CapGroupConv2d(in_chans, out_chans, kernel_size, stride, groups)
        else:
            self.conv = MasterAide(in_chans, out_chans, kernel_size, stride, groups, coefficients)
        self.bn = nn.BatchNorm2d(out_chans)
        self.squash = SquashGroups(groups)

    def forward(self, x: Tensor, skip: Optional[Tensor] = None) -> Tensor:
        """Capsules ``[b, in, h, w]`` to ``[b, out, h', w']``; ``skip``, of that shape, is added before the norm."""
        y = self.conv(x)
        if skip is not None:
            y = y + skip
        return self.finish(y)

    def finish(self, y: Tensor) -> Tensor:
        """The sum of branches and skip ``[b, out, h', w']`` to capsules of that shape."""
        return self.compute([y], 1, False).poses[0]

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """BN-ReLU-squash of the sum of branches and skip; there are no couplings."""
        return Routed([self.squash(F.relu(self.bn(inputs[0]), inplace=True))], [], None)


class EncapModule(_GroupedLayer):
    """An encapsulated module (Fig. 3a): one Type I layer, then a stack of Type II layers.

    Args:
        in_chans, out_chans: channels, multiples of ``groups``.
        depth: layers in all, the Type I layer included.
        stride: of the Type I layer.
        groups: capsule channels.
        mode, coefficients: as in :class:`CapConv`.
        skip_type1: add a 3x3 ungrouped convolution of the input to the Type I layer (Table 3, row 5).
        skip_type2: add the stack's input to its last layer, before that layer's norm (Table 3, row 6).

    Raises:
        ValueError: an argument is out of range.
    """

    engines = (OneConvolution, Reference)

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        depth: int = 4,
        stride: int = 1,
        groups: int = 32,
        mode: str = "master_aide",
        coefficients: str = "both",
        skip_type1: bool = True,
        skip_type2: bool = True,
    ) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"a module has at least its Type I layer: depth must be 1 or more, not {depth}")
        self.groups = groups
        self.aided = mode != "master"
        self.skip_type2 = skip_type2
        self.last = depth - 2  # index of the last Type II layer
        self.skip: Optional[nn.Module] = None
        if skip_type1:
            self.skip = XavierConv2d(in_chans, out_chans, 3, stride, 1)
        self.type1 = CapConv(in_chans, out_chans, 3, stride, groups, mode, coefficients)
        self.type2 = nn.ModuleList(
            CapConv(out_chans, out_chans, 1, 1, groups, mode, coefficients) for _ in range(depth - 1)
        )

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """The Type I layer without an aide, and its skip; there are no couplings."""
        skip = self.skip
        assert skip is not None
        return Routed([self.type1(inputs[0], skip(inputs[0]))], [], None)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, in, h, w] -> [b, out, h', w']``."""
        if self.skip is None:
            x = self.type1(x)
        elif self.aided:
            x = self.type1(x, self.skip(x))
        else:
            x = self.compute([x], 1, False).poses[0]
        stack_input = x
        for index, layer in enumerate(self.type2):
            if self.skip_type2 and index == self.last:
                x = layer(x, stack_input)
            else:
                x = layer(x)
        return x


class CapFC(ForwardMethods):
    """capFC: one matrix per pose dimension from all grid capsules to the classes, then squash.

    Args:
        num_classes: class capsules.
        pose_dim: pose dimension of the grid capsules and of the class capsules.
        groups: capsule channels.
        grid: rows and columns of the feature map.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, num_classes: int, pose_dim: int = 16, groups: int = 32, grid: Union[int, Tuple[int, int]] = 4
    ) -> None:
        super().__init__()
        at_least(1, num_classes=num_classes, pose_dim=pose_dim, groups=groups)
        self.num_classes = num_classes
        self.pose_dim = pose_dim
        self.groups = groups
        self.grid = (grid, grid) if isinstance(grid, int) else (int(grid[0]), int(grid[1]))
        at_least(1, grid=min(self.grid))
        in_caps = groups * self.grid[0] * self.grid[1]
        self.weight = nn.Parameter(torch.empty(pose_dim, in_caps, num_classes))  # [d, g*h*w, n]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1.0 / math.sqrt(self.weight.shape[1])  # as released
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Grid capsules ``[b, g*d, h, w]`` to class capsules ``[b, n, d]``."""
        return cap_fc(x, self.weight)

    @torch.jit.ignore
    @forward_method
    def votes(self, x: Tensor) -> Tensor:
        """Grid capsules ``[b, g*d, h, w]`` to their summands in the classes before the squash, ``[b, n, g*h*w, d]``."""
        children = x.unflatten(1, (self.groups, self.pose_dim)).transpose(1, 2).flatten(2)  # [b, d, g*h*w]
        return torch.einsum("bdi,din->bnid", children, self.weight)

    @torch.jit.ignore
    @forward_method
    def contributions(self, x: Tensor, poses: Tensor) -> Tensor:
        """How much each grid position adds to each class capsule's length, ``[b, n, h, w]``, summing to 1.

        A position's vote for a class is its share of the matrix products before the squash. Its contribution is
        the vote's component along the class capsule, clamped at zero and normalised over the grid (uniform where
        no position contributes). It replaces coupling coefficients, which this layer does not have.

        Args:
            x: grid capsules ``[b, g*d, h, w]``.
            poses: class capsules ``[b, n, d]``.
        """
        h, w = self.grid
        d = self.pose_dim
        weight = self.weight.unflatten(1, (self.groups, h * w)).transpose(1, 2).flatten(0, 1)  # [d*h*w, g, n]
        grid = x.unflatten(1, (self.groups, d)).flatten(3).permute(2, 3, 0, 1).flatten(0, 1)  # [d*h*w, b, g]
        votes = torch.bmm(grid, weight).unflatten(0, (d, h * w)).permute(2, 3, 1, 0)  # [b, n, h*w, d]
        share = torch.matmul(votes, poses.unsqueeze(-1)).squeeze(-1).float().clamp(min=0.0)  # [b, n, h*w]
        total = share.sum(dim=-1, keepdim=True)
        uniform = torch.full_like(share, 1.0 / (h * w))
        return torch.where(total > 1e-12, share / total.clamp(min=1e-12), uniform).unflatten(-1, (h, w))

    def extra_repr(self) -> str:
        h, w = self.grid
        return f"{self.groups}x{h}x{w} capsules of {self.pose_dim} -> {self.num_classes}"
