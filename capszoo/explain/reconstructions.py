"""Reconstructions by a decoder: right and wrong answers, one capsule dimension perturbed, overlapping digits.

The figures are those of Sabour, Frosst, Hinton, "Dynamic Routing Between Capsules" (2017): Fig. 3 (:func:`answers`),
Fig. 4 (:func:`perturb`), Fig. 5 (:func:`overlaps`). Every function needs a model created with ``decoder=True``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._pretrained.facts import label_names
from ..errors import CapszooError, UsageError
from ..models._inspect import evaluating
from ..preprocess import ImageLike, model_transform
from .heat_map import class_index, model_input
from .plotting import new_figure, save, save_columns, show

__all__ = [
    "OFFSETS",
    "Answer",
    "Overlap",
    "Perturbation",
    "answers",
    "offsets_to",
    "overlaps",
    "perturb",
    "save_answers",
    "save_overlaps",
    "save_perturbation",
]

#: What is added to a dimension: -0.25 to 0.25 by 0.05, as in Fig. 4.
OFFSETS = tuple(round(0.05 * k, 2) for k in range(-5, 6))


def offsets_to(span: float) -> tuple[float, ...]:
    """Eleven offsets from ``-span`` to ``span``, the middle one 0; ``0.25`` gives :data:`OFFSETS`."""
    return tuple(round(span * k / 5, 6) for k in range(-5, 6))


@dataclass(frozen=True)
class Perturbation:
    """A class capsule, decoded with one dimension changed at a time.

    Attributes:
        images: ``[d, k, c, h, w]`` in 0..1: dimension by dimension, offset by offset.
        offsets: values added to a dimension.
        image: the model's input, ``[c, h, w]`` in 0..1.
        label: name of the capsule's class.
        dims: indices of the dimensions.
    """

    images: Tensor
    offsets: tuple[float, ...]
    image: Tensor
    label: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """An image, its label, the predicted class, and the reconstructions from the two capsules.

    Images are ``[c, h, w]`` in 0..1.
    """

    image: Tensor
    label: str
    predicted: str
    by_label: Tensor
    by_predicted: Tensor

    @property
    def right(self) -> bool:
        return self.label == self.predicted


@dataclass(frozen=True)
class Overlap:
    """Two overlapping digits, and reconstructions from their capsules.

    Reconstructions of both labels, of both predicted digits, and of one digit that is neither. Images are ``[c, h, w]``
    in 0..1.
    """

    image: Tensor
    labels: tuple[str, str]
    predicted: tuple[str, str]
    stranger: str
    by_labels: tuple[Tensor, Tensor]
    by_predicted: tuple[Tensor, Tensor]
    by_stranger: Tensor

    @property
    def right(self) -> bool:
        return set(self.labels) == set(self.predicted)


def _require_decoder(model: nn.Module) -> tuple[str, ...]:
    """Check that a model has a decoder, and return the names of its classes."""
    if getattr(model, "decoder", None) is None:
        raise CapszooError(
            "the model has no decoder, so it reconstructs nothing", "train one with model_args.decoder=true"
        )
    return tuple(label_names(model))


def _decode(model: Any, poses: Tensor, target: Tensor) -> Tensor:
    return model.reconstruct(poses, target).float().cpu()


@torch.no_grad()
def perturb(
    model: nn.Module,
    image: ImageLike,
    target: int | str | None = None,
    offsets: Sequence[float] = OFFSETS,
    dims: Sequence[int] | None = None,
) -> Perturbation:
    """Change one dimension of a class capsule at a time, and decode it.

    Args:
        model: model with a decoder; used in eval mode.
        image: a path, a picture or a numpy array (see ``capszoo.preprocess.as_image``); or a normalised tensor
            ``[c, h, w]``.
        target: class whose capsule is changed; None for the predicted one.
        offsets: values added to each dimension in turn.
        dims: indices of the dimensions to change; None changes all.

    Raises:
        CapszooError: the model has no decoder, or the image cannot be read.
        UsageError: no such class or dimension, or a tensor of another size.

    Examples:
        >>> from PIL import Image
        >>> from capszoo.inference import load_model
        >>> net = load_model("capsnet_dynamic.mnist", device="cpu")
        >>> found = perturb(net, Image.open("digit_7.png"), offsets=(-0.25, 0.0, 0.25), dims=[0, 5])
        >>> tuple(found.images.shape)  # dimensions, offsets, then an image each
        (2, 3, 1, 28, 28)
    """
    labels = _require_decoder(model)
    transform = model_transform(model)
    x = model_input(transform, image)
    like = next(model.parameters())
    with evaluating(model):
        output = model.forward_capsules(x[None].to(like.device, like.dtype))  # type: ignore[operator]
    chosen = int(output.scores[0].argmax()) if target is None else class_index(target, labels)
    pose = output.poses[0]  # [n, e]
    e, k = pose.shape[1], len(offsets)
    numbers = list(range(e)) if dims is None else list(dims)
    for number in numbers:
        if not 0 <= number < e:
            raise UsageError(f"the capsule has no dimension {number}", f"give numbers from 0 to {e - 1}")
    d = len(numbers)
    changed = pose.repeat(d * k, 1, 1)  # [d*k, n, e]
    shifts = torch.tensor(offsets, device=pose.device, dtype=pose.dtype)
    unit = torch.eye(e, device=pose.device)[numbers]  # [d, e]
    changed[:, chosen] += (unit[:, None] * shifts[:, None]).flatten(0, 1)
    with evaluating(model):
        images = _decode(model, changed, torch.full((d * k,), chosen, device=pose.device))
    return Perturbation(
        images.unflatten(0, (d, k)), tuple(offsets), transform.restore(x), labels[chosen], tuple(numbers)
    )


@torch.no_grad()
def answers(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], right: int = 4, wrong: int = 4
) -> list[Answer]:
    """The first images that are recognised, then the first that are not, each with reconstructions.

    Args:
        model: model with a decoder, in eval mode.
        batches: images ``[b, c, h, w]``, normalised, on the model's device, and their classes ``[b]``.
        right, wrong: number of images of each kind; fewer if there are no more.

    Raises:
        CapszooError: the model has no decoder, or the images have several labels.
    """
    labels = _require_decoder(model)
    transform = model_transform(model)
    by_outcome: dict[bool, list[Answer]] = {True: [], False: []}
    wanted = {True: right, False: wrong}
    for images, classes in batches:
        if classes.dim() != 1:
            raise CapszooError("these images have several labels", "draw them with `capszoo explain multi`")
        output = model.forward_capsules(images)  # type: ignore[operator]
        predicted = output.scores.argmax(1)
        for kind in (True, False):
            room = wanted[kind] - len(by_outcome[kind])
            picked = ((predicted == classes) == kind).nonzero()[:room, 0]
            if len(picked):
                by_label = _decode(model, output.poses[picked], classes[picked])
                by_predicted = _decode(model, output.poses[picked], predicted[picked])
                seen = transform.restore(images[picked])
                for n, place in enumerate(picked.tolist()):
                    names = labels[int(classes[place])], labels[int(predicted[place])]
                    by_outcome[kind].append(Answer(seen[n], *names, by_label[n], by_predicted[n]))
        if all(len(by_outcome[kind]) == wanted[kind] for kind in wanted):
            break
    return by_outcome[True] + by_outcome[False]


@torch.no_grad()
def overlaps(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], right: int = 4, wrong: int = 4
) -> list[Overlap]:
    """The first pairs of digits that are recognised, then the first that are not (images of two labels only).

    Args:
        model: model with a decoder, in eval mode.
        batches: images ``[b, c, h, w]``, normalised, on the model's device, and zeros and ones ``[b, n]``.
        right, wrong: number of images of each kind; fewer if there are no more.

    Raises:
        CapszooError: the model has no decoder or fewer than five classes, or the images have one label each.
    """
    labels = _require_decoder(model)
    if len(labels) < 5:
        raise CapszooError("explain multi needs a model with at least five classes", "choose another")
    transform = model_transform(model)
    by_outcome: dict[bool, list[Overlap]] = {True: [], False: []}
    wanted = {True: right, False: wrong}
    for images, present in batches:
        if present.dim() != 2:
            raise CapszooError("these images have one label each", "give --dataset multimnist")
        output = model.forward_capsules(images)  # type: ignore[operator]
        top = output.scores.topk(2, dim=1).indices.sort(1).values
        for place in (present.sum(1) == 2).nonzero()[:, 0].tolist():
            there = present[place].nonzero()[:, 0]
            kind = bool((there == top[place]).all())
            if len(by_outcome[kind]) == wanted[kind]:
                continue
            others = output.scores[place].clone()
            others[torch.cat([there, top[place]])] = -torch.inf
            classes = torch.cat([there, top[place], others.argmax()[None]])  # the most probable other class
            a, b, c, d, e = _decode(model, output.poses[place].expand(5, -1, -1), classes)
            one, two, three, four, stranger = (labels[number] for number in classes.tolist())
            seen = transform.restore(images[place])
            found = Overlap(seen, (one, two), (three, four), stranger, (a, b), (c, d), e)
            by_outcome[kind].append(found)
        if all(len(by_outcome[kind]) == wanted[kind] for kind in wanted):
            break
    return by_outcome[True] + by_outcome[False]


#: Colours of two overlapping reconstructions, distinguishable with red-green colour blindness.
FIRST_COLOUR, SECOND_COLOUR = (1.0, 0.55, 0.0), (0.0, 0.45, 1.0)


def orange_and_blue(first: Tensor, second: Tensor) -> Tensor:
    """Two images ``[c, h, w]`` as one ``[3, h, w]``: the first orange, the second blue, both white."""
    colours = torch.tensor([FIRST_COLOUR, SECOND_COLOUR], device=first.device)[:, :, None, None]
    return (torch.stack([first.mean(0), second.mean(0)])[:, None] * colours).sum(0).clamp(0, 1)


def save_perturbation(perturbation: Perturbation, path: str | Path, name: str = "") -> Path:
    """Draw a row for each dimension, a column for each offset (Fig. 4); more than eight dimensions in two blocks.

    Args:
        perturbation: from :func:`perturb`.
        path: of the file.
        name: of the model and the image, for the title.
    """
    count, offsets = perturbation.images.shape[:2]
    blocks = 2 if count > 8 else 1
    rows = -(-count // blocks)
    widths = [*[1.0] * offsets, 0.5] * (blocks - 1) + [1.0] * offsets
    figure = new_figure(0.55 * sum(widths) + 0.8 * blocks, 0.55 * rows + 0.9)
    grid = figure.subplots(rows, len(widths), squeeze=False, width_ratios=widths)
    for axis in grid.ravel():
        axis.set_axis_off()
    for place, number in enumerate(perturbation.dims):
        block, row = divmod(place, rows)
        start = block * (offsets + 1)
        for column, offset in enumerate(perturbation.offsets):
            axis = grid[row][start + column]
            axis.set_axis_on()
            show(axis, perturbation.images[place, column])
            if offset == 0:
                for side in axis.spines.values():
                    side.set(visible=True, color="tab:orange", linewidth=1.5)
            if row == 0:
                title = "unchanged" if offset == 0 else f"{offset:+.3g}"
                axis.set_title(title, fontsize=7, color="tab:orange" if offset == 0 else "black")
        label = {"rotation": 0, "fontsize": 7, "labelpad": 8, "va": "center"}
        grid[row][start].set_ylabel(str(number), **label)
    what = f"capsule of {perturbation.label}, one dimension changed at a time (rows: its number)"
    figure.suptitle(f"{name}: {what}" if name else what, fontsize=9)
    return save(figure, path)


def save_answers(
    drawings: Sequence[Answer], path: str | Path, about: str | None = None, title: str = ""
) -> Path:
    """Draw input above, reconstructions from the true and the predicted class below (Fig. 3); right before wrong."""
    columns = [
        (f"true {one.label}\npredicted {one.predicted}", (one.image, one.by_label, one.by_predicted))
        for one in drawings
    ]
    rows = ("input", "reconstruction from\nthe true class", "reconstruction from\nthe predicted class")
    return save_columns(columns, rows, path, about, gap=sum(one.right for one in drawings), title=title)


def save_overlaps(
    drawings: Sequence[Overlap], path: str | Path, about: str | None = None, title: str = ""
) -> Path:
    """Draw the input above, and reconstructions below, in orange and blue: of both labels, of both predicted digits,
    and of a label with a digit that is neither label nor prediction (Fig. 5)."""
    columns = []
    for one in drawings:
        name = f"true {'+'.join(one.labels)}\npredicted {'+'.join(one.predicted)}\nneither: {one.stranger}"
        pictures = (
            one.image,
            orange_and_blue(*one.by_labels),
            orange_and_blue(*one.by_predicted),
            orange_and_blue(one.by_labels[0], one.by_stranger),
        )
        columns.append((name, pictures))
    rows = ("input", "from the\ntrue digits", "from the\npredicted digits", "first true digit,\nand neither")
    legend = {"first digit": FIRST_COLOUR, "second digit": SECOND_COLOUR}
    gap = sum(one.right for one in drawings)
    return save_columns(columns, rows, path, about, gap=gap, title=title, legend=legend)
