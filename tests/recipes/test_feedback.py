"""Feedback agreement in a recipe: trained along, resumed with the run, gone from the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from capszoo.recipes.config import Recipe, RecipeError, load_recipe
from capszoo.recipes.train import train
from tests.support.errors import refuses


def encap_recipe(**changes: Any) -> Recipe:
    """A small EncapNet with the paper's units, one per module."""
    args = {
        "depths": [2, 2],
        "strides": [1, 2],
        "pose_dims": [1, 2],
        "stem_chans": [8],
        "stem_strides": [1],
        "groups": 8,
    }
    tree: dict[str, Any] = {
        "arch": "encapnet6",
        "tag": "mnist",
        "model_args": args,
        "data": {"name": "mnist", "val_size": 20},
        "epochs": 2,
        "batch_size": 32,
        "optimizer": {"name": "adamw", "lr": 0.003},
        "loss": {"name": "margin"},
        "feedback": {"units": 1, "weight": 1.0},
    }
    return Recipe.model_validate({**tree, **changes})


def test_feedback_is_trained_and_resumed(tiny_mnist: Path, tmp_path: Path) -> None:
    whole = train(encap_recipe(), out=tmp_path / "whole", data=tiny_mnist)
    train(encap_recipe(), out=tmp_path / "cut", data=tiny_mnist, stop_after=2)
    cut = train(encap_recipe(), out=tmp_path / "cut", data=tiny_mnist)
    files = [
        next((run["out"] / "checkpoints").glob("step-*6")) / "feedback.safetensors" for run in (whole, cut)
    ]
    ends = [load_file(file) for file in files]
    assert ends[0].keys() == ends[1].keys() and all(
        torch.equal(ends[0][key], ends[1][key]) for key in ends[0]
    )
    begun = load_file(next((whole["out"] / "checkpoints").glob("step-*3")) / "feedback.safetensors")
    assert any(not torch.equal(begun[key], ends[0][key]) for key in begun), "the critics and generators learn"
    assert not any("units" in key for key in load_file(whole["weights"])), (
        "nothing of it is left in the weights"
    )
    plain = train(encap_recipe(feedback=None), out=tmp_path / "plain", data=tiny_mnist)
    assert plain["test"] and not list(tmp_path.glob("plain/checkpoints/*/feedback*"))
    with_it, without = (load_file(run["weights"]) for run in (whole, plain))
    assert any(not torch.equal(with_it[key], without[key]) for key in without)


def test_feedback_on_a_plain_resnet(tiny_mnist: Path, tmp_path: Path) -> None:
    feedback = {"pairs": [["layer1", "layer2"]], "weight": 1.0, "options": {"metric": "kl"}}
    recipe = encap_recipe(
        arch="test_resnet", model_args={}, loss={"name": "cross_entropy"}, feedback=feedback, epochs=1
    )
    assert train(recipe, out=tmp_path / "run", data=tiny_mnist)["finished"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feedback": {"pairs": [["stages.modul1", "stages.module2"]]}}, "did you mean"),
        ({"feedback": {"options": {"critics": False}}}, "critic"),
        ({"compile": True}, "compile must be false"),
        (
            {"loss": {"name": "margin", "reconstruction": 0.0005}, "model_args": {"decoder": True}},
            "exclude each other",
        ),
        ({"arch": "resnet20_routingcaps", "model_args": {}}, "feedback_pairs"),
    ],
)
def test_wrong_feedback_is_one_line(
    changes: dict[str, Any], message: str, tiny_mnist: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        train(encap_recipe(**changes), out=tmp_path / "run", data=tiny_mnist)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_unknown_key_of_feedback_names_the_nearest() -> None:
    tree = encap_recipe().model_dump()
    without = Recipe.model_validate({**tree, "feedback": None})
    tree["feedback"]["wieght"] = 1.0
    for given, overrides in ((tree, []), (without, ["feedback={wieght: 1.0}"])):
        with refuses(RecipeError, names=["feedback"]):
            load_recipe(given, overrides)
