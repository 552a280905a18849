"""A strided convolution whose gradients are matrix products: for bfloat16 on a CPU.

oneDNN computes the gradients of a 9x9 convolution with stride 2 in bfloat16 at a fraction of the speed of its matrix
products: they were two thirds of a training step of ``capsnet_dynamic`` (docs/dev/engines.md, "Primary capsules:
strided_conv"). The forward pass, other dtypes, other devices and machines without a C++ compiler use PyTorch's
convolution.

Letters: b batch · h w rows and columns of the input · h' w' of the output · c o channels in and out · k taps of a side
of the kernel · p q phase: rows p, p + stride, p + 2 stride, .. and columns q, q + stride, ..
"""

import itertools
import math
from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from ._autograd import count_as_reference, refuse_second_gradient
from ._native import does_not_build, no_compiler
from ._native.build import load
from ._native.call import arguments, in_threads
from ._precision import is_tracing, is_transformed, working_type
from .engine_choice import STATE
from .tuning import TUNING


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
            # as `choose` of a routing layer: this form has no name that could be forced, PyTorch's has "reference"
            and "reference" not in STATE.names
            and x.device.type == "cpu"
            and x.dim() == 4
            and working_type(x) == working_type(self.weight) == torch.bfloat16
            and self.padding == (0, 0)
            and self.dilation == (1, 1)
            and self.groups == 1
            and self.stride[0] == self.stride[1] > 1
            and self.kernel_size[0] == self.kernel_size[1] >= TUNING.strided_conv_min_kernel
            and not no_compiler(torch.float32)
            and not does_not_build("tap_sums", torch.float32)
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
    c, k = weight.shape[1:3]
    gradient = grad.new_empty(b, height, width, c)
    taps = weight.permute(2, 3, 0, 1).contiguous()
    # as many images as of 8x8 outputs: the buffer does not grow with the size of an image
    images = max(1, min(b, TUNING.strided_conv_block_images * 64 // max(64, rows * columns)))
    # one buffer for every block: new memory would be new pages, which cost as much as the products
    buffer = grad.new_empty((-(-k // stride)) ** 2, images * rows * columns, c)
    for part, of_inputs in zip(grad.split(images), gradient.split(images), strict=True):
        of_positions = part.permute(0, 2, 3, 1).reshape(-1, o)
        for p, q in itertools.product(range(stride), repeat=2):
            phase = taps[p::stride, q::stride]
            count = phase.shape[0] * phase.shape[1]
            shape = (count, of_positions.shape[0], c)
            products = buffer.view(-1)[: math.prod(shape)].view(shape)
            for tap, product in zip(phase.reshape(count, o, c), products, strict=True):
                torch.mm(of_positions, tap, out=product)
            _sum_taps(products, (*phase.shape[:2], p, q, stride), (rows, columns), of_inputs)
    return gradient.permute(0, 3, 1, 2)


def _sum_taps(
    products: Tensor, phase: Tuple[int, int, int, int, int], outputs: Tuple[int, int], of_inputs: Tensor
) -> None:
    """Write one phase of the gradient for some images: ``tap_sums`` of ``_native/tap_sums.cpp``."""
    images, height, width, channels = of_inputs.shape
    function = load("tap_sums", False).tap_sums

    def compute(_: int, first: int, last: int) -> None:
        sizes = (first, last, images, *outputs, channels, *phase, height, width)
        function(*arguments(products, *sizes, of_inputs))

    in_threads(compute, images)


@_input_gradient.register_fake
def _(grad: Tensor, weight: Tensor, height: int, width: int, stride: int) -> Tensor:
    return grad.new_empty(grad.shape[0], height, width, weight.shape[1]).permute(0, 3, 1, 2)


@library.custom_op("capszoo::strided_conv_weight_gradient", mutates_args=())
def _weight_gradient(grad: Tensor, x: Tensor, kernel: int, stride: int) -> Tensor:
    """Gradient for the weight, ``[o, c, k, k]``, channels-last: a product for each tap of the kernel.

    Args:
        grad: of the output, ``[b, o, h', w']``.
        x: input ``[b, c, h, w]``.
        kernel: ``k``.
        stride: of the convolution.
    """
    b, o, rows, columns = grad.shape
    c = x.shape[1]
    of_outputs = grad.permute(0, 2, 3, 1).reshape(-1, o).t().contiguous()
    images = x.permute(0, 2, 3, 1)
    gradient = x.new_empty(kernel, kernel, o, c)
    of_tap = x.new_empty(b, rows, columns, c)
    for i, j in itertools.product(range(kernel), repeat=2):
        last_row, last_column = i + stride * (rows - 1) + 1, j + stride * (columns - 1) + 1
        of_tap.copy_(images[:, i:last_row:stride, j:last_column:stride])
        torch.mm(of_outputs, of_tap.view(-1, c), out=gradient[i, j])
    return gradient.permute(2, 0, 1, 3).contiguous().permute(0, 3, 1, 2)


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


@count_as_reference(strided_conv)
def _multiply_adds(x: Any, weight: Any, bias: Any, stride: int) -> int:
    rows, columns = ((size - weight[2]) // stride + 1 for size in x[2:])
    return x[0] * rows * columns * math.prod(weight)


@count_as_reference(_input_gradient)
def _multiply_adds_of_input(grad: Any, weight: Any, *rest: Any) -> int:
    return math.prod(grad) * math.prod(weight[1:])


@count_as_reference(_weight_gradient)
def _multiply_adds_of_weight(grad: Any, x: Any, kernel: int, stride: int) -> int:
    return math.prod(grad) * x[1] * kernel**2
