"""Use a model on image files: find it under whatever name it was given, and predict.

What ``capszoo predict`` and ``capszoo explain`` do, as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.models import is_model
from torch import Tensor, nn

from ._api import UnknownModel, create_model, default_device, list_models, list_pretrained
from ._suggest import unknown_name
from .errors import CapszooError, UsageError
from .models._builder import NO_SOURCE
from .models._metadata import WeightsError, check_demand, fitting
from .models._pretrained import WeightsInfo, checked_pair, is_hub_error, load_safetensors
from .preprocess import ImageLike, ImageTransform, as_image, is_image_like, model_transform
from .scores import probabilities, score_kind

__all__ = [
    "ImagePrediction",
    "NoWeights",
    "ScoredClass",
    "label_names",
    "load_model",
    "model_of_pair",
    "predict",
    "run_weights",
]


class NoWeights(CapszooError):
    """An architecture of the zoo that has no pretrained weights."""


def load_model(name: str, pretrained: bool = True, device: str | None = None, **kwargs: Any) -> nn.Module:
    """A model in eval mode, from a name or a path.

    Args:
        name: registered name, ``name.tag``, ``hf-hub:org/repo``, the folder of a finished training run, a folder with
            a ``config.json`` (timm's and the Hub's layout), or a ``.safetensors`` file beside its metadata.
        pretrained: load weights; False gives freshly initialised ones.
        device: where to put it; None is CUDA where there is one.
        **kwargs: as for :func:`capszoo.create_model`.

    Raises:
        UnknownModel: no such name.
        NoWeights: an architecture without weights.
        CapszooError: nothing there that could be loaded.
        WeightsError: weights that are damaged or do not fit.
    """
    path = Path(name.removeprefix("local-dir:"))
    if name.startswith("hf-hub:"):
        model = _from_hub(name, pretrained, kwargs)
    elif path.is_dir() or path.suffix == ".safetensors":
        model = _from_disk(path, pretrained, kwargs)
    elif "/" in name or name.startswith("local-dir:"):
        raise CapszooError(f"{path}: no such folder or .safetensors file", "check the path")
    else:
        if pretrained and name in list_models() and not list_pretrained(f"{name}.*"):
            raise NoWeights(
                f"no pretrained weights of {name} exist",
                "`capszoo list --pretrained` shows those that do; `capszoo train` makes them",
            )
        model = create_model(name, pretrained=pretrained, **kwargs)
    return model.eval().to(device or default_device())


def _from_hub(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    try:
        return create_model(name, pretrained=pretrained, **kwargs)
    except (WeightsError, UnknownModel):
        raise
    except Exception as e:
        if not is_hub_error(e) and not isinstance(e, ValueError):
            raise
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise CapszooError(
            f"{name}: the Hub gives no such model ({reason})", "check the name and the connection"
        ) from e


def _from_disk(path: Path, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    if path.is_dir() and (path / "config.json").is_file():
        return create_model(f"local-dir:{path}", pretrained=pretrained, **kwargs)
    weights, info = checked_pair(run_weights(path) if path.is_dir() else path)
    return model_of_pair(weights, info, pretrained, **kwargs)


def model_of_pair(weights: Path, info: WeightsInfo, pretrained: bool = True, **kwargs: Any) -> nn.Module:
    """The model that metadata describe, with the weights that :func:`checked_pair` found beside them.

    Raises:
        WeightsError: the metadata do not describe these weights, or no model.
    """
    if not is_model(info.architecture):
        raise WeightsError(f"{weights}: {unknown_name('architecture', info.architecture, list_models())}")
    about: dict[str, Any] = dict(
        NO_SOURCE,
        tag="",
        num_classes=info.num_classes,
        input_size=info.input_size,
        mean=info.mean,
        std=info.std,
        interpolation=info.interpolation,
        crop_pct=info.crop_pct,
        label_names=info.label_names,
    )
    described = {"num_classes": info.num_classes, "in_chans": info.input_size[0], **info.model_args}
    create = partial(create_model, info.architecture)
    if pretrained:
        state = load_safetensors(weights)
        check_demand(partial(create, pretrained_cfg_overlay=dict(about), **described), state, str(weights))
        about["state_dict"] = state
    with fitting(str(weights)):
        model = create(pretrained=pretrained, pretrained_cfg_overlay=about, **{**described, **kwargs})
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    cfg.pop("state_dict", None)
    cfg["capszoo"] = info.own_keys
    cfg["file"] = str(weights)  # where it came from; only now, for timm would read it
    return model


def run_weights(folder: Path) -> Path:
    """The weights that a finished run left in its folder, as ``<architecture>.<tag>.safetensors``."""
    found = [file for file in sorted(folder.glob("*.*.safetensors")) if file.with_suffix(".json").is_file()]
    if len(found) != 1:
        what = "several checkpoints" if found else "no weights with their metadata, and no config.json"
        raise CapszooError(f"{folder}: {what} in this folder", "name a .safetensors file, or finish the run")
    return found[0]


@dataclass(frozen=True)
class ScoredClass:
    """A class, its name where the weights have names, its score, and what the score means as a probability.

    Attributes:
        index: number of the class.
        label: its name.
        score: what the network gives (capsule length, activation or logit).
        probability: the score between 0 and 1, see `capszoo.scores`.
    """

    index: int
    label: str
    score: float
    probability: float


@dataclass(frozen=True)
class ImagePrediction:
    """The highest-scored classes of an image, best first; or why it could not be read.

    Attributes:
        image: path as given; ``"image"`` and a number for a picture or an array.
        top: the classes.
        size: width and height of the image as it was given.
        error: empty where all went well.
        score_kind: what the scores are, a key of `capszoo.scores.SCORE_KINDS`.
        notes: what a person should know of how the image was read.
    """

    image: str
    top: tuple[ScoredClass, ...] = ()
    size: tuple[int, int] = (0, 0)
    error: str = ""
    score_kind: str = "logits"
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name of the best class."""
        return self._best.label

    @property
    def probability(self) -> float:
        """The probability of the best class."""
        return self._best.probability

    @property
    def _best(self) -> ScoredClass:
        if not self.top:
            raise CapszooError(self.error or f"{self.image}: no classes", "look at `error` first")
        return self.top[0]

    def to_dict(self) -> dict[str, Any]:
        if self.error:
            return {"image": self.image, "error": self.error}
        found = {"image": self.image, "predictions": [asdict(scored) for scored in self.top]}
        return found | ({"notes": list(self.notes)} if self.notes else {})


