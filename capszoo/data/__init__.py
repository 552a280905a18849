"""Data sets by name, in memory or streamed, with batched augmentation. Nothing is downloaded without a folder."""

from .augment import Augment, normalize
from .batches import Batch, Batches
from .errors import DataError
from .sets import DatasetSpec, ImageSet, StreamedSet, keyed_generator, split_validation
from .sources import TEST_SEEDS, load_dataset
from .specs import DATASETS, PREFIXES, check_name, dataset_spec

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
