"""What counts as recognised, and that recipes and data sets agree on the keys of augmentation."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from capszoo import create_model
from capszoo.data import Augment, Batches, ImageSet, dataset_spec
from capszoo.data.sources import compose
from capszoo.errors import UsageError
from capszoo.losses import margin_loss
from capszoo.recipes.config import AugmentConfig, Recipe, RecipeError, load_recipe
from capszoo.recipes.evaluate import evaluate
from capszoo.recipes.evaluation.metrics import all_right, count_correct
from capszoo.recipes.evaluation.report import measure
from capszoo.recipes.evaluation.target import prepare, score_threshold
from capszoo.recipes.train import TrainingError, train
from capszoo.recipes.training.run_folder import check_run
from capszoo.recipes.training.step import TrainStep
from tests.support.errors import refuses

SMALL = {"arch": "some_net", "tag": "mnist", "data": {"name": "mnist"}, "epochs": 2}
LABELS = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1]])
LENGTHS = torch.tensor([[0.9, 0.1, 0.4, 0.2], [0.1, 0.8, 0.3, 0.2], [0.1, 0.8, 0.7, 0.9]])


def test_an_image_counts_where_exactly_its_labels_are_found() -> None:
    assert all_right(LENGTHS, LABELS).tolist() == [False, True, False], "one missing; right; one too many"
    assert all_right(LENGTHS, LABELS, threshold=0.35).tolist() == [True, True, False]
    assert all_right(LENGTHS[::2], LABELS[::2], count=2).tolist() == [True, False], "the highest two"
    assert all_right(LENGTHS, torch.tensor([0, 1, 1])).tolist() == [True, True, False]
    assert score_threshold("margin") == 0.5 and score_threshold("bce") == 0.0


def test_a_batch_has_an_image() -> None:
    with refuses(UsageError, names=["batch_size", "1", "0"]):
        evaluate("resnet20_routingcaps.mnist", batch_size=0)


class Oracle(nn.Module):
    """Finds the labels by the mark that each digit's corner bears: 10 times its class and 10."""

    def __init__(self, wrong: int = 0) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, images: Tensor) -> Tensor:
        pixels = (images * 0.3118 + 0.1291) * 255
        seen = torch.stack([(pixels - 10 * k - 10).abs().flatten(1).amin(1) < 0.5 for k in range(10)], dim=1)
        seen[: self.wrong, 0] ^= True
        return torch.where(seen, 3.0, -3.0)


def test_accuracy_on_a_set_of_several_labels() -> None:
    labels = torch.arange(40) % 10
    images = torch.zeros(40, 1, 28, 28, dtype=torch.uint8)
    images[:, 0, 14, 14] = (10 * labels + 10).byte()
    digits = ImageSet(dataset_spec("mnist"), "test", images, labels)
    test = compose(dataset_spec("diverse_multimnist"), "test", digits)
    overlapping = test.images.flatten(1).count_nonzero(1) < test.labels.sum(1)  # one mark upon the other
    test = test.subset((~overlapping).nonzero()[:, 0])
    (right,), (n,) = count_correct(Oracle(), Batches(test, 16), threshold=0.0).tolist()
    assert right == n == len(test) > 30
    (right,), _ = count_correct(Oracle(wrong=1), Batches(test, 16), threshold=0.0).tolist()
    assert right == n - 3, "one of each of three batches"


def test_a_module_keeps_its_modes_and_is_measured_in_float32() -> None:
    net = create_model("resnet20_routingcaps", depth=8)
    net.train()
    frozen = next(module for module in net.modules() if isinstance(module, nn.BatchNorm2d))
    frozen.eval()
    allowed: list[bool] = []
    net.register_forward_pre_hook(lambda *_: allowed.append(torch.backends.cudnn.allow_tf32))
    images = ImageSet(
        dataset_spec("mnist"), "test", torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.arange(4)
    )
    assert evaluate(net, images, device="cpu")["n"] == 4
    assert net.training and not frozen.training and allowed and not any(allowed)
    allowed.clear()
    measure(prepare(net, images, device="cpu"))
    assert allowed and not any(allowed)


def test_augment_keys_are_those_of_the_data_package() -> None:
    assert AugmentConfig().build() == Augment()
    given = dict(
        shift=1, flip="alternating", pad_mode="reflect", cutout=8, erase=4, shift_in_margin=True, resize=34
    )
    given |= dict(squeeze=0.2, tilt=30.0, rotation=5.0, shear=0.1, scale=(0.9, 1.1), hue=0.2)
    given |= dict(brightness=0.1, contrast=0.2, saturation=0.3)
    assert asdict(AugmentConfig(**given).build()) == given and given.keys() == asdict(Augment()).keys()


