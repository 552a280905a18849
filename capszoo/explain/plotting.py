"""Write figures to files, completely or not at all; matplotlib is loaded with the first figure."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

from .._utils.choices import PICTURE_SUFFIXES
from .._utils.files import replacing, write_csv
from ..errors import UsageError, require, unknown_name


@dataclass(frozen=True)
class Style:
    """Resolution and scale of saved pictures.

    Attributes:
        dpi: dots per inch (PNG; vector formats have none).
        scale: factor of the sizes of text, lines and markers; a figure keeps its size in inches.
    """

    dpi: int = 150
    scale: float = 1.0


#: Styles by name: for a page on a screen, a printed column, and slides.
STYLES = {"screen": Style(), "paper": Style(300, 0.8), "talk": Style(150, 1.4)}

_style = ContextVar("style", default=STYLES["screen"])


@contextmanager
def style(dpi: int | None = None, name: str = "screen") -> Iterator[None]:
    """Set the style of pictures saved within this context.

    Args:
        dpi: dots per inch; None uses the style's.
        name: a key of :data:`STYLES`.

    Raises:
        UsageError: an unknown style.
    """
    if name not in STYLES:
        raise UsageError(unknown_name("style", name, STYLES))
    chosen = STYLES[name]
    token = _style.set(Style(dpi or chosen.dpi, chosen.scale))
    try:
        yield
    finally:
        _style.reset(token)


def _scale(figure: Any, factor: float) -> None:
    """Change the sizes of text, lines and markers of a drawn figure."""
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_fontsize(text.get_fontsize() * factor)
    for line in figure.findobj(Line2D):
        line.set(linewidth=line.get_linewidth() * factor, markersize=line.get_markersize() * factor)


def require_matplotlib(what: str) -> None:
    """Raise ``CapszooError`` if figures cannot be drawn, before anything is computed."""
    require(what, ["matplotlib"], "explain")


def new_figure(width: float, height: float) -> Any:
    """An empty figure, which requires no display.

    Raises:
        CapszooError: matplotlib is not installed.
    """
    require_matplotlib("a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | Path, about: str | None = None) -> Path:
    """Write a figure in the format given by the suffix of its path.

    Args:
        figure: from :func:`new_figure`.
        path: with the suffix of an image format.
        about: a note stored in the file (PNG and SVG: ``Description``).

    Raises:
        CapszooError: the file cannot be written.
        UsageError: a suffix that is no image format.
    """
    import matplotlib
    from matplotlib.text import Text

    chosen = _style.get()
    if chosen.scale != 1:
        _scale(figure, chosen.scale)
    path = Path(path)
    metadata = {"Description": about} if about else None
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise UsageError(f"{path}: cannot write this kind of file", f"use {' or '.join(PICTURE_SUFFIXES)}")
    scales = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() == "log"]
    powers = {text for axis in scales for text in axis.findobj(Text)}  # their 10^2 is a formula
    words = set(figure.findobj(Text)) - powers
    for text in words:
        text.set_parse_math(False)  # the name of a class such as $1_$5 is none
    _add_fonts(words)
    # TrueType: journals refuse Type 3 fonts, matplotlib's default
    with (
        replacing(path) as temporary,
        matplotlib.rc_context({"pdf.fonttype": 42}),
        warnings.catch_warnings(),
    ):
        # a line per missing character; `_add_fonts` has one for all
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=chosen.dpi, metadata=metadata)
    return path


def _add_fonts(texts: Iterable[Any]) -> None:
    """Add installed fonts that have the characters which the default font lacks, such as names in Chinese."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

    default = get_font(findfont(FontProperties())).get_charmap()
    foreign = {text: missing for text in texts if (missing := _printed(text.get_text()) - default.keys())}
    missing = set().union(*foreign.values())
    families: list[str] = []
    for font in fontManager.ttflist if missing else ():
        if font.style != "normal" or font.name.startswith("Last Resort"):  # boxes with the names of scripts
            continue
        covered = missing & get_font(font.fname).get_charmap().keys()
        if covered:
            families.append(font.name)
            missing -= covered
    for text in foreign:
        text.set_fontfamily([*text.get_fontfamily(), *families])
    if missing:
        characters = "".join(map(chr, sorted(missing)[:10]))
        logging.getLogger(__name__).warning(
            "no installed font has the characters %s: they become boxes", characters
        )


def _printed(text: str) -> set[int]:
    return {ord(character) for character in text if not character.isspace()}


def save_with_numbers(
    figure: Any, path: str | Path, header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> Path:
    """:func:`save` a figure, and write its data to a ``.csv`` file of the same name.

    Args:
        figure, path: as for :func:`save`, which states the errors.
        header: names of the columns.
        rows: values of the rows; None is left empty.
    """
    written = save(figure, path)
    write_csv(written.with_suffix(".csv"), header, rows)
    return written


def save_columns(
    columns: Sequence[tuple[str, Sequence[Tensor]]],
    rows: Sequence[str],
    path: str | Path,
    about: str | None = None,
    *,
    gap: int | None = None,
    title: str = "",
    legend: Mapping[str, tuple[float, float, float]] | None = None,
) -> Path:
    """Draw pictures ``[c, h, w]`` in 0..1 in columns, each below its title, with names of the rows on the left.

    Args:
        columns: title and pictures of each column.
        rows: names of the rows.
        path: of the file.
        about: see :func:`save`.
        gap: leave a gap before this column.
        title: of the whole figure.
        legend: name to colour, below the pictures.

    Raises:
        UsageError: there are no pictures, or :func:`save` cannot write this kind of file.
        CapszooError: matplotlib is not installed, or the file cannot be written.
    """
    if not columns:
        raise UsageError("there is nothing to draw", "give more images")
    drawn: list[tuple[str, Sequence[Tensor]] | None] = list(columns)
    if gap is not None and 0 < gap < len(columns):
        drawn.insert(gap, None)
    widths = [0.25 if column is None else 1.0 for column in drawn]
    figure = new_figure(
        1.3 * sum(widths) + 1.3, 1.25 * len(rows) + 0.6 + 0.3 * bool(title) + 0.3 * bool(legend)
    )
    grid = figure.subplots(len(rows), len(drawn), squeeze=False, width_ratios=widths)
    for number, column in enumerate(drawn):
        for row in range(len(rows)):
            if column is None:
                grid[row][number].set_axis_off()
            else:
                show(grid[row][number], column[1][row])
        if column is not None:
            grid[0][number].set_title(column[0], fontsize=8)
    for row, name in enumerate(rows):
        grid[row][0].set_ylabel(name, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=9)
    if legend:
        from matplotlib.patches import Patch

        patches = [Patch(color=colour, label=name) for name, colour in legend.items()]
        figure.legend(
            handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False
        )
    return save(figure, path, about)


def show(axes: Any, image: Tensor) -> None:
    """Draw only the image ``[c, h, w]`` in 0..1, without axes."""
    picture = for_display(image)
    axes.imshow(picture, **image_style(picture))
    axes.set(xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set_visible(False)


def for_display(image: Tensor) -> Any:
    """``[c, h, w]`` as ``[h, w]`` or ``[h, w, 3]``."""
    return image[0].numpy() if image.shape[0] == 1 else image.permute(1, 2, 0).numpy()


def image_style(image: Any) -> dict[str, Any]:
    """Arguments of ``imshow`` for an image from :func:`for_display`."""
    return {"cmap": "gray", "vmin": 0, "vmax": 1} if image.ndim == 2 else {}
