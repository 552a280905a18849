"""Compare the model that metadata describe with its weights file; ``checks`` checks the metadata themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from capszoo.errors import WeightsError, first_line

#: Elements that a model may have beyond those of its weights file: a decoder, masks, tables of positions.
MAX_FRESH_NUMBERS = 32 * 2**20
#: Modules that a model may have beyond 20 for each tensor of its file.
MAX_FRESH_MODULES = 10_000


@contextmanager
def fitting(source: str) -> Iterator[None]:
    """Turn errors from loading a state dict that does not fit into a :class:`WeightsError` of one line."""
    try:
        yield
    except WeightsError:
        raise
    except RuntimeError as e:
        reason = " ".join(str(e).split())[:200]
        raise WeightsError(f"{source}: the weights do not fit the model that is described ({reason})") from e


@contextmanager
def _module_limit(most: int, source: str) -> Iterator[None]:
    """Within this context, the thread that registers more sub-modules than ``most`` gets a ``WeightsError``."""
    thread, count = threading.get_ident(), 0

    def registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > most:
            raise WeightsError(f"{source}: the metadata describe a model of over {most:,} modules")

    handle = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def check_demand(
    create: Callable[[], nn.Module],
    state_dict: Mapping[str, Tensor] | None,
    source: str,
) -> None:
    """Refuse metadata that describe a model much larger than its weights, before allocating any memory for it.

    Args:
        create: creates the model that the metadata describe; called where parameters take no memory.
        state_dict: the tensors of the file; None if no weights are loaded, and the model must only be possible.
        source: name of the file in error messages.

    Raises:
        WeightsError: the arguments make no model; the model has more elements than 1.1 times the file's plus
            :data:`MAX_FRESH_NUMBERS`, or more modules than 20 times the file's tensors plus :data:`MAX_FRESH_MODULES`;
            or one of two tensors of the same name is floating-point and the other is not.
    """
    with torch.device("meta"), _module_limit(20 * len(state_dict or ()) + MAX_FRESH_MODULES, source):
        try:
            model = create()
        except NotImplementedError:  # a few of timm's models compute with values, which do not exist here
            return
        except WeightsError:
            raise
        except Exception as e:  # models check their arguments with many kinds of errors
            raise WeightsError(f"{source}: the metadata's arguments make no model ({first_line(e)})") from e
    if state_dict is None:
        return
    held = sum(tensor.numel() for tensor in state_dict.values())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    needed = sum(tensor.numel() for tensor in tensors.values())
    if needed > 1.1 * held + MAX_FRESH_NUMBERS:
        raise WeightsError(
            f"{source}: the metadata describe a model of {needed:,} numbers, the file holds {held:,}: "
            "they do not belong together"
        )
    for name, tensor in state_dict.items():
        loaded = tensors.get(name)
        if loaded is not None and loaded.is_floating_point() != tensor.is_floating_point():
            raise WeightsError(
                f"{source}: the tensor {name} is {tensor.dtype}, the model's is {loaded.dtype}"
            )
