"""Layouts: windows of a grid, weights as block-diagonal matrices."""

from typing import List

import torch
import torch.nn.functional as F
from torch import Tensor


def split_axis(x: Tensor, dim: int, sizes: List[int]) -> Tensor:
    """``x`` with the axis ``dim``, counted from the front, as several of the given sizes; a view where one exists.

    ``unflatten`` by ``reshape``: torch.onnx's TorchScript exporter writes the other axes, as the batch, as constants
    for ``unflatten``. A leaf for FX, which cannot list a shape: a file that uses this function in traced code must also
    call ``torch.fx.wrap("split_axis")`` at its top level.
    """
    shape = list(x.size())
    return x.reshape(shape[:dim] + sizes + shape[dim + 1 :])


torch.fx.wrap("split_axis")


def out_size(size: int, kernel_size: int, stride: int, padding: int = 0) -> int:
    """Number of windows along an axis of ``size`` positions; also the output size of a convolution."""
    return (size + 2 * padding - kernel_size) // stride + 1


def windows(x: Tensor, kernel_size: int, stride: int, padding: int = 0) -> Tensor:
    """Every window of a grid: ``[b, h, w, c]`` to ``[b, h', w', k*l*c]``.

    Slices along one axis, then the other: 2 k slices and two concatenations. They export to plain operators
    (unfold becomes Gather) and copy long contiguous runs. Compiled, the gradient of unfold adds one number at a time.

    Args:
        x: grid, channels last.
        kernel_size: rows k and columns l of a window.
        stride: distance of windows.
        padding: rows and columns of zeros around the grid.
    """
    if padding > 0:
        x = F.pad(x, [0, 0, padding, padding, padding, padding])
    rest = kernel_size - 1
    height, width = x.shape[1], x.shape[2]
    torch._assert(height > rest, "the grid is smaller than the window: give larger images")
    torch._assert(width > rest, "the grid is smaller than the window: give larger images")
    x = torch.cat(
        [x[:, :, k : width - rest + k : stride] for k in range(kernel_size)], dim=3
    )  # [b, h, w', l*c]
    return torch.cat([x[:, k : height - rest + k : stride] for k in range(kernel_size)], dim=3)


def block_diagonal(weight: Tensor, pose_size: int) -> Tensor:
    """Transforms of matrix poses as block-diagonal matrices on flattened poses: ``[i, j, q, r] -> [i, p*q, j*p*r]``.

    ``pose.flatten() @ block_diagonal(weight)[i]`` is ``pose @ weight[i, j]`` for all parents j, flattened.
    Multiplying by the zeros costs less than the inefficiency of separate 4x4 products.

    Args:
        weight: ``[i, j, q, r]``.
        pose_size: rows p of a pose.
    """
    w = weight.permute(0, 2, 1, 3).unsqueeze(3)  # [i, q, j, 1, r]
    # row p of the child's pose reaches row p of the vote only
    rows = [F.pad(w, [0, 0, p, pose_size - 1 - p]) for p in range(pose_size)]  # each [i, q, j, p, r]
    return torch.stack(rows, dim=1).flatten(3).flatten(1, 2)
