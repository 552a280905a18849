"""Model cards and the page of results: the header parses, figures are those of the metadata, papers' are marked."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard

from capszoo._pretrained.catalogue import checkpoints
from capszoo._pretrained.files import locate_weights
from capszoo._pretrained.info import WeightsInfo
from capszoo.checkpoint import resolve
from capszoo.data import DATASETS
from capszoo.models._papers import PAPERS
from capszoo.recipes.config import list_recipes, load_recipe
from capszoo.recipes.release.model_card import _classes, model_card
from capszoo.recipes.release.paper_results import (
    as_accuracy,
    counted,
    figures_table,
    header_line,
    paper_figures,
    protocol_lines,
    recipe_differences,
    sampling_error,
    settings_unlike_the_recipe,
    twin_groups,
)
from scripts import pictures
from tests.support.errors import assert_names

OURS = "resnet20_routingpool.cifar10"
#: a checkpoint with the summary of three seeds
SEEDED = "resnet20_routingcaps.mnist"


def info_of(name: str, title: str = "CIFAR-10", **raw: object) -> WeightsInfo:
    """Metadata of a checkpoint that does not exist."""
    architecture, tag = name.split(".")
    whole = {"dataset": {"name": tag, "title": title}, **raw}
    return WeightsInfo(architecture, tag, "0" * 64, 10, (3, 32, 32), (0.5,) * 3, (0.5,) * 3, raw=whole)


@pytest.mark.parametrize("name", sorted(checkpoints(aliases=False)))
def test_the_header_parses_and_states_the_metadata(name: str) -> None:
    info = checkpoints(aliases=False)[name]
    card = ModelCard(model_card(info, f"me/{name}", pictures=["curves.png"]).content)
    data, test = card.data, info.raw["metrics"]["test"]
    assert data.license == "apache-2.0" and data.to_dict()["library_name"] == "capszoo"
    assert info.architecture in data.tags
    assert data.pipeline_tag == "image-classification" and data.model_name == name
    (ours,) = data.eval_results  # the papers' results are not this repository's
    assert ours.metric_value == test["top1"] and f"n = {test['n']}" in ours.metric_name
    assert ours.dataset_split == "test" and ours.dataset_name == info.raw["dataset"]["title"]
    figures = f"{test['top1']:.2f}", f"{test['errors']:,} wrong"
    for said in (info.sha256, *figures, f"hf-hub:me/{name}", "no pickle"):
        assert said in card.text
    assert "\n## Limits" in card.text and "![Training curves](curves.png)" in card.text


def test_the_papers_figure_stands_beside_ours() -> None:
    info = checkpoints(aliases=False)[OURS]
    card, top1 = model_card(info, "me/x"), info.raw["metrics"]["test"]["top1"]
    assert [result.metric_value for result in card.data.eval_results] == [top1]
    assert f"| **this file** | {top1:.2f}" in card.text and "| 91.51 | 8.49 | CIFAR-10 |" in card.text
    assert "curves.png" not in card.text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (OURS, 'so does `pipeline("image-classification"'),
        (SEEDED, "makes images RGB"),
        ("encapnet6.cifar10", "applies a softmax"),
    ],
)
def test_a_card_says_which_of_transformers_loaders_fit(name: str, said: str) -> None:
    text = model_card(checkpoints(aliases=False)[name], "me/x").text
    assert 'AutoModelForImageClassification.from_pretrained("me/x")' in text and said in text


def test_a_card_has_every_name_of_its_weights() -> None:
    known = checkpoints(aliases=False)
    assert "`resnet20_avg.cifar10_avg`" in model_card(known["resnet20_routingpool.cifar10_avg"], "me/x").text
    assert "resnet20_avg" not in model_card(known["resnet20_routingpool.cifar10"], "me/x").text
    other = replace(known["resnet20_routingpool.cifar10_avg"], sha256="0" * 64)
    assert "resnet20_avg" not in model_card(other, "me/x").text, "a run of the user's"


def test_a_card_without_a_papers_figure_a_test_set_or_a_data_set_of_the_hub() -> None:
    info = replace(
        info_of("resnet20_routingcaps.pets", "pets"), label_names=tuple(f"breed {i}" for i in range(30))
    )
    card = model_card(info, "me/pets", private=True)
    assert card.data.eval_results is None and card.data.datasets is None
    assert "breed 9" in card.text and "breed 29" not in card.text and "hf auth login" in card.text
    info.raw["metrics"] = {"test": {"top1": 50.0, "n": 40}, "validation": {"top1": 40.0, "n": 10}}
    (result,) = model_card(info, "me/pets").data.eval_results
    assert result.metric_value == 50.0 and result.dataset_name == "pets"
    info.raw.update(epoch=3, recipe={"epochs": 9, "init": {"weights": "idpa_cnn.mnist"}}, seed=1)
    text = model_card(info, "me/pets", pictures=["confusion.png"]).text
    assert_names(text, ["`idpa_cnn.mnist`", "confusion.png", "held out", "seed 1", "epoch 3 of 9"])
    head = replace(info, architecture="caps_head", model_args={"routing": "avg"})
    assert "Paper:" not in model_card(head, "me/pets").text
    assert "2002.04764" in model_card(replace(head, model_args={"routing": "idpa"}), "me/pets").text
    secret = {"weights": "/home/me/secret/run.safetensors"}
    info.raw["recipe"] = {"init": secret, "data": {"validation": "own"}}
    text = model_card(info, "me/pets").text
    assert "`private`" in text and "/home" not in text and "run.safetensors" not in text
    assert model_card(info, "me/pets").data.base_model is None
    info.raw["recipe"] = {"init": {"weights": "hf-hub:bob/caps@v1"}}
    info.raw["dataset"] = {"name": "hf:ann/pets", "title": "hf:ann/pets"}
    data = model_card(info, "me/pets").data
    assert (data.base_model, data.datasets) == ("bob/caps", ["ann/pets"])
    assert {result.dataset_type for result in data.eval_results} == {"ann/pets"}
    info.raw["dataset"] = {"name": "hf:mine/ann/pets", "title": "pets"}  # a folder
    assert model_card(info, "me/pets").data.datasets is None
    assert "held out" not in text and "The data set's validation split has 10 images" in text
    foreign = replace(info, architecture="resnet18")  # timm's own: no paper of ours
    assert "Paper:" not in model_card(foreign, "me/pets").text


def test_the_card_of_a_run_loads_the_run_and_not_the_zoo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may have the name of a model of the zoo."""
    text = model_card(checkpoints(aliases=False)[SEEDED], SEEDED, local=True).text
    (named,) = re.findall(r'capszoo\.load\("(.*)"\)', text)
    assert f"capszoo predict {named} " in text and f"capszoo export {named} " in text
    (tmp_path / SEEDED).mkdir()
    for end in ("json", "safetensors"):
        shutil.copy(
            locate_weights(checkpoints(aliases=False)[SEEDED]).with_suffix(f".{end}"), tmp_path / SEEDED
        )
    monkeypatch.chdir(tmp_path)
    assert resolve(named).kind == "file" and resolve(SEEDED).kind == "name"


