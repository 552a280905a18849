"""Heat maps of a prediction: the positions that a class capsule was routed from, or attributions of its score.

The map of couplings is the model's ``coupling_map``: its coupling coefficients, in some routings times the length of
the vote or the activation of the child (``map_quantity``). Nothing is fitted. A share of the routing is no importance:
``deletion`` measures for a network whether its largest shares lie where its score depends on the image. The
attributions are described in ``attributions``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._pretrained.facts import label_names
from .._utils.files import check_numbers_file, write_csv
from ..errors import CapszooError, NoCapsules, UsageError, unknown_name
from ..models._inspect import evaluating, first_parameter
from ..models.routing_pool import RoutingPoolNet
from ..preprocess import ImageLike, ImageTransform, as_image, model_transform
from ..scores import probabilities, score_kind
from .attributions import ATTRIBUTIONS, attribution
from .cell_centres import CellCentres, centres_of, recorded_centres
from .plotting import for_display, image_style, new_figure, save, show

__all__ = ["MEANINGS", "METHODS", "Explanation", "class_index", "explain", "save_figure", "save_heat_grid"]

#: Kind of heat map → the sentence below it: what it shows, and what it does not.
MEANINGS = {
    "couplings": "Shows the share of each position in the class capsule, not on which pixels its score depends.",
    "gradient": (
        "Shows where a small change of the pixels would change the class score, not what happens without them."
    ),
    "occlusion": (
        "Shows by how much the class score falls if one tile is blackened, not what tiles contribute together."
    ),
}

#: Kinds of heat maps.
METHODS = tuple(MEANINGS)

#: What the maps of attributions draw; that of couplings depends on the network.
_QUANTITIES = {"gradient": "gradient × pixel", "occlusion": "fall of the score"}


@dataclass(frozen=True)
class Explanation:
    """An image, the model's output for it, and a heat map.

    Attributes:
        heat: share of each grid position in the class capsule ``[h', w']`` (``coupling_map``); sums to 1. With
            another ``method``, the attribution of the class score to each tile, in units of the score.
        image: the model's input before normalisation, ``[c, h, w]`` in 0..1.
        scores: class scores ``[n]``.
        predicted: class with the highest score.
        target: class of the heat map (the predicted one, or the one requested).
        labels: names of the classes.
        couplings: couplings of every routing layer, for a batch of one, as returned by ``forward_capsules``.
        reconstruction: the decoder's image ``[c, h, w]`` of the target's capsule in 0..1; None without a decoder.
        covered: which cells of the grid take part in routing, ``[h', w']`` of bool; None for all of them.
        name: of the model.
        score_kind: kind of the scores, a key of ``capszoo.scores.SCORE_KINDS``.
        quantity: what the map draws: the couplings, a product such as ``coupling × vote length``, or an attribution.
        centres: where the grid's rows and columns lie in the image: the centres of the cells' receptive fields, in
            pixels. None divides the image evenly.
        method: kind of the map, one of ``METHODS``.
    """

    heat: Tensor
    image: Tensor
    scores: Tensor
    predicted: int
    target: int
    labels: tuple[str, ...]
    couplings: tuple[Tensor, ...] = ()
    reconstruction: Tensor | None = None
    covered: Tensor = None  # type: ignore[assignment]  # never None after __post_init__
    name: str = "model"
    score_kind: str = "logits"
    quantity: str = "coupling"
    centres: tuple[CellCentres, CellCentres] = None  # type: ignore[assignment]  # never None after __post_init__
    method: str = "couplings"

    def __repr__(self) -> str:
        shown = f"{self.labels[self.target]!r}, predicted {self.labels[self.predicted]!r}"
        return f"Explanation({self.name}: {shown}, grid {self.heat.shape[0]}x{self.heat.shape[1]})"

    def __post_init__(self) -> None:
        if self.covered is None:
            object.__setattr__(self, "covered", torch.ones_like(self.heat, dtype=torch.bool))
        if self.centres is None:
            object.__setattr__(self, "centres", centres_of(self.heat.shape, {}, self.image.shape[-2:]))

    @property
    def meaning(self) -> str:
        """What the map shows and what it does not, in one sentence."""
        return MEANINGS[self.method]

    @property
    def neutral(self) -> float:
        """The value of :attr:`relative` that is drawn white: 1, an even share, or 0 for an attribution."""
        return 0.0 if self.method in ATTRIBUTIONS else 1.0

    @property
    def relative(self) -> Tensor:
        """Shares as multiples of an even share ``[h', w']``: 1 everywhere if all cells have the same share.

        NaN in cells that no window covers. Attributions as parts of the largest one's size, in -1..1.
        """
        if self.method in ATTRIBUTIONS:
            return self.heat / self.heat.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        share = self.heat * self.covered.sum()
        return share.masked_fill(~self.covered, float("nan"))

    @property
    def is_even(self) -> bool:
        """True if no covered cell differs from an even share by more than a tenth, or no attribution from 0."""
        return bool(((self.relative - self.neutral).abs().nan_to_num(0) <= EVEN_WITHIN).all())

    @property
    def probabilities(self) -> Tensor:
        """The scores as probabilities in 0..1, ``[n]``."""
        return probabilities(self.scores, self.score_kind)

    def save(self, path: str | Path) -> Path:
        """Draw the explanation into an image file, see :func:`save_figure`."""
        return save_figure(self, path)

    def heat_at(self, height: int, width: int) -> Tensor:
        """The values of :attr:`relative`, resampled to ``[height, width]`` of an overlaid image.

        Each cell's value lies at the centre of its receptive field, with linear steps between. It is neutral in
        uncovered cells, and more than half a step outside the outermost centres.
        """
        values = self.relative.nan_to_num(self.neutral)
        (lower_y, upper_y, part_y, inside_y), (lower_x, upper_x, part_x, inside_x) = (
            _between_cells(centres, cells, size, side)
            for centres, cells, size, side in zip(
                self.centres, values.shape, self.image.shape[-2:], (height, width), strict=True
            )
        )
        rows = torch.lerp(values[lower_y], values[upper_y], part_y[:, None])
        heat = torch.lerp(rows[:, lower_x], rows[:, upper_x], part_x)
        return torch.where(inside_y[:, None] & inside_x, heat, self.neutral)


def _between_cells(
    centres: CellCentres, cells: int, size: int, side: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For ``side`` places along an axis: cell before, cell after, the latter's share, whether inside the grid."""
    at = ((torch.arange(side) + 0.5) * (size / side) - centres.first) / centres.step
    inside = (at >= -0.5) & (at <= cells - 0.5)
    at = at.clamp(0, cells - 1)
    lower = at.floor().long()
    return lower, (lower + 1).clamp(max=cells - 1), at - lower, inside


