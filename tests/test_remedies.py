"""Each remedy that a message names is followed once, and leads to something that works."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import capszoo
from capszoo.checkpoint import NoWeights, resolve
from capszoo.errors import CapszooError, UnknownModel, UsageError
from tests.support import packed
from tests.support.command import fails, run, succeeds
from tests.support.errors import refuses
from tests.support.recipes import write_photos
from tests.support.toys import ToyCaps

pytest.importorskip("onnxruntime")
import onnxruntime

from capszoo.export.to_onnx import ExportError, export

MODEL = "resnet20_routingcaps.mnist"


def test_commands_for_an_architecture_without_weights_run() -> None:
    names = [name for name in capszoo.list_models() if name != "caps_head"]
    untrained = next(name for name in names if not capszoo.list_pretrained(f"{name}.*"))
    with pytest.raises(NoWeights) as found:
        resolve(untrained).create()
    named = [line.split()[1:] for line in re.findall(r"`(capszoo [^`]*)`", str(found.value))]
    assert named
    for command in named:
        if command[0] in ("train", "finetune"):  # hours: only the recipe is looked up
            command = ["recipes", "show", command[1]]
        assert succeeds(*command).strip(), command


@pytest.mark.parametrize("name", ["me/model-1.0", "https://huggingface.co/me/model-1.0"])
def test_a_repository_s_path_or_address_becomes_its_name(name: str) -> None:
    with pytest.raises(CapszooError) as found:
        resolve(name)
    (remedy,) = re.findall(r"hf-hub:[\w./-]+", str(found.value))
    assert resolve(remedy).kind == "hub" and remedy == "hf-hub:me/model-1.0"


def test_a_path_to_create_model_is_loaded_as_the_message_says(tmp_path: Path) -> None:
    from timm.models import save_for_hf

    net = capszoo.create_model("cnn6", num_classes=3, in_chans=1, img_size=28)
    save_for_hf(net, str(tmp_path / "saved"), safe_serialization=True)
    with pytest.raises(UnknownModel) as found:
        capszoo.create_model(str(tmp_path / "saved"))
    remedy = str(found.value).rpartition("use ")[2]
    again = capszoo.create_model(remedy, pretrained=True)
    for key, value in net.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)


class _Nameless(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.module = net

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)


_SLOW = [pytest.param(wrap, marks=pytest.mark.slow) for wrap in (nn.DataParallel, AveragedModel)]


@pytest.mark.parametrize("wrap", [torch.compile, _Nameless, *_SLOW])
def test_a_wrapped_model_is_exported_by_the_name_that_the_message_gives(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    wrapper = wrap(ToyCaps(1).eval())
    with pytest.raises(ExportError) as found:
        export(wrapper, tmp_path / "m.onnx", gate="quick")
    (inner,) = re.findall(r"export model\.(\w+)", str(found.value))
    assert export(getattr(wrapper, inner), tmp_path / "m.onnx", gate="quick").passed


def test_a_wrapper_that_names_its_input_is_exported(tmp_path: Path) -> None:
    class Scaled(_Nameless):
        in_chans, img_size, num_classes = 1, (10, 10), 5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x * 2)

    assert export(Scaled(ToyCaps(1)).eval(), tmp_path / "m.onnx", gate="quick").passed


def test_a_pruned_model_is_exported_once_its_pruning_is_permanent(tmp_path: Path) -> None:
    net = ToyCaps(1).eval()
    prune.l1_unstructured(net.primary, "weight", amount=0.5)
    net(torch.randn(1, 1, 10, 10))  # now its weight is a computed tensor
    with pytest.raises(ExportError, match="primary.weight") as found:
        export(net, tmp_path / "m.onnx", gate="quick")
    (call,) = re.findall(r"torch\.nn\.utils\.prune\.remove\(.*\)", str(found.value))
    eval(call, {"torch": torch, "layer": net.primary})
    assert export(net, tmp_path / "m.onnx", gate="quick").passed


def test_modules_that_hold_no_plain_weights_are_refused_by_name(tmp_path: Path) -> None:
    net = ToyCaps(1).eval()
    x = torch.randn(2, 1, 10, 10)
    net.classifier = nn.Linear(3, 3)
    scripted = torch.jit.trace(ToyCaps(1).eval(), x, check_trace=False)
    quantised = torch.ao.quantization.quantize_dynamic(net, {nn.Linear})
    for odd, names in ((scripted, "TorchScript"), (quantised, "classifier")):
        with pytest.raises(ExportError, match=names):
            export(odd, tmp_path / "m.onnx", gate="quick", input_size=(1, 10, 10))
    assert not list(tmp_path.iterdir())


def test_an_export_within_autocast_is_the_same_file(tmp_path: Path) -> None:
    net = ToyCaps(2).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = export(net, tmp_path / "inside.onnx", gate="quick")
    assert report.passed and report.precision == "fp32"
    export(net, tmp_path / "outside.onnx", gate="quick")
    assert (tmp_path / "inside.onnx").read_bytes() == (tmp_path / "outside.onnx").read_bytes()


def test_a_graph_without_optimisation_is_written_unchecked_as_the_option_says(tmp_path: Path) -> None:
    with refuses(ExportError, names=["breaks", "rule"]):
        export(ToyCaps(1).eval(), tmp_path / "m.onnx", gate="quick", optimize=False)
    export(ToyCaps(1).eval(), tmp_path / "m.onnx", optimize=False, check=False)
    assert (tmp_path / "m.onnx").is_file()


def test_an_older_opset_is_written_by_the_exporter_that_the_message_names(tmp_path: Path) -> None:
    from timm.utils.onnx import onnx_export

    with refuses(UsageError, names=["timm.utils.onnx.onnx_export", "FILE", "opset=N", "batch_size=B"]):
        export("resnet20_routingcaps.mnist", tmp_path / "m.onnx", opset=16)
    net = capszoo.create_model("resnet20_routingcaps.mnist", pretrained=True).eval()
    file = tmp_path / "m.onnx"
    onnx_export(net, str(file), opset=16, batch_size=2)
    session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
    x = torch.randn(2, 1, 28, 28)
    (scores,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(scores), net(x), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["m.tflite", "m.TRT", "m.xml", "m.mlpackage", "m.safetensors", "m.pt2"])
def test_a_file_of_another_format_is_refused_and_any_case_of_ours_is_one_file(
    name: str, tmp_path: Path
) -> None:
    from capszoo._utils.choices import names_onnx_file

    with pytest.raises(UsageError, match="model.onnx"):
        names_onnx_file(tmp_path / name)
    assert names_onnx_file(tmp_path / "M.ONNX") and not names_onnx_file(tmp_path / "v1.2")


def test_a_forward_for_one_batch_is_exported_with_that_batch(tmp_path: Path) -> None:
    class Counts(ToyCaps):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.ones(int(x.shape[0]), 1)

    with pytest.raises(ExportError, match="profile of one number"):
        export(Counts(1).eval(), tmp_path / "m.onnx", gate="quick")
    assert export(Counts(1).eval(), tmp_path / "m.onnx", gate="quick", batch=3).passed


@pytest.mark.parametrize(
    ("change", "precisions"),
    [
        (lambda scores: scores * 1e6, ["bf16", "fp32"]),  # too large for float16
        (lambda scores: (scores + 100) - 100, ["fp32"]),  # digits that half precision loses
    ],
)
def test_what_float16_cannot_hold_is_exported_in_the_precisions_named(
    change: Callable[[torch.Tensor], torch.Tensor], precisions: list[str], tmp_path: Path
) -> None:
    class Changed(ToyCaps):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return change(super().forward(x))

    with pytest.raises(ExportError) as found:
        export(Changed(1).eval(), tmp_path / "m.onnx", gate="quick", precision="fp16")
    named = re.findall(r"\b(?:bf16|fp32)\b", str(found.value).rpartition("use precision")[2])
    assert named == precisions
    for precision in named:
        assert export(Changed(1).eval(), tmp_path / "m.onnx", gate="quick", precision=precision).passed


def test_int8_is_exported_once_the_images_that_it_names_are_given(tmp_path: Path) -> None:
    options = {"--calibrate": "calibration", "--verify-data": "images"}
    given: dict[str, Any] = {}
    for option, name in options.items():
        with pytest.raises(UsageError, match=option) as found:
            export(ToyCaps(1).eval(), tmp_path / "m.onnx", gate="quick", precision="int8", **given)
        (count,) = re.findall(r"at least (\d+)", str(found.value))
        images = torch.randn(int(count), 1, 10, 10, generator=torch.Generator().manual_seed(16))
        given[name] = images if name == "images" else torch.cat([images + 0.1, 2 * images])
    assert export(ToyCaps(1).eval(), tmp_path / "m.onnx", gate="quick", precision="int8", **given).passed


def test_a_network_without_layers_for_int8_is_exported_in_the_precision_named(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(100, 5)).eval()
    net.in_chans, net.img_size, net.num_classes = 1, (10, 10), 5
    images = {"calibration": torch.randn(16, 1, 10, 10), "images": torch.randn(16, 1, 10, 10)}
    with pytest.raises(ExportError) as found:
        export(net, tmp_path / "m.onnx", gate="quick", precision="int8", **images)
    (precision,) = re.findall(r"use (\w+)$", str(found.value))
    assert export(net, tmp_path / "m.onnx", gate="quick", precision=precision).passed


def _finetune(folder: Path, *more: object) -> tuple[object, ...]:
    """A short call of `finetune` on the photos of a folder."""
    places = ("--data", folder / "photos", "--out", folder / "run")
    return ("finetune", MODEL, *places, "--epochs", 1, "--device", "cpu", *more)


def test_one_of_two_options_of_finetune_is_left_out(root: Path, tmp_path: Path) -> None:
    write_photos(packed(root, "mnist"), tmp_path / "photos", {"one": 6, "three": 6})
    message = fails(2, *_finetune(tmp_path), "--freeze", "body", "--from-scratch")
    assert re.findall(r"--[\w-]+", message) == ["--freeze", "--from-scratch"]
    (option,) = re.findall(r"give (--[\w-]+)", fails(2, *_finetune(tmp_path), "--set", "data.size=20"))
    assert run(*_finetune(tmp_path), option, 20, "--freeze", "body").exit_code == 0


def test_classes_of_one_image_are_taken_with_two(root: Path, tmp_path: Path) -> None:
    write_photos(packed(root, "mnist"), tmp_path / "photos", {"one": 1, "three": 1})
    assert "two images" in fails(1, *_finetune(tmp_path))
    for image in list((tmp_path / "photos").rglob("*.png")):
        shutil.copy(image, image.with_name("copy.png"))
    assert run(*_finetune(tmp_path)).exit_code == 0
