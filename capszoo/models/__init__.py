"""The zoo's architectures; importing this package registers all of them with timm."""

from . import (
    caps_head,
    capsnet_dynamic,
    capsnet_em,
    cnn_baselines,
    efficient_capsnet,
    encapnet,
    idpa,
    routing_pool,
)
from ._base import CapsuleNet, CapsuleOutput
from ._pretrained import HUB_ORG, WeightsError, WeightsInfo

__all__ = [
    "CapsuleNet",
    "CapsuleOutput",
    "HUB_ORG",
    "MODULES",
    "WeightsError",
    "WeightsInfo",
    "caps_head",
    "capsnet_dynamic",
    "capsnet_em",
    "cnn_baselines",
    "efficient_capsnet",
    "encapnet",
    "idpa",
    "routing_pool",
]

#: Model files of the zoo, by their names in timm's registry.
MODULES = (
    "caps_head",
    "capsnet_dynamic",
    "capsnet_em",
    "cnn_baselines",
    "efficient_capsnet",
    "encapnet",
    "idpa",
    "routing_pool",
)
