"""Engines of capConv besides the reference: training that stores only the convolutions' outputs, or convolves once.

Letters as in :mod:`capszoo.layers.capconv`; ``n`` denotes the maps of one branch before its norm. Autograd
would store the output of each norm, each squash and each product; here the backward pass recomputes them from ``n``.
"""

from typing import Any, List, NamedTuple, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._autograd import differentiable_once, refuse_batched_gradient
from .._modules import is_plain
from ..engine import Call, Engine, Routed
from ..squash import squared_lengths, squash_factor, squash_gradient
from ..tuning import TUNING
from .convolutions import CapGroupConv2d, XavierConv2d
from .routing import SquashGroups, merge_groups


class Norm(NamedTuple):
    """A BatchNorm and the statistics that it applied, each ``[g*d]``."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    inverse: Tensor  # of the standard deviation
    training: bool
    eps: float

    @property
    def variance(self) -> Tensor:
        return self.inverse.pow(-2) - self.eps

    def relu(self, n: Tensor) -> Tensor:
        """``relu(norm(n))`` of some images, with these statistics."""
        y = torch.native_batch_norm(
            n, self.weight, self.bias, self.mean, self.variance, False, 0.0, self.eps
        )[0]
        return y.relu_()

    def gradients(self, grad: Tensor, n: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``n``, weight and bias from that of ``norm(n)``."""
        stats = (self.mean, self.variance, self.mean, self.inverse)  # running, then those of the batch
        return torch.ops.aten.native_batch_norm_backward(
            grad, n, self.weight, *stats, self.training, self.eps, [True] * 3
        )


def _norm_relu(n: Tensor, norm: Any) -> Tuple[Tensor, Tensor, Tensor]:
    """``relu(norm(n))``, mean and inverse standard deviation; updates running statistics like the module."""
    if norm.training:
        norm.num_batches_tracked.add_(1)
    y, mean, inverse = torch.native_batch_norm(
        n, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.training, norm.momentum, norm.eps
    )  # fmt: skip
    if not norm.training:
        mean, inverse = norm.running_mean.clone(), (norm.running_var + norm.eps).rsqrt()
    return y.relu_(), mean, inverse


def _blocks(n: Tensor) -> List[slice]:
    """Slices over the images of ``[b, g*d, h, w]``, sized so that a map of one block fits the cache."""
    images = max(1, TUNING.capconv_block_elements // max(1, n[0].numel()))
    return [slice(start, start + images) for start in range(0, len(n), images)]


def _gradient(grad: Tensor, s: Tensor, square: Tensor) -> Tensor:
    """Gradient through ReLU and squash, from squashed ``s`` to the input of ReLU."""
    grad = squash_gradient(grad, s, 2, square)
    return torch.ops.aten.threshold_backward(grad, s, 0).flatten(1, 2)


class _NormSquash(torch.autograd.Function):
    """BatchNorm, ReLU and squash that store only their input."""

    @staticmethod
    def forward(ctx: Any, n: Tensor, weight: Tensor, bias: Tensor, norm: Any, groups: int) -> Tensor:  # type: ignore[override]
        y, mean, inverse = _norm_relu(n, norm)
        ctx.save_for_backward(n, weight, bias, mean, inverse)
        ctx.groups, ctx.how = groups, (norm.training, norm.eps)
        for block in _blocks(y):
            s = y[block].unflatten(1, (groups, -1))
            s.mul_(squash_factor(squared_lengths(s, 2)))
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Any, grad: Tensor) -> Any:  # type: ignore[override]
        refuse_batched_gradient(grad)
        n, *kept = saved
        norm, split = Norm(*kept, *ctx.how), (ctx.groups, -1)
        gradient = torch.empty_like(n)
        for block in _blocks(n):
            s = norm.relu(n[block]).unflatten(1, split)
            gradient[block] = _gradient(grad[block].unflatten(1, split), s, squared_lengths(s, 2))
        return (*norm.gradients(gradient, n), None, None)


