"""Schema of a bundle's ``manifest.json``, validated with pydantic before anything of the bundle is used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from capszoo.errors import CapszooError
from capszoo.metadata import MAX_CHANNELS, MAX_INPUT_PIXELS

SCHEMA = 1

#: Files that every bundle has.
NEEDED = ("model.onnx", "reference.npz", "preprocess.json", "labels.txt", "infer.py")


def _inside(name: str) -> str:
    """A file name, validated to be inside the bundle's folder."""
    parts = name.split("/")
    if not re.fullmatch(r"[\w./ +-]{1,300}", name) or any(part in ("", ".", "..") for part in parts):
        raise ValueError("must name a file inside the bundle")
    return name


_Name = Annotated[str, AfterValidator(_inside)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Section(BaseModel):
    # strict: neither "1" nor true is a number; protected_namespaces: `model` is not a method of pydantic
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class _Model(_Section):
    source: str
    state_sha256: _Digest
    outputs: list[str]
    routing_iters_asked: int | None


class _Input(_Section):
    channels: Annotated[int, Field(ge=1, le=MAX_CHANNELS)]
    size: Annotated[list[Annotated[int, Field(ge=1, le=MAX_INPUT_PIXELS)]], Field(min_length=2, max_length=2)]
    dtype: Literal["float32", "uint8"]

    @model_validator(mode="after")
    def _limited(self) -> _Input:
        if self.size[0] * self.size[1] > MAX_INPUT_PIXELS:
            raise ValueError(f"more than {MAX_INPUT_PIXELS} pixels")
        return self


class _Output(_Section):
    name: str


class _Precision(_Section):
    model: Literal["fp32", "fp16", "bf16", "int8"]


class _Batch(_Section):
    min: Annotated[int, Field(ge=1)]
    usual: int
    max: Annotated[int, Field(le=2**20)]

    @model_validator(mode="after")
    def _ordered(self) -> _Batch:
        if not self.min <= self.usual <= self.max:
            raise ValueError("min, usual and max must ascend")
        return self


class _Engine(_Section):
    file: _Name | None = None


class _Manifest(_Section):
    name: str
    model: _Model
    opset: int
    input: _Input
    outputs: Annotated[list[_Output], Field(min_length=1)]
    precision: _Precision
    batch: _Batch
    labels: list[str]
    engines: dict[str, _Engine]
    tolerance: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    files: dict[_Name, _Digest]

    @model_validator(mode="after")
    def _complete(self) -> _Manifest:
        if missing := [name for name in NEEDED if name not in self.files]:
            raise ValueError(f"files lacks {missing[0]}")
        if "scores" not in [output.name for output in self.outputs]:
            raise ValueError("outputs lacks the scores")
        return self


def check_manifest(values: Any, path: Path) -> dict[str, Any]:
    """Validate the content of a ``manifest.json``, and return it unchanged.

    Args:
        values: content of the JSON file.
        path: of the file, for the message.

    Raises:
        CapszooError: another schema, a missing key, or an invalid value.
    """
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise CapszooError(f"{path}: not a manifest of schema {SCHEMA}", "export again with this version")
    try:
        _Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]") or "the whole"
        reason = str(first["msg"]).removeprefix("Value error, ")
        raise CapszooError(f"{path}: {key}: {reason}", "the file was changed; export again") from None
    return values
