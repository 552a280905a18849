"""Compile the C++ sources beside this file, for the sizes in their macros, with the machine's compiler; load them."""

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import torch

HERE = Path(__file__).parent

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
    compilers = (shutil.which(name) for name in (named, "g++", "clang++") if name)
    return next((path for path in compilers if path), "")


@functools.cache
def load(source: str, double: bool, **sizes: int) -> ctypes.CDLL:
    """The compiled code for these sizes; compiled once on a machine, see :func:`_folder`.

    Args:
        source: name of the file, without its suffix.
        double: compute in float64, else in float32.
        sizes: the other macros of the source.

    Raises:
        RuntimeError: there is no compiler, or it failed; with its first lines.
    """
    if not compiler():
        raise RuntimeError("there is no C++ compiler (CXX, g++ or clang++)")
    file = HERE / f"{source}.cpp"
    options = [
        *FLAGS,
        "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",
        f"-DSCALAR={'double' if double else 'float'}",
        f"-DFLOAT={int(not double)}",
        *(f"-D{name}={value}" for name, value in sizes.items()),
    ]
    texts = [path.read_text(encoding="utf-8") for path in (file, HERE / "lanes.h")]
    key = hashlib.sha256("\0".join([compiler(), *options, _processor(), *texts]).encode()).hexdigest()[:24]
    folder = _folder()
    built = folder / f"{source}-{key}.so"
    if built.exists():
        with suppress(OSError):  # a damaged file is compiled again
            return ctypes.CDLL(str(built))
    _compile([compiler(), *options, str(file)], built)
    return ctypes.CDLL(str(built))


def _compile(command: list[str], built: Path) -> None:
    """Run the compiler; ``built`` appears complete or not at all.

    Raises:
        RuntimeError: the compiler failed.
    """
    with tempfile.TemporaryDirectory(dir=built.parent) as temporary:
        output = Path(temporary) / built.name
        command = [*command, "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            lines = "\n".join(done.stderr.splitlines()[:5])
            raise RuntimeError(f"{' '.join(command)} failed: {lines}")
        with output.open("rb") as written:
            os.fsync(written.fileno())  # else a power cut may leave the name with half of the content
        output.replace(built)


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
        setting = os.environ.get("TORCH_EXTENSIONS_DIR")
        cache = os.environ.get("XDG_CACHE_HOME")
        root = Path(setting) if setting else Path(cache or Path.home() / ".cache") / "torch_extensions"
        folder = root / "capszoo"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        pass
    folder = Path(tempfile.mkdtemp(prefix="capszoo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@torch.compiler.assume_constant_result
def build_error(source: str, double: bool, **sizes: int) -> str:
    """Compile the code unless that was done before: a sentence if it fails (with one warning), else an empty string."""
    return _build_error(source, double, **sizes)


@functools.cache
def _build_error(source: str, double: bool, **sizes: int) -> str:
    try:
        load(source, double, **sizes)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"capszoo's C++ code cannot be used, other code is slower: {error}", stacklevel=2)
        return "needs its C++ code, which could not be compiled or loaded"
    return ""
