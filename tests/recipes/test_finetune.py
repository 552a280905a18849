"""Fine-tuning on a few real images: what comes out, what stays frozen, when it ends, how it goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from timm.models import save_for_hf
from typer.testing import CliRunner

import capszoo
from capszoo.cli import app
from capszoo.data import DATASETS, ImageSet, dataset_spec
from capszoo.data.errors import DataError
from capszoo.errors import UsageError
from capszoo.inference import load_model
from capszoo.models._backbones import create_backbone_cfg
from capszoo.preprocess import load_image, model_transform
from capszoo.recipes import train as train_module
from capszoo.recipes.config import Recipe, RecipeError
from capszoo.recipes.evaluation.target import prepare
from capszoo.recipes.finetune import (
    DERIVING,
    backbone_source,
    batch_size,
    find_source,
    finetune,
    finetune_recipe,
)
from capszoo.recipes.training import setup
from capszoo.recipes.training.distributed import TrainingError
from capszoo.recipes.training.early_stop import BestEpoch
from capszoo.recipes.training.setup import create_net, create_optimizer
from tests.support import load_script, recipes
from tests.support.command import fails, run, succeeds
from tests.support.errors import refuses
from tests.support.recipes import assert_same_weights, metadata, write_photos
from tests.support.zoo import names, slow_unless, small

MODEL = "resnet20_routingcaps.mnist"
WEIGHTS = Path(capszoo.__file__).parent / "weights"
NAMES = ("eight", "one", "three")  # the folders' order, which is not that of the digits
QUICK = ("capsnet_em", "encapnet_v1", "idpa_cnn", "resnet20_routingcaps", "resnet20_routingpool")


def pretrained() -> dict[str, torch.Tensor]:
    return capszoo.create_model(MODEL, pretrained=True).state_dict()


def with_capszoo(root: Path) -> dict[str, str]:
    """The environment of a process that finds the checkout from anywhere."""
    return {**os.environ, "PYTHONPATH": str(root)}


def weights_of(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(result["weights"])


def tune(data: Path, out: Path, *more: object) -> str:
    """What a run by the command prints."""
    return succeeds("finetune", MODEL, "--data", data, "--out", out, "--device", "cpu", *more)


def test_from_the_command_to_predict_and_export(root: Path, digits: ImageSet, tmp_path: Path) -> None:
    write_photos(digits, tmp_path / "split" / "train", {"one": 10, "three": 12, "eight": 8})
    write_photos(digits, tmp_path / "split" / "val", {"one": 4, "three": 4, "eight": 4}, start=20)
    write_photos(digits, tmp_path / "split" / "test", {"one": 9, "three": 5, "eight": 6}, start=30)
    out = tmp_path / "run"
    printed = tune(tmp_path / "split", out, "--epochs", 4, "--tag", "few")
    name = "resnet20_routingcaps.few"
    expected = {f"{name}.{end}" for end in ("safetensors", "json", "golden.npz")}
    assert expected | {"README.md", "labels.txt", "confusion.png", "recipe.yaml"} <= {
        p.name for p in out.iterdir()
    }
    assert (out / "labels.txt").read_text().split() == list(NAMES)

    raw = json.loads((out / f"{name}.json").read_text())
    assert raw["label_names"] == list(NAMES) and raw["mean"] == [0.1307] and raw["input_size"] == [1, 28, 28]
    assert raw["metrics"]["test"]["n"] == 20 and raw["metrics"]["validation"]["n"] == 12
    assert set(raw["dataset"]["sha256"]) == {"train", "val", "test"}
    assert raw["metrics"]["test"]["top1"] > 60, "these weights know digits; by chance it would be 33"
    line = f"test: top-1 {raw['metrics']['test']['top1']:.2f}% of 20 images"
    assert printed.count("test: ") == 1 and line in printed
    assert printed.count("weights in ") == 1
    card = ModelCard((out / "README.md").read_text())
    assert f"Fine-tuned from `{MODEL}`" in card.text and "optimistic" in card.text
    per_class = raw["per_class"]
    assert per_class["split"] == "test" and per_class["images"] == [6, 9, 5]
    assert sum(per_class["right"]) == 20 - raw["metrics"]["test"]["errors"]
    row = f"| eight | 6 | {100 * per_class['right'][0] / 6:.1f} |"
    assert row in card.text
    assert card.data.eval_results[0].metric_value == raw["metrics"]["test"]["top1"]
    named = set(re.findall(r"[(`](\S+\.\w+)[)`]", card.text))
    assert named & {"hf-hub:", "config.json", "metadata.json"} == set(), "what only a repository has"
    assert {f"{name}.json", "curves.png", "confusion.png", "recipe.yaml"} <= named
    (snippet,) = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    image = next((tmp_path / "split" / "test" / "one").iterdir())
    snippet = snippet.replace("picture.png", str(image))
    shown = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, env=with_capszoo(root)
    )
    assert {line.split()[0] for line in shown.stdout.splitlines()} == set(NAMES), shown.stderr
    assert Image.open(out / "confusion.png").size[0] > 300

    top = json.loads(succeeds("predict", out, image, "--json"))["results"][0]["predictions"]
    assert {scored["label"] for scored in top} == set(NAMES)
    succeeds("export", out, "--out", tmp_path / "bundle", "--quick")
    assert (tmp_path / "bundle" / "labels.txt").read_text().split() == list(NAMES)
    succeeds("publish", out, "me/few", "--dry-run", "--out", tmp_path / "staged")
    published = (tmp_path / "staged" / "README.md").read_text()
    assert row in published and "hf-hub:me/few" in published
    assert str(tmp_path) not in published, "paths of the user's machine stay there"


def test_images_are_read_once(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, load = [], setup.load_dataset

    def counted(name: str, split: str, *args: Any, **options: Any) -> Any:
        found.append(split)
        return load(name, split, *args, **options)

    monkeypatch.setattr(setup, "load_dataset", counted)
    finetune(MODEL, photos, tmp_path / "run", epochs=1)
    assert found == ["train"]
    finetune(MODEL, photos, tmp_path / "larger", epochs=1, overrides=["data.augment.resize=32"])
    assert found[1:] == ["train", "train"], "what the recipe changes afterwards is obeyed"


def test_defaults_follow_from_the_data(photos: Path) -> None:
    recipe = finetune_recipe(MODEL, photos)
    assert recipe.name == "resnet20_routingcaps.my_photos" and recipe.loss.name == "margin"
    assert recipe.data.validation == "stratified" and recipe.data.val_size == 6 and not recipe.data.test
    assert recipe.batch_size == 24 and recipe.epochs == 60 and recipe.data.balance
    assert recipe.init and recipe.init.new_classes and recipe.optimizer.layer_decay
    assert recipe.data.size == 28 and recipe.data.mean == (0.1307,)
    scratch = finetune_recipe(MODEL, photos, from_scratch=True)
    assert scratch.init is None and scratch.optimizer.layer_decay is None
    same = scratch.model_copy(update={"init": recipe.init, "optimizer": recipe.optimizer})
    assert same.model_copy(update={"description": recipe.description}) == recipe, "the same budget"
    assert finetune_recipe(MODEL, photos, overrides=["optimizer.lr=0.5"]).optimizer.lr == 0.5
    long = photos.rename(photos.parent / f"{'a' * 99}-{'b' * 50}")
    assert finetune_recipe(MODEL, long).tag == "a" * 99  # a tag has at most 100 characters
    assert find_source("resnet20_routingpool.cifar10").loss["name"] == "cross_entropy"
    # the EM recipes train activations with the spread loss; a bare network's scores are logits
    assert find_source("capsnet_em_norb", weights=False).loss["name"] == "cross_entropy"


def test_the_size_is_that_of_the_network_not_of_its_first_images(photos: Path, tmp_path: Path) -> None:
    net = capszoo.create_model(MODEL, pretrained=True, num_classes=3, img_size=36)
    save_for_hf(net, str(tmp_path / "saved"), safe_serialization=True)
    recipe = finetune_recipe(str(tmp_path / "saved"), photos)
    assert recipe.data.size == recipe.data.augment.resize == 36


def test_more_processes_than_images(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    with refuses(DataError, names=["24", "64", "processes"]):
        finetune_recipe(MODEL, photos)


def test_classes_of_the_weights_are_kept_where_they_are_the_same(digits: ImageSet, tmp_path: Path) -> None:
    for kind in range(10):
        (tmp_path / "data" / str(kind)).mkdir(parents=True)
        for index in (digits.labels == kind).nonzero().flatten()[:4].tolist():
            Image.fromarray(digits.images[index, 0].numpy()).save(
                tmp_path / "data" / str(kind) / f"{index}.png"
            )
    recipe = finetune_recipe(MODEL, tmp_path / "data")
    assert recipe.init and not recipe.init.new_classes
    result = finetune(MODEL, tmp_path / "data", tmp_path / "run", epochs=1, overrides=["optimizer.lr=1e-9"])
    assert result["validation"]["top1"] == 100, "the net reads digits from the start"


@pytest.mark.parametrize(
    ("freeze", "stays"),
    [
        ("body", lambda key: key.startswith("stages.")),
        ("all", lambda key: "class_caps" not in key),
        ("stages.stem", lambda key: key.startswith("stages.stem.")),
    ],
)
def test_what_is_frozen_stays_and_the_rest_learns(
    photos: Path, tmp_path: Path, freeze: str, stays: Callable[[str], bool]
) -> None:
    result = finetune(MODEL, photos, tmp_path / "run", epochs=1, freeze=[freeze])
    before, after = pretrained(), weights_of(result)
    frozen = {key for key in after if stays(key)}
    assert any("running_mean" in key for key in frozen)
    for key in frozen:
        assert torch.equal(before[key], after[key]), f"{key} changed"
    start = load_file(result["out"] / "checkpoints" / "step-00000000" / "model.safetensors")
    head = [key for key in after if "class_caps" in key]
    assert head and all(before[key].shape != after[key].shape for key in head)
    others = ["stages.layer1.0.conv1.weight"] if freeze == "stages.stem" else []
    assert all(not torch.equal(start[key], after[key]) for key in [*head, *others])


@pytest.mark.parametrize(
    ("freeze", "named"), [("stages.stam", ["stages.stam", "stages.stem"]), ("foo", ["foo"])]
)
def test_an_unknown_part_to_freeze_is_one_line(
    photos: Path, tmp_path: Path, freeze: str, named: list[str]
) -> None:
    with refuses(RecipeError, names=named) as caught:
        finetune(MODEL, photos, tmp_path / "no", freeze=[freeze])
    assert "''" not in str(caught.value) and not (tmp_path / "no").exists()


def test_without_freezing_everything_learns(photos: Path, tmp_path: Path) -> None:
    before, after = pretrained(), weights_of(finetune(MODEL, photos, tmp_path / "free", epochs=2))
    for key, _ in capszoo.create_model(MODEL).named_parameters():
        if before[key].shape == after[key].shape:
            assert not torch.equal(before[key], after[key]), f"{key} did not learn"


def test_another_call_names_what_the_user_changed(
    photos: Path, digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = dict(out=tmp_path / "run", cpu=True, epochs=1)
    assert not finetune(MODEL, photos, **given, overrides=["batch_size=12"], stop_after=1)["finished"]
    given["overrides"] = ["batch_size=12"]
    path = next((photos / "one").iterdir())
    with Image.open(path) as image:
        image.rotate(180).save(path)
    with refuses(TrainingError, names=["--accept-data"]):
        finetune(MODEL, photos, **given)
    assert finetune(MODEL, photos, **given, accept_data=True)["finished"]
    with refuses(TrainingError, names=["epochs=1", "3"]) as error:
        finetune(MODEL, photos, **{**given, "epochs": 3})
    assert f"finetune {tmp_path / 'run'} --data" in str(error.value), "the run as a start"
    monkeypatch.chdir(tmp_path)  # a relative path names the same images
    assert finetune(MODEL, photos.name, **given, accept_data=True)["finished"]
    Image.fromarray(digits.images[0, 0].numpy()).save(photos / "one" / "more.png")
    with refuses(TrainingError, names=["30", "31", "images"]):
        finetune(MODEL, photos, **given, accept_data=True)


def test_another_call_with_folds_is_told_from_the_first(photos: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = dict(out=tmp_path / "run", cpu=True)
    finetune(MODEL, photos, folds=3, epochs=2, stop_after=1, **given)
    for changed in (dict(folds=3, epochs=3), dict(folds=2, epochs=2)):
        with refuses(TrainingError, names=["fold-1", "options"]):
            finetune(MODEL, photos, **changed, **given)


def test_keys_that_others_follow_from_have_options(photos: Path, tmp_path: Path) -> None:
    for key in DERIVING:
        with refuses(UsageError, names=[key, DERIVING[key].split()[0]]):
            finetune(MODEL, photos, tmp_path / "run", overrides=[f"{key}=3"])
    with refuses(UsageError, names=["--layer-decay", "--from-scratch"]):
        finetune(MODEL, photos, tmp_path / "run", from_scratch=True, layer_decay=0.5)
    with pytest.raises(RecipeError, match="epochs: 0"):
        finetune(MODEL, photos, tmp_path / "run", epochs=0)


def test_one_value_for_batchnorm_is_said_before_anything_is_written(photos: Path, tmp_path: Path) -> None:
    """At 2x2 pixels the last maps of a ResNet-20 have a single position."""
    for overrides in (["batch_size=1"], ["batch_size=2", "accumulate=2"]):
        with pytest.raises(RecipeError, match="BatchNorm"):
            finetune(
                MODEL, photos, tmp_path / "run", img_size=4, cpu=True, overrides=overrides, from_scratch=True
            )
        assert not (tmp_path / "run").exists()


def test_a_run_states_the_sha256_of_its_initial_weights(photos: Path, tmp_path: Path) -> None:
    first = finetune(MODEL, photos, tmp_path / "run", epochs=1, cpu=True)
    assert metadata(first)["init_sha256"] == capszoo.checkpoint.resolve(MODEL).stated_sha256()
    second = finetune(str(tmp_path / "run"), photos, tmp_path / "more", epochs=1, cpu=True)
    assert metadata(second)["init_sha256"] == metadata(first)["sha256"]


@pytest.mark.slow
def test_training_goes_on_without_a_reader_of_its_output(root: Path, photos: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "capszoo", "finetune", MODEL, "--data", str(photos), "--device", "cpu"]
    command += ["--epochs", "1", "--out", str(tmp_path / "run")]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, env=with_capszoo(root)
        )
    assert done.returncode == 0 and "stdout is closed" in done.stderr, done.stderr
    assert (tmp_path / "run" / "labels.txt").is_file()


def test_without_validation_images_the_message_names_both_keys(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data.val_size.*early_stop=null"):
        finetune(MODEL, photos, tmp_path / "run", cpu=True, overrides=["data.val_size=0"])
    assert not (tmp_path / "run").exists()


def test_parts_with_random_weights_are_frozen_only_by_name() -> None:
    def recipe(arch: str, weights: str, freeze: str, **args: Any) -> Recipe:
        init = {"weights": weights, "freeze": [freeze], "new_classes": True}
        tree = {"arch": arch, "tag": "x", "data": {"name": "mnist"}, "epochs": 1, "init": init}
        return Recipe.model_validate({**tree, "model_args": args})

    def trained(*args: str, **model_args: Any) -> set[str]:
        spec = replace(dataset_spec("mnist"), label_names=("a", "b"))
        net = create_net(recipe(*args, **model_args), spec, initial=False)
        return {name.split(".")[0] for name, part in net.named_parameters() if part.requires_grad}

    own = ("capsnet_dynamic", "capsnet_dynamic.mnist")
    assert trained(*own, "all", decoder=True) == {"class_caps", "decoder"}
    by_name = trained(*own, "decoder", decoder=True)
    assert by_name >= {"class_caps", "stages"} and "decoder" not in by_name
    head = trained("caps_head", "backbone:resnet10t", "all", backbone="resnet10t", routing="avg")
    assert head == {"head"}
    wide = recipe("efficient_capsnet", "efficient_capsnet.mnist", "all", decoder=True)
    with refuses(RecipeError, names=["init.freeze", "stages.primary.weight"]):
        create_net(wide, replace(dataset_spec("mnist"), input_size=(1, 36, 36)))


def test_freeze_may_be_repeated(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        "capszoo.recipes.finetune.finetune", lambda *a, **options: asked.update(options) or {}
    )
    monkeypatch.setattr("capszoo.cli.finetune.print_run", lambda result: None)
    line = ["finetune", MODEL, "--data", str(photos), "--freeze", "body, stages.stem", "--freeze", "decoder"]
    assert CliRunner().invoke(app, line).exit_code == 0
    assert asked["freeze"] == ["body", "stages.stem", "decoder"]


@pytest.mark.parametrize("name", slow_unless(QUICK, names()))
def test_layer_decay(name: str) -> None:
    """Each parameter is in one group; rates rise from the stem to the head, which has the full one."""
    net = small(name)
    optimizer = {"lr": 0.1, "layer_decay": 0.5}
    recipe = Recipe(arch=name, tag="x", data={"name": "mnist"}, epochs=1, optimizer=optimizer)  # type: ignore[arg-type]
    groups = create_optimizer(recipe, net).param_groups
    place = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(place) == len(list(net.parameters()))
    scales = {key: place[id(parameter)] for key, parameter in net.named_parameters()}
    head = [key for key in scales if not key.startswith("stages.")]
    assert head and all(scales[key] == 1 for key in head)
    body = [scales[key] for key in scales if key.startswith("stages.")]
    assert body == sorted(body) and len(set(body)) > 1, "deeper is faster"
    assert body[0] == min(scales.values()) < 1


@pytest.mark.parametrize("schedule", ["cosine", "none"])
def test_layers_have_their_rates(photos: Path, tmp_path: Path, schedule: str) -> None:
    """A layer whose rate is scaled to nothing stays where it is, with and without a schedule."""
    sets = [f"schedule.name={schedule}", "optimizer.weight_decay=0"]
    result = finetune(MODEL, photos, tmp_path / "run", epochs=1, layer_decay=1e-4, overrides=sets)
    start, after = (
        load_file(result["out"] / "checkpoints/step-00000000/model.safetensors"),
        weights_of(result),
    )
    change = {key: float((start[key] - value).abs().max()) for key, value in after.items()}
    assert change["stages.stem.conv.weight"] < 1e-9
    assert max(moved for key, moved in change.items() if "class_caps" in key) > 1e-4, "the head's is whole"


def test_best_epoch_by_hand() -> None:
    net = torch.nn.Linear(1, 1)
    best, seen = BestEpoch(2), []
    for epoch, top1 in enumerate((50, 80, 80, 70, 75), start=1):
        torch.nn.init.constant_(net.weight, float(epoch))
        best.see(epoch, {"val_top1": top1}, net)
        seen.append(best.over(epoch))
    assert seen == [False, False, False, True, True], "two epochs after the last that was better"
    assert best.epoch == 3 and float(best.weights["weight"]) == 3, "of equally good ones the latest"
    again = BestEpoch(2)
    again.restore(best.state(), best.weights)
    assert again.state() == best.state() and again.over(4) and not BestEpoch(2).over(5)


def test_the_best_epoch_of_balanced_classes_is_that_of_the_mean_recall() -> None:
    net = torch.nn.Linear(1, 1)
    best = BestEpoch(9, "val_recall")
    # the last one calls everything by the rare class
    for epoch, (top1, recall) in enumerate(((95, 50), (90, 80), (95, 60), (5, 80)), start=1):
        best.see(epoch, {"val_top1": top1, "val_recall": recall}, net)
    assert (best.epoch, best.top1, best.score) == (2, 90, 80)


def test_early_stopping_keeps_the_best_weights(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, seen = [(1, 1, 0), (2, 2, 1), (2, 1, 1), (1, 1, 1), (2, 2, 2)], []

    def scripted(net: torch.nn.Module, *_: Any) -> torch.Tensor:
        seen.append({key: value.clone() for key, value in net.state_dict().items()})
        return torch.tensor([right[len(seen) - 1], (2, 2, 2)])

    monkeypatch.setattr(train_module, "count_correct", scripted)
    result = finetune(MODEL, photos, tmp_path / "run", epochs=9, overrides=["early_stop=2"])
    assert len(seen) == 4 and result["epoch"] == 4 and metadata(result)["epoch"] == 2
    assert metadata(result)["metrics"]["validation"] == {"top1": 83.3333, "n": 6, "recall": 83.3333}
    kept = weights_of(result)
    assert all(torch.equal(kept[key], value) for key, value in seen[1].items())
    assert any(not torch.equal(kept[key], value) for key, value in seen[3].items())


def test_a_rare_class_chooses_the_epoch_and_is_named_at_the_end(
    digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An epoch that finds the rare class is better than one that calls everything by the frequent one."""
    folder = tmp_path / "photos"
    write_photos(digits, folder / "train", {"one": 20, "three": 4, "eight": 4})
    write_photos(digits, folder / "val", {"one": 18, "three": 2}, start=30)
    (folder / "val" / "eight").mkdir()
    counted = iter([(0, 18, 0), (0, 14, 2), (0, 18, 0)])  # eight, one, three
    monkeypatch.setattr(
        train_module, "count_correct", lambda *_: torch.tensor([next(counted), (0, 18, 2)], dtype=torch.int64)
    )
    monkeypatch.setattr(setup, "check_classes", lambda parts: None)
    result = finetune(MODEL, folder, tmp_path / "run", epochs=3, cpu=True)
    assert metadata(result)["epoch"] == 2 and metadata(result)["metrics"]["validation"]["top1"] == 80
    printed = capsys.readouterr().out
    assert (
        "recall (validation): mean 88.89%, lowest 77.78% (one, 14 of 18 images)" in printed
        and "no images of eight" in printed
    )
    card = (tmp_path / "run" / "README.md").read_text()
    assert "no images of eight" in card


