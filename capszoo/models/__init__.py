"""The zoo's architectures; importing this package registers all of them with timm."""

from importlib import import_module

from ._base import CapsuleNet, CapsuleOutput
from ._builder import MODULES

for _name in MODULES:
    import_module(f".{_name}", __name__)

__all__ = ["CapsuleNet", "CapsuleOutput", "MODULES", *MODULES]
