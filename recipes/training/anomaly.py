"""Find the origin of a value that is not finite: hooks name the first layer, or the first gradient, that has one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def _finite(value: Any) -> bool:
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


class NonFiniteDetector:
    """Check every output (and gradient) of a module until one is not finite; slow, so for a few updates only.

    Args:
        module: the trained module: a net under the name ``net``, and its loss.
        gradients: check gradients too.

    ``found`` describes the result in words; it stays empty if all values are finite.
    """

    def __init__(self, module: nn.Module, gradients: bool = True) -> None:
        self.found = ""
        self.handles = [
            part.register_forward_hook(self._output_hook(name)) for name, part in module.named_modules()
        ]
        if gradients:
            self.handles += [
                parameter.register_hook(self._gradient_hook(name))
                for name, parameter in module.named_parameters()
                if parameter.requires_grad
            ]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _output_hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.found or _finite(output):
                return
            bad = [key for key, weight in module.named_parameters() if not weight.isfinite().all()]
            inside = name.removeprefix("net.")
            what = {"": "the loss", "net": "the net", "criterion": "the loss"}.get(name, inside)
            cause = f", whose {bad[0]} is not finite" if bad else ""
            self.found = f"first in the output of {what} ({type(module).__name__}){cause}"

        return hook

    def _gradient_hook(self, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            if not self.found and not _finite(gradient):
                self.found = f"first in the gradient of {name.removeprefix('net.')}"

        return hook
