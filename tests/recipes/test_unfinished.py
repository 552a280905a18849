"""Unfinished trainings that the repository keeps: their recipes can go on from them; they are no results."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

import capszoo
from capszoo._pretrained.files import checked_pair
from capszoo.data import DATASETS
from capszoo.recipes.config import load_recipe
from capszoo.recipes.train import train
from capszoo.recipes.training.checkpoints import latest_checkpoint
from capszoo.recipes.training.setup import create_net
from capszoo.recipes.training.transfer import export_state, import_state
from capszoo.recipes.weights import write_weights

from .training.test_stages import staged_recipe

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


def check_folder(folder: Path, tmp_path: Path) -> tuple[int, int]:
    """Check what a folder such as `unfinished/` keeps; return its numbers of weights files and states."""
    lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    named = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert named == [file.name for file in sorted(folder.glob("*.safetensors"))]
    for name in named:
        goes_on_from(folder / name)
    states = sorted(path for path in folder.iterdir() if path.is_dir())
    for state in states:
        run = import_state(state, tmp_path / state.name)
        recipe, checkpoint = load_recipe(run / "recipe.yaml"), latest_checkpoint(run)[0]
        assert checkpoint is not None
        net = create_net(recipe, DATASETS[recipe.data.name], initial=False)
        net.load_state_dict(checkpoint.weights["model"])
    metadata = [Path(name).with_suffix(".json").name for name in named]
    kept = {"README.md", *named, *metadata, *(state.name for state in states)}
    assert {path.name for path in folder.iterdir()} == kept
    return len(named), len(states)


def test_recipes_go_on_from_what_the_table_names(tmp_path: Path) -> None:
    check_folder(FOLDER, tmp_path)


def test_what_such_a_folder_may_hold(tiny_mnist: Path, tmp_path: Path) -> None:
    """The folder is often empty: the same checks on weights without a figure, and on the state of a stopped run."""
    folder, name = tmp_path / "kept", "idpa_cnn.mnist_uniform"
    recipe = load_recipe(name)
    net = create_net(recipe, DATASETS["mnist"])
    folder.mkdir()
    write_weights(
        folder,
        net,
        architecture=recipe.arch,
        tag=recipe.tag,
        model_args=recipe.model_args,
        spec=DATASETS["mnist"],
        golden_pixels=torch.zeros(1, 1, 28, 28, dtype=torch.uint8),
        details={"recipe": recipe.model_dump(mode="json"), "metrics": {}},
    )
    next(folder.glob("*.npz")).unlink()
    train(staged_recipe(stages=[]), out=tmp_path / "run", data=tiny_mnist, stop_after=1)
    export_state(tmp_path / "run", folder / "stopped")
    (folder / "README.md").write_text(f"| `{name}.safetensors` | 3 of 20 epochs |\n")
    assert check_folder(folder, tmp_path) == (1, 1)
