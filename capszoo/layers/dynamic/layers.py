"""Dynamic routing: routing by agreement between vector capsules.

Paper: Sabour, Frosst, Hinton, "Dynamic Routing Between Capsules" (2017), Procedure 1 and Eq. 1-3. The variants (which
axis the softmax runs over, how the logits start, transforms shared over the grid) are those of Li et al., "Neural
Network Encapsulation" (2018), appendix A and Table 5.

============ =====================================
symbol       here
============ =====================================
u_i          ``x``, the children
û_ij = W u_i ``votes``
b_ij         ``logits``
c_ij         ``couplings``
s_j          ``total``, the weighted sum of votes
v_j          ``poses``
r            ``num_iters``
============ =====================================

Letters: ``b`` batch, ``i`` children, ``j`` parents, ``d`` child pose, ``e`` parent pose, ``g`` groups (capsule types
that share a transform), ``p`` grid positions, ``h w`` grid, ``k l`` kernel.

How it is computed, without changing the result:

* The logits are never accumulated: after t rounds b_ij is ``<û_ij, v_j^1> + … + <û_ij, v_j^t>``, which is
  ``<û_ij, v_j^1 + … + v_j^t>``; the poses are summed instead, and there are ``i / e`` times fewer numbers in them.
* With logits that start at zero the first round is a plain sum of the votes, divided by the number of parents
  (children, where the softmax runs over children). If it is the only round, no vote is made at all: the sum over
  children and child dimensions is one matrix product.
* The logits are not updated after the last round (Procedure 1 does, and drops the result).
* Where transforms are shared over the grid (:class:`SharedDynamicRouting`), ``sum_p c W u_p = W sum_p c u_p`` and
  ``<W u_p, v> = <u_p, Wᵀ v>``: the votes, ``e`` times as many numbers as there are couplings, are never made.
* On a CPU, so many votes that no cache holds them are not made at all where children's poses are short
  (:mod:`capszoo.layers.dynamic.vote_free`); where poses are long, they are routed for some images (or windows) at a
  time.
* On CUDA, a round of :class:`DynamicRouting` after the first is one ``capszoo::fused_pass``
  (:mod:`capszoo.layers._triton`), with votes in registers, squash and the sum of the poses so far; where the softmax
  runs over the children, or the first logits are not zero, the plain form remains.

Deviations: logits and softmax are float32 for half-precision votes; on a CPU, in eager mode or compiled, so are all
rounds, but for those of long poses, and of transforms shared over the grid, in training.
"""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._precision import upcast_half
from .._tracing import is_tracing
from .._triton import fused, working_type
from .._triton.ops import fused_norm, fused_pass
from ..squash import squash
from .vote_free import pays_without_votes, vote_free_routing

__all__ = [
    "ConvDynamicRouting",
    "DynamicRouting",
    "SharedDynamicRouting",
    "dynamic_routing",
    "shared_dynamic_routing",
]

torch.fx.wrap("upcast_half")

#: Votes of one block (numbers in them; 8 MiB in float32), and from how many on blocks are made. Smaller blocks pay more
#: for each call than they save; more votes at once are memory that the system takes back and gives anew in every pass
#: of a network.
_BLOCK = 1 << 21
_MANY = 4 * _BLOCK

#: Numbers in a child's pose from which on votes are formed in blocks, and kept for the backward pass.
_DEEP = 16


