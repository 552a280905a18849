"""Records of what strangers' files may state of a model, which :mod:`.checks` reads; they need pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from ..metadata import (
    MAX_INPUT_PIXELS,
    Architecture,
    Channels,
    Classes,
    CropShare,
    InputSize,
    Labels,
    Mean,
    PerChannel,
    Sha256,
    Side,
    Std,
    Tag,
    number,
    read_record,
)
from .facts import SCORE_KINDS


def _ascending(value_range: tuple[float, float]) -> tuple[float, float]:
    if not value_range[0] < value_range[1]:
        raise ValueError("[black, white] must ascend")
    return value_range


def _one_or_two(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


class _Keys(BaseModel):
    """Keys with None for those that are absent; others are dropped."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """The values of the keys that are present and not null.

        Raises:
            WeightsError: an invalid value; the message names the file and the key.
        """
        present = {key: values[key] for key in cls.model_fields if values.get(key) is not None}
        return read_record(cls, present, source).model_dump(exclude_unset=True)


PoolSide = Annotated[int, BeforeValidator(number), Field(ge=0, le=MAX_INPUT_PIXELS)]
PoolSize = Annotated[tuple[PoolSide, ...], BeforeValidator(_one_or_two), Field(min_length=1, max_length=2)]
Names = str | tuple[str, ...]


class Description(_Keys):
    """Keys of a configuration that describe a model.

    All of timm's ``PretrainedCfg`` except its sources: ``url``, ``file``, ``state_dict``, ``hf_hub_id``,
    ``hf_hub_filename``, ``source``, ``custom_load``.
    """

    architecture: Architecture | None = None
    tag: Tag | None = None
    input_size: InputSize | None = None
    test_input_size: InputSize | None = None
    min_input_size: InputSize | None = None
    fixed_input_size: StrictBool | None = None
    interpolation: str | None = None
    crop_pct: CropShare | None = None
    test_crop_pct: CropShare | None = None
    crop_mode: str | None = None
    mean: Annotated[Mean, PerChannel] | None = None
    std: Annotated[Std, PerChannel] | None = None
    num_classes: Classes | None = None
    label_offset: Annotated[int, BeforeValidator(number), Field(ge=0, le=1)] | None = None
    label_names: Labels = None
    label_descriptions: dict[str, Any] | None = None
    pool_size: PoolSize | None = None
    test_pool_size: PoolSize | None = None
    first_conv: Names | None = None
    classifier: Names | None = None
    license: str | None = None
    description: str | None = None
    paper_name: str | None = None
    paper_ids: Names | None = None
    notes: Names | None = None


class Facts(_Keys):
    """The zoo's keys: facts about weights for which timm's ``PretrainedCfg`` has no field."""

    background: Literal["black", "white"] | None = None  # those of `capszoo.images`, which imports Pillow
    object_size: tuple[Side, Side] | None = None
    score_kind: Literal[tuple(SCORE_KINDS)] | None = None  # type: ignore[valid-type]
    inherited_mean: StrictBool | None = None
    value_range: Annotated[tuple[float, float], AfterValidator(_ascending)] | None = None


def _image(size: Any) -> Any:
    return [1, *(size if isinstance(size, (list, tuple)) else (size, size))]


class Sizes(_Keys):
    """Arguments of a model that have limits of their own."""

    num_classes: Classes | None = None
    in_chans: Channels | None = None
    img_size: Annotated[InputSize, BeforeValidator(_image)] | None = None


class Source(_Keys):
    """What a ``config.json`` states outside its ``pretrained_cfg``."""

    architecture: Architecture
    sha256: Sha256 | None = None
