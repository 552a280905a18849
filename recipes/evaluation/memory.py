"""The memory of a forward pass, measured on two images, so that a batch is not larger than a machine allows."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capszoo.models._inspect import evaluating, first_parameter

#: Bytes that an evaluation on a CPU takes at most, also where there is more memory.
MOST_BYTES = 5 * 10**9

#: Factor of the measured memory, for what an operator takes within itself.
MARGIN = 1.5

_IMAGES = 2


class _PeakMemory(TorchDispatchMode):
    """Record the largest sum of the bytes of tensors that exist at one time, of those created within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):  # weights and input existed before
            if isinstance(leaf, Tensor):
                self._seen.add(leaf.untyped_storage())
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes()).atexit = False
        return out

    def _count(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def memory_per_image(net: nn.Module, input_size: tuple[int, ...]) -> float:
    """Bytes of activations of a forward pass in eval mode, for each image, from a pass of two blank ones.

    Args:
        net: on its device.
        input_size: channels, height and width.
    """
    like = first_parameter(net)
    images = torch.zeros(_IMAGES, *input_size, device=like.device, dtype=like.dtype)
    images = images.contiguous(memory_format=torch.channels_last)
    with evaluating(net), torch.no_grad(), torch.random.fork_rng(devices=[]), _PeakMemory() as memory:
        net(images)
    return memory.peak / _IMAGES


def available_memory(device: torch.device) -> int | None:
    """Bytes that a process may still take on a device; None if the system does not say so."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with suppress(OSError, ValueError, StopIteration):  # a container's limit; "max" is none
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        cached = int(next(line for line in lines if line.startswith("inactive_file ")).split()[1])
        limits.append(int((group / "memory.max").read_text()) - used + cached)
    with suppress(OSError, ValueError, AttributeError):
        if not limits:
            limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(min(limits), 0) if limits else None


def fitting_images(net: nn.Module, input_size: tuple[int, ...]) -> int:
    """Images of a forward pass that take at most half of the available memory, and at most 5 GB on a CPU."""
    device = first_parameter(net).device
    available = available_memory(device)
    budgets = [available / 2] if available is not None else []
    budgets += [MOST_BYTES] if device.type != "cuda" or not budgets else []
    return max(1, int(min(budgets) / (MARGIN * max(memory_per_image(net, input_size), 1))))
