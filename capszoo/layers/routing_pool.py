"""Routing pooling: dynamic routing as a pooling layer, with vector normalisation and a sparsity parameter.

Paper: Zhao, Huang, "Exploring Dynamic Routing As A Pooling Layer" (ICCV workshop, 2019), Algorithm 1, Eqs. 3, 5, 6.

=========== =========================================================================================
symbol      here
=========== =========================================================================================
û_i         ``u``, a child capsule: ``e`` channels at one grid position (or its vote, in ``routing_caps``)
û'_i, v     ``û_i / |û_i|``, ``s / |s|``: only their product is formed, from ``u`` and the lengths
s           ``s``, the parent before its activation
b_i, λ      ``logits`` holds λ·b_i; λ is ``lam``
c_i         ``couplings``, softmax over the children
r           ``num_iters``
=========== =========================================================================================

Letters: b batch, g groups (capsule types), l grid positions (locations), d child pose, e parent pose, n classes.

Two forms. :func:`routing_pool` is the pooling layer: the children of one group route to one parent, without any
transform. :func:`routing_caps` routes all children, of every type and position, to ``n`` class capsules through
transforms that are shared over positions; each class has its own couplings over all the children.

Deviations from the paper: lengths are clamped at 1e-6 (zero capsules stay zero, gradients stay finite). Half precision
is computed in float32, as is everything in the layers under autocast; poses are cast back, couplings stay float32. With
``lam=0``, where every coupling is uniform whatever the agreement, the iterations are skipped. Sharing the transforms of
``routing_caps`` over positions is our choice (the paper states only the model's size, which it matches).

Training: the gradient of a child's direction grows as 1 / |û|. One image with short capsules can dominate an update, so
clip gradients.

Speed: agreements and updates are batched matrix products over the children, whose layout changes once. ``routing_caps``
forms its votes once, for their lengths alone: as ``Σ c·(W u) = W·(Σ c·u)`` and ``⟨W u, v⟩ = ⟨u, Wᵀv⟩``, each
iteration works on the ``d``-dimensional children instead of ``n`` votes for each, with a tenth of the memory traffic.
"""

from typing import List, Tuple, Union

import torch
from torch import Tensor, nn

from ._forward_methods import forward_method
from ._layout import split_axis
from ._modules import at_least
from ._precision import upcast_half
from .engine import Routed, RoutingLayer
from .squash import squash

__all__ = ["RoutingCaps", "RoutingPool2d", "routing_caps", "routing_pool"]


def _length(square: Tensor) -> Tensor:
    """Length from its square; a divisor with a finite quotient and a finite gradient for every input.

    Divide by it: OpenVINO takes a product with the inverse, between the two products of a softmax, for the scale of an
    attention, which must be one number.
    """
    return square.clamp(1e-12, 1e38).sqrt()


def _activate(s: Tensor, activation: str) -> Tensor:
    if activation == "squash":
        return squash(s)
    if activation == "norm":
        return s / _length((s * s).sum(dim=-1, keepdim=True))
    return s


def _check(lam: float, num_iters: int, activation: str) -> None:
    """Also in scripted code, which knows neither keyword arguments of any name nor global tuples."""
    if not 0.0 <= lam < float("inf"):  # also true of NaN
        raise ValueError(f"lam must be 0 (average pooling) or more and finite, not {lam}")
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1, not {num_iters}")
    if activation != "identity" and activation != "squash" and activation != "norm":
        raise ValueError(f"activation must be one of 'identity', 'squash', 'norm', not '{activation}'")


