"""Compile ``routing_pass.cpp`` for one shape of a pose with the machine's C++ compiler, and load it."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

__all__ = ["build_error", "compiler", "library"]

SOURCE = Path(__file__).with_name("routing_pass.cpp")

# without -ffast-math, NaN and infinity keep their meaning
FLAGS = "-std=c++17 -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math -shared -fPIC".split()


@torch.compiler.assume_constant_result
def compiler() -> str:
    """Path of the C++ compiler: ``CXX``, g++ or clang++. Empty without one, on Windows, or with CAPSZOO_NATIVE=0."""
    return _compiler(os.environ.get("CXX", ""), os.environ.get("CAPSZOO_NATIVE", "1"))


@functools.cache
def _compiler(named: str, enabled: str) -> str:
    if os.name != "posix" or enabled == "0":
        return ""
    found = (shutil.which(name) for name in (named, "g++", "clang++") if name)
    return next((path for path in found if path), "")


@functools.cache
def library(rows: int, inner: int, cols: int, double: bool, squares: bool) -> ctypes.CDLL:
    """The compiled code for poses of these sizes; compiled once on a machine, see :func:`_folder`.

    Args:
        rows, inner, cols: P, Q and R of the source.
        double: compute in float64, else in float32.
        squares: whether the squares of the votes are read.

    Raises:
        RuntimeError: there is no compiler, or it failed; with its first lines.
    """
    if not compiler():
        raise RuntimeError("there is no C++ compiler (CXX, g++ or clang++)")
    scalar = "double" if double else "float"
    options = [
        *FLAGS,
        "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",
        *(f"-D{name}={value}" for name, value in zip("PQR", (rows, inner, cols), strict=True)),
        f"-DSCALAR={scalar}",
        f"-DFLOAT={int(not double)}",
        f"-DSQUARES={int(squares)}",
    ]
    parts = [compiler(), *options, _processor(), SOURCE.read_text(encoding="utf-8")]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = _folder()
    file = folder / f"routing_pass-{key}.so"
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            built = Path(temporary) / file.name
            command = [compiler(), *options, "-o", str(built), str(SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = "\n".join(done.stderr.splitlines()[:5])
                raise RuntimeError(f"{' '.join(command)} failed: {lines}")
            built.replace(file)
    return ctypes.CDLL(str(file))


@functools.cache
def _processor() -> str:
    """Its instruction sets, for which code is compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor()
    )


@functools.cache
def _folder() -> Path:
    """``capszoo`` in torch's folder for compiled extensions; a new temporary one where that cannot be written."""
    try:
        stated = os.environ.get("TORCH_EXTENSIONS_DIR")
        cache = os.environ.get("XDG_CACHE_HOME")
        root = Path(stated) if stated else Path(cache or Path.home() / ".cache") / "torch_extensions"
        folder = root / "capszoo"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        pass
    return Path(tempfile.mkdtemp(prefix="capszoo-"))


@torch.compiler.assume_constant_result
def build_error(rows: int, inner: int, cols: int, double: bool, squares: bool) -> str:
    """Compile the code unless that was done before: a sentence if it fails (with one warning), else an empty string."""
    return _build_error(rows, inner, cols, double, squares)


@functools.cache
def _build_error(rows: int, inner: int, cols: int, double: bool, squares: bool) -> str:
    try:
        library(rows, inner, cols, double, squares)
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"the routing's C++ code cannot be used, other engines are slower: {error}", stacklevel=2
        )
        return "its C++ code could not be compiled or loaded"
    return ""
