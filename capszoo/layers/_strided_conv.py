"""A strided convolution whose gradients are matrix products: for bfloat16 on a CPU.

oneDNN computes the gradients of a 9x9 convolution with stride 2 in bfloat16 at a fraction of the speed of its matrix
products: they were two thirds of a training step of ``capsnet_dynamic`` (docs/dev/performance.md, "Primary capsules:
strided_conv"). The forward pass, every other dtype and every other device use PyTorch's convolution.

Letters: b batch · h w rows and columns of the input · h' w' of the output · c o channels in and out · k taps of a side
of the kernel.
"""

from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from ._autograd import refuse_second_gradient
from ._precision import working_type
from ._tracing import is_tracing, is_transformed
from .engine_choice import STATE
from .tuning import TUNING

__all__ = ["StridedConv2d"]


class StridedConv2d(nn.Conv2d):
    """``nn.Conv2d`` that trains faster in bfloat16 on a CPU, where its kernel is large and its stride above 1."""

    def forward(self, x: Tensor) -> Tensor:
        """``[b, c, h, w]`` to ``[b, o, h', w']``."""
        if not torch.jit.is_scripting():
            if self._by_products(x):
                bias = None if self.bias is None else self.bias.to(torch.bfloat16)
                weight, x = self.weight.to(torch.bfloat16), x.to(torch.bfloat16)
                return strided_conv(x, weight, bias, int(self.stride[0]))
        return self._conv_forward(x, self.weight, self.bias)

    @torch.jit.unused
    def _by_products(self, x: Tensor) -> bool:
        """True if the gradients of this call are to be matrix products."""
        if is_tracing(x) or is_transformed():
            return False
        return (
            torch.is_grad_enabled()
            and "reference" not in STATE.names
            and x.device.type == "cpu"
            and x.dim() == 4
            and working_type(x) == torch.bfloat16
            and self.padding == (0, 0)
            and self.dilation == (1, 1)
            and self.groups == 1
            and self.stride[0] == self.stride[1] > 1
            and self.kernel_size[0] == self.kernel_size[1] >= TUNING.strided_conv_min_kernel
        )


@library.custom_op("capszoo::strided_conv", mutates_args=())
def strided_conv(x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int) -> Tensor:
    """PyTorch's convolution, without padding; its gradients are :func:`_input_gradient` and :func:`_weight_gradient`.

    Args:
        x: ``[b, c, h, w]``.
        weight: ``[o, c, k, k]`` of the same dtype.
        bias: ``[o]`` or None.
        stride: of rows and columns.

    Returns:
        ``[b, o, h', w']``, channels-last.
    """
    return F.conv2d(x, weight, bias, stride).contiguous(memory_format=torch.channels_last)


@strided_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int) -> Tensor:
    k = weight.shape[2]
    rows, columns = ((size - k) // stride + 1 for size in x.shape[2:])
    return x.new_empty(x.shape[0], rows, columns, weight.shape[0]).permute(0, 3, 1, 2)


@library.custom_op("capszoo::strided_conv_input_gradient", mutates_args=())
def _input_gradient(grad: Tensor, weight: Tensor, height: int, width: int, stride: int) -> Tensor:
    """Gradient for the input, ``[b, c, h, w]``, channels-last: a product for each tap of the kernel, summed in float32.

    Args:
        grad: of the output, ``[b, o, h', w']``.
        weight: ``[o, c, k, k]``.
        height, width: ``h`` and ``w``.
        stride: of the convolution.
    """
    b, o, rows, columns = grad.shape
    c = weight.shape[1]
    found = grad.new_empty(b, height, width, c)
    taps = weight.permute(2, 3, 0, 1).contiguous()
    images = max(1, min(b, TUNING.strided_conv_block_images))
    # buffers for every block: new ones would be new pages, which cost as much as the products
    sums = grad.new_empty(images, height, width, c, dtype=torch.float32)
    product = grad.new_empty(images * rows * columns, c)
    for part, of_inputs in zip(grad.split(images), found.split(images), strict=True):
        n = part.shape[0]
        of_positions = part.permute(0, 2, 3, 1).reshape(n * rows * columns, o)
        total, one = sums[:n].zero_(), product[: n * rows * columns]
        for i in range(taps.shape[0]):
            for j in range(taps.shape[1]):
                last_row, last_column = i + stride * (rows - 1) + 1, j + stride * (columns - 1) + 1
                torch.mm(of_positions, taps[i, j], out=one)
                total[:, i:last_row:stride, j:last_column:stride] += one.view(n, rows, columns, c)
        of_inputs.copy_(total)
    return found.permute(0, 3, 1, 2)


@_input_gradient.register_fake
def _(grad: Tensor, weight: Tensor, height: int, width: int, stride: int) -> Tensor:
    return grad.new_empty(grad.shape[0], height, width, weight.shape[1]).permute(0, 3, 1, 2)


@library.custom_op("capszoo::strided_conv_weight_gradient", mutates_args=())
def _weight_gradient(grad: Tensor, x: Tensor, kernel: int, stride: int) -> Tensor:
    """Gradient for the weight, ``[o, c, k, k]``, channels-last: one product with the windows of some images at a time.

    Args:
        grad: of the output, ``[b, o, h', w']``.
        x: input ``[b, c, h, w]``.
        kernel: ``k``.
        stride: of the convolution.
    """
    b, o, rows, columns = grad.shape
    c = x.shape[1]
    total = grad.new_zeros(o, kernel * kernel * c, dtype=torch.float32)
    images = max(1, min(b, TUNING.strided_conv_block_images))
    buffer = x.new_empty(images, rows, columns, kernel, kernel, c)  # as in _input_gradient
    for of_outputs, of_inputs in zip(grad.split(images), x.split(images), strict=True):
        n = of_inputs.shape[0]
        windows = of_inputs.permute(0, 2, 3, 1).unfold(1, kernel, stride).unfold(2, kernel, stride)
        block = buffer[:n].copy_(windows.permute(0, 1, 2, 4, 5, 3))
        of_positions = of_outputs.permute(0, 2, 3, 1).reshape(n * rows * columns, o)
        total += of_positions.t() @ block.view(n * rows * columns, kernel * kernel * c)
    return total.to(grad.dtype).view(o, kernel, kernel, c).permute(0, 3, 1, 2)


@_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, kernel: int, stride: int) -> Tensor:
    return grad.new_empty(grad.shape[1], kernel, kernel, x.shape[1]).permute(0, 3, 1, 2)


def _keep(ctx: Any, inputs: Tuple[Tensor, Tensor, Optional[Tensor], int], output: Tensor) -> None:
    x, weight, _, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], None]:
    x, weight = ctx.saved_tensors
    for_input, for_weight, for_bias, _ = ctx.needs_input_grad
    return (
        _input_gradient(grad, weight, x.shape[2], x.shape[3], ctx.stride) if for_input else None,
        _weight_gradient(grad, x, weight.shape[2], ctx.stride) if for_weight else None,
        grad.sum((0, 2, 3)) if for_bias else None,
        None,
    )


strided_conv.register_autograd(_backward, setup_context=_keep)
refuse_second_gradient(_input_gradient)
refuse_second_gradient(_weight_gradient)
