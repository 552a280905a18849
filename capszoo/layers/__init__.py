"""Capsule layers: each routing is one file or package with a pure function and a module. Imports torch alone."""

from ._precision import upcast_half
from ._triton import use_triton
from .capconv import (
    CapConv,
    CapFC,
    EncapModule,
    MasterAide,
    cap_fc,
    capconv_combine,
    squash_groups,
)
from .dynamic import (
    Conv3dDynamicRouting,
    ConvDynamicRouting,
    DynamicRouting,
    SharedDynamicRouting,
    dynamic_routing,
    shared_dynamic_routing,
)
from .em import ClassEM, ConvEM, SharedEM, em_routing, shared_em_routing
from .engine_choice import engine_report, use_engines
from .engine_choice import read_environment as _read_environment
from .heinsen import HeinsenRouting, heinsen_routing
from .idpa import FCIDPA, CapsuleNorm, ConvIDPA, IDPAStack, idpa_routing
from .primary import PrimaryCaps2d, capsules_from_map
from .routing_pool import RoutingCaps, RoutingPool2d, routing_caps, routing_pool
from .self_attention import SelfAttentionRouting, self_attention_routing
from .self_routing import ConvSelfRouting, SelfRouting, self_routing
from .sinkhorn import SinkhornUnit, feature_kl, ground_cost, sinkhorn_divergence, sinkhorn_plan
from .squash import Squash, capsule_lengths, exponential_squash, squash

__all__ = [
    "CapConv",
    "CapFC",
    "CapsuleNorm",
    "ClassEM",
    "Conv3dDynamicRouting",
    "ConvDynamicRouting",
    "ConvEM",
    "ConvIDPA",
    "ConvSelfRouting",
    "DynamicRouting",
    "EncapModule",
    "FCIDPA",
    "HeinsenRouting",
    "IDPAStack",
    "MasterAide",
    "PrimaryCaps2d",
    "RoutingCaps",
    "RoutingPool2d",
    "SelfAttentionRouting",
    "SelfRouting",
    "SharedDynamicRouting",
    "SharedEM",
    "SinkhornUnit",
    "Squash",
    "cap_fc",
    "capconv_combine",
    "capsule_lengths",
    "capsules_from_map",
    "dynamic_routing",
    "em_routing",
    "engine_report",
    "exponential_squash",
    "feature_kl",
    "ground_cost",
    "heinsen_routing",
    "idpa_routing",
    "routing_caps",
    "routing_pool",
    "self_attention_routing",
    "self_routing",
    "shared_dynamic_routing",
    "shared_em_routing",
    "sinkhorn_divergence",
    "sinkhorn_plan",
    "squash",
    "squash_groups",
    "upcast_half",
    "use_engines",
    "use_triton",
]

_read_environment()
