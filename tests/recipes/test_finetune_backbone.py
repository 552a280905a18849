"""`capszoo finetune --backbone NAME --head ROUTING` on a few real images, without a network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from capszoo.cli import app
from capszoo.data import ImageSet
from capszoo.recipes.finetune import finetune
from tests.support import packed
from tests.support.recipes import write_photos

SMALL = ["--img-size", "32", "--epochs", "1", "--device", "cpu", "--set", "model_args.head_args.caps_types=4"]


@pytest.fixture(scope="module")
def digits(root: Path) -> ImageSet:
    return packed(root, "mnist")


@pytest.fixture
def photos(digits: ImageSet, tmp_path: Path) -> Path:
    return write_photos(digits, tmp_path / "photos", {"one": 6, "three": 6})


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


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": None})


def test_from_a_local_backbone_to_predict_explain_and_export(
    backbone: tuple[str, torch.nn.Module], photos: Path, tmp_path: Path
) -> None:
    name, source = backbone
    out = tmp_path / "run"
    arguments = ("finetune", "--backbone", name, "--head", "dynamic", "--data", photos, "--out", out)
    result = run(*arguments, *SMALL, "--freeze", "body")
    assert result.exit_code == 0, result.output
    meta = json.loads((out / "caps_head.photos.json").read_text())
    assert meta["model_args"]["backbone"] == "resnet10t" and meta["model_args"]["routing"] == "dynamic"
    weights = load_file(out / "caps_head.photos.safetensors")
    key = "layer1.0.conv1.weight"  # stored in half precision
    frozen = weights[f"stages.backbone.model.{key}"].float()
    torch.testing.assert_close(frozen, source.state_dict()[key], rtol=1e-3, atol=1e-4)
    (tmp_path / "backbone" / "model.safetensors").unlink()  # what follows needs the run alone
    picture = next((photos / "one").iterdir())
    for command in (
        ("predict", out, picture),
        ("explain", "heatmap", out, picture, "--out", tmp_path / "map.png"),
    ):
        result = run(*command)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "map.png").is_file()
    pytest.importorskip("onnxscript")
    result = run("export", out, "--out", tmp_path / "bundle")
    assert result.exit_code == 0, result.output


def test_with_and_without_the_backbone_s_weights(
    backbone: tuple[str, torch.nn.Module], photos: Path, tmp_path: Path
) -> None:
    found: dict[bool, Any] = {}
    for scratch in (False, True):
        result = finetune(
            None,
            photos,
            tmp_path / str(scratch),
            backbone=backbone[0],
            head="avg",
            img_size=32,
            epochs=1,
            from_scratch=scratch,
            cpu=True,
            overrides=["optimizer.lr=1e-9"],
        )
        found[scratch] = load_file(result["weights"])["stages.backbone.model.layer1.0.conv1.weight"]
    theirs = backbone[1].state_dict()["layer1.0.conv1.weight"]
    torch.testing.assert_close(found[False].float(), theirs, rtol=1e-3, atol=1e-4)
    assert (found[True].float() - theirs).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backbone", "resnet10t", "--head", "ipda"], "unknown routing 'ipda': did you mean 'idpa'"),
        (["--backbone", "resnt10t"], "unknown backbone 'resnt10t': did you mean"),
        ([], "give one of them"),
        (["resnet20_routingcaps.mnist", "--backbone", "resnet10t"], "give one of them"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, photos: Path, tmp_path: Path) -> None:
    result = run("finetune", *arguments, "--data", photos, "--out", tmp_path / "run", *SMALL)
    assert result.exit_code == 2 and message in " ".join(result.output.split())
    assert len(result.output.strip().splitlines()) <= 2 and not (tmp_path / "run").exists()


def test_a_network_of_timm_in_place_of_a_model_is_a_backbone(photos: Path, tmp_path: Path) -> None:
    rest = ("--data", photos, "--out", tmp_path / "run", *SMALL)
    result = run("finetune", "resnet10t", *rest)
    assert result.exit_code == 2 and not (tmp_path / "run").exists()
    remedy = re.findall(r"--backbone \S+", " ".join(result.output.split()))
    assert remedy == ["--backbone resnet10t"]
    result = run("finetune", *remedy[0].split(), "--head", "dynamic", "--from-scratch", *rest)
    assert result.exit_code == 0, result.output


def test_without_a_network_and_a_local_copy_one_line_says_so(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    arguments = ("--backbone", "resnet10t.c3_in1k", "--data", photos, "--out", tmp_path / "run")
    result = run("finetune", *arguments, *SMALL)
    text = " ".join(result.output.split())
    assert result.exit_code != 0 and "no weights of timm/resnet10t.c3_in1k on this machine" in text
    assert "Traceback" not in text and not (tmp_path / "run").exists()
