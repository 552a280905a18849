"""Resolve public names of a package on first access (PEP 562), so that importing it loads nothing heavy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["resolver"]


def resolver(
    package: str, defined_in: Mapping[str, str], modules: Collection[str] = ()
) -> Callable[[str], Any]:
    """Create the ``__getattr__`` of a package.

    Args:
        package: ``__name__`` of the package.
        defined_in: public name to the module, below the package, that defines it.
        modules: further modules that are attributes of the package without being imported by it.
    """

    def find(name: str) -> Any:
        if name in defined_in:
            value = getattr(importlib.import_module(f".{defined_in[name]}", package), name)
            setattr(sys.modules[package], name, value)  # later accesses bypass this function
            return value
        if name in modules:
            return importlib.import_module(f".{name}", package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
