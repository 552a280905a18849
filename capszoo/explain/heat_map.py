"""Where a prediction came from: the positions of the feature map that a class capsule was routed from.

>>> from capszoo.explain import explain, save_figure
>>> explanation = explain(model, Image.open("seven.png"))
>>> save_figure(explanation, "heat.png")

The heat map is made of the model's own coupling coefficients (``coupling_map``); nothing is differentiated and nothing
is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ..errors import CapszooError, UsageError
from ..inference import label_names
from ..models._base import NoCapsules
from ..preprocess import model_transform
from .plotting import for_display, image_style, new_figure, save

__all__ = ["Explanation", "class_index", "explain", "save_figure"]


@dataclass(frozen=True)
class Explanation:
    """An image, what the model says of it, and from where.

    Attributes:
        heat: share of the class capsule's coupling at each grid position ``[h', w']``; sums to 1.
        image: what the model saw, ``[c, h, w]`` in 0..1.
        scores: class scores ``[n]``.
        predicted: class with the highest score.
        target: class that the heat map belongs to (the predicted one, or the one asked for).
        labels: names of the classes.
        couplings: couplings of every routing layer, batch of one, as ``forward_capsules`` gives them.
        reconstruction: the decoder's image ``[c, h, w]`` of the target's capsule in 0..1; None without a decoder.
    """

    heat: Tensor
    image: Tensor
    scores: Tensor
    predicted: int
    target: int
    labels: tuple[str, ...]
    couplings: tuple[Tensor, ...] = ()
    reconstruction: Tensor | None = None

    def heat_at(self, height: int, width: int) -> Tensor:
        """The heat map resampled to ``[height, width]`` and scaled to 0..1, to lie over an image."""
        heat = F.interpolate(self.heat[None, None], (height, width), mode="bilinear", align_corners=False)[
            0, 0
        ]
        low, high = heat.min(), heat.max()
        return (heat - low) / (high - low).clamp_min(1e-12)


def explain(model: nn.Module, image: Image.Image | Tensor, target: int | str | None = None) -> Explanation:
    """Explain a prediction.

    Args:
        model: a capsule network with ``coupling_map``; used in eval mode.
        image: a picture, or a normalised tensor ``[c, h, w]``.
        target: class (index or name) whose capsule is followed; None for the predicted one.

    Raises:
        CapszooError: the model has no couplings to show, or gives values that are not finite.
        UsageError: no such class, or a tensor of another size.
    """
    if not callable(getattr(model, "coupling_map", None)):
        raise CapszooError(f"{type(model).__name__} is no capsule network", "choose one: `capszoo list`")
    transform = model_transform(model)
    x = image if isinstance(image, Tensor) else transform(image)
    expected = (transform.channels, *transform.size)
    if tuple(x.shape) != expected:
        raise UsageError(
            f"the image is {tuple(x.shape)}, the model takes {expected}", "resize it, or pass a picture"
        )
    labels = tuple(label_names(model))
    if not labels:
        raise UsageError(f"{type(model).__name__} has no classes", "create it with num_classes above 0")

    like = next(model.parameters())
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            batch = x[None].to(like.device, like.dtype)
            output = model.forward_capsules(batch)  # type: ignore[operator]
            scores = output.scores[0].float().cpu()
            predicted = int(scores.argmax())
            chosen = predicted if target is None else class_index(target, labels)
            heat = model.coupling_map(batch)[0, chosen].float().cpu()  # type: ignore[operator]
            reconstruction = None
            if getattr(model, "decoder", None) is not None:
                kept = torch.tensor([chosen], device=like.device)
                reconstruction = model.reconstruct(output.poses, kept)[0].float().cpu()  # type: ignore[operator]
    except (NotImplementedError, NoCapsules):
        raise CapszooError(
            f"{type(model).__name__} has no routing, so no couplings to show", "choose a model with routing"
        ) from None
    finally:
        model.train(was_training)
    if not bool(torch.isfinite(heat).all()):
        raise CapszooError("the couplings hold NaN or infinity", "the weights are damaged or untrained")
    return Explanation(
        heat=heat,
        image=transform.restore(x),
        scores=scores,
        predicted=predicted,
        target=chosen,
        labels=labels,
        couplings=tuple(c.float().cpu() for c in output.couplings),
        reconstruction=reconstruction,
    )


def class_index(target: int | str, labels: tuple[str, ...]) -> int:
    """Number of a class given by its name or number; `UsageError` where there is none."""
    if isinstance(target, str) and target in labels:
        return labels.index(target)
    try:
        index = int(target)
    except ValueError:
        index = -1
    if not 0 <= index < len(labels):
        shown = ", ".join(labels[:12]) + (", …" if len(labels) > 12 else "")
        raise UsageError(f"no class '{target}'", f"the classes are {shown}")
    return index


def save_figure(explanation: Explanation, path: str | Path) -> Path:
    """Draw input, heat map, overlay and, where there is one, the reconstruction into an image file.

    Raises:
        CapszooError: matplotlib is not installed, or the file cannot be written.
        UsageError: a suffix that is no image format.
    """
    image = for_display(explanation.image)
    height, width = explanation.image.shape[-2:]
    heat = explanation.heat_at(height, width).numpy()
    panels: list[tuple[str, list[tuple[Any, dict[str, Any]]]]] = [
        ("input", [(image, image_style(image))]),
        ("couplings", [(explanation.heat.numpy(), {"cmap": "inferno"})]),
        (
            "overlay",
            [
                (image, image_style(image)),
                (heat, {"cmap": "autumn", "alpha": 0.65 * heat}),  # where nothing was routed, the image alone
            ],
        ),
    ]
    if explanation.reconstruction is not None:
        rebuilt = for_display(explanation.reconstruction)
        panels.append(("reconstruction", [(rebuilt, image_style(rebuilt))]))

    figure = new_figure(2.6 * len(panels), 3.1)
    for axis, (title, layers) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for values, style in layers:
            axis.imshow(values, extent=(0, width, height, 0), **style)
        axis.set_title(title, fontsize=10)
        axis.set_axis_off()
    figure.suptitle(_caption(explanation), fontsize=11)
    return save(figure, path)


def _caption(explanation: Explanation) -> str:
    name = explanation.labels[explanation.predicted]
    text = f"predicted {name}, score {float(explanation.scores[explanation.predicted]):.3f}"
    if explanation.target != explanation.predicted:
        asked = explanation.labels[explanation.target]
        text += f"; shown: {asked}, score {float(explanation.scores[explanation.target]):.3f}"
    return text
