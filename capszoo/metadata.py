"""The metadata file of a checkpoint as a typed record: training data, training settings, and measurements.

Everything is optional, because checkpoints of earlier versions and from other authors state less; keys that are not
listed here are kept. ``WeightsInfo.metadata`` reads it on first access, so that ``import capszoo`` and
``capszoo list`` do not need pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

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
    "read_record",
]

MAX_CLASSES = 1_000_000
MAX_CHANNELS = 4_096
#: Largest input of a model, in pixels.
MAX_INPUT_PIXELS = 4_096**2

R = TypeVar("R", bound=BaseModel)


def first_complaint(error: ValidationError) -> tuple[str, str]:
    """The first wrong value that pydantic found: its key, and what is wrong with it."""
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")


def read_record(kind: type[R], values: Mapping[str, Any], where: str) -> R:
    """Validate values read from JSON.

    Args:
        kind: the record.
        values: the content of the file, or a part of it.
        where: name of the file in error messages.

    Raises:
        WeightsError: a value of the wrong type or size.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        key, why = first_complaint(error)
        raise WeightsError(
            f"{where}: the metadata's {key} is wrong ({why})", "take the file from its source again"
        ) from None


def number(value: Any) -> Any:
    """A number of JSON: no text, and neither true nor false."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("a number is needed")
    return value


def _labels(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value or None
    if not all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in value):
        raise ValueError("a string for each class is needed")
    return tuple(map(str, value)) or None


def _few_pixels(size: tuple[int, int, int]) -> tuple[int, int, int]:
    if size[1] * size[2] > MAX_INPUT_PIXELS:
        raise ValueError(f"images of {size[1]}x{size[2]}, more than {MAX_INPUT_PIXELS} pixels")
    return size


Classes = Annotated[int, BeforeValidator(number), Field(ge=0, le=MAX_CLASSES)]
Channels = Annotated[int, BeforeValidator(number), Field(ge=1, le=MAX_CHANNELS)]
Side = Annotated[int, BeforeValidator(number), Field(ge=1, le=MAX_INPUT_PIXELS)]
InputSize = Annotated[tuple[Channels, Side, Side], AfterValidator(_few_pixels)]
Mean = tuple[Annotated[float, BeforeValidator(number), Field(ge=-1e6, le=1e6)], ...]
Std = tuple[Annotated[float, BeforeValidator(number), Field(ge=1e-6, le=1e6)], ...]
PerChannel = Field(min_length=1, max_length=MAX_CHANNELS)
#: A registered model's name, so that no source (``hf-hub:…``, a path) passes.
Architecture = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,200}$")]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,200}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$"), AfterValidator(str.lower)]
Labels = Annotated[tuple[str, ...] | None, BeforeValidator(_labels)]
#: The share of an image that is kept. Above 1, timm pads the image (VOLO's 1.15); here it fills the frame.
CropShare = Annotated[
    float, BeforeValidator(number), Field(ge=0.01, le=2), AfterValidator(lambda share: min(share, 1.0))
]


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

    architecture: Architecture | None = None
    tag: Tag = ""
    license: str = "apache-2.0"
    description: str | None = None
    sha256: Sha256 | None = None
    storage: str = "float32"
    num_params: Count | None = None
    num_classes: Classes | None = None
    input_size: InputSize | None = None
    mean: Annotated[Mean, PerChannel] | None = None
    std: Annotated[Std, PerChannel] | None = None
    interpolation: str = "bilinear"
    crop_pct: CropShare = 1.0
    crop_mode: str = "center"
    pool_size: tuple[int, ...] | None = None
    label_names: Labels = None
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
        return read_record(cls, values, where)
