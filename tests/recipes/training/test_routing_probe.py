"""Routing in the course of training, and several runs in one figure: what is recorded, drawn, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
import torch
from PIL import Image

import capszoo
from capszoo.checkpoint import model_from_file
from capszoo.data import Batches, load_dataset, split_validation
from capszoo.errors import CapszooError, UsageError
from capszoo.explain import plotting
from capszoo.explain.routing_stats import routing_stats
from capszoo.recipes.config import Recipe, RecipeError
from capszoo.recipes.evaluation.plots import draw_routing_probe, draw_runs, shown_epochs
from capszoo.recipes.train import train
from capszoo.recipes.training.history import find_runs
from capszoo.recipes.training.routing_probe import RoutingProbe
from tests.support.command import fails, succeeds
from tests.support.errors import assert_names, refuses
from tests.support.recipes import assert_same_weights, records, tiny_recipe

DATA = {"name": "mnist", "val_size": 20}


def watched_recipe(**changes: Any) -> Recipe:
    return tiny_recipe(**{"data": DATA, "batch_size": 50, "routing_images": 15, **changes})


@pytest.fixture
def runs(tiny_mnist: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run with the probe, and the same one without."""
    for name, more in (("watched", {}), ("plain", {"routing_images": 0})):
        train(watched_recipe(**more), out=tmp_path / name, data=tiny_mnist, cpu=True)
    return tmp_path / "watched", tmp_path / "plain"


def test_the_record_of_credit_has_its_negative_share(tiny_mnist: Path) -> None:
    net = capszoo.create_model("resnet20_heinsen", in_chans=1, img_size=28)
    _, validation = split_validation(load_dataset("mnist", "train", tiny_mnist), 20, 0)
    record = RoutingProbe(watched_recipe(), net, validation).measure(net)
    assert record["entropy"] == [None] * 3 and len(record["dead"]) == 3
    assert all(0 < share < 1 for share in record["negative"])


def test_a_run_records_its_routing_and_is_not_changed_by_it(
    runs: tuple[Path, Path], tiny_mnist: Path, tmp_path: Path
) -> None:
    watched, plain = runs
    assert_same_weights(*(out / "resnet20_routingcaps.mnist.safetensors" for out in runs))
    assert [record["epoch"] for record in records(watched)] == [1, 2]
    assert "routing" not in records(plain)[0]

    # The last epoch's record is what the finished weights give on the same images.
    net, _ = model_from_file(watched / "resnet20_routingcaps.mnist.safetensors")
    _, validation = split_validation(load_dataset("mnist", "train", tiny_mnist), 20, 0)
    some = Batches(validation.subset(torch.arange(15)), 15)
    found = routing_stats(net, ((batch.images, batch.labels) for batch in some.epoch()))
    last = records(watched)[-1]["routing"]
    assert last["n"] == 15 and found.curve and last["dead"] == [layer.dead for layer in found.layers]
    assert last["entropy"] == pytest.approx([layer.entropy for layer in found.layers], rel=1e-3)
    assert last["share"] == pytest.approx(found.curve.share, rel=1e-3, abs=0.1)
    lengths = [
        [-1 if length is None else length for length in side] for side in (last["length"], found.curve.length)
    ]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-3)
    assert records(watched)[0]["routing"] != last

    written = succeeds("curves", watched, "--what", "routing", "--out", tmp_path / "fig2.png")
    assert "fig2.png" in written and Image.open(tmp_path / "fig2.png").size[0] > 600
    unwatched = ("curves", plain, "--what", "routing", "--out", tmp_path / "no.png")
    fails(1, *unwatched, names=["routing", "statistics"])
    assert not (tmp_path / "no.png").exists()


def test_what_cannot_be_probed_is_said_before_the_first_update(tiny_mnist: Path, tmp_path: Path) -> None:
    for more, message in (
        ({"data": {"name": "mnist", "val_size": 0}}, ("validation", "images")),
        ({"arch": "resnet18", "model_args": {}, "loss": {"name": "cross_entropy"}}, ("capsule", "network")),
    ):
        with refuses(RecipeError, names=message):
            train(watched_recipe(**more), out=tmp_path / "run", data=tiny_mnist, cpu=True)
        assert not (tmp_path / "run").exists()


def test_epochs_that_are_shown() -> None:
    assert shown_epochs(list(range(1, 201))) == [1, 6, 34, 200]
    for few in ([3], [1, 2], [1, 2, 3]):
        assert shown_epochs(few) == few


