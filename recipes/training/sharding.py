"""Fully sharded data parallel (FSDP2): each process keeps its share of weights, gradients and optimiser state.

A recipe asks for it with `parallel: fsdp`. The net is one unit: its weights are gathered for an update and go back to
shares after the backward pass, so that between updates a process holds 1/N of them, and always 1/N of the optimiser's
state. torch's `fully_shard` is used and not Accelerate's plugin, which trains by DDP on CPUs without saying so.
Checkpoints hold whole tensors: they are those of any other run, for any number of processes.
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
    """Cut the parameters of a module into shares, in place; an optimiser of the old ones is of no use afterwards."""
    for parameter in module.parameters():  # those of convolutions are channels-last, which it does not take
        parameter.data = parameter.data.contiguous()
    fully_shard(module, mesh=init_device_mesh(device.type, (world,)))


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Whole weights while the block lasts, so that parts of a sharded module can be called; on every process."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def whole(tree: Any) -> Any:
    """A state dict whose sharded tensors are put together on the CPU, on every process; others stay as they are."""
    if isinstance(tree, DTensor):
        return tree.full_tensor().cpu()
    if isinstance(tree, Mapping):
        return {key: whole(value) for key, value in tree.items()}
    return [whole(value) for value in tree] if isinstance(tree, list) else tree


def _share(value: Any, like: Any) -> Any:
    """This process's share of a whole tensor, where `like` is sharded and of its shape."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    # Every process has read the same checkpoint: nothing is sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load whole weights into a module, sharded or not."""
    own = module.state_dict()
    module.load_state_dict({name: _share(value, own.get(name)) for name, value in weights.items()})


def load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load a whole state into an optimiser of parameters that are sharded or not."""
    parameters: dict[int, Any] = {}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        parameters.update(zip(saved["params"], group["params"], strict=True))
    shares = {
        number: {name: _share(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": shares})
