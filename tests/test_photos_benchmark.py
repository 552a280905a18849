"""The benchmark of photographs: backbone, cached features, tables that say what is missing."""

from __future__ import annotations

import hashlib
import json
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import capszoo
from benchmarks import photos


def write_wheel(path: Path, pickled: bytes | None = None) -> dict[str, torch.Tensor]:
    """A wheel with the tensors of Lite0 under other names."""
    state = {f"_{key}": value for key, value in timm.create_model(photos.BACKBONE).state_dict().items()}
    buffer = BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(photos.MEMBER, pickled or buffer.getvalue())
    return state


def test_the_backbone_is_a_folder_for_finetune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "lite0.whl"
    state = write_wheel(wheel)
    with pytest.raises(SystemExit, match=photos.SHA256):
        photos.write_backbone(tmp_path / "lite0", wheel)
    monkeypatch.setattr(photos, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    folder = photos.write_backbone(tmp_path / "lite0", wheel)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["conv_head.weight"], state["_conv_head.weight"]) and len(stored) == 296
    assert json.loads((folder / "config.json").read_text())["architecture"] == photos.BACKBONE
    net = capszoo.attach_head(f"local-dir:{folder}", "idpa", 10, pretrained=True, img_size=96).eval()
    images = torch.rand(2, 3, 96, 96)
    whole = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    net.train()
    capszoo.models._inspect.freeze_batch_statistics(net.stages.requires_grad_(False))
    with torch.no_grad():
        assert torch.equal(net.stages(images), whole.forward_features(images)), "what is computed once"


def test_a_wheel_of_pickled_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "evil.whl"
    write_wheel(wheel, b"cos\nsystem\n(S'touch " + str(tmp_path / "evil").encode() + b"'\ntR.")
    monkeypatch.setattr(photos, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(Exception, match=r"[Ww]eights"):
        photos.write_backbone(tmp_path / "lite0", wheel)
    assert not (tmp_path / "evil").exists() and not (tmp_path / "lite0").exists()
