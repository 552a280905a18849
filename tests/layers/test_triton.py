"""The Triton kernels: in the interpreter, compiled for Hopper without a GPU, on a GPU, and where there is no Triton."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capszoo import layers
from capszoo.layers import _triton

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs Triton: PyTorch's wheel has none for this system",
)


def python(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=560
    )


@needs_triton
@pytest.mark.slow
def test_kernels_in_the_interpreter(root: Path) -> None:
    """The cases of triton_cases.py; the report below names the one that failed."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command.append("tests/layers/triton_cases.py")
    done = python(root, *command, TRITON_INTERPRET="1")
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"\d\d+ passed", done.stdout) and "skipped" not in done.stdout


def test_a_machine_without_triton_works(root: Path) -> None:
    """Not found when the package looks for it: everything imports, and the reference is chosen."""
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "triton" else find(name, *rest)
sys.modules["triton"] = None  # an import raises ModuleNotFoundError
import torch
from capszoo import layers
from capszoo.layers import _triton
_triton._on_cpu = True
assert _triton.not_fused("cpu", torch.float32, True, torch.zeros(1), 10, 4, 4, 4)
assert layers.FCIDPA(6, 3, 4)(torch.randn(2, 6, 4)).shape == (2, 3, 4)
"""
    done = python(root, "-c", code)
    assert done.returncode == 0, done.stderr


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "_on_cpu", True)
    monkeypatch.setattr(_triton, "_FOUND", True)
    case = ("cpu", torch.float32, True, torch.zeros(1), 10, 4, 4, 4)
    monkeypatch.setattr(_triton, "_enabled", True)
    assert not _triton.not_fused(*case)
    layers.use_triton(False)
    assert "switched off" in _triton.not_fused(*case)
    layers.use_triton()
    assert not _triton.not_fused(*case)
    for value, enabled in (("0", False), ("1", True)):
        monkeypatch.setenv("CAPSZOO_TRITON", value)
        assert runpy.run_path(_triton.__file__)["_enabled"] is enabled


def test_float32_gradients_need_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute capability 8.6 has 99 KiB a block, 9.0 has 227."""
    monkeypatch.setattr(_triton, "_FOUND", True)
    about = SimpleNamespace(major=8, shared_memory_per_block_optin=101_376)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    weight = SimpleNamespace(device=torch.device("cuda:0"))

    def reason(dtype: torch.dtype, grad: bool) -> str:
        return _triton.not_fused(
            "cuda", dtype, grad, weight, 32, 6, 6, 6
        )  # a row of parents has 256 elements

    assert "shared memory" in reason(torch.float32, True)
    assert not reason(torch.float32, False) and not reason(torch.bfloat16, True)
    about.shared_memory_per_block_optin = 232_448
    assert not reason(torch.float32, True)


def test_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 classes are for half types alone, 1000 for none."""
    monkeypatch.setattr(_triton, "_on_cpu", True)
    monkeypatch.setattr(_triton, "_FOUND", True)

    def fits(dtype: torch.dtype, parents: int, size: int) -> bool:
        weight = torch.zeros(1, dtype=dtype)
        return not _triton.not_fused("cpu", dtype, True, weight, parents, size, size, size)

    half, single = torch.bfloat16, torch.float32
    assert fits(half, 100, 4) and not fits(single, 100, 4)
    assert fits(single, 32, 6) and not fits(half, 1000, 4)


# Compiled for compute capability 9.0, which needs Triton and its own ptxas, but no GPU.

#: j, p, q, r, child types, kernel: the layers that benchmarks/gpu.py times, padded ones, wide ones, and vector poses.
LAYERS = {
    "conv 6x6": (32, 6, 6, 6, 32, 3),
    "100 classes": (100, 4, 4, 4, 800, 1),
    "conv": (32, 4, 4, 4, 32, 3),
    "classes": (10, 4, 4, 4, 800, 1),
    "vectors": (10, 1, 8, 16, 1152, 1),
}
KERNELS = ("pass_kernel", "grad_parents_kernel", "grad_children_kernel")


def translated(kernel: Any, constants: dict[str, Any], dtype: str, warps: int = 4) -> Any:
    """A kernel's code for sm_90, specialised as a launch would; ``constants`` may have more names than the kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    single = ("gw_ptr", "ga_ptr", "gamma_ptr", "beta_ptr")  # float32 in training under autocast
    signature, attributes = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            signature[argument] = "*fp32" if argument in single else f"*{dtype}"
        else:
            signature[argument] = "fp32" if argument in ("scale", "eps") else "i32"
        if argument not in constants and (
            argument.endswith("_ptr") or argument in ("image", "row", "column", "grid_row")
        ):
            attributes[(place,)] = [["tt.divisibility", 16]]  # what a launch finds out by itself
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": 2, "enable_fp_fusion": True},
    )


def end_of(norm: str) -> dict[str, Any]:
    """Constants for what follows the sums, as in training."""
    absent = {} if norm == "layer" else {"gamma_ptr": None, "beta_ptr": None}
    return {"NORM": norm, "KEEP": norm != "none", **absent}


def tiles_of(name: str, layer: str, dtype: str) -> list[dict[str, int]]:
    from capszoo.layers._triton import launch

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    return launch.configs(name, kind, _triton.padded(*LAYERS[layer][:4]))