def routing_pool(
    x: Tensor, lam: float = 5.0, num_iters: int = 3, activation: str = "identity"
) -> Tuple[Tensor, Tensor]:
    """Pool the capsules of each group to one, by agreement (Zhao & Huang 2019, Algorithm 1).

    Args:
        x: child capsules ``[b, g, l, e]``.
        lam: λ, sparsity of the couplings: 0 is average pooling, a large value selects the winner.
        num_iters: routing iterations r, at least 1.
        activation: of the parent: ``"identity"``, ``"squash"`` or ``"norm"`` (unit length).

    Returns:
        Poses ``[b, g, e]`` in the dtype of ``x``, and couplings ``[b, g, l]`` that sum to 1 over ``l`` (float32 for
        half precision).

    Raises:
        ValueError: ``lam`` is negative, ``num_iters`` is below 1, or the activation does not exist.
    """
    _check(lam, num_iters, activation)
    groups, locations, pose = x.shape[1], x.shape[2], x.shape[3]
    u = upcast_half(x).reshape(-1, locations, pose)  # [b*g, l, e]
    s = u.mean(dim=1, keepdim=True)  # lines 2, 3 and the first line 5: uniform couplings, [b*g, 1, e]
    if lam == 0.0:
        couplings = torch.ones_like(u[:, :, 0]) / locations
    else:
        u_t = u.transpose(1, 2)  # [b*g, e, l], a view
        lengths = _length((u * u).sum(dim=2)).unsqueeze(1)  # |u|, [b*g, 1, l]
        logits = lengths  # a placeholder, as the couplings
        c = lengths
        for it in range(num_iters):
            v = s * (lam / _length((s * s).sum(dim=2, keepdim=True)))  # line 6, times λ
            agreement = torch.bmm(v, u_t) / lengths  # line 7: λ b = λ <u', v>
            logits = agreement if it == 0 else logits + agreement
            c = logits.softmax(dim=-1)  # line 8
            s = torch.bmm(c, u)  # line 5 of the next iteration, or line 10
        couplings = c.squeeze(1)
    poses = _activate(s.reshape(-1, groups, pose), activation)  # line 11
    return poses.to(x.dtype), couplings.reshape(-1, groups, locations)


