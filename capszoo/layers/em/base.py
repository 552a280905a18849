"""Base classes: the layers of matrix capsules, and the settings and initial values of every EM layer."""

from typing import ClassVar, List

import torch
from torch import Tensor, nn

from .._layout import block_diagonal
from .._modules import at_least, finite, non_negative, positive
from .._precision import upcast_half
from ..engine import Routed, RoutingLayer
from .steps import Settings, check_iterations

torch.fx.wrap("upcast_half")


class EMLayer(RoutingLayer):
    """A layer with EM routing; the fields of :class:`Settings` are attributes that may be set.

    It computes in float32 or wider, under autocast too: half precision cannot represent its variances.
    """

    autocasts: ClassVar[bool] = False

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        check_iterations(settings.num_iters)
        non_negative(lam_start=settings.lam_start, lam_step=settings.lam_step)
        positive(var_floor=settings.var_floor, eps=settings.eps)
        self.num_iters = settings.num_iters
        self.lam_start = settings.lam_start
        self.lam_step = settings.lam_step
        self.var_floor = settings.var_floor
        self.eps = settings.eps
        self.normalize_cost = settings.normalize_cost

    def settings(self, num_iters: int) -> Settings:
        return Settings(
            num_iters, self.lam_start, self.lam_step, self.var_floor, self.eps, self.normalize_cost
        )

    def extra_repr(self) -> str:
        text = f"num_iters={self.num_iters}, lam={self.lam_start:g}+{self.lam_step:g}t"
        text += f", var_floor={self.var_floor:g}, eps={self.eps:g}"
        return text + (", normalize_cost=True" if self.normalize_cost else "")


class MatrixEM(EMLayer):
    """Shared by the two layers of matrix capsules: arguments, parameters, and the layout of maps.

    A map of matrix capsules is ``[b, caps * (p*p + 1), h, w]``: the poses, channel = capsule * p*p + row * p +
    column, then the activations, one channel a capsule.
    """

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        taps: int,
        pose_size: int,
        settings: Settings,
        init_noise: float,
        init_beta_v: float,
    ) -> None:
        super().__init__(settings)
        at_least(1, in_caps=in_caps, out_caps=out_caps)
        non_negative(init_noise=init_noise)
        finite(init_beta_v=init_beta_v)
        if pose_size < 2:
            raise ValueError(f"pose_size must be at least 2 (poses are matrices), not {pose_size}")
        self.in_caps = in_caps
        self.out_caps = out_caps
        self.pose_size = pose_size
        self.pose_dim = pose_size * pose_size
        self.init_noise = init_noise
        self.init_beta_v = init_beta_v
        self.weight = nn.Parameter(torch.empty(taps * in_caps, out_caps, pose_size, pose_size))
        self.beta_v = nn.Parameter(torch.empty(out_caps))
        self.beta_a = nn.Parameter(torch.empty(out_caps))
        channels = in_caps * (self.pose_dim + 1)
        self._channels_message = (
            f"a map of {in_caps} matrix capsules has {channels} channels: poses, then activations"
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Transforms are the identity plus noise: a parent starts as the mean of its children's poses."""
        nn.init.normal_(self.weight, std=self.init_noise)
        with torch.no_grad():
            self.weight.add_(torch.eye(self.pose_size, dtype=self.weight.dtype, device=self.weight.device))
        nn.init.constant_(self.beta_v, self.init_beta_v)
        nn.init.zeros_(self.beta_a)

    def flat_weight(self) -> Tensor:
        """The transforms as matrices on flattened poses, ``[i, d, j * e]``."""
        return block_diagonal(upcast_half(self.weight), self.pose_size)

    def reference(self, inputs: List[Tensor], num_iters: int, need_couplings: bool) -> Routed:
        """Votes, then :func:`em_routing`."""
        weight = upcast_half(self.weight).transpose(1, 2).contiguous()
        return self.route_through(inputs, weight, self.flat_weight(), num_iters, need_couplings)

    def route_through(
        self, inputs: List[Tensor], weight: Tensor, flat_weight: Tensor, num_iters: int, need_couplings: bool
    ) -> Routed:
        """:meth:`reference` with given transforms: ``[i, q, j, r]``, and as ``[i, d, j * e]`` on flattened poses."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.in_caps}, {self.out_caps}, pose_size={self.pose_size}, " + super().extra_repr()
