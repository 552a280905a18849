"""Options of an export: each is declared once, every way in refuses the same mistakes, defaults follow from others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from capszoo.errors import UsageError
from capszoo.export.bundle import export_bundle
from capszoo.export.options import BundleOptions, ExportOptions, collect
from capszoo.export.to_onnx import export, prepare
from capszoo.export.to_torch_tensorrt import compile_module
from tests.support.errors import refuses
from tests.support.toys import ToyCaps

WAYS: dict[str, Callable[..., Any]] = {
    "export": lambda folder, **options: export(ToyCaps(1), folder / "x.onnx", **options),
    "prepare": lambda folder, **options: prepare(ToyCaps(1), **options),
    "bundle": lambda folder, **options: export_bundle(ToyCaps(1), folder / "b", **options),
    "torch_tensorrt": lambda folder, **options: compile_module(ToyCaps(1), **options),
}

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"batch": (4, 2, 8)}, "invalid batch"),
    ({"batch": (1, 2)}, "invalid batch"),
    ({"batch": 0}, "invalid batch 0"),
    ({"batch": None}, "invalid batch None"),
    ({"batch": True}, "invalid batch True"),
    ({"batch": (1.0, 8, 32)}, "invalid batch"),
    ({"input_size": 28}, "invalid input_size 28"),
    ({"input_size": (28, 28)}, "invalid input_size"),
    ({"outputs": "scores"}, r"outputs are a sequence, not 'scores': give \('scores',\)"),
    ({"tolerance": 2.0}, "invalid tolerance 2.0"),
    ({"tolerance": 0.0}, "invalid tolerance"),
    ({"tolerance": float("nan")}, "invalid tolerance nan"),
    ({"gate": "none"}, "unknown gate 'none'.*full or quick"),
    ({"runtime": "tpu"}, "unknown runtime 'tpu'.*cpu or gpu"),
    ({"runtime": ""}, "unknown runtime ''"),
    ({"precision": "int8", "outputs": ("poses",)}, "int8 is measured by its scores: add scores"),
    ({"precision": "int4"}, "unknown precision 'int4'"),
    ({"outputs": ("scores", "scores")}, "name one twice"),
    ({"outputs": ()}, "unknown output ''"),
    ({"outputs": ("logits",)}, "unknown output 'logits'"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ExportOptions(**options)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_refuses_them(way: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="invalid batch"):
        WAYS[way](tmp_path, batch=(4, 2, 8))
    with refuses(TypeError, names=["presicion", "precision"]):
        WAYS[way](tmp_path, presicion="fp16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": ("onyx",)}, "onyx"),
        ({"formats": ()}, ("unknown", "format")),
        ({"outputs": ("poses",)}, ("output", "scores")),
        ({"check": False}, ("requires", "gate")),
        ({"input_size": (1, 28, 28)}, "img_size"),
        ({"precision": "int8", "formats": ("aoti",)}, ("AOTInductor", "int8")),
        ({"precision": "fp16", "formats": ("executorch",)}, ("ExecuTorch", "fp16", "--precision")),
        ({"opset": 20, "precision": "bf16"}, ("20", "bfloat16", "22")),
        ({"opset": 25, "formats": ("tensorrt",)}, ("25", "24", "support")),
        ({"triton": True, "batch": (4, 8, 8)}, ("4", "Triton")),
        ({"triton": True, "triton_backends": ("trt",)}, ("trt", "tensorrt")),
        ({"triton": True, "triton_backends": ("tensorrt",)}, ("Triton", "tensorrt", "engine")),
        ({"triton": True, "triton_backends": ("python",), "precision": "bf16"}, ("python", "bf16", "CPU")),
        ({"triton_backends": ("python",)}, ("Triton", "repository")),
    ],
)
def test_what_a_bundle_refuses_besides(options: dict[str, Any], message: str) -> None:
    with refuses(UsageError, names=message):
        BundleOptions(**options)


IMAGES = torch.zeros(16, 1, 4, 4)


@pytest.mark.parametrize(
    ("precision", "calibration", "images", "message"),
    [
        ("int8", None, IMAGES, "at least 16 real images to calibrate it, there are none"),
        ("int8", IMAGES[:3], None, "there are 3"),
        ("int8", IMAGES, None, "measure what it costs"),
        ("fp16", IMAGES, None, "fp16 is not calibrated"),
        ("int8", IMAGES, IMAGES.clone(), "16 of the 16 images .* are calibration images: give others"),
        ("int8", IMAGES, torch.cat([IMAGES[:1], IMAGES + 1]), "1 of the 17 images"),
        ("int8", IMAGES, IMAGES[:3] + 1, "at least 16 real images that measure what it costs, there are 3"),
    ],
)
def test_int8_needs_its_images_before_anything_is_done(
    precision: str, calibration: torch.Tensor, images: torch.Tensor, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ExportOptions(precision=precision, calibration=calibration, images=images).check_images()
    ExportOptions(precision="int8", calibration=IMAGES, check=False).check_images()
    ExportOptions(precision="int8", calibration=IMAGES, images=IMAGES + 1).check_images()


def test_defaults_follow_from_other_options() -> None:
    half = ExportOptions(precision="bf16")
    assert (half.target, half.onnx_opset, half.allowed) == ("gpu", 22, 5e-2)
    plain = ExportOptions()
    assert (plain.target, plain.onnx_opset, plain.allowed, plain.profile) == ("cpu", 20, 1e-4, (1, 8, 32))
    assert ExportOptions(precision="fp16", runtime="cpu").target == "cpu"
    assert BundleOptions(formats=("tensorrt",)).target == "gpu" and BundleOptions().target == "cpu"
    assert ExportOptions(batch=3).profile == (3, 3, 3)
    given = ExportOptions(images=torch.zeros(2, 1, 4, 4)).real_images
    assert given is not None and len(given) == 2 and given.labels is None


def test_options_and_keywords_together() -> None:
    first = collect(BundleOptions, None, {"precision": "fp16", "triton": True})
    second = collect(BundleOptions, first, {"precision": "fp32"})
    assert (second.precision, second.triton, first.precision) == ("fp32", True, "fp16")
    with refuses(TypeError, names=["BundleOptions", "ExportOptions"]):
        export_bundle(ToyCaps(1), "b", ExportOptions())  # type: ignore[arg-type]
