"""The zoo's architectures; importing this package registers all of them with timm."""

from .._pretrained.info import HUB_ORG, WeightsInfo
from ..errors import WeightsError
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
    "HUB_ORG",
    "MODULES",
    "WeightsError",
    "WeightsInfo",
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
