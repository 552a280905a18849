"""AOTInductor packages: the model compiled ahead of time for the current device, run without Python code of ours.

A package (``.pt2``) only runs on the kind of device it was compiled on; :func:`compile_program` compiles the portable
``torch.export`` program beside it on another (``python -m capszoo.export.to_aoti PROGRAM OUT``).
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from capszoo.errors import CapszooError

from .prepare import PreparedModel, quiet
from .report import ExportError, first_line
from .verify.gate import verify_against_eager

__all__ = ["AotiRunner", "compile_program", "recompile_command", "write"]

PROGRAM = "program.pt2"


class AotiRunner:
    """Runner for a compiled package, without TF32: cuDNN takes it for float32 convolutions by default.

    Args:
        path: the ``.pt2`` file.
        device: device that it was compiled for.
    """

    name = "aoti"

    def __init__(self, path: str | os.PathLike[str], device: str = "cpu") -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise CapszooError(
                f"{path} was compiled for CUDA", "run it where there is a GPU, or recompile it"
            )
        self.device = device
        self.model = torch._inductor.aoti_load_package(str(path))

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        without_tf32 = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with torch.inference_mode(), without_tf32:
            outputs = self.model(torch.from_numpy(images).to(self.device))
        flat = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        return [output.float().cpu().numpy() for output in flat]


def compile_program(
    program: torch.export.ExportedProgram | str | os.PathLike[str],
    path: str | os.PathLike[str],
    device: str | None = None,
) -> Path:
    """Compile a ``torch.export`` program for a device of this machine.

    Args:
        program: the program, or a ``.pt2`` file from ``torch.export.save``.
        path: package to write.
        device: ``cpu`` or ``cuda``; None selects CUDA if available.

    Raises:
        ExportError: no C++ compiler, or the compiler failed.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ExportError(f"AOTInductor needs a C++ compiler, and there is no {compiler}", "install g++")
    if not isinstance(program, torch.export.ExportedProgram):
        program = torch.export.load(str(program))
    if device != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    with quiet():
        try:
            made = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        except Exception as e:  # inductor raises many kinds
            raise ExportError(f"AOTInductor failed: {first_line(e)}") from e
    return Path(made)


def recompile_command(package: str = "model.pt2") -> str:
    """The command that compiles the portable program on another machine."""
    return f"python -m capszoo.export.to_aoti {PROGRAM} {package}"


def write(
    prepared: PreparedModel, folder: Path, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Write the portable program and the package for the current device, and compare the package with the original.

    Returns:
        The manifest's entry.

    Raises:
        ExportError: it cannot be compiled, or its results differ.
    """
    say = progress or (lambda line: None)
    program = prepared.trace()
    torch.export.save(program, str(folder / PROGRAM))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    file = f"model.{device}.pt2"
    say("AOTInductor compiles (about half a minute)")
    compile_program(program, folder / file, device)
    say("AOTInductor against eager")
    words, worst = verify_against_eager(prepared, AotiRunner(folder / file, device))
    return {
        "file": file,
        "program": PROGRAM,
        "device": device,
        "torch": torch.__version__,
        "recompile": recompile_command(),
        "share_of_largest_output": worst,
        "detail": f"{device}, {words}",
        "readme": [
            f"AOTInductor: `{file}` runs on {device} with torch {torch.__version__} "
            f'(`torch._inductor.aoti_load_package("{file}")`). For another device, there: `{recompile_command()}`.'
        ],
    }


def main(arguments: list[str] | None = None) -> None:
    """Compile a portable program for a device of this machine."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("program", help="the .pt2 file that torch.export.save wrote")
    parser.add_argument("out", help="package to write (.pt2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    options = parser.parse_args(arguments)
    print(compile_program(options.program, options.out, options.device))


if __name__ == "__main__":
    main()
