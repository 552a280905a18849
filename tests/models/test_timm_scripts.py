"""What timm's own scripts do with our names and saved models: `resolve_model_input_args`, then `create_model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

import capszoo
from capszoo._pretrained.facts import own_facts, set_own_facts
from capszoo.errors import UnknownArgument, WeightsError
from tests.support.errors import refuses

resolved = getattr(timm.models, "resolve_model_input_args", None)
needs_scripts = pytest.mark.skipif(
    tuple(int(part) for part in timm.__version__.split(".")[:3]) < (1, 0, 31),
    reason="timm below 1.0.31 has no resolve_model_input_args",
)


def by_script(name: str, asked: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    assert resolved is not None
    return timm.create_model(**{**resolved(name, asked or {}), **kwargs}).eval()


@needs_scripts
@pytest.mark.parametrize(
    "name",
    ["cnn_routingpool.fashion_mnist_max", "efficient_capsnet.multimnist", "resnet20_routingpool.cifar10_avg"],
)
def test_a_tag_is_one_network(name: str) -> None:
    plain, scripted = timm.create_model(name), by_script(name)
    assert {key: tuple(value.shape) for key, value in plain.state_dict().items()} == {
        key: tuple(value.shape) for key, value in scripted.state_dict().items()
    }
    assert plain.global_pool == scripted.global_pool
    given = timm.create_model(name.partition(".")[0], pretrained_cfg=timm.get_pretrained_cfg(name))
    assert given.global_pool == plain.global_pool


@needs_scripts
def test_a_bare_name_has_its_default_weights() -> None:
    plain = timm.create_model("resnet20_routingcaps", pretrained=True).state_dict()
    scripted = by_script("resnet20_routingcaps", pretrained=True).state_dict()
    assert all(torch.equal(plain[key], scripted[key]) for key in plain)
    with refuses(WeightsError, names=["capsnet6_em"]):
        by_script("capsnet6_em", pretrained=True)


@needs_scripts
@pytest.mark.parametrize("architecture", ["resnet20_routingcaps", "test_resnet"])
def test_a_saved_model_is_read(architecture: str, tmp_path: Path) -> None:
    """timm's own architectures are read by a timm that has never heard of us."""
    if architecture == "test_resnet":
        from capszoo._pretrained.files import sha256_of

        net = timm.create_model(architecture, num_classes=3)
        file = tmp_path / f"{architecture}.own.safetensors"
        save_file(net.state_dict(), file)
        stated = dict(architecture=architecture, tag="own", sha256=sha256_of(file), num_classes=3)
        stated |= dict(input_size=[3, 160, 160], mean=[0.5] * 3, std=[0.5] * 3, score_kind="label_lengths")
        file.with_suffix(".json").write_text(json.dumps(stated))
        model = capszoo.load(file).net
    else:
        model = timm.create_model("resnet20_routingcaps.mnist", pretrained=True)
    facts = own_facts(model.pretrained_cfg)
    assert facts
    timm.models.save_for_hf(model, str(tmp_path / "saved"), safe_serialization=True)
    name = f"local-dir:{tmp_path / 'saved'}"
    images = torch.zeros(1, *model.pretrained_cfg["input_size"])
    wanted = model.eval()(images)
    assert torch.equal(by_script(name, pretrained=True)(images), wanted)
    assert torch.equal(timm.create_model(name, pretrained=True).eval()(images), wanted)
    again = capszoo.create_model(name, pretrained=True).eval()
    assert torch.equal(again(images), wanted) and own_facts(again.pretrained_cfg).items() >= facts.items()


def test_facts_are_one_note_among_others() -> None:
    cfg: dict[str, Any] = {"notes": ("of a user",)}
    set_own_facts(cfg, {"background": "white"})
    set_own_facts(cfg, {"background": "black"})
    assert (
        own_facts(cfg) == {"background": "black"}
        and cfg["notes"][0] == "of a user"
        and len(cfg["notes"]) == 2
    )
    set_own_facts(cfg, {})
    assert cfg == {"notes": ("of a user",)} and own_facts({}) == {}
    for wrong in ("capszoo: {", "capszoo: [1]"):
        with refuses(WeightsError, names=["JSON"]):
            own_facts({"notes": wrong})


@needs_scripts
def test_a_head_has_the_images_of_its_backbone() -> None:
    imagenet = timm.get_pretrained_cfg("resnet18").mean
    assert by_script("caps_head", {"img_size": 64}).pretrained_cfg["mean"] == imagenet
    overlay = dict(crop_pct=1.0, interpolation="nearest")
    cfg = timm.create_model("caps_head", img_size=64, pretrained_cfg_overlay=overlay).pretrained_cfg
    assert (cfg["crop_pct"], cfg["interpolation"], cfg["mean"]) == (1.0, "nearest", imagenet)
    cfg = timm.create_model(
        "caps_head", img_size=64, pretrained_cfg_overlay=dict(mean=(0.1,) * 3)
    ).pretrained_cfg
    assert cfg["mean"] == (0.1,) * 3 and cfg["std"] == timm.get_pretrained_cfg("resnet18").std


def test_features_of_a_backbone_whose_head_is_gone() -> None:
    net = timm.create_model("caps_head", backbone="convnext_atto", img_size=64, features_only=True)
    assert [tuple(out.shape[1:]) for out in net(torch.zeros(1, 3, 64, 64))][-1] == (320, 2, 2)


def test_the_cache_of_a_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, cache_dir: Any = None, *_: Any, **__: Any) -> Path:
        asked.append(cache_dir)
        raise WeightsError("offline")

    monkeypatch.setattr("capszoo.models._backbones.download_weights", download)
    with pytest.raises(WeightsError, match="offline"):
        timm.create_model(
            "caps_head",
            backbone="resnet18.a1_in1k",
            backbone_pretrained=True,
            cache_dir=tmp_path,
            img_size=64,
        )
    assert asked == [tmp_path]


def test_filters_without_a_tag() -> None:
    assert "encapnet_v1.cifar10_master" in capszoo.list_pretrained("encapnet_v?")
    assert capszoo.list_models("cnn6", pretrained=True, exclude_filters="cnn6") == []
    assert capszoo.list_pretrained("*.mnist") == [
        n for n in capszoo.list_pretrained() if n.endswith(".mnist")
    ]


def test_options_of_features_alone() -> None:
    with refuses(UnknownArgument, names=["out_indices", "features_only=True"]):
        timm.create_model("resnet20_avg", out_indices=(0,))


@pytest.mark.parametrize(
    "name", ["idpa_cnn", "cnn_sabour", "capsnet6_dynamic", "capsnet6_em", "hvc", "resnet20_avg", "caps_head"]
)
def test_a_pruned_head_has_no_new_classes(name: str) -> None:
    net: Any = capszoo.create_model(name, device="meta")
    net.prune_intermediate_layers(1)
    net.reset_classifier(0, "")
    for arguments in ((4,), (0, "avg")):
        with refuses(RuntimeError, names=["create", "network"]):
            net.reset_classifier(*arguments)