def write_run(folder: Path, batch_size: int, losses: list[float]) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"batch_size: {batch_size}\n")
    lines = [
        {"epoch": k, "step": 5 * k, "train_loss": loss, "train_top1": 50 + k}
        for k, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def lines_of(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[Any]:
    """The figures that a module saves, kept as they are drawn."""
    kept: list[matplotlib.figure.Figure] = []
    save = module.save
    monkeypatch.setattr(module, "save", lambda figure, path: (kept.append(figure), save(figure, path))[1])
    return kept


def test_runs_in_one_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = lines_of(monkeypatch, plotting)
    one = write_run(tmp_path / "one", 10, [3.0, 2.0])
    three = write_run(tmp_path / "three", 20, [4.0, 2.5, 1.5])
    draw_runs(find_runs([one, three]), tmp_path / "a.png", x="images", log=True)
    loss, top1 = kept[0].axes
    drawn = [[list(map(float, data)) for data in line.get_data()] for line in loss.lines]
    assert drawn == [[[50, 100], [3.0, 2.0]], [[100, 200, 300], [4.0, 2.5, 1.5]]]
    assert [line.get_label() for line in top1.lines] == ["one, training", "three, training"]
    assert loss.get_yscale() == "log" and loss.get_xlabel() == "training images seen"
    draw_runs(find_runs([one, "resnet20_routingcaps.mnist"]), tmp_path / "b.svg")
    numbers = (tmp_path / "a.csv").read_text().splitlines()
    assert numbers[0].startswith("run,epoch,images,train_loss") and numbers[1].startswith("one,1,50,3.0,")
    labels = [line.get_label() for line in kept[1].axes[1].lines]
    assert labels == ["one, training", "resnet20_routingcaps.mnist, validation"]
    same = write_run(tmp_path / "other" / "one", 10, [1.0])
    assert list(find_runs([one, same])) == [str(one), str(same)], "alike: the whole path"


def test_mistakes(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", 10, [3.0, 2.0])
    out = ("--out", tmp_path / "x.png")
    fails(1, "curves", tmp_path / "none", *out, names=["folder", "checkpoint"])
    fails(1, "curves", write_run(tmp_path / "new", 1, []), *out, names=["epoch", "ended"])
    fails(2, "curves", one, "--what", "routin", *out, names=["routing"])
    fails(2, "curves", one, "--x", "image", *out, names=["images"])
    fails(2, "curves", one, "--out", tmp_path / "x.doc", names=["write", "file"])
    line = fails(2, "curves", "resnet20_routingcaps.mnist", "--x", "images", *out)
    assert_names(line, ["many", "images"])
    assert {path.name for path in tmp_path.iterdir()} == {"one", "new"}, "nothing was written"
    text = succeeds("curves", one, *out)
    assert "one, epoch 2: training loss 2, training accuracy 52" in text and (tmp_path / "x.png").is_file()
    with pytest.raises(UsageError):
        draw_runs(find_runs(["resnet20_routingcaps.mnist"]), tmp_path / "y.png", x="images")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"epoch": 3, "step": 1, "train_loss": "x"}, "record 3 is damaged (train_loss: Input should be"),
        ({"epoch": 3, "step": 1, "routing": 5}, "record 3 is damaged (routing: Input should be"),
        (
            {"epoch": 3, "step": 1, "routing": {"share": []}},
            "record 3 is damaged (routing.share: List should",
        ),
        ({"epoch": 3, "step": 1, "routing": {"share": [1.0]}}, "share and length differ in length"),
    ],
)
def test_damaged_records_are_one_line(tmp_path: Path, record: Any, said: str) -> None:
    run = write_run(tmp_path / "run", 10, [3.0, 2.0])
    with (run / "metrics.jsonl").open("ab") as file:
        # as of a line that was cut by a kill, nothing is left of lines that hold no object
        file.write(b'[1]\n5\n\xff\n{"epoch"\n' + json.dumps(record).encode())
    for what in ("training", "routing"):
        line = fails(1, "curves", run, "--what", what, "--out", tmp_path / "x.png")
        assert said in line and "metrics.jsonl: " in line
    (run / "recipe.yaml").write_text("batch_size: .inf\n")
    fails(1, "curves", run, "--out", tmp_path / "x.png", names=["recipe", "run"])


def test_panels_show_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = lines_of(monkeypatch, plotting)
    routing = [{"share": [60.0, 40.0], "length": [None, 2.0 * k]} for k in (1, 2)]
    made = [{"epoch": k, "routing": values} for k, values in enumerate(routing, 1)]
    draw_routing_probe({"a": made, "b": made[:1]}, tmp_path / "x.png")
    titles = [axes.get_title() for axes in kept[0].axes if axes.get_title()]
    assert titles == ["a, epoch 1", "a, epoch 2", "b, epoch 1"]
    bars = [axes for axes in kept[0].axes if axes.patches]
    assert [patch.get_height() for patch in bars[0].patches] == [60.0, 40.0]
    lines = [line.get_xydata().tolist() for axes in kept[0].axes for line in axes.lines]
    assert lines == [[[0.5, 2.0]], [[0.5, 4.0]], [[0.5, 2.0]]], "no votes, no length"
    with refuses(CapszooError, names=["routing", "statistics"]):
        draw_routing_probe({"a": made, "b": [{"epoch": 1}]}, tmp_path / "y.png")
