"""Serving bundles: a folder with a model's files, their verification, and all information that a client needs.

>>> from capszoo.export.bundle import check_bundle, export_bundle
>>> from capszoo.inference import load_model
>>> manifest = export_bundle(load_model("resnet20_routingcaps.mnist"), "digits", gate="quick", triton=True)
>>> check_bundle("digits").passed
True

``write`` creates the folder and ``manifest`` its description, ``check`` verifies an existing folder, and ``infer`` is
copied into it. Names are resolved on first access, so that ``infer`` can be imported without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capszoo._utils.importing import resolver

if TYPE_CHECKING:
    from .check import BundleCheck, check_bundle, compare_bundle, open_runner
    from .manifest import read_manifest
    from .write import export_bundle

__all__ = [
    "BundleCheck",
    "check_bundle",
    "compare_bundle",
    "export_bundle",
    "open_runner",
    "read_manifest",
]

__getattr__ = resolver(
    __name__,
    {
        "BundleCheck": "check",
        "check_bundle": "check",
        "compare_bundle": "check",
        "export_bundle": "write",
        "open_runner": "check",
        "read_manifest": "manifest",
    },
)
