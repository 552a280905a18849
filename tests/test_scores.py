"""Kinds of scores, their probabilities, and which weights a bare name means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import capszoo
from capszoo._pretrained.catalogue import checkpoints
from capszoo._pretrained.facts import own_facts, set_own_facts
from capszoo._pretrained.files import sha256_of
from capszoo._pretrained.info import default_weights
from capszoo.data import dataset_spec
from capszoo.recipes.weights import canonical_keys, reading_keys
from capszoo.scores import SCORE_KINDS, kind_for, probabilities, score_kind
from tests.support import load_script

#: What a bare architecture name loads with `pretrained=True`.
DEFAULT_TAGS = {
    "capsnet_dynamic": "mnist",
    "capsnet_dynamic_cifar": "cifar10",
    "capsnet_em_norb_small": "mnist",
    "cnn_routingpool": "fashion_mnist",
    "efficient_capsnet": "mnist",
    "encapnet6_master": "mnist",
    "idpa_cnn": "mnist",
    "encapnet_v1": "cifar10_master",
    "idpa_resnet": "cifar10",
    "resnet20_routingcaps": "mnist",
    "resnet20_routingpool": "cifar10",
    "resnet32_routingpool": "cifar10",
}


@pytest.mark.parametrize(("architecture", "tag"), [*DEFAULT_TAGS.items()])
def test_a_bare_name_loads_its_default_tag(architecture: str, tag: str) -> None:
    model = capszoo.create_model(architecture, pretrained=True)
    assert model.pretrained_cfg["tag"] == tag
    info = checkpoints(aliases=False)[f"{architecture}.{tag}"]
    assert tuple(model.pretrained_cfg["input_size"]) == info.input_size
    assert score_kind(model) == info.score_kind


def test_the_metadata_are_complete() -> None:
    known = checkpoints(aliases=False)
    assert canonical_keys(known) == {name: info.canonical for name, info in known.items()}
    for architecture in {info.architecture for info in known.values()}:
        (canonical,) = (
            info for info in known.values() if info.architecture == architecture and info.canonical
        )
        assert default_weights(known, architecture) == canonical
    for name, info in known.items():
        raw = info.raw
        derived = reading_keys(dataset_spec(raw["dataset"]["name"]), raw["recipe"]["loss"]["name"])
        assert {key: raw[key] for key in derived} == json.loads(json.dumps(derived)), name


def test_canonical_is_kept_and_given_to_plain_sets_first() -> None:
    known = checkpoints(aliases=False)
    mine = {n: i for n, i in known.items() if i.architecture == "resnet20_routingcaps"}
    undecided = {n: replace(i, raw={**i.raw, "canonical": False}) for n, i in mine.items()}
    assert [n for n, yes in canonical_keys(undecided).items() if yes] == ["resnet20_routingcaps.mnist"]
    name = "resnet20_routingcaps.affnist"
    undecided[name] = replace(mine[name], raw={**mine[name].raw, "canonical": True})
    assert [n for n, yes in canonical_keys(undecided).items() if yes] == [name]


def test_kinds() -> None:
    assert kind_for("margin") == "lengths" and kind_for("margin", single_label=False) == "label_lengths"
    assert kind_for("cross_entropy") == "logits" and kind_for("bce", single_label=False) == "label_logits"
    assert kind_for("spread") == "activations"
    assert score_kind(capszoo.create_model("capsnet_dynamic", device="meta")) == "lengths"
    assert score_kind(capszoo.create_model("idpa_resnet", device="meta")) == "logits"
    activations = capszoo.create_model("capsnet_em", scores="activations", device="meta")
    assert score_kind(activations) == "activations"


SCORES = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize("kind", [*SCORE_KINDS])
def test_probabilities_are_those_of_infer_py(kind: str, root: Path) -> None:
    found = probabilities(SCORES, kind)
    infer = load_script(root / "export" / "bundle" / "infer.py")
    np.testing.assert_allclose(infer.probabilities(SCORES.numpy(), kind), found.numpy(), atol=1e-6)
    assert bool(((found >= 0) & (found <= 1)).all()) and bool(found.isfinite().all())
    assert found[0].argmax() == 0
    if not kind.startswith("label"):
        assert found[0].sum() == pytest.approx(1, abs=1e-6)


def test_probabilities_by_hand() -> None:
    assert probabilities(SCORES, "logits")[1].tolist() == pytest.approx([1 / 3] * 3)
    assert probabilities(SCORES, "lengths")[0].tolist() == pytest.approx([0.8, 0, 0.2])
    assert probabilities(SCORES, "label_logits")[1].tolist() == [0.5] * 3
    assert probabilities(SCORES, "label_lengths")[0].tolist() == [1, 0, 0.5]
    assert probabilities(torch.zeros(1, 3, dtype=torch.float16), "lengths").tolist() == [[0.0] * 3]
    with pytest.raises(KeyError):
        probabilities(SCORES, "nosuch")
    # the share of one class would be 1
    for kind in ("logits", "label_logits"):
        assert probabilities(torch.tensor([[-9.0]]), kind).item() == pytest.approx(1.2e-4, rel=0.03)
    for kind in ("lengths", "activations", "label_lengths"):
        assert probabilities(torch.tensor([[0.25]]), kind).item() == 0.25


def test_a_local_repository_keeps_the_kind(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="needs capszoo[train]")
    from capszoo.inference import load_model
    from capszoo.recipes.publish import stage

    stage("resnet20_routingcaps.multimnist", "me/x", tmp_path)
    assert score_kind(load_model(str(tmp_path), device="cpu")) == "label_lengths"


@pytest.mark.parametrize("save", ("publish", "timm"))
def test_a_repository_of_other_weights_keeps_what_timm_has_no_field_for(tmp_path: Path, save: str) -> None:
    """Weights that the zoo does not know by name, trained with another loss than the architecture's."""
    name, folder = "resnet20_routingcaps", tmp_path / "repository"
    net = capszoo.create_model(name, num_classes=3, in_chans=1, img_size=28)
    own = {"background": "white", "object_size": [20, 20], "score_kind": "label_lengths"}
    folder.mkdir()
    if save == "publish":
        pytest.importorskip("yaml", reason="needs capszoo[train]")
        from capszoo.recipes.publish import stage

        file = tmp_path / f"{name}.own.safetensors"
        save_file(net.state_dict(), file)
        stated = dict(architecture=name, tag="own", sha256=sha256_of(file), num_classes=3)
        stated |= dict(input_size=[1, 28, 28], mean=[0.5], std=[0.5], **own)
        file.with_suffix(".json").write_text(json.dumps(stated))
        stage(file, "me/own", folder)
    else:
        set_own_facts(net.pretrained_cfg, own)
        timm.models.save_for_hf(net, str(folder), safe_serialization=True)
    for create in (capszoo.create_model, timm.create_model):
        loaded = create(f"local-dir:{folder}", pretrained=True)
        assert own.items() <= own_facts(loaded.pretrained_cfg).items()
        assert score_kind(loaded) == "label_lengths"
    # a configuration in memory is accepted as timm accepts it
    again = capszoo.create_model(name, pretrained_cfg=dict(loaded.pretrained_cfg))
    assert own_facts(again.pretrained_cfg) == own, "not the arguments of another network"
