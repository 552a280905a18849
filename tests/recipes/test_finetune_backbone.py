"""`capszoo finetune --backbone NAME --head ROUTING` on a few real images, without a network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from tests.support.command import fails, succeeds

SMALL = ["--img-size", "32", "--epochs", "1", "--device", "cpu", "--set", "model_args.head_args.caps_types=4"]


@pytest.fixture
def backbone(tmp_path: Path) -> tuple[str, torch.nn.Module]:
    """A folder as timm's `local-dir:` takes it, of a small ResNet with known weights."""
    torch.manual_seed(3)
    model = timm.create_model("resnet10t", num_classes=7)
    folder = tmp_path / "backbone"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"architecture": "resnet10t", "num_classes": 7}')
    return f"local-dir:{folder}", model


def test_from_a_local_backbone_to_predict_explain_and_export(
    backbone: tuple[str, torch.nn.Module], photos: Path, tmp_path: Path
) -> None:
    name, source = backbone
    out = tmp_path / "run"
    arguments = ("finetune", "--backbone", name, "--data", photos, *SMALL)
    succeeds(*arguments, "--head", "dynamic", "--out", out, "--freeze", "body")
    meta = json.loads((out / "caps_head.my_photos.json").read_text())
    assert meta["model_args"]["backbone"] == "resnet10t" and meta["model_args"]["routing"] == "dynamic"
    key = "layer1.0.conv1.weight"  # stored in half precision
    frozen = load_file(out / "caps_head.my_photos.safetensors")[f"stages.backbone.model.{key}"].float()
    torch.testing.assert_close(frozen, source.state_dict()[key], rtol=1e-3, atol=1e-4)
    succeeds(*arguments, "--head", "dynamic", "--out", tmp_path / "scratch", "--from-scratch")
    fresh = load_file(tmp_path / "scratch" / "caps_head.my_photos.safetensors")
    assert (fresh[f"stages.backbone.model.{key}"].float() - source.state_dict()[key]).abs().max() > 1e-2
    (tmp_path / "backbone" / "model.safetensors").unlink()  # what follows needs the run alone
    picture = next((photos / "one").iterdir())
    succeeds("predict", out, picture)
    succeeds("explain", "heatmap", out, picture, "--out", tmp_path / "map.png")
    assert (tmp_path / "map.png").is_file()
    pytest.importorskip("onnxscript")
    succeeds("export", out, "--out", tmp_path / "bundle")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--backbone", "resnet10t", "--head", "ipda"], ["ipda", "idpa"]),
        (["--backbone", "resnt10t"], ["resnt10t", "resnet10t"]),
        ([], ["MODEL", "--backbone"]),
        (["resnet20_avg.cifar10"], ["resnet20_avg.cifar10_avg"]),
        (["resnet20_routingcaps.mnist", "--backbone", "resnet10t"], ["MODEL", "--backbone"]),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], names: list[str], photos: Path, tmp_path: Path) -> None:
    fails(2, "finetune", *arguments, "--data", photos, "--out", tmp_path / "run", *SMALL, names=names)
    assert not (tmp_path / "run").exists()


def test_a_network_of_timm_in_place_of_a_model_is_a_backbone(photos: Path, tmp_path: Path) -> None:
    rest = ("--data", photos, "--out", tmp_path / "run", *SMALL)
    (remedy,) = re.findall(r"--backbone \S+", fails(2, "finetune", "resnet10t", *rest))
    assert remedy == "--backbone resnet10t" and not (tmp_path / "run").exists()
    succeeds("finetune", *remedy.split(), "--head", "dynamic", "--from-scratch", *rest)


def test_without_a_network_and_a_local_copy_one_line_says_so(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    arguments = ("--backbone", "resnet10t.c3_in1k", "--data", photos, "--out", tmp_path / "run")
    line = fails(1, "finetune", *arguments, *SMALL)
    assert "no weights of timm/resnet10t.c3_in1k on this machine" in line and not (tmp_path / "run").exists()
