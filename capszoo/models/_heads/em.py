"""Head with EM routing."""

from typing import Any, Dict, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from capszoo.layers import ConvEM
from capszoo.layers._forward_methods import forward_method

from .._base import Votes
from .base import HeadArgs, HeadOutput, register_head
from .capsule_layers import ActivePrimary, CapsuleLayersHead


def _padded(x: Tensor) -> Tensor:
    """Pad a map with capsules of activation zero."""
    return F.pad(x, [1, 1, 1, 1])


@register_head("em")
class EMHead(CapsuleLayersHead):
    """Primary capsules with activations, EM routing; scores are ``log(a / sum of a)``.

    Args:
        caps_types, caps_dim: primary capsule types, and their pose dimension, a square number.
        num_iters: routing iterations.
        depth: capsule layers, 1 or 2; with 2, the poses of the first one go through a BatchNorm.
    """

    active = True
    map_quantity = "coupling × activation"
    relative = True
    even = {"num_iters": 1}

    def __init__(
        self, common: HeadArgs, caps_types: int = 32, caps_dim: int = 16, num_iters: int = 3, depth: int = 1
    ) -> None:
        super().__init__(common, caps_types, caps_dim, depth)
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
        self._ready(common.num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        # the window is the whole map: all its children become the types of a single position
        return ConvEM(self.num_children, num_classes, kernel_size=1, init_beta_v=3.0, **self._options)

    def _hidden(self, x: Tensor) -> Tensor:
        x = self.hidden(_padded(x))
        return torch.cat([self.norm(x[:, : self.width]), x[:, self.width :]], dim=1)

    @torch.jit.ignore
    def _route_hidden(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses, logits, couplings = self.hidden.route(_padded(x))
        return self.hidden.pack(poses, logits).to(x.dtype), couplings

    def _as_one_position(self, x: Tensor) -> Tensor:
        """Map of children to ``[b, i * (d + 1), 1, 1]``."""
        x = torch.cat([self._poses(x).flatten(1), self._activations(x)], dim=1)
        return x.unsqueeze(2).unsqueeze(3)

    def _scores(self, logits: Tensor) -> Tensor:
        """Activation logits ``[b, n]`` to ``log(a / sum of a)``, avoiding the activations, which may underflow."""
        return F.log_softmax(-F.softplus(-logits), dim=1)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        x = self._as_one_position(self._children(x))
        poses, logits = self.classes.capsules(x)  # [b, 1, 1, n, d], [b, 1, 1, n]
        poses = poses.flatten(1, 3).to(x.dtype)  # before the scores, which must be the last operation for FX
        return self._scores(logits.flatten(1)).to(x.dtype), poses

    @torch.jit.ignore
    def _route(self, x: Tensor) -> HeadOutput:
        """Returns couplings of the class layer ``[b, n, i]``, children ordered (row, column, type)."""
        children, below = self._routed_children(x)
        poses, logits, couplings = self.classes.route(self._as_one_position(children))
        poses, logits, couplings = poses[:, 0, 0], logits[:, 0, 0], couplings[:, 0, 0]
        share = couplings * self._activations(children).unsqueeze(1)
        scores, active = self._scores(logits).to(x.dtype), torch.sigmoid(logits).to(x.dtype)
        return HeadOutput(scores, poses.to(x.dtype), active, (*below, couplings), share)

    @torch.jit.ignore
    @forward_method
    def class_votes(self, x: Tensor) -> Votes:
        children, _ = self._routed_children(x)
        children = self._as_one_position(children)
        return Votes(self.classes.votes(children)[:, 0, 0], self.classes.capsules(children)[0][:, 0, 0], True)
