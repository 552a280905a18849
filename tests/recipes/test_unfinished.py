"""Unfinished trainings that the repository keeps: their recipes can go on from them; they are no results."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

import capszoo
from capszoo.data import DATASETS
from capszoo.models._pretrained import checked_pair
from capszoo.recipes.config import load_recipe
from capszoo.recipes.training.checkpoints import latest_checkpoint
from capszoo.recipes.training.setup import create_net
from capszoo.recipes.training.transfer import import_state

FOLDER = Path(__file__).resolve().parents[2] / "unfinished"


def goes_on_from(file: Path) -> None:
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


def test_recipes_go_on_from_what_the_table_names(tmp_path: Path) -> None:
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    named = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert named == [file.name for file in sorted(FOLDER.glob("*.safetensors"))]
    for name in named:
        goes_on_from(FOLDER / name)
    states = sorted(path for path in FOLDER.iterdir() if path.is_dir())
    for state in states:
        run = import_state(state, tmp_path / state.name)
        recipe, checkpoint = load_recipe(run / "recipe.yaml"), latest_checkpoint(run)[0]
        assert checkpoint is not None
        net = create_net(recipe, DATASETS[recipe.data.name], initial=False)
        net.load_state_dict(checkpoint.weights["model"])
    assert {path.name for path in FOLDER.iterdir()} == {
        "README.md",
        *named,
        *(state.name for state in states),
    }
