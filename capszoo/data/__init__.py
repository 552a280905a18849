"""Data sets by name, held in memory, with batched augmentation. Nothing here ever downloads anything."""

from .augment import crop_and_flip, normalize
from .batches import Batch, Batches, keyed_generator
from .errors import DataError
from .sources import DATASETS, DatasetSpec, ImageSet, dataset_spec, load_dataset, split_validation

__all__ = [
    "DATASETS",
    "Batch",
    "Batches",
    "DataError",
    "DatasetSpec",
    "ImageSet",
    "crop_and_flip",
    "dataset_spec",
    "keyed_generator",
    "load_dataset",
    "normalize",
    "split_validation",
]