class _Branches(torch.autograd.Function):
    """Norm, ReLU and squash of both branches, their coefficients and the combination.

    Stores the maps of both branches and the coefficients, ``[b, g, 2, 1, h, w]``. The squashed branches of a block lie
    side by side in each capsule channel, ``[b, g, 2, d, h, w]``, the layout that the coefficients' convolution reads.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, master: Tensor, aide: Tensor, layer: Any, coef: Tensor, coef_bias: Tensor, *norms: Tensor
    ) -> Tensor:
        groups, coef_groups = layer.groups, layer.groups // layer.coef_aide.together
        split = (groups, -1)
        out = torch.empty_like(master)
        maps = master.new_empty(len(master), groups, 2, 1, *master.shape[2:])
        kept: List[Tensor] = []
        branches: List[Tensor] = []
        for n, norm in ((master, layer.master_bn), (aide, layer.aide_bn)):
            y, mean, inverse = _norm_relu(n, norm)
            kept += [n, norm.weight, norm.bias, mean, inverse]
            branches.append(y)
        for block in _blocks(out):
            parts = [y[block].unflatten(1, split) for y in branches]
            pair = torch.stack([s * squash_factor(squared_lengths(s, 2)) for s in parts], dim=2)
            convolved = F.conv2d(pair.flatten(1, 3), coef, coef_bias, 1, 1, 1, coef_groups)
            maps[block] = convolved.unflatten(1, (groups, 2)).unsqueeze(3)
            grid = out[block].unflatten(1, split)
            torch.mul(pair[:, :, 0], maps[block, :, 0], out=grid).addcmul_(pair[:, :, 1], maps[block, :, 1])
        ctx.save_for_backward(coef, maps, *kept)
        ctx.groups, ctx.coef_groups = groups, coef_groups
        ctx.how = [(norm.training, norm.eps) for norm in (layer.master_bn, layer.aide_bn)]
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Any, grad: Tensor) -> Any:  # type: ignore[override]
        refuse_batched_gradient(grad)
        coef, maps, *kept = saved
        branches = [(kept[k], Norm(*kept[k + 1 : k + 5], *ctx.how[k // 5])) for k in (0, 5)]
        grads = [torch.empty_like(n) for n, _ in branches]
        grad_coef, grad_bias = torch.zeros_like(coef), coef.new_zeros(len(coef))
        for block in _blocks(grad):
            up = grad[block].unflatten(1, (ctx.groups, -1))
            parts = [norm.relu(n[block]).unflatten(1, (ctx.groups, -1)) for n, norm in branches]
            squares = [squared_lengths(s, 2) for s in parts]
            pair = torch.stack(
                [s * squash_factor(square) for s, square in zip(parts, squares, strict=True)], dim=2
            )
            grad_maps = (pair * up.unsqueeze(2)).sum(dim=3).flatten(1, 2)
            grad_pair, by_coef, by_bias = torch.ops.aten.convolution_backward(
                grad_maps, pair.flatten(1, 3), coef, [len(coef)], [1, 1], [1, 1], [1, 1], False, [0, 0],
                ctx.coef_groups, [True] * 3,
            )  # fmt: skip
            grad_coef += by_coef
            grad_bias += by_bias
            grad_pair = grad_pair.view_as(pair)
            for k in (0, 1):
                grad_s = grad_pair[:, :, k].addcmul_(up, maps[block, :, k])
                grads[k][block] = _gradient(grad_s, parts[k], squares[k])
        master, aide = (norm.gradients(g, n) for g, (n, norm) in zip(grads, branches, strict=True))
        return (master[0], aide[0], None, grad_coef, grad_bias, *master[1:], *aide[1:])


def _is_known(module: nn.Module) -> bool:
    """True for a plain ``nn.BatchNorm2d`` with all its tensors, and for a plain squash."""
    if type(module) is nn.BatchNorm2d:
        tensors = (module.weight, module.running_mean, module.momentum)
        return is_plain(module) and all(t is not None for t in tensors)
    return type(module) is SquashGroups and is_plain(module)


class Recompute(Engine):
    """On a CPU: BatchNorm, ReLU and squash in blocks of images; training stores only their input."""

    name = "recompute"
    evidence = "capConv: recompute"
    modes = ("eager",)
    devices = ("cpu",)
    #: reason for its refusal of modules that are not plain
    altered = "needs the original norm and squash, without hooks"

    @classmethod
    def modules(cls, layer: Any) -> Tuple[nn.Module, ...]:
        """Norms and squash of the layer, which it computes itself."""
        return layer.bn, layer.squash

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if reason := super().refusal(layer, call, forced):
            return reason
        if call.dtype not in (torch.float64, torch.float32):
            return "needs float32 or float64: half precision is squashed in float32"
        modules = cls.modules(layer)
        if call.routings == 1 and any(m.training for m in modules if isinstance(m, nn.BatchNorm2d)):
            return "needs more than one value per channel, for BatchNorm in training"
        if not all(_is_known(module) for module in modules):
            return cls.altered
        elements = call.routings * call.children * call.child_dim
        if not forced and not call.grad and elements < TUNING.capconv_recompute_min_elements:
            return "needs gradients, or at least TUNING.capconv_recompute_min_elements elements"
        return ""

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        norm = layer.bn
        return Routed([_NormSquash.apply(inputs[0], norm.weight, norm.bias, norm, layer.groups)], [], None)


class RecomputeBranches(Recompute):
    """The same for both branches of a layer, with their coefficients and the combination."""

    name = "recompute"
    altered = "needs the original norms, squash and coefficients, without hooks"

    @classmethod
    def modules(cls, layer: Any) -> Tuple[nn.Module, ...]:
        return layer.master_bn, layer.aide_bn, layer.squash

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        reason = super().refusal(layer, call, forced)
        if not reason and not layer.children_are_plain():
            return cls.altered
        if not reason and layer.coefficients != "both":
            return "needs coefficients that each come from both branches"
        if not reason and layer.graph_weight is not None:
            return "needs weights that are not constants of a graph"
        return reason

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        norms = [t for norm in (layer.master_bn, layer.aide_bn) for t in (norm.weight, norm.bias)]
        coef = layer.coefficient_weight()
        return Routed([_Branches.apply(*inputs, layer, coef, layer.coef_aide.bias, *norms)], [], None)


class OneConvolution(Engine):
    """On a CPU, in training: the master of a Type I layer and its skip as one convolution.

    They have the same kernel and stride, and a convolution in groups of few channels takes several times as long as an
    ungrouped one. The weights of the groups are added to those of the skip.
    """

    name = "one_convolution"
    evidence = "capConv: one convolution"
    devices = ("cpu",)

    @classmethod
    def refusal(cls, layer: Any, call: Call, forced: bool = False) -> str:
        if reason := super().refusal(layer, call, forced):
            return reason
        master, skip = layer.type1.conv, layer.skip
        ours = type(master) is CapGroupConv2d and type(skip) is XavierConv2d
        if not ours or not all(is_plain(module) for module in (master, skip, layer.type1)):
            return "needs the original convolutions, without hooks"
        if forced:
            return ""
        if not call.grad:
            return "needs gradients"
        if call.child_dim > TUNING.capconv_one_convolution_max_child_dim:
            return "needs children of at most TUNING.capconv_one_convolution_max_child_dim dimensions"
        return ""

    @classmethod
    def route(cls, layer: Any, inputs: List[Tensor], call: Call) -> Routed:
        master, skip = layer.type1.conv, layer.skip
        weight = skip.weight + merge_groups(master.weight, master.groups, master.groups)
        y = F.conv2d(inputs[0], weight, skip.bias + master.bias, skip.stride, skip.padding)
        return Routed([layer.type1.finish(y)], [], None)
