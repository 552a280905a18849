"""Routing by agreement (Sabour et al. 2017): fully connected, in convolutions, and with shared transforms.

Files: ``layers`` has the procedures and the modules, ``vote_free`` the routing that never forms votes.
"""

from .layers import (
    ConvDynamicRouting,
    DynamicRouting,
    SharedDynamicRouting,
    dynamic_routing,
    shared_dynamic_routing,
)

__all__ = [
    "ConvDynamicRouting",
    "DynamicRouting",
    "SharedDynamicRouting",
    "dynamic_routing",
    "shared_dynamic_routing",
]
