"""Capsule heads: from a feature map to class scores, with any routing of the zoo. :data:`HEADS` lists them.

The trunk and the twins are those of Hahn, Pyeon, Kim, "Self-Routing Capsule Networks" (NeurIPS 2019): 32 capsule types
of 16 dimensions from a 3x3 convolution, then one routing layer whose window is the whole map (``depth=1``), or a 3x3
layer of stride 2 below it (``depth=2``). The public release was read for facts. ``depth=2`` is available for the
paper's routings: dynamic, em, self_routing.

If scores are logarithms, they are log-probabilities: their cross-entropy is the negative log-likelihood.

Our choices: the EM head's inverse temperature is ``5e-4 + 4.6e-4 t``, the straight line through the release's
0.01 (1 - 0.95^(t+1)) at t = 0 and nearly at t = 1, 2; `idpa` and `self_attention` have the same primary capsules, with
LayerNorm and with the exponential squash; ``poses`` of self_routing, whose last layer has none, are the weighted means
of its children's poses.

Letters: ``b`` batch, ``i`` children, ``j`` parents, ``d`` child pose, ``e`` parent pose, ``h w`` grid, ``n`` classes.
"""

import inspect
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple, Type

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from capszoo._suggest import unknown_name
from capszoo.layers import (
    FCIDPA,
    CapsuleNorm,
    ConvDynamicRouting,
    ConvEM,
    ConvSelfRouting,
    DynamicRouting,
    RoutingPool2d,
    SelfAttentionRouting,
    SelfRouting,
    Squash,
    capsule_lengths,
    capsules_from_map,
)
from capszoo.layers._precision import upcast_half

from ._base import CouplingLayout, NoCapsules, Votes
from ._blocks import ConvBnAct, init_conv_weights

__all__ = ["HEADS", "CapsuleHead", "HeadOutput", "head_arguments", "unknown_routing"]

torch.fx.wrap("upcast_half")


class HeadOutput(NamedTuple):
    """Capsule outputs of a head.

    Attributes:
        scores: ``[b, n]``, as ``forward`` returns them.
        poses: class capsules ``[b, n, e]``.
        activations: presence of each class, ``[b, n]``.
        couplings: of each routing layer, in order; see :meth:`CapsuleHead.coupling_layouts`.
        share: ``[b, n, i]``, contribution of each child of the class layer to each class; not normalised.
    """

    scores: Tensor
    poses: Tensor
    activations: Tensor
    couplings: Tuple[Tensor, ...]
    share: Tensor


def _log(probabilities: Tensor) -> Tensor:
    return (probabilities + 1e-7).log()  # not a clamp, whose gradient would be zero


class ConvNorm(nn.Module):
    """3x3 convolution and BatchNorm, no activation."""

    def __init__(self, in_chans: int, out_chans: int, bias: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, out_chans, 3, 1, 1, bias=bias)
        self.bn = nn.BatchNorm2d(out_chans)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


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


