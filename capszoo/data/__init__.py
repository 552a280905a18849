"""Data sets by name, in memory or streamed, with batched augmentation. Downloads require an explicit folder.

Public names are resolved on first access (PEP 562): listing the names of data sets does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from capszoo._utils.importing import resolver as _resolver

if _TYPE_CHECKING:
    from .augment import Augment, normalize
    from .batches import Batch, Batches
    from .errors import DataError
    from .sets import ImageSet, StreamedSet, keyed_generator, split_validation
    from .sources import TEST_SEEDS, load_dataset
    from .specs import DATASETS, PREFIXES, DatasetSpec, check_name, dataset_spec

__all__ = [
    "DATASETS",
    "PREFIXES",
    "TEST_SEEDS",
    "Augment",
    "Batch",
    "Batches",
    "DataError",
    "DatasetSpec",
    "ImageSet",
    "StreamedSet",
    "check_name",
    "dataset_spec",
    "keyed_generator",
    "load_dataset",
    "normalize",
    "split_validation",
]

#: Public name -> the module that defines it.
_DEFINED_IN = {
    "DATASETS": "specs",
    "PREFIXES": "specs",
    "TEST_SEEDS": "sources",
    "Augment": "augment",
    "Batch": "batches",
    "Batches": "batches",
    "DataError": "errors",
    "DatasetSpec": "specs",
    "ImageSet": "sets",
    "StreamedSet": "sets",
    "check_name": "specs",
    "dataset_spec": "specs",
    "keyed_generator": "sets",
    "load_dataset": "sources",
    "normalize": "augment",
    "split_validation": "sets",
}

__getattr__ = _resolver(__name__, _DEFINED_IN)