def routing_caps(
    x: Tensor, weight: Tensor, lam: float = 1.0, num_iters: int = 3, activation: str = "squash"
) -> Tuple[Tensor, Tensor]:
    """Route capsules of several types through transforms to class capsules (Algorithm 1 with votes).

    The vote of child (type g, position l) for class j is ``x[:, g, l] @ weight[j, g*d:(g+1)*d]``.

    Args:
        x: child capsules ``[b, g, l, d]``.
        weight: transforms ``[n, g*d, e]``, one ``d x e`` matrix for each class and type.
        lam: λ, sparsity of the couplings.
        num_iters: routing iterations r, at least 1.
        activation: of the parents: ``"identity"``, ``"squash"`` or ``"norm"``.

    Returns:
        Poses ``[b, n, e]`` in the dtype of ``x``, and couplings ``[b, n, g, l]``: for each class they sum to 1 over
        all children, ``g`` and ``l`` together (float32 for half precision).

    Raises:
        ValueError: ``lam`` is negative, ``num_iters`` is below 1, or the activation does not exist.
    """
    _check(lam, num_iters, activation)
    types, locations, d = x.shape[1], x.shape[2], x.shape[3]
    classes, e = weight.shape[0], weight.shape[2]
    w = upcast_half(weight)  # [n, g*d, e]
    u = upcast_half(x).transpose(0, 1)  # [g, b, l, d]
    u = u.reshape(-1, locations, d)  # [g*b, l, d], the one copy of the children
    # lines 2, 3 and the first line 5: uniform couplings; the mean is taken before the transform
    mean = u.mean(dim=1).reshape(types, -1, d).transpose(0, 1).reshape(-1, types * d) / types  # [b, g*d]
    s = torch.mm(mean, w.transpose(0, 1).reshape(types * d, -1))  # [b, n*e]
    s = s.reshape(-1, classes, e).transpose(0, 1)  # [n, b, e]
    if lam == 0.0:
        couplings = torch.ones_like(u[:, :, :1]) / (types * locations)  # [g*b, l, 1]
        couplings = couplings.reshape(types, -1, 1, locations).expand(-1, -1, classes, -1).permute(1, 2, 0, 3)
    else:
        # line 1: lengths of all votes, one matrix product per type, summed over e with the positions contiguous
        w_t = w.reshape(classes, types, d, e).permute(1, 0, 3, 2).reshape(types, -1, d)  # [g, n*e, d]
        votes = torch.bmm(w_t, u.reshape(types, -1, d).transpose(1, 2))  # [g, n*e, b*l]
        votes = votes.reshape(types, classes, e, -1)
        lengths = _length(votes.square().sum(dim=2))  # [g, n, b*l]
        lengths = lengths.reshape(types, classes, -1, locations).transpose(1, 2)  # [g, b, n, l]
        lengths = lengths.reshape(-1, classes, locations)  # [g*b, n, l]
        u_t = u.transpose(1, 2)  # [g*b, d, l], a view
        back = w.transpose(1, 2)  # [n, e, g*d], a view
        logits = torch.zeros_like(lengths)
        c = logits
        for it in range(num_iters):
            v = s * (lam / _length((s * s).sum(dim=2, keepdim=True)))  # line 6, times λ
            q = torch.bmm(v, back).reshape(classes, -1, types, d).permute(2, 1, 0, 3)  # Wᵀv, [g, b, n, d]
            agreement = torch.bmm(q.reshape(-1, classes, d), u_t)  # <û, v>, [g*b, n, l]
            logits = agreement / lengths if it == 0 else logits + agreement / lengths  # line 7
            c = logits.reshape(types, -1, classes, locations).permute(1, 2, 0, 3)  # [b, n, g, l]
            c = c.reshape(-1, classes, types * locations).softmax(dim=-1)  # line 8, over all children
            c = c.reshape(-1, classes, types, locations)
            pooled = torch.bmm(c.permute(2, 0, 1, 3).reshape(-1, classes, locations), u)  # Σ c u, [g*b, n, d]
            pooled = pooled.reshape(types, -1, classes, d).permute(2, 1, 0, 3).reshape(classes, -1, types * d)
            s = torch.bmm(pooled, w)  # line 5 of the next iteration, or line 10: [n, b, e]
        couplings = c
    poses = _activate(s, activation).transpose(0, 1)  # line 11
    return poses.to(x.dtype), couplings


torch.fx.wrap("split_axis")

# Leaves for FX, which cannot trace the dtype and autocast branches.
torch.fx.wrap("routing_pool")
torch.fx.wrap("routing_caps")