class CapsuleHead(nn.Module):
    """A feature map ``[b, in_chans, h, w]`` to class scores ``[b, n]``; call this class, not its subclasses.

    ``CapsuleHead(64, (8, 8), 10, "dynamic")`` creates the head of that routing in :data:`HEADS`; further arguments are
    those of its class.

    Args:
        in_chans: channels of the map.
        grid: rows and columns of the map.
        num_classes: classes; 0 omits the class layer.
        routing: a name of :data:`HEADS`.
        proj_chans: channels of a 1x1 convolution (BatchNorm, ReLU) before the head, which makes the head's cost
            independent of the width of the map; 0 omits it.
        max_grid: a map with more rows or columns is first average-pooled to at most this many; 0 disables this.
        drop_rate: dropout of the class layer's input.

    Raises:
        ValueError: an unknown routing or argument, or sizes that do not fit; one line.
    """

    #: whether weights depend on ``grid``
    fixed_grid = True
    #: whether there are capsules; the twins have none
    has_capsules = True
    #: whether the classes have capsules, which ``forward`` computes
    has_poses = True

    def __new__(cls, *args: Any, **kwargs: Any) -> "CapsuleHead":
        if cls is CapsuleHead:
            routing = kwargs.get("routing", args[3] if len(args) > 3 else "idpa")
            if routing not in HEADS:
                raise unknown_routing(routing)
            cls = HEADS[routing]
            head_arguments(routing, {k for k in kwargs if k not in ("in_chans", "grid", "num_classes")})
        return super().__new__(cls)

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str = "idpa",
        proj_chans: int = 0,
        max_grid: int = 0,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if in_chans < 1 or min(grid) < 1:
            raise ValueError(f"in_chans and grid must be positive, not {in_chans} and {grid}")
        self.routing = routing
        self.shrink = -(-max(grid) // max_grid) if max_grid else 1
        self.grid = (-(-grid[0] // self.shrink), -(-grid[1] // self.shrink))
        self.project: nn.Module = ConvBnAct(in_chans, proj_chans, 1) if proj_chans else nn.Identity()
        self.chans = proj_chans or in_chans
        self.head_drop = nn.Dropout(drop_rate)

    def _ready(self, num_classes: int) -> None:
        """Last call of every ``__init__``: initialise the convolutions, create the class layer."""
        init_conv_weights(self)
        self.classes: Any = self.make_classes(num_classes)

    def make_classes(self, num_classes: int) -> nn.Module:
        """A new class layer; an identity for 0 classes."""
        return self._class_layer(num_classes) if num_classes else nn.Identity()

    def _class_layer(self, num_classes: int) -> nn.Module:
        raise NotImplementedError

    @property
    def hidden_size(self) -> int:
        """Width of :meth:`pooled`."""
        return self.chans

    def _map(self, x: Tensor) -> Tensor:
        """The feature map, pooled to at most ``max_grid`` and projected."""
        if self.shrink > 1:
            x = F.avg_pool2d(x, self.shrink, ceil_mode=True)
        return self.project(x)

    def pooled(self, x: Tensor) -> Tensor:
        """Feature map to ``[b, hidden_size]``: the class layer's input, averaged over the grid."""
        return self._map(x).mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Feature map ``[b, in_chans, h, w]`` to class scores ``[b, n]``."""
        return self.class_capsules(x)[0]

    def class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Feature map to scores ``[b, n]`` and class capsules ``[b, n, e]``."""
        raise NotImplementedError(f"the {self.routing} head has no class capsules")

    @torch.jit.ignore
    def route(self, x: Tensor) -> HeadOutput:
        """Feature map to all outputs of the head."""
        raise NoCapsules(f"the {self.routing} head has no capsules")

    @torch.jit.ignore
    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        """Layout of each of the couplings of :meth:`route`."""
        return ()

    @torch.jit.ignore
    def class_votes(self, x: Tensor) -> Votes:
        """Feature map to the votes for the class capsules."""
        raise NotImplementedError

    @torch.jit.ignore
    def coupling_map(self, x: Tensor) -> Tensor:
        """Feature map to ``[b, n, h', w']``: the share of each grid position in each class, summing to 1."""
        out = self.route(x)
        share = self._hand_down(out.share.float().clamp_min(0.0), out)
        heat = share.unflatten(2, (*self.grid, -1)).sum(dim=4) + 1e-12  # [b, n, h, w]
        return heat / heat.sum(dim=(2, 3), keepdim=True)

    def _hand_down(self, share: Tensor, out: HeadOutput) -> Tensor:
        """``[b, n, children of the class layer]`` to ``[b, n, h*w*types]``."""
        return share


class AverageHead(CapsuleHead):
    """Average pooling and a linear layer: the twin without capsules."""

    fixed_grid = has_capsules = has_poses = False

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str = "avg",
        proj_chans: int = 0,
        max_grid: int = 0,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(in_chans, grid, num_classes, routing, proj_chans, max_grid, drop_rate)
        self._ready(num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        return nn.Linear(self.chans, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.head_drop(self.pooled(x)))


class MaxHead(AverageHead):
    """Maximum pooling and a linear layer."""

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str = "max",
        proj_chans: int = 0,
        max_grid: int = 0,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(in_chans, grid, num_classes, routing, proj_chans, max_grid, drop_rate)

    def pooled(self, x: Tensor) -> Tensor:
        return self._map(x).amax(dim=(2, 3))


class RoutingPoolHead(AverageHead):
    """Routing pooling and a linear layer; "poses" are the contributions of each pooled capsule to each class score.

    Args:
        lam: λ of the routing; 0 is average pooling.
        caps_dim: channels of a capsule; divides those of the map (``proj_chans`` with a projection).
        num_iters: routing iterations.
    """

    has_capsules = True

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str = "routing_pool",
        proj_chans: int = 0,
        max_grid: int = 0,
        drop_rate: float = 0.0,
        lam: float = 5.0,
        caps_dim: int = 16,
        num_iters: int = 3,
    ) -> None:
        super().__init__(in_chans, grid, num_classes, routing, proj_chans, max_grid, drop_rate)
        if self.chans % caps_dim:
            raise ValueError(f"caps_dim={caps_dim} does not divide the {self.chans} channels of the map")
        self.pool = RoutingPool2d(caps_dim, lam, num_iters, flatten=True)

    def pooled(self, x: Tensor) -> Tensor:
        return self.pool(self._map(x))

    @torch.jit.ignore
    def route(self, x: Tensor) -> HeadOutput:
        """Returns couplings ``[b, groups, h, w]``, which sum to 1 over the positions."""
        x = self._map(x)
        pooled = self.pool(x)
        parts = (pooled[:, None] * self.classes.weight).unflatten(2, (-1, self.pool.caps_dim)).sum(-1)
        couplings = self.pool.couplings(x)
        scores = self.classes(self.head_drop(pooled))
        share = torch.bmm(parts.float().clamp_min(1e-6), couplings.float().flatten(2))  # [b, n, h*w]
        return HeadOutput(scores, parts, scores, (couplings,), share)

    @torch.jit.ignore
    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return (CouplingLayout(1, "children"),)

    @torch.jit.ignore
    def class_votes(self, x: Tensor) -> Votes:
        x = self._map(x)
        dim = self.pool.caps_dim
        votes = x.flatten(2).unflatten(1, (-1, dim)).transpose(2, 3)  # [b, g, h*w, e]
        return Votes(votes, self.pool(x).unflatten(1, (-1, dim)), False)


class ConvHead(CapsuleHead):
    """A convolution over the whole map of the primary capsules' channels: the same number of weights, no routing.

    Args:
        caps_types, caps_dim: their product is the number of channels.
    """

    has_capsules = has_poses = False

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str = "conv",
        proj_chans: int = 0,
        max_grid: int = 0,
        drop_rate: float = 0.0,
        caps_types: int = 32,
        caps_dim: int = 16,
    ) -> None:
        super().__init__(in_chans, grid, num_classes, routing, proj_chans, max_grid, drop_rate)
        self.width = caps_types * caps_dim
        self.primary = ConvNorm(self.chans, self.width, bias=True)
        self._ready(num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        layer = nn.Conv2d(self.width, num_classes, self.grid)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        return layer

    @property
    def hidden_size(self) -> int:
        return self.width

    def pooled(self, x: Tensor) -> Tensor:
        return self.primary(self._map(x)).mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.head_drop(self.primary(self._map(x)))).flatten(1)


class CapsuleLayersHead(CapsuleHead):
    """Base of the heads with primary capsules; ``depth`` is the routing depth.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension.
    """

    #: whether a child has an activation besides its pose
    active = False

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str,
        proj_chans: int,
        max_grid: int,
        drop_rate: float,
        caps_types: int,
        caps_dim: int,
        depth: int = 1,
    ) -> None:
        super().__init__(in_chans, grid, num_classes, routing, proj_chans, max_grid, drop_rate)
        if depth not in (1, 2):
            raise ValueError(f"depth must be 1 or 2 capsule layers, not {depth}")
        if caps_types < 1 or caps_dim < 1:
            raise ValueError(f"caps_types and caps_dim must be positive, not {caps_types} and {caps_dim}")
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

    def pooled(self, x: Tensor) -> Tensor:
        return self._children(x)[:, : self.width].mean(dim=(2, 3))

    def _poses(self, x: Tensor) -> Tensor:
        """Map of children to ``[b, h' * w' * types, d]``."""
        return self.head_drop(capsules_from_map(x[:, : self.width], self.caps_dim))

    def _activations(self, x: Tensor) -> Tensor:
        """Map of children to ``[b, h' * w' * types]``."""
        return x[:, self.width :].permute(0, 2, 3, 1).flatten(1)

    @torch.jit.ignore
    def _routed_children(self, x: Tensor) -> Tuple[Tensor, Tuple[Tensor, ...]]:
        """Like :meth:`_children`, but also return couplings ``[b, h', w', j, k*l*i]`` of a hidden layer, if any."""
        x = self.primary(self._map(x))
        if self.depth == 1:
            return x, ()
        if isinstance(self.hidden, ConvEM):
            poses, logits, couplings = self.hidden.route(_padded(x))
            x = self.hidden.pack(poses, logits).to(x.dtype)
        else:
            x, couplings = self.hidden.route(x)
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
        n = share.shape[2]
        share = (
            share.unflatten(3, (9, -1)).permute(0, 2, 4, 3, 1).reshape(b, -1, h * w)
        )  # [b, n*types*9, h'w']
        share = F.fold(share, self.grid, 3, padding=1, stride=2)  # [b, n*types, h, w]
        return share.reshape(b, n, self.caps_types, -1).transpose(2, 3).flatten(2)


class DynamicHead(CapsuleLayersHead):
    """Squashed primary capsules, dynamic routing; scores are ``log(length / sum of lengths)``.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension.
        class_dim: pose dimension of a class capsule.
        num_iters: routing iterations.
        depth: capsule layers, 1 or 2; with 2, the capsules of the first one go through a BatchNorm.
    """

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str = "dynamic",
        proj_chans: int = 0,
        max_grid: int = 0,
        drop_rate: float = 0.0,
        caps_types: int = 32,
        caps_dim: int = 16,
        class_dim: int = 16,
        num_iters: int = 3,
        depth: int = 1,
    ) -> None:
        super().__init__(
            in_chans, grid, num_classes, routing, proj_chans, max_grid, drop_rate, caps_types, caps_dim, depth
        )
        self.class_dim, self._iters = class_dim, num_iters
        self.primary = nn.Sequential(ConvNorm(self.chans, self.width), Squash(dim=1, pose_dim=caps_dim))
        if depth == 2:
            self.hidden = ConvDynamicRouting(
                caps_types, caps_dim, caps_types, caps_dim, 3, 2, 1, num_iters=num_iters
            )
        self._ready(num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        # Behind the BatchNorm, children are caps_dim ** 0.5 long instead of 1. With transforms as large as for children
        # of length 1, all classes would start at a length of 0.99, where squash has hardly any gradient.
        std = 0.1 / self.caps_dim**0.5 if self.depth == 2 else 0.1
        return DynamicRouting(
            self.num_children, self.caps_dim, num_classes, self.class_dim, self._iters, weight_std=std
        )

    def _scores(self, poses: Tensor) -> Tensor:
        lengths = capsule_lengths(upcast_half(poses))
        return _log(lengths / lengths.sum(dim=1, keepdim=True)).to(poses.dtype)

    def class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses = self.classes(self._poses(self._children(x)))
        return self._scores(poses), poses

    @torch.jit.ignore
    def route(self, x: Tensor) -> HeadOutput:
        """Returns couplings of the class layer ``[b, n, i]``, children ordered (row, column, type)."""
        children, below = self._routed_children(x)
        children = self._poses(children)
        poses, couplings = self.classes.route(children)
        share = couplings * capsule_lengths(self.classes.votes(children))
        return HeadOutput(self._scores(poses), poses, capsule_lengths(poses), (*below, couplings), share)

    @torch.jit.ignore
    def class_votes(self, x: Tensor) -> Votes:
        children = self._poses(self._children(x))
        return Votes(self.classes.votes(children), self.classes(children), True)


class SelfAttentionHead(DynamicHead):
    """Primary capsules and self-attention routing of Efficient-CapsNet; scores as in :class:`DynamicHead`.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension.
        class_dim: pose dimension of a class capsule.
    """

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str = "self_attention",
        proj_chans: int = 0,
        max_grid: int = 0,
        drop_rate: float = 0.0,
        caps_types: int = 32,
        caps_dim: int = 16,
        class_dim: int = 16,
    ) -> None:
        CapsuleLayersHead.__init__(
            self, in_chans, grid, num_classes, routing, proj_chans, max_grid, drop_rate, caps_types, caps_dim
        )
        self.class_dim = class_dim
        squash = Squash(dim=1, pose_dim=caps_dim, exponential=True)
        self.primary = nn.Sequential(ConvNorm(self.chans, self.width), squash)
        self._ready(num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        return SelfAttentionRouting(self.num_children, self.caps_dim, num_classes, self.class_dim)


class IDPAHead(CapsuleLayersHead):
    """Primary capsules with LayerNorm as matrix poses, one IDPA layer; scores by a linear layer shared by all classes.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension, a square number.
        num_iters: routing iterations.
    """

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str = "idpa",
        proj_chans: int = 0,
        max_grid: int = 0,
        drop_rate: float = 0.0,
        caps_types: int = 32,
        caps_dim: int = 16,
        num_iters: int = 2,
    ) -> None:
        super().__init__(
            in_chans, grid, num_classes, routing, proj_chans, max_grid, drop_rate, caps_types, caps_dim
        )
        self._iters = num_iters
        conv = nn.Conv2d(self.chans, self.width, 3, 1, 1, bias=False)
        self.primary = nn.Sequential(conv, CapsuleNorm(caps_dim))
        self.score = nn.Linear(caps_dim, 1)
        self._ready(num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        return FCIDPA(self.num_children, num_classes, self.caps_dim, num_iters=self._iters)

    def class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses = self.classes(self._poses(self._children(x)))
        return self.score(poses).squeeze(-1), poses

    @torch.jit.ignore
    def route(self, x: Tensor) -> HeadOutput:
        """Returns couplings ``[b, n, i]``, children ordered (row, column, type)."""
        children = self._poses(self._children(x))
        poses, _, found = self.classes.route([children], [], self.classes.num_iters)
        couplings = self.classes.even_couplings(poses[-1]) if found is None else found
        scores = self.score(poses[-1]).squeeze(-1)
        return HeadOutput(scores, poses[-1], scores, (couplings,), couplings)

    @torch.jit.ignore
    def class_votes(self, x: Tensor) -> Votes:
        children = self._poses(self._children(x))
        return Votes(self.classes.votes(children), self.classes(children), True)


def _padded(x: Tensor) -> Tensor:
    """Pad a map with capsules of activation zero."""
    return F.pad(x, [1, 1, 1, 1])


class EMHead(CapsuleLayersHead):
    """Primary capsules with activations, EM routing; scores are ``log(a / sum of a)``.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension, a square number.
        num_iters: routing iterations.
        depth: capsule layers, 1 or 2; with 2, the poses of the first one go through a BatchNorm.
    """

    active = True

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str = "em",
        proj_chans: int = 0,
        max_grid: int = 0,
        drop_rate: float = 0.0,
        caps_types: int = 32,
        caps_dim: int = 16,
        num_iters: int = 3,
        depth: int = 1,
    ) -> None:
        super().__init__(
            in_chans, grid, num_classes, routing, proj_chans, max_grid, drop_rate, caps_types, caps_dim, depth
        )
        side = round(caps_dim**0.5)
        if side * side != caps_dim:
            raise ValueError(f"matrix poses are square: caps_dim must be a square number, not {caps_dim}")
        self._options: Dict[str, Any] = dict(
            pose_size=side, num_iters=num_iters, lam_start=5e-4, lam_step=4.6e-4
        )
        self.primary = ActivePrimary(self.chans, caps_types, caps_dim)
        if depth == 2:
            self.hidden = ConvEM(
                caps_types, caps_types, kernel_size=3, stride=2, init_beta_v=0.5, **self._options
            )
        self._ready(num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        # the window is the whole map: all its children become the types of a single position
        return ConvEM(self.num_children, num_classes, kernel_size=1, init_beta_v=3.0, **self._options)

    def _hidden(self, x: Tensor) -> Tensor:
        x = self.hidden(_padded(x))
        return torch.cat([self.norm(x[:, : self.width]), x[:, self.width :]], dim=1)

    def _as_one_position(self, x: Tensor) -> Tensor:
        """Map of children to ``[b, i * (d + 1), 1, 1]``."""
        x = torch.cat([self._poses(x).flatten(1), self._activations(x)], dim=1)
        return x.unsqueeze(2).unsqueeze(3)

    def _scores(self, logits: Tensor) -> Tensor:
        """Activation logits ``[b, n]`` to ``log(a / sum of a)``, avoiding the activations, which may underflow."""
        return F.log_softmax(-F.softplus(-logits), dim=1)

    def class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        x = self._as_one_position(self._children(x))
        poses, logits, _ = self.classes._route(x, False)  # [b, 1, 1, n, d], [b, 1, 1, n]
        poses = poses.flatten(1, 3).to(x.dtype)  # before the scores, which must be the last operation for FX
        return self._scores(logits.flatten(1)).to(x.dtype), poses

    @torch.jit.ignore
    def route(self, x: Tensor) -> HeadOutput:
        """Returns couplings of the class layer ``[b, n, i]``, children ordered (row, column, type)."""
        children, below = self._routed_children(x)
        poses, logits, couplings = self.classes.route(self._as_one_position(children))
        poses, logits, couplings = poses[:, 0, 0], logits[:, 0, 0], couplings[:, 0, 0]
        share = couplings * self._activations(children).unsqueeze(1)
        scores, active = self._scores(logits).to(x.dtype), torch.sigmoid(logits).to(x.dtype)
        return HeadOutput(scores, poses.to(x.dtype), active, (*below, couplings), share)

    @torch.jit.ignore
    def class_votes(self, x: Tensor) -> Votes:
        children, _ = self._routed_children(x)
        poses = upcast_half(self._poses(children)).unflatten(2, (self.classes.pose_size, -1))  # [b, i, p, q]
        votes = torch.einsum("bipq,ijqr->bjipr", poses, upcast_half(self.classes.weight)).flatten(3)
        return Votes(votes, self.classes.route(self._as_one_position(children))[0][:, 0, 0], True)


class SelfRoutingHead(CapsuleLayersHead):
    """Primary capsules with activations, self-routing (SR-CapsNet); scores are the logarithms of the activations.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension.
        depth: capsule layers, 1 or 2; with 2, the poses of the first one go through a BatchNorm.
    """

    active = True
    has_poses = False

    def __init__(
        self,
        in_chans: int,
        grid: Tuple[int, int],
        num_classes: int,
        routing: str = "self_routing",
        proj_chans: int = 0,
        max_grid: int = 0,
        drop_rate: float = 0.0,
        caps_types: int = 32,
        caps_dim: int = 16,
        depth: int = 1,
    ) -> None:
        super().__init__(
            in_chans, grid, num_classes, routing, proj_chans, max_grid, drop_rate, caps_types, caps_dim, depth
        )
        self.primary = ActivePrimary(self.chans, caps_types, caps_dim)
        if depth == 2:
            self.hidden = ConvSelfRouting(caps_types, caps_dim, caps_types, caps_dim, 3, 2, 1)
        self._ready(num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        return SelfRouting(self.num_children, self.caps_dim, num_classes)

    def _hidden(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        return torch.cat([self.norm(x[:, : self.width]), x[:, self.width :]], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self._children(x)
        active, _ = self.classes(self._poses(x), self._activations(x))
        return _log(upcast_half(active)).to(x.dtype)

    @torch.jit.ignore
    def route(self, x: Tensor) -> HeadOutput:
        """Returns couplings of the class layer ``[b, n, i]``, children ordered (row, column, type)."""
        children, below = self._routed_children(x)
        poses, activations = self._poses(children), self._activations(children)
        active, _, couplings = self.classes.route(poses, activations)
        share = couplings * upcast_half(activations).unsqueeze(1)  # [b, n, i]
        means = torch.bmm(share, upcast_half(poses)) / share.sum(dim=2, keepdim=True).clamp_min(1e-7)
        scores = _log(upcast_half(active)).to(x.dtype)
        return HeadOutput(scores, means.to(x.dtype), active, (*below, couplings), share)


#: Routings available for a head, by name.
HEADS: Dict[str, Type[CapsuleHead]] = {
    "avg": AverageHead,
    "max": MaxHead,
    "conv": ConvHead,
    "routing_pool": RoutingPoolHead,
    "dynamic": DynamicHead,
    "em": EMHead,
    "idpa": IDPAHead,
    "self_routing": SelfRoutingHead,
    "self_attention": SelfAttentionHead,
}


def unknown_routing(name: str) -> ValueError:
    """The error for a routing that is not in :data:`HEADS`."""
    return ValueError(unknown_name("routing", str(name), HEADS))


def head_arguments(routing: str, given: Optional[Set[str]] = None) -> List[str]:
    """Names of the arguments specific to a routing.

    Raises:
        ValueError: an unknown routing, or one of ``given`` is no argument of it; the message suggests the nearest.
    """
    if routing not in HEADS:
        raise unknown_routing(routing)
    names = list(inspect.signature(HEADS[routing].__init__).parameters)[
        4:
    ]  # after self, in_chans, grid, num_classes
    for name in sorted(given or ()):
        if name not in names:
            raise ValueError(unknown_name(f"argument of the {routing} head", name, names))
    return names
