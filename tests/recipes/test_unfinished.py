"""Unfinished trainings that the repository keeps: their recipes can go on from them; they are no results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import capszoo
from capszoo.data import DATASETS
from capszoo.models._pretrained import checked_pair
from capszoo.recipes.build import create_net
from capszoo.recipes.config import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "unfinished"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.safetensors")), ids=lambda file: file.stem)
def test_a_recipe_goes_on_from_what_is_unfinished(file: Path) -> None:
    assert file.name in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert file.stem not in capszoo.list_pretrained(), "finished: take it out of unfinished/"
    _, info = checked_pair(file)
    assert not info.raw["metrics"], "what is unfinished has no figure"
    recipe = load_recipe(file.stem, overrides=[f"init.weights={file}", "init.new_classes=false"])
    net = create_net(recipe, DATASETS[recipe.data.name]).eval()
    stored = load_file(file)
    assert stored.keys() == net.state_dict().keys()
    assert all(torch.equal(value, stored[key].to(value.dtype)) for key, value in net.state_dict().items())
    with torch.inference_mode():
        assert net(torch.zeros(2, *info.input_size)).isfinite().all()
