"""Every recipe, run for a few steps on images of its data set's shape: it runs, and its loss falls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capszoo.data import ImageSet, dataset_spec
from capszoo.data.sets import sized
from capszoo.data.sources import compose
from capszoo.data.specs import Side, both_sides
from capszoo.errors import WeightsError
from capszoo.recipes.config import BACKBONE, list_profiles, list_recipes, load_recipe
from capszoo.recipes.train import train
from capszoo.recipes.training import setup
from tests.support import packed
from tests.support.recipes import records

#: Networks whose updates take long: fewer images. (batch, images, epochs)
SCALES = {
    ("encapnet_v2", "encapnet_v3"): (8, 16, 4),
    ("capsnet6_em",): (10, 10, 16),  # 16 updates on 32 images teach it nothing
    ("capsnet6", "capsnet_em", "capsnet_dynamic_multimnist", "encapnet", "idpa_multimnist"): (8, 32, 4),
    ("",): (16, 64, 6),
}
#: Nets that a few updates at the recipe's own rate, made for thousands with a longer warm-up, shake up: a tenth of it.
GENTLE = ("cnn_multimnist_fc", "encapnet_v3", "resnet32_routingpool")


def digits(root: Path, count: int) -> ImageSet:
    found = packed(root, "mnist")
    some = torch.arange(0, 1000, 1000 // count)[:count]  # of every class, which the first 32 are not
    if count < 32:
        some = found.labels.argsort(stable=True)[some + 500 // count]
    return found.subset(some, "train")


def patterns(name: str, count: int, size: int | None, resize: int | None) -> ImageSet:
    """Images of a named set's shape: a coarse pattern per class, under noise."""
    spec = dataset_spec(name)
    side: Side = spec.side or spec.input_size[1]
    if size or resize or spec.side:
        spec, side = sized(spec, size, resize)
    generator = torch.Generator().manual_seed(0)
    classes = 4  # no more, so that each has images
    spec = replace(spec, label_names=tuple(f"class {k}" for k in range(classes)))
    labels = torch.arange(count) % classes
    coarse = torch.rand(classes, spec.input_size[0], 4, 4, generator=generator)
    shown = torch.nn.functional.interpolate(coarse, size=both_sides(side))[labels]
    noise = torch.rand(shown.shape, generator=generator)
    return ImageSet(spec, "train", (255 * (0.8 * shown + 0.2 * noise)).to(torch.uint8), labels)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_recipes())
def test_loss_falls(name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = "short" if "short" in list_profiles(name) else None
    recipe = load_recipe(name, profile=profile)
    batch, count, epochs = next(scale for starts, scale in SCALES.items() if recipe.arch.startswith(starts))

    def few(data: str, split: str, *args: Any, **kwargs: Any) -> ImageSet:
        spec = dataset_spec(data)
        if spec.base:
            return compose(spec, split, digits(root, count))
        if data == "mnist":
            return replace(digits(root, count), split=split)
        return replace(patterns(data, count, kwargs.get("size"), kwargs.get("resize")), split=split)

    monkeypatch.setattr(setup, "load_dataset", few)
    changes = [f"epochs={epochs}", f"batch_size={batch}", "data.val_size=0", "precision=fp32"]
    # of 224 pixels: an update takes a minute, and so many do not fit a batch
    if recipe.data.name == "h_imagenet":
        changes += ["data.size=96", "data.augment.resize=112"]
    if recipe.arch in GENTLE:
        changes.append(f"optimizer.lr={recipe.optimizer.lr / 10}")
    changes += ["schedule={name: cosine, warmup_epochs: 1}", "checkpoint_every=null"]
    recipe = load_recipe(name, changes, profile=profile)
    try:
        result = train(recipe, out=tmp_path / "run", data=tmp_path)
    except WeightsError as error:
        if recipe.init is None or not recipe.init.weights.startswith(BACKBONE):
            raise
        pytest.skip(f"the Hub's weights of its backbone are not available: {error}")
    losses = [record["train_loss"] for record in records(tmp_path / "run")]
    assert result["finished"] and len(losses) == epochs
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
