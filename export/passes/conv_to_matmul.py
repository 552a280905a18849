"""Convolutions as matrix products, where these are faster in ONNX Runtime's CPU provider.

Its convolution stores maps in blocks of channels, and processes a row of the output a few positions at a time:

* A map that is no wider than the kernel, with padding, consists only of border, which it processes position by position
  at half its rate or less: the windows are gathered and multiplied by the weights (:class:`WindowProduct`).
* The result of a 1x1 convolution that is read channels-last, like the primary capsules of IDPA, is reordered
  twice: a product of pixels is written directly in that order (:class:`PixelProduct`).

Graphs for GPUs, in half precision or in INT8 keep their convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from capszoo.models.idpa import PrimaryConv

from ..unroll import has_hooks, is_plain_conv

#: Number of weights of a convolution from which gathering its windows pays.
_MANY_WEIGHTS = 1 << 18


class WindowProduct(nn.Module):
    """A convolution of maps of a fixed size, as one product of their windows. ``[b, c, h, w] -> [b, o, h', w']``

    Args:
        conv: without groups, dilation, or padding other than zeros given as numbers.
        size: ``(h, w)``.
    """

    places: Tensor
    weight: Tensor
    bias: Tensor | None

    def __init__(self, conv: nn.Conv2d, size: tuple[int, int]) -> None:
        super().__init__()
        height, width = size
        (k, m), (down, right) = conv.kernel_size, conv.stride
        up, left = (int(n) for n in conv.padding)
        # the place of every element of a padded map, h * w for padding
        places = torch.arange(height * width).view(1, 1, height, width)
        places = F.pad(places, [left, left, up, up], value=height * width)
        windows = places[0, 0].unfold(0, k, down).unfold(1, m, right)  # [h', w', k, m]
        self.size = (windows.shape[0], windows.shape[1])
        self.register_buffer("places", windows.flatten(), persistent=False)
        self.register_buffer(
            "weight", conv.weight.detach().permute(2, 3, 1, 0).flatten(0, 2), persistent=False
        )
        self.register_buffer("bias", None if conv.bias is None else conv.bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x.flatten(2), [0, 1]).transpose(1, 2)  # [b, h*w + 1, c], the last of them zero
        windows = x.index_select(1, self.places)  # [b, h'*w'*k*m, c]
        windows = windows.unflatten(1, (self.size[0] * self.size[1], -1)).flatten(2)  # [b, h'*w', k*m*c]
        y = torch.matmul(windows, self.weight)
        if self.bias is not None:
            y = y + self.bias
        # contiguous: of other strides, some operators read the storage by numbers that ONNX has no shapes for
        return y.transpose(1, 2).contiguous().unflatten(2, self.size)


class PixelProduct(nn.Module):
    """A 1x1 convolution of stride 1 without bias, as one product of the pixels. ``[b, c, h, w] -> [b, o, h, w]``"""

    weight: Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.register_buffer("weight", conv.weight.detach().flatten(1).t(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x.permute(0, 2, 3, 1), self.weight).permute(0, 3, 1, 2)


def gains_as_product(conv: nn.Conv2d, size: tuple[int, int]) -> bool:
    """True if ONNX Runtime computes it faster as a product for maps of this size (measured: docs/dev/engines.md)."""
    if has_hooks(conv) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return False
    if tuple(conv.dilation) != (1, 1) or min(conv.padding) < 1 or conv.weight.numel() < _MANY_WEIGHTS:
        return False
    width = (size[1] + 2 * conv.padding[1] - conv.kernel_size[1]) // conv.stride[1] + 1
    return width <= conv.kernel_size[1]


@contextmanager
def convs_to_matmul(model: nn.Module, example: Tensor) -> Iterator[None]:
    """Within this context, ``model`` (with input ``example``) computes such convolutions as products."""
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    sizes = _map_sizes(model, example)
    try:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if not isinstance(child, nn.Conv2d) or len(sizes.get(child, ())) != 1:
                    continue
                (size,) = sizes[child]
                product: nn.Module | None = None
                if gains_as_product(child, size):
                    product = WindowProduct(child, size)
                elif isinstance(parent, PrimaryConv) and _is_pointwise(child):
                    product = PixelProduct(child)
                if product is not None:
                    swapped.append((parent, name, child))
                    setattr(parent, name, product)
        yield
    finally:
        for parent, name, child in swapped:
            setattr(parent, name, child)


def _is_pointwise(conv: nn.Conv2d) -> bool:
    return conv.kernel_size == (1, 1) == conv.stride and conv.bias is None and not has_hooks(conv)


def _map_sizes(model: nn.Module, example: Tensor) -> dict[nn.Module, set[tuple[int, int]]]:
    """Heights and widths of the input maps of each plain convolution; empty for a model that does not run."""
    sizes: dict[nn.Module, set[tuple[int, int]]] = {}

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes.setdefault(module, set()).add((inputs[0].shape[-2], inputs[0].shape[-1]))

    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d) and is_plain_conv(m)]
    handles = [conv.register_forward_pre_hook(record) for conv in convolutions]
    try:
        with torch.no_grad():
            model(example)
    except Exception:  # the model's code failed: tracing will report the error
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return sizes