def explain(
    model: nn.Module,
    image: ImageLike,
    target: int | str | None = None,
    name: str | None = None,
    method: str = "couplings",
) -> Explanation:
    """Explain a prediction.

    Args:
        model: a capsule network with ``coupling_map``, or for an attribution any classifier; used in eval mode.
        image: a path, a picture or a numpy array (see ``capszoo.preprocess.as_image``); or a normalised tensor
            ``[c, h, w]``.
        target: class (index or name) whose capsule is traced; None for the predicted one.
        name: of the model, for titles; None uses the architecture and tag.
        method: ``couplings``: the share of each position in the class capsule. ``gradient`` and ``occlusion`` (by
            captum): the attribution of its score to the tiles of the image.

    Raises:
        CapszooError: the image cannot be read, the model has no couplings or takes no single image, its values are
            not finite, or captum is not installed.
        UsageError: no such class or method, a model without classes, an array that is no image, or a tensor of
            another size.

    Examples:
        >>> from capszoo.inference import load_model
        >>> found = explain(load_model("resnet20_routingcaps.mnist"), "digit_7.png")
        >>> found.labels[found.target]
        '7'
        >>> tuple(found.relative.shape)  # a share for each position of the grid, 1 where it is even
        (7, 7)
    """
    if method not in METHODS:
        raise UsageError(unknown_name("method", method, METHODS))
    if method == "couplings" and not callable(getattr(model, "coupling_map", None)):
        raise CapszooError(f"{type(model).__name__} is no capsule network", "choose one: `capszoo list`")
    transform = model_transform(model)
    x = model_input(transform, image)
    labels = tuple(label_names(model))
    if not labels:
        raise UsageError(f"{type(model).__name__} has no classes", "create it with num_classes above 0")
    chosen = None if target is None else class_index(target, labels)
    like = first_parameter(model)
    batch = x[None].to(like.device, like.dtype)
    with evaluating(model):
        if method == "couplings":
            explanation = _routed(model, batch, chosen, transform.size)
        else:
            explanation = _attributed(method, model, batch, chosen, transform)
    if not bool(torch.isfinite(explanation["heat"]).all()):
        raise CapszooError(f"the {method} hold NaN or infinity", "the weights are damaged or untrained")
    return Explanation(
        image=transform.restore(x),
        predicted=int(explanation["scores"].argmax()),
        labels=labels,
        name=name or _model_name(model),
        score_kind=score_kind(model),
        method=method,
        **explanation,
    )


