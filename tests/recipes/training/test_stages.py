"""Stages of the input size: what is carried over, what starts anew, exact resuming, and one line where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import capszoo
from capszoo.data import Batches, load_dataset, split_validation
from capszoo.recipes.config import RecipeError, load_recipe
from capszoo.recipes.train import train
from capszoo.recipes.training.checkpoints import latest_checkpoint, newest_position
from capszoo.recipes.training.setup import RunData
from capszoo.recipes.training.stages import (
    all_stages,
    optimizer_state_without,
    reset_batch_norm,
    stage_at,
    staged_data,
)
from tests.support.errors import refuses
from tests.support.recipes import MEASURES, assert_same_weights, records, staged_recipe


def test_stages_cover_the_run() -> None:
    stages = all_stages(staged_recipe())
    assert [(s.size, s.first_epoch, s.end_epoch, s.cutout) for s in stages] == [
        (20, 0, 1, 5),
        (24, 1, 2, None),
        (None, 2, 4, None),
    ]
    assert [stage_at(staged_recipe(), epoch).number for epoch in range(6)] == [0, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("stop_after", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_resume_in_any_stage_is_bit_exact(tiny_mnist: Path, tmp_path: Path, stop_after: int) -> None:
    """Three updates an epoch: runs stop within stages, and at the first update of each."""
    recipe = staged_recipe()
    whole = train(recipe, out=tmp_path / "whole", data=tiny_mnist)
    parts = train(recipe, out=tmp_path / "parts", data=tiny_mnist, stop_after=stop_after)
    while not parts["finished"]:
        parts = train(recipe, out=tmp_path / "parts", data=tiny_mnist, stop_after=stop_after)
    assert_same_weights(whole["weights"], parts["weights"])
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    assert [record["size"] for record in records(tmp_path / "whole")] == [20, 24, 28, 28]


def test_what_starts_anew(tiny_mnist: Path, tmp_path: Path) -> None:
    recipe = staged_recipe(arch="idpa_resnet")
    train(recipe, out=tmp_path, data=tiny_mnist, stop_after=3)
    before, _ = latest_checkpoint(tmp_path)
    train(recipe, out=tmp_path, data=tiny_mnist, stop_after=1)
    after, _ = latest_checkpoint(tmp_path)
    assert before is not None and after is not None
    weights, old = after.weights["model"], before.weights["model"]
    changed = [key for key in weights if weights[key].shape != old[key].shape]
    assert changed == ["capsules.classes.weight"]
    counted = [value for key, value in weights.items() if key.endswith("num_batches_tracked")]
    assert counted and all(int(value) == 1 for value in counted), "BatchNorm's statistics start anew"
    counts = [int(value) for key, value in old.items() if key.endswith("num_batches_tracked")]
    assert set(counts) == {3}
    # After the first update of a stage the average has no part of the former stage's.
    key = next(key for key, value in weights.items() if value.is_floating_point() and "running" not in key)
    assert torch.equal(after.weights["ema"][key], weights[key])
    assert not torch.equal(before.weights["ema"][key], old[key])


def test_momentum_of_the_resampled_tensor_starts_anew() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer_state_without(optimizer, net, optimizer.state_dict(), ("1.weight",))
    assert set(state["state"]) == {0, 1, 3} and set(optimizer.state_dict()["state"]) == {0, 1, 2, 3}
    optimizer.load_state_dict(state)


def test_a_network_without_a_rule_is_refused_before_training(tiny_mnist: Path, tmp_path: Path) -> None:
    recipe = staged_recipe(arch="capsnet_dynamic", model_args={}, stages=[{"size": 24, "epochs": 1}])
    with refuses(RecipeError, names=["class_caps.weight"]):
        train(recipe, out=tmp_path / "run", data=tiny_mnist)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": [{"size": 20, "epochs": 3}]}, ("1", "4", "30%", "epochs")),
        ({"early_stop": 2}, "early_stop"),
        ({"stages": [{"size": 20, "epochs": 1, "cutuot": 3}]}, "cutout"),
    ],
)
def test_stages_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with refuses(RecipeError, names=message):
        load_recipe({"arch": "idpa_cnn", "tag": "mnist", **MEASURES, **changes})


def test_cropped_images_are_refused(tiny_mnist: Path) -> None:
    """A stage would show whole images, and the next one crops of them."""
    images = load_dataset("mnist", "train", tiny_mnist)
    spec = replace(images.spec, input_size=(1, 24, 24))  # cropped from 28 pixels
    cropped: Any = replace(images, spec=spec)
    recipe = staged_recipe()
    with refuses(RecipeError, names=["smallNORB"]):
        staged_data(recipe, RunData(cropped, cropped, None, {}), stage_at(recipe, 0))


def test_networks_that_pool_need_no_rule(tiny_mnist: Path, tmp_path: Path) -> None:
    recipe = staged_recipe(
        arch="resnet20_routingpool", model_args={"depth": 8}, stages=[{"size": 20, "epochs": 2}]
    )
    assert train(recipe, out=tmp_path, data=tiny_mnist)["finished"]


def test_threads_are_restored(tiny_mnist: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        train(staged_recipe(), out=tmp_path, data=tiny_mnist, stop_after=1, threads=threads + 1)
        assert torch.get_num_threads() == threads, "the process has its number again"
        train(staged_recipe(), out=tmp_path, data=tiny_mnist, stop_after=1)
        assert torch.get_num_threads() == threads
        assert newest_position(tmp_path)["threads"] == threads + 1, "a resumed run has the run's number"
    finally:
        torch.set_num_threads(threads)


def test_alternating_flips_show_both_sides_in_two_epochs(tiny_mnist: Path) -> None:
    recipe = staged_recipe(data={"name": "mnist", "augment": {"flip": "alternating"}})
    images = load_dataset("mnist", "train", tiny_mnist)
    batches = Batches(images, 120, train=True, augment=recipe.data.augment.build())
    shown = []
    for epoch in range(4):
        (batch,) = batches.epoch(epoch)
        keys = {}
        for pixels in batch.pixels:
            straight, mirrored = pixels.numpy().tobytes(), pixels.flip(-1).contiguous().numpy().tobytes()
            keys[min(straight, mirrored)] = straight < mirrored
        shown.append(keys)
    assert len(shown[0]) == 120
    assert all(shown[0][key] != shown[1][key] for key in shown[0] if key in shown[1])
    assert shown[0] == shown[2] and shown[1] == shown[3]
    assert 30 < sum(shown[0].values()) < 90


@pytest.mark.slow
@pytest.mark.usefixtures("full_data")
def test_carrying_over_keeps_the_answers() -> None:
    """idpa_resnet at 32 pixels, and carried over to 28, give one answer on 90% of 1,000 resized validation images.

    28 to 32 is a step of `idpa_resnet_cifar100`'s recipe. BatchNorm's statistics are estimated anew at 28 pixels, as
    training does.
    """
    whole = load_dataset("cifar10", "train")
    _, images = split_validation(whole, 1000, 0)
    large = capszoo.create_model("idpa_resnet.cifar10", pretrained=True).eval()
    small = capszoo.create_model("idpa_resnet", img_size=28)
    weights, _ = small.fit_to_size(large.state_dict(), 32)
    small.load_state_dict(weights)
    resized = images.resized(28)  # type: ignore[union-attr]
    resized = replace(resized, spec=replace(resized.spec, input_size=(3, 28, 28)))

    def answers(net: torch.nn.Module, data: Any) -> torch.Tensor:
        return torch.cat([net(batch.images).argmax(1) for batch in Batches(data, 250).epoch()])

    reset_batch_norm(small)
    for module in small.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # a plain mean over the batches
    with torch.inference_mode():
        answers(small.train(), resized)
        agreement = (answers(small.eval(), resized) == answers(large, images)).float().mean()
    assert agreement >= 0.9


def test_a_later_stage_keeps_the_statistics_of_frozen_norms() -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2), torch.nn.Conv2d(2, 2, 1), torch.nn.BatchNorm2d(2)
    )
    frozen, trained = net[1], net[3]
    frozen.requires_grad_(False)
    for norm in (frozen, trained):
        norm.running_mean.fill_(5)
    reset_batch_norm(net)
    assert frozen.running_mean.tolist() == [5, 5] and trained.running_mean.tolist() == [0, 0]
