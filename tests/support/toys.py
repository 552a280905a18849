"""Small networks for the export tests: a capsule network with everything that the exporter meets."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from capszoo.layers import upcast_half
from capszoo.layers.squash import capsule_lengths
from capszoo.models import CapsuleOutput

torch.fx.wrap("upcast_half")


def squash(s: Tensor) -> Tensor:
    x = upcast_half(s)
    square = x.square().sum(-1, keepdim=True)
    return (x * (square.clamp_min(1e-12).sqrt() / (1 + square))).to(s.dtype)


class ToyRouting(nn.Module):
    """12 children of 4 to 5 parents of 3, by agreement; the iteration count is an attribute, as in the zoo's layers."""

    def __init__(self, num_iters: int) -> None:
        super().__init__()
        self.num_iters = num_iters
        self.weight = nn.Parameter(torch.randn(12, 4, 15) * 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        votes = torch.matmul(x.transpose(0, 1), self.weight)  # [i, b, j*e]
        votes = votes.reshape(12, x.shape[0], 5, 3).permute(1, 2, 0, 3)  # [b, j, i, e]
        poses = squash(votes.sum(2) / 5)
        coupling = torch.full_like(votes[..., 0], 1 / 5)
        agreement = torch.zeros_like(coupling)
        for _ in range(self.num_iters - 1):
            agreement = agreement + torch.matmul(votes, poses.unsqueeze(-1)).squeeze(-1)
            coupling = torch.softmax(upcast_half(agreement).transpose(1, 2), -1).to(x.dtype).transpose(1, 2)
            poses = squash(torch.matmul(coupling.unsqueeze(2), votes).squeeze(2))
        return poses, coupling


class ToyCaps(nn.Module):
    """1x10x10 image -> conv-BN-ReLU -> 12 capsules of 4 on a 2x2 grid -> 5 class capsules of 3."""

    def __init__(self, routing_iters: int = 3, decoder: bool = False) -> None:
        super().__init__()
        self.in_chans, self.img_size, self.num_classes = 1, (10, 10), 5
        self.routing_iters = routing_iters
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 5, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.primary = nn.Conv2d(8, 12, 4, stride=2)  # 6x6 -> 2x2
        self.class_caps = ToyRouting(routing_iters)
        self.decoder = nn.Linear(15, 100) if decoder else None
        self.pretrained_cfg = {"mean": (0.2,), "std": (0.5,), "label_names": tuple("abcde")}
        norm = self.stem[1]
        nn.init.normal_(norm.running_mean, std=0.3)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)

    def _children(self, x: Tensor) -> Tensor:
        x = self.primary(self.stem(x))
        return squash(x.reshape(x.shape[0], 3, 4, 4).transpose(2, 3).reshape(-1, 12, 4))

    def forward(self, x: Tensor) -> Tensor:
        poses, _ = self.class_caps(self._children(x))
        return capsule_lengths(poses)

    def forward_capsules(self, x: Tensor) -> CapsuleOutput:
        poses, coupling = self.class_caps(self._children(x))
        lengths = capsule_lengths(poses)
        return CapsuleOutput(lengths, poses, lengths, (coupling,))

    def coupling_map(self, x: Tensor) -> Tensor:
        coupling = self.forward_capsules(x).couplings[0]
        heat = coupling.reshape(-1, 5, 3, 2, 2).sum(2)
        return heat / heat.sum((2, 3), keepdim=True)

    def reconstruct(self, poses: Tensor, target: Tensor | None = None) -> Tensor:
        assert self.decoder is not None and target is not None
        kept = poses * nn.functional.one_hot(target, 5).unsqueeze(-1)
        return torch.sigmoid(self.decoder(kept.flatten(1))).reshape(-1, 1, 10, 10)
