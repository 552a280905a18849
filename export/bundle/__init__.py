"""Serving bundles: a folder with the model's files, the proof of what they do, and all that a client must know.

>>> from capszoo.export.bundle import check_bundle, export_bundle
>>> manifest = export_bundle(model, "digits", triton=True)
>>> check_bundle("digits").passed

``write`` makes the folder and ``manifest`` its description, ``check`` looks at a folder again, and ``infer`` is
copied into it.
"""

from ..options import FORMATS
from .check import BundleCheck, check_bundle, compare_bundle, open_runner
from .manifest import read_manifest
from .write import export_bundle

__all__ = [
    "FORMATS",
    "BundleCheck",
    "check_bundle",
    "compare_bundle",
    "export_bundle",
    "open_runner",
    "read_manifest",
]
