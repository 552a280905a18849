"""Capsule layers: one routing per file, each a pure function and a module. Imports torch alone."""

from .squash import Squash, squash, upcast_half

__all__ = [
    "Squash",
    "squash",
    "upcast_half",
]
