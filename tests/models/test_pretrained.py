"""Weights: found, verified, fitted to other channels, classes and sizes; refused with one clear line otherwise."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import capszoo
from capszoo._pretrained import catalogue as _catalogue
from capszoo._pretrained import files as _pretrained
from capszoo._pretrained import info as _info
from capszoo._pretrained.catalogue import checkpoints
from capszoo._pretrained.files import locate_weights, sha256_of
from capszoo._pretrained.info import ALIASES, WeightsInfo, other_names, with_aliases
from capszoo.errors import WeightsError
from capszoo.export.bundle.manifest import weights_of
from capszoo.models import _builder
from capszoo.models._adapt import _fit_input_channels
from capszoo.models._builder import zoo_cfgs
from tests.support.errors import assert_names, refuses

NAME = "capsnet_dynamic"
FIRST = "stages.conv1.conv.weight"


def _small(**kwargs: object) -> nn.Module:
    return capszoo.create_model(NAME, **{"img_size": 20, "stem_chans": 4, "caps_types": 2, **kwargs})


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    save_file(_small(decoder=True).state_dict(), path)
    return path


def _load(path: Path, **kwargs: object) -> nn.Module:
    overlay = {"file": str(path), "input_size": (1, 20, 20)}
    return _small(pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)


def test_weights_and_decoder_load_from_the_same_file(weights: Path) -> None:
    full, bare = _load(weights, decoder=True), _load(weights)
    saved = _pretrained.load_safetensors(weights)
    for key, value in full.state_dict().items():
        assert torch.equal(value, saved[key]), key
    assert not any(key.startswith("decoder.") for key in bare.state_dict())
    assert "state_dict" not in bare.pretrained_cfg


def test_grey_images_give_the_same_answer_at_three_channels(weights: Path) -> None:
    grey, colour = _load(weights).eval(), _load(weights, in_chans=3).eval()
    x = torch.randn(2, 1, 20, 20)
    torch.testing.assert_close(colour(x.expand(-1, 3, -1, -1)), grey(x))


def test_another_number_of_classes_keeps_the_body(weights: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = _load(weights, num_classes=3)
    assert torch.equal(model.state_dict()[FIRST], _pretrained.load_safetensors(weights)[FIRST])
    assert "num_classes" in caplog.text and "class_caps.weight" in caplog.text


def test_no_classes_and_features_only(weights: Path) -> None:
    bare, saved = _load(weights, num_classes=0), _pretrained.load_safetensors(weights)
    assert bare.num_classes == 0
    for key, value in bare.state_dict().items():
        assert torch.equal(value, saved[key]), key
    name = "resnet20_routingcaps.mnist"
    whole = capszoo.create_model(name, pretrained=True).eval()
    levels = capszoo.create_model(name, pretrained=True, features_only=True).eval()
    x = torch.rand(1, whole.in_chans, *whole.img_size)
    with torch.no_grad():
        for a, b in zip(levels(x), whole.forward_intermediates(x, intermediates_only=True), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("source", "wanted"), [(1, 2), (1, 3), (3, 1), (3, 4), (3, 5), (3, 6)])
def test_equal_channels_keep_their_response(source: int, wanted: int) -> None:
    weight, grey = (
        torch.randn(2, source, 3, 3, dtype=torch.float64),
        torch.randn(1, 1, 5, 5, dtype=torch.float64),
    )
    found = torch.conv2d(grey.expand(-1, wanted, -1, -1), _fit_input_channels(weight, wanted))
    torch.testing.assert_close(found, torch.conv2d(grey.expand(-1, source, -1, -1), weight))


def test_weights_of_another_width_are_refused(weights: Path) -> None:
    with refuses(WeightsError, names=["fit", "model"]):
        _load(weights, stem_chans=8)


@pytest.mark.parametrize("shape", [(), (4,), (4, 0, 3, 3)])
@pytest.mark.parametrize("in_chans", [1, 3])
def test_a_first_convolution_of_another_shape_is_refused(
    weights: Path, shape: tuple[int, ...], in_chans: int
) -> None:
    state = _pretrained.load_safetensors(weights)
    save_file({**state, FIRST: torch.zeros(shape)}, weights)
    with refuses(WeightsError, names=[FIRST, "fit", "model"]):
        _load(weights, in_chans=in_chans)


def test_nothing_but_safetensors(tmp_path: Path) -> None:
    pickled = tmp_path / "own.pth"
    torch.save({}, pickled)
    with refuses(WeightsError, names=["safetensors", "file"]):
        _load(pickled)
    damaged = tmp_path / "own.safetensors"
    damaged.write_bytes(b"not safetensors at all")
    with refuses(WeightsError, names=["readable", "safetensors"]):
        _load(damaged)
    with refuses(WeightsError, names=["file"]):
        _load(tmp_path / "absent.safetensors")


def test_a_tag_exists_once_its_metadata_does(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    weights.rename(folder / f"{NAME}.digits.safetensors")
    meta = dict(
        architecture=NAME,
        tag="digits",
        sha256=sha256_of(folder / f"{NAME}.digits.safetensors"),
        num_classes=10,
        input_size=[1, 20, 20],
        mean=[0.0],
        std=[1.0],
        label_names=list("0123456789"),
    )
    (folder / f"{NAME}.digits.json").write_text(json.dumps(meta))
    monkeypatch.setattr(_info, "weights_folders", lambda: (folder,))
    checkpoints.cache_clear()
    try:
        assert list(checkpoints(aliases=False)) == [f"{NAME}.digits"]
        info = checkpoints(aliases=False)[f"{NAME}.digits"]
        assert locate_weights(info) == folder / f"{NAME}.digits.safetensors"
        cfg = zoo_cfgs({NAME: dict(first_conv="stages.conv1.conv", classifier="class_caps")})[NAME]
        tagged = cfg.cfgs["digits"]
        assert tagged.num_classes == 10 and tagged.label_names == tuple("0123456789")
        assert cfg.tags[0] == "", "weights must not change what the bare name builds"

        (folder / f"{NAME}.digits.safetensors").write_bytes(b"truncated")
        with pytest.raises(WeightsError, match="sha256 is"):
            locate_weights(info)
    finally:
        monkeypatch.undo()
        checkpoints.cache_clear()


def test_weights_bring_the_arguments_that_they_were_trained_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the architecture's own name stands for another value; the caller's come first."""
    name = "resnet20_routingcaps.mnist"
    assert capszoo.create_model(name, pretrained=True).lam == 1.0
    info = replace(checkpoints(aliases=False)[name], model_args={"lam": 5.0})
    monkeypatch.setattr(_builder, "checkpoints", lambda: {name: info})
    assert capszoo.create_model(name, pretrained=True).lam == 5.0
    assert capszoo.create_model(name, pretrained=True, lam=2.0).lam == 2.0
    assert capszoo.create_model(name).lam == 5.0, "a name with a tag is one network"
    assert capszoo.create_model("resnet20_routingcaps").lam == 1.0


