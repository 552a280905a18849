"""The zoo's architectures; importing this package registers all of them with timm."""

from . import (
    caps_head,
    capsnet_dynamic,
    capsnet_em,
    cnn_baselines,
    deepcaps,
    efficient_capsnet,
    encapnet,
    hvc,
    idpa,
    routing_pool,
)
from ._base import CapsuleNet, CapsuleOutput
from ._builder import MODULES

__all__ = [
    "CapsuleNet",
    "CapsuleOutput",
    "MODULES",
    "caps_head",
    "capsnet_dynamic",
    "capsnet_em",
    "cnn_baselines",
    "deepcaps",
    "efficient_capsnet",
    "encapnet",
    "hvc",
    "idpa",
    "routing_pool",
]
