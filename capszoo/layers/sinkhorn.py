"""Feedback agreement: higher capsules must be able to reconstruct the lower ones, measured by optimal transport.

Paper: Li, Guo, Dai, Ouyang, Wang, "Neural Network Encapsulation" (2018), section 3.2, Eq. 8 to 11, Fig. 3(b),
appendix B, Table 3 (rows a to d5); padding and groups of the generator (appendix B: as many
groups as a capsule has dimensions), and epsilon, from the release.

============ ============================================================================================
symbol       here
============ ============================================================================================
``y``        ``low``: the lower feature map, the sample to be reconstructed
``z``        ``high``: the higher feature map, the input of the generator
``g``        ``generator``: transposed convolution grouped by capsule channel, BN, ReLU, squash
``f``        ``critic``: two strided convolutions to one channel, shared by both sides
``C, c``     ``cost [n, m]``: ground cost between the samples of two mini-batches
``log K``    ``log_kernel``: ``-C / epsilon``
``a, b``     ``rows``, ``columns``: logarithms of the scaling vectors
``P``        ``plan [n, m]``: how much mass goes from sample to sample; sums to 1
============ ============================================================================================

Letters: ``n m`` samples of the two sides (both the batch), ``l`` features of a sample, ``h w`` grid, ``c`` channels.

Steps (Eq. 9, 10): ``b = 1/m``; L times ``a = (1/n) / (K b)``, ``b = (1/m) / (K' a)``; ``P = diag(a) K diag(b)``;
loss ``W = sum(P * C)``; with the bias fix (Eq. 11) ``2 W(x, y) - W(x, x) - W(y, y)``. As published, no gradient
flows through the plan.

Deviations: the steps are computed in logarithms, because a kernel of large costs underflows, and a column that vanishes
loses its mass; each row of the cost is lowered by its minimum, which keeps precision and changes no plan (``a`` absorbs
the factor); half precision is computed in float32. Our choices where the paper does not specify: the KL alternative
compares, sample by sample, the softmax over the critic's features, ``KL(y || g(z))``; a mini-batch of one sample gives
zero.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._modules import at_least, positive
from ._precision import upcast_half
from .capconv import SquashGroups

__all__ = ["SinkhornUnit", "feature_kl", "ground_cost", "sinkhorn_divergence", "sinkhorn_plan"]

COSTS = ("cosine", "l2")


def ground_cost(x: Tensor, y: Tensor, cost: str = "cosine") -> Tensor:
    """Cost of moving each sample of ``x`` to each sample of ``y``.

    Args:
        x: ``[n, l]``.
        y: ``[m, l]``.
        cost: ``"cosine"``, one minus the cosine (1 where a sample is zero), or ``"l2"``, the Euclidean distance.

    Returns:
        ``[n, m]``, float32 for half-precision inputs.

    Raises:
        ValueError: an unknown ``cost``.
    """
    if cost not in COSTS:
        raise ValueError(f"cost must be one of {', '.join(COSTS)}, not {cost!r}")
    x, y = upcast_half(x), upcast_half(y)
    if cost == "l2":
        # not through matrix products: they lose small distances to cancellation, and give NaN gradients at 0
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    return 1.0 - _unit(x) @ _unit(y).t()


def _unit(x: Tensor) -> Tensor:
    """Rows scaled to length one; rows shorter than 1e-4 stay shorter, so that the gradient at zero is bounded."""
    # squares of huge values must not overflow
    largest = x.detach().abs().amax(dim=1, keepdim=True).clamp(min=1.0)
    x = x / largest
    return x / (x * x).sum(dim=1, keepdim=True).clamp(min=1e-8).sqrt()


def sinkhorn_plan(cost: Tensor, num_iters: int = 10, epsilon: float = 1.0) -> Tensor:
    """Transport plan between two uniform samples (Eq. 9, 10).

    Args:
        cost: ``[n, m]``.
        num_iters: Sinkhorn iterations L, at least 1.
        epsilon: strength of the entropy term; smaller is nearer to the exact plan and slower to converge.

    Returns:
        ``[n, m]``; columns sum to ``1/m`` exactly, rows to ``1/n`` in the limit; float32 for half-precision inputs.

    Raises:
        ValueError: ``num_iters`` is below 1, ``epsilon`` is not positive, or a sample is empty.
    """
    at_least(1, num_iters=num_iters)
    positive(epsilon=epsilon)
    cost = upcast_half(cost)
    n, m = cost.shape
    if min(n, m) < 1:
        raise ValueError(f"both samples need at least one row, not {n} and {m}")
    log_kernel = (cost.detach().amin(dim=1, keepdim=True) - cost) / epsilon  # [n, m]
    columns = log_kernel.new_full((m,), -math.log(m))
    rows = columns  # a placeholder: there is at least one iteration
    for _ in range(num_iters):
        rows = -math.log(n) - torch.logsumexp(log_kernel + columns, dim=1, keepdim=True)  # [n, 1]
        columns = -math.log(m) - torch.logsumexp(log_kernel + rows, dim=0)  # [m]
    return torch.exp(log_kernel + rows + columns)


def _transport_loss(
    x: Tensor, y: Tensor, num_iters: int, epsilon: float, cost: str, backprop_plan: bool
) -> Tensor:
    distance = ground_cost(x, y, cost)
    plan = sinkhorn_plan(distance if backprop_plan else distance.detach(), num_iters, epsilon)
    return (plan * distance).sum()  # Eq. 8


def sinkhorn_divergence(
    x: Tensor,
    y: Tensor,
    num_iters: int = 10,
    epsilon: float = 1.0,
    cost: str = "cosine",
    bias_fix: bool = True,
    backprop_plan: bool = False,
) -> Tensor:
    """Sinkhorn divergence between two mini-batches of features (Eq. 8 to 11).

    Args:
        x: ``[n, l]``.
        y: ``[m, l]``.
        num_iters: Sinkhorn iterations L.
        epsilon: strength of the entropy term.
        cost: ``"cosine"`` or ``"l2"`` (Table 3, row d5).
        bias_fix: ``2 W(x, y) - W(x, x) - W(y, y)``; otherwise ``W(x, y)`` alone (row d1).
        backprop_plan: let the gradient flow through the plan too (row d2).

    Returns:
        A scalar, float32 for half-precision inputs.

    Raises:
        ValueError: an unknown ``cost``, ``num_iters`` below 1, or ``epsilon`` that is not positive.
    """
    with torch.autocast(x.device.type, enabled=False):
        loss = _transport_loss(x, y, num_iters, epsilon, cost, backprop_plan)
        if bias_fix:
            same_x = _transport_loss(x, x, num_iters, epsilon, cost, backprop_plan)
            same_y = _transport_loss(y, y, num_iters, epsilon, cost, backprop_plan)
            loss = 2.0 * loss - same_x - same_y
    return loss


def feature_kl(x: Tensor, y: Tensor) -> Tensor:
    """Kullback-Leibler divergence ``KL(y || x)`` of the softmax over features, averaged over the batch.

    Args:
        x, y: ``[n, l]``.
    """
    with torch.autocast(x.device.type, enabled=False):
        log_x = F.log_softmax(upcast_half(x), dim=1)
        log_y = F.log_softmax(upcast_half(y), dim=1)
        return (log_y.exp() * (log_y - log_x)).sum(dim=1).mean()


class SinkhornUnit(nn.Module):
    """Generator, critic and divergence between two feature maps of one network; used in training only.

    Args:
        low_chans: channels of the lower map, which is reconstructed.
        high_chans: channels of the higher map.
        stride: ratio of the lower to the higher grid size, one number or (rows, columns).
        groups: capsule channels of the generator.
        generator: ``"capsule"``, grouped and with squash, or ``"cnn"``, a plain one (Table 3, row d4).
        critic: compare features of the critic; False compares the maps themselves (row d3).
        metric: ``"sinkhorn"`` or ``"kl"`` (row b).
        num_iters, epsilon, cost, bias_fix, backprop_plan: see :func:`sinkhorn_divergence`.

    The critic reduces a lower map of at most 4x4 positions to one number that is not negative. With the cosine cost
    every such pair of samples costs nothing: the unit's loss and gradients are zero.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        low_chans: int,
        high_chans: int,
        stride: int | tuple[int, int] = 2,
        groups: int = 32,
        generator: str = "capsule",
        critic: bool = True,
        metric: str = "sinkhorn",
        num_iters: int = 10,
        epsilon: float = 1.0,
        cost: str = "cosine",
        bias_fix: bool = True,
        backprop_plan: bool = False,
    ) -> None:
        super().__init__()
        if generator not in ("capsule", "cnn"):
            raise ValueError(f"generator must be 'capsule' or 'cnn', not {generator!r}")
        if metric not in ("sinkhorn", "kl"):
            raise ValueError(f"metric must be 'sinkhorn' or 'kl', not {metric!r}")
        if cost not in COSTS:
            raise ValueError(f"cost must be one of {', '.join(COSTS)}, not {cost!r}")
        at_least(1, low_chans=low_chans, high_chans=high_chans, groups=groups, num_iters=num_iters)
        positive(epsilon=epsilon)
        if generator == "capsule" and (low_chans % groups or high_chans % groups):
            raise ValueError(
                f"channels ({low_chans} and {high_chans}) must be multiples of groups ({groups}): "
                "choose other groups, or generator='cnn'"
            )
        self.stride = (stride, stride) if isinstance(stride, int) else (int(stride[0]), int(stride[1]))
        if min(self.stride) < 1:
            raise ValueError(f"stride must be at least 1, not {stride}")
        self.groups = groups if generator == "capsule" else 1
        self.squash = SquashGroups(groups) if generator == "capsule" else nn.Identity()
        self.metric = metric
        self.num_iters = num_iters
        self.epsilon = epsilon
        self.cost = cost
        self.bias_fix = bias_fix
        self.backprop_plan = backprop_plan

        # 3x3 as published; larger strides than the paper's get a kernel that leaves no holes (our choice)
        kernel = (max(3, 2 * self.stride[0] - 1), max(3, 2 * self.stride[1] - 1))
        self.deconv = nn.ConvTranspose2d(
            high_chans,
            low_chans,
            kernel,
            self.stride,
            (kernel[0] // 2, kernel[1] // 2),
            groups=self.groups,
        )
        self.deconv_bn = nn.BatchNorm2d(low_chans)
        self.critic: nn.Module | None = None
        if critic:
            hidden = max(1, low_chans // 4)
            self.critic = nn.Sequential(
                nn.Conv2d(low_chans, hidden, 3, 2, 1),
                nn.BatchNorm2d(hidden),
                nn.ReLU(inplace=True),
                nn.Conv2d(hidden, 1, 3, 2, 1),
                nn.BatchNorm2d(1),
                nn.ReLU(inplace=True),
            )
        for m in self.modules():
            if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
                nn.init.xavier_normal_(m.weight)  # as released
                if m.bias is not None:
                    nn.init.zeros_(m.bias)

    def generate(self, high: Tensor, size: tuple[int, int]) -> Tensor:
        """Reconstruct a lower map ``[b, low_chans, h, w]`` of grid ``size`` from ``high``."""
        x = self.deconv(high, output_size=list(size))
        x = F.relu(self.deconv_bn(x))
        return self.squash(x)

    def features(self, x: Tensor) -> Tensor:
        """The features that the divergence compares: the critic's output, or the map itself, as ``[b, l]``."""
        if self.critic is not None:
            x = self.critic(x)
        return x.flatten(1)

    def forward(self, low: Tensor, high: Tensor) -> Tensor:
        """Lower map ``[b, c, h, w]`` and higher map ``[b, c', h', w']`` to a scalar loss."""
        if low.shape[0] < 2:
            return low.flatten()[:0].sum() + high.flatten()[:0].sum()  # zero, and part of the graph
        rebuilt = self.generate(high, (low.shape[-2], low.shape[-1]))
        x = self.features(rebuilt)
        y = self.features(low)
        if self.metric == "kl":
            return feature_kl(x, y)
        return sinkhorn_divergence(
            x, y, self.num_iters, self.epsilon, self.cost, self.bias_fix, self.backprop_plan
        )

    def extra_repr(self) -> str:
        if self.metric == "kl":
            return "metric=kl"
        text = f"metric=sinkhorn, num_iters={self.num_iters}, epsilon={self.epsilon:g}, cost={self.cost}"
        text += "" if self.bias_fix else ", bias_fix=False"
        return text + (", backprop_plan=True" if self.backprop_plan else "")