def label_names(model: nn.Module) -> list[str]:
    """Names of a model's classes; their numbers where the weights have no names (or were made for other classes)."""
    count = int(getattr(model, "num_classes", 0))
    names = (getattr(model, "pretrained_cfg", None) or {}).get("label_names") or ()
    return [str(name) for name in names] if len(names) == count else [str(i) for i in range(count)]


def predict(
    model: nn.Module,
    images: ImageLike | Iterable[ImageLike],
    topk: int = 5,
    batch_size: int = 32,
    advance: Callable[[int], None] | None = None,
    transform: ImageTransform | None = None,
) -> list[ImagePrediction]:
    """Classify images; a file that cannot be read gets a prediction that says so.

    Args:
        model: in eval mode, on its device.
        images: one image or several: files, pictures, arrays (see `capszoo.preprocess.as_image`).
        topk: classes per image, at most as many as there are.
        batch_size: images per forward pass.
        advance: called with the number of images done after each batch.
        transform: how images are read; None takes `capszoo.preprocess.model_transform` of the model.

    Raises:
        UsageError: ``topk`` below 1, a model without classes, or an array that is no image.
    """
    labels = label_names(model)
    if topk < 1:
        raise UsageError(f"topk is {topk}", "give 1 or more")
    if not labels:
        raise UsageError(f"{type(model).__name__} has no classes", "create it with num_classes above 0")
    transform = transform or model_transform(model)
    pictures: list[ImageLike] = [images] if is_image_like(images) else list(images)  # type: ignore[list-item, arg-type]
    results: list[ImagePrediction] = []
    for start in range(0, len(pictures), batch_size):
        chunk = [
            (_image_name(image, i), image)
            for i, image in enumerate(pictures[start : start + batch_size], start)
        ]
        results.extend(_predict_chunk(model, transform, chunk, labels, min(topk, len(labels))))
        if advance:
            advance(len(chunk))
    return results


def _image_name(image: ImageLike, index: int) -> str:
    """A file's path, also that of a picture which Pillow opened; else a number."""
    name = image if isinstance(image, (str, Path)) else getattr(image, "filename", "")
    return str(name or f"image {index + 1}")


def _predict_chunk(
    model: nn.Module,
    transform: ImageTransform,
    chunk: Sequence[tuple[str, ImageLike]],
    labels: list[str],
    topk: int,
) -> list[ImagePrediction]:
    tensors: list[Tensor] = []
    sizes: list[tuple[int, int]] = []
    notes: list[tuple[str, ...]] = []
    errors: dict[int, str] = {}
    for i, (_, given) in enumerate(chunk):
        try:
            image = as_image(given)
            view, said = transform.read(image)
        except UsageError:
            raise
        except CapszooError as e:
            errors[i] = str(e)
        else:
            tensors.append(transform.normalise(view))
            notes.append(said)
            sizes.append(image.size)
    kind = score_kind(model)
    found: Iterator[tuple[Any, ...]] = iter(())
    if tensors:
        like = next(model.parameters())
        with torch.inference_mode():
            scores = model(torch.stack(tensors).to(like.device, like.dtype)).float().cpu()
        values, indices = scores.topk(topk, dim=1)
        shares = probabilities(scores, kind).gather(1, indices)
        found = iter(zip(values.tolist(), indices.tolist(), shares.tolist(), sizes, notes, strict=True))
    results = []
    for i, (name, _) in enumerate(chunk):
        if i in errors:
            results.append(ImagePrediction(name, error=errors[i]))
            continue
        best, classes, probable, size, said = next(found)
        top = tuple(
            ScoredClass(c, labels[c], value, share)
            for value, c, share in zip(best, classes, probable, strict=True)
        )
        results.append(ImagePrediction(name, top, size, score_kind=kind, notes=said))
    return results
