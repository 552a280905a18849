"""The source of a prediction: the positions of the feature map that a class capsule was routed from.

The heat map is the model's ``coupling_map``: its coupling coefficients, in some routings times the length of the vote
or the activation of the child (``map_quantity``). No gradient is computed and nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._files import check_numbers_file
from .._modes import evaluating
from ..errors import CapszooError, NoCapsules, UsageError
from ..inference import label_names
from ..models.routing_pool import RoutingPoolNet
from ..preprocess import ImageLike, ImageTransform, as_image, model_transform
from ..scores import probabilities, score_kind
from .cell_centres import CellCentres, centres_of, recorded_centres
from .plotting import for_display, image_style, new_figure, save, show, write_numbers

__all__ = ["Explanation", "class_index", "explain", "save_figure", "save_heat_grid"]


@dataclass(frozen=True)
class Explanation:
    """An image, the model's output for it, and the positions that it was routed from.

    Attributes:
        heat: share of each grid position in the class capsule ``[h', w']`` (``coupling_map``); sums to 1.
        image: the model's input before normalisation, ``[c, h, w]`` in 0..1.
        scores: class scores ``[n]``.
        predicted: class with the highest score.
        target: class of the heat map (the predicted one, or the one requested).
        labels: names of the classes.
        couplings: couplings of every routing layer, for a batch of one, as returned by ``forward_capsules``.
        reconstruction: the decoder's image ``[c, h, w]`` of the target's capsule in 0..1; None without a decoder.
        covered: which cells of the grid take part in routing, ``[h', w']`` of bool; None for all of them.
        name: of the model.
        score_kind: kind of the scores, a key of `capszoo.scores.SCORE_KINDS`.
        quantity: what the shares are shares of: the couplings, or e.g. ``coupling × vote length``.
        centres: where the grid's rows and columns lie in the image: the centres of the cells' receptive fields, in
            pixels. None divides the image evenly.
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

    def __repr__(self) -> str:
        shown = f"{self.labels[self.target]!r}, predicted {self.labels[self.predicted]!r}"
        return f"Explanation({self.name}: {shown}, grid {self.heat.shape[0]}x{self.heat.shape[1]})"

    def __post_init__(self) -> None:
        if self.covered is None:
            object.__setattr__(self, "covered", torch.ones_like(self.heat, dtype=torch.bool))
        if self.centres is None:
            cells, (height, width) = _cells(self.heat), self.image.shape[-2:]
            object.__setattr__(self, "centres", centres_of(cells, {}, (height, width)))

    @property
    def relative(self) -> Tensor:
        """Shares as multiples of an even share ``[h', w']``: 1 everywhere if all cells have the same share.

        NaN in cells that no window covers.
        """
        share = self.heat * self.covered.sum()
        return share.masked_fill(~self.covered, float("nan"))

    @property
    def is_even(self) -> bool:
        """True if no covered cell differs from an even share by more than a tenth."""
        return bool(((self.relative - 1).abs().nan_to_num(0) <= EVEN_WITHIN).all())

    @property
    def probabilities(self) -> Tensor:
        """The scores as probabilities in 0..1, ``[n]``."""
        return probabilities(self.scores, self.score_kind)

    def save(self, path: str | Path) -> Path:
        """Draw the explanation into an image file, see :func:`save_figure`."""
        return save_figure(self, path)

    def heat_at(self, height: int, width: int) -> Tensor:
        """Multiples of an even share, resampled to ``[height, width]`` of an overlaid image.

        Each cell's value lies at the centre of its receptive field, with linear steps between. It is 1 in uncovered
        cells, and more than half a step outside the outermost centres.
        """
        values = self.relative.nan_to_num(1.0)
        (lower_y, upper_y, part_y, inside_y), (lower_x, upper_x, part_x, inside_x) = (
            _between_cells(centres, cells, size, side)
            for centres, cells, size, side in zip(
                self.centres, values.shape, self.image.shape[-2:], (height, width), strict=True
            )
        )
        rows = torch.lerp(values[lower_y], values[upper_y], part_y[:, None])
        heat = torch.lerp(rows[:, lower_x], rows[:, upper_x], part_x)
        return torch.where(inside_y[:, None] & inside_x, heat, 1.0)