def _routed(model: Any, batch: Tensor, target: int | None, size: tuple[int, int]) -> dict[str, Any]:
    """The fields of an ``Explanation`` that the couplings of a capsule network determine."""
    try:
        with torch.inference_mode():
            if isinstance(model, RoutingPoolNet) and not model.coupling_layouts():
                raise NoCapsules("average and maximum pooling choose nothing by routing")
            output = model.forward_capsules(batch)
            scores = output.scores[0].float().cpu()
            chosen = int(scores.argmax()) if target is None else target
            with recorded_centres(model, size) as centres:
                heat = model.coupling_map(batch)[0, chosen].float().cpu()
            shrink = getattr(getattr(model, "head", None), "shrink", 1)
            covered_cells: Any = getattr(model, "covered_cells", None)
            covered = covered_cells(batch).cpu() if covered_cells else torch.ones_like(heat, dtype=torch.bool)
            reconstruction = None
            if getattr(model, "decoder", None) is not None:
                kept = torch.tensor([chosen], device=batch.device)
                reconstruction = model.reconstruct(output.poses, kept)[0].float().cpu()
    except (NotImplementedError, NoCapsules):
        raise CapszooError(
            f"{type(model).__name__} has no routing, so no couplings to show",
            "choose a model with routing, or another method: " + ", ".join(ATTRIBUTIONS),
        ) from None
    return {
        "heat": heat,
        "scores": scores,
        "target": chosen,
        "couplings": tuple(c.float().cpu() for c in output.couplings),
        "reconstruction": reconstruction,
        "covered": covered,
        "quantity": getattr(model, "map_quantity", "coupling"),
        "centres": centres_of(heat.shape, centres, size, shrink),
    }


def _attributed(
    method: str, model: nn.Module, batch: Tensor, target: int | None, transform: ImageTransform
) -> dict[str, Any]:
    """The fields of an ``Explanation`` that an attribution of the class score determines."""
    mean, std = (
        torch.tensor(values, device=batch.device, dtype=batch.dtype).view(-1, 1, 1)
        for values in (transform.mean, transform.std)
    )
    with torch.no_grad():
        scores = model(batch)[0].float().cpu()
    chosen = int(scores.argmax()) if target is None else target
    heat = attribution(method, model, batch * std + mean, chosen, mean, std)
    return {"heat": heat, "scores": scores, "target": chosen, "quantity": _QUANTITIES[method]}


def model_input(transform: ImageTransform, image: ImageLike) -> Tensor:
    """An image as the model's normalised input ``[c, h, w]``; a tensor is one already.

    Raises:
        CapszooError: a file or a picture that cannot be read.
        UsageError: an invalid array, or a tensor of another size or without normalised values.
    """
    x = image if isinstance(image, Tensor) else transform(as_image(image))
    expected = (transform.channels, *transform.size)
    if not x.is_floating_point():
        raise UsageError(
            f"a tensor must be normalised input, not {x.dtype}", "pass a picture, or a numpy array"
        )
    if tuple(x.shape) != expected:
        raise UsageError(
            f"the image is {tuple(x.shape)}, the model takes {expected}", "resize it, or pass a picture"
        )
    return x