def test_several_labels_are_not_called_top_1() -> None:
    info = checkpoints(aliases=False)["resnet20_routingcaps.affnist"]
    assert counted(info) == "top-1" and "| top-1, % |" in figures_table(info)[0]
    several = replace(info, raw={**info.raw, "dataset": {"name": "multimnist", "title": "MultiMNIST"}})
    assert counted(several) == "exact set" and "| exact set, % |" in figures_table(several)[0]
    card = str(model_card(several, "owner/name"))
    assert "exact set, % (n = " in card and "top-1" not in card


def test_the_recipe_names_the_papers_figure() -> None:
    for name, expected in (
        ("resnet20_routingpool.cifar10", [91.51]),
        ("resnet20_routingpool.cifar10_avg", [91.27]),
        ("idpa_resnet.cifar10", [95.14, 94.85]),
        ("capsnet_em_norb_small.mnist", []),
    ):
        title = "CIFAR-10" if "cifar10" in name else "MNIST"
        assert [as_accuracy(figure) for figure in paper_figures(info_of(name, title))] == expected
    unnamed = info_of("resnet20_routingpool.own")
    assert paper_figures(unnamed) == list(PAPERS["resnet20_routingpool"]), "all of that data set"
    uniform = info_of("resnet20_routingcaps.affnist_uniform", "affNIST (regenerated)")
    assert paper_figures(uniform) == [], "its recipe says that there is none"
    affnist = paper_figures(info_of("resnet20_routingcaps.affnist", "affNIST (regenerated)"))
    assert [figure.value for figure in affnist] == [5.12]


