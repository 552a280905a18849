"""ExecuTorch programs (``.pte``), for phones and small devices, with XNNPACK's kernels for the CPU.

Layers of routing are exported in the form of their reference. The constants of their other engines hold the same
weights again (block-diagonal ones four times or more), and ExecuTorch stores the constants of a program unasked.
"""

from __future__ import annotations

import copy
import os
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from capszoo.errors import first_line, require
from capszoo.layers.engine import RoutingLayer
from capszoo.layers.engine_choice import use_engines

from .compare import as_arrays
from .prepare import PreparedModel, quiet
from .report import ExportError
from .verify.gate import verify_against_eager

__all__ = ["ExecuTorchRunner", "require_executorch", "write"]

FILE = "model.pte"


def require_executorch() -> None:
    """Raise :class:`ExportError` if ExecuTorch is not installed."""
    require("the format executorch", ["executorch"], "executorch", ExportError)


class ExecuTorchRunner:
    """Runner for a program, in ExecuTorch's Python runtime.

    Args:
        path: the ``.pte`` file.
    """

    name = "executorch"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_executorch()
        from executorch.runtime import Runtime

        self.program = Runtime.get().load_program(str(path))
        self.method = self.program.load_method("forward")

    def __call__(self, images: np.ndarray) -> list[np.ndarray]:
        outputs = self.method.execute([torch.from_numpy(np.ascontiguousarray(images))])
        return as_arrays(tuple(output.clone() for output in outputs))  # the next call writes over them


def lower(prepared: PreparedModel) -> bytes:
    """The program, with XNNPACK's kernels where it has them, and ExecuTorch's portable ones elsewhere.

    Raises:
        ExportError: it cannot be traced or lowered.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    served = copy.deepcopy(prepared.served)
    for layer in served.modules():
        if isinstance(layer, RoutingLayer):
            layer.thaw()
    with use_engines("reference"):
        program = replace(prepared, served=served).trace(count=prepared.batch[1])
    # while torch chooses between these two for a convolution of width 1, it would bind the batch to less than 16
    without = (torch.backends.mkldnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False))
    try:
        with quiet(), without[0], without[1]:
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
            return bytes(lowered.to_executorch().buffer)
    except Exception as error:  # the library raises many kinds, without a common base
        raise ExportError(f"{prepared.name}: ExecuTorch cannot lower it: {first_line(error)}") from error


def write(prepared: PreparedModel, folder: Path) -> dict[str, Any]:
    """Write the program and compare it with the original.

    Returns:
        The manifest's entry.

    Raises:
        ExportError: ExecuTorch is missing or cannot lower the model, or its results differ.
    """
    say = prepared.options.say
    require_executorch()
    say("ExecuTorch lowers (seconds to minutes)")
    start = time.perf_counter()
    program = lower(prepared)
    (folder / FILE).write_bytes(program)
    seconds = time.perf_counter() - start
    say("ExecuTorch against eager")
    words, worst = verify_against_eager(prepared, ExecuTorchRunner(folder / FILE))
    version = metadata.version("executorch")
    return {
        "file": FILE,
        "executorch": version,
        "bytes": len(program),
        "seconds": round(seconds, 1),
        "share_of_largest_output": worst,
        "detail": f"{version} with XNNPACK, {len(program):,} bytes, {words}",
        "readme": [
            f"ExecuTorch: `{FILE}` is a program for ExecuTorch {version} with XNNPACK (method `forward`, the input "
            f"above). Its memory is planned for a batch of {prepared.batch[2]}: for single images, export with "
            "`--batch-profile 1`."
        ],
    }
