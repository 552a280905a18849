"""AOTInductor packages: the model compiled ahead of time for the current device, run without Python code of ours.

A package (``.pt2``) only runs on the kind of device it was compiled on; :func:`compile_program` compiles the portable
``torch.export`` program beside it on another (``python -m capszoo.export.to_aoti PROGRAM OUT``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from capszoo._utils.files import read_npz, workplace
from capszoo.errors import CapszooError, first_line

from .compare import as_arrays, compare_by_input
from .prepare import PreparedModel, quiet
from .report import ExportError
from .verify.gate import verify_against_eager

__all__ = ["AotiRunner", "compile_program", "write"]

PROGRAM = "program.pt2"

#: The package that is compiled on another machine, in a bundle, and the command that does so.
RECOMPILED = "model.pt2"
RECOMPILE = f"python -m capszoo.export.to_aoti {PROGRAM} {RECOMPILED} --trust"


class AotiRunner:
    """Runner for a compiled package, without TF32: cuDNN takes it for float32 convolutions by default.

    Args:
        path: the ``.pt2`` file.
        device: device that it was compiled for.
        size: channels, height and width of its images, which compiled code does not check; None checks nothing.
        dtype: type of its images.
    """

    name = "aoti"

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str = "cpu",
        size: Sequence[int] | None = None,
        dtype: str = "float32",
    ) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise CapszooError(
                f"{path} was compiled for CUDA", "run it where there is a GPU, or recompile it"
            )
        self.path, self.device, self.size, self.dtype = path, device, size, dtype
        self.model = torch._inductor.aoti_load_package(str(path))

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        """Outputs for images ``[b, c, h, w]``; ``CapszooError`` for images of another size or type."""
        if self.size is not None and (images.shape[1:], str(images.dtype)) != (tuple(self.size), self.dtype):
            raise CapszooError(
                f"{self.path} takes {self.dtype} images [b, {', '.join(map(str, self.size))}], "
                f"not {images.dtype} {list(images.shape)}",
                "prepare them as preprocess.json states",
            )
        without_tf32 = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with torch.inference_mode(), without_tf32:
            outputs = self.model(torch.from_numpy(np.ascontiguousarray(images)).to(self.device))
        return as_arrays(outputs)


def compile_program(
    program: torch.export.ExportedProgram | str | os.PathLike[str],
    path: str | os.PathLike[str],
    device: str | None = None,
) -> Path:
    """Compile a ``torch.export`` program for a device of this machine.

    Args:
        program: the program, or a ``.pt2`` file from ``torch.export.save``; reading a file can run code that is in it.
        path: package to write.
        device: ``cpu`` or ``cuda``; None selects CUDA if available.

    Raises:
        CapszooError: the program cannot be read, or there is no such device.
        ExportError: no C++ compiler, or the compiler failed.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CapszooError("there is no CUDA device here", "compile for cpu, or on another machine")
    if not isinstance(program, torch.export.ExportedProgram):
        try:
            with quiet():
                program = torch.export.load(str(program))
        except Exception as e:  # zip's, torch's and the system's own kinds
            raise CapszooError(f"{program}: no program of torch.export can be read ({first_line(e)})") from e
    if device != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    with quiet():
        try:
            made = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        except Exception as e:  # inductor raises many kinds
            usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")  # inductor's own choice
            remedy = f"install {usual}" if "CxxCompiler" in str(e) + type(e).__name__ else ""
            raise ExportError(f"AOTInductor failed: {first_line(e)}", remedy) from e
    return Path(made)


def write(prepared: PreparedModel, folder: Path) -> dict[str, Any]:
    """Write the portable program and the package for the current device, and compare the package with the original.

    Returns:
        The manifest's entry.

    Raises:
        ExportError: it cannot be compiled, or its results differ.
    """
    say = prepared.options.say
    program = prepared.trace()
    torch.export.save(program, str(folder / PROGRAM))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    file = f"model.{device}.pt2"
    say("AOTInductor compiles (about half a minute)")
    compile_program(program, folder / file, device)
    say("AOTInductor against eager")
    words, worst = verify_against_eager(
        prepared, AotiRunner(folder / file, device, prepared.size, prepared.input_dtype)
    )
    return {
        "file": file,
        "program": PROGRAM,
        "device": device,
        "torch": torch.__version__,
        "recompile": RECOMPILE,
        "share_of_largest_output": worst,
        "detail": f"{device}, {words}",
        "readme": [
            f"AOTInductor: `{file}` runs on {device} with torch {torch.__version__} "
            f'(`torch._inductor.aoti_load_package("{file}")`). For another device, there: `{RECOMPILE}`.',
            "The package does not check the size of its images: with another one it answers wrongly.",
            "PyTorch's own check of inputs, where it is on, refuses a batch of 1, although the package runs it.",
        ],
    }


def _against_reference(package: Path, program: Path, device: str) -> str:
    """Compare a package with the answers stored in the bundle of its program; the result in words.

    Raises:
        ExportError: the results differ.
    """
    stored, manifest = program.with_name("reference.npz"), program.with_name("manifest.json")
    if not stored.is_file() or not manifest.is_file():
        return "not compared: there is no reference.npz beside the program"
    described = json.loads(manifest.read_text(encoding="utf-8"))
    index = [output["name"] for output in described["outputs"]].index("scores")
    arrays = read_npz(stored, ("images", "scores"), max_bytes=2**30)
    difference = compare_by_input(arrays["scores"], AotiRunner(package, device)(arrays["images"])[index])
    limit = float(described["tolerance"])
    if not difference.passed(limit):
        raise ExportError(
            f"{package.name} differs from the stored answers by {difference.relative:.1e} of the largest output; "
            f"the limit is {limit:g}"
        )
    return f"{difference.relative:.1e} of the largest output on {difference.batch} inputs, the limit is {limit:g}"


def main(arguments: list[str] | None = None) -> int:
    """Compile a portable program for a device of this machine; compare it with the answers in its bundle."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("program", help="the .pt2 file that torch.export.save wrote")
    parser.add_argument("out", help="package to write (.pt2)")
    parser.add_argument(
        "--trust", action="store_true", help="the program is yours: reading one can run code that is in it"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    program, out = Path(options.program), Path(options.out)
    try:
        if not program.is_file():
            raise CapszooError(f"there is no file {program}")
        if not options.trust:
            raise CapszooError(
                f"{program}: reading a program can run code that is in it", "if you made it, add --trust"
            )
        if out.is_dir():
            raise CapszooError(f"{out} is a folder", "give the name of a .pt2 file")
        with workplace(out.with_suffix(".pt2"), folder=True) as work:
            made = compile_program(program, work / "model.pt2", device)
            message = _against_reference(made, program, device)
            os.replace(made, out)
    except (CapszooError, OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{out}: {message}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
