"""Names that are resolved on first access, and the registration with timm without importing it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODELS = f"{__package__.partition('.')[0]}.models"


def register_with_timm() -> None:
    """Register now if timm is loaded, else as soon as it is."""
    if "timm" in sys.modules:
        importlib.import_module(_MODELS)
    else:
        # by name: a capszoo that was removed from sys.modules has left a finder of another class, and two would call
        # each other for ever
        name = (_TimmFinder.__module__, _TimmFinder.__qualname__)
        others = [f for f in sys.meta_path if (type(f).__module__, type(f).__qualname__) != name]
        sys.meta_path[:] = [_TimmFinder(), *others]


class _TimmFinder(MetaPathFinder):
    """Find timm through the other finders, and replace its loader by one that registers our models after loading."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "timm":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader, self)
                return spec
        return None


class _RegisteringLoader(Loader):
    """timm's loader, followed by our registration."""

    def __init__(self, loader: Loader, finder: _TimmFinder) -> None:
        self.loader, self.finder = loader, finder

    def __getattr__(self, name: str) -> Any:  # get_source, is_package, … of the real one
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        importlib.import_module(_MODELS)


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