def _cells(heat: Tensor) -> tuple[int, int]:
    return heat.shape[0], heat.shape[1]


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
    model: nn.Module, image: ImageLike, target: int | str | None = None, name: str | None = None
) -> Explanation:
    """Explain a prediction.

    Args:
        model: a capsule network with ``coupling_map``; used in eval mode.
        image: a path, a picture or a numpy array (see `capszoo.preprocess.as_image`); or a normalised tensor
            ``[c, h, w]``.
        target: class (index or name) whose capsule is traced; None for the predicted one.
        name: of the model, for titles; None uses the architecture and tag.

    Raises:
        CapszooError: the image cannot be read, the model has no couplings or takes no single image, or its values are
            not finite.
        UsageError: no such class, a model without classes, an array that is no image, or a tensor of another size.

    Examples:
        >>> from capszoo.inference import load_model
        >>> found = explain(load_model("resnet20_routingcaps.mnist"), "digit_7.png")
        >>> found.labels[found.target]
        '7'
        >>> tuple(found.relative.shape)  # a share for each position of the grid, 1 where it is even
        (7, 7)
    """
    if not callable(getattr(model, "coupling_map", None)):
        raise CapszooError(f"{type(model).__name__} is no capsule network", "choose one: `capszoo list`")
    transform = model_transform(model)
    x = model_input(transform, image)
    labels = tuple(label_names(model))
    if not labels:
        raise UsageError(f"{type(model).__name__} has no classes", "create it with num_classes above 0")

    like = next(model.parameters())
    try:
        with evaluating(model), torch.inference_mode():
            batch = x[None].to(like.device, like.dtype)
            if isinstance(model, RoutingPoolNet) and not model.coupling_layouts():
                raise NoCapsules("average and maximum pooling choose nothing by routing")
            output = model.forward_capsules(batch)  # type: ignore[operator]
            scores = output.scores[0].float().cpu()
            predicted = int(scores.argmax())
            chosen = predicted if target is None else class_index(target, labels)
            with recorded_centres(model, transform.size) as found:
                heat = model.coupling_map(batch)[0, chosen].float().cpu()  # type: ignore[operator]
            shrink = getattr(getattr(model, "head", None), "shrink", 1)
            covered_cells: Any = getattr(model, "covered_cells", None)
            covered = covered_cells(batch).cpu() if covered_cells else torch.ones_like(heat, dtype=torch.bool)
            reconstruction = None
            if getattr(model, "decoder", None) is not None:
                kept = torch.tensor([chosen], device=like.device)
                reconstruction = model.reconstruct(output.poses, kept)[0].float().cpu()  # type: ignore[operator]
    except (NotImplementedError, NoCapsules):
        raise CapszooError(
            f"{type(model).__name__} has no routing, so no couplings to show", "choose a model with routing"
        ) from None
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
        covered=covered,
        name=name or _model_name(model),
        score_kind=score_kind(model),
        quantity=getattr(model, "map_quantity", "coupling"),
        centres=centres_of(_cells(heat), found, transform.size, shrink),
    )


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
    """Index of a class given by its name or index; raises `UsageError` if there is none."""
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
    """Draw input, shares, overlay and any reconstruction into an image file.

    Shares are drawn as multiples of an even share, with the same scale in every picture: white is even, blue
    less, red more, and values from twice the even share on are the darkest red. A map that is even within 10% is not
    drawn, and the picture states this. Cells that no window of the network covers are hatched.

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
    figure = new_figure(2.6 * count + (0 if explanation.is_even else 0.7), 3.1)
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
        colour_bar(figure, drawn, list(axes))
    figure.suptitle(_caption(explanation), fontsize=11)
    written = save(figure, path, about)
    if about is None:  # pictures in the docs state their source, and have no data file beside them
        grid = explanation.relative.nan_to_num(-1).tolist()
        rows = [[None if value < 0 else f"{value:.5g}" for value in row] for row in grid]
        write_numbers(written, [f"column {k}" for k in range(len(grid[0]))], rows)
    return written


def save_heat_grid(
    explanations: Sequence[Explanation], path: str | Path, title: str = "", about: str | None = None
) -> Path:
    """Draw several explanations of one model as columns: image, shares, overlay; one colour bar for all.

    Raises the errors of :func:`save_figure`.
    """
    if not explanations:
        raise UsageError("there is nothing to draw", "give more images")
    figure = new_figure(1.3 * len(explanations) + 1.6, 1.25 * 3 + 0.9)
    grid = figure.subplots(3, len(explanations), squeeze=False)
    drawn = None
    for column, found in enumerate(explanations):
        show(grid[0][column], found.image)
        drawn = draw_couplings(grid[1][column], found, fontsize=6) or drawn
        draw_overlay(grid[2][column], found)
        share = float(found.probabilities[found.target])
        grid[0][column].set_title(f"{found.labels[found.target]}, {share:.0%}", fontsize=8)
    quantity = explanations[0].quantity.replace("× ", "×\n")  # a row is as high as one short line is long
    for row, name in enumerate(("image", quantity, "overlay")):
        grid[row][0].set_ylabel(name, fontsize=8)
    if drawn is not None:
        colour_bar(figure, drawn, grid.ravel().tolist())
    if title:
        figure.suptitle(title, fontsize=9)
    return save(figure, path, about)


#: Colour map of shares: diverging, white for an even share.
COLOURS = "RdBu_r"

#: Ends of the scale, in multiples of an even share; larger shares have the colour of the upper end.
LEAST, MOST = 0.0, 2.0

#: Largest deviation from an even share for which no map is drawn.
EVEN_WITHIN = 0.1

#: Drawn instead of a map that is even.
NOTHING = "even within 10%:\nnothing to see"


def draw_couplings(axis: Any, explanation: Explanation, fontsize: float = 9) -> Any:
    """Draw the grid of shares, each cell about the centre of its receptive field; return None if they are even.

    Else the mappable.
    """
    height, width = explanation.image.shape[-2:]
    _bare(axis)
    drawn = None
    if explanation.is_even:
        axis.text(0.5, 0.5, NOTHING, ha="center", va="center", fontsize=fontsize, transform=axis.transAxes)
    else:
        scale = {"cmap": COLOURS, "vmin": LEAST, "vmax": MOST}
        (top, bottom), (left, right) = _edges(explanation)
        grid, extent = explanation.relative.numpy(), (left, right, bottom, top)
        drawn = axis.imshow(grid, extent=extent, interpolation="nearest", **scale)
        axis.set_facecolor("0.9")  # white is an even share
    axis.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    _hatch(axis, explanation)
    return drawn


def draw_overlay(axis: Any, explanation: Explanation) -> None:
    """Draw the image, overlaid with the shares' colours; opacity grows with the distance from an even share."""
    _bare(axis)
    height, width = explanation.image.shape[-2:]
    image = for_display(explanation.image)
    axis.imshow(image, extent=(0, width, height, 0), **image_style(image))
    if not explanation.is_even:
        heat = explanation.heat_at(height, width)
        strength = 0.8 * (heat - 1).abs().clamp(max=1)
        scale = {"cmap": COLOURS, "vmin": LEAST, "vmax": MOST, "alpha": strength.numpy()}
        axis.imshow(heat.numpy(), extent=(0, width, height, 0), **scale)
    _hatch(axis, explanation)


def colour_bar(figure: Any, drawn: Any, axes: list[Any]) -> None:
    """The scale of :func:`draw_couplings`, to the right of ``axes``."""
    bar = figure.colorbar(drawn, ax=axes, extend="max", shrink=0.8, aspect=25, ticks=[0, 0.5, 1, 1.5, 2])
    bar.ax.set_yticklabels(["0", "0.5", "1 (even)", "1.5", "2"], fontsize=8)
    bar.set_label("× even share", fontsize=8)


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
    cells = _cells(explanation.heat)
    return [centres.edges(count) for centres, count in zip(explanation.centres, cells, strict=True)]


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
        text += f"; share of {asked}, probability {float(shares[explanation.target]):.3f}"
    if not explanation.is_even:
        text += f"; largest share {float(explanation.relative.nan_to_num(0).max()):.1f} × even"
    return text