def test_every_recipe_names_the_figures_that_its_card_shows() -> None:
    """Otherwise the results of other variants of the network would stand beside its own."""
    for name in list_recipes():
        named = {float(number) for number in re.findall(r"\d+\.\d+|\d+", header_line(name, "Paper"))}
        title = DATASETS[load_recipe(name).data.name].title
        for figure in paper_figures(info_of(name, title)):
            assert named & {figure.value, as_accuracy(figure)}, (name, figure)


def test_a_header_line_includes_its_continuation() -> None:
    stated = header_line("idpa_resnet.cifar10", "Paper")
    assert stated.startswith("accuracy 95.14") and stated.endswith("pad 4, crop, flip.")
    assert "Momentum" not in stated and header_line("idpa_resnet.cifar10", "Nothing") == ""


def test_settings_unlike_the_recipe() -> None:
    recipe = load_recipe(OURS).model_dump(mode="json")
    assert settings_unlike_the_recipe(info_of(OURS, recipe=recipe)) == {}
    short = load_recipe(OURS, profile="short").model_dump(mode="json")
    unlike = settings_unlike_the_recipe(info_of(OURS, recipe=short))
    assert unlike["epochs"] == (60, 164) and unlike["precision"] == ("bf16", "fp32") and "tag" not in unlike
    assert "`epochs` 60 (recipe: 164)" in "\n".join(protocol_lines(info_of(OURS, recipe=short)))
    older = {key: value for key, value in recipe.items() if key not in ("feedback", "accumulate")}
    assert settings_unlike_the_recipe(info_of(OURS, recipe=older)) == {}, "a recipe of an earlier version"
    assert settings_unlike_the_recipe(info_of("idpa_cnn.pets", recipe=short)) == {}


def test_a_checkpoint_that_was_trained_on() -> None:
    recipe = load_recipe(OURS).model_dump(mode="json")
    for start, looks in (
        (f"runs/{OURS}", "at the end of both runs"),
        ("hf-hub:me/other", "once, at the end"),
    ):
        trained_on = recipe | {"init": {"weights": start}}
        info = info_of(
            OURS, recipe=trained_on, metrics={"test": {}}, hardware="a processor", train_seconds=1000
        )
        lines = "\n".join(protocol_lines(info))
        assert_names(lines, [f"`{start}`", looks, "a processor", "1,000 s"])
        assert ("optimistic" in lines) == (looks == "at the end of both runs")
        assert "Fine-tuned from" in model_card(info, "me/it").content
    further = info_of(OURS, recipe=recipe | {"init": {"weights": OURS}}, metrics={"test": {}})
    said = "\n".join(protocol_lines(further))
    assert_names(said, ["an earlier run", "at the end of both runs"])
    assert "Fine-tuned from" not in model_card(further, "me/it").content


def test_twins_differ_in_one_thing() -> None:
    groups = twin_groups()
    assert ["resnet20_routingpool.cifar10", "resnet20_routingpool.cifar10_avg"] in groups
    mixed = [
        name for base, *others in groups if base.endswith("cifar10") for name in others if "cifar100" in name
    ]
    assert not mixed
    for base, *others in groups:
        for name in others:
            one, other = (load_recipe(twin).model_dump(mode="json") for twin in (base, name))
            changed = recipe_differences(one, other)
            assert len(changed) == 1, name
            assert all(key == "feedback" or key.startswith("model_args.") for key in changed), name
    assert set(sum(groups, [])) <= set(list_recipes())
    assert sampling_error(90.0, 900) == pytest.approx(1.0)


def test_curves_of_the_checkpoints(root: Path, tmp_path: Path) -> None:
    def stale(docs: Path) -> dict[Path, Any]:
        return {path: one for path, one in pictures.stale_drawings(docs).items() if path.suffix == ".svg"}

    assert not stale(root / "docs")
    missing = stale(tmp_path)
    assert {path.stem for path in missing} == set(checkpoints(aliases=False))
    first, gone = next(iter(missing)), tmp_path / "curves" / "gone.mnist.svg"
    pictures.write_drawing(first, missing[first])
    gone.write_text("<svg/>")
    assert stale(tmp_path).keys() == missing.keys() - {first} | {gone}
    pictures.write_drawing(gone, None)
    assert [path.name for path in (tmp_path / "curves").iterdir()] == [first.name]


def test_a_label_with_a_bar_stays_in_its_cell() -> None:
    found = SimpleNamespace(split="test", images=[4], right=[1])
    info: Any = SimpleNamespace(label_names=["cat|dog"], metadata=SimpleNamespace(per_class=found))
    assert _classes(info).splitlines()[-1] == "| cat\\|dog | 4 | 25.0 |"
