"""Whether an engine may compute what a module inside a layer computes."""

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

__all__ = ["is_plain"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module) -> bool:
    """True if a call of the module runs its class's ``forward`` and nothing else, such as hooks."""
    hooked = _has_any_global_hook() or any(getattr(module, name) for name in _HOOKS)
    return "forward" not in vars(module) and not hooked
