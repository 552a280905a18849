"""Head with Heinsen's routing: tokens of one or several feature maps, two hidden layers of capsules, the classes."""

from typing import List, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from capszoo.layers import HeinsenRouting
from capszoo.layers._modules import at_least
from capszoo.layers._precision import upcast_half

from .._base import CouplingLayout
from .._blocks import ConvBnAct
from .base import CapsuleHead, HeadArgs, HeadOutput, register_head

torch.fx.wrap("upcast_half")


@register_head("heinsen")
class HeinsenHead(CapsuleHead):
    """The classification head of Heinsen's paper: tokens, routed to hidden capsules, to as many again, to the classes.

    The pixels of a feature map are the tokens: a LayerNorm without weights, times W, plus B. They may be any number, so
    that the head serves maps of any size. A class capsule has one dimension, its score. There are no primary capsules.

    The couplings are credit, which is no share and may be negative. The credit of the tokens is the product of the
    matrices of the three layers (the paper's appendix A); :meth:`coupling_map` shows its positive part. A child with
    positive credit is used. Whether this raises the score depends on the sign of its vote.

    Args:
        levels: feature maps that give tokens, the last one and those below it. Each has its own W and B.
        num_caps: hidden capsules of each of the two layers.
        caps_dim: pose dimension of a hidden capsule; 0 takes that of the tokens, as in the release.
        num_iters: routing iterations.
        lower_chans: channels of the maps below the last one, which come first in ``in_chans``; the network sets it.
    """

    fixed_grid = False
    map_quantity = "positive credit"
    never_even = "weights votes by credit, which is never even"

    def __init__(
        self,
        common: HeadArgs,
        levels: int = 1,
        num_caps: int = 64,
        caps_dim: int = 0,
        num_iters: int = 2,
        lower_chans: Tuple[int, ...] = (),
    ) -> None:
        at_least(1, levels=levels, num_caps=num_caps)
        at_least(0, caps_dim=caps_dim)
        if levels != len(lower_chans) + 1:
            raise ValueError(
                f"levels={levels} needs the maps of {levels} stages of a backbone: create the network with attach_head"
            )
        last, proj_chans = common.in_chans - sum(lower_chans), common.proj_chans
        super().__init__(common._replace(in_chans=last))
        if not proj_chans and set(lower_chans) - {last}:
            raise ValueError(
                f"the {levels} maps have {', '.join(map(str, (*lower_chans, last)))} channels: set proj_chans, which "
                "projects each of them"
            )
        self.levels, self._iters = levels, num_iters
        self.level_chans = [*lower_chans, last]
        self.project_lower = nn.ModuleList(
            ConvBnAct(chans, proj_chans, 1) if proj_chans else nn.Identity() for chans in lower_chans
        )
        self.scale = nn.Parameter(torch.ones(levels, self.chans))
        self.shift = nn.Parameter(torch.zeros(levels, self.chans))
        self.num_caps, self.caps_dim = num_caps, caps_dim or self.chans
        self.hidden1 = HeinsenRouting(0, self.chans, num_caps, self.caps_dim, num_iters)
        self.hidden2 = HeinsenRouting(num_caps, self.caps_dim, num_caps, self.caps_dim, num_iters)
        self._ready(common.num_classes)

    def _class_layer(self, num_classes: int) -> nn.Module:
        return HeinsenRouting(self.num_caps, self.caps_dim, num_classes, 1, self._iters)

    @property
    def hidden_size(self) -> int:
        return self.caps_dim

    def _map(self, x: Tensor) -> Tensor:
        """The feature maps, pooled to at most ``max_grid`` and projected, ``[b, levels * c, h, w]``."""
        if self.shrink > 1:
            x = F.avg_pool2d(x, self.shrink, ceil_mode=True)
        if self.levels == 1:
            return self.project(x)
        parts = torch.split(x, self.level_chans, dim=1)
        maps: List[Tensor] = []
        for k, project in enumerate(self.project_lower):
            maps.append(project(parts[k]))
        maps.append(self.project(parts[self.levels - 1]))
        return torch.cat(maps, dim=1)

    def _tokens(self, x: Tensor) -> Tensor:
        """Feature map to tokens ``[b, levels * h * w, c]``, ordered (level, row, column)."""
        x = (
            self._map(x).flatten(2).unflatten(1, (self.levels, self.chans)).transpose(2, 3)
        )  # [b, levels, h*w, c]
        tokens = F.layer_norm(upcast_half(x), [self.chans]).to(x.dtype)
        return (tokens * self.scale.unsqueeze(1) + self.shift.unsqueeze(1)).flatten(1, 2)

    def _children(self, x: Tensor) -> Tensor:
        """Feature map to the class layer's children ``[b, i, d]``."""
        return self.head_drop(self.hidden2(self.hidden1(self._tokens(x))))

    def _pooled(self, x: Tensor) -> Tensor:
        return self.hidden2(self.hidden1(self._tokens(x))).mean(dim=1)

    def _class_capsules(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        poses = self.classes(self._children(x))
        return poses.squeeze(-1), poses

    @torch.jit.ignore
    def _route(self, x: Tensor) -> HeadOutput:
        """Returns the credit of the three layers ``[b, j, i]``; the tokens are ordered (level, row, column)."""
        first, of_tokens = self.hidden1.route(self._tokens(x))
        second, of_first = self.hidden2.route(first)
        poses, of_second = self.classes.route(self.head_drop(second))
        scores = poses.squeeze(-1)
        return HeadOutput(scores, poses, scores, (of_tokens, of_first, of_second), of_second)

    def _hand_down(self, share: Tensor, out: HeadOutput) -> Tensor:
        """The credit of each position: the product of the layers' credit, summed over the levels."""
        of_tokens, of_first, _ = (credit.float() for credit in out.couplings)
        credit = torch.matmul(torch.matmul(share, of_first), of_tokens)  # [b, n, levels * h * w]
        return credit.unflatten(2, (self.levels, credit.shape[2] // self.levels)).sum(dim=2)

    @torch.jit.ignore
    def coupling_layouts(self) -> Tuple[CouplingLayout, ...]:
        return (CouplingLayout(1, None),) * 3