def _model_name(model: nn.Module) -> str:
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    parts = (cfg.get("architecture"), cfg.get("tag"))
    return ".".join(str(part) for part in parts if part) or type(model).__name__


def class_index(target: int | str, labels: tuple[str, ...]) -> int:
    """Index of a class given by its name or index; raises ``UsageError`` if there is none."""
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


def save_figure(explanation: Explanation, path: str | Path, about: str | None = None) -> Path:
    """Draw input, map, overlay and any reconstruction into an image file, and below them what the map shows.

    Shares are drawn as multiples of an even share, with the same scale in every picture: white is even, blue
    less, red more, and values from twice the even share on are the darkest red. A map that is even within 10% is not
    drawn, and the picture states this. Cells that no window of the network covers are hatched. Attributions are drawn
    as parts of the largest one: red supports the class, blue opposes it.

    Args:
        explanation: from :func:`explain`.
        path: with the suffix of an image format.
        about: a note stored in the file.

    Raises:
        CapszooError: matplotlib is not installed, the file cannot be written, or its numbers would replace a table
            that is not theirs.
        UsageError: a suffix that is no image format.
    """
    if about is None:
        check_numbers_file(path, "column 0")  # refused before a picture of that name exists
    count = 3 if explanation.reconstruction is None else 4
    figure = new_figure(2.6 * count + (0 if explanation.is_even else 0.7), 3.4)
    axes = figure.subplots(1, count)
    show(axes[0], explanation.image)
    drawn = draw_couplings(axes[1], explanation)
    draw_overlay(axes[2], explanation)
    titles = ["input", explanation.quantity, "overlay"]
    if explanation.reconstruction is not None:
        show(axes[3], explanation.reconstruction)
        titles.append("reconstruction")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
    if drawn is not None:
        colour_bar(figure, drawn, list(axes), explanation)
    figure.suptitle(_caption(explanation), fontsize=11)
    figure.supxlabel(explanation.meaning, fontsize=8)
    written = save(figure, path, about)
    if about is None:  # pictures in the docs state their source, and have no data file beside them
        grid = explanation.relative.tolist()
        rows = [[None if math.isnan(value) else f"{value:.5g}" for value in row] for row in grid]
        write_csv(written.with_suffix(".csv"), [f"column {k}" for k in range(len(grid[0]))], rows)
    return written


def save_heat_grid(
    explanations: Sequence[Explanation], path: str | Path, title: str = "", about: str | None = None
) -> Path:
    """Draw several explanations of one kind and model as columns: image, map, overlay; one colour bar for all.

    Raises the errors of :func:`save_figure`.
    """
    if not explanations:
        raise UsageError("there is nothing to draw", "give more images")
    figure = new_figure(1.3 * len(explanations) + 1.6, 1.25 * 3 + 1.1)
    grid = figure.subplots(3, len(explanations), squeeze=False)
    drawn = None
    for column, explanation in enumerate(explanations):
        show(grid[0][column], explanation.image)
        drawn = draw_couplings(grid[1][column], explanation, fontsize=6) or drawn
        draw_overlay(grid[2][column], explanation)
        share = float(explanation.probabilities[explanation.target])
        grid[0][column].set_title(f"{explanation.labels[explanation.target]}, {share:.0%}", fontsize=8)
    quantity = explanations[0].quantity.replace("× ", "×\n")  # a row is as high as one short line is long
    for row, name in enumerate(("image", quantity, "overlay")):
        grid[row][0].set_ylabel(name, fontsize=8)
    if drawn is not None:
        colour_bar(figure, drawn, grid.ravel().tolist(), explanations[0])
    figure.supxlabel(explanations[0].meaning, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=9)
    return save(figure, path, about)


#: Colour map of shares: diverging, white for an even share.
COLOURS = "RdBu_r"

#: Distance of the scale's ends from the neutral value; larger shares than 2 have the colour of the upper end.
REACH = 1.0

#: Largest deviation from the neutral value for which no map is drawn.
EVEN_WITHIN = 0.1

#: Drawn instead of a map that is even.
NOTHING = "even within 10%:\nnothing to see"


