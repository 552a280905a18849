"""Accuracy of a model on a data set: `python -m capszoo.recipes.evaluate resnet20_routingcaps.mnist --data FOLDER`.

For a name with weights the data set is that of its metadata, and the figure is held against the stated one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import capszoo
from capszoo.data import Batches, DataError, ImageSet, StreamedSet, load_dataset
from capszoo.models._pretrained import WeightsError, WeightsInfo, bundled_tags, load_safetensors, sha256_of

__all__ = [
    "all_right",
    "count_correct",
    "create_for",
    "evaluate",
    "main",
    "model_from_file",
    "score_threshold",
]


def all_right(scores: Tensor, labels: Tensor, count: int | None = None, threshold: float = 0.5) -> Tensor:
    """Which images are recognised: bool [b].

    Arguments:
        scores: [b, n].
        labels: classes [b]; or [b, n] with a one for each class that is there, all of which must be found and no other.
        count: how many classes each image has, where that is known: the highest so many scores are the answer.
        threshold: else the scores above it are the answer (0.5 for capsule lengths, 0 for logits).
    """
    if labels.dim() == 1:
        return scores.argmax(1) == labels
    if count:
        answer = torch.zeros_like(labels).scatter_(1, scores.topk(count, dim=1).indices, 1.0)
    else:
        answer = (scores > threshold).to(labels.dtype)
    return (answer == labels).all(1)


def score_threshold(loss: str) -> float:
    """The score from which a class is there: half a capsule length, or a logit of zero, by the loss trained with."""
    return 0.5 if loss in ("margin", "spread") else 0.0


@torch.no_grad()
def count_correct(
    net: nn.Module,
    batches: Batches,
    autocast: AbstractContextManager[Any] | None = None,
    threshold: float = 0.5,
) -> Tensor:
    """Run the net in eval mode over one epoch; returns int64 (right, all) [2] on the data's device.

    `threshold` counts where images have several labels, in a number that varies: see `all_right`.
    """
    was_training = net.training
    net.eval()
    totals = torch.zeros(2, dtype=torch.int64, device=batches.device)
    with autocast or nullcontext():
        for batch in batches.epoch():
            images = batch.images.contiguous(memory_format=torch.channels_last)
            known = batches.data.spec.labels_per_image
            totals[0] += all_right(net(images), batch.labels, known, threshold).sum()
            totals[1] += len(batch.labels)
    net.train(was_training)
    return totals


def create_for(
    architecture: str,
    num_classes: int,
    input_size: tuple[int, int, int],
    model_args: Mapping[str, Any],
    create: Callable[..., nn.Module] | None = None,
) -> nn.Module:
    """Create a net for a data set; timm's own architectures work too (those that take no `img_size` get none).

    `create` is called with the arguments alone; None creates the architecture with random weights.
    """
    args: dict[str, Any] = {"num_classes": num_classes, "in_chans": input_size[0]}
    if architecture in capszoo.list_models():
        args["img_size"] = input_size[1:]
    create = create or partial(capszoo.create_model, architecture)
    return create(**{**args, **model_args})


def model_from_file(path: str | Path) -> tuple[nn.Module, WeightsInfo]:
    """Build a trained model from `<arch>.<tag>.safetensors` (or its `.json`), the two lying side by side.

    Raises `WeightsError` where the sha256 differs from the metadata's.
    """
    weights = Path(path).with_suffix(".safetensors")
    metadata = weights.with_suffix(".json")
    for file in (weights, metadata):
        if not file.is_file():
            raise WeightsError(f"{file}: no such file; weights and their metadata must lie side by side")
    info = WeightsInfo.from_json(metadata)
    if sha256_of(weights) != info.sha256:
        raise WeightsError(
            f"{weights}: sha256 differs from its metadata's; the file is damaged or another one"
        )
    model = create_for(info.architecture, info.num_classes, info.input_size, info.model_args)
    model.load_state_dict(load_safetensors(weights))
    return model.eval(), info


def _resolve(model: nn.Module | str | Path) -> tuple[nn.Module, WeightsInfo | None]:
    if isinstance(model, nn.Module):
        return model, None
    if Path(model).suffix in (".safetensors", ".json"):
        return model_from_file(model)
    name = str(model)
    if name not in bundled_tags():  # an architecture's default weights, or an error that names what exists
        net = capszoo.create_model(name, pretrained=True)
        cfg: Any = net.pretrained_cfg
        return net, bundled_tags().get(f"{cfg['architecture']}.{cfg['tag']}")
    return capszoo.create_model(name, pretrained=True), bundled_tags()[name]


def evaluate(
    model: nn.Module | str | Path,
    dataset: str | ImageSet | StreamedSet | None = None,
    split: str = "test",
    data: str | Path | None = None,
    *,
    batch_size: int = 500,
    device: str | torch.device | None = None,
) -> dict[str, Any]:
    """Top-1 accuracy, in float32 and eval mode; an image with several labels counts where exactly these are found.

    Arguments:
        model: a module, a name with weights (`resnet20_routingcaps.mnist`), or the path of a weights file.
        dataset: a name, or images in memory; None takes the data set the weights were trained on.
        split: "test", "train" or another split of the data set.
        data: folder of the data set; None asks `CAPSZOO_DATA`.
        device: None takes CUDA where there is one.

    Returns `{"model", "dataset", "split", "top1" (per cent), "errors", "n", "stated"}`; `stated` is the metadata's
    top1 for a whole test split, else None.
    """
    net, info = _resolve(model)
    if dataset is None:
        if info is None or "dataset" not in info.raw:
            raise DataError("name the data set: the model does not say which one it was trained on")
        dataset = str(info.raw["dataset"]["name"])
    recipe = info.raw.get("recipe", {}) if info else {}
    if isinstance(dataset, str):
        # As in training: the middle of images resized in the same way.
        trained = recipe.get("data", {}) if recipe.get("data", {}).get("name") == dataset else {}
        resize = trained.get("augment", {}).get("resize")
        images = load_dataset(dataset, split, data, size=trained.get("size"), resize=resize)
    else:
        images = dataset
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    mean, std = (info.mean, info.std) if info else (None, None)
    net = net.to(target).to(memory_format=torch.channels_last)
    batches = Batches(images.to(target), batch_size, mean=mean, std=std)
    threshold = score_threshold(recipe.get("loss", {}).get("name", "margin"))
    right, n = count_correct(net, batches, threshold=threshold).tolist()
    stated = info.raw.get("metrics", {}).get(split, {}) if info else {}
    return {
        "model": info.name if info else type(net).__name__,
        "dataset": images.spec.name,
        "split": images.split,
        "top1": round(100 * right / n, 4),
        "errors": n - right,
        "n": n,
        "stated": stated.get("top1") if stated.get("n") == n else None,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code: 0, or 1 for a failure or a figure that differs from the stated one."""
    parser = argparse.ArgumentParser(prog="python -m capszoo.recipes.evaluate", description=__doc__)
    parser.add_argument(
        "model", help="name with weights, or path of a .safetensors file with its .json beside it"
    )
    parser.add_argument("--dataset", help="default: the one the weights were trained on")
    parser.add_argument("--split", default="test", help="test (the default), train, …")
    parser.add_argument("--data", help="folder of the data set; default: CAPSZOO_DATA")
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--device")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    try:
        result = evaluate(
            args.model, args.dataset, args.split, args.data, batch_size=args.batch_size, device=args.device
        )
    except (DataError, WeightsError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['model']} on {result['dataset']} ({result['split']}, n={result['n']}): "
            f"top-1 {result['top1']:.2f}%, {result['errors']} wrong"
        )
    if result["stated"] is None:
        return 0
    # One image may fall on the other side where another processor rounds differently.
    same = abs(result["stated"] - result["top1"]) <= 100 * 2 / result["n"] + 1e-9
    if not args.json:
        print(f"stated in the metadata: {result['stated']:.2f}%: {'reproduced' if same else 'DIFFERS'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