def dynamic_routing(
    votes: Tensor,
    num_iters: int,
    softmax_over: str = "parents",
    start: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Route votes to parents (Procedure 1).

    Args:
        votes: ``[b, j, i, e]``, the vote of child ``i`` for parent ``j``. Any strides; a contiguous pose (last axis)
            is fastest.
        num_iters: rounds of routing, at least 1.
        softmax_over: the axis over which the couplings sum to 1: ``"parents"`` (Sabour et al., Eq. 3) or
            ``"children"`` (Li et al., appendix A.i).
        start: ``[j, i]``, the logits of the first round; zero where absent.

    Returns:
        poses ``[b, j, e]``, squashed, and the couplings ``[b, j, i]`` of the last round.

    Raises:
        ValueError: ``num_iters`` is below 1 or ``softmax_over`` is neither word.
    """
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1, not {num_iters}")
    if softmax_over != "parents" and softmax_over != "children":
        raise ValueError(f"softmax_over must be 'parents' or 'children', not {softmax_over}")
    axis = 1 if softmax_over == "parents" else 2
    # line 4 with b = 0: uniform, over the parents or over the children
    couplings = votes.new_ones((1, 1, 1)) / votes.shape[axis]  # [1, 1, 1]
    if start is None:
        # line 5: [b, j, e]; by way of the mean, for a sum of many float16 votes could overflow
        total = votes.mean(dim=2) * (votes.shape[2] / votes.shape[axis])
    else:
        couplings = torch.softmax(upcast_half(start), dim=axis - 1).to(votes.dtype).unsqueeze(0)  # [1, j, i]
        total = torch.matmul(couplings.unsqueeze(2), votes).squeeze(2)
    poses = squash(total)  # line 6: [b, j, e]
    pose_sum = poses
    for t in range(1, num_iters):
        # line 7, all rounds so far at once: b_ij = <û_ij, v^1 + … + v^t>
        logits = upcast_half(torch.matmul(votes, pose_sum.unsqueeze(3)).squeeze(3))  # [b, j, i]
        if start is not None:
            logits = logits + start
        couplings = torch.softmax(logits, dim=axis).to(votes.dtype)  # line 4: [b, j, i]
        total = torch.matmul(couplings.unsqueeze(2), votes).squeeze(2)  # line 5: [b, j, e]
        poses = squash(total)  # line 6
        if t < num_iters - 1:
            pose_sum = pose_sum + poses
    return poses, couplings.expand(votes.shape[0], votes.shape[1], votes.shape[2])


def _check(num_iters: int, softmax_over: str, init: str) -> None:
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1, not {num_iters}")
    if softmax_over not in ("parents", "children"):
        raise ValueError(f"softmax_over must be 'parents' or 'children', not {softmax_over!r}")
    if init not in ("zero", "random", "learned"):
        raise ValueError(f"init must be 'zero', 'random' or 'learned', not {init!r}")


class _Routing(nn.Module):
    """What the routing layers share: settings, and the logits of the first round.

    ``start`` is None (zero), a buffer drawn once from U(0, 1) at construction (random; a fixed draw, so that
    evaluation is deterministic), or a parameter that starts at zero (learned): Li et al. 2018, Table 5; the
    distributions are those of the authors' public release.
    """

    start: Optional[Tensor]

    def __init__(
        self, num_iters: int, softmax_over: str, init: str, num_parents: int, num_children: int
    ) -> None:
        super().__init__()
        _check(num_iters, softmax_over, init)
        self.num_iters = num_iters
        self.softmax_over = softmax_over
        self.init = init
        if init == "zero":
            self.start = None
        elif init == "random":
            self.register_buffer("start", torch.rand(num_parents, num_children))
        else:
            self.start = nn.Parameter(torch.zeros(num_parents, num_children))

    @torch.jit.unused
    def _is_half_on_cpu(self, x: Tensor) -> bool:
        """Whether the rounds leave half types, whose products on a CPU copy their inputs into another order first."""
        if is_tracing(x):
            return False
        return x.device.type == "cpu" and working_type(x) in (torch.float16, torch.bfloat16)


class DynamicRouting(_Routing):
    """A fully connected capsule layer: every child has its own transform to every parent.

    Args:
        in_caps, in_dim: children, and numbers in a child's pose.
        out_caps, out_dim: parents, and numbers in a parent's pose.
        num_iters: rounds of routing.
        softmax_over: ``"parents"`` or ``"children"``, see :func:`dynamic_routing`.
        init: logits of the first round: ``"zero"``, ``"random"`` or ``"learned"`` (``start``, ``[j, i]``).
        weight_std: the transforms start as a normal distribution, cut at two standard deviations, of this width
            (0.1 in the public release of Sabour et al.).

    ``weight`` is ``[i, d, j * e]``: the layout in which votes are one batched product over the children and the
    one-round layer is one plain product.
    """

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
        super().__init__(num_iters, softmax_over, init, out_caps, in_caps)
        self.in_caps, self.in_dim, self.out_caps, self.out_dim = in_caps, in_dim, out_caps, out_dim
        self.weight_std = weight_std
        self.weight = nn.Parameter(torch.empty(in_caps, in_dim, out_caps * out_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=self.weight_std, a=-2 * self.weight_std, b=2 * self.weight_std)

    def votes(self, x: Tensor) -> Tensor:
        """Children ``[b, i, d]`` to votes ``[b, j, i, e]``, a view of ``[i, b, j, e]``.

        A copy in the order of its axes costs as much time as it saves (measured), and as much memory again.
        """
        return self._votes_through(x, self.weight)

    def _votes_through(self, x: Tensor, weight: Tensor) -> Tensor:
        votes = torch.bmm(x.transpose(0, 1), weight)  # [i, b, d] @ [i, d, j*e] -> [i, b, j*e]
        votes = votes.reshape(self.in_caps, -1, self.out_caps, self.out_dim)
        return votes.permute(1, 2, 0, 3)

    @torch.jit.unused
    def _is_fused(self, x: Tensor) -> bool:
        if self.num_iters == 1 or self.softmax_over != "parents" or self.start is not None:
            return False
        return fused(x, self.weight, self.out_caps, 1, self.in_dim, self.out_dim)

    @torch.jit.unused
    def _fused_rounds(self, x: Tensor, want_couplings: bool) -> Tuple[Tensor, Tensor]:
        """:func:`dynamic_routing` of ``[b, i, d]``, no vote being kept; couplings ``[b, j, i]`` where wanted."""
        dtype = working_type(x)
        squashed = ("squash", None, None, 0.0)
        poses = fused_norm(self._single_sum(x), 1.0, *squashed).to(dtype)
        couplings = poses
        children = x.reshape(-1, 1, 1, self.in_caps, self.in_dim).to(dtype)
        weight = self.weight.reshape(self.in_caps, self.in_dim, self.out_caps, self.out_dim).to(dtype)
        keep = torch.is_grad_enabled()
        for t in range(1, self.num_iters):
            last = t == self.num_iters - 1
            # before the last round, the poses of all rounds so far, added up
            poses, couplings, _ = fused_pass(
                children, weight, poses, want_couplings and last, keep, 1.0, 1, 1, not last, *squashed
            )
        return poses, couplings.transpose(1, 2) if want_couplings else couplings

    @torch.jit.unused
    def _gains_without_votes(self, x: Tensor) -> bool:
        return pays_without_votes(x.shape[0], self.in_caps, self.in_dim, self.out_caps)

    @torch.jit.unused
    def _has_many_votes(self, x: Tensor) -> bool:
        if is_tracing(x) or torch.compiler.is_compiling() or x.device.type != "cpu":
            return False
        if self._gains_without_votes(x):
            return True
        votes = self.in_caps * self.weight.shape[2]  # of an image
        # blocks of one or two images would read all weights, which are then many, for each
        return self.in_dim >= _DEEP and x.shape[0] * votes >= _MANY and votes <= _BLOCK // 4

    @torch.jit.unused
    def _rounds_on_cpu(self, x: Tensor, in_blocks: bool) -> Tensor:
        """:func:`dynamic_routing` of ``[b, i, d]``, some images at a time or without votes where that is asked for.

        The rounds are in float32 at least, and so are the votes; those of long poses are made in half types all the
        same, and where blocks of them are kept for a backward pass, left so.
        """
        dtype = working_type(x)
        deep = self.in_dim >= _DEEP
        votes_dtype = torch.float32 if self._is_half_on_cpu(x) and not deep else dtype
        size = self.in_caps * self.weight.shape[2]  # of an image's votes

        def routed(votes: Tensor) -> Tensor:
            return dynamic_routing(votes, self.num_iters, self.softmax_over, self.start)[0]

        with torch.autocast("cpu", enabled=False):
            x, weight = x.to(votes_dtype), self.weight.to(votes_dtype)
            if not in_blocks:
                poses = routed(upcast_half(self._votes_through(x, weight)))
            elif self._gains_without_votes(x):
                start = None if self.start is None else self.start.to(votes_dtype)
                poses = vote_free_routing(x, weight, start, self.out_caps, self.num_iters, self.softmax_over)
            elif torch.is_grad_enabled():
                parts = self._votes_through(x, weight).split(max(1, _BLOCK // size))
                poses = torch.cat([routed(votes) for votes in parts])
            else:
                parts = x.split(max(1, _BLOCK // size))
                poses = torch.cat([routed(upcast_half(self._votes_through(part, weight))) for part in parts])
        return poses.to(dtype)

    def _single_sum(self, x: Tensor) -> Tensor:
        """The first round without votes: the weighted sum over children is a matrix product."""
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

    def forward(self, x: Tensor) -> Tensor:
        """Children ``[b, i, d]`` to parents ``[b, j, e]``; their lengths lie in [0, 1]."""
        torch._assert(x.shape[1] == self.in_caps, "wrong number of child capsules for this routing layer")
        if self.num_iters == 1:
            return squash(self._single_sum(x))
        if not torch.jit.is_scripting():
            if self._is_fused(x):
                return self._fused_rounds(x, False)[0]
            many = self._has_many_votes(x)
            if many or self._is_half_on_cpu(x):
                return self._rounds_on_cpu(x, many)
        return dynamic_routing(self.votes(x), self.num_iters, self.softmax_over, self.start)[0]

    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Children ``[b, i, d]`` to parents ``[b, j, e]`` and the couplings ``[b, j, i]`` of the last round."""
        if not torch.jit.is_scripting():
            if self._is_fused(x):
                return self._fused_rounds(x, True)
        return dynamic_routing(self.votes(x), self.num_iters, self.softmax_over, self.start)

    def extra_repr(self) -> str:
        return (
            f"{self.in_caps}x{self.in_dim} -> {self.out_caps}x{self.out_dim}, num_iters={self.num_iters}, "
            f"softmax_over={self.softmax_over}, init={self.init}"
        )


class ConvDynamicRouting(nn.Module):
    """A convolutional capsule layer: at each output position the children of a window vote for the parents there.

    The children of a window are its ``k * l * in_caps`` capsules, with a transform for each place in the window and
    each type, shared over the output positions. The softmax runs, window by window, over the parent types at the
    output position (or over the window's children).

    Args:
        in_caps, in_dim: child types, and numbers in a child's pose.
        out_caps, out_dim: parent types, and numbers in a parent's pose.
        kernel_size, stride, padding: of the window; beyond the border there are zero capsules.
        num_iters, softmax_over, init, weight_std: as in :class:`DynamicRouting`.

    ``window`` is the :class:`DynamicRouting` that every window goes through; its children are ordered
    ``(row * l + column) * in_caps + type``.
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
        x = F.pad(x, [self.padding, self.padding, self.padding, self.padding])
        x = x.permute(0, 2, 3, 1)
        x = x.unfold(1, self.kernel_size, self.stride).unfold(2, self.kernel_size, self.stride)
        x = x.permute(0, 1, 2, 4, 5, 3)  # [b, h', w', k, l, i*d]
        children = self.kernel_size * self.kernel_size * self.in_caps
        return x.reshape(x.shape[0], x.shape[1], x.shape[2], children, self.in_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, in_caps * d, h, w]`` to ``[b, out_caps * e, h', w']``; channel = capsule * pose size + dimension."""
        x = self._windows(x)
        poses = self.window(x.flatten(0, 2))  # [b*h'*w', j, e]
        channels = poses.shape[1] * poses.shape[2]
        return poses.reshape(x.shape[0], x.shape[1], x.shape[2], channels).permute(0, 3, 1, 2)

    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """As ``forward``, with the couplings ``[b, h', w', j, k*l*i]`` of the last round."""
        x = self._windows(x)
        poses, couplings = self.window.route(x.flatten(0, 2))
        poses = poses.reshape(x.shape[0], x.shape[1], x.shape[2], -1).permute(0, 3, 1, 2)
        couplings = couplings.reshape(x.shape[0], x.shape[1], x.shape[2], self.out_caps, -1)
        return poses, couplings

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


def shared_dynamic_routing(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    num_iters: int,
    softmax_over: str = "children",
    start: Optional[Tensor] = None,
    need_couplings: bool = False,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Dynamic routing from capsules whose transforms are shared over the grid, without making votes.

    The vote of the child of type ``g`` at position ``p`` for parent ``j`` is ``W_gj u_gp + B_gj``. Two identities
    replace everything that is done with votes (``u'`` is ``u`` with a 1 appended, for the bias):

    * ``<W_gj u_gp + B_gj, v> = <u'_gp, [W_gjᵀ v, <B_gj, v>]>``: agreement is measured in the children's space;
    * ``sum_p c_gpj (W_gj u_gp + B_gj) = W_gj sum_p c_gpj u_gp + B_gj sum_p c_gpj``: children are summed first,
      and then transformed.

    Args:
        x: ``[b, g, d, p]``.
        weight: ``[j, e, g * d]``.
        bias: ``[j, e, g]``.
        num_iters: rounds of routing, at least 1.
        softmax_over: ``"children"`` (all ``g * p`` of them, Li et al., appendix A.i) or ``"parents"``.
        start: ``[j, g * p]``, the logits of the first round; zero where absent.
        need_couplings: whether to return the couplings.

    Returns:
        poses ``[b, j, e]``, squashed, and the couplings ``[b, j, g * p]`` of the last round, or None.
    """
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1, not {num_iters}")
    if softmax_over != "parents" and softmax_over != "children":
        raise ValueError(f"softmax_over must be 'parents' or 'children', not {softmax_over}")
    b, g, d, p = x.shape[0], x.shape[1], x.shape[2], x.shape[3]
    j, e = weight.shape[0], weight.shape[1]
    over_children = softmax_over == "children"
    children = F.pad(x, [0, 0, 0, 1], value=1.0)  # u': [b, g, d+1, p]
    transforms = torch.cat([weight.reshape(j, e, g, d), bias.unsqueeze(3)], dim=3).flatten(
        2
    )  # [j, e, g*(d+1)]
    couplings: Optional[Tensor] = None
    poses = x.new_zeros((1, 1, 1))
    pose_sum = poses
    first = 0
    if start is None:
        # round 1, uniform couplings: sum over the grid, then one product [b, g*(d+1)] @ [g*(d+1), j*e]
        first = 1
        count = g * p if over_children else j
        total = F.linear(children.mean(dim=3).flatten(1), transforms.flatten(0, 1))
        poses = squash(total.reshape(-1, j, e) * (p / count))  # [b, j, e]
        pose_sum = poses
        if need_couplings:
            couplings = (x.new_ones((1, 1, 1)) / count).expand(b, j, g * p)
    for t in range(first, num_iters):
        if t == 0:
            assert start is not None
            # [1, g*p, j]: the same for the whole batch
            share = torch.softmax(upcast_half(start), dim=1 if over_children else 0).t().unsqueeze(0)
        else:
            keys = torch.bmm(pose_sum.transpose(0, 1), transforms)  # [Wᵀ v, <B, v>]: [j, b, g*(d+1)]
            keys = keys.reshape(j, -1, g, d + 1).permute(1, 2, 3, 0)  # [b, g, d+1, j]
            logits = torch.matmul(children.transpose(2, 3), keys).reshape(-1, g * p, j)
            logits = upcast_half(logits)
            if start is not None:
                logits = logits + start.t()
            if over_children:
                # softmax over g*p: in place, its division left for the sums, whose row of ones has the denominator
                # (the maximum in two steps: ONNX Runtime is slow at long reductions over a middle axis)
                peak = logits.detach().reshape(-1, g, p, j).amax(dim=2).amax(dim=1)
                share = logits.sub_(peak.unsqueeze(1)).exp_()  # [b, g*p, j]
            else:
                share = torch.softmax(logits, dim=2)
        sums = torch.matmul(children, share.to(x.dtype).reshape(-1, g, p, j))  # sum_p c u': [b, g, d+1, j]
        total = torch.bmm(
            sums.permute(3, 0, 1, 2).flatten(2).contiguous(), transforms.transpose(1, 2)
        )  # [j, b, e]
        if over_children:
            mass = sums[:, :, d].sum(dim=1)  # sum_gp c: [b, j]
            total = total / mass.t().unsqueeze(2)
        poses = squash(total.transpose(0, 1))  # [b, j, e]
        if need_couplings and t == num_iters - 1:
            if over_children:
                share = share / share.sum(dim=1, keepdim=True)
            couplings = share.transpose(1, 2).to(x.dtype).expand(b, j, g * p)
        pose_sum = poses if t == 0 else pose_sum + poses
    return poses, couplings


class SharedDynamicRouting(_Routing):
    """Dynamic routing whose transforms are shared over the grid (Li et al. 2018, Fig. 1b and appendix A.i).

    Every capsule type ("group") has one biased transform to each parent, the same at all its positions: votes as by a
    biased 1x1 convolution with as many groups as capsule types. See :func:`shared_dynamic_routing` for how they
    are avoided.

    Args:
        groups, in_dim: child types, and numbers in a child's pose.
        out_caps, out_dim: parents, and numbers in a parent's pose.
        num_iters: rounds of routing.
        softmax_over: ``"children"`` or ``"parents"``.
        init: logits of the first round, ``"zero"``, ``"random"`` or ``"learned"``.
        positions: grid positions; needed only where the first logits are not zero, for they are one per child.

    ``weight`` is ``[j, e, g * d]``, normal of variance ``1 / d`` (our choice); ``bias`` is ``[j, e, g]``, standard
    normal as in the public release: with the softmax over children a parent is an average of its votes, and without
    biases of that size its squashed length starts too near zero to learn.
    """

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
        super().__init__(num_iters, softmax_over, init, out_caps, groups * positions)
        if init != "zero" and positions < 1:
            raise ValueError(f"init={init!r} has one logit per child: positions (of the grid) must be given")
        self.groups, self.in_dim, self.out_caps, self.out_dim = groups, in_dim, out_caps, out_dim
        self.weight = nn.Parameter(torch.empty(out_caps, out_dim, groups * in_dim))
        self.bias = nn.Parameter(torch.empty(out_caps, out_dim, groups))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_dim**-0.5)
        nn.init.normal_(self.bias)

    def votes(self, x: Tensor) -> Tensor:
        """Children ``[b, g, d, p]`` to votes ``[b, j, g * p, e]``, which the routing itself never makes."""
        weight = self.weight.unflatten(2, (self.groups, self.in_dim))  # [j, e, g, d]
        votes = torch.einsum("bgdp,jegd->bjgpe", x, weight)
        votes = votes + self.bias.permute(0, 2, 1).unsqueeze(2)  # [j, g, 1, e]
        return votes.flatten(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Children ``[b, g, d, p]`` to parents ``[b, j, e]``."""
        if not torch.jit.is_scripting():
            # (in training, half the size of all that is kept is worth more)
            if self._is_half_on_cpu(x) and not torch.is_grad_enabled():
                return self._in_float32(x)
        return shared_dynamic_routing(
            x, self.weight, self.bias, self.num_iters, self.softmax_over, self.start
        )[0]

    @torch.jit.unused
    def _in_float32(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            tensors = (upcast_half(x), upcast_half(self.weight), upcast_half(self.bias))
            poses = shared_dynamic_routing(*tensors, self.num_iters, self.softmax_over, self.start)[0]
        return poses.to(working_type(x))

    def route(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Children ``[b, g, d, p]`` to parents ``[b, j, e]`` and the couplings ``[b, j, g * p]`` of the last round."""
        poses, couplings = shared_dynamic_routing(
            x, self.weight, self.bias, self.num_iters, self.softmax_over, self.start, need_couplings=True
        )
        assert couplings is not None
        return poses, couplings

    def extra_repr(self) -> str:
        return (
            f"{self.groups} groups of {self.in_dim} -> {self.out_caps}x{self.out_dim}, "
            f"num_iters={self.num_iters}, softmax_over={self.softmax_over}, init={self.init}"
        )
