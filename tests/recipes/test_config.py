"""Recipes: each file is valid, and each mistake is one line that names the key."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import yaml

from capszoo.data import DATASETS, dataset_spec
from capszoo.losses import create_loss
from capszoo.models._papers import PAPERS
from capszoo.recipes.config import (
    CONFIGS,
    Recipe,
    RecipeError,
    find_recipe,
    list_profiles,
    list_recipes,
    load_recipe,
)
from capszoo.recipes.evaluation.target import create_for
from tests.support.errors import refuses

SMALL = {"arch": "some_net", "tag": "mnist", "data": {"name": "mnist"}, "epochs": 2}


@pytest.mark.parametrize("name", list_recipes())
def test_recipe_files(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name, "one file = one architecture and tag"
    assert recipe.tag.startswith(recipe.data.name)
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    assert lines[0].startswith(f"# capszoo train {name} "), "the header says the command"


@pytest.mark.parametrize("name", list_recipes())
def test_recipe_builds(name: str) -> None:
    """Model, loss and feedback take the settings of the file and of its profiles."""
    for profile in (None, *list_profiles(name)):
        recipe = load_recipe(name, profile=profile)
        spec, side = dataset_spec(recipe.data.name), recipe.data.size
        size = spec.input_size if side is None else (spec.input_size[0], side, side)
        with torch.device("meta"):
            net = create_for(recipe.arch, spec.num_classes, size, recipe.model_args)
        create_loss(recipe.loss.name, **recipe.loss.options)
        assert not recipe.loss.reconstruction or net.decoder is not None
        if recipe.feedback and recipe.feedback.pairs != "encapnet":
            modules = dict(net.named_modules())
            assert all(level in modules for pair in recipe.feedback.pairs for level in pair)
        elif recipe.feedback:
            assert net.feedback_pairs(recipe.feedback.units)


def test_every_figure_has_a_recipe() -> None:
    """Where a paper gives a figure on a data set that has a name here, there is a recipe for it."""
    names = {spec.title.partition(" (")[0]: name for name, spec in DATASETS.items()}
    #: An ensemble of seven at 24 pixels; one without a recipe yet; a second name of a network with recipes.
    without = {
        ("capsnet_dynamic", "CIFAR-10"),
        ("deepcaps", "MNIST"),
        ("resnet_routingpool", "CIFAR-10"),
    }
    wanted = {(arch, f.dataset) for arch, figures in PAPERS.items() for f in figures if f.dataset in names}
    assert len({data for _, data in wanted}) == 10
    recipes = [load_recipe(name) for name in list_recipes()]
    found = {(recipe.arch, recipe.data.name) for recipe in recipes}
    assert {(a, d) for a, d in wanted if (a, names[d]) not in found} == without


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["epoch=3"], "unknown key 'epoch': did you mean 'epochs'"),
        (["optimizer.learning_rate=1"], "unknown key of 'optimizer' 'learning_rate'"),
        (
            ["optimizer.weight_decy=1"],
            "unknown key of 'optimizer' 'weight_decy': did you mean 'weight_decay'",
        ),
        (["data.augment.shfit=1"], "unknown key of 'data.augment' 'shfit': did you mean 'shift'"),
        (["epochs=ten"], "'epochs: ten' is wrong"),
        (["epochs=0"], "'epochs: 0' is wrong: Input should be greater than 0"),
        (["seed=-1"], "'seed: -1' is wrong: Input should be greater than or equal to 0"),
        (["seed=4294967296"], "'seed: 4294967296' is wrong: Input should be less than 4294967296"),
        (["seed=1:30"], "'seed: 1:30' is wrong"),
        (["data.size=0"], "'data.size: 0' is wrong"),
        (["data.size=32x"], "'data.size: 32x' is wrong: must be a side in pixels such as 32"),
        (["data.size=[8,9,10]"], "'data.size' is wrong"),
        (["data.size=true"], "'data.size: True' is wrong"),
        (["data.crop_mode=squish"], "'data.crop_mode: squish' is wrong"),
        (["data.value_range=[9,9]"], "'data.value_range' is wrong: black comes first"),
        (["optimizer.lr=-1"], "'optimizer.lr: -1' is wrong"),
        (["optimizer.lr=.nan"], "'optimizer.lr: nan' is wrong"),
        (["precision=fp8"], "'precision: fp8' is wrong: Input should be 'fp32', 'bf16' or 'fp16'"),
        (["data.name=mnits"], "'data.name: mnits' is wrong: unknown data set 'mnits': did you mean 'mnist'"),
        (["data=mnist"], "'data: mnist' is wrong"),
        (["ema_decay=1.0"], "'ema_decay: 1.0' is wrong: Input should be less than 1"),
        (["tag=a.b"], "'tag: a.b' is wrong"),
        (["model_args.num_classes=20"], "the recipe names 'num_classes', which its data decide"),
        (["model_args.img_size=20"], "leave it out (data.size sets the images' size)"),
        (["schedule.milestones=[6,3]"], "milestones must ascend, not 6, 3"),
        (["schedule.milestones=[3,6]"], "has no effect on the schedule cosine (only on multistep)"),
        (["schedule.name=none", "schedule.warmup_epochs=2"], "has no effect on the schedule none"),
        (["schedule.name=multistep"], "multistep needs milestones"),
        (["schedule.name=step"], "set schedule.decay_epochs"),
        (["schedule.min_lr=0.2"], "schedule.min_lr 0.2 is above optimizer.lr"),
        (["compile=reduce_overhead"], "'compile: reduce_overhead' is wrong: Input should be a valid boolean"),
        (["compile=reduce_overhead"], "or Input should be 'reduce-overhead'"),
        (["loss.name=reconstruction"], "set loss.reconstruction to its weight"),
        (["batch_size=16", "accumulate=3"], "batch_size 16 cannot be divided into 3 equal parts"),
        (["batch_size=16", "accumulate=2", "compile=reduce-overhead"], "does not go with accumulate"),
        (["feedback={wieght: 1.0}"], "unknown key of 'feedback' 'wieght': did you mean 'weight'"),
        (["profile=short"], "a profile is chosen by --profile NAME"),
        (["epochs"], "--set takes key=value"),
        (["epochs.x=1"], "'epochs' has no keys of its own"),
        (["epochs=[1"], "is not a YAML value"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(SMALL, overrides)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_and_sizes_as_people_write_them() -> None:
    found = load_recipe(SMALL, ["seed=010", "data.size=32x64", "data.augment.resize=[40, 80]"])
    assert (found.seed, found.data.size, found.data.augment.resize) == (10, (32, 64), (40, 80))
    assert load_recipe(SMALL, ["data.size=[32,32]"]).data.size == 32
    again = load_recipe(found.model_dump(mode="json"))
    assert again == found, "a run's recipe is read back as it was"


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    for text, expected in [
        ("arch: [1", "YAML"),
        ("- a\n- b", "mapping"),
        ("arch: x\ntag: mnist\nepochs: 1\n", "data"),
        ("", "mapping"),
    ]:
        path.write_text(text)
        with refuses(RecipeError, names=expected) as caught:
            load_recipe(path)
        assert "\n" not in str(caught.value)
    with refuses(RecipeError, names=["recipe", "file"]):
        load_recipe(tmp_path / "absent.yaml")
    with refuses(RecipeError, names=["resnet20_routingcaps.mnist"]):
        load_recipe("resnet20_routingcap.mnist")


def test_overrides_and_defaults() -> None:
    before = copy.deepcopy(SMALL)
    recipe = load_recipe(SMALL, ["optimizer.lr=3e-3", "model_args.routing_iters=1", "data.augment.flip=true"])
    assert SMALL == before, "the caller's tree stays as it is"
    assert recipe.optimizer.lr == 0.003 and recipe.model_args == {"routing_iters": 1}
    assert recipe.data.augment.flip and recipe.data.val_size == 5000 and recipe.optimizer.name == "adamw"
    assert load_recipe(recipe) == recipe == Recipe.model_validate(recipe.model_dump(mode="json"))
    assert load_recipe(recipe, ["epochs=7"]).epochs == 7


def test_find_recipe_by_name_and_path() -> None:
    path = find_recipe("resnet20_routingcaps.mnist")
    assert path == CONFIGS / "resnet20_routingcaps.mnist.yaml"
    assert find_recipe(path) == path == find_recipe("resnet20_routingcaps.mnist.yaml")
    with refuses(RecipeError, names=["typo/resnet20_routingcaps.mnist.yaml"]):
        find_recipe("typo/resnet20_routingcaps.mnist.yaml")


SHORT = {"epochs": 1, "optimizer": {"lr": 0.5}, "data": {"augment": {"shift": 1}}, "clip_grad": None}
PROFILES = {
    **SMALL,
    "optimizer": {"name": "sgd", "lr": 0.1, "options": {"nesterov": True}},
    "clip_grad": 1.0,
    "profiles": {"short": SHORT, "shorter": {"optimizer": {"name": "adamw", "options": None}}},
}


def write_recipe(path: Path, tree: dict) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_profile_is_laid_over_the_paper_s_settings(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", PROFILES)
    assert list_profiles(path) == ["short", "shorter"]
    paper, short, shorter = (load_recipe(path, profile=name) for name in (None, "short", "shorter"))
    assert (paper.profile, paper.epochs, paper.optimizer.lr, paper.clip_grad) == (None, 2, 0.1, 1.0)
    assert (short.profile, short.epochs, short.optimizer.lr, short.clip_grad) == ("short", 1, 0.5, None)
    assert short.optimizer.name == "sgd" and short.optimizer.options == {"nesterov": True}
    assert short.data.name == "mnist" and short.data.augment.shift == 1 and paper.data.augment.shift == 0
    assert shorter.optimizer.name == "adamw" and shorter.optimizer.options == {} and shorter.epochs == 2
    assert paper.name == short.name, "one tag, whatever the schedule"
    assert load_recipe(path, ["epochs=9"], "short").epochs == 9, "--set comes after the profile"
    assert load_recipe(write_recipe(tmp_path / "again.yaml", short.model_dump(mode="json"))) == short


@pytest.mark.parametrize(
    ("profiles", "chosen", "expected"),
    [
        ({"short": {}}, "shrot", "unknown profile 'shrot': did you mean 'short'"),
        (None, "short", "has no profiles, so there is none named 'short'"),
        ({"short": {"epoch": 1}}, None, "r.yaml, profile short: unknown key 'epoch': did you mean 'epochs'"),
        ({"short": {"epochs": 0}}, "short", "r.yaml, profile short: 'epochs: 0' is wrong"),
        ({"short": {"tag": "other"}}, "short", "profile short: 'tag' is the recipe's"),
        ({"short": {"data": {"name": "cifar10"}}}, "short", "profile short: 'data.name' is the recipe's"),
        ({"short": {"profiles": {}}}, "short", "profile short: 'profiles' is the recipe's"),
        (["short"], "short", "'profiles' must be names with settings"),
        ({"short": 3}, "short", "'profiles' must be names with settings"),
    ],
)
def test_profile_mistakes_are_one_line(
    tmp_path: Path, profiles: object, chosen: str | None, expected: str
) -> None:
    path = write_recipe(tmp_path / "r.yaml", {**SMALL, "profiles": profiles})
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, profile=chosen)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_keys_of_earlier_versions_are_dropped_where_they_changed_nothing() -> None:
    tree = {"arch": "idpa_cnn", "tag": "mnist", "data": {"name": "mnist"}, "epochs": 1}
    former = {
        **tree,
        "parallel": "ddp",
        "data": {"name": "mnist", "augment": {"mixup": 0.0, "mix_prob": 1.0}},
    }
    assert Recipe.model_validate(former) == Recipe.model_validate(tree)
    for changes in ({"parallel": "fsdp"}, {"data": {"name": "mnist", "augment": {"cutmix": 1.0}}}):
        with pytest.raises(ValueError, match="parallel|cutmix"):
            Recipe.model_validate({**tree, **changes})