def test_a_net_that_only_guesses_is_noticed(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lazy: dict[str, Any] = {"from_scratch": True, "overrides": ["optimizer.lr=1e-9"]}
    finetune(MODEL, photos, tmp_path / "run", epochs=1, cpu=True, **lazy)
    assert "guessing (33.33%)" in capsys.readouterr().out
    finetune(MODEL, photos, tmp_path / "learns", epochs=6, cpu=True)
    assert "guessing" not in capsys.readouterr().out


def test_resume_is_bit_exact(photos: Path, tmp_path: Path) -> None:
    """Stopped every third update of two an epoch: between epochs and within, before and after the best one."""
    options: dict[str, Any] = {"epochs": 4, "freeze": ["stages.stem"]}
    options["overrides"] = ["early_stop=2", "batch_size=12", "optimizer.lr=0.0001"]
    whole = finetune(MODEL, photos, tmp_path / "whole", **options)
    parts: dict[str, Any] = {"finished": False}
    while not parts["finished"]:
        parts = finetune(MODEL, photos, tmp_path / "parts", stop_after=3, **options)
    assert parts["epoch"] == whole["epoch"] and metadata(parts)["epoch"] == metadata(whole)["epoch"]
    assert parts["validation"] == whole["validation"]
    assert_same_weights(whole["weights"], parts["weights"])
    again = finetune(MODEL, photos, tmp_path / "parts", **options)
    assert again["step"] == parts["step"], "it stays finished"


def test_a_run_goes_on_without_its_initial_weights(photos: Path, tmp_path: Path) -> None:
    """A checkpoint has all weights; what is frozen stays frozen."""
    source = tmp_path / "source" / f"{MODEL}.safetensors"
    source.parent.mkdir()
    shutil.copy(capszoo.checkpoint.resolve(MODEL).weights(), source)
    shutil.copy(WEIGHTS / f"{MODEL}.json", source.parent)
    options: dict[str, Any] = {"epochs": 2, "freeze": ["stages.stem"]}
    whole = finetune(str(source), photos, tmp_path / "whole", **options)
    assert not finetune(str(source), photos, tmp_path / "parts", stop_after=1, **options)["finished"]
    shutil.rmtree(source.parent)
    parts = train_module.train(tmp_path / "parts" / "recipe.yaml", out=tmp_path / "parts")
    assert_same_weights(whole["weights"], parts["weights"])


def test_initial_weights_of_another_network_are_refused(photos: Path) -> None:
    """The metadata of the trained weights would not have the argument, and describe another network."""
    recipe = finetune_recipe(f"{MODEL}_uniform", photos)
    assert recipe.model_args == {"lam": 0.0}
    spec = DATASETS["mnist"]
    setup.create_net(recipe, spec)
    with refuses(RecipeError, names=["resnet20_routingcaps.mnist_uniform", "lam=0.0", "model_args.lam"]):
        setup.create_net(recipe.model_copy(update={"model_args": {}}), spec)
    init = recipe.init.model_copy(update={"weights": "backbone:resnet18"})  # type: ignore[union-attr]
    bare = recipe.model_copy(update={"arch": "caps_head", "init": init, "model_args": {}})
    with refuses(RecipeError, names=["model_args.backbone", "backbone:resnet18"]):
        setup.create_net(bare, spec)


@pytest.mark.slow
def test_two_processes_end_with_the_same_weights_and_one_writes(
    root: Path, photos: Path, tmp_path: Path
) -> None:
    """BatchNorm's statistics too, of which each process on a CPU has its own between two updates."""
    next((photos / "one").iterdir()).unlink()  # an odd number is left to learn from
    out, notes = tmp_path / "run", tmp_path / "notes"
    argv = [MODEL, str(photos), str(out), str(notes)]
    done = recipes.run(root, recipes.launched("tests.support.run_finetune", argv, 2))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("re-initialised") == 1, "what one says the other need not"
    raw = json.loads((out / "resnet20_routingcaps.my_photos.json").read_text())
    kept = load_file(out / "resnet20_routingcaps.my_photos.safetensors")
    assert any("running_mean" in key for key in kept)
    for epoch in (1, 2, 3):
        first, second = (load_file(notes / f"{rank}-{epoch}.safetensors") for rank in (0, 1))
        assert all(torch.equal(first[key], second[key]) for key in first), epoch
        if epoch == raw["epoch"]:
            assert all(torch.equal(first[key], kept[key]) for key in kept)
    wrote = [json.loads((notes / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert len(wrote[0]) > 10 and wrote[1] == []
    expected = {"README.md", "labels.txt", "confusion.png", "curves.png", "recipe.yaml", "metrics.jsonl"}
    assert expected <= {path.name for path in out.iterdir()} and not list(out.rglob("*.tmp"))
    (session,) = json.loads((out / "sessions.json").read_text())
    assert session["processes"] == 2 and "per_class" in raw and raw["recipe"]["batch_size"] == 10
    shown = run("predict", out, *photos.rglob("*.png"), "--json")
    assert shown.exit_code == 0 and len(json.loads(shown.stdout)["results"]) == 29


def test_broken_folders_are_one_line_each(photos: Path, tmp_path: Path) -> None:
    def refused(folder: Path, *more: object, code: int = 1, names: Iterable[str]) -> None:
        fails(code, "finetune", MODEL, "--data", folder, "--out", tmp_path / "run", *more, names=names)
        assert not (tmp_path / "run").exists()

    refused(tmp_path / "nowhere", names=["--data"])
    (tmp_path / "alone" / "cats").mkdir(parents=True)
    Image.new("L", (28, 28)).save(tmp_path / "alone" / "cats" / "0.png")
    refused(tmp_path / "alone", names=["class", "cats"])
    for kind in ("one", "three"):
        (tmp_path / "few" / kind).mkdir(parents=True)
        (tmp_path / "few" / kind / "0.png").write_bytes(b"")
    refused(tmp_path / "few", names=["0.png", "PNG"])
    refused(tmp_path / "few", "--skip-bad", names=["2", "images"])
    split = tmp_path / "split"
    (split / "val" / "four").mkdir(parents=True)
    photos.rename(split / "train")
    Image.new("L", (28, 28)).save(split / "val" / "four" / "0.png")
    refused(split, names=["class", "four"])
    (split / "val" / "four").rename(split / "val" / "one")
    refused(split, names=["images", "class"])
    refused(split, "--set", "epoch=3", code=2, names=["epoch", "epochs"])
    refused(split, "--tag", "a.b", code=2, names=["short", "name"])


def test_unreadable_images_are_listed_or_skipped(photos: Path, tmp_path: Path) -> None:
    files = sorted(photos.rglob("*.png"))
    files[0].write_bytes(files[0].read_bytes()[:60])
    files[-1].write_bytes(b"no image")
    text = fails(1, "finetune", MODEL, "--data", photos, "--out", tmp_path / "run")
    assert (
        all(file.name in text for file in (files[0], files[-1])) and "skip_bad" in text and "1 more" in text
    )
    printed = tune(photos, tmp_path / "run", "--skip-bad", "--epochs", 1)
    listed = [line for line in printed.splitlines() if line.startswith("left out: ")]
    assert len(listed) == 2 and files[0].name in listed[0] and files[-1].name in listed[1]
    raw = json.loads((tmp_path / "run" / "resnet20_routingcaps.my_photos.json").read_text())
    assert len(raw["dataset"]["left_out"]) == 2
    told = [line for line in printed.splitlines() if f"imagefolder:{photos}: 3 classes (eight: 7, " in line]
    assert len(told) == 1 and "in grey" in told[0] and told[0].endswith("left out: 2 that cannot be read")
    assert raw["dataset"]["read"]["images"] == {"train": 22, "val": 6}
    assert sum(map(sum, raw["dataset"]["read"]["per_class"].values())) == 28
    assert told[0].endswith(raw["dataset"]["read"]["sentence"])


def test_images_are_read_in_the_channels_that_are_asked_for(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert "in colour, 28x28 pixels" in tune(photos, out, "--epochs", 1, "--colour")
    raw = json.loads((out / "resnet20_routingcaps.my_photos.json").read_text())
    assert raw["input_size"] == [3, 28, 28] and raw["recipe"]["data"]["channels"] == 3
    command = ("finetune", MODEL, "--out", out, "--data")
    fails(2, *command, photos, "--colour", "--set", "data.channels=1", names=["--colour", "--grey"])
    fails(1, *command, "mnist", "--grey", names=["number", "channels"])


def test_a_table_names_the_images_of_a_run(photos: Path, tmp_path: Path) -> None:
    files = sorted(photos.rglob("*.png"))
    rows = "".join(f"{file.relative_to(photos)},{file.parent.name}\n" for file in files)
    (photos / "all.csv").write_text(f"file_name,label\n{rows}")
    out = tmp_path / "run"
    tune(photos / "all.csv", out, "--epochs", 1)
    weights = next(out.glob("*.safetensors"))
    raw = json.loads(weights.with_suffix(".json").read_text())
    assert raw["label_names"] == list(NAMES) and raw["dataset"]["name"] == f"csv:{photos / 'all.csv'}"
    measured = json.loads(succeeds("eval", out, "--data", photos / "all.csv", "--split", "val", "--json"))
    assert measured["top1"] == pytest.approx(raw["metrics"]["validation"]["top1"], abs=0.01)


@pytest.mark.parametrize(
    ("count", "world", "batch"),
    [(1, 1, 1), (24, 1, 24), (57, 1, 28), (72, 1, 24), (300, 1, 32), (57, 2, 28), (3, 2, 2)],
)
def test_few_images_are_not_left_out(count: int, world: int, batch: int) -> None:
    assert batch_size(count, world) == batch


def test_one_reading_of_deep_strips_from_training_to_infer(root: Path, tmp_path: Path) -> None:
    """Crop mode, rows and columns, and range: training, eval, predict and a bundle see the same pixels."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 3)):
        for place, kind in enumerate(("left", "right")):
            (tmp_path / "strips" / split / kind).mkdir(parents=True)
            for number in range(count):
                strip = rng.integers(200, 400, (20, 90), dtype=np.uint16)
                strip[:, slice(0, 15) if place == 0 else slice(75, 90)] = 900 + 100 * number
                Image.fromarray(strip).save(tmp_path / "strips" / split / kind / f"{number}.png")
    out = tmp_path / "run"
    tune(tmp_path / "strips", out, "--epochs", 2, "--img-size", "28x56", "--crop-mode", "squash")
    raw = json.loads((out / "resnet20_routingcaps.strips.json").read_text())
    assert raw["input_size"] == [1, 28, 56] and raw["crop_mode"] == "squash"
    assert raw["value_range"] == [0, 2047], "the largest value is 1,400: 11 bits"
    assert raw["recipe"]["data"]["size"] == [28, 56] and raw["recipe"]["data"]["crop_mode"] == "squash"

    target = prepare(out, split="test", device="cpu")
    model = load_model(str(out), device="cpu")
    transform = model_transform(model)
    files = sorted((tmp_path / "strips" / "test").rglob("*.png"))
    predicted = torch.stack([transform(load_image(file)) for file in files])
    views = np.stack([np.asarray(transform.view(load_image(file))) for file in files])
    assert isinstance(target.images, ImageSet) and target.mean == transform.mean
    assert np.array_equal(target.images.images[:, 0].numpy(), views)
    again = json.loads(succeeds("predict", out, *files, "--json"))["results"]
    assert not any("notes" in one and one["notes"] for one in again)
    succeeds("export", out, "--out", tmp_path / "bundle", "--quick")
    infer = load_script(tmp_path / "bundle" / "infer.py")
    spec = json.loads((tmp_path / "bundle" / "preprocess.json").read_text())
    theirs = np.stack([infer.preprocess(file, spec) for file in files])
    assert np.abs(theirs - predicted.numpy()).max() < 1e-5
    fails(2, "finetune", MODEL, "--data", tmp_path / "strips", "--crop-mode", "squish", names=["squash"])


def test_a_large_part_that_is_cropped_away_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind in "ab":
        (tmp_path / "wide" / kind).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (80, 28), number).save(tmp_path / "wide" / kind / f"{number}.png")
    for crop_mode, said in (("center", "65%"), ("border", "")):
        caplog.clear()
        recipe = finetune_recipe(MODEL, tmp_path / "wide", crop_mode=crop_mode)
        setup.load_data(recipe, None)
        assert (said in caplog.text) if said else not caplog.text


def test_a_backbone_brings_its_crop_mode() -> None:
    cfg = create_backbone_cfg("convnext_tiny.in12k_ft_in1k_384", None)
    assert cfg["crop_mode"] == "squash"
    assert backbone_source("convnext_tiny.in12k_ft_in1k_384", "idpa").crop_mode == "squash"
    assert backbone_source("resnet18.a1_in1k", "idpa").crop_mode == "center"


@pytest.mark.slow
def test_folds_test_each_image_once(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    printed = tune(photos, out, "--folds", 3, "--epochs", 1)
    found = json.loads((out / "folds.json").read_text())
    assert (found["folds"], found["n"]) == (3, 30) and sum(map(sum, found["confusion"])) == 30
    values = found["top1"]["values"]
    assert len(values) == 3 and found["top1"]["mean"] == pytest.approx(sum(values) / 3, abs=1e-3)
    assert found["top1"]["sd"] == pytest.approx(statistics.stdev(values), abs=1e-3)
    right = sum(found["confusion"][k][k] for k in range(3))
    assert found["top1"]["mean"] == pytest.approx(100 * right / 30, abs=1e-3), "folds of equal size"
    assert f"3 folds: top-1 {found['top1']['mean']:.2f}" in printed
    for number in (1, 2, 3):
        raw = json.loads((out / f"fold-{number}" / "resnet20_routingcaps.my_photos.json").read_text())
        assert raw["metrics"]["test"]["n"] == 10 and f"fold {number} of 3" in raw["description"]
        assert raw["metrics"]["test"]["top1"] == pytest.approx(values[number - 1], abs=1e-3)
    assert (out / "confusion.png").is_file()


def test_folds_that_cannot_be_made_are_refused(photos: Path, tmp_path: Path) -> None:
    with refuses(DataError, names=["11 folds", "eight", "8"]):
        finetune(MODEL, photos, tmp_path / "out", folds=11)
    with refuses(UsageError, names=["1 folds", "--folds"]):
        finetune(MODEL, photos, tmp_path / "out", folds=1)
    (photos.parent / "split").mkdir()
    photos.rename(photos.parent / "split" / "train")
    shutil.copytree(photos.parent / "split" / "train", photos.parent / "split" / "test")
    with refuses(UsageError, names=["--folds", "test"]):
        finetune(MODEL, photos.parent / "split", tmp_path / "out", folds=3)
    assert not (tmp_path / "out").exists()
