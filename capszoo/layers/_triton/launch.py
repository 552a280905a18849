"""Kernels with their sizes, tiles and grids: everything between an operator and :mod:`.kernels`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from . import kernels, padded

#: Of each kernel, the tiles that are tried: numbers of votes, and warps. A thread holds 32 or 64 numbers of three tiles
#: (votes, parents, sums) or four. With more of them registers spill, as the compiler's report says; float32, whose
#: products are three, takes half of it.
TILES = {
    "pass_kernel": ((4096, 4), (8192, 4), (8192, 8)),
    "grad_parents_kernel": ((4096, 4), (8192, 8)),
    "grad_children_kernel": ((4096, 4), (8192, 8)),
}

#: Depth of the products of a step, one instruction's: four children with 4x4 poses.
DEPTH = 16

INTERPRETED = isinstance(kernels.pass_kernel, InterpretedFunction)

#: Multiplication and addition as one instruction, whatever this version's default; the interpreter takes no options.
OPTIONS = {} if INTERPRETED else {"enable_fp_fusion": True}

#: The tile by which loops are split.
_USUAL = 8192

#: Programs for each multiprocessor, at the least, so that one's loads hide behind another's arithmetic.
_RESIDENT = 2


def configs(name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> list[dict[str, int]]:
    """Tiles of a kernel for padded j, p, q and r: ``BN`` routings, ``KB`` deep, ``num_warps``."""
    j, p, q, r = sizes
    least = 16 // p  # rows of a product
    share = 2 if dtype == torch.float32 else 1
    found = [
        {"BN": max(least, numbers // (share * j * p * r)), "KB": max(DEPTH, q), "num_warps": warps}
        for numbers, warps in TILES[name]
    ]
    return [tile for place, tile in enumerate(found) if tile not in found[:place]]


@functools.cache
def _tuned(name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], bucket: int) -> Any:
    """The kernel with tiles for these (padded) sizes; ``bucket`` tells works of very different extent apart."""
    kernel = getattr(kernels, name)
    found = configs(name, dtype, sizes)
    if INTERPRETED:
        first = {key: value for key, value in found[0].items() if key != "num_warps"}
        return lambda grid: functools.partial(kernel[grid(first)], **first)
    choices = [
        triton.Config({"BN": c["BN"], "KB": c["KB"]}, num_warps=c["num_warps"], num_stages=2) for c in found
    ]
    tuned = triton.autotune(choices, key=["J", "P", "Q", "R", "TYPES", "KERNEL", "COUPLINGS"])(kernel)
    return lambda grid: functools.partial(tuned[grid], **OPTIONS)


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Pass:
    """One pass over some children, weights and parents (see :func:`.ops.fused_pass` for the arguments)."""

    def __init__(
        self, children: Tensor, weight: Tensor, parents: Tensor, scale: float, kernel: int, stride: int
    ) -> None:
        if not children.dtype == weight.dtype:
            raise ValueError(f"children are {children.dtype} and weights {weight.dtype}: cast one of them")
        self.children, self.weight, self.parents = (t.contiguous() for t in (children, weight, parents))
        b, height, width, types, d = children.shape
        self.count, q, j, r = weight.shape
        p = d // q
        self.kernel, self.stride = kernel, stride
        self.out = ((height - kernel) // stride + 1, (width - kernel) // stride + 1)
        self.routings = b * self.out[0] * self.out[1]
        if self.count != kernel * kernel * types or parents.shape != (self.routings, j, p * r):
            raise ValueError(
                f"children {tuple(children.shape)}, weights {tuple(weight.shape)} and parents "
                f"{tuple(parents.shape)} do not belong together at kernel {kernel}, stride {stride}"
            )
        self.sizes = padded(j, p, q, r)
        cell = types * d
        steps = {
            "positions": self.out[0] * self.out[1],
            "width": self.out[1],
            "image": height * width * cell,
            "row": stride * width * cell,
            "column": stride * cell,
            "grid_row": width * cell,
        }
        padded_sizes = dict(zip(("JP", "PP", "QP", "RP"), self.sizes, strict=True))
        self.arguments: dict[str, Any] = {
            **steps,
            "routings": self.routings,
            "children": self.count,
            "scale": scale,
            "J": j,
            "P": p,
            "Q": q,
            "R": r,
            **padded_sizes,
            "TYPES": types,
            "KERNEL": kernel,
            # float32 on the tensor cores without losing digits: three products of tf32
            "PRECISION": "ieee" if INTERPRETED else "tf32x3" if children.dtype == torch.float32 else "tf32",
        }
        j_padded, p_padded, _, r_padded = self.sizes
        self.tile = max(1, _USUAL // (j_padded * p_padded * r_padded))

    def _launch(self, name: str, grid: Any, part: int, couplings: bool, tensors: tuple[Any, ...]) -> None:
        kernel = _tuned(name, self.children.dtype, self.sizes, self.routings.bit_length())
        with torch.cuda.device_of(self.children):
            launch = kernel(grid)
            launch(*tensors, part=part, COUPLINGS=couplings, **self.arguments)

    def _parts(self, programs: int, length: int, least: int) -> tuple[int, int]:
        """Parts of a loop, so many that no multiprocessor idles, and a part's length, a multiple of ``least``."""
        wanted = -(-_RESIDENT * multiprocessors(self.children.device) // programs)
        part = -(-length // max(1, min(wanted, length // least)))
        part = -(-part // least) * least
        return -(-length // part), part

    def _over_routings(
        self, name: str, dtype: torch.dtype, before: tuple[Any, ...], after: tuple[Any, ...], couplings: bool
    ) -> Tensor:
        """A kernel whose programs own routings: what it sums up over the children, ``[n, j, e]``."""
        # a part ends where a step does, whatever the depth of the step
        parts, part = self._parts(-(-self.routings // self.tile), self.count, max(1, DEPTH // self.sizes[2]))
        out = self.parents.new_empty(
            (parts, *self.parents.shape), dtype=dtype if parts == 1 else torch.float32
        )

        def grid(meta: dict[str, Any]) -> tuple[int, int]:
            return triton.cdiv(self.routings, meta["BN"]), parts

        tensors = (self.children, self.weight, self.parents, *before, out, *after)
        self._launch(name, grid, part, couplings, tensors)
        return out[0] if parts == 1 else out.sum(dim=0).to(dtype)

    def run(self, want_couplings: bool) -> tuple[Tensor, Tensor]:
        """Sums ``[n, j, e]`` and couplings ``[n, c, j]``."""
        shape = (self.routings, self.count, self.parents.shape[1]) if want_couplings else (0,)
        couplings = self.children.new_empty(shape)
        if self.routings == 0:
            return self.children.new_zeros(self.parents.shape), couplings
        after = (couplings,)
        return self._over_routings("pass_kernel", self.children.dtype, (), after, want_couplings), couplings

    def grad_parents(self, grad_sums: Tensor, grad_couplings: Tensor | None) -> Tensor:
        """``[n, j, e]``"""
        if self.routings == 0:
            return torch.zeros_like(self.parents)
        given = _contiguous(grad_sums, grad_couplings)
        couplings = grad_couplings is not None
        return self._over_routings("grad_parents_kernel", self.parents.dtype, given, (), couplings)

    def grad_children(self, grad_sums: Tensor, grad_couplings: Tensor | None) -> tuple[Tensor, Tensor]:
        """``[b, h, w, i, d]`` and ``[c, q, j, r]``."""
        if self.routings == 0:
            return torch.zeros_like(self.children), torch.zeros_like(self.weight)
        depth = self.sizes[2]
        parts, part = self._parts(-(-self.count * depth // max(DEPTH, depth)), self.routings, 64)
        windows = self.children.new_empty(self.routings, self.count, self.children.shape[4])
        grad_weight = self.weight.new_empty((parts, *self.weight.shape), dtype=torch.float32)

        def grid(meta: dict[str, Any]) -> tuple[int, int]:
            return triton.cdiv(self.count, meta["KB"] // depth), parts

        given = _contiguous(grad_sums, grad_couplings)
        tensors = (self.children, self.weight, self.parents, *given, windows, grad_weight)
        self._launch("grad_children_kernel", grid, part, grad_couplings is not None, tensors)
        return self._fold(windows), grad_weight.sum(dim=0).to(self.weight.dtype)

    def _fold(self, windows: Tensor) -> Tensor:
        """Gradients of each window's own children, added up on the grid."""
        if self.kernel == 1 and self.stride == 1:
            return windows.view(self.children.shape)
        grid = torch.empty_like(self.children)
        _, height, width, types, d = grid.shape
        with torch.cuda.device_of(grid):
            kernels.fold_kernel[(triton.cdiv(grid.numel(), 1024),)](
                windows,
                grid,
                grid.numel(),
                height,
                width,
                *self.out,
                CHANNELS=types * d,
                KERNEL=self.kernel,
                STRIDE=self.stride,
                BLOCK=1024,
                **OPTIONS,
            )
        return grid


def _contiguous(grad_sums: Tensor, grad_couplings: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients for a kernel, which reads the second only where told to."""
    grad_sums = grad_sums.contiguous()
    return grad_sums, grad_sums if grad_couplings is None else grad_couplings.contiguous()
