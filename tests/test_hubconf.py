"""torch.hub: one entry point per architecture, from a plain checkout, with nothing but the stated dependencies."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import capszoo


@pytest.fixture(scope="module")
def hubconf(root: Path) -> ModuleType:
    return torch.hub._import_module("hubconf", str(root / "hubconf.py"))


def test_entry_points_are_the_registry(hubconf: ModuleType) -> None:
    # what torch.hub.list shows: every callable without an underscore
    shown = [name for name, value in vars(hubconf).items() if callable(value) and not name.startswith("_")]
    assert sorted(shown) == capszoo.list_models()
    assert hubconf.dependencies == ["torch", "timm", "safetensors", "huggingface_hub"]


def test_each_entry_point_is_a_function_that_builds_its_own_model(hubconf: ModuleType) -> None:
    for name in capszoo.list_models():
        entry = getattr(hubconf, name)
        assert inspect.isfunction(entry) and entry.__module__ == "hubconf"
        assert entry.__name__ == name and entry.__doc__
        assert list(inspect.signature(entry).parameters) == ["pretrained", "tag", "kwargs"]
        model = entry(num_classes=3, device="meta")
        assert (model.default_cfg["architecture"], model.num_classes) == (name, 3)


def test_load_pretrained_from_a_plain_checkout(root: Path, tmp_path: Path) -> None:
    """In a fresh process, away from the checkout, with only hubconf's dependencies importable."""
    architecture = capszoo.list_pretrained()[0].split(".")[0]
    code = f"""
import os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
for name in ("typer", "rich", "onnx", "onnxruntime", "accelerate", "datasets", "pydantic", "matplotlib", "pytest"):
    sys.modules[name] = None
# an editable install of the project must not be what makes this work
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path = [p for p in sys.path if os.path.realpath(p or ".") != {str(root)!r}]
import torch
root = {str(root)!r}
model = torch.hub.load(root, {architecture!r}, source="local", pretrained=True).eval()
import capszoo
same = capszoo.create_model({architecture!r}, pretrained=True).state_dict()
assert model.state_dict().keys() == same.keys()
assert all(torch.equal(value, same[key]) for key, value in model.state_dict().items())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_wrong_keyword_names_the_nearest(hubconf: ModuleType) -> None:
    with pytest.raises(TypeError, match="num_classes"):
        hubconf.idpa_resnet(num_clases=7)


def test_a_tag_chooses_the_weights(hubconf: ModuleType) -> None:
    assert hubconf.resnet20_routingcaps(tag="affnist").img_size == (40, 40)
    assert hubconf.resnet20_routingcaps(pretrained=True).img_size == (28, 28)  # the default: MNIST
    shared = hubconf.resnet20_avg(tag="cifar100_avg")
    assert shared.num_classes == 100 and hubconf.resnet_routingpool(pretrained=True).num_classes == 10
    with pytest.raises(capszoo.UnknownModel, match="nosuch"):
        hubconf.resnet20_routingcaps(tag="nosuch")
