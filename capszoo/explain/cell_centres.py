"""Where the cells of a feature map lie in the image: the centres of their receptive fields.

A convolution with kernel ``k``, stride ``s`` and padding ``p`` has its first output's centre ``(k - 1) / 2 - p`` input
cells after the first input's, and its outputs ``s`` input cells apart. An unpadded network therefore sees only the
middle of the image in its cells, and a strided, padded one has them shifted towards the top left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class CellCentres:
    """Centres of a grid's cells along one axis, in pixels; 0 is the image's edge, 0.5 its first pixel's centre.

    Attributes:
        first: centre of the first cell.
        step: distance of two cells.
    """

    first: float
    step: float

    def edges(self, cells: int) -> tuple[float, float]:
        """Start of the first of ``cells`` cells and end of the last, each cell being one step long."""
        return self.first - self.step / 2, self.first + (cells - 0.5) * self.step

    def after(self, kernel: int, stride: int, padding: float) -> CellCentres:
        """Those of the outputs of a convolution or a pooling over these cells."""
        return CellCentres(self.first + ((kernel - 1) / 2 - padding) * self.step, self.step * stride)


Grid = tuple[CellCentres, CellCentres]
Size = tuple[int, ...]


@contextmanager
def recorded_centres(model: nn.Module, size: Size) -> Iterator[dict[Size, Grid]]:
    """Record the centres of every feature map that the model computes inside, as rows and columns → (y, x).

    Maps of one size are taken to lie alike, as those of the branches of a residual block do. Maps behind an operation
    that is no module with ``kernel_size`` and ``stride`` are not found.

    Args:
        model: the network; gets forward hooks while the context lasts.
        size: height and width of its input, in pixels.
    """
    grids: dict[Size, Grid] = {size: (CellCentres(0.5, 1.0), CellCentres(0.5, 1.0))}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not (args and _is_map(args[0]) and _is_map(output)):
            return
        before, after = args[0].shape[2:], output.shape[2:]
        if before not in grids or after in grids:
            return
        window = zip(grids[before], before, after, *(_pair(module, name) for name in _WINDOW), strict=True)
        y, x = (
            centres.after(
                dilation * (kernel - 1) + 1, stride, _padding(b, a, kernel, stride, padding, dilation)
            )
            for centres, b, a, kernel, stride, padding, dilation in window
        )
        grids[after] = (y, x)

    windowed = [m for m in model.modules() if hasattr(m, "kernel_size") and hasattr(m, "stride")]
    hooks = [module.register_forward_hook(note) for module in windowed]
    try:
        yield grids
    finally:
        for hook in hooks:
            hook.remove()


def centres_of(cells: Size, centres: dict[Size, Grid], size: Size, shrink: int = 1) -> Grid:
    """The centres (y, x) of a grid among the recorded ones, else cells that divide the image evenly.

    Args:
        cells: rows and columns of the grid.
        centres: from :func:`recorded_centres`.
        size: height and width of the image, in pixels.
        shrink: side of the squares over which a head averaged the last map.
    """
    if shrink > 1:
        for before, (y, x) in reversed(centres.items()):
            if tuple(-(-side // shrink) for side in before) == cells:
                return y.after(shrink, shrink, 0), x.after(shrink, shrink, 0)
    elif cells in centres:
        return centres[cells]
    tall, wide = (side / count for count, side in zip(cells, size, strict=True))
    return CellCentres(tall / 2, tall), CellCentres(wide / 2, wide)


_WINDOW = ("kernel_size", "stride", "padding", "dilation")


def _is_map(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4


def _pair(module: nn.Module, name: str) -> tuple[Any, Any]:
    value = getattr(module, name, 1 if name == "dilation" else 0)
    if isinstance(value, (tuple, list)):
        return (value[0], value[-1]) if len(value) else (0, 0)
    return value, value


def _padding(before: int, after: int, kernel: int, stride: int, padding: Any, dilation: int) -> float:
    """Padding before the first cell; computed from the sizes where the module states none that explains them."""
    reach = dilation * (kernel - 1) + 1
    if isinstance(padding, int) and (before + 2 * padding - reach) // stride + 1 == after:
        return padding
    return max((after - 1) * stride + reach - before, 0) // 2