class RoutingPool2d(RoutingLayer):
    """Routing pooling of a feature map: ``[b, C, h, w] -> [b, C, 1, 1]`` or, flattened, ``[b, C]``.

    Channels are cut into groups of ``caps_dim``. In each group the capsules of all positions route to one, and the
    parents are concatenated, so the output width is that of average pooling. No parameters. With an ``output_size``
    above 1 the map is cut into that many equal cells, each pooled separately.

    The attributes ``pool_type``, ``flatten``, ``feat_mult()`` and ``is_identity()`` are those of timm's
    ``SelectAdaptivePool2d``, which it can replace.

    Args:
        caps_dim: channels of a capsule; must divide the channels of the input.
        lam: λ of the softmax; 0 is average pooling exactly.
        num_iters: routing iterations.
        activation: of the pooled capsules: ``"identity"``, ``"squash"`` or ``"norm"``.
        output_size: cells of the output, one number or (rows, columns); must divide the input's.
        flatten: return ``[b, C]`` (only with ``output_size=1``).

    Raises:
        ValueError: an argument is out of range.
        AssertionError: in ``forward``, if the channels or the grid of the input are not divisible.
    """

    autocasts = False

    def __init__(
        self,
        caps_dim: int = 16,
        lam: float = 5.0,
        num_iters: int = 3,
        activation: str = "identity",
        output_size: Union[int, Tuple[int, int]] = 1,
        flatten: bool = False,
    ) -> None:
        super().__init__()
        _check(lam, num_iters, activation)
        at_least(1, caps_dim=caps_dim)
        rows, cols = (output_size, output_size) if isinstance(output_size, int) else output_size
        if rows < 1 or cols < 1:
            raise ValueError(f"output_size must be at least 1, not {output_size}")
        if flatten and (rows, cols) != (1, 1):
            raise ValueError("flatten needs output_size=1")
        self.caps_dim = caps_dim
        self.lam = float(lam)
        self.num_iters = num_iters
        self.activation = activation
        self.rows = rows
        self.cols = cols
        self.flatten = flatten
        self.averages = lam == 0.0 and activation == "identity" and (rows, cols) == (1, 1)
        self.pool_type = "routing"
        self._chans_message = f"routing pooling needs channels that are a multiple of caps_dim={caps_dim}"
        self._grid_message = f"routing pooling to {rows}x{cols} cells needs a grid that is a multiple of it"

    def is_identity(self) -> bool:
        return False

    def feat_mult(self) -> int:
        return 1

    def capsules(self, x: Tensor) -> Tensor:
        """Feature map ``[b, C, h, w]`` to capsules, with one cell ``[b, g, l, e]``, else ``[b*g, rows*cols, l, e]``.

        l are the positions of a cell.
        """
        torch._assert(x.shape[1] % self.caps_dim == 0, self._chans_message)
        if self.rows == 1 and self.cols == 1:
            groups = x.shape[1] // self.caps_dim
            return split_axis(x.flatten(2), 1, [groups, self.caps_dim]).transpose(2, 3)  # a view
        h, w = x.shape[2], x.shape[3]
        torch._assert(h % self.rows == 0, self._grid_message)
        torch._assert(w % self.cols == 0, self._grid_message)
        x = x.reshape(-1, self.caps_dim, self.rows, h // self.rows, self.cols, w // self.cols)
        x = x.permute(0, 2, 4, 3, 5, 1).flatten(3, 4)  # [b*g, rows, cols, l, e]
        return x.reshape(-1, self.rows * self.cols, x.shape[3], self.caps_dim)  # the batch: b*g

    def forward(self, x: Tensor) -> Tensor:
        if self.averages:
            torch._assert(x.shape[1] % self.caps_dim == 0, self._chans_message)
            return self._average(x)
        return self._as_map(x, self.compute([self.capsules(x)], self.num_iters, False).poses[0])

    @forward_method
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Like :meth:`forward`, but also return :meth:`couplings`."""
        return self._route(x)

    def _route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        h, w = x.shape[2], x.shape[3]
        poses, c = self.with_couplings([self.capsules(x)], self.num_iters)
        pooled = self._average(x) if self.averages else self._as_map(x, poses)
        c = c.reshape(-1, self.rows, self.cols, h // self.rows, w // self.cols)
        return pooled, c.transpose(2, 3).reshape(-1, x.shape[1] // self.caps_dim, h, w)

    @forward_method
    def couplings(self, x: Tensor) -> Tensor:
        """Contribution of each position: ``[b, C, h, w] -> [b, groups, h, w]``; sums to 1 over each cell."""
        return self._route(x)[1]

    def _average(self, x: Tensor) -> Tensor:
        """Average pooling, in the input's layout and reduction order."""
        pooled = x.mean(dim=(2, 3), keepdim=True)
        return pooled.flatten(1) if self.flatten else pooled

    def _as_map(self, x: Tensor, poses: Tensor) -> Tensor:
        """Parents ``[b, g, e]`` or ``[b*g, rows*cols, e]`` of the capsules of ``x`` as a map, or flattened."""
        if self.rows == 1 and self.cols == 1:
            pooled = poses.reshape(-1, x.shape[1], 1, 1)
        else:
            pooled = poses.transpose(1, 2).reshape(-1, x.shape[1], self.rows, self.cols)
        return pooled.flatten(1) if self.flatten else pooled

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """:func:`routing_pool` of children ``[b, g, l, e]``."""
        poses, couplings = routing_pool(inputs[0], self.lam, num_iters, self.activation)
        return Routed([poses], [], couplings)

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        groups, locations, pose = inputs[0].shape[1:]
        return groups, locations, 1, pose, pose

    def extra_repr(self) -> str:
        return (
            f"caps_dim={self.caps_dim}, lam={self.lam:g}, num_iters={self.num_iters}, "
            f"activation={self.activation!r}, output_size=({self.rows}, {self.cols}), flatten={self.flatten}"
        )


class RoutingCaps(RoutingLayer):
    """Class capsules by Algorithm 1: capsules at the grid positions of a map, transforms shared over positions.

    ``[b, in_types * in_dim, h, w] -> [b, out_caps, out_dim]``; channel = type * in_dim + dimension. The weights do
    not depend on the grid.

    Args:
        in_types: capsule types, that is, capsules at one grid position.
        in_dim: channels of a child capsule.
        out_caps: class capsules.
        out_dim: dimension of a class capsule.
        lam: λ of the softmax.
        num_iters: routing iterations.
        activation: of the class capsules: ``"squash"``, ``"identity"`` or ``"norm"``.

    Raises:
        ValueError: an argument is out of range.
    """

    autocasts = False

    def __init__(
        self,
        in_types: int,
        in_dim: int,
        out_caps: int,
        out_dim: int = 16,
        lam: float = 1.0,
        num_iters: int = 3,
        activation: str = "squash",
    ) -> None:
        super().__init__()
        _check(lam, num_iters, activation)
        at_least(1, in_types=in_types, in_dim=in_dim, out_caps=out_caps, out_dim=out_dim)
        self.in_types = in_types
        self.in_dim = in_dim
        self.out_caps = out_caps
        self.out_dim = out_dim
        self.lam = float(lam)
        self.num_iters = num_iters
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(out_caps, in_types * in_dim, out_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Votes start at a fifth of their children's length (our choice; the paper does not specify it).

        With a ResNet's features the children have a length of about five, so class capsules start with a length of
        0.5. There the gradient of squash is largest; for longer capsules it fades.
        """
        nn.init.normal_(self.weight, std=0.2 * self.out_dim**-0.5)

    def _children(self, x: Tensor) -> Tensor:
        # [b, g, l, d], a view
        return split_axis(x.flatten(2), 1, [self.in_types, self.in_dim]).transpose(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Feature map ``[b, in_types * in_dim, h, w]`` to class capsules ``[b, out_caps, out_dim]``."""
        return self.compute([self._children(x)], self.num_iters, False).poses[0]

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """:func:`routing_caps` of children ``[b, g, l, d]``."""
        poses, couplings = routing_caps(inputs[0], self.weight, self.lam, num_iters, self.activation)
        return Routed([poses], [], couplings)

    @torch.jit.unused
    def sizes(self, inputs: List[Tensor]) -> Tuple[int, int, int, int, int]:
        x = inputs[0]
        return 1, x.shape[1] * x.shape[2], self.out_caps, self.in_dim, self.out_dim

    @forward_method
    def votes(self, x: Tensor) -> Tensor:
        """Feature map to votes ``[b, out_caps, in_types * h * w, out_dim]``, which routing does not store."""
        weight = self.weight.unflatten(1, (self.in_types, self.in_dim))  # [n, g, d, e]
        return torch.einsum("bgld,ngde->bngle", self._children(x), weight).flatten(2, 3)

    @forward_method
    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Like :meth:`forward`, but also return couplings ``[b, out_caps, in_types, h, w]`` (sum 1 over the last 3)."""
        poses, c = self.with_couplings([self._children(x)], self.num_iters)
        return poses, split_axis(c, 3, [x.shape[2], x.shape[3]])

    def extra_repr(self) -> str:
        return (
            f"{self.in_types}x{self.in_dim} -> {self.out_caps}x{self.out_dim}, lam={self.lam:g}, "
            f"num_iters={self.num_iters}, activation={self.activation!r}"
        )