def colour_scale(explanation: Explanation) -> dict[str, Any]:
    """Colours and ends of the scale, as arguments of matplotlib's ``imshow``."""
    neutral = explanation.neutral
    return {"cmap": COLOURS, "vmin": neutral - REACH, "vmax": neutral + REACH}


def draw_couplings(axis: Any, explanation: Explanation, fontsize: float = 9) -> Any:
    """Draw the grid of the map, each cell about the centre of its receptive field; return None if it is even.

    Else the mappable.
    """
    height, width = explanation.image.shape[-2:]
    _bare(axis)
    drawn = None
    if explanation.is_even:
        axis.text(0.5, 0.5, NOTHING, ha="center", va="center", fontsize=fontsize, transform=axis.transAxes)
    else:
        (top, bottom), (left, right) = _edges(explanation)
        grid, extent = explanation.relative.numpy(), (left, right, bottom, top)
        drawn = axis.imshow(grid, extent=extent, interpolation="nearest", **colour_scale(explanation))
        axis.set_facecolor("0.9")  # white is neutral
    axis.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    _hatch(axis, explanation)
    return drawn


def draw_overlay(axis: Any, explanation: Explanation) -> None:
    """Draw the image, overlaid with the map's colours; opacity grows with the distance from the neutral value."""
    _bare(axis)
    height, width = explanation.image.shape[-2:]
    image = for_display(explanation.image)
    axis.imshow(image, extent=(0, width, height, 0), **image_style(image))
    if not explanation.is_even:
        heat = explanation.heat_at(height, width)
        strength = 0.8 * (heat - explanation.neutral).abs().clamp(max=1)
        scale = {**colour_scale(explanation), "alpha": strength.numpy()}
        axis.imshow(heat.numpy(), extent=(0, width, height, 0), **scale)
    _hatch(axis, explanation)


def colour_bar(figure: Any, drawn: Any, axes: list[Any], explanation: Explanation) -> None:
    """The scale of :func:`draw_couplings`, to the right of ``axes``."""
    shares = explanation.method not in ATTRIBUTIONS
    ticks = [explanation.neutral + REACH * step / 2 for step in range(-2, 3)]
    bar = figure.colorbar(
        drawn, ax=axes, extend="max" if shares else "neither", shrink=0.8, aspect=25, ticks=ticks
    )
    names = [f"{tick:g}" + (" (even)" if shares and tick == 1 else "") for tick in ticks]
    bar.ax.set_yticklabels(names, fontsize=8)
    bar.set_label("× even share" if shares else "× largest attribution", fontsize=8)


def _hatch(axis: Any, explanation: Explanation) -> None:
    """Hatch the cells that no window covers: no coupling exists there."""
    from matplotlib.patches import Rectangle

    (top, _), (left, _) = _edges(explanation)
    tall, wide = (centres.step for centres in explanation.centres)
    for row, col in (~explanation.covered).nonzero().tolist():
        cell = Rectangle((left + col * wide, top + row * tall), wide, tall)
        cell.set(facecolor="none", edgecolor="0.5", hatch="////", linewidth=0)
        axis.add_patch(cell)


def _edges(explanation: Explanation) -> list[tuple[float, float]]:
    """Top and bottom, left and right of the grid's cells in the image, in pixels."""
    cells = zip(explanation.centres, explanation.heat.shape, strict=True)
    return [centres.edges(count) for centres, count in cells]


def _bare(axis: Any) -> None:
    axis.set(xticks=[], yticks=[])
    for side in axis.spines.values():
        side.set(color="0.8")


def _caption(explanation: Explanation) -> str:
    shares = explanation.probabilities
    name = explanation.labels[explanation.predicted]
    text = f"{explanation.name}: {name}, probability {float(shares[explanation.predicted]):.3f}"
    if explanation.target != explanation.predicted:
        asked = explanation.labels[explanation.target]
        text += f"; map of {asked}, probability {float(shares[explanation.target]):.3f}"
    if explanation.method not in ATTRIBUTIONS and not explanation.is_even:
        text += f"; largest share {float(explanation.relative.nan_to_num(0).max()):.1f} × even"
    return text
