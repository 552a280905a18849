"""Models of each family whose routing is looked into, and maps made by hand."""

from __future__ import annotations

from typing import Any

import torch

from capszoo.explain import Explanation

FAMILIES = (
    "capsnet_dynamic",
    "capsnet_dynamic_multimnist",
    "capsnet6_dynamic",
    "capsnet_em_norb_small",
    "capsnet6_em",
    "idpa_cnn",
    "idpa_cnn_cifar100",
    "cnn_routingpool",
    "resnet20_routingcaps",
    "encapnet6",
)


#: of layers that others of the list have: in the slow suite
REPEATED = ("capsnet_dynamic_multimnist", "capsnet6_em", "idpa_cnn_cifar100")


def flat_map(values: torch.Tensor, **more: Any) -> Explanation:
    scores = torch.tensor([0.2, 0.8])
    image = torch.full((1, 12, 12), 0.5)
    return Explanation(values / values.sum(), image, scores, 1, 1, ("no", "yes"), **more)