def test_mistakes_name_the_key() -> None:
    for change, names in (
        ("data.augment.hue=0.7", ["data.augment.hue"]),
        ("data.augment.rotaton=5", ["rotation"]),
        ("data.augment.scale=[1.2, 0.8]", ["smallest", "factor"]),
        ("data.name='hf:'", ["followed", "repository"]),
    ):
        with refuses(RecipeError, names=names):
            load_recipe(SMALL, [change])


@pytest.mark.parametrize(
    ("arch", "data", "loss"),
    [
        pytest.param("resnet20_routingpool", "diverse_multimnist", {"name": "bce"}, marks=pytest.mark.slow),
        pytest.param("capsnet_dynamic", "affnist", {"name": "margin"}, marks=pytest.mark.slow),
        ("capsnet_dynamic", "multimnist", {"name": "margin", "reconstruction": 0.0005}),
    ],
)
def test_composed_sets_train(
    tiny_mnist: Path, tmp_path: Path, arch: str, data: str, loss: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = SMALL | {"arch": arch, "tag": data, "epochs": 1, "batch_size": 8, "loss": loss}
    tree |= {"data": {"name": data, "val_size": 20}}
    if arch == "capsnet_dynamic":
        tree["model_args"] = {"stem_chans": 16, "caps_types": 2, "decoder": "reconstruction" in loss}
    result = train(load_recipe(tree), [], tmp_path / "run", tiny_mnist, cpu=True)
    assert result["step"] == 12 and result["test"]["n"] == 40
    again = evaluate(result["weights"], data=tiny_mnist)
    assert (again["errors"], again["dataset"]) == (result["test"]["errors"], data)
    assert again["accuracy"] == ("exact set" if "multi" in data else "top-1")
    assert f"test: {again['accuracy']} {again['top1']:.2f}%" in capsys.readouterr().out


class Mirror(nn.Module):
    """Rebuilds from each class's pose a constant image of that value."""

    def forward_poses(self, images: Tensor) -> tuple[Tensor, Tensor]:
        poses = torch.linspace(0.1, 1.0, 10).expand(len(images), 10)[..., None]
        return poses[..., 0], poses

    def reconstruct(self, poses: Tensor, target: Tensor) -> Tensor:
        return poses[torch.arange(len(poses)), target].view(-1, 1, 1, 1).expand(-1, 1, 2, 2)


def test_each_digit_is_rebuilt_alone() -> None:
    recipe = Recipe.model_validate({**SMALL, "loss": {"name": "margin", "reconstruction": 1.0}})
    labels = torch.zeros(2, 10)
    labels[0, [1, 4]], labels[1, 2] = 1.0, 1.0
    part_labels = torch.tensor([[1, 4], [2, -1]])
    parts = torch.tensor([[51, 102], [51, 0]], dtype=torch.uint8).view(2, 2, 1, 1, 1).expand(2, 2, 1, 2, 2)
    pixels = parts.sum(1).to(torch.uint8)
    loss, scores = TrainStep(Mirror(), recipe)(torch.zeros(2, 1, 2, 2), labels, pixels, parts, part_labels)
    # Class k is rebuilt as (k + 1) / 10: 0.2 against 0.2, 0.5 against 0.4, 0.3 against 0.2, nothing against black.
    expected = 4 * (0.0**2 + 0.1**2 + 0.1**2) / 2
    assert float(loss - margin_loss(scores, labels)) == pytest.approx(expected, abs=1e-6)


def test_a_run_from_before_a_key_was_new_goes_on(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(SMALL)
    old = recipe.model_dump(mode="json")
    del old["data"]["size"]
    old["data"]["augment"] = {"shift": 0, "flip": False}
    (tmp_path / "recipe.yaml").write_text(json.dumps(old))
    check_run(recipe, tmp_path, True)
    (tmp_path / "metrics.jsonl").write_text("{}\n")  # an epoch has ended
    old["data"]["augment"] = {"shift": 2, "flip": False}
    (tmp_path / "recipe.yaml").write_text(json.dumps(old))
    with refuses(TrainingError, names=["shift", "2"]):
        check_run(recipe, tmp_path, True)
