"""The queue: every item is a recipe; what is finished is left out, what was begun comes first; seeds are summarised."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from capszoo._pretrained.info import WeightsInfo
from capszoo.cli.train import resolved_yaml
from capszoo.errors import CapszooError
from capszoo.recipes.config import RecipeError, load_recipe
from capszoo.recipes.training import queue as module
from capszoo.recipes.training.distributed import TrainingError
from capszoo.recipes.training.history import find_runs, read_records, trained_images
from capszoo.recipes.training.multi_run import train_seeds
from capszoo.recipes.training.queue import queue_state, read_queue, train_queue
from capszoo.recipes.weights import seeds_summary

from .test_multi_run import write_recipes


def test_the_queue_of_the_package_names_recipes_and_aims() -> None:
    items = read_queue()
    assert len({item.tag for item in items}) == len(items)
    assert all(item.at_least is not None for item in items)
    assert all(item.cost and item.profile for item in items)
    tags = {item.tag for item in items}
    pooled = {tag for tag in tags if re.fullmatch(r"resnet\d+_routingpool\.[a-z0-9]+", tag)}
    assert {f"{tag}_avg" for tag in pooled} <= tags, "a twin is missing"
    assert [item.tier for item in items] == sorted(item.tier or 9 for item in items), "tier by tier"
    assert all(state.epoch == 0 and not state.finished for state in queue_state(items, "nowhere"))


def write_queue(folder: Path, items: list[dict]) -> Path:
    path = folder / "queue.yaml"
    path.write_text(yaml.safe_dump({"queue": items}))
    return path


def test_a_wrong_queue_is_one_line(tmp_path: Path) -> None:
    for item, message in (
        ({"tag": "idpa_cnn.mnist", "sed": 1}, "item 1: 'sed' is wrong"),
        ({"tag": "idpa_cnn.mnistt"}, "did you mean 'idpa_cnn.mnist'"),
        ({"tag": "idpa_cnn.mnist", "set": ["epoch=1"]}, "unknown key 'epoch'"),
        ({"tag": "idpa_cnn.mnist", "seeds": []}, "item 1: 'seeds' is wrong"),
        ({"tag": "idpa_cnn.mnist", "seeds": [0, 0]}, "two runs have the folder idpa_cnn.mnist.seed0"),
    ):
        with pytest.raises(RecipeError, match=message):
            read_queue(write_queue(tmp_path, [item]))


def test_a_queue_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "queue.yaml").write_bytes(b"queue: \xff\xfe")
    with pytest.raises(RecipeError, match="cannot read"):
        read_queue(tmp_path / "queue.yaml")


def test_seeds_and_queue_train_what_is_not_finished(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe,) = write_recipes(tmp_path, data, "idx")
    runs = tmp_path / "runs"
    summary = train_seeds(recipe, [0, 1], out=runs, cpu=True, parallel=2)
    assert summary["seeds"] == [0, 1] and len(summary["test"]["values"]) == 2 and "sd" in summary["test"]
    assert json.loads((runs / "idpa_cnn.idx.seeds.json").read_text()) == summary
    metadata = json.loads((runs / "idpa_cnn.idx.seed1" / "idpa_cnn.idx.json").read_text())
    assert metadata["seeds"] == summary and metadata["seed"] == 1
    logs = [path.stat().st_size for path in sorted(runs.glob("*.log"))]
    again = train_seeds(recipe, [0, 1], out=runs, cpu=True)
    assert again == summary and [path.stat().st_size for path in sorted(runs.glob("*.log"))] == logs
    assert train_seeds(recipe, [1], out=runs, cpu=True) == summary, "the run of the other seed counts"

    queue = write_queue(
        tmp_path, [{"tag": recipe, "seeds": [0, 1]}, {"tag": recipe, "set": ["tag=other"], "at_least": 50.0}]
    )
    before = queue_state(read_queue(queue), runs)
    assert [state.finished for state in before] == [True, True, False]
    with pytest.raises(RecipeError, match="the queue has no idpa_cnn.other"):
        train_queue(runs, only=["idpa_cnn.other"], path=queue)
    with pytest.raises(RecipeError, match="the queue states the seeds of its items: leave --seed "):
        train_queue(runs, overrides=["seed=3"], path=queue)
    capsys.readouterr()
    assert train_queue(runs, cpu=True, path=queue)
    (record,) = read_records(runs / "idpa_cnn.other" / "metrics.jsonl")
    images = record["step"] * load_recipe(recipe).batch_size
    assert f"{images} images in " in capsys.readouterr().out, "those of this call alone"
    assert all(state.finished and state.epoch == 1 for state in queue_state(read_queue(queue), runs))
    assert (runs / "idpa_cnn.other").is_dir()
    assert [path.stat().st_size for path in sorted(runs.glob("*seed*.log"))] == logs, "finished ones are left"
    # a damaged folder has no images, and stops no other run
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "recipe.yaml").touch()
    assert trained_images(tmp_path / "empty") == 0 < trained_images(runs / "idpa_cnn.other")
    with pytest.raises(CapszooError, match="recipe.yaml is no recipe of a run"):
        find_runs([tmp_path / "empty"])
    # no mean of runs on different images
    changed = runs / "idpa_cnn.idx.seed1" / "idpa_cnn.idx.json"
    kept = changed.read_text()
    changed.write_text(json.dumps(json.loads(kept) | {"dataset": {"sha256": {"test": "0"}}}))
    with pytest.raises(TrainingError, match="seed1 was trained on other images than .*seed0"):
        train_seeds(recipe, [0, 1], out=runs, cpu=True)
    changed.write_text(kept)
    # a finished run with other settings is not the recipe's
    with pytest.raises(
        TrainingError, match="idpa_cnn.idx.seed0 holds a run with epochs=1, this recipe says 2"
    ):
        train_seeds(recipe, [0, 2], ["epochs=2"], out=runs, cpu=True)
    assert not (runs / "idpa_cnn.idx.seed2").exists()
    other = write_queue(tmp_path, [{"tag": recipe, "set": ["tag=other", "optimizer.lr=0.5"]}])
    with pytest.raises(TrainingError, match="idpa_cnn.other holds a run with optimizer.lr="):
        train_queue(runs, cpu=True, path=other)


def test_what_the_zoo_has_is_left_out_unless_it_is_named(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe,) = write_recipes(tmp_path, data, "idx")
    raw = {"seed": 0, "metrics": {"test": {"top1": 60.0}}, "seeds": {"seeds": [0, 1]}}
    info = WeightsInfo("idpa_cnn", "idx", "", 10, (1, 28, 28), (), (), raw=raw)
    monkeypatch.setattr(module, "bundled_tags", lambda: {"idpa_cnn.idx": info})
    started: list[str] = []
    monkeypatch.setattr(
        module, "run_jobs", lambda jobs, *_: started.extend(job.out.name for job in jobs) or True
    )

    def train(at_least: float | None, *only: str) -> list[str]:
        started.clear()
        item = {"tag": recipe, "seeds": [0, 1, 2], "at_least": at_least}
        assert train_queue(tmp_path / "runs", path=write_queue(tmp_path, [item]), only=only)
        return [name.removeprefix("idpa_cnn.idx.seed") for name in started]

    assert train(60.0) == ["2"]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and "idx.yaml, seed 0: left out: the zoo has it, 60.00%" in said[0]
    assert train(60.0, recipe) == train(60.1) == train(None) == ["0", "1", "2"]
    assert not capsys.readouterr().out
    raw["recipe"] = load_recipe(recipe).model_dump(mode="json")  # below the aim, but training would repeat it
    assert train(60.1) == train(None) == ["2"]
    raw["recipe"] = load_recipe(recipe, ["epochs=7"]).model_dump(mode="json")
    assert train(60.1) == ["0", "1", "2"]


def test_runs_stopped_in_their_first_epoch_come_first(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe,) = write_recipes(tmp_path, data, "idx")
    item = {"tag": recipe, "seeds": [0, 1, 2]}
    stopped = tmp_path / "runs" / "idpa_cnn.idx.seed1"
    (stopped / "checkpoints" / "step-00000005").mkdir(parents=True)
    (stopped / "recipe.yaml").write_text(resolved_yaml(load_recipe(recipe, ["seed=1"])))
    order: list[str] = []
    monkeypatch.setattr(
        module, "run_jobs", lambda jobs, *_: order.extend(job.out.name[-1] for job in jobs) or True
    )
    assert train_queue(tmp_path / "runs", path=write_queue(tmp_path, [item]))
    assert order == ["1", "0", "2"]


def test_progress_counts_the_epochs_of_the_given_settings(tmp_path: Path, data: Path) -> None:
    (recipe,) = write_recipes(tmp_path, data, "idx")
    items = read_queue(write_queue(tmp_path, [{"tag": recipe}]))
    assert queue_state(items, tmp_path, ["epochs=7"])[0].epochs == 7


def test_mean_and_standard_deviation_by_hand() -> None:
    runs = {
        seed: {"metrics": {"test": {"top1": top1, "n": 100}}}
        for seed, top1 in ((0, 90.0), (1, 92.0), (2, 94.0))
    }
    summary = seeds_summary("a.b", runs, 5)
    assert summary["test"] == {"values": [90.0, 92.0, 94.0], "mean": 92.0, "sd": 2.0, "n": 100}
    assert "validation" not in summary
    assert "sd" not in seeds_summary("a.b", {0: runs[0]}, 5)["test"]


@pytest.mark.parametrize(("seeds", "overrides"), [([0, 0], []), ([], []), ([1], ["seed=2"])])
def test_seeds_that_cannot_be(tmp_path: Path, seeds: list[int], overrides: list[str]) -> None:
    with pytest.raises(RecipeError, match="--seeds"):
        train_seeds("idpa_cnn.mnist", seeds, overrides, out=tmp_path)
