"""Methods besides ``forward`` that run as calls of their module.

Tools act where a module is called: hooks, pruning, spectral norm, offloading and sharding bring its weights up to date
there. A public method that reads weights, such as ``route``, therefore enters through ``__call__``: a
:func:`forward_method` of a module that derives from :class:`ForwardMethods`. A method that its own module calls
within a call is a private one, so that hooks run once.
"""

import functools
from types import FunctionType
from typing import Any, Callable, TypeVar

import torch
from torch import nn

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _standing_for(inner: Any, outer: Any) -> Any:
    """``outer``, which TorchScript compiles and FX reads as ``inner``.

    Both read the source and signature of a function's ``__wrapped__``. TorchScript reads the names in it from the
    globals of the function itself, so it has those of ``inner``, and ``outer`` must not use its own.
    """
    function = FunctionType(outer.__code__, inner.__globals__, inner.__name__, None, outer.__closure__)
    function.__kwdefaults__ = outer.__kwdefaults__
    return functools.update_wrapper(function, inner)


class ForwardMethods(nn.Module):
    """Base of modules with a :func:`forward_method`: ``forward`` runs the one that the call names."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inner = vars(cls).get("forward")
        if inner is None:
            return

        def forward(self: Any, *args: Any, method: str = "", **kwargs: Any) -> Any:
            if method:
                return getattr(type(self), method).__wrapped__(self, *args, **kwargs)
            return inner(self, *args, **kwargs)

        cls.forward = _standing_for(inner, forward)  # type: ignore[method-assign]


def forward_method(inner: _Method) -> _Method:
    """Decorate a public method: it calls its module, which runs the method instead of ``forward``, with all hooks.

    Scripted modules run it directly.
    """
    name = inner.__name__  # type: ignore[attr-defined]
    scripted = torch.jit.ScriptModule

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, scripted):
            return inner(self, *args, **kwargs)
        return self(*args, method=name, **kwargs)

    return _standing_for(inner, method)
