"""Fully sharded data parallel (FSDP2): each process stores a shard of weights, gradients and optimiser state.

Selected by `parallel: fsdp` in a recipe. The net is one unit: its weights are gathered for an update and resharded
after the backward pass, so that between updates a process stores 1/N of them, and always 1/N of the optimiser's
state. It uses torch's `fully_shard`, not Accelerate's plugin, which silently trains with DDP on CPUs.
Checkpoints contain whole tensors: they are the same as those of any other run, for any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["gathered", "load_optimizer", "load_weights", "shard", "whole"]


def shard(module: nn.Module, device: torch.device, world: int) -> None:
    """Shard the parameters of a module, in place; an optimiser of the old parameters becomes invalid."""
    for parameter in module.parameters():  # convolutions' are channels-last, which it does not support
        parameter.data = parameter.data.contiguous()
    fully_shard(module, mesh=init_device_mesh(device.type, (world,)))


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather whole weights within this context, so that parts of a sharded module can be called; on every process."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def whole(tree: Any) -> Any:
    """A state dict with its sharded tensors gathered on the CPU, on every process; others are unchanged."""
    if isinstance(tree, DTensor):
        return tree.full_tensor().cpu()
    if isinstance(tree, Mapping):
        return {key: whole(value) for key, value in tree.items()}
    return [whole(value) for value in tree] if isinstance(tree, list) else tree


def _share(value: Any, like: Any) -> Any:
    """This process's shard of a whole tensor, if `like` is sharded and of its shape."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    # Every process has read the same checkpoint, so nothing is communicated.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load whole weights into a module, sharded or not."""
    own = module.state_dict()
    module.load_state_dict({name: _share(value, own.get(name)) for name, value in weights.items()})


def load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load a whole state into an optimiser of sharded or unsharded parameters."""
    parameters: dict[int, Any] = {}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        parameters.update(zip(saved["params"], group["params"], strict=True))
    shares = {
        number: {name: _share(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": shares})
