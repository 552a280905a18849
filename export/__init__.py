"""Export of models to other runtimes, with a proof that each result equals the original.

``options`` declares and checks every option. ``unroll`` prepares a model (fixed iterations, folded BatchNorm,
prepared weight layouts), ``prepare`` pairs it with its original, and ``passes`` are further changes to it.
``to_onnx`` writes the ONNX file through the gate of ``verify``, and records everything in a ``report``;
``to_tensorrt`` and ``to_aoti`` build engines; ``bundle`` writes and checks the folder for serving; ``compare`` has the
runners and the comparator; ``cached`` stores files for ``capszoo predict --runtime``. Modules are imported on first
access, and the optional libraries (onnx, onnxscript, onnxruntime) only when a function needs them.
"""

from __future__ import annotations

if __name__ == "export":
    raise ImportError("this folder is the package capszoo.export: write `import capszoo.export`")

from typing import TYPE_CHECKING

from capszoo._utils.importing import resolver

if TYPE_CHECKING:
    from . import compare, to_onnx, unroll

__all__ = ["compare", "to_onnx", "unroll"]


__getattr__ = resolver(__name__, {}, __all__)
