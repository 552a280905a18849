"""Export of models to other runtimes, each with proof that the result equals the original.

``unroll`` prepares a model (fixed iterations, folded BatchNorm, prepared weight layouts), ``job`` keeps it with its
original. ``to_onnx`` writes the ONNX file, through ``gate``, which asks the rules of ``graph`` and notes all in a
``report``; ``to_tensorrt`` and ``to_aoti`` make engines, ``bundle`` the folder that is served and its ``manifest``,
``check`` looks at that folder again; ``compare`` holds the runners and the one comparator; ``infer`` is copied into
bundles. The optional libraries (onnx, onnxscript, onnxruntime) are imported when a function needs them, not before.
"""

from __future__ import annotations

if __name__ == "export":
    raise ImportError("this folder is the package capszoo.export: write `import capszoo.export`")

from . import compare, to_onnx, unroll

__all__ = ["compare", "to_onnx", "unroll"]
