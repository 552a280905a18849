"""Feedback agreement in a recipe: trained along, resumed with the run, gone from the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from capszoo.recipes.config import Recipe, RecipeError
from capszoo.recipes.train import train
from tests.support.recipes import assert_same_weights, newest, tiny_recipe


def encap_recipe(**changes: Any) -> Recipe:
    """A small EncapNet with the paper's units, one per module."""
    args: dict[str, Any] = {"depths": [2, 2], "strides": [1, 2], "pose_dims": [1, 2], "groups": 8}
    tree = {
        "arch": "encapnet6",
        "model_args": {**args, "stem_chans": [8], "stem_strides": [1]},
        "feedback": {"units": 1, "weight": 1.0},
        "data": {"name": "mnist", "val_size": 20},
        "clip_grad": None,
    }
    return tiny_recipe(**{**tree, **changes})


def test_feedback_is_trained_and_resumed(tiny_mnist: Path, tmp_path: Path) -> None:
    whole = train(encap_recipe(), out=tmp_path / "whole", data=tiny_mnist)
    train(encap_recipe(), out=tmp_path / "cut", data=tiny_mnist, stop_after=2)
    cut = train(encap_recipe(), out=tmp_path / "cut", data=tiny_mnist)
    begun, end = (whole["out"] / "checkpoints" / f"step-0000000{n}" / "feedback.safetensors" for n in (3, 6))
    assert_same_weights(end, newest(cut["out"]) / "feedback.safetensors")
    learnt = load_file(end)
    assert any(not torch.equal(value, learnt[key]) for key, value in load_file(begun).items())
    plain = train(encap_recipe(feedback=None), out=tmp_path / "plain", data=tiny_mnist)
    assert plain["test"] and not list(tmp_path.glob("plain/checkpoints/*/feedback*"))
    with_it, without = (load_file(run["weights"]) for run in (whole, plain))
    assert with_it.keys() == without.keys(), "nothing of it is left in the weights"
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