SHARED = [(name, info.stored_as) for name, info in checkpoints().items() if info.stored_as]


@pytest.mark.parametrize(("name", "stored"), SHARED)
def test_a_shared_checkpoint_is_the_same_network(name: str, stored: str) -> None:
    """Its tensors, under the declared keys, and its scores; the file is the other's."""
    model, other = (capszoo.create_model(n, pretrained=True).eval() for n in (name, stored))
    info = checkpoints()[name]
    renamed = info.renamed(other.state_dict())
    assert list(renamed) == list(model.state_dict())
    assert all(torch.equal(value, renamed[key]) for key, value in model.state_dict().items())
    images = torch.randn(2, *info.input_size)
    assert torch.equal(model(images), other(images))
    assert locate_weights(info).stem == stored and info.hub_id.endswith(stored)


def test_every_name_of_a_checkpoint_is_listed() -> None:
    assert {name.partition(".")[0] for name, _ in SHARED} == set(ALIASES), "an alias has no weights"
    assert {info.stored_as for name, info in checkpoints().items() if "avg." in name} == {
        "resnet20_routingpool.cifar10_avg",
        "resnet20_routingpool.cifar100_avg",
    }
    for name, stored in SHARED:
        assert name in capszoo.list_pretrained() and name in timm.list_pretrained() and stored is not None
        assert name in {row["name"] for row in _catalogue.list_rows(pretrained=True)}
        described = _catalogue.describe(name)
        assert described is not None and [row["stored_as"] for row in described["weights"]] == [stored]
        assert name in other_names(checkpoints(aliases=False), stored)
        assert capszoo.model_info(name).weights[0].stored_as == stored
    for architecture, alias in ALIASES.items():
        assert capszoo.create_model(architecture, pretrained=True).pretrained_cfg["tag"] == alias.default


