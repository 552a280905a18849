"""Head with inverted dot-product attention routing."""

from typing import Tuple

import torch
import torch.nn as nn
from torch import Tensor

from capszoo.layers import FCIDPA, CapsuleNorm
from capszoo.layers._forward_methods import forward_method

from .._base import Votes
from .base import HeadArgs, HeadOutput, register_head
from .capsule_layers import CapsuleLayersHead


@register_head("idpa")
class IDPAHead(CapsuleLayersHead):
    """Primary capsules with LayerNorm as matrix poses, one IDPA layer; scores by a linear layer shared by all classes.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension, a square number.
        num_iters: routing iterations.
    """

    readout = ("score",)
    even = {"num_iters": 1}

    def __init__(
        self, common: HeadArgs, caps_types: int = 32, caps_dim: int = 16, num_iters: int = 2
    ) -> None:
        super().__init__(common, caps_types, caps_dim)
        self._iters = num_iters
        conv = nn.Conv2d(self.chans, self.width, 3, 1, 1, bias=False)
        self.primary = nn.Sequential(conv, CapsuleNorm(caps_dim))
        self.score = self.make_readout(common.num_classes)
        self._ready(common.num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        return FCIDPA(self.num_children, num_classes, self.caps_dim, num_iters=self._iters)

    @torch.jit.ignore
    def make_readout(self, num_classes: int) -> nn.Module:
        """A new Linear from a class pose to its logit, shared by the classes; an identity without classes."""
        return nn.Linear(self.caps_dim, 1) if num_classes else nn.Identity()

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses = self.classes(self._poses(self._children(x)))
        return self.score(poses).squeeze(-1), poses

    @torch.jit.ignore
    def _route(self, x: Tensor) -> HeadOutput:
        """Returns couplings ``[b, n, i]``, children ordered (row, column, type)."""
        children = self._poses(self._children(x))
        poses, _, routed = self.classes.route([children], [], self.classes.num_iters)
        couplings = self.classes.even_couplings(poses[-1]) if routed is None else routed
        scores = self.score(poses[-1]).squeeze(-1)
        return HeadOutput(scores, poses[-1], scores, (couplings,), couplings)

    @torch.jit.ignore
    @forward_method
    def class_votes(self, x: Tensor) -> Votes:
        children = self._poses(self._children(x))
        return Votes(self.classes.votes(children), self.classes(children), True)