def resources(code: Any) -> dict[str, int]:
    """Registers, bytes of stack (spilled registers) and of shared memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return {**found, "SHARED": code.metadata.shared}


def check_code(name: str, layer: str, dtype: str, tile: dict[str, int], couplings: bool = False) -> None:
    """A pass's kernel for sm_90."""
    from capszoo.layers._triton import kernels

    j, p, q, r, types, window = LAYERS[layer]
    constants = {
        **dict(zip(("JP", "PP", "QP", "RP"), _triton.padded(j, p, q, r), strict=True)),
        **end_of("layer"),
        **dict(J=j, P=p, Q=q, R=r, TYPES=types, KERNEL=window, COUPLINGS=couplings),
        "PRECISION": "tf32x3" if dtype == "fp32" else "tf32",
        **tile,
    }
    code = translated(getattr(kernels, name), constants, dtype, tile["num_warps"])
    used = resources(code)
    products = len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", code.asm["ptx"]))
    print(f"{name}, {layer}, {dtype}, {tile}: {used}, {products} tensor core products")
    assert products > 0, "no tensor core is used"
    assert used["SHARED"] <= 227 * 1024  # of a block on Hopper


@needs_triton
def test_a_kernel_compiles_for_hopper() -> None:
    check_code("pass_kernel", "classes", "bf16", tiles_of("pass_kernel", "classes", "bf16")[0])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_for_hopper(name: str, layer: str, dtype: str) -> None:
    """The smallest and the largest tile, the larger one with couplings."""
    if dtype == "fp32" and layer == "100 classes":
        pytest.skip("too wide for float32: the reference is chosen (test_widths)")
    tiles = tiles_of(name, layer, dtype)
    check_code(name, layer, dtype, tiles[0])
    check_code(name, layer, dtype, tiles[-1], couplings=True)


@needs_triton
@pytest.mark.slow
def test_the_fold_compiles_for_hopper() -> None:
    from capszoo.layers._triton import kernels

    code = translated(kernels.fold_kernel, {"CHANNELS": 512, "KERNEL": 3, "STRIDE": 2, "BLOCK": 1024}, "bf16")
    assert resources(code)["STACK"] == 0


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "layer"])
@pytest.mark.parametrize("e", [9, 16, 64, 512])
@pytest.mark.parametrize("name", ["finish_kernel", "grad_norm_kernel"])
def test_the_norms_compile_for_hopper(name: str, e: int, norm: str) -> None:
    """Poses of 4x4 numbers, odd ones, and the widest."""
    from capszoo.layers._triton import launch, norms

    tile = launch.tile_of(e)
    # of a split loop; of a first pass, for which a launch makes 1 a constant
    for parts in (
        {},
        {"parts": 1},
    ):
        constants = {**tile, **end_of(norm), **parts}
        used = resources(translated(getattr(norms, name), constants, "bf16", tile["num_warps"]))
        print(f"{name}, {norm}, poses of {e}: {used}")
        assert used["STACK"] == 0, "registers spill"


# On a GPU.

#: As far as a half type's rounding of values and gradients takes it; ||found - expected|| / ||expected||.
GPU_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gpu_layers() -> dict[str, tuple[torch.nn.Module, tuple[int, ...]]]:
    return {
        "conv": (layers.ConvIDPA(32, 32, 16, stride=2), (16, 512, 16, 16)),
        "conv, odd": (layers.ConvIDPA(3, 5, 16, stride=1, padding=1), (1, 48, 7, 5)),
        "classes": (layers.FCIDPA(800, 10), (32, 800, 16)),
        "vectors": (layers.FCIDPA(1152, 10, 8, 16, pose="vector"), (64, 1152, 8)),
        "vectors, batch 1": (layers.FCIDPA(1152, 10, 8, 16, pose="vector"), (1, 1152, 8)),
    }


def poison() -> None:
    """Fill the memory that the next tensors will get with NaN, so that what is never written shows."""
    for size in (2**28, 2**24, 2**20, 2**16):
        torch.full((size // 4,), float("nan"), device="cuda")


def outcome(
    layer: torch.nn.Module, x: torch.Tensor, seed: torch.Tensor, run: Any = None
) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    poison()
    # "run or layer" would ask a compiled module for its length, which raises
    y = (layer if run is None else run)(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], seed)]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", GPU_TOLERANCE, ids=str)
@pytest.mark.parametrize("name", gpu_layers())
def test_on_a_gpu(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients against the reference in float64, on fresh inputs, in poisoned memory; compiled too."""
    from capszoo.layers._triton import launch

    passes: list[int] = []
    original = launch.Pass.run
    monkeypatch.setattr(launch.Pass, "run", lambda *args: (passes.append(1), original(*args))[1])
    torch._dynamo.reset()  # with fullgraph, the ninth variant of a compiled forward raises
    layer, size = gpu_layers()[name]
    layer = layer.to("cuda", dtype)
    x = torch.randn(size, device="cuda").to(dtype)
    # cuDNN takes TF32 for float32 convolutions by default: an error of 2e-4
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        seed = torch.randn_like(layer(x))
        passes.clear()
        found = outcome(layer, x, seed)
        eager = len(passes)
        compiled = outcome(layer, x, seed, torch.compile(layer, fullgraph=True))
        assert (eager > 0) == (len(passes) > eager), "compiled, it is computed by the kernels too"
        expected = outcome(layer.double(), x.double(), seed.double())
    for values in (found, compiled):
        for f, e in zip(values, expected, strict=True):
            assert torch.isfinite(f).all()
            assert float((f.double() - e).norm() / e.norm().clamp(min=1e-9)) < GPU_TOLERANCE[dtype]


@pytest.mark.gpu
@needs_triton
def test_on_a_gpu_the_kernels_are_chosen() -> None:
    layer, x = layers.FCIDPA(800, 10).cuda(), torch.randn(4, 800, 16, device="cuda")
    with torch.profiler.profile() as used:
        layer(x)
    assert any("fused_pass" in event.key for event in used.key_averages())
    with torch.autocast("cuda", torch.bfloat16):
        layer(x).float().square().sum().backward()
    assert layer.weight.grad is not None and torch.isfinite(layer.weight.grad).all()
