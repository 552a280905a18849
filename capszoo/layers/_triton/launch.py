"""Sizes, tiles and grids for each kernel: everything between an operator and :mod:`.kernels`, :mod:`.norms`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from . import kernels, norms, padded

#: Tiles to try for each kernel: (elements of votes, warps). A thread has 32 or 64 elements of each of three tiles
#: (votes, parents, sums) or four. With more, registers spill, as the compiler reports. float32 takes half of that,
#: because its products are computed as three.
TILES = {
    "pass_kernel": ((4096, 4), (8192, 4), (8192, 8)),
    "grad_parents_kernel": ((4096, 4), (8192, 8)),
    "grad_children_kernel": ((4096, 4), (8192, 8)),
}

#: Depth of the products of a step, that of one instruction: four children with 4x4 poses.
DEPTH = 16

INTERPRETED = isinstance(kernels.pass_kernel, InterpretedFunction)

#: Fuse multiplication and addition, whatever this version's default; the interpreter takes no options.
OPTIONS = {} if INTERPRETED else {"enable_fp_fusion": True}

#: The tile that determines how loops are split.
_USUAL = 8192

#: Elements in a tile of the kernels in norms.py: 16 per thread, or 32 for wide poses.
_SMALL = 2048

#: Minimum programs per multiprocessor, so that the loads of one hide behind the arithmetic of another.
_RESIDENT = 2


def configs(name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> list[dict[str, int]]:
    """Tiles of a kernel for padded j, p, q and r: ``BN`` routings, ``KB`` deep, ``num_warps``."""
    j, p, q, r = sizes
    least = 16 // p  # rows of a product
    share = 2 if dtype == torch.float32 else 1
    tiles = [
        {"BN": max(least, numbers // (share * j * p * r)), "KB": max(DEPTH, q), "num_warps": warps}
        for numbers, warps in TILES[name]
    ]
    return [tile for place, tile in enumerate(tiles) if tile not in tiles[:place]]


@functools.cache
def _tuned(name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], bucket: int) -> Any:
    """The kernel with tiles for these (padded) sizes; ``bucket`` separates workloads of very different extent."""
    kernel = getattr(kernels, name)
    candidates = configs(name, dtype, sizes)
    if INTERPRETED:
        first = {key: value for key, value in candidates[0].items() if key != "num_warps"}
        return lambda grid: functools.partial(kernel[grid(first)], **first)
    choices = [
        triton.Config({"BN": c["BN"], "KB": c["KB"]}, num_warps=c["num_warps"], num_stages=2)
        for c in candidates
    ]
    tuned = triton.autotune(choices, key=["J", "P", "Q", "R", "TYPES", "KERNEL", "COUPLINGS"])(kernel)
    return lambda grid: functools.partial(tuned[grid], **OPTIONS)


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Norm(NamedTuple):
    """The normalisation that turns sums of votes into poses."""

    #: ``"none"`` or ``"layer"`` (LayerNorm over a pose).
    kind: str = "none"
    weight: Tensor | None = None
    #: Of LayerNorm, ``[e]``, of any type.
    bias: Tensor | None = None
    eps: float = 0.0

    def check(self, e: int) -> None:
        if self.kind not in ("none", "layer"):
            raise ValueError(f"norm must be 'none' or 'layer', not {self.kind!r}")
        shapes = [None if t is None else tuple(t.shape) for t in (self.weight, self.bias)]
        if shapes != [(e,) if self.kind == "layer" else None] * 2:
            raise ValueError(
                f"norm {self.kind!r} of poses of {e} numbers has no use for a weight and bias of shapes {shapes}"
            )

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        return (
            None if self.weight is None else self.weight.contiguous(),
            None if self.bias is None else self.bias.contiguous(),
        )


def tile_of(e: int) -> dict[str, int]:
    """A tile of the kernels in norms.py: ``BN`` poses of dimension e, ``num_warps`` (which the interpreter ignores)."""
    padded_e = max(1 << (e - 1).bit_length(), 2)
    rows = max(16, _SMALL // padded_e)
    return {"E": e, "EP": padded_e, "BN": rows, "num_warps": 4 if rows * padded_e <= 4096 else 8}


def finish(
    sums: Tensor,
    out: Tensor,
    norm: Norm,
    scale: float = 1.0,
    kept: Tensor | None = None,
) -> Tensor:
    """Sum ``[part, n, j, e]`` over parts, scale (store in ``kept``, if given) and normalise: ``out``."""
    count, e = out.numel() // out.shape[-1], out.shape[-1]
    tile = tile_of(e)
    with torch.cuda.device_of(out):
        norms.finish_kernel[(triton.cdiv(count, tile["BN"]),)](
            sums,
            out,
            out if kept is None else kept,
            *norm.tensors(),
            count,
            sums.shape[0],
            scale,
            norm.eps,
            NORM=norm.kind,
            KEEP=kept is not None,
            **tile,
            **OPTIONS,
        )
    return out


def normalise(sums: Tensor, norm: Norm, scale: float) -> Tensor:
    """Poses from sums, both ``[n, j, e]``."""
    norm.check(sums.shape[-1])
    out = torch.empty_like(sums, memory_format=torch.contiguous_format)
    return finish(sums.contiguous()[None], out, norm, scale) if out.numel() > 0 else out


def grad_norm(grad: Tensor, sums: Tensor, norm: Norm, scale: float) -> tuple[Tensor, Tensor]:
    """Gradients of the sums, ``[n, j, e]``, and of weight and bias, ``[2, e]`` (empty without them)."""
    count, e = sums.numel() // sums.shape[-1], sums.shape[-1]
    tile = tile_of(e)
    programs = triton.cdiv(count, tile["BN"])
    grad_sums = torch.empty_like(sums, memory_format=torch.contiguous_format)
    affine = sums.new_empty((programs, 2, e) if norm.weight is not None else (0,), dtype=torch.float32)
    if programs > 0:
        with torch.cuda.device_of(sums):
            norms.grad_norm_kernel[(programs,)](
                grad.contiguous(),
                sums.contiguous(),
                norm.tensors()[0],
                grad_sums,
                affine,
                count,
                scale,
                norm.eps,
                NORM=norm.kind,
                **tile,
                **OPTIONS,
            )
    return grad_sums, affine if norm.weight is None else affine.sum(dim=0).to(norm.weight.dtype)


class Pass:
    """One iteration over some children, weights and parents (see :func:`.ops.fused_pass` for the arguments)."""

    def __init__(
        self, children: Tensor, weight: Tensor, parents: Tensor, scale: float, kernel: int, stride: int
    ) -> None:
        if not children.dtype == weight.dtype:
            raise ValueError(f"children are {children.dtype} and weights {weight.dtype}: cast one of them")
        if not children.device == weight.device == parents.device:
            raise RuntimeError(
                f"expected all tensors on one device, but found children on {children.device}, weights on "
                f"{weight.device} and parents on {parents.device}"
            )
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
            # float32 accuracy on the tensor cores: three tf32 products
            "PRECISION": "ieee" if INTERPRETED else "tf32x3" if children.dtype == torch.float32 else "tf32",
        }
        j_padded, p_padded, _, r_padded = self.sizes
        self.tile = max(1, _USUAL // (j_padded * p_padded * r_padded))

    def _launch(self, name: str, grid: Any, tensors: tuple[Any, ...], **more: Any) -> None:
        kernel = _tuned(name, self.children.dtype, self.sizes, self.routings.bit_length())
        with torch.cuda.device_of(self.children):
            kernel(grid)(*tensors, **more, **self.arguments)

    def _parts(self, programs: int, length: int, least: int) -> tuple[int, int]:
        """Number of parts of a loop that keeps every multiprocessor busy, and their length, a multiple of ``least``."""
        wanted = -(-_RESIDENT * multiprocessors(self.children.device) // programs)
        part = -(-length // max(1, min(wanted, length // least)))
        part = -(-part // least) * least
        return -(-length // part), part

    def _split(self) -> tuple[int, int]:
        """Number and length of the parts of the loop over the children; a part ends on a step boundary at any depth."""
        return self._parts(-(-self.routings // self.tile), self.count, max(1, DEPTH // self.sizes[2]))

    def _over_routings(self, parts: int) -> Any:
        """The grid of a kernel whose programs own routings."""
        return lambda meta: (triton.cdiv(self.routings, meta["BN"]), parts)

    def run(self, want_couplings: bool, norm: Norm, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Poses ``[n, j, e]``, couplings ``[n, c, j]`` and sums before the norm ``[n, j, e]``."""
        new, shape = self.children.new_empty, self.parents.shape
        norm.check(shape[2])
        keep = keep and norm.kind != "none"
        poses, kept = new(shape), new(shape if keep else (0,))
        couplings = new((self.routings, self.count, shape[1]) if want_couplings else (0,))
        if self.routings == 0:
            return poses, couplings, kept
        parts, part = self._split()
        whole = parts == 1
        out = poses if whole else new((parts, *shape), dtype=torch.float32)
        end = norm if whole else Norm()
        self._launch(
            "pass_kernel",
            self._over_routings(parts),
            (self.children, self.weight, self.parents, out, couplings, kept, *end.tensors()),
            part=part,
            eps=end.eps,
            COUPLINGS=want_couplings,
            NORM=end.kind,
            KEEP=whole and keep,
        )
        if not whole:
            finish(out, poses, norm, kept=kept if keep else None)
        return poses, couplings, kept

    def grad_parents(self, grad_sums: Tensor, grad_couplings: Tensor | None) -> Tensor:
        """``[n, j, e]``."""
        if self.routings == 0:
            return torch.zeros_like(self.parents)
        parts, part = self._split()
        kind = self.parents.dtype if parts == 1 else torch.float32
        out = self.parents.new_empty((parts, *self.parents.shape), dtype=kind)
        self._launch(
            "grad_parents_kernel",
            self._over_routings(parts),
            (self.children, self.weight, self.parents, *_given(grad_sums, grad_couplings), out),
            part=part,
            COUPLINGS=grad_couplings is not None,
        )
        return out[0] if parts == 1 else finish(out, torch.empty_like(self.parents), Norm())

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

        incoming = _given(grad_sums, grad_couplings)
        tensors = (self.children, self.weight, self.parents, *incoming, windows, grad_weight)
        self._launch("grad_children_kernel", grid, tensors, part=part, COUPLINGS=grad_couplings is not None)
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


def _given(sums: Tensor, couplings: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients for a kernel, which does not read missing ones of the couplings; those of the sums fill their place."""
    sums = sums.contiguous()
    return sums, sums if couplings is None else couplings.contiguous()
