"""The metadata file of a checkpoint as a typed record: training data, training settings, and measurements.

Everything is optional, because checkpoints of earlier versions and from other authors state less; keys that are not
listed here are kept. ``WeightsInfo.metadata`` reads it on first access, so that ``import capszoo`` and
``capszoo list`` do not need pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import WeightsError

__all__ = [
    "AugmentRecord",
    "ClassCounts",
    "DataRecord",
    "DatasetRecord",
    "InitRecord",
    "LossRecord",
    "Measurement",
    "Metadata",
    "RecipeRecord",
    "SeedsMeasurement",
    "SeedsRecord",
    "first_complaint",
]


def first_complaint(error: ValidationError) -> tuple[str, str]:
    """The first wrong value that pydantic found: its key, and what is wrong with it."""
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])), first["msg"]


class _Record(BaseModel):
    # protected_namespaces: ``model_args`` is no method of pydantic's
    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


class DatasetRecord(_Record):
    """The data set that a run trained on, with the sha256 of its splits."""

    name: str = ""
    title: str = ""
    source: str = ""
    sha256: dict[str, str] = {}


#: A number of images, parameters or errors.
Count = Annotated[int, Field(strict=True, ge=0, le=10**15)]


class Measurement(_Record):
    """Results on one split; ``top1`` is exact-set accuracy, in per cent, if images have several labels."""

    top1: Annotated[float, Field(strict=True, ge=0, le=100)] | None = None
    errors: Count | None = None
    n: Count | None = None


class SeedsMeasurement(_Record):
    """Accuracies of the runs of several seeds on one split, in per cent; ``sd`` is the sample standard deviation."""

    values: list[float] = []
    mean: float | None = None
    sd: float | None = None


class SeedsRecord(_Record):
    """The runs of a recipe with several seeds, of which the checkpoint is the first."""

    test: SeedsMeasurement = SeedsMeasurement()
    validation: SeedsMeasurement = SeedsMeasurement()


class ClassCounts(_Record):
    """Number of images and of correct answers of each class, in the order of the labels."""

    split: str = ""
    images: list[int] = []
    right: list[int] = []


class AugmentRecord(_Record):
    """The part of a recipe's augmentation that evaluation applies too."""

    shift: int | None = None
    flip: bool | str = False
    resize: int | tuple[int, int] | None = None


class DataRecord(_Record):
    """The recipe's data."""

    name: str = ""
    size: int | tuple[int, int] | None = None
    val_size: int | None = None
    val_seed: int | None = None
    validation: str | None = None
    skip_bad: bool = False
    limit: int | None = None
    augment: AugmentRecord = AugmentRecord()


class LossRecord(_Record):
    """The recipe's loss."""

    name: str = "margin"
    options: dict[str, Any] = {}
    reconstruction: float = 0.0


class InitRecord(_Record):
    """The initial weights of a run."""

    weights: str | None = None


class RecipeRecord(_Record):
    """The recipe of a run, as written by the version at that time; ``capszoo.recipes.config.Recipe`` is the current."""

    epochs: int | None = None
    seed: int | None = None
    batch_size: int | None = None
    accumulate: int | None = None
    early_stop: int | None = None
    data: DataRecord = DataRecord()
    loss: LossRecord | None = None
    init: InitRecord | None = None


class Metadata(_Record):
    """All metadata of a checkpoint.

    Attributes:
        storage: precision of the stored weights.
        pool_size: height and width of the last feature map.
        model_args: arguments of ``create_model`` besides classes, channels and size.
        epoch: epoch whose weights were kept; None for the last one.
        metrics: results by split.
        seeds: results of the same recipe's runs with several seeds, if there are some.
        history: columns of values, one per epoch.
    """

    architecture: str = ""
    tag: str = ""
    license: str = "apache-2.0"
    description: str | None = None
    sha256: str = ""
    storage: str = "float32"
    num_params: Count | None = None
    num_classes: int | None = None
    input_size: tuple[int, ...] = ()
    pool_size: tuple[int, ...] | None = None
    label_names: tuple[str, ...] | None = None
    model_args: dict[str, Any] = {}
    recipe: RecipeRecord | None = None
    seed: int | None = None
    epoch: int | None = None
    commit: str | None = None
    hardware: str | None = None
    train_seconds: int | float | None = None
    versions: dict[str, str] = {}
    dataset: DatasetRecord = DatasetRecord()
    metrics: dict[str, Measurement] = {}
    seeds: SeedsRecord = SeedsRecord()
    history: dict[str, list[int | float | None]] = {}
    per_class: ClassCounts | None = None

    @property
    def trained(self) -> RecipeRecord:
        """The recipe; an empty one if the checkpoint states none."""
        return self.recipe or RecipeRecord()

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Metadata:
        """Validate values read from JSON.

        Args:
            values: the file's content.
            where: name of the file in error messages.

        Raises:
            WeightsError: a value of the wrong type.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            key, why = first_complaint(error)
            raise WeightsError(
                f"{where}: the metadata's {key} is wrong ({why})",
                "take the file from its source again",
            ) from None