def test_an_export_finds_the_weights_behind_a_second_name() -> None:
    model = capszoo.create_model("resnet20_avg", pretrained=True)
    found = weights_of(model)
    assert found is not None and found.stored_as == "resnet20_routingpool.cifar10_avg"
    with torch.no_grad():
        model.get_classifier().bias += 1
    assert weights_of(model) is None


def test_an_alias_keeps_checkpoints_of_its_own() -> None:
    """One that was trained under the second name is not hidden by the file of the first."""
    stored = checkpoints(aliases=False)["resnet20_routingpool.cifar10"]
    own = replace(stored, architecture="resnet_routingpool")
    known = {info.name: info for info in (stored, own)}
    assert with_aliases(known)["resnet_routingpool.cifar10"] is own


#: The zoo's seven networks, and whether there are weights.
SEVEN = {
    "encapnet_v1": True,
    "encapnet_v2": False,
    "encapnet_v3": False,
    "capsnet_dynamic": True,
    "capsnet_em": False,
    "idpa_resnet": True,
    "resnet_routingpool": True,
}


#: Further architectures that no checkpoint belongs to.
WITHOUT = {*capszoo.list_models()} - {name.partition(".")[0] for name in capszoo.list_pretrained()}


@pytest.mark.parametrize("name", [*SEVEN, *sorted(WITHOUT - SEVEN.keys())])
def test_a_name_loads_its_weights_or_says_how_to_get_some(name: str) -> None:
    if SEVEN.get(name):
        assert not hasattr(capszoo.create_model(name, pretrained=True), "untrained")
        return
    recipes = [recipe for recipe in _catalogue.recipes() if recipe.startswith(f"{name}.")]
    related = _catalogue.related_weights(name)
    assert recipes and related and set(related) <= set(capszoo.list_pretrained())
    for create in (capszoo.create_model, timm.create_model):
        with pytest.raises(WeightsError) as error:
            create(name, pretrained=True)
        message = str(error.value)
        assert "\n" not in message and len(message) <= 300 and name in message
        assert "".join(related[:1]) in message
        assert_names(message, [recipes[0], "capszoo", "train"])
        for recipe in recipes:
            assert f".{recipe.partition('.')[2]}" in message and _catalogue.recipes()[recipe] in message
    with pytest.raises(capszoo.UnknownModel, match=recipes[0]):
        capszoo.create_model(f"{name}.nosuch")


def test_related_weights_are_those_of_the_nearest_name() -> None:
    assert _catalogue.related_weights("encapnet_v2") == ["encapnet_v1.cifar10_master"]
    assert _catalogue.related_weights("capsnet_em") == ["capsnet_em_norb_small.mnist"]
    assert not _catalogue.related_weights("nothing_like_it")


def test_missing_and_offline_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    info = WeightsInfo("capsnet_em", "absent", "0" * 64, 10, (1, 8, 8), (0.0,), (1.0,))
    with refuses(WeightsError, names=["capszoo/capsnet_em.absent", "weights", "machine"]) as e:
        locate_weights(info, cache_dir=tmp_path)
    assert "\n" not in str(e.value)


def test_a_refused_configuration_in_the_cache_is_named_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays there: nothing could replace it."""
    cached = tmp_path / "models--me--own" / "snapshots" / ("0" * 40) / "config.json"
    cached.parent.mkdir(parents=True)
    cached.write_text('{"architecture": "idpa_cnn", "model_args": {"cache_dir": "/x"}}')
    (tmp_path / "models--me--own" / "refs").mkdir()
    (tmp_path / "models--me--own" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for _ in range(2):
        with refuses(WeightsError, names=["cache_dir", "me/own", "config.json", "model_args", "names"]):
            capszoo.create_model("hf-hub:me/own", cache_dir=tmp_path)
    assert cached.is_file()


@pytest.mark.parametrize("name", ("resnet20_routingcaps", "resnet20_routingcaps.mnist"))
def test_a_repository_that_the_caller_names_wins_over_the_tag(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="me/other"):
        capszoo.create_model(
            name, pretrained=True, pretrained_cfg_overlay={"hf_hub_id": "me/other"}, cache_dir=tmp_path
        )


def test_names_of_the_front_door() -> None:
    with refuses(capszoo.UnknownModel, names=["resnet18.a1_in1", "resnet18.a1_in1k", "unknown", "model"]):
        capszoo.create_model("resnet18.a1_in1")
    with refuses(capszoo.UnknownModel, names=["unknown", "model"]):
        capszoo.create_model("no_such_capsule_net")
    with refuses(capszoo.UnknownModel, names=["folder"]):
        capszoo.create_model("local-dir:/no/such/folder")
