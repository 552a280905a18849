"""Head with dynamic routing, and the base of the heads whose classes are scored by the length of a capsule."""

from typing import Tuple

import torch
import torch.nn as nn
from torch import Tensor

from capszoo.layers import ConvDynamicRouting, DynamicRouting, Squash, capsule_lengths
from capszoo.layers._forward_methods import forward_method
from capszoo.layers._modules import at_least
from capszoo.layers._precision import upcast_half

from .._base import Votes
from .base import ConvNorm, HeadArgs, HeadOutput, log_probabilities, register_head
from .capsule_layers import CapsuleLayersHead

torch.fx.wrap("upcast_half")


class LengthHead(CapsuleLayersHead):
    """Base of the heads whose scores are ``log(length / sum of lengths)`` of the class capsules."""

    map_quantity = "coupling × vote length"
    relative = True

    def _scores(self, poses: Tensor) -> Tensor:
        lengths = capsule_lengths(upcast_half(poses))
        return log_probabilities(lengths / lengths.sum(dim=1, keepdim=True)).to(poses.dtype)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses = self.classes(self._poses(self._children(x)))
        return self._scores(poses), poses

    @torch.jit.ignore
    def _route(self, x: Tensor) -> HeadOutput:
        """Returns couplings of the class layer ``[b, n, i]``, children ordered (row, column, type)."""
        children, below = self._routed_children(x)
        children = self._poses(children)
        poses, couplings = self.classes.route(children)
        share = couplings * capsule_lengths(self.classes.votes(children))
        return HeadOutput(self._scores(poses), poses, capsule_lengths(poses), (*below, couplings), share)

    @torch.jit.ignore
    @forward_method
    def class_votes(self, x: Tensor) -> Votes:
        children = self._poses(self._children(x))
        return Votes(self.classes.votes(children), self.classes(children), True)


@register_head("dynamic")
class DynamicHead(LengthHead):
    """Squashed primary capsules, dynamic routing; scores as in :class:`LengthHead`.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension.
        class_dim: pose dimension of a class capsule.
        num_iters: routing iterations.
        depth: capsule layers, 1 or 2; with 2, the capsules of the first one go through a BatchNorm.
    """

    even = {"num_iters": 1}

    def __init__(
        self,
        common: HeadArgs,
        caps_types: int = 32,
        caps_dim: int = 16,
        class_dim: int = 16,
        num_iters: int = 3,
        depth: int = 1,
    ) -> None:
        super().__init__(common, caps_types, caps_dim, depth)
        at_least(1, class_dim=class_dim)
        self.class_dim, self._iters = class_dim, num_iters
        self.primary = nn.Sequential(ConvNorm(self.chans, self.width), Squash(dim=1, pose_dim=caps_dim))
        if depth == 2:
            self.hidden = ConvDynamicRouting(
                caps_types, caps_dim, caps_types, caps_dim, 3, 2, 1, num_iters=num_iters
            )
        self._ready(common.num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        # Behind the BatchNorm, children are caps_dim ** 0.5 long instead of 1. With transforms as large as for children
        # of length 1, all classes would start at a length of 0.99, where squash has hardly any gradient.
        std = 0.1 / self.caps_dim**0.5 if self.depth == 2 else 0.1
        return DynamicRouting(
            self.num_children, self.caps_dim, num_classes, self.class_dim, self._iters, weight_std=std
        )
