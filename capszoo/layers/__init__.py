"""Capsule layers: one routing per file, each a pure function and a module. Imports torch alone."""

from .routing_pool import RoutingCaps, RoutingPool2d, routing_caps, routing_pool
from .squash import Squash, squash, upcast_half

__all__ = [
    "RoutingCaps",
    "RoutingPool2d",
    "Squash",
    "routing_caps",
    "routing_pool",
    "squash",
    "upcast_half",
]
